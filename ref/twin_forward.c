/* twin_forward.c: O and LSE of the twin, one block of rows. */
#include <cblas.h>
#include <float.h>
#include <string.h>

#include "twin_impl.h"
#include "vexp.h"

/* Key tiles of the kernel within the tile: cuts[0] = 0 < ... < cuts[n_cuts] = n; first_cut: index in the
 * range. */
static void cutTile(dkv_twin *t) {
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    int64_t offset = t->t.j0 - t->l->view.ranges[seg->range_begin + t->t.range].pos, k = 0;
    int64_t size = t->a->key_tile > 0 ? t->a->key_tile : DKV_TILE_KEYS;
    t->first_cut = offset / size;
    for (int64_t at = 0; at < t->t.n; at = (t->first_cut + ++k) * size - offset) t->cuts[k] = at;
    t->cuts[k] = t->t.n;
    t->n_cuts = k;
}

static int64_t tilesBefore(const dkv_twin *t, int32_t range) {
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    int64_t n = 0;
    for (int32_t r = 0; r < range; r++)
        n += (t->l->view.ranges[seg->range_begin + r].len + t->a->key_tile - 1) / t->a->key_tile;
    return n;
}

/* A pass over the scores for each key tile's maximum, then the running maximum in the kernel's order. */
static void fillMaxima(dkv_twin *t) {
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    int64_t n = tilesBefore(t, seg->range_count), m = t->b.m;
    for (int64_t e = 0; e < m * n; e++) t->tile_max[e] = -INFINITY;
    for (int64_t e = 0; t->late && e < m * n; e++) t->tile_vs[e] = 0;
    dkv_twinRewind(t);
    while (dkv_twinTile(t)) {
        cutTile(t);
        int64_t base = tilesBefore(t, t->t.range) + t->first_cut;
        for (int64_t i = 0; i < m; i++) {
            dkv_twinScoreRow(t, i);
            for (int64_t e = 0; e < t->n_cuts; e++) {
                double vs, x = dkv_twinTopOf(t, i, e, &vs), *at = &t->tile_max[i * n + base + e];
                if (t->late && x > *at) t->tile_vs[i * n + base + e] = vs;
                *at = x > *at ? x : *at;
            }
        }
    }
    for (int64_t i = 0; i < m; i++) {
        double top = -INFINITY, *row = t->tile_max + i * n;
        for (int64_t e = 0; !t->late && e < n; e++) {
            double *at = t->a->key_order ? &row[n - 1 - e] : &row[e];
            top = *at = *at > top ? *at : top;
        }
        if (t->late) dkv_twinRunTable(t, i, n);
        else t->max[i] = top;
    }
}

/* Where P is normalised before it is rounded: each row's LSE of the scores as declared, from a pass over them. */
static void fillLse(dkv_twin *t) {
    int64_t n, m = t->b.m;
    for (int64_t i = 0; i < m; i++) t->max[i] = -INFINITY, t->sum[i] = 0;
    for (dkv_twinRewind(t); dkv_twinTile(t);)
        for (int64_t i = 0; i < m; i++) {
            dkv_twinScoreRow(t, i);
            n = t->t.n;
            double *p = t->p_keys + i * n, x = dkv_maxOf(t->s + i * n, n), top = x > t->max[i] ? x : t->max[i];
            if (top == -INFINITY) continue;
            dkv_vexpShift(t->s + i * n, top, p, (size_t)n);
            t->sum[i] = t->sum[i] * exp(t->max[i] - top) + dkv_sumOf(p, n);
            t->max[i] = top;
        }
    for (int64_t i = 0; i < m; i++) {
        double sink = t->in->sink ? t->in->sink[t->h.kvh * t->h.g + i % t->h.g] : -INFINITY,
               top = sink > t->max[i] ? sink : t->max[i];
        t->lse[i] = top == -INFINITY ? top : top + log(t->sum[i] * exp(t->max[i] - top) + exp(sink - top));
    }
}

/* The reference that each key tile's P is taken against, and the row's own after the tile. Returns what sums
 * so far are multiplied by. */
