/* oracle_twin_late.cuh: the maximum that P is taken against where it is not the largest score so far (ref/twin_max.c). */
#ifndef DKV_ORACLE_TWIN_LATE_CUH
#define DKV_ORACLE_TWIN_LATE_CUH

#include "oracle_twin.cuh"

/* The maximum of a row comes to a tile of largest score x (ref/twin_max.c: meet). */
typedef struct late_state {
    double max, vs;
    int doubt;
} late_state;
static __device__ __forceinline__ void meet(const dkv_late_rows &l, late_state &m, double x, double vs) {
    if (!(x > m.max)) return;
    m.doubt |= dkv_raiseDoubtful(m.max, x, l.slack, m.vs > 0 ? m.vs : 0, vs);
    const double next = dkv_raisedMax(m.max, x, l.slack);
    if (next != m.max) m.vs = vs;
    m.max = next;
}

/* Before any key; then (late) the row sum of the sink alone, in units of the maximum. */
static __global__ void start_late_kernel(int m, int g, const float *sinks, dkv_rows r, dkv_late_rows late) {
    DKV_GRID_LOOP(i, m) {
        late.vs[i] = DKV_SINKS_OWN;
        late.doubt[i] = late.slack > 0 && !late.tiled;
        if (late.first && isfinite(sinks[i % g])) r.max[i] = (double)sinks[i % g];
    }
}

static __global__ void start_sum_kernel(int m, int g, const float *sinks, dkv_noise z, dkv_rows r) {
    DKV_GRID_LOOP(i, m) {
        const double sink = (double)sinks[i % g], shift = sink - r.max[i];
        if (sink == -INFINITY) continue;
        r.sum[i] = isfinite(sink) ? exp(shift) : NAN;
        if (shift != 0) r.score_var[i] = r.sum[i] * r.sum[i] * (z.exp2 + z.unit2 * shift * shift);
    }
}

/* The variance of the first score in [a, b) that is x; lane's keys are lane, lane + 32, ... */
static __device__ __forceinline__ double varianceOf(const double *s, const double *vs, int a, int b, double x, int lane) {
    int first = 1 << 30;
    double own = 0;
#pragma unroll
    for (int k = PER_LANE - 1; k >= 0; k--) {
        const int j = k * 32 + lane;
        if (j >= a && j < b && s[k] == x) first = j, own = vs[k];
    }
    const int all = __reduce_min_sync(~0u, first);
    return __shfl_sync(~0u, own, all & 31);
}

#endif
