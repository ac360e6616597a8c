/* oracle_twin.c: the twin (oracle.h): fp64 arithmetic with the declared rounding points, and the variance of
 * what they leave to explain. Derivation and calibration: ref/TOLERANCE-TWIN.md. Threads take KV heads; the
 * result does not depend on how many there are. */
#include <cblas.h>
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "twin_impl.h"
#include "twin_ride.h"

#define TABLE_MAX ((int64_t)1 << 25) /* most maxima kept for key tiles that do not divide ours */
#define FIT_ROWS  32
#define FIT_KEYS  64

void dkv_twinRewind(dkv_twin *t) {
    t->t = (dkv_tile){.range = -1};
    t->at_step = t->n_steps;
}

static void rowNorms(const double *x, int64_t n, int64_t d, double *norm2) {
    for (int64_t i = 0; i < n; i++, x += d) {
        double sum = cblas_ddot((int)d, x, 1, x, 1);
        norm2[i] = sum <= DBL_MAX ? sum : 0;
    }
}

/* What the rows need of the tile's keys and scores. */
static void prepareTile(dkv_twin *t) {
    const dkv_problem *p = t->p;
    int64_t n = t->t.n;
    const float *equal = t->equal_kv + t->t.k_row;
    dkv_twinMeans(t->t.k, n, p->dqk, NULL, t->k_mean2);
    dkv_twinMeans(t->t.v, n, p->dv, NULL, t->v_mean2);
    if (t->quick) {
        rowNorms(t->t.k, n, p->dqk, t->k_norm);
        rowNorms(t->t.v, n, p->dv, t->v_norm);
        return;
    }
    dkv_unitRows(t->t.k, n, p->dqk, t->k1, t->k_norm);
    dkv_chainSquares(&t->u.z, t->q1, t->k1, t->b.m, n, p->dqk, t->dot, t->sq);
    dkv_unitRows(t->t.v, n, p->dv, t->v1, t->v_norm);
    dkv_twinSquares(t->t.k, n, p->dqk, equal, t->k2, &t->k_unit);
    dkv_twinSquares(t->t.v, n, p->dv, equal, t->v2, &t->v_unit);
}

bool dkv_twinTile(dkv_twin *t) {
    const dkv_problem *p = t->p;
    if (t->a->key_order) {
        if (t->at_step == 0) return false;
        t->t = t->steps[--t->at_step];
    }
    if (!dkv_nextTile(&t->h, &t->b, &t->t)) return false;
    if (t->a->in_format != DUALKV_EXACT) {
        dkv_roundArray(t->b.k, (size_t)(t->t.n * p->dqk), t->a->in_format);
        dkv_roundArray(t->b.v, (size_t)(t->t.n * p->dv), t->a->in_format);
    }
    dkv_tileScores(&t->h, &t->b, &t->t, t->s, p->softcap > 0 ? t->cap : NULL);
    prepareTile(t);
    return true;
}

/* Softcap and ALiBi after the product: one rounding each, and tanh's own error. */
static void modifiedRow(dkv_twin *t, int64_t i) {
    int64_t n = t->t.n, head = t->h.kvh * t->h.g + i % t->h.g;
    const double *s = t->s + i * n, *cap = t->cap + i * n;
    double c = t->p->softcap, u2 = t->u.z.unit2, slope = t->p->alibi ? t->l->alibi_slopes[head] : 0;
    double row = (double)(t->p->nodes[t->b.node].context + t->b.r0 + i / t->h.g - t->t.j0);
    for (int64_t j = 0; j < n; j++) {
        double x = s[j], bias = slope * fabs(row - (double)j);
        if (!(x > -DBL_MAX)) { /* masked */
            t->vs[j] = 0;
            continue;
        }
        if (c > 0) {
            double keep = 1 - cap[j] * cap[j], y = cap[j] * c, raw = fabs(cap[j]) < 1 ? c * atanh(cap[j]) : 0;
            t->vs[j] = keep * keep * (t->vs[j] + u2 * raw * raw) + y * y * (t->u.z.tanh2 + u2);
        }
        if (slope != 0) t->vs[j] += u2 * (bias * bias + x * x);
    }
}

/* The same from scores without modifiers: s = scale q.k. */
DKV_CLONES
static void quickRow(const dkv_twin *t, int64_t n, double norm, const double *s, double *vs) {
    double scale = t->p->scale, by = 1 / (scale * scale), rounds = t->u.scale_exact ? 0 : t->u.z.unit2;
    double step = t->u.z.step2 * scale * scale;
    const double *k_norm = t->k_norm;
    const float *fit = t->fit_s.var;
    dkv_quick q = t->quick_s;
#pragma GCC ivdep
    for (int64_t j = 0; j < n; j++) {
        double x = s[j] > -DBL_MAX ? s[j] : 0, size = norm * k_norm[j],
               sq = dkv_quickSquares(q, x * x * by, size);
        float unit = size > 0 ? (float)(sq / size) : 0;
        vs[j] = step * fit[dkv_chainBin(unit)] * sq + rounds * x * x;
    }
}

