/* log.h: records of a fuzzing run: those of record.h, and which case each is:
 *     "fuzz": {"profile": "quick", "seed": "7", "case": 12} */
#ifndef DKV_LOG_H
#define DKV_LOG_H

#include "../verify/record.h"
#include "campaign.h"

typedef struct dkv_log {
    dkv_record_file file;
    const char *kernel;
    const dkv_sampler *sampler;
    uint8_t *done, *unsupported; /* owned: bit n is set where case n has a record; where that says UNSUPPORTED */
    uint64_t n_done;
    int held; /* the file, locked for as long as it is open; -1: none */
    bool made;
    long counts[DKV_ST_N]; /* of the records that were there, as are: */
    dkv_refusals refused;
    dkv_behaviour behaves;
} dkv_log;

/* How a log is opened. NEW: DKV_EUSER where something is in the file. RESUME: reads the records that are there, cuts off a
 * last one that was not finished, and goes on behind them; DKV_EUSER where they are of another kernel (or another build of it),
 * seed, profile, program, or of other options that verdicts depend on (those of replay lines), or where the file ends in what no run wrote. BEHIND: goes on behind other records of this run. */
typedef enum dkv_log_mode { DKV_LOG_NEW, DKV_LOG_RESUME, DKV_LOG_BEHIND } dkv_log_mode;
/* path: where records go (NULL: nowhere); DKV_EUSER where another run writes them. */
int dkv_openLog(dkv_log *log, const char *path, dkv_log_mode mode, const char *kernel, const dkv_sampler *s, dkv_err *err);
int dkv_logCase(dkv_log *log, const dkv_fuzzed *f, dkv_err *err);
/* Also where nothing was logged: leaves no file that was not there. */
int dkv_closeLog(dkv_log *log, dkv_err *err);

#endif
