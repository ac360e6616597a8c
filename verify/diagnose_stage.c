/* From which tensors are off, and from what probes and fits say, to the stage and the region. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "append.h"
#include "diagnose_impl.h"

#define MOSTLY 0.6   /* of the rows that were read: weights are called right */
#define SOME 0.2     /* wrong: a kind of fault is named */
#define GROSS 3.0    /* bounds: beyond it is no matter of a rounding more or less */
#define BELIEVED 0.4 /* where the error is no larger than a rounding: rounding of dS has its part in it */
#define EXPLAINS 0.8 /* of the error: a fit is believed */

enum {
    PP = 1,
    RP = 2,
    RR = 4,
    FOREIGN = 8
}; /* pairs: prompt-prompt, response-prompt, response-response, others */

static void sayRegion(const dkv_diag *d, unsigned pairs, char *out, size_t n) {
    static const char *const words[] = {"prompt-prompt", "response-prompt", "response-response",
                                        "keys of other branches"};
    bool deep = false;
    const dualkv_problem *v = &d->c->packed.view;
    for (int32_t i = 0; i < v->n_segments; i++) deep |= v->segments[i].depth > 1;
    size_t at = 0;
    out[0] = 0;
    for (int i = 0; i < 4; i++)
        if (pairs & 1u << i && at < n)
            at += (size_t)snprintf(out + at, n - at, "%s%s", at ? ", " : "",
                                   i == 1 && deep ? "response-ancestor" : words[i]);
}

/* Which segments have rows that are off: 1 prompts, 2 responses. */
static unsigned sidesOf(const dkv_diag *d, dkv_tensor_id id) {
    const dkv_map *m = &d->map[id];
    const dualkv_problem *v = &d->c->packed.view;
    int64_t off[2] = {0}, all = 0;
    if (!m->present || id == DKV_DSINK) return 0;
    for (int64_t i = 0; i < m->tokens * m->heads; i++) {
        if (!m->off[i]) continue;
        off[v->segments[dkv_segmentOf(&d->c->packed, m->keys, i / m->heads)].depth > 0]++;
        all++;
    }
    return (off[0] * 50 > all ? 1u : 0) | (off[1] * 50 > all ? 2u : 0);
}

static unsigned pairsOf(const dkv_weights *w) {
    int64_t all = 0;
    unsigned pairs = 0;
    for (int i = 0; i < 6; i++) all += w->at[i / 3][i % 3];
    if (w->at[0][0] * 50 > all) pairs |= PP;
    if (w->at[1][1] * 50 > all) pairs |= RP;
    if (w->at[1][0] * 50 > all) pairs |= RR;
    if ((w->at[0][2] + w->at[1][2]) * 50 > all) pairs |= FOREIGN;
    return pairs;
}

/* Pairs that rows and keys which are off leave possible. */
static unsigned pairsBetween(unsigned rows, unsigned keys) {
    return (rows & 1 && keys & 1 ? PP : 0) | (rows & 2 && keys & 1 ? RP : 0) |
           (rows & 2 && keys & 2 ? RR : 0);
}

static dkv_spot *addSpot(dkv_diag *d, dkv_stage stage, dkv_tensor_id tensor, unsigned tensors) {
    dkv_diagnosis *o = d->out;
    if (o->n_spots == DKV_SPOTS_MAX) return NULL;
    dkv_spot *s = &o->spot[o->n_spots++];
    memset(s, 0, sizeof *s);
    *s = (dkv_spot){.stage = stage, .tensor = tensor, .tensors = tensors, .share = NAN};
    return s;
}

static __attribute__((format(printf, 2, 3))) void addDetail(dkv_spot *s, const char *fmt, ...) {
    size_t at = strlen(s->detail);
    va_list ap;
    if (at && at + 3 < sizeof s->detail) at += (size_t)snprintf(s->detail + at, sizeof s->detail - at, "; ");
    va_start(ap, fmt);
    if (at < sizeof s->detail) vsnprintf(s->detail + at, sizeof s->detail - at, fmt, ap);
    va_end(ap);
}

/* A tensor's rows are another's, or its own times a number that explains at least `share`. */
static bool noteSimple(dkv_diag *d, dkv_spot *s, dkv_tensor_id id, double share) {
    const dkv_tensor_where *w = &d->out->tensor[id];
    char words[100];
    double moved = dkv_findMoved(d, id, words, sizeof words);
    if (moved > MOSTLY) addDetail(s, "%s", words);
    if (moved > MOSTLY) return true;
    if (!(w->scaled_share > share)) return false;
    addDetail(s, "%s is %.4g times its value", dkv_tensorName(id), w->scaled);
    s->share = w->scaled_share;
    return true;
}

