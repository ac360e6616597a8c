#include "lean.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "../ref/partials.h"
#include "../ref/reference.h"
#include "../ref/twin_formula.h"
#include "case.h"
#include "vectors.h"

typedef struct vector {
    int64_t at;
    uint64_t hash; /* of the truth: equal rows are one observation */
    int region, head, equal;
} vector;

typedef struct sums { /* of one vector: of w x e, w x^2, w |x| sigma */
    double slope, weight, noise;
} sums;

enum { ALL, PROMPTS, RESPONSES, HEADS }; /* parts; HEADS + h: head h */

typedef struct part {
    bool tested;
    double gain, chance, weight, leans; /* leans: the most that a known arithmetic does */
} part;

/* One tensor and one direction. */
typedef struct line {
    dkv_tensor_id id;
    dkv_way way;
    dkv_vectors s;
    const double *truth, *bound, *x;
    int32_t format;
    double dof, distinct; /* most independent rows; query rows that differ */
    vector *v;            /* [n], of the tensor's first line; equal ones beside each other */
    int64_t n;
    int parts;
    part *part;
    sums *sum; /* [n] */
} line;

typedef struct search {
    dkv_case *c;
    dkv_outputs shifted[DKV_N_WAYS]; /* directions */
    dkv_outputs truth, bound;        /* the oracle's own, kept while it is asked again */
    bool ask; /* else some rows are looked at, and chance alone */
    uint8_t *region;
    double *work;
    line line[DKV_N_OUTPUTS * DKV_N_WAYS];
    int n_lines;
    double functions, tanh; /* largest errors of functions among the candidates */
    double lost;            /* of a step at full coherence */
} search;

/* ---- slopes ---- */

/* Weight of an element; 0: it tells nothing. */
static double weightAt(const line *l, int64_t at) {
    const double b = l->bound[at];
    return isfinite(l->truth[at]) && isfinite(l->x[at]) && b > 0 && isfinite(b) ? 1 / (b * b) : 0;
}

/* Sums of value - truth over each vector; round: values are twins. */
static void sumVectors(const line *l, const double *value, const double *sigma2, sums *out) {
    for (int64_t i = 0; i < l->n; i++) {
        sums s = {0};
        for (int64_t c = 0, at = l->v[i].at; c < l->s.d; c++, at++) {
            double w = weightAt(l, at), x = l->x[at], y = sigma2 ? dkv_roundTo(value[at], l->format) : value[at];
            if (w == 0 || !isfinite(y) || !isfinite(x * x * w) || (sigma2 && !isfinite(sigma2[at]))) continue;
            s.slope += w * x * (y - l->truth[at]);
            s.weight += w * x * x;
            if (!sigma2) continue;
            const double near = value[at] - y, left = sigma2[at] - near * near;
            s.noise += left > 0 ? w * fabs(x) * sqrt(left) : 0;
        }
        out[i] = s;
    }
}

static bool isIn(const vector *v, int k) {
    return k == ALL || (k >= HEADS ? v->head == k - HEADS : v->region == k - PROMPTS);
}

