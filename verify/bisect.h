/* bisect.h: the commit between a good and a bad one from which on a kernel fails, or a number leaves its interval. git bisect
 * chooses what is tested; every result is cached, so that the same call goes on where it was ended. */
#ifndef DKV_BISECT_H
#define DKV_BISECT_H

#include "bisect_metric.h"
#include "bisect_try.h"

typedef struct dkv_tested {
    dkv_commit_info info;
    dkv_trial trial;
    double value; /* of the metric; without one, the largest error over its bound; NAN: none */
} dkv_tested;

typedef struct dkv_bisection {
    /* in */
    dkv_repo *repo;
    dkv_trying *trying;
    const char *good, *bad;         /* as given */
    const char *const *paths;       /* only commits that touch these; NULL behind the last */
    const dkv_metric *metric;       /* NULL: passed or not */
    double flaky;                   /* probability that a bad commit fails in one run; 0: it always does */
    double error;                   /* probability of a wrong answer by chance */
    int runs;                       /* as given; 0: what follows */
    const char *arithmetic;         /* --arithmetic, or NULL */
    void (*begun)(const struct dkv_bisection *h); /* once the ends are named */
    void (*fitted)(const struct dkv_bisection *h); /* --arithmetic auto: what the good end behaves as is in `held` */
    void (*tested)(const struct dkv_bisection *h, const dkv_tested *t);
    void *arg;
    /* out */
    char ends[2][DKV_HASH_MAX];     /* good, bad */
    long between;                   /* commits */
    bool linear;
    int steps, runs_made;           /* commits that are tested at most, were none skipped; runs of each */
    dkv_interval interval;          /* metric */
    int tensor;                     /* which it is, of any; -1: none */
    long line;                      /* and of which case */
    int side;                       /* +1: the bad end is above */
    dkv_fits held;                  /* what a kernel that declares nothing is held to (metric, --arithmetic) */
    dkv_tested *list;               /* the ends first; owned */
    long n, room;
    dkv_bisect_end end;
} dkv_bisection;

/* DKV_EUSER: words that name nothing. DKV_EHARNESS: the ends are not as they are said to be, git failed, or the run is to
 * stop. The worktree is the caller's to close. */
int dkv_runBisection(dkv_bisection *h, dkv_err *err);
const dkv_tested *dkv_findTested(const dkv_bisection *h, const char *id);
void dkv_freeBisection(dkv_bisection *h);

#endif
