/* oracle_twin_forward.cu: O and LSE of the twin, one block of rows (ref/twin_forward.c). Products of a tile are
 * cut at 256 keys (sums over keys) or at the CPU's blocks of rows (sums over rows) into parts, which one thread
 * an element then adds in order, with what each addition rounds. */
#include <float.h>

#include "oracle_twin_late.cuh"

typedef struct forward_walk {
    int32_t tile, mode; /* key tile (256 where undeclared); 0 running maximum, 1 table, 2 normalised by the row's LSE */
    int32_t down; /* keys come last first: key tiles, and 256 after another */
    int64_t max_m;
    const double *table;             /* [slots, max_m] */
    const float *equal_k, *equal_kv; /* of the tile's first key */
    double *p, *w, *x, *rel; /* out, [m, ld]: P in units of the row's maximum after 256 keys; its variance; the row
                                sum's terms; their variance */
    double *by, *fade, *old, *count, *p1, *p2, *wsum; /* [subs, max_m] */
    dkv_top_rows top;
    dkv_step_rows step;
    dkv_late_rows late;
} forward_walk;

/* Largest score of each key tile, for the kernels whose tiles do not divide ours. */
__global__ void maxima_kernel(dkv_area t, __grid_constant__ const dkv_twin_units u,
                              __grid_constant__ const dkv_twin_fit fit, score_view v, int tile, int64_t max_m,
                              double *table, dkv_late_rows late) {
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (i >= t.m) return;
    for (int64_t at = 0; at < t.n;) {
        const int64_t slot = (t.offset + at) / tile;
        int64_t end = (slot + 1) * tile - t.offset;
        double top = -INFINITY, vs, own = 0;
        int key = 1 << 30;
        end = end < t.n ? end : t.n;
        for (int64_t j = at + lane; j < end; j += 32) {
            const double x = scoreOf(t, u, fit, v, i, (int)j, &vs);
            if (x > top) own = vs, key = (int)j;
            top = x > top ? x : top;
        }
        const double mine = top;
        top = dkv_warpMax(top);
        const int64_t to = (t.slot0 + slot) * max_m + i;
        const double was = table[to];
        __syncwarp();
        if (lane == 0) table[to] = top > was ? top : was;
        if (late.on && top > was) { /* the variance of the first that has it */
            const int first = __reduce_min_sync(~0u, mine == top ? key : 1 << 30);
            if (key == first && mine == top) late.table_vs[to] = own;
        }
        at = end;
    }
}

/* The running maximum in the kernel's order; the row's own from the start. */
__global__ void run_maxima_kernel(int m, int64_t slots, int64_t max_m, int last_first, double *table,
                                  dkv_rows r, dkv_late_rows late) {
    DKV_GRID_LOOP(i, m) {
        double top = -INFINITY;
        late_state at = {r.max[i], DKV_SINKS_OWN, 0};
        for (int64_t k = 0; late.on && k < slots; k++) {
            const int64_t e = (last_first ? slots - 1 - k : k) * max_m + i;
            meet(late, at, table[e], late.table_vs[e]);
            table[e] = at.max;
            late.table_vs[e] = at.vs;
        }
        if (late.on) {
            r.max[i] = at.max, late.vs[i] = at.vs, late.doubt[i] = at.doubt;
            continue;
        }
        for (int64_t k = 0; k < slots; k++) {
            double *at = table + (last_first ? slots - 1 - k : k) * max_m + i;
            top = *at = *at > top ? *at : top;
        }
        r.max[i] = top;
    }
}

__global__ void fill_kernel(int64_t n, double x, double *out) { DKV_GRID_LOOP(e, n) out[e] = x; }

__global__ void start_twin_kernel(int m, dkv_rows r, dkv_top_rows top) {
    DKV_GRID_LOOP(i, m) {
        r.sum[i] = r.sum_var[i] = r.lost[i] = r.terms[i] = r.score_var[i] = r.ones[i] = 0;
        r.max[i] = top.s[i] = -INFINITY;
        top.vs[i] = 0;
    }
}

typedef struct row_state {
    double max, sum, sum_var, lost, terms, score_var, ones;
} row_state;

/* What was summed is multiplied by exp(old maximum - new), whose error is the same for all of it. */
static __device__ __forceinline__ double fadeState(const dkv_noise &z, row_state &x, double by,
                                                   double shift) {
    double by2 = by * by, rel = z.exp2 + z.unit2 * shift * shift;
    x.sum *= by;
    x.lost *= by;
    if (by > 0x1p-300) rel += dkv_twinLeast(&z, by) / by2;
    x.score_var = x.score_var * by2 + rel * x.sum * x.sum;
    x.sum_var = x.sum_var * by2 + z.unit2 * x.sum * x.sum;
    return rel;
}