/* Elements that still hold what was there before the launch. */
static bool isUnwritten(const dkv_diag *d, dkv_tensor_id id) {
    return d->c->run[d->c->judged_run].poison[id] > 0;
}

/* ---- forward ---- */

static const char *const kinds[] = {"right",
                                    "all times one number",
                                    "keys without weight",
                                    "keys that must not be seen",
                                    "a range of keys times one number",
                                    "each key times another number",
                                    "NaN"};

static dkv_weight_kind mainKind(const dkv_weights *w) {
    int best = DKV_W_RIGHT;
    if ((double)w->kind[DKV_W_RIGHT] >= MOSTLY * (double)w->rows) return DKV_W_RIGHT;
    for (int k = 1; k < DKV_N_WEIGHTS; k++)
        if (best == DKV_W_RIGHT || w->kind[k] > w->kind[best]) best = k;
    return (dkv_weight_kind)best;
}

static void noteWeights(dkv_spot *s, const dkv_weights *w, dkv_weight_kind kind) {
    s->share = (double)w->kind[kind] / (double)w->rows;
    if (kind == DKV_W_NAN || kind == DKV_W_RIGHT || kind == DKV_W_FACTOR || kind == DKV_W_PIECES)
        addDetail(s, "weights of keys: %s", kinds[kind]);
    if (w->words[0] && kind != DKV_W_RIGHT && kind != DKV_W_FACTOR) addDetail(s, "%s", w->words);
    if (kind == DKV_W_SCORES && w->n_linear && w->linear / (double)w->n_linear > 0.9)
        addDetail(s, "their logarithms are off in proportion to the score (scale or cap)");
}

/* Errors of LSE that are those of one key more or less: sharper than any weight that is read in 16 bit. */
typedef struct key_rule {
    const char *words;
    int own, index,
        ahead; /* index: 0 first, 1 last of the part (own, context); -1: position of the row plus `ahead` */
    bool more;
} key_rule;
static const key_rule rules[] = {
    {"they miss the key at their own position", 1, -1, 0, false},
    {"they see the key 1 position ahead", 1, -1, 1, true},
    {"they miss the first key before their segment", 0, 0, 0, false},
    {"they miss the last key before their segment", 0, 1, 0, false},
    {"they miss the first key of their segment", 1, 0, 0, false},
    {"they miss the key 1 position back", 1, -1, -1, false},
    {"they miss the oldest key that they see", 2, 0, 0, false},
    {"they see one key older than the oldest that they may", 2, -1, -1, true},
};
enum { N_RULES = sizeof rules / sizeof rules[0] };

static int64_t keyOf(const key_rule *u, const dkv_pairs *x, int64_t at) {
    int64_t j = -1, oldest = 0;
    if (u->own == 2) {
        while (oldest < x->n && !x->sees[oldest]) oldest++;
        j = oldest + u->ahead;
    } else if (u->index == -1)
        j = at + u->ahead;
    else if (u->own)
        j = u->index ? x->n - 1 : x->context;
    else
        j = u->index ? x->context - 1 : 0;
    if (j < 0 || j >= x->n || (u->own == 0 && j >= x->context)) return -1;
    return x->sees[j] == u->more ? -1 : j;
}

/* The rule that explains most rows of LSE that are off, NULL: none explains MOSTLY. */
static const key_rule *findRule(const dkv_diag *d, double *share, unsigned *pairs) {
    const dkv_map *m = &d->map[DKV_LSE];
    const dualkv_problem *v = &d->c->packed.view;
    int64_t fits[N_RULES] = {0}, own[N_RULES][2] = {{0}}, rows = 0;
    dkv_pairs x;
    if (dkv_openPairs(d, &x, NULL)) return NULL;
    for (int64_t i = 0; i < m->tokens * m->heads && rows < 2048; i++) {
        const int64_t at = dkv_mapAt(m, DKV_LSE, i, 0), t = i / m->heads;
        const double error = m->got[at] - m->want[at];
        if (!m->off[i] || !isfinite(error)) continue;
        const int32_t s = dkv_segmentOf(&d->c->packed, false, t);
        rows++;
        dkv_pairRow(&x, s, t - v->segments[s].q_start, (int32_t)(i % m->heads), false);
        for (int k = 0; k < N_RULES; k++) {
            const int64_t j = keyOf(&rules[k], &x, x.context + t - v->segments[s].q_start);
            const double p = j < 0 ? 0 : exp(x.s[j] - x.lse), is = rules[k].more ? log1p(p) : log1p(-p);
            if (j < 0 || !(fabs(is - error) <= 2 * m->bound[at])) continue;
            fits[k]++;
            own[k][v->segments[s].depth > 0]++;
        }
    }
    dkv_closePairs(&x);
    int best = 0;
    for (int k = 1; k < N_RULES; k++)
        if (fits[k] > fits[best]) best = k;
    *share = rows ? (double)fits[best] / (double)rows : 0;
    const bool context = rules[best].own == 0;
    *pairs = (own[best][0] && !context ? PP : 0) | (own[best][1] ? (context ? RP : RR) : 0);
    return *share > MOSTLY ? &rules[best] : NULL;
}

