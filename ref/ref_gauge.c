/* Error bound of the fp64 references, u = 2^-53, gamma(n) = n u / (1 - n u), sums in any order:
 *
 *   sigma_ij = gamma(D + 2) |scale| sum_c |q_ic k_jc|                score, before its modifiers
 *   eta_ij   = expm1(sigma_ij + u (|s_ij| + max(|m_i|, |L_i|)) + e)  relative error of exp(s - m), exp(s - L)
 *   TOL_L    = sum_j p_ij eta_ij + gamma(n + 1) + T (e + 2u) + e_log |L_i - m_i| + u |L_i|
 *   ep_ij    = p_ij (eta_ij + TOL_L + 2u) + tiny                     absolute error of P, however normalised
 *   TOL_O    = sum_j (ep_ij + (gamma(n + 2) + T (e + 2u)) p_ij) |v_jc|
 *   dD_i     = sum_c |do_ic| (TOL_O + gamma(Dv + 1) |o_ic|)
 *   E_ij     = ep_ij |dp - D + dLSE|
 *              + (p_ij + ep_ij) (gamma(Dv) sum_c |do_ic v_jc| + dD_i + 3u (|dp| + |D| + |dLSE|))
 *   TOL_dQ   = sum_j (E_ij + gamma(n + 2) |ds_ij|) |k_jc|, and in the same way dK, dV, dSink over the rows
 *
 * T rescalings of an online softmax. Softcap: t = tanh(x / cap) has error dt, 1 - t^2 has 2 |t| dt + 2u.
 * Second-order terms: each product of two relative errors is below the larger of them times a first-order
 * term, so all bounds are multiplied by 1 + 4 max(eta + TOL_L) at the end. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "mask.h"
#include "reference.h"
#include "sequence.h"

#define U 0x1p-53
#define TINY 0x1p-1021 /* exp's absolute error where it underflows */

typedef struct key_terms {
    int64_t row;       /* packed key row */
    double s, sigma;   /* score and its absolute error */
    double f, df;      /* softcap's derivative and its absolute error */
    double p, eta, ep; /* probability, relative and absolute error */
} key_terms;

typedef struct gauge {
    const dkv_problem *p;
    const dkv_layout *l;
    const dkv_inputs *in;
    dkv_gauge_errors e;
    dkv_starts starts;
    int64_t *row;    /* [longest] packed key rows of a sequence */
    key_terms *keys; /* [longest] visible keys of one query */
    int64_t n;       /* how many */
    double *k, *v;   /* packed, decoded */
    double m, lse, log_l, sink_p, sink_eta, tol_l, worst;
    double gamma_rows; /* gamma of the longest sum over rows and heads into one key */
    dkv_outputs *out;
} gauge;

static double gammaOf(double n) { return n * U / (1 - n * U); }

static void scoreTerms(const gauge *a, int h, const double *q, int64_t at, int64_t j, key_terms *t) {
    const dkv_problem *p = a->p;
    const double *k = a->k + (t->row * p->hkv + h / (p->hq / p->hkv)) * p->dqk;
    const double scale = p->scale, cap = p->softcap;
    double dot = 0, abs = 0;
    for (int c = 0; c < p->dqk; c++) {
        dot += q[c] * k[c];
        abs += fabs(q[c] * k[c]);
    }
    t->s = scale * dot;
    t->sigma = gammaOf(p->dqk + 2) * fabs(scale) * abs;
    t->f = 1;
    t->df = 0;
    if (cap > 0) {
        const double x = t->s / cap, th = tanh(x), dx = t->sigma / cap + U * fabs(x);
        const double dt = dx * (1 - th * th + 2 * dx) + fabs(th) * a->e.tanh_error;
        t->f = 1 - th * th;
        t->df = 2 * fabs(th) * dt + 2 * U;
        t->s = cap * th;
        t->sigma = cap * dt + U * fabs(t->s);
    }
    if (p->alibi) {
        const double bias = a->l->alibi_slopes[h] * (double)(at > j ? at - j : j - at);
        t->s -= bias;
        t->sigma += U * (bias + fabs(t->s));
    }
}

