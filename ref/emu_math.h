/* emu_math.h: the arithmetic of the emulated kernel, bitwise the same on every machine (IEEE operations only,
 * nothing contracted, fixed order). Arrays may be unaligned; lengths are any, in place unless said else. */
#ifndef DKV_EMU_MATH_H
#define DKV_EMU_MATH_H

#include <stdint.h>

#include "dualkv_kernel.h"

/* Relative errors over the whole range, subnormal results apart; test_emu measures and asserts them. */
#define DKV_EMU_EXP_ERROR 0x1.8p-24
#define DKV_EMU_LOG_ERROR 0x1.01p-24
#define DKV_EMU_TANH_ERROR 0x1.8p-23

float dkv_emuLog(float x);                     /* ln x; 0 -> -inf, negative -> NaN */
void dkv_emuExp(float *x, int n, float shift); /* exp(x - shift); -inf -> 0, NaN stays */
void dkv_emuTanh(float *x, int n);
void dkv_emuRound(float *x, int64_t n,
                  int32_t format); /* to the nearest even of the format; EXACT, FP32: as is */
void dkv_emuDecode(const void *in, int32_t dtype, int n, float *out);
void dkv_emuEncode(const float *in, int32_t dtype, int n, void *out); /* one rounding to the nearest even */

/* C [m, n] += A [m, k] B [k, n]; A's element (i, l) is a[i*a_row + l*a_col]; ldb, ldc at least n rounded up
 * to 8 (columns up to there are computed too). Each element is one chain over l = 0..k-1 that starts from C.
 * tc = 0: c = fl(c + fl(a*b)). tc = 1: 16 products a step, as measured on tensor cores (tolerance page):
 * products and accumulator cut toward zero below 2^-25 of the largest exponent, summed, cut to 24 bits toward
 * zero. */
typedef struct dkv_emuProduct {
    int tc, m, n, k;
    const float *a;
    int64_t a_row, a_col;
    const float *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
} dkv_emuProduct;
void dkv_emuMultiply(const dkv_emuProduct *g);

#endif
