/* ref_blocked.c: the packed fp64 truth on OpenBLAS (reference.h): truth.c over lanes.c. Backward recomputes the
 * scores from LSE; dQ belongs to the item, dK and dV are summed in place. */
#include "reference.h"

#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "truth.h"

#define MEMORY_MAX ((int64_t)384 << 20) /* for all threads together, unless one thread alone needs more */

typedef struct lane { /* one thread's */
    dkv_lane at;
    dkv_truth truth;
    double *s, *dp, *cap; /* [m, tile] */
    double *dsink;        /* [n_items, g]: summed in order at the end; shared */
} lane;

static void forwardItem(dkv_lane *at) {
    lane *t = (lane *)at;
    dkv_tile tile = {.range = -1};
    dkv_truthBeginForward(&t->truth);
    while (dkv_nextTile(&at->h, &at->b, &tile)) {
        dkv_tileScores(&at->h, &at->b, &tile, t->s, NULL);
        dkv_truthForwardTile(&t->truth, &tile, t->s, t->s);
    }
    dkv_truthEndForward(&t->truth);
}

static void backwardItem(dkv_lane *at) {
    lane *t = (lane *)at;
    dkv_tile tile = {.range = -1};
    dkv_truthBeginBackward(&t->truth, t->dsink ? t->dsink + at->item * at->h.g : NULL);
    while (dkv_nextTile(&at->h, &at->b, &tile)) {
        dkv_tileScores(&at->h, &at->b, &tile, t->s, t->cap);
        dkv_tileDp(&at->h, &at->b, &tile, t->dp);
        dkv_truthBackwardRows(&t->truth, &tile, t->s, t->cap, t->dp, t->s, t->dp);
        dkv_awaitTurn(at, tile.k_row, tile.k_row + tile.n);
        dkv_truthBackwardKeys(&t->truth, &tile, t->s, t->dp);
    }
    dkv_truthEndBackward(&t->truth);
}

static int64_t laneBytes(const dkv_head *h) {
    return dkv_blockBytes(h) + dkv_truthBytes(h) + (int64_t)sizeof(double) * h->max_m * 3 * DKV_TILE_KEYS;
}

static void closeLane(lane *t) {
    dkv_closeTruth(&t->truth);
    dkv_closeLane(&t->at);
    free(t->s);
    free(t->dp);
    free(t->cap);
}

static int openLane(dkv_lanes *w, lane *t, const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                    dkv_outputs *out, dkv_mutant mutant, dkv_err *err) {
    bool backward = in->d_o != NULL;
    int code = dkv_openLane(w, &t->at, p, l, in, err);
    if (!code) code = dkv_openTruth(&t->at.h, &t->at.b, in, out, backward, &t->truth, err);
    if (code) return code;
    t->at.h.mutant = mutant;
    size_t bytes = sizeof(double) * (size_t)t->at.h.max_m * DKV_TILE_KEYS;
    t->s = aligned_alloc(64, bytes);
    t->dp = backward ? aligned_alloc(64, bytes) : NULL;
    t->cap = backward && p->softcap > 0 ? aligned_alloc(64, bytes) : NULL;
    if (t->s && (t->dp || !backward) && (t->cap || !(backward && p->softcap > 0))) return DKV_OK;
    return dkv_fail(err, DKV_EHARNESS, "out of memory: tiles of %lld rows", (long long)t->at.h.max_m);
}

/* Backward where in has dO. */
static int runAll(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dkv_ref_options *opt,
                  dkv_outputs *out, dkv_err *err) {
    dkv_head h;
    int code = dkv_openHead(p, l, in, 0, &h, err);
    if (code) return code;
    dkv_lanes w = {.n_items = dkv_countItems(&h), .run = in->d_o ? backwardItem : forwardItem};
    w.threads = dkv_countThreads(opt, w.n_items, laneBytes(&h), MEMORY_MAX);
    lane *all = calloc((size_t)w.threads, sizeof *all);
    w.lane = calloc((size_t)w.threads, sizeof(dkv_lane *));
    double *dsink = NULL;
    bool sink = in->d_o && in->sink && out->dsink;
    if (sink) dsink = calloc((size_t)(w.n_items * h.g) + 1, sizeof(double));
    if (!all || !w.lane || (sink && !dsink)) {
        code = dkv_fail(err, DKV_EHARNESS, "out of memory: %lld work items", (long long)w.n_items);
        goto done;
    }
    for (int i = 0; i < w.threads && !code; i++) {
        w.lane[i] = &all[i].at;
        all[i].dsink = dsink;
        code = openLane(&w, &all[i], p, l, in, out, opt ? opt->mutant : DKV_MUTANT_NONE, err);
    }
    if (code) goto done;
    dkv_runLanes(&w);
    if (sink) dkv_sumSinks(p, w.n_items, dsink, out->dsink);
done:
    for (int i = 0; all && i < w.threads; i++) closeLane(&all[i]);
    free(all);
    free(w.lane);
    free(dsink);
    return code;
}

int dkv_refBlockedForward(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                          const dkv_ref_options *opt, dkv_outputs *out, dkv_err *err) {
    dkv_inputs used = *in;
    used.d_o = NULL; /* not read */
    return runAll(p, l, &used, opt, out, err);
}

int dkv_refBlockedBackward(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                           const dkv_ref_options *opt, dkv_outputs *out, dkv_err *err) {
    if (!in->d_o) return dkv_fail(err, DKV_EHARNESS, "backward without dO");
    memset(out->dk, 0, sizeof(double) * (size_t)(l->view.tk * p->hkv * p->dqk));
    memset(out->dv, 0, sizeof(double) * (size_t)(l->view.tk * p->hkv * p->dv));
    return runAll(p, l, in, opt, out, err);
}

int dkv_refBlocked(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                   const dkv_ref_options *opt, dkv_outputs *out, dkv_err *err) {
    int code = dkv_refBlockedForward(p, l, in, opt, out, err);
    return code || !in->d_o ? code : dkv_refBlockedBackward(p, l, in, opt, out, err);
}

int64_t dkv_refBlockedBytes(const dkv_layout *l, const dkv_ref_options *opt) {
    const dualkv_problem *v = &l->view;
    dkv_problem p = {.n_nodes = v->n_segments, .hq = v->hq, .hkv = v->hkv, .dqk = v->dqk, .dv = v->dv};
    dkv_inputs none = {0};
    dkv_head h;
    if (dkv_openHead(&p, l, &none, 0, &h, NULL)) return 0;
    int64_t items = dkv_countItems(&h), threads = dkv_countThreads(opt, items, laneBytes(&h), MEMORY_MAX);
    return threads * (laneBytes(&h) + (int64_t)sizeof(lane)) + items * h.g * (int64_t)sizeof(double);
}
