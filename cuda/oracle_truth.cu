/* oracle_truth.cu: the truth, and in the same walk over the tiles what the bound sums (oracle_bound.cu):
 * forward with an online softmax, backward from LSE. A warp has a row where a row is summed; elsewhere a
 * thread has a pair. */
#include "oracle_impl.cuh"

/* P = exp(s - max so far), where s may lie, too; what was summed is to be multiplied by `by`. */
__global__ void softmax_kernel(dkv_area t, dkv_rows r, const double *s, double *out) {
    int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (i >= t.m) return;
    const double *row = s + (int64_t)i * t.ld;
    double *to = out + (int64_t)i * t.ld, old = r.max[i], top = -INFINITY, sum = 0;
    int seen = 0;
    for (int j = lane; j < t.n; j += 32) {
        double x = row[j];
        top = x > top ? x : top;
        seen |= !(x == -INFINITY) || dkv_seesPair(t, i, j);
    }
    top = dkv_warpMax(top);
    top = top > old ? top : old;
    double by = top > old ? exp(old - top) : 1, shift = top == -INFINITY ? 0 : top;
    for (int j = lane; j < t.n; j += 32) {
        double p = exp(row[j] - shift);
        to[j] = p;
        sum += p;
    }
    sum = dkv_warpSum(sum);
    seen = __any_sync(~0u, seen);
    if (lane) return;
    r.max[i] = top;
    r.by[i] = by;
    r.sum[i] = r.sum[i] * by + sum;
    r.seen[i] |= (uint8_t)seen;
}

__global__ void start_kernel(int m, int g, dkv_rows r, const float *sink) {
    DKV_GRID_LOOP(i, m) {
        r.max[i] = sink ? (double)sink[i % g] : -INFINITY;
        r.sum[i] = sink ? 1 : 0;
        r.seen[i] = 0;
    }
}

/* Row of a block -> vector of a packed [tq, hq, d] tensor; element of [hq, tq]. */
typedef struct place {
    int64_t q_row, tq;
    int32_t m, g, hq, head0; /* head0 = kvh * g */
} place;
static __device__ __forceinline__ int64_t vectorOf(const place &w, int64_t i) {
    return (w.q_row + i / w.g) * w.hq + w.head0 + i % w.g;
}
static __device__ __forceinline__ int64_t lseOf(const place &w, int64_t i) {
    return (w.head0 + i % w.g) * w.tq + w.q_row + i / w.g;
}
static place placeOf(const dkv_device_oracle *o, const dkv_scene *s) {
    return place{s->seg->q_start + s->r0, o->l->view.tq, s->m, o->g, o->p->hq, s->kvh * o->g};
}

__global__ void finish_forward_kernel(place w, int d, dkv_rows r, const double *acc, double *o, double *lse) {
    DKV_GRID_LOOP(e, (int64_t)w.m * d) {
        int64_t i = e / d;
        double sum = r.sum[i];
        bool none = sum == 0 && !r.seen[i]; /* no key, no sink */
        o[vectorOf(w, i) * d + e % d] = none ? 0 : acc[e] / sum;
        if (e % d == 0) {
            double x = none ? -INFINITY : sum == 0 ? (double)NAN : r.max[i] + log(sum);
            lse[lseOf(w, i)] = x;
            r.lse[i] = x;
        }
    }
}

/* D = dO . O - dLSE of each row, a warp a row; the row's part of dSink. */
__global__ void delta_kernel(place w, int d, dkv_rows r, const double *d_o, const double *o,
                             const float *d_lse, const float *sink, double *sink_t) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (i >= w.m) return;
    double sum = 0;
    for (int c = lane; c < d; c += 32) sum += d_o[i * d + c] * o[vectorOf(w, i) * d + c];
    sum = dkv_warpSum(sum);
    if (lane) return;
    if (d_lse) sum -= (double)d_lse[lseOf(w, i)];
    r.delta[i] = sum;
    if (sink) sink_t[lseOf(w, i)] = -exp((double)sink[i % w.g] - r.lse[i]) * sum;
}

typedef struct grads {
    const double *s, *dp, *x, *z; /* scores, dP, sum |q||k|, sum |dO||v|; may be where an output is */
    double *p, *ds, *wq, *wk, *wv;
    const double *cap, *chain_k;
} grads;

