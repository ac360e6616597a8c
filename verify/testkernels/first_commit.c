/* first_commit.c: a small kernel as it stands in a repository's first commit (verify/test_gate_repo.c makes the others from it
 * by small edits): bf16, causal attention in host memory, forward and backward, in fp32, P and dS in bf16; each key range in one tile. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dualkv_kernel.h"

static uint64_t launched;

static float load(const dualkv_tensor *t, int64_t row, int64_t head, int64_t c) {
    uint32_t bits = (uint32_t)((const uint16_t *)t->data)[row * t->row + head * t->head + c] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float rounded(float x) {
    uint32_t bits = (uint32_t)narrow(x) << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void store(const dualkv_tensor *t, int64_t row, int64_t head, int64_t c, float x) {
    ((uint16_t *)t->data)[row * t->row + head * t->head + c] = narrow(x);
}

static int sees(const dualkv_problem *p, int64_t i, int64_t j) {
    switch (p->mask) {
    default: return j <= i;
    }
}

static float score(const dualkv_launch *l, int64_t row, int64_t key, int h) {
    const dualkv_problem *p = l->problem;
    float sum = 0;
    for (int c = 0; c < p->dqk; c++) sum += load(&l->q, row, h, c) * load(&l->k, key, h / (p->hq / p->hkv), c);
    return p->scale * sum;
}

/* The keys of range g that row r of a segment sees, in order. */
static int64_t listKeys(const dualkv_problem *p, const dualkv_segment *s, int64_t r, int g, int64_t *keys) {
    const dualkv_range *range = &p->ranges[s->range_begin + g];
    int64_t n = 0, len = range->len;
    for (int64_t k = 0; k < len; k++)
        if (sees(p, s->context + r, range->pos + k)) keys[n++] = range->k_start + k;
    return n;
}

static void attend(const dualkv_launch *l, const dualkv_segment *s, int64_t r, int h, int64_t *keys, float *x) {
    const dualkv_problem *p = l->problem;
    float max = -INFINITY, sum = 0, acc[256] = {0};
    int64_t row = s->q_start + r;
    for (int g = 0; g < s->range_count; g++) { /* the prompt, then its own tokens */
        int64_t n = listKeys(p, s, r, g, keys);
        float up = max;
        for (int64_t k = 0; k < n; k++) up = fmaxf(up, x[k] = score(l, row, keys[k], h));
        float rescale = max == -INFINITY ? 0 : expf(max - up);
        sum *= rescale;
        for (int c = 0; c < p->dv; c++) acc[c] *= rescale;
        max = up;
        for (int64_t k = 0; k < n; k++) {
            float w = expf(x[k] - max), low = rounded(w);
            sum += w;
            for (int c = 0; c < p->dv; c++) acc[c] += low * load(&l->v, keys[k], h / (p->hq / p->hkv), c);
        }
    }
    for (int c = 0; c < p->dv; c++) store(&l->o, row, h, c, sum == 0 ? 0 : acc[c] / sum);
    ((float *)l->lse.data)[row * l->lse.row + h * l->lse.head] = sum == 0 ? -INFINITY : max + logf(sum);
}

/* What keys of one range give and get. dk, dv: fp32 sums in the workspace, [tk, hkv, dqk] and [tk, hkv, dv]. */
static void addRange(const dualkv_launch *l, int64_t row, int h, const int64_t *keys, int64_t n, float delta, float *acc) {
    const dualkv_problem *p = l->problem;
    int kvh = h / (p->hq / p->hkv);
    float lse = ((float *)l->lse.data)[row * l->lse.row + h * l->lse.head];
    for (int64_t k = 0; k < n; k++) {
        float *dk = (float *)l->workspace + (keys[k] * p->hkv + kvh) * p->dqk;
        float *dv = (float *)l->workspace + p->tk * p->hkv * p->dqk + (keys[k] * p->hkv + kvh) * p->dv;
        float w = expf(score(l, row, keys[k], h) - lse), low = rounded(w), dp = 0;
        for (int c = 0; c < p->dv; c++) {
            dp += load(&l->d_o, row, h, c) * load(&l->v, keys[k], kvh, c);
            dv[c] += low * load(&l->d_o, row, h, c);
        }
        float ds = rounded(w * (dp - delta));
        for (int c = 0; c < p->dqk; c++) {
            acc[c] += ds * load(&l->k, keys[k], kvh, c);
            dk[c] += p->scale * ds * load(&l->q, row, h, c);
        }
    }
}

