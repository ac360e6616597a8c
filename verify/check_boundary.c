/* Where a sequence is cut into prompt and response means nothing to a mask over positions: its rows see the same keys
 * wherever the boundary lies. Tokens keep their packed rows, so every output is compared in place. */
#include <stdlib.h>
#include <string.h>

#include "../ref/mask.h"
#include "derive.h"

static bool isPositional(const dkv_problem *p) {
    return p->mask == DUALKV_CAUSAL || p->mask == DUALKV_WINDOW || p->mask == DUALKV_CHUNK || p->mask == DUALKV_BLOCK;
}

static int32_t endOfTree(const dkv_problem *p, int32_t i) {
    int32_t e = i + 1;
    while (e < p->n_nodes && p->nodes[e].depth > p->nodes[i].depth) e++;
    return e;
}

/* Has node i one child alone, which sees all that it may? */
static bool isChain(const dkv_problem *p, int32_t i) {
    const dkv_node *n = &p->nodes[i];
    if (n->key_only || i + 1 >= p->n_nodes || p->nodes[i + 1].parent != i) return false;
    return endOfTree(p, i + 1) == endOfTree(p, i) && p->nodes[i + 1].context == n->context + n->len;
}

/* A token of the root goes to its only child. */
static bool moveToken(dkv_problem *p, int32_t root) {
    if (!isChain(p, root) || p->nodes[root].len == 0) return false;
    p->nodes[root].len--;
    p->nodes[root + 1].len++;
    p->nodes[root + 1].context--;
    return true;
}

/* The root is cut in two, and its children become those of the second part. */
static bool cutRoot(dkv_problem *p, int32_t root) {
    int32_t end = endOfTree(p, root);
    dkv_node *n = p->nodes;
    if (n[root].key_only || n[root].len < 2 || p->n_nodes >= DKV_SEGMENTS_MAX) return false;
    for (int32_t i = root; i < end; i++)
        if (n[i].depth + 2 >= DKV_DEPTH_MAX) return false;
    n = realloc(n, (size_t)(p->n_nodes + 1) * sizeof *n);
    if (!n) return false;
    p->nodes = n;
    memmove(n + root + 1, n + root, (size_t)(p->n_nodes - root) * sizeof *n);
    p->n_nodes++;
    for (int32_t i = root + 1; i < p->n_nodes; i++) {
        n[i].depth += i <= end;
        n[i].parent += n[i].parent >= root;
    }
    int64_t first = (n[root].len + 1) / 2;
    n[root].len = first;
    n[root + 1].parent = root;
    n[root + 1].len -= first;
    n[root + 1].context = first;
    return true;
}

/* The root takes up its only child. */
static bool joinRoot(dkv_problem *p, int32_t root) {
    if (!isChain(p, root)) return false;
    dkv_node *n = p->nodes;
    int32_t end = endOfTree(p, root);
    n[root].len += n[root + 1].len;
    memmove(n + root + 1, n + root + 2, (size_t)(p->n_nodes - root - 2) * sizeof *n);
    p->n_nodes--;
    for (int32_t i = root + 1; i < p->n_nodes; i++) {
        n[i].depth -= i < end - 1;
        n[i].parent -= n[i].parent > root;
    }
    return true;
}

/* The roots are changed from the last one on, so that those before keep their places. */
static bool change(dkv_problem *p, bool join, bool cut) {
    bool any = false;
    for (int32_t i = p->n_nodes - 1; i >= 0; i--) {
        if (p->nodes[i].depth) continue;
        if (join) {
            for (; joinRoot(p, i); any = true) continue;
        } else {
            any |= moveToken(p, i) || (cut && cutRoot(p, i));
        }
    }
    return any;
}

/* True where the kernel took the changed problem. */
static bool tryChange(dkv_case *c, bool join, bool cut, const char *what, dkv_finding *f) {
    const dualkv_problem *v = &c->packed.view;
    dkv_err err = {0};
    dkv_problem p = {0};
    dkv_derived d = {0};
    dkv_tally t = {0};
    bool ran = false;
    int rc = dkv_deriveProblem(c, &p, &err);
    if (!rc && (!change(&p, join, cut) || dkv_maskAdmissible(&p, &err))) {
        dkv_freeProblem(&p);
        return true;
    }
    if (!rc) rc = dkv_beginDerived(c, &p, &d, &err);
    if (rc < 0 || rc > 1) dkv_find(f, DKV_CHECK_DEFECT, DKV_ST_HARNESS_ERROR, "%.300s", err.text);
    if (!rc) {
        dkv_freeInputs(&d.c.in);
        rc = dkv_copyInputs(c, &d.c.in, &err);
    }
    if (!rc) ran = dkv_runDerived(c, &d, what, f);
    if (ran) {
        dkv_compareQueries(c, &d.c, &d.c.got, 0, 0, v->tq, true, &t);
        dkv_compareKeys(c, &d.c, &d.c.got, 0, 0, v->tk, &t);
        if (c->in.sink) dkv_compareElements(c, &d.c, &d.c.got, DKV_DSINK, 0, 0, v->hq, &t);
        dkv_judgeTally(c, &t, DKV_ST_FAILED, what, NULL, f);
    }
    dkv_endDerived(&d);
    return ran || f->state == DKV_CHECK_DEFECT;
}

void dkv_checkBoundary(dkv_case *c, dkv_finding *f) {
    const char *what = "the prompt's end moved";
    if (!isPositional(c->p) || !dkv_worthDeriving(c, "boundary")) return;
    if (!tryChange(c, false, true, what, f)) tryChange(c, false, false, what, f); /* refused: too deep for it */
}

void dkv_checkPlain(dkv_case *c, dkv_finding *f) {
    if (!isPositional(c->p) || !dkv_worthDeriving(c, "plain")) return;
    tryChange(c, true, false, "prompt and only response as one sequence", f);
}
