/* The bound again, straight from the formulas of TOLERANCE.md: loops over pairs, no tiles, no matrix
 * products, nothing of bound_formula.h. The blocked bound must equal it within what its fp32 products are
 * raised by. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "bound_case.inc"

#define KEYS 256
#define DIM 32

typedef struct pair {                 /* one visible key of a row */
    int64_t row, range, offset;       /* packed key row; place in its range */
    double s, sigma, dt, t, p, dp, z; /* t, dt: softcap's tanh and its error */
} pair;

typedef struct direct {
    const bound_case *c;
    const dualkv_arithmetic *a;
    double u, us, e, in, dot_k, dot_v; /* with the oracle's own 2^-53 */
    double *rows_of_key;               /* [tk]: rows x heads that see it */
    dkv_outputs b;
    pair x[KEYS];
    int n;
} direct;

static double value(const direct *d, const void *x, int64_t at) {
    double y;
    dkv_decodeArray((const char *)x + at * (int64_t)dkv_dtypeSize(d->c->p.dtype), d->c->p.dtype, 1, &y);
    return y;
}
static double sum_error(const direct *d, double n) {
    return (1 + d->in) * (1 + expm1(n * d->a->acc_unit)) * (1 + expm1(n * 0x1p-53)) - 1;
}

static void score_of(const direct *d, int32_t node, int64_t r, int64_t j, int h, int64_t q_row, pair *y) {
    const dkv_problem *p = &d->c->p;
    const double us = d->us, alpha = p->scale, g2 = us * (2 + us);
    const int kvh = h / (p->hq / p->hkv);
    double dot = 0, x = 0, dp = 0, z = 0;
    for (int c = 0; c < p->dqk; c++) {
        double a = value(d, d->c->in.q, (q_row * p->hq + h) * p->dqk + c) *
                   value(d, d->c->in.k, (y->row * p->hkv + kvh) * p->dqk + c);
        dot += a;
        x += fabs(a);
    }
    for (int c = 0; c < p->dv; c++) {
        double a = value(d, d->c->in.d_o, (q_row * p->hq + h) * p->dv + c) *
                   value(d, d->c->in.v, (y->row * p->hkv + kvh) * p->dv + c);
        dp += a;
        z += fabs(a);
    }
    const double position = (double)(p->nodes[node].context + r);
    const double bias = p->alibi ? d->c->l.alibi_slopes[h] * fabs(position - (double)j) : 0;
    double s = alpha * dot;
    double sigma = alpha * x * d->dot_k * pow(1 + us, 2) + g2 * (p->softcap > 0 ? alpha * x : fabs(s));
    if (p->alibi && p->softcap <= 0)
        sigma = alpha * x * d->dot_k * pow(1 + us, 2) + g2 * (fabs(s - bias) + bias);
    if (p->softcap > 0) {
        const double t = tanh(s / p->softcap), at = fabs(t);
        const double hh = (sigma * pow(1 + us, 2) + g2 * alpha * x) / p->softcap,
                     th = hh < 0.01 ? hh : tanh(hh);
        const double moved = fmin(hh, at * th < 1 ? th * (1 - t * t) / (1 - at * th) : 2);
        y->dt = (moved + (d->a->tanh_error + 0x1p-50) * (at + moved)) * (1 + us) + us * at;
        y->t = t;
        s = p->softcap * t;
        sigma = p->softcap * y->dt * (1 + g2) + g2 * fabs(s);
    }
    if (bias > 0) sigma = sigma * (1 + us) + us * fabs(s - bias) + 3 * us * (1 + 2 * us) * bias;
    y->s = s - bias;
    y->sigma = sigma + (d->a->flushes ? 0x1p-126 : 0x1p-149) * (1 + alpha * 256);
    y->dp = dp;
    y->z = z;
}

