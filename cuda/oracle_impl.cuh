/* oracle_impl.cuh: what the files of the device oracle share. */
#ifndef DKV_ORACLE_IMPL_CUH
#define DKV_ORACLE_IMPL_CUH

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include "../ref/bound_formula.h"
#include "../ref/mask_pair.h"
#include "../ref/device_oracle.h"

#define DKV_SUB_KEYS \
    256 /* the CPU's tile (tiles.h), whose grid the statistics keep whatever the size of a tile here */
#define DKV_WORK 9 /* tiles of [rows, keys] doubles */
#define DKV_LANES 4 /* KV heads side by side: a product of one head's tile leaves most of a device idle */

int dkv_oracleFail(const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
#define DKV_TRY_CUDA(call)                                                                         \
    do {                                                                                           \
        cudaError_t dkv_e = (call);                                                                \
        if (dkv_e != cudaSuccess)                                                                  \
            return dkv_oracleFail(__FILE__, __LINE__, "%s: %s", #call, cudaGetErrorString(dkv_e)); \
    } while (0)
#define DKV_TRY(call)              \
    do {                           \
        int dkv_rc = (call);       \
        if (dkv_rc) return dkv_rc; \
    } while (0)

typedef struct dkv_blas {
    void *library;
    cublasHandle_t handle[DKV_LANES]; /* one a lane for the whole process: making one takes as long as a small oracle */
    cublasStatus_t (*create)(cublasHandle_t *);
    cublasStatus_t (*setStream)(cublasHandle_t, cudaStream_t);
    cublasStatus_t (*dgemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                            const double *, const double *, int, const double *, int, const double *,
                            double *, int);
    cublasStatus_t (*batched)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                              const double *, const double *, int, long long, const double *, int, long long,
                              const double *, double *, int, long long, int);
} dkv_blas;
int dkv_loadBlas(int lanes, const dkv_blas **out);

/* One tile: stacked rows [0, m) of a block against n keys of one range; passed to kernels by value. Tile
 * arrays are [m, ld]. */
typedef struct dkv_area {
    dkv_mask_view mask;
    int64_t r0, q_row;   /* first row within the node; packed */
    int64_t j0, k_row;   /* first key within the node's list; packed */
    int64_t offset;      /* of the first key in its range; a multiple of DKV_SUB_KEYS */
    int32_t m, n, ld, g; /* m = rows * g */
    int32_t vis;         /* 1: every pair visible */
    int32_t slot0;       /* key tiles of the ranges before this one */
    int32_t index;       /* tiles of the block before this one */
    int32_t sub_rows;    /* rows (not stacked) of a CPU block */
    double scale, softcap;
    const float *slopes; /* of the KV head's query heads; NULL: no ALiBi */
} dkv_area;

/* Rows of a block, [m] each. */
typedef struct dkv_rows {
    double *max, *sum, *by, *lse, *delta;
    uint8_t *seen;
    /* bound */
    double *n, *steps, *tiles, *rises, *cmax, *top, *last, *kappa, *w0, *sum_h, *xtop, *tol_lse, *base,
        *chain, *fmax;
    /* twin */
    double *sum_var, *lost, *terms, *score_var, *ones, *delta_var, *q_norm, *o_norm;
} dkv_rows;
#define DKV_ROW_ARRAYS 28

struct dkv_device_oracle {
    const dkv_problem *p;
    const dkv_layout *l;
    dkv_device_inputs in;
    dualkv_arithmetic a;
    dkv_units units;
    dkv_oracle_settings set;
    const dkv_blas *blas;
    cublasHandle_t handle;
    cudaStream_t stream;
    cudaEvent_t begin, end, fork;
    double seconds, flops;
    int64_t count[DKV_N_OUTPUTS];
    double *out[DKV_N_PARTS][DKV_N_OUTPUTS];
    bool has_twin[DKV_N_OUTPUTS], bounded;
    const void *stored_lse; /* where the truth's was stored last; NULL: nowhere */
    dkv_alike alike;
    float *slopes; /* device; NULL */
    int32_t g;
    int64_t rows, max_m, sub_rows, ld; /* rows a block; stacked; rows of a CPU block; keys a tile */
    /* of one KV head: operands as doubles, magnitudes */
    double *q, *k, *v, *d_o; /* [tq * g, dqk], [tk, dqk], [tk, dv], [tq * g, dv] */
    double *aq, *ak, *av, *ado;
    int32_t *bad_q, *bad_k; /* host, [hkv, tq + 1], [hkv, tk + 1]: rows before that are not finite */
    /* of one block */
    dkv_rows r;
    double *row_memory;
    double *work[DKV_WORK]; /* [max_m, ld] */
    double *kept[2];        /* [n_kept, max_m, ld]: scores and what lies behind them, from one walk over the block's tiles
                             * to the next */
    int32_t n_kept, filled; /* tiles; of this block */
    double *acc, *acc2;     /* [max_m, max(dqk, dv)] */
    double *v_max;          /* [blocks of sub_rows, dv] */
    double *table;          /* [slots, max_m] */
    int64_t slots;
    double *chain_k, *key_n;          /* [tk] */
    double *through, *roundings;      /* [tk]: dkv_countRoundings */
    double *sink_t, *sink_e, *sink_s; /* [hq, tq] */
    struct dkv_twin_device *twin;
    double done, todo; /* progress, in pairs */
    /* Lanes beside this one, which is the first: copies with a stream, a handle and the memory of a head of their own. */
    dkv_device_oracle *lane[DKV_LANES];
    int32_t lanes;
};

/* Grid over n elements. */
static inline unsigned dkv_blocksFor(int64_t n, int threads) {
    int64_t b = (n + threads - 1) / threads;
    return (unsigned)(b < 1 ? 1 : b > 0x7fffffff ? 0x7fffffff : b);
}
#define DKV_GRID_LOOP(i, n)                                                   \
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (n); \
         i += (int64_t)gridDim.x * blockDim.x)

