/* How much of the observed error a prediction explains: see explain.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/clock.h"
#include "../ref/dtype.h"
#include "hypothes.h"

#define KEEP_BYTES ((int64_t)128 << 20) /* of predictions kept */
#define GROSS 3.0                       /* bounds: an error beyond this is no matter of rounding */
#define SIGMA_SHARE (1.0 / 8)           /* of the bound, where there is no twin */
#define NEAR 0.05                       /* predictions nearer than this part of the error are the same */
#define ALIKE 0.01                      /* of the wrong elements may differ between the same */
#define FINE_WEIGHT 0.2                 /* of the logarithmic measure in the key */

double dkv_inquirySeconds(const dkv_inquiry *q) { return dkv_now() - q->start; }

bool dkv_outOfTime(const dkv_inquiry *q) { return dkv_inquirySeconds(q) > q->seconds; }

bool dkv_isExcluded(const dkv_inquiry *q, const char *name) {
    const size_t n = strlen(name);
    for (const char *at = q->in->exclude; at && *at;) {
        const size_t len = strcspn(at, ",");
        if (len == n && strncmp(at, name, n) == 0) return true;
        at += len + (at[len] == ',');
    }
    return false;
}

/* Rounding of the tensors: LSE and dSink are fp32. */
static double roundoffOf(const dkv_inquiry *q, int id) {
    return dkv_unitRoundoff(id == DKV_LSE || id == DKV_DSINK ? DUALKV_FP32 : (int32_t)q->in->p->dtype);
}

/* The bound was made for the truth; where what is right given the kernel's own O and LSE is larger, so is its
 * rounding. */
static void fillNoise(dkv_inquiry *q, int id) {
    const dkv_oracle *o = q->in->oracle;
    const double *bound = dkv_outputAt(&o->bound, (dkv_tensor_id)id),
                 *truth = dkv_outputAt(&o->truth, (dkv_tensor_id)id);
    const double *sigma2 = o->has_twin[id] ? dkv_outputAt(&o->sigma2, (dkv_tensor_id)id) : NULL;
    const double unit = roundoffOf(q, id),
                 least = dkv_underflow(id == DKV_LSE || id == DKV_DSINK ? DUALKV_FP32
                                                                        : (int32_t)q->in->p->dtype);
    for (int64_t i = 0; i < q->n[id]; i++) {
        const double clean = fabs(q->clean[id][i]), grown = clean - fabs(truth[i]);
        double n = bound[i] == DKV_UNCLAIMED || !isfinite(bound[i]) ? INFINITY
                                                                    : bound[i] + 2 * unit * fabs(truth[i]);
        if (isnan(truth[i])) n = INFINITY;
        if (isfinite(n) && grown > 0 && isfinite(grown)) n += 8 * unit * grown;
        q->noise[id][i] = n;
        double s = sigma2 && isfinite(sigma2[i]) ? sqrt(sigma2[i]) : isfinite(n) ? n * SIGMA_SHARE : INFINITY;
        if (s < unit * clean / 2) s = unit * clean / 2;
        q->sigma[id][i] = s > least ? s : least;
    }
}

int dkv_openInquiry(dkv_inquiry *q, const dkv_explain_in *in, dkv_err *err) {
    int64_t n[DKV_N_OUTPUTS];
    memset(q, 0, sizeof *q);
    q->in = in;
    q->start = dkv_now();
    q->seconds = in->seconds > 0 ? in->seconds : 10;
    dkv_countOutputs(in->l, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!n[id] || !dkv_outputAt(in->got, (dkv_tensor_id)id) ||
            !dkv_outputAt(&in->oracle->truth, (dkv_tensor_id)id))
            continue;
        q->n[id] = n[id];
        q->clean[id] = calloc((size_t)n[id], sizeof(double));
        q->noise[id] = calloc((size_t)n[id], sizeof(double));
        q->sigma[id] = calloc((size_t)n[id], sizeof(double));
        if (!q->clean[id] || !q->noise[id] || !q->sigma[id])
            return dkv_fail(err, DKV_EHARNESS, "out of memory");
    }
    return dkv_allocOutputs(in->l, &q->work.out, err);
}

