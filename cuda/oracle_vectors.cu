/* oracle_vectors.cu: the comparison's reductions: one vector (row and head) of a tensor against bound and
 * twin; the truth as a kernel's output. What is decided from them is verify/judge.c's. */
#include <math.h>

#include "../ref/dtype.h"
#include "oracle_impl.cuh"

#define EXACT 0x1p-42    /* as verify/judge.c: sigma below this share of the value, nothing was rounded; */
#define COINCIDENCE 1e-6 /* |z| below tells nothing about sigma */

typedef struct numbers { /* a format's numbers */
    int32_t lo, hi, p;   /* exponents of the smallest normal and the largest number, fraction bits */
    double most;         /* largest finite */
    dkv_rounder round;
} numbers;

static numbers numbersOf(int32_t format) {
    static const int lo[5] = {-126, -14, -126, -126, -1022}, hi[5] = {127, 15, 127, 127, 1023};
    static const int p[5] = {7, 10, 23, 10, 52};
    const int f = format < 0 || format > DUALKV_TF32 ? 4 : format;
    return numbers{lo[f], hi[f], p[f], dkv_maxFinite(format), dkv_makeRounder(format)};
}

static __device__ double ulpOf(const numbers &f, double x) {
    int e = (int)((unsigned long long)__double_as_longlong(x) >> 52 & 0x7ff) - 1023;
    if (x != x) return x;
    e = (e < f.lo ? f.lo : e > f.hi ? f.hi : e) - f.p;
    return ldexp(1.0, e);
}

/* err/bound, as verify/judge.c has it. */
static __device__ double ratioOf(const numbers &f, double got, double truth, double bound, bool lse) {
    if (isnan(truth) || bound == DKV_UNCLAIMED) return 0;
    if (isinf(truth)) return got == truth || (!isfinite(got) && !(lse && truth < 0)) ? 0 : (double)INFINITY;
    if (isinf(got)) {
        double half = ulpOf(f, f.most) / 2;
        return (got > 0) == (truth > 0) && fabs(truth) + bound >= f.most + half ? 0 : (double)INFINITY;
    }
    double err = fabs(got - truth);
    if (err == 0) return 0;
    return err <= bound ? err / bound : bound > 0 && err < INFINITY ? err / bound : (double)INFINITY;
}

typedef struct tensor {
    int64_t vectors, d;
    int32_t dtype; /* of got */
    bool lse;
    numbers f;
} tensor;

static tensor tensorOf(const dkv_device_oracle *o, dkv_tensor_id id) {
    const bool fp32 = id == DKV_LSE || id == DKV_DSINK;
    tensor t = {};
    t.d = fp32 ? 1 : id == DKV_DQ || id == DKV_DK ? o->p->dqk : o->p->dv;
    t.vectors = o->count[id] / t.d;
    t.dtype = fp32 ? DUALKV_FP32 : o->p->dtype;
    t.lse = id == DKV_LSE;
    t.f = numbersOf(fp32 ? DUALKV_FP32 : o->a.out_format);
    return t;
}

__global__ void bound_vectors_kernel(tensor t, const void *got, const double *truth, const double *bound,
                                     dkv_bound_vector *out) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (i >= t.vectors) return;
    double most = -1;
    int at = 0, bad = 0, odd = 0;
    for (int c = lane; c < t.d; c += 32) {
        const int64_t e = i * t.d + c;
        const double x = dkv_decodeOne(got, t.dtype, e), r = ratioOf(t.f, x, truth[e], bound[e], t.lse);
        bad += !(r <= 1);
        odd += !isfinite(x) && isfinite(truth[e]) && bound[e] != DKV_UNCLAIMED;
        if (r > most || isnan(r)) {
            most = isnan(r) ? (double)INFINITY : r;
            at = c;
        }
    }
    for (int s = 16; s; s >>= 1) {
        const double r = __shfl_xor_sync(~0u, most, s);
        const int c = __shfl_xor_sync(~0u, at, s);
        if (r > most || (r == most && c < at)) {
            most = r;
            at = c;
        }
        bad += __shfl_xor_sync(~0u, bad, s);
        odd += __shfl_xor_sync(~0u, odd, s);
    }
    if (lane) return;
    const int64_t e = i * t.d + at;
    dkv_bound_vector v = {
        most, dkv_decodeOne(got, t.dtype, e), truth[e], bound[e], t.d > 1 ? at : -1, bad, odd, 0};
    out[i] = v;
}

