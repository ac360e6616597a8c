/* report_classes.h: classes of problems that a report counts by. */
#ifndef DKV_REPORT_CLASSES_H
#define DKV_REPORT_CLASSES_H

#include "../ref/problem.h"

int dkv_classOfDim(const dkv_problem *p);
/* Bit i: edge class i; bit i of the second: feature i. A problem may be in several. */
unsigned dkv_edgesOf(const dkv_problem *p);
unsigned dkv_featuresOf(const dkv_problem *p);

/* Rates of a device as its vendor's datasheet has them: FLOP/s without sparsity, bytes/s. */
typedef struct dkv_card {
    const char *name; /* part of the device's name */
    double half, single, memory;
} dkv_card;
/* NULL: not known. */
const dkv_card *dkv_findCard(const char *device);
/* Least bytes that attention moves: each operand once. */
double dkv_leastBytes(const dkv_problem *p, bool backward);

#endif
