/* judge.h: one tensor of one case against the oracle: finiteness, bound, twin. Pure: no I/O, no processes.
 *
 * Order (design.md section 6): 1. finiteness, `!(err <= bound)` so that NaN fails, Inf right only where the truth
 * overflows the type (or is itself that Inf/NaN); 2. max err/bound <= 1; 3. residual to the twin: rms z above its
 * limit is IMPRECISE, slope or mean beyond what the declared accumulation explains is BIASED; upper limits only. */
#ifndef DKV_JUDGE_H
#define DKV_JUDGE_H

#include "../ref/oracle.h"

typedef struct dkv_where {
    int64_t group, segment, row, head, dim; /* row: within the segment; dim -1 for LSE, dSink */
    int64_t tile_edge;                      /* rows to the nearest multiple of the key tile (declared), -1 unknown */
    int region;                             /* 0 prompt, 1 response */
    double got, want, bound;
} dkv_where;

typedef struct dkv_part { /* one tensor, or one region of it */
    int64_t total, bad;   /* elements; elements outside the bound (non-finite included) */
    int64_t nonfinite;    /* elements that are NaN or Inf where the truth is not, nor may round to it */
    double truth_gain;    /* slope of (got - truth) on the truth: 1e-3 where all is 0.1 % too large; never judged */
    double max_ratio;     /* max err/bound; INFINITY where non-finite; 0 where total is 0 */
    double rms_z, mean_z, gain; /* residual to the twin; gain: slope of (got - rounded twin) on the twin */
    double rms_limit, mean_limit, gain_limit; /* upper limits at the given level; INFINITY: not tested */
    double dof;           /* independent rows */
    double rms_dof;       /* degrees of freedom of rms_z: 2 mean^2 over the variance of the mean square of a row, at most one a row */
} dkv_part;

typedef struct dkv_judgement {
    bool present, twin;
    dkv_part all, region[2];
    dkv_where worst;      /* of max_ratio; valid if total > 0 */
    bool failed, imprecise, biased;
} dkv_judgement;

/* got: the kernel's tensor as doubles, packed and contiguous. level: false-alarm probability of this one test. */
int dkv_judgeTensor(const dkv_layout *l, const dualkv_arithmetic *a, const dkv_oracle *o,
                    dkv_tensor_id id, const double *got, double level, dkv_judgement *out, dkv_err *err);

/* The sentence that says what is wrong and where, in words ("" where nothing is). */
void dkv_explainJudgement(const dualkv_arithmetic *a, dkv_tensor_id id,
                          const dkv_judgement *j, char *out, size_t n);
#endif
