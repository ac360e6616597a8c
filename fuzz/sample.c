#include "sample.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/rng.h"
#include "../ref/layout.h"
#include "../ref/mask.h"

/* Factors of the covering array. */
enum { MASK, MODIFIER, DTYPE, DIM, RATIO, EDGE, FILL, LAYOUT, RUN, N_FACTORS };
enum { FREE_MODIFIER, SCALE, SOFTCAP, ALIBI, SINK, DLSE, NO_GRADIENT, N_MODIFIERS };

#define RECORDED_EVERY 16 /* cases */
#define TIGHT 64          /* attempts after which only what is asked for is drawn */

static const struct {
    const char *name;
    double work_cap;
    int64_t longest; /* segment */
} profiles[DKV_N_PROFILES] = {{"quick", 1e6, 300}, {"deep", 5e7, 2100}, {"gpu", 2e7, 1100}};


/* Words of each class of head dim, the smaller ones first. */
static const char *const dims[][6] = {{"1", "2", "3", "8", NULL},
                                      {"9", "17", "25", "33", "47", NULL},
                                      {"16", "32", "48", NULL},
                                      {"40", "72", "96", "136", NULL},
                                      {"64", NULL},
                                      {"128", NULL},
                                      {"256", "200", NULL},
                                      {"8:24", "64:40", "24:40", "40:64", "128:64", NULL},
                                      {"192:128", "136:72", "72:136", NULL}};
enum { N_DIMS = sizeof dims / sizeof *dims };
static const uint8_t ratios[] = {1, 2, 3, 4, 7, 8};
enum { N_RATIOS = sizeof ratios };
static const char *const layouts[] = {"contiguous", "fused", "padded", "strided"};
static const char *const runs[] = {"single", "twice", "aba", "side", "graph", "busy"};
enum { N_LAYOUTS = 4, N_HOST_RUNS = 3, N_RUNS = 6 };

/* Tokens of what data/recorded holds: the prompt, then its responses. */
static const char *const recordings[] = {"gemma3-270m-l1", "gemma3-270m-l5"};
static const int64_t recorded_tokens[] = {415, 150, 57, 24, 7, 1};

/* The draws of one attempt at one case, and the line that they make. */
typedef struct draws {
    const dkv_sampler *s;
    uint64_t n;
    uint32_t attempt, used;
    int64_t longest; /* of a segment */
    uint8_t level[N_FACTORS];
    bool recorded, forced; /* the class of shape is not there yet */
    int ordinal;           /* of the next response of this prompt */
    char line[DKV_LINE_MAX];
    size_t len;
} draws;

static uint32_t below(draws *d, uint32_t limit) {
    return dkv_draw32(d->s->seed, DKV_STREAM_SAMPLE, d->attempt, d->n * 4096 + d->used++) % limit;
}

static bool oneIn(draws *d, uint32_t n) { return below(d, n) == 0; }

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

/* ---- lengths ---- */

/* One of an ascending list, not above the longest. */
static int64_t pickLength(draws *d, const int16_t *list, int n) {
    while (n > 1 && list[n - 1] > d->longest) n--;
    return list[below(d, (uint32_t)n)];
}

static int64_t tileLength(draws *d) {
    static const int16_t small[] = {15, 16, 17, 31, 32, 33, 47, 48, 49};
    static const int16_t large[] = {63,  64,  65,  127, 128, 129, 191,  192, 193,
                                    255, 256, 257, 511, 512, 513, 1023, 1025};
    return d->longest < 65 || oneIn(d, 4) ? pickLength(d, small, 9) : pickLength(d, large, 17);
}

static int64_t primeLength(draws *d) {
    static const int16_t list[] = {2,  3,  5,  7,  11, 13, 17,  19,  23,  29,  31, 37,
                                   41, 53, 61, 67, 79, 97, 101, 113, 211, 307, 761};
    return pickLength(d, list, sizeof list / sizeof *list);
}

