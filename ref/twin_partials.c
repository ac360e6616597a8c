/* twin_partials.c: sums of dK, dV and dQ that are rounded on their way, and the outputs' own rounding of dK and dV. */
#include <stdlib.h>
#include <string.h>

#include "twin_impl.h"

/* x, of variance v, rounded: what the rounding leaves, a rare whole step. v itself, too: much of it may be one rare step,
 * after which the rounding steps for certain. */
static double roundOne(const dkv_twin *t, double *x, double v) {
    double y = dkv_roundBy(t->round_part, *x), left = v + dkv_flip(*x, y, v, dkv_spacingAt(t->u.ulp_part, fabs(*x)));
    *x = y;
    return left;
}

/* ---- dQ ---- */

void dkv_twinPartQueries(dkv_twin *t) {
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    const dualkv_range *g = &t->l->view.ranges[seg->range_begin + t->t.range];
    const int64_t at = (t->t.j0 - g->pos) / t->part.dq_block + ((int64_t)t->t.range << 40), d = t->p->dqk;
    for (int64_t e = 0; e < t->b.m * d && t->dq_at >= 0 && at != t->dq_at; e++) {
        double x = t->dq.acc[e] - t->dq.loss[e],
               v = t->dq.chain[e] + t->dq.a2[e] + t->delta_var[e / d] * t->dq.a1[e] * t->dq.a1[e];
        t->dq_steps[e] += roundOne(t, &x, v);
        t->dq.acc[e] = x;
        t->dq.loss[e] = t->dq.chain[e] = t->dq.a1[e] = t->dq.a2[e] = 0;
    }
    t->dq_at = at;
}

/* ---- dK and dV ---- */

static void roundRunning(const dkv_twin *t, const dkv_keySum *sum, int64_t j, int64_t d) {
    double *x = sum->x + j * sum->ld, *v = sum->var + j * sum->ld, *steps = sum->steps + j * sum->ld;
    for (int64_t c = 0; c < d; c++) {
        if (x[c] == 0 && v[c] == 0) continue;
        steps[c] += roundOne(t, &x[c], v[c]);
        v[c] = 0;
    }
}

/* What each accumulator of key j is expected to lose (dkv_twinLossAnyhow); its chains begin anew. */
static void loseKey(const dkv_twin *t, const dkv_keySum *sum, double last, int64_t j, int64_t d) {
    const double n = t->key_n[j] / (double)t->parts, even = n > 0 ? t->key_n2[j] / (t->key_n[j] * t->key_n[j]) : 1;
    for (int64_t e = 0; e < t->parts; e++)
        for (int64_t c = 0; c < d; c++) {
            double *x = sum[e].x + j * sum[e].ld + c, *size = sum[e].size + j * d + c, *spread = sum[e].spread + j * d + c;
            double *square = sum[e].square + j * d + c;
            const dkv_twin_lost lost = dkv_twinLossAnyhow(&t->u.z, last, t->u.z.fold_dkv, *x, n, *size, *square);
            sum[e].var[j * sum[e].ld + c] += dkv_twinPath(&t->u.z, t->u.z.fold_dkv, *x, n, *size, *spread, even) + lost.var;
            *x -= lost.mean;
            *size = *spread = *square = 0;
        }
}

static void loseKeys(dkv_twin *t, int64_t first, int64_t n) {
    for (int64_t j = first; j < first + n; j++) {
        if (t->anyhow) {
            loseKey(t, t->dk, t->u.z.last_ds, j, t->p->dqk);
            loseKey(t, t->dv, t->u.z.last_p, j, t->p->dv);
        }
        t->key_n[j] = t->key_n2[j] = 0;
    }
}

/* One element's partial sums, rounded and added. */
static double addParts(const dkv_twin *t, const dkv_keySum *sum, int64_t at, double *var) {
    double x = 0;
    for (int64_t e = 0; e < t->parts; e++) {
        double y = sum[e].x[at], left = sum[e].var[at];
        if (t->part.heads && (t->parts > 1 || !t->part.summed)) left = roundOne(t, &y, left); /* else: once, as the output */
        x += y;
        *var += left + (sum[e].steps ? sum[e].steps[at] : 0) + (e > 0 ? t->u.z.unit2 * x * x : 0);
    }
    return x;
}

/* The same where the sum is an output of its own. */
static double storeParts(const dkv_twin *t, const dkv_keySum *sum, int64_t at, double *var) {
    const double x = addParts(t, sum, at, var);
    *var = dkv_twinStored(x, *var, dkv_spacingAt(t->u.ulp_out, fabs(x)), t->a->out_format);
    return x;
}

/* The same where the sum is rounded itself: its parts err by whole steps of their own spacing, if at all, which a coarser
 * rounding turns into steps of its own half of the time; of a sum that lies half way that says more than its variance. */
static double addHeads(const dkv_twin *t, const dkv_keySum *sum, int64_t at, double *var) {
    double x = addParts(t, sum, at, var), y, u = dkv_spacingAt(t->u.ulp_part, fabs(x));
    if (!t->part.heads) {
        *var = roundOne(t, &x, *var);
        return x;
    }
    *var = 0;
    for (int64_t e = 0; e < t->parts; e++) {
        double left = roundOne(t, (y = sum[e].x[at], &y), sum[e].var[at]) + (sum[e].steps ? sum[e].steps[at] : 0);
        double by = u / dkv_spacingAt(t->u.ulp_part, fabs(y));
        *var += left * (by * by > 2 ? by * by / 2 : 1);
    }
    return dkv_roundBy(t->round_part, x);
}