void dkv_twinScoreRow(dkv_twin *t, int64_t i) {
    int64_t n = t->t.n;
    const float *sq = t->sq + i * n, *dot = t->dot + i * n;
    double *s = t->s + i * n, *vs = t->vs, scale = t->p->scale,
           by = t->u.z.step2 * t->q_norm[i] * scale * scale;
    if (t->quick) {
        quickRow(t, n, t->q_norm[i], s, vs);
        return;
    }
    double rounds = t->u.scale_exact ? 0 : t->u.z.unit2, bias = t->u.z.gain > 0 ? scale * sqrt(t->q_norm[i]) : 0;
    for (int64_t j = 0; j < n; j++) {
        double raw = dot[j];
        vs[j] = by * t->fit_s.var[dkv_chainBin(sq[j])] * sq[j] * t->k_norm[j] +
                rounds * raw * raw * t->q_norm[i] * t->k_norm[j] * scale * scale;
    }
    if (bias > 0)
        for (int64_t j = 0; j < n; j++) {
            double keep = t->p->softcap > 0 ? 1 - t->cap[i * n + j] * t->cap[i * n + j] : 1;
            s[j] += keep * bias * t->fit_s.gain[dkv_chainBin(sq[j])] * dot[j] * sqrt(t->k_norm[j]);
        }
    if (t->p->softcap > 0 || t->p->alibi) modifiedRow(t, i);
    if (t->u.s_rounded)
        for (int64_t j = 0; j < n; j++) {
            double x = s[j] > -DBL_MAX ? fabs(s[j]) : 0;
            double y = dkv_roundBy(t->u.round_s, x);
            vs[j] = dkv_flip(x, y, vs[j], dkv_spacingAt(t->u.ulp_s, x));
            s[j] = dkv_roundBy(t->u.round_s, s[j]);
        }
}

/* What the rows need of the block's own operands. */
static void prepareBlock(dkv_twin *t) {
    if (t->quick) rowNorms(t->b.q, t->b.m, t->p->dqk, t->q_norm);
    else dkv_unitRows(t->b.q, t->b.m, t->p->dqk, t->q1, t->q_norm);
}

static void loadBlock(dkv_twin *t) {
    const dkv_problem *p = t->p;
    dkv_loadBlock(&t->h, &t->b);
    if (t->a->in_format != DUALKV_EXACT) {
        dkv_roundArray(t->b.q, (size_t)(t->b.m * p->dqk), t->a->in_format);
        if (t->b.d_o) dkv_roundArray(t->b.d_o, (size_t)(t->b.m * p->dv), t->a->in_format);
    }
    prepareBlock(t);
    dkv_tile at = {.range = -1};
    for (t->n_steps = 0; t->a->key_order; t->n_steps++) {
        t->steps[t->n_steps] = at;
        if (!dkv_nextTile(&t->h, &t->b, &at)) break;
    }
}

/* Runs sampled chains: rows and keys evenly spread over the problem, whatever the mask; and, of less weight,
 * pairs more alike than these, since the score that counts is the largest of many. */
static int fitChains(dkv_twin *t, dkv_err *err) {
    const dkv_problem *p = t->p;
    int64_t tq = t->l->view.tq, tk = t->l->view.tk, rows = tq < FIT_ROWS ? tq : FIT_ROWS;
    int64_t keys = tk < FIT_KEYS ? tk : FIT_KEYS, top = p->dqk > p->dv ? p->dqk : p->dv;
    double *a = malloc(sizeof(double) * (size_t)((keys + 1) * top)),
           *b = malloc(sizeof(double) * (size_t)((keys + 1) * top));
    dkv_startFit(&t->fit_s);
    dkv_startFit(&t->fit_dp);
    if (!a || !b) {
        free(a);
        free(b);
        return dkv_fail(err, DKV_EHARNESS, "out of memory: sampled chains");
    }
    for (int64_t i = 0; i < rows; i++)
        for (int pass = 0; pass < (t->in->d_o ? 2 : 1); pass++) {
            int64_t d = pass ? p->dv : p->dqk, row = i * tq / rows;
            dkv_chainFit *f = pass ? &t->fit_dp : &t->fit_s;
            const void *x = pass ? t->in->d_o : t->in->q, *y = pass ? t->in->v : t->in->k;
            dkv_decodeRows(x, p->dtype, row, 1, p->hq, t->h.kvh * t->h.g + i % t->h.g, d, a);
            for (int64_t j = 0; j < keys; j++) {
                memcpy(a + j * d, a, sizeof *a * (size_t)(j ? d : 0));
                int64_t at =
                    j ? (j * tk + i * tk / rows) / keys % tk : 0; /* the first: often the sink of attention */
                dkv_decodeRows(y, p->dtype, at, 1, p->hkv, t->h.kvh, d, b + j * d);
            }
            dkv_roundArray(a, (size_t)(keys * d), t->a->in_format);
            dkv_roundArray(b, (size_t)(keys * d), t->a->in_format);
            dkv_sampleFit(&t->u.z, a, b, keys, d, 8, t->quick, f);
            for (int64_t e = 0; e < keys * d; e++) /* parallel, as of needles; of every mantissa */
                a[e] = dkv_roundTo((1 + (double)i / (double)rows) * b[e], p->dtype);
            dkv_sampleFit(&t->u.z, a, b, keys, d, 1, t->quick, f);
            for (int64_t e = 0; e < keys * d; e++) /* half parallel: the largest of many scores */
                a[e] = dkv_roundTo(a[e] + (1 + (double)(e / d % 4)) / 2 * b[(e + d) % (keys * d)], p->dtype);
            dkv_sampleFit(&t->u.z, a, b, keys, d, 1, t->quick, f);
        }
    dkv_endFit(&t->fit_s);
    dkv_endFit(&t->fit_dp);
    free(a);
    free(b);
    return DKV_OK;
}

