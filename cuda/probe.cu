/* probe.cu: what the matrix unit's accumulator keeps, as one JSON object
 *
 *     {"mma_sync": {"bf16": UNIT, "fp16": UNIT}, "wgmma": the same or null, "same_bits": true}
 *     UNIT = {"aligned_bits": 25, "toward_zero": true, "chain": [{"n": 64, "gain": -7.7e-7, "gain_u": -0.20,
 *             "rms_signed_u": 0.1}, ...]}
 *
 *   aligned_bits   largest k <= 27 for which 1 + 16 products of 2^-k is exact: smaller ones are cut before the sum
 *   toward_zero    +-(1 + 1.5 ulp/2) keeps +-1: the result is cut, not rounded
 *   gain           mean over 32 chains of n steps (k16, positive products) of (got - exact) / exact
 *   gain_u         the same a step, in units of 2^-24: dualkv_arithmetic.acc_gain with the sign reversed
 *   rms_signed_u   products of random sign: rms error over n 2^-24 sum |a||b|
 *   same_bits      wgmma gave the bits of mma.sync in every chain of positive products
 *
 * All rows of A are equal and so are all columns of B: each result is one dot product, and no layout matters
 * but k's order in fragments, which is the same for both instructions. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "launch.h"
#include "mma.cuh"

#define CHAINS 32
#define LENGTHS 6
static const int lengths[LENGTHS] = {64, 256, 1024, 4096, 16384, 65536};

/* Which values a step multiplies. */
enum { POSITIVE, SIGNED, ALIGN, CUT };
struct probe_case {
    int kind, steps, k; /* ALIGN: products 2^-k */
    float start;        /* ALIGN, CUT: the accumulator's first value */
};
struct probe_result {
    float got;
    double exact, magnitude;
};

static __device__ __forceinline__ float
probe_uniform(unsigned x) { /* in (1/4, 1), 8 bits: exact in bf16 and fp16 */
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    return ((x >> 24 & 127) + 128) * (x & 1 ? 0x1p-8f : 0x1p-9f);
}

/* Element k of A (side 0) or B (side 1) at a step of a chain. */
static __device__ float probe_value(probe_case p, int chain, int step, int k, int side) {
    if (p.kind == ALIGN) return side ? 1.f : exp2f((float)-p.k);
    if (p.kind == CUT) return k ? 0.f : side ? 0x1.8p-10f : copysignf(0x1p-14f, p.start);
    unsigned id = ((unsigned)(chain * 65536 + step) * 16 + k) * 2 + side;
    float x = probe_uniform(id * 0x9E3779B9u + 12345u);
    return p.kind == SIGNED && (__popc(id * 0x85ebca6bu) & 1) ? -x : x;
}

static __device__ void probe_exact(probe_case p, int chain, int step, double *sum, double *magnitude) {
    for (int k = threadIdx.x % 4; k < 16; k += 4) {
        double x = (double)probe_value(p, chain, step, k, 0) * (double)probe_value(p, chain, step, k, 1);
        *sum += x;
        *magnitude += fabs(x);
    }
}

static __device__ void probe_finish(probe_case p, int chain, float got, double sum, double magnitude,
                                    probe_result *out) {
    for (int m = 1; m < 4; m *= 2) {
        sum += __shfl_xor_sync(~0u, sum, m);
        magnitude += __shfl_xor_sync(~0u, magnitude, m);
    }
    if (threadIdx.x == 0) out[chain] = {got, sum + p.start, magnitude + fabsf(p.start)};
}