/* O is off as an LSE that is wrong would make it: the row sum has more or less than the values. */
static double fitSum(const dkv_diag *d) {
    const dkv_map *m = &d->map[DKV_O], *l = &d->map[DKV_LSE];
    double share = 0, n = 0;
    for (int64_t i = 0; i < m->tokens * m->heads; i++) {
        const int64_t at = dkv_mapAt(l, DKV_LSE, i, 0);
        const double x = expm1(l->want[at] - l->got[at]);
        double ee = 0, rr = 0;
        if (!m->off[i] || !isfinite(x)) continue;
        for (int64_t c = 0; c < m->dim; c++) {
            const double e = m->got[i * m->dim + c] - m->want[i * m->dim + c],
                         r = e - x * m->want[i * m->dim + c];
            ee += e * e, rr += r * r;
        }
        if (!(ee > 0) || !isfinite(ee)) continue;
        share += 1 - fmin(1, rr / ee), n++;
    }
    return n ? share / n : 0;
}

static dkv_stage forwardStage(const dkv_diag *d, const dkv_weights *w, dkv_weight_kind kind) {
    const bool lse = dkv_isOff(d, DKV_LSE);
    switch (kind) {
    case DKV_W_MISSING:
    case DKV_W_EXTRA: return lse && 2 * w->unsummed < w->kind[kind] ? DKV_STAGE_MASK : DKV_STAGE_PV;
    case DKV_W_NAN: return lse ? DKV_STAGE_FORWARD : DKV_STAGE_PV;
    case DKV_W_SCORES: return lse ? DKV_STAGE_SCORES : DKV_STAGE_PV;
    case DKV_W_PIECES: return DKV_STAGE_SOFTMAX;
    case DKV_W_FACTOR: return DKV_STAGE_SUM;
    default: return DKV_STAGE_FORWARD;
    }
}

static void rowRegion(const dkv_diag *d, dkv_spot *s, dkv_tensor_id id) {
    static const char *const words[] = {"", "rows of the prompt", "rows of the responses",
                                        "rows of prompt and responses"};
    snprintf(s->region, sizeof s->region, "%s", words[sidesOf(d, id)]);
}

/* Errors of LSE that are one number. */
static bool noteOffset(const dkv_diag *d, dkv_spot *s) {
    const dkv_map *m = &d->map[DKV_LSE];
    double low = INFINITY, high = -INFINITY, bound = 0;
    for (int64_t i = 0; i < m->tokens * m->heads; i++) {
        const int64_t at = dkv_mapAt(m, DKV_LSE, i, 0);
        const double e = m->got[at] - m->want[at];
        if (!m->off[i] || !isfinite(e)) continue;
        low = fmin(low, e), high = fmax(high, e), bound = fmax(bound, m->bound[at]);
    }
    if (!(high >= low)) return false;
    if (high - low <= 4 * bound) {
        addDetail(s, "LSE is off by %+.4g everywhere", (low + high) / 2);
        return true;
    }
    if (low > 0 || high < 0)
        addDetail(s, "LSE is too %s everywhere, by %.2g to %.2g", low > 0 ? "large" : "small",
                  fmin(fabs(low), fabs(high)), fmax(fabs(low), fabs(high)));
    return false;
}

/* What its judgement says of bias. */
static void noteLean(const dkv_diag *d, dkv_spot *s, dkv_tensor_id id) {
    const dkv_judgement *j = &d->c->result->tensor[id];
    if (j->twin && fabs(j->all.gain) > j->all.gain_limit)
        addDetail(s, "%s is too %s by %.2g of its value on average", dkv_tensorName(id),
                  j->all.gain < 0 ? "small" : "large", fabs(j->all.gain));
}