/* The row's largest score, if it is among these 256: the first of them. */
static __device__ __forceinline__ void noteTop(const dkv_area &t, const dkv_twin_units &u, const dkv_twin_fit &fit,
                                               const score_view &v, const forward_walk &f, int i, int base, int n,
                                               const double *s, const double *vs, double most, int lane) {
    int first = 1 << 30, at = 0;
    if (!(most > f.top.s[i])) return;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        const int j = k * 32 + lane;
        if (j < n && s[k] == most && j < first) first = j, at = k;
    }
    const int mine = first;
    for (int d = 16; d; d >>= 1) {
        const int other = __shfl_xor_sync(~0u, first, d);
        first = other < first ? other : first;
    }
    __syncwarp();
    if (mine != first) return;
    const int j = base + first;
    const int64_t e = (int64_t)i * t.ld + j;
    const double cap = u.softcap > 0 ? v.cap[e] : 0, size = v.q_norm[i] * v.k_norm[j];
    double own = 0;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) own = k == at ? vs[k] : own;
    f.top.s[i] = most;
    f.top.vs[i] = own;
    f.top.chain[i] = u.z.step2 * u.scale * u.scale * fit.var[dkv_chainBin(v.sq[e])] * v.sq[e] * size;
    f.top.loss[i] = u.z.gain > 0 ? fit.gain[dkv_chainBin(v.sq[e])] * v.dot[e] * sqrt(size) : 0;
    f.top.keep2[i] = (1 - cap * cap) * (1 - cap * cap);
    f.top.equal[i] = (double)f.equal_k[j];
    f.top.equal_v[i] = (double)f.equal_kv[j];
    f.top.key[i] = t.k_row + j;
}

/* A warp a row: 256 keys after another. PLAIN: what is declared is what dkv_twinPlain says. LATE: late.on. */
template <bool PLAIN, bool LATE>
__global__ void __launch_bounds__(128)
    forward_twin_kernel(dkv_area t, __grid_constant__ const dkv_twin_units units,
                        __grid_constant__ const dkv_twin_fit fit, score_view v, dkv_rows r, forward_walk f) {
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (i >= t.m) return;
    const dkv_twin_units u = PLAIN ? dkv_plainUnits(units) : units;
    if (PLAIN) t.slopes = NULL;
    const double lse = r.lse[i];
    double max = r.max[i];
    late_state now = {max, LATE ? f.late.vs[i] : 0, LATE ? f.late.doubt[i] > 0 : 0};
    const int subs = (t.n + DKV_SUB_KEYS - 1) / DKV_SUB_KEYS;
    for (int e = 0; e < subs; e++) {
        const int sub = f.down ? subs - 1 - e : e, base = sub * DKV_SUB_KEYS;
        const int n = t.n - base < DKV_SUB_KEYS ? t.n - base : DKV_SUB_KEYS;
        const int64_t first = (t.offset + base) / f.tile, slots = (t.offset + base + n - 1) / f.tile - first + 1;
        double s[PER_LANE], vs[PER_LANE], ref[PER_LANE], late_vs[LATE ? PER_LANE : 1], old = max, top = old, most = -INFINITY;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            const int j = k * 32 + lane;
            vs[k] = 0;
            s[k] = j < n ? scoreOf(t, u, fit, v, i, base + j, &vs[k]) : -INFINITY;
            most = s[k] > most ? s[k] : most;
            ref[k] = lse;
        }
        /* the reference of each key tile's P */
        for (int64_t met = 0; met < slots && f.mode != 2; met++) {
            const int64_t slot = first + (f.down ? slots - 1 - met : met);
            int64_t a = slot * f.tile - t.offset - base, b = a + f.tile;
            a = a > 0 ? a : 0;
            b = b < n ? b : n;
            double here = -INFINITY;
            if (f.mode == 0) {
#pragma unroll
                for (int k = 0; k < PER_LANE; k++) {
                    const int j = k * 32 + lane;
                    if (j >= a && j < b) here = s[k] > here ? s[k] : here;
                }
                here = dkv_warpMax(here);
                if (LATE) {
                    meet(f.late, now, here, varianceOf(s, vs, (int)a, (int)b, here, lane));
                    top = now.max;
                } else {
                    top = here > top ? here : top;
                }
            }
            const int64_t cell = (t.slot0 + slot) * f.max_m + i;
            here = f.mode == 0 ? top : f.table[cell];
            const double here_vs = !LATE ? 0 : f.mode == 0 ? now.vs : f.late.table_vs[cell];
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                const int j = k * 32 + lane;
                if (j >= a && j < b) ref[k] = here;
                if (LATE && j >= a && j < b) late_vs[k] = here_vs;
            }
        }
        max = f.mode == 0 ? top : f.mode == 2 ? lse : max;
        const double largest = LATE ? *(volatile double *)&f.top.s[i] : 0;
        __syncwarp();
        noteTop(t, u, fit, v, f, i, base, n, s, vs, dkv_warpMax(most), lane);
        __syncwarp();
        const double ref_var = f.mode == 2 ? 0 : *(volatile double *)&f.top.vs[i]; /* in every exponent */
        double p1 = 0, p2 = 0, wsum = 0;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            const int j = k * 32 + lane;
            if (j >= n) continue;
            double w = 0, x = 0, p = 0, rel = 0;
            if (!(ref[k] == -INFINITY)) {
                const double fade = ref[k] == max ? 1 : exp(ref[k] - max), e = exp(s[k] - ref[k]);
                const double d = s[k] > -DBL_MAX ? s[k] - ref[k] : 0,
                             far = LATE && now.doubt && s[k] > -DBL_MAX ? fabs(d) + f.late.slack : d;
                const int errs = d != 0 || (LATE && (now.doubt || late_vs[k] < 0));
                const double shared = !LATE ? ref_var : late_vs[k] > 0 ? late_vs[k] : 0;
                const double y = e * e * (vs[k] + u.z.unit2 * far * far + (errs ? u.z.exp2 : 0));
                x = e * fade;
                rel = y * fade * fade;
                if (u.p_rounded) {
                    const double q = dkv_roundBy(u.round_p, e), e2 = errs ? y + e * e * shared : 0;
                    w = dkv_flip(e, q, e2, dkv_spacingAt(u.ulp_p, e)) * fade * fade;
                    if (LATE && now.doubt) w += dkv_doubtVar(u.ulp_p, e, f.late.slack) * fade * fade;
                    p = q * fade;
                } else {
                    w = rel + (errs ? x * x * u.z.prod_p2 : 0);
                    p = x;
                }
            }
            const int64_t at = (int64_t)i * t.ld + base + j;
            f.p[at] = p;
            f.w[at] = w;
            f.x[at] = x;
            f.rel[at] = rel;
            p1 += fabs(p);
            p2 += p * p;
            wsum += w * (double)f.equal_kv[base + j];
        }
        p1 = dkv_warpSum(p1);
        p2 = dkv_warpSum(p2);
        wsum = dkv_warpSum(wsum);
        if (lane) continue;
        f.by[sub * f.max_m + i] = f.mode || old == top ? 1 : exp(old - top);
        f.fade[sub * f.max_m + i] = f.mode ? 0 : old - top;
        f.p1[sub * f.max_m + i] = p1;
        f.p2[sub * f.max_m + i] = p2;
        f.wsum[sub * f.max_m + i] = wsum;
        if (!LATE) continue;
        const double greatest = *(volatile double *)&f.top.s[i];
        f.late.above[sub * f.max_m + i] = exp(greatest - max) - 1;
        f.late.rose[sub * f.max_m + i] = greatest > largest;
    }
    if (lane == 0) r.max[i] = max;
    if (LATE && f.mode == 0 && lane == 0) f.late.vs[i] = now.vs, f.late.doubt[i] = now.doubt;
}

