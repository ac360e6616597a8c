/* oracle_twin_backward.cu: dQ, dK, dV, dSink of the twin, one block of rows, given the kernel's own O and LSE
 * (ref/twin_backward.c). */
#include <float.h>

#include "oracle_twin.cuh"

typedef struct delta_end {
    int64_t q_row, tq;
    int32_t m, d, g, sub_m, hq, head0, dtype, exact, has_o, fp32; /* fp32: vector arithmetic with fp32's smallest numbers */
    const double *d_o, *truth; /* [m, d]; packed */
    const double *o_exact, *o_var, *v_mean2, *terms;
    const void *kernel_o, *raw; /* raw: dO as given, where operands of products are rounded; NULL */
    const float *d_lse, *sink;
    double p_unit2; /* ROUND_VAR u^2 of P's format */
    double *sink_y, *sink_v, *own;
} delta_end;

/* delta = dO . O - dLSE of the kernel's own O (or of its O before rounding, where it says so); a thread a
 * row. */
__global__ void delta_twin_kernel(delta_end k, __grid_constant__ const dkv_twin_units u, dkv_rows r) {
    DKV_GRID_LOOP(i, k.m) {
        const int64_t vec = (k.q_row + i / k.g) * k.hq + k.head0 + i % k.g;
        const int64_t one = (k.head0 + i % k.g) * k.tq + k.q_row + i / k.g;
        double sum = 0, var = 0, prod = k.exact ? u.z.unit2 : u.z.prod2;
        for (int c = 0; c < k.d; c++) {
            const int64_t e = i * k.d + c;
            const double d_o = k.raw ? dkv_decodeOne(k.raw, k.dtype, vec * k.d + c) : k.d_o[e];
            double o, v = 0;
            if (!k.exact) {
                o = dkv_decodeOne(k.kernel_o, k.dtype, vec * k.d + c);
            } else if (k.has_o) {
                o = k.o_exact[e];
                v = k.o_var[e];
            } else { /* P's roundings in it are not known: the truth, and their variance */
                o = k.truth[vec * k.d + c];
                v = k.p_unit2 * (o * o + k.v_mean2[i / k.sub_m * k.d + c] / fmax(k.terms[i], 1.0));
            }
            const double x = o * d_o, old = sum;
            sum += x;
            var += (old != 0 && x != 0 ? u.z.unit2 * sum * sum : 0) + prod * x * x + v * d_o * d_o;
            var += k.fp32 && x != 0 && fabs(x) < 0x1p-126 ? 0x1p-298 : 0; /* a product of fp32's smallest unit */
        }
        if (k.d_lse) {
            const double by = (double)k.d_lse[one];
            sum -= by;
            k.own[i] = by != 0 && isfinite(sum) ? u.z.unit2 * sum * sum : 0;
            var += k.own[i];
        }
        if (!isfinite(var)) var = 0;
        r.delta[i] = sum;
        r.delta_var[i] = var;
        if (!k.sink) continue;
        const double lse = r.lse[i], x = (double)k.sink[i % k.g] - lse, p = lse == -INFINITY ? 0 : exp(x),
                     y = p * sum;
        k.sink_y[one] = y;
        double more = p * p * var + y * y * (p > 0 ? u.z.exp2 + u.z.unit2 * (x * x + 1) : 0);
        if (k.fp32 && p < 0x1p-126) /* below fp32's normal numbers p may be anything from 0 on */
            more += (p * p + 0x1p-298) * sum * sum;
        if (k.fp32 && y != 0 && fabs(y) < 0x1p-126) more += 0x1p-298;
        k.sink_v[one] = more;
    }
}

typedef struct backward_walk {
    double *p, *ds, *w_p, *w_ds, *w_row, *size; /* [m, ld]; p over the scores, ds over dP; size: |dS| */
    const float *sq, *dot;                      /* chains of dP */
    const double *o_norm, *v_norm, *o_root, *v_root;
    const float *equal, *equal_v; /* of the block's rows; as dV has them */
    const double *d_lse, *mean_d_lse, *delta_own; /* of the block's rows; NULL: no dLSE, or dS is rounded */
    double *count, *size1, *squares; /* [subs, max_m]: terms that move a sum of P, sums of |dS|, of dS^2 */
    bool lse_stands_in;
    dkv_step_rows step;
    int64_t max_m;
} backward_walk;

