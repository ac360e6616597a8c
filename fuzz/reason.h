/* reason.h: why a case failed, in short: two failures of the same status and leading tensor are taken for
 * one. */
#ifndef DKV_REASON_H
#define DKV_REASON_H

#include "../verify/case.h"

typedef struct dkv_reason {
    dkv_status status;
    int tensor;        /* dkv_tensor_id that was first to be wrong; -1: none (a crash, a guard) */
    const char *check; /* that decided; "" where the kernel did not come through */
} dkv_reason;

dkv_reason dkv_reasonOf(const dkv_result *r);
static inline bool dkv_sameReason(dkv_reason a, dkv_reason b) {
    return a.status == b.status && a.tensor == b.tensor;
}
/* How often each reason was met; the last row: all further ones, too. */
#define DKV_REASON_ROWS 64
typedef struct dkv_reasons {
    struct {
        dkv_reason reason;
        long count;
        uint64_t first; /* the least case */
    } row[DKV_REASON_ROWS];
    int n;
} dkv_reasons;
/* How many there were of this reason, this one included. */
long dkv_countReason(dkv_reasons *t, dkv_reason r, uint64_t which);
/* "FAILED dK (bound)" */
void dkv_sayReason(dkv_reason r, char *out, size_t n);

#endif