static const char *rowOf(const void *x, dualkv_dtype dtype, int64_t row, int64_t heads, int64_t head,
                         int64_t d) {
    return (const char *)x + (size_t)((row * heads + head) * d) * dkv_dtypeSize(dtype);
}

/* Equal keys of a segment; equal rows (operands, kernel's O and LSE) of a group and of a segment. */
static int countEqual(dkv_twin *t, dkv_err *err) {
    const dkv_problem *p = t->p;
    const dualkv_problem *v = &t->l->view;
    int64_t n = v->tk > v->tq * t->h.g ? v->tk : v->tq * t->h.g;
    size_t size = dkv_dtypeSize(p->dtype), k_size = size * (size_t)p->dqk, v_size = size * (size_t)p->dv;
    uint64_t *hash = malloc(sizeof *hash * (size_t)(n + 1));
    int32_t *cls = malloc(sizeof *cls * (size_t)(n + 1));
    double *d_lse = malloc(sizeof *d_lse * (size_t)(n + 1)); /* in the rows' order */
    int code = hash && cls && d_lse ? DKV_OK : dkv_fail(err, DKV_EHARNESS, "out of memory: %lld rows", (long long)n);
    for (int pass = 0; pass < 2 && !code; pass++) {
        for (int32_t s = 0; s < v->n_segments; s++)
            for (int64_t j = v->segments[s].k_start; j < v->segments[s].k_start + v->segments[s].k_len; j++) {
                hash[j] = dkv_hashBytes(1, rowOf(t->in->k, p->dtype, j, p->hkv, t->h.kvh, p->dqk), k_size);
                if (pass)
                    hash[j] =
                        dkv_hashBytes(hash[j], rowOf(t->in->v, p->dtype, j, p->hkv, t->h.kvh, p->dv), v_size);
                cls[j] = s;
            }
        code = dkv_countEqual(hash, cls, v->tk, pass ? t->equal_kv : t->equal_k, NULL, NULL, err);
    }
    if (!t->in->d_o) goto done;
    for (int pass = 0; pass < 4 && !code; pass++) {
        bool own = pass % 2, all = pass >= 2;
        for (int32_t s = 0; s < v->n_segments; s++)
            for (int64_t r = 0; r < v->segments[s].q_len * t->h.g; r++) {
                int64_t row = v->segments[s].q_start + r / t->h.g, head = t->h.kvh * t->h.g + r % t->h.g;
                int64_t at = v->segments[s].q_start * t->h.g + r;
                d_lse[at] = t->in->d_lse ? t->in->d_lse[head * v->tq + row] : 0;
                uint64_t x = dkv_hashBytes(2, rowOf(t->in->q, p->dtype, row, p->hq, head, p->dqk), k_size);
                x = dkv_hashBytes(x, rowOf(t->in->d_o, p->dtype, row, p->hq, head, p->dv), v_size);
                if (t->in->d_lse && !all) x = dkv_hashBytes(x, &t->in->d_lse[head * v->tq + row], sizeof(float));
                x = dkv_hashBytes(x, &t->kernel_lse[head * v->tq + row], sizeof(double));
                hash[at] = dkv_hashBytes(x, &t->kernel_o[(row * p->hq + head) * p->dv],
                                         sizeof(double) * (size_t)p->dv);
                cls[at] = own ? s : v->segments[s].group;
            }
        code = dkv_countEqual(hash, cls, v->tq * t->h.g, own ? t->equal_own[all] : t->equal_any[all],
                              all && t->in->d_lse ? d_lse : NULL, own ? t->own_d_lse : t->any_d_lse, err);
    }
done:
    free(hash);
    free(cls);
    free(d_lse);
    return code;
}

static void finishHead(dkv_twin *t) {
    dkv_oracle *o = t->out;
    if (!t->in->d_o) return;
    if (!t->shares) dkv_twinFinishKeys(t);
    for (int32_t g = 0; g < t->h.g && t->sink_sum; g++) {
        o->twin.dsink[t->h.kvh * t->h.g + g] = t->sink_sum[g];
        o->sigma2.dsink[t->h.kvh * t->h.g + g] = t->sink_var[g];
    }
}