void dkv_closeInquiry(dkv_inquiry *q) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        free(q->clean[id]);
        free(q->noise[id]);
        free(q->sigma[id]);
        for (int g = 0; g < q->n_guesses; g++) free(q->guess[g].kept[id]);
    }
    free(q->guess);
    dkv_freeOutputs(&q->work.out);
}

/* |a - b|; 0 where both are NaN or the same infinity, else infinite where one is not finite. */
static inline double apart(double a, double b) {
    if (isfinite(a) && isfinite(b)) return fabs(a - b);
    return (isnan(a) && isnan(b)) || a == b ? 0 : INFINITY;
}

static inline double bitsOf(double e, double n) {
    if (!isfinite(e)) return 1;
    const double ratio = n > 0 ? e / n : INFINITY;
    return ratio < 2 ? (ratio > 1) : ratio < 0x1p20 ? log2(ratio) : 20;
}

static inline double logOf(double x, double s) {
    return isfinite(x) ? log1p(x / s * (x / s)) : log1p(0x1p60);
}

/* What is left of an element's error e where r remains. */
static inline double leftGross(double e, double r, double n) {
    if (!(e > n)) return r > n;
    if (!(r > n)) return 0;
    if (!isfinite(e)) return 1;
    return r < e ? r / e * (r / e) : 1;
}

static inline double leftFine(double e, double r, double s) {
    if (!isfinite(r)) return 1;
    if (!isfinite(e)) e = 0;
    const double m = r > e ? r : e;
    return r == 0 ? 0 : r * r / (m * m + s * s);
}

static bool memoryHurt(const dkv_damage *d) { return d && (d->outside || d->mutated); }

/* Bits alike? Then differences are the kernel's own doing, not its arithmetic's. */
static bool isExactlike(const dkv_inquiry *q) {
    int64_t same = 0, all = 0;
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        for (int64_t i = 0; i < q->n[id]; i++, all++)
            same += apart(dkv_outputAt(q->in->got, (dkv_tensor_id)id)[i], q->clean[id][i]) == 0;
    return all > 0 && 4 * same > all;
}

static bool isGross(const dkv_inquiry *q) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *got = q->n[id] ? dkv_outputAt(q->in->got, (dkv_tensor_id)id) : NULL;
        for (int64_t i = 0; i < q->n[id]; i++)
            if (apart(got[i], q->clean[id][i]) > GROSS * q->noise[id][i]) return true;
    }
    return false;
}

static void weighTensor(dkv_inquiry *q, int id) {
    const double *got = dkv_outputAt(q->in->got, (dkv_tensor_id)id);
    for (int64_t i = 0; i < q->n[id]; i++) {
        const double e = apart(got[i], q->clean[id][i]), n = q->noise[id][i], s = q->sigma[id][i];
        q->whole_fine[id] += logOf(e, s);
        q->whole[id] += q->gross ? e > n : leftFine(0, e, s);
        if (q->gross ? e > n : e > 0) {
            q->bad[id]++;
            if (isfinite(e)) q->any_finite = true;
            q->bits[id] += q->gross ? bitsOf(e, n) : isfinite(e) ? 0.5 * log2(1 + e / s * (e / s)) : 1;
        }
    }
}

/* Fine errors of a kernel that is not this emulation: those of the twin decide. */
static bool wrongFine(const dkv_inquiry *q, int id) {
    const dkv_oracle *o = q->in->oracle;
    const double *got = dkv_outputAt(q->in->got, (dkv_tensor_id)id),
                 *twin = dkv_outputAt(&o->twin, (dkv_tensor_id)id);
    double sum = 0;
    int64_t n = 0;
    if (q->exactlike) return q->bad[id] > 0;
    if (!o->has_twin[id]) return false;
    for (int64_t i = 0; i < q->n[id]; i++) {
        const double z = (got[i] - twin[i]) / q->sigma[id][i];
        if (!isfinite(z)) continue;
        sum += z * z;
        n++;
    }
    return n > 0 && sum / (double)n > 1.4 * 1.4;
}

