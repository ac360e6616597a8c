#include "scope.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const kinds[DKV_SCOPE_KINDS] = {"mask",      "dtype", "dim",  "gqa",    "scale",    "softcap", "alibi", "sinklogit",
                                                   "gradients", "dlse",  "layout", "branches", "context", "prompt", "groups"};
enum { FIRST_OF_SHAPE = 10 }; /* layout and what follows */
static const char *const sizes[DKV_SIZE_N_OF] = {"P", "R", "N", "sight", "context", "depth", "groups", "tokens", "heads"};
static const char *const layouts[] = {"contiguous", "fused", "padded", "strided"};

/* NULL: the mask has none of this number. */
static const char *parameterName(int i) {
    static const char *const others[] = {"scale", "softcap", "sinklogit"};
    if (i >= DKV_PARAM_SCALE) return others[i - DKV_PARAM_SCALE];
    return dkv_maskRow(i / DKV_MASK_PARAMETERS)->parameter[i % DKV_MASK_PARAMETERS].name;
}

/* ---- what a problem is ---- */

typedef struct profile {
    char word[DKV_SCOPE_KINDS][DKV_SCOPE_WORD];
    double parameter[DKV_PARAM_N_OF];
    bool has[DKV_PARAM_N_OF];
} profile;

static bool isLimited(const dkv_problem *p, const dkv_node *n) {
    return n->parent >= 0 && n->context < p->nodes[n->parent].context + p->nodes[n->parent].len;
}

static void setWord(profile *f, int kind, const char *value) {
    snprintf(f->word[kind], DKV_SCOPE_WORD, "%s=%s", kinds[kind], value);
}

static void setParameter(profile *f, int i, double x) {
    f->parameter[i] = x;
    f->has[i] = true;
}

static void describe(const dkv_problem *p, profile *f) {
    char dim[24], gqa[16];
    int32_t depth = 0;
    bool limited = false, key_only = false;
    memset(f, 0, sizeof *f);
    for (int32_t i = 0; i < p->n_nodes; i++) {
        if (p->nodes[i].depth > depth) depth = p->nodes[i].depth;
        limited |= isLimited(p, &p->nodes[i]);
        key_only |= p->nodes[i].key_only;
    }
    snprintf(dim, sizeof dim, p->dqk == p->dv ? "%d" : "%d:%d", p->dqk, p->dv);
    snprintf(gqa, sizeof gqa, "%d", p->hq / p->hkv);
    setWord(f, 0, dkv_maskName(p->mask));
    setWord(f, 1, dkv_dtypeName(p->dtype));
    setWord(f, 2, dim);
    setWord(f, 3, gqa);
    setWord(f, 4, p->scale_given ? "own" : "usual");
    setWord(f, 5, p->softcap != 0 ? "on" : "off");
    setWord(f, 6, p->alibi ? "on" : "off");
    setWord(f, 7, p->sink ? "on" : "off");
    setWord(f, 8, p->grad ? "on" : "off");
    setWord(f, 9, p->dlse ? "on" : "off");
    setWord(f, 10, layouts[p->layout]);
    setWord(f, 11, depth == 0 ? "none" : depth == 1 ? "responses" : "tree");
    setWord(f, 12, limited ? "limited" : "whole");
    setWord(f, 13, key_only ? "keys-only" : "with-queries");
    setWord(f, 14, p->n_groups > 1 ? "several" : "one");
    const dkv_mask_parameter *q = dkv_maskRow(p->mask)->parameter;
    for (int i = 0; q[i].kind; i++)
        if (q[i].name) setParameter(f, (int)p->mask * DKV_MASK_PARAMETERS + i, dkv_maskParameter(p, &q[i]));
    if (p->scale_given) setParameter(f, DKV_PARAM_SCALE, (double)p->scale * sqrt((double)p->dqk));
    if (p->softcap != 0) setParameter(f, DKV_PARAM_SOFTCAP, (double)p->softcap);
    if (p->sink) setParameter(f, DKV_PARAM_SINK, (double)p->sinklogit);
}

/* Every value of a size that stands in the problem. */
static void eachSize(const dkv_problem *p, void (*take)(dkv_scope_size size, double x, void *arg), void *arg) {
    int32_t *children = calloc((size_t)p->n_nodes + 1, sizeof *children);
    int32_t depth = 0;
    int64_t tokens = 0;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        const dkv_node *n = &p->nodes[i];
        take(n->parent < 0 ? DKV_SIZE_P : DKV_SIZE_R, (double)n->len, arg);
        take(DKV_SIZE_SIGHT, (double)(n->context + n->len), arg);
        if (isLimited(p, n)) take(DKV_SIZE_CONTEXT, (double)n->context, arg);
        if (n->parent >= 0 && children) children[n->parent]++;
        if (n->depth > depth) depth = n->depth;
        tokens += n->len;
    }
    for (int32_t i = 0; children && i < p->n_nodes; i++)
        if (children[i]) take(DKV_SIZE_N, children[i], arg);
    take(DKV_SIZE_DEPTH, depth, arg);
    take(DKV_SIZE_GROUPS, p->n_groups, arg);
    take(DKV_SIZE_TOKENS, (double)tokens, arg);
    take(DKV_SIZE_HEADS, p->hq, arg);
    free(children);
}