#define AHEAD 4
/* A warp a row. PLAIN: what is declared is what dkv_twinPlain says. */
template <bool PLAIN>
__global__ void __launch_bounds__(128, 4)
    backward_twin_kernel(dkv_area t, __grid_constant__ const dkv_twin_units units,
                         __grid_constant__ const dkv_twin_fit fit_s,
                         __grid_constant__ const dkv_twin_fit fit_dp, score_view v, dkv_rows r,
                         backward_walk b) {
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (i >= t.m) return;
    const dkv_twin_units u = PLAIN ? dkv_plainUnits(units) : units;
    if (PLAIN) t.slopes = NULL;
    const double given = r.lse[i], lse = given == -INFINITY ? 0 : given, delta = r.delta[i],
                 delta_var = r.delta_var[i];
    const double o_norm = b.o_norm[i], o_root = b.o_root[i], alike = (double)b.equal[i], alike_v = (double)b.equal_v[i];
    dkv_twin_row row = {lse, u.z.exp2 + (b.lse_stands_in ? dkv_twinStandsIn(&u, lse) : 0), delta, delta_var, 1, 0, 0};
    if (b.d_lse) row.alike = alike_v / alike, row.shift = b.mean_d_lse[i] - b.d_lse[i], row.own_var = b.delta_own[i];
    for (int base = 0, sub = 0; base < t.n; base += DKV_SUB_KEYS, sub++) {
        double p[PER_LANE], sum = 0, count = 0, size = 0, squares = 0;
#pragma unroll
        for (int k0 = 0; k0 < PER_LANE; k0 += AHEAD) {
            double s[AHEAD], vs[AHEAD], dp[AHEAD], vd[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) { /* loaded before anything is stored, where they may lie */
                const int j = base + (k0 + k) * 32 + lane;
                const int64_t at = (int64_t)i * t.ld + j;
                if (j >= t.n) continue;
                s[k] = scoreOf(t, u, fit_s, v, i, j, &vs[k]);
                dp[k] = b.ds[at];
                const int bin = dkv_chainBin(b.sq[at]);
                vd[k] = u.z.step2 * fit_dp.var[bin] * b.sq[at] * (o_norm * b.v_norm[j]);
                if (u.z.gain > 0) dp[k] += fit_dp.gain[bin] * b.dot[at] * (o_root * b.v_root[j]);
                if (!u.s_rounded) continue;
                const double y = dkv_roundBy(u.round_s, dp[k]);
                vd[k] = dkv_flip(dp[k], y, vd[k], dkv_spacingAt(u.ulp_s, fabs(dp[k])));
                dp[k] = y;
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int j = base + (k0 + k) * 32 + lane;
                const int64_t at = (int64_t)i * t.ld + j;
                p[k0 + k] = 0;
                if (j >= t.n) continue;
                dkv_twin_pair x = {0, 0, 0, 0, 0};
                if (s[k] > -DBL_MAX)
                    x = dkv_formulaTwinPair(&u, &row, s[k], exp(s[k] - lse), dp[k], u.softcap > 0 ? v.cap[at] : 0, vs[k],
                                            vd[k]);
                b.p[at] = p[k0 + k] = x.p;
                b.ds[at] = x.ds;
                b.w_p[at] = x.w_p * alike_v;
                b.w_ds[at] = x.w_ds * alike;
                b.w_row[at] = x.w_row;
                b.size[at] = isfinite(x.ds) ? fabs(x.ds) : 0;
                sum += x.p;
                size += fabs(x.ds);
                squares += x.ds * x.ds;
            }
        }
        sum = dkv_warpSum(sum);
        size = dkv_warpSum(size);
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) count += p[k] > u.z.stuck * sum;
        count = dkv_warpSum(count);
        squares = dkv_warpSum(squares);
        if (lane == 0) {
            b.count[sub * b.max_m + i] = count;
            b.size1[sub * b.max_m + i] = size;
            b.squares[sub * b.max_m + i] = squares;
        }
    }
}

