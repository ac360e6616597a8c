#include "errmap.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "derive.h"

#define LEVELS 52
#define HEAVY 4e9 /* FLOPs above which no run more is made */

static char letterOf(double r) {
    if (r < 0) return '.';
    if (!(r < INFINITY)) return '!';
    double level = r > 0 ? ceil(8 * log10(r) - 1e-9) + 15 : 0;
    int at = level < 0 ? 0 : level > LEVELS - 1 ? LEVELS - 1 : (int)level;
    if (r > 1 && at < 16) at = 16;
    return (char)(at < 26 ? 'A' + at : 'a' + at - 26);
}

/* err/bound; -1 where nothing is claimed or there is nothing. */
static double ratioOf(double got, double truth, double bound) {
    if (isnan(truth) || isinf(truth) || bound == DKV_UNCLAIMED || isnan(bound)) return -1;
    double err = fabs(got - truth);
    if (err == 0) return truth == 0 ? -1 : 0;
    return err < INFINITY && bound > 0 ? err / bound : INFINITY;
}

/* ---- axes ---- */

static int64_t lengthOf(const dualkv_problem *v, bool keys, int32_t i) {
    return keys ? v->segments[i].k_len : v->segments[i].q_len;
}

static int64_t countTiles(const dualkv_problem *v, bool keys, int32_t first, int32_t end, int64_t tile) {
    int64_t n = 0;
    for (int32_t i = first; i < end; i++) n += (lengthOf(v, keys, i) + tile - 1) / tile;
    return n;
}

/* Tiles of `tile` tokens or more, `most` at most; around segment `worst` where there are too many segments. */
static void cutSegments(const dualkv_problem *v, bool keys, int64_t tile, int most, int32_t worst, dkv_axis *a) {
    int32_t shown = v->n_segments < most ? v->n_segments : most;
    int32_t first = worst - shown / 2;
    if (first > v->n_segments - shown) first = v->n_segments - shown;
    if (first < 0) first = 0;
    while (countTiles(v, keys, first, first + shown, tile) > most) tile *= 2;
    *a = (dkv_axis){.tile = tile, .first = first, .n = shown};
    for (int32_t i = 0; i < shown; i++) {
        a->cells[i] = (uint8_t)((lengthOf(v, keys, first + i) + tile - 1) / tile);
        a->total += a->cells[i];
    }
}

static void cutHeads(int64_t heads, dkv_axis *a) {
    *a = (dkv_axis){.tile = (heads + DKV_MAP_SIDE - 1) / DKV_MAP_SIDE};
    a->total = a->cells[0] = (uint8_t)((heads + a->tile - 1) / a->tile);
}

/* Cell of each packed row, -1 where it is not shown; malloc'ed. */
static int *placeRows(const dualkv_problem *v, bool keys, const dkv_axis *a) {
    int64_t rows = keys ? v->tk : v->tq;
    int *place = malloc((size_t)(rows + 1) * sizeof *place), cell = 0;
    for (int64_t i = 0; place && i < rows; i++) place[i] = -1;
    for (int32_t i = a->first; place && i < a->first + a->n; i++) {
        const dualkv_segment *s = &v->segments[i];
        int64_t start = keys ? s->k_start : s->q_start;
        for (int64_t r = 0; r < lengthOf(v, keys, i); r++) place[start + r] = cell + (int)(r / a->tile);
        cell += a->cells[i - a->first];
    }
    return place;
}

static void drawCells(const double *most, dkv_errmap *m) {
    for (int i = 0; i < m->rows.total * m->columns.total; i++) m->cells[i] = letterOf(most[i]);
}

static double *startCells(void) {
    double *most = malloc(DKV_MAP_SIDE * DKV_MAP_SIDE * sizeof *most);
    for (int i = 0; most && i < DKV_MAP_SIDE * DKV_MAP_SIDE; i++) most[i] = -1;
    return most;
}

static void lift(double *most, double r) {
    if (!(r <= *most)) *most = r;
}

/* ---- from the outputs ---- */

/* Residual to the twin over its predicted size, or err/bound. */
static double valueOf(const dkv_case *c, dkv_tensor_id id, int64_t at, bool twin) {
    const dkv_oracle *o = &c->oracle;
    double got = dkv_outputAt(&c->got, id)[at];
    if (!twin) return ratioOf(got, dkv_outputAt(&o->truth, id)[at], dkv_outputAt(&o->bound, id)[at]);
    double z = (got - dkv_outputAt(&o->twin, id)[at]) / sqrt(dkv_outputAt(&o->sigma2, id)[at]);
    return isfinite(z) ? fabs(z) : -1;
}

