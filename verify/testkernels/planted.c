/* planted.c: a kernel of its own arithmetic, row by row over key tiles, against nothing but the public
 * header, with fifteen faults (fault=P1 to P15; none: a correct kernel) that are not in the catalogue of the
 * emulated kernel, or are two of its faults at once (P13 to P15): for `dualkv diagnose` to explain without
 * having seen them.
 *
 *   P1   backward: the scores of query head 2 are scaled by 1.015
 *   P2   dV of KV head 1: the rows of the second response are added twice
 *   P3   rows of a last, partial query tile: LSE is formed with the maximum of the row before
 *   P4   dK of the first 8 keys of a segment: dims 0 to 7 are stored transposed
 *   P5   backward: softcap's derivative is left out where |tanh| is above one half
 *   P6   forward: the second key tile of the prompt misses every seventh key
 *   P7   the first row of a response has the delta of the row before
 *   P8   O of responses: P of the prompt's keys counts 0.99 times; LSE is right
 *   P9   forward: the second response reads the first key and value of the first response in place of its own
 *   P10  dQ of the last query tile of a segment is stored one row late (the last row in the first place)
 *   P11  dK of group 1 is summed in bf16
 *   P12  column 17 of the dQ accumulator is not zeroed between the rows of a query tile
 *   P13  the last key of a prefix is lost, and delta is read one head too early
 *   P14  forward: the sink logit is scaled, and dK, dV of a prompt miss its last response
 *   P15  softcap's derivative is left out, and own dK, dV of responses keep only the first query head of the
 * group
 *
 * gain=NAME:X multiplies O, LSE, dQ, dK, dV or the softmax scale by X, before it is rounded; head=H: in that query (KV) head
 * alone; undeclared: its arithmetic is not told; interrupt=N: its N-th forward sends SIGINT to the process that started it,
 * and waits; lose=N: forward and backward miss the key of position N.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dualkv_kernel.h"

enum { BM = 32, BN = 64, MAX_HEADS = 64 };

typedef struct key {
    int64_t row, at;      /* packed row; offset in its range */
    int range, last, far; /* range of the segment; that of the segment's own keys?; |p - j| */
} key;

enum { GAIN_O, GAIN_LSE, GAIN_DQ, GAIN_DK, GAIN_DV, GAIN_SCALE, N_GAINS };

typedef struct instance {
    int fault, undeclared, head; /* head -1: all */
    int interrupt;               /* forwards left until the signal; 0: none */
    int lose;                    /* position of the key that is missed; -1: none */
    float gain[N_GAINS];
} instance;

typedef struct run {
    const dualkv_launch *l;
    const dualkv_problem *p;
    const instance *self;
    int fault;
    float *q, *k, *v, *go; /* inputs as fp32, packed */
    float *dq, *dk, *dv;   /* sums, packed */
    key *keys;
    float *x, *cap;          /* scores and tanh of one row */
    int n;                   /* its keys */
    float before[MAX_HEADS]; /* fault P3: maxima of the row before */
} run;

