/* What part of an error a change of one thing explains. Every row counts the same: what is left of its
 * error, squared, over its error, squared. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/mask.h"
#include "../ref/tiles.h"
#include "diagnose_impl.h"

enum { ROWS = 256, KEYS = 32, PARTS = 96, TILES = 32, EQUATIONS_DIM = DKV_DIM_MAX };

#define FAINT 0.2 /* of an error and its noise: less of it tells nothing */

/* At most `n` of the rows that are off (of all, where none is) and finite, spread evenly. */
static int sampleRows(const dkv_map *m, dkv_tensor_id id, int n, int64_t *rows) {
    int64_t all = m->tokens * m->heads, good = 0, seen = 0;
    int taken = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < all; i++) {
            bool use = (m->off[i] > 0 && m->off[i] < 3) || !m->n_off;
            for (int64_t c = 0; c < m->dim && use; c++) {
                int64_t at = dkv_mapAt(m, id, i, c);
                use = isfinite(m->got[at]) && isfinite(m->base[at]);
            }
            if (!use) continue;
            if (!pass)
                good++;
            else if (seen++ * n / good >= taken && taken < n)
                rows[taken++] = i;
        }
    return taken;
}

double dkv_fitFactor(const dkv_diag *d, dkv_tensor_id id, double *factor) {
    const dkv_map *m = &d->map[id];
    double above = 0, below = 0, left = 0, n = 0;
    *factor = NAN;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < m->tokens * m->heads; i++) {
            double ee = 0, ew = 0, ww = 0;
            if (!m->off[i]) continue;
            for (int64_t c = 0; c < m->dim; c++) {
                int64_t at = dkv_mapAt(m, id, i, c);
                double e = m->got[at] - m->want[at];
                ee += e * e, ew += e * m->want[at], ww += m->want[at] * m->want[at];
            }
            if (!(ee > 0) || !isfinite(ee) || !isfinite(ww)) continue;
            const double x = pass ? *factor - 1 : 0;
            if (!pass)
                above += ew / ee, below += ww / ee;
            else
                left += fmin(1, (ee - 2 * x * ew + x * x * ww) / ee), n++;
        }
        if (!pass && !(below > 0)) return NAN;
        if (!pass) *factor = 1 + above / below;
    }
    return n > 1 || m->dim > 1 ? 1 - left / n : NAN;
}

/* Each row counts by its noise where the arithmetic is known, and the noise that rounding leaves is taken
 * off: faults that are not much larger than it have their share, too. */
double dkv_fitDelta(const dkv_diag *d) {
    const dkv_map *m = &d->map[DKV_DQ];
    const dualkv_problem *v = &d->c->packed.view;
    const double *sigma2 = d->known && d->c->oracle.has_twin[DKV_DQ] ? d->c->oracle.sigma2.dq : NULL;
    dkv_pairs x;
    int64_t rows[ROWS];
    double gross = 0, fine = 0, all = 0, grow[DKV_DIM_MAX];
    const int n = sampleRows(m, DKV_DQ, ROWS, rows);
    if (!n || v->dqk < 4 || dkv_openPairs(d, &x, NULL)) return NAN;
    for (int i = 0; i < n; i++) {
        int64_t t = rows[i] / v->hq;
        int32_t h = (int32_t)(rows[i] % v->hq), s = dkv_segmentOf(&d->c->packed, false, t);
        double ee = 0, eg = 0, gg = 0, noise = 0;
        dkv_pairRow(&x, s, t - v->segments[s].q_start, h, true);
        memset(grow, 0, sizeof grow);
        for (int64_t j = 0; j < x.n; j++)
            for (int c = 0; c < v->dqk && x.p[j] > 0; c++)
                grow[c] += x.p[j] * x.slope[j] * x.k[j * v->dqk + c];
        for (int c = 0; c < v->dqk; c++) {
            const int64_t at = rows[i] * v->dqk + c;
            const double e = m->got[at] - m->base[at];
            ee += e * e, eg += e * grow[c], gg += grow[c] * grow[c];
            if (sigma2) noise += sigma2[at];
        }
        if (!(ee > 0 && gg > 0)) continue;
        gross += eg * eg / (ee * gg);
        if (!(noise > 0)) continue;
        fine += (eg * eg / gg - noise / v->dqk) / (ee + noise);
        all += (ee - noise) / (ee + noise);
    }
    dkv_closePairs(&x);
    gross = (gross / n - 1.0 / v->dqk) / (1 - 1.0 / v->dqk); /* chance alone explains 1/Dqk */
    return all > FAINT * n ? fmax(gross, fine / all) : gross;
}

