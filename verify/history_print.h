/* history_print.h: rows of history.h for people and for spreadsheets, and their trends over commits. */
#ifndef DKV_HISTORY_PRINT_H
#define DKV_HISTORY_PRINT_H

#include <stdio.h>

#include "history.h"

/* Text for a terminal: control characters and bytes that are no UTF-8 are '?', at most n bytes. */
void dkv_writePlain(FILE *f, const char *text, size_t n);

/* CSV of RFC 4180: rows end in CR LF. A text that a spreadsheet would take for a formula gets a ' before it. */
void dkv_writeCell(FILE *f, const char *text, bool last);
void dkv_writeNumberCell(FILE *f, bool there, double x, bool last); /* shortest that reads back the same; "" */
void dkv_writeCsvHead(FILE *f);
void dkv_writeCsvRow(FILE *f, const dkv_history_row *row);

/* Values of one number, by kernel, then by commit and the kernel's file in the order in which they were first seen (time,
 * then place in the files). */
typedef struct dkv_trend_point {
    char *kernel, *commit, *hash, *time; /* owned; time: of its first record */
    double *values;                      /* owned, sorted by dkv_finishTrend; NaN counts as infinite */
    long n, room, first;                 /* first: which row it was seen in */
} dkv_trend_point;

typedef struct dkv_trend {
    int number; /* dkv_historyNumber */
    dkv_trend_point *points;
    int n, last; /* last: where a search begins */
    long rows;
} dkv_trend;

/* "rms:dK", "rms_z:dK", "seconds", "tflops_fwd" -> a number; -1: there is none of that name. */
int dkv_parseTrend(const char *word);
int dkv_addTrend(dkv_trend *t, const dkv_history_row *row); /* -1: out of memory */
void dkv_finishTrend(dkv_trend *t);
void dkv_writeTrendTable(const dkv_trend *t, FILE *f);    /* a table for each kernel, with a line of blocks: the medians */
void dkv_writeTrendCsv(const dkv_trend *t, FILE *f); /* without head */
void dkv_writeTrendHead(FILE *f);
void dkv_freeTrend(dkv_trend *t);

#endif
