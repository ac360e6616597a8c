#include "strength.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../ref/dtype.h"
#include "../ref/mask.h"
#include "derive.h"
#include "spans.h"
#include "strength_rows.h"

#define SEGMENT_MOST (1 << 20)
#define FEW 1000000 /* elements of a tensor that are not worth several threads */
#define WHOLE 1e9 /* FLOPs of forward and backward up to which the reference is run again for each fault */

static const char *const names[DKV_N_SLIPS] = {"first-key", "last-key", "key-ahead", "scale",    "kv-head",
                                               "delta",     "response", "zeros",     "old-output"};
static const int64_t most_of_class[DKV_LENGTH_CLASSES - 1] = {16, 64, 256, 1024, 8192};

const char *dkv_slipName(int slip) { return slip >= 0 && slip < DKV_N_SLIPS ? names[slip] : NULL; }

int dkv_lengthClass(int64_t tokens) {
    int k = 0;
    while (k < DKV_LENGTH_CLASSES - 1 && tokens > most_of_class[k]) k++;
    return k;
}

void dkv_stratumName(int tensor, int region, int length, char *out, size_t n) {
    long long least = length ? most_of_class[length - 1] + 1 : 1;
    const char *name = dkv_tensorName((dkv_tensor_id)tensor), *where = dkv_regionName(region);
    if (tensor == DKV_DSINK) snprintf(out, n, "%s", name);
    else if (length == DKV_LENGTH_CLASSES - 1) snprintf(out, n, "%s %s %lld-", name, where, least);
    else snprintf(out, n, "%s %s %lld-%lld", name, where, least, (long long)most_of_class[length]);
}

/* ---- where a fault can be ---- */

/* Of each segment: does some row see two keys or more (one key alone leaves nothing to shift)? do its keys have such a row,
 * its own or a descendant's? */
typedef struct places {
    bool *rows, *keys, *ahead, *ahead_keys, *missing; /* missing: keys that the dropped response sees */
    bool *dropped;
} places;

static int64_t countVisible(const dkv_problem *p, int32_t i, int64_t r) {
    int64_t n = 0, keys = p->nodes[i].context + p->nodes[i].len;
    for (int64_t j = 0; j < keys && n < 2; j++) n += dkv_maskSees(p, i, r, j);
    return n;
}

static bool seesTwo(const dkv_problem *p, int32_t i) {
    int64_t len = p->nodes[i].key_only ? 0 : p->nodes[i].len;
    for (int64_t k = 0; k < 4 && len; k++)
        if (countVisible(p, i, (len - 1) * (4 - k) / 4) > 1) return true;
    return false;
}

static void dropResponses(const dkv_problem *p, places *at) {
    for (int32_t i = 0, last = -1; i <= p->n_nodes; i++) {
        if (i == p->n_nodes || p->nodes[i].parent < 0) {
            for (int32_t a = last; a >= 0; a = p->nodes[a].parent)
                at->missing[a] = a != last && p->nodes[a].len > 0 && p->nodes[last].context > p->nodes[a].context && at->rows[last];
            if (last >= 0) at->dropped[last] = true;
            last = -1;
        } else if (p->nodes[i].len > 0) {
            last = i;
        }
    }
}

static int findPlaces(const dkv_problem *p, places *at, dkv_err *err) {
    bool *all = calloc(6 * (size_t)p->n_nodes + 1, sizeof *all);
    if (!all) return dkv_fail(err, DKV_EHARNESS, "out of memory for segments");
    *at = (places){all, all + p->n_nodes, all + 2 * p->n_nodes, all + 3 * p->n_nodes, all + 4 * p->n_nodes, all + 5 * p->n_nodes};
    for (int32_t i = 0; i < p->n_nodes; i++) {
        const dkv_node *n = &p->nodes[i];
        at->rows[i] = seesTwo(p, i);
        at->ahead[i] = at->rows[i] && !dkv_maskWhole(p, i) && n->len > 1;
        for (int32_t a = i; a >= 0; a = p->nodes[a].parent) {
            if (p->nodes[a].len == 0 || (a != i && n->context <= p->nodes[a].context)) continue;
            at->keys[a] |= at->rows[i];
            at->ahead_keys[a] |= at->ahead[i];
        }
    }
    dropResponses(p, at);
    return 0;
}

