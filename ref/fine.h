/* fine.h: single precision where a constant or a polynomial that errs the same way in every row would show as the error
 * of their mean. Plain C for host and device, so that the CPU measures it (test_fine.c); the device gives the same bits.
 *
 * CUDA's tanhf is within 2 ulp, but off by -1.8 2^-24 on average around 0.34 and by +1.3 around 0.49: where all rows
 * lean on scores of one size, as at a softcap, LSE's mean is off by that. */
#ifndef DKV_FINE_H
#define DKV_FINE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define DKV_FINE __host__ __device__ static inline
#else
#define DKV_FINE static inline
#endif

#define DKV_LOG2E_EXACT 1.4426950408889634
#define DKV_LOG2E 1.4426950408889634f
#define DKV_LOG2E_REST 0x1.4ae0cp-26f /* log2 e - DKV_LOG2E */
#define DKV_FINE_TANH_ERROR 0x1.4p-23 /* relative, of dkv_fineTanh */

/* Up to 5/8 an odd polynomial (minimax, 0.003 2^-24), beyond 1 - 2 / (e^2a + 1), e^r by a polynomial (0.05 2^-24). */
DKV_FINE float dkv_fineTanh(float x) {
    float a = fabsf(x), y;
    if (a <= 0.625f) {
        float z = x * x, q = 0x1.1a27fep-9f;
        q = fmaf(q, z, -0x1.0c5ecep-7f);
        q = fmaf(q, z, 0x1.63a55p-6f);
        q = fmaf(q, z, -0x1.b9f188p-5f);
        q = fmaf(q, z, 0x1.11107ap-3f);
        q = fmaf(q, z, -0x1.555554p-2f);
        return fmaf(q * z, x, x);
    }
    if (a > 10.f) return copysignf(1.f, x);
    const float magic = 12582912.f; /* 1.5 2^23: what is added to it is rounded to an integer */
    float t = fmaf(a, 0x1.715476p+1f, magic), k = t - magic, q = 0x1.6a4134p-10f;
    float r = fmaf(k, -0x1.7f7d1cp-20f, fmaf(k, -0x1.62e4p-1f, 2.f * a)), power; /* 2 a - k ln 2 */
    int32_t bits;
    q = fmaf(q, r, 0x1.1239cp-7f);
    q = fmaf(q, r, 0x1.5558bcp-5f);
    q = fmaf(q, r, 0x1.555492p-3f);
    q = fmaf(q, r, 0x1.fffffcp-2f);
    y = fmaf(r * r, q, r) + 1.f;
    memcpy(&bits, &t, sizeof bits);
    bits = (int32_t)((uint32_t)(bits + 127) << 23); /* the low bits of t are k's */
    memcpy(&power, &bits, sizeof power);
    return copysignf(1.f - 2.f / fmaf(y, power, 1.f), x);
}

/* x f, f = factor + rest; rounded once, so that f's own rounding leaves nothing. rest has factor's sign and is not 0: an
 * infinite x stays one. */
DKV_FINE float dkv_fineTimes(float x, float factor, float rest) { return fmaf(x, factor, x * rest); }

/* Splits f, finite, for dkv_fineTimes. */
static inline void dkv_fineFactor(double f, float *hi, float *rest) {
    *hi = (float)f;
    if (!(fabs((double)*hi) < fabs(f))) *hi = nextafterf(*hi, 0.f);
    *rest = (float)(f - *hi);
    if (*rest == 0.f) *rest = copysignf(0x1p-149f, (float)f);
}
#endif