/* Slope of a part and what chance makes of it; chance INFINITY: too few rows. */
static void fitPart(const line *l, int which, double bits, part *out) {
    double slope = 0, weight = 0, n = 0, squares = 0, lean = 0, error = 0;
    for (int64_t i = 0; i < l->n; i++) {
        if (!isIn(&l->v[i], which) || !(l->sum[i].weight > 0)) continue;
        n++;
        squares += l->v[i].equal;
        slope += l->sum[i].slope;
        weight += l->sum[i].weight;
        lean += l->sum[i].weight * l->sum[i].weight * l->v[i].equal;
    }
    *out = (part){.chance = INFINITY, .weight = weight};
    if (!(weight > 0) || !isfinite(slope)) return;
    out->gain = slope / weight;
    for (int64_t i = 0; i < l->n; i++) {
        if (!isIn(&l->v[i], which) || !(l->sum[i].weight > 0)) continue;
        const double e = l->sum[i].slope - out->gain * l->sum[i].weight, own = l->sum[i].weight * l->v[i].equal / weight;
        error += e * e * l->v[i].equal / ((1 - own) * (1 - own)); /* a row that the slope leans on fits itself */
    }
    double eff = fmin(fmin(n * n / squares, l->dof), weight * weight / lean);
    /* A self-normalised sum of fewer rows than this cannot reach its own limit. */
    if (!(eff > 2 * bits)) return;
    out->tested = true;
    out->chance = sqrt(2 * bits * error) / weight * eff / (eff - 2 * bits);
    /* Something that belongs to a query row, rounded once: in all keys alike. */
    if (l->s.keys) out->chance += dkv_unitRoundoff(l->format) * sqrt(2 * bits * DKV_ROUND_VAR / l->distinct);
}

/* Slope of errors of one sign, so large a share f of |y|, at full coherence. */
static double coherent(const line *l, int which, double f, const double *y) {
    double sum = 0, weight = 0;
    for (int64_t i = 0; i < l->n; i++)
        for (int64_t c = 0, at = l->v[i].at; isIn(&l->v[i], which) && c < l->s.d; c++, at++) {
            const double w = weightAt(l, at), x = l->x[at], size = y ? fabs(y[at]) : 1;
            if (w == 0 || !isfinite(x * x * w) || !isfinite(size)) continue;
            sum += w * fabs(x) * size;
            weight += w * x * x;
        }
    return weight > 0 ? f * sum / weight : 0;
}

/* ---- what is looked at ---- */

static int compareVectors(const void *x, const void *y) {
    const vector *a = x, *b = y;
    if (a->region != b->region) return a->region - b->region;
    return a->hash < b->hash ? -1 : a->hash > b->hash ? 1 : a->at < b->at ? -1 : a->at > b->at;
}

#define SOME 262144 /* vectors of a case that is too large to ask */

static int gatherVectors(line *l, const uint8_t *region, bool every, dkv_err *err) {
    const dkv_vectors *s = &l->s;
    const int64_t step = every ? 1 : s->rows * s->heads / SOME | 1; /* odd: no one place in all tiles */
    l->v = malloc((size_t)(s->rows * s->heads + 1) * sizeof *l->v);
    if (!l->v) return dkv_fail(err, DKV_EHARNESS, "out of memory: slopes of %lld rows", (long long)(s->rows * s->heads));
    for (int64_t row = 0; row < s->rows; row += step)
        for (int64_t h = 0; h < s->heads; h++) {
            const int64_t at = dkv_vectorAt(s, row, h);
            bool use = false;
            for (int64_t c = 0; c < s->d; c++) use |= weightAt(l, at + c) > 0;
            if (use) l->v[l->n++] = (vector){at, dkv_hashVector(l->truth + at, s->d), region[row], (int)h, 1};
        }
    qsort(l->v, (size_t)l->n, sizeof *l->v, compareVectors);
    for (int64_t i = 0, end; i < l->n; i = end) {
        for (end = i; end < l->n && l->v[end].hash == l->v[i].hash && l->v[end].region == l->v[i].region; end++) {
        }
        for (int64_t e = i; e < end; e++) l->v[e].equal = (int)(end - i > 1 << 30 ? 1 << 30 : end - i);
    }
    return 0;
}

static double countRows(search *f, const line *l) {
    const dkv_oracle *o = &f->c->oracle;
    if (l->id == DKV_LSE && o->alike.lse > 0) return dkv_independent(&o->alike, o->alike.lse);
    return l->s.keys ? l->distinct : INFINITY;
}

