/* check.h: the checks, one function and one row of the table in check.c each. A check looks at the case after
 * its runs and says what it found; it decides nothing by itself. */
#ifndef DKV_CHECK_H
#define DKV_CHECK_H

#include "case.h"
#include "vectors.h"

/* check_memory.c */
void dkv_checkLaunched(dkv_case *c, dkv_finding *f);
void dkv_checkGuards(dkv_case *c, dkv_finding *f);
void dkv_checkInputs(dkv_case *c, dkv_finding *f);
void dkv_checkWritten(dkv_case *c, dkv_finding *f);
/* check_values.c */
void dkv_checkIsolation(dkv_case *c, dkv_finding *f);
void dkv_checkFinite(dkv_case *c, dkv_finding *f);
void dkv_checkBound(dkv_case *c, dkv_finding *f);
void dkv_checkTwin(dkv_case *c, dkv_finding *f);
void dkv_checkLean(dkv_case *c, dkv_finding *f);
void dkv_checkCopies(dkv_case *c, dkv_finding *f);
/* check_repeat.c */
void dkv_checkReuse(dkv_case *c, dkv_finding *f);
void dkv_checkRepeat(dkv_case *c, dkv_finding *f);
void dkv_checkSequence(dkv_case *c, dkv_finding *f);
/* First tensor whose bits differ between two runs; -1 if none. *n elements, *first their first. */
int dkv_firstDifference(const dkv_case *c, const dkv_run *a, const dkv_run *b, int64_t *n, int64_t *first);
/* check_identity.c: identities that need no oracle; their tolerance is the sum of the elements' bounds */
void dkv_checkSumDv(dkv_case *c, dkv_finding *f);
void dkv_checkEuler(dkv_case *c, dkv_finding *f);
/* check_siblings.c: one more run, with the inputs of all other branches changed */
void dkv_checkSiblings(dkv_case *c, dkv_finding *f);
/* further runs, of problems made from the case's own (derive.h) */
void dkv_checkBoundary(dkv_case *c, dkv_finding *f);
void dkv_checkPlain(dkv_case *c, dkv_finding *f);
void dkv_checkPermute(dkv_case *c, dkv_finding *f);
void dkv_checkFuture(dkv_case *c, dkv_finding *f);
void dkv_checkShift(dkv_case *c, dkv_finding *f);
void dkv_checkMerge(dkv_case *c, dkv_finding *f);
void dkv_checkMaxima(dkv_case *c, dkv_finding *f);
/* check_peer.c */
void dkv_checkPeer(dkv_case *c, dkv_finding *f);

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