/* Adds the head's rows, and how many of them err alike. */
static int countClasses(dkv_twin *t, dkv_err *err) {
    int64_t n = t->l->view.tq * t->h.g;
    int32_t *cls = calloc((size_t)n + 1, sizeof *cls);
    dkv_alike sum = {0};
    int code = cls ? dkv_countEqual(t->row_class, cls, n, t->equal_any[0], NULL, NULL, err)
                   : dkv_fail(err, DKV_EHARNESS, "out of memory: %lld rows", (long long)n);
    for (int64_t i = 0; i < n && !code; i++) {
        if (t->row_class[i] == 0) continue;
        const int64_t times = (int64_t)t->equal_any[0][i];
        sum.rows++;
        sum.lse += t->row_class[i] & DKV_CLASS_LEANS ? times : 1;
        sum.capped += t->row_class[i] & DKV_CLASS_CAPPED ? times : 1;
    }
    free(cls);
    __atomic_fetch_add(&t->out->alike.rows, sum.rows, __ATOMIC_RELAXED);
    __atomic_fetch_add(&t->out->alike.lse, sum.lse, __ATOMIC_RELAXED);
    __atomic_fetch_add(&t->out->alike.capped, sum.capped, __ATOMIC_RELAXED);
    return code;
}

/* All of a tile but its terms of dK and dV; scores and dP are there. */
static void walkTile(dkv_twin *t, bool forward, bool backward) {
    if (backward) dkv_twinBackwardPairs(t);
    for (int64_t i = 0; i < t->b.m; i++) {
        dkv_twinScoreRow(t, i);
        if (forward) dkv_twinForwardRow(t, i);
        if (backward) dkv_twinBackwardRow(t, i);
    }
    if (forward) dkv_twinForwardTile(t);
    if (backward) dkv_twinBackwardQueries(t);
}

static void runBlock(dkv_twin *t, bool forward, bool backward) {
    t->has_exact = forward;
    if (forward) dkv_twinBeginForward(t);
    if (backward) dkv_twinBeginBackward(t);
    for (dkv_twinRewind(t); dkv_twinTile(t);) {
        if (backward) dkv_tileDp(&t->h, &t->b, &t->t, t->dp);
        walkTile(t, forward, backward);
        if (backward) dkv_twinBackwardKeys(t);
    }
    if (forward) dkv_twinEndForward(t);
    if (backward) dkv_twinEndBackward(t);
}

static void clearSum(const dkv_twin *t, const dkv_keySum *sum, int64_t d) {
    for (int64_t j = 0; j < t->l->view.tk; j++) {
        memset(sum->x + j * sum->ld, 0, sizeof(double) * (size_t)d);
        memset(sum->var + j * sum->ld, 0, sizeof(double) * (size_t)d);
        if (sum->steps) memset(sum->steps + j * sum->ld, 0, sizeof(double) * (size_t)d);
    }
}

/* What holds for the whole head; its sums over rows start at 0. */
static int beginHead(dkv_twin *t, int32_t kvh, dkv_err *err) {
    const int32_t to = kvh / t->carry, heads = t->p->hkv / t->carry; /* of dK and dV */
    const dkv_problem *p = t->p;
    int code;
    t->h.kvh = kvh;
    code = fitChains(t, err);
    if (!code) code = countEqual(t, err);
    if (code) return code;
    const dkv_keySum out_k = {t->out->twin.dk + to * p->dqk, t->out->sigma2.dk + to * p->dqk, NULL,
                              (int64_t)heads * p->dqk, t->dk[0].size, t->dk[0].spread, t->dk[0].square};
    const dkv_keySum out_v = {t->out->twin.dv + to * p->dv, t->out->sigma2.dv + to * p->dv, NULL,
                              (int64_t)heads * p->dv, t->dv[0].size, t->dv[0].spread, t->dv[0].square};
    if (!t->apart) t->dk[0] = out_k, t->dv[0] = out_v;
    for (int64_t e = 0; e < t->parts && t->in->d_o && !t->shares; e++) {
        clearSum(t, &t->dk[e], p->dqk);
        clearSum(t, &t->dv[e], p->dv);
    }
    if (t->in->d_o && t->part.segments && !t->shares) {
        clearSum(t, &out_k, p->dqk);
        clearSum(t, &out_v, p->dv);
    }
    if (t->sink_sum) {
        memset(t->sink_sum, 0, sizeof(double) * (size_t)t->h.g);
        memset(t->sink_var, 0, sizeof(double) * (size_t)t->h.g);
    }
    return DKV_OK;
}

/* The blocks of the next segment that has rows. False at the end. */
static bool runSegment(dkv_twin *t, bool last_head) {
    const bool grad = t->in->d_o != NULL, two = grad && t->a->delta_exact;
    do {
        if (!dkv_stepBlock(&t->h, &t->b)) return false;
        loadBlock(t);
        runBlock(t, true, grad && !two);
        if (two) runBlock(t, false, true);
        if (grad) dkv_twinPartKeys(t, last_head);
    } while (t->b.r1 < t->l->view.segments[t->b.node].q_len);
    return true;
}

/* Blocks and tiles that end where the kernel's blocks do. */
static void alignBlocks(dkv_twin *t) {
    const int64_t block = t->part.dq_block;
    if (t->part.rows && t->h.rows) t->h.rows = dkv_commonRows(t->a, t->h.rows);
    t->h.max_m = t->h.rows * t->h.g;
    t->h.keys = block > 0 && block < DKV_TILE_KEYS ? block : DKV_TILE_KEYS;
    while (block > 0 && block % t->h.keys) t->h.keys--;
}

