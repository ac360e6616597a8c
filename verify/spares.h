/* spares.h: small arenas that are not in use. Pages that come and go with each case cost more than what is done in them.
 * Spares belong to one kernel's process, for that may have kept what it was given. */
#ifndef DKV_SPARES_H
#define DKV_SPARES_H

#include "buffers.h"

#define DKV_SPARES 3

typedef struct dkv_spares { /* zeroed: none */
    dkv_arena arena[DKV_SPARES];
} dkv_spares;

/* As dkv_openArena and dkv_closeArena, from and into the spares where that is possible. What is in a spare is as it was
 * left: dkv_fillArena writes all of it. */
int dkv_takeArena(dkv_spares *s, const dkv_plan *plan, bool shadow, dkv_arena *a, dkv_err *err);
void dkv_giveArena(dkv_spares *s, dkv_arena *a);
void dkv_dropSpares(dkv_spares *s);

#endif