static int64_t anyLength(draws *d) {
    switch (below(d, 10)) {
    case 0: return 0;
    case 1: return 1;
    case 2:
    case 3:
    case 4: return tileLength(d);
    case 5:
    case 6: return primeLength(d);
    case 7: return below(d, 12);
    default: return below(d, (uint32_t)d->longest + 1);
    }
}

/* Of a prompt, or of a response: as the class of shape wants it once, half of the others likewise. */
static int64_t drawLength(draws *d, bool prompt) {
    const bool wanted = d->forced || oneIn(d, 2);
    switch (d->level[EDGE]) {
    case DKV_EDGE_EMPTY:
        if (!wanted || (prompt && oneIn(d, 2))) return anyLength(d);
        d->forced = false;
        return 0;
    case DKV_EDGE_ONE:
        if (!wanted || (prompt && oneIn(d, 2))) return anyLength(d);
        d->forced = false;
        return 1;
    case DKV_EDGE_TILE:
        if (!wanted) return primeLength(d) % 24;
        d->forced = false;
        return tileLength(d);
    case DKV_EDGE_PRIMES: return primeLength(d);
    case DKV_EDGE_MANY: return prompt ? anyLength(d) % 71 : below(d, 6);
    case DKV_EDGE_LONG:
        return prompt ? d->longest / 2 + below(d, (uint32_t)(d->longest - d->longest / 2) + 1) : below(d, 20);
    default: return anyLength(d);
    }
}

/* ---- shapes ---- */

static const dkv_mask_row *rowOf(const draws *d, bool *with) {
    dualkv_mask_kind mask = DUALKV_CAUSAL;
    (void)dkv_listVariant(d->level[MASK], &mask, with);
    return dkv_maskRow(mask);
}

static int64_t clampRecorded(const draws *d, int64_t x, int which) {
    return d->recorded && x > recorded_tokens[which] ? recorded_tokens[which] : x;
}

/* A context limit below `there`, or `there`: none. */
static int64_t drawLimit(draws *d, int64_t there, int depth) {
    bool wanted = d->level[EDGE] == DKV_EDGE_LIMIT && depth == 1 && d->forced && there > 0;
    if (wanted) d->forced = false;
    if (there == 0 || (!wanted && !oneIn(d, 8))) return there;
    switch (below(d, 4)) {
    case 0: return 0;
    case 1: return there - 1;
    default: return below(d, (uint32_t)there);
    }
}

static uint32_t countChildren(draws *d, int depth) {
    static const uint8_t many[] = {9, 10, 13, 17, 33, 40, 65, 130};
    if (depth > 1) return 1 + below(d, 2);
    if (d->level[EDGE] != DKV_EDGE_MANY) return 1 + below(d, 4);
    return d->recorded ? 9 + below(d, 4) : PICK(d, many);
}

/* Children of a segment after which a child sees `there` tokens. */
static void putChildren(draws *d, int64_t there, int depth) {
    uint32_t n = countChildren(d, depth);
    const bool many = depth == 1 && d->level[EDGE] == DKV_EDGE_MANY && !d->recorded;
    for (uint32_t i = 0, copies = 1; i < n; i += copies) {
        put(d, i ? "," : "+");
        copies = many ? 1 + below(d, n - i) : !d->recorded && oneIn(d, 5) ? 2 + below(d, 3) : 1;
        if (copies > 1) put(d, "%" PRIu32 "x", copies);
        int64_t limit = drawLimit(d, there, depth), len = drawLength(d, false);
        bool branch = d->level[EDGE] == DKV_EDGE_TREE ? d->forced || oneIn(d, 3) : oneIn(d, 8);
        len = clampRecorded(d, len, 1 + d->ordinal++ % 5);
        if (branch && depth < 4 && !many && !d->recorded) {
            d->forced &= d->level[EDGE] != DKV_EDGE_TREE;
            put(d, "(%" PRId64, len);
            putChildren(d, limit + len, depth + 1);
            put(d, ")");
        } else
            put(d, "%" PRId64, len);
        if (limit < there) put(d, "@%" PRId64, limit);
    }
}

