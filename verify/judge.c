/* judge.c: see judge.h. Statistics of the residual to the twin, of one tensor or one region of it:
 *
 *   X_row    mean over the row's elements of min(z^2, C). Rows are independent, elements of a row are not;
 * rows that are equal (duplicated responses) count once, by weight. 0 <= X <= C, so Bernstein's inequality
 * holds whatever the tails: P(mean X > mu + sqrt(2 V L/n) + C L/(3 n_max)) < e^-L. V        variance of X: at
 * least 2, that of a row of one coherent normal error; else what the sample shows. mu       SIGMA^2: by how
 * much the twin's sigma may be off. Calibrated (TOLERANCE-TWIN.md), not derived; so are MEAN and GAIN, the
 * means that clean kernels show. gain     slope of (got - rounded twin) on the twin, weights 1/(sigma^2 +
 * ulp^2/12), standard error from rows. Where all rows have the same scores they err alike: sigma, but for the
 * output's rounding, is allowed as well. */
#include "append.h"
#include "coherent.h"
#include "judge.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "spans.h"
#include "vectors.h"

#define SIGMA    1.25
#define MEAN     0.35
#define GAIN     (1.0 / 16) /* of the output's unit roundoff */
#define PARTS    3          /* the tensor, its prompts, its responses */
#define TESTS    (3 * PARTS)
#define SHARED   16
#define CLIP_MIN 9.0
#define CLIP_MAX 100.0
#define EXACT    0x1p-42 /* sigma below this share of the value: nothing was rounded */
#define CERTAIN  0x1p-10 /* sigma below this share of the output's spacing: the rounding is certain */

typedef dkv_vectors shape;

/* err/bound; INFINITY where that says nothing. Where the truth is NaN nothing is defined; where it overflows
 * the type, the infinity of its sign is right. */
static double ratioOf(double got, double truth, double bound, bool lse, int32_t format) {
    if (isnan(truth) || bound == DKV_UNCLAIMED) return 0;
    if (isinf(truth)) return got == truth || (!isfinite(got) && !(lse && truth < 0)) ? 0 : INFINITY;
    if (isinf(got)) {
        double most = dkv_maxFinite(format), half = dkv_ulp(most, format) / 2;
        return (got > 0) == (truth > 0) && fabs(truth) + bound >= most + half ? 0 : INFINITY;
    }
    double err = fabs(got - truth);
    if (err == 0) return 0;
    return err <= bound ? err / bound : bound > 0 && err < INFINITY ? err / bound : INFINITY;
}

static void findPlace(const dkv_layout *l, const dualkv_arithmetic *a, const shape *s, int64_t row,
                      dkv_where *w) {
    const dualkv_problem *v = &l->view;
    if (s->sums) {
        w->group = w->segment = w->row = w->tile_edge = -1;
        return;
    }
    w->segment = dkv_segmentOf(l, s->keys, row);
    const dualkv_segment *segment = &v->segments[w->segment];
    w->group = segment->group;
    w->row = row - dkv_firstRow(segment, s);
    w->region = segment->depth > 0;
    w->tile_edge = -1;
    if (a->key_tile > 0) {
        int64_t past = w->row % a->key_tile, before = a->key_tile - past;
        w->tile_edge = past < before ? past : before;
    }
}

/* ---- the bound ---- */

/* What the threads look at, and what each span of rows found. */
typedef struct bound_loop {
    const shape *s;
    const uint8_t *region;
    const double *got, *truth, *bound;
    int32_t format;
    bool lse;
    dkv_judgement found[DKV_SPANS];
    int64_t worst_row[DKV_SPANS];
    double slope[DKV_SPANS][2], weight[DKV_SPANS][2]; /* of the error on the truth, by region */
} bound_loop;

