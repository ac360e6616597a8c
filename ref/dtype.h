/* dtype.h: bf16, fp16 and fp32 as bits. Round to nearest even from double (one rounding, never through fp32),
 * subnormals kept, overflow to infinity, NaN kept quiet. */
#ifndef DKV_DTYPE_H
#define DKV_DTYPE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "dualkv_kernel.h"

/* Functions that a device needs too. */
#ifdef __CUDACC__
#define DKV_INLINE __host__ __device__ static inline
#else
#define DKV_INLINE static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

static inline size_t dkv_dtypeSize(dualkv_dtype t) { return t == DUALKV_FP32 ? 4 : 2; }

/* What rounding to a format needs, looked up once outside a loop. With p fraction bits and smallest normal
 * exponent emin: |x| + 2^(max(exponent of x, emin) + 52 - p) has the spacing of the format at x, so the
 * hardware's own rounding of that sum is the rounding wanted. DUALKV_EXACT: mask 0, the number added is 0. */
typedef struct dkv_rounder {
    double floor;       /* 2^emin */
    uint64_t mask, add; /* bits of the number added: (bits of max(|x|, floor) & mask) + add */
    double limit;       /* from here on: infinity */
} dkv_rounder;

dkv_rounder dkv_makeRounder(int32_t format);

/* Nearest value of the format, as double. No branches: loops over it vectorise. */
DKV_INLINE double dkv_roundBy(dkv_rounder f, double x) {
    double a = fabs(x), c = a > f.floor ? a : f.floor, r;
    uint64_t u;
    memcpy(&u, &c, sizeof u);
    u = (u & f.mask) + f.add;
    memcpy(&c, &u, sizeof c);
    r = (a + c) - c;
    r = a < f.limit ? r : a >= f.limit ? (double)INFINITY : x + x;
    return copysign(r, x);
}

double dkv_roundTo(double x, int32_t format); /* the same for one value; DUALKV_EXACT: x */
void dkv_roundArray(double *x, size_t n, int32_t format);
uint16_t dkv_encode16(double x, dualkv_dtype t);
double dkv_decode16(uint16_t bits, dualkv_dtype t);
void dkv_decodeArray(const void *in, dualkv_dtype t, size_t n, double *out);
void dkv_encodeArray(const double *in, dualkv_dtype t, size_t n, void *out);

/* Unit roundoff (2^-8, 2^-11, 2^-24; 0 for DUALKV_EXACT), half the quantum at underflow (0 for DUALKV_EXACT),
 * largest finite value. */
double dkv_unitRoundoff(int32_t format);
double dkv_underflow(int32_t format);
double dkv_maxFinite(int32_t format);
/* Spacing of the format's numbers at |x|: the subnormal spacing near 0, the largest spacing from the largest
 * finite value on, NaN for NaN; DUALKV_EXACT: the spacing of doubles. */
double dkv_ulp(double x, int32_t format);

#ifdef __cplusplus
}
#endif
#endif
