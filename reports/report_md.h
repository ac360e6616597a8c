/* report_md.h: the table by mask, dtype and tensor, from records one at a time: for a terminal and as Markdown. */
#ifndef DKV_REPORT_MD_H
#define DKV_REPORT_MD_H

#include <stdbool.h>
#include <stdio.h>

#include "../ref/dkv_err.h"
#include "report_gather.h"

enum { DKV_REPORT_CASES = 2000 }; /* that did not pass; further ones are counted */

/* One row: a mask, a dtype, a tensor. */
typedef struct dkv_report_row {
    char kernel[64], mask[16], dtype[8], tensor[8];
    long cases, defects;
    double max_ratio;           /* worst err/bound; INFINITY where something is not finite */
    double least_rms, most_rms; /* residual to the twin over the cases that have one; NAN: none */
} dkv_report_row;

typedef struct dkv_report_case { /* one that did not pass */
    char *line, *kernel, *status, *why, *replay;
} dkv_report_case;

typedef struct dkv_report {
    dkv_report_row *rows;
    int n_rows;
    dkv_report_case *cases;
    long n_cases, cases_left_out, total;
    dkv_power_table power;
} dkv_report;

/* Adds one record. DKV_EUSER where it is not one. */
int dkv_addReport(dkv_report *r, const char *json, dkv_err *err);
/* Adds the rows of what was gathered. -1: out of memory. */
int dkv_tableOf(const dkv_gather *g, dkv_report *r);
void dkv_freeReport(dkv_report *r);

/* The table by mask, dtype and tensor: worst err/bound, range of the twin's rms z, cases. */
void dkv_writeReportTable(const dkv_report *r, FILE *f, bool markdown);

#endif
