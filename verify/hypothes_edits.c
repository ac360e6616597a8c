/* The wrong decisions that the model is asked about, a row each. An edit is tried in the stages where
 * something is wrong, for all tensors of a stage and for some of them: a mask may be right in one loop of a
 * kernel and wrong in another. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "hypothes_model.h"

static const dkv_edit edits[] = {
#define KEYS(name_, doc_, ...)                                                                               \
    { .family = "visible", .name = name_, .doc = doc_, __VA_ARGS__ }
#define EACH(name_, doc_, ...)                                                                               \
    KEYS(name_, doc_, __VA_ARGS__),                                                                          \
        KEYS(name_ " (prompts)", doc_ ", in prompts alone", .rows = DKV_ROWS_PROMPT, __VA_ARGS__),           \
        KEYS(name_ " (responses)", doc_ ", in responses alone", .rows = DKV_ROWS_RESPONSE, __VA_ARGS__)
    EACH("one key ahead", "a row sees one key of the future", .keys = DKV_KEYS_SHIFT, .by = 1),
    EACH("not itself", "a row does not see itself", .keys = DKV_KEYS_SHIFT, .by = -1),
    EACH("two keys ahead", "a row sees two keys of the future", .keys = DKV_KEYS_SHIFT, .by = 2),
    EACH("window +1", "the window is one key too wide", .keys = DKV_KEYS_WINDOW, .by = 1),
    EACH("window -1", "the window is one key too narrow", .keys = DKV_KEYS_WINDOW, .by = -1),
    KEYS("window sinks +1", "the window keeps one sink too many", .keys = DKV_KEYS_SINKS, .by = 1),
    KEYS("window sinks -1", "the window loses one of its sinks", .keys = DKV_KEYS_SINKS, .by = -1),
    KEYS("no window sinks", "the window's sinks are not seen", .keys = DKV_KEYS_SINKS, .by = -1000000),
    EACH("no mask", "no mask is applied", .keys = DKV_KEYS_MASK, .by = DUALKV_FULL),
    EACH("causal mask", "the mask is causal and nothing more", .keys = DKV_KEYS_MASK, .by = DUALKV_CAUSAL),
    EACH("first key lost", "the first of all keys is lost", .keys = DKV_KEYS_FIRST),
    KEYS("prefix's last key lost", "the last key of an ancestor is lost", .keys = DKV_KEYS_PREFIX_END),
    EACH("own first key lost", "a segment's own first key is lost", .keys = DKV_KEYS_OWN_FIRST),
    KEYS("no prefix", "responses do not see their ancestors", .keys = DKV_KEYS_NO_PREFIX),
    KEYS("no own keys", "responses see their ancestors alone", .keys = DKV_KEYS_NO_OWN),
    KEYS("parent alone", "ancestors above the parent are not seen", .keys = DKV_KEYS_PARENT),
    KEYS("own limit without context", "own region: the causal limit leaves out the context",
         .keys = DKV_KEYS_LOCAL),
    KEYS("diagonal on the prefix", "the causal limit is applied to the prefix by the row's number",
         .keys = DKV_KEYS_PREFIX_DIAGONAL),
    KEYS("earlier siblings seen", "a response sees the responses before it", .keys = DKV_KEYS_SIBLINGS),
    KEYS("neighbour seen", "a response sees the segment before it", .keys = DKV_KEYS_NEIGHBOUR),
    KEYS("later segments seen", "a row sees the segments behind its own", .keys = DKV_KEYS_LATER),
    KEYS("context limit ignored", "a context limit is ignored", .keys = DKV_KEYS_UNLIMITED),
    KEYS("one row beyond the prefix", "the row behind an ancestor's last is seen",
         .keys = DKV_KEYS_ONE_BEYOND),
    KEYS("prefix twice", "ancestors' keys count twice", .keys = DKV_KEYS_TWICE),
#define TILES(n)                                                                                             \
    KEYS("partial tile of " #n " lost", "a last, partial tile of " #n " keys is lost",                       \
         .keys = DKV_KEYS_TAIL, .by = n),                                                                    \
        KEYS("last tile of " #n " lost", "the last tile of " #n " keys is lost", .keys = DKV_KEYS_LAST_TILE, \
             .by = n),                                                                                       \
        KEYS("first tile of " #n " lost", "the first tile of " #n " keys is lost",                           \
             .keys = DKV_KEYS_FIRST_TILE, .by = n),                                                          \
        KEYS("tail of a tile of " #n " seen", "rows behind a range are seen up to a whole tile of " #n,      \
             .keys = DKV_KEYS_BEYOND, .by = n)
    TILES(16),
    TILES(32),
    TILES(64),
    TILES(128),
#define SCORE(name_, doc_, ...)                                                                              \
    { .family = "score", .name = name_, .doc = doc_, __VA_ARGS__ }
    SCORE("softcap ignored", "softcap is not applied", .softcap = 1),
    SCORE("ALiBi ignored", "ALiBi is not applied", .alibi = 1),
    SCORE("ALiBi slope of the KV head", "ALiBi's slope is that of head h / (Hq/Hkv)", .alibi = 2),
    SCORE("ALiBi signed", "ALiBi's distance is signed", .alibi = 3),
    SCORE("ALiBi without context", "ALiBi's distance in the own region leaves out the context", .alibi = 4),
    SCORE("ALiBi slope of the next head", "ALiBi's slope is that of head h + 1", .alibi = 5),
    SCORE("sink ignored", "the sink is left out", .sink = 1),
    SCORE("sink twice", "the sink counts twice", .sink = 2),
    SCORE("sink scaled", "the sink's logit is scaled", .sink = 3),
    SCORE("LSE in base 2", "LSE is in base 2", .lse = 1),
    SCORE("LSE converted twice", "LSE is natural and converted from base 2 once more", .lse = 2),
    SCORE("LSE without the maximum", "LSE leaves out the row's maximum", .lse = 3),
    SCORE("LSE is the maximum", "LSE is the row's maximum", .lse = 4),
    SCORE("LSE without scale", "LSE is divided by the scale", .lse = 5),
#define HEAD(name_, doc_, ...)                                                                               \
    { .family = "head", .name = name_, .doc = doc_, __VA_ARGS__ }
#define HEADS(n, name_, doc_)                                                                                \
    HEAD(name_, doc_ " (K and V)", .k_heads = n, .v_heads = n),                                              \
        HEAD(name_ " for K", doc_ " (K)", .k_heads = n), HEAD(name_ " for V", doc_ " (V)", .v_heads = n)
    HEADS(1, "KV head h mod Hkv", "query head h reads KV head h mod Hkv"),
    HEADS(2, "KV heads reversed", "KV heads are read in reverse order"),
    HEADS(3, "KV head 0", "all query heads read KV head 0"),
    HEADS(4, "next KV head", "query heads read the next KV head"),
#define GRADIENT(name_, doc_, ...)                                                                           \
    { .family = "gradient", .name = name_, .doc = doc_, __VA_ARGS__ }
    GRADIENT("delta left out", "delta is left out, the gradient through LSE is not", .delta = 1),
    GRADIENT("delta and dLSE left out", "delta and the gradient through LSE are left out", .delta = 1,
             .d_lse = -1),
    GRADIENT("delta's sign", "delta has the other sign", .delta = 2),
    GRADIENT("delta of the head before", "delta is that of the head before", .delta = 3),
    GRADIENT("delta of the head after", "delta is that of the head after", .delta = 4),
    GRADIENT("delta of the row before", "delta is that of the row before", .delta = 5),
    GRADIENT("delta of the row after", "delta is that of the row after", .delta = 6),
    GRADIENT("delta twice", "delta counts twice", .delta = 7),
    GRADIENT("dLSE ignored", "the gradient through LSE is left out", .d_lse = -1),
    GRADIENT("dLSE's sign", "the gradient through LSE has the other sign", .d_lse = -2),
    GRADIENT("dLSE twice", "the gradient through LSE counts twice", .d_lse = 1),
    GRADIENT("softcap's derivative", "backward leaves out softcap's derivative", .softcap = 2),
    GRADIENT("LSE taken for base 2", "backward takes the natural LSE for one in base 2", .base = 1),
    GRADIENT("LSE converted to base 2", "backward converts LSE to base 2 and uses it as a natural one",
             .base = 2),
    GRADIENT("dS without P", "dS is not multiplied by P", .p_for_ds = 1),
    GRADIENT("dS with P twice", "dS is multiplied by P twice", .p_for_ds = 2),
};
#define N_EDITS (sizeof edits / sizeof *edits)

/* Parts of a kernel that may decide by themselves. */
static const struct {
    const char *word;
    int32_t mask;
} places[] = {
    {"", DKV_ALL_PARTS},
    {" in forward", DKV_FORWARD_PARTS},
    {" in backward", DKV_GRADIENT_PARTS},
    {" in O", 1 << DKV_O},
    {" in LSE", 1 << DKV_LSE},
    {" in dK and dV", 1 << DKV_DK | 1 << DKV_DV},
    {" in dQ and dK", 1 << DKV_DQ | 1 << DKV_DK | 1 << DKV_DSINK},
    {" in dQ", 1 << DKV_DQ},
    {" in dK", 1 << DKV_DK},
    {" in dV", 1 << DKV_DV},
    {" in dSink", 1 << DKV_DSINK},
};