static double setMaxima(dkv_twin *t, int64_t i, double *ref) {
    const int64_t *cuts = t->cuts, k = t->n_cuts;
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    double old = t->max[i], top = old;
    if (t->a->p_normalised) {
        for (int64_t e = 0; e < k; e++) ref[e] = t->lse[i];
        t->max[i] = t->lse[i];
        return 1;
    }
    if (t->table) {
        int64_t n = tilesBefore(t, seg->range_count), base = tilesBefore(t, t->t.range) + t->first_cut;
        for (int64_t e = 0; e < k; e++) ref[e] = t->tile_max[i * n + base + e];
        for (int64_t e = 0; t->late && e < k; e++) t->late_vs[e] = t->tile_vs[i * n + base + e];
        return 1;
    }
    if (t->late) return dkv_twinLateMaxima(t, i, ref);
    for (int64_t n = 0; n < k; n++) {
        int64_t e = t->a->key_order ? k - 1 - n : n;
        double x = dkv_maxOf(t->s + i * t->t.n + cuts[e], cuts[e + 1] - cuts[e]);
        ref[e] = top = x > top ? x : top;
    }
    t->max[i] = top;
    return old == top ? 1 : exp(old - top);
}

/* What P is taken against in one key tile: the maximum in use, its own variance, 1 if no key's P is certain to be exp(0),
 * how far a kernel's may be off. */
typedef struct reference {
    double at, var, always, blur;
} reference;

static reference referenceOf(const dkv_twin *t, int64_t i, int64_t e, double at) {
    reference r = {at, t->a->p_normalised ? 0 : t->top[i].vs, 0, 0}; /* the maximum's own error is in every exponent */
    if (!t->late) return r;
    const bool doubt = t->late_max[i].doubt;
    r.var = fmax(t->late_vs[e], 0);
    r.always = doubt || t->late_vs[e] < 0;
    r.blur = doubt ? t->a->max_slack : 0;
    return r;
}

/* Of one key tile, exact = exp(s - ref): P in units of the row's reference into p (`fade` = exp(ref - row's)),
 * rounded; its variance over unit2 into w. Masked pairs: s = -inf, P = 0. */
DKV_CLONES
static void roundedRow(const dkv_twin *t, int64_t n, const double *s, const double *exact, reference r, double fade,
                       const double *vs, double *restrict p, float *restrict w, double *restrict rel) {
    dkv_rounder f = t->u.round_p;
    dkv_spacing ulp = t->u.ulp_p;
    double unit2 = t->u.z.unit2, exp2 = t->u.z.exp2, over = fade * fade / t->u.z.unit2;
    const double ref = r.at, ref_var = r.var, always = r.always, blur = r.blur;
    for (int64_t j = 0; j < n; j++) {
        double x = s[j] > -DBL_MAX ? fabs(s[j] - ref) + blur : 0, errs = x != 0 ? 1 : always; /* exp(0) is 1 */
        double e = exact[j], v = e * e * (vs[j] + unit2 * x * x + errs * exp2), y = dkv_roundBy(f, e);
        rel[j] = v * over;
        v = errs * (v + e * e * ref_var);
        w[j] = (float)(dkv_flip(e, y, v, dkv_spacingAt(ulp, e)) * over);
        p[j] = y * fade;
    }
}

DKV_CLONES
static void exactRow(const dkv_twin *t, int64_t n, const double *s, const double *exact, reference r, double fade,
                     const double *vs, double *restrict p, float *restrict w, double *restrict rel) {
    double unit2 = t->u.z.unit2, exp2 = t->u.z.exp2, over = 1 / t->u.z.unit2, prod = t->u.z.prod_p2 * over;
    const double ref = r.at, always = r.always, blur = r.blur;
    for (int64_t j = 0; j < n; j++) {
        double x = s[j] > -DBL_MAX ? fabs(s[j] - ref) + blur : 0, y = exact[j] * fade, errs = x != 0 ? 1 : always;
        double v = (vs[j] + unit2 * x * x + errs * exp2) * over;
        rel[j] = y * y * v;
        w[j] = (float)(y * y * (v + errs * prod));
        p[j] = y;
    }
}

