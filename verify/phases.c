#include "phases.h"

#include <stddef.h>

#include "../ref/clock.h"

static _Thread_local dkv_phases *counted;

static const char *const names[DKV_N_PHASES] = {"other",  "inputs", "fill",   "kernel",   "gather",
                                                "oracle", "judge",  "checks", "strength", "release"};

const char *dkv_phaseName(dkv_phase s) { return names[s]; }

dkv_phase dkv_enterPhase(dkv_phase s) {
    if (!counted) return s;
    const dkv_phase was = counted->now;
    const double now = dkv_now();
    counted->seconds[was] += now - counted->since;
    counted->since = now;
    counted->now = s;
    return was;
}

dkv_phases *dkv_countPhases(dkv_phases *s) {
    dkv_phases *before = counted;
    dkv_enterPhase(DKV_PHASE_OTHER); /* what ran so far is counted */
    counted = s;
    if (s) s->since = dkv_now(), s->now = DKV_PHASE_OTHER;
    return before;
}
