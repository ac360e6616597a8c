/* tiles.c: see tiles.h.
 *
 * Size of a tile: 256 rows by 256 keys of fp64 scores are half a MiB, half of a usual L2. Useful FLOP/s over
 * dgemm's, shape=2048+8x256 heads=4:1 dim=128, one core of an AMD EPYC (Zen 4), CPU time:
 *
 *     rows x keys  256x192  256x256  256x384  384x256  384x384  512x256  512x384
 *     forward      0.79     0.79     0.80     0.79     0.80     0.78     0.77
 *     backward     0.85     0.83     0.82     0.80     0.80     0.79     0.77 */
#include "tiles.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "clones.h"
#include "mask.h"
#include "vexp.h"

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

int dkv_openHead(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, int32_t kvh, dkv_head *h,
                 dkv_err *err) {
    memset(h, 0, sizeof *h);
    if (kvh < 0 || kvh >= p->hkv || l->view.n_segments != p->n_nodes)
        return dkv_fail(err, DKV_EHARNESS, "KV head %d of a problem of %d", (int)kvh, (int)p->hkv);
    h->p = p;
    h->l = l;
    h->in = in;
    h->kvh = kvh;
    h->g = p->hq / p->hkv;
    h->rows = h->g >= DKV_BLOCK_ROWS ? 1 : DKV_BLOCK_ROWS / h->g;
    h->rows = l->view.max_q_len < 1 ? 1 : min64(h->rows, l->view.max_q_len);
    h->max_m = h->rows * h->g;
    h->keys = DKV_TILE_KEYS;
    h->scale = p->scale;
    return DKV_OK;
}

void dkv_closeHead(dkv_head *h) { memset(h, 0, sizeof *h); }

int64_t dkv_blockBytes(const dkv_head *h) {
    int64_t d = h->p->dqk + h->p->dv;
    return (int64_t)sizeof(double) * (h->max_m * d + DKV_TILE_KEYS * d);
}

int dkv_openBlock(const dkv_head *h, dkv_block *b, dkv_err *err) {
    memset(b, 0, sizeof *b);
    b->node = -1;
    b->q = malloc(sizeof(double) * (size_t)(h->max_m * h->p->dqk));
    b->k = malloc(sizeof(double) * (size_t)(DKV_TILE_KEYS * h->p->dqk));
    b->v = malloc(sizeof(double) * (size_t)(DKV_TILE_KEYS * h->p->dv));
    if (h->in->d_o) b->d_o = malloc(sizeof(double) * (size_t)(h->max_m * h->p->dv));
    if (b->q && b->k && b->v && (b->d_o || !h->in->d_o)) return DKV_OK;
    dkv_closeBlock(b);
    return dkv_fail(err, DKV_EHARNESS, "out of memory: a block of %lld rows", (long long)h->max_m);
}

void dkv_closeBlock(dkv_block *b) {
    free(b->q);
    free(b->d_o);
    free(b->k);
    free(b->v);
    memset(b, 0, sizeof *b);
}

/* One row of n elements; the return value is not 0 if one of them is NaN or infinite. */
DKV_CLONES
static unsigned decodeBf16(const uint16_t *in, int64_t n, double *out) {
    unsigned bad = 0;
    for (int64_t i = 0; i < n; i++) {
        union { uint32_t u; float f; } x = {.u = (uint32_t)in[i] << 16};
        out[i] = x.f;
        bad |= (in[i] & 0x7f80u) == 0x7f80u;
    }
    return bad;
}

/* The 15 bits of magnitude, put at the top of a double's fraction and the bottom of its exponent, are the
 * value times 2^-1008, subnormals too; only exponent 31 needs another exponent. */
DKV_CLONES
static unsigned decodeFp16(const uint16_t *in, int64_t n, double *out) {
    unsigned bad = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t special = (in[i] & 0x7c00u) == 0x7c00u;
        union { uint64_t u; double f; } x = {.u = (uint64_t)(in[i] & 0x7fffu) << 42};
        x.f *= 0x1p1008;
        x.u |= (uint64_t)(in[i] & 0x8000u) << 48 | ((0 - special) & 0x7ff0000000000000u);
        out[i] = x.f;
        bad |= (unsigned)special;
    }
    return bad;
}

DKV_CLONES
static unsigned decodeFp32(const float *in, int64_t n, double *out) {
    unsigned bad = 0;
    for (int64_t i = 0; i < n; i++) {
        union { float f; uint32_t u; } x = {.f = in[i]};
        out[i] = x.f;
        bad |= (x.u & 0x7f800000u) == 0x7f800000u;
    }
    return bad;
}