static __device__ __forceinline__ void endSum(const dkv_twin_units &u, row_state &st, dkv_formula_sum &k) {
    const double stuck = u.z.stuck, old = st.sum;
    st.score_var += k.noise;
    st.sum_var += k.squares / 12;
    st.lost += k.lost;
    st.sum += k.part;
    st.ones += k.ones;
    if (old > k.part * stuck && k.part > old * stuck) {
        const double h = dkv_spacingAt(u.ulp_sum, st.sum);
        st.sum_var += h * h / 12;
    } else {
        st.lost += old < k.part ? old : k.part;
    }
    k = dkv_formula_sum{};
}

/* A thread a row, term after term: the row sum, and the chains of O. A block is a warp; its 32 rows come through
 * shared memory, 32 keys at a time. */
__global__ void __launch_bounds__(32) forward_sums_kernel(dkv_area t, __grid_constant__ const dkv_twin_units u,
                                                          dkv_rows r, forward_walk f) {
    __shared__ double x[32][33], rel[32][33];
    const int i0 = blockIdx.x * 32, lane = threadIdx.x, i = i0 + lane;
    row_state st = {};
    if (i < t.m) st = row_state{0, r.sum[i], r.sum_var[i], r.lost[i], r.terms[i], r.score_var[i], r.ones[i]};
    const int subs = (t.n + DKV_SUB_KEYS - 1) / DKV_SUB_KEYS;
    for (int e = 0; e < subs; e++) {
        const int sub = f.down ? subs - 1 - e : e, base = sub * DKV_SUB_KEYS;
        const int n = t.n - base < DKV_SUB_KEYS ? t.n - base : DKV_SUB_KEYS;
        const int64_t at = sub * f.max_m + (i < t.m ? i : 0);
        int64_t cut = ((t.offset + base) / f.tile + 1) * f.tile - t.offset - base;
        const double by = f.by[at], fade = by != 1 ? fadeState(u.z, st, by, by > 0 ? f.fade[at] : 0) : 0;
        const double old = st.sum;
        if (by < 1 - 0.5 * u.z.stuck || (f.late.on && f.late.rose[at] > 0)) st.ones = 0;
        dkv_formula_sum k = {};
        k.above = f.late.on ? f.late.above[at] : 0;
        dkv_spacing ulp = dkv_sumSpacing(u.ulp_sum, st.sum, f.late.first);
        for (int j0 = 0; j0 < n; j0 += 32) {
            __syncwarp();
            for (int row = 0; row < 32; row++) {
                const bool in = i0 + row < t.m && j0 + lane < n;
                const int64_t e = (int64_t)(i0 + row) * t.ld + base + j0 + lane;
                x[row][lane] = in ? f.x[e] : 0;
                rel[row][lane] = in ? f.rel[e] : 0;
            }
            __syncwarp();
            for (int c = 0; c < 32 && j0 + c < n; c++) {
                if (j0 + c == cut) {
                    endSum(u, st, k);
                    k.above = f.late.on ? f.late.above[at] : 0;
                    ulp = dkv_sumSpacing(u.ulp_sum, st.sum, f.late.first);
                    cut += f.tile;
                }
                dkv_formulaAdd(&u.z, ulp, &k, x[lane][c], rel[lane][c], (double)f.equal_k[base + j0 + c]);
            }
        }
        endSum(u, st, k);
        const dkv_formula_step step =
            walkRow(f.p, t.ld, i0, t.m, base, n, x, f.p1[at], f.p2[at], u.z.stuck * st.sum);
        st.terms += step.count;
        if (i >= t.m) continue;
        f.fade[at] = fade;
        f.old[at] = old;
        f.count[at] = step.count;
        putStep(f.step, at, step);
    }
    if (i >= t.m) return;
    r.sum[i] = st.sum;
    r.sum_var[i] = st.sum_var;
    r.lost[i] = st.lost;
    r.terms[i] = st.terms;
    r.score_var[i] = st.score_var;
    r.ones[i] = st.ones;
}