/* Weights of the bound of one pair. */
static __device__ __forceinline__ void boundPair(const dkv_area &t, const dkv_rows &r, const dkv_units &u,
                                                 const grads &a, int i, int j, double s, double p,
                                                 double dp) {
    const int64_t at = (int64_t)i * t.ld + j;
    const double lse = r.lse[i];
    double wq = 0, wk = 0, wv = 0;
    if (isfinite(lse) && s > -INFINITY) {
        const dkv_grad_units g = dkv_formulaGradUnits(&u, lse);
        const double bias = dkv_biasOf(t, i, j);
        const double sigma = dkv_formulaSigma(&u, dkv_formulaSigmaUnits(&u), s, a.x[at],
                                              t.slopes ? (double)t.slopes[i % t.g] : 0, bias);
        const double x = dkv_formulaBackwardX(g, s, sigma, lse, r.tol_lse[i]);
        const double h = dkv_formulaGrow(p, s - lse, x);
        double e, ds;
        dkv_formulaPair(&u, g, p, h, a.z[at], dp, r.delta[i], r.base[i], &e, &ds);
        if (u.cap > 0) dkv_formulaCap(&u, s, bias, sigma, &e, &ds);
        dkv_formulaWeights(&u, g, p, h, e, ds, r.chain[i], a.chain_k[t.k_row + j], &wq, &wk, &wv);
    }
    a.wq[at] = wq;
    a.wk[at] = wk;
    a.wv[at] = wv;
}

template <bool BOUND>
__global__ void gradients_kernel(dkv_area t, dkv_rows r, __grid_constant__ const dkv_units u, grads a) {
    DKV_GRID_LOOP(e, (int64_t)t.m * t.n) {
        int i = (int)(e / t.n), j = (int)(e % t.n);
        int64_t at = (int64_t)i * t.ld + j;
        double s = a.s[at], dp = a.dp[at], lse = r.lse[i];
        double p = exp(s - (lse == -INFINITY ? 0 : lse)), ds = p * (dp - r.delta[i]);
        if (t.softcap > 0) ds *= 1 - a.cap[at] * a.cap[at];
        /* 0 times what is not finite is not 0: a masked pair is 0 by name. */
        bool sees = !(s == -INFINITY) || dkv_seesPair(t, i, j);
        a.p[at] = sees ? p : 0;
        a.ds[at] = sees ? ds : 0;
        if (BOUND) boundPair(t, r, u, a, i, j, s, p, dp);
    }
}

__global__ void add_vector_kernel(place w, int d, const double *acc, double *to) {
    DKV_GRID_LOOP(e, (int64_t)w.m * d) to[vectorOf(w, e / d) * d + e % d] = acc[e];
}