static void boundSpan(int64_t first, int64_t end, int span, void *arg) {
    bound_loop *w = arg;
    const shape *s = w->s;
    dkv_judgement *j = &w->found[span];
    int64_t worst_row = -1;
    for (int64_t row = first; row < end; row++)
        for (int64_t h = 0; h < s->heads; h++)
            for (int64_t at = dkv_vectorAt(s, row, h), c = 0; c < s->d; c++, at++) {
                const double got = w->got[at], truth = w->truth[at], bound = w->bound[at];
                double r = ratioOf(got, truth, bound, w->lse, w->format);
                dkv_part *part = &j->region[w->region[row]];
                part->total++;
                part->bad += !(r <= 1);
                /* an overflow that rounding explains is none */
                part->nonfinite += !isfinite(got) && isfinite(truth) && bound != DKV_UNCLAIMED && !(r <= 1 && isfinite(bound));
                if (r > part->max_ratio) part->max_ratio = r;
                if (isfinite(got) && isfinite(truth)) {
                    w->slope[span][w->region[row]] += truth * (got - truth);
                    w->weight[span][w->region[row]] += truth * truth;
                }
                if (worst_row >= 0 && !(r > j->all.max_ratio)) continue;
                j->all.max_ratio = r;
                worst_row = row;
                j->worst = (dkv_where){
                    .row = row, .head = h, .dim = s->d > 1 ? c : -1, .got = got, .want = truth, .bound = bound};
            }
    w->worst_row[span] = worst_row;
}

static double gainOf(double slope, double weight) {
    return weight > 0 && isfinite(slope) && isfinite(weight) ? slope / weight : 0;
}

static int judgeBound(const dkv_layout *l, const dualkv_arithmetic *a, const dkv_oracle *o, dkv_tensor_id id,
                      const shape *s, const uint8_t *region, const double *got, dkv_judgement *j, dkv_err *err) {
    int64_t worst_row = -1;
    double slope[2] = {0}, weight[2] = {0};
    bound_loop *w = calloc(1, sizeof *w);
    if (!w) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    *w = (bound_loop){.s = s,
                      .region = region,
                      .got = got,
                      .truth = dkv_outputAt(&o->truth, id),
                      .bound = dkv_outputAt(&o->bound, id),
                      .format = id == DKV_LSE || id == DKV_DSINK ? DUALKV_FP32 : a->out_format,
                      .lse = id == DKV_LSE};
    dkv_eachSpan(s->rows, (double)s->rows * (double)(s->heads * s->d), boundSpan, w);
    for (int k = 0; k < DKV_SPANS; k++) {
        const dkv_judgement *f = &w->found[k];
        for (int e = 0; e < 2; e++) {
            dkv_part *part = &j->region[e];
            part->total += f->region[e].total;
            part->bad += f->region[e].bad;
            part->nonfinite += f->region[e].nonfinite;
            if (f->region[e].max_ratio > part->max_ratio) part->max_ratio = f->region[e].max_ratio;
            slope[e] += w->slope[k][e];
            weight[e] += w->weight[k][e];
        }
        if (w->worst_row[k] < 0 || (worst_row >= 0 && !(f->all.max_ratio > j->all.max_ratio))) continue;
        worst_row = w->worst_row[k];
        j->all.max_ratio = f->all.max_ratio;
        j->worst = f->worst;
    }
    free(w);
    j->all.truth_gain = gainOf(slope[0] + slope[1], weight[0] + weight[1]);
    for (int e = 0; e < 2; e++) {
        j->region[e].truth_gain = gainOf(slope[e], weight[e]);
        j->all.total += j->region[e].total;
        j->all.bad += j->region[e].bad;
        j->all.nonfinite += j->region[e].nonfinite;
    }
    if (worst_row >= 0) findPlace(l, a, s, worst_row, &j->worst);
    j->failed = j->all.bad > 0;
    return 0;
}

/* ---- the twin ---- */

typedef struct row_stat { /* of one vector */
    uint64_t hash;        /* of its twin: equal rows are one observation */
    int64_t at;
    int region, equal;                         /* equal: rows of the region that are the same */
    double square, mean, off, slope, weight, noise; /* of min(z^2, C), of z, of (got - rounded twin)/sigma; sums
                                                     * for the slope */
} row_stat;