/* The chains of dQ: a thread a row, a warp a block. */
__global__ void __launch_bounds__(32) walk_kernel(dkv_area t, double stuck, backward_walk b) {
    __shared__ double tile[32][33];
    const int i0 = blockIdx.x * 32, i = i0 + (int)threadIdx.x;
    for (int base = 0, sub = 0; base < t.n; base += DKV_SUB_KEYS, sub++) {
        const int n = t.n - base < DKV_SUB_KEYS ? t.n - base : DKV_SUB_KEYS;
        const int64_t at = sub * b.max_m + (i < t.m ? i : 0);
        const double squares = b.squares[at];
        const dkv_formula_step k =
            walkRow(b.ds, t.ld, i0, t.m, base, n, tile, b.size1[at], squares, stuck * sqrt(squares));
        if (i < t.m) putStep(b.step, at, k);
    }
}

/* A thread a key and a CPU block of rows: terms that move a column's sum of P, sums of squares. */
__global__ void columns_kernel(dkv_area t, int sub_m, double stuck, const double *p, const double *ds,
                               double *n, double *p2, double *ds2) {
    const int j = (int)(blockIdx.x * blockDim.x + threadIdx.x), b = (int)blockIdx.y;
    if (j >= t.n) return;
    const int end = (b + 1) * sub_m < t.m ? (b + 1) * sub_m : t.m;
    double sum = 0, count = 0, x2 = 0, y2 = 0;
    for (int i = b * sub_m; i < end; i++) {
        const double x = p[(int64_t)i * t.ld + j], y = ds[(int64_t)i * t.ld + j];
        count += x > stuck * sum;
        sum += x;
        x2 += x * x;
        y2 += y * y;
    }
    n[b * (int64_t)t.ld + j] = count;
    p2[b * (int64_t)t.ld + j] = x2;
    ds2[b * (int64_t)t.ld + j] = y2;
}

typedef struct key_parts {         /* of one tile */
    const double *sum;             /* [subm, n, d] */
    const double *count, *squares; /* [subm, ld] */
    const double *mean2, *alike;   /* [subm, d], [subm] */
    double *x, *var;               /* of the tile's first key: element (j, c) at j * ld_x + c */
    double *spread, *square;       /* of the tile's first key, [n, d] */
    const double *done;            /* [n]: terms so far, in all accumulators */
    int64_t ld, ld_x;
    int32_t n, d, subm, parts;
    double fold, squares_by;
} key_parts;

/* What a warp's lanes find out about a part each, for all columns. */
typedef struct part_key {
    dkv_formula_walk walk;
    double alike, within, squares;
} part_key;