/* The edit's change on top of what the emulated kernel prints. */
static void predict(dkv_inquiry *q, const dkv_outputs *edited, dkv_prediction *to) {
    memset(&to->damage, 0, sizeof to->damage);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *x = dkv_outputAt(edited, (dkv_tensor_id)id),
                     *right = dkv_outputAt(&q->model->right, (dkv_tensor_id)id);
        double *out = dkv_outputAt(&to->out, (dkv_tensor_id)id);
        for (int64_t i = 0; i < q->n[id]; i++) {
            const double moved = q->clean[id][i] + (x[i] - right[i]);
            out[i] = x[i] == right[i] ? q->clean[id][i] : isfinite(moved) ? moved : x[i];
        }
    }
}

/* The best of the places where it helps; the first of those that are alike. */
static int guessInPlaces(dkv_inquiry *q, const dkv_edit *e, const dkv_outputs *edited, dkv_err *err) {
    double best = INFINITY;
    int32_t wrong = 0;
    predict(q, edited, &q->work);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) wrong |= q->wrong[id] ? 1 << id : 0;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char name[96], doc[300];
        if (!(places[i].mask & wrong)) continue;
        snprintf(name, sizeof name, "%s%s", e->name, places[i].word);
        snprintf(doc, sizeof doc, "%s%s", e->doc, places[i].word);
        if (dkv_isExcluded(q, e->name)) continue;
        dkv_guess *g = dkv_addGuess(q, e->family, name, doc, places[i].mask, &q->work);
        if (!g) return dkv_fail(err, DKV_EHARNESS, "out of memory");
        if (!g->moves || (best < INFINITY && g->key >= best - 0.01)) dkv_dropGuess(q);
        else best = g->key;
    }
    return 0;
}