static void declare(dkv_twin *t) {
    const dualkv_arithmetic *a = t->a;
    dkv_makeUnits(t->p, a, &t->u);
    t->part = dkv_partialsOf(a);
    t->round_part = dkv_makeRounder(a->partial_format);
    t->parts = t->part.heads ? t->p->hq / t->p->hkv : 1;
    t->apart = t->parts > 1 || t->part.segments || t->part.rows;
    t->anyhow = t->u.z.gain > 0 && !t->part.rows && t->in->d_o;
    alignBlocks(t);
    t->quick = !t->whole && t->u.p_rounded && t->u.ds_rounded && !t->u.s_rounded && !t->apart && !t->part.dq_block &&
               t->u.z.gain == 0 && !t->u.z.truncates && t->p->dtype != DUALKV_FP32 && !(t->p->softcap > 0) && !t->p->alibi;
    t->quick_s = dkv_makeQuick(t->p->dqk);
    t->quick_dp = dkv_makeQuick(t->p->dv);
    t->late = !a->p_normalised && (a->max_slack > 0 || (a->sink_first && t->in->sink));
    t->table = t->u.p_rounded && !a->p_normalised && a->key_tile > 0 && t->h.keys % a->key_tile;
}

/* Most tiles of `size` keys that a row's ranges are cut into. */
static int64_t mostTiles(const dkv_twin *t, int64_t size) {
    const dualkv_problem *v = &t->l->view;
    int64_t most = 0;
    for (int32_t s = 0; s < v->n_segments; s++) {
        int64_t n = 0;
        for (int32_t r = 0; r < v->segments[s].range_count; r++)
            n += (t->l->ranges[v->segments[s].range_begin + r].len + size - 1) / size;
        most = n > most ? n : most;
    }
    return most;
}

typedef struct buffer {
    void *at; /* of a pointer */
    int64_t n;
    size_t size;
} buffer;

#define DOUBLES(field, count)                                                                                \
    { &t->field, count, sizeof(double) }
#define FLOATS(field, count)                                                                                 \
    { &t->field, count, sizeof(float) }
#define ROWS(sum)                                                                                            \
    DOUBLES(sum.acc, m *d), DOUBLES(sum.chain, m *d), DOUBLES(sum.loss, m *d), DOUBLES(sum.a1, m *d),        \
        DOUBLES(sum.a2, m *d), DOUBLES(sum.terms, m), DOUBLES(sum.now, m), DOUBLES(sum.var, m)
#define BUFFERS 100

static int allocate(dkv_twin *t, const buffer *all, size_t n, void **owned, int *count, dkv_err *err) {
    for (size_t e = 0; e < n; e++) {
        size_t bytes;
        void *x = NULL;
        if (!__builtin_mul_overflow((size_t)all[e].n, all[e].size, &bytes) && bytes < SIZE_MAX - 64)
            x = aligned_alloc(64, (bytes + 64) & ~(size_t)63);
        if (!x)
            return dkv_fail(err, DKV_EHARNESS, "out of memory: the twin's tiles of %lld rows",
                            (long long)t->h.max_m);
        memset(x, 0, bytes);
        memcpy(all[e].at, &x, sizeof x);
        owned[(*count)++] = x;
    }
    return DKV_OK;
}

/* What belongs to a whole head. */
static int openHead(dkv_twin *t, void **owned, int *count, dkv_err *err) {
    const dkv_problem *p = t->p;
    int64_t tk = t->l->view.tk, rows = t->l->view.tq * t->h.g;
    const buffer all[] = {FLOATS(equal_k, tk),
                          FLOATS(equal_kv, tk),
                          FLOATS(equal_any[0], rows),
                          FLOATS(equal_own[0], rows),
                          FLOATS(equal_any[1], rows),
                          FLOATS(equal_own[1], rows),
                          DOUBLES(any_d_lse, t->in->d_lse ? rows : 0),
                          DOUBLES(own_d_lse, t->in->d_lse ? rows : 0),
                          {&t->row_class, rows, sizeof(uint64_t)},
                          DOUBLES(key_n, tk),
                          DOUBLES(key_n2, tk),
                          {&t->dk, t->parts, sizeof(dkv_keySum)},
                          {&t->dv, t->parts, sizeof(dkv_keySum)}};
    const buffer sink[] = {DOUBLES(sink_sum, t->h.g), DOUBLES(sink_var, t->h.g)};
    int code = allocate(t, all, sizeof all / sizeof *all, owned, count, err);
    if (!code && t->in->sink && t->in->d_o) code = allocate(t, sink, 2, owned, count, err);
    if (code || (!t->apart && !t->anyhow) || t->shares) return code;
    /* One block for all sums' arrays: two that the outputs have room for if they are not apart, the steps or three more. */
    const int64_t own = t->apart ? 2 : 0, each = own + (t->anyhow ? 3 : t->part.rows), k = tk * p->dqk, v = tk * p->dv;
    double *x = NULL;
    const buffer parts = {&x, each * t->parts * (k + v), sizeof(double)};
    code = allocate(t, &parts, 1, owned, count, err);
    for (int64_t e = 0; e < t->parts && !code; e++, x += each * (k + v)) {
        double *y = x + each * k;
        t->dk[e] = (dkv_keySum){x, x + k, t->part.rows ? x + 2 * k : NULL, p->dqk, x + own * k, x + (own + 1) * k, x + (own + 2) * k};
        t->dv[e] = (dkv_keySum){y, y + v, t->part.rows ? y + 2 * v : NULL, p->dv, y + own * v, y + (own + 1) * v, y + (own + 2) * v};
    }
    return code;
}

