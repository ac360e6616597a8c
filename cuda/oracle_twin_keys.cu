/* oracle_twin_keys.cu: what becomes of the twin's sums over rows, of dK and dV (ref/twin_partials.c). */
#include "../ref/partials.h"
#include "oracle_twin.cuh"

typedef struct key_end {
    int64_t tk;
    /* parts: to be summed, 0: none; heads: each rounded before; summed: their sum is not */
    int32_t d, hkv, kvh, parts, stored, heads, summed;
    dkv_rounder round_part;
} key_end;

/* x, of variance v, rounded: what that leaves (ref/twin_partials.c). */
static __device__ __forceinline__ double roundOne(const key_end &k, const dkv_twin_units &u, double *x, double v) {
    const double y = dkv_roundBy(k.round_part, *x), left = v + dkv_flip(*x, y, v, dkv_spacingAt(u.ulp_part, fabs(*x)));
    *x = y;
    return left;
}

/* One element's partial sums, rounded and added. */
static __device__ __forceinline__ double addParts(const key_end &k, const dkv_twin_units &u, const double *x,
                                                  const double *var, int64_t e, double *v) {
    double sum = 0;
    for (int i = 0; i < k.parts; i++) {
        double y = x[i * k.tk * k.d + e], left = var[i * k.tk * k.d + e];
        if (k.heads && (k.parts > 1 || !k.summed)) left = roundOne(k, u, &y, left);
        sum += y;
        *v += left + (i > 0 ? u.z.unit2 * sum * sum : 0);
    }
    return sum;
}

/* A segment's sums over the keys of one range, rounded, into the outputs'; cleared. */
__global__ void add_segment_kernel(key_end k, __grid_constant__ const dkv_twin_units u, int64_t first, int64_t n,
                                   double *x, double *var, double *twin, double *sigma2) {
    DKV_GRID_LOOP(i, n * k.d) {
        const int64_t e = first * k.d + i, at = (e / k.d * k.hkv + k.kvh) * k.d + e % k.d;
        double v = 0, sum = addParts(k, u, x, var, e, &v);
        const double h = dkv_spacingAt(u.ulp_part, fabs(sum)), before = twin[at];
        if (k.summed) v = dkv_stored(sum, dkv_roundBy(u.round_out, sum), v, dkv_spacingAt(u.ulp_out, fabs(sum)));
        else v = k.heads ? 0 : roundOne(k, u, &sum, v);
        for (int p = 0; p < k.parts; p++) {
            const int64_t o = p * k.tk * k.d + e;
            if (k.heads && !k.summed) {
                double y = x[o], left = roundOne(k, u, &y, var[o]), by = h / dkv_spacingAt(u.ulp_part, fabs(y));
                v += left * (by * by > 2 ? by * by / 2 : 1);
            }
            x[o] = var[o] = 0;
        }
        if (!k.summed) sum = dkv_roundBy(k.round_part, sum);
        twin[at] = before + sum;
        sigma2[at] += v + (before != 0 && sum != 0 && !k.summed ? u.z.unit2 * twin[at] * twin[at] : 0);
    }
}

/* What is left to sum, summed; then the output's rounding. */
__global__ void finish_keys_kernel(key_end k, __grid_constant__ const dkv_twin_units u, const double *x,
                                   const double *var, double *twin, double *sigma2) {
    DKV_GRID_LOOP(e, k.tk * k.d) {
        const int64_t at = (e / k.d * k.hkv + k.kvh) * k.d + e % k.d;
        double sum = twin[at], v = sigma2[at];
        if (k.parts > 0) v = 0, sum = addParts(k, u, x, var, e, &v);
        twin[at] = sum;
        const double h = k.stored ? 0 : dkv_spacingAt(u.ulp_out, fabs(sum));
        sigma2[at] = k.summed ? v : dkv_stored(sum, dkv_roundBy(u.round_out, sum), v, h);
    }
}

typedef struct key_loss {
    const double *n, *n2; /* [tk] */
    double *x, *var, *size, *spread, *square;
    double last; /* dkv_noise.last_p, last_ds */
    int64_t ld, part; /* element (j, c) of accumulator p at p * part + j * ld + c; sizes at (p * tk + j) * d + c */
    int64_t tk;
    int32_t d, parts;
} key_loss;

/* What the accumulators of keys [first, first + n) are expected to lose (dkv_twinLossAnyhow); their chains begin anew. */
__global__ void lose_keys_kernel(key_loss k, __grid_constant__ const dkv_noise z, int64_t first, int64_t n) {
    DKV_GRID_LOOP(e, k.parts * n * k.d) {
        const int64_t p = e / (n * k.d), j = first + e / k.d % n, c = e % k.d, at = p * k.part + j * k.ld + c;
        const int64_t own = (p * k.tk + j) * k.d + c;
        const double all = k.n[j], terms = all / k.parts, x = k.x[at], size = k.size[own];
        const dkv_twin_lost lost = dkv_twinLossAnyhow(&z, k.last, z.fold_dkv, x, terms, size, k.square[own]);
        k.var[at] += dkv_twinPath(&z, z.fold_dkv, x, terms, size, k.spread[own], all > 0 ? k.n2[j] / (all * all) : 1) + lost.var;
        k.x[at] = x - lost.mean;
        k.size[own] = k.spread[own] = k.square[own] = 0;
    }
}

