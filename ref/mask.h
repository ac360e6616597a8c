/* mask.h: the mask over a node of the problem tree, and which masks a tree admits. What each mask means: mask_pair.h.
 * No kernel includes this file (kernels have their own, walk.h; a test enumerates both). */
#ifndef DKV_MASK_H
#define DKV_MASK_H

#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Does row r (0 <= r < len) of node `n` see key j (0 <= j < context + len, in order of position)? */
bool dkv_maskSees(const dkv_problem *p, int32_t n, int64_t r, int64_t j);

/* For a block of rows [r0, r1) and keys [j0, j1) of node n: 0 no pair visible, 1 all visible, 2 mixed
 * (may say 2 where a finer look would say 0 or 1, never the reverse). */
int dkv_maskBlock(const dkv_problem *p, int32_t n, int64_t r0, int64_t r1, int64_t j0, int64_t j1);

/* DKV_OK, or DKV_EREFUSED with the row and the key: a mask is admissible when no row sees a descendant or a sibling
 * branch, and when every copy of a row in the replicated layout sees exactly the keys that the packed row sees
 * (mask=full/prefix with a context limit that cuts through a segment with queries is refused for that reason). */
int dkv_maskAdmissible(const dkv_problem *p, dkv_err *err);

#ifdef __cplusplus
}
#endif
#endif
