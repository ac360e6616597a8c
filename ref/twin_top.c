/* twin_top.c: the key of each row's largest score. Where a row leans on one key, that key's score is most of its
 * noise, and an average over sampled chains is no estimate of one chain: this one is walked. */
#include "twin_impl.h"

/* The model's variance of the chain of row i and the tile's key j, as dkv_twinScoreRow has it. */
static double chainModel(const dkv_twin *t, int64_t i, int64_t j) {
    double scale = t->p->scale, size = t->q_norm[i] * t->k_norm[j];
    if (t->quick) {
        double x = t->s[i * t->t.n + j] / scale, sq = dkv_quickSquares(t->quick_s, x * x, size);
        return t->u.z.step2 * scale * scale * t->fit_s.var[dkv_chainBin(size > 0 ? (float)(sq / size) : 0)] *
               sq;
    }
    float sq = t->sq[i * t->t.n + j];
    return t->u.z.step2 * scale * scale * t->fit_s.var[dkv_chainBin(sq)] * sq * size;
}

/* What the twin expects the chain of row i and the tile's key j to lose, as dkv_twinScoreRow has it. */
static double chainLoss(const dkv_twin *t, int64_t i, int64_t j) {
    int64_t at = i * t->t.n + j;
    if (t->quick || !(t->u.z.gain > 0)) return 0;
    return t->fit_s.gain[dkv_chainBin(t->sq[at])] * t->dot[at] * sqrt(t->q_norm[i] * t->k_norm[j]);
}

void dkv_twinNoteTop(dkv_twin *t, int64_t i) {
    int64_t n = t->t.n, j = 0;
    const double *s = t->s + i * n;
    double x = dkv_maxOf(s, n), cap;
    if (!(x > t->top[i].s)) return;
    while (s[j] != x) j++;
    cap = t->p->softcap > 0 ? t->cap[i * n + j] : 0;
    t->top[i] = (dkv_topKey){.s = x,
                             .vs = t->vs[j],
                             .chain = chainModel(t, i, j),
                             .loss = chainLoss(t, i, j),
                             .keep2 = (1 - cap * cap) * (1 - cap * cap),
                             .equal = t->equal_k[t->t.k_row + j],
                             .equal_v = t->equal_kv[t->t.k_row + j],
                             .key = t->t.k_row + j};
}

void dkv_twinRefineTop(dkv_twin *t, int64_t i) {
    const dkv_problem *p = t->p;
    dkv_topKey *k = &t->top[i];
    const double *q = t->b.q + i * p->dqk;
    dkv_twin_walk walk;
    double row[256], more, weight = exp(k->s - t->max[i]), by = p->scale * p->scale;
    if (k->s == -INFINITY || (t->u.z.step > 1 && !t->u.z.truncates) || t->u.s_rounded || t->u.z.unit2 < 0x1p-80) return;
    dkv_decodeRows(t->in->k, p->dtype, k->key, 1, p->hkv, t->h.kvh, p->dqk, row);
    dkv_roundArray(row, (size_t)p->dqk, t->a->in_format);
    walk = dkv_twinWalk(&t->u.z, q, row, p->dqk, k->loss);
    more = (by * (walk.own + walk.common) - k->chain) * k->keep2 * weight * weight;
    if (!isfinite(more)) return;
    k->common = by * walk.common * k->keep2;
    k->vs = fmax(k->vs + more / (weight * weight), 0);
    t->score_var[i] = fmax(t->score_var[i] + more * k->equal, 0);
    if (t->u.p_rounded) return;
    dkv_decodeRows(t->in->v, p->dtype, k->key, 1, p->hkv, t->h.kvh, p->dv, row);
    dkv_roundArray(row, (size_t)p->dv, t->a->in_format);
    for (int64_t c = 0; c < p->dv; c++) {
        if (!isfinite(row[c])) continue;
        t->o.a1[i * p->dv + c] += more * k->equal_v * row[c];
        t->o.a2[i * p->dv + c] += more * k->equal_v * row[c] * row[c];
    }
}

/* Of the row sum's relative variance, what its scores cause: the largest is subtracted from all, so that its
 * own term is 1 whatever its error, and that error is in all others. */
double dkv_twinSumVar(const dkv_twin *t, int64_t i) {
    const dkv_topKey *k = &t->top[i];
    double p = exp(k->s - t->max[i]), rest = t->sum[i] - p;
    double var = t->score_var[i] - p * p * k->vs * k->equal;
    if (t->late && p != 1) return dkv_twinLateSumVar(t, i);
    if (k->s == -INFINITY || p < 1) return t->score_var[i]; /* the sink is larger */
    return (var > 0x1p-40 * t->score_var[i] ? var : 0) + k->vs * rest * rest;
}

/* Beside the largest score's own: a loss that all scores of a row share moves the whole sum. */
double dkv_twinCommonVar(const dkv_twin *t, int64_t i, double keys) {
    double p = exp(t->top[i].s - t->max[i]);
    return keys > p ? t->top[i].common * (keys * keys - p * p) : 0;
}

/* Rows of one query vector that lean on one key have one chain's error: one class. So have rows whose weight is
 * mostly of one score which the softcap has made, whatever their vectors. */
void dkv_twinClassify(dkv_twin *t, int64_t i) {
    const dkv_problem *p = t->p;
    const dkv_topKey *k = &t->top[i];
    double weight = exp(k->s - t->max[i]) / t->sum[i];
    int64_t at = t->b.q_row * t->h.g + i;
    size_t size = dkv_dtypeSize(p->dtype) * (size_t)p->dqk;
    uint64_t h = dkv_hashBytes(3, &at, sizeof at), flags = 0;
    if (t->sum[i] > 0 && k->s > -INFINITY) {
        const int at_cap = dkv_twinAtCap(&t->u, k->keep2, k->vs);
        flags = dkv_twinLeans(weight, at_cap ? fmax(k->equal, t->ones[i]) : k->equal, k->vs, t->lse_var[i], at_cap);
    }
    if (flags) {
        const char *key = (const char *)t->in->k + size * (size_t)(k->key * p->hkv + t->h.kvh);
        const float score = (float)k->s;
        h = flags & DKV_CLASS_CAPPED
                ? dkv_hashBytes(5, &score, sizeof score)
                : dkv_hashBytes(dkv_hashBytes(4, t->b.q + i * p->dqk, sizeof(double) * (size_t)p->dqk), key, size);
    }
    t->row_class[at] = t->sum[i] > 0 ? dkv_twinClass(h, flags) : 0; /* those that see no key are exact */
}