/* Visible keys of row r, softmax, errors of P and LSE. */
static void softmaxTerms(gauge *a, int32_t node, int64_t r, int h, const double *q) {
    const dkv_problem *p = a->p;
    const int64_t at = p->nodes[node].context + r, len = p->nodes[node].context + p->nodes[node].len;
    const double sink = a->in->sink ? a->in->sink[h] : -(double)INFINITY;
    double l = 0, big, sum = 0;
    a->n = 0;
    a->m = sink;
    for (int64_t j = 0; j < len; j++) {
        if (!dkv_maskSees(p, node, r, j)) continue;
        key_terms *t = &a->keys[a->n++];
        t->row = a->row[j];
        scoreTerms(a, h, q, at, j, t);
        a->m = fmax(a->m, t->s);
    }
    a->lse = sink;
    a->tol_l = a->sink_eta = a->log_l = 0;
    a->sink_p = sink > -(double)INFINITY ? 1 : 0;
    if (!a->n) return;
    for (int64_t i = 0; i < a->n; i++) l += exp(a->keys[i].s - a->m);
    l += exp(sink - a->m);
    a->log_l = log(l);
    a->lse = a->m + a->log_l;
    big = fmax(fabs(a->m), fabs(a->lse));
    a->sink_p = exp(sink - a->m) / l;
    a->sink_eta = a->sink_p > 0 ? expm1(U * (fabs(sink) + big) + a->e.exp_error) : 0;
    double top = a->sink_eta;
    for (int64_t i = 0; i < a->n; i++) {
        key_terms *t = &a->keys[i];
        t->p = exp(t->s - a->m) / l;
        t->eta = expm1(t->sigma + U * (fabs(t->s) + big) + a->e.exp_error);
        sum += t->p * t->eta;
        top = fmax(top, t->eta);
    }
    a->tol_l = sum + a->sink_p * a->sink_eta + gammaOf((double)a->n + 1) +
               a->e.rescales * (a->e.exp_error + 2 * U) + a->e.log_error * fabs(a->log_l) + U * fabs(a->lse);
    a->worst = fmax(a->worst, top + a->tol_l);
    for (int64_t i = 0; i < a->n; i++) {
        key_terms *t = &a->keys[i];
        t->ep = t->p * (t->eta + a->tol_l + 2 * U) + TINY;
    }
}

/* Bound of O of one row into tol; the row itself into o. */
static void forwardTerms(const gauge *a, int kvh, double *o, double *tol) {
    const int dv = a->p->dv;
    const double chain = gammaOf((double)a->n + 2) + a->e.rescales * (a->e.exp_error + 2 * U);
    memset(o, 0, (size_t)dv * sizeof *o);
    memset(tol, 0, (size_t)dv * sizeof *tol);
    for (int64_t i = 0; i < a->n; i++) {
        const key_terms *t = &a->keys[i];
        const double *v = a->v + (t->row * a->p->hkv + kvh) * dv;
        for (int c = 0; c < dv; c++) {
            o[c] += t->p * v[c];
            tol[c] += (t->ep + chain * t->p) * fabs(v[c]);
        }
    }
}

static void backwardTerms(gauge *a, int h, const double *q, const double *d_o, double d_lse, const double *o,
                          const double *tol_o, double *tol_dq) {
    const dkv_problem *p = a->p;
    const int kvh = h / (p->hq / p->hkv);
    const double scale = p->scale, chain = gammaOf((double)a->n + 2);
    double delta = 0, d_delta = 0;
    for (int c = 0; c < p->dv; c++) {
        delta += d_o[c] * o[c];
        d_delta += fabs(d_o[c]) * (tol_o[c] + gammaOf(p->dv + 1) * fabs(o[c]));
    }
    for (int64_t i = 0; i < a->n; i++) {
        const key_terms *t = &a->keys[i];
        const int64_t at = t->row * p->hkv + kvh;
        const double *k = a->k + at * p->dqk, *v = a->v + at * p->dv;
        double dp = 0, abs = 0;
        for (int c = 0; c < p->dv; c++) {
            dp += d_o[c] * v[c];
            abs += fabs(d_o[c] * v[c]);
        }
        const double g = dp - delta + d_lse, raw = t->p * g, ds = scale * raw * t->f;
        const double terms = gammaOf(p->dv) * abs + d_delta + 3 * U * (fabs(dp) + fabs(delta) + fabs(d_lse));
        const double e0 = t->ep * fabs(g) + (t->p + t->ep) * terms;
        const double e = fabs(scale) * (e0 * (t->f + t->df) + fabs(raw) * t->df) + 3 * U * fabs(ds);
        for (int c = 0; c < p->dqk; c++) {
            tol_dq[c] += (e + chain * fabs(ds)) * fabs(k[c]);
            a->out->dk[at * p->dqk + c] += (e + a->gamma_rows * fabs(ds)) * fabs(q[c]);
        }
        for (int c = 0; c < p->dv; c++)
            a->out->dv[at * p->dv + c] += (t->ep + a->gamma_rows * t->p) * fabs(d_o[c]);
    }
    if (a->out->dsink)
        a->out->dsink[h] +=
            a->sink_p * ((a->sink_eta + a->tol_l + 2 * U + a->gamma_rows) * fabs(d_lse - delta) + d_delta +
                         2 * U * (fabs(delta) + fabs(d_lse)));
}