static int compareRows(const void *x, const void *y) {
    const row_stat *a = x, *b = y;
    if (a->region != b->region) return a->region - b->region;
    return a->hash < b->hash ? -1 : a->hash > b->hash ? 1 : a->at < b->at ? -1 : a->at > b->at;
}

typedef struct twin_loop {
    const shape *s;
    const uint8_t *region;
    const double *got, *twin, *sigma2;
    int32_t format;
    double clip, unit; /* unit: of the arithmetic; 0 where the output is no coarser */
    row_stat *rows;
    uint8_t *used;
} twin_loop;

/* Every vector's hash; equal 0: it tells nothing. */
static void hashSpan(int64_t first, int64_t end, int span, void *arg) {
    const twin_loop *w = arg;
    const shape *s = w->s;
    (void)span;
    for (int64_t row = first; row < end; row++)
        for (int64_t h = 0; h < s->heads; h++) {
            int64_t at = dkv_vectorAt(s, row, h), use = 0;
            for (int64_t c = 0; c < s->d; c++) use += isfinite(w->twin[at + c]) && isfinite(w->sigma2[at + c]);
            w->rows[row * s->heads + h] = (row_stat){
                .hash = use ? dkv_hashVector(w->twin + at, s->d) : 0, .at = at, .region = w->region[row], .equal = use > 0};
        }
}

/* Informative vectors of the tensor, sorted so that equal ones lie together; how many of each. */
static int64_t gatherRows(twin_loop *w) {
    const shape *s = w->s;
    row_stat *rows = w->rows;
    int64_t n = 0;
    dkv_eachSpan(s->rows, (double)s->rows * (double)(s->heads * s->d), hashSpan, w);
    for (int64_t i = 0; i < s->rows * s->heads; i++)
        if (rows[i].equal) rows[n++] = rows[i];
    dkv_sortSpans(rows, n, sizeof *rows, compareRows);
    for (int64_t i = 0, end; i < n; i = end) {
        for (end = i; end < n && rows[end].hash == rows[i].hash && rows[end].region == rows[i].region;
             end++) {
        }
        for (int64_t e = i; e < end; e++) rows[e].equal = (int)(end - i > 1 << 30 ? 1 << 30 : end - i);
    }
    return n;
}

/* z of every element of the vector; false if none tells anything. */
static bool measureRow(const double *got, const double *twin, const double *sigma2, int64_t d, int32_t format,
                       double clip, double unit, row_stat *r) {
    double n = 0, sure = 0, wrong = 0, square = 0, mean = 0, off = 0, top = sqrt(clip);
    for (int64_t c = 0; c < d; c++) {
        double t = twin[c], e = got[c] - t, h, s2 = sigma2[c], z, w;
        if (!isfinite(e) || !isfinite(s2)) continue; /* the bound's business */
        h = dkv_ulp(t, format);
        if (s2 <= EXACT * EXACT * t * t || s2 <= CERTAIN * CERTAIN * h * h) { /* half a unit is an error */
            sure++;
            if (!(fabs(e) > h / 2)) continue;
            wrong++;
            s2 = h * h / 12;
        }
        z = e / sqrt(s2);
        n++;
        square += z * z < clip ? z * z : clip;
        mean += z > top ? top : z < -top ? -top : z;
        double stored = dkv_roundTo(t, format), near = t - stored;
        z = (got[c] - stored) / sqrt(s2);
        off += z > top ? top : z < -top ? -top : z;
        w = 1 / (s2 + h * h / 12);
        /* Which way a tie goes, and what the arithmetic cannot tell from one, says nothing of a gain: a sink of e^-25 moves
         * the twin off all ties in one direction, and no sum in fp32. */
        const bool tie = unit > 0 && h / 2 - fabs(near) <= unit * fabs(t);
        if (!tie && isfinite(w) && isfinite(t * t * w)) {
            r->slope += w * t * (got[c] - stored);
            r->weight += w * t * t;
            r->noise += s2 > near * near ? w * fabs(t) * sqrt(s2 - near * near) : 0;
        }
    }
    if (wrong > 0) n += sure - wrong; /* beside one that is wrong, those that are right tell something, too */
    r->square = n > 0 ? square / n : 0;
    r->mean = n > 0 ? mean / n : 0;
    r->off = n > 0 ? off / n : 0;
    return n > 0;
}

