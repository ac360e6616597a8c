/* ref_blocked.c: the packed fp64 truth on OpenBLAS (reference.h).
 *
 * Work items are (block of rows, KV head); threads take them in one fixed order. Forward items are
 * independent: online softmax over the key tiles of the block. Backward recomputes the scores from LSE; dQ
 * belongs to the item, dK and dV are summed in place. That sum's order must not depend on threads, so a
 * block adds to a key tile only after every earlier block of the same head has left it: blocks walk keys
 * in ascending packed order, and each thread publishes the row below which it is done. Threads of one head
 * so follow each other tile after tile, and the first never waits. OpenBLAS runs inside each thread,
 * single-threaded. */
#include "reference.h"

#include <cblas.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "tiles.h"
#include "vexp.h"

#define MEMORY_MAX ((int64_t)384 << 20) /* for all threads together, unless one thread alone needs more */

typedef struct lane lane;

typedef struct work {
    const dkv_problem *p;
    const dkv_layout *l;
    dkv_inputs in;
    dkv_outputs *out;
    dkv_mutant mutant;
    bool backward;
    int threads;
    int64_t n_items, next; /* item = block * hkv + KV head */
    lane *lanes;
    double *dsink; /* [n_items, g]: summed in order at the end */
    pthread_mutex_t lock;
    pthread_cond_t moved;
} work;

struct lane { /* one thread's */
    work *w;
    pthread_t thread;
    dkv_head h;
    dkv_block b;
    int64_t block, item, done; /* index of b; -1 if idle; packed key row below which the item adds no more */
    double *s, *dp, *cap;      /* [m, tile] */
    double *o, *dq;            /* [m, dv], [m, dqk] */
    double *max, *sum, *lse, *delta; /* [m] */
    uint8_t *sees, *seen; /* [rows, tile]; [m] forward: rows that met a key whose score may be -inf */
};

/* One row of scores becomes exp(s - max so far); o and the sum follow when the maximum moves. A row of
 * -inf alone is shifted by nothing, so that exp(-inf - -inf) never arises. */
static void softmaxRow(lane *t, int64_t i, int64_t n, int64_t dv, double *s) {
    double top = dkv_maxOf(s, n);
    if (top > t->max[i]) {
        double fade, shift = t->max[i] - top;
        dkv_vexp(&shift, &fade, 1);
        t->max[i] = top;
        t->sum[i] *= fade;
        for (int64_t e = 0; e < dv; e++) t->o[i * dv + e] *= fade;
    }
    dkv_vexpShift(s, t->max[i] == -INFINITY ? 0 : t->max[i], s, (size_t)n);
    t->sum[i] += dkv_sumOf(s, n);
}

static void finishRow(lane *t, int64_t i, int64_t dv) {
    double *o = t->o + i * dv;
    if (t->sum[i] == 0 && !t->seen[i]) { /* no key, no sink */
        t->lse[i] = -INFINITY;
        return;
    }
    t->lse[i] = t->sum[i] == 0 ? NAN : t->max[i] + log(t->sum[i]);
    if (t->w->mutant == DKV_MUTANT_LSE) t->lse[i] /= log(2.0);
    for (int64_t e = 0; e < dv; e++) o[e] /= t->sum[i];
}

/* Where operands are not finite, a key that is seen can score -inf: such a row is not a row without keys. */
static void markSeen(lane *t, const dkv_tile *tile) {
    const dkv_head *h = &t->h;
    dkv_tileSees(h, &t->b, tile, t->sees);
    for (int64_t i = 0; i < t->b.m; i++)
        t->seen[i] |= memchr(t->sees + i / h->g * tile->n, 1, (size_t)tile->n) != NULL;
}

