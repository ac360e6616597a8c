/* campaign.h: one kernel on the cases of one sampler, several at a time. Verdicts depend on (profile, seed,
 * case number) alone: not on the number of threads, on shards, or on where the run was cut and resumed.
 *
 * So does which cases there are: the first ones of which `cases` are not refused. A kernel is asked about cases of other
 * shards, too, to know how far that is; of one that refuses nearly all no more than DKV_TRIES numbers a wanted case are taken. */
#ifndef DKV_CAMPAIGN_H
#define DKV_CAMPAIGN_H

#include "reason.h"
#include "sample.h"

enum { DKV_TRIES = 20 };

/* A finished case, as it comes. */
typedef struct dkv_fuzzed {
    uint64_t n;
    const dkv_result *result;
    int alone;          /* of a defect: 1 it is there in a fresh process, too; 0 it is not; -1 not tried */
    const char *before; /* the line that ran before it in its process, "" if none */
} dkv_fuzzed;

typedef struct dkv_campaign {
    const dkv_kernel_spec *kernel, *peer; /* peer: or NULL */
    const dkv_fits *fits;                 /* of the kernel, or NULL */
    dkv_remote *remote;                   /* the oracle on a device, open; or NULL */
    const dkv_sampler *sampler;
    const char *data_dir;
    uint64_t first, cases;  /* numbers from `first` on, until so many are not refused; cases 0: no end */
    uint64_t shard, shards; /* of these the ones that are `shard` modulo `shards` */
    double seconds;         /* 0: no limit; no case is started later */
    int jobs, repeats;
    double timeout;
    double budget, level; /* false alarms of all cases together; or of each test (0: by the budget) */
    int confirm;          /* defects that are tried again in a fresh process */
    const uint8_t *done, *refused; /* bit n: case n has a verdict already; it is that it was refused; n_done bits */
    uint64_t n_done;
    /* Called with one case at a time. Non-zero: start no more. */
    int (*report)(const dkv_fuzzed *f, void *arg);
    void *arg;
    /* out */
    long counts[DKV_ST_N], finished;
    bool stopped; /* by a signal */
    bool short_of; /* less than `cases` were not refused */
    dkv_err trouble;
} dkv_campaign;

/* Level of one statistical test of case n. A campaign has no last case, so the budget is spent as a
 * convergent series: the sum over all cases and tensors is below it. */
double dkv_fuzzLevel(double budget, uint64_t n);
void dkv_runCampaign(dkv_campaign *c);

/* Runs one line in a process of its own. */
void dkv_runAlone(const dkv_kernel_spec *kernel, const dkv_problem *p, const dkv_case_options *options,
                  double timeout, dkv_result *out);

#endif
