/* dtype.h: bf16, fp16 and fp32 as bits. Round to nearest even from double (one rounding, never through fp32),
 * subnormals kept, overflow to infinity, NaN kept quiet. */
#ifndef DKV_DTYPE_H
#define DKV_DTYPE_H

#include <stddef.h>
#include <stdint.h>

#include "dualkv_kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline size_t dkv_dtypeSize(dualkv_dtype t) { return t == DUALKV_FP32 ? 4 : 2; }

double dkv_roundTo(double x, int32_t format); /* nearest value of the format, as double; DUALKV_EXACT: x */
uint16_t dkv_encode16(double x, dualkv_dtype t);
double dkv_decode16(uint16_t bits, dualkv_dtype t);
void dkv_decodeArray(const void *in, dualkv_dtype t, size_t n, double *out);
void dkv_encodeArray(const double *in, dualkv_dtype t, size_t n, void *out);

/* Unit roundoff (2^-8, 2^-11, 2^-24; 0 for DUALKV_EXACT), half the quantum at underflow, largest finite value. */
double dkv_unitRoundoff(int32_t format);
double dkv_underflow(int32_t format);
double dkv_maxFinite(int32_t format);
/* Spacing of the format's numbers at |x| (the subnormal spacing near 0). */
double dkv_ulp(double x, int32_t format);

#ifdef __cplusplus
}
#endif
#endif