static void forwardItem(lane *t) {
    const work *w = t->w;
    const dkv_head *h = &t->h;
    const dkv_block *b = &t->b;
    int64_t dv = w->p->dv;
    dkv_tile tile = {.range = -1};
    memset(t->o, 0, sizeof(double) * (size_t)(b->m * dv));
    memset(t->seen, 0, (size_t)b->m);
    for (int64_t i = 0; i < b->m; i++) {
        t->max[i] = w->in.sink ? w->in.sink[h->kvh * h->g + i % h->g] : -INFINITY;
        t->sum[i] = w->in.sink ? 1 : 0;
    }
    while (dkv_nextTile(h, b, &tile)) {
        if (!b->finite || !tile.finite) markSeen(t, &tile);
        dkv_tileScores(h, b, &tile, t->s, NULL);
        for (int64_t i = 0; i < b->m; i++) softmaxRow(t, i, tile.n, dv, t->s + i * tile.n);
        dkv_addRows(h, b, &tile, 1.0, t->s, tile.v, dv, tile.finite, t->o, dv);
    }
    for (int64_t i = 0; i < b->m; i++) finishRow(t, i, dv);
    dkv_putRows(h, b, t->o, dv, w->out->o);
    dkv_putLse(h, b, t->lse, w->out->lse);
}

/* D = dO . O - dLSE; and the sink's gradient, -p_sink D, summed over the block's rows. */
static void deltaRows(lane *t) {
    const work *w = t->w;
    const dkv_head *h = &t->h;
    const dkv_block *b = &t->b;
    int64_t dv = w->p->dv, tq = w->l->view.tq;
    dkv_getRows(h, b, w->out->o, dv, t->o);
    dkv_getLse(h, b, w->out->lse, t->lse);
    for (int64_t i = 0; i < b->m; i++) {
        int64_t head = h->kvh * h->g + i % h->g;
        double d = cblas_ddot((int)dv, t->o + i * dv, 1, b->d_o + i * dv, 1), sink;
        if (w->in.d_lse) d -= w->in.d_lse[head * tq + b->q_row + i / h->g];
        if (w->mutant == DKV_MUTANT_DELTA) d = 0;
        t->delta[i] = d;
        if (!w->dsink) continue;
        sink = w->in.sink[head] - t->lse[i];
        dkv_vexp(&sink, &sink, 1);
        w->dsink[t->item * h->g + i % h->g] -= sink * d;
    }
}

/* s becomes P = exp(s - LSE), dp becomes dS = P (dP - D), times 1 - tanh^2 where capped. `careful`: masked
 * pairs are set to 0 by name, since 0 times what is not finite is not 0. */
static void gradRow(lane *t, int64_t i, int64_t n, const uint8_t *careful) {
    double *s = t->s + i * n, *dp = t->dp + i * n, d = t->delta[i];
    const double *cap = t->w->p->softcap > 0 ? t->cap + i * n : NULL;
    dkv_vexpShift(s, t->lse[i] == -INFINITY ? 0 : t->lse[i], s, (size_t)n);
    for (int64_t j = 0; j < n; j++) dp[j] = s[j] * (dp[j] - d);
    for (int64_t j = 0; cap && j < n; j++) dp[j] *= 1 - cap[j] * cap[j];
    for (int64_t j = 0; careful && j < n; j++) {
        s[j] = careful[j] ? s[j] : 0;
        dp[j] = careful[j] ? dp[j] : 0;
    }
}

/* Publishes that this thread adds to no key row below `row`; waits until all earlier blocks of the head
 * are past `end`. */
static void awaitTurn(lane *t, int64_t row, int64_t end) {
    work *w = t->w;
    bool wait = true;
    pthread_mutex_lock(&w->lock);
    t->done = row;
    pthread_cond_broadcast(&w->moved);
    while (wait) {
        wait = false;
        for (int i = 0; i < w->threads; i++) {
            const lane *o = &w->lanes[i];
            if (o->item >= 0 && o->item < t->item && o->h.kvh == t->h.kvh && o->done < end) wait = true;
        }
        if (wait) pthread_cond_wait(&w->moved, &w->lock);
    }
    pthread_mutex_unlock(&w->lock);
}

