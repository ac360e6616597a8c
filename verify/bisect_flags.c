#include "bisect_flags.h"

#include <stdlib.h>
#include <string.h>

typedef struct items {
    char *text[DKV_FLAGS_MAX]; /* owned */
    int n;
} items;

typedef struct plan {
    items good, bad;
    int of_bad[DKV_FLAGS_MAX];  /* change that adds it, -1: both have it */
    int of_good[DKV_FLAGS_MAX]; /* change that takes it away, -1 */
} plan;

static void freeItems(items *l) {
    for (int i = 0; i < l->n; i++) free(l->text[i]);
    l->n = 0;
}

/* Words, with their quotes. */
static int split(const char *option, const char *text, items *out, dkv_err *err) {
    for (const char *at = text + strspn(text, " \t\n"); *at; at += strspn(at, " \t\n")) {
        size_t n = strcspn(at, " \t\n");
        if (*at == '\'' || *at == '"') {
            const char *close = strchr(at + 1, *at);
            if (!close) return dkv_fail(err, DKV_EUSER, "%s: the quote at '%.40s' is not closed", option, at);
            n = (size_t)(close - at + 1);
        }
        if (out->n == DKV_FLAGS_MAX) return dkv_fail(err, DKV_EUSER, "%s: more than %d flags", option, DKV_FLAGS_MAX);
        out->text[out->n] = strndup(at, n);
        if (!out->text[out->n++]) return dkv_fail(err, DKV_EHARNESS, "out of memory for flags");
        at += n;
    }
    return 0;
}

static int addChange(dkv_flag_search *s, const char *text, bool added, int *which, dkv_err *err) {
    if (s->n == DKV_FLAGS_MAX) return dkv_fail(err, DKV_EUSER, "--flags: more than %d differ", DKV_FLAGS_MAX);
    *which = s->n;
    s->changes[s->n] = (dkv_flag_change){strdup(text), added};
    return s->changes[s->n++].text ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for flags");
}

/* Each item of one set is matched with one of the other. */
static int compare(plan *p, dkv_flag_search *s, dkv_err *err) {
    bool matched[DKV_FLAGS_MAX] = {false};
    int rc = 0;
    for (int i = 0; i < p->bad.n && !rc; i++) {
        int k = 0;
        p->of_bad[i] = -1;
        while (k < p->good.n && (matched[k] || strcmp(p->good.text[k], p->bad.text[i]))) k++;
        if (k < p->good.n) matched[k] = true;
        else rc = addChange(s, p->bad.text[i], true, &p->of_bad[i], err);
    }
    for (int k = 0; k < p->good.n && !rc; k++) {
        p->of_good[k] = -1;
        if (!matched[k]) rc = addChange(s, p->good.text[k], false, &p->of_good[k], err);
    }
    if (!rc && s->n == 0) rc = dkv_fail(err, DKV_EUSER, "--flags-good and --flags-bad hold the same flags");
    return rc;
}

/* The flags with the changes in `with`: those that stay of the good set first, then the bad set's in its order. */
static char *compose(const plan *p, const bool *with) {
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    const char *gap = "";
    if (!f) return NULL;
    for (int k = 0; k < p->good.n; k++)
        if (p->of_good[k] >= 0 && !with[p->of_good[k]]) {
            fprintf(f, "%s%s", gap, p->good.text[k]);
            gap = " ";
        }
    for (int i = 0; i < p->bad.n; i++)
        if (p->of_bad[i] < 0 || with[p->of_bad[i]]) {
            fprintf(f, "%s%s", gap, p->bad.text[i]);
            gap = " ";
        }
    fclose(f);
    return text;
}

static int test(const plan *p, dkv_flag_search *s, const bool *with, dkv_bisect_verdict *out, dkv_err *err) {
    char *flags = compose(p, with);
    int rc = flags ? s->test(flags, s->arg, out, err) : dkv_fail(err, DKV_EHARNESS, "out of memory for flags");
    s->tests++;
    free(flags);
    return rc;
}