/* ---- parts of a sum ---- */

typedef struct system { /* least squares: e = sum_b x_b part_b */
    int n;
    double a[PARTS][PARTS], b[PARTS], x[PARTS], weight[PARTS];
    double share;
} equations;

static void addRow(equations *q, const double *parts, const double *e, int dim) {
    double ee = 0;
    for (int c = 0; c < dim; c++) ee += e[c] * e[c];
    if (!(ee > 0) || !isfinite(ee)) return;
    for (int i = 0; i < q->n; i++) {
        const double *p = parts + (size_t)i * EQUATIONS_DIM;
        double be = 0;
        for (int c = 0; c < dim; c++) be += p[c] * e[c];
        q->b[i] += be / ee;
        for (int k = 0; k <= i; k++) {
            const double *o = parts + (size_t)k * EQUATIONS_DIM;
            double s = 0;
            for (int c = 0; c < dim; c++) s += p[c] * o[c];
            q->a[i][k] += s / ee;
        }
    }
    q->share++; /* rows, until solved */
}

/* Cholesky with a little on the diagonal: parts that are not there get 0. */
static void solve(equations *q) {
    static __thread double l[PARTS][PARTS];
    double y[PARTS], rows = q->share, most = 0, left;
    for (int i = 0; i < q->n; i++) most = fmax(most, q->a[i][i]);
    for (int i = 0; i < q->n; i++)
        for (int k = 0; k <= i; k++) {
            double s = q->a[i][k] + (i == k ? 1e-9 * most + 1e-300 : 0);
            for (int j = 0; j < k; j++) s -= l[i][j] * l[k][j];
            l[i][k] = i == k ? sqrt(fmax(s, 1e-300)) : s / l[k][k];
        }
    for (int i = 0; i < q->n; i++) {
        y[i] = q->b[i];
        for (int j = 0; j < i; j++) y[i] -= l[i][j] * y[j];
        y[i] /= l[i][i];
    }
    for (int i = q->n - 1; i >= 0; i--) {
        q->x[i] = y[i];
        for (int j = i + 1; j < q->n; j++) q->x[i] -= l[j][i] * q->x[j];
        q->x[i] /= l[i][i];
    }
    left = rows;
    for (int i = 0; i < q->n; i++) {
        left -= 2 * q->x[i] * q->b[i];
        for (int k = 0; k < q->n; k++) left += q->x[i] * q->x[k] * (i >= k ? q->a[i][k] : q->a[k][i]);
        q->weight[i] = q->a[i][i] * q->x[i] * q->x[i] / fmax(rows, 1); /* of the error, if it stood alone */
    }
    q->share = rows > 0 ? 1 - left / rows : 0;
}

/* Which part a pair belongs to, by how finely parts are cut: 0 all; 1 context, own; 2 by response and head;
 * 3 tiles. */
typedef struct cut {
    int level, g;        /* query heads of a KV head */
    int64_t tile, tiles; /* of 3 */
} cut;

static int countParts(const cut *u) {
    return u->level == 0 ? 1 : u->level == 1 ? 2 : u->level == 2 ? PARTS : (int)(3 * u->tiles);
}

