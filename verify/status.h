/* status.h: what became of a case, and the exit code that follows (design.md section 6). One table. */
#ifndef DKV_STATUS_H
#define DKV_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* In order of severity for a run's exit; the table in status.c has one row for each, in this order. */
typedef enum dkv_status {
    DKV_ST_PASSED,
    DKV_ST_FAILED,
    DKV_ST_IMPRECISE,
    DKV_ST_BIASED,
    DKV_ST_NONDETERMINISTIC,
    DKV_ST_OUT_OF_BOUNDS,
    DKV_ST_UNWRITTEN,
    DKV_ST_INPUT_MUTATED,
    DKV_ST_LEAKED,
    DKV_ST_NOT_RUN,
    DKV_ST_CRASHED,
    DKV_ST_TIMEOUT,
    DKV_ST_HARNESS_ERROR,
    DKV_ST_INCONCLUSIVE,
    DKV_ST_UNSUPPORTED,
    DKV_ST_N
} dkv_status;

/* What became of one check of a case. */
typedef enum dkv_finding_state {
    DKV_NOT_APPLICABLE,
    DKV_CHECK_PASSED,
    DKV_CHECK_DEFECT,
    DKV_CHECK_NOTE
} dkv_finding_state;
/* Its word in records; NULL: none is written. */
const char *dkv_findingName(dkv_finding_state s);

enum { DKV_EXIT_OK = 0, DKV_EXIT_DEFECT = 1, DKV_EXIT_USER = 2, DKV_EXIT_NOTHING = 3, DKV_EXIT_WEAK = 4 };

typedef struct dkv_status_row {
    const char *name, *doc;
    int exit;    /* exit code of a run whose only case this is */
    bool defect; /* of the kernel */
} dkv_status_row;

const dkv_status_row *dkv_statusRow(dkv_status s);
/* Status of a name, DKV_ST_N if there is none. */
dkv_status dkv_findStatus(const char *name);
/* Exit code of a run: 1 if any defect, else 3 (nothing learned: a harness error, or nothing ran), else 4,
 * else 0. */
int dkv_runExit(const long counts[DKV_ST_N]);
/* As `git bisect run` wants it: 3, 4 and UNSUPPORTED give 125, 2 gives 128. */
int dkv_bisectExit(int code, const long counts[DKV_ST_N]);

/* Refusals of a long run, told together, by reason; the last row is of all further ones. */
enum { DKV_REASONS_MAX = 16 };
typedef struct dkv_refusals {
    struct {
        char why[200];
        long cases;
    } row[DKV_REASONS_MAX];
} dkv_refusals;
void dkv_countRefusal(dkv_refusals *t, const char *why);
void dkv_sayRefusals(const dkv_refusals *t, FILE *f);

/* The word of `words` (n of them) nearest to `word`, NULL if none is near: for "did you mean". */
const char *dkv_nearestWord(const char *word, const char *const *words, size_t n);

#endif