static bool canBe(const places *at, int slip, int id, int32_t i) {
    bool keys = id == DKV_DK || id == DKV_DV;
    if (slip == DKV_SLIP_DELTA && id != DKV_DQ && id != DKV_DK && id != DKV_DSINK) return false;
    if (id == DKV_DSINK) return slip != DKV_SLIP_AHEAD && slip != DKV_SLIP_RESPONSE;
    if (slip == DKV_SLIP_RESPONSE) return keys && at->missing[i];
    if (slip == DKV_SLIP_AHEAD) return keys ? at->ahead_keys[i] : at->ahead[i];
    return keys ? at->keys[i] : at->rows[i];
}

/* ---- comparing ---- */

static double excess(double got, double truth, double bound) {
    double e = fabs(got - truth);
    if (e == 0) return 0;
    return e < INFINITY && bound > 0 ? e / bound : INFINITY;
}

static void noteSlip(const dkv_case *c, dkv_strength *s, int slip, dkv_tensor_id id, int32_t segment, int64_t at, double got,
                     int64_t keys) {
    if (c->kernel.d.absent >> id & 1) return; /* what is not judged shows nothing */
    const dkv_problem *p = c->p;
    const dkv_node *n = segment >= 0 ? &p->nodes[segment] : NULL;
    double truth = dkv_outputAt(&c->oracle.truth, id)[at], bound = dkv_outputAt(&c->oracle.bound, id)[at];
    int32_t format = id == DKV_LSE || id == DKV_DSINK ? DUALKV_FP32 : (int32_t)p->dtype;
    if (!isfinite(truth) || !isfinite(bound) || bound == DKV_UNCLAIMED || fabs(truth) > dkv_maxFinite(format)) return;
    double ratio = excess(got, truth, bound);
    float *cell = &s->ratio[slip][id][n && n->depth > 0][n ? dkv_lengthClass(n->context + n->len) : 0];
    if (ratio > *cell) *cell = (float)fmin(ratio, 1e30);
    if (ratio > 1 && slip <= DKV_SLIP_LAST && keys > s->longest) s->longest = (double)keys;
}

void dkv_noteSlip(dkv_case *c, int slip, dkv_tensor_id id, int32_t segment, int64_t at, double got, int64_t keys) {
    noteSlip(c, &c->result->strength, slip, id, segment, at, got, keys);
}

/* got NULL: zeros. */
static void noteSegment(const dkv_case *c, dkv_strength *into, int slip, dkv_tensor_id id, int32_t i, const dkv_outputs *got) {
    const dualkv_problem *v = &c->packed.view;
    const dualkv_segment *s = &v->segments[i];
    const double *x = got ? dkv_outputAt(got, id) : NULL;
    const dkv_vectors g = dkv_vectorsOf(v, id);
    const bool causal = v->mask == DUALKV_CAUSAL;
    const int64_t from = dkv_firstRow(s, &g), n = dkv_countRows(s, &g);
    /* What is sampled is sampled here, too: not more than so many elements of a segment. */
    int64_t step = c->result->strength.sampled ? 1 + n * g.heads * g.d / SEGMENT_MOST : 1;
    for (int64_t r = 0; r < n; r += step)
        for (int64_t h = 0; h < g.heads; h++)
            for (int64_t e = 0; e < g.d; e++) {
                int64_t at = dkv_vectorAt(&g, from + r, h) + e;
                noteSlip(c, into, slip, id, i, at, x ? x[at] : 0, id <= DKV_LSE && causal ? s->context + r + 1 : 0);
            }
}

typedef struct note_loop {
    const dkv_case *c;
    const places *at;
    const dkv_outputs *got;
    int slip;
    dkv_tensor_id id;
    dkv_strength of[DKV_SPANS];
} note_loop;

static void noteSpan(int64_t first, int64_t end, int span, void *arg) {
    note_loop *w = arg;
    for (int64_t i = first; i < end; i++)
        if (canBe(w->at, w->slip, w->id, (int32_t)i)) noteSegment(w->c, &w->of[span], w->slip, w->id, (int32_t)i, w->got);
}

/* The larger of both, cell by cell. */
static void addStrength(const dkv_strength *part, dkv_strength *s) {
    const float *from = &part->ratio[0][0][0][0];
    float *cell = &s->ratio[0][0][0][0];
    for (size_t i = 0; i < sizeof s->ratio / sizeof *cell; i++)
        if (from[i] > cell[i]) cell[i] = from[i];
    if (part->longest > s->longest) s->longest = part->longest;
}

