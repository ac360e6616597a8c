/* scope.h: which problems a set of judged ones speaks for, and whether another one is among them. The rule:
 *
 *   - a problem is a set of *features* (mask, dtype, head dims, GQA ratio, modifiers on or off, gradients, layout, how
 *     segments branch: dkv_featureWords) and of *sizes*. Fill, seed and run say how it is tested, not what is computed: they
 *     are not compared;
 *   - each feature, and each pair of its features, must have been judged together in some case. (Of three or more
 *     nothing is asked: that no fault needs three of them is an assumption, the one that covering arrays make.)
 *   - each size must lie between the least and the largest that were judged with the same mask and dtype; each parameter of
 *     a mask or a modifier between the least and largest judged at all. Between tested values nothing was run: points are
 *     told beside the range. */
#ifndef DKV_SCOPE_H
#define DKV_SCOPE_H

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "../ref/mask.h"
#include "../ref/problem.h"

enum {
    DKV_SCOPE_FEATURES = 512,  /* different ones */
    DKV_SCOPE_POINTS = 24,     /* kept of a span, its ends among them */
    DKV_SCOPE_WORD = 48,
    DKV_SCOPE_KINDS = 15,      /* features of a problem */
    DKV_SCOPE_MASKS = DUALKV_BIDIR + 1,
    DKV_SCOPE_DTYPES = 3
};

typedef struct dkv_span { /* ascending, each once; the first and the last are the range */
    double point[DKV_SCOPE_POINTS];
    int n;
} dkv_span;

typedef enum dkv_scope_size {
    DKV_SIZE_P,        /* tokens of a root */
    DKV_SIZE_R,        /* of another segment */
    DKV_SIZE_N,        /* children of one segment */
    DKV_SIZE_SIGHT,    /* tokens that a segment's last row has in sight, itself included: sequence length */
    DKV_SIZE_CONTEXT,  /* c of @c, where it limits */
    DKV_SIZE_DEPTH,
    DKV_SIZE_GROUPS,
    DKV_SIZE_TOKENS,   /* packed, of the problem */
    DKV_SIZE_HEADS,    /* Hq */
    DKV_SIZE_N_OF
} dkv_scope_size;

typedef enum dkv_scope_parameter { /* those of masks first, DKV_MASK_PARAMETERS for each */
    DKV_PARAM_SCALE = DKV_SCOPE_MASKS * DKV_MASK_PARAMETERS, /* times sqrt(Dqk) */
    DKV_PARAM_SOFTCAP,
    DKV_PARAM_SINK,
    DKV_PARAM_N_OF
} dkv_scope_parameter;

typedef struct dkv_scope {
    char feature[DKV_SCOPE_FEATURES][DKV_SCOPE_WORD]; /* "mask=causal", …; in the order of kinds, then as first seen */
    int n;
    bool pair[DKV_SCOPE_FEATURES][DKV_SCOPE_FEATURES]; /* judged together; symmetric, true on the diagonal */
    struct {
        long cases;
        dkv_span size[DKV_SIZE_N_OF];
    } kind[DKV_SCOPE_MASKS][DKV_SCOPE_DTYPES]; /* mask, dtype */
    dkv_span parameter[DKV_PARAM_N_OF];
} dkv_scope;

/* -1: more features than there is room for. */
int dkv_addToScope(dkv_scope *s, const dkv_problem *p);

typedef struct dkv_covered {
    bool inside;
    const char *key;  /* of the feature, size or parameter: "softcap", "sight" */
    const char *with; /* of a pair that was not judged: the other's key, else NULL */
    char what[120], why[200];
} dkv_covered;

/* Asks for one thing after the other; returns how many lie outside. `shapeless`: how segments branch, P, R, N, groups, tokens
 * and layout are not asked (a model's configuration does not say). */
typedef void (*dkv_covered_take)(const dkv_covered *c, void *arg);
int dkv_askScope(const dkv_scope *s, const dkv_problem *p, bool shapeless, dkv_covered_take take, void *arg);

cJSON *dkv_printScope(const dkv_scope *s); /* NULL: out of memory */
/* DKV_EUSER where it is not one; *s as large as it is belongs on the heap. */
int dkv_readScope(const cJSON *o, dkv_scope *s, dkv_err *err);

#endif
