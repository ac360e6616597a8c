/* memory.h: bytes of host memory that a case needs, array by array, from counts alone; and what there is. */
#ifndef DKV_MEMORY_H
#define DKV_MEMORY_H

#include <stddef.h>

#include "../ref/problem.h"

#define DKV_MEMORY_ROWS 12

typedef struct dkv_memory_row {
    const char *name;
    double bytes;
} dkv_memory_row;

/* All that is held at once at most, of checking a case; returns how many rows. Buffers and the oracle's arrays are shared with the
 * workers: counted once. What a host kernel takes for itself is counted in small cases. */
int dkv_accountCase(const dkv_problem *p, bool replicated, dkv_memory_row rows[DKV_MEMORY_ROWS]);
/* The largest of them in words: "kernel's buffers 38.4, truth, bound, twin, variance 27.5 GiB". */
void dkv_sayMemory(const dkv_problem *p, bool replicated, char *out, size_t n);

/* Their sum; INFINITY where beyond counting. */
double dkv_estimateCase(const dkv_problem *p, bool replicated);
/* Bytes that timing a case needs. */
double dkv_estimateTiming(const dkv_problem *p, bool replicated);
/* Bytes that this process may still take (MemAvailable, and the limit of its control group). */
double dkv_availableMemory(void);

#endif
