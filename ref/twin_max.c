/* twin_max.c: the maximum that P is taken against where it is not the largest score so far: raised late (max_slack), or
 * started from the sink (sink_first). Then exp(0) = 1 is another key's, or the sink's, and the error that all exponents of
 * a tile share is that one's. Where a kernel may decide otherwise than the twin, the row is in doubt from there on: its P
 * is as large as it is, but not rounded on the same grid. */
#include "twin_impl.h"

static double sinkOf(const dkv_twin *t, int64_t i) {
    return t->a->sink_first && t->in->sink ? t->in->sink[t->h.kvh * t->h.g + i % t->h.g] : -INFINITY;
}

void dkv_twinStartMax(dkv_twin *t, int64_t i) {
    const double sink = sinkOf(t, i);
    t->late_max[i] = (dkv_lateMax){.vs = DKV_SINKS_OWN, .doubt = t->a->max_slack > 0 && t->a->key_tile <= 0};
    if (isfinite(sink)) t->max[i] = sink;
}

void dkv_twinStartSum(dkv_twin *t, int64_t i) {
    const double sink = sinkOf(t, i), shift = sink - t->max[i];
    if (sink == -INFINITY) return;
    if (!isfinite(sink)) {
        t->sum[i] = NAN;
        return;
    }
    t->sum[i] = exp(shift);
    if (shift != 0) t->score_var[i] = t->sum[i] * t->sum[i] * (t->u.z.exp2 + t->u.z.unit2 * shift * shift);
}

/* A tile of largest score x, of variance vs, comes. */
static void meet(dkv_twin *t, int64_t i, double x, double vs) {
    const double slack = t->a->max_slack, old = t->max[i];
    dkv_lateMax *late = &t->late_max[i];
    if (!(x > old)) return;
    if (dkv_raiseDoubtful(old, x, slack, fmax(late->vs, 0), vs)) late->doubt = true;
    t->max[i] = dkv_raisedMax(old, x, slack);
    if (t->max[i] != old) late->vs = vs;
}

double dkv_twinTopOf(const dkv_twin *t, int64_t i, int64_t e, double *vs) {
    const int64_t at = t->cuts[e], n = t->cuts[e + 1] - at;
    const double *s = t->s + i * t->t.n + at, x = dkv_maxOf(s, n);
    int64_t j = 0;
    while (j < n - 1 && s[j] != x) j++;
    *vs = t->vs[at + j];
    return x;
}

double dkv_twinLateMaxima(dkv_twin *t, int64_t i, double *ref) {
    const double old = t->max[i];
    for (int64_t n = 0; n < t->n_cuts; n++) {
        const int64_t e = t->a->key_order ? t->n_cuts - 1 - n : n;
        double vs, x = dkv_twinTopOf(t, i, e, &vs);
        meet(t, i, x, vs);
        ref[e] = t->max[i];
        t->late_vs[e] = t->late_max[i].vs;
    }
    return old == t->max[i] ? 1 : exp(old - t->max[i]);
}

void dkv_twinRunTable(dkv_twin *t, int64_t i, int64_t n) {
    for (int64_t e = 0; e < n; e++) {
        const int64_t at = i * n + (t->a->key_order ? n - 1 - e : e);
        meet(t, i, t->tile_max[at], t->tile_vs[at]);
        t->tile_max[at] = t->max[i];
        t->tile_vs[at] = t->late_max[i].vs;
    }
}

void dkv_twinDoubt(const dkv_twin *t, int64_t n, const double *exact, double fade, float *w) {
    const double over = fade * fade / t->u.z.unit2;
    for (int64_t j = 0; j < n; j++) w[j] += (float)(dkv_doubtVar(t->u.ulp_p, exact[j], t->a->max_slack) * over);
}

double dkv_twinLateSumVar(const dkv_twin *t, int64_t i) {
    const double rest = t->sum[i] - 1, vs = t->late_max[i].vs;
    return t->score_var[i] + (vs > 0 && t->top[i].s > t->max[i] ? vs * rest * rest : 0);
}

double dkv_twinUnknownMax(const dkv_twin *t, int64_t i) {
    if (!(t->a->max_slack > 0)) return 0;
    return t->a->p_normalised || t->late_max[i].doubt || (t->in->sink && !t->a->sink_first) ? t->a->max_slack : 0;
}
