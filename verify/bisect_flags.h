/* bisect_flags.h: the smallest change of compile flags that makes a case fail (delta debugging, Zeller 2002): of all flags
 * that the bad set has and the good one has not, and of those that it lacks. Pure: `fails` builds and judges.
 *
 * A set of flags is words, as a shell has them: an item in quotes stays one. An item "FILE=FLAGS" is of that file alone. */
#ifndef DKV_BISECT_FLAGS_H
#define DKV_BISECT_FLAGS_H

#include <stdbool.h>

#include "bisect_try.h"

#define DKV_FLAGS_MAX 256

typedef struct dkv_flag_change {
    char *text; /* owned */
    bool added; /* else taken away */
} dkv_flag_change;

typedef struct dkv_flag_search {
    /* in: builds with these flags and says what came of it */
    int (*test)(const char *flags, void *arg, dkv_bisect_verdict *out, dkv_err *err);
    void *arg;
    /* out */
    dkv_flag_change *changes; /* all, owned */
    int n;
    bool needed[DKV_FLAGS_MAX]; /* those of the smallest set that was found: without any one of them it does not fail */
    int n_needed;
    long tests;
    char *flags; /* with these changes alone; owned */
} dkv_flag_search;

/* DKV_EUSER: nothing differs, too many. DKV_EHARNESS: the good set fails, the bad one does not. */
int dkv_searchFlags(const char *good, const char *bad, dkv_flag_search *s, dkv_err *err);
void dkv_freeFlagSearch(dkv_flag_search *s);

#endif