static int addLine(search *f, dkv_tensor_id id, dkv_way way, const double *x, dkv_err *err) {
    dkv_case *c = f->c;
    const dualkv_problem *v = &c->packed.view;
    line *l = &f->line[f->n_lines], *first = NULL;
    for (int i = 0; i < f->n_lines; i++)
        if (f->line[i].id == id && !first) first = &f->line[i];
    *l = (line){.id = id, .way = way, .s = dkv_vectorsOf(v, id), .truth = dkv_outputAt(&c->oracle.truth, id),
                .bound = dkv_outputAt(&c->oracle.bound, id), .x = x,
                .format = id == DKV_LSE ? DUALKV_FP32 : (int32_t)c->p->dtype};
    f->n_lines++;
    l->distinct = (double)dkv_countDistinct(c->oracle.truth.lse, v->tq * v->hq, f->work);
    l->dof = countRows(f, l);
    l->parts = HEADS + (l->s.heads > 1 ? (int)l->s.heads : 0);
    l->part = calloc((size_t)l->parts, sizeof *l->part);
    if (!l->part) return dkv_fail(err, DKV_EHARNESS, "out of memory: slopes");
    if (first) l->v = first->v, l->n = first->n;
    else {
        dkv_markRegions(v, &l->s, f->region);
        if (gatherVectors(l, f->region, f->ask, err)) return (int)err->code;
    }
    l->sum = malloc((size_t)(l->n + 1) * sizeof *l->sum);
    if (!l->sum) return dkv_fail(err, DKV_EHARNESS, "out of memory: slopes");
    sumVectors(l, dkv_outputAt(&c->got, id), NULL, l->sum);
    return 0;
}

/* The derivative of all outputs in one of the directions, from the reference. */
static int makeDirection(search *f, dkv_way way, dkv_err *err) {
    dkv_case *c = f->c;
    dkv_outputs *out = &f->shifted[way];
    dkv_ref_options ref = {.threads = c->options->threads, .mutant = way == DKV_WAY_SCALE ? DKV_MUTANT_SCALE
                           : way == DKV_WAY_DELTA ? DKV_MUTANT_DELTA : DKV_MUTANT_NONE};
    dkv_inputs in = c->in;
    int64_t n[DKV_N_OUTPUTS];
    const double step = way == DKV_WAY_SCALE ? DKV_MUTANT_SCALE_BY : -1;
    int rc = dkv_allocOutputs(&c->packed, out, err);
    dkv_countOutputs(&c->packed, n);
    if (way == DKV_WAY_DLSE) in.d_lse = NULL;
    for (int id = 0; id <= DKV_LSE && !rc; id++)
        memcpy(dkv_outputAt(out, (dkv_tensor_id)id), dkv_outputAt(&c->oracle.truth, (dkv_tensor_id)id),
               (size_t)n[id] * sizeof(double));
    if (!rc && way == DKV_WAY_SCALE) rc = dkv_refBlocked(c->p, &c->packed, &in, &ref, out, err);
    else if (!rc) rc = dkv_refBlockedBackward(c->p, &c->packed, &in, &ref, out, err);
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++) {
        double *x = dkv_outputAt(out, (dkv_tensor_id)id);
        const double *truth = dkv_outputAt(&c->oracle.truth, (dkv_tensor_id)id);
        for (int64_t i = 0; i < n[id]; i++) x[i] = (x[i] - truth[i]) / step;
    }
    return rc;
}

static bool goesThere(dkv_way way, int id) {
    if (way == DKV_WAY_ITSELF) return true;
    return way == DKV_WAY_SCALE ? id == DKV_O || id == DKV_LSE : id == DKV_DQ || id == DKV_DK;
}

