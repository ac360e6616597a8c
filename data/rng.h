/* rng.h: counter-based random numbers. A value is a function of (seed, stream, sub, index) and of nothing
 * else, the same bits on any host and on a GPU: Philox 4x32-10 (Random123), then only integer operations and
 * fp64 + - * / sqrt, each rounded correctly and never contracted (build hosts with -ffp-contract=off). */
#ifndef DKV_RNG_H
#define DKV_RNG_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <Random123/philox.h>

#ifdef __CUDACC__
#define DKV_RNG __host__ __device__ static inline
#else
#define DKV_RNG static inline
#endif

#ifdef __CUDA_ARCH__
#define DKV_MUL(a, b) __dmul_rn(a, b)
#define DKV_ADD(a, b) __dadd_rn(a, b)
#define DKV_SUB(a, b) __dsub_rn(a, b)
#define DKV_DIV(a, b) __ddiv_rn(a, b)
#define DKV_SQRT(a) __dsqrt_rn(a)
#else
#define DKV_MUL(a, b) ((a) * (b))
#define DKV_ADD(a, b) ((a) + (b))
#define DKV_SUB(a, b) ((a) - (b))
#define DKV_DIV(a, b) ((a) / (b))
#define DKV_SQRT(a) sqrt(a)
#endif

/* Streams: one a tensor, the rest for what fills draw beside them. */
enum {
    DKV_STREAM_Q = 1,
    DKV_STREAM_K,
    DKV_STREAM_V,
    DKV_STREAM_DO,
    DKV_STREAM_DLSE,
    DKV_STREAM_SINK,
    DKV_STREAM_SIGN,
    DKV_STREAM_PICK,
    DKV_STREAM_TAIL,
    DKV_STREAM_SAMPLE
};

typedef struct dkv_words {
    uint32_t v[4];
} dkv_words;

DKV_RNG dkv_words dkv_drawWords(uint64_t seed, uint32_t stream, uint32_t sub, uint64_t block) {
    philox4x32_ctr_t c = {{(uint32_t)block, (uint32_t)(block >> 32), stream, sub}};
    philox4x32_key_t k = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    philox4x32_ctr_t r = philox4x32_R(10, c, k);
    dkv_words w = {{r.v[0], r.v[1], r.v[2], r.v[3]}};
    return w;
}

/* Uniform in (0, 1): (w + 1/2) / 2^32, exact. */
DKV_RNG double dkv_uniform(uint32_t w) { return DKV_MUL(DKV_ADD((double)w, 0.5), 0x1p-32); }

/* -2 ln(u) for u = dkv_uniform(w). u = m 2^e with m in [1/sqrt 2, sqrt 2); ln m = 2 atanh z, z = (m-1)/(m+1),
 * |z| < 0.1716: the series to z^17 leaves less than 1e-15. */
DKV_RNG double dkv_minusTwoLog(double u) {
    uint64_t bits;
    memcpy(&bits, &u, sizeof bits);
    int e = (int)(bits >> 52) - 1022;
    bits = (bits & 0xFFFFFFFFFFFFFull) | 0x3FE0000000000000ull; /* m in [1/2, 1) */
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m < 0.70710678118654752) {
        m = DKV_MUL(m, 2.0);
        e--;
    }
    double z = DKV_DIV(DKV_SUB(m, 1.0), DKV_ADD(m, 1.0)), zz = DKV_MUL(z, z), s = 1.0 / 17;
    for (int k = 15; k >= 1; k -= 2) s = DKV_ADD(DKV_MUL(s, zz), DKV_DIV(1.0, (double)k));
    double ln = DKV_ADD(DKV_MUL(DKV_MUL(2.0, z), s), DKV_MUL((double)e, 0.69314718055994531));
    return DKV_MUL(-2.0, ln);
}

/* cos and sin of 2 pi w / 2^32: the top three bits choose the octant, so that the Taylor series (to x^15 and
 * x^16) is taken at |x| <= pi/4, where they leave less than 1e-16. */
DKV_RNG void dkv_circle(uint32_t w, double *c, double *s) {
    uint32_t quarter = (w + 0x20000000u) >> 30; /* nearest multiple of a quarter turn */
    int32_t rest = (int32_t)(w - (quarter << 30));
    double x = DKV_MUL((double)rest, 1.4629180792671596e-09); /* 2 pi / 2^32 */
    double xx = DKV_MUL(x, x), cs = 1.0, sn = 1.0;
    for (int k = 15; k >= 1;
         k -= 2) { /* nested: 1 - x^2/(1 2) (1 - x^2/(3 4) (...)) and the same for sin(x)/x */
        cs = DKV_SUB(1.0, DKV_MUL(DKV_DIV(xx, (double)(k * (k + 1))), cs));
        if (k > 1) sn = DKV_SUB(1.0, DKV_MUL(DKV_DIV(xx, (double)(k * (k - 1))), sn));
    }
    sn = DKV_MUL(sn, x);
    *c = quarter == 0 ? cs : quarter == 1 ? -sn : quarter == 2 ? -cs : sn;
    *s = quarter == 0 ? sn : quarter == 1 ? cs : quarter == 2 ? -sn : -cs;
}

/* Four independent standard normal deviates, indices 4 block .. 4 block + 3 (Box and Muller; |x| < 6.8). */
DKV_RNG void dkv_drawNormals(uint64_t seed, uint32_t stream, uint32_t sub, uint64_t block, double x[4]) {
    dkv_words w = dkv_drawWords(seed, stream, sub, block);
    for (int i = 0; i < 4; i += 2) {
        double r = DKV_SQRT(dkv_minusTwoLog(dkv_uniform(w.v[i]))), c, s;
        dkv_circle(w.v[i + 1], &c, &s);
        x[i] = DKV_MUL(r, c);
        x[i + 1] = DKV_MUL(r, s);
    }
}

DKV_RNG double dkv_normal(uint64_t seed, uint32_t stream, uint32_t sub, uint64_t index) {
    double x[4];
    dkv_drawNormals(seed, stream, sub, index / 4, x);
    return x[index % 4];
}

DKV_RNG uint32_t dkv_draw32(uint64_t seed, uint32_t stream, uint32_t sub, uint64_t index) {
    return dkv_drawWords(seed, stream, sub, index / 4).v[index % 4];
}

/* Deviates of indices start .. start + n - 1. */
DKV_RNG void dkv_fillNormals(uint64_t seed, uint32_t stream, uint32_t sub, uint64_t start, int64_t n,
                             double *out) {
    double x[4];
    for (int64_t i = 0; i < n; i++) {
        uint64_t index = start + (uint64_t)i;
        if (i == 0 || index % 4 == 0) dkv_drawNormals(seed, stream, sub, index / 4, x);
        out[i] = x[index % 4];
    }
}
#endif
