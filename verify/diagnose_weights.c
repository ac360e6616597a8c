/* The weights that the kernel gives to keys. Forward: V is one-hot, key j in dim j mod Dv (moved on by one
 * for each KV head, so that another head's V shows), and O is the weight. Backward: dO is one-hot, a row in
 * a dim, and dV is the weight. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "../ref/tiles.h"
#include "diagnose_impl.h"

#define CELLS ((int64_t)1 << 23) /* weights kept */
#define RUNS 48                  /* of the kernel, at most */
#define TELLS 3.0                /* a weight is worth a look where it is so many bounds */
#define SIGMA 3.0   /* a bound is taken for so many standard deviations where many weights are averaged */
#define ENOUGH 4.0  /* standard deviations that an average must be off */
#define OTHERS 0.2  /* share of the keys that may be off beside those that are missing or must not be seen */
#define COMMON 0.02 /* share of the weights that must agree with LSE for LSE to be right */

typedef struct reading {
    dkv_diag *d;
    bool backward;
    int64_t n_rows, n_keys, *rows, *keys; /* row: t * hq + h; packed keys, spread over the runs */
    int64_t *order;                       /* [n_keys] their places, by key */
    float *weight, *bound;                /* [n_rows, n_keys]; bound < 0: not read */
} reading;

/* ---- which rows, which keys ---- */

static int chooseRows(reading *x, const uint8_t *off, int64_t most) {
    const dualkv_problem *v = &x->d->c->packed.view;
    int64_t all = v->tq * v->hq, good = 0, seen = 0;
    for (int64_t i = 0; i < all; i++) good += off[i] > 0;
    x->rows = calloc((size_t)(good < most ? good : most) + 1, sizeof *x->rows);
    for (int64_t i = 0; i < all && x->rows; i++) {
        if (!off[i]) continue;
        if (x->n_rows < most && seen * most / good >= x->n_rows) x->rows[x->n_rows++] = i;
        seen++;
    }
    return x->rows ? 0 : -1;
}

/* All keys, or those beside the edges of segments and tiles and others spread evenly. */
static int chooseKeys(reading *x, int64_t most) {
    const dualkv_problem *v = &x->d->c->packed.view;
    uint8_t *use = calloc((size_t)v->tk + 1, 1);
    int64_t n = 0;
    x->keys = calloc((size_t)v->tk + 1, sizeof *x->keys);
    for (int edge = 0; use && x->keys && edge < 4 && v->tk > most; edge++)
        for (int32_t i = 0; i < v->n_segments; i++)
            for (int64_t j = 0; j < v->segments[i].k_len && n < most / 2; j++) {
                const int64_t len = v->segments[i].k_len, t = v->segments[i].k_start + j;
                const bool is = edge == 0   ? j == 0 || j == len - 1
                                : edge == 1 ? j == 1 || j == len - 2
                                : edge == 2 ? j % 64 == 0 || j % 64 == 63
                                            : j % 16 == 0 || j % 16 == 15;
                n += is && !use[t];
                use[t] |= is;
            }
    for (int64_t t = 0; use && x->keys && t < v->tk; t++)
        if (v->tk <= most || use[t] || t * (most - n) / v->tk != (t + 1) * (most - n) / v->tk)
            x->keys[x->n_keys++] = t;
    free(use);
    return x->keys ? 0 : -1;
}

/* So that each run, of `each` keys, has keys from everywhere: there may be time for few. */
static int spreadKeys(reading *x, int64_t each) {
    const int64_t runs = (x->n_keys + each - 1) / each;
    int64_t *spread = calloc((size_t)x->n_keys + 1, sizeof *spread), at = 0;
    x->order = calloc((size_t)x->n_keys + 1, sizeof *x->order);
    for (int64_t i = 0; i < runs && spread && x->order; i++)
        for (int64_t k = i; k < x->n_keys; k += runs) {
            x->order[k] = at;
            spread[at++] = x->keys[k];
        }
    if (!spread || !x->order) {
        free(spread);
        return -1;
    }
    free(x->keys);
    x->keys = spread;
    return 0;
}

