/* Fields of an arithmetic in words: what of it changed. */
#include <stdio.h>
#include <string.h>

#include "../ref/dualkv_kernel.h"
#include "gate.h"

typedef enum kind {
    NUMBER, /* as it is */
    COUNT,  /* 0: see `zero` */
    FORMAT,
    CHOICE, /* 0 or 1: `zero` or `one` */
    SUMS    /* DUALKV_PARTIAL_* */
} kind;

static const struct {
    const char *field, *words;
    kind kind;
    const char *zero, *one;
} table[] = {
    {"unit", "roundoff of vector operations", NUMBER, NULL, NULL},
    {"acc_unit", "roundoff of an accumulation step", NUMBER, NULL, NULL},
    {"acc_truncates", "accumulation", CHOICE, "to nearest", "truncating"},
    {"acc_step", "products in an accumulation step", NUMBER, NULL, NULL},
    {"acc_gain", "expected loss of an accumulation step", NUMBER, NULL, NULL},
    {"acc_fold", "accumulation steps between folds", COUNT, "never folded", NULL},
    {"acc_fold_dq", "accumulation steps of dQ between folds", COUNT, "as the others", NULL},
    {"acc_fold_dkv", "accumulation steps of dK and dV between folds", COUNT, "as the others", NULL},
    {"in_format", "operands", FORMAT, NULL, NULL},
    {"s_format", "scores and dP", FORMAT, NULL, NULL},
    {"p_format", "P", FORMAT, NULL, NULL},
    {"ds_format", "dS", FORMAT, NULL, NULL},
    {"out_format", "outputs", FORMAT, NULL, NULL},
    {"partial_format", "partial sums of gradients", FORMAT, NULL, NULL},
    {"p_normalised", "P", CHOICE, "rounded before it is normalised", "normalised first"},
    {"delta_exact", "delta", CHOICE, "from rounded O", "from O before its rounding"},
    {"key_tile", "key tile", COUNT, "not told", NULL},
    {"key_order", "key tiles", CHOICE, "first to last", "last to first"},
    {"exp_error", "error of exp", NUMBER, NULL, NULL},
    {"log_error", "error of log", NUMBER, NULL, NULL},
    {"tanh_error", "error of tanh", NUMBER, NULL, NULL},
    {"flushes", "subnormals", CHOICE, "kept", "flushed"},
    {"partial_of", "partial sums of gradients", SUMS, NULL, NULL},
    {"ds_scaled", "dS", CHOICE, "rounded before it is scaled", "scaled first"},
    {"row_block", "rows between roundings of dK and dV", COUNT, "not by rows", NULL},
    {"row_block2", "rows between them in long sequences", COUNT, "the same", NULL},
    {"row_from2", "long sequences, from so many rows on", COUNT, "none", NULL},
    {"row_block3", "rows between them in very long sequences", COUNT, "the same", NULL},
    {"row_from3", "very long sequences, from so many rows on", COUNT, "none", NULL},
    {"dq_block", "keys between roundings of dQ", COUNT, "not by keys", NULL},
    {"max_slack", "slack of the running maximum", COUNT, "none", NULL},
    {"sink_first", "the sink", CHOICE, "after the keys", "before the keys"},
};
enum { N_FIELDS = sizeof table / sizeof table[0] };

static const char *formatWords(double x) {
    switch ((int)x) {
    case DUALKV_EXACT: return "not rounded";
    case DUALKV_BF16: return "rounded to bf16";
    case DUALKV_FP16: return "rounded to fp16";
    case DUALKV_FP32: return "rounded to fp32";
    case DUALKV_TF32: return "rounded to TF32";
    default: return "rounded to an unknown type";
    }
}

static void sayValue(int i, double x, char *out, size_t n) {
    const int of = (int)x;
    if (table[i].kind == FORMAT) snprintf(out, n, "%s", formatWords(x));
    else if (table[i].kind == CHOICE) snprintf(out, n, "%s", x == 0 ? table[i].zero : table[i].one);
    else if (table[i].kind == SUMS)
        snprintf(out, n, "%s%s%s%s", of ? "of each" : "of query heads", of & DUALKV_PARTIAL_HEADS ? " head" : "",
                 of & DUALKV_PARTIAL_SEGMENTS ? " segment" : "", of & DUALKV_PARTIAL_ROWS ? " block of rows" : "");
    else if (table[i].kind == COUNT && x == 0) snprintf(out, n, "%s", table[i].zero);
    else snprintf(out, n, "%.4g", x);
}

void dkv_sayField(const char *field, double was, double now, char *out, size_t n) {
    char before[80], after[80];
    int i = 0;
    while (i < N_FIELDS - 1 && strcmp(table[i].field, field)) i++;
    sayValue(i, was, before, sizeof before);
    sayValue(i, now, after, sizeof after);
    snprintf(out, n, "%s %s -> %s", table[i].words, before, after);
}

#define COUNT_FIELD(field, looser) +1
_Static_assert(N_FIELDS == 0 DKV_ARITHMETIC_FIELDS(COUNT_FIELD), "a row for every field");
