/* oracle_bound.cu: what the bound adds to the truth's walk: chains of rows and keys, the forward's weights,
 * and what is made of the sums. The formulas are bound_formula.h's; which pair belongs to which step and tile
 * is counted as bound_chains.c does. */
#include "oracle_impl.cuh"

/* --- chains over rows, for each key --- */

typedef struct key_walk {
    dkv_mask_view mask;
    int64_t pos, len, k_start, q_len; /* of a range; of the segment's rows */
    int64_t sub_rows;
    int32_t g, step;
} key_walk;

/* One block of threads a tile of 256 keys; a thread a key. */
__global__ void key_chains_kernel(key_walk w, double *n, double *steps, double *pieces) {
    const int64_t first = w.pos + blockIdx.x * (int64_t)DKV_SUB_KEYS, key = first + threadIdx.x;
    const int64_t end = first + DKV_SUB_KEYS < w.pos + w.len ? first + DKV_SUB_KEYS : w.pos + w.len;
    const int64_t row = w.k_start + (key - w.pos);
    double a = 0, b = 0, c = 0;
    for (int64_t r0 = 0; r0 < w.q_len; r0 += w.sub_rows) {
        int64_t r1 = r0 + w.sub_rows < w.q_len ? r0 + w.sub_rows : w.q_len, j0 = first, j1 = end, last = -1;
        int vis = dkv_pairTrim(&w.mask, r0, r1, &j0, &j1);
        if (vis == 2) vis = dkv_pairBlock(&w.mask, r0, r1, j0, j1);
        if (!vis || key < j0 || key >= j1) continue;
        if (vis == 1) {
            a += (double)(r1 - r0) * w.g;
            b += w.g * (double)((r1 - 1) / w.step - r0 / w.step + 1);
            c += w.g;
            continue;
        }
        for (int64_t r = r0; r < r1; r++) {
            if (!dkv_pairSees(&w.mask, r, key)) continue;
            a += w.g;
            if (last < 0) c += w.g;
            b += last < 0 ? w.g + 2 : last != r / w.step ? w.g : 0;
            last = r / w.step;
        }
    }
    if (key >= end) return;
    n[row] += a;
    steps[row] += b;
    pieces[row] += c;
}

/* through: roundings of partial sums on the way, of which the formulas know one. */
__global__ void chain_error_kernel(int64_t tk, dkv_chain_units c, const double *n, const double *steps,
                                   const double *pieces, double partial, const double *through, double *out) {
    DKV_GRID_LOOP(j, tk)
    out[j] = (1 + dkv_formulaSum(c, n[j], steps[j], pieces[j])) * pow(1 + partial, fmax(through[j] - 1, 0.0)) - 1;
}

static dkv_chain_units chainOf(const dkv_device_oracle *o, int64_t fold) {
    return dkv_chain_units{o->a.acc_unit, o->a.unit, o->units.in, fold ? fold : o->a.acc_fold};
}

int dkv_boundHead(dkv_device_oracle *o) {
    const dualkv_problem *v = &o->l->view;
    const int64_t tk = v->tk;
    double *steps = NULL, *pieces = NULL;
    cudaError_t e = cudaMallocAsync(&steps, sizeof(double) * (size_t)(tk + 1), o->stream);
    if (!e) e = cudaMallocAsync(&pieces, sizeof(double) * (size_t)(tk + 1), o->stream);
    if (!e) e = cudaMemsetAsync(o->key_n, 0, sizeof(double) * (size_t)tk, o->stream);
    if (!e) e = cudaMemsetAsync(steps, 0, sizeof(double) * (size_t)tk, o->stream);
    if (!e) e = cudaMemsetAsync(pieces, 0, sizeof(double) * (size_t)tk, o->stream);
    for (int32_t s = 0; s < v->n_segments && !e; s++)
        for (int32_t r = 0; r < v->segments[s].range_count; r++) {
            const dualkv_range *x = &v->ranges[v->segments[s].range_begin + r];
            if (v->segments[s].q_len == 0 || x->len == 0) continue;
            key_walk w = {dkv_viewMask(o->p, s), x->pos,      x->len, x->k_start,
                          v->segments[s].q_len,  o->sub_rows, o->g,   o->a.acc_step};
            key_chains_kernel<<<dkv_blocksFor(x->len, DKV_SUB_KEYS), DKV_SUB_KEYS, 0, o->stream>>>(
                w, o->key_n, steps, pieces);
        }
    if (!e && tk > 0)
        chain_error_kernel<<<dkv_blocksFor(tk, 256), 256, 0, o->stream>>>(
            tk, chainOf(o, o->a.acc_fold_dkv), o->key_n, steps, pieces, o->units.partial, o->through, o->chain_k);
    if (!e) e = cudaGetLastError();
    if (steps) cudaFreeAsync(steps, o->stream);
    if (pieces) cudaFreeAsync(pieces, o->stream);
    DKV_TRY_CUDA(e);
    return 0;
}