/* Gradients' own decisions leave forward as it is, and the forms of LSE leave backward: it starts from the
 * kernel's. */
static bool changesForward(const dkv_edit *e) { return strcmp(e->family, "gradient") != 0; }

static void copyRight(dkv_inquiry *q, int32_t parts) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (parts >> id & 1 && q->n[id])
            memcpy(dkv_outputAt(&q->model->out, (dkv_tensor_id)id),
                   dkv_outputAt(&q->model->right, (dkv_tensor_id)id), (size_t)q->n[id] * sizeof(double));
}

static void runEdit(dkv_inquiry *q, const dkv_edit *e) {
    dkv_model *m = q->model;
    if (changesForward(e)) dkv_runModelForward(m, e, &m->out);
    else copyRight(q, DKV_FORWARD_PARTS);
    if (q->in->p->grad && !e->lse) dkv_runModelBackward(m, e, -1, -1, &m->out);
    else copyRight(q, DKV_GRADIENT_PARTS);
}

int dkv_tryEdit(dkv_inquiry *q, const dkv_edit *e, dkv_err *err) {
    const bool forward = (q->wrong[DKV_O] || q->wrong[DKV_LSE]) && changesForward(e);
    const bool backward = (q->wrong[DKV_DQ] || q->wrong[DKV_DK] || q->wrong[DKV_DV] || q->wrong[DKV_DSINK]) &&
                          !e->lse;
    if (!forward && !backward) return 0;
    runEdit(q, e);
    return guessInPlaces(q, e, &q->model->out, err);
}

