#include "emu_math.h"

#include <math.h>
#include <string.h>

/* Four lanes; GCC lowers them to what the machine has, with the same bits everywhere. */
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef float f4u __attribute__((vector_size(16), aligned(4), may_alias));

static inline f4 pick4(i4 mask, f4 yes, f4 no) { return (f4)((mask & (i4)yes) | (~mask & (i4)no)); }
static inline f4 all4(float x) { return (f4){x, x, x, x}; }

/* exp(x) = 2^k exp(r), r = x - k ln 2, |r| <= 0.347; Taylor to r^7 (the rest is 2^-27.5). k ln 2 is taken off
 * in two parts, the first exact; 2^k is applied in two exact steps, so that subnormal results are rounded
 * once. */
static inline f4 exp4(f4 x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    i4 low = x<-105.0f, high = x> 89.0f;
    x = pick4(low | high, all4(0.0f), x);
    f4 t = x * 0x1.715476p+0f + magic;
    i4 k = (i4)t - (i4)all4(magic);
    f4 kf = t - magic;
    f4 r = (x - kf * 0x1.62e4p-1f) - kf * 0x1.7f7d1cp-20f;
    f4 q = all4(1.0f / 5040.0f);
    q = q * r + 1.0f / 720.0f;
    q = q * r + 1.0f / 120.0f;
    q = q * r + 1.0f / 24.0f;
    q = q * r + 1.0f / 6.0f;
    q = q * r + 0.5f;
    f4 y = (r * r * q + r) + 1.0f;
    i4 half = k >> 1;
    y = y * (f4)((half + 127) << 23);
    y = y * (f4)((k - half + 127) << 23);
    y = pick4(low, all4(0.0f), y);
    return pick4(high, all4(INFINITY), y);
}

void dkv_emuExp(float *x, int n, float shift) {
    int i = 0;
    for (; i + 4 <= n; i += 4) *(f4u *)(x + i) = exp4(*(f4u *)(x + i) - shift);
    if (i == n) return;
    float rest[4] = {0};
    memcpy(rest, x + i, (size_t)(n - i) * sizeof *x);
    *(f4u *)rest = exp4(*(f4u *)rest - shift);
    memcpy(x + i, rest, (size_t)(n - i) * sizeof *x);
}

/* |x| < 0.3: odd Taylor series; else (1 - e)/(1 + e) with e = exp(-2|x|), where 1 - e loses at most a bit and
 * a half. */
static inline f4 tanh4(f4 x) {
    i4 sign = (i4)x & INT32_MIN;
    f4 a = (f4)((i4)x ^ sign), z = x * x;
    f4 e = exp4(a * -2.0f);
    f4 big = (1.0f - e) / (1.0f + e);
    f4 q = all4(-1382.0f / 155925.0f);
    q = q * z + 62.0f / 2835.0f;
    q = q * z - 17.0f / 315.0f;
    q = q * z + 2.0f / 15.0f;
    q = q * z - 1.0f / 3.0f;
    f4 small = a + a * (z * q);
    f4 y = pick4(a < 0.3f, small, big);
    return (f4)((i4)y | sign);
}

void dkv_emuTanh(float *x, int n) {
    int i = 0;
    for (; i + 4 <= n; i += 4) *(f4u *)(x + i) = tanh4(*(f4u *)(x + i));
    if (i == n) return;
    float rest[4] = {0};
    memcpy(rest, x + i, (size_t)(n - i) * sizeof *x);
    *(f4u *)rest = tanh4(*(f4u *)rest);
    memcpy(x + i, rest, (size_t)(n - i) * sizeof *x);
}

/* Once a row, so in double and rounded once: x = 2^e m, m in [sqrt(1/2), sqrt 2), ln m = 2
 * atanh((m-1)/(m+1)). */
float dkv_emuLog(float x) {
    if (!(x > 0.0f)) return x == 0.0f ? -INFINITY : NAN;
    if (isinf(x)) return x;
    int e;
    double m = frexp(x, &e);
    if (m < 0.70710678118654752) {
        m *= 2;
        e--;
    }
    double s = (m - 1) / (m + 1), z = s * s, q = 1.0 / 17;
    for (int d = 15; d >= 1; d -= 2) q = q * z + 1.0 / d;
    return (float)(e * 0.69314718055994531 + 2 * s * q);
}

static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
static inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline uint32_t toBf16(float x) {
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u >> 16) | 0x40u; /* NaN stays, quiet */
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
static inline uint32_t toFp16(float x) {
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7e00u;
    if (a >= 0x477ff000u) return sign | 0x7c00u; /* from 65520 on: infinity */
    if (a < 0x38800000u) /* below 2^-14: 0.5 has the quantum 2^-24, so the addition rounds */
        return sign | (bits_of(float_of(a) + 0.5f) - 0x3f000000u);
    a += 0xfffu + ((a >> 13) & 1u);
    return sign | ((a - 0x38000000u) >> 13);
}
static inline float fromFp16(uint32_t h) {
    uint32_t sign = (h & 0x8000u) << 16, e = h & 0x7c00u, m = h & 0x3ffu;
    if (e == 0x7c00u) return float_of(sign | 0x7f800000u | m << 13);
    if (e == 0) return float_of(sign | bits_of((float)m * 0x1p-24f));
    return float_of(sign | (((h & 0x7fffu) << 13) + 0x38000000u));
}

void dkv_emuRound(float *x, int64_t n, int32_t format) {
    if (format == DUALKV_BF16)
        for (int64_t i = 0; i < n; i++) x[i] = float_of(toBf16(x[i]) << 16);
    else if (format == DUALKV_FP16)
        for (int64_t i = 0; i < n; i++) x[i] = fromFp16(toFp16(x[i]));
}