static __device__ __forceinline__ double dkv_warpMax(double x) {
    for (int s = 16; s; s >>= 1) x = fmax(x, __shfl_xor_sync(~0u, x, s));
    return x;
}
static __device__ __forceinline__ double dkv_warpSum(double x) {
    for (int s = 16; s; s >>= 1) x += __shfl_xor_sync(~0u, x, s);
    return x;
}
static __device__ __forceinline__ double dkv_decodeOne(const void *x, int dtype, int64_t i) {
    if (dtype == DUALKV_FP32) return ((const float *)x)[i];
    const uint16_t h = ((const uint16_t *)x)[i];
    if (dtype == DUALKV_BF16) return __uint_as_float((uint32_t)h << 16);
    const uint32_t e = (h >> 10) & 31u, f = h & 1023u;
    double y = e == 31 ? (f ? (double)NAN : (double)INFINITY)
               : e     ? ldexp(1024.0 + f, (int)e - 25)
                       : ldexp((double)f, -24);
    return h & 0x8000u ? -y : y;
}
/* Bias of ALiBi of stacked row i and key j of the tile. */
static __device__ __forceinline__ double dkv_biasOf(const dkv_area &t, int i, int j) {
    if (!t.slopes) return 0;
    double distance = (double)(t.mask.context + t.r0 + i / t.g - t.j0);
    return (double)t.slopes[i % t.g] * fabs(distance - (double)j);
}
static __device__ __forceinline__ bool dkv_seesPair(const dkv_area &t, int i, int j) {
    return t.vis == 1 || dkv_pairSees(&t.mask, t.r0 + i / t.g, t.j0 + j);
}

/* --- host: oracle_lanes.cu --- */
typedef int (*dkv_head_fn)(dkv_device_oracle *lane, int32_t kvh, const void *arg);
/* Calls f for every KV head, those of different lanes side by side; after what was queued on o->stream before, before
 * what is queued there next. */
int dkv_eachHead(dkv_device_oracle *o, dkv_head_fn f, const void *arg);
int dkv_openLanes(dkv_device_oracle *o);
void dkv_closeLanes(dkv_device_oracle *o);
double dkv_laneBytes(const dkv_device_oracle *o); /* of device memory: a head's, the twin's included */