/* ---- spans ---- */

/* Where there is no room, the point that is nearest to its neighbours goes; the ends stay. */
static void addPoint(dkv_span *s, double x) {
    double all[DKV_SCOPE_POINTS + 1];
    int n = 0, at = 0, gone = 1;
    while (at < s->n && s->point[at] < x) at++;
    if (at < s->n && s->point[at] == x) return;
    for (int i = 0; i < s->n; i++) {
        if (i == at) all[n++] = x;
        all[n++] = s->point[i];
    }
    if (at == s->n) all[n++] = x;
    if (n > DKV_SCOPE_POINTS) {
        for (int i = 1; i < n - 1; i++) /* by ratio: lengths of 1, 2, 3 tell more than 1001, 1002 */
            if ((all[i + 1] - all[i - 1]) / (fabs(all[i + 1]) + 1) < (all[gone + 1] - all[gone - 1]) / (fabs(all[gone + 1]) + 1)) gone = i;
        memmove(all + gone, all + gone + 1, (size_t)(n - gone - 1) * sizeof *all);
        n--;
    }
    memcpy(s->point, all, (size_t)n * sizeof *all);
    s->n = n;
}

static int compareValues(const void *a, const void *b) {
    const char *x = *(const char *const *)a, *y = *(const char *const *)b;
    double d = strtod(x, NULL) - strtod(y, NULL);
    return d != 0 ? (d > 0) - (d < 0) : strcmp(x, y);
}

/* Values of a kind of feature in order; returns how many. */
static int listValues(const dkv_scope *s, int kind, const char *value[DKV_SCOPE_FEATURES]) {
    size_t len = strlen(kinds[kind]);
    int n = 0;
    for (int i = 0; i < s->n; i++)
        if (strncmp(s->feature[i], kinds[kind], len) == 0 && s->feature[i][len] == '=') value[n++] = s->feature[i] + len + 1;
    qsort(value, (size_t)n, sizeof *value, compareValues);
    return n;
}

static int findFeature(const dkv_scope *s, const char *word) {
    for (int i = 0; i < s->n; i++)
        if (strcmp(s->feature[i], word) == 0) return i;
    return -1;
}

static void addSize(dkv_scope_size size, double x, void *arg) { addPoint((dkv_span *)arg + size, x); }

int dkv_addToScope(dkv_scope *s, const dkv_problem *p) {
    profile f;
    int at[DKV_SCOPE_KINDS];
    if ((int)p->mask >= DKV_SCOPE_MASKS || (int)p->dtype >= DKV_SCOPE_DTYPES) return -1;
    describe(p, &f);
    for (int k = 0; k < DKV_SCOPE_KINDS; k++) {
        at[k] = findFeature(s, f.word[k]);
        if (at[k] >= 0) continue;
        if (s->n == DKV_SCOPE_FEATURES) return -1;
        at[k] = s->n++;
        strcpy(s->feature[at[k]], f.word[k]);
    }
    for (int k = 0; k < DKV_SCOPE_KINDS; k++)
        for (int l = 0; l < DKV_SCOPE_KINDS; l++) s->pair[at[k]][at[l]] = true;
    s->kind[p->mask][p->dtype].cases++;
    eachSize(p, addSize, s->kind[p->mask][p->dtype].size);
    for (int i = 0; i < DKV_PARAM_N_OF; i++)
        if (f.has[i]) addPoint(&s->parameter[i], f.parameter[i]);
    return 0;
}

/* ---- is a problem among them? ---- */

typedef struct question {
    const dkv_scope *scope;
    const dkv_problem *p;
    dkv_covered_take take;
    void *arg;
    int outside;
    bool asked[DKV_SIZE_N_OF];
    double least[DKV_SIZE_N_OF], most[DKV_SIZE_N_OF];
} question;

static void answer(question *q, dkv_covered *c) {
    q->outside += !c->inside;
    q->take(c, q->arg);
}

