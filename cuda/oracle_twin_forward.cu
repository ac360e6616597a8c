/* oracle_twin_forward.cu: O and LSE of the twin, one block of rows (ref/twin_forward.c). Products of a tile are
 * cut at 256 keys (sums over keys) or at the CPU's blocks of rows (sums over rows) into parts, which one thread
 * an element then adds in order, with what each addition rounds. */
#include <float.h>

#include "oracle_twin.cuh"

typedef struct forward_walk {
    int32_t tile, mode; /* key tile (256 where undeclared); 0 running maximum, 1 table, 2 normalised by the
                           truth's LSE */
    int64_t max_m;
    const double *table;  /* [slots, max_m] */
    const float *equal_k; /* of the tile's first key */
    double *p, *w;        /* out, [m, ld]: P in units of the row's maximum after 256 keys; its variance */
    double *by, *fade, *old, *count, *p2; /* [subs, max_m] */
} forward_walk;

/* Largest score of each key tile, for the kernels whose tiles do not divide ours or come last first. */
__global__ void maxima_kernel(dkv_area t, __grid_constant__ const dkv_twin_units u,
                              __grid_constant__ const dkv_twin_fit fit, score_view v, int tile, int64_t max_m,
                              double *table) {
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (i >= t.m) return;
    for (int64_t at = 0; at < t.n;) {
        const int64_t slot = (t.offset + at) / tile;
        int64_t end = (slot + 1) * tile - t.offset;
        double top = -INFINITY, vs;
        end = end < t.n ? end : t.n;
        for (int64_t j = at + lane; j < end; j += 32) {
            const double x = scoreOf(t, u, fit, v, i, (int)j, &vs);
            top = x > top ? x : top;
        }
        top = dkv_warpMax(top);
        double *to = table + (t.slot0 + slot) * max_m + i;
        if (lane == 0) *to = top > *to ? top : *to;
        at = end;
    }
}

/* The running maximum in the kernel's order; the row's own from the start. */
__global__ void run_maxima_kernel(int m, int64_t slots, int64_t max_m, int last_first, double *table,
                                  dkv_rows r) {
    DKV_GRID_LOOP(i, m) {
        double top = -INFINITY;
        for (int64_t k = 0; k < slots; k++) {
            double *at = table + (last_first ? slots - 1 - k : k) * max_m + i;
            top = *at = *at > top ? *at : top;
        }
        r.max[i] = top;
    }
}

__global__ void fill_kernel(int64_t n, double x, double *out) { DKV_GRID_LOOP(e, n) out[e] = x; }

__global__ void start_twin_kernel(int m, dkv_rows r) {
    DKV_GRID_LOOP(i, m) {
        r.sum[i] = r.sum_var[i] = r.lost[i] = r.terms[i] = r.score_var[i] = 0;
        r.max[i] = -INFINITY;
    }
}

typedef struct row_state {
    double max, sum, sum_var, lost, terms, score_var;
} row_state;

/* What was summed is multiplied by exp(old maximum - new), whose error is the same for all of it. */
static __device__ __forceinline__ double fadeState(const dkv_formula_noise &z, row_state &x, double by,
                                                   double shift) {
    double by2 = by * by, rel = z.exp2 + z.unit2 * shift * shift;
    x.sum *= by;
    x.lost *= by;
    if (by > 0x1p-300) rel += dkv_formulaLeast(&z, by) / by2;
    x.score_var = x.score_var * by2 + rel * x.sum * x.sum;
    x.sum_var = x.sum_var * by2 + z.unit2 * x.sum * x.sum;
    return rel;
}

/* The row sum over keys [a, b) of the 256, one key tile or the part of it that lies here, term by term as the
 * kernel adds. x: terms; rel: variance of each. */