static int addLines(search *f, unsigned doubtful, bool fits, dkv_err *err) {
    const dkv_case *c = f->c;
    const bool cpu = c->result->oracle.by != DKV_ORACLE_CUDA && f->ask; /* else too large for the reference */
    const bool more = cpu && !fits;
    const bool ways[DKV_N_WAYS] = {true, more || (cpu && c->kernel.d.absent >> DKV_LSE & 1 && !c->p->grad), more && c->p->grad,
                                   more && c->p->grad && c->in.d_lse};
    int rc = 0;
    for (int way = 0; way < DKV_N_WAYS && !rc; way++) {
        bool any = false;
        for (int id = 0; id < DKV_DSINK; id++) any |= ways[way] && doubtful >> id & 1 && goesThere((dkv_way)way, id);
        if (any && way != DKV_WAY_ITSELF) rc = makeDirection(f, (dkv_way)way, err);
        for (int id = 0; id < DKV_DSINK && any && !rc; id++)
            if (doubtful >> id & 1 && goesThere((dkv_way)way, id))
                rc = addLine(f, (dkv_tensor_id)id, (dkv_way)way,
                             dkv_outputAt(way == DKV_WAY_ITSELF ? &c->oracle.truth : &f->shifted[way], (dkv_tensor_id)id), err);
    }
    return rc;
}

static int countTests(const search *f, dkv_tensor_id id) {
    int n = 0;
    for (int i = 0; i < f->n_lines; i++) n += f->line[i].id == id ? f->line[i].parts : 0;
    return n;
}

/* Slopes of all parts. True: some slope is more than chance. */
static bool fitLines(search *f) {
    bool any = false;
    for (int i = 0; i < f->n_lines; i++) {
        line *l = &f->line[i];
        const double bits = log(countTests(f, l->id) / f->c->options->level);
        for (int k = 0; k < l->parts; k++) {
            fitPart(l, k, bits, &l->part[k]);
            any |= fabs(l->part[k].gain) > l->part[k].chance;
        }
    }
    return any;
}

/* ---- what arithmetic may do ---- */

static const int32_t tiles[] = {16, 64, 256, 32, 48, 96, 128};
enum { N_TILES = sizeof tiles / sizeof tiles[0], LATE = 1 + 2 * N_TILES, N_LATE = 4, EACH = LATE + N_LATE, FEW = N_TILES };

/* Is one arithmetic known: declared, or named by the user? */
static bool isHeld(const search *f) {
    const dkv_fit *fit = f->c->options->fits ? &f->c->options->fits->of[f->c->kernel.p->dtype] : NULL;
    return f->c->kernel.d.arithmetic.declared || (fit && fit->known && fit->held);
}

/* Arithmetic i of those that are possible: what is declared (or the user named), else every profile; each with several key
 * tiles where O depends on that. False past the end. */
static bool listPossible(const search *f, int i, dualkv_arithmetic *out) {
    const dkv_case *c = f->c;
    const int tile = i % EACH - 1;
    if (isHeld(f)) {
        *out = c->result->arithmetic;
        if (i >= EACH) return false;
    } else if (!dkv_arithmeticProfile(i / EACH, c->kernel.p, out, NULL)) {
        return false;
    }
    if (tile < 0) return true;
    if (i % EACH >= LATE) { /* the maximum raised late, the sink in it, both; of two key tiles */
        const int kind = i % EACH - LATE;
        out->key_tile = kind == 3 ? 128 : 64;
        out->key_order = 0;
        out->max_slack = kind ? 8 * 0.69314718055994531 : 0;
        out->sink_first = kind < 2;
        return true;
    }
    out->key_tile = tiles[tile / 2];
    out->key_order = tile % 2;
    return true;
}

/* How much of it says anything new: key tiles are of no matter to gradients (but where delta comes from what O was before its
 * rounding), nor where P is not rounded by them. With every profile in the list an O of tiles is that of one without partial
 * sums. */
