/* shrink.h: from a line that fails to one that fails for the same reason (reason.h) and of which no simpler
 * line (simplify.h) does. Every trial runs in a fresh process, as a replay would. */
#ifndef DKV_SHRINK_H
#define DKV_SHRINK_H

#include "campaign.h"

typedef struct dkv_shrinking {
    const dkv_kernel_spec *kernel;
    dkv_case_options options;                               /* of a trial */
    double timeout, seconds;                                /* of a launch; of the whole, 0: no limit */
    void (*step)(const char *line, long trials, void *arg); /* each time the line got simpler; may be NULL */
    void *arg;
    /* out */
    char line[DKV_LINE_MAX + 1];
    dkv_reason reason;
    dkv_result *result; /* of the line, by the caller */
    long trials;
    int failed, tried; /* how often the first line failed for this reason */
    int tries;         /* runs of a trial: more than 1 for a flaky kernel */
    bool after;        /* the first line alone did not fail; with run=twice or run=aba it did */
    bool minimal;      /* every simpler line was tried */
    bool changed;      /* the kernel's file was, meanwhile: the line is as far as it got */
} dkv_shrinking;

/* DKV_EREFUSED where the line does not fail in a fresh process (the text says how often it was tried). */
int dkv_shrinkLine(const dkv_problem *p, dkv_shrinking *s, dkv_err *err);

#endif
