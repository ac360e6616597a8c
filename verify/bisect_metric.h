/* bisect_metric.h: a number of a commit's runs, and the interval that the good end gives it.
 *
 * Seeds are fixed, so truth, twin and bound are the same for every commit, and a kernel that promises repeatable bits has
 * exactly the value that it had. A commit that changes nothing but how values happen to round has another, by chance. The
 * interval holds what chance explains, at the level of one comparison:
 *   rms    the root of a mean square of n degrees of freedom: up to the factor of dkv_chanceGrowth (gate.h) either way;
 *   bound, bias, gain    the good end is run on further seeds: the prediction interval (Student's t) for one value more, of
 *          the logarithm for bound. Seeds change inputs as well as roundings: wider than need be, never narrower;
 *   seconds, forward, backward    the same from the good end's own runs.
 * A commit's value is the median of its runs. */
#ifndef DKV_BISECT_METRIC_H
#define DKV_BISECT_METRIC_H

#include "bisect_cache.h"

typedef enum dkv_metric_kind {
    DKV_M_RMS,   /* rms of the residual to the twin, in expected deviations */
    DKV_M_BOUND, /* largest error over its bound */
    DKV_M_BIAS,  /* mean of the residual, in expected deviations */
    DKV_M_GAIN,  /* slope of the error on the value */
    DKV_M_SECONDS,
    DKV_M_FORWARD,
    DKV_M_BACKWARD,
    DKV_M_N
} dkv_metric_kind;

typedef struct dkv_metric {
    dkv_metric_kind kind;
    int tensor; /* -1: any */
    char name[24];
} dkv_metric;

typedef struct dkv_interval {
    double at, low, high; /* the good end's value; what chance explains */
    double dof;
    int sample;           /* values that it is made from; 1: rms */
} dkv_interval;

/* "rms", "dQ.rms", "seconds", ... */
int dkv_parseMetric(const char *word, dkv_metric *m, dkv_err *err);
bool dkv_isTime(const dkv_metric *m);
bool dkv_isLogarithmic(const dkv_metric *m);
/* Of one row; NAN where it has none. `tensor`: of m, or which of any. */
double dkv_metricOf(const dkv_metric *m, int tensor, const dkv_bisect_row *row);
/* The middle one of n numbers, which it sorts; NAN where one of them is. */
double dkv_medianOf(double *x, int n);

/* `level`: probability that chance alone leaves it on one side. */
void dkv_rmsInterval(double rms, double dof, double level, dkv_interval *out);
void dkv_sampleInterval(const dkv_metric *m, double at, const double *x, int n, double level, dkv_interval *out);
/* How far from `at`, in units of the interval's half on that side (of logarithms where the metric is): beyond 1 it has left;
 * its sign is the side. Infinite numbers have left. */
double dkv_distanceFrom(const dkv_metric *m, const dkv_interval *v, double x);

/* Runs that find a commit bad which fails with probability p a run, so that `commits` of them are all found but with
 * probability `error`: the least n with commits (1-p)^n <= error. */
int dkv_runsNeeded(double p, double error, int commits);

#endif
