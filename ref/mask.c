#include "mask.h"

#include <stdio.h>

bool dkv_maskWhole(const dkv_problem *p, int32_t n) {
    const dkv_mask_view v = dkv_viewMask(p, n);
    return dkv_pairWhole(&v);
}

bool dkv_maskSees(const dkv_problem *p, int32_t n, int64_t r, int64_t j) {
    const dkv_mask_view v = dkv_viewMask(p, n);
    return j >= 0 && j < v.context + v.len && r >= 0 && r < v.len && dkv_pairSees(&v, r, j);
}

int dkv_maskBlock(const dkv_problem *p, int32_t n, int64_t r0, int64_t r1, int64_t j0, int64_t j1) {
    const dkv_mask_view v = dkv_viewMask(p, n);
    return dkv_pairBlock(&v, r0, r1, j0, j1);
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
    if (dkv_maskRow(p->mask)->whole == DKV_WHOLE_NEVER) return DKV_OK;
    /* A row that sees its whole segment must find it whole in every sequence where it has a copy. */
    for (int32_t n = 0; n < p->n_nodes; n++) {
        const dkv_node *node = &p->nodes[n];
        if (!hasQueries(node)) continue; /* nobody computes its sequence */
        for (int32_t a = node->parent; a >= 0; a = p->nodes[a].parent) {
            const dkv_node *anc = &p->nodes[a];
            const int64_t seen = node->context - anc->context; /* (a cut between the two is refused there) */
            if (dkv_maskWhole(p, a) && hasQueries(anc) && seen > 0 && seen < anc->len)
                return dkv_fail(
                    err, DKV_EREFUSED,
                    "mask=%s: row 0 of %s (group %d) sees key %lld, which its copy before %s would "
                    "not see: @%lld cuts through its segment",
                    dkv_maskName(p->mask), nameNode(p, a, an, sizeof an), anc->group,
                    (long long)node->context, nameNode(p, n, nn, sizeof nn), (long long)node->context);
        }
    }
    return DKV_OK;
}
