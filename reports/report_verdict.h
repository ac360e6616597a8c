/* report_verdict.h: the first screen of the HTML page: a kernel's verdict, its evidence, its power, what was not checked. */
#ifndef DKV_REPORT_VERDICT_H
#define DKV_REPORT_VERDICT_H

#include "report_gather.h"

void dkv_writeVerdict(const dkv_gather_kernel *k, FILE *f);
/* The verdict in two or three words. */
const char *dkv_verdictWord(const dkv_gather_kernel *k);
/* Words with their counts, "a (3), b". */
void dkv_writeWords(const dkv_wordcount *w, bool counts, FILE *f);

#endif