/* Where P is normalised before it is rounded: each row's LSE of the scores as declared; a warp a row. */
__global__ void lse_pass_kernel(dkv_area t, __grid_constant__ const dkv_twin_units u,
                                __grid_constant__ const dkv_twin_fit fit, score_view v, dkv_rows r) {
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (i >= t.m) return;
    double vs, top = r.max[i], sum = 0;
    const double old = top;
    for (int j = lane; j < t.n; j += 32) {
        const double x = scoreOf(t, u, fit, v, i, j, &vs);
        top = x > top ? x : top;
    }
    top = dkv_warpMax(top);
    if (top == -INFINITY) return;
    for (int j = lane; j < t.n; j += 32) sum += exp(scoreOf(t, u, fit, v, i, j, &vs) - top);
    sum = dkv_warpSum(sum);
    if (lane) return;
    r.sum[i] = r.sum[i] * exp(old - top) + sum;
    r.max[i] = top;
}

__global__ void lse_end_kernel(int m, int g, const float *sinks, dkv_rows r) {
    DKV_GRID_LOOP(i, m) {
        const double sink = sinks ? (double)sinks[i % g] : -INFINITY, top = sink > r.max[i] ? sink : r.max[i];
        r.lse[i] = top == -INFINITY ? top : top + log(r.sum[i] * exp(r.max[i] - top) + exp(sink - top));
    }
}

typedef struct seen_means {
    const double *k, *v; /* of the tile's first key */
    const float *equal;
    int32_t dk, dv;
    double *k_mean2, *v_mean2, *mean_kv, *last;
} seen_means;

static __device__ void meanSquares(const double *x, int n, int d, double *out) {
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        double sum = 0;
        for (int j = 0; j < n; j++) {
            const double y = x[(int64_t)j * d + c];
            sum += isfinite(y) ? y * y : 0;
        }
        out[c] = n > 0 ? sum / n : 0;
    }
}

/* A block a CPU block of rows (y) and 256 keys (x), of which those count that the CPU's tile is left with. */
__global__ void __launch_bounds__(128) seen_means_kernel(dkv_area t, seen_means k) {
    __shared__ int keys[2];
    const int64_t at = (int64_t)blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) {
        const int64_t r0 = t.r0 + (int64_t)blockIdx.y * t.sub_rows, last = t.r0 + t.m / t.g;
        int64_t j0 = t.j0 + (int64_t)blockIdx.x * DKV_SUB_KEYS, j1 = t.j0 + t.n;
        j1 = j1 < j0 + DKV_SUB_KEYS ? j1 : j0 + DKV_SUB_KEYS;
        dkv_pairTrim(&t.mask, r0, r0 + t.sub_rows < last ? r0 + t.sub_rows : last, &j0, &j1);
        keys[0] = (int)(j0 - t.j0);
        keys[1] = (int)(j1 - j0);
    }
    __syncthreads();
    const int64_t first = keys[0];
    const int n = keys[1];
    meanSquares(k.k + first * k.dk, n, k.dk, k.k_mean2 + at * k.dk);
    meanSquares(k.v + first * k.dv, n, k.dv, k.v_mean2 + at * k.dv);
    if (threadIdx.x >= 32) return;
    double sum = 0;
    for (int j = threadIdx.x; j < n; j += 32) sum += (double)k.equal[first + j];
    sum = dkv_warpSum(sum);
    if (threadIdx.x == 0) k.mean_kv[at] = n > 0 ? sum / n : 0; /* 0: it sees none of them */
}