/* No more is known of rows that are not written than which they are; of NaN, whether the rows see any key. */
static bool spotOfNothing(dkv_diag *d) {
    const dkv_map *o = &d->map[DKV_O], *l = &d->map[DKV_LSE];
    const bool not_o = isUnwritten(d, DKV_O), not_lse = isUnwritten(d, DKV_LSE);
    int64_t blind = 0, all = 0, nan = 0;
    for (int64_t i = 0; i < l->tokens * l->heads && l->present; i++) {
        if (!l->off[i]) continue;
        blind += isinf(l->want[dkv_mapAt(l, DKV_LSE, i, 0)]);
        nan += l->off[i] == 3;
        all++;
    }
    const bool empty = all && blind == all;
    if (!not_o && !not_lse && !(empty && o->n_off)) return false;
    const unsigned tensors = (unsigned)(o->n_off > 0) << DKV_O | (unsigned)(l->n_off > 0) << DKV_LSE;
    const dkv_tensor_id id = not_o || !l->n_off ? DKV_O : DKV_LSE;
    dkv_spot *s = addSpot(d,
                          empty              ? DKV_STAGE_SOFTMAX
                          : not_lse && not_o ? DKV_STAGE_FORWARD
                          : not_o            ? DKV_STAGE_O
                                             : DKV_STAGE_LSE,
                          id, tensors);
    if (!s) return true;
    if (empty)
        addDetail(s, "rows that see no key");
    else
        addDetail(s, "not written%s", not_o && not_lse ? ": these rows are not computed" : "");
    rowRegion(d, s, id);
    return true;
}

/* Weights are right: LSE alone, O alone, or both by less than weights tell. */
static void spotBesideWeights(dkv_diag *d, bool read) {
    const bool lse = dkv_isOff(d, DKV_LSE), o = dkv_isOff(d, DKV_O);
    double share;
    unsigned pairs;
    const key_rule *rule = lse ? findRule(d, &share, &pairs) : NULL;
    dkv_spot *s;
    if (rule) {
        s = addSpot(d, DKV_STAGE_MASK, DKV_LSE, 1u << DKV_LSE | (unsigned)o << DKV_O);
        if (!s) return;
        s->share = share;
        sayRegion(d, pairs, s->region, sizeof s->region);
        addDetail(s, "%s", rule->words);
        return;
    }
    if (lse && o && !d->map[DKV_LSE].n_nonfinite && (share = fitSum(d)) > 0.5) {
        s = addSpot(d, DKV_STAGE_SUM, DKV_LSE, 1u << DKV_LSE | 1u << DKV_O);
        if (!s) return;
        s->share = share;
        addDetail(s, "O is off by the factor by which the sum is");
        rowRegion(d, s, DKV_LSE);
        return;
    }
    if (lse && o && read) { /* by less than a weight in 16 bit tells */
        s = addSpot(d, DKV_STAGE_SCORES, DKV_LSE, 1u << DKV_LSE | 1u << DKV_O);
        if (!s) return;
        addDetail(s, "scores or exp: by less than single weights show");
        noteLean(d, s, DKV_LSE);
        rowRegion(d, s, DKV_LSE);
        return;
    }
    const dkv_tensor_id id = lse ? DKV_LSE : DKV_O;
    s = addSpot(d, lse ? (o ? DKV_STAGE_FORWARD : DKV_STAGE_LSE) : DKV_STAGE_O, id,
                (unsigned)lse << DKV_LSE | (unsigned)o << DKV_O);
    if (!s) return;
    rowRegion(d, s, id);
    if (lse && !o && noteOffset(d, s)) return;
    if (noteSimple(d, s, id, 0.95)) return;
    if (lse && o && !read) addDetail(s, "no probe could be run (--time gives them more)");
    if (!lse && read) addDetail(s, "each key has its weight when V is one-hot");
    noteLean(d, s, id);
}

/* Weights share a factor: does the sum have more than the values, or less? */
static void noteSum(const dkv_diag *d, dkv_spot *s) {
    const dkv_map *m = &d->map[DKV_LSE];
    int64_t more = 0, less = 0;
    for (int64_t i = 0; i < m->tokens * m->heads; i++) {
        const int64_t at = dkv_mapAt(m, DKV_LSE, i, 0);
        more += m->off[i] && m->got[at] > m->want[at];
        less += m->off[i] && m->got[at] < m->want[at];
    }
    if (more > 9 * less) addDetail(s, "the sum has more than the keys' weights");
    if (less > 9 * more) addDetail(s, "the sum has less than the keys' weights");
}