/* --- chains over keys, for each row --- */

typedef struct row_walk {
    int32_t tile, step; /* key tile, 0: undeclared */
    int64_t slots, max_m;
    double *table; /* [slots, max_m] */
} row_walk;

static __device__ __forceinline__ double sigmaAt(const dkv_area &t, const dkv_units &u, dkv_sigma_units su,
                                                 int i, int j, double s, double x) {
    return s > -INFINITY
               ? dkv_formulaSigma(&u, su, s, x, t.slopes ? (double)t.slopes[i % t.g] : 0, dkv_biasOf(t, i, j))
               : 0;
}

/* A warp a row: largest score of each key tile, steps of products that hold a visible key. */
__global__ void row_chains_kernel(dkv_area t, dkv_rows r, row_walk w, __grid_constant__ const dkv_units u,
                                  const double *s, const double *x) {
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (i >= t.m) return;
    const dkv_sigma_units su = dkv_formulaSigmaUnits(&u);
    const double *row = s + (int64_t)i * t.ld, *mag = x + (int64_t)i * t.ld;
    /* 32 bits, for the sake of divisions: oracle_open lets no more keys in */
    const unsigned tile = (unsigned)w.tile, step = (unsigned)w.step, per_tile = tile ? (tile + step - 1) / step : 0;
    const unsigned offset = (unsigned)t.offset, keys = (unsigned)t.n;
    double n = 0, steps = 0, most = -INFINITY, wide = 0, tiles = 0, last_slot = r.last[i];
    unsigned before = ~0u; /* step of the last visible key, within 256 keys */
    for (unsigned at = 0; at < keys;) {
        const unsigned slot = tile ? (offset + at) / tile : 0;
        const unsigned slot_end = tile ? (slot + 1) * tile - offset : keys;
        double top = -INFINITY;
        for (; at < slot_end && at < keys;) {
            unsigned sub_end = (at / DKV_SUB_KEYS + 1) * DKV_SUB_KEYS, end = at + 32; /* a tile begins at a multiple of it */
            if (at % DKV_SUB_KEYS == 0) before = ~0u;
            end = end < slot_end ? end : slot_end;
            end = end < sub_end ? end : sub_end;
            end = end < keys ? end : keys;
            const unsigned j = at + lane, off = offset + j;
            const bool in = j < end;
            const double y = in ? row[j] : -INFINITY;
            const bool sees = y > -INFINITY;
            const unsigned group = tile ? off / tile * per_tile + off % tile / step : off / step;
            const unsigned all = __ballot_sync(~0u, sees), below = all & ((1u << lane) - 1);
            const unsigned prev = __shfl_sync(~0u, group, below ? 31 - __clz(below) : 0);
            const bool fresh = sees && group != (below ? prev : before);
            n += __popc(all);
            steps += __popc(__ballot_sync(~0u, fresh));
            if (all) before = __shfl_sync(~0u, group, 31 - __clz(all));
            top = y > top ? y : top;
            if (in) wide = fmax(wide, sigmaAt(t, u, su, i, (int)j, y, mag[j]));
            at = end;
        }
        top = dkv_warpMax(top);
        most = fmax(most, top);
        const double id = (double)(t.slot0 + slot);
        if (w.tile && top > -INFINITY) {
            tiles += last_slot != id;
            last_slot = id;
        }
        if (w.slots && lane == 0) {
            double *m = w.table + (t.slot0 + slot) * w.max_m + i;
            *m = top > *m ? top : *m;
        }
    }
    wide = dkv_warpMax(wide);
    if (lane) return;
    r.n[i] += n;
    r.steps[i] += steps;
    r.tiles[i] += tiles;
    r.last[i] = last_slot;
    r.cmax[i] = fmax(r.cmax[i], most);
    r.top[i] = fmax(r.top[i], wide);
}

