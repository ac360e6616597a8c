/* arith.c: the arithmetic that a kernel declares: range checks, chains, named profiles, words. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "dtype.h"
#include "oracle.h"
#include "partials.h"

#define ROUNDOFF_MAX 0x1p-7 /* a format or a step coarser than bf16 is no arithmetic for attention */
#define FUNCTION_MAX 0x1p-10 /* of exp, log, tanh: tanh.approx errs by 2^-11; a looser promise would buy a pass */

static int inRange(double x, double lo, double hi) { return x >= lo && x <= hi; }

/* P reaches e^max_slack, its sums and their squares in the twin's floats many times that. */
static double mostSlack(const dualkv_arithmetic *a) {
    const int32_t p = a->p_format >= 0 ? a->p_format : a->in_format;
    return p == DUALKV_FP16 ? 11 : 25;
}

int dkv_checkArithmetic(const dualkv_arithmetic *a, dkv_err *err) {
    const struct {
        const char *name;
        double value, lo, hi;
    } field[] = {
        {"unit", a->unit, 0x1p-60, ROUNDOFF_MAX},
        {"acc_unit", a->acc_unit, 0x1p-60, ROUNDOFF_MAX},
        {"acc_truncates", a->acc_truncates, 0, 1},
        {"acc_step", a->acc_step, 1, 1024},
        {"acc_gain", a->acc_gain, 0, a->acc_unit},
        {"acc_fold", (double)a->acc_fold, 0, 0x1p62},
        {"acc_fold_dq", (double)a->acc_fold_dq, 0, 0x1p62},
        {"acc_fold_dkv", (double)a->acc_fold_dkv, 0, 0x1p62},
        {"in_format", a->in_format, DUALKV_EXACT, DUALKV_TF32},
        {"s_format", a->s_format, DUALKV_EXACT, DUALKV_TF32},
        {"p_format", a->p_format, DUALKV_EXACT, DUALKV_TF32},
        {"ds_format", a->ds_format, DUALKV_EXACT, DUALKV_TF32},
        {"out_format", a->out_format, DUALKV_EXACT, DUALKV_FP32},
        {"partial_format", a->partial_format, DUALKV_EXACT, DUALKV_TF32},
        {"p_normalised", a->p_normalised, 0, 1},
        {"delta_exact", a->delta_exact, 0, 1},
        {"key_tile", a->key_tile, 0, 0x1p30},
        {"key_order", a->key_order, 0, 1},
        {"exp_error", a->exp_error, 0, FUNCTION_MAX},
        {"log_error", a->log_error, 0, FUNCTION_MAX},
        {"tanh_error", a->tanh_error, 0, FUNCTION_MAX},
        {"flushes", a->flushes, 0, 1},
        {"partial_of", a->partial_of, 0, 15},
        {"ds_scaled", a->ds_scaled, 0, 1},
        {"row_block", (double)a->row_block, 0, 0x1p62},
        {"row_block2", (double)a->row_block2, a->row_from2 > 0, 0x1p62},
        {"row_from2", (double)a->row_from2, 0, 0x1p62},
        {"row_block3", (double)a->row_block3, a->row_from3 > 0, 0x1p62},
        {"row_from3", (double)a->row_from3, a->row_from3 ? (double)a->row_from2 : 0, 0x1p62},
        {"dq_block", (double)a->dq_block, 0, 0x1p62},
        {"max_slack", a->max_slack, 0, mostSlack(a)},
        {"sink_first", a->sink_first, 0, 1},
    };
    for (size_t i = 0; i < sizeof field / sizeof *field; i++)
        if (!inRange(field[i].value, field[i].lo, field[i].hi))
            return dkv_fail(err, DKV_EUSER, "declared arithmetic: %s=%g is outside %g to %g", field[i].name,
                            field[i].value, field[i].lo, field[i].hi);
    return DKV_OK;
}

double dkv_stepsError(const dualkv_arithmetic *a, double steps, double pieces, int64_t fold) {
    double inner = steps, folds = 0;
    if (fold > 0 && steps > (double)fold) {
        inner = (double)fold;
        folds = fmin(steps, ceil(steps / (double)fold) + pieces);
    }
    return expm1(inner * a->acc_unit + folds * a->unit);
}

double dkv_chainError(const dualkv_arithmetic *a, double n_products) {
    return dkv_stepsError(a, ceil(n_products / a->acc_step), 0, a->acc_fold);
}