/* A block a CPU block of rows. */
__global__ void last_mean_kernel(int subs, int down, seen_means k) {
    for (int b = 0; b < subs; b++) {
        const int64_t at = (int64_t)blockIdx.x * subs + (down ? b : subs - 1 - b);
        if (k.mean_kv[at] == 0) continue;
        for (int c = threadIdx.x; c < k.dv; c += blockDim.x) k.last[blockIdx.x * (int64_t)k.dv + c] = k.v_mean2[at * k.dv + c];
        return;
    }
}

/* k_mean2, v_mean2, mean_kv and last_mean of a tile. */
static int seenMeans(dkv_device_oracle *o, const dkv_area *t) {
    const dkv_twin_device *x = o->twin;
    const int32_t dk = o->p->dqk, dv = o->p->dv;
    const seen_means k = {o->k + t->k_row * dk, o->v + t->k_row * dv, x->equal_kv + t->k_row, dk, dv,
                          x->k_mean2,           x->v_mean2,           x->mean_kv,             x->last_mean};
    const dim3 grid(dkv_blocksFor(t->n, DKV_SUB_KEYS), dkv_blocksFor(t->m, (int)x->sub_m));
    seen_means_kernel<<<grid, 128, 0, o->stream>>>(*t, k);
    last_mean_kernel<<<grid.y, 128, 0, o->stream>>>((int)grid.x, o->a.key_order, k);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

int dkv_twinLoadTile(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, score_view *v) {
    const dkv_problem *p = o->p;
    dkv_twin_device *x = o->twin;
    const int64_t at = (s->seg->q_start + s->r0) * o->g, key = t->k_row;
    double *kept = dkv_keptTile(o, t, 1), *scores;
    const bool known = kept && t->index < o->filled;
    float *dot = (float *)(kept ? kept : o->work[7]), *sq = dot + o->max_m * o->ld;
    DKV_TRY(dkv_loadScores(o, s, t, o->work[6], &scores, NULL));
    if (!known)
        DKV_TRY(dkv_chainTile(o, t->m, t->n, p->dqk, t->ld, x->q1 + at * p->dqk, x->k1 + key * p->dqk, dot, sq));
    DKV_TRY(seenMeans(o, t));
    *v = score_view{scores, o->work[6], sq, dot, x->q_norm + at, x->k_norm + key, x->k_root + key};
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
    if (x->late.on) fill_kernel<<<1024, 256, 0, o->stream>>>(slots * o->max_m, 0, x->late.table_vs);
    while (dkv_nextArea(o, s, &range, &t)) {
        DKV_TRY(dkv_twinLoadTile(o, s, &t, &v));
        maxima_kernel<<<dkv_blocksFor((int64_t)t.m * 32, 128), 128, 0, o->stream>>>(
            t, x->u, x->fit_s, v, o->a.key_tile, o->max_m, x->table_max, x->late);
    }
    run_maxima_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(s->m, slots, o->max_m, o->a.key_order,
                                                                       x->table_max, o->r, x->late);
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
                      o->a.key_order,
                      o->max_m,
                      x->table_max,
                      x->equal_k + key,
                      x->equal_kv + key,
                      o->work[0],
                      o->work[1],
                      o->work[2],
                      o->work[3],
                      x->by,
                      x->fade,
                      x->old,
                      x->count,
                      x->p1,
                      x->p2,
                      x->wsum,
                      x->top,
                      x->step,
                      x->late};
    const auto kernel = x->late.on                 ? forward_twin_kernel<false, true>
                        : dkv_twinPlain(&x->u, t) ? forward_twin_kernel<true, false>
                                                  : forward_twin_kernel<false, false>;
    kernel<<<dkv_blocksFor((int64_t)t->m * 32, 128), 128, 0, o->stream>>>(*t, x->u, x->fit_s, v, o->r, f);
    forward_sums_kernel<<<dkv_blocksFor(t->m, 32), 32, 0, o->stream>>>(*t, x->u, o->r, f);
    DKV_TRY_CUDA(cudaGetLastError());
    row_parts k = {};
    k.sum = x->part[0];
    k.a2 = x->part[1];
    k.by = x->by;
    k.fade = x->fade;
    k.old = x->old;
    k.count = x->count;
    k.wsum = x->u.p_rounded ? NULL : x->wsum;
    k.mean2 = x->v_mean2;
    k.alike = x->mean_kv;
    k.step = x->step;
    k.max_m = o->max_m;
    k.m = t->m;
    k.d = d;
    k.subs = (t->n + DKV_SUB_KEYS - 1) / DKV_SUB_KEYS;
    k.sub_m = (int32_t)x->sub_m;
    k.fold = x->u.z.fold;
    k.done = x->row_done;
    k.down = o->a.key_order != 0;
    k.squares_by = 1;
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
    return dkv_twinAddRows(o, &k, dkv_twinRowSums(o, false));
}