/* Weights that are wrong, and LSE where they do not explain it. */
static void spotOfForwardWeights(dkv_diag *d, const dkv_weights *w, dkv_weight_kind kind) {
    const unsigned lse = dkv_isOff(d, DKV_LSE), of = dkv_isOff(d, DKV_O);
    const dkv_stage stage = forwardStage(d, w, kind);
    const bool lost = kind == DKV_W_MISSING || kind == DKV_W_EXTRA;
    bool apart = lse && lost && stage == DKV_STAGE_PV, all = true;
    for (int i = 0; i < 2 && lse && lost; i++) {
        const bool differs = (double)w->lse_differs[i] > MOSTLY * (double)w->lost[i];
        apart |= w->lost[i] && differs;
        all &= !w->lost[i] || differs;
    }
    const bool with = lse && !(apart && all);
    dkv_spot *s = addSpot(d, stage, with ? DKV_LSE : DKV_O, (unsigned)with << DKV_LSE | of << DKV_O);
    if (!s) return;
    noteWeights(s, w, kind);
    if (kind == DKV_W_FACTOR && lse) noteSum(d, s);
    sayRegion(d, pairsOf(w), s->region, sizeof s->region);
    if (!s->region[0]) rowRegion(d, s, s->tensor);
    if (!apart || !(s = addSpot(d, DKV_STAGE_LSE, DKV_LSE, 1u << DKV_LSE))) return;
    rowRegion(d, s, DKV_LSE);
    if (all) {
        if (!noteSimple(d, s, DKV_LSE, 0.95)) noteOffset(d, s);
    } else {
        const int which = (double)w->lse_differs[0] > MOSTLY * (double)w->lost[0] ? 0 : 1;
        snprintf(s->region, sizeof s->region, "rows of the %s", which ? "responses" : "prompt");
        addDetail(s, "in %s", s->region);
    }
    addDetail(s, "the weights that O shows do not explain it");
}

/* O alone, by no more than a rounding more or less: single weights, read in the same precision, tell
 * nothing. */
static bool isFine(const dkv_diag *d, dkv_tensor_id id) {
    return !d->map[id].n_nonfinite && d->out->tensor[id].worst < GROSS;
}

static void findForward(dkv_diag *d) {
    if (spotOfNothing(d)) return;
    const dkv_map *o = &d->map[DKV_O], *l = &d->map[DKV_LSE];
    const int64_t n = d->c->packed.view.tq * d->c->packed.view.hq;
    uint8_t *rows = calloc((size_t)n + 1, 1);
    dkv_weights w = {0};
    for (int64_t i = 0; i < n && rows; i++) rows[i] = (o->present && o->off[i]) || (l->present && l->off[i]);
    const bool fine = !dkv_isOff(d, DKV_LSE) && isFine(d, DKV_O);
    const bool read = rows && !fine && dkv_readWeights(d, false, rows, &w);
    const dkv_weight_kind kind = read ? mainKind(&w) : DKV_W_RIGHT;
    if (kind == DKV_W_RIGHT)
        spotBesideWeights(d, read);
    else
        spotOfForwardWeights(d, &w, kind);
    dkv_freeWeights(&w);
    free(rows);
}

/* ---- backward ---- */

static void keyRegion(const dkv_diag *d, dkv_spot *s, dkv_tensor_id id) {
    static const char *const words[] = {"", "keys of the prompt", "keys of the responses",
                                        "keys of prompt and responses"};
    snprintf(s->region, sizeof s->region, "%s", words[sidesOf(d, id)]);
}