int dkv_weighErrors(dkv_inquiry *q, dkv_err *err) {
    (void)err;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) fillNoise(q, id);
    q->gross = isGross(q);
    q->exactlike = isExactlike(q);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!q->n[id]) continue;
        weighTensor(q, id);
        q->wrong[id] = q->gross ? q->bad[id] > 0 : wrongFine(q, id);
        q->n_wrong += q->wrong[id];
    }
    q->wrong[DKV_MEMORY] = memoryHurt(q->in->damage);
    q->n_wrong += q->wrong[DKV_MEMORY];
    return 0;
}

/* ---- guesses ---- */

static uint64_t mix(uint64_t h, double x) {
    uint64_t w;
    if (isnan(x)) x = NAN;
    if (x == 0) x = 0; /* -0, too */
    memcpy(&w, &x, sizeof w);
    h = (h ^ w) * 0xD1B54A32D192ED03ull;
    return h ^ h >> 29;
}

static void scoreTensor(const dkv_inquiry *q, int id, const double *pred, dkv_guess *g) {
    const double *got = dkv_outputAt(q->in->got, (dkv_tensor_id)id);
    double left = 0, fine = 0;
    for (int64_t i = 0; i < q->n[id]; i++) {
        const double e = apart(got[i], q->clean[id][i]), r = apart(got[i], pred[i]);
        left += q->gross ? leftGross(e, r, q->noise[id][i]) : leftFine(e, r, q->sigma[id][i]);
        fine += logOf(r, q->sigma[id][i]);
        if (r != 0) g->exact = false;
        if (!g->moves && apart(pred[i], q->clean[id][i]) != 0) g->moves = true;
        g->hash = mix(g->hash, pred[i]);
    }
    if (q->wrong[id]) {
        g->left[id] = left / q->whole[id];
        g->fine[id] = q->whole_fine[id] > 0 ? fine / q->whole_fine[id] : fine > 0;
    } else {
        const double more = q->gross ? left : left > q->whole[id] ? left - q->whole[id] : 0;
        g->left[id] = more / (more + 1);
        g->fine[id] = fine > q->whole_fine[id] ? (fine - q->whole_fine[id]) / (fine - q->whole_fine[id] + 1)
                                               : 0;
    }
}

/* The same place? How many bytes depends on the poison that lay there: "40 bytes after O, the first 0 bytes
 * from its end". */
static bool samePlace(int64_t a, const char *where_a, int64_t b, const char *where_b) {
    const char *x = strchr(where_a, ' '), *y = strchr(where_b, ' ');
    if (!a || !b) return !a && !b;
    return x && y ? strcmp(x, y) == 0 : a == b;
}

static void scoreMemory(const dkv_inquiry *q, dkv_guess *g) {
    const dkv_damage *d = q->in->damage;
    if (!d) return;
    const bool alike = samePlace(d->outside, d->outside_where, g->damage.outside, g->damage.outside_where) &&
                       samePlace(d->mutated, d->mutated_where, g->damage.mutated, g->damage.mutated_where);
    g->left[DKV_MEMORY] = alike ? 0 : memoryHurt(d) && memoryHurt(&g->damage) ? 0.5 : 1;
    if (!alike) g->exact = false;
}

/* How little a guess leaves of the tensor that it explains best. */
static double worthOf(const dkv_inquiry *q, const dkv_guess *g) {
    double least = 1;
    for (int id = 0; id < DKV_PARTS; id++)
        if (q->wrong[id]) least = fmin(least, g->left[id]);
    return least + 1e-3 * g->key;
}

/* Lets go of the predictions of the guess that explains least, if that is less than `better` does. */
static bool forgetOne(dkv_inquiry *q, const dkv_guess *better) {
    dkv_guess *worst = NULL;
    double most = worthOf(q, better);
    for (int i = 0; i < q->n_guesses; i++) {
        dkv_guess *g = &q->guess[i];
        bool any = false;
        for (int id = 0; id < DKV_N_OUTPUTS; id++) any |= g->kept[id] != NULL;
        if (g == better || !any || worthOf(q, g) <= most) continue;
        most = worthOf(q, g);
        worst = g;
    }
    if (!worst) return false;
    worst->whole = false;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (worst->kept[id]) q->kept_bytes -= q->n[id] * (int64_t)sizeof(double);
        free(worst->kept[id]);
        worst->kept[id] = NULL;
    }
    return true;
}