/* What a thread needs of its own; t->h is there. */
static int openTiles(dkv_twin *t, void **owned, int *count, dkv_err *err) {
    const dkv_problem *p = t->p;
    int64_t m = t->h.max_m, n = DKV_TILE_KEYS, d = p->dqk > p->dv ? p->dqk : p->dv, most = m > n ? m : n;
    int64_t tiles = t->table ? mostTiles(t, t->a->key_tile) : 0;
    if (tiles && tiles > TABLE_MAX / m) t->table = false, t->out->has_twin[DKV_O] = false, tiles = 0;
    const buffer all[] = {FLOATS(q1, m * d),
                          FLOATS(o1, m * d),
                          DOUBLES(q_norm, m),
                          DOUBLES(o_norm, m),
                          DOUBLES(before, most * d),
                          FLOATS(prod, most * d),
                          ROWS(o),
                          ROWS(dq),
                          DOUBLES(p_keys, m * n),
                          FLOATS(w_keys, m * n),
                          FLOATS(flat_keys, n * d),
                          DOUBLES(max, m),
                          DOUBLES(sum, m),
                          DOUBLES(sum_var, m),
                          DOUBLES(ones, m),
                          DOUBLES(lost, m),
                          DOUBLES(lse_var, m),
                          {&t->top, m, sizeof(dkv_topKey)},
                          DOUBLES(lse_kernel, m),
                          DOUBLES(score_var, m),
                          DOUBLES(delta, m),
                          DOUBLES(delta_var, m),
                          DOUBLES(delta_own, m),
                          DOUBLES(lse, m),
                          DOUBLES(tile_max, m * tiles),
                          DOUBLES(tile_vs, t->late ? m * tiles : 0),
                          {&t->late_max, t->late ? m : 0, sizeof(dkv_lateMax)},
                          DOUBLES(dq_steps, t->part.dq_block ? m * d : 0),
                          DOUBLES(dq.size, t->u.z.gain > 0 ? m * d : 0),
                          DOUBLES(dq.spread, t->u.z.gain > 0 ? m * d : 0),
                          DOUBLES(dq.square, t->u.z.gain > 0 ? m * d : 0),
                          DOUBLES(dq.n, m),
                          DOUBLES(dq.n2, m),
                          DOUBLES(o_kernel, m * d),
                          DOUBLES(o_exact, m * d),
                          DOUBLES(o_var, m * d),
                          FLOATS(q2, m * d),
                          FLOATS(do2, m * d),
                          FLOATS(flat, m * d),
                          FLOATS(k1, n * d),
                          FLOATS(v1, n * d),
                          FLOATS(k2, n * d),
                          FLOATS(v2, n * d),
                          DOUBLES(k_norm, n),
                          DOUBLES(v_norm, n),
                          DOUBLES(s, m * n),
                          DOUBLES(cap, m * n),
                          DOUBLES(dp, m * n),
                          DOUBLES(vs, n),
                          DOUBLES(vd, n),
                          FLOATS(sq, m * n),
                          FLOATS(dot, m * n),
                          FLOATS(tmp, m * n),
                          FLOATS(sq_dp, m * n),
                          FLOATS(dot_dp, m * n),
                          FLOATS(w, m * n),
                          FLOATS(w2, m * n),
                          DOUBLES(wide, m * n),
                          DOUBLES(col, n),
                          DOUBLES(col_n, n),
                          DOUBLES(row_ds2, m),
                          DOUBLES(col_p2, n),
                          DOUBLES(col_ds2, n),
                          DOUBLES(col_vp, n),
                          DOUBLES(col_vds, n),
                          DOUBLES(k_mean2, d),
                          DOUBLES(v_mean2, d),
                          DOUBLES(q_mean2, d),
                          DOUBLES(do_mean2, d),
                          {&t->steps, t->a->key_order ? mostTiles(t, t->h.keys) + 1 : 0, sizeof(dkv_tile)}};
    return allocate(t, all, sizeof all / sizeof *all, owned, count, err);
}

/* A thread's twin, or a head's. */
struct dkv_rider {
    dkv_twin t;
    void *owned[BUFFERS];
    int count, code;
    dkv_err err;
    int32_t *next;   /* KV head to take; shared */
    dkv_ride *ride; /* NULL: alone */
};
typedef struct dkv_rider lane;

/* Of w->t the problem, the arithmetic and the outputs are there. */
static int openLane(lane *w, bool tiles, bool head, dkv_err *err) {
    int code = dkv_openHead(w->t.p, w->t.l, w->t.in, 0, &w->t.h, err);
    if (code) return code;
    declare(&w->t);
    if (tiles && !w->ride) code = dkv_openBlock(&w->t.h, &w->t.b, err);
    if (!code && head) code = openHead(&w->t, w->owned, &w->count, err);
    if (!code && tiles) code = openTiles(&w->t, w->owned, &w->count, err);
    return code;
}