static void see_row(direct *d, int32_t node, int64_t r, int h) {
    const dualkv_segment *seg = &d->c->l.segments[node];
    d->n = 0;
    for (int64_t g = seg->range_begin; g < seg->range_begin + seg->range_count; g++) {
        const dualkv_range *range = &d->c->l.ranges[g];
        for (int64_t off = 0; off < range->len; off++) {
            if (!dkv_maskSees(&d->c->p, node, r, range->pos + off)) continue;
            assert_true(d->n < KEYS);
            d->x[d->n] = (pair){.row = range->k_start + off, .range = g, .offset = off};
            score_of(d, node, r, range->pos + off, h, seg->q_start + r, &d->x[d->n++]);
        }
    }
}

/* Key tiles of the row, and how many may raise its maximum. */
static void count_tiles(const direct *d, double *tiles, double *rises) {
    double top[KEYS], sigma = 0, biggest = 0, run = -(double)INFINITY;
    int n = 0;
    for (int i = 0; i < d->n; i++) {
        const pair *y = &d->x[i], *before = i ? y - 1 : NULL;
        if (!before || before->range != y->range ||
            before->offset / d->a->key_tile != y->offset / d->a->key_tile)
            top[n++] = -(double)INFINITY;
        top[n - 1] = fmax(top[n - 1], y->s);
        sigma = fmax(sigma, y->sigma);
        biggest = i && biggest > y->s ? biggest : y->s;
    }
    *tiles = n;
    *rises = 0;
    for (int i = 0; i < n; i++) {
        double x = top[d->a->key_order ? n - 1 - i : i];
        *rises += i && x >= run - 2 * sigma - 8 * d->u * fabs(biggest);
        run = fmax(run, x);
    }
}

static double finish(const direct *d, double sum, double scale, double n, double x) {
    const double u = d->u, three = u * (3 + 4 * u), w = d->a->flushes ? 0x1p-126 : 0x1p-149;
    const double out = dkv_unitRoundoff(d->a->out_format),
                 b = scale * (sum + n * w) * (1 + three) + three * fabs(x);
    return b * (1 + out) + out * fabs(x) + dkv_underflow(d->a->out_format) + w;
}