static void putShape(draws *d) {
    const int edge = d->level[EDGE];
    const char *fill = NULL, *help;
    fill = dkv_listFill(d->level[FILL], &help);
    const bool planted = !d->recorded && (!strcmp(fill, "nanresp") || !strcmp(fill, "infresp"));
    bool second = edge == DKV_EDGE_GROUPS || (planted && edge == DKV_EDGE_PLAIN);
    second = second || (d->attempt < TIGHT && oneIn(d, 6));
    uint32_t groups = !second ? 1 : edge == DKV_EDGE_GROUPS ? 2 + below(d, 2) : 2;
    /* Where rows see their whole segment a limit may not cut through tokens that have queries. */
    bool with;
    const bool cut = edge == DKV_EDGE_LIMIT && rowOf(d, &with)->whole != DKV_WHOLE_NEVER;
    put(d, "shape=");
    for (uint32_t g = 0; g < groups; g++) {
        int64_t len = clampRecorded(d, drawLength(d, true), 0);
        d->ordinal = 0;
        put(d, g ? "/%" PRId64 : "%" PRId64, len);
        if (edge == DKV_EDGE_CONTEXT || cut || (edge != DKV_EDGE_PLAIN && oneIn(d, 12))) put(d, "k");
        if (edge == DKV_EDGE_PLAIN ? g > 0 && oneIn(d, 2) : g == 0 || !oneIn(d, 8)) putChildren(d, len, 1);
    }
}

/* ---- the rest of the line ---- */

/* One of the words of a list. */
static void drawWord(draws *d, const char *list, char *out, size_t n) {
    uint32_t words = 1;
    for (const char *c = list; *c; c++) words += *c == ' ';
    for (uint32_t k = below(d, words); k; k--) list += strcspn(list, " ") + 1;
    snprintf(out, n, "%.*s", (int)strcspn(list, " "), list);
}

/* Parameters are drawn from the last to the first, and one length whatever the mask. */
static void putMask(draws *d) {
    char words[DKV_MASK_PARAMETERS][24];
    bool with;
    const dkv_mask_row *row = rowOf(d, &with);
    const dkv_mask_parameter *q = row->parameter;
    const int64_t size = 1 + anyLength(d);
    int n = 0;
    if (row == dkv_maskRow(DUALKV_CAUSAL)) return;
    while (q[n].kind && (with || !q[n].variant)) n++;
    for (int i = n - 1; i >= 0; i--)
        if (q[i].draws) drawWord(d, q[i].draws, words[i], sizeof words[i]);
        else if (q[i].kind == DKV_PARAMETER_COUNT) snprintf(words[i], sizeof words[i], "%" PRId64, i ? 1 + anyLength(d) : size);
        else snprintf(words[i], sizeof words[i], "%" PRIu32, below(d, 100));
    put(d, " mask=%s", row->name);
    for (int i = 0; i < n; i++) put(d, ":%s", words[i]);
}

static void putHeads(draws *d) {
    static const char *const dtypes[] = {"bf16", "fp16", "fp32"};
    const char *const *words = dims[d->level[DIM]];
    uint32_t n = 0, ratio = ratios[d->level[RATIO]],
             hkv = d->attempt < TIGHT && oneIn(d, 3) ? 2 + below(d, 2) : 1;
    while (words[n]) n++;
    if (d->recorded)
        put(d, " heads=%s dim=256", oneIn(d, 3) ? "8:2" : "4:1");
    else
        put(d, " heads=%" PRIu32 ":%" PRIu32 " dim=%s", ratio * hkv, hkv, words[below(d, n)]);
    put(d, " dtype=%s", dtypes[d->level[DTYPE]]);
}