static void backwardTile(lane *t, const dkv_tile *tile) {
    const work *w = t->w;
    const dkv_head *h = &t->h;
    const dkv_block *b = &t->b;
    int64_t n = tile->n, dqk = w->p->dqk, dv = w->p->dv, hkv = w->p->hkv;
    bool finite = b->finite && tile->finite;
    for (int64_t i = 0; finite && i < b->m; i++) finite = isfinite(t->delta[i]) && !isnan(t->lse[i]);
    bool careful = tile->vis == 2 && !finite;
    dkv_tileScores(h, b, tile, t->s, t->cap);
    dkv_tileDp(h, b, tile, t->dp);
    if (careful) dkv_tileSees(h, b, tile, t->sees);
    for (int64_t i = 0; i < b->m; i++) gradRow(t, i, n, careful ? t->sees + i / h->g * n : NULL);
    dkv_addRows(h, b, tile, h->scale, t->dp, tile->k, dqk, tile->finite, t->dq, dqk);
    awaitTurn(t, tile->k_row, tile->k_row + n);
    int64_t at = tile->k_row * hkv + h->kvh;
    dkv_addKeys(h, b, tile, h->scale, t->dp, b->q, dqk, b->finite, w->out->dk + at * dqk, hkv * dqk);
    dkv_addKeys(h, b, tile, 1.0, t->s, b->d_o, dv, b->finite, w->out->dv + at * dv, hkv * dv);
}

static void backwardItem(lane *t) {
    dkv_tile tile = {.range = -1};
    int64_t dqk = t->w->p->dqk;
    memset(t->dq, 0, sizeof(double) * (size_t)(t->b.m * dqk));
    deltaRows(t);
    while (dkv_nextTile(&t->h, &t->b, &tile)) backwardTile(t, &tile);
    dkv_putRows(&t->h, &t->b, t->dq, dqk, t->w->out->dq);
}

static void *runLane(void *arg) {
    lane *t = arg;
    work *w = t->w;
    for (;;) {
        pthread_mutex_lock(&w->lock);
        t->item = w->next < w->n_items ? w->next++ : -1;
        t->done = -1;
        if (t->item >= 0) t->h.kvh = (int32_t)(t->item % w->p->hkv);
        pthread_cond_broadcast(&w->moved);
        pthread_mutex_unlock(&w->lock);
        if (t->item < 0) return NULL;
        for (; t->block < t->item / w->p->hkv; t->block++) (void)dkv_stepBlock(&t->h, &t->b);
        dkv_loadBlock(&t->h, &t->b);
        if (w->backward) backwardItem(t);
        else forwardItem(t);
    }
}

static int64_t laneBytes(const dkv_head *h) {
    int64_t d = h->p->dqk + h->p->dv;
    return dkv_blockBytes(h) + (int64_t)sizeof(double) * h->max_m * (3 * DKV_TILE_KEYS + d + 4) +
           h->rows * DKV_TILE_KEYS + h->max_m;
}

static int64_t countBlocks(const dkv_head *h) {
    dkv_block b = {.node = -1};
    int64_t n = 0;
    while (dkv_stepBlock(h, &b)) n++;
    return n;
}

static int countThreads(const dkv_head *h, const dkv_ref_options *opt, int64_t n_items) {
    cpu_set_t cpus;
    int64_t n = opt ? opt->threads : 0, most = MEMORY_MAX / laneBytes(h);
    if (n <= 0) n = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    n = n > n_items ? n_items : n;
    n = n > most ? most : n;
    return n < 1 ? 1 : (int)n;
}

static void closeLane(lane *t) {
    double **all[] = {&t->s, &t->dp, &t->cap, &t->o, &t->dq, &t->max, &t->sum, &t->lse, &t->delta};
    dkv_closeBlock(&t->b);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(*all[i]);
    free(t->sees);
    free(t->seen);
}