static void closeLane(lane *w) {
    for (int e = 0; e < w->count; e++) free(w->owned[e]);
    if (!w->ride) dkv_closeBlock(&w->t.b);
}

/* The heads of one running sum, segment by segment: `carry` lanes, mostly one. */
static int runHeads(lane *w, int32_t first, dkv_err *err) {
    const int32_t n = w->t.carry;
    bool more = true;
    int code = DKV_OK;
    for (int32_t e = 0; e < n && !code; e++) {
        code = beginHead(&w[e].t, first + e, err);
        w[e].t.b.node = -1;
        w[e].t.b.r1 = 0;
    }
    while (!code && more)
        for (int32_t e = 0; e < n && more; e++) more = runSegment(&w[e].t, e == n - 1);
    for (int32_t e = 0; e < n && !code; e++) {
        finishHead(&w[e].t);
        code = countClasses(&w[e].t, err);
    }
    return code;
}

static void *runLane(void *arg) {
    lane *w = arg;
    const int32_t n = w->t.carry;
    int32_t head;
    while (!w->code && (head = __atomic_fetch_add(w->next, 1, __ATOMIC_RELAXED)) < w->t.p->hkv / n)
        w->code = runHeads(w, head * n, &w->err);
    return NULL;
}

static void setPresence(const dkv_problem *p, const dkv_inputs *in, const dualkv_arithmetic *a,
                        dkv_oracle *o) {
    bool grad = in->d_o != NULL;
    bool rounded = dkv_unitRoundoff(a->p_format) > a->unit;
    o->has_twin[DKV_O] = a->key_tile > 0 || a->p_normalised || !rounded;
    o->has_twin[DKV_LSE] = true;
    o->has_twin[DKV_DQ] = o->has_twin[DKV_DK] = o->has_twin[DKV_DV] = grad;
    o->has_twin[DKV_DSINK] = grad && p->sink;
}

/* Where the bound claims nothing, neither does the twin. */
static void dropUnclaimed(const dkv_layout *l, dkv_oracle *out) {
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(l, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *b = dkv_outputAt(&out->bound, (dkv_tensor_id)id);
        double *s2 = dkv_outputAt(&out->sigma2, (dkv_tensor_id)id);
        for (int64_t i = 0; i < n[id]; i++)
            if (b[i] == DKV_UNCLAIMED) s2[i] = NAN;
    }
}

/* All heads. base: what each twin starts from. */
static int runTwin(const dkv_twin *base, const dkv_ref_options *opt, dkv_err *err) {
    const int32_t carry = base->carry, heads = base->p->hkv / carry;
    int n = dkv_countThreads(opt, heads, 1, heads), code = DKV_OK;
    int32_t next = 0;
    lane *all = calloc((size_t)n * (size_t)carry, sizeof *all);
    void **arg = calloc((size_t)n, sizeof *arg);
    if (!all || !arg) {
        code = dkv_fail(err, DKV_EHARNESS, "out of memory: the twin's threads");
        goto done;
    }
    for (int e = 0; e < n * carry && !code; e++) {
        lane *first = &all[e / carry * carry];
        all[e].t = *base;
        all[e].t.shares = e % carry > 0;
        all[e].next = &next;
        arg[e / carry] = first;
        code = openLane(&all[e], true, true, err);
        if (!code && all[e].t.shares) all[e].t.dk[0] = first->t.dk[0], all[e].t.dv[0] = first->t.dv[0];
    }
    if (code) goto done;
    dkv_runThreads(n, runLane, arg);
    for (int e = 0; e < n && !code; e++)
        if ((code = all[e * carry].code) && err) *err = all[e * carry].err;
done:
    for (int e = 0; all && e < n * carry; e++) closeLane(&all[e]);
    free(all);
    free(arg);
    return code;
}

int dkv_oracleTwin(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                   const dualkv_arithmetic *a, const dkv_ref_options *opt, const double *kernel_o,
                   const double *kernel_lse, dkv_oracle *out, dkv_err *err) {
    const bool wide = dkv_partialsOf(a).rows && p->hkv < p->hq && in->d_o;
    dkv_twin base = {.p = p, .l = l, .in = in, .a = a, .kernel_o = kernel_o, .kernel_lse = kernel_lse, .out = out, .carry = 1,
                     .lse_stands_in = opt && opt->lse_stands_in, .whole = opt && opt->exact_products};
    dkv_spread x = {0};
    int code = DKV_OK;
    if (in->d_o && (!kernel_o || !kernel_lse))
        return dkv_fail(err, DKV_EHARNESS, "the twin of gradients needs the kernel's O and LSE");
    setPresence(p, in, a, out);
    out->alike = (dkv_alike){0};
    if (wide) {
        code = dkv_openSpread(p, l, in, &x, err);
        base.p = &x.p;
        base.l = &x.l;
        base.in = &x.in;
        base.carry = p->hq / p->hkv;
    }
    if (!code) code = runTwin(&base, opt, err);
    if (!code) dropUnclaimed(l, out);
    dkv_closeSpread(&x);
    return code;
}