/* The row sum over one key tile, term by term as the kernel adds, and what is so far: where one of both is too small
 * to be seen beside the other it is lost, and what is lost has one sign. */
static void sumRow(dkv_twin *t, int64_t i, int64_t n, const double *p, double fade, const double *rel,
                   const float *equal) {
    double u, stuck = t->u.z.stuck, old = t->sum[i];
    dkv_formula_sum s = {.above = t->late ? exp(t->top[i].s - t->max[i]) - 1 : 0};
    const dkv_spacing ulp = dkv_sumSpacing(t->u.ulp_sum, old, t->late && t->a->sink_first && t->in->sink);
    dkv_twinAddTerms(&t->u.z, ulp, &s, n, p, fade, rel, equal);
    t->score_var[i] += s.noise;
    t->sum_var[i] += s.squares / 12;
    t->lost[i] += s.lost;
    t->sum[i] += s.part;
    t->ones[i] += s.ones;
    if (old > s.part * stuck && s.part > old * stuck) {
        u = dkv_spacingAt(t->u.ulp_sum, t->sum[i]);
        t->sum_var[i] += u * u / 12;
    } else {
        t->lost[i] += old < s.part ? old : s.part;
    }
}

/* What was summed is multiplied by exp(old maximum - new), whose error is the same for all of it. */
static void fadeRow(dkv_twin *t, int64_t i, double by, double shift) {
    int64_t d = t->p->dv;
    double by2 = by * by, rel = t->u.z.exp2 + t->u.z.unit2 * shift * shift, old, *acc = t->o.acc + i * d,
           *chain = t->o.chain + i * d;
    double *a1 = t->o.a1 + i * d, *a2 = t->o.a2 + i * d, *loss = t->o.loss + i * d;
    t->sum[i] *= by;
    t->lost[i] *= by;
    if (by > 0x1p-300) rel += dkv_twinLeast(&t->u.z, by) / by2;
    old = t->sum[i];
    t->score_var[i] = t->score_var[i] * by2 + rel * old * old;
    t->sum_var[i] = t->sum_var[i] * by2 + t->u.z.unit2 * t->sum[i] * t->sum[i];
    for (int64_t c = 0; c < d; c++) {
        acc[c] *= by;
        loss[c] *= by;
        a1[c] = a1[c] * by2 + rel * old * acc[c];
        a2[c] = a2[c] * by2 + rel * acc[c] * acc[c];
        chain[c] = chain[c] * by2 + t->u.z.unit2 * acc[c] * acc[c] + dkv_twinLeast(&t->u.z, acc[c]);
    }
}

void dkv_twinForwardRow(dkv_twin *t, int64_t i) {
    double rel[DKV_TILE_KEYS], *ref = t->exact_ref, *exact = t->exact, by, was = t->max[i], largest = t->top[i].s;
    const double *s = t->s + i * t->t.n;
    double *p = t->p_keys + i * t->t.n;
    float *w = t->quick ? t->w_keys : t->w_keys + i * t->t.n; /* quick: of this row alone */
    if (i == 0) cutTile(t);
    by = setMaxima(t, i, ref);
    if (by != 1) fadeRow(t, i, by, by > 0 ? was - t->max[i] : 0);
    if (by < 1 - 0.5 * t->u.z.stuck) t->ones[i] = 0;
    dkv_twinNoteTop(t, i);
    if (t->late && t->top[i].s > largest) t->ones[i] = 0;
    for (int64_t e = 0; e < t->n_cuts; e++) {
        int64_t at = t->cuts[e], n = t->cuts[e + 1] - at;
        double fade = ref[e] == t->max[i] ? 1 : exp(ref[e] - t->max[i]);
        if (ref[e] == -INFINITY) {
            memset(exact + at, 0, sizeof *p * (size_t)n);
            memset(p + at, 0, sizeof *p * (size_t)n);
            memset(w + at, 0, sizeof *w * (size_t)n);
            continue;
        }
        dkv_vexpShift(s + at, ref[e], exact + at, (size_t)n);
        const reference r = referenceOf(t, i, e, ref[e]);
        if (t->u.p_rounded)
            roundedRow(t, n, s + at, exact + at, r, fade, t->vs + at, p + at, w + at, rel);
        else
            exactRow(t, n, s + at, exact + at, r, fade, t->vs + at, p + at, w + at, rel);
        if (t->u.p_rounded && r.blur > 0) dkv_twinDoubt(t, n, exact + at, fade, w + at);
        sumRow(t, i, n, exact + at, fade, rel, t->equal_k + t->t.k_row + at);
    }
    if (t->quick) t->o.var[i] = dkv_twinWeighted(w, t->v_norm, t->equal_kv + t->t.k_row, t->t.n);
}