/* A stage that one tensor alone shows, or dK and dV together. */
static void spotOfSum(dkv_diag *d, dkv_stage stage, dkv_tensor_id id, unsigned tensors) {
    dkv_parts parts = {0};
    dkv_spot *s = addSpot(d, stage, id, tensors);
    if (!s) return;
    if (isUnwritten(d, id)) addDetail(s, "not written");
    if (isUnwritten(d, id) || noteSimple(d, s, id, 0.995)) {
        if (id == DKV_DQ)
            rowRegion(d, s, id);
        else
            keyRegion(d, s, id);
        return;
    }
    const bool found = dkv_fitParts(d, id, &parts);
    const unsigned sides = sidesOf(d, id);
    unsigned pairs = 0;
    if (found) {
        s->share = parts.share;
        addDetail(s, "%s", parts.words);
    } else if (d->out->tensor[id].scaled_share > 0.9)
        noteSimple(d, s, id, 0.9);
    const bool own = !found || parts.own, other = !found || parts.context;
    if (id == DKV_DQ)
        pairs = (sides & 1 && own ? PP : 0) | (sides & 2 && other ? RP : 0) | (sides & 2 && own ? RR : 0);
    else
        pairs = (sides & 1 && own ? PP : 0) | (sides & 1 && other ? RP : 0) | (sides & 2 && own ? RR : 0);
    sayRegion(d, pairs, s->region, sizeof s->region);
}

static dkv_stage weightStage(dkv_weight_kind kind) {
    return kind == DKV_W_MISSING || kind == DKV_W_EXTRA ? DKV_STAGE_B_MASK
           : kind == DKV_W_SCORES                       ? DKV_STAGE_B_SCORES
                                                        : DKV_STAGE_B_P;
}

/* Rows of dQ that are far off though the backward's weights of their keys are right. */
static double shareBeside(const dkv_diag *d, const dkv_weights *w, const uint8_t *rows) {
    const dkv_map *m = &d->map[DKV_DQ];
    int64_t right = 0, all = 0;
    for (int64_t i = 0; i < m->tokens * m->heads; i++) {
        if (!rows[i] || !w->read[i]) continue;
        all++;
        right += !w->off[i] && m->size[i] > GROSS;
    }
    return all ? (double)right / (double)all : 0;
}

/* 0: the weights are right, or could not be read; 1: they are wrong; 2: in some rows, others are off beside;
 * 3: pairs are lost from dV and not from dQ, so the sum over rows loses them, and dQ has another fault: no spot
 * is added. */
static int spotOfWeights(dkv_diag *d, dkv_tensor_id from, unsigned tensors) {
    const int64_t n = d->c->packed.view.tq * d->c->packed.view.hq;
    uint8_t *rows = calloc((size_t)n + 1, 1);
    dkv_weights w = {0};
    int named = 0;
    for (int64_t i = 0; i < n && rows; i++) rows[i] = from == DKV_DQ ? d->map[DKV_DQ].off[i] : 1;
    if (rows && dkv_readWeights(d, true, rows, &w) &&
        (double)w.kind[DKV_W_RIGHT] < (1 - SOME) * (double)w.rows) {
        named = from == DKV_DQ && shareBeside(d, &w, rows) > SOME ? 2 : 1;
        w.kind[DKV_W_RIGHT] = 0;
        const dkv_weight_kind kind = mainKind(&w);
        if (from == DKV_DQ && kind == DKV_W_MISSING && w.lost_dq < 0.5) named = 3;
        dkv_spot *s = named == 3 ? NULL : addSpot(d, weightStage(kind), from, tensors);
        if (s) {
            noteWeights(s, &w, kind);
            sayRegion(d, pairsOf(&w), s->region, sizeof s->region);
            if (!s->region[0])
                sayRegion(d, pairsBetween(sidesOf(d, DKV_DQ), sidesOf(d, DKV_DK) | sidesOf(d, DKV_DV)),
                          s->region, sizeof s->region);
        }
    }
    dkv_freeWeights(&w);
    free(rows);
    return named;
}

static void spotOfPairs(dkv_diag *d, dkv_stage stage, dkv_tensor_id id, unsigned tensors, double share) {
    dkv_spot *s = addSpot(d, stage, id, tensors);
    if (!s) return;
    s->share = share;
    if (stage == DKV_STAGE_DELTA)
        rowRegion(d, s, DKV_DQ);
    else
        sayRegion(d, pairsBetween(sidesOf(d, DKV_DQ), sidesOf(d, DKV_DK) | sidesOf(d, DKV_DV)), s->region,
                  sizeof s->region);
}