typedef enum profile {
    FP32, FAST, TF32, FLASH, NORMALISED, DELTA, SCALED, PARTIALS, DELTA_PARTIALS, SCALED_PARTIALS, COPIES, DELTA_COPIES, RUNNING,
    EAGER, N_PROFILES
} profile;

static const struct {
    const char *name, *words;
} profile_table[N_PROFILES] = {
    {"fp32", "P and dS kept in fp32"},
    {"fast", "fp32 with exp to 20 units in the last place, as PyTorch's on a CPU"},
    {"tf32", "operands, P and dS rounded to TF32"},
    {"flash", "16-bit P and dS, the rest fp32"},
    {"normalised", "flash with P divided by its sum before it is rounded"},
    {"delta", "flash with delta from O before its rounding"},
    {"scaled", "flash with dS multiplied by the scale before it is rounded"},
    {"partials", "flash with 16-bit partial dK and dV of each query head"},
    {"delta-partials", "delta and partials"},
    {"scaled-partials", "scaled and partials, as cuDNN"},
    {"copies", "partials, with the 16-bit dK and dV of each segment's rows summed thereafter"},
    {"delta-copies", "copies with delta from O before its rounding"},
    {"running", "flash, with running sums of dK, dV and dQ in 16 bit, rounded once a block, as PyTorch's on a CPU"},
    {"eager", "scores, normalised P, dP and dS rounded to 16 bit, 16-bit partial dK and dV"},
};

/* Profiles that say something about a problem of this dtype: 16-bit inputs are exact in TF32, and their own roundings hide
 * 20 units of fp32; fp32 ones have no 16-bit P. */
static int applies(int i, dualkv_dtype t) { return t == DUALKV_FP32 ? i <= TF32 : i == FP32 || i > TF32; }

static void fillTensorCore(dualkv_arithmetic *a, int step) {
    a->acc_truncates = 1;
    a->acc_step = step;
    a->acc_unit = (step + 4) * 0x1p-25;        /* TOLERANCE.md, "accumulation" */
    a->acc_gain = (step + 0.75) * 0x1p-25 / 5; /* 1.68 * 2^-24 at step 16, as measured */
}

void dkv_roundRunning(dualkv_arithmetic *a) {
    a->partial_of = DUALKV_PARTIAL_ROWS;
    a->row_block = 32;
    a->row_block2 = 64;
    a->row_from2 = 192;
    a->row_block3 = 256;
    a->row_from3 = 768;
    a->dq_block = 512;
    a->exp_error = 0x1p-13; /* of its vectorised exp for 16-bit tensors: LSE was seen to err by 7e-5 */
}

const char *dkv_arithmeticProfile(int i, const dkv_problem *p, dualkv_arithmetic *a, const char **words) {
    int k = 0, left = i;
    while (k < N_PROFILES && (!applies(k, p->dtype) || left-- > 0)) k++;
    if (i < 0 || k >= N_PROFILES) return NULL;
    const int32_t low = k <= FAST ? DUALKV_EXACT : k == TF32 ? DUALKV_TF32 : (int32_t)p->dtype;
    *a = (dualkv_arithmetic){.size = sizeof *a, .unit = 0x1p-24, .acc_unit = 0x1p-24, .acc_step = 1};
    a->in_format = k == TF32 || k == EAGER ? low : DUALKV_EXACT;
    a->s_format = k == EAGER ? low : DUALKV_EXACT;
    a->p_format = a->ds_format = low;
    a->out_format = p->dtype;
    a->partial_format = k >= PARTIALS ? low : DUALKV_EXACT;
    if (k == COPIES || k == DELTA_COPIES) a->partial_of = DUALKV_PARTIAL_HEADS | DUALKV_PARTIAL_SEGMENTS;
    a->p_normalised = k == NORMALISED || k == EAGER;
    a->ds_scaled = k == SCALED || k == SCALED_PARTIALS;
    a->delta_exact = k == DELTA || k == DELTA_PARTIALS || k == DELTA_COPIES;
    a->exp_error = a->log_error = 0x1p-22;           /* ex2.approx, lg2.approx: the PTX ISA's maximum */
    if (k == FAST) a->exp_error = 20 * 0x1p-24;
    a->tanh_error = k <= FAST ? 0x1p-22 : 0x1.1p-11; /* tanh.approx: near 2^-11 */
    a->flushes = 1;
    if (k == RUNNING) dkv_roundRunning(a);
    if (k >= TF32 && k != RUNNING) fillTensorCore(a, k == TF32 ? 8 : 16);
    if (words) *words = profile_table[k].words;
    return profile_table[k].name;
}

