/* options.h: words of the fuzzing commands' options; each returns 0 or DKV_EUSER. NULL: the default. */
#ifndef DKV_OPTIONS_H
#define DKV_OPTIONS_H

#include "sample.h"

int dkv_parseSeed(const char *word, uint64_t *out, dkv_err *err);   /* 0 .. 2^64 - 1; default 1 */
int dkv_parseTime(const char *word, double *seconds, dkv_err *err); /* 90, 60s, 5m, 2h; default 0: none */
int dkv_parseShard(const char *word, uint64_t *shard, uint64_t *shards,
                   dkv_err *err);                                       /* "2/4": 1, 4; default 0, 1 */
int dkv_parseProfile(const char *word, dkv_profile *out, dkv_err *err); /* default quick */

#endif
