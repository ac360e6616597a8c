#include "bisect.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"

enum {
    RUNS = 3,        /* of each commit, unless told otherwise */
    TIMED_RUNS = 8,  /* of each where times are compared */
    SEEDS = 12,      /* further ones, of the good end */
    FIRST_SEED = 900001
};

static const dkv_tested *lastTested(const dkv_bisection *h) { return &h->list[h->n - 1]; }

const dkv_tested *dkv_findTested(const dkv_bisection *h, const char *id) {
    for (long i = 0; i < h->n; i++)
        if (strcmp(h->list[i].info.id, id) == 0) return &h->list[i];
    return NULL;
}

void dkv_freeBisection(dkv_bisection *h) {
    for (long i = 0; i < h->n; i++) dkv_freeTrial(&h->list[i].trial);
    free(h->list);
    free(h->end.possible);
    h->list = NULL;
    h->end.possible = NULL;
    h->n = h->room = 0;
}

/* ---- values ---- */

/* Of one case, the middle of its runs; without a metric the largest error over its bound. */
static double valueOf(const dkv_trial *t, const dkv_metric *m, int tensor, long line) {
    double *x = malloc(sizeof *x * (size_t)t->runs), value;
    int n = 0;
    for (int run = 0; x && run < t->runs; run++) {
        if (!t->there[run * t->n_lines + line]) continue;
        x[n++] = dkv_metricOf(m, tensor, &t->rows[run * t->n_lines + line]);
    }
    value = dkv_medianOf(x, x ? n : 0);
    free(x);
    return value;
}

static double plainValue(const dkv_trial *t) {
    const dkv_metric bound = {.kind = DKV_M_BOUND};
    double most = NAN;
    for (long i = 0; i < (long)t->runs * t->n_lines; i++)
        for (int id = 0; id < DKV_N_OUTPUTS && t->there[i]; id++) {
            double x = dkv_metricOf(&bound, id, &t->rows[i]);
            if (!isnan(x) && !(x <= most)) most = x;
        }
    return most;
}

/* The verdict of a metric. */
static void measure(const dkv_bisection *h, dkv_tested *t) {
    dkv_trial *trial = &t->trial;
    if (trial->build != DKV_BUILD_OK) return;
    t->value = valueOf(trial, h->metric, h->tensor, h->line);
    double far = dkv_distanceFrom(h->metric, &h->interval, t->value);
    trial->why[0] = 0;
    trial->verdict = isnan(far) ? DKV_BV_SKIP : far * h->side > 1 ? DKV_BV_BAD : DKV_BV_GOOD;
    if (isnan(far)) {
        const dkv_bisect_row *row = &trial->rows[h->line];
        snprintf(trial->why, sizeof trial->why, "no %s: %s%s%.400s", h->metric->name, dkv_statusRow(row->status)->name,
                 row->why[0] ? ": " : "", row->why);
    }
}

/* ---- testing ---- */

static int addTested(dkv_bisection *h, const char *id, bool sure, dkv_err *err) {
    if (h->n == h->room) {
        long room = h->room * 2 + 16;
        void *more = realloc(h->list, (size_t)room * sizeof *h->list);
        if (!more) return dkv_fail(err, DKV_EHARNESS, "out of memory for commits");
        h->list = more;
        h->room = room;
    }
    dkv_tested *t = &h->list[h->n];
    memset(t, 0, sizeof *t);
    t->value = NAN;
    int rc = dkv_describeCommit(h->repo, id, h->ends[0], &t->info, err);
    if (!rc) rc = dkv_tryCommit(h->trying, id, sure, &t->trial, err);
    if (rc) return rc;
    h->n++;
    if (!h->metric) t->value = plainValue(&t->trial);
    else if (h->side) measure(h, t);
    return 0;
}

static void tell(const dkv_bisection *h) {
    if (h->tested) h->tested(h, lastTested(h));
}

static const char *endWord(const dkv_bisection *h, int end) { return end ? h->bad : h->good; }