static const char *formatName(int32_t f) {
    switch (f) {
    case DUALKV_BF16: return "bf16";
    case DUALKV_FP16: return "fp16";
    case DUALKV_FP32: return "fp32";
    case DUALKV_TF32: return "TF32";
    default: return "";
    }
}

/* Appends ", ..." while there is room. */
static void add(char *out, size_t n, const char *fmt, const char *a, long long b) {
    size_t had = strlen(out);
    if (had + 1 < n) snprintf(out + had, n - had, fmt, a, b);
}

static void describePartials(const dualkv_arithmetic *a, char *out, size_t n) {
    const dkv_partials p = dkv_partialsOf(a);
    add(out, n, ", partial dK and dV in %s", formatName(a->partial_format), 0);
    if (p.segments) add(out, n, p.heads ? " of each head and segment%s" : " of each segment%s", "", 0);
    if (p.summed) add(out, n, ", their sum not rounded%s", "", 0);
    if (p.rows) add(out, n, ", of each %s%lld rows on", "", (long long)a->row_block);
    if (p.rows && a->row_from2) add(out, n, ", %s%lld", "", (long long)a->row_block2);
    if (p.rows && a->row_from2) add(out, n, "%s from %lld", "", (long long)a->row_from2);
    if (p.rows && a->row_from3) add(out, n, ", %s%lld", "", (long long)a->row_block3);
    if (p.rows && a->row_from3) add(out, n, "%s from %lld", "", (long long)a->row_from3);
    if (p.dq_block) add(out, n, ", of dQ after each %s%lld keys", "", (long long)p.dq_block);
}

static void describeSlack(const dualkv_arithmetic *a, char *out, size_t n) {
    char factor[32];
    snprintf(factor, sizeof factor, "%.4g", a->max_slack * 1.4426950408889634);
    add(out, n, ", maximum raised lazily, by 2^%s", factor, 0);
}

void dkv_describeArithmetic(const dualkv_arithmetic *a, char *out, size_t n) {
    if (!n) return;
    snprintf(out, n, "%s accumulation (%s, %d product%s a step", a->unit < 0x1p-40 ? "fp64" : "fp32",
             a->acc_truncates ? "truncating" : "to nearest", (int)a->acc_step, a->acc_step == 1 ? "" : "s");
    if (a->acc_fold) add(out, n, "%s, folded every %lld steps", "", (long long)a->acc_fold);
    if (a->acc_fold_dq) add(out, n, "%s, dQ every %lld", "", (long long)a->acc_fold_dq);
    if (a->acc_fold_dkv) add(out, n, "%s, dK and dV every %lld", "", (long long)a->acc_fold_dkv);
    add(out, n, ")%s", "", 0);
    if (a->in_format >= 0) add(out, n, ", operands rounded to %s", formatName(a->in_format), 0);
    if (a->s_format >= 0) add(out, n, ", scores and dP rounded to %s", formatName(a->s_format), 0);
    if (a->p_format >= 0 && a->p_format == a->ds_format) {
        add(out, n, ", P and dS rounded to %s", formatName(a->p_format), 0);
    } else {
        if (a->p_format >= 0) add(out, n, ", P rounded to %s", formatName(a->p_format), 0);
        if (a->ds_format >= 0) add(out, n, ", dS rounded to %s", formatName(a->ds_format), 0);
    }
    if (a->p_normalised) add(out, n, ", P normalised first%s", "", 0);
    if (a->ds_scaled) add(out, n, ", dS scaled before it is rounded%s", "", 0);
    if (a->delta_exact) add(out, n, ", delta from unrounded O%s", "", 0);
    if (a->partial_format >= 0) describePartials(a, out, n);
    if (a->out_format >= 0) add(out, n, ", outputs in %s", formatName(a->out_format), 0);
    if (a->key_tile) add(out, n, ", key tile %s%lld", "", (long long)a->key_tile);
    if (a->key_tile && a->key_order) add(out, n, ", last tile first%s", "", 0);
    if (a->max_slack > 0) describeSlack(a, out, n);
    if (a->sink_first) add(out, n, ", the sink first%s", "", 0);
    if (a->flushes) add(out, n, ", subnormals flushed%s", "", 0);
}
