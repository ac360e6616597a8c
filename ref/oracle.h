/* oracle.h: what a kernel of the declared arithmetic may differ by. Derivation: ref/TOLERANCE.md.
 *
 *   bound    for each element of O, LSE, dQ, dK, dV, dSink: no kernel of that arithmetic can be further from the truth
 *            (plus the oracle's own error at 2^-53).
 *   twin     fp64 arithmetic with the declared rounding points: what such a kernel should print, before the output's
 *            own rounding; sigma2: the variance of (got - twin) that is left to explain (output rounding included).
 *            Forward over the declared key tiles (has_twin false for O where the key tile is undeclared), backward
 *            conditioned on the kernel's own O and LSE, so that a forward fault is not reported again in dQ.
 *
 * All arrays are packed and contiguous, shaped like dkv_outputs. */
#ifndef DKV_ORACLE_H
#define DKV_ORACLE_H

#include "reference.h"
#include "tensors.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of what truth, bound and twin say: counted up by whoever makes them say something else. What was accepted under another
 * version is not compared (verify/gate.h). */
#define DKV_ORACLE_VERSION "6"

/* Rows whose errors are the same number (twin_top.c): rows that tell anything; the sum over them of how many share their
 * LSE's error; of how many lean on the same capped score. 0: not counted. */
typedef struct dkv_alike {
    int64_t rows, lse, capped;
} dkv_alike;
/* How many errors are independent, of those counted in `times`: alike.lse or alike.capped, not 0. */
static inline double dkv_independent(const dkv_alike *a, int64_t times) {
    return (double)a->rows * (double)a->rows / (double)times;
}

typedef struct dkv_oracle {
    dkv_outputs truth, bound, twin, sigma2;
    bool has_twin[DKV_N_OUTPUTS];
    dkv_alike alike;
} dkv_oracle;

int dkv_allocOracle(const dkv_layout *l, dkv_oracle *o, dkv_err *err);
void dkv_freeOracle(dkv_oracle *o);

/* Truth (the same bits as dkv_refBlocked's) and bound: needs no kernel outputs. Where the truth is not finite the
 * bound is NaN or infinity. It is DKV_UNCLAIMED where nothing is claimed though the truth be finite: an input of the element's own branch is not finite
 * and a masked pair may carry it (0 times NaN; bound_exempt.c). Infinite beside a finite truth: an error of e^700 is
 * possible. */
#define DKV_UNCLAIMED (-1.0)
int dkv_oracleBound(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dualkv_arithmetic *a,
                    const dkv_ref_options *opt, dkv_oracle *out, dkv_err *err);
/* Twin and sigma2, given what the kernel left in O [tq,hq,dv] and LSE [hq,tq] (as doubles; may be NULL where
 * grad=off). Call after dkv_oracleBound on the same oracle. */
int dkv_oracleTwin(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dualkv_arithmetic *a,
                   const dkv_ref_options *opt, const double *kernel_o, const double *kernel_lse, dkv_oracle *out,
                   dkv_err *err);

/* Both, in one traversal where the arithmetic allows; the same bits. kernel_o and kernel_lse are not out's own. */
int dkv_oracleAll(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dualkv_arithmetic *a,
                  const dkv_ref_options *opt, const double *kernel_o, const double *kernel_lse, dkv_oracle *out,
                  dkv_err *err);

/* Named arithmetic profiles, tightest first, for kernels that declare nothing: fills *a for this problem.
 * Index past the end: returns NULL. */
const char *dkv_arithmeticProfile(int i, const dkv_problem *p, dualkv_arithmetic *a, const char **words);
/* Adds to *a running sums rounded as PyTorch's flash attention on a CPU rounds them: dK and dV after 32 query rows (64 in
 * sequences of 192 and more, 256 in those of 768), dQ after 512 keys. */
void dkv_roundRunning(dualkv_arithmetic *a);
/* One line in words: "fp32 accumulation (to nearest, 1 product a step), P and dS rounded to bf16, key tile 64". */
void dkv_describeArithmetic(const dualkv_arithmetic *a, char *out, size_t n);
/* DKV_OK or DKV_EUSER: are the declared values in range (formats known, roundoffs in (0, 2^-7], ...)? */
int dkv_checkArithmetic(const dualkv_arithmetic *a, dkv_err *err);

/* Largest error of a chain, relative to the sum of the magnitudes that it adds (a closed gamma, not an expectation):
 * of n products, or of `steps` steps with an accumulator folded every `fold` steps (0: never) and at the ends of
 * `pieces` pieces. */
double dkv_chainError(const dualkv_arithmetic *a, double n_products);
double dkv_stepsError(const dualkv_arithmetic *a, double steps, double pieces, int64_t fold);

#ifdef __cplusplus
}
#endif
#endif
