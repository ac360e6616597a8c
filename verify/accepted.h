/* accepted.h: what was accepted of a kernel, line by line: a canonical, sorted, diffable file against which a later
 * run is compared (gate.h). JSON Lines:
 *
 *     {"accepted":1,"kernel":K,"kernel_sha256":H,"generator":G,"program":V,"oracle":O,"commit":C,"device":D,"cases":N,
 *      "counts":{STATUS:n,…},"sha256":HASH OF ALL FURTHER LINES,"sum":S}
 *     {"line":L,"status":S,…,"declared":true,"counted":true,"arithmetic":{…},"tensors":{"O":{"rms":…,"dof":…,"ratio":…},…},"sum":S}     N of them, sorted by line
 *
 * S, the first 16 digits of the SHA-256 of its line up to `,"sum"`, names the line that was edited. */
#ifndef DKV_ACCEPTED_H
#define DKV_ACCEPTED_H

#include <stdbool.h>

#include "../ref/dkv_err.h"
#include "../ref/dualkv_kernel.h"
#include "../ref/tensors.h"
#include "status.h"

/* The fields of a dualkv_arithmetic that are kept, and which way is looser: +1 larger, -1 smaller, 0 neither;
 * 2 a format (fewer bits are looser); 3 steps between folds (more are looser, 0 is never). */
#define DKV_ARITHMETIC_FIELDS(F)                                                                             \
    F(unit, 1) F(acc_unit, 1) F(acc_truncates, 1) F(acc_step, 0) F(acc_gain, 1) F(acc_fold, 3)               \
    F(acc_fold_dq, 0) F(acc_fold_dkv, 0) F(in_format, 2) F(s_format, 2) F(p_format, 2) F(ds_format, 2)       \
    F(out_format, 2) F(partial_format, 2) F(p_normalised, 0) F(delta_exact, -1) F(key_tile, 0)               \
    F(key_order, 0) F(exp_error, 1) F(log_error, 1) F(tanh_error, 1) F(flushes, 1)               \
    F(partial_of, 1) F(ds_scaled, 0) F(row_block, 0) F(row_block2, 0) F(row_from2, 0) F(row_block3, 0) F(row_from3, 0) F(dq_block, 0) \
    F(max_slack, 1) F(sink_first, 0)

struct cJSON;
/* These fields of an arithmetic, as an object. */
void dkv_addArithmetic(struct cJSON *o, const char *key, const dualkv_arithmetic *a);

typedef struct dkv_accepted_row {
    char *line, *why;  /* owned; why: of what did not pass; in the file of refusals only */
    const char *excused; /* of this run: the reason of the waiver that excuses the defect (borrowed), or NULL */
    dkv_status status;
    bool judged, declared, counted; /* counted: its own launches, so that no fallback passes for it */
    char bits[17];     /* "" where repeatable bits are not promised */
    double level;      /* false alarms of one test */
    dualkv_arithmetic a;
    struct {
        bool there;
        double rms, dof, ratio; /* of the residual to the twin (NAN: no twin), its degrees of freedom; worst err/bound */
    } tensor[DKV_N_OUTPUTS];
} dkv_accepted_row;

typedef struct dkv_accepted {
    char *kernel, *generator, *program, *oracle, *commit, *device; /* owned; program, oracle: their versions */
    char kernel_hash[65]; /* SHA-256 of the kernel's file, "" where it has none */
    dkv_accepted_row *rows;
    long n, room;
} dkv_accepted;

/* Adds a record (record.h). DKV_EUSER where it is not one. `program` and `oracle` are set to this program's versions. */
int dkv_addAccepted(dkv_accepted *a, const char *record, dkv_err *err);
/* Sorts by line; of equal lines the last one added stays. */
void dkv_sortAccepted(dkv_accepted *a);
/* The row of a line, or NULL; sorted only. */
const dkv_accepted_row *dkv_findAccepted(const dkv_accepted *a, const char *line);
/* Sorts and writes, whole or not at all. */
int dkv_writeAccepted(dkv_accepted *a, const char *path, dkv_err *err);
/* DKV_EUSER, naming the line: a file that is not one, was edited, cut off or reordered. */
int dkv_readAccepted(const char *path, dkv_accepted *out, dkv_err *err);
void dkv_freeAccepted(dkv_accepted *a);

#endif