static int openLane(work *w, lane *t, dkv_err *err) {
    int code = dkv_openHead(w->p, w->l, &w->in, 0, &t->h, err);
    if (code) return code;
    t->w = w;
    t->h.mutant = w->mutant;
    t->item = t->block = -1;
    int64_t m = t->h.max_m, tile = DKV_TILE_KEYS;
    struct { double **at; int64_t n; } all[] = {
        {&t->s, m * tile}, {&t->dp, w->backward ? m * tile : 0}, {&t->cap, w->backward ? m * tile : 0},
        {&t->o, m * w->p->dv}, {&t->dq, w->backward ? m * w->p->dqk : 0}, {&t->max, m}, {&t->sum, m},
        {&t->lse, m}, {&t->delta, m}};
    bool ok = dkv_openBlock(&t->h, &t->b, err) == DKV_OK;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        size_t bytes = ((size_t)all[i].n * sizeof(double) + 63) & ~(size_t)63;
        ok &= bytes == 0 || (*all[i].at = aligned_alloc(64, bytes)) != NULL;
    }
    ok &= (t->sees = malloc((size_t)(t->h.rows * tile))) != NULL;
    ok &= (t->seen = malloc((size_t)m)) != NULL;
    return ok ? DKV_OK : dkv_fail(err, DKV_EHARNESS, "out of memory: tiles of %lld rows", (long long)m);
}

/* Threads that cannot be started are done without: the others take their items. */
static void runLanes(work *w) {
    int had = openblas_get_num_threads(), started = 1;
    openblas_set_num_threads(1);
    while (started < w->threads &&
           pthread_create(&w->lanes[started].thread, NULL, runLane, &w->lanes[started]) == 0)
        started++;
    runLane(&w->lanes[0]);
    for (int i = 1; i < started; i++) pthread_join(w->lanes[i].thread, NULL);
    openblas_set_num_threads(had);
}

static void sumSinks(const work *w) {
    int64_t g = w->p->hq / w->p->hkv;
    for (int64_t h = 0; h < w->p->hq; h++) w->out->dsink[h] = 0;
    for (int64_t i = 0; i < w->n_items; i++)
        for (int64_t e = 0; e < g; e++) w->out->dsink[i % w->p->hkv * g + e] += w->dsink[i * g + e];
}

static int runWork(work *w, const dkv_ref_options *opt, dkv_err *err) {
    dkv_head h;
    int code = dkv_openHead(w->p, w->l, &w->in, 0, &h, err);
    if (code) return code;
    w->mutant = opt ? opt->mutant : DKV_MUTANT_NONE;
    w->n_items = countBlocks(&h) * w->p->hkv;
    w->threads = countThreads(&h, opt, w->n_items);
    w->lanes = calloc((size_t)w->threads, sizeof *w->lanes);
    bool sink = w->backward && w->in.sink && w->out->dsink;
    if (sink) w->dsink = calloc((size_t)(w->n_items * h.g) + 1, sizeof(double));
    if (!w->lanes || (sink && !w->dsink)) {
        code = dkv_fail(err, DKV_EHARNESS, "out of memory: %lld work items", (long long)w->n_items);
        goto done;
    }
    for (int i = 0; i < w->threads && !code; i++) code = openLane(w, &w->lanes[i], err);
    if (code) goto done;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->moved, NULL);
    runLanes(w);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->moved);
    if (sink) sumSinks(w);
done:
    for (int i = 0; w->lanes && i < w->threads; i++) closeLane(&w->lanes[i]);
    free(w->lanes);
    free(w->dsink);
    return code;
}

int dkv_refBlockedForward(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                          const dkv_ref_options *opt, dkv_outputs *out, dkv_err *err) {
    work w = {.p = p, .l = l, .in = *in, .out = out};
    w.in.d_o = NULL; /* not read */
    return runWork(&w, opt, err);
}

int dkv_refBlockedBackward(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                           const dkv_ref_options *opt, dkv_outputs *out, dkv_err *err) {
    work w = {.p = p, .l = l, .in = *in, .out = out, .backward = true};
    if (!in->d_o) return dkv_fail(err, DKV_EHARNESS, "backward without dO");
    memset(out->dk, 0, sizeof(double) * (size_t)(l->view.tk * p->hkv * p->dqk));
    memset(out->dv, 0, sizeof(double) * (size_t)(l->view.tk * p->hkv * p->dv));
    return runWork(&w, opt, err);
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
    int64_t items = countBlocks(&h) * p.hkv, threads = countThreads(&h, opt, items);
    return threads * (laneBytes(&h) + (int64_t)sizeof(lane)) + items * h.g * (int64_t)sizeof(double);
}