/* A pair within a segment (own), or not; child: number of the response; head in the group; place: row or key
 * in its segment. */
static int partOf(const cut *u, bool own, bool root, int64_t child, int head, int64_t place) {
    const int slots = PARTS / u->g;
    if (u->level == 0) return 0;
    if (u->level == 1) return own ? 1 : 0;
    if (u->level == 2) return head * slots + (own ? 0 : 1 + (int)(child < slots - 2 ? child : slots - 2));
    return (int)((own ? (root ? 2 : 1) * u->tiles : 0) +
                 (place / u->tile < u->tiles ? place / u->tile : u->tiles - 1));
}

static void quantify(double x, char *out, size_t n) {
    if (fabs(x + 1) < 0.08)
        snprintf(out, n, "left out");
    else if (fabs(x - 1) < 0.08)
        snprintf(out, n, "counted twice");
    else
        snprintf(out, n, "times %.*g", fabs(x) < 0.1 ? 4 : 2, 1 + x); /* never "times 1" */
}

/* The query heads and responses whose parts are wrong: heads that are wrong for every response are named
 * alone. */
static void sayLevel2(const equations *q, const cut *u, const bool *bad, dkv_parts *out) {
    const int slots = PARTS / u->g;
    char heads[80] = "", of[100] = "", how[40] = "";
    bool by_head[PARTS] = {false}, by_slot[PARTS] = {false};
    int n_heads = 0, at = 0;
    double x = 0, n = 0;
    for (int i = 0; i < q->n; i++) {
        if (!bad[i]) continue;
        by_head[i / slots] = by_slot[i % slots] = true;
        x += q->x[i], n++;
    }
    for (int h = 0; h < u->g; h++) n_heads += by_head[h];
    if (n_heads < u->g)
        for (int h = 0; h < u->g; h++)
            if (by_head[h] && at < 60)
                at += snprintf(heads + at, sizeof heads - (size_t)at, "%s%d", at ? ", " : "", h);
    at = 0;
    int wrong = 0, last = -1;
    for (int s = 1; s < slots; s++) {
        for (int h = 0; h < u->g; h++)
            if (q->a[h * slots + s][h * slots + s] > 0) last = s;
        wrong += by_slot[s];
    }
    if (wrong == 1 && last > 0 && by_slot[last] && last > 1)
        snprintf(of, sizeof of, "the last response's rows");
    else if (wrong == last && last > 0)
        snprintf(of, sizeof of, by_slot[0] ? "all rows" : "all responses' rows");
    else if (wrong == last - 1 && last > 1 && !by_slot[last])
        snprintf(of, sizeof of, "the rows of all responses but the last");
    else if (wrong == last - 1 && last > 1 && !by_slot[1])
        snprintf(of, sizeof of, "the rows of all responses but the first");
    else {
        for (int s = 1; s < slots; s++)
            if (by_slot[s] && at < 70)
                at +=
                    snprintf(of + at, sizeof of - (size_t)at, "%s%d", at ? ", " : "rows of response ", s - 1);
        if (!wrong) snprintf(of, sizeof of, "the segment's own rows");
    }
    quantify(n > 0 ? x / n : 0, how, sizeof how);
    snprintf(out->words, sizeof out->words, "%s%s%s: %s", of, heads[0] ? ", query head in the group " : "",
             heads, how);
}

static void sayTiles(const equations *q, const cut *u, const bool *bad, bool keys, dkv_parts *out) {
    int n = 0, at = 0;
    double x = 0;
    char how[40], list[120] = "";
    for (int i = 0; i < q->n; i++) {
        if (!bad[i]) continue;
        x += q->x[i], n++;
        if (at < 90)
            at += snprintf(list + at, sizeof list - (size_t)at, "%s%s %lld", at ? ", " : "",
                           i >= 2 * u->tiles       ? "prompt"
                           : i >= u->tiles || keys ? "response"
                                                   : "context",
                           (long long)(i % u->tiles));
    }
    quantify(n ? x / n : 0, how, sizeof how);
    snprintf(out->words, sizeof out->words, "tiles of %lld %s (%s): %s", (long long)u->tile,
             keys ? "rows" : "keys", list, how);
}