static int loseKeys(dkv_device_oracle *o, int32_t kvh, int64_t first, int64_t n) {
    const dkv_problem *p = o->p;
    dkv_twin_device *t = o->twin;
    const int64_t tk = o->l->view.tk;
    for (int of_dv = 0; of_dv < 2; of_dv++) {
        const int32_t d = of_dv ? p->dv : p->dqk;
        const int id = of_dv ? DKV_DV : DKV_DK;
        key_loss k = {t->key_n, t->key_n2, of_dv ? t->dv : t->dk, of_dv ? t->dv_var : t->dk_var,
                      of_dv ? t->dv_size : t->dk_size, of_dv ? t->dv_spread : t->dk_spread,
                      of_dv ? t->dv_square : t->dk_square, of_dv ? t->u.z.last_p : t->u.z.last_ds, d, tk * d, tk, d, t->parts};
        if (!t->apart) {
            k.x = o->out[DKV_PART_TWIN][id] + (int64_t)kvh * d;
            k.var = o->out[DKV_PART_SIGMA2][id] + (int64_t)kvh * d;
            k.ld = (int64_t)p->hkv * d;
        }
        lose_keys_kernel<<<dkv_blocksFor(t->parts * n * d, 256), 256, 0, o->stream>>>(k, t->u.z, first, n);
        DKV_TRY_CUDA(cudaGetLastError());
    }
    return 0;
}

static int zeroCounts(dkv_device_oracle *o, int64_t first, int64_t n) {
    for (double *x : {o->twin->key_n, o->twin->key_n2})
        DKV_TRY_CUDA(cudaMemsetAsync(x + first, 0, sizeof(double) * (size_t)n, o->stream));
    return 0;
}

/* After a segment's last rows. */
int dkv_twinAddSegment(dkv_device_oracle *o, const dkv_scene *s) {
    dkv_twin_device *t = o->twin;
    const int summed = dkv_partialsOf(&o->a).summed;
    key_end k = {o->l->view.tk, 0, o->p->hkv, s->kvh, t->parts, 0, t->heads, summed, dkv_makeRounder(o->a.partial_format)};
    for (int32_t r = 0; r < s->seg->range_count; r++) {
        const dualkv_range *g = &o->l->view.ranges[s->seg->range_begin + r];
        if (t->anyhow) DKV_TRY(loseKeys(o, s->kvh, g->k_start, g->len));
        DKV_TRY(zeroCounts(o, g->k_start, g->len));
    }
    for (int32_t r = 0; r < s->seg->range_count; r++) {
        const dualkv_range *g = &o->l->view.ranges[s->seg->range_begin + r];
        k.d = o->p->dqk; /* a range is never empty */
        add_segment_kernel<<<dkv_blocksFor(g->len * k.d, 256), 256, 0, o->stream>>>(
            k, t->u, g->k_start, g->len, t->dk, t->dk_var, o->out[DKV_PART_TWIN][DKV_DK], o->out[DKV_PART_SIGMA2][DKV_DK]);
        k.d = o->p->dv;
        add_segment_kernel<<<dkv_blocksFor(g->len * k.d, 256), 256, 0, o->stream>>>(
            k, t->u, g->k_start, g->len, t->dv, t->dv_var, o->out[DKV_PART_TWIN][DKV_DV], o->out[DKV_PART_SIGMA2][DKV_DV]);
    }
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

int dkv_twinFinishKeys(dkv_device_oracle *o, int32_t kvh) {
    dkv_twin_device *t = o->twin;
    const bool fp32 = o->a.out_format == DUALKV_FP32;
    key_end k = {o->l->view.tk, o->p->dqk, o->p->hkv, kvh, t->apart && !t->segments ? t->parts : 0,
                 fp32 && t->u.scale_exact, t->heads, dkv_partialsOf(&o->a).summed, dkv_makeRounder(o->a.partial_format)};
    if (k.tk == 0) return 0;
    if (t->anyhow) DKV_TRY(loseKeys(o, kvh, 0, k.tk));
    finish_keys_kernel<<<dkv_blocksFor(k.tk * k.d, 256), 256, 0, o->stream>>>(
        k, t->u, t->dk, t->dk_var, o->out[DKV_PART_TWIN][DKV_DK], o->out[DKV_PART_SIGMA2][DKV_DK]);
    k.d = o->p->dv;
    k.stored = fp32;
    finish_keys_kernel<<<dkv_blocksFor(k.tk * k.d, 256), 256, 0, o->stream>>>(
        k, t->u, t->dv, t->dv_var, o->out[DKV_PART_TWIN][DKV_DV], o->out[DKV_PART_SIGMA2][DKV_DV]);
    DKV_TRY_CUDA(cudaGetLastError());
    return 0;
}

static int zeroSums(dkv_device_oracle *o, int d, double *const *sums, int n) {
    const size_t bytes = sizeof(double) * (size_t)(o->twin->parts * o->l->view.tk * d);
    for (int e = 0; e < n; e++) DKV_TRY_CUDA(cudaMemsetAsync(sums[e], 0, bytes, o->stream));
    return 0;
}

/* The head's sums that are not the outputs' own. */
int dkv_twinZeroKeys(dkv_device_oracle *o) {
    dkv_twin_device *t = o->twin;
    double *const k[] = {t->dk, t->dk_var}, *const v[] = {t->dv, t->dv_var};
    double *const kl[] = {t->dk_size, t->dk_spread, t->dk_square}, *const vl[] = {t->dv_size, t->dv_spread, t->dv_square};
    if (t->apart) {
        DKV_TRY(zeroSums(o, o->p->dqk, k, 2));
        DKV_TRY(zeroSums(o, o->p->dv, v, 2));
    }
    DKV_TRY(zeroCounts(o, 0, o->l->view.tk));
    if (!t->anyhow) return 0;
    DKV_TRY(zeroSums(o, o->p->dqk, kl, 3));
    DKV_TRY(zeroSums(o, o->p->dv, vl, 3));
    return 0;
}
