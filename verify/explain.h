/* explain.h: what is wrong with a kernel, by hypothesis. Each hypothesis says what the kernel would have
 * printed if it were true; it is scored by the share of the observed error that it explains.
 *
 *   families   fault       a planted fault of the emulated kernel (`dualkv list faults`), in the kernel's
 * arithmetic and tiles arithmetic  the emulated kernel, correct, with another rounding point (which operand,
 * which type) visible     a set of keys that the mask does not let through, in double precision score scale,
 * softcap, ALiBi, sink, base of the logarithm head        KV heads or query heads taken for others gradient
 * a term of the gradients left out, twice, with the other sign factor      a tensor times a number, fitted,
 * then named sum         gradients of keys: a response's or head's part left out or counted n times place
 * rows or dims moved, transposed, stale, poison, zero order       the results change from run to run, their
 * values do not pair        one of these in forward and another in backward; or two that add up unknown
 * nothing explains enough: the nearest follow, with their shares
 *
 * Stages are kept apart: forward (O, LSE) against the clean forward; backward (dQ, dK, dV, dSink) against the
 * clean backward of the kernel's *own* O and LSE.
 *
 * Share of one tensor. e = got - clean, r = got - hypothesis, n = what rounding may do to the element. Gross
 * errors (some tensor is beyond 3 bounds or not finite): n is the bound; elements with |e| > n are wrong and
 * count 1 each, of which min(1, r^2/e^2) is left where |r| > n; an element that was right and that the
 * hypothesis puts wrong counts 1 against it. So neither a few large elements nor many good ones decide. Fine
 * errors: n is the twin's sigma, and element counts e^2/(e^2 + n^2), of which r^2/(max(e^2, r^2) + n^2) is
 * left: what lies inside the noise counts little, and a share is limited by it. A case's share: the mean over
 * the tensors that are wrong.
 *
 * A cause is claimed where its share is at least DKV_EXPLAIN_CLAIM, no hypothesis of another class leaves
 * less than DKV_EXPLAIN_MARGIN times as much unexplained, and the wrong elements carry enough information to
 * tell so many hypotheses apart. Otherwise the first hypothesis is `unknown`. */
#ifndef DKV_EXPLAIN_H
#define DKV_EXPLAIN_H

#include "../ref/oracle.h"
#include "buffers.h"

#define DKV_EXPLAIN_CLAIM 0.90
#define DKV_EXPLAIN_MARGIN 3.0
#define DKV_CLASS_MAX 48 /* members of an equivalence class that are named */

typedef enum dkv_explain_stage { DKV_FORWARD_ONLY = 1, DKV_BACKWARD_ONLY = 2 } dkv_explain_stage; /* bits */

typedef struct dkv_hypothesis {
    char family[16];                    /* as above */
    char name[96];                      /* "X12", "scale", "X12 then F1": a key; unique among the results */
    char sentence[400];                 /* "delta is left out (1.000 of the error of dQ and dK)" */
    double share;                       /* 0..1 of the observed error, all wrong tensors */
    double tensor_share[DKV_N_OUTPUTS]; /* NAN: that tensor is not wrong */
    int32_t stage;                      /* dkv_explain_stage that it is about */
    int32_t parameters;                 /* numbers that were fitted */
    bool exact;                         /* every output's bits are as predicted */
    bool claimed;                       /* only of out[0] */
    double value[4];                    /* what was fitted */
    char evidence[1100];                /* further facts: probes, coverage, in words; "" if none */
    int32_t n_members; /* hypotheses whose outputs cannot be told apart on this line, itself included */
    char members[DKV_CLASS_MAX][64];
} dkv_hypothesis;

typedef struct dkv_explain_in {
    const dkv_problem *p;
    const dkv_layout *l; /* packed */
    const dkv_inputs *in;
    const dualkv_arithmetic *a; /* the kernel's, or the profile that fits */
    const char *emu; /* options of the emulated kernel nearest to it ("bm=32,bn=32"), or NULL: from `a` */
    bool replicated; /* the kernel takes the replicated layout */
    const dkv_oracle *oracle;  /* truth and bound; twin and sigma2 where has_twin */
    const dkv_outputs *got;    /* packed; NULL tensors are not given */
    const dkv_outputs *again;  /* of a second run on the same inputs, or NULL */
    const dkv_outputs *before; /* of another case that ran before (same shapes), or NULL: stale buffers */
    const dkv_damage *damage;  /* or NULL */
    const int64_t *unwritten;  /* [DKV_N_OUTPUTS] elements that still hold the poison, or NULL */
    /* Runs the kernel on other inputs of the same problem and fills out (allocated as dkv_allocOutputs does).
     * 0, or anything else where that run gave nothing. NULL: no probes. A worker that ran another problem
     * since must be told of this one again (dkv_describeCase). */
    int (*probe)(void *arg, const dkv_inputs *in, const dkv_outputs *out);
    void *probe_arg;
    const char *exclude; /* comma list of hypotheses (names) that are left out, or NULL */
    double seconds;      /* no further hypothesis is tried after so long; 0: 10 */
    int threads;         /* 0: as many as cores */
} dkv_explain_in;

/* Ranks hypotheses into out[0..cap); returns how many (at least 1, `unknown` where nothing else; 0: nothing
 * is wrong), or -1 and *err. */
int dkv_explain(const dkv_explain_in *in, dkv_hypothesis *out, int cap, dkv_err *err);

#endif