static void measureSpan(int64_t first, int64_t end, int span, void *arg) {
    const twin_loop *w = arg;
    (void)span;
    for (int64_t i = first; i < end; i++) {
        row_stat *r = &w->rows[i];
        w->used[i] = measureRow(w->got + r->at, w->twin + r->at, w->sigma2 + r->at, w->s->d, w->format, w->clip, w->unit, r);
    }
}

typedef struct sums {
    double n, eff, most; /* rows; (sum of equal)^2 / sum of equal^2, roughly; the largest weight */
} sums;

static sums countRows(const row_stat *rows, int64_t n, int region) {
    sums s = {0, 0, 1};
    double squares = 0;
    for (int64_t i = 0; i < n; i++) {
        if (region >= 0 && rows[i].region != region) continue;
        s.n++;
        squares += rows[i].equal;
        if (rows[i].equal > s.most) s.most = rows[i].equal;
    }
    s.eff = squares > 0 ? s.n * s.n / squares : 0;
    return s;
}

/* How many independent vectors a part's keys are. In 16 bit each has its own rounding, which is most of its noise. */
static double independentOf(const twin_loop *w, int64_t n, int region, double gain) {
    const dkv_residuals r = {w->got, w->twin, w->sigma2, w->s->d, gain};
    dkv_coherence sum = {0};
    if (w->format != DUALKV_FP32 || !w->s->keys) return INFINITY;
    for (int64_t i = 0; i < n; i++)
        if (w->used[i] && (region < 0 || w->rows[i].region == region))
            dkv_addResidual(&r, w->rows[i].at, 1.0 / w->rows[i].equal, &sum);
    return dkv_independentVectors(&sum);
}

static double clipFor(double dof) {
    double c = dof / 8;
    return c < CLIP_MIN ? CLIP_MIN : c > CLIP_MAX ? CLIP_MAX : c;
}

/* Statistics and limits of one part from its measured rows (used: those that tell anything). */
static void judgePart(const twin_loop *w, int64_t n, int region, double dof_max, double mean_clean, double gain_clean,
                      double level, dkv_part *out) {
    const row_stat *rows = w->rows;
    const uint8_t *used = w->used;
    const double clip = w->clip;
    double count = 0, square = 0, square2 = 0, mean = 0, mean2 = 0, off = 0, off2 = 0, slope = 0, weight = 0,
           error = 0, lean = 0, noise = 0, squares = 0, most = 1;
    for (int64_t i = 0; i < n; i++) {
        if (!used[i] || (region >= 0 && rows[i].region != region)) continue;
        count++;
        squares += rows[i].equal;
        most = rows[i].equal > most ? rows[i].equal : most;
        square += rows[i].square;
        square2 += rows[i].square * rows[i].square;
        mean += rows[i].mean;
        mean2 += rows[i].mean * rows[i].mean;
        off += rows[i].off;
        off2 += rows[i].off * rows[i].off;
        slope += rows[i].slope;
        weight += rows[i].weight;
        noise += rows[i].noise;
    }
    out->rms_limit = out->mean_limit = out->gain_limit = INFINITY;
    if (count == 0) return;
    out->gain = weight > 0 ? slope / weight : 0;
    const double own_n = independentOf(w, n, region, out->gain), all = count * count / squares;
    double eff = fmin(all, fmin(own_n, dof_max)), bits = log(TESTS / level), top = sqrt(clip), v, few = fmin(count / most, eff);
    square /= count;
    /* Where all rows round the same way the residual has a mean, and where the rounding is not foreseen its
     * distance from the rounded twin has one: a bias has both. */
    if (fabs(off) < fabs(mean)) mean = off, mean2 = off2;
    mean /= count;
    out->dof = eff;
    out->rms_z = sqrt(square);
    out->mean_z = mean;
    for (int64_t i = 0; i < n; i++) {
        if (!used[i] || (region >= 0 && rows[i].region != region)) continue;
        double e = rows[i].slope - out->gain * rows[i].weight, own = rows[i].weight * rows[i].equal / weight;
        error +=
            e * e * rows[i].equal / ((1 - own) * (1 - own)); /* a row that the slope leans on fits itself */
        lean += rows[i].weight * rows[i].weight * rows[i].equal;
    }
    error *= own_n < all ? all / own_n : 1;
    v = square2 / count - square * square;
    out->rms_dof = square > 0 && v > 2 * square * square ? 2 * square * square / v * eff : eff;
    v = v > 2 ? v : 2;
    out->rms_limit = sqrt(SIGMA * SIGMA + sqrt(2 * v * bits / eff) + clip * bits / (3 * few));
    v = mean2 / count - mean * mean;
    v = v > SIGMA * SIGMA ? v : SIGMA * SIGMA;
    out->mean_limit = mean_clean + sqrt(2 * v * bits / eff) + top * bits / (3 * few);
    /* A self-normalised sum of fewer rows than this cannot reach its own limit. */
    eff = lean > 0 && weight * weight / lean < eff ? weight * weight / lean : eff;
    if (eff > 2 * bits && weight > 0)
        out->gain_limit =
            gain_clean + noise / weight + sqrt(2 * bits * error) / weight * eff / (eff - 2 * bits);
}

