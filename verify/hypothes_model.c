#include "hypothes_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "../ref/mask_pair.h"

#define PAIRS_MAX ((double)(1 << 22)) /* rows x keys x heads */

static double *decode(const void *from, dualkv_dtype t, int64_t n) {
    double *x = malloc((size_t)n * sizeof *x + 1);
    if (x) dkv_decodeArray(from, t, (size_t)n, x);
    return x;
}

static double dot(const double *a, const double *b, int n) {
    double s = 0;
    for (int c = 0; c < n; c++) s += a[c] * b[c];
    return s;
}

static bool sameGroup(const dkv_model *m, int64_t t, int64_t j) {
    const dualkv_segment *s = m->l->view.segments;
    return s[m->q_segment[t]].group == s[m->k_segment[j]].group;
}

/* Products of all pairs of a group, which every edit shares. */
static void multiply(dkv_model *m) {
    const dkv_problem *p = m->p;
    const int g = p->hq / p->hkv;
    for (int h = 0; h < p->hq; h++)
        for (int64_t t = 0; t < m->tq; t++)
            for (int64_t j = 0; j < m->tk; j++) {
                const int64_t at = (h * m->tq + t) * m->tk + j, kv = j * p->hkv + h / g;
                if (!sameGroup(m, t, j)) continue;
                m->raw[at] = dot(m->q + (t * p->hq + h) * p->dqk, m->k + kv * p->dqk, p->dqk);
                if (m->d_o) m->dp[at] = dot(m->d_o + (t * p->hq + h) * p->dv, m->v + kv * p->dv, p->dv);
            }
}

static void findPositions(dkv_model *m) {
    const dualkv_problem *v = &m->l->view;
    int32_t rows = 0;
    for (int32_t i = 0; i < v->n_segments; i++) {
        const dualkv_segment *s = &v->segments[i];
        for (int64_t r = 0; r < s->q_len; r++) m->q_segment[s->q_start + r] = i;
        for (int64_t r = 0; r < s->k_len; r++) m->k_segment[s->k_start + r] = i;
        if (!s->q_len) continue;
        int64_t *pos = m->pos + (int64_t)rows * m->tk;
        m->pos_at[i] = rows++;
        for (int64_t j = 0; j < m->tk; j++) pos[j] = -1;
        for (int x = 0; x < s->range_count; x++) {
            const dualkv_range *g = &v->ranges[s->range_begin + x];
            for (int64_t j = 0; j < g->len; j++) pos[g->k_start + j] = g->pos + j;
        }
    }
}

int dkv_openModel(dkv_inquiry *q, dkv_err *err) {
    const dkv_explain_in *in = q->in;
    const dualkv_problem *v = &in->l->view;
    const dualkv_dtype t = in->p->dtype;
    int64_t rows = 0;
    for (int32_t i = 0; i < v->n_segments; i++) rows += v->segments[i].q_len > 0;
    if ((double)v->tq * (double)v->tk * v->hq > PAIRS_MAX || v->tq == 0 || v->tk == 0) return 0;
    dkv_model *m = q->model = calloc(1, sizeof *m);
    if (!m) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    *m = (dkv_model){.p = in->p, .l = in->l, .tq = v->tq, .tk = v->tk};
    const size_t pairs = (size_t)(m->tq * m->tk * v->hq), tk = (size_t)m->tk;
    m->q = decode(in->in->q, t, v->tq * v->hq * v->dqk);
    m->k = decode(in->in->k, t, v->tk * v->hkv * v->dqk);
    m->v = decode(in->in->v, t, v->tk * v->hkv * v->dv);
    m->d_o = in->in->d_o ? decode(in->in->d_o, t, v->tq * v->hq * v->dv) : NULL;
    m->d_lse = in->in->d_lse ? decode(in->in->d_lse, DUALKV_FP32, v->tq * v->hq) : NULL;
    m->sink = in->in->sink ? decode(in->in->sink, DUALKV_FP32, v->hq) : NULL;
    m->raw = calloc(pairs, sizeof(double));
    m->dp = calloc(pairs, sizeof(double));
    m->pos = calloc((size_t)rows * tk + 1, sizeof *m->pos);
    m->q_segment = calloc((size_t)v->tq, sizeof(int32_t));
    m->k_segment = calloc(tk, sizeof(int32_t));
    m->pos_at = calloc((size_t)v->n_segments, sizeof(int32_t));
    m->w = calloc(4 * tk, sizeof(double));
    if (!m->q || !m->k || !m->v || !m->raw || !m->dp || !m->pos || !m->q_segment || !m->k_segment ||
        !m->pos_at || !m->w)
        return dkv_fail(err, DKV_EHARNESS, "out of memory");
    m->s = m->w + tk;
    m->g = m->s + tk;
    m->slope = m->g + tk;
    m->o = in->got->o ? in->got->o : in->oracle->truth.o;
    m->lse = in->got->lse ? in->got->lse : in->oracle->truth.lse;
    findPositions(m);
    multiply(m);
    int rc = dkv_allocOutputs(in->l, &m->right, err);
    if (!rc) rc = dkv_allocOutputs(in->l, &m->out, err);
    if (rc) return rc;
    dkv_runModelForward(m, &(dkv_edit){0}, &m->right);
    if (in->p->grad) dkv_runModelBackward(m, &(dkv_edit){0}, -1, -1, &m->right);
    return 0;
}

