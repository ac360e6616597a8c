/* report_gather.h: what a report says of a set of records, gathered one record at a time; its size grows with
 * their number by some bytes a line only. Reads records (of verify/record.h, bench and power). Whatever stands in them is hostile: a
 * line that is none of the three is counted and its number kept. */
#ifndef DKV_REPORT_GATHER_H
#define DKV_REPORT_GATHER_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "../ref/tensors.h"
#include "../verify/status.h"
#include "report_map.h"
#include "report_power.h"

enum {
    DKV_GATHER_KERNELS = 64, /* further ones are counted together, in the last */
    DKV_GATHER_MASKS = DUALKV_BIDIR + 1,
    DKV_GATHER_DTYPES = 3,
    DKV_GATHER_DIMS = 5,   /* head-dim classes, dkv_gatherDim */
    DKV_GATHER_EDGES = 8,  /* edge classes, dkv_gatherEdge */
    DKV_GATHER_FEATURES = 17,
    DKV_GATHER_BINS = 96,  /* of a strip */
    DKV_GATHER_WORDS = 40, /* different words that are kept of a field */
    DKV_GATHER_CASES = 500, /* of a kernel's cases that did not pass */
    DKV_GATHER_OTHERS = 100, /* of these for such as are no defect */
    DKV_GATHER_BENCH = 200,
    DKV_GATHER_MAPPED = 8,
    DKV_GATHER_RULES = 3, /* of usual tests */
    DKV_GATHER_COMMITS = 100, /* of a kernel, told apart; further ones are left out */
    DKV_GATHER_BAD = 40 /* numbers of lines of a file that were skipped */
};

/* Words and how often each came; `more`: of those that there was no room for. */
typedef struct dkv_wordcount {
    char *word[DKV_GATHER_WORDS];
    long count[DKV_GATHER_WORDS], more;
    int n;
} dkv_wordcount;

/* Cases by the place of a value on an axis: [0] within its limit, [1] outside. */
typedef struct dkv_strip {
    long bins[2][DKV_GATHER_BINS];
    long cases, outside;
    double most; /* INFINITY where something is not finite */
} dkv_strip;

typedef struct dkv_gather_row { /* a mask, a dtype, a tensor */
    long cases, outside;
    double max_ratio, least_rms, most_rms; /* NAN: none */
} dkv_gather_row;

typedef struct dkv_gather_cell {
    long cases, defects, refused;
} dkv_gather_cell;

typedef struct dkv_gather_case { /* one that did not pass, owned */
    char *line, *why, *replay, *waived; /* waived: reason and end of the waiver that excuses it, or "" */
    dkv_picture *maps;                  /* of the first DKV_GATHER_MAPPED that have some */
    int n_maps;
    dkv_status status;
} dkv_gather_case;

typedef struct dkv_gather_commit { /* a kernel's cases of one commit, owned strings */
    char *commit, *started; /* the earliest start of a run; "" where records do not say */
    long cases, defects;
    double worst, rms, rms_share; /* largest err/bound, rms z and rms z over its limit; NAN: none */
    double seconds;               /* in the kernel, forward and backward */
    uint64_t lines;               /* sum of the hashes of its lines: equal where the lines are */
} dkv_gather_commit;

typedef struct dkv_gather_kernel {
    char *name;
    long counts[DKV_ST_N], total, judged, waived; /* waived: defects that a waiver excuses */
    double elements, worst; /* elements judged; largest err/bound */
    char worst_tensor[8];
    dkv_gather_row rows[DKV_GATHER_MASKS][DKV_GATHER_DTYPES][DKV_N_OUTPUTS];
    dkv_gather_cell cover[DKV_GATHER_MASKS][DKV_GATHER_DTYPES][DKV_GATHER_DIMS][DKV_GATHER_EDGES];
    dkv_gather_cell kinds[DKV_GATHER_MASKS][DKV_GATHER_DTYPES]; /* the same, each case once */
    long features[DKV_GATHER_FEATURES]; /* judged cases that have it, dkv_gatherFeature */
    dkv_strip ratio[DKV_N_OUTPUTS][2], rms[DKV_N_OUTPUTS], normal[DKV_N_OUTPUTS]; /* normal: (rms z^2 - 1) sqrt(dof / 2) */
    dkv_wordcount devices, commits, reasons, arithmetic, profiles, not_judged, waivers, checks[3]; /* passed, defect, note */
    dkv_power_table power;
    uint64_t *lines; /* hashes of the different lines, a table of `room` places, 0: free */
    size_t n_lines, room;
    dkv_gather_case *cases;
    int n_cases, mapped;
    long kept[2], cases_left_out; /* kept: others, defects */
    dkv_gather_commit *by_commit;
    int n_commits;
    long commits_left_out; /* cases of these */
} dkv_gather_kernel;

typedef struct dkv_gather_bench { /* owned strings */
    char *line, *kernel, *device, *commit, *started;
    double ms[2], tflops[2], intensity[2], roof[2], peak_bytes, dgemm; /* forward, backward; roof 0: not known */
    bool memory[2];                                      /* the roof is that of the memory */
} dkv_gather_bench;

typedef struct dkv_gather_fault { /* of `power`, owned strings */
    char *fault, *doc, *check, *line;
    bool found, control, matrix; /* matrix: rule[] is known */
    int in_suite;                /* by the suite alone: 1 yes, 0 no, -1 not known */
    double cases, rule[DKV_GATHER_RULES]; /* cases until found; of a usual rule 0: not */
} dkv_gather_fault;

typedef struct dkv_gather_file {
    char *path, *hash; /* owned */
    long lines, records, bad, bad_lines[DKV_GATHER_BAD];
    bool cut; /* it could not be read to its end */
} dkv_gather_file;

typedef struct dkv_gather {
    dkv_gather_kernel **kernels;
    int n_kernels, n_bench, n_faults, n_files;
    long total, bench_left_out, clean_cases, false_alarms, rule_alarms[DKV_GATHER_RULES];
    double seconds, least_level, most_level;
    dkv_gather_bench *bench;
    dkv_gather_fault *faults;
    dkv_gather_file *files;
    dkv_wordcount devices, hosts, drivers, commits, compilers, generators, oracles, flags, libraries, started, commands;
} dkv_gather;

/* 1: a record, 0: not one, -1: out of memory. */
int dkv_gatherRecord(dkv_gather *g, const char *json);
void dkv_freeGather(dkv_gather *g);

/* Every record of a file; what is none is skipped, and its line's number kept. DKV_EUSER where the file itself cannot be read.
 * `hash` may be "". (report_read.c) */
int dkv_gatherFile(dkv_gather *g, const char *path, const char *hash, dkv_err *err);
/* Notes a case of a commit. `hash`: of its line. -1: out of memory. (report_trend.c) */
struct cJSON;
int dkv_addCommit(dkv_gather_kernel *k, const struct cJSON *record, dkv_status status, uint64_t hash);
void dkv_freeCommits(dkv_gather_kernel *k);

/* Names of classes, NULL past the end. */
const char *dkv_gatherDim(int i);
const char *dkv_gatherEdge(int i);
const char *dkv_gatherFeature(int i);
/* Axes of strips: err/bound at the left edge of bin i (logarithmic), rms z likewise (linear). */
double dkv_ratioOfBin(double i);
double dkv_rmsOfBin(double i);
double dkv_normalOfBin(double i); /* from -8 to 8 */

#endif