/* The modifier of the covering array, and others beside it. */
static void putModifiers(draws *d, const char *fill) {
    static const char *const scales[] = {"0.01", "0.05", "0.12", "0.3", "0.7"}, *const caps[] = {"0.5", "5",
                                                                                                 "20", "50"};
    static const char *const sinks[] = {"-20", "-1", "0", "1.5", "10"};
    const int m = d->level[MODIFIER];
    if (!strcmp(fill, "rawdot"))
        put(d, " scale=0.0001");
    else if (m == SCALE || oneIn(d, 8))
        put(d, " scale=%s", PICK(d, scales));
    if (m == SOFTCAP || oneIn(d, 8)) put(d, " softcap=%s", PICK(d, caps));
    if (m == ALIBI || oneIn(d, 8)) put(d, " alibi=on");
    if (m == SINK || oneIn(d, 8)) put(d, " sinklogit=%s", PICK(d, sinks));
    if (m == NO_GRADIENT)
        put(d, " grad=off");
    else if (m == DLSE || oneIn(d, 6))
        put(d, " dlse=on");
}

static void putRest(draws *d) {
    const char *help, *fill = d->recorded ? "" : dkv_listFill(d->level[FILL], &help);
    putHeads(d);
    putModifiers(d, fill);
    if (d->recorded)
        put(d, " fill=recorded:%s", PICK(d, recordings));
    else
        put(d, " fill=%s", fill);
    put(d, " seed=%" PRIu32 " layout=%s run=%s", below(d, 1000), layouts[d->level[LAYOUT]],
        runs[d->level[RUN]]);
}

static bool hasUnequal(const dkv_problem *p) {
    for (int32_t i = 1; i < p->n_nodes; i++)
        for (int32_t j = 1; j < i; j++)
            if (p->nodes[i].parent == p->nodes[j].parent && p->nodes[i].len != p->nodes[j].len) return true;
    return false;
}

bool dkv_hasEdge(const dkv_problem *p, dkv_edge edge) {
    bool found = edge == DKV_EDGE_GROUPS ? p->n_groups > 1 : edge == DKV_EDGE_PRIMES && hasUnequal(p);
    for (int32_t i = 0; i < p->n_nodes && !found; i++) {
        const dkv_node *n = &p->nodes[i], *up = n->parent < 0 ? NULL : &p->nodes[n->parent];
        int32_t children = 0;
        for (int32_t j = i + 1; j < p->n_nodes && p->nodes[j].depth > n->depth; j++)
            children += p->nodes[j].parent == i;
        switch (edge) {
        case DKV_EDGE_EMPTY: found = n->len == 0; break;
        case DKV_EDGE_ONE: found = n->len == 1; break;
        case DKV_EDGE_TILE: found = n->len > 14 && (n->len + 1) % 16 < 3; break;
        case DKV_EDGE_MANY: found = children > 8; break;
        case DKV_EDGE_TREE: found = n->depth > 1; break;
        case DKV_EDGE_CONTEXT: found = n->key_only; break;
        case DKV_EDGE_LIMIT: found = up && n->context < up->context + up->len; break;
        case DKV_EDGE_LONG:
            found = !up && n->len >= 24 && children > 0 && p->nodes[i + 1].len < n->len / 2;
            break;
        case DKV_EDGE_PLAIN: found = !up && children == 0; break;
        default: break;
        }
    }
    return found;
}

static bool accepted(const draws *d, const dkv_problem *p) {
    int32_t dim = p->dqk > p->dv ? p->dqk : p->dv;
    bool planted = !strcmp(p->fill, "nanresp") || !strcmp(p->fill, "infresp");
    /* Tokens count as well: a sparse mask has few pairs, and its tensors are as large as any. */
    double work = ((double)dkv_countPairs(p) + 8.0 * (double)dkv_countKeys(p)) * p->hq * dim;
    if (work > d->s->work_cap || (planted && dkv_victimNode(p) < 0) || dkv_maskAdmissible(p, NULL))
        return false;
    if (d->recorded && d->level[EDGE] == DKV_EDGE_TREE) return true;
    return d->attempt > 800 || dkv_hasEdge(p, (dkv_edge)d->level[EDGE]);
}