static const dkv_bisect_row *findInconclusive(const dkv_trial *t) {
    for (long i = 0; i < t->runs * t->n_lines; i++)
        if (t->rows[i].status == DKV_ST_INCONCLUSIVE) return &t->rows[i];
    return NULL;
}

static int refuseEnd(const dkv_bisection *h, int end, const dkv_trial *t, dkv_err *err) {
    const char *name = end ? "bad" : "good";
    if (t->build != DKV_BUILD_OK)
        return dkv_fail(err, DKV_EHARNESS, "the %s end %.60s (%.12s) cannot be tested: %.300s", name, endWord(h, end), t->id,
                        t->why[0] ? t->why : dkv_buildName(t->build));
    if (t->flaky)
        return dkv_fail(err, DKV_EHARNESS, "the %s end %.60s (%.12s) fails in %d of %d runs%s", name, endWord(h, end), t->id,
                        t->failed, t->made,
                        end ? ": with --flaky P (how often, at the least) as many runs are made as that needs"
                            : ", so it is not good");
    if (t->verdict == DKV_BV_SKIP)
        return dkv_fail(err, DKV_EHARNESS, "the %s end %.60s (%.12s) says nothing: %.300s", name, endWord(h, end), t->id, t->why);
    if (!end) return dkv_fail(err, DKV_EHARNESS, "the good end %.60s (%.12s) fails: %.250s", h->good, t->id, t->why);
    const dkv_bisect_row *weak = findInconclusive(t);
    return dkv_fail(err, DKV_EHARNESS, "the bad end %.60s (%.12s) fails no case (%s%.250s%s--metric NAME finds drifts)", h->bad,
                    t->id, weak ? "INCONCLUSIVE: " : "", weak ? weak->why : "", weak ? "; " : "");
}

static int testEnds(dkv_bisection *h, dkv_err *err) {
    for (int end = 0; end < 2; end++) {
        int rc = addTested(h, h->ends[end], true, err);
        if (rc) return rc;
        const dkv_trial *t = &lastTested(h)->trial;
        tell(h);
        if (t->verdict != (end ? DKV_BV_BAD : DKV_BV_GOOD)) return refuseEnd(h, end, t, err);
    }
    return 0;
}

/* ---- a metric's ends ---- */

/* Kernels that declare nothing are judged by what fits best, which may be another arithmetic for each commit: all are held to
 * the good end's. */
static bool holdArithmetic(dkv_bisection *h, const dkv_trial *good) {
    bool any = false;
    for (long i = 0; i < good->n_lines; i++) {
        const dkv_bisect_row *row = &good->rows[i];
        dkv_problem p = {0};
        if (!row->judged || row->declared || dkv_parseProblem(row->line, NULL, &p, NULL)) continue;
        dkv_fit *fit = &h->held.of[p.dtype];
        dkv_freeProblem(&p);
        if (fit->known) continue;
        fit->known = fit->held = any = true;
        fit->a = row->arithmetic;
        snprintf(fit->words, sizeof fit->words, "%s", row->profile[0] ? row->profile : "the loosest that is known");
    }
    return any;
}

/* The good end's line with another seed. */
static int reseed(const char *line, uint64_t seed, char out[DKV_LINE_MAX + 1], dkv_err *err) {
    dkv_problem p = {0};
    int rc = dkv_parseProblem(line, dkv_knownFill, &p, err);
    p.seed = seed;
    if (!rc) rc = dkv_printProblem(&p, out, DKV_LINE_MAX + 1, err);
    dkv_freeProblem(&p);
    return rc;
}