typedef enum news { NOTHING, FORWARD, EVERYTHING } news;
static news whatIsNew(const search *f, int i, const dualkv_arithmetic *a) {
    const bool running = dkv_partialsOf(a).rows, own = isHeld(f), tiled = i % EACH > 0;
    const bool by_tiles = !a->p_normalised && a->s_format == DUALKV_EXACT && dkv_unitRoundoff(a->p_format) > a->unit;
    if (running && f->c->kernel.d.memory != DUALKV_HOST && !own) return NOTHING; /* known of CPUs alone */
    if (!tiled) return by_tiles && (own || a->delta_exact) ? NOTHING : EVERYTHING; /* own: its other twins vouch */
    if (i % EACH >= LATE && (f->c->kernel.d.arithmetic.declared || (a->sink_first && !f->c->p->sink))) return NOTHING;
    if (!by_tiles || (!own && (running || (!a->delta_exact && a->partial_format != DUALKV_EXACT)))) return NOTHING;
    if (!a->delta_exact) return FORWARD;
    return own || i % EACH % FEW == 1 ? EVERYTHING : NOTHING;
}

static void noteLeans(search *f, const dualkv_arithmetic *a, sums *work) {
    for (int i = 0; i < f->n_lines; i++) {
        line *l = &f->line[i];
        if (!f->c->oracle.has_twin[l->id]) continue;
        sumVectors(l, dkv_outputAt(&f->c->oracle.twin, l->id), dkv_outputAt(&f->c->oracle.sigma2, l->id), work);
        for (int k = 0; k < l->parts; k++) {
            double slope = 0, weight = 0, noise = 0;
            for (int64_t e = 0; e < l->n; e++) {
                if (!isIn(&l->v[e], k)) continue;
                slope += work[e].slope;
                weight += work[e].weight;
                noise += work[e].noise;
            }
            if (weight > 0) l->part[k].leans = fmax(l->part[k].leans, (fabs(slope) + noise) / weight);
        }
    }
    f->functions = fmax(f->functions, a->exp_error + a->log_error + 4 * a->unit);
    f->tanh = fmax(f->tanh, a->tanh_error);
    if (a->acc_truncates) f->lost = fmax(f->lost, a->acc_gain / a->acc_step);
}

static int keepOracle(search *f, dkv_err *err) {
    dkv_case *c = f->c;
    int64_t n[DKV_N_OUTPUTS];
    int rc = dkv_allocOutputs(&c->packed, &f->truth, err);
    if (!rc) rc = dkv_allocOutputs(&c->packed, &f->bound, err);
    dkv_countOutputs(&c->packed, n);
    for (int i = 0; i < f->n_lines && !rc; i++) {
        line *l = &f->line[i];
        double *truth = dkv_outputAt(&f->truth, l->id), *bound = dkv_outputAt(&f->bound, l->id);
        memcpy(truth, l->truth, (size_t)n[l->id] * sizeof *truth);
        memcpy(bound, l->bound, (size_t)n[l->id] * sizeof *bound);
        if (l->x == l->truth) l->x = truth;
        l->truth = truth;
        l->bound = bound;
    }
    return rc;
}

/* Is some slope still more than what was seen of known arithmetic, and chance? */
static bool anyLeft(const search *f) {
    bool any = false;
    for (int i = 0; i < f->n_lines; i++)
        for (int k = 0; k < f->line[i].parts; k++)
            any |= fabs(f->line[i].part[k].gain) > f->line[i].part[k].chance + f->line[i].part[k].leans;
    return any;
}

static int askPossible(search *f, dkv_err *err) {
    dkv_case *c = f->c;
    dualkv_arithmetic a;
    int64_t most = 0;
    int rc = 0;
    for (int i = 0; i < f->n_lines; i++) most = f->line[i].n > most ? f->line[i].n : most;
    sums *work = malloc((size_t)(most + 1) * sizeof *work);
    rc = work ? keepOracle(f, err) : dkv_fail(err, DKV_EHARNESS, "out of memory: slopes");
    for (int i = 0; !rc && anyLeft(f) && listPossible(f, i, &a); i++) {
        const news new = whatIsNew(f, i, &a);
        if (new == NOTHING) continue;
        rc = c->result->oracle.by == DKV_ORACLE_CUDA ? dkv_consultOracle(c, &a, true, err)
                                                     : dkv_consultTwin(c, &a, new == FORWARD, err);
        if (!rc) noteLeans(f, &a, work);
        if (rc == DKV_EREFUSED) rc = 0; /* the device's oracle does not know it */
    }
    free(work);
    if (rc) return rc;
    return c->result->oracle.by == DKV_ORACLE_CUDA ? dkv_consultOracle(c, &c->result->arithmetic, true, err)
                                                   : dkv_consultTwin(c, &c->result->arithmetic, false, err);
}