template <bool ANYHOW>
__global__ void __launch_bounds__(128) add_keys_kernel(__grid_constant__ const dkv_noise z, key_parts k) {
    __shared__ part_key shared[4][32];
    const int j = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    const int c0 = (int)blockIdx.y * 32 * COLUMNS + lane;
    part_key *const part = shared[threadIdx.x / 32];
    if (j >= k.n) return;
    double x[COLUMNS], var[COLUMNS], spread[COLUMNS] = {}, square[COLUMNS] = {}, done = k.done[j] / k.parts;
#pragma unroll
    for (int q = 0; q < COLUMNS; q++) {
        const int64_t at = j * k.ld_x + c0 + q * 32;
        if (c0 + q * 32 < k.d) x[q] = k.x[at], var[q] = k.var[at];
    }
    for (int b0 = 0; b0 < k.subm; b0 += 32) {
        const int here = k.subm - b0 < 32 ? k.subm - b0 : 32;
        const double n = lane < here ? k.count[(b0 + lane) * k.ld + j] / k.parts : 0, before = sumBefore(n, lane);
        __syncwarp();
        if (lane < here) {
            const dkv_formula_step step = dkv_formulaEven(n, k.squares_by * k.squares[(b0 + lane) * k.ld + j] / k.parts);
            part[lane].walk = dkv_formulaWalk(&z, step, k.fold, done + before);
            part[lane].alike = dkv_twinAlike(k.alike[b0 + lane]);
            part[lane].within = ANYHOW ? dkv_twinPathWithin(&z, k.fold, n, step.squares) : 0;
            part[lane].squares = step.squares;
        }
        __syncwarp();
        done = __shfl_sync(~0u, done + before + n, 31);
        for (int b = 0; b < here; b++) {
            const part_key &p = part[b];
#pragma unroll
            for (int q = 0; q < COLUMNS; q++) {
                const int c = c0 + q * 32;
                if (c >= k.d) continue;
                const double old = x[q], mean2 = k.mean2[(b0 + b) * k.d + c];
                x[q] += k.sum[((b0 + b) * (int64_t)k.n + j) * k.d + c];
                var[q] += p.alike * dkv_formulaWalked(&p.walk, old, x[q], mean2) + p.within * mean2;
                if (!ANYHOW) continue;
                spread[q] += (x[q] - old) * (x[q] - old);
                square[q] += p.squares * mean2;
            }
        }
    }
#pragma unroll
    for (int q = 0; q < COLUMNS; q++) {
        const int64_t at = j * k.ld_x + c0 + q * 32;
        if (c0 + q * 32 >= k.d) continue;
        k.x[at] = x[q];
        k.var[at] = var[q];
        if (!ANYHOW) continue;
        k.spread[(int64_t)j * k.d + c0 + q * 32] += spread[q];
        k.square[(int64_t)j * k.d + c0 + q * 32] += square[q];
    }
}

/* The slow way, as dkv_gemmKeys has it: m rows first, first + step, ... of the block at `base`. */
__global__ void careful_keys_kernel(dkv_area t, int base, int m, int first, int step, int d, double alpha,
                                    const double *w, const double *x, double *c) {
    DKV_GRID_LOOP(e, (int64_t)t.n * d) {
        const int j = (int)(e / d), k = (int)(e % d);
        double sum = 0;
        for (int i = 0; i < m; i++) {
            const int row = base + first + i * step;
            if (dkv_seesPair(t, row, j)) sum += w[(int64_t)row * t.ld + j] * x[(int64_t)row * d + k];
        }
        c[e] = alpha * sum;
    }
}