/* One warp a chain. */
template <typename T> __global__ void probe_mma(probe_case p, probe_result *out) {
    int t = threadIdx.x % 4;
    float c[4] = {p.start, p.start, p.start, p.start};
    double sum = 0, magnitude = 0;
    for (int step = 0; step < p.steps; step++) {
        uint32_t f[2][2]; /* [side][k half]: elements 2t, 2t+1 of each half */
        for (int side = 0; side < 2; side++)
            for (int h = 0; h < 2; h++)
                f[side][h] = half_ops<T>::pack(probe_value(p, blockIdx.x, step, 8 * h + 2 * t, side),
                                               probe_value(p, blockIdx.x, step, 8 * h + 2 * t + 1, side));
        uint32_t a[4] = {f[0][0], f[0][0], f[0][1], f[0][1]};
        half_ops<T>::mma(c, a, f[1][0], f[1][1]);
        probe_exact(p, blockIdx.x, step, &sum, &magnitude);
    }
    probe_finish(p, blockIdx.x, c[0], sum, magnitude, out);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <typename T> static __device__ void wgmma(float c[4], const uint32_t a[4], uint64_t b);
#define PROBE_WGMMA(T, name)                                                                                 \
    template <> __device__ __forceinline__ void wgmma<T>(float c[4], const uint32_t a[4], uint64_t b) {      \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                              \
                     "wgmma.fence.sync.aligned;\n"                                                           \
                     "wgmma.mma_async.sync.aligned.m64n8k16.f32." name "." name                              \
                     " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;\n"                                      \
                     "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}"                 \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                    \
                     : "memory");                                                                            \
    }
PROBE_WGMMA(__nv_bfloat16, "bf16")
PROBE_WGMMA(__half, "f16")
#endif

/* One warpgroup a chain: A from registers, B (16 x 8, no swizzle: two core matrices of 8 columns x 8 k, 128
 * bytes each) from shared memory. */
template <typename T> __global__ void __launch_bounds__(128) probe_wgmma(probe_case p, probe_result *out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    __shared__ __align__(128) T b[2][8][8];
    int t = threadIdx.x % 4;
    float c[4] = {p.start, p.start, p.start, p.start};
    double sum = 0, magnitude = 0;
    uint64_t descriptor = (smem_addr(b) >> 4 & 0x3fff) | (128ull >> 4) << 16 | (128ull >> 4) << 32;
    for (int step = 0; step < p.steps; step++) {
        uint32_t f[2];
        for (int h = 0; h < 2; h++)
            f[h] = half_ops<T>::pack(probe_value(p, blockIdx.x, step, 8 * h + 2 * t, 0),
                                     probe_value(p, blockIdx.x, step, 8 * h + 2 * t + 1, 0));
        uint32_t a[4] = {f[0], f[0], f[1], f[1]};
        int k = threadIdx.x % 16;
        b[k / 8][threadIdx.x / 16][k % 8] = half_ops<T>::from(probe_value(p, blockIdx.x, step, k, 1));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        wgmma<T>(c, a, descriptor);
        __syncthreads();
        probe_exact(p, blockIdx.x, step, &sum, &magnitude);
    }
    probe_finish(p, blockIdx.x, c[0], sum, magnitude, out);
#else
    (void)p;
    (void)out;
#endif
}

typedef void (*probe_kernel)(probe_case, probe_result *);

static cudaError_t probe_run(probe_kernel k, int threads, probe_case p, int chains, probe_result *device,
                             probe_result *host) {
    k<<<(unsigned)chains, (unsigned)threads>>>(p, device);
    cudaError_t e = cudaGetLastError();
    return e != cudaSuccess ? e
                            : cudaMemcpy(host, device, sizeof *host * (size_t)chains, cudaMemcpyDeviceToHost);
}

static void put(char *json, size_t n, const char *fmt, double x) {
    size_t used = strlen(json);
    if (used < n) snprintf(json + used, n - used, fmt, x);
}