/* --- riding along --- */

struct dkv_ride {
    lane *head, *thread; /* [hkv]: what belongs to a whole head; [threads] */
    int32_t heads, next;
    int threads;
};

bool dkv_twinRides(const dkv_problem *p, const dkv_inputs *in, const dualkv_arithmetic *a) {
    dkv_twin t = {.p = p, .in = in, .a = a};
    declare(&t);
    /* Not with a pass over the scores of its own: it walks tiles in the other's buffers. */
    return in->d_o && !in->sink && a->in_format == DUALKV_EXACT && !a->key_order && !a->delta_exact && !t.apart &&
           !t.part.dq_block && !t.table && !a->p_normalised;
}

static void *beginHeads(void *arg) {
    lane *w = arg;
    int32_t head;
    while (!w->code && (head = __atomic_fetch_add(w->next, 1, __ATOMIC_RELAXED)) < w->ride->heads)
        w->code = beginHead(&w->ride->head[head].t, head, &w->err);
    return NULL;
}

int dkv_openRide(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dualkv_arithmetic *a,
                 const double *kernel_o, const double *kernel_lse, int threads, dkv_oracle *out, dkv_ride **ride,
                 dkv_err *err) {
    const dkv_twin base = {
        .p = p, .l = l, .in = in, .a = a, .kernel_o = kernel_o, .kernel_lse = kernel_lse, .out = out, .carry = 1};
    dkv_ride *r = *ride = calloc(1, sizeof *r);
    void **arg = calloc((size_t)threads, sizeof *arg);
    int code = DKV_OK;
    if (r) {
        r->heads = p->hkv;
        r->threads = threads;
        r->head = calloc((size_t)p->hkv, sizeof *r->head);
        r->thread = calloc((size_t)threads, sizeof *r->thread);
    }
    if (!r || !arg || !r->head || !r->thread) {
        code = dkv_fail(err, DKV_EHARNESS, "out of memory: the twin's threads");
        goto done;
    }
    setPresence(p, in, a, out);
    out->alike = (dkv_alike){0};
    for (int32_t e = 0; e < r->heads && !code; e++) {
        r->head[e].t = base;
        r->head[e].ride = r;
        code = openLane(&r->head[e], false, true, err);
    }
    for (int e = 0; e < threads && !code; e++) {
        r->thread[e].t = base;
        r->thread[e].ride = r;
        r->thread[e].next = &r->next;
        arg[e] = &r->thread[e];
        code = openLane(&r->thread[e], true, false, err);
    }
    if (code) goto done;
    dkv_runThreads(threads, beginHeads, arg);
    for (int e = 0; e < threads && !code; e++)
        if ((code = r->thread[e].code) && err) *err = r->thread[e].err;
done:
    free(arg);
    return code;
}

void dkv_closeRide(dkv_ride *r) {
    if (!r) return;
    for (int32_t e = 0; r->head && e < r->heads; e++) closeLane(&r->head[e]);
    for (int e = 0; r->thread && e < r->threads; e++) closeLane(&r->thread[e]);
    free(r->head);
    free(r->thread);
    free(r);
}

dkv_rider *dkv_riderOf(dkv_ride *r, int thread) { return &r->thread[thread]; }

void dkv_rideBegin(dkv_rider *w, const dkv_head *h, const dkv_block *b) {
    const dkv_twin *head = &w->ride->head[h->kvh].t;
    dkv_twin *t = &w->t;
    t->h = *h;
    t->b = *b; /* its operands stay the other's */
    t->fit_s = head->fit_s;
    t->fit_dp = head->fit_dp;
    t->equal_k = head->equal_k;
    t->equal_kv = head->equal_kv;
    for (int e = 0; e < 2; e++) {
        t->equal_any[e] = head->equal_any[e];
        t->equal_own[e] = head->equal_own[e];
    }
    t->any_d_lse = head->any_d_lse;
    t->own_d_lse = head->own_d_lse;
    t->row_class = head->row_class;
    t->dk = head->dk;
    t->dv = head->dv;
    t->key_n = head->key_n;
    t->key_n2 = head->key_n2;
    prepareBlock(t);
    t->has_exact = true;
    dkv_twinBeginForward(t);
    dkv_twinBeginBackward(t);
}

void dkv_rideTile(dkv_rider *w, const dkv_tile *tile, double *s, double *cap, double *dp) {
    dkv_twin *t = &w->t;
    t->t = *tile;
    t->s = s;
    t->cap = cap;
    t->dp = dp;
    prepareTile(t);
    walkTile(t, true, true);
}

void dkv_rideKeys(dkv_rider *w) { dkv_twinBackwardKeys(&w->t); }

void dkv_rideEnd(dkv_rider *w) {
    dkv_twinEndForward(&w->t);
    dkv_twinEndBackward(&w->t);
}

int dkv_finishRide(dkv_ride *r, dkv_err *err) {
    int code = DKV_OK;
    for (int32_t e = 0; e < r->heads && !code; e++) {
        finishHead(&r->head[e].t);
        code = countClasses(&r->head[e].t, err);
    }
    if (!code) dropUnclaimed(r->head[0].t.l, r->head[0].t.out);
    return code;
}