/* ---- the runs ---- */

static void putOne(void *to, dualkv_dtype t, int64_t at) {
    const double one = 1;
    dkv_encodeArray(&one, t, 1, (char *)to + (size_t)at * dkv_dtypeSize(t));
}

/* Problem and inputs of a run, all but V (forward) or dO (backward) the case's own. */
static int beginRun(const reading *x, dkv_derived *e) {
    const dkv_case *c = x->d->c;
    const dualkv_problem *v = &c->packed.view;
    const size_t elt = dkv_dtypeSize(c->p->dtype);
    dkv_problem p = {0};
    dkv_err err = {0};
    if (dkv_deriveProblem(c, &p, &err)) return -1;
    if (!x->backward) p.grad = p.dlse = false;
    if (dkv_beginDerived(c, &p, e, &err)) return -1;
    memcpy(e->c.in.q, c->in.q, elt * (size_t)v->tq * (size_t)v->hq * (size_t)v->dqk);
    memcpy(e->c.in.k, c->in.k, elt * (size_t)v->tk * (size_t)v->hkv * (size_t)v->dqk);
    if (x->backward) memcpy(e->c.in.v, c->in.v, elt * (size_t)v->tk * (size_t)v->hkv * (size_t)v->dv);
    return 0;
}

static bool launch(const reading *x, dkv_derived *e) {
    dkv_finding f = {0};
    dkv_case *c = x->d->c;
    const dkv_status kept = c->result->status;
    bool ran = dkv_runDerived(c, e, x->backward ? "one-hot dO" : "one-hot V", &f);
    c->result->status = kept;
    x->d->out->probes++;
    return ran || (e->c.has_oracle && e->c.has_got);
}

static bool readForward(reading *x, int64_t first) {
    const dualkv_problem *v = &x->d->c->packed.view;
    const int64_t n = x->n_keys - first < v->dv ? x->n_keys - first : v->dv, g = v->hq / v->hkv;
    dkv_derived e = {0};
    bool ran = !beginRun(x, &e);
    for (int64_t k = 0; k < n && ran; k++)
        for (int64_t h = 0; h < v->hkv; h++)
            putOne(e.c.in.v, x->d->c->p->dtype, (x->keys[first + k] * v->hkv + h) * v->dv + (k + h) % v->dv);
    ran = ran && launch(x, &e);
    for (int64_t i = 0; i < x->n_rows && ran; i++)
        for (int64_t k = 0; k < n; k++) {
            int64_t at = x->rows[i] * v->dv + (k + x->rows[i] % v->hq / g) % v->dv;
            x->weight[i * x->n_keys + first + k] = (float)e.c.got.o[at];
            x->bound[i * x->n_keys + first + k] = (float)e.c.oracle.bound.o[at];
        }
    dkv_endDerived(&e);
    return ran;
}

/* Each KV head has Dv dims for rows of its query heads. *next [hkv]: where its rows begin in x->rows. */
static bool readBackward(reading *x, int64_t *next) {
    const dualkv_problem *v = &x->d->c->packed.view;
    const int64_t g = v->hq / v->hkv;
    int64_t *row = calloc((size_t)(v->hkv * v->dv) + 1, sizeof *row);
    dkv_derived e = {0};
    bool ran = row && !beginRun(x, &e), any = false;
    for (int64_t h = 0; h < v->hkv && ran; h++)
        for (int64_t k = 0; k < v->dv; k++) {
            while (next[h] < x->n_rows && x->rows[next[h]] % v->hq / g != h) next[h]++;
            row[h * v->dv + k] = next[h] < x->n_rows ? next[h] : -1;
            if (next[h] >= x->n_rows) continue;
            any = true;
            putOne(e.c.in.d_o, x->d->c->p->dtype, x->rows[next[h]++] * v->dv + k);
        }
    ran = ran && any && launch(x, &e);
    for (int64_t at = 0; at < v->hkv * v->dv && ran; at++)
        for (int64_t j = 0; j < x->n_keys && row[at] >= 0; j++) {
            int64_t from = (x->keys[j] * v->hkv + at / v->dv) * v->dv + at % v->dv;
            x->weight[row[at] * x->n_keys + j] = (float)e.c.got.dv[from];
            x->bound[row[at] * x->n_keys + j] = (float)e.c.oracle.bound.dv[from];
        }
    if (row) dkv_endDerived(&e);
    free(row);
    return ran;
}

