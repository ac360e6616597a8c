/* bisect_cache.h: what a bisect has learned, an object of JSON a line, appended as it comes: builds that did not work, and
 * runs of cases. A row's key is the SHA-256 of all that its result depends on: this program's own bytes, the build command
 * and its flags, the files of the commit (git's name of its tree), kernel, line, time limits, and which run of several. So
 * a run that was killed goes on where it was, another repository with the same files profits, and nothing else is taken for
 * the same. A last line that was cut off counts as not there; others that are no rows are skipped, and counted. */
#ifndef DKV_BISECT_CACHE_H
#define DKV_BISECT_CACHE_H

#include "case.h"

typedef enum dkv_build_state {
    DKV_BUILD_OK,
    DKV_BUILD_FAILED,
    DKV_BUILD_HUNG,    /* took longer than it may */
    DKV_BUILD_MISSING, /* ended well, and the kernel's file is not there */
    DKV_BUILD_USELESS, /* what it made cannot be loaded */
    DKV_BUILD_N
} dkv_build_state;

typedef struct dkv_bisect_stat { /* of one tensor: judge.h */
    bool there, twin;
    double ratio, rms, mean, gain, dof; /* dof: of rms */
} dkv_bisect_stat;

typedef struct dkv_bisect_row { /* a build (line "") or one run of one case */
    char key[65];
    char tree[72];
    const char *line; /* not owned; "" of a build */
    int run;
    dkv_build_state build;
    dkv_status status;
    bool judged, declared, partial; /* partial: some outputs were not given */
    char why[600];
    double forward, backward; /* seconds */
    dkv_bisect_stat tensor[DKV_N_OUTPUTS];
    dualkv_arithmetic arithmetic; /* by which it was judged */
    char profile[DKV_FIT_WORDS];
} dkv_bisect_row;

typedef struct dkv_bisect_cache {
    char *path; /* owned; NULL: only in memory */
    FILE *f;
    struct dkv_cached {
        char key[65];
        char *json; /* owned */
    } *rows;
    long n, room, skipped; /* skipped: lines that are no rows */
    bool cut;              /* the last line has no end: the next row starts a new one */
} dkv_bisect_cache;

/* path NULL: nothing is read or written. DKV_EUSER where it cannot be used. */
int dkv_openCache(const char *path, dkv_bisect_cache *c, dkv_err *err);
void dkv_closeCache(dkv_bisect_cache *c);
/* Fills the row of this key, line and run excepted; false where there is none. */
bool dkv_findCached(const dkv_bisect_cache *c, const char *key, dkv_bisect_row *row);
int dkv_addCached(dkv_bisect_cache *c, const dkv_bisect_row *row, dkv_err *err);

/* JSON of a row, without newline, malloc'ed; NULL where out of memory. */
char *dkv_printBisectRow(const dkv_bisect_row *row);
const char *dkv_buildName(dkv_build_state s);
/* From a finished case. */
void dkv_takeResult(const dkv_result *r, dkv_bisect_row *row);

#endif
