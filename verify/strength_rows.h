/* strength_rows.h: lost keys in rows of cases too large to run the reference again. */
#ifndef DKV_STRENGTH_ROWS_H
#define DKV_STRENGTH_ROWS_H

#include "case.h"

/* Notes in c->result->strength what one element, index `at` of a tensor, would be under a slip. `keys`: what its row sees
 * (0: does not count as a length); segment -1: dSink. */
void dkv_noteSlip(dkv_case *c, int slip, dkv_tensor_id id, int32_t segment, int64_t at, double got, int64_t keys);

/* Without key j of weight p a row has O' = (O - p v_j) / (1 - p), LSE' = LSE + log1p(-p): its first, then its last key, in
 * some rows of every segment of `rows`. */
void dkv_loseKeys(dkv_case *c, const bool *rows);

#endif