/* dK and dV, or one of them: one spot where the same explains both. */
static void spotOfKeys(dkv_diag *d, bool k, bool v) {
    dkv_diagnosis *o = d->out;
    if (!k || !v) {
        if (k) spotOfSum(d, DKV_STAGE_DK, DKV_DK, 1u << DKV_DK);
        if (v) spotOfSum(d, DKV_STAGE_DV, DKV_DV, 1u << DKV_DV);
        return;
    }
    const int at = o->n_spots;
    spotOfSum(d, DKV_STAGE_DV, DKV_DV, 1u << DKV_DV);
    if (at + 1 < DKV_SPOTS_MAX) spotOfSum(d, DKV_STAGE_DK, DKV_DK, 1u << DKV_DK);
    if (o->n_spots < at + 2) return;
    dkv_spot *a = &o->spot[at];
    const dkv_spot *b = &o->spot[at + 1];
    const bool named = !strncmp(a->detail, "dV", 2) && !strncmp(b->detail, "dK", 2);
    if (a->detail[0] && b->detail[0] && strcmp(a->detail + (named ? 2 : 0), b->detail + (named ? 2 : 0)) &&
        fmin(a->share, b->share) > EXPLAINS)
        return;
    if (!a->detail[0]) memcpy(a->detail, b->detail, sizeof a->detail);
    a->stage = DKV_STAGE_REDUCE;
    a->tensors |= 1u << DKV_DK;
    o->n_spots = at + 1;
}

static void findBackward(dkv_diag *d) {
    bool q = dkv_isOff(d, DKV_DQ), k = dkv_isOff(d, DKV_DK), v = dkv_isOff(d, DKV_DV);
    const bool sink = dkv_isOff(d, DKV_DSINK),
               fine = isFine(d, DKV_DQ) && isFine(d, DKV_DK) && isFine(d, DKV_DV);
    const unsigned all =
        (unsigned)q << DKV_DQ | (unsigned)k << DKV_DK | (unsigned)v << DKV_DV | (unsigned)sink << DKV_DSINK;
    const double delta = q ? dkv_fitDelta(d) : NAN;
    int weights = 0;
    if (delta > (!k ? 0.9 : isFine(d, DKV_DQ) ? BELIEVED : EXPLAINS)) {
        spotOfPairs(d, DKV_STAGE_DELTA, DKV_DQ, all & ~(v ? 1u << DKV_DV : 0u), delta);
        if (v) spotOfKeys(d, false, true);
        return;
    }
    const dkv_tensor_where *dq = &d->out->tensor[DKV_DQ];
    if (q && (k || v) && dq->scaled_share > 0.995 &&
        fabs(dq->scaled) > 0.01) { /* alone, whatever the others have */
        spotOfSum(d, DKV_STAGE_DQ, DKV_DQ, 1u << DKV_DQ);
        q = false;
    }
    if (q && v) weights = spotOfWeights(d, DKV_DQ, all);
    if (weights >= 2) spotOfPairs(d, DKV_STAGE_DS, DKV_DQ, 1u << DKV_DQ | (unsigned)k << DKV_DK, NAN);
    if (weights == 3) spotOfSum(d, DKV_STAGE_REDUCE, DKV_DV, 1u << DKV_DV | (unsigned)k << DKV_DK);
    if (weights) return;
    if (q && v && k) {
        const int at = d->out->n_spots;
        spotOfPairs(d, fine ? DKV_STAGE_B_P : DKV_STAGE_BACKWARD, DKV_DQ, all, NAN);
        for (int id = DKV_DQ; id <= DKV_DV && at < d->out->n_spots; id++)
            noteLean(d, &d->out->spot[at], (dkv_tensor_id)id);
    } else if (q && k)
        spotOfPairs(d, DKV_STAGE_DS, DKV_DQ, all, NAN);
    else {
        if (q) spotOfSum(d, DKV_STAGE_DQ, DKV_DQ, 1u << DKV_DQ);
        spotOfKeys(d, k, v);
        if (sink) spotOfPairs(d, DKV_STAGE_DSINK, DKV_DSINK, 1u << DKV_DSINK, NAN);
    }
}

/* ---- precision ---- */

static bool leans(const dkv_diag *d, dkv_tensor_id id) {
    const dkv_judgement *j = &d->c->result->tensor[id];
    return j->present && (j->imprecise || j->biased);
}

