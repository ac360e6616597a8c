#include "sequence.h"

#include <stdlib.h>
#include <string.h>

int dkv_makeStarts(const dkv_problem *p, dkv_starts *out, dkv_err *err) {
    memset(out, 0, sizeof *out);
    out->q = malloc((size_t)(p->n_nodes + 1) * sizeof *out->q);
    out->k = malloc((size_t)(p->n_nodes + 1) * sizeof *out->k);
    if (!out->q || !out->k) {
        dkv_freeStarts(out);
        return dkv_fail(err, DKV_EHARNESS, "out of memory: %d segments", p->n_nodes);
    }
    for (int32_t n = 0; n < p->n_nodes; n++) {
        out->q[n] = out->tq;
        out->k[n] = out->tk;
        out->tq += p->nodes[n].key_only ? 0 : p->nodes[n].len;
        out->tk += p->nodes[n].len;
    }
    return DKV_OK;
}

void dkv_freeStarts(dkv_starts *s) {
    free(s->q);
    free(s->k);
    memset(s, 0, sizeof *s);
}

void dkv_fillSequence(const dkv_problem *p, const dkv_starts *s, int32_t n, int64_t *rows) {
    int64_t end =
        p->nodes[n].context + p->nodes[n].len; /* positions from here on are not seen, or filled already */
    for (; n >= 0; n = p->nodes[n].parent) {
        const int64_t begin = p->nodes[n].context; /* position of n's first own token */
        for (int64_t j = begin; j < end; j++) rows[j] = s->k[n] + (j - begin);
        if (begin < end) end = begin;
    }
}

int64_t dkv_longestSequence(const dkv_problem *p) {
    int64_t longest = 0;
    for (int32_t n = 0; n < p->n_nodes; n++)
        if (!p->nodes[n].key_only && p->nodes[n].len > 0 && p->nodes[n].context + p->nodes[n].len > longest)
            longest = p->nodes[n].context + p->nodes[n].len;
    return longest;
}
