/* reference.h: three references for the truth, forward and backward (dLSE, dSink included).
 *
 *   naive    fp64, on replicated sequences, straight from the definition; shares nothing with kernels: walks the
 *            problem tree by parent pointers and asks dkv_maskSees for each pair.
 *   quad     the same in __float128, for small cases: certifies the other two.
 *   blocked  fp64, packed, on OpenBLAS; memory O(tokens + tile); deterministic whatever the number of threads.
 *
 * Outputs are packed (dkv_outputs, allocated by the caller). Rows without keys: O = 0, LSE = -inf (or the sink logit),
 * gradients 0. Non-finite inputs propagate as the formulas say (a masked key contributes nothing, not 0*NaN). */
#ifndef DKV_REFERENCE_H
#define DKV_REFERENCE_H

#include "tensors.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Deliberate mistakes in the blocked reference, one at a time, for the suite's self-test and for what a case has the power to
 * see (0: none). FIRST: a row does not see the first of its keys; AHEAD: it sees the one behind its own token, too (but for
 * the last row of a block). */
typedef enum dkv_mutant {
    DKV_MUTANT_NONE, DKV_MUTANT_MASK, DKV_MUTANT_SCALE, DKV_MUTANT_LSE, DKV_MUTANT_HEAD, DKV_MUTANT_DELTA,
    DKV_MUTANT_SIBLING, DKV_MUTANT_FIRST, DKV_MUTANT_AHEAD, DKV_MUTANT_N
} dkv_mutant;

#define DKV_MUTANT_SCALE_BY 0.01 /* DKV_MUTANT_SCALE: the softmax scale is so much too large */

typedef struct dkv_ref_options {
    int threads;       /* 0: as many as cores */
    dkv_mutant mutant;
    bool exact_products; /* as on a device. Bound: products of magnitudes in fp64; twin: no shortcut for 16 bits */
    bool lse_stands_in;  /* twin: kernel_lse is the truth, where the kernel used an LSE of fp32 that it does not give */
} dkv_ref_options;

int dkv_refNaive(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_outputs *out, dkv_err *err);
int dkv_refQuad(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_outputs *out, dkv_err *err);
int dkv_refBlocked(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dkv_ref_options *opt,
                   dkv_outputs *out, dkv_err *err);

/* What an fp64 evaluation of the definition may differ by from the truth, element by element (derivation: ref_gauge.c).
 * Errors of the elementary functions are relative; rescales: how often an online softmax rescales a row (0: never).
 * e NULL: the C library's functions, no rescaling. `bound` is allocated by the caller. */
typedef struct dkv_gauge_errors {
    double exp_error, log_error, tanh_error, rescales;
} dkv_gauge_errors;
int dkv_refGauge(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dkv_gauge_errors *e,
                 dkv_outputs *bound, dkv_err *err);

/* Forward and backward alone, for timing. Backward reads out->o and out->lse as forward left them. */
int dkv_refBlockedForward(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                          const dkv_ref_options *opt, dkv_outputs *out, dkv_err *err);
int dkv_refBlockedBackward(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                           const dkv_ref_options *opt, dkv_outputs *out, dkv_err *err);

/* Bytes that dkv_refBlocked allocates beside inputs and outputs. */
int64_t dkv_refBlockedBytes(const dkv_layout *l, const dkv_ref_options *opt);

/* GFLOP/s (median) of 2048^3 dgemm on this machine, now, for about so many seconds; 0 if out of memory. threads <= 0:
 * OpenBLAS's own number. */
double dkv_dgemmRate(int threads, double seconds);

#ifdef __cplusplus
}
#endif
#endif
