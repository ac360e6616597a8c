/* derive.h: problems made from a case's own, run on the same worker, for identities that need no oracle of values: two
 * problems whose outputs must agree, each within its own bound. So the tolerance is the sum of the two bounds. */
#ifndef DKV_DERIVE_H
#define DKV_DERIVE_H

#include "check.h"

typedef struct dkv_derived {
    dkv_case c;    /* packed, in, kernel, run[0], got, oracle (truth and bound, no twin) */
    dkv_problem p; /* its own */
    char line[DKV_LINE_MAX + 1];
    dkv_result *result; /* of no use but to c */
} dkv_derived;

/* Is the check worth a further run of this case? Small ones always, larger ones by a hash of the line (a replayed line
 * does what it did in its suite), heavy ones never; not within another case. */
bool dkv_worthDeriving(const dkv_case *c, const char *check);

/* A copy of the case's problem, to be changed: one plain run, no fill (inputs are copied). */
int dkv_deriveProblem(const dkv_case *c, dkv_problem *out, dkv_err *err);
/* Takes p over (also on failure), makes layout and zeroed inputs; the sink is copied. 1 where the problem has no line (too
 * long): not applicable. */
int dkv_beginDerived(const dkv_case *c, dkv_problem *p, dkv_derived *d, dkv_err *err);
/* True where a run came through; else the finding says what became of it. */
bool dkv_cameThrough(dkv_case *c, dkv_outcome o, const char *what, dkv_finding *f);
/* Runs it, packs what came, takes truth and bound. False where there is nothing to compare: refused (the finding stays not
 * applicable), or a defect, which is in *f; `what` says what was done, in words. */
bool dkv_runDerived(dkv_case *c, dkv_derived *d, const char *what, dkv_finding *f);
void dkv_endDerived(dkv_derived *d);

/* Copies n tokens: their q, dO, dLSE rows from query row q_from to q_to (q_from < 0: none), their k, v rows. */
void dkv_copyTokens(const dkv_case *c, dkv_derived *d, int64_t q_from, int64_t q_to, int64_t k_from, int64_t k_to, int64_t n);
int dkv_copyInputs(const dkv_case *c, dkv_inputs *out, dkv_err *err);
/* Other numbers of the same size in the tokens of segment i from its token `first` on: Q, V, dO, dLSE and half of K (so
 * that q.k does not come out the same) change their signs. */
void dkv_negateTokens(const dkv_case *c, int32_t i, int64_t first, dkv_inputs *in);

/* What a comparison found. */
typedef struct dkv_tally {
    int64_t compared, outside, bits; /* elements compared; beyond the tolerance; of other bits */
    dkv_tensor_id id;
    int64_t first; /* of those outside: its tensor, index in the case, values */
    double was, now, allowed;
    bool oracle; /* the truths disagree, too: the oracle's fault */
} dkv_tally;

/* Is anything claimed of an element, and its value within reach of the type? */
bool dkv_isClaimed(const dkv_case *c, dkv_tensor_id id, double truth, double bound);
/* Elements [at, at + n) of the case against [to, to + n) of the derived one. `other` NULL: the derived problem's
 * truth and bound are the case's own. Elements of which nothing is claimed are passed over. */
void dkv_compareElements(const dkv_case *c, const dkv_case *other, const dkv_outputs *got, dkv_tensor_id id, int64_t at,
                         int64_t to, int64_t n, dkv_tally *t);
/* One element of any identity: `was` and `now` may differ by `allowed`, and so may the truths. Index `at` names it. */
void dkv_compareValues(double was, double now, double truth_was, double truth_now, double allowed, dkv_tensor_id id,
                       int64_t at, dkv_tally *t);
/* What another part of the comparison found, after *t. */
void dkv_addTally(const dkv_tally *part, dkv_tally *t);
/* n query rows (O, LSE, and dQ where `dq`), and n key rows (dK, dV). */
void dkv_compareQueries(const dkv_case *c, const dkv_case *other, const dkv_outputs *got, int64_t at, int64_t to, int64_t n,
                        bool dq, dkv_tally *t);
void dkv_compareKeys(const dkv_case *c, const dkv_case *other, const dkv_outputs *got, int64_t at, int64_t to, int64_t n,
                     dkv_tally *t);
/* The finding of a tally: a defect of the kernel (FAILED unless said otherwise), of the oracle, a note on bits (where
 * repeatable bits are promised and `bits` says what for), or nothing. */
void dkv_judgeTally(const dkv_case *c, const dkv_tally *t, dkv_status status, const char *what, const char *bits,
                    dkv_finding *f);

#endif