static void row_bound(direct *d, int32_t node, int64_t r, int h) {
    const dkv_problem *p = &d->c->p;
    const dkv_outputs *truth = &d->c->oracle.truth;
    const int64_t t = d->c->l.segments[node].q_start + r, at = (t * p->hq + h) * p->dv;
    const int kvh = h / (p->hq / p->hkv);
    const double u = d->u, e = d->e, w = d->a->flushes ? 0x1p-126 : 0x1p-149, we = 0x1p-126;
    const double lp = dkv_unitRoundoff(d->a->p_format), wp = dkv_underflow(d->a->p_format);
    const double ls = dkv_unitRoundoff(d->a->s_format), lds = dkv_unitRoundoff(d->a->ds_format);
    const double wds = dkv_underflow(d->a->ds_format) + 2 * w, L = truth->lse[h * d->c->l.view.tq + t];
    const double sink = p->sink ? d->c->in.sink[h] : -(double)INFINITY;
    double m = sink, tiles, rises, hx = 0, top = 0, acc[DIM] = {0}, tol[DIM] = {0}, v_max[DIM] = {0};
    see_row(d, node, r, h);
    if (!d->n && !p->sink) return;
    count_tiles(d, &tiles, &rises);
    if (p->sink && d->n) {
        tiles++;
        rises++;
    }
    for (int i = 0; i < d->n; i++) m = fmax(m, d->x[i].s);
    const double n = d->n, chain = sum_error(d, n);
    const double kappa =
        (1 + lp) * (1 + chain) * exp((rises + 2) * u * (1 + 2 * u)) * exp(rises * e * (1 + 2 * e)) - 1;
    for (int i = 0; i < d->n; i++) {
        pair *y = &d->x[i];
        const double x =
            (y->sigma + u * (fabs(y->s) + fmax(fabs(y->s), fabs(m))) + 3 * u * (m - y->s)) * (1 + 8 * u);
        const double hh = x <= 1 ? x + 0.7182818284590453 * x * x : expm1(x);
        y->p = exp(y->s - L);
        hx += y->p * hh;
        top = fmax(top, x);
        const double weight = y->p * ((hh * (1 + e) + e) * (1 + kappa) + kappa) + we +
                              wp * (d->a->p_normalised ? 1 : exp(m - L));
        for (int c = 0; c < p->dv; c++) {
            double v = fabs(value(d, d->c->in.v, (y->row * p->hkv + kvh) * p->dv + c));
            acc[c] += weight * v;
            v_max[c] = fmax(v_max[c], v);
        }
    }
    if (p->sink) {
        double x = u * (fabs(sink) + fmax(fabs(sink), fabs(m)) + 3 * (m - sink)) * (1 + 8 * u);
        hx += exp(sink - L) * expm1(x);
        top = fmax(top, x);
    }
    hx += n * we;
    const double in_tile = fmin(d->a->key_tile, n),
                 lambda = (in_tile + tiles + rises) * u / (1 - u) + rises * e / (1 - e) + n * 0x1p-53;
    double tl = fmin(log1p(hx), top) + e / (1 - e) + lambda;
    tl += (d->a->log_error + 0x1p-50) * fmax(1, 1.4427 * (L - m + tl)) +
          (2 * u * (fabs(m) + L - m + tl) + fmax(u, 0x1p-24) * (fabs(L) + tl)) * (1 + 4 * u) *
              (1 + d->a->log_error);
    d->b.lse[h * d->c->l.view.tq + t] = tl + 4 * w + 0x1p-149;
    tl = d->b.lse[h * d->c->l.view.tq + t];

    const double g = expm1(lambda + 2 * u * (1 + u)), H = hx * (1 + e) + e;
    double delta = 0, err = 0;
    for (int c = 0; c < p->dv; c++) {
        const double o = truth->o[at + c], ao = fabs(o), d_o = value(d, d->c->in.d_o, at + c);
        const double far = v_max[c] * (1 + kappa) * (1 + g) + ao, out = dkv_unitRoundoff(d->a->out_format);
        double b = H < 1 ? (acc[c] + H * ao) / (1 - H) * (1 + g) + g * ao : far;
        b = fmin(b, far) + (n + 4) * w;
        tol[c] = d->n ? b * (1 + out) + out * ao + dkv_underflow(d->a->out_format) + w : 0;
        d->b.o[at + c] = tol[c];
        if (d->a->delta_exact && d->n) tol[c] = b;
        double x = tol[c] + expm1(p->dv * u) * (ao + tol[c]);
        if (d->a->p_normalised && d->n) x += acc[c] * (d->dot_v + ls + expm1(n * u)) / kappa;
        delta += d_o * o;
        err += fabs(d_o) * x + w;
    }
    const double d_lse = d->c->in.d_lse ? d->c->in.d_lse[h * d->c->l.view.tq + t] : 0;
    delta -= d_lse;
    err += u * (2 * fabs(delta) + fabs(d_lse)) * (1 + u) + 2 * w;

    const double ops = (d->a->p_normalised ? 5 : 3) * u * (1 + 8 * u);
    const bool eager = d->a->p_normalised && d->a->s_format >= 0;
    double dq[DIM] = {0};
    for (int i = 0; i < d->n; i++) {
        const pair *y = &d->x[i];
        const double x = (y->sigma + tl + u * (fabs(y->s) + fabs(L)) + 3 * u * fabs(y->s - L)) * (1 + 8 * u);
        const double hh = x <= 1 ? x + 0.7182818284590453 * x * x : expm1(x);
        const double pe = y->p * (hh * (1 + e) * (1 + ops) + (1 + e) * (1 + ops) - 1);
        const double pk = eager ? pe + lp * (y->p + pe) + wp : pe;
        const double f = d->dot_v * y->z + err + (u + ls) * fabs(y->dp), diff = fabs(y->dp - delta);
        double ds = y->p * diff, E = pk * diff + (y->p + pk) * f + we * (diff + f);
        if (p->softcap > 0) {
            const double k = 1 - y->t * y->t, dt = fmin(y->sigma / p->softcap, 2);
            const double dk = dt * (2 * fabs(y->t) + dt) + 2 * d->us;
            E = (E * (k + dk) + ds * dk) * (1 + u) + u * ds * k;
            ds *= k;
        }
        const double lpart = dkv_unitRoundoff(d->a->partial_format),
                     kr = sum_error(d, d->rows_of_key[y->row]);
        const double kk = (1 + kr) * (1 + lpart) - 1, z = E * (1 + lds) + lds * ds + wds;
        for (int c = 0; c < p->dqk; c++) {
            int64_t kat = (y->row * p->hkv + kvh) * p->dqk + c;
            dq[c] += (z * (1 + chain) + chain * ds) * fabs(value(d, d->c->in.k, kat));
            d->b.dk[kat] +=
                (z * (1 + kk) + kk * ds) * fabs(value(d, d->c->in.q, (t * p->hq + h) * p->dqk + c));
        }
        for (int c = 0; c < p->dv; c++)
            d->b.dv[(y->row * p->hkv + kvh) * p->dv + c] +=
                ((pe + lp * (y->p + pe)) * (1 + kk) + kk * y->p + wp + we) *
                fabs(value(d, d->c->in.d_o, at + c));
    }
    for (int c = 0; c < p->dqk && d->n; c++) {
        int64_t q = (t * p->hq + h) * p->dqk + c;
        d->b.dq[q] = finish(d, dq[c], p->scale, n, truth->dq[q]);
    }
    if (!p->sink) return;
    const double xs = (tl + u * (fabs(sink) + fabs(L) + 3 * fabs(sink - L))) * (1 + 8 * u),
                 ps = exp(sink - L);
    const double rel = expm1(xs) * (1 + e) + e, rows = expm1((double)d->c->l.view.tq * u);
    d->b.dsink[h] +=
        ((ps * rel + we) * fabs(delta) + (ps * (1 + rel) + we) * (err + 3 * u * fabs(delta)) + w) *
            (1 + rows) +
        rows * ps * fabs(delta);
}