typedef struct part_loop {
    const twin_loop *w;
    int64_t n;
    double dof, mean, clean, level;
    dkv_part *part[PARTS];
} part_loop;

/* The sums of a part are in one order, whoever runs: parts side by side, no part by several. */
static void judgeParts(int64_t first, int64_t end, int span, void *arg) {
    const part_loop *w = arg;
    (void)span;
    for (int64_t k = first; k < end; k++)
        judgePart(w->w, w->n, (int)k - 1, w->dof, w->mean, w->clean, w->level, w->part[k]);
}

static bool exceeds(const dkv_part *p) { return p->rms_z > p->rms_limit; }
static bool leans(const dkv_part *p) {
    return fabs(p->gain) > p->gain_limit || fabs(p->mean_z) > p->mean_limit;
}

static int judgeTwin(const dkv_layout *l, const dualkv_arithmetic *a, const dkv_oracle *o, dkv_tensor_id id,
                     const shape *s, const uint8_t *region, const double *got, double level, dkv_judgement *j,
                     dkv_err *err) {
    const double *twin = dkv_outputAt(&o->twin, id), *sigma2 = dkv_outputAt(&o->sigma2, id);
    const double *lse = o->truth.lse;
    int64_t vectors = s->rows * s->heads, rows = l->view.tq * l->view.hq, used_n = 0;
    int32_t format = id == DKV_LSE || id == DKV_DSINK ? DUALKV_FP32 : a->out_format;
    row_stat *stat = malloc(sizeof *stat * (size_t)(vectors + 1));
    uint8_t *used = calloc((size_t)vectors + 1, 1);
    double *work = malloc(sizeof *work * (size_t)(rows + 1)), dof = INFINITY;
    int code = DKV_OK;
    if (!stat || !used || !work) {
        code = dkv_fail(err, DKV_EHARNESS, "out of memory: statistics of %" PRId64 " rows", vectors);
        goto done;
    }
    /* One row's delta errs in the gradients of all its keys: these are not more independent than the rows. In fp32 rows
     * with one LSE have, as a rule, the same scores (all at the softcap, one key beside a sink) and err alike. */
    if (lse && (s->keys || (format == DUALKV_FP32 && !s->by_head && !s->sums)))
        dof = (double)dkv_countDistinct(lse, rows, work);
    twin_loop w = {s, region, got, twin, sigma2, format, 0, dkv_unitRoundoff(format) > a->unit ? a->unit : 0, stat, used};
    int64_t n = gatherRows(&w);
    if (id == DKV_LSE && o->alike.lse > 0) dof = dkv_independent(&o->alike, o->alike.lse);
    /* Rows that lean on one capped score have one error of P, in all that is made of it. In 16 bit its rounding is most of
     * the noise. */
    if (id != DKV_LSE && o->alike.capped > 0 && format == DUALKV_FP32 && !s->by_head && !s->sums)
        dof = fmin(dof, dkv_independent(&o->alike, o->alike.capped));
    sums all = countRows(stat, n, -1);
    /* Rows that see nearly the same keys with nearly the same weights share their chains' errors: in fp32
     * these are all the noise there is, and only the head dimension's elements are independent. Calibrated on
     * fill=cold. */
    if (format == DUALKV_FP32 && !s->by_head && !s->sums && s->d < SHARED) {
        double most = all.n * (double)s->d / SHARED;
        dof = dof < most ? dof : most;
    }
    w.clip = clipFor(all.eff < dof ? all.eff : dof);
    dkv_eachSpan(n, (double)n * (double)s->d, measureSpan, &w);
    for (int64_t i = 0; i < n; i++) used_n += used[i];
    double clean = GAIN * dkv_unitRoundoff(format) + 4 * a->unit;
    if (a->acc_truncates)
        clean += a->acc_gain * (s->keys ? (double)rows : (double)l->view.max_k_len) / a->acc_step / 4;
    j->twin = used_n > 0;
    /* fp32: all noise is arithmetic, and where all rows have the same scores they err alike. */
    double mean = format == DUALKV_FP32 ? SIGMA : MEAN;
    part_loop parts = {&w, n, dof, mean, clean, level, {&j->all, &j->region[0], &j->region[1]}};
    dkv_eachSpan(PARTS, (double)n * 64, judgeParts, &parts);
    j->imprecise = exceeds(&j->all) || exceeds(&j->region[0]) || exceeds(&j->region[1]);
    j->biased = leans(&j->all) || leans(&j->region[0]) || leans(&j->region[1]);
done:
    free(stat);
    free(used);
    free(work);
    return code;
}