typedef struct forward_end {
    int64_t q_row, tq;
    int32_t m, dqk, d, g, hq, hkv, head0, kvh, dtype, p_normalised, fp32;
    const float *sink;         /* of the KV head's query heads; NULL */
    const double *q, *k, *v;   /* of the head: the block's rows, all keys */
    const void *in_q, *in_k;   /* as given */
    double *o_exact, *o_var;   /* [m, d] */
    double *twin_o, *sigma2_o, *twin_lse, *sigma2_lse;
    dkv_top_rows top;
    unsigned long long *row_class; /* of the block's first row */
    dkv_late_rows late;
} forward_end;

/* Where a row leans on one key, that key's score is most of its noise: its chain is walked, and all that depends on it
 * set right (ref/twin_top.c). Returns the variance of the top score; *common: of what all scores of the row share. */
static __device__ __forceinline__ double refineTop(const forward_end &f, const dkv_twin_units &u, row_state &st,
                                                   const row_sums &x, int64_t i, int lane, double *common) {
    double vs = f.top.vs[i];
    *common = 0;
    const double s = f.top.s[i];
    if (s == -INFINITY || (u.z.step > 1 && !u.z.truncates) || u.s_rounded || u.z.unit2 < 0x1p-80) return vs;
    const int64_t key = f.top.key[i];
    const double weight = exp(s - st.max), w2 = weight * weight;
    const double by = u.scale * u.scale;
    const dkv_twin_walk walk = dkv_twinWalk(&u.z, f.q + i * f.dqk, f.k + key * f.dqk, f.dqk, f.top.loss[i]);
    const double more = (by * (walk.own + walk.common) - f.top.chain[i]) * f.top.keep2[i] * w2;
    if (!isfinite(more)) return vs;
    *common = by * walk.common * f.top.keep2[i];
    vs = fmax(vs + more / w2, 0.0);
    st.score_var = fmax(st.score_var + more * f.top.equal[i], 0.0);
    if (u.p_rounded) return vs;
    for (int c = lane; c < f.d; c += 32) {
        const double y = f.v[key * f.d + c];
        if (!isfinite(y)) continue;
        x.a1[i * f.d + c] += more * f.top.equal_v[i] * y;
        x.a2[i * f.d + c] += more * f.top.equal_v[i] * y * y;
    }
    return vs;
}

/* Of the row sum's relative variance, what its scores cause: the largest is subtracted from all, so that its own term
 * is 1 whatever its error, and that error is in all others. */
static __device__ __forceinline__ double sumVar(const forward_end &f, const row_state &st, int64_t i, double vs) {
    const double s = f.top.s[i], p = exp(s - st.max), rest = st.sum - p;
    const double var = st.score_var - p * p * vs * f.top.equal[i];
    if (f.late.on && p != 1) {
        const double own = f.late.vs[i], others = st.sum - 1;
        return st.score_var + (own > 0 && s > st.max ? own * others * others : 0);
    }
    if (s == -INFINITY || p < 1) return st.score_var; /* the sink is larger */
    return (var > 0x1p-40 * st.score_var ? var : 0) + vs * rest * rest;
}

/* Rows of one query vector that lean on one key have one chain's error: one class. So have rows whose weight is
 * mostly of one score which the softcap has made. */
static __device__ __forceinline__ void classify(const forward_end &f, const dkv_twin_units &u, const row_state &st, int64_t i,
                                                double vs, double lse_var, int lane) {
    const double s = f.top.s[i], weight = exp(s - st.max) / st.sum;
    unsigned long long h = mixed(3 + 8 * (unsigned long long)(f.q_row * f.g + i)), flags = 0;
    if (st.sum > 0 && s > -INFINITY) {
        const int at_cap = dkv_twinAtCap(&u, f.top.keep2[i], vs);
        flags = dkv_twinLeans(weight, at_cap ? fmax(f.top.equal[i], st.ones) : f.top.equal[i], vs, lse_var, at_cap);
    }
    if (flags) {
        const int64_t q = (f.q_row + i / f.g) * f.hq + f.head0 + i % f.g, k = f.top.key[i] * f.hkv + f.kvh;
        if (flags & DKV_CLASS_CAPPED) {
            h = mixed(mixed(5) + __float_as_uint((float)s));
        } else {
            h = mixed(4) + hashOf(f.in_q, f.dtype, q * f.dqk, f.dqk, 1, lane);
            h = mixed(mixed(h) + hashOf(f.in_k, f.dtype, k * f.dqk, f.dqk, 2, lane));
        }
    }
    if (lane == 0) f.row_class[i] = st.sum > 0 ? dkv_twinClass(h, flags) : 0;
}

