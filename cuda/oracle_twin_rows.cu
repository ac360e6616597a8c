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

/* Adds a tile's parts to the rows' sums, in order. */
template <bool ANYHOW>
__global__ void __launch_bounds__(256) add_rows_kernel(__grid_constant__ const dkv_noise z, row_parts k, row_sums x) {
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32);
    const int c0 = (int)blockIdx.y * 32 * COLUMNS + threadIdx.x % 32, mean0 = i / k.sub_m * k.subs;
    if (i >= k.m) return;
    row_element s[COLUMNS];
    double spread[COLUMNS] = {}, n = 0, n2 = 0, done = k.done[i];
    const int64_t row = (int64_t)i * k.d;
#pragma unroll
    for (int q = 0; q < COLUMNS; q++) {
        const int64_t e = row + c0 + q * 32;
        if (c0 + q * 32 < k.d) s[q] = row_element{x.acc[e], x.chain[e], ANYHOW ? 0 : x.loss[e], x.a1[e], x.a2[e]};
    }
    for (int b = 0; b < k.subs; b++) {
        const int64_t at = b * k.max_m + i;
        const double count = k.count[at], wsum = k.wsum ? k.wsum[at] : 0, by = k.by ? k.by[at] : 1;
        const double alike = dkv_twinAlike(k.alike[mean0 + b]), fade = by != 1 ? k.fade[at] : 0, old = by != 1 ? k.old[at] : 0;
        dkv_formula_step step = getStep(k.step, at);
        step.squares *= k.squares_by;
        const double within = ANYHOW ? dkv_twinPathWithin(&z, k.fold, count, step.squares) : 0;
#pragma unroll
        for (int q = 0; q < COLUMNS; q++) {
            const int c = c0 + q * 32;
            const int64_t part = b * (int64_t)k.m * k.d + row + c;
            if (c >= k.d) continue;
            const double a2 = k.a2 ? k.a2[part] : 0;
            double mean2 = k.mean2[(int64_t)(mean0 + b) * k.d + c];
            if (by != 1) fadeElement(z, s[q], by, fade, old);
            const double before = s[q].acc, after = before + k.sum[part];
            s[q].acc = after;
            if (k.a1) s[q].a1 += k.a1[part];
            s[q].a2 += a2;
            /* V^2 weighted as the row sees it: by P's variance, nearly P^2 */
            if (wsum > 0) mean2 = a2 / wsum;
            s[q].chain += alike * dkv_formulaChain(&z, step, k.fold, done, before, after, mean2) + within * mean2;
            if (!ANYHOW && k.size) s[q].loss += dkv_twinLoss(&z, k.fold, before, after, count, k.size[part]);
            if (ANYHOW) spread[q] += (after - before) * (after - before);
        }
        done += step.count;
        n += count;
        n2 += count * count;
    }
#pragma unroll
    for (int q = 0; q < COLUMNS; q++) {
        const int64_t e = row + c0 + q * 32;
        if (c0 + q * 32 >= k.d) continue;
        x.acc[e] = s[q].acc;
        x.chain[e] = s[q].chain;
        if (k.by || k.a1) x.a1[e] = s[q].a1;
        if (k.by || k.a2) x.a2[e] = s[q].a2;
        if (ANYHOW) x.spread[e] += spread[q];
        else x.loss[e] = s[q].loss;
    }
    if (!ANYHOW || c0 > 0) return;
    x.n[i] += n;
    x.n2[i] += n2;
}

int dkv_twinAddRows(dkv_device_oracle *o, const row_parts *k, row_sums sums) {
    dkv_twin_device *x = o->twin;
    const dim3 grid = dkv_columnGrid(k->m, k->d);
    if (k->anyhow) add_rows_kernel<true><<<grid, 256, 0, o->stream>>>(x->u.z, *k, sums);
    else add_rows_kernel<false><<<grid, 256, 0, o->stream>>>(x->u.z, *k, sums);
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
