/* bound_units.c: declared arithmetic in the form that the bound's formulas use. */
#include <math.h>

#include "bound_formula.h"
#include "dtype.h"

/* TF32 operands may be rounded or, where fp32 words are fed to the tensor core as they are, cut. */
static double operandError(int32_t format) {
    return format == DUALKV_TF32 ? 2 * dkv_unitRoundoff(format) : dkv_unitRoundoff(format);
}

double dkv_sumError(const dkv_units *t, double n, double steps, double pieces, int64_t fold) {
    return dkv_formulaSum((dkv_chain_units){t->a->acc_unit, t->a->unit, t->in, fold}, n, steps, pieces);
}

/* Error of a dot product of two rounded operands. */
static double dotError(const dkv_units *t, double n) {
    return (1 + t->in) * (1 + dkv_sumError(t, n, ceil(n / t->a->acc_step), 0, t->a->acc_fold)) - 1;
}

void dkv_makeUnits(const dkv_problem *p, const dualkv_arithmetic *a, dkv_units *t) {
    const int fp64 = a->unit < 0x1p-40;
    /* P and dS are operands too */
    const int32_t p_format = a->p_format >= 0 ? a->p_format : a->in_format;
    const int32_t ds_format = a->ds_format >= 0 ? a->ds_format : a->in_format;
    *t = (dkv_units){.a = a};
    t->u = a->unit + DKV_U64;
    t->us = fmax(a->unit, dkv_unitRoundoff(a->s_format)) + DKV_U64;
    t->exp = a->exp_error + 8 * DKV_U64;
    t->log = a->log_error + 8 * DKV_U64;
    t->tanh = a->tanh_error + 8 * DKV_U64;
    t->w = fp64 ? 0 : a->flushes ? 0x1p-126 : 0x1p-149;
    t->w_exp = fp64 ? 0x1p-1022 : 0x1p-126;
    t->in = operandError(a->in_format);
    t->operand = (dkv_underflow(a->in_format) + (a->flushes ? t->w : 0)) / fmax(t->in, 0x1p-24);
    t->dp_round = dkv_unitRoundoff(a->s_format);
    t->p = operandError(p_format);
    t->ds = operandError(ds_format) + (a->ds_scaled ? t->u : 0);
    t->out = dkv_unitRoundoff(a->out_format);
    t->partial = dkv_unitRoundoff(a->partial_format);
    t->w_p = dkv_underflow(p_format);
    t->w_ds = dkv_underflow(ds_format) + 2 * t->w;
    if (a->ds_scaled && p->scale != 0) t->w_ds = (t->w_ds + t->w) / fabs((double)p->scale) + 2 * t->w;
    t->w_out = dkv_underflow(a->out_format) + t->w;
    t->w_partial = dkv_underflow(a->partial_format);
    t->grad_ops = a->p_normalised ? 5 : 3;
    if (a->p_normalised && a->s_format >= 0) { /* eager */
        t->kept_p = t->p;
        t->w_kept = t->w_p;
    }
    t->score = dotError(t, p->dqk);
    t->dp = dotError(t, p->dv);
    t->delta = expm1(p->dv * t->u);
    t->scale = fabs((double)p->scale);
    t->cap = p->softcap > 0 ? p->softcap : 0;
    t->slack = a->max_slack;
}