static int forwardBlock(dkv_device_oracle *o, dkv_scene *s, bool bound) {
    const dkv_problem *p = o->p;
    const place w = placeOf(o, s);
    const float *sink = o->in.sink ? o->in.sink + s->kvh * o->g : NULL;
    dkv_area t;
    int32_t range = -1;
    o->filled = 0;
    start_kernel<<<dkv_blocksFor(s->m, 256), 256, 0, o->stream>>>(s->m, o->g, o->r, sink);
    DKV_TRY_CUDA(cudaMemsetAsync(o->acc, 0, sizeof(double) * (size_t)s->m * (size_t)p->dv, o->stream));
    if (bound) DKV_TRY(dkv_boundStart(o, s));
    while (dkv_nextArea(o, s, &range, &t)) {
        double *scores, *sizes;
        DKV_TRY(dkv_loadScores(o, s, &t, NULL, &scores, bound ? &sizes : NULL));
        if (bound) DKV_TRY(dkv_boundChains(o, &t, scores, sizes));
        softmax_kernel<<<dkv_blocksFor((int64_t)t.m * 32, 256), 256, 0, o->stream>>>(t, o->r, scores, o->work[0]);
        DKV_TRY(dkv_scaleRows(o, t.m, p->dv, o->r.by, o->acc));
        DKV_TRY(dkv_gemmRows(o, &t, p->dv, 1, o->work[0], o->v + t.k_row * p->dv, 1, o->acc,
                             !dkv_finiteKeys(o, s, &t)));
        DKV_TRY(dkv_oracleTick(o, &t));
    }
    finish_forward_kernel<<<dkv_blocksFor((int64_t)s->m * p->dv, 256), 256, 0, o->stream>>>(
        w, p->dv, o->r, o->acc, o->out[DKV_PART_TRUTH][DKV_O], o->out[DKV_PART_TRUTH][DKV_LSE]);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

static int backwardTile(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, bool bound) {
    const dkv_problem *p = o->p;
    const int64_t at = (s->seg->q_start + s->r0) * o->g, hkv = p->hkv;
    const bool keys = !dkv_finiteKeys(o, s, t), rows = !s->finite_rows;
    double *const *w = o->work;
    const double *q = o->q + at * p->dqk, *d_o = o->d_o + at * p->dv;
    const double *k = o->k + t->k_row * p->dqk, *v = o->v + t->k_row * p->dv;
    double *scores, *sizes = NULL;
    DKV_TRY(dkv_loadScores(o, s, t, w[5], &scores, bound ? &sizes : NULL));
    DKV_TRY(dkv_gemmNt(o, t, p->dv, 1, d_o, v, w[1]));
    if (bound) DKV_TRY(dkv_gemmNt(o, t, p->dv, 1, o->ado + at * p->dv, o->av + t->k_row * p->dv, w[3]));
    const grads a = {scores, w[1], sizes, w[3], w[0], w[1], w[2], w[3], w[4], w[5], o->chain_k};
    const unsigned grid = dkv_blocksFor((int64_t)t->m * t->n, 256);
    if (bound) gradients_kernel<true><<<grid, 256, 0, o->stream>>>(*t, o->r, o->units, a);
    else gradients_kernel<false><<<grid, 256, 0, o->stream>>>(*t, o->r, o->units, a);
    DKV_TRY_CUDA(cudaGetLastError());
    const int64_t to_k = (t->k_row * hkv + s->kvh) * p->dqk, to_v = (t->k_row * hkv + s->kvh) * p->dv;
    double **truth = o->out[DKV_PART_TRUTH], **b = o->out[DKV_PART_BOUND];
    DKV_TRY(dkv_gemmRows(o, t, p->dqk, t->scale, w[1], k, 1, o->acc, keys));
    DKV_TRY(dkv_gemmKeys(o, t, p->dqk, t->scale, w[1], q, 1, truth[DKV_DK] + to_k, hkv * p->dqk, rows));
    DKV_TRY(dkv_gemmKeys(o, t, p->dv, 1, w[0], d_o, 1, truth[DKV_DV] + to_v, hkv * p->dv, rows));
    if (!bound) return 0;
    DKV_TRY(dkv_gemmRows(o, t, p->dqk, 1, w[2], o->ak + t->k_row * p->dqk, 1, o->acc2, false));
    DKV_TRY(
        dkv_gemmKeys(o, t, p->dqk, 1, w[3], o->aq + at * p->dqk, 1, b[DKV_DK] + to_k, hkv * p->dqk, false));
    return dkv_gemmKeys(o, t, p->dv, 1, w[4], o->ado + at * p->dv, 1, b[DKV_DV] + to_v, hkv * p->dv, false);
}

static int backwardBlock(dkv_device_oracle *o, dkv_scene *s, bool bound) {
    const dkv_problem *p = o->p;
    const place w = placeOf(o, s);
    const int64_t at = (s->seg->q_start + s->r0) * o->g;
    const float *sink = o->in.sink ? o->in.sink + s->kvh * o->g : NULL;
    dkv_area t;
    int32_t range = -1;
    delta_kernel<<<dkv_blocksFor((int64_t)s->m * 32, 256), 256, 0, o->stream>>>(
        w, p->dv, o->r, o->d_o + at * p->dv, o->out[DKV_PART_TRUTH][DKV_O], o->in.d_lse, sink, o->sink_t);
    DKV_TRY_CUDA(cudaGetLastError());
    const size_t bytes = sizeof(double) * (size_t)s->m * (size_t)p->dqk;
    DKV_TRY_CUDA(cudaMemsetAsync(o->acc, 0, bytes, o->stream));
    if (bound) DKV_TRY_CUDA(cudaMemsetAsync(o->acc2, 0, bytes, o->stream));
    while (dkv_nextArea(o, s, &range, &t)) {
        DKV_TRY(backwardTile(o, s, &t, bound));
        DKV_TRY(dkv_oracleTick(o, &t));
    }
    const unsigned grid = dkv_blocksFor((int64_t)s->m * p->dqk, 256);
    add_vector_kernel<<<grid, 256, 0, o->stream>>>(w, p->dqk, o->acc, o->out[DKV_PART_TRUTH][DKV_DQ]);
    if (bound)
        add_vector_kernel<<<grid, 256, 0, o->stream>>>(w, p->dqk, o->acc2, o->out[DKV_PART_BOUND][DKV_DQ]);
    DKV_TRY_CUDA(cudaGetLastError());
    return bound ? dkv_boundRows(o, s) : 0;
}

/* out[h] = sum over the head's rows, one block a head, in an order that tq alone decides. */
__global__ void sink_kernel(int64_t tq, const double *x, double *out) {
    __shared__ double part[256];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < tq; i += 256) sum += x[blockIdx.x * tq + i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int n = 128; n; n >>= 1) {
        if ((int)threadIdx.x < n) part[threadIdx.x] += part[threadIdx.x + n];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

int dkv_sumSink(dkv_device_oracle *o, const double *x, double *out) {
    sink_kernel<<<(unsigned)o->p->hq, 256, 0, o->stream>>>(o->l->view.tq, x, out);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

static int clear(dkv_device_oracle *o, int part, int id) {
    if (o->out[part][id])
        DKV_TRY_CUDA(cudaMemsetAsync(o->out[part][id], 0, sizeof(double) * (size_t)o->count[id], o->stream));
    return 0;
}

/* O and LSE of a forward that ran elsewhere, as doubles. */
__global__ void take_kernel(int64_t n_o, int64_t n_lse, int dtype, const void *from_o, const float *from_lse, double *o,
                            double *lse) {
    DKV_GRID_LOOP(e, n_o) o[e] = dkv_decodeOne(from_o, dtype, e);
    DKV_GRID_LOOP(e, n_lse) lse[e] = (double)from_lse[e];
}

__global__ void row_lse_kernel(place w, dkv_rows r, const double *lse) {
    DKV_GRID_LOOP(i, w.m) r.lse[i] = lse[lseOf(w, i)];
}

static int takeForward(dkv_device_oracle *o, dkv_scene *s) {
    o->filled = 0;
    row_lse_kernel<<<dkv_blocksFor(s->m, 256), 256, 0, o->stream>>>(placeOf(o, s), o->r,
                                                                   o->out[DKV_PART_TRUTH][DKV_LSE]);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

typedef struct truth_run {
    bool bound, given; /* given: O and LSE, taken already */
} truth_run;

static int truthHead(dkv_device_oracle *o, int32_t kvh, const void *arg) {
    const truth_run *run = (const truth_run *)arg;
    dkv_scene s = {};
    s.kvh = kvh;
    s.node = -1;
    DKV_TRY(dkv_loadHead(o, kvh, DUALKV_EXACT));
    while (dkv_nextScene(o, &s)) {
        DKV_TRY(run->given ? takeForward(o, &s) : forwardBlock(o, &s, run->bound));
        if (run->bound) DKV_TRY(dkv_boundForward(o, &s));
        if (o->in.d_o) DKV_TRY(backwardBlock(o, &s, run->bound));
    }
    return 0;
}

int dkv_runTruth(dkv_device_oracle *o, bool bound, const void *kernel_o, const float *kernel_lse) {
    const bool grad = o->in.d_o != NULL;
    for (int part = DKV_PART_TRUTH; part <= (bound ? DKV_PART_BOUND : DKV_PART_TRUTH); part++)
        for (int id = 0; id < DKV_N_OUTPUTS; id++) DKV_TRY(clear(o, part, id));
    if (o->sink_t)
        for (double *x : {o->sink_t, o->sink_e, o->sink_s})
            DKV_TRY_CUDA(
                cudaMemsetAsync(x, 0, sizeof(double) * (size_t)(o->l->view.tq * o->p->hq), o->stream));
    if (kernel_o && o->count[DKV_O] > 0) {
        take_kernel<<<dkv_blocksFor(o->count[DKV_O], 256), 256, 0, o->stream>>>(
            o->count[DKV_O], o->count[DKV_LSE], o->p->dtype, kernel_o, kernel_lse, o->out[DKV_PART_TRUTH][DKV_O],
            o->out[DKV_PART_TRUTH][DKV_LSE]);
        DKV_TRY_CUDA(cudaGetLastError());
    }
    if (bound && grad) DKV_TRY(dkv_boundHead(o));
    const truth_run run = {bound, kernel_o != NULL};
    DKV_TRY(dkv_eachHead(o, truthHead, &run));
    if (grad && o->sink_t) DKV_TRY(dkv_sumSink(o, o->sink_t, o->out[DKV_PART_TRUTH][DKV_DSINK]));
    return bound ? dkv_boundFinish(o) : 0;
}
