/* diagnose_impl.h: what the parts of the diagnoser share. A "row" is a token and a head: index t * heads +
 * h, for LSE, too. */
#ifndef DKV_DIAGNOSE_IMPL_H
#define DKV_DIAGNOSE_IMPL_H

#include "../ref/clock.h"
#include "derive.h"
#include "diagnose.h"

typedef struct dkv_map { /* one tensor */
    bool present, keys;
    int64_t tokens, heads, dim;
    const double *got, *want; /* want: the truth, given the kernel's own O and LSE in backward */
    const double *bound, *base; /* base: what fits start from: the twin where it is known, else `want` */
    double *widen;   /* [heads]: the bound is of the true LSE; factor for the kernel's own. NULL: 1 */
    uint8_t *off;    /* [tokens * heads] 0, 1: by its noise, 2: beyond the bound, 3: NaN or Inf */
    float *size;     /* [tokens * heads] largest err/bound */
    float *noise;    /* [tokens * heads] rms z, NAN: no twin */
    int64_t n_off, n_outside, n_nonfinite, n_judged;
    int64_t dims[DKV_DIM_MAX]; /* rows that are off in it */
} dkv_map;

typedef struct dkv_diag {
    dkv_case *c;
    const dkv_diagnose_options *o;
    dkv_diagnosis *out;
    dkv_outputs own;  /* the kernel's O and LSE, and the backward that follows from them */
    bool has_own, known; /* known: the arithmetic is, so that the twin tells */
    dkv_map map[DKV_N_OUTPUTS];
    double start;
} dkv_diag;

/* Element of a tensor: row index as above, dim. */
static inline int64_t dkv_mapAt(const dkv_map *m, dkv_tensor_id id, int64_t row, int64_t dim) {
    if (id == DKV_LSE) return row % m->heads * m->tokens + row / m->heads;
    return row * m->dim + dim;
}
static inline bool dkv_isOff(const dkv_diag *d, dkv_tensor_id id) {
    return d->map[id].present && d->map[id].n_off > 0;
}
/* Is less than this share of the time for runs over? */
bool dkv_hasTime(const dkv_diag *d, double share);

/* diagnose_map.c */
int dkv_makeMaps(dkv_diag *d, dkv_err *err);
void dkv_freeMaps(dkv_diag *d);
void dkv_describeMaps(dkv_diag *d);

/* diagnose_pairs.c: rows of P and dS in double, from the kernel's own LSE and O or from the truth's. */
typedef struct dkv_pairs {
    const dkv_diag *d;
    int32_t segment, kvh; /* whose keys are decoded; -1: none */
    int64_t n;            /* keys of the segment's list */
    int64_t *row;         /* [n] packed key row */
    double *k, *v;        /* [n, dqk], [n, dv] */
    double *s, *slope, *p, *dp, *ds; /* [n] of the row at hand; p 0 where not seen */
    uint8_t *sees;        /* [n] */
    double *q, *d_o;      /* [dqk], [dv] */
    double lse, delta;
    int64_t context;      /* keys before the segment's own */
} dkv_pairs;
int dkv_openPairs(const dkv_diag *d, dkv_pairs *x, dkv_err *err);
void dkv_closePairs(dkv_pairs *x);
/* Row r of a segment, query head h; own: with the kernel's own LSE and O. */
void dkv_pairRow(dkv_pairs *x, int32_t segment, int64_t r, int32_t h, bool own);

/* diagnose_weights.c: the weights that the kernel gives to keys, read with one-hot V or dO. */
typedef enum dkv_weight_kind {
    DKV_W_RIGHT,   /* every weight is as it must be */
    DKV_W_FACTOR,  /* all of them times one number */
    DKV_W_MISSING, /* keys have no weight */
    DKV_W_EXTRA,   /* keys that it must not see have weight */
    DKV_W_PIECES,  /* a range of keys times one number */
    DKV_W_SCORES,  /* each times another number */
    DKV_W_NAN,
    DKV_N_WEIGHTS
} dkv_weight_kind;
typedef struct dkv_weights {
    int64_t rows, kind[DKV_N_WEIGHTS]; /* rows that were read; of each kind */
    /* Wrong weights, of rows of prompts [0], of responses [1]: of own keys, of keys before the segment, of
     * keys that are not the row's. */
    int64_t at[2][3];
    /* Of the rows that lost or gained keys [of prompts, of responses]: all; those that LSE does not fit; all
     * whose other weights are as if none were lost. */
    int64_t lost[2], lse_differs[2], unsummed;
    int64_t future;   /* of those that it must not see: behind it in its own segment */
    double linear;    /* of DKV_W_SCORES: share of the logarithm's variance that is linear in the score */
    int64_t n_linear;
    double lost_dq;   /* backward: what part of the pairs without weight, which dV shows, is left out of dQ,
                       * too; NAN: unknown */
    uint8_t *off, *read; /* [tokens * hq] rows of a wrong kind; rows that were read; or NULL */
    char words[300];  /* what is common to the wrong keys */
} dkv_weights;
/* False where no probe could be run. backward: P of the backward. rows [tokens * hq]: which (those off). */
bool dkv_readWeights(dkv_diag *d, bool backward, const uint8_t *rows, dkv_weights *out);
void dkv_freeWeights(dkv_weights *w);

/* diagnose_fit.c: what part of the error of rows that are off a change of one thing explains. */
/* dQ: a row's delta is wrong. */
double dkv_fitDelta(const dkv_diag *d);
/* Error of a tensor against its own value: best factor, share. */
double dkv_fitFactor(const dkv_diag *d, dkv_tensor_id id, double *factor);
/* dQ: parts of the sum over keys; dK, dV: over rows. Words of the parts that are wrong ("of the last
 * response: left out"). */
typedef struct dkv_parts {
    double share;
    bool own, context; /* which parts are wrong: pairs within a segment; with keys before or rows below it */
    char words[240];
} dkv_parts;
bool dkv_fitParts(const dkv_diag *d, dkv_tensor_id id, dkv_parts *out);
/* Share of the rows off whose value is that of another row or head; words. */
double dkv_findMoved(const dkv_diag *d, dkv_tensor_id id, char *words, size_t n);

/* diagnose_stage.c: fills out->spot from the maps, with probes. */
void dkv_findSpots(dkv_diag *d);
#endif
