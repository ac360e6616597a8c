#include "simplify.h"

#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../ref/mask.h"

enum kind {
    DROP_GROUP,
    DROP_CHILDREN,
    SPLICE,
    HALVE_ALL,
    LENGTH,
    UNLIMIT,
    WITH_QUERIES,
    HEADS,
    DIM_QK,
    DIM_V,
    OPTION,
    NUMBER
};

/* Options back to their defaults; what is still to be numbers of the mask, smaller. */
enum option {
    CAUSAL,
    NO_FIRST,
    NO_SCALE,
    NO_SOFTCAP,
    NO_ALIBI,
    NO_SINK,
    NO_DLSE,
    GRAD_OFF,
    NORMAL,
    BF16,
    SEED,
    PLAIN,
    ONCE,
    N_OPTIONS
};

typedef struct edits {
    dkv_cut *list;
    int n, room;
    bool failed;
} edits;

static void add(edits *e, dkv_cut x) {
    if (e->n == e->room) {
        int room = e->room ? 2 * e->room : 64;
        dkv_cut *list = realloc(e->list, (size_t)room * sizeof *list);
        if (!list) {
            e->failed = true;
            return;
        }
        e->list = list;
        e->room = room;
    }
    e->list[e->n++] = x;
}

static int countChildren(const dkv_problem *p, int32_t node) {
    int n = 0;
    for (int32_t i = node + 1; i < p->n_nodes && p->nodes[i].depth > p->nodes[node].depth; i++)
        n += p->nodes[i].parent == node;
    return n;
}

/* Values below x, each once: the smallest first, then a half, three quarters, one less. */
static int smaller(int64_t x, int64_t least, int64_t out[8]) {
    const int64_t tries[] = {least, least + 1, least + 2, x / 4, x / 2, x - x / 4, x - 1};
    int n = 0;
    for (size_t i = 0; i < sizeof tries / sizeof *tries; i++) {
        bool fresh = tries[i] >= least && tries[i] < x;
        for (int k = 0; k < n; k++) fresh &= out[k] != tries[i];
        if (fresh) out[n++] = tries[i];
    }
    return n;
}

static void listHeads(const dkv_problem *p, edits *e) {
    const int32_t ratio = p->hq / p->hkv;
    const int32_t heads[][2] = {
        {1, 1}, {2, 1}, {2, 2}, {ratio, 1}, {p->hkv, p->hkv}, {2 * p->hkv, p->hkv}, {2 * ratio, 2}};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        if (heads[i][0] <= p->hq && heads[i][1] <= p->hkv && heads[i][0] + heads[i][1] < p->hq + p->hkv)
            add(e, (dkv_cut){.kind = HEADS, .from = heads[i][0], .count = heads[i][1]});
}

static void listSegments(const dkv_problem *p, edits *e) {
    for (int32_t g = 0; g < p->n_groups && p->n_groups > 1; g++)
        add(e, (dkv_cut){.kind = DROP_GROUP, .node = g});
    for (int32_t i = 0; i < p->n_nodes; i++) {
        int k = countChildren(p, i);
        for (int size = k; size > 0; size /= 2)
            for (int from = 0; from < k; from += size)
                add(e, (dkv_cut){.kind = DROP_CHILDREN, .node = i, .from = from, .count = size});
        if (k && p->nodes[i].depth) add(e, (dkv_cut){.kind = SPLICE, .node = i});
    }
}

static void listTokens(const dkv_problem *p, edits *e) {
    int64_t values[8];
    add(e, (dkv_cut){.kind = HALVE_ALL});
    for (int32_t i = 0; i < p->n_nodes; i++) {
        int n = smaller(p->nodes[i].len, 0, values);
        for (int k = 0; k < n; k++) add(e, (dkv_cut){.kind = LENGTH, .node = i, .value = values[k]});
        if (p->nodes[i].depth) add(e, (dkv_cut){.kind = UNLIMIT, .node = i});
        if (p->nodes[i].key_only) add(e, (dkv_cut){.kind = WITH_QUERIES, .node = i});
    }
}

static void listNumbers(const dkv_problem *p, edits *e) {
    int64_t values[8];
    for (int kind = DIM_QK; kind <= DIM_V; kind++) {
        int n = smaller(kind == DIM_QK ? p->dqk : p->dv, 1, values);
        for (int k = 0; k < n; k++) add(e, (dkv_cut){.kind = kind, .value = values[k]});
    }
    const int64_t numbers[] = {p->window, p->window_sinks, p->chunk, p->block};
    for (int i = 0; i < 4; i++) {
        int n = numbers[i] > 0 ? smaller(numbers[i], i != 1, values) : 0;
        for (int k = 0; k < n; k++) add(e, (dkv_cut){.kind = NUMBER, .node = i, .value = values[k]});
    }
}

/* Tokens come late: a fault that shows in statistics needs some of them, but neither heads nor segments. */
dkv_cut *dkv_listCuts(const dkv_problem *p, int *n) {
    edits e = {0};
    listSegments(p, &e);
    listHeads(p, &e);
    for (int i = 0; i < N_OPTIONS; i++) add(&e, (dkv_cut){.kind = OPTION, .node = i});
    listTokens(p, &e);
    listNumbers(p, &e);
    if (e.failed) free(e.list);
    *n = e.n;
    return e.failed ? NULL : e.list;
}