__global__ void hashes_kernel(tensor t, const double *twin, const double *sigma2, uint64_t *hash,
                              uint8_t *use) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (i >= t.vectors) return;
    unsigned long long h = 0;
    int any = 0;
    for (int c = lane; c < t.d; c += 32) {
        const double x = twin[i * t.d + c];
        unsigned long long w = (unsigned long long)__double_as_longlong(x) + (c + 1) * 0x9E3779B97F4A7C15ull;
        any |= isfinite(x) && isfinite(sigma2[i * t.d + c]);
        w = (w ^ w >> 30) * 0xBF58476D1CE4E5B9ull;
        w = (w ^ w >> 27) * 0x94D049BB133111EBull;
        h += w ^ w >> 31;
    }
    for (int s = 16; s; s >>= 1) h += __shfl_xor_sync(~0u, h, s);
    any = __any_sync(~0u, any);
    if (lane) return;
    hash[i] = h;
    use[i] = (uint8_t)any;
}

__global__ void twin_vectors_kernel(tensor t, double clip, const void *got, const double *twin,
                                    const double *sigma2, dkv_twin_vector *out) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (i >= t.vectors) return;
    double n = 0, square = 0, mean = 0, slope = 0, weight = 0, noise = 0;
    const double top = sqrt(clip);
    for (int c = lane; c < t.d; c += 32) {
        const int64_t at = i * t.d + c;
        const double x = twin[at], g = dkv_decodeOne(got, t.dtype, at), e = g - x;
        double s2 = sigma2[at];
        if (!isfinite(x) || !isfinite(s2)) continue;
        const double h = ulpOf(t.f, x);
        if (s2 <= EXACT * EXACT * x * x) { /* exact: only half a unit and more is an error */
            if (!(fabs(e) > h / 2)) continue;
            s2 = h * h / 12;
        }
        const double z = isfinite(e) ? e / sqrt(s2) : top;
        if (fabs(z) < COINCIDENCE) continue;
        n++;
        square += z * z < clip ? z * z : clip;
        mean += z > top ? top : z < -top ? -top : z;
        const double w = 1 / (s2 + h * h / 12);
        if (isfinite(e) && isfinite(w) && isfinite(x * x * w)) {
            const double near = x - dkv_roundBy(t.f.round, x);
            slope += w * x * (g - dkv_roundBy(t.f.round, x));
            weight += w * x * x;
            noise += s2 > near * near ? w * fabs(x) * sqrt(s2 - near * near) : 0;
        }
    }
    n = dkv_warpSum(n);
    square = dkv_warpSum(square);
    mean = dkv_warpSum(mean);
    slope = dkv_warpSum(slope);
    weight = dkv_warpSum(weight);
    noise = dkv_warpSum(noise);
    if (lane) return;
    dkv_twin_vector v = {n > 0 ? square / n : 0, n > 0 ? mean / n : 0, slope, weight, noise, n > 0, 0};
    out[i] = v;
}

__global__ void store_kernel(int64_t n, int dtype, dkv_rounder f, const double *x, void *out) {
    DKV_GRID_LOOP(e, n) {
        const double y = dkv_roundBy(f, x[e]);
        if (dtype == DUALKV_FP32) {
            ((float *)out)[e] = (float)x[e];
        } else if (dtype == DUALKV_BF16) {
            ((uint16_t *)out)[e] = (uint16_t)(__float_as_uint((float)y) >> 16);
        } else {
            const double a = fabs(y); /* exact in fp16 by now */
            const unsigned long long u = (unsigned long long)__double_as_longlong(a);
            const uint32_t normal = (uint32_t)((u >> 42) - (1008u << 10)),
                           small = (uint32_t)((a < 1 ? a : 0) * 0x1p24);
            const uint32_t special = 0x7c00u | ((uint32_t)(u >> 42) & 0x3ffu);
            const uint32_t sign = (uint32_t)((unsigned long long)__double_as_longlong(y) >> 48) & 0x8000u;
            ((uint16_t *)out)[e] = (uint16_t)(sign | (a < 0x1p-14 ? small : a < 65536 ? normal : special));
        }
    }
}