/* Part `k` of `parts` of the changes in `set`, or all but that. */
static void cut(const bool *set, int size, int parts, int k, bool rest, bool *out) {
    int from = size * k / parts, to = size * (k + 1) / parts, at = 0;
    for (int i = 0; i < DKV_FLAGS_MAX; i++) {
        out[i] = set[i] && (at >= from && at < to) != rest;
        at += set[i];
    }
}

static int count(const bool *set) {
    int n = 0;
    for (int i = 0; i < DKV_FLAGS_MAX; i++) n += set[i];
    return n;
}

/* One round of ddmin: a part that fails alone, or a rest that does. *less: found. */
static int reduce(const plan *p, dkv_flag_search *s, int parts, bool rest, bool *less, dkv_err *err) {
    bool part[DKV_FLAGS_MAX];
    const int size = count(s->needed);
    dkv_bisect_verdict v;
    *less = false;
    for (int k = 0; k < parts; k++) {
        cut(s->needed, size, parts, k, rest, part);
        if (count(part) == 0 || count(part) == size) continue;
        int rc = test(p, s, part, &v, err);
        if (rc) return rc;
        if (v != DKV_BV_BAD) continue;
        memcpy(s->needed, part, sizeof part);
        *less = true;
        return 0;
    }
    return 0;
}

static int minimise(const plan *p, dkv_flag_search *s, dkv_err *err) {
    int parts = 2, rc = 0;
    while (!rc && count(s->needed) >= 2) {
        bool less = false;
        const int size = count(s->needed);
        if (parts > size) parts = size;
        rc = reduce(p, s, parts, false, &less, err);
        if (!rc && less) {
            parts = 2;
            continue;
        }
        if (!rc && parts > 2) rc = reduce(p, s, parts, true, &less, err);
        if (!rc && less) parts = parts - 1 > 2 ? parts - 1 : 2;
        else if (!rc && parts >= size) break;
        else parts *= 2;
    }
    return rc;
}

int dkv_searchFlags(const char *good, const char *bad, dkv_flag_search *s, dkv_err *err) {
    static const char *const said[] = {"pass", "fail", "say nothing"};
    plan *p = calloc(1, sizeof *p);
    bool none[DKV_FLAGS_MAX] = {false};
    dkv_bisect_verdict v = DKV_BV_SKIP;
    s->changes = calloc(DKV_FLAGS_MAX, sizeof *s->changes);
    s->n = 0;
    s->tests = 0;
    s->flags = NULL;
    memset(s->needed, 0, sizeof s->needed);
    int rc = p && s->changes ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for flags");
    if (!rc) rc = split("--flags-good", good, &p->good, err);
    if (!rc) rc = split("--flags-bad", bad, &p->bad, err);
    if (!rc) rc = compare(p, s, err);
    if (!rc) rc = test(p, s, none, &v, err);
    if (!rc && v != DKV_BV_GOOD) rc = dkv_fail(err, DKV_EHARNESS, "--flags-good: with these the cases %s", said[v]);
    for (int i = 0; i < s->n; i++) s->needed[i] = true;
    if (!rc) rc = test(p, s, s->needed, &v, err);
    if (!rc && v != DKV_BV_BAD) rc = dkv_fail(err, DKV_EHARNESS, "--flags-bad: with these the cases %s", said[v]);
    if (!rc) rc = minimise(p, s, err);
    s->n_needed = count(s->needed);
    if (!rc) s->flags = compose(p, s->needed);
    if (p) {
        freeItems(&p->good);
        freeItems(&p->bad);
    }
    free(p);
    return rc;
}

void dkv_freeFlagSearch(dkv_flag_search *s) {
    for (int i = 0; s->changes && i < s->n; i++) free(s->changes[i].text);
    free(s->changes);
    free(s->flags);
    s->changes = NULL;
    s->flags = NULL;
}
