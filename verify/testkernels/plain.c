/* plain.c: somebody else's kernel, for the tests: textbook attention in fp32, row by row, forward and backward, against
 * nothing but the public header. (The example to begin with is verify/examples/plain_kernel.c.)
 *
 * It exports `plain` (declares nothing of its arithmetic), `forward-only` and `no-lse` (which keeps that to itself). Takes
 * bf16 and fp32, any mask but block and prefix, no modifiers. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dualkv_kernel.h"

static float load(const dualkv_tensor *t, int dtype, int64_t row, int64_t head, int64_t c) {
    int64_t at = row * t->row + head * t->head + c;
    if (dtype == DUALKV_FP32) return ((const float *)t->data)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)t->data)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void store(const dualkv_tensor *t, int dtype, int64_t row, int64_t head, int64_t c, float x) {
    int64_t at = row * t->row + head * t->head + c;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == DUALKV_FP32) ((float *)t->data)[at] = x;
    else ((uint16_t *)t->data)[at] = (uint16_t)(x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static int sees(const dualkv_problem *p, int64_t i, int64_t j) {
    switch (p->mask) {
    case DUALKV_FULL: return 1;
    case DUALKV_WINDOW: return j <= i && (j > i - p->window || j < p->window_sinks);
    case DUALKV_CHUNK: return j <= i && j / p->chunk == i / p->chunk;
    default: return j <= i;
    }
}

/* Calls f for each key that row r of segment s sees. */
typedef void (*key_fn)(const dualkv_launch *l, int64_t row, int64_t key, int head, float *acc);
static void eachKey(const dualkv_launch *l, const dualkv_segment *s, int64_t r, int head, key_fn f,
                    float *acc) {
    const dualkv_problem *p = l->problem;
    for (int g = 0; g < s->range_count; g++) {
        const dualkv_range *range = &p->ranges[s->range_begin + g];
        for (int64_t k = 0; k < range->len; k++)
            if (sees(p, s->context + r, range->pos + k)) f(l, s->q_start + r, range->k_start + k, head, acc);
    }
}

static float score(const dualkv_launch *l, int64_t row, int64_t key, int h) {
    const dualkv_problem *p = l->problem;
    float sum = 0;
    int kvh = h / (p->hq / p->hkv);
    for (int c = 0; c < p->dqk; c++)
        sum += load(&l->q, p->dtype, row, h, c) * load(&l->k, p->dtype, key, kvh, c);
    return p->scale * sum;
}

static void findMax(const dualkv_launch *l, int64_t row, int64_t key, int h, float *acc) {
    acc[0] = fmaxf(acc[0], score(l, row, key, h));
}

/* acc: maximum, sum, then Dv of the output. */
static void addValue(const dualkv_launch *l, int64_t row, int64_t key, int h, float *acc) {
    const dualkv_problem *p = l->problem;
    float w = expf(score(l, row, key, h) - acc[0]);
    acc[1] += w;
    for (int c = 0; c < p->dv; c++) acc[2 + c] += w * load(&l->v, p->dtype, key, h / (p->hq / p->hkv), c);
}

static int forward(void *self, const dualkv_launch *l, char *err, size_t n) {
    const dualkv_problem *p = l->problem;
    (void)self, (void)err, (void)n;
    for (int i = 0; i < p->n_segments; i++)
        for (int64_t r = 0; r < p->segments[i].q_len; r++)
            for (int h = 0; h < p->hq; h++) {
                float acc[2 + 256] = {-INFINITY};
                int64_t row = p->segments[i].q_start + r;
                eachKey(l, &p->segments[i], r, h, findMax, acc);
                eachKey(l, &p->segments[i], r, h, addValue, acc);
                for (int c = 0; c < p->dv; c++)
                    store(&l->o, p->dtype, row, h, c, acc[1] == 0 ? 0 : acc[2 + c] / acc[1]);
                store(&l->lse, DUALKV_FP32, row, h, 0, acc[1] == 0 ? -INFINITY : acc[0] + logf(acc[1]));
            }
    return 0;
}

/* acc: LSE, delta, then Dqk of dQ; dK and dV are summed in the workspace, fp32 [tk, hkv, dqk] and [tk, hkv,
 * dv]. */