static void askFeature(question *q, const profile *f, int k, bool shapeless) {
    const dkv_scope *s = q->scope;
    int at = findFeature(s, f->word[k]), misses = 0;
    dkv_covered c = {.inside = true, .key = kinds[k]};
    snprintf(c.what, sizeof c.what, "%s", f->word[k]);
    if (at < 0) {
        const char *values[DKV_SCOPE_FEATURES];
        c.inside = false;
        size_t n = (size_t)snprintf(c.why, sizeof c.why, "never judged; judged:");
        for (int i = 0, all = listValues(s, k, values); i < all && n < sizeof c.why; i++)
            n += (size_t)snprintf(c.why + n, sizeof c.why - n, "%s %s", i ? "," : "", values[i]);
        if (n >= sizeof c.why) strcpy(c.why + sizeof c.why - 5, " ...");
        answer(q, &c);
        return;
    }
    for (int l = 0; l < k; l++) { /* each pair once */
        int other = findFeature(s, f->word[l]);
        if (other < 0 || s->pair[at][other] || (shapeless && (l >= FIRST_OF_SHAPE || l == 9))) continue;
        dkv_covered pair = {.inside = false, .key = kinds[k], .with = kinds[l]};
        snprintf(pair.what, sizeof pair.what, "%s with %s", f->word[k], f->word[l]);
        snprintf(pair.why, sizeof pair.why, "each was judged, the two never together");
        answer(q, &pair);
        misses++;
    }
    if (misses) return;
    snprintf(c.why, sizeof c.why, "judged, and with each of the features before it");
    answer(q, &c);
}

/* "between 1 and 330, judged at 257 and 300" */
static void askSpan(question *q, const char *key, const dkv_span *s, double x, const char *where) {
    dkv_covered c = {.key = key};
    int at = 0;
    snprintf(c.what, sizeof c.what, "%s=%.10g", key, x);
    if (s->n == 0) {
        snprintf(c.why, sizeof c.why, "never judged%s", where);
        answer(q, &c);
        return;
    }
    c.inside = x >= s->point[0] && x <= s->point[s->n - 1];
    while (at < s->n - 1 && s->point[at] < x) at++;
    if (!c.inside)
        snprintf(c.why, sizeof c.why, "judged from %.10g to %.10g only%s", s->point[0], s->point[s->n - 1], where);
    else if (s->point[at] == x) snprintf(c.why, sizeof c.why, "judged%s", where);
    else
        snprintf(c.why, sizeof c.why, "not run itself: between %.10g and %.10g, which were judged%s", s->point[at - 1], s->point[at],
                 where);
    answer(q, &c);
}

static void noteSize(dkv_scope_size size, double x, void *arg) {
    question *q = arg;
    if (!q->asked[size] || x < q->least[size]) q->least[size] = x;
    if (!q->asked[size] || x > q->most[size]) q->most[size] = x;
    q->asked[size] = true;
}

int dkv_askScope(const dkv_scope *s, const dkv_problem *p, bool shapeless, dkv_covered_take take, void *arg) {
    question q = {.scope = s, .p = p, .take = take, .arg = arg};
    char where[80];
    profile f;
    describe(p, &f);
    for (int k = 0; k < DKV_SCOPE_KINDS; k++)
        if (!shapeless || (k < FIRST_OF_SHAPE && k != 9)) askFeature(&q, &f, k, shapeless);
    eachSize(p, noteSize, &q);
    snprintf(where, sizeof where, " with %s %s", dkv_maskName(p->mask), dkv_dtypeName(p->dtype));
    for (int i = 0; i < DKV_SIZE_N_OF; i++) {
        const dkv_span *span = &s->kind[p->mask][p->dtype].size[i];
        if (!q.asked[i] || (shapeless && i != DKV_SIZE_SIGHT && i != DKV_SIZE_HEADS)) continue;
        if (q.least[i] != q.most[i] && !shapeless) askSpan(&q, sizes[i], span, q.least[i], where);
        askSpan(&q, sizes[i], span, q.most[i], where);
    }
    for (int i = 0; i < DKV_PARAM_N_OF; i++)
        if (f.has[i]) askSpan(&q, parameterName(i), &s->parameter[i], f.parameter[i], "");
    return q.outside;
}

/* ---- JSON ---- */

static cJSON *printSpan(const dkv_span *s) { return cJSON_CreateDoubleArray(s->point, s->n); }

