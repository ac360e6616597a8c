/* report_verdict.h: the first screen of the HTML page: a kernel's verdict, its evidence, its power, what was not checked. */
#ifndef DKV_REPORT_VERDICT_H
#define DKV_REPORT_VERDICT_H

#include "report_gather.h"

typedef struct dkv_verdict {
    long defects, waived, unsure, harness, judged; /* cases; defects: those that no waiver excuses */
    int blind;                                     /* strata in which some small fault would not have been seen */
} dkv_verdict;

dkv_verdict dkv_sumUp(const dkv_gather_kernel *k);
/* The first that no waiver excuses, or NULL. */
const dkv_gather_case *dkv_firstDefect(const dkv_gather_kernel *k);
void dkv_writeVerdict(const dkv_gather_kernel *k, FILE *f);
/* The verdict in two or three words. */
const char *dkv_verdictWord(const dkv_gather_kernel *k);
/* Words with their counts, "a (3), b". */
void dkv_writeWords(const dkv_wordcount *w, bool counts, FILE *f);

#endif
