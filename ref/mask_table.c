#include <inttypes.h>
#include <string.h>

#include "mask.h"
#include "word.h"

static const dkv_mask_row rows[] = {
#define M(id, word, parameters, whole, keys, help, needs, tests, ...) \
    [DUALKV_##id] = {word, word parameters, help, whole, keys, needs, tests, {__VA_ARGS__}},
    DKV_MASKS(M)
#undef M
};
enum { N_MASKS = sizeof rows / sizeof *rows };
_Static_assert(N_MASKS == DUALKV_BIDIR + 1, "every mask of dualkv_kernel.h has a row");

const dkv_mask_row *dkv_maskRow(int m) { return m >= 0 && m < N_MASKS ? &rows[m] : NULL; }

const char *dkv_maskName(dualkv_mask_kind m) { return m >= 0 && (int)m < N_MASKS ? rows[m].name : "?"; }

const char *dkv_listMask(int i, const char **help) {
    const dkv_mask_row *row = dkv_maskRow(i);
    if (row) *help = row->help;
    return row ? row->form : NULL;
}

static void *fieldOf(dkv_problem *p, const dkv_mask_parameter *q) { return (char *)p + q->at; }

double dkv_maskParameter(const dkv_problem *p, const dkv_mask_parameter *q) {
    const void *field = (const char *)p + q->at;
    if (q->kind == DKV_PARAMETER_COUNT) return (double)*(const int64_t *)field;
    if (q->kind == DKV_PARAMETER_SHARE) return *(const double *)field;
    return (double)*(const uint64_t *)field;
}

/* The parameter that may be left out, and is given. */
static const dkv_mask_parameter *optionOf(const dkv_problem *p) {
    for (const dkv_mask_parameter *q = rows[p->mask].parameter; q->kind; q++)
        if (q->variant && dkv_maskParameter(p, q) > 0) return q;
    return NULL;
}

dkv_mask_keys dkv_maskKeys(const dkv_problem *p) { return optionOf(p) ? DKV_KEYS_GAPS : rows[p->mask].keys; }

const char *dkv_listVariant(int i, dualkv_mask_kind *mask, bool *with) {
    for (int m = 0; m < DUALKV_BIDIR && i >= 0; m++) {
        *mask = (dualkv_mask_kind)m;
        *with = false;
        if (i-- == 0) return rows[m].name;
        for (const dkv_mask_parameter *q = rows[m].parameter; q->kind; q++)
            if (q->variant && i-- == 0) {
                *with = true;
                return q->variant;
            }
    }
    return NULL;
}

int dkv_maskVariant(const dkv_problem *p) {
    dualkv_mask_kind mask;
    bool with;
    for (int i = 0; dkv_listVariant(i, &mask, &with); i++)
        if (mask == p->mask && with == (optionOf(p) != NULL)) return i;
    return -1;
}

static int readParameter(const dkv_word *w, const char **s, const dkv_mask_parameter *q, dkv_problem *p, dkv_err *err) {
    const char *at = *s;
    if (q->kind == DKV_PARAMETER_COUNT) return dkv_readRange(w, s, q->least, DKV_TOKENS_MAX, q->what, fieldOf(p, q), err);
    if (q->kind == DKV_PARAMETER_SEED) return dkv_readSeed(w, s, fieldOf(p, q), err);
    double *share = fieldOf(p, q);
    int code = dkv_readReal(w, s, false, share, err);
    if (!code && !(*share >= 0 && *share <= 1)) code = dkv_failWord(err, w, at, "%s is between 0 and 1", q->what);
    return code;
}

int dkv_readMask(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    const char *names[N_MASKS + 1] = {NULL}, *s = w->value;
    for (int i = 0; i < N_MASKS; i++) names[i] = rows[i].name;
    while (s < w->end && *s != ':') s++;
    int kind = 0, code = dkv_readChoice(w, w->value, s, "mask", names, &kind, err);
    p->mask = (dualkv_mask_kind)kind;
    for (const dkv_mask_parameter *q = rows[kind].parameter; q->kind && !code; q++) {
        bool there = dkv_takeChar(w, &s, ':');
        if (there) code = readParameter(w, &s, q, p, err);
        else if (!q->variant) code = dkv_failWord(err, w, s, "%s needs %s: %s", rows[kind].name, rows[kind].needs, rows[kind].form);
    }
    return code ? code : dkv_atEnd(w, s, err);
}

void dkv_putMask(const dkv_problem *p, dkv_text *t) {
    if (p->mask == DUALKV_CAUSAL) return;
    dkv_putText(t, " mask=%s", rows[p->mask].name);
    for (const dkv_mask_parameter *q = rows[p->mask].parameter; q->kind; q++) {
        const void *field = (const char *)p + q->at;
        if (q->variant && dkv_maskParameter(p, q) == 0) continue;
        dkv_putText(t, ":");
        if (q->kind == DKV_PARAMETER_SHARE) dkv_putReal(t, *(const double *)field, false);
        else if (q->kind == DKV_PARAMETER_SEED) dkv_putText(t, "%" PRIu64, *(const uint64_t *)field);
        else dkv_putText(t, "%" PRId64, *(const int64_t *)field);
    }
}
