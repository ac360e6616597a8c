#include "perf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../ref/clock.h"
#include "side.h"

enum { ROUNDS_MOST = 400 };
#define CLOCK 1e-9 /* seconds: below what any clock here tells apart */

int dkv_leastRounds(double level) {
    int n = 1;
    while (n < ROUNDS_MOST && ldexp(1, -n) > level) n++;
    return n;
}

void dkv_rankInterval(const double *sorted, int n, double level, double *low, double *high) {
    double heads = ldexp(1, -n), sum = heads; /* P(0 heads), P(at most k heads) */
    int k = 0;
    *low = 0;
    *high = INFINITY;
    if (n < 1 || sum > level) return;
    while (k + 1 < (n + 1) / 2) {
        heads *= (double)(n - k) / (k + 1);
        if (sum + heads > level) break;
        sum += heads;
        k++;
    }
    *low = sorted[k];
    *high = sorted[n - 1 - k];
}

static int byValue(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double dkv_median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, byValue);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

typedef struct contest {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    dkv_worker w[2];
    dkv_side side[2];
    bool open[2], device[2]; /* device: it times itself there, on inputs of the line, warmed up: a median of several runs */
    double time[2][2][ROUNDS_MOST]; /* kernel, direction, round */
    int rounds;
} contest;

static int openSides(contest *c, const char *line, const dkv_kernel_spec *const kernel[2], double timeout,
                     const char *data_dir, dkv_err *err) {
    int rc = dkv_parseProblem(line, dkv_knownFill, &c->p, err);
    if (!rc) rc = dkv_makeLayout(&c->p, &c->l, err);
    if (!rc) rc = dkv_allocInputs(&c->l, &c->in, err);
    if (!rc) rc = dkv_fillInputs(&c->p, &c->l, data_dir, &c->in, err);
    for (int k = 0; k < 2 && !rc; k++) {
        dkv_initWorker(&c->w[k], kernel[k], timeout);
        dkv_outcome o = dkv_startWorker(&c->w[k]);
        c->device[k] = c->w[k].memory == DUALKV_CUDA;
        if (o == DKV_W_OK && c->device[k]) o = dkv_describeCase(&c->w[k], line, &c->side[k].d);
        else if (o == DKV_W_OK) {
            o = dkv_openSide(&c->side[k], &c->w[k], &c->p, line, &c->l, &c->in);
            c->open[k] = true;
        }
        if (o != DKV_W_OK) rc = dkv_fail(err, DKV_EHARNESS, "%.100s: %.380s", kernel[k]->text, c->w[k].why);
        else if (c->side[k].d.refused)
            rc = dkv_fail(err, DKV_EREFUSED, "%.100s refuses it: %.380s", kernel[k]->text, c->side[k].d.reason);
        else if (c->p.grad && !c->side[k].d.has_backward)
            rc = dkv_fail(err, DKV_EREFUSED, "%.100s has no backward (grad=off times its forward)", kernel[k]->text);
    }
    return rc;
}

static int runOnce(contest *c, int k, bool counted, dkv_err *err) {
    dkv_run run = {0};
    int64_t bytes;
    dkv_outcome o = c->device[k] ? dkv_timeCase(&c->w[k], run.seconds, &bytes) : dkv_runSide(&c->side[k], 0, &run);
    for (int d = 0; d < 2 && o == DKV_W_OK && counted; d++) c->time[k][d][c->rounds] = run.seconds[d];
    if (!c->device[k]) dkv_freeRun(&run);
    return o == DKV_W_OK ? 0 : dkv_fail(err, DKV_EHARNESS, "%.100s: %.380s", c->w[k].spec.text, c->w[k].why);
}

static void evaluate(contest *c, double level, dkv_perf *out) {
    double ratio[ROUNDS_MOST];
    out->rounds = c->rounds;
    out->backward = c->p.grad;
    out->gpu = c->w[0].gpu;
    for (int d = 0; d < (c->p.grad ? 2 : 1); d++) {
        for (int i = 0; i < c->rounds; i++) ratio[i] = fmax(c->time[0][d][i], CLOCK) / fmax(c->time[1][d][i], CLOCK);
        out->ratio[d] = dkv_median(ratio, c->rounds);
        dkv_rankInterval(ratio, c->rounds, level, &out->low[d], &out->high[d]);
        for (int k = 0; k < 2; k++) out->seconds[k][d] = dkv_median(c->time[k][d], c->rounds);
    }
}

int dkv_compareSpeed(const char *line, const dkv_kernel_spec *const kernel[2], double timeout, double level, double seconds,
                     const char *data_dir, dkv_perf *out, dkv_err *err) {
    contest *c = calloc(1, sizeof *c);
    int least = dkv_leastRounds(level);
    *out = (dkv_perf){0};
    if (!c) return dkv_fail(err, DKV_EHARNESS, "out of memory for timing");
    int rc = openSides(c, line, kernel, timeout, data_dir, err);
    double start = dkv_now();
    for (int round = -1; !rc && round < ROUNDS_MOST && (round < least || dkv_now() - start < seconds); round++) {
        int first = round & 1;
        rc = runOnce(c, first, round >= 0, err);
        if (!rc) rc = runOnce(c, !first, round >= 0, err);
        if (!rc && round >= 0) c->rounds++;
    }
    if (!rc) evaluate(c, level, out);
    for (int k = 0; k < 2; k++) {
        if (c->open[k]) dkv_closeSide(&c->side[k]);
        if (c->w[k].timeout > 0) dkv_stopWorker(&c->w[k]);
    }
    dkv_freeInputs(&c->in);
    dkv_freeLayout(&c->l);
    dkv_freeProblem(&c->p);
    free(c);
    return rc;
}