static int noteAll(dkv_case *c, const places *at, int slip, const dkv_outputs *got, dkv_err *err) {
    dkv_strength *s = &c->result->strength;
    note_loop *w = malloc(sizeof *w);
    int64_t n[DKV_N_OUTPUTS];
    if (!w) return dkv_fail(err, DKV_EHARNESS, "out of memory for what a case would show");
    dkv_countOutputs(&c->packed, n);
    *w = (note_loop){.c = c, .at = at, .got = got, .slip = slip};
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *x = got ? dkv_outputAt(got, (dkv_tensor_id)id) : NULL;
        if ((got && !x) || !dkv_outputAt(&c->oracle.truth, (dkv_tensor_id)id)) continue;
        for (int32_t h = 0; id == DKV_DSINK && h < c->p->hq && canBe(at, slip, id, 0); h++)
            dkv_noteSlip(c, slip, DKV_DSINK, -1, h, x ? x[h] : 0, 0);
        if (id == DKV_DSINK) continue;
        w->id = (dkv_tensor_id)id;
        for (int32_t i = 0; n[id] < FEW && i < c->p->n_nodes; i++)
            if (canBe(at, slip, id, i)) noteSegment(c, s, slip, (dkv_tensor_id)id, i, got);
        if (n[id] < FEW) continue;
        for (int i = 0; i < DKV_SPANS; i++) w->of[i] = *s;
        dkv_eachSpan(c->p->n_nodes, (double)n[id], noteSpan, w);
        for (int i = 0; i < DKV_SPANS; i++) addStrength(&w->of[i], s);
    }
    free(w);
    return 0;
}

/* ---- the faults ---- */

/* Recorded inputs may hold one KV head several times, and do not know of seeds: there is nothing to mistake then. */
static bool headsDiffer(const dkv_case *c) {
    const dualkv_problem *v = &c->packed.view;
    size_t elt = dkv_dtypeSize(c->p->dtype), k = (size_t)v->dqk * elt, w = (size_t)v->dv * elt;
    for (int64_t i = 0; i + 1 < v->tk * v->hkv; i++) {
        if (i % v->hkv == v->hkv - 1) continue;
        const char *key = (const char *)c->in.k + (size_t)i * k, *value = (const char *)c->in.v + (size_t)i * w;
        if (memcmp(key, key + k, k) != 0 || memcmp(value, value + w, w) != 0) return true;
    }
    return false;
}

static bool isOther(const dkv_case *c, const dkv_inputs *in) {
    const dualkv_problem *v = &c->packed.view;
    size_t elt = dkv_dtypeSize(c->p->dtype);
    return memcmp(in->k, c->in.k, (size_t)(v->tk * v->hkv * v->dqk) * elt) != 0 ||
           memcmp(in->v, c->in.v, (size_t)(v->tk * v->hkv * v->dv) * elt) != 0;
}

static void copyForward(const dkv_case *c, dkv_outputs *to) {
    const dualkv_problem *v = &c->packed.view;
    memcpy(to->o, c->oracle.truth.o, (size_t)(v->tq * v->hq * v->dv) * sizeof *to->o);
    memcpy(to->lse, c->oracle.truth.lse, (size_t)(v->tq * v->hq) * sizeof *to->lse);
}

static int mutate(dkv_case *c, const places *at, int slip, dkv_mutant mutant, dkv_outputs *work, dkv_err *err) {
    dkv_ref_options ref = {.threads = c->options->threads, .mutant = mutant};
    int rc;
    if (slip == DKV_SLIP_DELTA) {
        copyForward(c, work);
        rc = dkv_refBlockedBackward(c->p, &c->packed, &c->in, &ref, work, err);
    } else {
        rc = dkv_refBlocked(c->p, &c->packed, &c->in, &ref, work, err);
    }
    return rc ? rc : noteAll(c, at, slip, work, err);
}

static int dropResponse(dkv_case *c, const places *at, dkv_outputs *work, dkv_err *err) {
    const dualkv_problem *v = &c->packed.view;
    size_t row = (size_t)(v->hq * v->dv) * dkv_dtypeSize(c->p->dtype);
    dkv_ref_options ref = {.threads = c->options->threads};
    dkv_inputs in = {0};
    bool any = false;
    for (int32_t i = 0; i < c->p->n_nodes; i++) any |= at->missing[i];
    if (!any) return 0;
    int rc = dkv_copyInputs(c, &in, err);
    for (int32_t i = 0; i < v->n_segments && !rc; i++) {
        const dualkv_segment *s = &v->segments[i];
        if (!at->dropped[i]) continue;
        memset((char *)in.d_o + (size_t)s->q_start * row, 0, (size_t)s->q_len * row);
        for (int64_t h = 0; in.d_lse && h < v->hq; h++)
            memset(in.d_lse + h * v->tq + s->q_start, 0, (size_t)s->q_len * sizeof *in.d_lse);
    }
    copyForward(c, work);
    if (!rc) rc = dkv_refBlockedBackward(c->p, &c->packed, &in, &ref, work, err);
    if (!rc) rc = noteAll(c, at, DKV_SLIP_RESPONSE, work, err);
    dkv_freeInputs(&in);
    return rc;
}

