/* power_report.h: a measurement of power as JSON Lines (design.md section 9) and as Markdown. */
#ifndef DKV_POWER_REPORT_H
#define DKV_POWER_REPORT_H

#include <stdio.h>

#include "power.h"

typedef struct dkv_power_summary {
    int planted, controls; /* faults; controls apart */
    int found;             /* in every seed */
    int controls_found;    /* a control that was "found": a false alarm */
    double median, worst;  /* cases until found, over faults and seeds that were found */
    int in_suite;
    int by_rule[DKV_N_RULES]; /* found by each rule in the first seed */
    int by_tool;              /* likewise by this tool */
} dkv_power_summary;

dkv_power_summary dkv_summarisePower(const dkv_power *p);
/* -1: cannot write. */
int dkv_writePowerJson(const dkv_power *p, FILE *f);
int dkv_writePowerMarkdown(const dkv_power *p, FILE *f);

#endif
