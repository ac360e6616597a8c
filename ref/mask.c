#include "mask.h"

#include <stdio.h>

/* Every key of the list, in order of position, that row r of node n may look at: its ancestors' tokens that
 * it sees and its own segment. Position of the row: context + r; position of the key: j. */
bool dkv_maskSees(const dkv_problem *p, int32_t n, int64_t r, int64_t j) {
    const dkv_node *node = &p->nodes[n];
    const int64_t i = node->context + r;
    if (j < 0 || j >= node->context + node->len || r < 0 || r >= node->len) return false;
    switch (p->mask) {
    case DUALKV_FULL: return true;
    case DUALKV_BIDIR: return true;
    case DUALKV_PREFIX: return node->parent < 0 || j <= i;
    case DUALKV_CAUSAL: return j <= i;
    case DUALKV_WINDOW: return j <= i && (i - j < p->window || j < p->window_sinks);
    case DUALKV_CHUNK: return j <= i && i / p->chunk == j / p->chunk;
    case DUALKV_BLOCK:
        return j <= i && dualkv_block_kept(p->block_seed, i / p->block, j / p->block, p->block_density);
    }
    return false;
}

#define BLOCKS_LOOKED_AT 256 /* pairs of mask blocks examined before dkv_maskBlock says "mixed" */

/* Positions first..last of rows and a..b of keys, all on or below the diagonal if `below`. */
static int blockSparse(const dkv_problem *p, int64_t first, int64_t last, int64_t a, int64_t b, bool below) {
    const int64_t q0 = first / p->block, q1 = last / p->block, k0 = a / p->block, k1 = b / p->block;
    int64_t pairs, kept = 0;
    if (__builtin_mul_overflow(q1 - q0 + 1, k1 - k0 + 1, &pairs) || pairs > BLOCKS_LOOKED_AT) return 2;
    for (int64_t q = q0; q <= q1; q++)
        for (int64_t k = k0; k <= k1; k++) kept += dualkv_block_kept(p->block_seed, q, k, p->block_density);
    if (!kept) return 0;
    return kept == pairs && below ? 1 : 2;
}

int dkv_maskBlock(const dkv_problem *p, int32_t n, int64_t r0, int64_t r1, int64_t j0, int64_t j1) {
    const dkv_node *node = &p->nodes[n];
    if (r0 >= r1 || j0 >= j1) return 0;
    const int64_t first = node->context + r0, last = node->context + r1 - 1, a = j0, b = j1 - 1;
    if (p->mask == DUALKV_FULL || p->mask == DUALKV_BIDIR) return 1;
    if (p->mask == DUALKV_PREFIX && node->parent < 0) return 1;
    if (a > last) return 0;
    const bool below = b <= first;
    switch (p->mask) {
    case DUALKV_WINDOW: {
        const int64_t far = a > p->window_sinks ? a : p->window_sinks; /* farthest key that is no sink */
        if (a >= p->window_sinks && first - b >= p->window) return 0;
        return below && (b < far || last - far < p->window) ? 1 : 2;
    }
    case DUALKV_CHUNK:
        if (b / p->chunk < first / p->chunk) return 0;
        return below && a / p->chunk == last / p->chunk ? 1 : 2;
    case DUALKV_BLOCK: return blockSparse(p, first, last, a, b, below);
    default: return below ? 1 : 2;
    }
}

/* "the prompt", "response 3", "branch 2 at depth 2 (segment 9)": how a person finds the node in the line. */
static const char *nameNode(const dkv_problem *p, int32_t n, char *out, size_t size) {
    const dkv_node *node = &p->nodes[n];
    int32_t index = 0;
    if (node->parent < 0) return "the prompt";
    for (int32_t i = node->parent + 1; i < n; i++) index += p->nodes[i].parent == node->parent;
    if (node->depth <= 1)
        snprintf(out, size, "response %d", index);
    else
        snprintf(out, size, "branch %d at depth %d (segment %d)", index, node->depth, n);
    return out;
}

static bool hasQueries(const dkv_node *node) { return !node->key_only && node->len > 0; }

/* A row of ancestor `a` would see a token of `n`: the hidden state shared by all of a's descendants would
 * depend on n. */
static int refuseBidir(const dkv_problem *p, dkv_err *err) {
    char an[64], nn[64];
    for (int32_t n = 0; n < p->n_nodes; n++) {
        const dkv_node *node = &p->nodes[n];
        if (node->len == 0) continue;
        for (int32_t a = node->parent; a >= 0; a = p->nodes[a].parent)
            if (hasQueries(&p->nodes[a]) && node->context > p->nodes[a].context)
                return dkv_fail(err, DKV_EREFUSED,
                                "mask=bidir: row 0 of %s (group %d) would see key %lld, a token of %s",
                                nameNode(p, a, an, sizeof an), p->nodes[a].group, (long long)node->context,
                                nameNode(p, n, nn, sizeof nn));
    }
    return dkv_fail(err, DKV_EREFUSED,
                    "mask=bidir: no shared row here would see a descendant; say mask=full");
}

int dkv_maskAdmissible(const dkv_problem *p, dkv_err *err) {
    char an[64], nn[64];
    if (p->mask == DUALKV_BIDIR) return refuseBidir(p, err);
    if (p->mask != DUALKV_FULL && p->mask != DUALKV_PREFIX) return DKV_OK;
    /* A row that sees its whole segment must find it whole in every sequence where it has a copy. */
    for (int32_t n = 0; n < p->n_nodes; n++) {
        const dkv_node *node = &p->nodes[n];
        if (!hasQueries(node)) continue; /* nobody computes its sequence */
        for (int32_t a = node->parent; a >= 0; a = p->nodes[a].parent) {
            const dkv_node *anc = &p->nodes[a];
            const int64_t seen = node->context - anc->context; /* (a cut between the two is refused there) */
            if (p->mask == DUALKV_PREFIX && anc->parent >= 0) continue;
            if (hasQueries(anc) && seen > 0 && seen < anc->len)
                return dkv_fail(
                    err, DKV_EREFUSED,
                    "mask=%s: row 0 of %s (group %d) sees key %lld, which its copy before %s would "
                    "not see: @%lld cuts through its segment",
                    p->mask == DUALKV_FULL ? "full" : "prefix", nameNode(p, a, an, sizeof an), anc->group,
                    (long long)node->context, nameNode(p, n, nn, sizeof nn), (long long)node->context);
        }
    }
    return DKV_OK;
}
