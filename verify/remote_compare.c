/* remote_compare.c: two evaluations of one oracle. In fp64 they may differ by what fp64 arithmetic may err: the bound
 * of that arithmetic, once for each. The bound is the same formulas over sums of magnitudes, good to far better than
 * 1e-6. The twin rounds where the kernel does, so that a last bit that differs may fall on the other side of a
 * rounding: a few elements may be off, and variances, which are sums over many roundings, hardly.
 *
 * Of arithmetic that is as fine as the oracle's own (a kernel in double precision) bound and twin speak of errors that
 * both evaluations have themselves: only the truths are compared. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "remote.h"

#define FINE 0x1p-40 /* unit roundoff from which on arithmetic is as fine as the oracle's */
#define BOUND_SHARE 1e-6
#define TWIN_SHARE  0.1  /* of sigma: an element whose twins differ by more is off */
#define TWIN_OFF    0.01 /* share of the elements that may be off */
#define SIGMA_OFF   0.05 /* share of all variances together by which they may be off */
#define FEWEST      200  /* elements: fewer have no shares */

static const dualkv_arithmetic exact = {.size = sizeof exact,
                                        .unit = 0x1p-53,
                                        .acc_unit = 0x1p-53,
                                        .acc_step = 1,
                                        .in_format = DUALKV_EXACT,
                                        .s_format = DUALKV_EXACT,
                                        .p_format = DUALKV_EXACT,
                                        .ds_format = DUALKV_EXACT,
                                        .out_format = DUALKV_EXACT,
                                        .partial_format = DUALKV_EXACT,
                                        .exp_error = 0x1p-51,
                                        .log_error = 0x1p-51,
                                        .tanh_error = 0x1p-50};

static bool same(double a, double b) { return (isnan(a) && isnan(b)) || a == b; }

static int disagree(const char *what, dkv_tensor_id id, int64_t i, double cpu, double device, double allowed,
                    dkv_err *err) {
    return dkv_fail(err, DKV_EHARNESS,
                    "the oracles disagree: %s of %s, element %" PRId64 ": %.17g on the CPU, %.17g on the device, %.3g "
                    "is allowed",
                    what, dkv_tensorName(id), i, cpu, device, allowed);
}

static int compareTensor(dkv_tensor_id id, int64_t n, const dkv_oracle *cpu, const dkv_oracle *device,
                         const double *allowed, bool coarse, dkv_err *err) {
    const double *x = dkv_outputAt(&cpu->truth, id), *y = dkv_outputAt(&device->truth, id);
    const double *bx = dkv_outputAt(&cpu->bound, id), *by = dkv_outputAt(&device->bound, id);
    for (int64_t i = 0; i < n; i++) {
        if (allowed[i] != DKV_UNCLAIMED && !same(x[i], y[i]) && !(fabs(x[i] - y[i]) <= 2 * allowed[i]))
            return disagree("truth", id, i, x[i], y[i], 2 * allowed[i], err);
        if (coarse && !same(bx[i], by[i]) && !(fabs(bx[i] - by[i]) <= BOUND_SHARE * fabs(bx[i]) && isfinite(bx[i])))
            return disagree("bound", id, i, bx[i], by[i], BOUND_SHARE * fabs(bx[i]), err);
    }
    return 0;
}

static int compareTwin(dkv_tensor_id id, int64_t n, const dkv_oracle *cpu, const dkv_oracle *device, dkv_err *err) {
    const double *x = dkv_outputAt(&cpu->twin, id), *y = dkv_outputAt(&device->twin, id);
    const double *sx = dkv_outputAt(&cpu->sigma2, id), *sy = dkv_outputAt(&device->sigma2, id);
    double off = 0, apart = 0, size = 0, used = 0;
    for (int64_t i = 0; i < n; i++) {
        const bool told = isfinite(x[i]) && isfinite(sx[i]);
        if (told != (isfinite(y[i]) && isfinite(sy[i]))) return disagree("twin", id, i, x[i], y[i], 0, err);
        if (!told) continue;
        used++;
        off += !(fabs(x[i] - y[i]) <= TWIN_SHARE * sqrt(sx[i]) || fabs(x[i] - y[i]) <= 1e-13 * fabs(x[i]));
        apart += fabs(sy[i] - sx[i]);
        size += sx[i];
    }
    if (used < FEWEST || (off <= TWIN_OFF * used && apart <= SIGMA_OFF * size)) return 0;
    return dkv_fail(err, DKV_EHARNESS,
                    "the oracles disagree: %.3g of the twins of %s differ by more than a tenth of sigma, sigma2 by %.3g of "
                    "itself",
                    off / used, dkv_tensorName(id), apart / size);
}

int dkv_compareOracles(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dualkv_arithmetic *a,
                       bool twin, int threads, const dkv_oracle *cpu, const dkv_oracle *device, dkv_err *err) {
    const dkv_ref_options opt = {.threads = threads};
    const bool coarse = a->unit > FINE;
    dkv_oracle allowed = {0};
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(l, n);
    int rc = dkv_allocOracle(l, &allowed, err);
    if (rc) return rc;
    rc = dkv_oracleBound(p, l, in, &exact, &opt, &allowed, err);
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++) {
        const dkv_tensor_id t = (dkv_tensor_id)id;
        if (n[id] > 0) rc = compareTensor(t, n[id], cpu, device, dkv_outputAt(&allowed.bound, t), coarse, err);
        if (rc || !twin || !coarse || n[id] == 0) continue;
        if (cpu->has_twin[id] != device->has_twin[id])
            rc = dkv_fail(err, DKV_EHARNESS, "the oracles disagree: only one of them has a twin of %s", dkv_tensorName(t));
        else if (id == DKV_LSE && memcmp(&cpu->alike, &device->alike, sizeof cpu->alike))
            rc = dkv_fail(err, DKV_EHARNESS,
                          "the oracles disagree: %" PRId64 " rows that err alike %" PRId64 " times in LSE and %" PRId64
                          " in scores, on the device %" PRId64 ", %" PRId64 " and %" PRId64,
                          cpu->alike.rows, cpu->alike.lse, cpu->alike.capped, device->alike.rows, device->alike.lse,
                          device->alike.capped);
        else if (cpu->has_twin[id]) rc = compareTwin(t, n[id], cpu, device, err);
    }
    dkv_freeOracle(&allowed);
    return rc;
}