static bool readParts(equations *q, const cut *u, bool keys, dkv_parts *out) {
    bool bad[PARTS];
    double most = 0;
    char how[40];
    solve(q);
    memset(out, 0, sizeof *out);
    out->share = q->share;
    for (int i = 0; i < q->n; i++) most = fmax(most, q->weight[i]);
    for (int i = 0; i < q->n; i++) {
        bad[i] = q->weight[i] > 0.02 * most && fabs(q->x[i]) > 0.02;
        if (!bad[i]) continue;
        const bool own = u->level == 0 || (u->level == 1 && i == 1) ||
                         (u->level == 2 && i % (PARTS / u->g) == 0) || (u->level == 3 && i >= u->tiles);
        if (own) out->own = true;
        if (!own || u->level == 0) out->context = true;
    }
    quantify(q->x[q->n > 1 && bad[1] && !bad[0] ? 1 : 0], how, sizeof how);
    if (u->level == 0) snprintf(out->words, sizeof out->words, "all of it: %s", how);
    if (u->level == 1)
        snprintf(out->words, sizeof out->words, "%s: %s",
                 out->own && out->context ? "both parts"
                 : out->own               ? "the pairs within a segment"
                 : keys                   ? "the rows below the segment"
                                          : "the keys before the segment",
                 how);
    if (u->level == 2) sayLevel2(q, u, bad, out);
    if (u->level == 3) sayTiles(q, u, bad, keys, out);
    return out->share > 0.9;
}

/* ---- dQ ---- */

static void addQuery(const dkv_diag *d, dkv_pairs *x, const cut *u, int64_t row, equations *q,
                     double *parts) {
    const dkv_map *m = &d->map[DKV_DQ];
    const dualkv_problem *v = &d->c->packed.view;
    int64_t t = row / v->hq;
    int32_t s = dkv_segmentOf(&d->c->packed, false, t);
    double e[DKV_DIM_MAX];
    dkv_pairRow(x, s, t - v->segments[s].q_start, (int32_t)(row % v->hq), true);
    memset(parts, 0, (size_t)q->n * EQUATIONS_DIM * sizeof *parts);
    for (int64_t j = 0; j < x->n; j++) {
        const bool own = j >= x->context;
        int at = partOf(u, own, v->segments[s].depth == 0, 0, 0, own ? j - x->context : j);
        for (int c = 0; c < v->dqk && x->p[j] > 0; c++)
            parts[at * EQUATIONS_DIM + c] += (double)d->c->p->scale * x->ds[j] * x->k[j * v->dqk + c];
    }
    for (int c = 0; c < v->dqk; c++) e[c] = m->got[row * v->dqk + c] - m->base[row * v->dqk + c];
    addRow(q, parts, e, v->dqk);
}

/* ---- dK, dV ---- */

typedef struct
    query_rows { /* of one KV head: all packed rows of its query heads, in double, with LSE and delta */
    double *q, *d_o, *lse, *delta;
} query_rows;

static int childNumber(const dualkv_problem *v, int32_t of, int32_t i) {
    int n = -1;
    for (int32_t k = of + 1; k <= i; k++) n += v->segments[k].parent == of;
    return n;
}

