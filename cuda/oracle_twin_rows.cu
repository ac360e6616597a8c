/* oracle_twin_rows.cu: sums over keys, of O and dQ: parts of a tile's products, and what each addition of a part rounds. */
#include "oracle_twin.cuh"

/* sum[n] += each of [parts, ld], sum2 their squares; NULL: not. After all that read how many there were before. */
__global__ void count_terms_kernel(int64_t n, int64_t parts, int64_t ld, const double *count, double *sum, double *sum2) {
    DKV_GRID_LOOP(e, n) {
        for (int64_t b = 0; b < parts; b++) {
            const double x = count[b * ld + e];
            sum[e] += x;
            if (sum2) sum2[e] += x * x;
        }
    }
}

int dkv_twinCountTerms(dkv_device_oracle *o, int64_t n, int64_t parts, int64_t ld, const double *count, double *sum,
                       double *sum2) {
    count_terms_kernel<<<dkv_blocksFor(n, 128), 128, 0, o->stream>>>(n, parts, ld, count, sum, sum2);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

/* What a warp's lanes find out about a part each, for all columns. */
typedef struct part_row {
    dkv_formula_walk walk;
    double alike, within, squares, count, by, fade, old, to_mean; /* to_mean: 1 / wsum, 0: mean2 it is */
} part_row;

static __device__ __forceinline__ part_row partOf(const dkv_noise &z, const row_parts &k, int i, int b, double done) {
    part_row y = {};
    const int64_t at = b * k.max_m + i;
    dkv_formula_step step = getStep(k.step, at);
    step.squares *= k.squares_by;
    y.walk = dkv_formulaWalk(&z, step, k.fold, done);
    y.alike = dkv_twinAlike(k.alike[i / k.sub_m * k.subs + b]);
    y.count = k.count[at];
    y.within = k.anyhow ? dkv_twinPathWithin(&z, k.fold, y.count, step.squares) : 0;
    y.squares = step.squares;
    y.by = k.by ? k.by[at] : 1;
    if (y.by != 1) y.fade = k.fade[at], y.old = k.old[at];
    if (k.wsum && k.wsum[at] > 0) y.to_mean = 1 / k.wsum[at];
    return y;
}

/* Adds a tile's parts to the rows' sums, in order. */
template <bool ANYHOW>
__global__ void __launch_bounds__(128) add_rows_kernel(__grid_constant__ const dkv_noise z, row_parts k, row_sums x) {
    __shared__ part_row parts[4][32];
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    const int c0 = (int)blockIdx.y * 32 * COLUMNS + lane, mean0 = i / k.sub_m * k.subs;
    part_row *const part = parts[threadIdx.x / 32];
    if (i >= k.m) return;
    row_element s[COLUMNS];
    double spread[COLUMNS] = {}, square[COLUMNS] = {}, n = 0, n2 = 0, done = k.done[i];
    const int64_t row = (int64_t)i * k.d;
#pragma unroll
    for (int q = 0; q < COLUMNS; q++) {
        const int64_t e = row + c0 + q * 32;
        if (c0 + q * 32 < k.d) s[q] = row_element{x.acc[e], x.chain[e], ANYHOW ? 0 : x.loss[e], x.a1[e], x.a2[e]};
    }
    for (int b0 = 0; b0 < k.subs; b0 += 32) {
        const int here = k.subs - b0 < 32 ? k.subs - b0 : 32, own = k.down ? k.subs - 1 - b0 - lane : b0 + lane;
        const double terms = lane < here ? k.step.count[own * k.max_m + i] : 0, before = sumBefore(terms, lane);
        __syncwarp();
        if (lane < here) part[lane] = partOf(z, k, i, own, done + before);
        __syncwarp();
        done = __shfl_sync(~0u, done + before + terms, 31);
        for (int b = 0; b < here; b++) {
            const part_row &p = part[b];
            const int sub = k.down ? k.subs - 1 - b0 - b : b0 + b;
#pragma unroll
            for (int q = 0; q < COLUMNS; q++) {
                const int c = c0 + q * 32;
                const int64_t at = sub * (int64_t)k.m * k.d + row + c;
                if (c >= k.d) continue;
                const double a2 = k.a2 ? k.a2[at] : 0;
                if (p.by != 1) fadeElement(z, s[q], p.by, p.fade, p.old);
                const double old = s[q].acc, now = old + k.sum[at];
                /* V^2 weighted as the row sees it: by P's variance, nearly P^2 */
                const double mean2 = p.to_mean > 0 ? a2 * p.to_mean : k.mean2[(int64_t)(mean0 + sub) * k.d + c];
                s[q].acc = now;
                if (k.a1) s[q].a1 += k.a1[at];
                s[q].a2 += a2;
                s[q].chain += p.alike * dkv_formulaWalked(&p.walk, old, now, mean2) + p.within * mean2;
                if (!ANYHOW && k.size) s[q].loss += dkv_twinLoss(&z, k.fold, old, now, p.count, k.size[at]);
                if (ANYHOW) spread[q] += (now - old) * (now - old), square[q] += p.squares * mean2;
            }
            n += p.count;
            n2 += p.count * p.count;
        }
    }
#pragma unroll
    for (int q = 0; q < COLUMNS; q++) {
        const int64_t e = row + c0 + q * 32;
        if (c0 + q * 32 >= k.d) continue;
        x.acc[e] = s[q].acc;
        x.chain[e] = s[q].chain;
        if (k.by || k.a1) x.a1[e] = s[q].a1;
        if (k.by || k.a2) x.a2[e] = s[q].a2;
        if (ANYHOW) x.spread[e] += spread[q], x.square[e] += square[q];
        else x.loss[e] = s[q].loss;
    }
    if (!ANYHOW || c0 > 0) return;
    x.n[i] += n;
    x.n2[i] += n2;
}

int dkv_twinAddRows(dkv_device_oracle *o, const row_parts *k, row_sums sums) {
    dkv_twin_device *x = o->twin;
    const dim3 grid = dkv_columnGrid(k->m, k->d);
    if (k->anyhow) add_rows_kernel<true><<<grid, 128, 0, o->stream>>>(x->u.z, *k, sums);
    else add_rows_kernel<false><<<grid, 128, 0, o->stream>>>(x->u.z, *k, sums);
    DKV_TRY_CUDA(cudaGetLastError());
    return k->fold > 0 ? dkv_twinCountTerms(o, k->m, k->subs, k->max_m, k->step.count, x->row_done, NULL) : 0;
}

/* parts [subs][m, d] = alpha w [:, 256 keys] x [256 keys, d]. */
int dkv_twinPartRows(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *w,
                     const double *x, bool careful, double *part) {
    const int full = t->n / DKV_SUB_KEYS;
    const double zero = 0;
    if (careful && t->vis != 1) {
        for (int b = 0; b * DKV_SUB_KEYS < t->n; b++) {
            dkv_area u = *t;
            u.j0 += b * DKV_SUB_KEYS;
            u.n = t->n - b * DKV_SUB_KEYS < DKV_SUB_KEYS ? t->n - b * DKV_SUB_KEYS : DKV_SUB_KEYS;
            DKV_TRY(dkv_gemmRows(o, &u, d, alpha, w + b * DKV_SUB_KEYS, x + (int64_t)b * DKV_SUB_KEYS * d, 0,
                                 part + (int64_t)b * t->m * d, true));
        }
        return 0;
    }
    if (full > 0) {
        o->flops += 2.0 * t->m * full * DKV_SUB_KEYS * d;
        const cublasStatus_t e = o->blas->batched(o->handle, CUBLAS_OP_N, CUBLAS_OP_N, d, t->m, DKV_SUB_KEYS,
                                                  &alpha, x, d, (long long)DKV_SUB_KEYS * d, w, t->ld,
                                                  DKV_SUB_KEYS, &zero, part, d, (long long)t->m * d, full);
        if (e != CUBLAS_STATUS_SUCCESS)
            return dkv_oracleFail(__FILE__, __LINE__, "cuBLAS: status %d", (int)e);
    }
    if (t->n == full * DKV_SUB_KEYS) return 0;
    dkv_area u = *t;
    u.n = t->n - full * DKV_SUB_KEYS;
    return dkv_gemmRows(o, &u, d, alpha, w + full * DKV_SUB_KEYS, x + (int64_t)full * DKV_SUB_KEYS * d, 0,
                        part + (int64_t)full * t->m * d, false);
}