bool dkv_decodeRows(const void *in, dualkv_dtype t, int64_t row0, int64_t n, int64_t heads, int64_t head,
                    int64_t d, double *out) {
    unsigned bad = 0;
    for (int64_t i = 0; i < n; i++, out += d) {
        int64_t at = ((row0 + i) * heads + head) * d;
        if (t == DUALKV_BF16) bad |= decodeBf16((const uint16_t *)in + at, d, out);
        else if (t == DUALKV_FP16) bad |= decodeFp16((const uint16_t *)in + at, d, out);
        else bad |= decodeFp32((const float *)in + at, d, out);
    }
    return bad == 0;
}

bool dkv_stepBlock(const dkv_head *h, dkv_block *b) {
    const dualkv_problem *v = &h->l->view;
    int64_t next = b->r1;
    while (b->node < 0 || next >= v->segments[b->node].q_len) {
        if (b->node + 1 >= v->n_segments) return false;
        b->node++;
        next = 0;
    }
    b->r0 = next;
    b->r1 = min64(next + h->rows, v->segments[b->node].q_len);
    b->m = (b->r1 - b->r0) * h->g;
    b->q_row = v->segments[b->node].q_start + b->r0;
    return true;
}

/* A row's query heads lie side by side in [tq, hq, d], so the stacked row is one row of [tq, hkv, g * d]. */
void dkv_loadBlock(const dkv_head *h, dkv_block *b) {
    const dkv_problem *p = h->p;
    int64_t n = b->r1 - b->r0, wq = (int64_t)h->g * p->dqk, wo = (int64_t)h->g * p->dv;
    b->finite = dkv_decodeRows(h->in->q, p->dtype, b->q_row, n, p->hkv, h->kvh, wq, b->q);
    if (b->d_o) b->finite &= dkv_decodeRows(h->in->d_o, p->dtype, b->q_row, n, p->hkv, h->kvh, wo, b->d_o);
}

bool dkv_nextBlock(const dkv_head *h, dkv_block *b) {
    if (!dkv_stepBlock(h, b)) return false;
    dkv_loadBlock(h, b);
    return true;
}

/* Leaves out keys that no row sees at both ends of a mixed tile, by bisection on what the mask says. */
static void trimTile(const dkv_head *h, const dkv_block *b, int64_t *j0, int64_t *j1) {
    int64_t lo = *j0, hi = *j1, keep = *j1;
    while (lo < hi) { /* smallest end such that [end, j1) is empty; hi always is one */
        int64_t mid = lo + (hi - lo) / 2;
        if (dkv_maskBlock(h->p, b->node, b->r0, b->r1, mid, keep) == 0) hi = mid;
        else lo = mid + 1;
    }
    *j1 = hi;
    lo = *j0;
    hi = *j1 - 1;
    while (lo < hi) { /* largest start such that [j0, start) is empty; lo always is one */
        int64_t mid = hi - (hi - lo) / 2;
        if (dkv_maskBlock(h->p, b->node, b->r0, b->r1, *j0, mid) == 0) lo = mid;
        else hi = mid - 1;
    }
    *j0 = lo;
}

static void loadTile(const dkv_head *h, const dkv_block *b, dkv_tile *t) {
    const dkv_problem *p = h->p;
    int64_t row = t->k_row, head = h->kvh;
    if (h->mutant == DKV_MUTANT_SIBLING && p->nodes[b->node].depth > 0 && row > 0) row--;
    if (h->mutant == DKV_MUTANT_HEAD) head = (head + 1) % p->hkv;
    t->finite = dkv_decodeRows(h->in->k, p->dtype, row, t->n, p->hkv, head, p->dqk, b->k);
    t->finite &= dkv_decodeRows(h->in->v, p->dtype, row, t->n, p->hkv, head, p->dv, b->v);
    t->k = b->k;
    t->v = b->v;
}

bool dkv_nextTile(const dkv_head *h, const dkv_block *b, dkv_tile *t) {
    const dualkv_segment *seg = &h->l->view.segments[b->node];
    int64_t j = t->j1;
    int32_t r = t->range < 0 ? 0 : t->range;
    for (; r < seg->range_count; r++) {
        const dualkv_range *g = &h->l->view.ranges[seg->range_begin + r];
        for (j = j < g->pos ? g->pos : j; j < g->pos + g->len;) {
            int64_t j0 = j, j1 = min64(j + h->keys, g->pos + g->len);
            int vis = dkv_maskBlock(h->p, b->node, b->r0, b->r1, j0, j1);
            j = j1;
            if (vis == 2) trimTile(h, b, &j0, &j1);
            if (vis == 0 || j0 >= j1) continue;
            if (vis == 2) vis = dkv_maskBlock(h->p, b->node, b->r0, b->r1, j0, j1);
            if (vis == 0) continue;
            *t = (dkv_tile){.j0 = j0, .j1 = j1, .n = j1 - j0, .vis = vis, .range = r};
            t->k_row = g->k_start + (j0 - g->pos);
            loadTile(h, b, t);
            return true;
        }
    }
    return false;
}