static __device__ __forceinline__ void sumTile(const dkv_twin_units &u, row_state &st, int a, int b, int lane,
                                               const double *x, const double *rel, const float *equal) {
    double part = 0, squares = 0, lost = 0, noise = 0;
    const double stuck = u.z.stuck, old = st.sum;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        if (k * 32 >= b || k * 32 + 32 <= a) continue;
        const int j = k * 32 + lane;
        const bool in = j >= a && j < b;
        const double y = in ? x[k] : 0;
        double run = y;
        for (int s = 1; s < 32; s <<= 1) {
            const double z = __shfl_up_sync(~0u, run, s);
            if (lane >= s) run += z;
        }
        const double whole = part + run, before = whole - y;
        const double less = y < before ? y : before, more = y < before ? before : y,
                     moves = less > stuck * more ? 1 : 0;
        const double h = dkv_formulaSpacingAt(u.ulp_sum, whole), alike = in ? (double)equal[j] : 0;
        squares += in ? moves * h * h * alike : 0;
        lost += in ? (1 - moves) * less : 0;
        noise += in ? rel[k] * alike : 0;
        part = __shfl_sync(~0u, whole, 31);
    }
    st.score_var += dkv_warpSum(noise);
    st.sum_var += dkv_warpSum(squares) / 12;
    st.lost += dkv_warpSum(lost);
    st.sum += part;
    if (old > part * stuck && part > old * stuck) {
        const double h = dkv_formulaSpacingAt(u.ulp_sum, st.sum);
        st.sum_var += h * h / 12;
    } else {
        st.lost += old < part ? old : part;
    }
}

/* A warp a row: 256 keys after another. */
__global__ void __launch_bounds__(128)
    forward_twin_kernel(dkv_area t, __grid_constant__ const dkv_twin_units u,
                        __grid_constant__ const dkv_twin_fit fit, score_view v, dkv_rows r, forward_walk f) {
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (i >= t.m) return;
    row_state st = {r.max[i], r.sum[i], r.sum_var[i], r.lost[i], r.terms[i], r.score_var[i]};
    const double lse = r.lse[i];
    for (int base = 0, sub = 0; base < t.n; base += DKV_SUB_KEYS, sub++) {
        const int n = t.n - base < DKV_SUB_KEYS ? t.n - base : DKV_SUB_KEYS;
        const int64_t first = (t.offset + base) / f.tile;
        double s[PER_LANE], vs[PER_LANE], ref[PER_LANE], x[PER_LANE], p[PER_LANE], old = st.max, top = old;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            const int j = k * 32 + lane;
            vs[k] = 0;
            s[k] = j < n ? scoreOf(t, u, fit, v, i, base + j, &vs[k]) : -INFINITY;
        }
        /* the reference of each key tile's P */
        for (int64_t slot = first, a = 0; a < n; slot++) {
            int64_t b = (slot + 1) * f.tile - t.offset - base;
            b = b < n ? b : n;
            double here = -INFINITY;
            if (f.mode == 0) {
#pragma unroll
                for (int k = 0; k < PER_LANE; k++) {
                    const int j = k * 32 + lane;
                    if (j >= a && j < b) here = s[k] > here ? s[k] : here;
                }
                here = dkv_warpMax(here);
                top = here > top ? here : top;
            }
            here = f.mode == 0 ? top : f.mode == 1 ? f.table[(t.slot0 + slot) * f.max_m + i] : lse;
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                const int j = k * 32 + lane;
                if (j >= a && j < b) ref[k] = here;
            }
            a = b;
        }
        double by = 1, rel = 0;
        if (f.mode == 0) {
            by = old == top ? 1 : exp(old - top);
            st.max = top;
        } else if (f.mode == 2) {
            st.max = lse;
        }
        if (by != 1) rel = fadeState(u.z, st, by, by > 0 ? old - top : 0);
        if (lane == 0) {
            f.by[sub * f.max_m + i] = by;
            f.fade[sub * f.max_m + i] = rel;
            f.old[sub * f.max_m + i] = st.sum;
        }
        for (int64_t slot = first, a = 0; a < n; slot++) {
            int64_t b = (slot + 1) * f.tile - t.offset - base;
            b = b < n ? b : n;
            double var[PER_LANE], here = -INFINITY;
            bool none = true;
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                const int j = k * 32 + lane;
                var[k] = 0;
                if (!(j >= a && j < b)) continue;
                double w = 0;
                here = ref[k];
                x[k] = p[k] = 0;
                if (!(here == -INFINITY)) {
                    const double fade = here == st.max ? 1 : exp(here - st.max), e = exp(s[k] - here);
                    const double d = s[k] > -DBL_MAX ? s[k] - here : 0,
                                 y = dkv_formulaWeightVar(&u.z, e, d, vs[k]);
                    none = false;
                    x[k] = e * fade;
                    var[k] = y * fade * fade;
                    if (u.p_rounded) {
                        const double q = dkv_roundBy(u.round_p, e);
                        w = dkv_formulaFlip(e, q, y, dkv_formulaSpacingAt(u.ulp_p, e)) * fade * fade;
                        p[k] = q * fade;
                    } else {
                        w = var[k] + x[k] * x[k] * u.z.prod_p2;
                        p[k] = x[k];
                    }
                }
                const int64_t at = (int64_t)i * t.ld + base + j;
                f.p[at] = p[k];
                f.w[at] = w;
            }
            if (__any_sync(~0u, !none)) sumTile(u, st, (int)a, (int)b, lane, x, var, f.equal_k + base);
            a = b;
        }
        double p2 = 0, count = 0;
        const double least = u.z.stuck * st.sum;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            if (k * 32 + lane >= n) continue;
            p2 += p[k] * p[k];
            count += p[k] > least;
        }
        p2 = dkv_warpSum(p2);
        count = dkv_warpSum(count);
        st.terms += count;
        if (lane == 0) {
            f.count[sub * f.max_m + i] = count;
            f.p2[sub * f.max_m + i] = p2;
        }
    }
    if (lane) return;
    r.max[i] = st.max;
    r.sum[i] = st.sum;
    r.sum_var[i] = st.sum_var;
    r.lost[i] = st.lost;
    r.terms[i] = st.terms;
    r.score_var[i] = st.score_var;
}