/* Tiles x heads. Outside the bound: err/bound. Within it, but imprecise or biased: rms of the residual. */
static void mapTensor(dkv_case *c, dkv_tensor_id id, dkv_errmap *m) {
    const dualkv_problem *v = &c->packed.view;
    const dkv_judgement *j = &c->result->tensor[id];
    const dkv_vectors g = dkv_vectorsOf(v, id);
    const bool twin = !j->failed && j->all.bad == 0;
    int64_t tile = c->result->arithmetic.key_tile;
    cutSegments(v, g.keys, tile > 0 && tile < 4096 ? tile : 64, DKV_MAP_SIDE, (int32_t)(j->worst.segment > 0 ? j->worst.segment : 0), &m->rows);
    cutHeads(g.heads, &m->columns);
    int *place = placeRows(v, g.keys, &m->rows);
    double *most = startCells(), *count = calloc(DKV_MAP_SIDE * DKV_MAP_SIDE, sizeof *count);
    for (int64_t r = 0; place && most && count && r < g.rows; r++)
        for (int64_t h = 0; place[r] >= 0 && h < g.heads; h++) {
            const int cell = place[r] * m->columns.total + (int)(h / m->columns.tile);
            const int64_t at = dkv_vectorAt(&g, r, h);
            for (int64_t d = 0; d < g.d; d++) {
                double x = valueOf(c, id, at + d, twin);
                if (x < 0 || !twin) lift(&most[cell], x);
                else most[cell] = (most[cell] < 0 ? 0 : most[cell]) + x * x, count[cell]++;
            }
        }
    for (int i = 0; twin && most && count && i < DKV_MAP_SIDE * DKV_MAP_SIDE; i++)
        if (count[i] > 0) most[i] = sqrt(most[i] / count[i]);
    if (place && most && count) drawCells(most, m);
    else memset(m, 0, sizeof *m);
    free(count);
    free(most);
    free(place);
}

/* ---- weights, by a run more ---- */

static int beginProbe(const dkv_case *c, bool backward, dkv_derived *e) {
    const dualkv_problem *v = &c->packed.view;
    const size_t elt = dkv_dtypeSize(c->p->dtype);
    dkv_problem p = {0};
    dkv_err err = {0};
    if (dkv_deriveProblem(c, &p, &err)) return -1;
    p.dlse = false;
    if (!backward) p.grad = false;
    if (dkv_beginDerived(c, &p, e, &err)) return -1;
    memcpy(e->c.in.q, c->in.q, elt * (size_t)v->tq * (size_t)v->hq * (size_t)v->dqk);
    memcpy(e->c.in.k, c->in.k, elt * (size_t)v->tk * (size_t)v->hkv * (size_t)v->dqk);
    if (backward) memcpy(e->c.in.v, c->in.v, elt * (size_t)v->tk * (size_t)v->hkv * (size_t)v->dv);
    return 0;
}

/* One-hot vectors: element place[row] of each of `heads` vectors of `dim` elements. */
static void putOneHot(void *to, dualkv_dtype type, const int *place, int64_t rows, int64_t heads, int64_t dim) {
    const double one = 1;
    for (int64_t i = 0; i < rows * heads; i++)
        if (place[i / heads] >= 0)
            dkv_encodeArray(&one, type, 1, (char *)to + (size_t)(i * dim + place[i / heads]) * dkv_dtypeSize(type));
}

/* Rows of the output against the other axis: forward O[row, key tile], backward dV[key, query tile]. */
static void readProbe(const dkv_case *e, bool backward, const int *row_of, const int *column_of, dkv_errmap *m, double *most) {
    const dualkv_problem *v = &e->packed.view;
    const dkv_tensor_id id = backward ? DKV_DV : DKV_O;
    const int64_t n = backward ? v->tk : v->tq, heads = backward ? v->hkv : v->hq;
    const int shown = backward ? m->rows.total : m->columns.total;
    const double *got = dkv_outputAt(&e->got, id), *truth = dkv_outputAt(&e->oracle.truth, id), *bound = dkv_outputAt(&e->oracle.bound, id);
    for (int64_t i = 0; i < n * heads; i++) {
        const int own = backward ? column_of[i / heads] : row_of[i / heads];
        for (int d = 0; own >= 0 && d < shown; d++) {
            const int64_t at = i * v->dv + d;
            lift(&most[backward ? d * m->columns.total + own : own * m->columns.total + d], ratioOf(got[at], truth[at], bound[at]));
        }
    }
}

