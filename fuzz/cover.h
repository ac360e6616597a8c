/* cover.h: a covering array: rows of levels that together hold every pair of levels of any two factors. Built
 * greedily, so that the first rows hold the most; a function of (seed, levels) and of nothing else. */
#ifndef DKV_COVER_H
#define DKV_COVER_H

#include <stdint.h>

#include "../ref/dkv_err.h"

#define DKV_FACTORS_MAX 12
#define DKV_LEVELS_MAX 32

typedef struct dkv_cover {
    int n_factors, n_rows;
    uint8_t (*rows)[DKV_FACTORS_MAX]; /* owned: level of each factor */
} dkv_cover;

/* levels[f]: how many levels factor f has, 1..DKV_LEVELS_MAX. */
int dkv_makeCover(uint64_t seed, int n_factors, const int *levels, dkv_cover *out, dkv_err *err);
void dkv_freeCover(dkv_cover *c);

#endif