/* Row r against keys [j0, j1): halves the range until the mask gives one answer for a whole part. */
static void markRow(const dkv_head *h, int32_t node, int64_t r, int64_t j0, int64_t j1, uint8_t *sees) {
    int vis = j1 - j0 > 4 ? dkv_maskBlock(h->p, node, r, r + 1, j0, j1) : 2;
    if (vis != 2) {
        memset(sees, vis, (size_t)(j1 - j0));
    } else if (j1 - j0 <= 4) {
        for (int64_t j = j0; j < j1; j++) sees[j - j0] = dkv_maskSees(h->p, node, r, j);
    } else {
        int64_t mid = j0 + (j1 - j0) / 2;
        markRow(h, node, r, j0, mid, sees);
        markRow(h, node, r, mid, j1, sees + (mid - j0));
    }
}

static int hasEarlierKey(const dkv_head *h, int32_t node, int64_t r, int64_t before) {
    for (int64_t j = 0; j < before; j++)
        if (dkv_maskSees(h->p, node, r, j)) return 1;
    return 0;
}

static void seesRow(const dkv_head *h, const dkv_block *b, const dkv_tile *t, int64_t r, uint8_t *sees) {
    if (t->vis == 1) memset(sees, 1, (size_t)t->n);
    else markRow(h, b->node, r, t->j0, t->j1, sees);
    int64_t diagonal = h->p->nodes[b->node].context + r - t->j0;
    if (h->mutant == DKV_MUTANT_MASK && diagonal >= 0 && diagonal < t->n) sees[diagonal] = 0;
    if (h->mutant == DKV_MUTANT_AHEAD && diagonal + 1 >= 0 && diagonal + 1 < t->n) sees[diagonal + 1] = 1;
    uint8_t *first = h->mutant == DKV_MUTANT_FIRST ? memchr(sees, 1, (size_t)t->n) : NULL;
    if (first && !hasEarlierKey(h, b->node, r, t->j0)) *first = 0;
}

void dkv_tileSees(const dkv_head *h, const dkv_block *b, const dkv_tile *t, uint8_t *sees) {
    for (int64_t r = b->r0; r < b->r1; r++, sees += t->n) seesRow(h, b, t, r, sees);
}

static void capRow(double cap, int64_t n, double *s, double *cap_t) {
    double *x = cap_t ? cap_t : s;
    for (int64_t i = 0; i < n; i++) x[i] = s[i] / cap;
    dkv_vtanh(x, x, (size_t)n);
    for (int64_t i = 0; i < n; i++) s[i] = cap * x[i];
}

static void alibiRow(double slope, double distance, int64_t n, double *s) {
    for (int64_t i = 0; i < n; i++) s[i] -= slope * fabs(distance - (double)i);
}

void dkv_tileScores(const dkv_head *h, const dkv_block *b, const dkv_tile *t, double *s, double *cap_t) {
    const dkv_problem *p = h->p;
    uint8_t sees[DKV_TILE_KEYS];
    int masks = t->vis == 2 || h->mutant == DKV_MUTANT_MASK || h->mutant == DKV_MUTANT_FIRST;
    double scale = h->mutant == DKV_MUTANT_SCALE ? h->scale * (1 + DKV_MUTANT_SCALE_BY) : h->scale;
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)b->m, (int)t->n, p->dqk, scale, b->q, p->dqk,
                t->k, p->dqk, 0.0, s, (int)t->n);
    if (!masks && !p->alibi && !(p->softcap > 0)) return;
    for (int64_t i = 0; i < b->m; i++, s += t->n) {
        int64_t r = b->r0 + i / h->g, g = i % h->g;
        if (p->softcap > 0) capRow(p->softcap, t->n, s, cap_t ? cap_t + i * t->n : NULL);
        double distance = (double)(p->nodes[b->node].context + r - t->j0); /* of the tile's first key */
        if (p->alibi) alibiRow(h->l->alibi_slopes[h->kvh * h->g + g], distance, t->n, s);
        if (!masks) continue;
        if (g == 0) seesRow(h, b, t, r, sees);
        for (int64_t j = 0; j < t->n; j++) s[j] = sees[j] ? s[j] : -INFINITY;
    }
}