/* ---- cases ---- */

const char *dkv_profileName(int i) { return i >= 0 && i < DKV_N_PROFILES ? profiles[i].name : NULL; }

static void countLevels(const dkv_sampler *s, int levels[N_FACTORS]) {
    dualkv_mask_kind mask;
    bool with;
    for (levels[MASK] = 0; dkv_listVariant(levels[MASK], &mask, &with); levels[MASK]++) continue;
    levels[MODIFIER] = N_MODIFIERS;
    levels[DTYPE] = s->profile == DKV_GPU ? 2 : 3;
    levels[DIM] = N_DIMS;
    levels[RATIO] = N_RATIOS;
    levels[EDGE] = DKV_N_EDGES;
    levels[FILL] = s->n_fills;
    levels[LAYOUT] = N_LAYOUTS;
    levels[RUN] = s->profile == DKV_GPU ? N_RUNS : N_HOST_RUNS;
}

int dkv_openSampler(dkv_profile profile, uint64_t seed, dkv_sampler *s, dkv_err *err) {
    const char *help, *name;
    int levels[N_FACTORS];
    *s = (dkv_sampler){.seed = seed, .profile = profile, .work_cap = profiles[profile].work_cap};
    while ((name = dkv_listFill(s->n_fills, &help)) && !strchr(name, ':')) s->n_fills++;
    countLevels(s, levels);
    return dkv_makeCover(seed, N_FACTORS, levels, &s->cover, err);
}

void dkv_closeSampler(dkv_sampler *s) { dkv_freeCover(&s->cover); }

static bool isRecorded(uint64_t n) { return n % RECORDED_EVERY == RECORDED_EVERY - 5; }

/* Cases before n that are not recorded. */
static uint64_t countDrawn(uint64_t n) { return n - (n + 4) / RECORDED_EVERY; }

uint64_t dkv_coveringCases(const dkv_sampler *s) {
    uint64_t n = (uint64_t)s->cover.n_rows;
    while (countDrawn(n) < (uint64_t)s->cover.n_rows) n++;
    return n;
}

static void drawLevels(draws *d) {
    int levels[N_FACTORS];
    uint64_t at = countDrawn(d->n);
    countLevels(d->s, levels);
    if (!d->recorded && at < (uint64_t)d->s->cover.n_rows) {
        memcpy(d->level, d->s->cover.rows[at], sizeof d->level);
        return;
    }
    for (int f = 0; f < N_FACTORS; f++) d->level[f] = (uint8_t)below(d, (uint32_t)levels[f]);
    if (oneIn(d, 2)) d->level[RUN] = 0; /* sequences of calls take three times as long */
}

int dkv_sampleCase(const dkv_sampler *s, uint64_t n, dkv_problem *p, dkv_err *err) {
    draws d = {.s = s, .n = n, .longest = profiles[s->profile].longest, .recorded = isRecorded(n)};
    dkv_err why = {0};
    drawLevels(&d);
    const int64_t least = d.level[EDGE] == DKV_EDGE_LONG ? 30 : d.level[EDGE] == DKV_EDGE_TILE ? 17 : 8;
    for (d.attempt = 1; d.attempt < 1000; d.attempt++) {
        d.len = d.used = 0;
        d.forced = true;
        putShape(&d);
        putMask(&d);
        putRest(&d);
        if (!dkv_parseProblem(d.line, dkv_knownFill, p, &why)) {
            if (accepted(&d, p)) {
                if (s->forward) p->grad = p->dlse = false;
                return 0;
            }
            dkv_freeProblem(p);
        }
        if (d.attempt % 8 == 0 && d.longest > least) d.longest = d.longest * 7 / 8;
    }
    *p = (dkv_problem){0};
    return dkv_fail(err, DKV_EHARNESS, "no problem %" PRIu64 " of seed %" PRIu64 " within work %g: %.200s", n,
                    s->seed, s->work_cap, why.text);
}