int dkv_judgeTensor(const dkv_layout *l, const dualkv_arithmetic *a,
                    const dkv_oracle *o, dkv_tensor_id id, const double *got, double level,
                    dkv_judgement *out, dkv_err *err) {
    int64_t n[DKV_N_OUTPUTS];
    shape s = dkv_vectorsOf(&l->view, id);
    uint8_t *region;
    int code = DKV_OK;
    memset(out, 0, sizeof *out);
    dkv_part *parts[] = {&out->all, &out->region[0], &out->region[1]};
    for (int e = 0; e < PARTS; e++)
        parts[e]->rms_limit = parts[e]->mean_limit = parts[e]->gain_limit = INFINITY;
    dkv_countOutputs(l, n);
    if (!got || n[id] == 0 || !dkv_outputAt(&o->truth, id)) return DKV_OK;
    if (!(level > 0 && level < 1)) return dkv_fail(err, DKV_EHARNESS, "a test's level of %g", level);
    region = calloc((size_t)s.rows + 1, 1);
    if (!region) return dkv_fail(err, DKV_EHARNESS, "out of memory: %" PRId64 " rows", s.rows);
    out->present = true;
    dkv_markRegions(&l->view, &s, region);
    code = judgeBound(l, a, o, id, &s, region, got, out, err);
    if (!code && o->has_twin[id]) code = judgeTwin(l, a, o, id, &s, region, got, level, out, err);
    free(region);
    return code;
}

/* ---- in words ---- */