/* What is allowed of a slope beside chance. */
static double allowedOf(const search *f, const line *l, int k) {
    const part *t = &l->part[k];
    const dualkv_problem *v = &f->c->packed.view;
    const double *scaled = f->shifted[DKV_WAY_SCALE].o ? dkv_outputAt(&f->shifted[DKV_WAY_SCALE], l->id) : NULL;
    double sum = t->leans + coherent(l, k, f->functions, l->id == DKV_LSE ? NULL : l->truth);
    if (f->c->p->softcap > 0) sum += coherent(l, k, f->tanh, scaled ? scaled : l->truth);
    if (t->gain < 0) sum += f->lost * (l->s.keys ? (double)(v->tq * v->hq) : (double)v->max_k_len);
    return sum;
}

/* ---- in words ---- */

/* Does the part lean as much as `gain`, as far as can be told? */
static bool leansToo(const part *t, double gain) { return !t->tested || fabs(t->gain - gain) <= t->chance; }

static int strongest(const line *l, const bool *found, int from, int to) {
    int best = -1;
    for (int k = from; k < to; k++)
        if (found[k] && (best < 0 || fabs(l->part[k].gain) > fabs(l->part[best].gain))) best = k;
    return best;
}

/* Words for the parts that lean; which part's numbers are told. */
static int nameParts(const line *l, const bool *found, char *out, size_t n) {
    const char *head = l->s.keys ? "KV head" : "head";
    const int region = strongest(l, found, PROMPTS, HEADS), other = PROMPTS + RESPONSES - region, heads = l->parts - HEADS;
    const int top = strongest(l, found, HEADS, l->parts);
    int many = 0;
    out[0] = 0;
    if (region >= 0 && !found[other] && !leansToo(&l->part[other], l->part[region].gain)) {
        snprintf(out, n, " in the %s", region == PROMPTS ? "prompts" : "responses");
        return region;
    }
    const double gain = l->part[top >= 0 ? top : ALL].gain;
    for (int h = 0; h < heads; h++) many += found[HEADS + h] || leansToo(&l->part[HEADS + h], gain);
    if (heads && many == heads) snprintf(out, n, ", in every %s", head);
    else if (many == 1 && top >= 0) snprintf(out, n, " in %s %d", head, top - HEADS);
    else if (top >= 0) snprintf(out, n, " in %d of %d %ss", many, heads, head);
    if (heads && many < heads && top >= 0) return top;
    return found[ALL] ? ALL : top >= 0 ? top : region;
}

static int decide(search *f, dkv_err *err) {
    for (int i = 0; i < f->n_lines; i++) {
        line *l = &f->line[i];
        dkv_lean *out = &f->c->result->lean[l->id];
        bool *found = calloc((size_t)l->parts, sizeof *found), any = false;
        if (!found) return dkv_fail(err, DKV_EHARNESS, "out of memory: slopes");
        for (int k = 0; k < l->parts; k++) {
            out->tested |= l->part[k].tested;
            if (!(fabs(l->part[k].gain) > l->part[k].chance)) continue;
            found[k] = !f->ask || fabs(l->part[k].gain) > l->part[k].chance + allowedOf(f, l, k);
            any |= found[k];
        }
        if (any) {
            char where[sizeof out->where];
            const int told = nameParts(l, found, where, sizeof where);
            const part *t = &l->part[told];
            const line *best = NULL; /* the direction that explains most of the tensor is told */
            for (int e = 0; e < i && (out->found || out->open); e++)
                if (f->line[e].id == l->id && f->line[e].way == out->way) best = &f->line[e];
            const double was = best ? best->part[ALL].gain * best->part[ALL].gain * best->part[ALL].weight : -1;
            if (l->part[ALL].gain * l->part[ALL].gain * l->part[ALL].weight > was) {
                *out = (dkv_lean){.tested = true, .found = f->ask, .open = !f->ask, .way = l->way, .gain = t->gain,
                                  .allowed = t->chance + allowedOf(f, l, told)};
                out->as_cut = l->way == DKV_WAY_ITSELF && t->gain < 0 && -t->gain < DKV_MANTISSA * dkv_unitRoundoff(l->format) + t->chance;
                memcpy(out->where, where, sizeof where);
            }
        }
        free(found);
    }
    return 0;
}