void dkv_tileDp(const dkv_head *h, const dkv_block *b, const dkv_tile *t, double *dp) {
    int d = h->p->dv;
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)b->m, (int)t->n, d, 1.0, b->d_o, d, t->v, d,
                0.0, dp, (int)t->n);
}

/* The same sums pair by pair, where masked pairs must not touch what is not finite: into rows, or into keys. */
static void addSeen(const dkv_head *h, const dkv_block *b, const dkv_tile *t, bool keys, double alpha, const double *w,
                    const double *x, int64_t d, double *c, int64_t ldc) {
    uint8_t sees[DKV_TILE_KEYS];
    for (int64_t i = 0; i < b->m; i++) {
        if (i % h->g == 0) seesRow(h, b, t, b->r0 + i / h->g, sees);
        for (int64_t j = 0; j < t->n; j++) {
            double a = alpha * w[i * t->n + j], *to = c + (keys ? j : i) * ldc;
            const double *from = x + (keys ? i : j) * d;
            for (int64_t e = 0; sees[j] && e < d; e++) to[e] += a * from[e];
        }
    }
}

void dkv_addRows(const dkv_head *h, const dkv_block *b, const dkv_tile *t, double alpha, const double *w,
                 const double *x, int64_t d, bool finite, double *c, int64_t ldc) {
    if (!finite && t->vis != 1) addSeen(h, b, t, false, alpha, w, x, d, c, ldc);
    else
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)b->m, (int)d, (int)t->n, alpha, w, (int)t->n, x,
                    (int)d, 1.0, c, (int)ldc);
}

void dkv_addKeys(const dkv_head *h, const dkv_block *b, const dkv_tile *t, double alpha, const double *w,
                 const double *x, int64_t d, bool finite, double *c, int64_t ldc) {
    if (!finite && t->vis != 1) addSeen(h, b, t, true, alpha, w, x, d, c, ldc);
    else
        cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)t->n, (int)d, (int)b->m, alpha, w, (int)t->n, x,
                    (int)d, 1.0, c, (int)ldc);
}

static double *rowAt(const dkv_head *h, int64_t row, int64_t d, const double *packed) {
    return (double *)packed + (row * h->p->hkv + h->kvh) * h->g * d;
}

void dkv_putRows(const dkv_head *h, const dkv_block *b, const double *x, int64_t d, double *packed) {
    int64_t w = h->g * d;
    for (int64_t r = 0; r < b->r1 - b->r0; r++)
        memcpy(rowAt(h, b->q_row + r, d, packed), x + r * w, sizeof(double) * (size_t)w);
}

void dkv_getRows(const dkv_head *h, const dkv_block *b, const double *packed, int64_t d, double *x) {
    int64_t w = h->g * d;
    for (int64_t r = 0; r < b->r1 - b->r0; r++)
        memcpy(x + r * w, rowAt(h, b->q_row + r, d, packed), sizeof(double) * (size_t)w);
}

void dkv_putLse(const dkv_head *h, const dkv_block *b, const double *x, double *packed) {
    for (int64_t i = 0; i < b->m; i++)
        packed[(h->kvh * h->g + i % h->g) * h->l->view.tq + b->q_row + i / h->g] = x[i];
}

void dkv_getLse(const dkv_head *h, const dkv_block *b, const double *packed, double *x) {
    for (int64_t i = 0; i < b->m; i++)
        x[i] = packed[(h->kvh * h->g + i % h->g) * h->l->view.tq + b->q_row + i / h->g];
}

/* Eight lanes, folded in halves: fast at any vector width, and the same result at every one. */
DKV_CLONES
double dkv_maxOf(const double *x, int64_t n) {
    double m[8], best = -INFINITY;
    int64_t i = 0;
    for (int e = 0; e < 8; e++) m[e] = -INFINITY;
    for (; i + 8 <= n; i += 8)
        for (int e = 0; e < 8; e++) m[e] = x[i + e] > m[e] ? x[i + e] : m[e];
    for (int e = 0; e < 8; e++) best = m[e] > best ? m[e] : best;
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}

DKV_CLONES
double dkv_sumOf(const double *x, int64_t n) {
    double s[8] = {0}, tail = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int e = 0; e < 8; e++) s[e] += x[i + e];
    for (; i < n; i++) tail += x[i];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7])) + tail;
}