/* The sink is one more logit, whose value is 0, met after the keys. */
static __device__ __forceinline__ void addSink(const forward_end &f, const dkv_twin_units &u, row_state &st,
                                               const row_sums &x, int64_t i, int lane) {
    const double sink = (double)f.sink[i % f.g], top = sink > st.max ? sink : st.max;
    const double by = st.max == -INFINITY ? 0 : exp(st.max - top);
    if (f.late.on && f.late.first) { /* it was met before them, or is added now */
        st.sum_var += u.z.unit2 * st.sum * st.sum;
        return;
    }
    if (f.p_normalised) { /* the keys' P counts the sink already; the sum, and so LSE, does not */
        st.sum *= by;
        st.lost *= by;
        st.score_var *= by * by;
        st.sum_var *= by * by;
    } else if (by != 1) {
        const double rel = fadeState(u.z, st, by, by > 0 ? log(by) : 0);
        for (int c = lane; c < f.d; c += 32) {
            const int64_t e = i * f.d + c;
            row_element y = {x.acc[e], x.chain[e], x.loss[e], x.a1[e], x.a2[e]};
            fadeElement(u.z, y, by, rel, st.sum);
            x.acc[e] = y.acc, x.chain[e] = y.chain, x.loss[e] = y.loss, x.a1[e] = y.a1, x.a2[e] = y.a2;
        }
    }
    st.max = top;
    const double y = exp(sink - top), v = u.z.unit2 * (sink - top) * (sink - top) + u.z.exp2;
    st.sum += y;
    st.score_var += y * y * v;
    st.sum_var += u.z.unit2 * st.sum * st.sum;
}

/* How far a kernel's maximum may be from the row's (ref/twin_max.c). */
static __device__ __forceinline__ double unknownMax(const forward_end &f, int64_t i) {
    if (!(f.late.slack > 0)) return 0;
    return f.p_normalised || f.late.doubt[i] > 0 || (f.sink && !f.late.first) ? f.late.slack : 0;
}

/* A warp a row: the sink, LSE = max + log(sum), O. */
__global__ void finish_forward_twin_kernel(forward_end f, __grid_constant__ const dkv_twin_units u,
                                           dkv_rows r, row_sums x) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (i >= f.m) return;
    row_state st = {r.max[i], r.sum[i], r.sum_var[i], r.lost[i], r.terms[i], r.score_var[i], r.ones[i]};
    const int64_t vec = (f.q_row + i / f.g) * f.hq + f.head0 + i % f.g,
                  one = (f.head0 + i % f.g) * f.tq + f.q_row + i / f.g;
    double common;
    const double vs = refineTop(f, u, st, x, i, lane, &common);
    if (f.sink) addSink(f, u, st, x, i, lane);
    if (st.sum == 0) { /* no key, no sink: exact */
        for (int c = lane; c < f.d; c += 32) {
            f.twin_o[vec * f.d + c] = f.sigma2_o[vec * f.d + c] = 0;
            f.o_exact[i * f.d + c] = f.o_var[i * f.d + c] = 0;
        }
        if (lane == 0) f.twin_lse[one] = -INFINITY, f.sigma2_lse[one] = 0, f.row_class[i] = 0;
        return;
    }
    /* Whatever P is taken against, the row sum itself is taken against the largest score. */
    const double l = st.sum, lse = st.max + log(l), top = f.p_normalised ? f.top.s[i] : st.max, g = lse - top,
                 h = dkv_spacingAt(u.ulp_lse, fabs(lse));
    const double unknown = unknownMax(f, i), v = dkv_spacingAt(u.ulp_lse, fabs(g) + unknown),
                 rel = (st.score_var + st.sum_var + st.lost * st.lost) / (l * l);
    const double fine = fmin(dkv_spacingAt(u.ulp_lse, fabs(top)), v); /* both are multiples of it */
    double last = fine < h ? (h * h + 2 * fine * fine) / 12 : 0;
    if (last > g * g && !(unknown > 0)) last = g * g;
    const double keys = f.sink ? l - exp((double)f.sink[i % f.g] - st.max) : l, most = exp(f.top.s[i] - st.max);
    common = keys > most ? common * (keys * keys - most * most) / (l * l) : 0;
    const double sums = rel + common + u.z.log2 / u.z.lse2 * v * v / 12;
    /* finer arithmetic than fp32: that is what the sum was rounded to, not what it was made of */
    const double lse_var = u.z.unit2 < 0x1p-80 ? dkv_stored(lse, (double)(float)lse, sums, h) : sums + last;
    if (lane == 0) {
        f.twin_lse[one] = lse;
        f.sigma2_lse[one] = lse_var;
    }
    const double by = f.p_normalised ? 1 : l, by_sum = sumVar(f, st, i, vs),
                 own = rel - st.score_var / (l * l); /* of the sum's roundings alone */
    const bool divides = fabs(by - 1) > u.z.stuck;   /* dividing by 1 is exact */
    for (int c = lane; c < f.d; c += 32) {
        const int64_t e = i * f.d + c;
        const double a1 = x.a1[e], a2 = x.a2[e], y = (x.acc[e] - x.loss[e]) / by, z = x.acc[e] / by;
        double scores = u.p_rounded ? a2 + z * z * by_sum : a2 - 2 * z * a1 + z * z * st.score_var;
        if (!u.p_rounded && scores < 0x1p-20 * a2) scores = 0; /* of one key */
        scores /= by * by;
        if (f.p_normalised) scores = a2;
        double var = (scores > 0 ? scores : 0) + x.chain[e] / (by * by) + y * y * (own > 0 ? own : 0);
        var += 0x1p-100 * y * y; /* our own arithmetic */
        f.o_exact[e] = y;
        f.o_var[e] = var;
        f.twin_o[vec * f.d + c] = y;
        f.sigma2_o[vec * f.d + c] = dkv_stored(y, dkv_roundBy(u.round_out, y), var, divides || !f.fp32 ? dkv_spacingAt(u.ulp_out, fabs(y)) : 0);
    }
    classify(f, u, st, i, vs, lse_var, lane);
}

