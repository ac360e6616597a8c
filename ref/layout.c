#include "layout.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "mask.h"

/* ---- packed ---- */

/* Appends what segment i sees: the first `context` tokens of its parent's list, then its own. `cap`: room in
 * l->ranges. */
static int put_ranges(dkv_layout *l, int32_t i, int64_t *cap, dkv_err *err) {
    dualkv_segment *s = &l->segments[i];
    const dualkv_segment *up = s->parent < 0 ? NULL : &l->segments[s->parent];
    int64_t n = l->view.n_ranges, most = n + (up ? up->range_count : 0) + 1;
    if (most > *cap) {
        int64_t room = most * 2;
        dualkv_range *ranges = realloc(l->ranges, (size_t)room * sizeof *ranges);
        if (!ranges) return dkv_fail(err, DKV_EHARNESS, "out of memory for %" PRId64 " key ranges", room);
        l->ranges = ranges;
        *cap = room;
    }
    int64_t left = s->context;
    s->range_begin = n;
    for (int32_t k = 0; up && k < up->range_count && left > 0; k++) {
        dualkv_range r = l->ranges[up->range_begin + k];
        if (r.len > left) r.len = left;
        left -= r.len;
        l->ranges[n++] = r;
    }
    if (s->k_len) l->ranges[n++] = (dualkv_range){s->k_start, s->k_len, s->context};
    s->range_count = (int32_t)(n - s->range_begin);
    l->view.n_ranges = n;
    return 0;
}

int dkv_makeLayout(const dkv_problem *p, dkv_layout *out, dkv_err *err) {
    int64_t cap = 0;
    int code = 0;
    *out = (dkv_layout){0};
    dualkv_problem *v = &out->view;
    *v = (dualkv_problem){.size = sizeof *v,
                          .n_groups = p->n_groups,
                          .n_segments = p->n_nodes,
                          .hq = p->hq,
                          .hkv = p->hkv,
                          .dqk = p->dqk,
                          .dv = p->dv,
                          .dtype = p->dtype,
                          .mask = p->mask,
                          .alibi = p->alibi,
                          .sink = p->sink,
                          .dlse = p->dlse,
                          .grad = p->grad,
                          .window = p->window,
                          .window_sinks = p->window_sinks,
                          .chunk = p->chunk,
                          .block = p->block,
                          .block_density = p->block_density,
                          .block_seed = p->block_seed,
                          .scale = p->scale,
                          .softcap = p->softcap};
    out->segments = calloc((size_t)p->n_nodes + 1, sizeof *out->segments);
    if (p->alibi) out->alibi_slopes = calloc((size_t)p->hq, sizeof *out->alibi_slopes);
    if (!out->segments || (p->alibi && !out->alibi_slopes))
        code = dkv_fail(err, DKV_EHARNESS, "out of memory");
    if (!code && p->alibi) dkv_fillSlopes(p->hq, out->alibi_slopes);
    for (int32_t i = 0; i < p->n_nodes && !code; i++) {
        const dkv_node *n = &p->nodes[i];
        int64_t q_len = n->key_only ? 0 : n->len;
        out->segments[i] = (dualkv_segment){.group = n->group,
                                            .parent = n->parent,
                                            .depth = n->depth,
                                            .q_start = v->tq,
                                            .q_len = q_len,
                                            .k_start = v->tk,
                                            .k_len = n->len,
                                            .context = n->context};
        v->tq += q_len;
        v->tk += n->len;
        if (q_len > v->max_q_len) v->max_q_len = q_len;
        if (n->context + n->len > v->max_k_len) v->max_k_len = n->context + n->len;
        code = put_ranges(out, i, &cap, err);
    }
    v->segments = out->segments;
    v->ranges = out->ranges;
    v->alibi_slopes = out->alibi_slopes;
    if (code) dkv_freeLayout(out);
    return code;
}

void dkv_freeLayout(dkv_layout *l) {
    if (!l) return;
    free(l->segments);
    free(l->ranges);
    free(l->alibi_slopes);
    *l = (dkv_layout){0};
}

void dkv_fillSlopes(int32_t hq, float *slopes) {
    int32_t m = 1;
    while (m <= hq / 2) m *= 2;
    for (int32_t h = 0; h < hq; h++)
        slopes[h] = (float)(h < m ? exp2(-8.0 * (h + 1) / m) : exp2(-8.0 * (2 * (h - m) + 1) / (2.0 * m)));
}

/* ---- replicated ---- */

