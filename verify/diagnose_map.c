/* Which rows of which tensor are off, and what they have in common. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/mask.h"
#include "diagnose_impl.h"
#include "diagnose_set.h"

enum { FEW = 200 }; /* of so many rows one that is off by its noise says nothing */

bool dkv_hasTime(const dkv_diag *d, double share) {
    const double limit = d->o->seconds > 0 ? d->o->seconds : 30;
    return !dkv_stopRequested && dkv_now() - d->start < share * limit;
}

/* Backward of the kernel's own O and LSE, in double. */
static int makeOwn(dkv_diag *d, dkv_err *err) {
    dkv_case *c = d->c;
    int64_t n[DKV_N_OUTPUTS];
    const dkv_ref_options ref = {.threads = c->options->threads};
    int rc = dkv_allocOutputs(&c->packed, &d->own, err);
    d->has_own = !rc;
    if (rc) return rc;
    dkv_countOutputs(&c->packed, n);
    for (int id = DKV_O; id <= DKV_LSE; id++) {
        const bool absent = c->kernel.d.absent >> id & 1;
        memcpy(dkv_outputAt(&d->own, (dkv_tensor_id)id),
               dkv_outputAt(absent ? &c->oracle.truth : &c->got, (dkv_tensor_id)id),
               (size_t)n[id] * sizeof(double));
    }
    return c->p->grad ? dkv_refBlockedBackward(c->p, &c->packed, &c->in, &ref, &d->own, err) : 0;
}

/* The bound was made for the true LSE and O. Where the kernel's LSE is smaller its P are larger, and so is
 * their rounding: per head of the tensor, the largest factor. */
static int widenBounds(dkv_diag *d, dkv_tensor_id id, dkv_err *err) {
    const dualkv_problem *v = &d->c->packed.view;
    dkv_map *m = &d->map[id];
    m->widen = calloc((size_t)m->heads + 1, sizeof *m->widen);
    if (!m->widen) return dkv_fail(err, DKV_EHARNESS, "out of memory for a diagnosis");
    for (int64_t h = 0; h < v->hq; h++) {
        double *w = &m->widen[m->keys ? h / (v->hq / v->hkv) : h];
        *w = fmax(*w, 1);
        for (int64_t t = 0; t < v->tq; t++) {
            double by = d->c->oracle.truth.lse[h * v->tq + t] - d->own.lse[h * v->tq + t];
            if (isfinite(by)) *w = fmax(*w, exp(fmin(by, 300)));
        }
    }
    return 0;
}

/* One row: its largest err/bound, its noise, whether it is off. */
static void judgeRow(dkv_diag *d, dkv_tensor_id id, int64_t row, bool strict) {
    const dkv_oracle *o = &d->c->oracle;
    const double *twin = o->has_twin[id] ? dkv_outputAt(&o->twin, id) : NULL,
                 *sigma2 = dkv_outputAt(&o->sigma2, id);
    dkv_map *m = &d->map[id];
    const double widen = m->widen ? m->widen[row % m->heads] : 1;
    double most = 0, z2 = 0;
    int64_t n = 0, judged = 0;
    uint8_t off = 0;
    for (int64_t c = 0; c < m->dim; c++) {
        int64_t at = dkv_mapAt(m, id, row, c);
        double got = m->got[at], want = m->want[at], bound = m->bound[at];
        if (isnan(want) || bound == DKV_UNCLAIMED || isnan(bound)) continue;
        judged++;
        const bool same = got == want, wrong = !same && !(fabs(got - want) <= bound * widen);
        if (!same)
            most = fmax(most, isfinite(got) && isfinite(want) ? fabs(got - want) / (bound * widen)
                                                              : (double)INFINITY);
        if (wrong) m->dims[c]++;
        if (wrong) off = !isfinite(got) && isfinite(want) ? 3 : off < 2 ? 2 : off;
        if (!twin || !isfinite(twin[at]) || !(sigma2[at] > 0) || !isfinite(got)) continue;
        z2 += (got - twin[at]) * (got - twin[at]) / sigma2[at];
        n++;
    }
    m->n_judged += judged > 0;
    m->size[row] = (float)fmin(most, 3e38);
    m->noise[row] = n ? (float)fmin(sqrt(z2 / (double)n), 3e38) : NAN;
    const bool noisy = d->known && n && m->noise[row] > DKV_OFF_NOISE;
    if (off == 2 && strict && d->known && n && !noisy) off = 0;
    if (!off && noisy) off = 1;
    m->off[row] = off;
    m->n_off += off > 0;
    m->n_outside += off > 1;
    m->n_nonfinite += off == 3;
}