/* Adds unit^2 * w [m, n] x [n, d] to out [m, d]. */
static void addVariance(dkv_twin *t, const float *w, const float *x, int64_t d, double unit, double *out) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)t->b.m, (int)d, (int)t->t.n, 1, w,
                (int)t->t.n, x, (int)d, 0, t->prod, (int)d);
    dkv_twinAddFloats(t->prod, t->b.m * d, unit, out);
}

/* Quick mode's variance of the terms of O: each row's sum, spread over the columns as V^2 is. */
static void spreadTerms(dkv_twin *t) {
    int64_t d = t->p->dv;
    double all = dkv_sumOf(t->v_mean2, d);
    for (int64_t i = 0; i < t->b.m && all > 0; i++)
        dkv_twinAddScaled(t->v_mean2, d, t->u.z.unit2 * t->o.var[i] / all, t->o.a2 + i * d);
}

/* First moments, where the errors of O and of the row sum are the same. */
static void addMoments(dkv_twin *t) {
    int64_t n = t->t.n, d = t->p->dv;
    for (int64_t j = 0; j < n; j++) {
        dkv_twinFloats(t->t.v + j * d, d, 1 / t->v_unit, t->flat_keys + j * d);
        dkv_twinWeigh(t->flat_keys + j * d, d, t->equal_kv[t->t.k_row + j]);
    }
    addVariance(t, t->w_keys, t->flat_keys, d, t->u.z.unit2 * t->v_unit, t->o.a1);
}

/* Mean of V^2 over the keys, weighted as row i sees them: by P's variance, nearly P^2. prod holds w V^2. */
static const double *weightedMeans(const dkv_twin *t, int64_t i, double *mean2) {
    const float *w = t->w_keys + i * t->t.n, *equal = t->equal_kv + t->t.k_row;
    double sum = dkv_twinDot(w, equal, t->t.n), unit;
    if (!(sum > 0)) return t->v_mean2;
    unit = t->v_unit * t->v_unit / sum;
    for (int64_t c = 0; c < t->p->dv; c++) mean2[c] = unit * t->prod[i * t->p->dv + c];
    return mean2;
}

/* Sum of |terms| of O into prod, and what its chains lose. */
static void loseTerms(dkv_twin *t) {
    int64_t m = t->b.m, n = t->t.n, d = t->p->dv;
    dkv_twinMagnitudes(t->p_keys, m * n, 1, t->w_keys);
    dkv_twinMagnitudes(t->t.v, n * d, 1, t->flat_keys);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)d, (int)n, 1, t->w_keys, (int)n,
                t->flat_keys, (int)d, 0, t->prod, (int)d);
    for (int64_t i = 0; i < m; i++)
        for (int64_t e = i * d; e < (i + 1) * d; e++)
            t->o.loss[e] +=
                dkv_twinLoss(&t->u.z, t->u.z.fold, t->before[e], t->o.acc[e], t->o.now[i], t->prod[e]);
}

