#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "word.h"

/* Recursive descent over the grammar in problem.h; nodes are appended in depth-first order. While it reads,
 * node.context is the stated limit (-1: none): `@c` stands after the children of its node, so that contexts
 * are resolved when the whole shape has been read. limit_at: where each limit stands, for messages. */
typedef struct reader {
    const dkv_word *w;
    const char *s; /* next character */
    dkv_node *nodes;
    const char **limit_at;
    int64_t n, cap, tokens;
    int32_t groups;
    dkv_err *err;
} reader;

static int more_nodes(reader *r, int64_t count, const char *at) {
    if (count > DKV_SEGMENTS_MAX - r->n)
        return dkv_failWord(r->err, r->w, at, "more than %d segments", DKV_SEGMENTS_MAX);
    if (r->n + count <= r->cap) return 0;
    int64_t cap = r->cap ? r->cap : 16;
    while (cap < r->n + count) cap *= 2;
    dkv_node *nodes = realloc(r->nodes, (size_t)cap * sizeof *nodes);
    if (nodes) r->nodes = nodes;
    const char **limit_at = realloc(r->limit_at, (size_t)cap * sizeof *limit_at);
    if (limit_at) r->limit_at = limit_at;
    if (!nodes || !limit_at)
        return dkv_fail(r->err, DKV_EHARNESS, "out of memory for %" PRId64 " segments", cap);
    r->cap = cap;
    return 0;
}

static int add_tokens(reader *r, int64_t len, int64_t times, const char *at) {
    if (len && times > (DKV_TOKENS_MAX - r->tokens) / len)
        return dkv_failWord(r->err, r->w, at, "more than 2^40 tokens in all");
    r->tokens += len * times;
    return 0;
}

static int add_node(reader *r, int32_t parent, int64_t len, const char *at) {
    int depth = parent < 0 ? 0 : r->nodes[parent].depth + 1;
    if (depth >= DKV_DEPTH_MAX) return dkv_failWord(r->err, r->w, at, "deeper than %d levels", DKV_DEPTH_MAX);
    int code = more_nodes(r, 1, at);
    if (!code) code = add_tokens(r, len, 1, at);
    if (code) return code;
    r->nodes[r->n++] =
        (dkv_node){.parent = parent, .group = r->groups, .depth = depth, .len = len, .context = -1};
    return 0;
}

static bool take(reader *r, char c) {
    if (r->s >= r->w->end || *r->s != c) return false;
    r->s++;
    return true;
}

static int read_children(reader *r, int32_t parent);

/* R | '(' R '+' children ')'; `len` is R where it has been read already (a number that no 'x' followed), else
 * -1. */
static int read_subtree(reader *r, int32_t parent, int64_t len, const char *at) {
    if (len >= 0) return add_node(r, parent, len, at);
    at = r->s;
    bool nested = take(r, '(');
    int code = dkv_readCount(r->w, &r->s, DKV_TOKENS_MAX, &len, r->err);
    if (!code) code = add_node(r, parent, len, at);
    if (code || !nested) return code;
    if (!take(r, '+')) return dkv_failWord(r->err, r->w, r->s, "'+' and children are missing in parentheses");
    if ((code = read_children(r, (int32_t)r->n - 1))) return code;
    if (!take(r, ')')) return dkv_failWord(r->err, r->w, r->s, "')' is missing");
    return 0;
}

/* Appends times - 1 more copies of the subtree [first, n). */
static int repeat(reader *r, int64_t first, int64_t times, const char *at) {
    int64_t size = r->n - first, tokens = 0;
    for (int64_t i = first; i < r->n; i++) tokens += r->nodes[i].len;
    bool many = times - 1 > DKV_SEGMENTS_MAX / size;
    int code = more_nodes(r, many ? DKV_SEGMENTS_MAX + (int64_t)1 : size * (times - 1), at);
    if (!code) code = add_tokens(r, tokens, times - 1, at);
    for (int64_t k = 1; !code && k < times; k++)
        for (int64_t i = 0; i < size; i++) {
            r->limit_at[r->n] = r->limit_at[first + i];
            r->nodes[r->n] = r->nodes[first + i];
            if (i) r->nodes[r->n].parent += (int32_t)(size * k);
            r->n++;
        }
    return code;
}

/* [N 'x'] subtree ['@' c] */
static int read_child(reader *r, int32_t parent) {
    const char *at = r->s;
    int64_t times = 1, len = -1, first = r->n;
    int code = 0;
    if (r->s >= r->w->end || *r->s != '(') {
        if ((code = dkv_readCount(r->w, &r->s, DKV_TOKENS_MAX, &len, r->err))) return code;
        if (take(r, 'x')) {
            times = len;
            len = -1;
            if (times == 0) return dkv_failWord(r->err, r->w, at, "0x: a count is at least 1");
        }
    }
    if ((code = read_subtree(r, parent, len, at))) return code;
    const char *limit_at = r->s + 1;
    if (take(r, '@')) {
        int64_t c;
        if ((code = dkv_readCount(r->w, &r->s, DKV_TOKENS_MAX, &c, r->err))) return code;
        r->nodes[first].context = c;
        r->limit_at[first] = limit_at;
    }
    return repeat(r, first, times, at);
}