static int useOld(dkv_case *c, const places *at, dkv_outputs *work, dkv_err *err) {
    dkv_ref_options ref = {.threads = c->options->threads};
    dkv_problem p = {0};
    dkv_inputs in = {0};
    int rc = dkv_copyProblem(c->p, &p, err);
    p.seed++;
    if (!rc) rc = dkv_allocInputs(&c->packed, &in, err);
    if (!rc) rc = dkv_fillInputs(&p, &c->packed, c->options->data_dir, &in, err);
    bool other = !rc && isOther(c, &in);
    if (other) rc = dkv_refBlocked(&p, &c->packed, &in, &ref, work, err);
    if (other && !rc) rc = noteAll(c, at, DKV_SLIP_OLD, work, err);
    dkv_freeInputs(&in);
    dkv_freeProblem(&p);
    return rc;
}

int dkv_measureStrength(dkv_case *c, dkv_err *err) {
    static const struct {
        int slip;
        dkv_mutant mutant;
    } mutants[] = {{DKV_SLIP_FIRST, DKV_MUTANT_FIRST}, {DKV_SLIP_LAST, DKV_MUTANT_MASK}, {DKV_SLIP_AHEAD, DKV_MUTANT_AHEAD},
                   {DKV_SLIP_SCALE, DKV_MUTANT_SCALE}, {DKV_SLIP_HEAD, DKV_MUTANT_HEAD}, {DKV_SLIP_DELTA, DKV_MUTANT_DELTA}};
    dkv_strength *s = &c->result->strength;
    dkv_outputs work = {0};
    places at = {0};
    float *cell = &s->ratio[0][0][0][0];
    for (size_t i = 0; i < sizeof s->ratio / sizeof *cell; i++) cell[i] = -1;
    s->sampled = dkv_forwardFlops(c->p) + (c->p->grad ? dkv_backwardFlops(c->p) : 0) > WHOLE;
    int rc = findPlaces(c->p, &at, err);
    if (!rc && !s->sampled) rc = dkv_allocOutputs(&c->packed, &work, err);
    for (size_t i = 0; i < sizeof mutants / sizeof mutants[0] && !rc && !s->sampled; i++) {
        int slip = mutants[i].slip;
        if ((slip == DKV_SLIP_HEAD && !headsDiffer(c)) || (slip == DKV_SLIP_DELTA && !c->p->grad)) continue;
        rc = mutate(c, &at, slip, mutants[i].mutant, &work, err);
    }
    if (!rc && !s->sampled && c->p->grad) rc = dropResponse(c, &at, &work, err);
    if (!rc && !s->sampled) rc = useOld(c, &at, &work, err);
    if (!rc && s->sampled) dkv_loseKeys(c, at.rows);
    if (!rc) rc = noteAll(c, &at, DKV_SLIP_ZEROS, NULL, err);
    s->measured = !rc;
    dkv_freeOutputs(&work);
    free(at.rows);
    return rc;
}

/* ---- in words ---- */

static double best(const dkv_strength *s, int slip, int only) {
    double most = 0;
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        for (int region = 0; region < 2 && (only < 0 || only == id); region++)
            for (int k = 0; k < DKV_LENGTH_CLASSES; k++) most = fmax(most, s->ratio[slip][id][region][k]);
    return most;
}

double dkv_leastScale(const dkv_strength *s) { return 0.01 / best(s, DKV_SLIP_SCALE, -1); }
double dkv_leastGain(const dkv_strength *s, dkv_tensor_id id) { return 1 / best(s, DKV_SLIP_ZEROS, id); }

void dkv_sayStrength(const dkv_strength *s, char *out, size_t n) {
    char part[3][64] = {"", "", ""};
    out[0] = 0;
    if (!s->measured) return;
    double scale = dkv_leastScale(s), gain = dkv_leastGain(s, DKV_DK);
    if (s->longest > 0) snprintf(part[0], sizeof part[0], "one lost key of up to %.0f", s->longest);
    if (scale < 1) snprintf(part[1], sizeof part[1], "a scale error of %.1e", scale);
    if (gain < 1) snprintf(part[2], sizeof part[2], "a dK gain of %.1e", gain);
    for (int i = 0; i < 3; i++) {
        size_t at = strlen(out);
        if (part[i][0] && at < n) snprintf(out + at, n - at, "%s%s", at ? ", " : "", part[i]);
    }
}
