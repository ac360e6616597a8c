#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "dtype.h"
#include "emu.h"
#include "emu_math.h"
#include "reference.h"

/* One problem with random inputs, and what a kernel made of it. */
typedef struct trial {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    dkv_outputs out;
    int64_t damage; /* bytes changed past the ends of outputs and workspace, inputs changed */
} trial;

static uint64_t next(uint64_t *x) {
    uint64_t z = (*x += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static double random_value(uint64_t *x) { /* roughly normal */
    double s = 0;
    for (int i = 0; i < 4; i++) s += (double)(next(x) >> 11) * 0x1p-53 - 0.5;
    return s * 1.7;
}
static void fill_random(void *t, dualkv_dtype type, int64_t n, uint64_t *x) {
    for (int64_t i = 0; t && i < n; i++) {
        double v = random_value(x);
        dkv_encodeArray(&v, type, 1, (char *)t + i * (int64_t)dkv_dtypeSize(type));
    }
}

static void open_trial(const char *line, trial *t) {
    dkv_err err = {0};
    memset(t, 0, sizeof *t);
    if (dkv_parseProblem(line, NULL, &t->p, &err) || dkv_makeLayout(&t->p, &t->l, &err) ||
        dkv_allocInputs(&t->l, &t->in, &err) || dkv_allocOutputs(&t->l, &t->out, &err))
        fail_msg("%s: %s", line, err.text);
    const dualkv_problem *p = &t->l.view;
    uint64_t x = t->p.seed;
    fill_random(t->in.q, t->p.dtype, p->tq * p->hq * p->dqk, &x);
    fill_random(t->in.k, t->p.dtype, p->tk * p->hkv * p->dqk, &x);
    fill_random(t->in.v, t->p.dtype, p->tk * p->hkv * p->dv, &x);
    fill_random(t->in.d_o, t->p.dtype, p->tq * p->hq * p->dv, &x);
    fill_random(t->in.d_lse, DUALKV_FP32, p->tq * p->hq, &x);
    fill_random(t->in.sink, DUALKV_FP32, p->hq, &x);
}
static void close_trial(trial *t) {
    dkv_freeOutputs(&t->out);
    dkv_freeInputs(&t->in);
    dkv_freeLayout(&t->l);
    dkv_freeProblem(&t->p);
}

/* A strided copy of a packed tensor of rows x heads x d elements, `pad` elements between heads and rows;
 * slack (a row at the end included) and outputs full of NaN. */
typedef struct block {
    dualkv_tensor t;
    size_t bytes, used; /* used: up to the end of the last element */
    void *before;       /* inputs: a copy */
} block;

static block spread(const void *from, int64_t rows, int64_t heads, int64_t d, int64_t size, int64_t pad) {
    block b = {.t = {NULL, heads * (d + pad) + pad, d + pad}};
    b.used = rows ? (size_t)(((rows - 1) * b.t.row + (heads - 1) * b.t.head + d) * size) : 0;
    b.bytes = (size_t)((rows + 1) * b.t.row * size);
    b.t.data = malloc(b.bytes);
    b.before = malloc(b.bytes);
    assert_true(b.t.data && b.before);
    memset(b.t.data, 0xff, b.bytes);
    for (int64_t r = 0; from && r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            memcpy((char *)b.t.data + (r * b.t.row + h * b.t.head) * size,
                   (const char *)from + (r * heads + h) * d * size, (size_t)(d * size));
    memcpy(b.before, b.t.data, b.bytes);
    return b;
}
/* Frees an input, or an output after decoding it; what changed that should not have. */
static int64_t collect(block b, int64_t rows, int64_t heads, int64_t d, dualkv_dtype type, double *to) {
    int64_t damage = 0, size = (int64_t)dkv_dtypeSize(type);
    for (size_t i = to ? b.used : 0; i < b.bytes; i++)
        damage += ((char *)b.t.data)[i] != ((char *)b.before)[i];
    for (int64_t r = 0; to && r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            dkv_decodeArray((char *)b.t.data + (r * b.t.row + h * b.t.head) * size, type, (size_t)d,
                            to + (r * heads + h) * d);
    free(b.t.data);
    free(b.before);
    return damage;
}
static dualkv_tensor plane(const float *from, int64_t tq, int64_t hq, int64_t pad) { /* [hq, tq] */
    dualkv_tensor t = {calloc((size_t)(hq * (tq + pad) + 1), sizeof(float)), 1, tq + pad};
    assert_non_null(t.data);
    for (int64_t h = 0; from && h < hq; h++)
        memcpy((float *)t.data + h * t.head, from + h * tq, (size_t)tq * sizeof(float));
    return t;
}

static int64_t launch_backward(void *self, trial *t, dualkv_launch *l, int64_t pad) {
    const dualkv_problem *p = &t->l.view;
    const dualkv_dtype type = t->p.dtype;
    const int64_t size = (int64_t)dkv_dtypeSize(type);
    int64_t damage = 0;
    char err[200] = "";
    unsigned char *work;
    l->workspace_size = dkv_emuKernel.workspace(self, p, 1);
    l->workspace = work = malloc(l->workspace_size + 64);
    assert_non_null(work);
    memset(work, 0xff, l->workspace_size + 64);
    block d_o = spread(t->in.d_o, p->tq, p->hq, p->dv, size, pad);
    block dq = spread(NULL, p->tq, p->hq, p->dqk, size, pad),
          dk = spread(NULL, p->tk, p->hkv, p->dqk, size, pad);
    block dv = spread(NULL, p->tk, p->hkv, p->dv, size, pad);
    l->d_o = d_o.t;
    l->dq = dq.t;
    l->dk = dk.t;
    l->dv = dv.t;
    if (t->in.d_lse) l->d_lse = plane(t->in.d_lse, p->tq, p->hq, pad);
    l->dsink = p->sink ? calloc((size_t)p->hq, sizeof(float)) : NULL;
    if (dkv_emuKernel.backward(self, l, err, sizeof err)) fail_msg("%s", err);
    for (int h = 0; p->sink && h < p->hq; h++) t->out.dsink[h] = l->dsink[h];
    for (size_t i = l->workspace_size; i < l->workspace_size + 64; i++) damage += work[i] != 0xff;
    damage += collect(d_o, p->tq, p->hq, p->dv, type, NULL);
    damage += collect(dq, p->tq, p->hq, p->dqk, type, t->out.dq);
    damage += collect(dk, p->tk, p->hkv, p->dqk, type, t->out.dk);
    damage += collect(dv, p->tk, p->hkv, p->dv, type, t->out.dv);
    free(l->dsink);
    free(l->d_lse.data);
    free(work);
    return damage;
}

static void launch_trial(void *self, trial *t, int64_t pad) {
    const dualkv_problem *p = &t->l.view;
    const dualkv_dtype type = t->p.dtype;
    const int64_t size = (int64_t)dkv_dtypeSize(type);
    char err[200] = "";
    dualkv_launch l = {.size = sizeof l,
                       .problem = p,
                       .device_segments = p->segments,
                       .device_ranges = p->ranges,
                       .device_alibi_slopes = p->alibi_slopes,
                       .sink = t->in.sink};
    assert_null(dkv_emuKernel.refuses(self, p));
    block q = spread(t->in.q, p->tq, p->hq, p->dqk, size, pad),
          k = spread(t->in.k, p->tk, p->hkv, p->dqk, size, pad);
    block v = spread(t->in.v, p->tk, p->hkv, p->dv, size, pad),
          o = spread(NULL, p->tq, p->hq, p->dv, size, pad + 1);
    l.q = q.t;
    l.k = k.t;
    l.v = v.t;
    l.o = o.t;
    l.lse = plane(NULL, p->tq, p->hq, pad);
    assert_int_equal(dkv_emuKernel.workspace(self, p, 0), 0);
    if (dkv_emuKernel.forward(self, &l, err, sizeof err)) fail_msg("%s", err);
    t->damage = p->grad ? launch_backward(self, t, &l, pad) : 0;
    t->damage +=
        collect(q, p->tq, p->hq, p->dqk, type, NULL) + collect(k, p->tk, p->hkv, p->dqk, type, NULL) +
        collect(v, p->tk, p->hkv, p->dv, type, NULL) + collect(o, p->tq, p->hq, p->dv, type, t->out.o);
    for (int64_t h = 0; h < p->hq; h++)
        for (int64_t r = 0; r < p->tq; r++)
            t->out.lse[h * p->tq + r] = *((float *)l.lse.data + h * l.lse.head + r);
    free(l.lse.data);
}

static void run_trial(const char *line, const char *options, int64_t pad, trial *t) {
    char err[200] = "";
    open_trial(line, t);
    void *self = dkv_emuKernel.open(options, err, sizeof err);
    if (!self) fail_msg("%s: %s", options, err);
    launch_trial(self, t, pad);
    dkv_emuKernel.close(self);
}

/* Elements whose bits differ (NaN equals NaN). */
static int64_t count_different(const trial *a, const trial *b, dkv_tensor_id id) {
    int64_t n[DKV_N_OUTPUTS], bad = 0;
    dkv_countOutputs(&a->l, n);
    const double *x = dkv_outputAt(&a->out, id), *y = dkv_outputAt(&b->out, id);
    for (int64_t i = 0; x && i < n[id]; i++) bad += !(x[i] == y[i] || (isnan(x[i]) && isnan(y[i])));
    return bad;
}
static int64_t count_all_different(const trial *a, const trial *b) {
    int64_t bad = a->damage + b->damage;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) bad += count_different(a, b, (dkv_tensor_id)id);
    return bad;
}

static const char *const lines[] = {
    "shape=37+3x21 heads=4:2 dim=24",
    "shape=37+3x21 heads=4:2 dim=24 dtype=fp16 dlse=on sinklogit=0.5",
    "shape=37+3x21 heads=4:2 dim=24 dtype=fp32 dlse=on sinklogit=-1",
    "shape=64+2x64,65,63,1 heads=2:1 dim=16 dtype=fp32",
    "shape=0+4x9 heads=7:1 dim=8 dtype=fp32",
    "shape=40 heads=2:2 dim=40 dtype=fp32",
    "shape=5+3x0 heads=1:1 dim=1 dtype=fp32",
    "shape=200+77,2x9/64+3x9 heads=2:1 dim=8 dtype=fp32 softcap=3 alibi=on",
    "shape=30+2x(17+2x9@30,5@3)@20,6 heads=2:1 dim=24:8 dtype=fp32 dlse=on",
    "shape=90k+16@10,16@90,7 heads=2:2 dim=17 dtype=fp32",
    "shape=33+3x21 heads=2:1 dim=16 dtype=fp32 mask=full",
    "shape=33+3x21 heads=2:1 dim=16 dtype=fp32 mask=prefix",
    "shape=83+3x41 heads=2:1 dim=16 dtype=fp32 mask=window:20",
    "shape=83+3x41 heads=2:1 dim=16 dtype=fp32 mask=window:20:5 alibi=on",
    "shape=83+3x41 heads=2:1 dim=16 dtype=fp32 mask=chunk:24",
    "shape=83+3x41 heads=2:1 dim=16 dtype=fp32 mask=block:16:0.4:3 dlse=on",
    "shape=83+3x41 heads=2:1 dim=16 dtype=bf16 mask=block:16:0.4:3 sinklogit=1 dlse=on",
    "shape=60+40 heads=1:1 dim=64 dtype=bf16 scale=1",
    "shape=70+2x30 heads=2:1 dim=192:128 dtype=fp16 softcap=2",
    "shape=50+2x30 heads=2:1 dim=64 grad=off",
};
#define N_LINES (int)(sizeof lines / sizeof *lines)

/* The same kernel on the replicated layout, its outputs packed again. */
static void run_replicated(const char *line, const char *options, trial *t) {
    trial rep = {0};
    int64_t *q, *k;
    uint8_t *own;
    char reason[200] = "";
    dkv_err err = {0};
    open_trial(line, t);
    if (dkv_makeReplicated(&t->p, &t->l, &rep.l, &q, &k, &own, &err) ||
        dkv_allocOutputs(&rep.l, &rep.out, &err) ||
        dkv_replicateInputs(&t->l, &rep.l, q, k, own, &t->in, &rep.in, &err))
        fail_msg("%s: %s", line, err.text);
    rep.p.dtype = t->p.dtype;
    assert_int_equal(dkv_emuReplicatedKernel.replicated, 1);
    void *self = dkv_emuReplicatedKernel.open(options, reason, sizeof reason);
    if (!self) fail_msg("%s: %s", options, reason);
    launch_trial(self, &rep, 0);
    assert_true(dkv_emuReplicatedKernel.launches(self) == (t->p.grad ? 2 : 1));
    dkv_emuReplicatedKernel.close(self);
    if (dkv_packOutputs(&t->l, &rep.l, q, k, own, &rep.out, &t->out, &err))
        fail_msg("%s: %s", line, err.text);
    dkv_freeOutputs(&rep.out);
    dkv_freeInputs(&rep.in);
    dkv_freeLayout(&rep.l);
    free(q);
    free(k);
    free(own);
}

/* dkv_refGauge is the error of an evaluation whose every operation errs by 2^-53, for any order of its sums.
 * An evaluation whose every operation errs by `unit` errs by unit/2^-53 times that, and by its output's
 * rounding. fp32 operations for LSE; for the rest every rounding is taken to be as coarse as the 16-bit
 * type's. */
static double worst_against_naive(const char *line, const char *options, int replicated, char where[100]) {
    trial got, want;
    dkv_outputs gauge;
    dkv_err err = {0};
    int64_t n[DKV_N_OUTPUTS];
    dualkv_arithmetic a = {.size = sizeof a};
    double worst = 0;
    if (replicated)
        run_replicated(line, options, &got);
    else
        run_trial(line, options, 0, &got);
    open_trial(line, &want);
    void *self = dkv_emuKernel.open(options, (char[200]){0}, 200);
    dkv_emuKernel.arithmetic(self, &want.l.view, &a);
    dkv_emuKernel.close(self);
    const double fp32 = fmax(a.unit, a.acc_unit), coarse = fmax(fp32, dkv_unitRoundoff(a.out_format));
    const dkv_gauge_errors e = {a.exp_error * 0x1p-53 / a.unit, a.log_error * 0x1p-53 / a.unit,
                                a.tanh_error * 0x1p-53 / a.unit, 40};
    if (dkv_refNaive(&want.p, &want.l, &want.in, &want.out, &err) ||
        dkv_allocOutputs(&want.l, &gauge, &err) || dkv_refGauge(&want.p, &want.l, &want.in, &e, &gauge, &err))
        fail_msg("%s: %s", line, err.text);
    dkv_countOutputs(&want.l, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *x = dkv_outputAt(&got.out, (dkv_tensor_id)id);
        const double *y = dkv_outputAt(&want.out, (dkv_tensor_id)id);
        const double *g = dkv_outputAt(&gauge, (dkv_tensor_id)id);
        const double unit = id == DKV_LSE ? fp32 : coarse;
        const double half = id == DKV_LSE ? 0 : dkv_underflow(a.out_format);
        for (int64_t i = 0; x && y && i < n[id]; i++) {
            double ratio =
                x[i] == y[i] ? 0 : fabs(x[i] - y[i]) / (unit * (g[i] * 0x1p53 + fabs(y[i])) + half);
            if (ratio <= worst) continue;
            worst = isnan(ratio) ? INFINITY : ratio;
            snprintf(where, 100, "%s[%ld] is %g, truth %g", dkv_tensorName((dkv_tensor_id)id), (long)i, x[i],
                     y[i]);
        }
    }
    dkv_freeOutputs(&gauge);
    close_trial(&got);
    close_trial(&want);
    return worst;
}

static void check_against_naive(const char *line, const char *options, int replicated) {
    char where[100] = "";
    double worst = worst_against_naive(line, options, replicated, where);
    if (worst > 1) fail_msg("%s +%s: %s, %g times what is allowed", line, options, where, worst);
}

static void test_against_naive(void **state) {
    (void)state;
    static const char *const options[] = {"", "bm=16,bn=16", "bm=3,bn=7,order=down", "bm=100,bn=33",
                                          "bm=1,bn=1"};
    for (int i = 0; i < N_LINES; i++)
        for (size_t j = 0; j < sizeof options / sizeof *options; j++)
            check_against_naive(lines[i], options[j], 0);
    check_against_naive(lines[0], "bm=32,bn=16,acc=tc", 0);
    check_against_naive(lines[1], "acc=tc,order=down", 0);
}

static void test_replicated(void **state) {
    (void)state;
    for (int i = 0; i < N_LINES; i++) check_against_naive(lines[i], "bm=16,bn=32", 1);
}

/* The same bits twice, with strides, and for any query tile; LSE does not depend on the rounding of P. */
static void test_bits(void **state) {
    (void)state;
    for (int i = 0; i < N_LINES; i++) {
        trial a, b, c, d;
        run_trial(lines[i], "bm=16,bn=32", 0, &a);
        run_trial(lines[i], "bm=16,bn=32", 0, &b);
        run_trial(lines[i], "bn=32,bm=16", 5, &c);
        run_trial(lines[i], "bm=7,bn=32", 0, &d);
        assert_int_equal(count_all_different(&a, &b), 0);
        assert_int_equal(count_all_different(&a, &c), 0);
        assert_int_equal(count_all_different(&a, &d), 0);
        close_trial(&a);
        close_trial(&b);
        close_trial(&c);
        close_trial(&d);
    }
}

/* Rows [q0, q1) of O, dQ, LSE and keys [k0, k1) of dK, dV are the same in both. */
static int same_segment(const trial *a, const trial *b, const dualkv_segment *s, int keys) {
    const dualkv_problem *p = &a->l.view;
    int64_t no = p->hq * p->dv, nq = p->hq * p->dqk, nk = p->hkv * p->dqk, nv = p->hkv * p->dv;
    const dkv_outputs *x = &a->out, *y = &b->out;
    int same =
        !memcmp(x->o + s->q_start * no, y->o + s->q_start * no, (size_t)(s->q_len * no) * sizeof(double)) &&
        !memcmp(x->dq + s->q_start * nq, y->dq + s->q_start * nq, (size_t)(s->q_len * nq) * sizeof(double));
    for (int h = 0; h < p->hq; h++)
        same &= !memcmp(x->lse + h * p->tq + s->q_start, y->lse + h * p->tq + s->q_start,
                        (size_t)s->q_len * sizeof(double));
    if (keys)
        same &= !memcmp(x->dk + s->k_start * nk, y->dk + s->k_start * nk,
                        (size_t)(s->k_len * nk) * sizeof(double)) &&
                !memcmp(x->dv + s->k_start * nv, y->dv + s->k_start * nv,
                        (size_t)(s->k_len * nv) * sizeof(double));
    return same;
}

/* NaN in all inputs of one segment's own tokens. */
static void plant_nan(trial *t, int segment) {
    const dualkv_problem *p = &t->l.view;
    const dualkv_segment *s = &p->segments[segment];
    const int64_t size = (int64_t)dkv_dtypeSize(t->p.dtype);
    const int64_t q = p->hq * p->dqk * size, o = p->hq * p->dv * size, k = p->hkv * p->dqk * size,
                  v = p->hkv * p->dv * size;
    memset((char *)t->in.q + s->q_start * q, 0xff, (size_t)(s->q_len * q));
    memset((char *)t->in.d_o + s->q_start * o, 0xff, (size_t)(s->q_len * o));
    memset((char *)t->in.k + s->k_start * k, 0xff, (size_t)(s->k_len * k));
    memset((char *)t->in.v + s->k_start * v, 0xff, (size_t)(s->k_len * v));
}

/* Nothing changes in the other responses, nor in the prompt's rows. */
static void test_isolation(void **state) {
    (void)state;
    for (int poisoned = 1; poisoned <= 3; poisoned++) {
        trial a, b;
        run_trial("shape=21+3x13 heads=2:1 dim=16", "bm=16,bn=16", 0, &a);
        open_trial("shape=21+3x13 heads=2:1 dim=16", &b);
        plant_nan(&b, poisoned);
        void *self = dkv_emuKernel.open("bm=16,bn=16", (char[200]){0}, 200);
        launch_trial(self, &b, 0);
        dkv_emuKernel.close(self);
        for (int i = 0; i < 4; i++) {
            int same = same_segment(&a, &b, &b.l.view.segments[i], i > 0);
            if (same != (i != poisoned)) fail_msg("segment %d, NaN planted in %d", i, poisoned);
        }
        close_trial(&a);
        close_trial(&b);
    }
}

/* A line that each fault needs, where those above do not have it: long logits, a head dim that is no multiple
 * of 64, many segments, ALiBi where a row sees what comes after it. */
static const char *const fault_lines[] = {
    "shape=9+3x21 heads=2:1 dim=24 dtype=fp32 scale=40 dlse=on",
    "shape=9+3x21 heads=2:1 dim=24 dtype=fp16 scale=40",
    "shape=20+2x9 heads=1:1 dim=72",
    "shape=3+130x1 heads=2:1 dim=2",
    "shape=33+2x9 heads=2:1 dim=16 mask=full alibi=on",
    "shape=9+3x21,10x2 heads=2:1 dim=25 scale=40 sinklogit=1 dlse=on",
    "shape=9+3x21 heads=2:1 dim=16 softcap=1 scale=3",
    "shape=70+(20+5) heads=16:8 dim=64:40",
    "shape=33+2x9 heads=2:1 dim=16 mask=block:8:0.5:1",
};

/* Runs one line in an instance with a fault and in a clean one; NaN in segment `poisoned` unless it is 0. */
static int differs(const char *line, void *clean, void *faulty, int poisoned) {
    trial a, b;
    open_trial(line, &a);
    open_trial(line, &b);
    if (poisoned) plant_nan(&a, poisoned), plant_nan(&b, poisoned);
    launch_trial(clean, &a, 0);
    launch_trial(faulty, &b, 0);
    int differ = count_all_different(&a, &b) > 0;
    close_trial(&a);
    close_trial(&b);
    return differ;
}

/* Each planted fault changes something, in one instance over a list of problems, one of them twice. */
static void test_faults(void **state) {
    (void)state;
    char err[200], options[64];
    int n = 0;
    for (const dkv_fault *f; (f = dkv_listFault(n)); n++) {
        snprintf(options, sizeof options, "fault=%s,bm=16,bn=16", f->id);
        void *clean = dkv_emuKernel.open("bm=16,bn=16", err, sizeof err);
        void *faulty = dkv_emuKernel.open(options, err, sizeof err);
        assert_true(clean && faulty);
        int seen = differs(lines[0], clean, faulty, 0) || differs(lines[0], clean, faulty, 0) ||
                   differs("shape=21+3x13 heads=2:1 dim=16", clean, faulty, 2);
        for (int i = 0; i < N_LINES && !seen; i++) seen = differs(lines[i], clean, faulty, 0);
        for (size_t i = 0; i < sizeof fault_lines / sizeof *fault_lines && !seen; i++)
            seen = differs(fault_lines[i], clean, faulty, 0);
        if (!seen) fail_msg("fault %s changes nothing", f->id);
        dkv_emuKernel.close(clean);
        dkv_emuKernel.close(faulty);
        assert_true(strlen(f->doc) > 10 && strlen(f->kind) > 1);
    }
    assert_true(n >= 100);
}

/* The control: P loses less than 2^-126, which |dP - D| and |q| (inputs are below M), the scale, and the sum
 * over rows and heads can only raise to `limit`; and it is declared. */
static void test_control(void **state) {
    (void)state;
    const double M = 4 * 0.5 * 1.7;
    trial a, b;
    dualkv_arithmetic declared = {.size = sizeof declared};
    run_trial(fault_lines[0], "", 0, &a);
    run_trial(fault_lines[0], "fault=E5", 0, &b);
    const dualkv_problem *p = &a.l.view;
    const double limit =
        0x1p-126 * p->scale * (double)(p->tq * p->hq) * (2 * p->dv * M * M + M) * M; /* dLSE is below M too */
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(&a.l, n);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const double *x = dkv_outputAt(&a.out, (dkv_tensor_id)id),
                     *y = dkv_outputAt(&b.out, (dkv_tensor_id)id);
        for (int64_t i = 0; x && i < n[id]; i++) assert_true(x[i] == y[i] || fabs(x[i] - y[i]) <= limit);
    }
    void *self = dkv_emuKernel.open("fault=E5", (char[200]){0}, 200);
    dkv_emuKernel.arithmetic(self, p, &declared);
    assert_int_equal(declared.flushes, 1);
    dkv_emuKernel.close(self);
    close_trial(&a);
    close_trial(&b);
}

static void test_options(void **state) {
    (void)state;
    static const char *const bad[][2] = {
        {"bm=0", "bm=0"},
        {"bn=1025", "bn=1025"},
        {"bm=", "bm="},
        {"bm=6 ", "bm=6 "},
        {"bn=-4", "bn=-4"},
        {"acc=fp64", "acc=fp64"},
        {"order=", "order="},
        {"det", "det"},
        {"bm=64,,bn=2", "''"},
        {"fault=Z9", "fault=Z9"},
        {"bm=8,acc=tc", "acc=tc"},
        {"bm=99999999999999999999", "bm=9"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char err[120] = "";
        if (dkv_emuKernel.open(bad[i][0], err, sizeof err)) fail_msg("%s was taken", bad[i][0]);
        if (!strstr(err, bad[i][1])) fail_msg("%s: '%s'", bad[i][0], err);
    }
    void *self = dkv_emuKernel.open("bm=1,bn=1024,order=down", NULL, 0);
    assert_non_null(self);
    dkv_emuKernel.close(self);
}

static void test_refusals(void **state) {
    (void)state;
    trial t;
    open_trial("shape=9+2x3 dim=8 dtype=fp32", &t);
    void *self = dkv_emuKernel.open("acc=tc", (char[200]){0}, 200);
    assert_non_null(dkv_emuKernel.refuses(self, &t.l.view));
    t.l.view.dtype = DUALKV_BF16;
    assert_null(dkv_emuKernel.refuses(self, &t.l.view));
    t.l.view.mask = DUALKV_BIDIR;
    assert_non_null(dkv_emuKernel.refuses(self, &t.l.view));
    t.l.view.mask = DUALKV_CAUSAL;
    t.l.view.tq = INT64_MAX / 2;
    assert_true(dkv_emuKernel.workspace(self, &t.l.view, 1) == SIZE_MAX);
    dkv_emuKernel.close(self);
    close_trial(&t);
}

/* Stated errors of exp, log, tanh; exp(0) = 1 exactly; conversions against dtype.c. */
static void test_math(void **state) {
    (void)state;
    double worst_exp = 0, worst_log = 0, worst_tanh = 0;
    uint64_t x = 1;
    for (int i = 0; i < 400000; i++) {
        float a = (float)((double)(next(&x) >> 11) * 0x1p-53 * 175 - 87), y = a, z,
              t = ldexpf(a, (int)(next(&x) % 20) - 16);
        dkv_emuExp(&y, 1, 0.0f);
        worst_exp = fmax(worst_exp, fabs(y - exp(a)) / exp(a));
        z = t;
        dkv_emuTanh(&z, 1);
        worst_tanh = fmax(worst_tanh, fabs(z - tanh(t)) / fabs(tanh(t)));
        float b = ldexpf(1 + (float)(next(&x) >> 41) * 0x1p-23f, (int)(next(&x) % 100) - 50);
        worst_log = fmax(worst_log, fabs(dkv_emuLog(b) - log(b)) / fabs(log(b)));
    }
    assert_true(worst_exp <= DKV_EMU_EXP_ERROR && worst_exp > DKV_EMU_EXP_ERROR / 2);
    assert_true(worst_log <= DKV_EMU_LOG_ERROR && worst_log > DKV_EMU_LOG_ERROR / 2);
    assert_true(worst_tanh <= DKV_EMU_TANH_ERROR && worst_tanh > DKV_EMU_TANH_ERROR / 2);
    float special[6] = {0.0f, -INFINITY, INFINITY, NAN, -200.0f, -103.0f};
    dkv_emuExp(special, 6, 0.0f);
    assert_true(special[0] == 1 && special[1] == 0 && special[2] == INFINITY && isnan(special[3]));
    assert_true(special[4] == 0 && special[5] == 0x1p-149f);
    for (int i = 0; i < 400000; i++) {
        uint32_t u = (uint32_t)next(&x);
        float f;
        memcpy(&f, &u, sizeof f);
        for (int type = DUALKV_BF16; !isnan(f) && type <= DUALKV_FP16; type++) {
            uint16_t h;
            float back, rounded = f;
            dkv_emuEncode(&f, type, 1, &h);
            assert_int_equal(h, dkv_encode16(f, (dualkv_dtype)type));
            dkv_emuDecode(&h, type, 1, &back);
            assert_true((double)back == dkv_decode16(h, (dualkv_dtype)type));
            dkv_emuRound(&rounded, 1, type);
            assert_true(rounded == back);
        }
    }
}

/* What was measured on tensor cores (tolerance page): 1 + 16 * 2^-25 is exact, 1 + 16 * 2^-26 is 1; a chain
 * of n steps over positive products loses the printed amount. */
static void test_tensor_core(void **state) {
    (void)state;
    float a[16], b[16], c = 1.0f;
    for (int i = 0; i < 16; i++) a[i] = 0x1p-13f, b[i] = 0x1p-12f;
    dkv_emuProduct g = {1, 1, 1, 16, a, 16, 1, b, 1, &c, 8};
    dkv_emuMultiply(&g);
    assert_true(c == 1.0f + 0x1p-21f);
    for (int i = 0; i < 16; i++) b[i] = 0x1p-13f;
    c = 1.0f;
    dkv_emuMultiply(&g);
    assert_true(c == 1.0f);
    for (int i = 0; i < 16; i++) a[i] = -0x1p-13f; /* toward zero from both sides */
    c = -1.0f;
    dkv_emuMultiply(&g);
    assert_true(c == -1.0f);
    const int steps[] = {256, 4096, 16384};
    const double loss[] = {-1.0e-5, -3.8e-4, -1.6e-3};
    for (int t = 0; t < 3; t++) {
        uint64_t x = 5;
        double sum = 0;
        c = 0.0f;
        for (int s = 0; s < steps[t]; s++) {
            for (int i = 0; i < 16; i++) {
                a[i] = (float)fabs(random_value(&x)), b[i] = (float)fabs(random_value(&x));
                dkv_emuRound(&a[i], 1, DUALKV_BF16), dkv_emuRound(&b[i], 1, DUALKV_BF16);
                sum += (double)a[i] * b[i];
            }
            dkv_emuMultiply(&g);
        }
        double got = c / sum - 1;
        print_message("%d steps: %g (measured on the device: %g)\n", steps[t], got, loss[t]);
        assert_true(got < loss[t] / 1.5 && got > loss[t] * 1.5);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_naive), cmocka_unit_test(test_replicated),
        cmocka_unit_test(test_bits),          cmocka_unit_test(test_isolation),
        cmocka_unit_test(test_options),       cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_math),          cmocka_unit_test(test_tensor_core),
        cmocka_unit_test(test_faults),        cmocka_unit_test(test_control),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
