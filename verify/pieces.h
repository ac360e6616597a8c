/* pieces.h: 64-bit sums of the pieces of a large block: what is wanted of it later is whether it changed, and about where. */
#ifndef DKV_PIECES_H
#define DKV_PIECES_H

#include <stdint.h>

#define DKV_PIECE ((int64_t)1 << 20) /* bytes; the last one may be shorter */

/* Into `room`, or into memory to be freed where that is NULL (NULL: there is none). By all cores. */
uint64_t *dkv_sumPieces(const uint8_t *from, int64_t bytes, uint64_t *room);
/* Bytes of the pieces that differ; *first: where the first of them begins. Others have the same sum once in 2^64. */
int64_t dkv_comparePieces(const uint64_t *a, const uint64_t *b, int64_t bytes, int64_t *first);

#endif