static __device__ __forceinline__ void fadeElement(const dkv_formula_noise &z, const row_sums &x, int64_t e,
                                                   double by, double rel, double old) {
    const double by2 = by * by;
    x.acc[e] *= by;
    x.loss[e] *= by;
    x.a1[e] = x.a1[e] * by2 + rel * old * x.acc[e];
    x.a2[e] = x.a2[e] * by2 + rel * x.acc[e] * x.acc[e];
    x.chain[e] = x.chain[e] * by2 + z.unit2 * x.acc[e] * x.acc[e] + dkv_formulaLeast(&z, x.acc[e]);
}

/* Adds a tile's parts to the rows' sums, in order. */
__global__ void add_rows_kernel(dkv_formula_noise z, row_parts k, row_sums x) {
    DKV_GRID_LOOP(e, (int64_t)k.m * k.d) {
        const int64_t i = e / k.d, c = e % k.d;
        for (int b = 0; b < k.subs; b++) {
            const int64_t at = b * k.max_m + i, part = b * (int64_t)k.m * k.d + e;
            if (k.by && k.by[at] != 1) fadeElement(z, x, e, k.by[at], k.fade[at], k.old[at]);
            const double before = x.acc[e], after = before + k.sum[part], n = k.count[at];
            x.acc[e] = after;
            if (k.a1) x.a1[e] += k.a1[part];
            if (k.a2) x.a2[e] += k.a2[part];
            x.chain[e] += dkv_formulaAlike(k.alike[b]) *
                          dkv_formulaChain(&z, k.fold, before, after, n,
                                           k.squares_by * k.squares[at] * k.mean2[b * k.d + c]);
            if (k.size) x.loss[e] += dkv_formulaLoss(&z, k.fold, before, after, n, k.size[part]);
        }
    }
}

