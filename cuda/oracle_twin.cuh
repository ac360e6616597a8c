/* oracle_twin.cuh: what the files of the device's twin share (oracle_twin.cu, oracle_twin_pass.cu). */
#ifndef DKV_ORACLE_TWIN_CUH
#define DKV_ORACLE_TWIN_CUH

#include <float.h>

#include "../ref/twin_formula.h"
#include "oracle_impl.cuh"

/* Factors measured on sampled chains, by bin of sq. */
typedef struct dkv_twin_fit {
    float var[DKV_FORMULA_BINS], gain[DKV_FORMULA_BINS];
} dkv_twin_fit;

typedef struct dkv_twin_device {
    dkv_twin_units u;
    dkv_twin_fit fit_s, fit_dp;
    bool table, delta_exact, p_normalised, has_o;
    int32_t parts;      /* accumulators of dK and dV */
    int64_t subs, subm; /* most key tiles of 256 in a tile; most CPU blocks in a block */
    int64_t sub_m;      /* stacked rows of a CPU block */
    /* of the head: unit rows, squared norms, squares (keys': times equal_kv), magnitudes; what is not finite
     * is 0 */
    float *q1, *k1, *v1, *o1;
    double *q_norm, *k_norm, *v_norm, *o_norm;
    double *q2, *k2, *v2, *o2, *ve, *kf;               /* ve: V times equal_kv; kf: K */
    float *equal_k, *equal_kv, *equal_any, *equal_own; /* [tk], [tk], [tq * g], [tq * g] */
    int32_t *segment_k, *segment_q, *group_q;          /* [tk], [tq], [tq] */
    unsigned long long *hash, *sorted;                 /* [max(tk, tq * g)] */
    /* of the block: [m, d] */
    double *a1, *a2, *chain, *loss, *o_exact, *o_var;
    double *q_mean2, *o_mean2, *mean_any, *mean_own; /* [subm, d], [subm] */
    /* of the tile */
    double *k_mean2, *v_mean2, *mean_kv;  /* [subs, d], [subs] */
    double *by, *fade, *old, *count, *p2; /* [subs, max_m] */
    double *col_n, *col_p2, *col_ds2;     /* [subm, ld] */
    double *part[4];                      /* [subs, m, d] or [subm, n, d] */
    double *table_max;                    /* [slots, max_m] */
    double *last_mean;                    /* [d]: v_mean2 of the last key tile */
    /* of the head: sums over rows, [parts, tk, d]; the outputs themselves where parts = 1 */
    double *dk, *dk_var, *dv, *dv_var;
    double *sink_y, *sink_v; /* [hq, tq] */
    void *memory[64];
    int n_memory;
} dkv_twin_device;

typedef struct score_view { /* of one tile: scores (final, -inf where masked), caps, chains of the products */
    const double *s, *cap;
    const float *sq, *dot;
    const double *q_norm, *k_norm; /* of the block's first row, of the tile's first key */
    double gain;
} score_view;

/* The twin's score of a pair, and its variance. */
static __device__ __forceinline__ double scoreOf(const dkv_area &t, const dkv_twin_units &u,
                                                 const dkv_twin_fit &fit, const score_view &v, int i, int j,
                                                 double *vs) {
    const int64_t at = (int64_t)i * t.ld + j;
    const int bin = dkv_formulaBin(v.sq[at]);
    const double qn = v.q_norm[i], kn = v.k_norm[j], cap = u.softcap > 0 ? v.cap[at] : 0;
    double s = v.s[at];
    *vs = dkv_formulaScoreVar(&u, fit.var[bin], v.sq[at], v.dot[at], qn, kn);
    if (u.z.gain > 0) s += dkv_formulaScoreLoss(&u, fit.gain[bin], v.dot[at], qn, kn, cap);
    if (u.softcap > 0 || t.slopes)
        *vs = dkv_formulaScoreModified(&u, *vs, s, s > -DBL_MAX, cap,
                                       t.slopes ? (double)t.slopes[i % t.g] : 0, dkv_biasOf(t, i, j));
    if (u.s_rounded) {
        const double x = s > -DBL_MAX ? fabs(s) : 0, y = dkv_roundBy(u.round_s, x);
        *vs = dkv_formulaFlip(x, y, *vs, dkv_formulaSpacingAt(u.ulp_s, x));
        s = dkv_roundBy(u.round_s, s);
    }
    return s;
}

#define PER_LANE (DKV_SUB_KEYS / 32)

typedef struct row_sums { /* [m, d] each */
    double *acc, *chain, *loss, *a1, *a2;
} row_sums;

typedef struct row_parts { /* of one tile, [subs, m, d]; NULL: none */
    const double *sum, *a1, *a2, *size;
    const double *by, *fade, *old, *count, *squares; /* [subs, max_m] */
    const double *mean2, *alike;                     /* [subs, d], [subs] */
    int64_t max_m;
    int32_t m, d, subs;
    double fold, squares_by; /* factor on `squares` */
} row_parts;

/* A block's rows of a packed [hq, tq] array, as doubles. */
template <typename T>
__global__ void load_lse_kernel(int64_t q_row, int64_t tq, int m, int g, int head0, const T *x, double *out) {
    DKV_GRID_LOOP(i, m) out[i] = (double)x[(head0 + i % g) * tq + q_row + i / g];
}

/* What the chains of unit rows a [m, d], b [n, d] round: sq, dot [m, n] (leading dimension ld), from
 * checkpoints. */
int dkv_chainTile(dkv_device_oracle *o, int m, int n, int d, int ld, const float *a, const float *b,
                  float *dot, float *sq);
/* Scores of a tile and what they are made of; parts of its products; what each addition of a part rounds. */
int dkv_twinLoadTile(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, score_view *v);
int dkv_twinPartRows(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *w,
                     const double *x, bool careful, double *part);
int dkv_twinAddRows(dkv_device_oracle *o, const row_parts *k);
int dkv_twinZeroSums(dkv_device_oracle *o, int m, int d);
int dkv_twinForwardBlock(dkv_device_oracle *o, dkv_scene *s, const float *lse);
int dkv_twinBackwardBlock(dkv_device_oracle *o, dkv_scene *s, const void *kernel_o, const float *kernel_lse);
int dkv_twinMeans(dkv_device_oracle *o, const double *x, int64_t rows, int64_t per, int d, double *out);
int dkv_twinMeanOf(dkv_device_oracle *o, const float *x, int64_t rows, int64_t per, double *out);
#endif