/* Appends UNIT; bits[LENGTHS][CHAINS]: results of the positive chains. */
static cudaError_t probe_unit(probe_kernel k, int threads, probe_result *device, char *json, size_t n,
                              float bits[LENGTHS][CHAINS]) {
    probe_result r[CHAINS];
    cudaError_t e = cudaSuccess;
    int aligned = 0, toward_zero = 1;
    for (int b = 1; b <= 27 && e == cudaSuccess;
         b++) { /* 1 + 16 2^-27 still has 24 bits; 2^-24 is fp16's smallest */
        probe_case p = {ALIGN, 1, b < 24 ? b : 24, b < 24 ? 1.f : ldexpf(1.f, b - 24)};
        if ((e = probe_run(k, threads, p, 1, device, r)) == cudaSuccess && r[0].got == r[0].exact)
            aligned = b;
    }
    for (int s = -1; s <= 1 && e == cudaSuccess; s += 2) {
        probe_case p = {CUT, 1, 0, (float)s};
        if ((e = probe_run(k, threads, p, 1, device, r)) == cudaSuccess) toward_zero &= r[0].got == (float)s;
    }
    put(json, n, "{\"aligned_bits\": %.0f", aligned);
    put(json, n,
        toward_zero ? ", \"toward_zero\": true, \"chain\": [" : ", \"toward_zero\": false, \"chain\": [", 0);
    for (int i = 0; i < LENGTHS && e == cudaSuccess; i++) {
        double gain = 0, square = 0;
        probe_case p = {POSITIVE, lengths[i], 0, 0.f};
        if ((e = probe_run(k, threads, p, CHAINS, device, r)) != cudaSuccess) break;
        for (int j = 0; j < CHAINS; j++) {
            gain += (r[j].got - r[j].exact) / r[j].exact / CHAINS;
            bits[i][j] = r[j].got;
        }
        p.kind = SIGNED;
        if ((e = probe_run(k, threads, p, CHAINS, device, r)) != cudaSuccess) break;
        for (int j = 0; j < CHAINS; j++) square += pow((r[j].got - r[j].exact) / r[j].magnitude, 2) / CHAINS;
        put(json, n, i ? ", {\"n\": %.0f" : "{\"n\": %.0f", lengths[i]);
        put(json, n, ", \"gain\": %.3g", gain);
        put(json, n, ", \"gain_u\": %.3f", gain / lengths[i] * 0x1p24);
        put(json, n, ", \"rms_signed_u\": %.4f}", sqrt(square) / lengths[i] * 0x1p24);
    }
    put(json, n, "]}", 0);
    return e;
}

cudaError_t dkv_cudaProbe(char *json, size_t n) {
    probe_result *device = NULL;
    static float bits[4][LENGTHS][CHAINS];
    int which, major = 0, minor = 0;
    cudaError_t e = cudaGetDevice(&which);
    if (n) json[0] = 0;
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, which);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, which);
    if (e == cudaSuccess) e = cudaMalloc(&device, sizeof *device * CHAINS);
    bool hopper = major == 9 && minor == 0;
    put(json, n, "{\"mma_sync\": {\"bf16\": ", 0);
    if (e == cudaSuccess) e = probe_unit(probe_mma<__nv_bfloat16>, 32, device, json, n, bits[0]);
    put(json, n, ", \"fp16\": ", 0);
    if (e == cudaSuccess) e = probe_unit(probe_mma<__half>, 32, device, json, n, bits[1]);
    put(json, n, hopper ? "}, \"wgmma\": {\"bf16\": " : "}, \"wgmma\": null}", 0);
    if (hopper) {
        if (e == cudaSuccess) e = probe_unit(probe_wgmma<__nv_bfloat16>, 128, device, json, n, bits[2]);
        put(json, n, ", \"fp16\": ", 0);
        if (e == cudaSuccess) e = probe_unit(probe_wgmma<__half>, 128, device, json, n, bits[3]);
        put(json, n,
            memcmp(bits[0], bits[2], 2 * sizeof bits[0]) ? "}, \"same_bits\": false}"
                                                         : "}, \"same_bits\": true}",
            0);
    }
    cudaFree(device);
    return e;
}
