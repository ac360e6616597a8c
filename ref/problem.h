/* problem.h: the problem line, a case's whole identity (with the kernel spec).
 *
 *     shape=8192+32x1024 heads=32:8 dim=128 dtype=bf16 mask=causal fill=normal seed=7
 *
 * parse(print(p)) = p; print is canonical: keys in the order of the table in problem.c, defaults dropped, runs
 * collapsed to NxR, `@c` dropped when it limits nothing, numbers in shortest round-trip form.
 *
 * shape  := group ('/' group)*            group := P['k'] ['+' children]
 * children := child (',' child)*          child := [N 'x'] ( R | '(' R '+' children ')' ) ['@' c]
 *
 * P, R >= 0 tokens; `k` makes the prompt key-only. A child sees the first c tokens of (what its parent sees, then its
 * parent's own tokens); c defaults to all of them and may not exceed them. */
#ifndef DKV_PROBLEM_H
#define DKV_PROBLEM_H

#include <stdbool.h>
#include <stdint.h>

#include "dkv_err.h"
#include "dualkv_kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_LINE_MAX 4096       /* longest problem line, bytes */
#define DKV_SEGMENTS_MAX 1048576 /* most segments of a problem */
#define DKV_DEPTH_MAX 16
#define DKV_HEADS_MAX 4096
#define DKV_DIM_MAX 256
#define DKV_TOKENS_MAX ((int64_t)1 << 40) /* tokens of a problem */

/* Segments in depth-first order. */
typedef struct dkv_node {
    int32_t parent;  /* index, -1 for a root */
    int32_t group;
    int32_t depth;
    bool key_only;   /* roots only */
    int64_t len;     /* its own tokens */
    int64_t context; /* tokens of its ancestors that it sees (c resolved) */
} dkv_node;

typedef enum dkv_layout_kind { DKV_CONTIGUOUS, DKV_FUSED, DKV_PADDED, DKV_STRIDED } dkv_layout_kind;
typedef enum dkv_run_kind { DKV_SINGLE, DKV_TWICE, DKV_ABA, DKV_SIDE, DKV_GRAPH, DKV_BUSY } dkv_run_kind;

typedef struct dkv_problem {
    int32_t n_nodes, n_groups;
    dkv_node *nodes; /* owned */
    int32_t hq, hkv, dqk, dv;
    dualkv_dtype dtype;
    dualkv_mask_kind mask;
    int64_t window, window_sinks, chunk, block;
    double block_density;
    uint64_t block_seed;
    float scale;   /* resolved: 1/sqrt(dqk) unless given */
    float softcap; /* 0: off */
    bool scale_given, alibi, sink;
    float sinklogit;  /* base value, see dkv_fillSink in data/fill.h */
    char fill[64];    /* "normal", "recorded:NAME", ... (fill table: data/fill.c) */
    uint64_t seed;
    bool grad, dlse;
    dkv_layout_kind layout;
    dkv_run_kind run;
} dkv_problem;

/* Parses and validates everything but admissibility of the mask (mask.h). On failure *p is empty, the error names
 * the word. `known_fill` checks the fill word (NULL: any word of [a-z0-9:_.-] is taken). */
typedef bool (*dkv_fill_known)(const char *word);
int dkv_parseProblem(const char *line, dkv_fill_known known_fill, dkv_problem *p, dkv_err *err);

/* Canonical line into out (NUL-terminated, at most n bytes); DKV_EUSER if it does not fit. */
int dkv_printProblem(const dkv_problem *p, char *out, size_t n, dkv_err *err);
int dkv_copyProblem(const dkv_problem *p, dkv_problem *out, dkv_err *err);
void dkv_freeProblem(dkv_problem *p);

/* Token counts: queries, keys; 64-bit, cannot overflow once parsed (each at most 2^40). */
int64_t dkv_countQueries(const dkv_problem *p);
int64_t dkv_countKeys(const dkv_problem *p);
/* Rows of the replicated layout: what each node with queries is a sequence of. */
double dkv_countReplicated(const dkv_problem *p);

const char *dkv_dtypeName(dualkv_dtype t);
const char *dkv_maskName(dualkv_mask_kind m);

/* Tables for `dualkv list`: name and one line of help; NULL past the end. */
const char *dkv_listMask(int i, const char **help);
const char *dkv_listKey(int i, const char **help);

#ifdef __cplusplus
}
#endif
#endif
