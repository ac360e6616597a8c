/* bisect_try.h: one commit (or one set of flags) built and judged: the kernel is rebuilt, the harness is this program. */
#ifndef DKV_BISECT_TRY_H
#define DKV_BISECT_TRY_H

#include "bisect_cache.h"
#include "bisect_repo.h"

typedef enum dkv_bisect_verdict {
    DKV_BV_GOOD,
    DKV_BV_BAD,
    DKV_BV_SKIP /* nothing was learned */
} dkv_bisect_verdict;

typedef struct dkv_trying {
    dkv_repo *repo;
    dkv_bisect_cache *cache;
    const char *build;  /* command for sh; NULL: nothing is built */
    const char *kernel; /* spec; a path is one in the tree */
    const char *flags;  /* of --flags, or NULL: in DUALKV_FLAGS of the build (bisect_flags.h) */
    double build_timeout, timeout; /* seconds */
    bool keep;          /* what earlier builds made stays (but for the kernel's file) */
    char *const *lines;
    long n_lines;
    int runs;           /* of each case */
    bool any;           /* one failing run makes it bad, and is enough; else all must agree */
    bool all_runs;      /* every run is made, whatever came out (metric) */
    const dkv_fits *held; /* what kernels that declare nothing are held to; NULL: judged as ever */
    char base[65];      /* out of dkv_prepareTrying: key of what does not change */
    char standing[65];  /* what is built in the worktree now: its key; "": nothing */
    long builds;        /* out: made */
    long reused;        /* out: runs that the cache knew */
    bool told_changes;  /* out: that builds change files of the commit was said */
} dkv_trying;

typedef struct dkv_trial {
    char id[DKV_HASH_MAX], tree[DKV_HASH_MAX];
    dkv_build_state build;
    bool built;   /* now, not read from the cache */
    double seconds;
    dkv_bisect_row *rows; /* [run][line], owned */
    bool *there;          /* of each row: it was run */
    long n_lines;
    int runs;
    dkv_bisect_verdict verdict;
    bool flaky;           /* some runs failed, some did not */
    int failed, made;     /* runs */
    const dkv_bisect_row *worst; /* the row that decided; NULL: none */
    char why[600];        /* one sentence; "" where good */
} dkv_trial;

/* Is the kernel spec one that can be bisected, are there lines to be judged? DKV_EUSER where not. */
int dkv_prepareTrying(dkv_trying *t, dkv_err *err);
/* Builds where something is not known yet, and judges. DKV_EHARNESS also where the run is to stop. `sure`: a failed build
 * is tried again, whatever the cache says. */
int dkv_tryCommit(dkv_trying *t, const char *id, bool sure, dkv_trial *out, dkv_err *err);
void dkv_freeTrial(dkv_trial *t);
/* --arithmetic: what all commits are held to; `auto`: what fits that commit, which is built. Types that nothing fits are judged
 * as ever. DKV_EHARNESS where it cannot be built. */
int dkv_fitCommit(dkv_trying *t, const char *id, const char *word, dkv_fits *out, dkv_err *err);
/* Tokens of --flags as environment of the build: DUALKV_FLAGS, and DUALKV_FLAGS_file_c of words "file.c=FLAGS". */
int dkv_setFlags(const char *flags, dkv_err *err);

#endif
