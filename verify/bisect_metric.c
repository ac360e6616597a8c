#include "bisect_metric.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"

static const char *const names[DKV_M_N] = {"rms", "bound", "bias", "gain", "seconds", "forward", "backward"};

enum { RUNS_MOST = 10000 };

int dkv_parseMetric(const char *word, dkv_metric *m, dkv_err *err) {
    const char *dot = strchr(word, '.'), *kind = dot ? dot + 1 : word;
    memset(m, 0, sizeof *m);
    m->tensor = -1;
    while (m->kind < DKV_M_N && strcmp(names[m->kind], kind)) m->kind++;
    if (m->kind == DKV_M_N)
        return dkv_fail(err, DKV_EUSER, "--metric: '%.40s' is none of rms, bound, bias, gain (or TENSOR.rms, …), seconds, forward, "
                                        "backward", word);
    for (int id = 0; dot && id < DKV_N_OUTPUTS; id++) {
        const char *name = dkv_tensorName((dkv_tensor_id)id);
        if (strlen(name) == (size_t)(dot - word) && strncmp(name, word, (size_t)(dot - word)) == 0) m->tensor = id;
    }
    if (dot && (m->tensor < 0 || dkv_isTime(m)))
        return dkv_fail(err, DKV_EUSER, "--metric: '%.40s': %s", word,
                        dkv_isTime(m) ? "times are of the whole kernel" : "no tensor of that name (O, LSE, dQ, dK, dV, dSink)");
    snprintf(m->name, sizeof m->name, "%s", word);
    return 0;
}

bool dkv_isTime(const dkv_metric *m) { return m->kind >= DKV_M_SECONDS; }
bool dkv_isLogarithmic(const dkv_metric *m) { return m->kind != DKV_M_BIAS && m->kind != DKV_M_GAIN; }

double dkv_metricOf(const dkv_metric *m, int tensor, const dkv_bisect_row *row) {
    if (!row->judged) return NAN;
    if (m->kind == DKV_M_SECONDS) return row->forward + row->backward;
    if (m->kind == DKV_M_FORWARD) return row->forward;
    if (m->kind == DKV_M_BACKWARD) return row->backward;
    if (tensor < 0) return NAN;
    const dkv_bisect_stat *s = &row->tensor[tensor];
    if (!s->there) return NAN;
    if (m->kind == DKV_M_BOUND) return isnan(s->ratio) ? INFINITY : s->ratio;
    if (isinf(s->ratio)) return INFINITY; /* NaN where a number is right: no statistic says how far */
    if (!s->twin) return NAN;
    return m->kind == DKV_M_RMS ? s->rms : m->kind == DKV_M_BIAS ? s->mean : s->gain;
}

static int byValue(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double dkv_medianOf(double *x, int n) {
    for (int i = 0; i < n; i++)
        if (isnan(x[i])) return NAN;
    if (n < 1) return NAN;
    qsort(x, (size_t)n, sizeof *x, byValue);
    return n % 2 || x[n / 2 - 1] == x[n / 2] ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

void dkv_rmsInterval(double rms, double dof, double level, dkv_interval *out) {
    const double chance = dkv_chanceGrowth(dof, level);
    *out = (dkv_interval){.at = rms, .low = rms / chance, .high = rms * chance, .dof = dof, .sample = 1};
}

/* The quantile of Student's t of n degrees that is exceeded with probability `level` (dkv_chanceGrowth, turned round). */
static double studentQuantile(double n, double level) {
    double growth = dkv_chanceGrowth(n, level);
    return isfinite(growth) ? sqrt(n) * sinh(log(growth)) : INFINITY;
}

void dkv_sampleInterval(const dkv_metric *m, double at, const double *x, int n, double level, dkv_interval *out) {
    const bool logs = dkv_isLogarithmic(m);
    const double first = n < 1 ? 0 : logs ? log(x[0]) : x[0]; /* from here: equal values have no spread at all */
    double mean = first, square = 0;
    for (int i = 0; i < n; i++) mean += ((logs ? log(x[i]) : x[i]) - first) / n;
    for (int i = 0; i < n; i++) {
        double d = (logs ? log(x[i]) : x[i]) - mean;
        square += d * d / (n > 1 ? n - 1 : 1);
    }
    double half = n > 1 ? studentQuantile(n - 1, level) * sqrt(square * (1 + 1.0 / n)) : INFINITY;
    *out = (dkv_interval){.at = at, .dof = n - 1, .sample = n};
    out->low = logs ? exp(mean - half) : mean - half;
    out->high = logs ? exp(mean + half) : mean + half;
    out->low = fmin(out->low, at); /* what the good end has is accepted */
    out->high = fmax(out->high, at);
}

double dkv_distanceFrom(const dkv_metric *m, const dkv_interval *v, double x) {
    if (isnan(x)) return NAN;
    const double side = x < v->at ? -1 : 1, limit = side < 0 ? v->low : v->high;
    if (isinf(x)) return side * INFINITY;
    if (x == v->at) return 0;
    if (!isfinite(limit)) return 0;
    double far = x - v->at, half = limit - v->at;
    if (dkv_isLogarithmic(m) && x > 0 && v->at > 0 && limit > 0) {
        far = log(x / v->at);
        half = log(limit / v->at);
    }
    if (half == 0) return side * INFINITY;
    return side * fabs(far / half);
}

int dkv_runsNeeded(double p, double error, int commits) {
    double n = p < 1 ? ceil(log(error / (commits > 0 ? commits : 1)) / log1p(-p)) : 1;
    return n < 1 ? 1 : n > RUNS_MOST ? RUNS_MOST : (int)n;
}