static int carefulKeys(dkv_device_oracle *o, const dkv_area *t, int base, int m, int first, int step, int d,
                       double alpha, const double *w, const double *x, double *c) {
    careful_keys_kernel<<<dkv_blocksFor((int64_t)t->n * d, 128), 128, 0, o->stream>>>(
        *t, base, m, first, step, d, alpha, w, x, c);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

typedef struct row_set { /* the rows of one accumulator: all stacked rows, or those of one query head */
    int32_t first, step;
} row_set;

/* parts [subm][n, d] = alpha w^T x over the rows of each CPU block. */
static int partKeys(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *w,
                    const double *x, row_set rows, bool careful, double *part) {
    const int sub = (int)(o->sub_rows * o->g), full = t->m / sub;
    const double zero = 0, *w0 = w + (int64_t)rows.first * t->ld, *x0 = x + (int64_t)rows.first * d;
    const int ld_w = t->ld * rows.step, ld_x = d * rows.step;
    for (int b = 0; b * sub < t->m; b++) {
        const int m = (t->m - b * sub < sub ? t->m - b * sub : sub) / rows.step;
        const double *wb = w0 + (int64_t)b * sub * t->ld, *xb = x0 + (int64_t)b * sub * d;
        double *to = part + (int64_t)b * t->n * d;
        cublasStatus_t e;
        if (careful && t->vis != 1) {
            DKV_TRY(carefulKeys(o, t, b * sub, m, rows.first, rows.step, d, alpha, w, x, to));
            continue;
        }
        if (b == 0 && full > 1) { /* all whole blocks in one call */
            o->flops += 2.0 * full * m * t->n * d;
            e = o->blas->batched(o->handle, CUBLAS_OP_N, CUBLAS_OP_T, d, t->n, m, &alpha, x0, ld_x,
                                 (long long)sub * d, w0, ld_w, (long long)sub * t->ld, &zero, part, d,
                                 (long long)t->n * d, full);
            b = full - 1;
        } else {
            o->flops += 2.0 * m * t->n * d;
            e = o->blas->dgemm(o->handle, CUBLAS_OP_N, CUBLAS_OP_T, d, t->n, m, &alpha, xb, ld_x, wb, ld_w,
                               &zero, to, d);
        }
        if (e != CUBLAS_STATUS_SUCCESS)
            return dkv_oracleFail(__FILE__, __LINE__, "cuBLAS: status %d", (int)e);
    }
    return 0;
}

/* x, var += sum over the rows of one accumulator. w, var_w, size_w [m, ld]; y, y2, y_size [m, d]. */
typedef struct key_sum {
    const double *w, *var_w, *size_w, *y, *y2, *y_size, *squares, *mean2;
    double alpha;
    int d;
    double *x, *var, *sizes, *spread, *square;
    int64_t ld_x;
} key_sum;

/* to [n, d] (leading dimension ld) += alpha w^T x over the rows of one accumulator. */
static int wholeKeys(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *w, const double *x,
                     row_set rows, double *to, int64_t ld) {
    const double one = 1;
    const int m = t->m / rows.step;
    o->flops += 2.0 * m * t->n * d;
    const cublasStatus_t e = o->blas->dgemm(o->handle, CUBLAS_OP_N, CUBLAS_OP_T, d, t->n, m, &alpha,
                                            x + (int64_t)rows.first * d, d * rows.step, w + (int64_t)rows.first * t->ld,
                                            t->ld * rows.step, &one, to, (int)ld);
    return e == CUBLAS_STATUS_SUCCESS ? 0 : dkv_oracleFail(__FILE__, __LINE__, "cuBLAS: status %d", (int)e);
}

static int addKeySum(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, row_set rows,
                     const key_sum &k, const double *alike) {
    dkv_twin_device *x = o->twin;
    const bool gain = x->u.z.gain > 0;
    DKV_TRY(partKeys(o, t, k.d, k.alpha, k.w, k.y, rows, !s->finite_rows, x->part[0]));
    if (gain) DKV_TRY(wholeKeys(o, t, k.d, fabs(k.alpha), k.size_w, k.y_size, rows, k.sizes, k.d));
    DKV_TRY(wholeKeys(o, t, k.d, k.alpha * k.alpha, k.var_w, k.y2, rows, k.var, k.ld_x));
    key_parts p = {x->part[0],
                   x->col_n,
                   k.squares,
                   k.mean2,
                   alike,
                   k.x,
                   k.var,
                   k.spread,
                   k.square,
                   x->key_n + t->k_row,
                   t->ld,
                   k.ld_x,
                   t->n,
                   k.d,
                   (int32_t)((t->m + x->sub_m - 1) / x->sub_m),
                   x->parts,
                   x->u.z.fold_dkv,
                   k.alpha * k.alpha};
    const dim3 grid = dkv_columnGrid(t->n, k.d);
    if (gain) add_keys_kernel<true><<<grid, 128, 0, o->stream>>>(x->u.z, p);
    else add_keys_kernel<false><<<grid, 128, 0, o->stream>>>(x->u.z, p);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

static int addKeySums(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, const backward_walk &b,
                      bool own) {
    const dkv_problem *p = o->p;
    dkv_twin_device *x = o->twin;
    const int64_t at = (s->seg->q_start + s->r0) * o->g, hkv = p->hkv;
    double *const *alike = own ? x->mean_own : x->mean_any;
    columns_kernel<<<dim3(dkv_blocksFor(t->n, 128), dkv_blocksFor(t->m, (int)x->sub_m)), 128, 0, o->stream>>>(
        *t, (int)x->sub_m, x->u.z.stuck, b.p, b.ds, x->col_n, x->col_p2, x->col_ds2);
    DKV_TRY_CUDA(cudaGetLastError());
    for (int e = 0; e < x->parts; e++) {
        const row_set rows = {e, x->parts > 1 ? o->g : 1};
        const bool one = !x->apart;
        const int64_t tk = o->l->view.tk, own_row = e * tk + t->k_row, row = one ? t->k_row * hkv + s->kvh : own_row;
        double *dk = one ? o->out[DKV_PART_TWIN][DKV_DK] : x->dk,
               *dk_var = one ? o->out[DKV_PART_SIGMA2][DKV_DK] : x->dk_var;
        double *dv = one ? o->out[DKV_PART_TWIN][DKV_DV] : x->dv,
               *dv_var = one ? o->out[DKV_PART_SIGMA2][DKV_DV] : x->dv_var;
        const key_sum v = {b.p,
                           b.w_p,
                           b.p,
                           o->d_o + at * p->dv,
                           x->o2 + at * p->dv,
                           o->ado + at * p->dv,
                           x->col_p2,
                           x->o_mean2,
                           1,
                           p->dv,
                           dv + row * p->dv,
                           dv_var + row * p->dv,
                           x->dv_size + own_row * p->dv,
                           x->dv_spread + own_row * p->dv,
                           x->dv_square + own_row * p->dv,
                           (one ? hkv : 1) * p->dv};
        const key_sum k = {b.ds,
                           b.w_ds,
                           b.size,
                           o->q + at * p->dqk,
                           x->q2 + at * p->dqk,
                           o->aq + at * p->dqk,
                           x->col_ds2,
                           x->q_mean2,
                           t->scale,
                           p->dqk,
                           dk + row * p->dqk,
                           dk_var + row * p->dqk,
                           x->dk_size + own_row * p->dqk,
                           x->dk_spread + own_row * p->dqk,
                           x->dk_square + own_row * p->dqk,
                           (one ? hkv : 1) * p->dqk};
        DKV_TRY(addKeySum(o, s, t, rows, v, alike[1]));
        DKV_TRY(addKeySum(o, s, t, rows, k, alike[0]));
    }
    if (x->anyhow || x->u.z.fold_dkv > 0)
        DKV_TRY(dkv_twinCountTerms(o, t->n, (t->m + x->sub_m - 1) / x->sub_m, t->ld, x->col_n, x->key_n + t->k_row,
                                   x->key_n2 + t->k_row));
    return 0;
}

static int addQueries(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, const backward_walk &b) {
    const int d = o->p->dqk;
    dkv_twin_device *x = o->twin;
    const int64_t key = t->k_row;
    const double scale = t->scale;
    row_parts k = {};
    k.sum = x->part[0];
    k.count = x->count;
    k.mean2 = x->k_mean2;
    k.alike = x->mean_kv;
    k.step = x->step;
    k.max_m = o->max_m;
    k.m = t->m;
    k.d = d;
    k.subs = (t->n + DKV_SUB_KEYS - 1) / DKV_SUB_KEYS;
    k.sub_m = (int32_t)x->sub_m;
    k.fold = x->u.z.fold_dq;
    k.done = x->row_done;
    k.down = o->a.key_order != 0;
    k.squares_by = scale * scale;
    walk_kernel<<<dkv_blocksFor(t->m, 32), 32, 0, o->stream>>>(*t, x->u.z.stuck, b);
    DKV_TRY_CUDA(cudaGetLastError());
    DKV_TRY(dkv_twinPartRows(o, t, d, scale, b.ds, o->k + key * d, !dkv_finiteKeys(o, s, t), x->part[0]));
    k.anyhow = x->u.z.gain > 0;
    if (k.anyhow) DKV_TRY(dkv_gemmRows(o, t, d, fabs(scale), b.size, o->ak + key * d, 1, x->size, false));
    DKV_TRY(dkv_gemmRows(o, t, d, scale * scale, b.w_row, x->k2 + key * d, 1, x->a2, false));
    DKV_TRY(dkv_gemmRows(o, t, d, scale, b.p, x->kf + key * d, 1, x->a1, false));
    DKV_TRY(dkv_twinAddRows(o, &k, dkv_twinRowSums(o, true)));
    return 0;
}

__global__ void finish_queries_kernel(int64_t q_row, int m, int g, int hq, int head0, int d, int stored,
                                      __grid_constant__ const dkv_twin_units u, double terms, dkv_rows r, row_sums x,
                                      double *twin, double *sigma2) {
    DKV_GRID_LOOP(e, (int64_t)m * d) {
        const int64_t i = e / d, at = ((q_row + i / g) * hq + head0 + i % g) * d + e % d;
        const double n = x.n ? x.n[i] : 0, sum = x.acc[e];
        dkv_twin_lost lost = {0, 0};
        if (n > 0) lost = dkv_twinLossAnyhow(&u.z, u.z.last_ds, u.z.fold_dq, sum, n, x.size[e], x.square[e]);
        const double y = sum - lost.mean;
        const double path = n > 0 ? dkv_twinPath(&u.z, u.z.fold_dq, sum, n, x.size[e], x.spread[e], x.n2[i] / (n * n)) : 0;
        const double var = path + lost.var + x.chain[e] + x.a2[e] + r.delta_var[i] * x.a1[e] * x.a1[e] +
                           dkv_twinFlushed(&u.z, u.z.fold_dq, y, u.scale, terms);
        twin[at] = y;
        sigma2[at] =
            dkv_stored(y, dkv_roundBy(u.round_out, y), var, stored ? 0 : dkv_spacingAt(u.ulp_out, fabs(y)));
    }
}

static int startBackward(dkv_device_oracle *o, dkv_scene *s, const void *kernel_o, const float *kernel_lse) {
    const dkv_problem *p = o->p;
    dkv_twin_device *x = o->twin;
    const int64_t q_row = s->seg->q_start + s->r0, at = q_row * o->g;
    const double unit = dkv_unitRoundoff(o->a.p_format);
    const unsigned blocks = dkv_blocksFor(s->m, 128);
    if (x->lse_stands_in) /* unrounded, as on the CPU */
        load_lse_kernel<<<blocks, 128, 0, o->stream>>>(q_row, o->l->view.tq, s->m, o->g, s->kvh * o->g,
                                                       o->out[DKV_PART_TRUTH][DKV_LSE], o->r.lse);
    else
        load_lse_kernel<<<blocks, 128, 0, o->stream>>>(q_row, o->l->view.tq, s->m, o->g, s->kvh * o->g, kernel_lse, o->r.lse);
    delta_end k = {q_row,
                   o->l->view.tq,
                   s->m,
                   p->dv,
                   o->g,
                   (int32_t)x->sub_m,
                   p->hq,
                   s->kvh * o->g,
                   p->dtype,
                   x->delta_exact,
                   x->has_o,
                   o->a.unit > 0x1p-40,
                   o->d_o + at * p->dv,
                   o->out[DKV_PART_TRUTH][DKV_O],
                   x->o_exact,
                   x->o_var,
                   x->last_mean,
                   o->r.terms,
                   kernel_o,
                   o->a.in_format != DUALKV_EXACT ? o->in.d_o : NULL,
                   o->in.d_lse,
                   o->in.sink ? o->in.sink + s->kvh * o->g : NULL,
                   DKV_ROUND_VAR * unit * unit,
                   x->sink_y,
                   x->sink_v,
                   x->delta_own};
    delta_twin_kernel<<<dkv_blocksFor(s->m, 64), 64, 0, o->stream>>>(k, x->u, o->r);
    DKV_TRY_CUDA(cudaGetLastError());
    DKV_TRY(dkv_twinZeroSums(o, s->m, p->dqk));
    for (double *y : {x->size, x->spread, x->square, x->row_n, x->row_n2}) {
        const size_t each = y == x->row_n || y == x->row_n2 ? 1 : (size_t)p->dqk;
        if (x->anyhow) DKV_TRY_CUDA(cudaMemsetAsync(y, 0, sizeof(double) * (size_t)s->m * each, o->stream));
    }
    DKV_TRY(dkv_twinMeans(o, o->d_o + at * p->dv, s->m, x->sub_m, p->dv, x->o_norm + at, x->o_mean2));
    DKV_TRY(dkv_twinMeans(o, o->q + at * p->dqk, s->m, x->sub_m, p->dqk, o->in.d_lse ? NULL : x->o_norm + at,
                          x->q_mean2));
    for (int all = 0; all < 2; all++) {
        DKV_TRY(dkv_twinMeanOf(o, x->equal_any[all] + at, s->m, x->sub_m, x->mean_any[all]));
        DKV_TRY(dkv_twinMeanOf(o, x->equal_own[all] + at, s->m, x->sub_m, x->mean_own[all]));
    }
    return 0;
}

int dkv_twinBackwardBlock(dkv_device_oracle *o, dkv_scene *s, const void *kernel_o, const float *kernel_lse) {
    const dkv_problem *p = o->p;
    dkv_twin_device *x = o->twin;
    const int64_t q_row = s->seg->q_start + s->r0, at = q_row * o->g;
    dkv_area t;
    score_view v;
    int32_t range = -1;
    DKV_TRY(startBackward(o, s, kernel_o, kernel_lse));
    float *dot = (float *)o->work[8], *sq = dot + o->max_m * o->ld;
    const bool shared = o->in.d_lse && !x->u.ds_rounded;
    while (dkv_nextOrdered(o, s, &range, &t)) {
        const bool own = t.k_row >= s->seg->k_start;
        DKV_TRY(dkv_twinLoadTile(o, s, &t, &v));
        DKV_TRY(dkv_gemmNt(o, &t, p->dv, 1, o->d_o + at * p->dv, o->v + t.k_row * p->dv, o->work[1]));
        DKV_TRY(
            dkv_chainTile(o, t.m, t.n, p->dv, t.ld, x->o1 + at * p->dv, x->v1 + t.k_row * p->dv, dot, sq));
        const backward_walk b = {o->work[0],
                                 o->work[1],
                                 o->work[2],
                                 o->work[3],
                                 o->work[4],
                                 o->work[5],
                                 sq,
                                 dot,
                                 x->o_norm + at,
                                 x->v_norm + t.k_row,
                                 x->o_root + at,
                                 x->v_root + t.k_row,
                                 (own ? x->equal_own : x->equal_any)[0] + at,
                                 (own ? x->equal_own : x->equal_any)[1] + at,
                                 shared ? x->d_lse + at : NULL,
                                 (own ? x->own_d_lse : x->any_d_lse) + at,
                                 x->delta_own,
                                 x->count,
                                 x->p1,
                                 x->p2,
                                 x->lse_stands_in,
                                 x->step,
                                 o->max_m};
        const auto kernel = dkv_twinPlain(&x->u, &t) ? backward_twin_kernel<true> : backward_twin_kernel<false>;
        kernel<<<dkv_blocksFor((int64_t)t.m * 32, 128), 128, 0, o->stream>>>(t, x->u, x->fit_s, x->fit_dp, v, o->r, b);
        DKV_TRY_CUDA(cudaGetLastError());
        DKV_TRY(addQueries(o, s, &t, b));
        DKV_TRY(addKeySums(o, s, &t, b, own));
        DKV_TRY(dkv_oracleTick(o, &t));
    }
    finish_queries_kernel<<<dkv_blocksFor((int64_t)s->m * p->dqk, 256), 256, 0, o->stream>>>(
        q_row, s->m, o->g, p->hq, s->kvh * o->g, p->dqk, x->u.scale_exact && o->a.out_format == DUALKV_FP32,
        x->u, (double)(p->nodes[s->node].context + p->nodes[s->node].len), o->r,
        dkv_twinRowSums(o, true), o->out[DKV_PART_TWIN][DKV_DQ],
        o->out[DKV_PART_SIGMA2][DKV_DQ]);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}
