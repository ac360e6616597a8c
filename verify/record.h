/* record.h: one JSON object a case, one line each (design.md section 9). The one source of truth: reports and
 * databases are made from it. Non-finite numbers are strings ("nan", "inf", "-inf"). */
#ifndef DKV_RECORD_H
#define DKV_RECORD_H

#include <stdio.h>

#include "case.h"

/* Options of a run without which a case of it may end otherwise. NULL, or level 0: not given. */
typedef struct dkv_run_options {
    const char *arithmetic, *oracle;
    int repeats;
    double timeout, level, budget;
} dkv_run_options;

enum { DKV_REPEATS = 1, DKV_TIMEOUT = 120 }; /* where no option says otherwise */
#define DKV_BUDGET 1e-4

void dkv_nameOptions(const dkv_run_options *options); /* before the run */
/* Those that are not the defaults, behind out[at]; `judging`: for a command that takes --budget and --oracle, too. A case
 * alone has a larger share of a budget than in its run: limits are tighter then, and what failed fails. */
size_t dkv_appendOptions(char *out, size_t n, size_t at, bool judging);
/* The command that replays a case: dualkv replay 'LINE' --kernel SPEC [--files DIR] (quoted for a shell), with these options;
 * and the one that shrinks it. */
#define DKV_REPLAY_MAX (DKV_LINE_MAX + 4 * DKV_SPEC_MAX) /* room for one */
void dkv_replayCommand(const char *line, const char *kernel, char *out, size_t n);
void dkv_shrinkCommand(const char *line, const char *kernel, char *out, size_t n);
/* 'text' for a shell, plain where it needs no quotes; cut to n bytes. */
void dkv_quoteWord(const char *text, char *out, size_t n);
/* A command as a shell takes it, malloc'ed: `dualkv NAME OPTION VALUE… WORD…`, options without a value left out. NULL: out of
 * memory. */
char *dkv_spellCommand(const char *name, const char *const (*options)[2], int n_options, const char *const *words, int n_words);
/* The words of the command that runs, for the records; before the first of them. */
void dkv_nameCommand(int argc, char **argv);
/* One line of JSON without newline, malloc'ed; NULL where out of memory. */
char *dkv_printRecord(const dkv_result *r);
/* The same of a case whose defect a waiver excuses (verify/waiver.h); reason NULL: none does. */
char *dkv_printExcused(const dkv_result *r, const char *reason, const char *until);

struct cJSON;
/* The device: a GPU with its capability, driver and host, or the host alone. */
void dkv_addDevice(struct cJSON *o, const dkv_gpu_info *gpu);
/* Commit, compiler and its flags, libraries, when the run began, its command. */
void dkv_addBuild(struct cJSON *o);

/* A file of records. Opened with the first record, so that a run that ends as a user error leaves none. */
typedef struct dkv_record_file {
    const char *path; /* NULL: no file; "-": stdout */
    FILE *f;
    long written;
    bool append; /* the first record goes behind what is there */
} dkv_record_file;

/* Whether the path of an option can be written, before anything runs (nothing is created or changed); NULL and "-" can. */
int dkv_checkOutPath(const char *option, const char *path, dkv_err *err);
/* The same of --json. Records of an earlier run are replaced; those of a fuzzing run, which can be gone on with, are not. */
int dkv_checkRecordPath(const char *path, dkv_err *err);
/* Appends one line and flushes it; the first call truncates, unless `append`. */
int dkv_writeRecord(dkv_record_file *file, const char *json, dkv_err *err);
int dkv_closeRecords(dkv_record_file *file, dkv_err *err);

#endif
