#include "dtype.h"

#include <float.h>

/* Of each dualkv_dtype, and of DUALKV_TF32: 2^-(fraction bits + 1), half of the smallest subnormal, the largest value. */
static const double roundoff[4] = {0x1p-8, 0x1p-11, 0x1p-24, 0x1p-11};
static const double underflow[4] = {0x1p-134, 0x1p-25, 0x1p-150, 0x1p-137};
static const double max_finite[4] = {0x1.fep127, 0x1.ffcp15, 0x1.fffffep127, 0x1.ffcp127};

static uint64_t bitsOf(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static double fromBits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

#define EXPONENT 0x7ff0000000000000ull
#define ROUNDER(p, floor, limit)                                                                             \
    { floor, EXPONENT, (uint64_t)(52 - (p)) << 52, limit }
/* The limit is half way between the largest finite value and the next power of two. */
static const dkv_rounder rounder[4] = {ROUNDER(7, 0x1p-126, 0x1.ffp127), ROUNDER(10, 0x1p-14, 0x1.ffep15),
                                       ROUNDER(23, 0x1p-126, 0x1.ffffffp127), ROUNDER(10, 0x1p-126, 0x1.ffep127)};

dkv_rounder dkv_makeRounder(int32_t format) {
    static const dkv_rounder exact = {0, 0, 0, (double)INFINITY};
    return format >= 0 && format <= DUALKV_TF32 ? rounder[format] : exact;
}

double dkv_roundTo(double x, int32_t format) {
    return format >= 0 && format <= DUALKV_TF32 ? dkv_roundBy(rounder[format], x) : x;
}

void dkv_roundArray(double *x, size_t n, int32_t format) {
    dkv_rounder f = dkv_makeRounder(format);
    if (!f.mask) return;
    for (size_t i = 0; i < n; i++) x[i] = dkv_roundBy(f, x[i]);
}

/* The next four are written without branches so that the array loops vectorise. */

static inline uint16_t encodeBf16(dkv_rounder f, double x) {
    float r = (float)dkv_roundBy(f, x); /* exact: bf16 is a subset of float */
    uint32_t u;
    memcpy(&u, &r, sizeof u);
    return (uint16_t)(u >> 16); /* a quiet NaN keeps its quiet bit */
}

static inline uint16_t encodeFp16(dkv_rounder f, double x) {
    double r = dkv_roundBy(f, x), a = fabs(r);
    uint64_t u = bitsOf(a);
    uint32_t sign = (uint32_t)(bitsOf(r) >> 48) & 0x8000u;
    uint32_t normal = (uint32_t)((u >> 42) - (1008u << 10));
    uint32_t subnormal = (uint32_t)(int32_t)((a < 1 ? a : 0) * 0x1p24);
    uint32_t special = 0x7c00u | ((uint32_t)(u >> 42) & 0x3ffu);
    uint32_t h = a < 0x1p-14 ? subnormal : a < 65536 ? normal : special;
    return (uint16_t)(sign | h);
}

static inline double decodeBf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline double decodeFp16(uint16_t h) {
    uint64_t e = (h >> 10) & 31u, m = h & 1023u;
    uint64_t wide = e == 31 ? 2047 : e + 1008, quiet = (uint64_t)(e == 31 && m) << 51;
    double normal = fromBits(wide << 52 | m << 42 | quiet), subnormal = (double)(int32_t)m * 0x1p-24;
    return copysign(e ? normal : subnormal, h & 0x8000u ? -1.0 : 1.0);
}

uint16_t dkv_encode16(double x, dualkv_dtype t) {
    return t == DUALKV_FP16 ? encodeFp16(rounder[t], x) : encodeBf16(rounder[DUALKV_BF16], x);
}

double dkv_decode16(uint16_t bits, dualkv_dtype t) {
    return t == DUALKV_FP16 ? decodeFp16(bits) : decodeBf16(bits);
}

void dkv_decodeArray(const void *in, dualkv_dtype t, size_t n, double *restrict out) {
    if (t == DUALKV_FP32) {
        const float *x = in;
        for (size_t i = 0; i < n; i++) out[i] = x[i];
    } else if (t == DUALKV_FP16) {
        const uint16_t *x = in;
        for (size_t i = 0; i < n; i++) out[i] = decodeFp16(x[i]);
    } else {
        const uint16_t *x = in;
        for (size_t i = 0; i < n; i++) out[i] = decodeBf16(x[i]);
    }
}

void dkv_encodeArray(const double *in, dualkv_dtype t, size_t n, void *restrict out) {
    dkv_rounder f = dkv_makeRounder(t);
    if (t == DUALKV_FP32) {
        float *x = out;
        for (size_t i = 0; i < n; i++) x[i] = (float)in[i];
    } else if (t == DUALKV_FP16) {
        uint16_t *x = out;
        for (size_t i = 0; i < n; i++) x[i] = encodeFp16(f, in[i]);
    } else {
        uint16_t *x = out;
        for (size_t i = 0; i < n; i++) x[i] = encodeBf16(f, in[i]);
    }
}

double dkv_unitRoundoff(int32_t format) {
    return format < 0 || format > DUALKV_TF32 ? 0 : roundoff[format];
}

double dkv_underflow(int32_t format) {
    return format < 0 || format > DUALKV_TF32 ? 0 : underflow[format];
}

double dkv_maxFinite(int32_t format) {
    return format < 0 || format > DUALKV_TF32 ? DBL_MAX : max_finite[format];
}

double dkv_ulp(double x, int32_t format) {
    static const int lo[5] = {-126, -14, -126, -126, -1022}, hi[5] = {127, 15, 127, 127, 1023};
    static const int p[5] = {7, 10, 23, 10, 52};
    int f = format < 0 || format > DUALKV_TF32 ? 4 : format;
    int e = (int)(bitsOf(x) >> 52 & 0x7ff) - 1023;
    if (x != x) return x;
    e = (e < lo[f] ? lo[f] : e > hi[f] ? hi[f] : e) - p[f];
    /* 2^e as a double: subnormal only for DUALKV_EXACT near 0 */
    return e >= -1022 ? fromBits((uint64_t)(e + 1023) << 52) : fromBits(1ull << (e + 1074));
}