/* Runs of the good end on further seeds of one line; x[tensor][SEEDS]. */
static int trySeeds(dkv_bisection *h, long line, dkv_trial *out, dkv_err *err) {
    dkv_trying t = *h->trying;
    char *lines[SEEDS] = {0};
    int rc = 0;
    for (int i = 0; i < SEEDS && !rc; i++) {
        lines[i] = malloc(DKV_LINE_MAX + 1);
        rc = lines[i] ? reseed(h->trying->lines[line], (uint64_t)(FIRST_SEED + i), lines[i], err)
                      : dkv_fail(err, DKV_EHARNESS, "out of memory");
    }
    t.lines = lines;
    t.n_lines = SEEDS;
    t.runs = 1;
    if (!rc) rc = dkv_tryCommit(&t, h->ends[0], true, out, err);
    h->trying->builds = t.builds;
    h->trying->reused = t.reused;
    h->trying->told_changes = t.told_changes;
    memcpy(h->trying->standing, t.standing, sizeof t.standing);
    for (int i = 0; i < SEEDS; i++) free(lines[i]);
    return rc;
}

static void intervalFor(const dkv_bisection *h, const dkv_trial *good, const dkv_trial *seeds, int tensor, long line, double level,
                        dkv_interval *out) {
    double *x = malloc(sizeof *x * (size_t)(good->runs + SEEDS)), at = valueOf(good, h->metric, tensor, line);
    int n = 0;
    *out = (dkv_interval){.at = NAN};
    if (h->metric->kind == DKV_M_RMS && tensor >= 0) {
        dkv_rmsInterval(at, good->rows[line].tensor[tensor].dof, level, out);
    } else if (x) {
        const dkv_trial *from = seeds ? seeds : good;
        for (long i = 0; i < (seeds ? SEEDS : good->runs); i++) {
            double y = dkv_metricOf(h->metric, tensor, &from->rows[seeds ? i : i * good->n_lines + line]);
            if (!isnan(y)) x[n++] = y;
        }
        dkv_sampleInterval(h->metric, at, x, n, level, out);
    }
    free(x);
}

/* Of all cases and tensors that the metric may mean: the one by which the ends differ most. */
static int choose(dkv_bisection *h, const dkv_trial *good, const dkv_trial *bad, dkv_err *err) {
    const dkv_metric *m = h->metric;
    const bool timed = dkv_isTime(m), seeded = !timed && m->kind != DKV_M_RMS;
    const double level = h->error / (2.0 * h->steps * (double)good->n_lines * (m->tensor < 0 && !timed ? DKV_N_OUTPUTS : 1));
    double most = 0, value = NAN;
    int rc = 0;
    h->tensor = -1;
    for (long line = 0; line < good->n_lines && !rc; line++) {
        dkv_trial seeds = {0};
        if (seeded) rc = trySeeds(h, line, &seeds, err);
        for (int id = timed ? -1 : 0; id < (timed ? 0 : DKV_N_OUTPUTS) && !rc; id++) {
            dkv_interval v;
            if (m->tensor >= 0 && id != m->tensor) continue;
            intervalFor(h, good, seeded ? &seeds : NULL, id, line, level, &v);
            double x = valueOf(bad, m, id, line), far = dkv_distanceFrom(m, &v, x);
            if (isnan(v.at) || isnan(far) || (!isnan(h->interval.at) && !(fabs(far) > most))) continue;
            most = fabs(far);
            value = x;
            h->interval = v;
            h->tensor = id;
            h->line = line;
            h->side = far < 0 ? -1 : 1;
        }
        dkv_freeTrial(&seeds);
    }
    if (rc) return rc;
    if (isnan(h->interval.at))
        return dkv_fail(err, DKV_EHARNESS, "the ends have no %s: %s at the good one, %s at the bad one", m->name,
                        dkv_statusRow(good->rows[0].status)->name, dkv_statusRow(bad->rows[0].status)->name);
    if (most > 1) return 0;
    h->side = 0;
    return dkv_fail(err, DKV_EHARNESS, "%s%s%s does not tell the ends apart: %.6g at the good one, %.6g at the bad one, and chance "
                                       "explains %.6g to %.6g",
                    h->tensor >= 0 && m->tensor < 0 ? dkv_tensorName((dkv_tensor_id)h->tensor) : "",
                    h->tensor >= 0 && m->tensor < 0 ? "." : "", m->name, h->interval.at, value, h->interval.low, h->interval.high);
}