static size_t addPlace(const dualkv_arithmetic *a, dkv_tensor_id id, const dkv_where *w, char *out, size_t n,
                       size_t at) {
    if (id == DKV_DSINK) return dkv_append(out, n, at, " at head %" PRId64, w->head);
    at = dkv_append(out, n, at, " at group %" PRId64 ", %s", w->group, dkv_regionName(w->region));
    if (w->region) at = dkv_append(out, n, at, " (segment %" PRId64 ")", w->segment);
    at = dkv_append(out, n, at, ", %s %" PRId64, id == DKV_DK || id == DKV_DV ? "key" : "row", w->row);
    if (w->tile_edge >= 0 && w->tile_edge <= 2 && w->row >= a->key_tile / 2) {
        int64_t past = w->row % a->key_tile;
        if (past == 0)
            at = dkv_append(out, n, at, " (the first of a %d-row tile)", (int)a->key_tile);
        else if (past <= 2)
            at = dkv_append(out, n, at, " (%" PRId64 " past a %d-row tile's edge)", past, (int)a->key_tile);
        else
            at =
                dkv_append(out, n, at, " (%" PRId64 " before a %d-row tile's edge)", w->tile_edge, (int)a->key_tile);
    }
    at = dkv_append(out, n, at, ", %s %" PRId64, id == DKV_DK || id == DKV_DV ? "KV head" : "head", w->head);
    if (w->dim >= 0) at = dkv_append(out, n, at, ", dim %" PRId64, w->dim);
    return at;
}

static const char *partName(const dkv_judgement *j, bool (*test)(const dkv_part *), const dkv_part **part) {
    *part = &j->all;
    if (test(&j->all)) return "";
    *part = test(&j->region[0]) ? &j->region[0] : &j->region[1];
    return *part == &j->region[0] ? " of the prompts" : " of the responses";
}

static size_t explainTwin(dkv_tensor_id id, const dkv_judgement *j, char *out, size_t n, size_t at) {
    const dkv_part *part;
    if (j->imprecise) {
        const char *where = partName(j, exceeds, &part);
        at = dkv_append(out, n, at,
                 "%s%s: noise of %.2f times what the declared roundings leave, where %.2f is the limit",
                 dkv_tensorName(id), where, part->rms_z, part->rms_limit);
    }
    if (!j->biased) return at;
    const char *where = partName(j, leans, &part);
    if (j->imprecise) at = dkv_append(out, n, at, "; ");
    if (fabs(part->gain) > part->gain_limit)
        return dkv_append(out, n, at, "%s%s: too %s by %.2g of its value on average, where %.2g is the limit",
                   dkv_tensorName(id), where, part->gain < 0 ? "small" : "large", fabs(part->gain),
                   part->gain_limit);
    return dkv_append(out, n, at, "%s%s: off by %+.2f of its noise on average, where %.2f is the limit",
               dkv_tensorName(id), where, part->mean_z, part->mean_limit);
}

void dkv_explainJudgement(const dualkv_arithmetic *a, dkv_tensor_id id,
                          const dkv_judgement *j, char *out, size_t n) {
    const dkv_where *w = &j->worst;
    size_t at = 0;
    if (!n) return;
    out[0] = 0;
    if (!j->present) return;
    if (!j->failed) {
        explainTwin(id, j, out, n, 0);
        return;
    }
    if (isinf(w->want))
        at = dkv_append(out, n, 0, "%s: %g where %g is right", dkv_tensorName(id), w->got, w->want);
    else if (!isfinite(w->got))
        at = dkv_append(out, n, 0, "%s: %g where %.6g is right", dkv_tensorName(id), w->got, w->want);
    else if (isinf(j->all.max_ratio))
        at = dkv_append(out, n, 0, "%s: an error where none is allowed", dkv_tensorName(id));
    else
        at = dkv_append(out, n, 0, "%s: %.3g times what rounding allows", dkv_tensorName(id), j->all.max_ratio);
    at = addPlace(a, id, w, out, n, at);
    if (isfinite(w->got) && !isinf(w->want)) at = dkv_append(out, n, at, ": got %.6g, truth %.6g", w->got, w->want);
    dkv_append(out, n, at, "; %" PRId64 " of %" PRId64 " elements are wrong", j->all.bad, j->all.total);
}
