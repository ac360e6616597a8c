#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../verify/status.h"

/* Digits up to `end`; false if there are none or too many. */
static bool parseWhole(const char *word, char **end, uint64_t *out) {
    errno = 0;
    *end = (char *)word;
    if (!isdigit((unsigned char)word[0])) return false;
    *out = strtoull(word, end, 10);
    return errno == 0;
}

int dkv_parseSeed(const char *word, uint64_t *out, dkv_err *err) {
    char *end;
    *out = 1;
    if (!word || (parseWhole(word, &end, out) && !*end)) return 0;
    return dkv_fail(err, DKV_EUSER, "--seed: '%.80s' is not a whole number below 2^64", word);
}

int dkv_parseTime(const char *word, double *seconds, dkv_err *err) {
    char *end;
    *seconds = 0;
    if (!word) return 0;
    double x = isdigit((unsigned char)word[0]) || word[0] == '.' ? strtod(word, &end) : NAN;
    double unit = 0;
    if (!isnan(x))
        unit = !strcmp(end, "m") ? 60 : !strcmp(end, "h") ? 3600 : !*end || !strcmp(end, "s") ? 1 : 0;
    *seconds = x * unit;
    if (*seconds > 0 && *seconds < 1e9) return 0;
    return dkv_fail(err, DKV_EUSER, "--time: '%.80s' is not a time (90, 60s, 5m, 2h)", word);
}

int dkv_parseShard(const char *word, uint64_t *shard, uint64_t *shards, dkv_err *err) {
    char *end;
    uint64_t i = 1, n = 1;
    if (word && !(parseWhole(word, &end, &i) && *end == '/' && parseWhole(end + 1, &end, &n) && !*end &&
                  i >= 1 && i <= n))
        return dkv_fail(err, DKV_EUSER, "--shard: '%.80s' is not I/N with I from 1 to N", word);
    *shard = i - 1;
    *shards = n;
    return 0;
}

int dkv_parseProfile(const char *word, dkv_profile *out, dkv_err *err) {
    const char *names[DKV_N_PROFILES];
    *out = DKV_QUICK;
    for (int i = 0; i < DKV_N_PROFILES; i++) {
        names[i] = dkv_profileName(i);
        if (word && strcmp(word, names[i])) continue;
        *out = (dkv_profile)i;
        return 0;
    }
    const char *near = dkv_nearestWord(word, names, DKV_N_PROFILES);
    return dkv_fail(err, DKV_EUSER, "--profile: '%.80s' is not quick, deep or gpu%s%s%s", word,
                    near ? ": did you mean '" : "", near ? near : "", near ? "'?" : "");
}