void dkv_twinForwardTile(dkv_twin *t) {
    int64_t m = t->b.m, n = t->t.n, d = t->p->dv;
    double alike = dkv_twinAlike(dkv_twinMean(t->equal_kv + t->t.k_row, n));
    memcpy(t->before, t->o.acc, sizeof *t->before * (size_t)(m * d));
    dkv_addRows(&t->h, &t->b, &t->t, 1, t->p_keys, t->t.v, d, t->t.finite, t->o.acc, d);
    if (t->quick)
        spreadTerms(t);
    else
        addVariance(t, t->w_keys, t->v2, d, t->u.z.unit2 * t->v_unit * t->v_unit, t->o.a2);
    for (int64_t i = 0; i < m; i++) {
        double squares, own[256], least = t->u.z.stuck * t->sum[i];
        const double *p = t->p_keys + i * n, *mean2 = t->u.p_rounded ? t->v_mean2 : weightedMeans(t, i, own);
        dkv_chainStep k;
        if (t->quick) {
            k = dkv_evenStep(dkv_twinCount(p, n, least, &squares), 0, alike, t->u.z.fold, t->o.terms[i]);
            k.squares = squares;
        } else {
            k = dkv_walkStep(p, n, least, alike, t->u.z.fold, t->o.terms[i]);
        }
        t->o.now[i] = k.count;
        t->o.terms[i] += k.count;
        dkv_twinChain(&t->u.z, k, d, t->before + i * d, t->o.acc + i * d, mean2, t->o.chain + i * d);
    }
    if (!t->u.p_rounded) addMoments(t);
    if (t->u.z.gain > 0) loseTerms(t);
}

/* The sink is one more logit, whose value is 0, met after the keys. */
static void addSink(dkv_twin *t, int64_t i) {
    double sink = t->in->sink[t->h.kvh * t->h.g + i % t->h.g], top = sink > t->max[i] ? sink : t->max[i], x,
           by, v;
    if (t->late && t->a->sink_first) { /* it was met before them, or is added now */
        t->sum_var[i] += t->u.z.unit2 * t->sum[i] * t->sum[i];
        return;
    }
    by = t->max[i] == -INFINITY ? 0 : exp(t->max[i] - top);
    t->max[i] = top;
    if (t->a->p_normalised) { /* the keys' P counts the sink already; the sum, and so LSE, does not */
        t->sum[i] *= by;
        t->lost[i] *= by;
        t->score_var[i] *= by * by;
        t->sum_var[i] *= by * by;
    } else if (by != 1) {
        fadeRow(t, i, by, by > 0 ? log(by) : 0);
    }
    x = exp(sink - top);
    v = t->u.z.unit2 * (sink - top) * (sink - top) + t->u.z.exp2;
    t->sum[i] += x;
    t->score_var[i] += x * x * v;
    t->sum_var[i] += t->u.z.unit2 * t->sum[i] * t->sum[i];
}

/* LSE = max + log(sum). The maximum's own error cancels: it is in every exponent too. */
static void finishLse(dkv_twin *t, int64_t i) {
    /* Whatever P is taken against, the row sum itself is taken against the largest score. */
    double l = t->sum[i], lse = t->max[i] + log(l), top = t->a->p_normalised ? t->top[i].s : t->max[i],
           g = lse - top, u = dkv_spacingAt(t->u.ulp_lse, fabs(lse)), unknown = dkv_twinUnknownMax(t, i),
           v = dkv_spacingAt(t->u.ulp_lse, fabs(g) + unknown);
    double keys = t->in->sink ? l - exp(t->in->sink[t->h.kvh * t->h.g + i % t->h.g] - t->max[i]) : l;
    double rel = (t->score_var[i] + t->sum_var[i] + t->lost[i] * t->lost[i]) / (l * l);
    double fine = fmin(dkv_spacingAt(t->u.ulp_lse, fabs(top)), v); /* both are multiples of it */
    double last = fine < u ? (u * u + 2 * fine * fine) / 12 : 0, own;
    if (last > g * g && !(unknown > 0)) last = g * g;
    t->sum_var[i] = rel;
    own = rel + dkv_twinCommonVar(t, i, keys) / (l * l) + t->u.z.log2 / t->u.z.lse2 * v * v / 12;
    /* finer arithmetic than fp32: that is what the sum was rounded to, not what it was made of */
    t->lse_var[i] = t->u.z.unit2 < 0x1p-80 ? dkv_twinStored(lse, own, u, DUALKV_FP32) : own + last;
    t->lse[i] = lse;
}