static int prepareGauge(gauge *a, dkv_err *err) {
    const dkv_problem *p = a->p;
    const int64_t longest = dkv_longestSequence(p) + 1;
    int rc = dkv_makeStarts(p, &a->starts, err);
    if (rc) return rc;
    const int64_t tk = a->starts.tk, nk = tk * p->hkv * p->dqk, nv = tk * p->hkv * p->dv;
    a->row = malloc((size_t)longest * sizeof *a->row);
    a->keys = malloc((size_t)longest * sizeof *a->keys);
    a->k = malloc((size_t)(nk + 1) * sizeof *a->k);
    a->v = malloc((size_t)(nv + 1) * sizeof *a->v);
    if (!a->row || !a->keys || !a->k || !a->v)
        return dkv_fail(err, DKV_EHARNESS, "out of memory in the gauge");
    dkv_decodeArray(a->in->k, p->dtype, (size_t)nk, a->k);
    dkv_decodeArray(a->in->v, p->dtype, (size_t)nv, a->v);
    a->gamma_rows = gammaOf((double)a->starts.tq * p->hq / p->hkv + p->n_nodes + 2);
    return DKV_OK;
}

static void gaugeRow(gauge *a, int32_t node, int64_t r, int h) {
    const dkv_problem *p = a->p;
    const int64_t t = a->starts.q[node] + r, at = t * p->hq + h;
    double q[256], o[256], tol_o[256], d_o[256];
    const size_t bytes = dkv_dtypeSize(p->dtype);
    dkv_decodeArray((const char *)a->in->q + (size_t)(at * p->dqk) * bytes, p->dtype, (size_t)p->dqk, q);
    softmaxTerms(a, node, r, h, q);
    a->out->lse[h * a->starts.tq + t] = a->tol_l;
    forwardTerms(a, h / (p->hq / p->hkv), o, tol_o);
    memcpy(a->out->o + at * p->dv, tol_o, (size_t)p->dv * sizeof(double));
    if (!a->out->dq) return;
    dkv_decodeArray((const char *)a->in->d_o + (size_t)(at * p->dv) * bytes, p->dtype, (size_t)p->dv, d_o);
    backwardTerms(a, h, q, d_o, a->in->d_lse ? a->in->d_lse[h * a->starts.tq + t] : 0, o, tol_o,
                  a->out->dq + at * p->dqk);
}

int dkv_refGauge(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dkv_gauge_errors *e,
                 dkv_outputs *bound, dkv_err *err) {
    /* glibc on x86-64: exp and log within 1 ulp, tanh within 2 */
    const dkv_gauge_errors libm = {
        .exp_error = 2 * U, .log_error = 2 * U, .tanh_error = 4 * U, .rescales = 0};
    gauge a = {.p = p, .l = l, .in = in, .e = e ? *e : libm, .out = bound};
    int64_t count[DKV_N_OUTPUTS];
    int rc = prepareGauge(&a, err);
    if (rc) goto done;
    dkv_countOutputs(l, count);
    for (int i = 0; i < DKV_N_OUTPUTS; i++) {
        double *x = dkv_outputAt(bound, (dkv_tensor_id)i);
        if (x) memset(x, 0, (size_t)count[i] * sizeof *x);
    }
    for (int32_t n = 0; n < p->n_nodes; n++) {
        if (p->nodes[n].key_only) continue;
        if (p->nodes[n].len) dkv_fillSequence(p, &a.starts, n, a.row);
        for (int64_t r = 0; r < p->nodes[n].len; r++)
            for (int h = 0; h < p->hq; h++) gaugeRow(&a, n, r, h);
    }
    for (int i = 0; i < DKV_N_OUTPUTS; i++) {
        double *x = dkv_outputAt(bound, (dkv_tensor_id)i);
        for (int64_t j = 0; x && j < count[i]; j++) x[j] *= 1 + 4 * a.worst;
    }
done:
    free(a.row);
    free(a.keys);
    free(a.k);
    free(a.v);
    dkv_freeStarts(&a.starts);
    return rc;
}
