/* report_trend.h: a kernel's cases by commit, in the order in which their runs began. */
#ifndef DKV_REPORT_TREND_H
#define DKV_REPORT_TREND_H

#include <stdio.h>

#include "report_gather.h"

/* A copy of the commits, oldest first (those whose records do not say when: in the order of the records, before the others);
 * freed by the caller. NULL: out of memory, or none. */
dkv_gather_commit *dkv_sortCommits(const dkv_gather_kernel *k);
/* Drawing and table of a kernel with more than one commit. */
void dkv_writeTrend(const dkv_gather_kernel *k, FILE *f);
/* The table as Markdown. */
void dkv_markTrend(const dkv_gather_kernel *k, FILE *f);

#endif