/* Keeps the tensors that the guess changes, while there is room. Pairs push nothing out: they are made of
 * what is kept. */
static void keepGuess(dkv_inquiry *q, dkv_guess *g, const dkv_prediction *p) {
    const bool pair = strcmp(g->family, "pair") == 0;
    const int64_t limit = pair ? KEEP_BYTES : KEEP_BYTES / 4 * 3;
    g->whole = true;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const int64_t bytes = q->n[id] * (int64_t)sizeof(double);
        const double *out = dkv_outputAt(&p->out, (dkv_tensor_id)id);
        if (!bytes || !(g->mask >> id & 1) || !memcmp(out, q->clean[id], (size_t)bytes)) continue;
        while (q->kept_bytes + bytes > limit && !pair && forgetOne(q, g)) continue;
        g->kept[id] = q->kept_bytes + bytes <= limit ? malloc((size_t)bytes) : NULL;
        if (!g->kept[id]) {
            g->whole = false;
            continue;
        }
        q->kept_bytes += bytes;
        memcpy(g->kept[id], out, (size_t)bytes);
    }
}

dkv_guess *dkv_addGuess(dkv_inquiry *q, const char *family, const char *name, const char *doc, int32_t mask,
                        const dkv_prediction *p) {
    if (q->n_guesses == q->room) {
        dkv_guess *more = realloc(q->guess, (size_t)(2 * q->room + 64) * sizeof *more);
        if (!more) return NULL;
        q->guess = more;
        q->room = 2 * q->room + 64;
    }
    dkv_guess *g = &q->guess[q->n_guesses++];
    double left = 0, fine = 0;
    memset(g, 0, sizeof *g);
    snprintf(g->family, sizeof g->family, "%s", family);
    snprintf(g->name, sizeof g->name, "%s", name);
    snprintf(g->doc, sizeof g->doc, "%s", doc);
    g->mask = mask;
    g->damage = p->damage;
    g->exact = true;
    g->order = q->n_made++;
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (q->n[id])
            scoreTensor(q, id, mask >> id & 1 ? dkv_outputAt(&p->out, (dkv_tensor_id)id) : q->clean[id], g);
    scoreMemory(q, g);
    g->hash = mix(mix(g->hash, (double)g->damage.outside), (double)g->damage.mutated);
    for (int id = 0; id < DKV_PARTS; id++) {
        left += g->left[id];
        if (id < DKV_N_OUTPUTS) fine += g->fine[id];
    }
    g->share = fmax(0, 1 - left / fmax(1, q->n_wrong));
    g->key = left / fmax(1, q->n_wrong) + FINE_WEIGHT * fine / fmax(1, q->n_wrong);
    keepGuess(q, g, p);
    return g;
}

void dkv_dropGuess(dkv_inquiry *q) {
    dkv_guess *g = &q->guess[--q->n_guesses];
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (g->kept[id]) q->kept_bytes -= q->n[id] * (int64_t)sizeof(double);
        free(g->kept[id]);
    }
}

bool dkv_sameGuess(const dkv_inquiry *q, const dkv_guess *a, const dkv_guess *b) {
    if (a->hash == b->hash) return true;
    if (!q->gross || !a->whole || !b->whole) return false;
    if (a->damage.outside != b->damage.outside || a->damage.mutated != b->damage.mutated) return false;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *got = q->n[id] ? dkv_outputAt(q->in->got, (dkv_tensor_id)id) : NULL;
        int64_t differ = 0;
        if (!a->kept[id] && !b->kept[id]) continue;
        for (int64_t i = 0; i < q->n[id]; i++) {
            const double d = apart(dkv_guessAt(q, a, id, i), dkv_guessAt(q, b, id, i));
            const double e = apart(got[i], q->clean[id][i]);
            differ += d > fmax(q->noise[id][i], isfinite(e) ? NEAR * e : 0);
        }
        if ((double)differ > ALIKE * (double)q->bad[id]) return false;
    }
    return true;
}