static bool readAll(reading *x, const uint8_t *off) {
    const dualkv_problem *v = &x->d->c->packed.view;
    bool any = false;
    if (chooseKeys(x, x->backward ? 4096 : RUNS * (int64_t)v->dv) || !x->n_keys) return false;
    if (spreadKeys(x, x->backward ? x->n_keys : v->dv)) return false;
    const int64_t room = CELLS / x->n_keys, most = x->backward ? 8 * (int64_t)v->dv * v->hkv : 4096;
    if (chooseRows(x, off, room < most ? room : most) || !x->n_rows) return false;
    const size_t n = (size_t)(x->n_rows * x->n_keys);
    x->weight = malloc(n * sizeof *x->weight);
    x->bound = malloc(n * sizeof *x->bound);
    int64_t *next = calloc((size_t)v->hkv + 1, sizeof *next);
    if (x->weight && x->bound && next) {
        for (size_t i = 0; i < n; i++) x->bound[i] = -1;
        for (int run = 0; run < RUNS && (run == 0 ? !dkv_stopRequested : dkv_hasTime(x->d, x->backward ? 1 : 0.6)); run++) {
            if (!x->backward && (int64_t)run * v->dv >= x->n_keys) break;
            if (!(x->backward ? readBackward(x, next) : readForward(x, (int64_t)run * v->dv))) break;
            any = true;
        }
    }
    free(next);
    return any;
}

/* ---- one row ---- */

typedef struct key_weight {
    double ratio,
        bound; /* logarithm of (weight over right weight), with the kernel's LSE put right; its bound */
    double s;
    int64_t pos;
} key_weight;

typedef struct row_view {
    const dkv_pairs *x;
    int64_t at, n; /* position of the row; informative keys */
    bool response;
    key_weight *key;
    double lse_error, widen; /* widen: of bounds, where the kernel's own LSE makes the weights larger */
    int64_t missing, extra;
    bool nan;
    dkv_weights *out;
    int64_t *low,
        *high; /* [3] of the wrong keys: distance to the row, offset in the range, offset from its end */
    double *lost;  /* [dqk] what the missing keys add to dQ, without the scale */
} row_view;

static void noteKey(row_view *w, int64_t pos, bool seen) {
    const dkv_pairs *x = w->x;
    w->out->at[w->response][pos < 0 ? 2 : pos < x->context]++;
    w->out->future += !seen && pos > w->at;
    const int64_t start = pos >= x->context ? x->context : 0, end = pos >= x->context ? x->n : x->context;
    const int64_t is[3] = {pos < 0 ? INT64_MIN / 2 : pos - w->at, pos < 0 ? -1 : pos - start,
                           pos < 0 ? -1 : end - 1 - pos};
    for (int i = 0; i < 3; i++) {
        if (is[i] < w->low[i]) w->low[i] = is[i];
        if (is[i] > w->high[i]) w->high[i] = is[i];
    }
}

/* Sorts the row's keys: those it must not see, missing, informative. */
static void sortKeys(const reading *r, int64_t i, const int64_t *place, row_view *w) {
    const dkv_pairs *x = w->x;
    for (int64_t at = 0; at < r->n_keys; at++) {
        const int64_t k = r->order[at];
        const double weight = r->weight[i * r->n_keys + k], bound = w->widen * r->bound[i * r->n_keys + k];
        const int64_t pos = place[r->keys[k]];
        if (!(bound >= 0) || !isfinite(bound)) continue;
        if (isnan(weight)) w->nan |= pos < 0 || !isnan(x->p[pos]);
        const double right = pos >= 0 && x->sees[pos] ? x->p[pos] : 0, own = right * exp(-w->lse_error);
        if (isnan(weight) || isnan(right)) continue;
        if (right == 0) {
            if (!(fabs(weight) <= bound) && !(pos >= 0 && x->sees[pos])) {
                w->extra++;
                noteKey(w, pos, false);
            }
        } else if (weight < 0.05 * own && own > TELLS * bound) {
            w->missing++;
            noteKey(w, pos, true);
            const int64_t dqk = x->d->c->packed.view.dqk;
            for (int64_t c = 0; c < dqk; c++) w->lost[c] += x->ds[pos] * x->k[pos * dqk + c];
        } else if (weight > TELLS * bound || (right > TELLS * bound && weight > 0)) {
            w->key[w->n++] =
                (key_weight){log(weight / right) + w->lse_error, bound / fmin(weight, right), x->s[pos], pos};
        }
    }
}

