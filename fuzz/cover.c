/* Greedy: of some candidate rows, each grown from a pair that is still missing, the one that holds the most
 * missing pairs is kept. (Cohen et al., "The AETG system", describe the method.) */
#include "cover.h"

#include <stdlib.h>
#include <string.h>

#include "../data/rng.h"

#define CANDIDATES 24

typedef struct builder {
    int n, left; /* factors; pairs that are missing */
    const int *levels;
    uint64_t seed, used;
    uint8_t missing[DKV_FACTORS_MAX][DKV_FACTORS_MAX][DKV_LEVELS_MAX][DKV_LEVELS_MAX]; /* [f][g], f < g */
} builder;

static int below(builder *b, int limit) {
    uint64_t at = b->used++;
    return (int)(dkv_drawWords(b->seed, DKV_STREAM_SAMPLE, 0xC0, at).v[0] % (uint32_t)limit);
}

static int isMissing(const builder *b, int f, int x, int g, int y) {
    return f < g ? b->missing[f][g][x][y] : b->missing[g][f][y][x];
}

/* Missing pairs that level x of factor f makes with the factors that have a level. */
static int countGain(const builder *b, const int8_t *row, int f, int x) {
    int n = 0;
    for (int g = 0; g < b->n; g++)
        if (g != f && row[g] >= 0) n += isMissing(b, f, x, g, row[g]);
    return n;
}

/* A missing pair, chosen with equal chance. */
static void pickPair(builder *b, int8_t *row) {
    int at = below(b, b->left);
    for (int f = 0; f < b->n; f++)
        for (int g = f + 1; g < b->n; g++)
            for (int x = 0; x < b->levels[f]; x++)
                for (int y = 0; y < b->levels[g]; y++)
                    if (b->missing[f][g][x][y] && at-- == 0) {
                        row[f] = (int8_t)x;
                        row[g] = (int8_t)y;
                        return;
                    }
}

static int growRow(builder *b, int8_t *row) {
    int order[DKV_FACTORS_MAX], gain = 1;
    memset(row, -1, DKV_FACTORS_MAX);
    pickPair(b, row);
    for (int i = 0; i < b->n; i++) {
        int j = below(b, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = 0; i < b->n; i++) {
        int f = order[i], most = -1, ties = 0;
        if (row[f] >= 0) continue;
        int8_t best = 0;
        for (int x = 0; x < b->levels[f]; x++) {
            int g = countGain(b, row, f, x);
            if (g > most) ties = 0;
            if (g < most || below(b, ++ties)) continue;
            most = g;
            best = (int8_t)x;
        }
        row[f] = best;
        gain += most;
    }
    return gain;
}

static void takeRow(builder *b, const int8_t *row, uint8_t *to) {
    for (int f = 0; f < b->n; f++) {
        to[f] = (uint8_t)row[f];
        for (int g = f + 1; g < b->n; g++) {
            b->left -= b->missing[f][g][row[f]][row[g]];
            b->missing[f][g][row[f]][row[g]] = 0;
        }
    }
}

int dkv_makeCover(uint64_t seed, int n_factors, const int *levels, dkv_cover *out, dkv_err *err) {
    builder *b = calloc(1, sizeof *b);
    int room = 0, rc = 0;
    *out = (dkv_cover){.n_factors = n_factors};
    if (!b) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    b->n = n_factors;
    b->levels = levels;
    b->seed = seed;
    for (int f = 0; f < n_factors; f++)
        for (int g = f + 1; g < n_factors; g++)
            for (int x = 0; x < levels[f]; x++)
                for (int y = 0; y < levels[g]; y++, b->left++) b->missing[f][g][x][y] = 1;
    while (b->left > 0) {
        int8_t row[DKV_FACTORS_MAX], best[DKV_FACTORS_MAX];
        int most = -1;
        if (out->n_rows == room) {
            room = room ? 2 * room : 256;
            void *rows = realloc(out->rows, (size_t)room * sizeof *out->rows);
            if (!rows) {
                rc = dkv_fail(err, DKV_EHARNESS, "out of memory");
                break;
            }
            out->rows = rows;
        }
        for (int i = 0; i < CANDIDATES; i++) {
            int gain = growRow(b, row);
            if (gain > most) memcpy(best, row, sizeof best);
            if (gain > most) most = gain;
        }
        takeRow(b, best, out->rows[out->n_rows++]);
    }
    free(b);
    if (rc) dkv_freeCover(out);
    return rc;
}

void dkv_freeCover(dkv_cover *c) {
    free(c->rows);
    *c = (dkv_cover){0};
}
