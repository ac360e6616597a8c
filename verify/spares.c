#include "spares.h"

#include <string.h>

int dkv_takeArena(dkv_spares *s, const dkv_plan *plan, bool shadow, dkv_arena *a, dkv_err *err) {
    for (int i = 0; i < DKV_SPARES && shadow; i++) {
        dkv_arena *x = &s->arena[i];
        if (plan->size > x->room) continue;
        *a = (dkv_arena){.plan = *plan, .room = x->room, .fd = x->fd, .base = x->base, .shadow = x->shadow};
        memset(x, 0, sizeof *x);
        return 0;
    }
    return dkv_openArena(plan, shadow, a, err);
}

/* The largest stay. */
void dkv_giveArena(dkv_spares *s, dkv_arena *a) {
    int least = 0;
    for (int i = 1; i < DKV_SPARES; i++)
        if (s->arena[i].room < s->arena[least].room) least = i;
    if (a->shadow && a->room <= DKV_ARENA_SMALL && a->room > s->arena[least].room) {
        dkv_arena out = s->arena[least];
        s->arena[least] = *a;
        *a = out;
    }
    dkv_closeArena(a);
}

void dkv_dropSpares(dkv_spares *s) {
    for (int i = 0; i < DKV_SPARES; i++) dkv_closeArena(&s->arena[i]);
    memset(s, 0, sizeof *s);
}