static int read_children(reader *r, int32_t parent) {
    do {
        int code = read_child(r, parent);
        if (code) return code;
    } while (take(r, ','));
    return 0;
}

static int read_group(reader *r) {
    const char *at = r->s;
    int64_t len;
    int code = dkv_readCount(r->w, &r->s, DKV_TOKENS_MAX, &len, r->err);
    if (!code) code = add_node(r, -1, len, at);
    if (code) return code;
    int32_t root = (int32_t)r->n - 1;
    r->nodes[root].key_only = take(r, 'k');
    if (take(r, '+') && (code = read_children(r, root))) return code;
    r->groups++;
    return 0;
}

static int resolve(reader *r) {
    for (int64_t i = 0; i < r->n; i++) {
        dkv_node *node = &r->nodes[i];
        const dkv_node *up = node->parent < 0 ? NULL : &r->nodes[node->parent];
        int64_t there = up ? up->context + up->len : 0;
        if (node->context > there)
            return dkv_failWord(r->err, r->w, r->limit_at[i],
                                "context limit %" PRId64 " is above the %" PRId64 " tokens that are there",
                                node->context, there);
        if (node->context < 0) node->context = there;
    }
    return 0;
}

int dkv_readShape(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    reader r = {.w = w, .s = w->value, .err = err};
    int code = 0;
    if (w->value == w->end) code = dkv_failWord(err, w, w->end, "empty shape");
    if (!code) {
        do code = read_group(&r);
        while (!code && take(&r, '/'));
    }
    if (!code && r.s < w->end)
        code = *r.s == ')' ? dkv_failWord(err, w, r.s, "')' without '('")
                           : dkv_failWord(err, w, r.s, "'%c' is not expected here", *r.s);
    if (!code) code = resolve(&r);
    int64_t queries = 0;
    for (int64_t i = 0; i < r.n; i++) queries += r.nodes[i].key_only ? 0 : r.nodes[i].len;
    if (!code && !queries) code = dkv_failWord(err, w, w->value, "empty shape: no token has a query");
    free(r.limit_at);
    if (code) {
        free(r.nodes);
        return code;
    }
    p->nodes = r.nodes;
    p->n_nodes = (int32_t)r.n;
    p->n_groups = r.groups;
    return 0;
}

/* Are the subtrees at a and b (siblings, `size` nodes each) the same? */
static bool same_subtree(const dkv_node *nodes, int32_t a, int32_t b, int32_t size) {
    for (int32_t i = 0; i < size; i++) {
        const dkv_node *x = &nodes[a + i], *y = &nodes[b + i];
        if (x->len != y->len || x->context != y->context) return false;
        if (i && x->parent - a != y->parent - b) return false;
    }
    return true;
}

/* Children of node i; end[i] is the index past its subtree. Runs of equal children become NxCHILD. */
static void put_children(const dkv_problem *p, const int32_t *end, int32_t i, dkv_text *t) {
    const dkv_node *nodes = p->nodes;
    char sep = '+';
    for (int32_t c = i + 1, next; c < end[i]; c = next, sep = ',') {
        int32_t size = end[c] - c, times = 1;
        next = end[c];
        while (next < end[i] && end[next] - next == size && same_subtree(nodes, c, next, size)) {
            next = end[next];
            times++;
        }
        dkv_putText(t, "%c", sep);
        if (times > 1) dkv_putText(t, "%" PRId32 "x", times);
        dkv_putText(t, size > 1 ? "(%" PRId64 : "%" PRId64, nodes[c].len);
        put_children(p, end, c, t);
        if (size > 1) dkv_putText(t, ")");
        if (nodes[c].context < nodes[i].context + nodes[i].len) dkv_putText(t, "@%" PRId64, nodes[c].context);
    }
}

int dkv_putShape(const dkv_problem *p, dkv_text *t, dkv_err *err) {
    int32_t *end = malloc(((size_t)p->n_nodes + 1) * sizeof *end);
    if (!end) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int32_t i = 0; i < p->n_nodes; i++) end[i] = i + 1;
    for (int32_t i = p->n_nodes - 1; i > 0; i--) {
        int32_t up = p->nodes[i].parent;
        if (up >= 0 && end[up] < end[i]) end[up] = end[i];
    }
    dkv_putText(t, "shape=");
    for (int32_t i = 0; i < p->n_nodes; i = end[i]) {
        dkv_putText(t, i ? "/%" PRId64 : "%" PRId64, p->nodes[i].len);
        if (p->nodes[i].key_only) dkv_putText(t, "k");
        put_children(p, end, i, t);
    }
    free(end);
    return 0;
}