int dkv_twinZeroSums(dkv_device_oracle *o, int m, int d) {
    dkv_twin_device *x = o->twin;
    for (double *y : {o->acc, x->chain, x->loss, x->a1, x->a2})
        DKV_TRY_CUDA(cudaMemsetAsync(y, 0, sizeof(double) * (size_t)m * (size_t)d, o->stream));
    DKV_TRY_CUDA(cudaMemsetAsync(x->row_done, 0, sizeof(double) * (size_t)m, o->stream));
    return 0;
}

static int fillLse(dkv_device_oracle *o, dkv_scene *s) {
    dkv_twin_device *x = o->twin;
    dkv_area t;
    score_view v;
    int32_t range = -1;
    while (dkv_nextArea(o, s, &range, &t)) {
        DKV_TRY(dkv_twinLoadTile(o, s, &t, &v));
        lse_pass_kernel<<<dkv_blocksFor((int64_t)t.m * 32, 128), 128, 0, o->stream>>>(t, x->u, x->fit_s, v, o->r);
    }
    lse_end_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(
        s->m, o->g, o->in.sink ? o->in.sink + s->kvh * o->g : NULL, o->r);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

int dkv_twinForwardBlock(dkv_device_oracle *o, dkv_scene *s, const float *) {
    const dkv_problem *p = o->p;
    dkv_twin_device *x = o->twin;
    dkv_area t;
    int32_t range = -1;
    const int64_t q_row = s->seg->q_start + s->r0;
    o->filled = 0;
    DKV_TRY(dkv_twinZeroSums(o, s->m, p->dv));
    DKV_TRY_CUDA(cudaMemsetAsync(x->last_mean, 0, sizeof(double) * (size_t)(x->subm * p->dv), o->stream));
    start_twin_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(s->m, o->r, x->top);
    if (x->p_normalised) {
        DKV_TRY(fillLse(o, s));
        start_twin_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(s->m, o->r, x->top);
    }
    const float *sinks = o->in.sink ? o->in.sink + s->kvh * o->g : NULL;
    if (x->late.on) start_late_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(s->m, o->g, sinks, o->r, x->late);
    DKV_TRY_CUDA(cudaGetLastError());
    if (x->table) DKV_TRY(fillTable(o, s));
    if (x->late.on && x->late.first)
        start_sum_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(s->m, o->g, sinks, x->u.z, o->r);
    DKV_TRY_CUDA(cudaGetLastError());
    while (dkv_nextOrdered(o, s, &range, &t)) {
        DKV_TRY(forwardTile(o, s, &t));
        DKV_TRY(dkv_oracleTick(o, &t));
    }
    const int64_t at = q_row * o->g;
    forward_end f = {q_row,
                     o->l->view.tq,
                     s->m,
                     p->dqk,
                     p->dv,
                     o->g,
                     p->hq,
                     p->hkv,
                     s->kvh * o->g,
                     s->kvh,
                     p->dtype,
                     o->a.p_normalised,
                     o->a.out_format == DUALKV_FP32,
                     sinks,
                     o->q + at * p->dqk,
                     o->k,
                     o->v,
                     o->in.q,
                     o->in.k,
                     x->o_exact,
                     x->o_var,
                     o->out[DKV_PART_TWIN][DKV_O],
                     o->out[DKV_PART_SIGMA2][DKV_O],
                     o->out[DKV_PART_TWIN][DKV_LSE],
                     o->out[DKV_PART_SIGMA2][DKV_LSE],
                     x->top,
                     x->row_class + at,
                     x->late};
    finish_forward_twin_kernel<<<dkv_blocksFor((int64_t)s->m * 32, 128), 128, 0, o->stream>>>(
        f, x->u, o->r, dkv_twinRowSums(o, false));
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}