static void addPair(const dkv_diag *d, dkv_tensor_id id, const double *k, const double *value,
                    const double *qv, const double *dov, double lse, double delta, double bias,
                    double *part) {
    const dkv_problem *p = d->c->p;
    double s = 0, dp = 0, slope = 1;
    for (int c = 0; c < p->dqk; c++) s += qv[c] * k[c];
    s *= (double)p->scale;
    if (p->softcap > 0) {
        double t = tanh(s / (double)p->softcap);
        slope = 1 - t * t;
        s = (double)p->softcap * t;
    }
    double w = exp(s - bias - (lse == -INFINITY ? 0 : lse));
    if (id == DKV_DV) {
        for (int c = 0; c < p->dv; c++) part[c] += w * dov[c];
        return;
    }
    for (int c = 0; c < p->dv; c++) dp += dov[c] * value[c];
    w *= (dp - delta) * slope * (double)p->scale;
    for (int c = 0; c < p->dqk; c++) part[c] += w * qv[c];
}

static void addKey(const dkv_diag *d, dkv_tensor_id id, const cut *u, int64_t row, equations *q,
                   double *parts) {
    const dkv_case *c = d->c;
    const dkv_map *m = &d->map[id];
    const dualkv_problem *v = &c->packed.view;
    const int64_t t = row / v->hkv, kvh = row % v->hkv;
    const int32_t of = dkv_segmentOf(&c->packed, true, t);
    const int64_t offset = t - v->segments[of].k_start;
    double k[DKV_DIM_MAX], val[DKV_DIM_MAX], qv[DKV_DIM_MAX], dov[DKV_DIM_MAX], e[DKV_DIM_MAX];
    dkv_decodeRows(c->in.k, c->p->dtype, t, 1, v->hkv, kvh, v->dqk, k);
    dkv_decodeRows(c->in.v, c->p->dtype, t, 1, v->hkv, kvh, v->dv, val);
    memset(parts, 0, (size_t)q->n * EQUATIONS_DIM * sizeof *parts);
    for (int32_t i = of; i < v->n_segments && (i == of || v->segments[i].depth > v->segments[of].depth);
         i++) {
        const dualkv_segment *s = &v->segments[i];
        const dualkv_range *g = NULL;
        for (int32_t a = 0; a < s->range_count; a++)
            if (v->ranges[s->range_begin + a].k_start == v->segments[of].k_start)
                g = &v->ranges[s->range_begin + a];
        if (!g || offset >= g->len) continue;
        const int child = i == of ? 0 : childNumber(v, of, i);
        for (int64_t r = 0; r < s->q_len; r++) {
            if (!dkv_maskSees(c->p, i, r, g->pos + offset)) continue;
            for (int a = 0; a < u->g; a++) {
                const int64_t h = kvh * u->g + a, at = s->q_start + r;
                double delta = 0, bias = 0;
                dkv_decodeRows(c->in.q, c->p->dtype, at, 1, v->hq, h, v->dqk, qv);
                dkv_decodeRows(c->in.d_o, c->p->dtype, at, 1, v->hq, h, v->dv, dov);
                for (int b = 0; b < v->dv && id == DKV_DK; b++)
                    delta += dov[b] * d->own.o[(at * v->hq + h) * v->dv + b];
                if (c->in.d_lse) delta -= (double)c->in.d_lse[h * v->tq + at];
                if (c->p->alibi)
                    bias =
                        (double)c->packed.alibi_slopes[h] * fabs((double)(s->context + r - g->pos - offset));
                addPair(d, id, k, val, qv, dov, d->own.lse[h * v->tq + at], delta, bias,
                        parts + (size_t)partOf(u, i == of, s->depth == 0, child, a, r) * EQUATIONS_DIM);
            }
        }
    }
    for (int b = 0; b < m->dim; b++) e[b] = m->got[row * m->dim + b] - m->base[row * m->dim + b];
    addRow(q, parts, e, (int)m->dim);
}

/* Tile of level 3: no more than TILES of them. */
static int64_t chooseTile(const dkv_diag *d) {
    const dualkv_problem *v = &d->c->packed.view;
    int64_t longest = 1, tile = 16;
    for (int32_t i = 0; i < v->n_segments; i++) {
        longest = v->segments[i].k_len > longest ? v->segments[i].k_len : longest;
        longest = v->segments[i].context > longest ? v->segments[i].context : longest;
    }
    while (longest > tile * TILES) tile *= 2;
    return tile;
}