__global__ void start_chains_kernel(int m, dkv_rows r, row_walk w) {
    DKV_GRID_LOOP(i, m) {
        r.n[i] = r.steps[i] = r.tiles[i] = r.rises[i] = r.top[i] = r.sum_h[i] = r.xtop[i] = 0;
        r.cmax[i] = -INFINITY;
        r.last[i] = -1;
    }
    DKV_GRID_LOOP(e, w.slots * w.max_m) w.table[e] = -INFINITY;
}

static row_walk walkOf(const dkv_device_oracle *o) {
    return row_walk{o->a.key_tile, o->a.acc_step, o->slots, o->max_m, o->table};
}

int dkv_boundChains(dkv_device_oracle *o, const dkv_area *t, const double *s, const double *x) {
    row_chains_kernel<<<dkv_blocksFor((int64_t)t->m * 32, 256), 256, 0, o->stream>>>(*t, o->r, walkOf(o),
                                                                                     o->units, s, x);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

int dkv_boundStart(dkv_device_oracle *o, const dkv_scene *s) {
    start_chains_kernel<<<1024, 256, 0, o->stream>>>(s->m, o->r, walkOf(o));
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

/* How often the row's maximum may rise, by computed scores within sigma of the true ones; then kappa and w0.
 */
__global__ void start_weights_kernel(int m, int g, dkv_rows r, row_walk w, int64_t slots, dkv_chain_units c,
                                     int p_normalised, int key_order, const float *sink,
                                     __grid_constant__ const dkv_units u) {
    DKV_GRID_LOOP(i, m) {
        double run = -INFINITY, margin = 2.0 * r.top[i] + 8 * u.u * fabs(r.cmax[i]), rises = 0,
               tiles = r.tiles[i];
        if (!w.tile) tiles = r.n[i];
        if (!slots) rises = tiles;
        for (int64_t k = 0; k < slots; k++) {
            double x = w.table[(key_order ? slots - 1 - k : k) * w.max_m + i];
            rises += run > -INFINITY && x > -INFINITY && x >= run - margin;
            run = x > run ? x : run;
        }
        if (sink && tiles > 0) {
            tiles++;
            rises++;
        }
        r.tiles[i] = tiles;
        r.rises[i] = rises;
        const double lse = r.lse[i], top = sink ? fmax(r.cmax[i], (double)sink[i % g]) : r.cmax[i];
        r.fmax[i] = top;
        if (!isfinite(lse)) continue;
        r.kappa[i] = dkv_formulaKappa(&u, dkv_formulaSum(c, r.n[i], r.steps[i], tiles), rises);
        r.w0[i] = dkv_formulaW0(&u, p_normalised, top, lse);
    }
}

/* A warp a row: the weights of O's error; sums of h, the largest x. */
__global__ void weights_kernel(dkv_area t, dkv_rows r, __grid_constant__ const dkv_units u, const double *s,
                               const double *x, double *out) {
    const int i = (int)((blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32), lane = threadIdx.x % 32;
    if (i >= t.m) return;
    const dkv_sigma_units su = dkv_formulaSigmaUnits(&u);
    const double lse = r.lse[i], m = dkv_formulaLateMax(&u, r.fmax[i]), am = fabs(r.fmax[i]), close = 1 + 8 * u.u, kappa = r.kappa[i],
                 w0 = r.w0[i];
    const double by_h = (1 + u.exp) * (1 + kappa), by_p = u.exp * (1 + kappa) + kappa;
    const bool part = isfinite(lse);
    double sum = 0, top = 0;
    for (int j = lane; j < t.n; j += 32) {
        const int64_t at = (int64_t)i * t.ld + j;
        const double y = s[at];
        double w = 0;
        if (part && y > -INFINITY) {
            double p = exp(y - lse),
                   z = dkv_formulaForwardX(u.u, close, m, am, y, sigmaAt(t, u, su, i, j, y, x[at]));
            double h = dkv_formulaGrow(p, y - lse, z);
            w = dkv_formulaForwardWeight(by_h, by_p, w0, h, p);
            sum += h;
            top = z > top ? z : top;
        }
        out[at] = w;
    }
    sum = dkv_warpSum(sum);
    top = dkv_warpMax(top);
    if (lane) return;
    r.sum_h[i] += sum;
    r.xtop[i] = fmax(r.xtop[i], top);
}

/* Largest finite |V| that a block of sub_rows rows may see: one block of threads for each of those and 256
 * keys. */
__global__ void v_max_kernel(dkv_area t, int rows, int d, const double *v, double *out) {
    int64_t r0 = t.r0 + blockIdx.x * (int64_t)t.sub_rows, r1 = r0 + t.sub_rows;
    int64_t a = blockIdx.y * (int64_t)DKV_SUB_KEYS, b = a + DKV_SUB_KEYS;
    b = t.j0 + (b < t.n ? b : t.n);
    a += t.j0;
    r1 = r1 < t.r0 + rows ? r1 : t.r0 + rows;
    if (!dkv_pairTrim(&t.mask, r0, r1, &a, &b)) return;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        double top = 0;
        for (int64_t j = a - t.j0; j < b - t.j0; j++) {
            double x = fabs(v[j * d + c]);
            top = x <= DKV_FP32_MAX && x > top ? x : top;
        }
        atomicMax((unsigned long long *)&out[blockIdx.x * (int64_t)d + c],
                  (unsigned long long)__double_as_longlong(top));
    }
}

typedef struct forward_end {
    int64_t q_row, tq;
    int32_t m, g, hq, head0, dv, sub_m, key_tile, delta_exact, p_normalised;
    const double *d_o, *o, *acc, *v_max; /* block, packed, block, [sub-blocks, dv] */
    const float *d_lse, *sink;
    double *lse_out, *o_out, *sink_e, *sink_s;
} forward_end;

/* A warp a row: LSE's tolerance, O's, and the error of delta. */
__global__ void finish_forward_bound_kernel(forward_end f, dkv_rows r, dkv_chain_units dq,
                                            __grid_constant__ const dkv_units u) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (i >= f.m) return;
    const int64_t vec = (f.q_row + i / f.g) * f.hq + f.head0 + i % f.g;
    const int64_t one = (f.head0 + i % f.g) * f.tq + f.q_row + i / f.g;
    const double lse = r.lse[i], n = r.n[i];
    double *out = f.o_out + vec * f.dv, e = 0, d = 0;
    if (!isfinite(lse)) {
        for (int c = lane; c < f.dv; c += 32) out[c] = 0;
        if (lane == 0) f.lse_out[one] = r.tol_lse[i] = r.base[i] = r.chain[i] = 0;
        return;
    }
    const double sink = f.sink ? (double)f.sink[i % f.g] : -INFINITY;
    double sum_h = r.sum_h[i], top = r.xtop[i];
    if (f.sink) {
        double x = dkv_formulaSinkForward(&u, sink, r.fmax[i]);
        sum_h += exp(sink - lse) * expm1(x);
        top = fmax(top, x);
    }
    sum_h += n * u.w_exp;
    const double row_sum = dkv_formulaRowSum(&u, f.key_tile, n, r.tiles[i], r.rises[i]);
    const double tol = dkv_formulaLse(&u, row_sum, sum_h, top, r.fmax[i], lse);
    const double sums = expm1(row_sum + 2 * u.u * (1 + u.u)), h = sum_h * (1 + u.exp) + u.exp,
                 kappa = r.kappa[i];
    const double tiny = (n + 4) * u.w, dp = u.dp + u.dp_round + expm1(n * u.u);
    for (int c = lane; c < f.dv; c += 32) {
        const double o = f.o[vec * f.dv + c], acc = f.acc[i * f.dv + c],
                     v_max = f.v_max[i / f.sub_m * f.dv + c];
        double before = 0, after = 0;
        if (n > 0) {
            before = dkv_formulaO(fabs(o), acc, v_max, kappa, r.w0[i], n, sums, h, tiny);
            after = dkv_formulaOutput(&u, before, fabs(o));
        }
        out[c] = after;
        if (!f.d_o) continue;
        const double d_o = f.d_o[i * f.dv + c];
        e += dkv_formulaDelta(&u, d_o, o, f.delta_exact ? before : after,
                              f.p_normalised ? acc * dp / kappa : 0);
        d += d_o * o;
    }
    e = dkv_warpSum(e);
    d = dkv_warpSum(d);
    if (lane) return;
    r.tol_lse[i] = f.lse_out[one] = tol;
    if (!f.d_o) return;
    const double d_lse = f.d_lse ? (double)f.d_lse[one] : 0, delta = d - d_lse;
    r.base[i] = dkv_formulaBase(&u, e, delta, d_lse);
    r.chain[i] = dkv_formulaSum(dq, n, r.steps[i], r.tiles[i]);
    if (f.sink)
        dkv_formulaSinkRow(&u, exp(sink - lse), dkv_formulaSinkBackward(&u, sink, lse, tol), delta, r.base[i],
                           &f.sink_e[one], &f.sink_s[one]);
}

static int finishForward(dkv_device_oracle *o, const dkv_scene *s) {
    const int64_t at = (s->seg->q_start + s->r0) * o->g;
    forward_end f = {};
    f.q_row = s->seg->q_start + s->r0;
    f.tq = o->l->view.tq;
    f.m = s->m;
    f.g = o->g;
    f.hq = o->p->hq;
    f.head0 = s->kvh * o->g;
    f.dv = o->p->dv;
    f.sub_m = (int32_t)(o->sub_rows * o->g);
    f.key_tile = o->a.key_tile;
    f.delta_exact = o->a.delta_exact;
    f.p_normalised = o->a.p_normalised;
    f.d_o = o->in.d_o ? o->d_o + at * f.dv : NULL;
    f.o = o->out[DKV_PART_TRUTH][DKV_O];
    f.acc = o->acc2;
    f.v_max = o->v_max;
    f.d_lse = o->in.d_lse;
    f.sink = o->in.sink ? o->in.sink + f.head0 : NULL;
    f.lse_out = o->out[DKV_PART_BOUND][DKV_LSE];
    f.o_out = o->out[DKV_PART_BOUND][DKV_O];
    f.sink_e = o->sink_e;
    f.sink_s = o->sink_s;
    finish_forward_bound_kernel<<<dkv_blocksFor((int64_t)s->m * 32, 256), 256, 0, o->stream>>>(
        f, o->r, chainOf(o, o->a.acc_fold_dq), o->units);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

int dkv_boundForward(dkv_device_oracle *o, const dkv_scene *s) {
    const dkv_problem *p = o->p;
    const int64_t blocks = (s->r1 - s->r0 + o->sub_rows - 1) / o->sub_rows;
    const float *sink = o->in.sink ? o->in.sink + s->kvh * o->g : NULL;
    dkv_area t;
    int32_t range = -1;
    int64_t slots = 0;
    for (int32_t r = 0; r < s->seg->range_count && o->slots; r++)
        slots += (o->l->view.ranges[s->seg->range_begin + r].len + o->a.key_tile - 1) / o->a.key_tile;
    start_weights_kernel<<<dkv_blocksFor(s->m, 128), 128, 0, o->stream>>>(
        s->m, o->g, o->r, walkOf(o), slots, chainOf(o, 0), o->a.p_normalised, o->a.key_order, sink, o->units);
    DKV_TRY_CUDA(cudaGetLastError());
    DKV_TRY_CUDA(cudaMemsetAsync(o->acc2, 0, sizeof(double) * (size_t)s->m * (size_t)p->dv, o->stream));
    DKV_TRY_CUDA(cudaMemsetAsync(o->v_max, 0, sizeof(double) * (size_t)blocks * (size_t)p->dv, o->stream));
    while (dkv_nextArea(o, s, &range, &t)) {
        const double *v = o->v + t.k_row * p->dv;
        double *scores, *sizes;
        DKV_TRY(dkv_loadScores(o, s, &t, NULL, &scores, &sizes));
        weights_kernel<<<dkv_blocksFor((int64_t)t.m * 32, 256), 256, 0, o->stream>>>(t, o->r, o->units, scores, sizes,
                                                                                     o->work[1]);
        v_max_kernel<<<dim3((unsigned)blocks, dkv_blocksFor(t.n, DKV_SUB_KEYS)), 128, 0, o->stream>>>(
            t, (int)(s->r1 - s->r0), p->dv, v, o->v_max);
        DKV_TRY_CUDA(cudaGetLastError());
        DKV_TRY(dkv_gemmRows(o, &t, p->dv, 1, o->work[1], o->av + t.k_row * p->dv, 1, o->acc2, false));
    }
    return finishForward(o, s);
}

/* --- the whole --- */

/* Sums of weights become bounds. scale, after: of dkv_formulaFinish; partial sums at underflow are scaled already, too. */
__global__ void finish_sums_kernel(int64_t n, int64_t per_key, const double *key_n, const double *roundings,
                                   double scale, int after, __grid_constant__ const dkv_units u,
                                   const double *x, double *b) {
    DKV_GRID_LOOP(e, n) {
        double terms = key_n[e / per_key], lost = roundings[e / per_key] * u.w_partial;
        b[e] = terms > 0 ? dkv_formulaFinish(&u, b[e] + lost, scale, terms, x[e]) + (after ? lost : 0) : 0;
    }
}

__global__ void finish_rows_kernel(int64_t q_row, int m, int g, int hq, int head0, int d, dkv_rows r,
                                   __grid_constant__ const dkv_units u, const double *x, double *b) {
    DKV_GRID_LOOP(e, (int64_t)m * d) {
        int64_t i = e / d, at = ((q_row + i / g) * hq + head0 + i % g) * d + e % d;
        b[at] = r.n[i] > 0 ? dkv_formulaFinish(&u, b[at], u.scale, r.n[i], x[at]) : 0;
    }
}

int dkv_boundRows(dkv_device_oracle *o, const dkv_scene *s) {
    const int d = o->p->dqk;
    finish_rows_kernel<<<dkv_blocksFor((int64_t)s->m * d, 256), 256, 0, o->stream>>>(
        s->seg->q_start + s->r0, s->m, o->g, o->p->hq, s->kvh * o->g, d, o->r, o->units,
        o->out[DKV_PART_TRUTH][DKV_DQ], o->out[DKV_PART_BOUND][DKV_DQ]);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

__global__ void finish_sink_kernel(int hq, double rows, __grid_constant__ const dkv_units u,
                                   const double *error, const double *size, const double *x, double *b) {
    DKV_GRID_LOOP(h, hq) b[h] = dkv_formulaSinkSum(&u, error[h], size[h], rows, x[h]);
}

/* Where the truth is not finite neither is the bound: NaN, or infinity. */
__global__ void copy_non_finite_kernel(int64_t n, int lse, const double *x, double *b) {
    DKV_GRID_LOOP(e, n) {
        if (!isfinite(x[e]) && !(lse && x[e] < 0)) b[e] = isnan(x[e]) ? (double)NAN : (double)INFINITY;
    }
}

/* --- elements for which nothing is claimed (ref/bound_exempt.c) --- */

/* Rows [row, row + n) of [rows, heads, width]: one head's elements. */
__global__ void unclaim_kernel(int64_t row, int64_t n, int64_t heads, int64_t head, int64_t width,
                               double *x) {
    DKV_GRID_LOOP(e, n * width) {
        const int64_t at = ((row + e / width) * heads + head) * width + e % width;
        if (isfinite(x[at])) x[at] = DKV_UNCLAIMED;
    }
}

static int unclaim(dkv_device_oracle *o, dkv_tensor_id id, int64_t row, int64_t n, int64_t head,
                   int64_t width) {
    if (!o->out[DKV_PART_BOUND][id] || n == 0) return 0;
    unclaim_kernel<<<dkv_blocksFor(n * width, 256), 256, 0, o->stream>>>(row, n, o->p->hkv, head, width,
                                                                         o->out[DKV_PART_BOUND][id]);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

static int markSegment(dkv_device_oracle *o, const dualkv_segment *s, int64_t kvh) {
    const dkv_problem *p = o->p;
    const dualkv_problem *v = &o->l->view;
    const int32_t *q = o->bad_q + kvh * (v->tq + 1) + s->q_start, *k = o->bad_k + kvh * (v->tk + 1);
    const bool rows = q[s->q_len] > q[0];
    bool keys = false;
    for (int64_t r = s->range_begin; r < s->range_begin + s->range_count; r++)
        keys |= k[v->ranges[r].k_start + v->ranges[r].len] > k[v->ranges[r].k_start];
    if (s->q_len == 0 || (!keys && !rows)) return 0;
    if (keys) {
        DKV_TRY(unclaim(o, DKV_O, s->q_start, s->q_len, kvh, (int64_t)o->g * p->dv));
        DKV_TRY(unclaim(o, DKV_DQ, s->q_start, s->q_len, kvh, (int64_t)o->g * p->dqk));
        DKV_TRY(unclaim(o, DKV_DSINK, 0, 1, kvh, o->g)); /* through the rows' dO.O */
    }
    for (int64_t r = s->range_begin; r < s->range_begin + s->range_count; r++) {
        DKV_TRY(unclaim(o, DKV_DK, v->ranges[r].k_start, v->ranges[r].len, kvh, p->dqk));
        DKV_TRY(unclaim(o, DKV_DV, v->ranges[r].k_start, v->ranges[r].len, kvh, p->dv));
    }
    return 0;
}

static int markExempt(dkv_device_oracle *o) {
    const dualkv_problem *v = &o->l->view;
    for (int64_t h = 0; h < o->p->hkv; h++) {
        if (o->bad_q[h * (v->tq + 1) + v->tq] == 0 && o->bad_k[h * (v->tk + 1) + v->tk] == 0) continue;
        for (int32_t s = 0; s < v->n_segments; s++) DKV_TRY(markSegment(o, &v->segments[s], h));
    }
    return 0;
}

int dkv_boundFinish(dkv_device_oracle *o) {
    const dkv_problem *p = o->p;
    double **x = o->out[DKV_PART_TRUTH], **b = o->out[DKV_PART_BOUND];
    if (o->in.d_o) {
        const int64_t k = o->count[DKV_DK], v = o->count[DKV_DV];
        if (k > 0)
            finish_sums_kernel<<<dkv_blocksFor(k, 256), 256, 0, o->stream>>>(
                k, (int64_t)p->hkv * p->dqk, o->key_n, o->roundings, o->units.scale, 1, o->units, x[DKV_DK],
                b[DKV_DK]);
        if (v > 0)
            finish_sums_kernel<<<dkv_blocksFor(v, 256), 256, 0, o->stream>>>(
                v, (int64_t)p->hkv * p->dv, o->key_n, o->roundings, 1, 0, o->units, x[DKV_DV], b[DKV_DV]);
        DKV_TRY_CUDA(cudaGetLastError());
    }
    if (o->in.d_o && o->sink_e) {
        DKV_TRY(dkv_sumSink(o, o->sink_e, o->acc));
        DKV_TRY(dkv_sumSink(o, o->sink_s, o->acc2));
        finish_sink_kernel<<<dkv_blocksFor(p->hq, 64), 64, 0, o->stream>>>(
            p->hq, (double)o->l->view.tq, o->units, o->acc, o->acc2, x[DKV_DSINK], b[DKV_DSINK]);
        DKV_TRY_CUDA(cudaGetLastError());
    }
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (o->count[id] > 0)
            copy_non_finite_kernel<<<dkv_blocksFor(o->count[id], 256), 256, 0, o->stream>>>(
                o->count[id], id == DKV_LSE, x[id], b[id]);
    DKV_TRY_CUDA(cudaGetLastError());
    return markExempt(o);
}