static void evaluate(direct *d) {
    const dkv_problem *p = &d->c->p;
    const dualkv_problem *v = &d->c->l.view;
    const double g = (double)(p->hq / p->hkv), wpart = dkv_underflow(d->a->partial_format);
    for (int32_t node = 0; node < p->n_nodes; node++)
        for (int64_t r = 0; r < d->c->l.segments[node].q_len; r++) {
            see_row(d, node, r, 0);
            for (int i = 0; i < d->n; i++) d->rows_of_key[d->x[i].row] += g;
        }
    for (int32_t node = 0; node < p->n_nodes; node++)
        for (int64_t r = 0; r < d->c->l.segments[node].q_len; r++)
            for (int h = 0; h < p->hq; h++) row_bound(d, node, r, h);
    for (int64_t j = 0; j < v->tk * p->hkv; j++) {
        const double n = d->rows_of_key[j / p->hkv];
        for (int64_t i = j * p->dqk; i < (j + 1) * p->dqk; i++)
            d->b.dk[i] =
                n > 0 ? finish(d, d->b.dk[i] + g * wpart, p->scale, n, d->c->oracle.truth.dk[i]) + g * wpart
                      : 0;
        for (int64_t i = j * p->dv; i < (j + 1) * p->dv; i++)
            d->b.dv[i] = n > 0 ? finish(d, d->b.dv[i] + g * wpart, 1, n, d->c->oracle.truth.dv[i]) : 0;
    }
    for (int h = 0; p->sink && h < p->hq; h++)
        d->b.dsink[h] =
            d->b.dsink[h] * (1 + 0x1p-24) + 0x1p-24 * fabs(d->c->oracle.truth.dsink[h]) + 0x1p-149;
}

