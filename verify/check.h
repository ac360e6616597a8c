/* check.h: the checks, one row of the table and one function each. A check looks at the case after its runs and says what it
 * found; it decides nothing by itself. */
#ifndef DKV_CHECK_H
#define DKV_CHECK_H

#include "case.h"
#include "vectors.h"

/* The checks, one row each: dkv_check<Function>, its name, what holds. In the order in which a defect decides the case: a value
 * is believed only if the memory is sound. Files: check_memory.c, check_values.c (isolation, finite, bound, twin, copies),
 * check_repeat.c (reuse, repeat, sequence), check_identity.c (identities that need no oracle), else check_<name>.c, where
 * further runs are made of the case's own problem (derive.h). */
#define DKV_CHECKS(C)                                                                                     \
    C(Launched, "launched", "the kernel ran its own code, no fallback (where it counts launches)")        \
    C(Guards, "guards", "nothing outside the outputs was written: guards, slack between rows")            \
    C(Inputs, "inputs", "inputs, and in backward O and LSE, are as they were")                            \
    C(Written, "written", "no output element still holds the poison, under two patterns")                 \
    C(Isolation, "isolation", "a NaN or Inf of one branch does not reach another")                        \
    C(Finite, "finite", "NaN or Inf only where the truth is")                                             \
    C(Bound, "bound", "every element within what rounding allows")                                        \
    C(Copies, "copies", "replicated kernels: every copy of a shared row agrees with it")                  \
    C(Siblings, "siblings", "changing other branches changes nothing in one (bits: only reported)")       \
    C(SumDv, "sum-dv", "sum of dV over keys = sum of dO over rows (less the sink's share)")               \
    C(Euler, "euler", "sum of q.dq = sum of k.dk")                                                        \
    C(Boundary, "boundary", "where the prompt ends changes nothing")                                      \
    C(Plain, "plain", "a prompt and its only response are one sequence")                                  \
    C(Permute, "permute", "responses in another order are the same responses (bits: only reported)")      \
    C(Future, "future", "changing later tokens changes nothing before them (bits: only reported)")        \
    C(Shift, "shift", "a constant added to V is added to O")                                              \
    C(Merge, "merge", "the context cut in two and merged by LSE gives the whole")                         \
    C(Maxima, "maxima", "overstated longest lengths change nothing (bits: only reported)")                \
    C(Sequence, "sequence", "run=aba: other cases between two runs change nothing, and pass")             \
    C(Repeat, "repeat", "two runs give the same bits where that is promised")                             \
    C(Reuse, "reuse", "other data in the same buffers, then Q, K, V in others with -dO: nothing is remembered") \
    C(Twin, "twin", "no more rounding than declared, no bias that it does not explain")                   \
    C(Lean, "lean",                                                                                       \
       "where no twin speaks: no tensor, region or head leans in a direction that no known rounding has") \
    C(Peer, "peer", "error beside that of the same-precision replicated peer (never decides)")

#define C(function, name, doc) void dkv_check##function(dkv_case *c, dkv_finding *f);
DKV_CHECKS(C)
#undef C

/* First tensor whose bits differ between two runs; -1 if none. *n elements, *first their first. */
int dkv_firstDifference(const dkv_case *c, const dkv_run *a, const dkv_run *b, int64_t *n, int64_t *first);

/* Share of a row's weight that keys have: 1, or what the sink leaves; 0 where the row sees nothing. *error: what the fp64
 * rounding of LSE makes of it. */
double dkv_keyShare(const dkv_case *c, int64_t t, int32_t h, double *error);

/* Sets a finding; `fmt` in words. */
void dkv_find(dkv_finding *f, dkv_finding_state state, dkv_status status, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static inline void dkv_findNothing(dkv_finding *f) { f->state = DKV_CHECK_PASSED; }

/* Element `index` of a packed tensor in words: "group 0, segment 2 (response) row 5, head 1, dim 3". */
void dkv_nameElement(const dkv_layout *l, dkv_tensor_id id, int64_t index, char *out, size_t n);

#endif
