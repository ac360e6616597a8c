/* sample.h: random problems for the fuzzer; case n is a function of (profile, seed, n) and of nothing else.
 *
 * The first cases are a covering array (cover.h): every pair of levels of mask, modifier, dtype, class of
 * head dim, GQA ratio, class of shape (edge class), fill, layout and run. Each 16th case has recorded
 * activations. After the array, levels are drawn at random. Every problem is admissible. */
#ifndef DKV_SAMPLE_H
#define DKV_SAMPLE_H

#include "../ref/problem.h"
#include "cover.h"

typedef enum dkv_profile { DKV_QUICK, DKV_DEEP, DKV_GPU, DKV_N_PROFILES } dkv_profile;

typedef struct dkv_sampler {
    uint64_t seed;
    dkv_profile profile;
    bool forward;    /* the same cases without gradients */
    double work_cap; /* most (pairs + 8 keys) * Hq * max(Dqk, Dv) of a case */
    int n_fills;     /* that need no files */
    dkv_cover cover;
} dkv_sampler;

/* Classes of shape; a problem may belong to several. */
typedef enum dkv_edge {
    DKV_EDGE_EMPTY,   /* a segment without tokens */
    DKV_EDGE_ONE,     /* a segment of one token */
    DKV_EDGE_TILE,    /* a length at a multiple of 16, or one beside it; of 64 or 128 where the work allows */
    DKV_EDGE_PRIMES,  /* unequal responses of prime lengths */
    DKV_EDGE_MANY,    /* more than eight children */
    DKV_EDGE_TREE,    /* a branch of a branch */
    DKV_EDGE_GROUPS,  /* two or three prompts */
    DKV_EDGE_CONTEXT, /* a key-only prompt */
    DKV_EDGE_LIMIT,   /* a context limit */
    DKV_EDGE_LONG,    /* a prompt much longer than its responses */
    DKV_EDGE_PLAIN,   /* a prompt alone */
    DKV_N_EDGES
} dkv_edge;

const char *dkv_profileName(int profile); /* NULL past the end */
bool dkv_hasEdge(const dkv_problem *p, dkv_edge edge);

int dkv_openSampler(dkv_profile profile, uint64_t seed, dkv_sampler *out, dkv_err *err);
void dkv_closeSampler(dkv_sampler *s);
/* Cases before the first that is drawn at random. */
uint64_t dkv_coveringCases(const dkv_sampler *s);
int dkv_sampleCase(const dkv_sampler *s, uint64_t n, dkv_problem *p, dkv_err *err);

#endif