static void addGradient(const dualkv_launch *l, int64_t row, int64_t key, int h, float *acc) {
    const dualkv_problem *p = l->problem;
    int kvh = h / (p->hq / p->hkv);
    float *dk = (float *)l->workspace + (key * p->hkv + kvh) * p->dqk;
    float *dv = (float *)l->workspace + p->tk * p->hkv * p->dqk + (key * p->hkv + kvh) * p->dv;
    float w = expf(score(l, row, key, h) - acc[0]), dp = 0;
    for (int c = 0; c < p->dv; c++) {
        float g = load(&l->d_o, p->dtype, row, h, c);
        dp += g * load(&l->v, p->dtype, key, kvh, c);
        dv[c] += w * g;
    }
    float ds = p->scale * w * (dp - acc[1]);
    for (int c = 0; c < p->dqk; c++) {
        acc[2 + c] += ds * load(&l->k, p->dtype, key, kvh, c);
        dk[c] += ds * load(&l->q, p->dtype, row, h, c);
    }
}

static size_t workspace(void *self, const dualkv_problem *p, int backward) {
    (void)self;
    return backward ? sizeof(float) * (size_t)(p->tk * p->hkv * (p->dqk + p->dv)) : 0;
}

static int backward(void *self, const dualkv_launch *l, char *err, size_t n) {
    const dualkv_problem *p = l->problem;
    (void)err, (void)n;
    memset(l->workspace, 0, workspace(self, p, 1));
    for (int i = 0; i < p->n_segments; i++)
        for (int64_t r = 0; r < p->segments[i].q_len; r++)
            for (int h = 0; h < p->hq; h++) {
                float acc[2 + 256] = {0};
                int64_t row = p->segments[i].q_start + r;
                acc[0] = load(&l->lse, DUALKV_FP32, row, h, 0);
                for (int c = 0; c < p->dv; c++)
                    acc[1] += load(&l->d_o, p->dtype, row, h, c) * load(&l->o, p->dtype, row, h, c);
                if (l->d_lse.data) acc[1] -= load(&l->d_lse, DUALKV_FP32, row, h, 0);
                eachKey(l, &p->segments[i], r, h, addGradient, acc);
                for (int c = 0; c < p->dqk; c++) store(&l->dq, p->dtype, row, h, c, acc[2 + c]);
            }
    const float *dk = l->workspace, *dv = dk + p->tk * p->hkv * p->dqk;
    for (int64_t j = 0; j < p->tk; j++)
        for (int h = 0; h < p->hkv; h++) {
            for (int c = 0; c < p->dqk; c++) store(&l->dk, p->dtype, j, h, c, *dk++);
            for (int c = 0; c < p->dv; c++) store(&l->dv, p->dtype, j, h, c, *dv++);
        }
    return 0;
}

static const char *refuses(void *self, const dualkv_problem *p) {
    (void)self;
    if (p->dtype == DUALKV_FP16) return "no fp16";
    if (p->softcap > 0 || p->alibi || p->sink) return "no score modifiers";
    if (p->mask != DUALKV_CAUSAL && p->mask != DUALKV_FULL && p->mask != DUALKV_WINDOW && p->mask != DUALKV_CHUNK)
        return "no such mask";
    return NULL;
}

static void *openPlain(const char *options, char *err, size_t n) {
    static int instance;
    if (!options[0]) return &instance;
    strncpy(err, "takes no option", n);
    return NULL;
}

static void closePlain(void *self) { (void)self; }

/* What all three have. */
#define KERNEL(word, aligned)                                                                              \
    .size = sizeof(dualkv_kernel), .abi = DUALKV_ABI, .name = word, .alignment = aligned, .open = openPlain, \
    .close = closePlain, .refuses = refuses, .forward = forward

static const dualkv_kernel plain = {
    KERNEL("plain", 4), .doc = "textbook attention in fp32", .workspace = workspace, .backward = backward};
static const dualkv_kernel forward_only = {KERNEL("forward-only", 1)};
static const dualkv_kernel no_lse = {KERNEL("no-lse", 4), .absent = 1 << 1, .workspace = workspace, .backward = backward};

const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count);
const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count) {
    static const dualkv_kernel *const list[] = {&plain, &forward_only, &no_lse};
    *count = 3;
    return abi == DUALKV_ABI ? list : NULL;
}