int dkv_storeTruth(dkv_device_oracle *o, dkv_tensor_id id, void *device) {
    const tensor t = tensorOf(o, id);
    if (o->count[id] == 0) return 0;
    store_kernel<<<dkv_blocksFor(o->count[id], 256), 256, 0, o->stream>>>(
        o->count[id], t.dtype, dkv_makeRounder(t.dtype), o->out[DKV_PART_TRUTH][id], device);
    DKV_TRY_CUDA(cudaGetLastError());
    DKV_TRY_CUDA(cudaStreamSynchronize(o->stream));
    return 0;
}

int64_t dkv_countVectors(const dkv_device_oracle *o, dkv_tensor_id id) { return tensorOf(o, id).vectors; }

/* Results of one launch over all vectors to host memory. */
static int fetch(dkv_device_oracle *o, void *device, void *host, size_t bytes) {
    cudaError_t e = cudaGetLastError();
    if (!e) e = cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, o->stream);
    if (!e) e = cudaStreamSynchronize(o->stream);
    cudaFree(device);
    DKV_TRY_CUDA(e);
    return 0;
}

int dkv_boundVectors(dkv_device_oracle *o, dkv_tensor_id id, const void *got, dkv_bound_vector *out) {
    const tensor t = tensorOf(o, id);
    dkv_bound_vector *x;
    if (t.vectors == 0) return 0;
    DKV_TRY_CUDA(cudaMalloc(&x, sizeof *x * (size_t)t.vectors));
    bound_vectors_kernel<<<dkv_blocksFor(t.vectors * 32, 256), 256, 0, o->stream>>>(
        t, got, o->out[DKV_PART_TRUTH][id], o->out[DKV_PART_BOUND][id], x);
    return fetch(o, x, out, sizeof *x * (size_t)t.vectors);
}

int dkv_twinHashes(dkv_device_oracle *o, dkv_tensor_id id, uint64_t *hash, uint8_t *use) {
    const tensor t = tensorOf(o, id);
    uint8_t *x;
    if (t.vectors == 0) return 0;
    DKV_TRY_CUDA(cudaMalloc(&x, 9 * (size_t)t.vectors));
    uint64_t *h = (uint64_t *)x;
    hashes_kernel<<<dkv_blocksFor(t.vectors * 32, 256), 256, 0, o->stream>>>(
        t, o->out[DKV_PART_TWIN][id], o->out[DKV_PART_SIGMA2][id], h, x + 8 * t.vectors);
    DKV_TRY_CUDA(
        cudaMemcpyAsync(use, x + 8 * t.vectors, (size_t)t.vectors, cudaMemcpyDeviceToHost, o->stream));
    return fetch(o, x, hash, 8 * (size_t)t.vectors);
}

int dkv_twinVectors(dkv_device_oracle *o, dkv_tensor_id id, const void *got, double clip,
                    dkv_twin_vector *out) {
    const tensor t = tensorOf(o, id);
    dkv_twin_vector *x;
    if (t.vectors == 0) return 0;
    DKV_TRY_CUDA(cudaMalloc(&x, sizeof *x * (size_t)t.vectors));
    twin_vectors_kernel<<<dkv_blocksFor(t.vectors * 32, 256), 256, 0, o->stream>>>(
        t, clip, got, o->out[DKV_PART_TWIN][id], o->out[DKV_PART_SIGMA2][id], x);
    return fetch(o, x, out, sizeof *x * (size_t)t.vectors);
}