static void unattend(const dualkv_launch *l, const dualkv_segment *s, int64_t r, int h, int64_t *keys) {
    const dualkv_problem *p = l->problem;
    float delta = 0, acc[256] = {0};
    int64_t row = s->q_start + r;
    for (int c = 0; c < p->dv; c++) delta += load(&l->d_o, row, h, c) * load(&l->o, row, h, c);
    for (int g = 0; g < s->range_count; g++) addRange(l, row, h, keys, listKeys(p, s, r, g, keys), delta, acc);
    for (int c = 0; c < p->dqk; c++) store(&l->dq, row, h, c, p->scale * acc[c]);
}

static size_t workspace(void *self, const dualkv_problem *p, int backward) {
    (void)self;
    return backward ? sizeof(float) * (size_t)(p->tk * p->hkv * (p->dqk + p->dv)) : 0;
}

static int run(const dualkv_launch *l, int back) {
    const dualkv_problem *p = l->problem;
    int64_t *keys = malloc(sizeof *keys * (size_t)(p->max_k_len + 1));
    float *x = malloc(sizeof *x * (size_t)(p->max_k_len + 1));
    for (int i = 0; keys && x && i < p->n_segments; i++)
        for (int64_t r = 0; r < p->segments[i].q_len; r++)
            for (int h = 0; h < p->hq; h++) {
                if (back) unattend(l, &p->segments[i], r, h, keys);
                else attend(l, &p->segments[i], r, h, keys, x);
            }
    int rc = !keys || !x;
    free(keys);
    free(x);
    launched++;
    return rc;
}

static int forward(void *self, const dualkv_launch *l, char *err, size_t n) {
    (void)self, (void)err, (void)n;
    return run(l, 0);
}

static int backward(void *self, const dualkv_launch *l, char *err, size_t n) {
    const dualkv_problem *p = l->problem;
    (void)err, (void)n;
    memset(l->workspace, 0, workspace(self, p, 1));
    if (run(l, 1)) return 1;
    const float *dk = l->workspace, *dv = dk + p->tk * p->hkv * p->dqk;
    for (int64_t j = 0; j < p->tk; j++)
        for (int h = 0; h < p->hkv; h++) {
            for (int c = 0; c < p->dqk; c++) store(&l->dk, j, h, c, *dk++);
            for (int c = 0; c < p->dv; c++) store(&l->dv, j, h, c, *dv++);
        }
    return 0;
}

static const char *refuses(void *self, const dualkv_problem *p) {
    (void)self;
    if (p->dtype != DUALKV_BF16) return "bf16 only";
    if (p->softcap > 0 || p->alibi || p->sink || p->dlse) return "no modifiers";
    return p->mask != DUALKV_CAUSAL ? "mask" : NULL;
}

static void arithmetic(void *self, const dualkv_problem *p, dualkv_arithmetic *a) {
    (void)self;
    a->declared = 1;
    a->unit = a->acc_unit = ldexp(1, -24);
    a->acc_step = 1;
    a->in_format = a->s_format = a->partial_format = DUALKV_EXACT;
    a->p_format = a->ds_format = a->out_format = p->dtype;
    a->key_tile = 1 << 20;
    a->exp_error = a->log_error = a->tanh_error = ldexp(1, -22);
}

static int deterministic(void *self, const dualkv_problem *p) { return (void)self, (void)p, 1; }
static uint64_t launches(void *self) { return (void)self, launched; }
static void *openIt(const char *options, char *err, size_t n) { return (void)options, (void)err, (void)n, &launched; }
static void closeIt(void *self) { (void)self; }

static const dualkv_kernel kernel = {
    .size = sizeof(dualkv_kernel), .abi = DUALKV_ABI, .name = "mine", .doc = "a row at a time", .memory = DUALKV_HOST,
    .alignment = 2, .open = openIt, .close = closeIt, .refuses = refuses, .arithmetic = arithmetic,
    .deterministic = deterministic, .workspace = workspace, .forward = forward, .backward = backward, .launches = launches};

const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count);
const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count) {
    static const dualkv_kernel *const list[] = {&kernel};
    *count = 1;
    return abi == DUALKV_ABI ? list : NULL;
}