void dkv_closeModel(dkv_inquiry *q) {
    dkv_model *m = q->model;
    if (!m) return;
    void *all[] = {m->q,  m->k,   m->v,         m->d_o,       m->d_lse,  m->sink, m->raw,
                   m->dp, m->pos, m->q_segment, m->k_segment, m->pos_at, m->w};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    dkv_freeOutputs(&m->right);
    dkv_freeOutputs(&m->out);
    free(m);
    q->model = NULL;
}

/* ---- which keys ---- */

static int64_t roundUp(int64_t n, int64_t tile) { return (n + tile - 1) / tile * tile; }

/* Is j one of the rows behind a range of the segment, up to `tile`? One row: tile 0, behind ancestors alone.
 */
static bool isBeyond(const dkv_model *m, const dualkv_segment *s, int64_t j, int64_t tile) {
    for (int x = 0; x < s->range_count; x++) {
        const dualkv_range *g = &m->l->view.ranges[s->range_begin + x];
        const int64_t end = g->k_start + g->len;
        if (!tile && g->k_start == s->k_start) continue;
        if (j >= end && j < (tile ? g->k_start + roundUp(g->len, tile) : end + 1)) return true;
    }
    return false;
}

/* Offset in the range of a key that the segment sees, and the range's length. */
static int64_t offsetOf(const dkv_model *m, const dualkv_segment *s, int64_t j, int64_t *len) {
    for (int x = 0; x < s->range_count; x++) {
        const dualkv_range *g = &m->l->view.ranges[s->range_begin + x];
        if (j < g->k_start || j >= g->k_start + g->len) continue;
        *len = g->len;
        return j - g->k_start;
    }
    *len = 0;
    return 0;
}

static bool rowsApply(const dualkv_segment *s, dkv_edit_rows rows) {
    return rows == DKV_ROWS_ALL || (rows == DKV_ROWS_RESPONSE) == (s->depth > 0);
}

/* Keys that are none of the segment's. */
static bool seesStranger(const dkv_model *m, const dkv_edit *e, const dualkv_segment *s, int32_t seg,
                         int64_t j) {
    const int32_t of = m->k_segment[j];
    const dualkv_segment *k = &m->l->view.segments[of];
    if (k->group != s->group) return false;
    switch (e->keys) {
    case DKV_KEYS_SIBLINGS: return s->depth > 0 && of < seg;
    case DKV_KEYS_NEIGHBOUR: return s->depth > 0 && of == seg - 1;
    case DKV_KEYS_LATER: return of > seg;
    case DKV_KEYS_UNLIMITED: return of < seg && k->depth < s->depth;
    case DKV_KEYS_BEYOND: return isBeyond(m, s, j, e->by);
    case DKV_KEYS_ONE_BEYOND: return isBeyond(m, s, j, 0);
    default: return false;
    }
}

/* How often row r of segment seg counts key j, and the key's position. */
static double counts(const dkv_model *m, const dkv_edit *e, int32_t seg, int64_t r, int64_t j, int64_t *pos) {
    const dualkv_segment *s = &m->l->view.segments[seg];
    dkv_mask_view v = dkv_viewMask(m->p, seg);
    const bool own = m->k_segment[j] == seg, on = rowsApply(s, e->rows);
    const int32_t segments = m->l->view.n_segments;
    int64_t len, off;
    *pos = m->pos[(int64_t)m->pos_at[seg] * m->tk + j];
    if (*pos < 0) {
        *pos = s->context - (s->k_start - j);
        return on && seesStranger(m, e, s, seg, j);
    }
    if (!on || e->keys == DKV_KEYS_RIGHT) return dkv_pairSees(&v, r, *pos);
    switch (e->keys) {
    case DKV_KEYS_SHIFT: v.context += e->by; break;
    case DKV_KEYS_WINDOW: v.window += e->by; break;
    case DKV_KEYS_SINKS: v.window_sinks = v.window_sinks + e->by > 0 ? v.window_sinks + e->by : 0; break;
    case DKV_KEYS_MASK: v.mask = (int32_t)e->by; break;
    case DKV_KEYS_LOCAL:
        if (own) v.context = 0;
        break;
    case DKV_KEYS_PREFIX_DIAGONAL:
        if (!own) v.context = 0;
        break;
    default: break;
    }
    if (!dkv_pairSees(&v, r, *pos)) return 0;
    off = offsetOf(m, s, j, &len);
    switch (e->keys) {
    case DKV_KEYS_FIRST: return *pos > 0;
    case DKV_KEYS_PREFIX_END: return own || off < len - 1;
    case DKV_KEYS_OWN_FIRST: return !own || off > 0;
    case DKV_KEYS_NO_PREFIX: return own;
    case DKV_KEYS_NO_OWN: return !own || s->depth == 0;
    case DKV_KEYS_PARENT: return own || m->k_segment[j] == s->parent;
    case DKV_KEYS_TAIL: return off < len / e->by * e->by;
    case DKV_KEYS_LAST_TILE: return off < (len - 1) / e->by * e->by;
    case DKV_KEYS_FIRST_TILE: return off >= e->by;
    case DKV_KEYS_TWICE: return own ? 1 : 2;
    case DKV_KEYS_PAIR: return seg != e->by / segments || m->k_segment[j] != e->by % segments;
    default: return 1;
    }
}

