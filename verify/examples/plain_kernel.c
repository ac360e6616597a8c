/* plain_kernel.c: the smallest kernel that can be judged: causal attention in host memory, forward only, row by row with a
 * running maximum. `forgetful` is wrong: it does not rescale what it has summed when the maximum grows.
 *
 *     gcc -shared -fPIC -O2 -Iref -o plain.so verify/examples/plain_kernel.c -lm
 *     dualkv check smoke --forward --kernel ./plain.so:plain        # every case PASSED or UNSUPPORTED
 *     dualkv check smoke --forward --kernel ./plain.so:forgetful    # FAILED, each with its place and a line that replays it
 *
 * For gradients fill in `backward`, which gets O, LSE and dO as well; ref/dualkv_kernel.h says all. */
#include <math.h>
#include <string.h>

#include "dualkv_kernel.h"

static float load(const dualkv_tensor *t, int64_t row, int64_t head, int64_t c) { /* bf16: the upper half of a float */
    uint32_t bits = (uint32_t)((const uint16_t *)t->data)[row * t->row + head * t->head + c] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t narrow(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static void attend(const dualkv_launch *l, const dualkv_segment *s, int64_t r, int h, int forgets) {
    const dualkv_problem *p = l->problem;
    float max = -INFINITY, sum = 0, acc[256] = {0};
    int64_t row = s->q_start + r, kvh = h / (p->hq / p->hkv);
    for (int g = 0; g < s->range_count; g++) { /* the prompt's keys, then its own */
        const dualkv_range *range = &p->ranges[s->range_begin + g];
        for (int64_t k = 0; k < range->len && range->pos + k <= s->context + r; k++) { /* causal */
            float x = 0;
            for (int c = 0; c < p->dqk; c++) x += load(&l->q, row, h, c) * load(&l->k, range->k_start + k, kvh, c);
            float up = fmaxf(max, x *= p->scale), rescale = forgets ? 1 : expf(max - up), w = expf(x - up);
            sum = sum * rescale + w;
            for (int c = 0; c < p->dv; c++) acc[c] = acc[c] * rescale + w * load(&l->v, range->k_start + k, kvh, c);
            max = up;
        }
    }
    for (int c = 0; c < p->dv; c++)
        ((uint16_t *)l->o.data)[row * l->o.row + h * l->o.head + c] = narrow(sum == 0 ? 0 : acc[c] / sum);
    ((float *)l->lse.data)[row * l->lse.row + h * l->lse.head] = sum == 0 ? -INFINITY : max + logf(sum);
}

static int forward(void *forgets, const dualkv_launch *l, char *err, size_t n) {
    (void)err, (void)n;
    for (int i = 0; i < l->problem->n_segments; i++)
        for (int64_t r = 0; r < l->problem->segments[i].q_len; r++)
            for (int h = 0; h < l->problem->hq; h++) attend(l, &l->problem->segments[i], r, h, *(int *)forgets);
    return 0;
}

static const char *refuses(void *self, const dualkv_problem *p) {
    (void)self;
    if (p->dtype != DUALKV_BF16) return "bf16 only";
    return p->mask != DUALKV_CAUSAL ? "causal only" : p->softcap > 0 || p->alibi || p->sink ? "no score modifiers" : NULL;
}

static int right = 0, wrong = 1; /* what `self` is */
static void *openRight(const char *options, char *err, size_t n) { return (void)options, (void)err, (void)n, &right; }
static void *openWrong(const char *options, char *err, size_t n) { return (void)options, (void)err, (void)n, &wrong; }
static void closeIt(void *self) { (void)self; }

#define KERNEL(NAME, DOC, OPEN) \
    {.size = sizeof(dualkv_kernel), .abi = DUALKV_ABI, .name = NAME, .doc = DOC, .memory = DUALKV_HOST, .alignment = 2, \
     .open = OPEN, .close = closeIt, .refuses = refuses, .forward = forward}
static const dualkv_kernel plain = KERNEL("plain", "a row at a time, running maximum", openRight);
static const dualkv_kernel forgetful = KERNEL("forgetful", "the same without the rescale", openWrong);

const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count);
const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count) {
    static const dualkv_kernel *const list[] = {&plain, &forgetful};
    *count = 2;
    return abi == DUALKV_ABI ? list : NULL;
}