cJSON *dkv_printScope(const dkv_scope *s) {
    cJSON *o = cJSON_CreateObject(), *features = cJSON_AddObjectToObject(o, "features");
    for (int k = 0; k < DKV_SCOPE_KINDS; k++) {
        cJSON *list = cJSON_AddArrayToObject(features, kinds[k]);
        const char *values[DKV_SCOPE_FEATURES];
        for (int i = 0, n = listValues(s, k, values); i < n; i++) cJSON_AddItemToArray(list, cJSON_CreateString(values[i]));
    }
    cJSON *pairs = cJSON_AddObjectToObject(o, "judged_together");
    for (int i = 0; i < s->n; i++) {
        cJSON *list = cJSON_AddArrayToObject(pairs, s->feature[i]);
        for (int k = 0; k < i; k++)
            if (s->pair[i][k]) cJSON_AddItemToArray(list, cJSON_CreateString(s->feature[k]));
    }
    cJSON *by = cJSON_AddArrayToObject(o, "sizes");
    for (int m = 0; m < DKV_SCOPE_MASKS; m++)
        for (int t = 0; t < DKV_SCOPE_DTYPES; t++) {
            if (!s->kind[m][t].cases) continue;
            cJSON *row = cJSON_CreateObject();
            cJSON_AddItemToArray(by, row);
            cJSON_AddStringToObject(row, "mask", dkv_maskName((dualkv_mask_kind)m));
            cJSON_AddStringToObject(row, "dtype", dkv_dtypeName((dualkv_dtype)t));
            cJSON_AddNumberToObject(row, "cases", (double)s->kind[m][t].cases);
            for (int i = 0; i < DKV_SIZE_N_OF; i++) cJSON_AddItemToObject(row, sizes[i], printSpan(&s->kind[m][t].size[i]));
        }
    cJSON *params = cJSON_AddObjectToObject(o, "parameters");
    for (int i = 0; i < DKV_PARAM_N_OF; i++)
        if (parameterName(i)) cJSON_AddItemToObject(params, parameterName(i), printSpan(&s->parameter[i]));
    return o;
}

static int readSpan(const cJSON *o, const char *key, dkv_span *s, dkv_err *err) {
    const cJSON *x, *list = cJSON_GetObjectItemCaseSensitive(o, key);
    s->n = 0;
    if (!cJSON_IsArray(list)) return dkv_fail(err, DKV_EUSER, "its scope has no list '%s'", key);
    cJSON_ArrayForEach(x, list) {
        if (!cJSON_IsNumber(x) || s->n == DKV_SCOPE_POINTS || (s->n && x->valuedouble <= s->point[s->n - 1]))
            return dkv_fail(err, DKV_EUSER, "its scope's '%s' is no ascending list of at most %d numbers", key, DKV_SCOPE_POINTS);
        s->point[s->n++] = x->valuedouble;
    }
    return 0;
}

static int readFeatures(const cJSON *o, dkv_scope *s, dkv_err *err) {
    const cJSON *list, *x, *together = cJSON_GetObjectItemCaseSensitive(o, "judged_together");
    if (!cJSON_IsObject(together)) return dkv_fail(err, DKV_EUSER, "its scope does not say what was judged together");
    cJSON_ArrayForEach(list, together) {
        if (s->n == DKV_SCOPE_FEATURES || strlen(list->string) >= DKV_SCOPE_WORD || findFeature(s, list->string) >= 0 || !cJSON_IsArray(list))
            return dkv_fail(err, DKV_EUSER, "its scope's feature '%.60s' is none", list->string);
        strcpy(s->feature[s->n], list->string);
        s->pair[s->n][s->n] = true;
        cJSON_ArrayForEach(x, list) {
            int other = findFeature(s, cJSON_IsString(x) ? x->valuestring : "");
            if (other < 0) return dkv_fail(err, DKV_EUSER, "its scope's feature '%.60s' names one that is none", list->string);
            s->pair[s->n][other] = s->pair[other][s->n] = true;
        }
        s->n++;
    }
    return 0;
}

static int findName(const char *(*name)(int), int n, const cJSON *o, const char *key) {
    const char *word = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(o, key));
    for (int i = 0; word && i < n; i++)
        if (name(i) && strcmp(name(i), word) == 0) return i;
    return -1;
}

static const char *maskName(int i) { return dkv_maskName((dualkv_mask_kind)i); }
static const char *dtypeName(int i) { return dkv_dtypeName((dualkv_dtype)i); }

int dkv_readScope(const cJSON *o, dkv_scope *s, dkv_err *err) {
    const cJSON *row, *params = cJSON_GetObjectItemCaseSensitive(o, "parameters");
    memset(s, 0, sizeof *s);
    if (!cJSON_IsObject(o)) return dkv_fail(err, DKV_EUSER, "it has no scope");
    int rc = readFeatures(o, s, err);
    cJSON_ArrayForEach(row, cJSON_GetObjectItemCaseSensitive(o, "sizes")) {
        int m = findName(maskName, DUALKV_BIDIR + 1, row, "mask"), t = findName(dtypeName, DKV_SCOPE_DTYPES, row, "dtype");
        if (rc || m < 0 || t < 0) return rc ? rc : dkv_fail(err, DKV_EUSER, "its scope's sizes are of no mask and dtype");
        s->kind[m][t].cases = 1;
        for (int i = 0; i < DKV_SIZE_N_OF && !rc; i++) rc = readSpan(row, sizes[i], &s->kind[m][t].size[i], err);
    }
    for (int i = 0; i < DKV_PARAM_N_OF && !rc; i++)
        if (parameterName(i)) rc = readSpan(params, parameterName(i), &s->parameter[i], err);
    return rc;
}
