/* The kernel table of emu and emu-replicated: options, refusals, declared arithmetic. */
#include "emu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emu_fault.h"

#define TILE_DEFAULT 64
#define LAZY_MAX     36 /* e^25; 15 where P is fp16: dkv_checkArithmetic */
#define LAZY_FP16    15
#define LN2          0.69314718055994531

static int parseTile(const char *word, const char *value, int *out, char *err, size_t n) {
    char *end;
    long x = value[0] >= '0' && value[0] <= '9' ? strtol(value, &end, 10) : -1;
    if (x < 1 || x > DKV_EMU_TILE_MAX || *end) {
        snprintf(err, n, "emu: %s: a tile is 1 to %d", word, DKV_EMU_TILE_MAX);
        return -1;
    }
    *out = (int)x;
    return 0;
}

static int parseChoice(const char *word, const char *value, const char *zero, const char *one, int *out,
                       char *err, size_t n) {
    if (strcmp(value, zero) && strcmp(value, one)) {
        snprintf(err, n, "emu: %s: the choices are %s and %s", word, zero, one);
        return -1;
    }
    *out = !strcmp(value, one);
    return 0;
}

static int parseLazy(const char *word, const char *value, int *out, char *err, size_t n) {
    char *end;
    long x = value[0] >= '0' && value[0] <= '9' ? strtol(value, &end, 10) : -1;
    if (x < 0 || x > LAZY_MAX || *end) {
        snprintf(err, n, "emu: %s: the maximum may wait for a factor of 2^N, N from 0 to %d", word, LAZY_MAX);
        return -1;
    }
    *out = (int)x;
    return 0;
}

static int parsePartials(const char *value, int *out, char *err, size_t n) {
    static const struct {
        const char *name;
        int of;
    } all[] = {{"exact", 0},
               {"low", DUALKV_PARTIAL_HEADS},
               {"segments", DUALKV_PARTIAL_HEADS | DUALKV_PARTIAL_SEGMENTS},
               {"rows", DUALKV_PARTIAL_SEGMENTS | DUALKV_PARTIAL_ROWS}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (strcmp(value, all[i].name)) continue;
        *out = all[i].of;
        return 0;
    }
    snprintf(err, n, "emu: partials=%s: the choices are exact, low, segments and rows", value);
    return -1;
}

static int parseOption(dkv_emu *e, const char *word, char *err, size_t n) {
    if (!strncmp(word, "bm=", 3)) return parseTile(word, word + 3, &e->bm, err, n);
    if (!strncmp(word, "bn=", 3)) return parseTile(word, word + 3, &e->bn, err, n);
    if (!strncmp(word, "acc=", 4)) return parseChoice(word, word + 4, "rn", "tc", &e->tc, err, n);
    if (!strncmp(word, "order=", 6)) return parseChoice(word, word + 6, "up", "down", &e->down, err, n);
    if (!strncmp(word, "sink=", 5)) return parseChoice(word, word + 5, "last", "first", &e->sink_first, err, n);
    if (!strncmp(word, "lazy=", 5)) return parseLazy(word, word + 5, &e->lazy, err, n);
    if (!strcmp(word, "undeclared")) {
        e->undeclared = 1;
        return 0;
    }
    if (!strcmp(word, "p=normalised")) {
        e->p_normalised = 1;
        return 0;
    }
    if (!strncmp(word, "p=", 2)) return parseChoice(word, word + 2, "rounded", "exact", &e->p_exact, err, n);
    if (!strncmp(word, "delta=", 6))
        return parseChoice(word, word + 6, "rounded", "exact", &e->delta_exact, err, n);
    if (!strncmp(word, "partials=", 9)) return parsePartials(word + 9, &e->partials, err, n);
    if (!strncmp(word, "ds=", 3)) return parseChoice(word, word + 3, "plain", "scaled", &e->ds_scaled, err, n);
    if (!strncmp(word, "scores=", 7))
        return parseChoice(word, word + 7, "exact", "low", &e->low_scores, err, n);
    if (!strncmp(word, "in=", 3)) return parseChoice(word, word + 3, "exact", "tf32", &e->tf32, err, n);
    if (!strncmp(word, "fault=", 6)) {
        e->fault = (int)dkv_findFault(word + 6);
        if (e->fault == F_NONE) snprintf(err, n, "emu: %s: no such fault (see: dualkv list faults)", word);
        return e->fault == F_NONE ? -1 : 0;
    }
    snprintf(err, n,
             "emu: unknown option '%s' (bm=N, bn=N, acc=rn|tc, order=up|down, p=rounded|normalised|exact, "
             "delta=rounded|exact, ds=plain|scaled, partials=exact|low|segments|rows, scores=exact|low, in=exact|tf32, lazy=N, "
             "sink=last|first, undeclared, fault=ID)",
             word);
    return -1;
}

