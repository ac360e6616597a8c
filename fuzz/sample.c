#include "sample.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/rng.h"
#include "../ref/layout.h"
#include "../ref/mask.h"

/* A stream of draws for one attempt at one problem, and the line that they make. */
typedef struct draws {
    uint64_t seed, n;
    uint32_t attempt, used;
    int64_t longest; /* of a segment */
    char line[DKV_LINE_MAX];
    size_t len;
} draws;

static uint32_t below(draws *d, uint32_t limit) {
    return dkv_draw32(d->seed, DKV_STREAM_SAMPLE, d->attempt, d->n * 4096 + d->used++) % limit;
}

static bool one_in(draws *d, uint32_t n) { return below(d, n) == 0; }

static void put(draws *d, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void put(draws *d, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    size_t room = sizeof d->line - d->len;
    int n = vsnprintf(d->line + d->len, room, fmt, ap);
    va_end(ap);
    d->len += n < 0 ? 0 : (size_t)n < room ? (size_t)n : room - 1;
}

#define PICK(d, list) (list)[below(d, sizeof(list) / sizeof *(list))]

static int64_t length(draws *d) {
    static const int16_t edges[] = {15,  16,  17,  31,  32,  33,  63,  64,  65,
                                    127, 128, 129, 191, 192, 193, 255, 256, 257};
    static const int16_t primes[] = {2,  3,  5,  7,  11, 13, 17,  19,  23, 29,
                                     31, 37, 41, 53, 61, 97, 101, 113, 211};
    int64_t x;
    switch (below(d, 10)) {
    case 0:
        return 0;
    case 1:
        return 1;
    case 2:
    case 3:
    case 4:
        x = PICK(d, edges);
        break;
    case 5:
    case 6:
    case 7:
        x = PICK(d, primes);
        break;
    default:
        x = below(d, 300);
    }
    return x <= d->longest ? x : below(d, (uint32_t)d->longest + 1);
}

/* Children of a segment after which a child sees `there` tokens. */
static void put_children(draws *d, int64_t there, int depth) {
    uint32_t n = 1 + below(d, depth > 1 ? 2 : 4);
    for (uint32_t i = 0; i < n; i++) {
        put(d, i ? "," : "+");
        if (one_in(d, 4)) put(d, "%" PRIu32 "x", 2 + below(d, depth > 1 ? 2 : 7));
        int64_t limit = one_in(d, 6) ? one_in(d, 3) ? there - !!there : below(d, (uint32_t)there + 1) : there;
        int64_t len = length(d);
        if (depth < 4 && one_in(d, 5)) {
            put(d, "(%" PRId64, len);
            put_children(d, limit + len, depth + 1);
            put(d, ")");
        } else
            put(d, "%" PRId64, len);
        if (limit < there) put(d, "@%" PRId64, limit);
    }
}

static void put_shape(draws *d) {
    uint32_t groups = one_in(d, 4) ? 2 + below(d, 2) : 1;
    put(d, "shape=");
    for (uint32_t g = 0; g < groups; g++) {
        int64_t len = length(d);
        put(d, g ? "/%" PRId64 : "%" PRId64, len);
        if (one_in(d, 8)) put(d, "k");
        if (!one_in(d, 10)) put_children(d, len, 1);
    }
}

static void put_mask(draws *d) {
    static const char *const plain[] = {"causal", "full", "prefix"};
    static const char *const densities[] = {"0", "0.05", "0.3", "0.7", "1"};
    int64_t size = 1 + length(d);
    switch (below(d, 7)) {
    case 0:
        put(d, " mask=window:%" PRId64, size);
        break;
    case 1:
        put(d, " mask=window:%" PRId64 ":%" PRId64, size, length(d));
        break;
    case 2:
        put(d, " mask=chunk:%" PRId64, size);
        break;
    case 3:
        put(d, " mask=block:%" PRId64 ":%s:%" PRIu32, size, PICK(d, densities), below(d, 100));
        break;
    default:
        put(d, " mask=%s", PICK(d, plain));
    }
}

static void put_rest(draws *d) {
    static const char *const dims[] = {"1",  "2",  "3",   "8",   "16",  "17",      "32",    "40",  "64",
                                       "72", "96", "128", "136", "256", "192:128", "64:40", "8:24"};
    static const char *const scales[] = {"0.01", "0.05", "0.125", "0.3"}, *const caps[] = {"0.5", "5", "20",
                                                                                           "50"};
    static const char *const sinks[] = {"-20", "-1", "0", "1.5", "10"}, *const dtypes[] = {"bf16", "fp16",
                                                                                           "fp32"};
    static const char *const layouts[] = {"fused", "padded", "strided"}, *const runs[] = {"twice", "aba"};
    static const uint8_t ratios[] = {1, 1, 2, 3, 4, 7, 8};
    const char *help, *fill = "normal";
    int fills = 0;
    uint32_t ratio = PICK(d, ratios), hkv = 1 + below(d, 3);
    put(d, " heads=%" PRIu32 ":%" PRIu32 " dim=%s dtype=%s", ratio * hkv, hkv, PICK(d, dims),
        PICK(d, dtypes));
    while (dkv_listFill(fills, &help)) fills++;
    if (!one_in(d, 4)) fill = dkv_listFill((int)below(d, (uint32_t)fills), &help);
    if (strchr(fill, ':')) fill = "normal";
    if (!strcmp(fill, "rawdot"))
        put(d, " scale=0.0001");
    else if (one_in(d, 5))
        put(d, " scale=%s", PICK(d, scales));
    if (one_in(d, 5)) put(d, " softcap=%s", PICK(d, caps));
    if (one_in(d, 5)) put(d, " alibi=on");
    if (one_in(d, 5)) put(d, " sinklogit=%s", PICK(d, sinks));
    put(d, " fill=%s seed=%" PRIu32, fill, below(d, 1000));
    if (one_in(d, 12))
        put(d, " grad=off");
    else if (one_in(d, 5))
        put(d, " dlse=on");
    if (one_in(d, 3)) put(d, " layout=%s", PICK(d, layouts));
    if (one_in(d, 5)) put(d, " run=%s", PICK(d, runs));
}

static bool accepted(const dkv_problem *p, double work_cap) {
    int32_t dim = p->dqk > p->dv ? p->dqk : p->dv;
    bool planted = !strcmp(p->fill, "nanresp") || !strcmp(p->fill, "infresp");
    /* Tokens count as well: a sparse mask has few pairs, and its tensors are as large as any. */
    double work = (double)dkv_countPairs(p) + 8.0 * (double)dkv_countKeys(p);
    return work * p->hq * dim <= work_cap && !(planted && dkv_victimNode(p) < 0) &&
           !dkv_maskAdmissible(p, NULL);
}

int dkv_sampleProblem(uint64_t seed, uint64_t n, double work_cap, dkv_problem *p, dkv_err *err) {
    draws d = {.seed = seed, .n = n, .longest = 300};
    for (d.attempt = 0; d.attempt < 1000; d.attempt++) {
        d.len = d.used = 0;
        put_shape(&d);
        put_mask(&d);
        put_rest(&d);
        if (!dkv_parseProblem(d.line, dkv_knownFill, p, err)) {
            if (accepted(p, work_cap)) return 0;
            dkv_freeProblem(p);
        }
        d.longest = d.longest > 4 ? d.longest * 7 / 8 : 4;
    }
    *p = (dkv_problem){0};
    return dkv_fail(err, DKV_EHARNESS, "no problem %" PRIu64 " of seed %" PRIu64 " within work %g", n, seed,
                    work_cap);
}