static int makeMap(dkv_diag *d, dkv_tensor_id id, dkv_err *err) {
    const dkv_case *c = d->c;
    const dkv_vectors g = dkv_vectorsOf(&c->packed.view, id);
    dkv_map *m = &d->map[id];
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(&c->packed, n);
    m->present = n[id] > 0 && dkv_outputAt(&c->got, id) && !(c->kernel.d.absent >> id & 1);
    if (!m->present) return 0;
    m->keys = g.keys;
    m->tokens = g.rows;
    m->heads = g.heads;
    m->dim = g.d;
    m->got = dkv_outputAt(&c->got, id);
    m->want = dkv_outputAt(id >= DKV_DQ ? &d->own : &c->oracle.truth, id);
    m->bound = dkv_outputAt(&c->oracle.bound, id);
    m->base = d->known && c->oracle.has_twin[id] ? dkv_outputAt(&c->oracle.twin, id) : m->want;
    const size_t rows = (size_t)(m->tokens * m->heads);
    m->off = calloc(rows + 1, 1);
    m->size = calloc(rows + 1, sizeof *m->size);
    m->noise = calloc(rows + 1, sizeof *m->noise);
    if (!m->off || !m->size || !m->noise) return dkv_fail(err, DKV_EHARNESS, "out of memory for a diagnosis");
    const bool strict = id >= DKV_DQ && (dkv_isOff(d, DKV_O) || dkv_isOff(d, DKV_LSE));
    int rc = strict ? widenBounds(d, id, err) : 0;
    for (int64_t i = 0; i < (int64_t)rows && !rc; i++) judgeRow(d, id, i, strict);
    /* Noise that strayed; or, where O is far off, rounding that is not bounded so well. */
    if ((strict || !m->n_outside) && m->n_off * FEW < (int64_t)rows) {
        memset(m->off, 0, rows);
        m->n_off = m->n_outside = m->n_nonfinite = 0;
    }
    return rc;
}

int dkv_makeMaps(dkv_diag *d, dkv_err *err) {
    const dkv_result *r = d->c->result;
    int rc = makeOwn(d, err);
    d->known = r->declared || r->profile[0];
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++) rc = makeMap(d, (dkv_tensor_id)id, err);
    return rc;
}

void dkv_freeMaps(dkv_diag *d) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        free(d->map[id].off);
        free(d->map[id].size);
        free(d->map[id].noise);
        free(d->map[id].widen);
    }
    if (d->has_own) dkv_freeOutputs(&d->own);
    memset(d->map, 0, sizeof d->map);
    d->has_own = false;
}

/* Marks each token with a row that is off (of `only`, if given: [tokens * heads]). */
static void dkv_offTokens(const dkv_map *m, const uint8_t *only, uint8_t *tokens) {
    for (int64_t t = 0; t < m->tokens; t++) {
        tokens[t] = 0;
        for (int64_t h = 0; h < m->heads; h++) tokens[t] |= (only ? only : m->off)[t * m->heads + h] > 0;
    }
}

/* ---- in words ---- */

/* How a row's error goes with the number of keys that it may see: slope of log against log over its rows,
 * and the probability of so large a correlation by chance (Fisher's transform). */
static void fitGrowth(const dkv_diag *d, dkv_tensor_id id, dkv_tensor_where *w) {
    const dkv_map *m = &d->map[id];
    const dualkv_problem *v = &d->c->packed.view;
    double n = 0, sx = 0, sy = 0, sxx = 0, syy = 0, sxy = 0;
    w->growth = w->growth_p = NAN;
    if (m->keys || id == DKV_DSINK) return;
    for (int32_t i = 0; i < v->n_segments; i++)
        for (int64_t r = 0; r < v->segments[i].q_len; r++) {
            double e = 0;
            for (int64_t h = 0; h < m->heads; h++) {
                int64_t row = (v->segments[i].q_start + r) * m->heads + h;
                e += m->off[row] ? (isnan(m->noise[row]) ? m->size[row] : m->noise[row]) : 0;
            }
            if (!(e > 0) || !isfinite(e)) continue;
            double x = log((double)(v->segments[i].context + r + 1)), y = log(e);
            n++;
            sx += x, sy += y, sxx += x * x, syy += y * y, sxy += x * y;
        }
    double vx = sxx - sx * sx / n, vy = syy - sy * sy / n, cov = sxy - sx * sy / n;
    if (n < 16 || !(vx > 1e-9 * n) || !(vy > 1e-12 * n)) return;
    double corr = cov / sqrt(vx * vy);
    if (fabs(corr) >= 1) return;
    w->growth = cov / vx;
    w->growth_p = erfc(fabs(atanh(corr)) * sqrt(n - 3) / sqrt(2));
}