static int needBuilt(const dkv_bisection *h, int end, dkv_err *err) {
    const dkv_trial *t = &h->list[end].trial;
    return t->build == DKV_BUILD_OK ? 0 : refuseEnd(h, end, t, err);
}

static int measureEnds(dkv_bisection *h, dkv_err *err) {
    h->interval.at = NAN;
    int rc = addTested(h, h->ends[0], true, err);
    if (!rc) rc = needBuilt(h, 0, err);
    if (!rc && holdArithmetic(h, &h->list[0].trial)) {
        const bool built = h->list[0].trial.built;
        const double seconds = h->list[0].trial.seconds;
        h->trying->held = &h->held;
        dkv_freeTrial(&h->list[0].trial);
        h->n = 0;
        rc = addTested(h, h->ends[0], true, err);
        if (!rc && built) h->list[0].trial.built = true;
        if (!rc && built) h->list[0].trial.seconds = seconds;
    }
    const bool seeded = !dkv_isTime(h->metric) && h->metric->kind != DKV_M_RMS;
    for (long line = 0; line < h->trying->n_lines && seeded && !rc; line++) { /* while it is built */
        dkv_trial seeds = {0};
        rc = trySeeds(h, line, &seeds, err);
        dkv_freeTrial(&seeds);
    }
    if (!rc) rc = addTested(h, h->ends[1], true, err);
    if (!rc) rc = needBuilt(h, 1, err);
    if (!rc) rc = choose(h, &h->list[0].trial, &h->list[1].trial, err);
    for (int end = 0; end < 2 && !rc; end++) {
        measure(h, &h->list[end]);
        if (h->tested) h->tested(h, &h->list[end]);
    }
    return rc;
}

/* ---- the search ---- */

static int search(dkv_bisection *h, dkv_err *err) {
    static const char *const words[] = {"good", "bad", "skip"};
    char id[DKV_HASH_MAX];
    int rc = dkv_startBisect(h->repo, h->ends[0], h->ends[1], h->paths, err);
    while (!rc) {
        free(h->end.possible);
        rc = dkv_nextCommit(h->repo, h->paths, id, &h->end, err);
        if (rc || h->end.found || h->end.stuck) break;
        if (dkv_findTested(h, id)) return dkv_fail(err, DKV_EHARNESS, "git bisect asks for %.12s again", id);
        rc = addTested(h, id, false, err);
        if (rc) break;
        tell(h);
        rc = dkv_markCommit(h->repo, words[lastTested(h)->trial.verdict], id, err);
    }
    return rc;
}

static void countRuns(dkv_bisection *h) {
    h->steps = 2;
    for (long left = h->between; left > 1; left /= 2) h->steps++;
    h->trying->any = h->flaky > 0;
    h->trying->all_runs = h->metric != NULL;
    int runs = h->runs ? h->runs : h->flaky > 0 ? dkv_runsNeeded(h->flaky, h->error, h->steps) : RUNS;
    if (h->metric && dkv_isTime(h->metric) && runs < TIMED_RUNS) runs = TIMED_RUNS;
    h->runs_made = h->trying->runs = runs;
}

int dkv_runBisection(dkv_bisection *h, dkv_err *err) {
    int rc = dkv_findCommit(h->repo, "--good", h->good, h->ends[0], err);
    if (!rc) rc = dkv_findCommit(h->repo, "--bad", h->bad, h->ends[1], err);
    if (!rc) rc = dkv_countBetween(h->repo, h->ends[0], h->ends[1], h->paths, &h->between, &h->linear, err);
    if (!rc) countRuns(h);
    if (!rc) rc = dkv_openTree(h->repo, h->ends[0], err);
    if (!rc && h->begun) h->begun(h);
    if (!rc && h->arithmetic) rc = dkv_fitCommit(h->trying, h->ends[0], h->arithmetic, &h->held, err);
    if (!rc && h->arithmetic) h->trying->held = &h->held;
    if (!rc && h->arithmetic && h->fitted) h->fitted(h);
    if (!rc) rc = h->metric ? measureEnds(h, err) : testEnds(h, err);
    if (!rc) rc = search(h, err);
    return rc;
}
