/* Responses in another order are the same responses: children of every segment, and groups, last first. */
#include <stdlib.h>
#include <string.h>

#include "derive.h"

typedef struct order {
    const dkv_problem *from;
    dkv_problem *to;
    int32_t *source; /* [n_nodes] node of `from` that a node of `to` is */
} order;

static void emit(order *o, int32_t i, int32_t parent) {
    const dkv_node *n = o->from->nodes;
    int32_t at = o->to->n_nodes++, end = i + 1;
    o->to->nodes[at] = n[i];
    o->to->nodes[at].parent = parent;
    o->to->nodes[at].group = o->from->n_groups - 1 - n[i].group;
    o->source[at] = i;
    while (end < o->from->n_nodes && n[end].depth > n[i].depth) end++;
    for (int32_t k = end - 1; k > i; k--)
        if (n[k].parent == i) emit(o, k, at);
}

static bool reverse(order *o) {
    bool other = false;
    o->to->n_nodes = 0;
    for (int32_t i = o->from->n_nodes - 1; i >= 0; i--)
        if (o->from->nodes[i].parent < 0) emit(o, i, -1);
    for (int32_t i = 0; i < o->to->n_nodes; i++) other |= o->source[i] != i;
    return other;
}

static void compareAll(const dkv_case *c, const dkv_derived *d, const int32_t *source, dkv_tally *t) {
    for (int32_t i = 0; i < d->p.n_nodes; i++) {
        const dualkv_segment *to = &d->c.packed.view.segments[i], *s = &c->packed.view.segments[source[i]];
        dkv_compareQueries(c, &d->c, &d->c.got, s->q_start, to->q_start, s->q_len, true, t);
        int64_t bits = t->bits; /* the order of sums over responses may show */
        dkv_compareKeys(c, &d->c, &d->c.got, s->k_start, to->k_start, s->k_len, t);
        t->bits = bits;
    }
    int64_t bits = t->bits;
    if (c->in.sink) dkv_compareElements(c, &d->c, &d->c.got, DKV_DSINK, 0, 0, c->p->hq, t);
    t->bits = bits;
}

void dkv_checkPermute(dkv_case *c, dkv_finding *f) {
    enum { MANY = 8192 };
    const char *what = "responses and groups in reverse order";
    dkv_err err = {0};
    dkv_problem p = {0};
    dkv_derived d = {0};
    dkv_tally t = {0};
    order o = {.from = c->p, .to = &p};
    if (c->p->n_nodes < 2 || c->p->n_nodes > MANY || !dkv_worthDeriving(c, "permute")) return;
    o.source = malloc((size_t)c->p->n_nodes * sizeof *o.source);
    int rc = o.source ? dkv_deriveProblem(c, &p, &err) : dkv_fail(&err, DKV_EHARNESS, "out of memory for an order");
    bool same = !rc && !reverse(&o);
    if (!rc && !same) rc = dkv_beginDerived(c, &p, &d, &err);
    if (rc < 0 || rc > 1) dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
    if (rc || same) goto done;
    for (int32_t i = 0; i < d.p.n_nodes; i++) {
        const dualkv_segment *to = &d.c.packed.view.segments[i], *s = &c->packed.view.segments[o.source[i]];
        dkv_copyTokens(c, &d, s->q_len ? s->q_start : -1, to->q_start, s->k_start, to->k_start, s->k_len);
    }
    if (dkv_runDerived(c, &d, what, f)) {
        compareAll(c, &d, o.source, &t);
        dkv_judgeTally(c, &t, DKV_ST_FAILED, what, "the order of responses", f);
    }
done:
    dkv_endDerived(&d);
    dkv_freeProblem(&p);
    free(o.source);
}