/* The chain root..i, and how many tokens of each the segment i sees (its own: all). Returns its length. */
static int chain_of(const dkv_problem *p, int32_t i, int32_t chain[DKV_DEPTH_MAX],
                    int64_t seen[DKV_DEPTH_MAX]) {
    int n = p->nodes[i].depth + 1;
    for (int32_t k = n - 1, a = i; k >= 0; k--, a = p->nodes[a].parent) chain[k] = a;
    /* What i sees is a beginning of every list below it, so each cut moves down the chain: the tokens of
     * chain[k] lie at positions from the context of chain[k]. */
    for (int k = 0; k < n - 1; k++) {
        const dkv_node *a = &p->nodes[chain[k]];
        int64_t left = p->nodes[i].context - a->context;
        for (int j = k + 1; j < n - 1; j++)
            if (p->nodes[chain[j]].context - a->context < left)
                left = p->nodes[chain[j]].context - a->context;
        seen[k] = left < 0 ? 0 : left < a->len ? left : a->len;
    }
    seen[n - 1] = p->nodes[i].len;
    return n;
}

static bool has_queries(const dkv_node *n) { return n->len > 0 && !n->key_only; }

/* Is the copy of node i's sequence plain attention of one segment? */
static bool is_plain(const dkv_problem *p, int32_t root) {
    return dkv_maskRow(p->mask)->whole == DKV_WHOLE_NEVER && !p->nodes[root].key_only;
}

/* The replicated problem's nodes. */
static int replicate_nodes(const dkv_problem *p, dkv_problem *rep, dkv_err *err) {
    int32_t chain[DKV_DEPTH_MAX];
    int64_t seen[DKV_DEPTH_MAX], total = 0;
    for (int32_t i = 0; i < p->n_nodes; i++)
        if (has_queries(&p->nodes[i])) total += p->nodes[i].depth + 1;
    rep->nodes = malloc((size_t)(total + 1) * sizeof *rep->nodes);
    if (!rep->nodes) return dkv_fail(err, DKV_EHARNESS, "out of memory for %" PRId64 " segments", total);
    for (int32_t i = 0; i < p->n_nodes; i++) {
        if (!has_queries(&p->nodes[i])) continue;
        int n = chain_of(p, i, chain, seen);
        dkv_node *to = &rep->nodes[rep->n_nodes];
        if (is_plain(p, chain[0])) {
            *to = (dkv_node){
                .parent = -1, .group = rep->n_groups, .len = p->nodes[i].context + p->nodes[i].len};
            n = 1;
        } else {
            for (int k = 0; k < n; k++)
                to[k] = (dkv_node){.parent = k ? rep->n_nodes + k - 1 : -1,
                                   .group = rep->n_groups,
                                   .depth = k,
                                   .key_only = p->nodes[chain[k]].key_only,
                                   .len = seen[k],
                                   .context = k ? to[k - 1].context + to[k - 1].len : 0};
        }
        rep->n_nodes += n;
        rep->n_groups++;
    }
    return 0;
}

int dkv_makeReplicated(const dkv_problem *p, const dkv_layout *packed, dkv_layout *out, int64_t **q_source,
                       int64_t **k_source, uint8_t **q_own, dkv_err *err) {
    dkv_problem rep = *p;
    int64_t *qs = NULL, *ks = NULL, nq = 0, nk = 0;
    uint8_t *own = NULL;
    rep.nodes = NULL;
    rep.n_nodes = rep.n_groups = 0;
    *out = (dkv_layout){0};
    int code = replicate_nodes(p, &rep, err);
    if (!code) code = dkv_makeLayout(&rep, out, err);
    free(rep.nodes);
    if (code) return code;
    qs = malloc(((size_t)out->view.tq + 1) * sizeof *qs);
    ks = malloc(((size_t)out->view.tk + 1) * sizeof *ks);
    own = malloc((size_t)out->view.tq + 1);
    if (!qs || !ks || !own) {
        code = dkv_fail(err, DKV_EHARNESS, "out of memory for the sources of %" PRId64 " replicated rows",
                        out->view.tk);
        dkv_freeLayout(out);
        goto done;
    }
    for (int32_t i = 0; i < p->n_nodes; i++) {
        int32_t chain[DKV_DEPTH_MAX];
        int64_t seen[DKV_DEPTH_MAX];
        if (!has_queries(&p->nodes[i])) continue;
        int n = chain_of(p, i, chain, seen);
        for (int k = 0; k < n; k++) {
            const dualkv_segment *s = &packed->segments[chain[k]];
            for (int64_t t = 0; t < seen[k]; t++) ks[nk++] = s->k_start + t;
            for (int64_t t = 0; t < seen[k] && s->q_len; t++) {
                own[nq] = k == n - 1;
                qs[nq++] = s->q_start + t;
            }
        }
    }
    if (q_source) *q_source = qs, qs = NULL;
    if (k_source) *k_source = ks, ks = NULL;
    if (q_own) *q_own = own, own = NULL;
done:
    free(qs);
    free(ks);
    free(own);
    return code;
}

