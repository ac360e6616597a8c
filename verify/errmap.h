/* errmap.h: where the errors of a case lie, in tiles, small enough for its record.
 *
 * Two kinds. From the outputs themselves: tiles of rows x heads of a wrong tensor; an output holds no error of a single pair of
 * query and key. And, by one run more with other inputs, tiles of queries x tiles of keys of the weights P: with V one-hot by key
 * tile (V[key, d] = 1 where the key lies in tile d) O[row, d] is the weight that the row gives to tile d; with dO one-hot by
 * query tile dV[key, d] is the weight that the rows of tile d give to the key in the backward. Not seen so: errors of dS alone.
 *
 * Tiles begin at each segment's first token; where there are too many, they are made larger, and of too many segments a stretch
 * around the worst row is shown. A cell holds the largest err/bound in it as a letter: '.' nothing there, 'A'..'Z', 'a'..'z'
 * level 0..51, '!' not finite; level L means at most 10^((L - 15) / 8), so that 'P' and below are within the bound. */
#ifndef DKV_ERRMAP_H
#define DKV_ERRMAP_H

#include <stdint.h>

enum { DKV_MAP_SIDE = 40, DKV_MAP_PROBES = 6 };

typedef struct dkv_axis {
    int64_t tile;               /* tokens (heads) of a cell */
    int32_t first, n;           /* segments shown; n 0: heads */
    uint8_t cells[DKV_MAP_SIDE]; /* of each segment; [0] where heads */
    int total;
} dkv_axis;

typedef struct dkv_errmap { /* rows.total 0: none */
    dkv_axis rows, columns;
    char cells[DKV_MAP_SIDE * DKV_MAP_SIDE + 1]; /* [rows.total, columns.total] */
} dkv_errmap;

struct dkv_case;
struct cJSON;
/* Maps of the wrong tensors of a judged case into its result, while truth, bound and twin are there. */
void dkv_mapTensors(struct dkv_case *c);
/* With *probes > 0 (counted down) those of the weights, for which the kernel runs again. */
void dkv_mapPairs(struct dkv_case *c, int *probes);
void dkv_addErrmap(struct cJSON *o, const char *name, const dkv_errmap *m);

#endif
