/* bound_chains.c: how long the chains are in which a kernel sums. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bound.h"

#define TILE_MAX_ROOM ((int64_t)1 << 22) /* doubles; beyond, every key tile is taken to raise the maximum */

static int64_t ceilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

void dkv_freeKeyChains(dkv_key_chains *c) {
    free(c->n);
    free(c->steps);
    free(c->pieces);
    memset(c, 0, sizeof *c);
}

/* Rows of a segment fill a kernel's steps from the segment's start on. A step belongs to a key's chain if one
 * of its rows sees the key (the others add zeros, exactly). Two more for query heads stacked in one step. */
static void countTile(const dkv_head *h, const dkv_block *b, const dkv_tile *t, int32_t step, uint8_t *sees,
                      int64_t *last, dkv_key_chains *c) {
    const double g = h->g;
    double *n = c->n + t->k_row, *steps = c->steps + t->k_row, *pieces = c->pieces + t->k_row;
    if (t->vis == 1) {
        double groups = (double)((b->r1 - 1) / step - b->r0 / step + 1);
        for (int64_t j = 0; j < t->n; j++) {
            n[j] += (double)b->m;
            steps[j] += g * groups;
            pieces[j] += g;
        }
        return;
    }
    dkv_tileSees(h, b, t, sees);
    for (int64_t j = 0; j < t->n; j++) last[j] = -1;
    for (int64_t r = b->r0; r < b->r1; r++, sees += t->n)
        for (int64_t j = 0; j < t->n; j++) {
            if (!sees[j]) continue;
            n[j] += g;
            if (last[j] < 0) pieces[j] += g;
            steps[j] += last[j] < 0 ? g + 2 : last[j] != r / step ? g : 0;
            last[j] = r / step;
        }
}

int dkv_countKeyChains(const dkv_head *h, int32_t step, dkv_key_chains *c, dkv_err *err) {
    const size_t tk = h->l->view.tk > 0 ? (size_t)h->l->view.tk : 1;
    dkv_block b = {0};
    int64_t last[DKV_TILE_KEYS];
    uint8_t *sees = malloc((size_t)h->rows * DKV_TILE_KEYS);
    int rc = dkv_openBlock(h, &b, err);
    *c = (dkv_key_chains){calloc(tk, sizeof(double)), calloc(tk, sizeof(double)), calloc(tk, sizeof(double))};
    if (!rc && (!c->n || !c->steps || !c->pieces || !sees))
        rc = dkv_fail(err, DKV_EHARNESS, "out of memory: chains of %zu keys", tk);
    while (!rc && dkv_stepBlock(h, &b)) {
        dkv_tile t = {.range = -1};
        while (dkv_nextTile(h, &b, &t)) countTile(h, &b, &t, step, sees, last, c);
    }
    dkv_closeBlock(&b);
    free(sees);
    if (rc) dkv_freeKeyChains(c);
    return rc;
}

int dkv_openRowChains(const dualkv_arithmetic *a, int64_t max_m, int64_t keys, dkv_row_chains *c, dkv_err *err) {
    memset(c, 0, sizeof *c);
    c->a = a;
    c->capacity = a->key_tile <= 0 ? 0 : keys < TILE_MAX_ROOM / max_m ? (keys + 1) * max_m : TILE_MAX_ROOM;
    c->n = malloc(sizeof(double) * (size_t)(7 * max_m));
    if (c->capacity) c->tile_max = malloc(sizeof(double) * (size_t)c->capacity);
    if (!c->n || (c->capacity && !c->tile_max)) {
        dkv_closeRowChains(c);
        return dkv_fail(err, DKV_EHARNESS, "out of memory: chains of %lld rows", (long long)max_m);
    }
    c->steps = c->n + max_m;
    c->tiles = c->steps + max_m;
    c->rises = c->tiles + max_m;
    c->max = c->rises + max_m;
    c->top = c->max + max_m;
    c->last = c->top + max_m;
    return DKV_OK;
}

void dkv_closeRowChains(dkv_row_chains *c) {
    free(c->n);
    free(c->tile_max);
    memset(c, 0, sizeof *c);
}