static void finishRow(dkv_twin *t, int64_t i) {
    int64_t d = t->p->dv;
    double l = t->a->p_normalised ? 1 : t->sum[i];
    double *o = t->o.acc + i * d, *var = t->o.chain + i * d;
    bool fp32 = t->a->out_format == DUALKV_FP32;
    if (t->sum[i] == 0) { /* no key, no sink: exact */
        t->lse[i] = -INFINITY;
        t->lse_var[i] = 0;
        memset(o, 0, sizeof *o * (size_t)d);
        memset(var, 0, sizeof *var * (size_t)d);
        memset(t->o_exact + i * d, 0, sizeof *o * (size_t)d);
        memset(t->o_var + i * d, 0, sizeof *o * (size_t)d);
        return;
    }
    finishLse(t, i);
    double own = t->sum_var[i] - t->score_var[i] / (t->sum[i] * t->sum[i]); /* of the sum's roundings alone */
    double by_sum = dkv_twinSumVar(t, i);
    for (int64_t c = 0; c < d; c++) {
        double a1 = t->o.a1[i * d + c], a2 = t->o.a2[i * d + c], x = (o[c] - t->o.loss[i * d + c]) / l,
               y = o[c] / l;
        double u = dkv_spacingAt(t->u.ulp_out, fabs(x)), scores;
        scores = t->u.p_rounded ? a2 + y * y * by_sum : a2 - 2 * y * a1 + y * y * t->score_var[i];
        if (!t->u.p_rounded && scores < 0x1p-20 * a2) scores = 0; /* of one key: a difference of equal floats */
        scores /= l * l;
        if (t->a->p_normalised) scores = a2;
        o[c] = x;
        var[c] = (scores > 0 ? scores : 0) + var[c] / (l * l) + x * x * (own > 0 ? own : 0);
        var[c] += 0x1p-100 * x * x; /* the last: our own arithmetic */
        t->o_exact[i * d + c] = x;
        t->o_var[i * d + c] = var[c];
        bool divides = fabs(l - 1) > t->u.z.stuck; /* dividing by 1 is exact */
        var[c] = dkv_twinStored(x, var[c], divides || !fp32 ? u : 0, t->a->out_format);
    }
}

void dkv_twinBeginForward(dkv_twin *t) {
    int64_t m = t->b.m;
    size_t row = sizeof(double) * (size_t)m, all = row * (size_t)t->p->dv;
    double *rows[] = {t->sum, t->sum_var, t->lost, t->o.terms, t->score_var, t->ones};
    double *wide[] = {t->o.acc, t->o.chain, t->o.loss, t->o.a1, t->o.a2};
    if (t->a->p_normalised) fillLse(t);
    for (size_t e = 0; e < sizeof rows / sizeof *rows; e++) memset(rows[e], 0, row);
    for (size_t e = 0; e < sizeof wide / sizeof *wide; e++) memset(wide[e], 0, all);
    for (int64_t i = 0; i < m; i++) {
        t->max[i] = -INFINITY;
        t->top[i] = (dkv_topKey){.s = -INFINITY};
        if (t->late) dkv_twinStartMax(t, i);
    }
    if (t->table) fillMaxima(t);
    for (int64_t i = 0; t->late && i < m; i++) dkv_twinStartSum(t, i);
}

void dkv_twinEndForward(dkv_twin *t) {
    for (int64_t i = 0; i < t->b.m; i++) {
        dkv_twinRefineTop(t, i);
        if (t->in->sink) addSink(t, i);
        finishRow(t, i);
        dkv_twinClassify(t, i);
    }
    dkv_putRows(&t->h, &t->b, t->o.acc, t->p->dv, t->out->twin.o);
    dkv_putRows(&t->h, &t->b, t->o.chain, t->p->dv, t->out->sigma2.o);
    dkv_putLse(&t->h, &t->b, t->lse, t->out->twin.lse);
    dkv_putLse(&t->h, &t->b, t->lse_var, t->out->sigma2.lse);
}
