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
/* "FAILED dK (bound)" */
void dkv_sayReason(dkv_reason r, char *out, size_t n);

#endif
