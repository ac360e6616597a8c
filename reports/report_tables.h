/* report_tables.h: the tables of the HTML page, each with its caption. Text from records is escaped; what is shown is capped,
 * and what was left out is said. */
#ifndef DKV_REPORT_TABLES_H
#define DKV_REPORT_TABLES_H

#include <stdio.h>

#include "report_gather.h"

/* Opens a table that scrolls by itself; `caption` is ours, `of` (NULL: none) from outside. */
void dkv_beginTable(FILE *f, const char *caption, const char *of);
void dkv_endTable(FILE *f);

void dkv_writeErrorTable(const dkv_gather_kernel *k, FILE *f);  /* mask x dtype x tensor */
void dkv_writeCoverage(const dkv_gather_kernel *k, FILE *f);    /* mask x dtype x head dim x edge */
void dkv_writeStrata(const dkv_gather_kernel *k, FILE *f);      /* power: stratum x fault */
void dkv_writeCheckTable(const dkv_gather_kernel *k, FILE *f);  /* what each check said */
void dkv_writeReasons(const dkv_gather_kernel *k, FILE *f);     /* refusals by reason */
/* Cases that did not pass, defects first, until the page is `most` bytes long. */
void dkv_writeFailures(const dkv_gather_kernel *k, FILE *f, long most);
void dkv_writeBench(const dkv_gather *g, FILE *f);
void dkv_writeFaults(const dkv_gather *g, FILE *f);
/* Faults that no case of a stratum would have seen, in one sentence a stratum; returns their number. f NULL: only that. */
int dkv_writeBlindStrata(const dkv_gather_kernel *k, FILE *f);

#endif