/* Edits of what the problem does not have change nothing: not worth their time. */
static bool applies(const dkv_inquiry *q, const dkv_edit *e) {
    const dkv_problem *p = q->in->p;
    if ((e->keys == DKV_KEYS_WINDOW || e->keys == DKV_KEYS_SINKS) && p->mask != DUALKV_WINDOW) return false;
    if (e->keys == DKV_KEYS_MASK && (int64_t)p->mask == e->by) return false;
    if (e->keys == DKV_KEYS_SHIFT && p->mask == DUALKV_FULL) return false;
    if (e->softcap && p->softcap == 0) return false;
    if (e->alibi && !p->alibi) return false;
    if (e->sink && !p->sink) return false;
    if (e->d_lse != 0 && !p->dlse) return false;
    if ((e->k_heads || e->v_heads) && p->hkv == 1) return false;
    if ((e->delta == 3 || e->delta == 4) && p->hq == 1) return false;
    return true;
}

/* ---- a factor on the scores, fitted ---- */

/* <e, g> / <g, g> over one tensor, weighted by 1 / noise; its standard error. */
static double project(const dkv_inquiry *q, int id, const double *at, const double *ahead,
                      const double *right, double *error) {
    const double *got = dkv_outputAt(q->in->got, (dkv_tensor_id)id);
    double eg = 0, gg = 0, variance = 0;
    for (int64_t i = 0; i < q->n[id]; i++) {
        const double e = got[i] - (q->clean[id][i] + (at[i] - right[i])), g = ahead[i] - at[i],
                     n = q->noise[id][i];
        if (!isfinite(e) || !isfinite(g) || !isfinite(n) || n <= 0) continue;
        eg += e / n * (g / n);
        gg += g / n * (g / n);
        variance += g / n * (g / n) * (q->sigma[id][i] / n) * (q->sigma[id][i] / n);
    }
    *error = gg > 0 ? sqrt(variance) / gg : 0;
    return gg > 0 ? eg / gg : 0;
}

#define STEP 0.01 /* relative, of the difference quotient */
#define ROUNDS 6

static int guessScale(dkv_inquiry *q, dkv_err *err) {
    dkv_model *m = q->model;
    const int id = q->wrong[DKV_LSE] ? DKV_LSE : q->wrong[DKV_O] ? DKV_O : DKV_DV;
    dkv_edit e = {.family = "score", .name = "scale", .scale = 1};
    char word[60], doc[160];
    double *at = q->wrong[id] && q->n[id] ? malloc((size_t)q->n[id] * sizeof *at) : NULL, c = 1, error = 0;
    if (!at || dkv_isExcluded(q, "scale")) {
        free(at);
        return 0;
    }
    for (int i = 0; i < ROUNDS; i++) {
        e.scale = c;
        runEdit(q, &e);
        memcpy(at, dkv_outputAt(&m->out, (dkv_tensor_id)id), (size_t)q->n[id] * sizeof *at);
        e.scale = c * (1 + STEP);
        runEdit(q, &e);
        double by = project(q, id, at, dkv_outputAt(&m->out, (dkv_tensor_id)id),
                            dkv_outputAt(&m->right, (dkv_tensor_id)id), &error);
        error *= STEP; /* of c, relative */
        by = fmin(fmax(by * STEP, -0.5), 1);
        c *= 1 + by;
        if (fabs(by) < error) break;
    }
    free(at);
    error *= sqrt(2 * log(2 / DKV_FIT_CHANCE));
    if (!(fabs(c - 1) > error) || !isfinite(c)) return 0;
    dkv_nameFactor(q->in->p, c, error + dkv_unitRoundoff((int32_t)q->in->p->dtype), word, sizeof word); /* it may have been rounded */
    snprintf(doc, sizeof doc, "the scores' scale is %s times what it must be", word);
    e.scale = c;
    e.doc = doc;
    runEdit(q, &e);
    const int before = q->n_guesses;
    int rc = guessInPlaces(q, &e, &m->out, err);
    for (int i = before; i < q->n_guesses; i++) {
        q->guess[i].parameters = 1;
        q->guess[i].value[0] = c;
    }
    return rc;
}