static void emuClose(void *self) {
    free(((dkv_emu *)self)->first_ranges);
    free(self);
}

static void *emuOpen(const char *options, char *err, size_t n) {
    dkv_emu *e = calloc(1, sizeof *e);
    if (!e) {
        snprintf(err, n, "emu: out of memory");
        return NULL;
    }
    e->bm = e->bn = TILE_DEFAULT;
    for (const char *at = options ? options : ""; *at;) {
        size_t len = strcspn(at, ",");
        char word[64];
        snprintf(word, sizeof word, "%.*s", (int)(len < 63 ? len : 63), at);
        if (parseOption(e, word, err, n)) {
            emuClose(e);
            return NULL;
        }
        at += len + (at[len] == ',');
    }
    if (e->tc && (e->bm % 16 || e->bn % 16)) {
        snprintf(err, n, "emu: acc=tc: bm and bn must be multiples of 16");
        emuClose(e);
        return NULL;
    }
    return e;
}

static const char *emuRefuses(void *self, const dualkv_problem *p) {
    dkv_emu *e = self;
    const char *why = NULL;
    if (p->size < sizeof *p)
        why = "the problem is of an older ABI";
    else if (p->dtype != DUALKV_BF16 && p->dtype != DUALKV_FP16 && p->dtype != DUALKV_FP32)
        why = "unknown dtype";
    else if (p->dqk < 1 || p->dqk > 256 || p->dv < 1 || p->dv > 256)
        why = "head dims are 1 to 256";
    else if (p->hkv < 1 || p->hq < 1 || p->hq % p->hkv)
        why = "the KV heads must divide the query heads";
    else if (p->mask < DUALKV_CAUSAL || p->mask >= DUALKV_BIDIR)
        why = "inadmissible or unknown mask";
    else if (p->alibi && !p->alibi_slopes)
        why = "alibi without slopes";
    else if (e->tc && p->dtype == DUALKV_FP32)
        why = "acc=tc takes 16-bit operands";
    else if (e->tf32 && p->dtype != DUALKV_FP32)
        why = "in=tf32 takes fp32 operands";
    else if (e->p_exact && e->tc)
        why = "acc=tc takes P rounded to 16 bit";
    else if (e->lazy > LAZY_FP16 && p->dtype == DUALKV_FP16 && !e->p_exact)
        why = "lazy beyond 15 leaves fp16's range";
    if (!why) return NULL;
    snprintf(e->why, sizeof e->why, "emu: %s", why);
    return e->why;
}

/* acc=tc, relative to the largest magnitude in a step: 16 of the 17 terms are cut by less than 2^-25, the sum
 * by less than 2^-23 (20 * 2^-25); expected loss on sums of one sign 1.68 * 2^-24 (tolerance page). */
