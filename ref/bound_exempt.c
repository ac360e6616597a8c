/* bound_exempt.c: elements for which nothing is claimed, because an input of their own branch is not finite.
 *
 * A kernel multiplies whole tiles: a masked pair adds 0 times what stands there, and 0 times NaN is NaN. So a
 * key that is not finite may reach O and dQ of any row whose ranges hold it, masked or not (and dSink of those
 * heads, by way of O), and a row that is not finite may reach dK and dV of any key in its ranges. It must not
 * reach anything else: not a sibling branch, not keys past a range's end, not another KV head. LSE is not
 * exempt: masking replaces the score. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bound.h"

/* bad[i]: rows [0, rows) of heads [rows, heads, d]; is any element of the row's head not finite? */
static void findBad(const void *x, dualkv_dtype t, int64_t rows, int64_t heads, int64_t d, uint8_t *bad) {
    double y[256];
    for (int64_t i = 0; x && i < rows * heads; i++)
        bad[i] |= !dkv_decodeRows(x, t, i / heads, 1, heads, i % heads, d, y);
}

typedef struct exempt {
    const dkv_problem *p;
    const dkv_layout *l;
    uint8_t *rows, *keys; /* [tq, hq], [tk, hkv]: not finite */
} exempt;

static bool rangesHold(const exempt *e, const dualkv_segment *s, int64_t kvh) {
    for (int64_t r = s->range_begin; r < s->range_begin + s->range_count; r++) {
        const dualkv_range *g = &e->l->ranges[r];
        for (int64_t j = g->k_start; j < g->k_start + g->len; j++)
            if (e->keys[j * e->p->hkv + kvh]) return true;
    }
    return false;
}

static bool rowsHold(const exempt *e, const dualkv_segment *s, int64_t kvh) {
    const int64_t g = e->p->hq / e->p->hkv;
    for (int64_t i = s->q_start; i < s->q_start + s->q_len; i++)
        if (memchr(e->rows + i * e->p->hq + kvh * g, 1, (size_t)g)) return true;
    return false;
}

/* Where the truth is not finite the bound says so already. */
static void unclaim(double *x, int64_t n) {
    for (int64_t i = 0; x && i < n; i++) x[i] = isfinite(x[i]) ? DKV_UNCLAIMED : x[i];
}

static void markSegment(const exempt *e, const dualkv_segment *s, int64_t kvh, dkv_outputs *bound) {
    const int64_t g = e->p->hq / e->p->hkv, dv = e->p->dv, dqk = e->p->dqk, hkv = e->p->hkv;
    const bool keys = rangesHold(e, s, kvh);
    if (s->q_len == 0 || (!keys && !rowsHold(e, s, kvh))) return;
    for (int64_t i = s->q_start; keys && i < s->q_start + s->q_len; i++) {
        unclaim(bound->o + (i * hkv + kvh) * g * dv, g * dv);
        if (bound->dq) unclaim(bound->dq + (i * hkv + kvh) * g * dqk, g * dqk);
    }
    if (keys && bound->dsink) unclaim(bound->dsink + kvh * g, g); /* through the rows' dO.O */
    for (int64_t r = s->range_begin; bound->dk && r < s->range_begin + s->range_count; r++) {
        const dualkv_range *x = &e->l->ranges[r];
        for (int64_t j = x->k_start; j < x->k_start + x->len; j++) {
            unclaim(bound->dk + (j * hkv + kvh) * dqk, dqk);
            unclaim(bound->dv + (j * hkv + kvh) * dv, dv);
        }
    }
}

int dkv_markExempt(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_outputs *bound,
                   dkv_err *err) {
    const dualkv_problem *v = &l->view;
    exempt e = {p, l, calloc((size_t)(v->tq * v->hq) + 1, 1), calloc((size_t)(v->tk * v->hkv) + 1, 1)};
    int rc = DKV_OK;
    if (!e.rows || !e.keys) {
        rc = dkv_fail(err, DKV_EHARNESS, "out of memory");
        goto done;
    }
    findBad(in->q, p->dtype, v->tq, v->hq, v->dqk, e.rows);
    findBad(in->k, p->dtype, v->tk, v->hkv, v->dqk, e.keys);
    findBad(in->v, p->dtype, v->tk, v->hkv, v->dv, e.keys);
    if (p->grad) findBad(in->d_o, p->dtype, v->tq, v->hq, v->dv, e.rows);
    for (int64_t h = 0; p->grad && in->d_lse && h < v->hq; h++)
        for (int64_t i = 0; i < v->tq; i++) e.rows[i * v->hq + h] |= !isfinite(in->d_lse[h * v->tq + i]);
    if (!memchr(e.rows, 1, (size_t)(v->tq * v->hq)) && !memchr(e.keys, 1, (size_t)(v->tk * v->hkv)))
        goto done;
    for (int32_t s = 0; s < v->n_segments; s++)
        for (int64_t kvh = 0; kvh < v->hkv; kvh++) markSegment(&e, &l->segments[s], kvh, bound);
done:
    free(e.rows);
    free(e.keys);
    return rc;
}