double dkv_modelSees(const dkv_model *m, int64_t t, int64_t j) {
    const int32_t seg = m->q_segment[t];
    int64_t pos;
    return sameGroup(m, t, j) ? counts(m, &(dkv_edit){0}, seg, t - m->l->view.segments[seg].q_start, j, &pos)
                              : 0;
}

/* ---- scores ---- */

static int headOf(const dkv_problem *p, int h, int how) {
    const int g = p->hq / p->hkv;
    switch (how) {
    case 1: return h % p->hkv;
    case 2: return p->hkv - 1 - h / g;
    case 3: return 0;
    case 4: return (h / g + 1) % p->hkv;
    default: return h / g;
    }
}

static double biasOf(const dkv_model *m, const dkv_edit *e, int h, int32_t seg, int64_t r, int64_t pos,
                     bool own) {
    const dkv_problem *p = m->p;
    const int g = p->hq / p->hkv;
    if (!p->alibi || e->alibi == 1) return 0;
    const double slope = m->l->alibi_slopes[e->alibi == 2 ? h / g : e->alibi == 5 ? (h + 1) % p->hq : h];
    int64_t d = m->l->view.segments[seg].context + r - pos;
    if (e->alibi == 4 && own) d -= m->l->view.segments[seg].context;
    return -slope * (double)(e->alibi == 3 ? d : d < 0 ? -d : d);
}

/* Scores and multiplicities of a row; m->slope: derivative by the scaled product. Returns the largest score
 * that counts. */
static double scoreRow(dkv_model *m, const dkv_edit *e, int64_t t, int h) {
    const dkv_problem *p = m->p;
    const int32_t seg = m->q_segment[t];
    const int64_t r = t - m->l->view.segments[seg].q_start;
    const double scale = p->scale * (e->scale != 0 ? e->scale : 1), cap = e->softcap == 1 ? 0 : p->softcap;
    const double *raw = m->raw + (h * m->tq + t) * m->tk;
    const int kh = headOf(p, h, e->k_heads);
    double max = -INFINITY;
    for (int64_t j = 0; j < m->tk; j++) {
        int64_t pos = 0;
        m->w[j] = sameGroup(m, t, j) ? counts(m, e, seg, r, j, &pos) : 0;
        if (m->given && e->keys == DKV_KEYS_GIVEN) m->w[j] = m->given[(h * m->tq + t) * m->tk + j];
        if (m->w[j] == 0) continue;
        double s = e->k_heads
                       ? dot(m->q + (t * p->hq + h) * p->dqk, m->k + (j * p->hkv + kh) * p->dqk, p->dqk)
                       : raw[j];
        s *= scale;
        m->slope[j] = 1;
        if (cap > 0) {
            const double th = tanh(s / cap);
            m->slope[j] = e->softcap == 2 ? 1 : 1 - th * th;
            s = cap * th;
        }
        m->s[j] = s + biasOf(m, e, h, seg, r, pos, m->k_segment[j] == seg);
        if (m->s[j] > max) max = m->s[j];
    }
    return max;
}

static double sinkOf(const dkv_model *m, const dkv_edit *e, int h) {
    if (!m->sink || e->sink == 1) return -INFINITY;
    return e->sink == 3 ? m->sink[h] * m->p->scale : e->sink == 2 ? m->sink[h] + log(2) : m->sink[h];
}

static double lseOf(const dkv_model *m, const dkv_edit *e, double max, double sum) {
    const double lse = max + log(sum);
    switch (e->lse) {
    case 1: return lse / log(2);
    case 2: return lse * log(2);
    case 3: return log(sum);
    case 4: return max;
    case 5: return lse / m->p->scale;
    default: return lse;
    }
}

