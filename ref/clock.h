/* clock.h: seconds of a clock that never goes back. Only differences mean anything. */
#ifndef DKV_CLOCK_H
#define DKV_CLOCK_H

#include <time.h>

static inline double dkv_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