static void emuArithmetic(void *self, const dualkv_problem *p, dualkv_arithmetic *a) {
    const dkv_emu *e = self;
    int32_t sixteen = p->dtype == DUALKV_FP32 ? DUALKV_EXACT : p->dtype;
    int32_t low = e->tf32 ? DUALKV_TF32 : e->p_exact ? DUALKV_EXACT : sixteen;
    a->declared = !e->undeclared;
    if (e->undeclared) return;
    a->unit = 0x1p-24;
    a->acc_unit = e->tc ? 0x1.4p-21 : 0x1p-24;
    a->acc_truncates = e->tc;
    a->acc_step = e->tc ? 16 : 1;
    a->acc_gain = e->tc ? 1.68 * 0x1p-24 : 0.0;
    a->acc_fold = 0;
    a->in_format = e->tf32 ? DUALKV_TF32 : DUALKV_EXACT;
    a->s_format = e->low_scores ? sixteen : DUALKV_EXACT;
    a->partial_format = e->partials ? sixteen : DUALKV_EXACT;
    a->partial_of = e->partials;
    a->row_block = e->partials & DUALKV_PARTIAL_ROWS ? e->bm : 0;
    a->dq_block = e->partials & DUALKV_PARTIAL_ROWS ? e->bn : 0;
    a->p_format = a->ds_format = low;
    a->out_format = p->dtype;
    a->p_normalised = e->p_normalised;
    a->delta_exact = e->delta_exact;
    a->ds_scaled = e->ds_scaled;
    a->key_tile = e->bn;
    a->key_order = e->down;
    a->max_slack = e->lazy * LN2;
    a->sink_first = e->sink_first;
    a->exp_error = DKV_EMU_EXP_ERROR;
    a->log_error = DKV_EMU_LOG_ERROR;
    a->tanh_error = DKV_EMU_TANH_ERROR;
    a->flushes = e->fault == F_E5; /* the control stays a correct kernel */
}

static int emuDeterministic(void *self, const dualkv_problem *p) {
    (void)self;
    (void)p;
    return 1;
}

static size_t emuWorkspace(void *self, const dualkv_problem *p, int backward) {
    (void)self;
    return backward ? dkv_emuWorkspace(p) : 0;
}

static int checkLaunch(dkv_emu *e, const dualkv_launch *l, int backward, char *err, size_t n) {
    const char *why = l->size < sizeof *l ? "emu: the launch is of an older ABI" : emuRefuses(e, l->problem);
    size_t need = why ? 0 : emuWorkspace(e, l->problem, backward);
    if (why)
        snprintf(err, n, "%s", why);
    else if (l->workspace_size < need || (need && !l->workspace))
        snprintf(err, n, "emu: workspace of %zu bytes, %zu needed", l->workspace_size, need);
    else
        return 0;
    return -1;
}

/* Fault J1. */
static int keepRanges(dkv_emu *e, const dualkv_problem *p) {
    if (e->fault != F_J1 || e->first_ranges) return 1;
    e->first_ranges = malloc((size_t)(p->n_ranges + 1) * sizeof *p->ranges);
    if (!e->first_ranges) return 0;
    memcpy(e->first_ranges, p->ranges, (size_t)p->n_ranges * sizeof *p->ranges);
    e->n_first_ranges = p->n_ranges;
    return 1;
}

static int emuForward(void *self, const dualkv_launch *l, char *err, size_t n) {
    dkv_emu *e = self;
    if (checkLaunch(e, l, 0, err, n)) return -1;
    e->launches++;
    if (e->fault == F_I7 && (int64_t)l->problem->n_segments * l->problem->hq > 127) return 0;
    if (!dkv_emuForward(e, l) && keepRanges(e, l->problem)) return 0;
    snprintf(err, n, "emu: out of memory");
    return -1;
}

static int emuBackward(void *self, const dualkv_launch *l, char *err, size_t n) {
    dkv_emu *e = self;
    if (checkLaunch(e, l, 1, err, n)) return -1;
    e->launches++;
    if (!dkv_emuBackward(e, l)) return 0;
    snprintf(err, n, "emu: out of memory");
    return -1;
}

static uint64_t emuLaunches(void *self) { return ((dkv_emu *)self)->launches; }

#define EMU_COMMON                                                                                           \
    .size = sizeof(dualkv_kernel), .abi = DUALKV_ABI, .memory = DUALKV_HOST, .alignment = 2,                 \
    .open = emuOpen, .close = emuClose, .refuses = emuRefuses, .arithmetic = emuArithmetic,                  \
    .deterministic = emuDeterministic, .workspace = emuWorkspace, .forward = emuForward,                     \
    .backward = emuBackward, .launches = emuLaunches

const dualkv_kernel dkv_emuKernel = {EMU_COMMON, .name = "emu",
                                     .doc = "CPU emulation of the fused shared-prompt kernel, tile by tile"};
const dualkv_kernel dkv_emuReplicatedKernel = {
    EMU_COMMON, .name = "emu-replicated",
    .doc = "the same arithmetic on replicated sequences: the same-precision peer", .replicated = 1};