#define PAIRS_MAX 24 /* of segments */

/* The rows of one segment and the keys of another: not walked. */
static int guessPairs(dkv_inquiry *q, dkv_err *err) {
    const dualkv_problem *v = &q->in->l->view;
    int rc = 0;
    if (v->n_ranges > PAIRS_MAX) return 0;
    for (int32_t i = 0; i < v->n_segments && !rc; i++)
        for (int x = 0; x < v->segments[i].range_count && !rc && v->segments[i].q_len && !dkv_outOfTime(q);
             x++) {
            const dualkv_range *g = &v->ranges[v->segments[i].range_begin + x];
            char name[60], doc[120];
            const int32_t k = q->model->k_segment[g->k_start];
            snprintf(name, sizeof name, "segment %d without the keys of %d", i, k);
            snprintf(doc, sizeof doc, "the rows of segment %d leave out the keys of segment %d", i, k);
            rc = dkv_tryEdit(q,
                             &(dkv_edit){.family = "visible",
                                         .name = name,
                                         .doc = doc,
                                         .keys = DKV_KEYS_PAIR,
                                         .by = (int64_t)i * v->n_segments + k},
                             err);
        }
    return rc;
}

int dkv_guessEdits(dkv_inquiry *q, dkv_err *err) {
    int rc = 0;
    for (size_t i = 0; i < N_EDITS && !rc && q->model && !dkv_outOfTime(q); i++)
        if (applies(q, &edits[i])) rc = dkv_tryEdit(q, &edits[i], err);
    if (!rc && q->model && !dkv_outOfTime(q)) rc = guessScale(q, err);
    if (!rc && q->model) rc = guessPairs(q, err);
    return rc;
}

/* ---- names of numbers ---- */

void dkv_nameFactor(const dkv_problem *p, double c, double tolerance, char *out, size_t n) {
    const double g = (double)p->hq / p->hkv, d = p->dqk;
    double children = 0;
    for (int32_t i = 0; i < p->n_nodes; i++) children += p->nodes[i].depth == 1 && p->nodes[i].group == 0;
    const struct {
        const char *word;
        double value;
    } known[] = {
        {"2", 2},
        {"1/2", 0.5},
        {"-1", -1},
        {"3", 3},
        {"1/3", 1.0 / 3},
        {"4", 4},
        {"1/4", 0.25},
        {"log2 e", 1 / log(2)},
        {"ln 2", log(2)},
        {"sqrt 2", sqrt(2)},
        {"1/sqrt 2", sqrt(0.5)},
        {"the scale", p->scale},
        {"1/scale", 1 / p->scale},
        {"sqrt(Dqk)", sqrt(d)},
        {"1/sqrt(Dqk)", 1 / sqrt(d)},
        {"Dqk", d},
        {"Hq/Hkv", g},
        {"Hkv/Hq", 1 / g},
        {"N", children},
        {"1/N", 1 / children},
        {"(N-1)/N", (children - 1) / children},
        {"N+1", children + 1},
        {"Hq", p->hq},
        {"1/Hq", 1.0 / p->hq},
        {"(log2 e)^2", 1 / (log(2) * log(2))},
        {"log10 e", 1 / log(10)},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (!isfinite(known[i].value) || known[i].value == 0 || fabs(known[i].value - 1) <= tolerance) continue;
        if (fabs(c / known[i].value - 1) > tolerance) continue;
        snprintf(out, n, "%s", known[i].word);
        return;
    }
    snprintf(out, n, "%.4g", c);
}