void dkv_sayLean(const dkv_lean *l, dkv_tensor_id id, char *out, size_t n) {
    const char *name = dkv_tensorName(id);
    const double percent = 100 * fabs(l->gain);
    out[0] = 0;
    if (!l->found && !l->open) return;
    const char *side = l->gain < 0 ? "small" : "large";
    size_t at = 0;
    if (l->way == DKV_WAY_ITSELF) at = (size_t)snprintf(out, n, "%s is %.2g %% too %s%s", name, percent, side, l->where);
    else if (l->way == DKV_WAY_SCALE)
        at = (size_t)snprintf(out, n, "the softmax scale is %.2g %% too %s, as %s shows%s", percent, side, name, l->where);
    else
        at = (size_t)snprintf(out, n, "%s counts %.3g times in %s%s", l->way == DKV_WAY_DELTA ? "delta" : "dLSE", 1 + l->gain, name,
                              l->where);
    if (at < n && l->open) snprintf(out + at, n - at, ": not judged, which roundings explain that is not asked of a case this large");
    else if (at < n)
        snprintf(out + at, n - at, "; no known rounding explains more than %.2g %%%s", 100 * l->allowed,
                 l->as_cut ? ", cutting in place of rounding would" : "");
}

/* ---- the whole ---- */

static void freeSearch(search *f) {
    for (int i = f->n_lines; i-- > 0;) {
        bool shared = false;
        for (int e = 0; e < i; e++) shared |= f->line[e].v == f->line[i].v;
        if (!shared) free(f->line[i].v);
        free(f->line[i].part);
        free(f->line[i].sum);
    }
    for (int i = 0; i < DKV_N_WAYS; i++) dkv_freeOutputs(&f->shifted[i]);
    dkv_freeOutputs(&f->truth);
    dkv_freeOutputs(&f->bound);
    free(f->region);
    free(f->work);
    free(f);
}

int dkv_judgeLeans(dkv_case *c, unsigned vouched, bool fits, bool ask, dkv_err *err) {
    const dualkv_problem *v = &c->packed.view;
    unsigned doubtful = 0;
    for (int id = 0; id < DKV_DSINK; id++)
        if (c->result->tensor[id].present && !(vouched >> id & 1)) doubtful |= 1u << id;
    if (!doubtful) return 0;
    search *f = calloc(1, sizeof *f);
    int rc = f ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory: slopes");
    if (rc) return rc;
    f->c = c;
    f->ask = ask;
    f->region = malloc((size_t)(v->tq > v->tk ? v->tq : v->tk) + 1);
    f->work = malloc(((size_t)(v->tq * v->hq) + 1) * sizeof *f->work);
    if (!f->region || !f->work) rc = dkv_fail(err, DKV_EHARNESS, "out of memory: slopes");
    if (!rc) rc = addLines(f, doubtful, fits, err);
    if (!rc && fitLines(f) && ask) rc = askPossible(f, err);
    if (!rc) rc = decide(f, err);
    freeSearch(f);
    return rc;
}