static void findPrecision(dkv_diag *d) {
    const bool l = leans(d, DKV_LSE), o = leans(d, DKV_O), q = leans(d, DKV_DQ), k = leans(d, DKV_DK),
               v = leans(d, DKV_DV);
    const unsigned forward = (unsigned)l << DKV_LSE | (unsigned)o << DKV_O;
    const unsigned back = (unsigned)q << DKV_DQ | (unsigned)k << DKV_DK | (unsigned)v << DKV_DV;
    dkv_stage stage = DKV_STAGE_NONE;
    if (forward) {
        stage = l && o ? DKV_STAGE_SCORES : l ? DKV_STAGE_SUM : DKV_STAGE_PV;
        dkv_spot *s = addSpot(d, stage, l ? DKV_LSE : DKV_O, forward);
        if (s) s->precision = true;
    }
    if (back) {
        const double delta = q && !v ? dkv_fitDelta(d) : NAN;
        stage = delta > 0.5   ? DKV_STAGE_DELTA
                : v && q && k ? DKV_STAGE_B_P
                : q && k      ? DKV_STAGE_DS
                : k && v      ? DKV_STAGE_REDUCE
                : q           ? DKV_STAGE_DQ
                : k           ? DKV_STAGE_DK
                              : DKV_STAGE_DV;
        dkv_spot *s = addSpot(d, stage, q ? DKV_DQ : k ? DKV_DK : DKV_DV, back);
        if (s) s->precision = true;
    }
    if (leans(d, DKV_DSINK) && !back && !forward) {
        dkv_spot *s = addSpot(d, DKV_STAGE_DSINK, DKV_DSINK, 1u << DKV_DSINK);
        if (s) s->precision = true;
    }
}

/* ---- sentences ---- */

static size_t putTensors(const dkv_spot *s, char *out, size_t n) {
    size_t at = 0;
    int left = __builtin_popcount(s->tensors), first = 1;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!(s->tensors >> id & 1)) continue;
        at = dkv_append(out, n, at, "%s%s",
                 first       ? ""
                 : left == 1 ? " and "
                             : ", ",
                 dkv_tensorName((dkv_tensor_id)id));
        first = 0;
        left--;
    }
    return at;
}

static size_t putPrecision(const dkv_diag *d, const dkv_spot *s, char *out, size_t n, size_t at) {
    const dkv_judgement *j = &d->c->result->tensor[s->tensor];
    const dkv_tensor_where *w = &d->out->tensor[s->tensor];
    char why[300];
    dkv_explainJudgement(&d->c->result->arithmetic, s->tensor, j, why, sizeof why);
    at = dkv_append(out, n, at, ": %s", why);
    if (j->region[0].total && j->region[1].total)
        at = dkv_append(out, n, at, " (noise %.2f in the prompts, %.2f in the responses)", j->region[0].rms_z,
                 j->region[1].rms_z);
    if (w->growth_p < 1e-6)
        at = dkv_append(out, n, at, "; its noise goes with the number of keys to the power %.2g", w->growth);
    return at;
}

static void say(const dkv_diag *d, dkv_spot *s) {
    const dkv_tensor_where *w = &d->out->tensor[s->tensor];
    const bool many = __builtin_popcount(s->tensors) > 1;
    const size_t n = sizeof s->sentence;
    char *out = s->sentence;
    size_t at = putTensors(s, out, n);
    at = dkv_append(out, n, at,
             s->precision                             ? " %s less precise than declared, %s"
             : w->nonfinite && w->nonfinite == w->off ? " %s not finite, %s"
                                                      : " %s wrong, %s",
             many ? "are" : "is", dkv_stageRow(s->stage)->words);
    if (s->precision) {
        putPrecision(d, s, out, n, at);
        return;
    }
    if (w->rows_words[0]) at = dkv_append(out, n, at, ": %s of %s", w->rows_words, w->segments);
    if (w->heads[0]) at = dkv_append(out, n, at, "%s %s", w->rows_words[0] ? "," : ":", w->heads);
    if (w->dims[0] && strncmp(w->dims, "all ", 4) && strncmp(w->dims, "the only", 8))
        at = dkv_append(out, n, at, ", %s", w->dims);
    if (s->region[0] && strncmp(s->region, "rows", 4) && strncmp(s->region, "keys of the", 11))
        at = dkv_append(out, n, at, "; pairs %s", s->region);
    if (s->detail[0]) dkv_append(out, n, at, "; %s", s->detail);
}

void dkv_findSpots(dkv_diag *d) {
    if (dkv_isOff(d, DKV_O) || dkv_isOff(d, DKV_LSE)) findForward(d);
    if (d->c->p->grad &&
        (dkv_isOff(d, DKV_DQ) || dkv_isOff(d, DKV_DK) || dkv_isOff(d, DKV_DV) || dkv_isOff(d, DKV_DSINK)))
        findBackward(d);
    if (!d->out->n_spots) findPrecision(d);
    for (int i = 0; i < d->out->n_spots; i++) say(d, &d->out->spot[i]);
}
