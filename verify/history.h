/* history.h: records of many runs. JSON Lines files are the truth; an SQLite database is an index of them, which is made
 * from them, held against them whenever it is opened, and made anew wherever it is in doubt. Whatever stands in either is
 * hostile: a line that is no record is counted, a database that is broken is replaced.
 *
 * The index (schema DKV_HISTORY_SCHEMA, in user_version; application_id says that it is ours):
 *   file    path, size and times when read, bytes up to the last line that ended, SHA-256 of these, lines, what they were,
 *           and a sum of its rows
 *   record  file, number of the line, dkv_historyText(i) as text, dkv_historyNumber(i) as numbers (absent: NULL) */
#ifndef DKV_HISTORY_H
#define DKV_HISTORY_H

#include <stdbool.h>
#include <stdint.h>

#include "../ref/dkv_err.h"
#include "../ref/tensors.h"
#include "status.h"

#define DKV_HISTORY_SCHEMA 1
#define DKV_HISTORY_FILE ".dualkv-history.sqlite" /* of a folder, where no other is named */

typedef enum dkv_history_text {
    DKV_HT_KIND, /* check or bench */
    DKV_HT_LINE,
    DKV_HT_KERNEL,
    DKV_HT_KERNEL_HASH,
    DKV_HT_STATUS,
    DKV_HT_WHY,
    DKV_HT_TIME, /* when its run started, UTC, "2026-01-31T12:00:00Z"; "" in older records */
    DKV_HT_COMMIT,
    DKV_HT_DEVICE,
    DKV_HT_DRIVER,
    DKV_HT_GENERATOR,
    DKV_HT_ORACLE,
    DKV_HT_ARITHMETIC,
    DKV_HT_PROFILE,
    DKV_HT_REPLAY,
    DKV_HT_N
} dkv_history_text;

enum { /* numbers: these, then of each output DKV_HN_EACH */
    DKV_HN_SECONDS,
    DKV_HN_MS_FWD,
    DKV_HN_MS_BWD,
    DKV_HN_TFLOPS_FWD,
    DKV_HN_TFLOPS_BWD,
    DKV_HN_TENSORS,
    DKV_HN_RATIO = 0, /* of an output: err/bound, all and by region; residual to the twin; wrong elements */
    DKV_HN_PROMPT,
    DKV_HN_RESPONSE,
    DKV_HN_RMS,
    DKV_HN_GAIN,
    DKV_HN_MEAN,
    DKV_HN_BAD,
    DKV_HN_EACH,
    DKV_HN_N = DKV_HN_TENSORS + DKV_HN_EACH * DKV_N_OUTPUTS
};

typedef struct dkv_history_row {
    const char *file; /* as it was named, or the folder and its place in it */
    long number;      /* of the line, from 1 */
    const char *text[DKV_HT_N];
    double x[DKV_HN_N]; /* NAN where the record says "nan" */
    uint64_t there;     /* a bit each */
} dkv_history_row;

/* What is wanted; NULL or 0: anything. Texts must live as long as the call. */
typedef struct dkv_history_filter {
    const char *kernel, *commit, *line, *device, *since; /* equal, begins so, holds, holds, not before */
    uint32_t statuses;                                   /* bits 1 << dkv_status */
    int tensor;                                          /* 1 + dkv_tensor_id */
} dkv_history_filter;

typedef struct dkv_history_file {
    char *path, *shown; /* owned; path: real */
    long records, others, bad, first_bad; /* others: of `power`, or accepted files; bad: no records at all */
    bool cut;                             /* a line was too long: what follows was not read */
    int64_t id;
} dkv_history_file;

#define DKV_HISTORY_NOTES 8
typedef struct dkv_history {
    dkv_history_file *files; /* in the order of the arguments, of a folder by name */
    int n_files;
    long read;                           /* lines that were read for this; 0: the index knew all */
    char notes[DKV_HISTORY_NOTES][300];  /* what the user should hear: "index … is broken: made anew" */
    int n_notes;
    struct sqlite3 *db;
} dkv_history;

/* The files of `words` (regular files, folders) and an index that agrees with them. index: a path that ends in .sqlite, or
 * NULL: DKV_HISTORY_FILE in the folder, where one folder alone is named, else in memory. An index that cannot be written,
 * or is in use, leaves the memory. DKV_EUSER: a word that is no such thing, no file, a database that is not ours or of a
 * later schema. dkv_closeHistory frees in any case. */
int dkv_openHistory(const char *const *words, int n, const char *index, bool rebuild, dkv_history *h, dkv_err *err);
void dkv_closeHistory(dkv_history *h);

/* Rows in the order of files and lines; stops where `take` returns non-zero, and returns that. */
typedef int (*dkv_history_take)(const dkv_history_row *row, void *arg);
int dkv_eachRow(dkv_history *h, const dkv_history_filter *f, dkv_history_take take, void *arg, dkv_err *err);

/* Column names, NULL past the end. */
const char *dkv_historyText(int i);
const char *dkv_historyNumber(int i);
int dkv_findNumber(const char *name); /* "rms_dK" -> its place; -1: none */
/* The largest err/bound of a row's outputs, -1: none was judged; *tensor: whose. */
double dkv_worstOf(const dkv_history_row *row, int *tensor);

/* Takes the fields of one line. 1: a record, 2: of another kind (power, accepted), 0: none. row->text point into *keep, a
 * cJSON object that the caller deletes. */
struct cJSON;
int dkv_parseRow(const char *json, dkv_history_row *row, struct cJSON **keep);

#endif