static void mapWeights(dkv_case *c, bool backward, int32_t worst, dkv_errmap *m) {
    const dualkv_problem *v = &c->packed.view;
    const int hot = v->dv < DKV_MAP_SIDE ? v->dv : DKV_MAP_SIDE; /* tiles that a vector can tell apart */
    const int64_t tile = c->result->arithmetic.key_tile, base = tile > 0 && tile < 4096 ? tile : 64;
    dkv_derived e = {0};
    dkv_finding f = {0};
    const dkv_status kept = c->result->status;
    cutSegments(v, false, base, backward ? hot : DKV_MAP_SIDE, worst, &m->rows);
    cutSegments(v, true, base, backward ? DKV_MAP_SIDE : hot, worst, &m->columns);
    int *row_of = placeRows(v, false, &m->rows), *column_of = placeRows(v, true, &m->columns);
    double *most = startCells();
    bool ran = row_of && column_of && most && !beginProbe(c, backward, &e);
    if (ran && backward) putOneHot(e.c.in.d_o, c->p->dtype, row_of, v->tq, v->hq, v->dv);
    if (ran && !backward) putOneHot(e.c.in.v, c->p->dtype, column_of, v->tk, v->hkv, v->dv);
    ran = ran && dkv_runDerived(c, &e, backward ? "dO one-hot" : "V one-hot", &f) && !(e.c.kernel.d.absent >> (backward ? DKV_DV : DKV_O) & 1);
    if (ran) {
        readProbe(&e.c, backward, row_of, column_of, m, most);
        drawCells(most, m);
    } else memset(m, 0, sizeof *m);
    c->result->status = kept; /* of the case, whatever becomes of the probe */
    c->result->stopped = false;
    dkv_endDerived(&e);
    free(most);
    free(column_of);
    free(row_of);
}

static bool isWrong(const dkv_judgement *j) { return j->present && (j->failed || j->imprecise || j->biased); }

void dkv_mapTensors(dkv_case *c) {
    for (int id = 0; id < DKV_DSINK; id++)
        if (isWrong(&c->result->tensor[id])) mapTensor(c, (dkv_tensor_id)id, &c->result->map[id]);
}

void dkv_mapPairs(dkv_case *c, int *probes) {
    dkv_result *r = c->result;
    int32_t worst = 0;
    bool forward = false, backward = false;
    for (int id = 0; id < DKV_DSINK; id++) {
        const dkv_judgement *j = &r->tensor[id];
        if (!isWrong(j)) continue;
        if (!forward && !backward && j->worst.segment > 0) worst = (int32_t)j->worst.segment;
        if (id == DKV_O || id == DKV_LSE) forward = true;
        else backward = true;
    }
    if ((!forward && !backward) || __atomic_fetch_sub(probes, 1, __ATOMIC_RELAXED) <= 0) return;
    if (dkv_isFiles(c->kernel.w) || dkv_forwardFlops(c->p) + dkv_backwardFlops(c->p) > HEAVY) return;
    mapWeights(c, false, worst, &r->weights[0]);
    if (backward && c->p->grad && !dkv_stopRequested) mapWeights(c, true, worst, &r->weights[1]);
}

/* ---- into a record ---- */

static void addAxis(cJSON *o, const char *name, const dkv_axis *a) {
    cJSON *x = cJSON_AddObjectToObject(o, name), *cells;
    cJSON_AddNumberToObject(x, "tile", (double)a->tile);
    if (a->n) cJSON_AddNumberToObject(x, "first_segment", a->first);
    cells = cJSON_AddArrayToObject(x, a->n ? "tiles" : "heads");
    for (int i = 0; i < (a->n ? a->n : 1); i++) cJSON_AddItemToArray(cells, cJSON_CreateNumber(a->cells[i]));
}

void dkv_addErrmap(cJSON *o, const char *name, const dkv_errmap *m) {
    if (!m->rows.total || !m->columns.total) return;
    cJSON *x = cJSON_AddObjectToObject(o, name);
    addAxis(x, "rows", &m->rows);
    addAxis(x, "columns", &m->columns);
    cJSON_AddStringToObject(x, "cells", m->cells);
}
