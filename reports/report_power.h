/* report_power.h: what the cases of a run, together, had the power to see, from the `power` of their records: for each
 * kernel, stratum (tensor, region, length class) and cheap fault, how many cases would have caught it. A fault that could be
 * in a stratum and is caught by no case leaves the run inconclusive there. */
#ifndef DKV_REPORT_POWER_H
#define DKV_REPORT_POWER_H

#include <cjson/cJSON.h>
#include <stdio.h>

#define DKV_POWER_ROWS 16384 /* of a table; further ones are left out */

typedef struct dkv_power_row {
    char kernel[64], stratum[32], fault[16];
    long cases, caught; /* cases where the fault could be; that catch it */
    double best;        /* largest error over its bound */
} dkv_power_row;

typedef struct dkv_power_table {
    dkv_power_row *rows;
    int n_rows, next;            /* next: where a search begins, since records name strata in the same order */
    long cases;                  /* measured */
    double longest, scale, gain; /* keys of the longest row where a lost key shows; least errors seen; 0: none */
} dkv_power_table;

/* A record's `power`; one without is passed over. -1: out of memory. */
int dkv_addPowerRecord(dkv_power_table *t, const cJSON *record);
void dkv_freePowerTable(dkv_power_table *t);

/* A copy of the rows, by kernel and stratum, in reading order; freed by the caller. NULL: out of memory. */
dkv_power_row *dkv_sortPowerRows(const dkv_power_table *t);
/* Strata in which some fault is caught by no case. */
int dkv_countBlind(const dkv_power_table *t);
/* One line each, `most` at most: "O response 17-64: no case would have seen first-key, scale". */
void dkv_writeBlind(const dkv_power_table *t, FILE *f, const char *before, int most);
/* The same as a list of Markdown, names escaped; what is left out is counted. */
void dkv_markBlind(const dkv_power_table *t, FILE *f, int most);
/* "one lost key up to length 330; a scale error of 3e-06; a dK gain of 2e-04" */
void dkv_writePowerWords(const dkv_power_table *t, FILE *f);
/* Markdown: stratum x fault -> caught by how many of how many cases, best ratio. */
void dkv_writePowerTable(const dkv_power_table *t, FILE *f);

#endif