static void compare(const char *line, const direct *d) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *want = dkv_outputAt(&d->b, (dkv_tensor_id)id);
        const double *got = dkv_outputAt(&d->c->oracle.bound, (dkv_tensor_id)id);
        for (int64_t i = 0; i < d->c->n[id]; i++)
            if (!(got[i] >= want[i] * (1 - 1e-9) && got[i] <= want[i] * (1 + 0x1p-11) + 0x1p-100))
                fail_msg("%s %s[%ld]: %.9g, directly %.9g", line, dkv_tensorName((dkv_tensor_id)id), (long)i,
                         got[i], want[i]);
    }
}

static void check_line(const char *line, int variant) {
    bound_case c;
    direct d = {.c = &c, .a = &c.a};
    dkv_err err;
    if (!open_case(line, &c)) return;
    c.a = profile_of(&c, 0);
    c.a.unit = c.a.acc_unit = 0x1p-20;
    c.a.exp_error = 0x1p-21;
    c.a.log_error = 0x1p-19;
    c.a.tanh_error = 0x1p-13;
    c.a.key_tile = 1 + variant % 7;
    c.a.key_order = variant & 1;
    c.a.p_format = c.a.ds_format = variant & 2 ? DUALKV_BF16 : DUALKV_FP16;
    c.a.in_format = variant % 5 == 0 ? DUALKV_BF16 : DUALKV_EXACT;
    c.a.s_format = variant % 3 == 0 ? DUALKV_BF16 : DUALKV_EXACT;
    c.a.partial_format = variant & 4 ? DUALKV_BF16 : DUALKV_EXACT;
    c.a.p_normalised = variant % 4 == 3;
    c.a.delta_exact = variant % 3 == 1;
    c.a.flushes = 0;
    run_bound(&c);
    assert_int_equal(dkv_allocOutputs(&c.l, &d.b, &err), 0);
    d.rows_of_key = calloc((size_t)c.l.view.tk + 1, sizeof(double));
    assert_non_null(d.rows_of_key);
    d.u = c.a.unit + 0x1p-53;
    d.us = fmax(c.a.unit, dkv_unitRoundoff(c.a.s_format)) + 0x1p-53;
    d.e = c.a.exp_error + 0x1p-50;
    d.in = dkv_unitRoundoff(c.a.in_format);
    d.dot_k = (1 + d.in) * (1 + sum_error(&d, c.p.dqk)) - 1;
    d.dot_v = (1 + d.in) * (1 + sum_error(&d, c.p.dv)) - 1;
    evaluate(&d);
    compare(line, &d);
    free(d.rows_of_key);
    dkv_freeOutputs(&d.b);
    close_case(&c);
}

static void test_direct(void **state) {
    (void)state;
    static const char *const more[] = {"",          " softcap=2",
                                       " alibi=on", " sinklogit=1",
                                       " dlse=on",  " softcap=20 alibi=on sinklogit=-2 dlse=on scale=1"};
    static const char *const heads[] = {"1:1", "4:2", "3:1"}, *const dims[] = {"16", "1", "8:3"};
    int i = 0;
    for (size_t s = 0; s < DKV_COUNT(dkv_small_shapes); s++)
        for (size_t m = 0; dkv_smallMask(m); m++, i++) {
            char line[300];
            snprintf(line, sizeof line, "shape=%s mask=%s heads=%s dim=%s dtype=%s seed=%d%s",
                     dkv_small_shapes[s], dkv_smallMask(m), heads[i % 3], dims[i / 3 % 3],
                     dkv_dtypeName((dualkv_dtype)(i / 2 % 3)), i, more[i % 6]);
            check_line(line, i);
        }
    check_line("shape=90+2x40 heads=2:1 dim=16 dtype=bf16 seed=1", 6);
    check_line("shape=90+2x40 heads=2:1 dim=16 dtype=bf16 mask=window:30:3 softcap=2 seed=1", 9);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_direct)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