/* ---- counts ---- */

typedef __int128 wide; /* 2^40 rows of 2^40 keys are 2^80 pairs */

static wide triangle(wide n) { return n > 0 ? n * (n + 1) / 2 : 0; }

/* Sum over positions p in [0, n) of min(p + 1, w). */
static wide capped(wide n, wide w) { return n <= w ? triangle(n) : triangle(w) + (n - w) * w; }

/* Sum over p in [0, n) of the keys that a row at position p sees. */
static wide below_window(const dkv_problem *p, wide n) {
    wide w = p->window; /* before the window begins at p - w + 1, the first S keys are seen as well */
    return capped(n, w) + (n > w ? capped(n - w, p->window_sinks) : 0);
}

static wide below_chunk(const dkv_problem *p, wide n) {
    return n / p->chunk * triangle(p->chunk) + triangle(n % p->chunk);
}

#define COUNTED ((wide)1 << 28) /* above this many pairs (of blocks) the expected count stands in */

static wide block_pairs(const dkv_problem *p, int64_t first, int64_t end) {
    int64_t b = p->block, q0 = first / b, q1 = (end - 1) / b;
    if ((wide)(q1 - q0 + 1) * (q1 + 1) > COUNTED)
        return (wide)(p->block_density * (double)(triangle(end) - triangle(first)));
    wide pairs = 0;
    for (int64_t q = q0; q <= q1; q++) {
        int64_t lo = q * b > first ? q * b : first, hi = (q + 1) * b < end ? (q + 1) * b : end, kept = 0;
        for (int64_t k = 0; k < q; k++) kept += dualkv_block_kept(p->block_seed, q, k, p->block_density);
        pairs += (wide)kept * b * (hi - lo);
        if (dualkv_block_kept(p->block_seed, q, q, p->block_density))
            pairs += triangle(hi - q * b) - triangle(lo - q * b);
    }
    return pairs;
}

/* Pair by pair; above the limit those of the causal mask, of which it is a part. */
static wide each_pair(const dkv_problem *p, const dkv_node *n, wide causal) {
    const dkv_mask_view v = dkv_viewMask(p, (int32_t)(n - p->nodes));
    wide pairs = 0;
    if (causal > COUNTED) return causal;
    for (int64_t r = 0; r < n->len; r++)
        for (int64_t j = 0; j <= n->context + r; j++) pairs += dkv_pairSees(&v, r, j);
    return pairs;
}

static wide node_pairs(const dkv_problem *p, const dkv_node *n) {
    const int64_t first = n->context, end = n->context + n->len;
    const wide causal = triangle(end) - triangle(first);
    if (dkv_maskWhole(p, (int32_t)(n - p->nodes))) return (wide)n->len * end;
    if (dkv_maskKeys(p) == DKV_KEYS_ALL) return causal;
    switch (p->mask) {
    case DUALKV_WINDOW: return below_window(p, end) - below_window(p, first);
    case DUALKV_CHUNK: return below_chunk(p, end) - below_chunk(p, first);
    case DUALKV_BLOCK: return block_pairs(p, first, end);
    default: return each_pair(p, n, causal);
    }
}

static wide count_pairs(const dkv_problem *p) {
    wide pairs = 0;
    for (int32_t i = 0; i < p->n_nodes; i++)
        if (has_queries(&p->nodes[i])) pairs += node_pairs(p, &p->nodes[i]);
    return pairs;
}

int64_t dkv_countPairs(const dkv_problem *p) {
    wide pairs = count_pairs(p);
    return pairs > INT64_MAX ? INT64_MAX : (int64_t)pairs;
}

double dkv_forwardFlops(const dkv_problem *p) {
    return 2.0 * (p->dqk + p->dv) * p->hq * (double)count_pairs(p);
}

double dkv_backwardFlops(const dkv_problem *p) {
    return (6.0 * p->dqk + 4.0 * p->dv) * p->hq * (double)count_pairs(p);
}