/* ---- applying ---- */

/* Nodes with drop[i] leave (their children's children go up to the next node that stays); contexts are as
 * before where they were limited, else all that there is. */
static void rebuild(const dkv_problem *old, const bool *drop, const bool *limited, dkv_problem *p) {
    int32_t *to = malloc(((size_t)p->n_nodes + 1) * sizeof *to), n = 0, groups = 0;
    if (!to) {
        p->n_nodes = 0;
        return;
    }
    for (int32_t i = 0; i < p->n_nodes; i++) {
        dkv_node x = p->nodes[i];
        int32_t parent = x.parent;
        to[i] = -1;
        if (drop[i]) continue;
        while (parent >= 0 && drop[parent]) parent = old->nodes[parent].parent;
        x.parent = parent < 0 ? -1 : to[parent];
        const dkv_node *up = x.parent < 0 ? NULL : &p->nodes[x.parent];
        int64_t all = up ? up->context + up->len : 0;
        x.depth = up ? up->depth + 1 : 0;
        x.context = limited[i] && x.context < all ? x.context : all;
        groups += !up;
        x.group = groups - 1;
        to[i] = n;
        p->nodes[n++] = x; /* n <= i */
    }
    p->n_nodes = n;
    p->n_groups = groups;
    free(to);
}

static void markDropped(const dkv_problem *p, const dkv_cut *e, bool *drop) {
    if (e->kind == DROP_GROUP)
        for (int32_t i = 0; i < p->n_nodes; i++) drop[i] = p->nodes[i].group == e->node;
    if (e->kind == SPLICE) drop[e->node] = true;
    if (e->kind != DROP_CHILDREN) return;
    int k = 0;
    for (int32_t i = e->node + 1; i < p->n_nodes && p->nodes[i].depth > p->nodes[e->node].depth; i++) {
        if (p->nodes[i].parent == e->node) k++;
        drop[i] = k > e->from && k <= e->from + e->count;
    }
}

static void setOption(dkv_problem *p, int which) {
    switch ((enum option)which) {
    case CAUSAL: p->mask = DUALKV_CAUSAL; break;
    case NO_FIRST: p->window_sinks = 0; break;
    case NO_SCALE: p->scale_given = false; break;
    case NO_SOFTCAP: p->softcap = 0; break;
    case NO_ALIBI: p->alibi = false; break;
    case NO_SINK: p->sink = false; break;
    case NO_DLSE: p->dlse = false; break;
    case GRAD_OFF: p->grad = p->dlse = false; break;
    case NORMAL: strcpy(p->fill, "normal"); break;
    case BF16: p->dtype = DUALKV_BF16; break;
    case SEED: p->seed = 1; break;
    case PLAIN: p->layout = DKV_CONTIGUOUS; break;
    case ONCE: p->run = DKV_SINGLE; break;
    case N_OPTIONS: break;
    }
}

static void setValue(dkv_problem *p, const dkv_cut *e, bool *limited) {
    int64_t *const numbers[] = {&p->window, &p->window_sinks, &p->chunk, &p->block};
    switch ((enum kind)e->kind) {
    case HALVE_ALL:
        for (int32_t i = 0; i < p->n_nodes; i++) p->nodes[i].len /= 2;
        break;
    case LENGTH: p->nodes[e->node].len = e->value; break;
    case UNLIMIT: limited[e->node] = false; break;
    case WITH_QUERIES: p->nodes[e->node].key_only = false; break;
    case HEADS:
        p->hq = e->from;
        p->hkv = e->count;
        break;
    case DIM_QK: p->dqk = (int32_t)e->value; break;
    case DIM_V: p->dv = (int32_t)e->value; break;
    case OPTION: setOption(p, e->node); break;
    case NUMBER: *numbers[e->node] = e->value; break;
    default: break;
    }
}

static bool isFit(const dkv_problem *p) {
    bool planted = !strcmp(p->fill, "nanresp") || !strcmp(p->fill, "infresp");
    return !dkv_maskAdmissible(p, NULL) && !(planted && dkv_victimNode(p) < 0);
}

bool dkv_applyCut(const dkv_problem *p, const dkv_cut *e, dkv_problem *out) {
    dkv_problem q = {0};
    char before[DKV_LINE_MAX + 1], line[DKV_LINE_MAX + 1];
    bool *drop = calloc((size_t)p->n_nodes + 1, 2), *limited = drop + p->n_nodes;
    bool made = false;
    *out = (dkv_problem){0};
    if (!drop || dkv_copyProblem(p, &q, NULL)) goto done;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        const dkv_node *x = &p->nodes[i];
        limited[i] = x->parent >= 0 && x->context < p->nodes[x->parent].context + p->nodes[x->parent].len;
    }
    markDropped(p, e, drop);
    setValue(&q, e, limited);
    rebuild(p, drop, limited, &q);
    if (!q.n_nodes || dkv_printProblem(&q, line, sizeof line, NULL) ||
        dkv_printProblem(p, before, sizeof before, NULL))
        goto done;
    if (!strcmp(line, before) || dkv_parseProblem(line, dkv_knownFill, out, NULL)) goto done;
    made = isFit(out);
    if (!made) dkv_freeProblem(out);
done:
    dkv_freeProblem(&q);
    free(drop);
    return made;
}