static int byRatio(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double medianRatio(const row_view *w) {
    double *all = malloc((size_t)(w->n + 1) * sizeof *all), m;
    if (!all) return 0;
    for (int64_t i = 0; i < w->n; i++) all[i] = w->key[i].ratio;
    qsort(all, (size_t)w->n, sizeof *all, byRatio);
    m = w->n ? all[w->n / 2] : 0;
    free(all);
    return m;
}

/* Is the ratio the same number within each group (range, tile), and is it off in most keys of a group if in
 * any? tile 0: groups are ranges. */
static bool isPiecewise(const row_view *w, int64_t tile, double base) {
    int64_t group = -1, n_groups = 0, keys = 0, off = 0;
    double low = 0, high = 0;
    for (int64_t i = 0; i <= w->n; i++) {
        const key_weight *k = &w->key[i < w->n ? i : 0];
        const bool own = k->pos >= w->x->context;
        const int64_t offset = own ? k->pos - w->x->context : k->pos;
        const int64_t is = i < w->n ? 2 * (tile ? offset / tile : 0) + own : -2;
        if (is != group) {
            if (off && 2 * off < keys) return false;
            group = is;
            n_groups += i < w->n;
            keys = off = 0;
            low = -INFINITY;
            high = INFINITY;
        }
        if (i == w->n) break;
        keys++;
        off += fabs(k->ratio - base) > k->bound;
        low = fmax(low, k->ratio - k->bound);
        high = fmin(high, k->ratio + k->bound);
        if (low > high) return false;
    }
    return n_groups * 3 <= w->n;
}

static void fitLine(const row_view *w, double base) {
    double n = 0, sx = 0, sy = 0, sxx = 0, syy = 0, sxy = 0;
    for (int64_t i = 0; i < w->n; i++) {
        const key_weight *k = &w->key[i];
        if (fabs(k->ratio - base) <= k->bound) continue;
        n++;
        sx += k->s, sy += k->ratio, sxx += k->s * k->s, syy += k->ratio * k->ratio, sxy += k->s * k->ratio;
    }
    double vx = sxx - sx * sx / n, vy = syy - sy * sy / n, cov = sxy - sx * sy / n;
    if (n < 4 || !(vx > 0) || !(vy > 0)) return;
    w->out->linear += cov * cov / (vx * vy);
    w->out->n_linear++;
}

/* Keys whose ratio is `base`, within the bound. */
static int64_t countAt(const row_view *w, double base) {
    int64_t n = 0;
    for (int64_t i = 0; i < w->n; i++) n += fabs(w->key[i].ratio - base) <= w->key[i].bound;
    return n;
}

/* Weights as they must be, whatever LSE is: right, unless together they go with the score, or share a
 * factor. */
static dkv_weight_kind judgeMean(row_view *w) {
    double mean = 0, noise = 0, s = 0, up = 0, across = 0, slope_noise = 0;
    for (int64_t i = 0; i < w->n; i++) {
        mean += w->key[i].ratio - w->lse_error;
        noise += w->key[i].bound * w->key[i].bound / (SIGMA * SIGMA);
        s += w->key[i].s / (double)w->n;
    }
    for (int64_t i = 0; i < w->n; i++) {
        const double by = w->key[i].s - s, sigma = w->key[i].bound / SIGMA;
        up += by * (w->key[i].ratio - w->lse_error - mean / (double)w->n);
        across += by * by;
        slope_noise += by * by * sigma * sigma;
    }
    if (w->n > 3 && across > 0 && fabs(up) > ENOUGH * sqrt(slope_noise)) {
        w->out->linear++;
        w->out->n_linear++;
        for (int64_t i = 0; i < w->n; i++) noteKey(w, w->key[i].pos, true);
        return DKV_W_SCORES;
    }
    return fabs(mean) > ENOUGH * sqrt(noise) ? DKV_W_FACTOR : DKV_W_RIGHT;
}

/* Keys are missing or must not be seen; the others are off by nothing or by one number. Is that what a
 * softmax without them gives (their ratio is that of LSE), or are the others as if nothing were missing (P V
 * left them out)? */
static dkv_weight_kind judgeLost(row_view *w) {
    const int64_t whole = countAt(w, w->lse_error), summed = countAt(w, 0);
    w->out->lost[w->response]++;
    w->out->unsummed += whole > summed && whole * 10 >= w->n * 9;
    w->out->lse_differs[w->response] += w->n >= 4 && summed * 10 < w->n;
    return w->extra >= w->missing ? DKV_W_EXTRA : DKV_W_MISSING;
}

static dkv_weight_kind judgeWeights(row_view *w) {
    const int64_t lost = w->missing + w->extra;
    if (w->nan) return DKV_W_NAN;
    if (!lost && countAt(w, w->lse_error) >= w->n) return judgeMean(w);
    const double base = (double)countAt(w, 0) >= COMMON * (double)w->n ? 0 : medianRatio(w);
    const int64_t deviating = w->n - countAt(w, base);
    if (!lost && !deviating) return DKV_W_FACTOR;
    if (lost && (double)deviating <= OTHERS * (double)w->n) return judgeLost(w);
    for (int64_t i = 0; i < w->n; i++)
        if (fabs(w->key[i].ratio - base) > w->key[i].bound) noteKey(w, w->key[i].pos, true);
    for (int64_t tile = 0; tile <= 128; tile = tile ? tile * 2 : 8)
        if (isPiecewise(w, tile, base)) return !lost ? DKV_W_PIECES : judgeLost(w);
    fitLine(w, base);
    return DKV_W_SCORES;
}

static void sayKeys(dkv_weights *w, const int64_t *low, const int64_t *high) {
    char *out = w->words;
    const size_t n = sizeof w->words;
    const int64_t own = w->at[0][0] + w->at[1][0], context = w->at[0][1] + w->at[1][1],
                  other = w->at[0][2] + w->at[1][2];
    int most = 1;
    for (int k = 2; k < DKV_N_WEIGHTS; k++)
        if (w->kind[k] > w->kind[most]) most = k;
    const bool extra = most == DKV_W_EXTRA, missing = most == DKV_W_MISSING;
    const char *what = extra ? "they see" : missing ? "they miss" : "wrong is the weight of";
    const char *of = context && !own   ? "the keys before their segment"
                     : own && !context ? "their own segment's keys"
                                       : "all their keys";
    if (!extra && !missing && !own && !context) return;
    if (other > own + context)
        snprintf(out, n, "%s keys that are not theirs (another branch or group, or beyond their context)",
                 what);
    else if (low[0] == high[0] && low[0] == 0)
        snprintf(out, n, "%s the key at their own position", what);
    else if (low[0] == high[0] && low[0] > -100000)
        snprintf(out, n, "%s the key %lld position%s %s", what, (long long)llabs(low[0]),
                 llabs(low[0]) == 1 ? "" : "s", low[0] > 0 ? "ahead" : "back");
    else if (low[1] == high[1] && low[1] >= 0)
        snprintf(out, n, "%s key %lld of %s", what, (long long)low[1], of);
    else if (low[2] == high[2] && low[2] >= 0)
        snprintf(out, n, low[2] ? "%s the key %lld before the last of %s" : "%s the last%.0lld of %s", what,
                 (long long)low[2], of);
    else if (extra && w->future == own + context)
        snprintf(out, n, "%s up to %lld keys ahead of them", what, (long long)high[0]);
    else if ((missing || extra) && low[1] >= 0)
        snprintf(out, n, "%s keys %lld-%lld of %s", what, (long long)low[1], (long long)high[1], of);
    else
        snprintf(out, n, "%s %s", what, of);
}

/* Backward: dQ's error of one row along what its missing keys would take from it. */
static void addLost(const dkv_diag *d, int64_t row, const double *lost, double *along, double *all) {
    const dkv_map *m = &d->map[DKV_DQ];
    for (int64_t c = 0; c < m->dim && m->present; c++) {
        const double e = m->got[row * m->dim + c] - m->want[row * m->dim + c],
                     x = (double)d->c->p->scale * lost[c];
        if (!isfinite(e) || !isfinite(x)) continue;
        *along -= e * x;
        *all += x * x;
    }
}

static int classify(const reading *r, dkv_weights *out) {
    const dkv_case *c = r->d->c;
    const dualkv_problem *v = &c->packed.view;
    const double *lse = c->oracle.truth.lse;
    int64_t low[3] = {INT64_MAX, INT64_MAX, INT64_MAX}, high[3] = {INT64_MIN, INT64_MIN, INT64_MIN};
    int64_t *place = malloc(((size_t)v->tk + 1) * sizeof *place);
    key_weight *key = malloc(((size_t)r->n_keys + 1) * sizeof *key);
    double along = 0, all = 0;
    dkv_pairs x = {0};
    int rc = place && key ? dkv_openPairs(r->d, &x, NULL) : -1;
    out->off = calloc((size_t)(v->tq * v->hq) + 1, 1);
    out->read = calloc((size_t)(v->tq * v->hq) + 1, 1);
    for (int64_t i = 0; i < r->n_rows && !rc && out->off && out->read && !dkv_stopRequested; i++) {
        const int64_t t = r->rows[i] / v->hq, h = r->rows[i] % v->hq;
        const int32_t s = dkv_segmentOf(&c->packed, false, t);
        dkv_pairRow(&x, s, t - v->segments[s].q_start, (int32_t)h, r->backward);
        for (int64_t j = 0; j < v->tk; j++) place[j] = -1;
        for (int64_t j = 0; j < x.n; j++) place[x.row[j]] = j;
        double lost[DKV_DIM_MAX] = {0};
        row_view w = {.x = &x,
                      .lost = lost,
                      .at = x.context + t - v->segments[s].q_start,
                      .key = key,
                      .out = out,
                      .low = low,
                      .high = high};
        w.response = v->segments[s].depth > 0;
        const double off = c->got.lse[h * v->tq + t] - lse[h * v->tq + t], error = isfinite(off) ? off : 0;
        w.lse_error = r->backward ? 0 : error;
        w.widen = r->backward ? fmax(1, exp(fmin(-error, 300))) : 1;
        sortKeys(r, i, place, &w);
        const dkv_weight_kind kind = judgeWeights(&w);
        out->kind[kind]++;
        out->rows++;
        out->read[r->rows[i]] = w.n > 0 || kind != DKV_W_RIGHT;
        out->off[r->rows[i]] = kind != DKV_W_RIGHT;
        if (r->backward) addLost(r->d, r->rows[i], lost, &along, &all);
    }
    out->lost_dq = all > 0 ? along / all : NAN;
    sayKeys(out, low, high);
    free(place);
    free(key);
    dkv_closePairs(&x);
    return rc;
}

bool dkv_readWeights(dkv_diag *d, bool backward, const uint8_t *rows, dkv_weights *out) {
    reading r = {.d = d, .backward = backward};
    memset(out, 0, sizeof *out);
    bool ran = !dkv_isFiles(d->c->kernel.w) && readAll(&r, rows) && !classify(&r, out);
    free(r.rows);
    free(r.keys);
    free(r.order);
    free(r.weight);
    free(r.bound);
    return ran && out->rows > 0;
}

void dkv_freeWeights(dkv_weights *w) {
    free(w->off);
    free(w->read);
    memset(w, 0, sizeof *w);
}