/* The segment's sums of key j, rounded, into the outputs'; cleared. */
static void addSegment(const dkv_twin *t, const dkv_keySum *sum, int64_t j, int64_t d, double *twin, double *sigma2) {
    for (int64_t c = 0; c < d; c++) {
        const int64_t at = j * sum->ld + c, to = (j * t->p->hkv / t->carry + t->h.kvh / t->carry) * d + c;
        double var = 0, before = twin[to];
        const double x = t->part.summed ? storeParts(t, sum, at, &var) : addHeads(t, sum, at, &var);
        for (int64_t e = 0; e < t->parts; e++) {
            sum[e].x[at] = sum[e].var[at] = 0;
            if (sum[e].steps) sum[e].steps[at] = 0;
        }
        twin[to] += x;
        sigma2[to] += var + (before != 0 && x != 0 && !t->part.summed ? t->u.z.unit2 * twin[to] * twin[to] : 0);
    }
}

void dkv_twinPartKeys(dkv_twin *t, bool last_head) {
    const dualkv_segment *seg = &t->l->view.segments[t->b.node];
    const int64_t size = dkv_rowBlock(t->a, seg->q_len);
    const bool last = t->b.r1 == seg->q_len, running = t->part.rows && (last || t->b.r1 % size == 0);
    const bool whole = t->part.segments && last && last_head;
    for (int32_t r = 0; r < seg->range_count && (running || whole); r++) {
        const dualkv_range *g = &t->l->view.ranges[seg->range_begin + r];
        loseKeys(t, g->k_start, whole ? g->len : 0);
        for (int64_t j = g->k_start; j < g->k_start + g->len; j++) {
            for (int64_t e = 0; e < t->parts && running; e++) {
                roundRunning(t, &t->dk[e], j, t->p->dqk);
                roundRunning(t, &t->dv[e], j, t->p->dv);
            }
            if (!whole) continue;
            addSegment(t, t->dk, j, t->p->dqk, t->out->twin.dk, t->out->sigma2.dk);
            addSegment(t, t->dv, j, t->p->dv, t->out->twin.dv, t->out->sigma2.dv);
        }
    }
}

/* What is left to sum, summed; then the output's rounding. */
static void finishKeySum(dkv_twin *t, const dkv_keySum *sum, double *twin, double *sigma2, int64_t d, bool stored) {
    const bool add = t->apart && !t->part.segments;
    for (int64_t j = 0; j < t->l->view.tk; j++)
        for (int64_t c = 0; c < d; c++) {
            int64_t at = (j * t->p->hkv / t->carry + t->h.kvh / t->carry) * d + c;
            double x = twin[at], var = sigma2[at], u;
            if (add) var = 0, x = addParts(t, sum, j * sum->ld + c, &var);
            u = dkv_spacingAt(t->u.ulp_out, fabs(x));
            twin[at] = x;
            sigma2[at] = t->part.summed ? var : dkv_twinStored(x, var, stored ? 0 : u, t->a->out_format);
        }
}

void dkv_twinFinishKeys(dkv_twin *t) {
    const bool fp32 = t->a->out_format == DUALKV_FP32;
    loseKeys(t, 0, t->l->view.tk);
    finishKeySum(t, t->dk, t->out->twin.dk, t->out->sigma2.dk, t->p->dqk, fp32 && t->u.scale_exact);
    finishKeySum(t, t->dv, t->out->twin.dv, t->out->sigma2.dv, t->p->dv, fp32);
}

/* ---- running sums over the query heads of a KV head ---- */

static void spreadRows(const void *from, dualkv_dtype dtype, int64_t rows, int32_t hkv, int32_t hq, int64_t d, char *to) {
    const size_t size = (size_t)d * dkv_dtypeSize(dtype);
    for (int64_t i = 0; i < rows; i++)
        for (int32_t h = 0; h < hq; h++, to += size)
            memcpy(to, (const char *)from + (size_t)(i * hkv + h / (hq / hkv)) * size, size);
}

int dkv_openSpread(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_spread *x, dkv_err *err) {
    const size_t rows = (size_t)l->view.tk * (size_t)p->hq, size = dkv_dtypeSize(p->dtype);
    *x = (dkv_spread){*p, *l, *in, calloc(rows + 1, size * (size_t)p->dqk), calloc(rows + 1, size * (size_t)p->dv)};
    if (!x->k || !x->v) return dkv_fail(err, DKV_EHARNESS, "out of memory: K and V of each query head");
    spreadRows(in->k, p->dtype, l->view.tk, p->hkv, p->hq, p->dqk, x->k);
    spreadRows(in->v, p->dtype, l->view.tk, p->hkv, p->hq, p->dv, x->v);
    x->p.hkv = x->l.view.hkv = p->hq;
    x->in.k = x->k;
    x->in.v = x->v;
    return DKV_OK;
}

void dkv_closeSpread(dkv_spread *x) {
    free(x->k);
    free(x->v);
    x->k = x->v = NULL;
}