int dkv_twinAddRows(dkv_device_oracle *o, const row_parts *k) {
    dkv_twin_device *x = o->twin;
    add_rows_kernel<<<dkv_blocksFor((int64_t)k->m * k->d, 256), 256, 0, o->stream>>>(
        x->u.z, *k, row_sums{o->acc, x->chain, x->loss, x->a1, x->a2});
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
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

int dkv_twinLoadTile(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, score_view *v) {
    const dkv_problem *p = o->p;
    dkv_twin_device *x = o->twin;
    const int64_t at = (s->seg->q_start + s->r0) * o->g, key = t->k_row;
    float *dot = (float *)o->work[7], *sq = dot + o->max_m * o->ld;
    DKV_TRY(dkv_gemmNt(o, t, p->dqk, t->scale, o->q + at * p->dqk, o->k + key * p->dqk, o->work[0]));
    DKV_TRY(dkv_finalScores(o, t, o->work[0], o->work[6]));
    DKV_TRY(dkv_chainTile(o, t->m, t->n, p->dqk, t->ld, x->q1 + at * p->dqk, x->k1 + key * p->dqk, dot, sq));
    DKV_TRY(dkv_twinMeans(o, o->k + key * p->dqk, t->n, DKV_SUB_KEYS, p->dqk, x->k_mean2));
    DKV_TRY(dkv_twinMeans(o, o->v + key * p->dv, t->n, DKV_SUB_KEYS, p->dv, x->v_mean2));
    DKV_TRY(dkv_twinMeanOf(o, x->equal_kv + key, t->n, DKV_SUB_KEYS, x->mean_kv));
    *v = score_view{o->work[0], o->work[6], sq, dot, x->q_norm + at, x->k_norm + key, x->u.z.gain};
    return 0;
}

static int fillTable(dkv_device_oracle *o, dkv_scene *s) {
    dkv_twin_device *x = o->twin;
    dkv_area t;
    score_view v;
    int32_t range = -1;
    int64_t slots = 0;
    for (int32_t r = 0; r < s->seg->range_count; r++)
        slots += (o->l->view.ranges[s->seg->range_begin + r].len + o->a.key_tile - 1) / o->a.key_tile;
    fill_kernel<<<1024, 256, 0, o->stream>>>(slots * o->max_m, -INFINITY, x->table_max);
    while (dkv_nextArea(o, s, &range, &t)) {
        DKV_TRY(dkv_twinLoadTile(o, s, &t, &v));
        maxima_kernel<<<dkv_blocksFor((int64_t)t.m * 32, 128), 128, 0, o->stream>>>(
            t, x->u, x->fit_s, v, o->a.key_tile, o->max_m, x->table_max);
    }
    run_maxima_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(s->m, slots, o->max_m, o->a.key_order,
                                                                       x->table_max, o->r);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

static int forwardTile(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t) {
    const int d = o->p->dv;
    dkv_twin_device *x = o->twin;
    score_view v;
    const int64_t key = t->k_row;
    DKV_TRY(dkv_twinLoadTile(o, s, t, &v));
    forward_walk f = {o->a.key_tile > 0 ? o->a.key_tile : DKV_SUB_KEYS,
                      x->p_normalised ? 2
                      : x->table      ? 1
                                      : 0,
                      o->max_m,
                      x->table_max,
                      x->equal_k + key,
                      o->work[0],
                      o->work[1],
                      x->by,
                      x->fade,
                      x->old,
                      x->count,
                      x->p2};
    forward_twin_kernel<<<dkv_blocksFor((int64_t)t->m * 32, 128), 128, 0, o->stream>>>(*t, x->u, x->fit_s, v,
                                                                                       o->r, f);
    DKV_TRY_CUDA(cudaGetLastError());
    row_parts k = {x->part[0],  NULL,     x->part[1], NULL,  x->by,
                   x->fade,     x->old,   x->count,   x->p2, x->v_mean2,
                   x->mean_kv,  o->max_m, t->m,       d,     (t->n + DKV_SUB_KEYS - 1) / DKV_SUB_KEYS,
                   x->u.z.fold, 1};
    DKV_TRY(dkv_twinPartRows(o, t, d, 1, o->work[0], o->v + key * d, !dkv_finiteKeys(o, s, t), x->part[0]));
    DKV_TRY(dkv_twinPartRows(o, t, d, 1, o->work[1], x->v2 + key * d, false, x->part[1]));
    if (!x->u.p_rounded) {
        DKV_TRY(dkv_twinPartRows(o, t, d, 1, o->work[1], x->ve + key * d, false, x->part[2]));
        k.a1 = x->part[2];
    }
    if (x->u.z.gain > 0) {
        DKV_TRY(dkv_twinPartRows(o, t, d, 1, o->work[0], o->av + key * d, false, x->part[3]));
        k.size = x->part[3];
    }
    DKV_TRY(dkv_twinAddRows(o, &k));
    DKV_TRY_CUDA(cudaMemcpyAsync(x->last_mean, x->v_mean2 + (k.subs - 1) * (int64_t)d,
                                 sizeof(double) * (size_t)d, cudaMemcpyDeviceToDevice, o->stream));
    return 0;
}

typedef struct forward_end {
    int64_t q_row, tq;
    int32_t m, d, g, hq, head0, p_normalised, fp32;
    const float *sink;       /* of the KV head's query heads; NULL */
    const double *v_mean2;   /* [d] */
    double *o_exact, *o_var; /* [m, d] */
    double *twin_o, *sigma2_o, *twin_lse, *sigma2_lse;
} forward_end;

/* A warp a row: the sink, LSE = max + log(sum), O. */
__global__ void finish_forward_twin_kernel(forward_end f, __grid_constant__ const dkv_twin_units u,
                                           dkv_rows r, row_sums x) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (i >= f.m) return;
    row_state st = {r.max[i], r.sum[i], r.sum_var[i], r.lost[i], r.terms[i], r.score_var[i]};
    const int64_t vec = (f.q_row + i / f.g) * f.hq + f.head0 + i % f.g,
                  one = (f.head0 + i % f.g) * f.tq + f.q_row + i / f.g;
    if (f.sink) { /* one more logit, whose value is 0, met after the keys */
        const double sink = (double)f.sink[i % f.g], top = sink > st.max ? sink : st.max;
        const double by = st.max == -INFINITY ? 0 : exp(st.max - top);
        if (f.p_normalised) {
            st.sum *= by;
            st.lost *= by;
            st.score_var *= by * by;
            st.sum_var *= by * by;
        } else if (by != 1) {
            const double rel = fadeState(u.z, st, by, by > 0 ? log(by) : 0);
            for (int c = lane; c < f.d; c += 32) fadeElement(u.z, x, i * f.d + c, by, rel, st.sum);
        }
        st.max = top;
        const double y = exp(sink - top), v = u.z.unit2 * (sink - top) * (sink - top) + u.z.exp2;
        st.sum += y;
        st.score_var += y * y * v;
        st.sum_var += u.z.unit2 * st.sum * st.sum;
    }
    if (st.sum == 0) { /* no key, no sink: exact */
        for (int c = lane; c < f.d; c += 32) {
            f.twin_o[vec * f.d + c] = f.sigma2_o[vec * f.d + c] = 0;
            f.o_exact[i * f.d + c] = f.o_var[i * f.d + c] = 0;
        }
        if (lane == 0) f.twin_lse[one] = -INFINITY, f.sigma2_lse[one] = 0;
        return;
    }
    const double l = st.sum, g = log(l), lse = st.max + g, h = dkv_formulaSpacingAt(u.ulp_lse, fabs(lse));
    const double v = dkv_formulaSpacingAt(u.ulp_lse, fabs(g)),
                 rel = (st.score_var + st.sum_var + st.lost * st.lost) / (l * l);
    const double fine = fmin(dkv_formulaSpacingAt(u.ulp_lse, fabs(st.max)), v); /* both are multiples of it */
    double last = fine < h ? (h * h + 2 * fine * fine) / 12 : 0;
    if (last > g * g) last = g * g;
    if (lane == 0) {
        f.twin_lse[one] = lse;
        f.sigma2_lse[one] = rel + u.z.log2 / u.z.lse2 * v * v / 12 + last;
    }
    const double by = f.p_normalised ? 1 : l,
                 own = rel - st.score_var / (l * l); /* of the sum's roundings alone */
    const bool divides = fabs(by - 1) > u.z.stuck;   /* dividing by 1 is exact */
    for (int c = lane; c < f.d; c += 32) {
        const int64_t e = i * f.d + c;
        const double a1 = x.a1[e], a2 = x.a2[e], y = (x.acc[e] - x.loss[e]) / by, z = x.acc[e] / by;
        double scores = u.p_rounded ? a2 / (by * by) + z * z * st.score_var / (by * by)
                                    : (a2 - 2 * z * a1 + z * z * st.score_var) / (by * by);
        if (f.p_normalised) scores = a2;
        double var = (scores > 0 ? scores : 0) + x.chain[e] / (by * by) + y * y * (own > 0 ? own : 0);
        var += st.lost * st.lost / (by * by) * f.v_mean2[c] +
               0x1p-100 * y * y; /* the last: our own arithmetic */
        f.o_exact[e] = y;
        f.o_var[e] = var;
        f.twin_o[vec * f.d + c] = y;
        f.sigma2_o[vec * f.d + c] = dkv_formulaStored(
            y, var, divides || !f.fp32 ? dkv_formulaSpacingAt(u.ulp_out, fabs(y)) : 0, u.round_out);
    }
}

int dkv_twinZeroSums(dkv_device_oracle *o, int m, int d) {
    dkv_twin_device *x = o->twin;
    for (double *y : {o->acc, x->chain, x->loss, x->a1, x->a2})
        DKV_TRY_CUDA(cudaMemsetAsync(y, 0, sizeof(double) * (size_t)m * (size_t)d, o->stream));
    return 0;
}

int dkv_twinForwardBlock(dkv_device_oracle *o, dkv_scene *s, const float *) {
    const dkv_problem *p = o->p;
    dkv_twin_device *x = o->twin;
    dkv_area t;
    int32_t range = -1;
    const int64_t q_row = s->seg->q_start + s->r0;
    DKV_TRY(dkv_twinZeroSums(o, s->m, p->dv));
    DKV_TRY_CUDA(cudaMemsetAsync(x->last_mean, 0, sizeof(double) * (size_t)p->dv, o->stream));
    start_twin_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(s->m, o->r);
    load_lse_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(
        q_row, o->l->view.tq, s->m, o->g, s->kvh * o->g, o->out[DKV_PART_TRUTH][DKV_LSE], o->r.lse);
    DKV_TRY_CUDA(cudaGetLastError());
    if (x->table) DKV_TRY(fillTable(o, s));
    while (dkv_nextArea(o, s, &range, &t)) {
        DKV_TRY(forwardTile(o, s, &t));
        DKV_TRY(dkv_oracleTick(o, &t));
    }
    forward_end f = {q_row,
                     o->l->view.tq,
                     s->m,
                     p->dv,
                     o->g,
                     p->hq,
                     s->kvh * o->g,
                     o->a.p_normalised,
                     o->a.out_format == DUALKV_FP32,
                     o->in.sink ? o->in.sink + s->kvh * o->g : NULL,
                     x->last_mean,
                     x->o_exact,
                     x->o_var,
                     o->out[DKV_PART_TWIN][DKV_O],
                     o->out[DKV_PART_SIGMA2][DKV_O],
                     o->out[DKV_PART_TWIN][DKV_LSE],
                     o->out[DKV_PART_SIGMA2][DKV_LSE]};
    finish_forward_twin_kernel<<<dkv_blocksFor((int64_t)s->m * 32, 128), 128, 0, o->stream>>>(
        f, x->u, o->r, row_sums{o->acc, x->chain, x->loss, x->a1, x->a2});
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}