void dkv_startRowChains(dkv_row_chains *c, int64_t m) {
    c->m = m;
    c->slots = 0;
    c->range = c->tile = -1;
    for (int64_t i = 0; i < m; i++) {
        c->n[i] = c->steps[i] = c->tiles[i] = c->rises[i] = c->top[i] = 0;
        c->max[i] = -(double)INFINITY;
        c->last[i] = -1;
    }
}

static bool keepsTileMax(const dkv_row_chains *c) { return (c->slots + 1) * c->m <= c->capacity; }

/* Keys [j, j + n) of the traversal's tile lie in one key tile of the kernel, the one of slot slots - 1. */
static void addKeyTile(dkv_row_chains *c, const dkv_tile *t, int64_t j, int64_t n, bool fresh, bool keep,
                       const double *s) {
    double *tm = c->tile_max + (c->slots - 1) * c->m;
    for (int64_t i = 0; i < c->m; i++) {
        double top = dkv_maxOf(s + i * t->n + j, n);
        if (keep) tm[i] = fresh || top > tm[i] ? top : tm[i];
        if (!(top > -(double)INFINITY)) continue;
        c->max[i] = top > c->max[i] ? top : c->max[i];
        if (c->last[i] != (double)c->slots) c->tiles[i]++;
        c->last[i] = (double)c->slots;
    }
}

static void countSteps(dkv_row_chains *c, const dkv_tile *t, const double *s) {
    const int64_t *g = c->group;
    for (int64_t i = 0; i < c->m; i++, s += t->n) {
        int64_t n = 0, steps = 0, last = -1;
        if (t->vis == 1) {
            n = t->n;
            steps = g[t->n - 1] - g[0] + 1;
        } else {
            for (int64_t j = 0; j < t->n; j++) {
                int sees = s[j] > -(double)INFINITY;
                n += sees;
                steps += sees && g[j] != last;
                last = sees ? g[j] : last;
            }
        }
        c->n[i] += (double)n;
        c->steps[i] += (double)steps;
    }
}

void dkv_addRowChains(dkv_row_chains *c, const dkv_tile *t, int64_t offset, const double *s,
                      const double *sigma) {
    const int64_t step = c->a->acc_step, tile = c->a->key_tile;
    for (int64_t j = 0; j < t->n; j++) {
        int64_t at = offset + j;
        c->group[j] = tile ? at / tile * ceilDiv(tile, step) + at % tile / step : at / step;
    }
    countSteps(c, t, s);
    for (int64_t i = 0; i < c->m; i++) {
        double top = dkv_maxOf(sigma + i * t->n, t->n);
        c->top[i] = top > c->top[i] ? top : c->top[i];
    }
    if (!tile) {
        for (int64_t i = 0; i < c->m; i++) {
            double top = dkv_maxOf(s + i * t->n, t->n);
            c->max[i] = top > c->max[i] ? top : c->max[i];
        }
        return;
    }
    for (int64_t j = 0, n; j < t->n; j += n) {
        int64_t at = (offset + j) / tile;
        n = (at + 1) * tile - (offset + j);
        n = n < t->n - j ? n : t->n - j;
        bool fresh = c->range != t->range || c->tile != at, keep = keepsTileMax(c);
        if (fresh) c->slots++;
        if (!fresh) keep = c->slots * c->m <= c->capacity;
        c->range = t->range;
        c->tile = at;
        addKeyTile(c, t, j, n, fresh, keep, s);
    }
}

/* A key tile rescales what was summed only if it may raise the running maximum: by computed scores, which are
 * within sigma of the true ones on either side. */
void dkv_endRowChains(dkv_row_chains *c, double u) {
    if (c->slots * c->m > c->capacity || !c->a->key_tile) {
        for (int64_t i = 0; i < c->m; i++) {
            if (!c->a->key_tile) c->tiles[i] = c->n[i];
            c->rises[i] = c->tiles[i];
        }
        return;
    }
    for (int64_t i = 0; i < c->m; i++) {
        double run = -(double)INFINITY, margin = 2.0 * c->top[i] + 8 * u * fabs(c->max[i]);
        for (int64_t k = 0; k < c->slots; k++) {
            int64_t slot = c->a->key_order ? c->slots - 1 - k : k;
            double x = c->tile_max[slot * c->m + i];
            if (run > -(double)INFINITY && x > -(double)INFINITY && x >= run - margin) c->rises[i]++;
            run = x > run ? x : run;
        }
    }
}