/* Dims in which rows that are off are beyond the bound; or, where these are few, in which their noise is. */
static void markDims(const dkv_diag *d, dkv_tensor_id id, uint8_t *dims) {
    const dkv_map *m = &d->map[id];
    const dkv_oracle *o = &d->c->oracle;
    /* Of a forward that is wrong, the twin of backward is not the kernel's. */
    const bool given = id >= DKV_DQ && (dkv_isOff(d, DKV_O) || dkv_isOff(d, DKV_LSE));
    const double *twin = dkv_outputAt(&o->twin, id), *sigma2 = dkv_outputAt(&o->sigma2, id);
    int64_t most = 0;
    for (int64_t c = 0; c < m->dim; c++) most = m->dims[c] > most ? m->dims[c] : most;
    for (int64_t c = 0; c < m->dim; c++) {
        double z2 = 0, n = 0;
        dims[c] = m->dims[c] * 20 > most;
        if (dims[c] || !o->has_twin[id] || !d->known || given) continue;
        for (int64_t row = 0; row < m->tokens * m->heads; row++) {
            const int64_t at = dkv_mapAt(m, id, row, c);
            if (!m->off[row] || !isfinite(m->got[at]) || !isfinite(twin[at]) || !(sigma2[at] > 0)) continue;
            z2 += (m->got[at] - twin[at]) * (m->got[at] - twin[at]) / sigma2[at];
            n++;
        }
        dims[c] = n > 0 && z2 > 4 * n; /* twice what rounding leaves */
    }
}

static void describeTensor(dkv_diag *d, dkv_tensor_id id) {
    const dkv_map *m = &d->map[id];
    const dkv_judgement *j = &d->c->result->tensor[id];
    const dualkv_problem *v = &d->c->packed.view;
    dkv_tensor_where *w = &d->out->tensor[id];
    dkv_row_words words;
    memset(w, 0, sizeof *w);
    w->present = m->present;
    w->growth = w->growth_p = w->noise = w->gain = w->mean = w->scaled = w->scaled_share = NAN;
    if (!m->present) return;
    w->given_own = id >= DKV_DQ;
    w->rows = m->tokens * m->heads;
    w->off = m->n_off;
    w->outside = m->n_outside;
    w->nonfinite = m->n_nonfinite;
    for (int64_t i = 0; i < w->rows; i++) w->worst = fmax(w->worst, (double)m->size[i]);
    if (j->twin) {
        w->noise = j->all.rms_z;
        w->gain = j->all.gain;
        w->mean = j->all.mean_z;
    }
    uint8_t *tokens = calloc((size_t)m->tokens + 1, 1), heads[DKV_HEADS_MAX] = {0}, dims[DKV_DIM_MAX] = {0};
    for (int64_t i = 0; i < w->rows; i++) heads[i % m->heads] |= m->off[i] > 0;
    markDims(d, id, dims);
    if (tokens && m->n_off) {
        dkv_offTokens(m, NULL, tokens);
        if (id != DKV_DSINK) dkv_describeRows(&d->c->packed, m->keys, tokens, &words);
        if (id != DKV_DSINK) {
            snprintf(w->segments, sizeof w->segments, "%s", words.segments);
            snprintf(w->rows_words, sizeof w->rows_words, "%s", words.rows);
            snprintf(w->pattern, sizeof w->pattern, "%s", words.pattern);
        }
        const bool keys = m->keys;
        dkv_describeItems(heads, m->heads, keys ? 0 : v->hq / v->hkv, keys ? "KV head" : "head",
                          keys ? "KV heads" : "heads", w->heads, sizeof w->heads);
        if (m->dim > 1 && m->n_outside)
            dkv_describeItems(dims, m->dim, 0, "dim", "dims", w->dims, sizeof w->dims);
        fitGrowth(d, id, w);
        w->scaled_share = dkv_fitFactor(d, id, &w->scaled);
    }
    free(tokens);
}

void dkv_describeMaps(dkv_diag *d) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) describeTensor(d, (dkv_tensor_id)id);
}