void dkv_emuDecode(const void *in, int32_t dtype, int n, float *out) {
    const uint16_t *h = in;
    if (dtype == DUALKV_FP32)
        memcpy(out, in, (size_t)n * sizeof *out);
    else if (dtype == DUALKV_BF16)
        for (int i = 0; i < n; i++) out[i] = float_of((uint32_t)h[i] << 16);
    else
        for (int i = 0; i < n; i++) out[i] = fromFp16(h[i]);
}

void dkv_emuEncode(const float *in, int32_t dtype, int n, void *out) {
    uint16_t *h = out;
    if (dtype == DUALKV_FP32)
        memcpy(out, in, (size_t)n * sizeof *in);
    else if (dtype == DUALKV_BF16)
        for (int i = 0; i < n; i++) h[i] = (uint16_t)toBf16(in[i]);
    else
        for (int i = 0; i < n; i++) h[i] = (uint16_t)toFp16(in[i]);
}

/* Four rows by eight columns: the accumulators stay in registers. */
static void multiply4x8(const dkv_emuProduct *g, int i, int j) {
    f4 c[4][2];
    for (int r = 0; r < 4; r++) {
        c[r][0] = *(const f4u *)(g->c + (i + r) * g->ldc + j);
        c[r][1] = *(const f4u *)(g->c + (i + r) * g->ldc + j + 4);
    }
    const float *a0 = g->a + i * g->a_row, *a1 = a0 + g->a_row, *a2 = a1 + g->a_row, *a3 = a2 + g->a_row;
    const float *b = g->b + j;
    for (int l = 0; l < g->k; l++, b += g->ldb) {
        f4 b0 = *(const f4u *)b, b1 = *(const f4u *)(b + 4);
        int64_t o = l * g->a_col;
        f4 x0 = all4(a0[o]), x1 = all4(a1[o]), x2 = all4(a2[o]), x3 = all4(a3[o]);
        c[0][0] += x0 * b0, c[0][1] += x0 * b1;
        c[1][0] += x1 * b0, c[1][1] += x1 * b1;
        c[2][0] += x2 * b0, c[2][1] += x2 * b1;
        c[3][0] += x3 * b0, c[3][1] += x3 * b1;
    }
    for (int r = 0; r < 4; r++) {
        *(f4u *)(g->c + (i + r) * g->ldc + j) = c[r][0];
        *(f4u *)(g->c + (i + r) * g->ldc + j + 4) = c[r][1];
    }
}

static void multiply1x8(const dkv_emuProduct *g, int i, int j) {
    float *c = g->c + i * g->ldc + j;
    f4 c0 = *(f4u *)c, c1 = *(f4u *)(c + 4);
    const float *a = g->a + i * g->a_row, *b = g->b + j;
    for (int l = 0; l < g->k; l++, b += g->ldb) {
        f4 x = all4(a[l * g->a_col]);
        c0 += x * *(const f4u *)b;
        c1 += x * *(const f4u *)(b + 4);
    }
    *(f4u *)c = c0;
    *(f4u *)(c + 4) = c1;
}

/* One tensor core step: `n` <= 16 products. In units of 2^-25 of the largest exponent everything is an
 * integer. */
static float stepTensorCore(float acc, int n, const float *a, int64_t a_col, const float *b, int64_t ldb) {
    double term[17], largest = fabs((double)acc), plain = acc;
    term[16] = acc;
    for (int l = 0; l < n; l++) {
        term[l] = (double)a[l * a_col] * b[l * ldb]; /* exact: 48 bits at most */
        plain += term[l];
        if (fabs(term[l]) > largest) largest = fabs(term[l]);
    }
    if (!isfinite(plain)) return (float)plain;
    if (largest == 0) return 0.0f;
    int e = ilogb(largest);
    double unit = ldexp(1.0, 25 - e);
    int64_t sum = (int64_t)(term[16] * unit);
    for (int l = 0; l < n; l++) sum += (int64_t)(term[l] * unit);
    int64_t mag = sum < 0 ? -sum : sum;
    if (!mag) return 0.0f;
    int drop = 40 - __builtin_clzll((uint64_t)mag); /* bit length - 24 */
    int lowest = -149 - (e - 25);                   /* fp32 has nothing below 2^-149 */
    if (drop < lowest) drop = lowest;
    if (drop > 62) return 0.0f;
    if (drop > 0) mag = mag >> drop << drop;
    double r = ldexp((double)mag, e - 25);
    return (float)(sum < 0 ? -r : r);
}

static void multiplyTensorCore(const dkv_emuProduct *g) {
    for (int i = 0; i < g->m; i++)
        for (int j = 0; j < g->n; j++) {
            float acc = g->c[i * g->ldc + j];
            for (int l = 0; l < g->k; l += 16)
                acc = stepTensorCore(acc, g->k - l < 16 ? g->k - l : 16, g->a + i * g->a_row + l * g->a_col,
                                     g->a_col, g->b + l * g->ldb + j, g->ldb);
            g->c[i * g->ldc + j] = acc;
        }
}

void dkv_emuMultiply(const dkv_emuProduct *g) {
    if (g->tc) {
        multiplyTensorCore(g);
        return;
    }
    for (int j = 0; j < g->n; j += 8) {
        int i = 0;
        for (; i + 4 <= g->m; i += 4) multiply4x8(g, i, j);
        for (; i < g->m; i++) multiply1x8(g, i, j);
    }
}