/* --- host: oracle_read.cu --- */
int dkv_readDoubles(const double *from, int64_t n, double *host); /* one thread at a time; beside stages that do not write `from` */

/* --- host: oracle.cu --- */
int dkv_allocateHead(dkv_device_oracle *o); /* a lane's own memory */
void dkv_freeHead(dkv_device_oracle *o);
typedef struct dkv_scene { /* where the traversal is */
    int32_t kvh, node;
    int64_t r0, r1;
    int32_t m;
    const dualkv_segment *seg;
    bool finite_rows;
} dkv_scene;
/* Next block of rows of a KV head, start with node = -1; next tile of it, start with *range = -1. */
bool dkv_nextScene(const dkv_device_oracle *o, dkv_scene *s);
bool dkv_nextArea(const dkv_device_oracle *o, const dkv_scene *s, int32_t *range, dkv_area *t);
/* The same in the declared order of keys. */
bool dkv_nextOrdered(const dkv_device_oracle *o, const dkv_scene *s, int32_t *range, dkv_area *t);
bool dkv_finiteKeys(const dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t);
int dkv_oracleTick(dkv_device_oracle *o, const dkv_area *t);

/* Products. nt: c [m, n] (ld) = alpha x [m, d] y [n, d]^T. rows: c [m, d] = alpha w [m, n] x [n, d] + beta c.
 * keys: c [n, d] (leading dimension ldc) = alpha w^T x [m, d] + beta c. careful: masked pairs contribute
 * nothing even where x is not finite. */
int dkv_gemmNt(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *x, const double *y,
               double *c);
int dkv_gemmRows(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *w,
                 const double *x, double beta, double *c, bool careful);
int dkv_gemmKeys(dkv_device_oracle *o, const dkv_area *t, int d, double alpha, const double *w,
                 const double *x, double beta, double *c, int64_t ldc, bool careful);
/* Final scores in place (softcap, ALiBi, mask); cap: tanh where softcap is on (may be NULL). */
int dkv_finalScores(dkv_device_oracle *o, const dkv_area *t, double *s, double *cap);
/* Where a tile's scores (0) and what lies behind them (1) stay; NULL: there is no room. */
static inline double *dkv_keptTile(const dkv_device_oracle *o, const dkv_area *t, int which) {
    return t->index < o->n_kept ? o->kept[which] + (int64_t)t->index * o->max_m * o->ld : NULL;
}
/* Final scores of a tile and, unless `sizes` is NULL, sum |q||k| of its pairs: as they were kept, or in work[0], work[2].
 * cap: as for dkv_finalScores. */
int dkv_loadScores(dkv_device_oracle *o, const dkv_scene *s, const dkv_area *t, double *cap, double **scores,
                   double **sizes);
int dkv_scaleRows(dkv_device_oracle *o, int m, int d, const double *by, double *acc);
int dkv_loadHead(dkv_device_oracle *o, int32_t kvh, int32_t format);

/* oracle_truth.cu; kernel_o NULL: forward and backward, else backward from this O and LSE. */
int dkv_runTruth(dkv_device_oracle *o, bool bound, const void *kernel_o, const float *kernel_lse);
int dkv_sumSink(dkv_device_oracle *o, const double *x, double *out); /* [hq, tq] -> [hq] */
int dkv_boundHead(dkv_device_oracle *o);                             /* oracle_bound.cu: once a problem */
int dkv_boundStart(dkv_device_oracle *o, const dkv_scene *s);        /* a block: before, after its dQ */
int dkv_boundRows(dkv_device_oracle *o, const dkv_scene *s);
int dkv_boundChains(dkv_device_oracle *o, const dkv_area *t, const double *s, const double *x);
int dkv_boundForward(dkv_device_oracle *o, const dkv_scene *s);
int dkv_boundFinish(dkv_device_oracle *o);
int dkv_runTwin(dkv_device_oracle *o, const void *kernel_o, const float *kernel_lse); /* oracle_twin.cu */
double dkv_twinBytes(const dkv_device_oracle *o); /* of one lane, about */
void dkv_closeTwin(dkv_device_oracle *o);
#endif