bool dkv_fitParts(const dkv_diag *d, dkv_tensor_id id, dkv_parts *out) {
    const dualkv_problem *v = &d->c->packed.view;
    int64_t rows[ROWS];
    const bool keys = id != DKV_DQ;
    const double pairs = (double)v->tq * (double)(v->hq / v->hkv);
    const int most = keys ? (pairs > 1e5 ? 8 : KEYS) : (pairs > 1e5 ? 32 : ROWS);
    const int n = sampleRows(&d->map[id], id, most, rows), g = v->hq / v->hkv;
    equations *q = malloc(sizeof *q);
    double *parts = malloc((size_t)PARTS * EQUATIONS_DIM * sizeof *parts);
    dkv_pairs x = {0};
    bool found = false;
    memset(out, 0, sizeof *out);
    if (n && q && parts && !dkv_openPairs(d, &x, NULL))
        for (int level = 0; level <= 3 && !found && !dkv_stopRequested; level++) {
            cut u = {level, g, chooseTile(d), TILES};
            if (level == 2 && (!keys || g > PARTS / 4)) continue;
            memset(q, 0, sizeof *q);
            q->n = countParts(&u);
            if ((double)n * (double)d->map[id].dim < 3.0 * q->n) break;
            for (int i = 0; i < n; i++) {
                if (keys)
                    addKey(d, id, &u, rows[i], q, parts);
                else
                    addQuery(d, &x, &u, rows[i], q, parts);
            }
            found = readParts(q, &u, keys, out);
        }
    dkv_closePairs(&x);
    free(q);
    free(parts);
    return found;
}

/* ---- moved rows ---- */

static bool holds(const dkv_map *m, dkv_tensor_id id, int64_t row, int64_t other) {
    bool differs = false;
    for (int64_t c = 0; c < m->dim; c++) {
        int64_t to = dkv_mapAt(m, id, row, c), from = dkv_mapAt(m, id, other, c);
        if (!(fabs(m->got[to] - m->want[from]) <= m->bound[from])) return false;
        differs |= fabs(m->want[to] - m->want[from]) > m->bound[from] + m->bound[to];
    }
    return differs;
}

double dkv_findMoved(const dkv_diag *d, dkv_tensor_id id, char *words, size_t n) {
    enum { SAMPLE = 24 };
    const dkv_map *m = &d->map[id];
    int64_t rows[SAMPLE], shift = 0;
    int taken = sampleRows(m, id, SAMPLE, rows), zero = 0, moved = 0, alike = 0, head = -1;
    words[0] = 0;
    if (!taken || m->dim < 4) return 0;
    for (int i = 0; i < taken; i++) {
        bool all_zero = true;
        for (int64_t c = 0; c < m->dim; c++) all_zero &= m->got[dkv_mapAt(m, id, rows[i], c)] == 0;
        zero += all_zero;
        for (int64_t o = 0; o < m->tokens * m->heads && !all_zero; o++) {
            if (o == rows[i] || !holds(m, id, rows[i], o)) continue;
            int64_t by = o / m->heads - rows[i] / m->heads;
            int to = (int)(o % m->heads - rows[i] % m->heads);
            alike += moved && by == shift && to == head;
            if (!moved++) shift = by, head = to;
            break;
        }
    }
    if (zero * 10 >= taken * 9) {
        snprintf(words, n, "they are zero");
        return (double)zero / taken;
    }
    if (moved * 10 < taken * 9) return 0;
    if (alike + 1 == moved && shift)
        snprintf(words, n, "each holds what belongs %lld %s %s", (long long)(shift < 0 ? -shift : shift),
                 m->keys ? "keys" : "rows", shift < 0 ? "before it" : "behind it");
    else
        snprintf(words, n, "they hold values of other rows or heads");
    return (double)moved / taken;
}