static float widen(uint16_t half) { /* bf16: the upper half of a float */
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t narrow(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float rounded(const run *r, float x) { return r->p->dtype == DUALKV_BF16 ? widen(narrow(x)) : x; }

static float *load(const run *r, const dualkv_tensor *t, int64_t rows, int heads, int d) {
    float *out = malloc(((size_t)(rows * heads * d) + 1) * sizeof *out), *to = out;
    for (int64_t i = 0; out && i < rows; i++)
        for (int h = 0; h < heads; h++)
            for (int64_t c = 0, at = i * t->row + h * t->head; c < d; c++, at++)
                *to++ = r->p->dtype == DUALKV_BF16 ? widen(((const uint16_t *)t->data)[at])
                                                   : ((const float *)t->data)[at];
    return out;
}

static void store(const run *r, const dualkv_tensor *t, int64_t row, int h, int d, const float *in,
                  float scale) {
    for (int64_t c = 0, at = row * t->row + h * t->head; c < d; c++, at++) {
        if (r->p->dtype == DUALKV_BF16) ((uint16_t *)t->data)[at] = narrow(in[c] * scale);
        else ((float *)t->data)[at] = in[c] * scale;
    }
}

static float gain(const run *r, int of, int h) {
    return r->self->head < 0 || r->self->head == h ? r->self->gain[of] : 1;
}

static float *scalar(const dualkv_tensor *t, int64_t row, int h) {
    return (float *)t->data + row * t->row + h * t->head;
}

static int sees(const dualkv_problem *p, const dualkv_segment *s, int64_t i, int64_t j) {
    switch (p->mask) {
    case DUALKV_FULL: return 1;
    case DUALKV_PREFIX: return s->parent < 0 || j <= i;
    case DUALKV_WINDOW: return j <= i && (j > i - p->window || j < p->window_sinks);
    case DUALKV_CHUNK: return j <= i && j / p->chunk == i / p->chunk;
    case DUALKV_BLOCK:
        return j <= i && dualkv_block_kept(p->block_seed, i / p->block, j / p->block, p->block_density);
    default: return j <= i;
    }
}

/* 0, 1, ... among the segments of the same parent; -1 for a root. */
static int sibling(const dualkv_problem *p, const dualkv_segment *s, int *of) {
    int n = 0, at = -1;
    for (int i = 0; i < p->n_segments; i++) {
        if (s->parent < 0 || p->segments[i].parent != s->parent) continue;
        if (&p->segments[i] == s) at = n;
        n++;
    }
    *of = n;
    return at;
}

/* The keys that row i of a segment sees. */
static void listKeys(run *r, const dualkv_segment *s, int64_t i, int backward) {
    const int64_t position = s->context + i;
    int of;
    const int second = r->fault == 9 && !backward && sibling(r->p, s, &of) == 1;
    r->n = 0;
    for (int g = 0; g < s->range_count; g++) {
        const dualkv_range *range = &r->p->ranges[s->range_begin + g];
        const int own = s->k_len > 0 && range->k_start == s->k_start;
        for (int64_t k = 0; k < range->len; k++) {
            if (!sees(r->p, s, position, range->pos + k)) continue;
            if (range->pos + k == r->self->lose) continue;
            if (r->fault == 6 && !backward && g == 0 && k >= BN && k < 2 * BN && (k - BN) % 7 == 0) continue;
            if (r->fault == 13 && !own && k == range->len - 1) continue;
            int64_t row = range->k_start + k;
            if (second && own && k == 0)
                for (int b = r->p->n_segments - 1; b >= 0; b--)
                    if (r->p->segments[b].parent == s->parent) row = r->p->segments[b].k_start;
            r->keys[r->n++] = (key){row, k, g, own, (int)llabs(position - range->pos - k)};
        }
    }
}

/* Scores of the listed keys, with scale, softcap and ALiBi. */
static void score(run *r, int64_t row, int h, int backward) {
    const dualkv_problem *p = r->p;
    const float *q = r->q + (row * p->hq + h) * p->dqk;
    const float scale = p->scale * gain(r, GAIN_SCALE, h) * (r->fault == 1 && backward && h == 2 ? 1.015f : 1);
    for (int i = 0; i < r->n; i++) {
        const float *k = r->k + (r->keys[i].row * p->hkv + h / (p->hq / p->hkv)) * p->dqk;
        float x = 0;
        for (int c = 0; c < p->dqk; c++) x += q[c] * k[c];
        x *= scale;
        if (p->softcap > 0) {
            r->cap[i] = tanhf(x / p->softcap);
            x = r->cap[i] * p->softcap;
        }
        if (p->alibi) x -= p->alibi_slopes[h] * (float)r->keys[i].far;
        r->x[i] = x;
    }
}

static void forwardRow(run *r, const dualkv_segment *s, int64_t i, int h) {
    const dualkv_problem *p = r->p;
    const int64_t row = s->q_start + i;
    float max = -INFINITY, sum = 0, o[256] = {0};
    score(r, row, h, 0);
    for (int a = 0, b; a < r->n; a = b) { /* one key tile */
        float up = max;
        for (b = a;
             b < r->n && r->keys[b].range == r->keys[a].range && r->keys[b].at / BN == r->keys[a].at / BN;
             b++)
            up = fmaxf(up, r->x[b]);
        const float corr = expf(max - up);
        float part = 0;
        for (int c = 0; c < p->dv; c++) o[c] *= corr;
        for (int j = a; j < b; j++) {
            const float *v = r->v + (r->keys[j].row * p->hkv + h / (p->hq / p->hkv)) * p->dv,
                        w = expf(r->x[j] - up);
            const float used =
                rounded(r, r->fault == 8 && s->parent >= 0 && r->keys[j].range == 0 ? w * 0.99f : w);
            part += w;
            for (int c = 0; c < p->dv; c++) o[c] += used * v[c];
        }
        sum = sum * corr + part;
        max = up;
    }
    if (p->sink) {
        const float sink = r->fault == 14 ? r->l->sink[h] * p->scale : r->l->sink[h], up = fmaxf(max, sink);
        for (int c = 0; c < p->dv; c++) o[c] *= expf(max - up);
        sum = sum * expf(max - up) + expf(sink - up);
        max = up;
    }
    const int tail = r->fault == 3 && i > 0 && i >= s->q_len / BM * BM;
    store(r, &r->l->o, row, h, p->dv, o, sum == 0 ? 0 : gain(r, GAIN_O, h) / sum);
    *scalar(&r->l->lse, row, h) = sum == 0 ? -INFINITY : gain(r, GAIN_LSE, h) * ((tail ? r->before[h] : max) + logf(sum));
    r->before[h] = max;
}

/* delta - dLSE of a row. */
static float rowDelta(const run *r, const dualkv_segment *s, int64_t i, int h) {
    const dualkv_problem *p = r->p;
    const int64_t row = s->q_start + i - (r->fault == 7 && s->parent >= 0 && i == 0);
    float sum = 0;
    if (r->fault == 13 && h) h--;
    for (int c = 0; c < p->dv; c++) {
        const int64_t at = row * r->l->o.row + h * r->l->o.head + c;
        const float o = p->dtype == DUALKV_BF16 ? widen(((const uint16_t *)r->l->o.data)[at])
                                                : ((const float *)r->l->o.data)[at];
        sum += r->go[(row * p->hq + h) * p->dv + c] * o;
    }
    return r->l->d_lse.data ? sum - *scalar(&r->l->d_lse, row, h) : sum;
}

/* Does the pair count in dK and dV of the key? How often in dV? */
static int counts(const run *r, const dualkv_segment *s, const key *k, int h, int *in_dv) {
    const dualkv_problem *p = r->p;
    const int group = p->hq / p->hkv;
    int of, at = sibling(p, s, &of);
    *in_dv = r->fault == 2 && h / group == 1 && at == 1 ? 2 : 1;
    if (r->fault == 14 && !k->last && at == of - 1 && at >= 0) return 0;
    return !(r->fault == 15 && k->last && at >= 0 && h % group);
}

static void backwardRow(run *r, const dualkv_segment *s, int64_t i, int h) {
    const dualkv_problem *p = r->p;
    const int64_t row = s->q_start + i;
    const int kvh = h / (p->hq / p->hkv);
    const float lse = *scalar(&r->l->lse, row, h), delta = rowDelta(r, s, i, h);
    const float *q = r->q + (row * p->hq + h) * p->dqk, *go = r->go + (row * p->hq + h) * p->dv;
    float *dq = r->dq + (row * p->hq + h) * p->dqk;
    if (p->sink) r->l->dsink[h] -= lse == -INFINITY ? 0 : expf(r->l->sink[h] - lse) * delta;
    score(r, row, h, 1);
    if (r->fault == 12 && i % BM) dq[17 % p->dqk] = dq[17 % p->dqk - p->hq * p->dqk];
    for (int j = 0; j < r->n && lse != -INFINITY; j++) {
        const int64_t at = r->keys[j].row * p->hkv + kvh;
        const float *k = r->k + at * p->dqk, *v = r->v + at * p->dv, w = expf(r->x[j] - lse);
        float *dk = r->dk + at * p->dqk, *dv = r->dv + at * p->dv, dp = 0;
        for (int c = 0; c < p->dv; c++) dp += go[c] * v[c];
        float ds = w * (dp - delta);
        const int slope = r->fault == 15 ? 0 : r->fault == 5 ? fabsf(r->cap[j]) <= 0.5f : 1;
        if (p->softcap > 0 && slope) ds *= 1 - r->cap[j] * r->cap[j];
        ds = rounded(r, ds);
        for (int c = 0; c < p->dqk; c++) dq[c] += ds * k[c];
        int in_dv;
        if (!counts(r, s, &r->keys[j], h, &in_dv)) continue;
        for (int c = 0; c < p->dqk; c++) {
            dk[c] += ds * q[c];
            if (r->fault == 11 && s->group == 1) dk[c] = widen(narrow(dk[c]));
        }
        for (int c = 0; c < p->dv; c++) dv[c] += (float)in_dv * rounded(r, w) * go[c];
    }
}

static void storeGradients(run *r) {
    const dualkv_problem *p = r->p;
    for (int i = 0; i < p->n_segments; i++) {
        const dualkv_segment *s = &p->segments[i];
        const int64_t last = s->q_len ? (s->q_len - 1) / BM * BM : 0;
        for (int64_t j = 0; j < s->q_len; j++)
            for (int h = 0; h < p->hq; h++) {
                int64_t to = r->fault == 10 && j >= last ? (j + 1 < s->q_len ? j + 1 : last) : j;
                store(r, &r->l->dq, s->q_start + to, h, p->dqk,
                      r->dq + ((s->q_start + j) * p->hq + h) * p->dqk, p->scale * gain(r, GAIN_DQ, h));
            }
        for (int64_t j = 0; j < s->k_len; j++)
            for (int h = 0; h < p->hkv; h++) {
                float line[256];
                const float *dk = r->dk + (s->k_start * p->hkv + h) * p->dqk; /* the segment's first key */
                const int step = p->hkv * p->dqk;
                memcpy(line, dk + j * step, (size_t)p->dqk * sizeof *line);
                for (int c = 0; c < 8 && c < p->dqk && r->fault == 4 && j < 8 && s->k_len >= 8; c++)
                    line[c] = dk[c * step + j];
                store(r, &r->l->dk, s->k_start + j, h, p->dqk, line, p->scale * gain(r, GAIN_DK, h));
                store(r, &r->l->dv, s->k_start + j, h, p->dv, r->dv + ((s->k_start + j) * p->hkv + h) * p->dv,
                      gain(r, GAIN_DV, h));
            }
    }
}

static void walkRows(run *r, int backward) {
    for (int i = 0; i < r->p->n_segments; i++)
        for (int64_t j = 0; j < r->p->segments[i].q_len; j++) {
            listKeys(r, &r->p->segments[i], j, backward);
            for (int h = 0; h < r->p->hq; h++)
                (backward ? backwardRow : forwardRow)(r, &r->p->segments[i], j, h);
        }
    if (backward) storeGradients(r);
}

static int launch(void *self, const dualkv_launch *l, int backward, char *err, size_t n) {
    const dualkv_problem *p = l->problem;
    const size_t most = (size_t)p->max_k_len + 1;
    run r = {.l = l, .p = p, .self = self, .fault = ((const instance *)self)->fault};
    r.q = load(&r, &l->q, p->tq, p->hq, p->dqk);
    r.k = load(&r, &l->k, p->tk, p->hkv, p->dqk);
    r.v = load(&r, &l->v, p->tk, p->hkv, p->dv);
    r.keys = malloc(most * sizeof *r.keys);
    r.x = malloc(most * sizeof *r.x);
    r.cap = malloc(most * sizeof *r.cap);
    int ok = r.q && r.k && r.v && r.keys && r.x && r.cap;
    if (backward) {
        r.go = load(&r, &l->d_o, p->tq, p->hq, p->dv);
        r.dq = calloc((size_t)(p->tq * p->hq * p->dqk) + 1, sizeof *r.dq);
        r.dk = calloc((size_t)(p->tk * p->hkv * p->dqk) + 1, sizeof *r.dk);
        r.dv = calloc((size_t)(p->tk * p->hkv * p->dv) + 1, sizeof *r.dv);
        ok = ok && r.go && r.dq && r.dk && r.dv;
        if (p->sink) memset(l->dsink, 0, (size_t)p->hq * sizeof *l->dsink);
    }
    if (ok) walkRows(&r, backward);
    else snprintf(err, n, "planted: out of memory");
    float *const all[] = {r.q, r.k, r.v, r.go, r.dq, r.dk, r.dv, r.x, r.cap};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(r.keys);
    return ok ? 0 : -1;
}

static int forward(void *self, const dualkv_launch *l, char *err, size_t n) {
    instance *own = self;
    if (own->interrupt && !--own->interrupt) {
        kill(getppid(), SIGINT);
        pause();
    }
    return launch(self, l, 0, err, n);
}
static int backward(void *self, const dualkv_launch *l, char *err, size_t n) {
    return launch(self, l, 1, err, n);
}

static const char *refuses(void *self, const dualkv_problem *p) {
    (void)self;
    if (p->dtype == DUALKV_FP16) return "planted: no fp16";
    if (p->mask > DUALKV_BLOCK) return "planted: no such mask";
    return p->hq > MAX_HEADS || p->dqk > 256 || p->dv > 256 ? "planted: at most 64 heads, head dims to 256"
                                                            : NULL;
}

static void arithmetic(void *self, const dualkv_problem *p, dualkv_arithmetic *a) {
    if (((const instance *)self)->undeclared) return;
    a->declared = a->acc_step = 1;
    a->unit = a->acc_unit = 0x1p-24;
    a->in_format = a->s_format = a->partial_format = DUALKV_EXACT;
    a->p_format = a->ds_format = p->dtype == DUALKV_BF16 ? DUALKV_BF16 : DUALKV_EXACT;
    a->out_format = p->dtype;
    a->key_tile = BN;
    a->exp_error = a->log_error = a->tanh_error = 0x1p-22;
}

static int deterministic(void *self, const dualkv_problem *p) { return (void)self, (void)p, 1; }

static int parseOption(const char *word, size_t length, instance *out) {
    static const char *const names[N_GAINS] = {"O", "LSE", "dQ", "dK", "dV", "scale"};
    char name[16], text[64];
    float x;
    int at = -1;
    snprintf(text, sizeof text, "%.*s", (int)length, word);
    if (!strcmp(text, "undeclared")) return out->undeclared = 1;
    if (sscanf(text, "interrupt=%d%n", &out->interrupt, &at) == 1 && !text[at]) return out->interrupt > 0;
    if (sscanf(text, "lose=%d%n", &out->lose, &at) == 1 && !text[at]) return out->lose >= 0;
    if (sscanf(text, "head=%d%n", &out->head, &at) == 1 && !text[at]) return 1;
    if (sscanf(text, "fault=P%2d%n", &out->fault, &at) == 1 && !text[at]) return out->fault >= 1 && out->fault <= 15;
    if (sscanf(text, "gain=%15[^:]:%f%n", name, &x, &at) != 2 || text[at]) return 0;
    for (int i = 0; i < N_GAINS; i++)
        if (!strcmp(names[i], name)) {
            out->gain[i] = x;
            return 1;
        }
    return 0;
}

static void *openPlanted(const char *options, char *err, size_t n) {
    instance *self = malloc(sizeof *self);
    if (!self) {
        snprintf(err, n, "planted: out of memory");
        return NULL;
    }
    *self = (instance){.head = -1, .lose = -1, .gain = {1, 1, 1, 1, 1, 1}};
    for (const char *at = options ? options : ""; *at;) {
        const size_t length = strcspn(at, ",");
        if (!parseOption(at, length, self)) {
            snprintf(err, n, "planted: the options are fault=P1 to P15, gain=O|LSE|dQ|dK|dV|scale:X, head=H, undeclared, interrupt=N, lose=N");
            free(self);
            return NULL;
        }
        at += length + (at[length] == ',');
    }
    return self;
}

static const dualkv_kernel planted = {.size = sizeof(dualkv_kernel),
                                      .abi = DUALKV_ABI,
                                      .name = "planted",
                                      .doc = "row by row over key tiles, with faults of its own",
                                      .memory = DUALKV_HOST,
                                      .alignment = 4,
                                      .open = openPlanted,
                                      .close = free,
                                      .refuses = refuses,
                                      .arithmetic = arithmetic,
                                      .deterministic = deterministic,
                                      .forward = forward,
                                      .backward = backward};

const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count);
const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count) {
    static const dualkv_kernel *const list[] = {&planted};
    *count = 1;
    return abi == DUALKV_ABI ? list : NULL;
}