void dkv_runModelForward(dkv_model *m, const dkv_edit *e, const dkv_outputs *out) {
    const dkv_problem *p = m->p;
    for (int h = 0; h < p->hq; h++) {
        const int vh = headOf(p, h, e->v_heads);
        for (int64_t t = 0; t < m->tq; t++) {
            double *o = out->o + (t * p->hq + h) * p->dv, sum = 0;
            const double sink = sinkOf(m, e, h), keys = scoreRow(m, e, t, h), max = fmax(keys, sink);
            for (int c = 0; c < p->dv; c++) o[c] = 0;
            out->lse[h * m->tq + t] = max;
            if (max == -INFINITY) continue;
            for (int64_t j = 0; j < m->tk; j++) {
                if (m->w[j] == 0) continue;
                const double x = m->w[j] * exp(m->s[j] - max), *v = m->v + (j * p->hkv + vh) * p->dv;
                sum += x;
                for (int c = 0; c < p->dv; c++) o[c] += x * v[c];
            }
            sum += exp(sink - max);
            for (int c = 0; c < p->dv; c++) o[c] /= sum;
            out->lse[h * m->tq + t] = lseOf(m, e, max, sum);
        }
    }
}

static double deltaOf(const dkv_model *m, const dkv_edit *e, int64_t t, int h) {
    const dkv_problem *p = m->p;
    if (e->delta == 1) return 0;
    if (e->delta == 3 && h > 0) h--;
    if (e->delta == 4 && h + 1 < p->hq) h++;
    if (e->delta == 5 && t > 0) t--;
    if (e->delta == 6 && t + 1 < m->tq) t++;
    const double d = dot(m->d_o + (t * p->hq + h) * p->dv, m->o + (t * p->hq + h) * p->dv, p->dv);
    return e->delta == 2 ? -d : e->delta == 7 ? 2 * d : d;
}

static void backwardRow(dkv_model *m, const dkv_edit *e, int64_t t, int h, bool keys,
                        const dkv_outputs *out) {
    const dkv_problem *p = m->p;
    const int64_t row = t * p->hq + h;
    const int kh = headOf(p, h, e->k_heads), vh = headOf(p, h, e->v_heads), own = h / (p->hq / p->hkv);
    const double *dp = m->dp + (h * m->tq + t) * m->tk, *d_o = m->d_o + row * p->dv, *q = m->q + row * p->dqk;
    const double scale = p->scale * (e->scale != 0 ? e->scale : 1),
                 d_lse = m->d_lse ? m->d_lse[h * m->tq + t] * (1 + e->d_lse) : 0;
    const double delta = deltaOf(m, e, t, h) - d_lse;
    double lse = m->lse[h * m->tq + t];
    lse *= e->base == 1 ? log(2) : e->base == 2 ? 1 / log(2) : 1;
    if (lse == -INFINITY) lse = 0;
    scoreRow(m, e, t, h);
    for (int64_t j = 0; j < m->tk; j++) {
        if (m->w[j] == 0) continue;
        const double x = m->w[j] * exp(m->s[j] - lse);
        const double z = e->v_heads ? dot(d_o, m->v + (j * p->hkv + vh) * p->dv, p->dv) : dp[j];
        const double ds = (e->p_for_ds == 1   ? 1
                           : e->p_for_ds == 2 ? x * x
                                              : x) *
                          (z - delta) * m->slope[j] * scale;
        const double *k = m->k + (j * p->hkv + kh) * p->dqk;
        double *dq = out->dq + row * p->dqk;
        for (int c = 0; c < p->dqk; c++) dq[c] += ds * k[c];
        if (!keys) continue;
        double *dk = out->dk + (j * p->hkv + own) * p->dqk, *dv = out->dv + (j * p->hkv + own) * p->dv;
        for (int c = 0; c < p->dqk; c++) dk[c] += ds * q[c];
        for (int c = 0; c < p->dv; c++) dv[c] += x * d_o[c];
    }
    if (out->dsink && keys) out->dsink[h] -= exp(sinkOf(m, e, h) - lse) * delta;
}

void dkv_runModelBackward(dkv_model *m, const dkv_edit *e, int32_t seg, int head, const dkv_outputs *out) {
    const dkv_problem *p = m->p;
    memset(out->dq, 0, (size_t)(m->tq * p->hq * p->dqk) * sizeof(double));
    memset(out->dk, 0, (size_t)(m->tk * p->hkv * p->dqk) * sizeof(double));
    memset(out->dv, 0, (size_t)(m->tk * p->hkv * p->dv) * sizeof(double));
    if (out->dsink) memset(out->dsink, 0, (size_t)p->hq * sizeof(double));
    for (int h = 0; h < p->hq; h++)
        for (int64_t t = 0; t < m->tq; t++)
            backwardRow(m, e, t, h, (seg < 0 || m->q_segment[t] == seg) && (head < 0 || h == head), out);
}
