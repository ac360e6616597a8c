/* The blocked reference against the naive one, each within its own fp64 bound (dkv_refGauge); the same
 * bits for any number of threads; isolation from NaN; planted mistakes are caught. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "mask.h"
#include "reference.h"
#include "tiles.h"
#include "vexp.h"

static const char *const LINES[] = {
    "shape=1 dim=1",
    "shape=0+3x5 dim=1 heads=2:1",
    "shape=530+2x200 dim=8 heads=2:1 dlse=on",
    "shape=257+256,255,1,0,265 dim=8 mask=causal sinklogit=0.5 dlse=on",
    "shape=70+33,2x9/64+3x9 dim=40 heads=7:1 softcap=3 alibi=on",
    "shape=70+33,2x9/64+3x9 dim=40 heads=8:4 softcap=3 dlse=on dtype=fp16",
    "shape=40+17,20 dim=192:128 heads=2:2 dtype=fp32 dlse=on",
    "shape=30+9,5 dim=256 heads=8:1 dtype=fp16",
    "shape=100k+8@7,9@100,3@0 dim=16 heads=2:1 mask=full",
    "shape=300k+270@150,40@299 dim=16 heads=2:1 mask=causal sinklogit=-1 dlse=on",
    "shape=300+3x(40+2x50) dim=8 heads=4:2 alibi=on dlse=on",
    "shape=300+3x(40+2x50@200) dim=8 heads=4:2 dlse=on",
    "shape=300+2x100 dim=8 mask=full heads=3:1",
    "shape=300+2x100 dim=8 mask=prefix heads=3:3 softcap=2",
    "shape=350+2x150 dim=8 mask=window:64 heads=2:1",
    "shape=350+2x150 dim=8 mask=window:300:4 alibi=on sinklogit=1",
    "shape=350+2x150 dim=8 mask=chunk:96 heads=2:1 dlse=on",
    "shape=350+2x150 dim=8 mask=block:32:0.3:5 heads=2:1 dlse=on",
    "shape=300+2x100 dim=8 mask=block:16:0.02:9 dlse=on",
    "shape=300+2x100 dim=8 mask=block:16:0.02:9 heads=2:1 sinklogit=0.25 dlse=on",
    "shape=40+2x9 dim=72:24 heads=600:1 scale=0.5",
    "shape=200+3x40 dim=8 grad=off",
};
#define N_LINES ((int)(sizeof LINES / sizeof *LINES))

typedef struct bench {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    dkv_outputs naive, blocked, gauge_n, gauge_b;
    int64_t n[DKV_N_OUTPUTS];
} bench;

static uint64_t state;
static double uniform(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-52 - 1;
}

static void fill(void *x, dualkv_dtype t, int64_t n, double size) {
    for (int64_t i = 0; i < n; i++) {
        double v = size * (uniform() + uniform() + uniform());
        dkv_encodeArray(&v, t, 1, (char *)x + (size_t)i * dkv_dtypeSize(t));
    }
}

static void fillInputs(bench *b) {
    const dualkv_problem *v = &b->l.view;
    state = 42;
    fill(b->in.q, b->p.dtype, v->tq * v->hq * v->dqk, 1.5);
    fill(b->in.k, b->p.dtype, v->tk * v->hkv * v->dqk, 1);
    fill(b->in.v, b->p.dtype, v->tk * v->hkv * v->dv, 1);
    if (b->in.d_o) fill(b->in.d_o, b->p.dtype, v->tq * v->hq * v->dv, 1);
    if (b->in.d_lse) fill(b->in.d_lse, DUALKV_FP32, v->tq * v->hq, 1);
    for (int h = 0; b->in.sink && h < v->hq; h++) b->in.sink[h] = b->p.sinklogit + 0.25f * (float)h;
}

static void openBench(const char *line, bench *b) {
    dkv_err err;
    memset(b, 0, sizeof *b);
    if (dkv_parseProblem(line, NULL, &b->p, &err) || dkv_makeLayout(&b->p, &b->l, &err))
        fail_msg("%s: %s", line, err.text);
    assert_int_equal(dkv_allocInputs(&b->l, &b->in, &err), DKV_OK);
    assert_int_equal(dkv_allocOutputs(&b->l, &b->naive, &err), DKV_OK);
    assert_int_equal(dkv_allocOutputs(&b->l, &b->blocked, &err), DKV_OK);
    assert_int_equal(dkv_allocOutputs(&b->l, &b->gauge_n, &err), DKV_OK);
    assert_int_equal(dkv_allocOutputs(&b->l, &b->gauge_b, &err), DKV_OK);
    fillInputs(b);
    dkv_countOutputs(&b->l, b->n);
}

static void closeBench(bench *b) {
    dkv_outputs *all[] = {&b->naive, &b->blocked, &b->gauge_n, &b->gauge_b};
    for (int i = 0; i < 4; i++) dkv_freeOutputs(all[i]);
    dkv_freeInputs(&b->in);
    dkv_freeLayout(&b->l);
    dkv_freeProblem(&b->p);
}

static void poison(bench *b) {
    for (int i = 0; i < DKV_N_OUTPUTS; i++) {
        double *x = dkv_outputAt(&b->blocked, (dkv_tensor_id)i);
        if (x) memset(x, 0xff, sizeof(double) * (size_t)b->n[i]);
    }
}

static void runBlocked(bench *b, int threads, dkv_mutant mutant) {
    dkv_ref_options opt = {.threads = threads, .mutant = mutant};
    dkv_err err;
    poison(b);
    if (dkv_refBlocked(&b->p, &b->l, &b->in, &opt, &b->blocked, &err)) fail_msg("%s", err.text);
}

static void runTruth(bench *b) {
    dkv_gauge_errors e = {.exp_error = 2 * DKV_VEXP_ULP * 0x1p-53, .log_error = 0x1p-52,
                          .tanh_error = 2 * DKV_VTANH_ULP * 0x1p-53};
    dkv_err err;
    for (int i = 0; i < b->l.view.n_segments; i++) { /* tiles of the longest list of ranges */
        const dualkv_segment *s = &b->l.view.segments[i];
        e.rescales = fmax(e.rescales, (double)((s->context + s->k_len) / DKV_TILE_KEYS + s->range_count));
    }
    if (dkv_refNaive(&b->p, &b->l, &b->in, &b->naive, &err)) fail_msg("%s", err.text);
    assert_int_equal(dkv_refGauge(&b->p, &b->l, &b->in, NULL, &b->gauge_n, &err), DKV_OK);
    assert_int_equal(dkv_refGauge(&b->p, &b->l, &b->in, &e, &b->gauge_b, &err), DKV_OK);
}

/* Largest difference between the two in units of their bounds together; infinity where one is not finite
 * alone. */
static double compare(const bench *b, const char **tensor) {
    double most = 0;
    for (int k = 0; k < DKV_N_OUTPUTS; k++) {
        const dkv_tensor_id id = (dkv_tensor_id)k;
        const double *x = dkv_outputAt(&b->naive, id), *y = dkv_outputAt(&b->blocked, id);
        const double *f = dkv_outputAt(&b->gauge_n, id), *g = dkv_outputAt(&b->gauge_b, id);
        for (int64_t i = 0; x && i < b->n[k]; i++) {
            if (x[i] == y[i] || (isnan(x[i]) && isnan(y[i]))) continue;
            double r = fabs(x[i] - y[i]) / (f[i] + g[i]);
            if (!(r <= most)) {
                most = isnan(r) ? INFINITY : r;
                *tensor = dkv_tensorName(id);
            }
        }
    }
    return most;
}

static void test_naive(void **s) {
    (void)s;
    for (int i = 0; i < N_LINES; i++) {
        bench b;
        const char *tensor = "-";
        openBench(LINES[i], &b);
        runTruth(&b);
        runBlocked(&b, 2, DKV_MUTANT_NONE);
        double r = compare(&b, &tensor);
        print_message("%.3f of the bound (%s) %s\n", r, tensor, LINES[i]);
        assert_true(r <= 1);
        closeBench(&b);
    }
}

static void test_threads(void **s) {
    (void)s;
    const char *const lines[] = {
        "shape=900+3x200 dim=16 heads=4:1 dlse=on sinklogit=1",
        "shape=600+9x90/500+5x(100+2x60) dim=24:16 heads=4:2 dlse=on sinklogit=1 softcap=4",
        "shape=900+3x300 dim=8 heads=3:3 mask=window:200:3"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        bench b;
        openBench(lines[i], &b);
        runBlocked(&b, 1, DKV_MUTANT_NONE);
        for (int k = 0; k < DKV_N_OUTPUTS; k++) { /* keep the first run's outputs where naive's were to lie */
            double *x = dkv_outputAt(&b.naive, (dkv_tensor_id)k);
            if (x) memcpy(x, dkv_outputAt(&b.blocked, (dkv_tensor_id)k), sizeof(double) * (size_t)b.n[k]);
        }
        for (int threads = 2; threads <= 9; threads += 1 + threads / 3) {
            runBlocked(&b, threads, DKV_MUTANT_NONE);
            for (int k = 0; k < DKV_N_OUTPUTS; k++) {
                double *x = dkv_outputAt(&b.naive, (dkv_tensor_id)k);
                const double *y = dkv_outputAt(&b.blocked, (dkv_tensor_id)k);
                if (x) assert_memory_equal(x, y, sizeof(double) * (size_t)b.n[k]);
            }
        }
        closeBench(&b);
    }
}

/* Non-finite values in one tensor, in a middle row, in the last segment, or in the first row (whose only
 * score may then be -inf): the same pattern of NaN as the definition's. */
static void test_isolation(void **s) {
    (void)s;
    const char *const lines[] = {"shape=260+2x20 dim=8 heads=2:1 dlse=on sinklogit=1 dtype=fp32",
                                 "shape=60+2x30 dim=8 heads=2:1 softcap=2 alibi=on dtype=fp32",
                                 "shape=90+2x30 dim=8 mask=window:40:2 dtype=fp32",
                                 "shape=40+2x(20+2x9) dim=8 mask=block:8:0.3:3 heads=4:2 dtype=fp32",
                                 "shape=50+20,30 dim=8 mask=prefix dtype=fp32"};
    const float values[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 5; i++) {
        bench b;
        openBench(lines[i], &b);
        runTruth(&b); /* the bounds of finite inputs; they matter only where the truth stays finite */
        for (int k = 0; k < 3 * 4 * 3; k++) {
            const char *tensor = "-";
            const dualkv_problem *v = &b.l.view;
            const dualkv_segment *seg = &v->segments[v->n_segments - 1];
            float *x[] = {b.in.q, b.in.k, b.in.v, b.in.d_o};
            int which = k / 3 % 4, place = k / 12;
            int64_t width = (which == 0 || which == 3 ? v->hq : v->hkv) * (which < 2 ? v->dqk : v->dv);
            int64_t first[] = {v->segments[0].q_len / 2, seg->q_start, 0};
            int64_t n = place == 1 ? seg->q_len * width : 1;
            for (int64_t e = 0; e < n; e++) x[which][first[place] * width + e] = values[k % 3];
            dkv_err err;
            assert_int_equal(dkv_refNaive(&b.p, &b.l, &b.in, &b.naive, &err), DKV_OK);
            runBlocked(&b, 2, DKV_MUTANT_NONE);
            if (!(compare(&b, &tensor) <= 1))
                fail_msg("%s: tensor %d is %g: %s", lines[i], which, values[k % 3], tensor);
            fillInputs(&b);
        }
        closeBench(&b);
    }
}

static void test_mutants(void **s) {
    (void)s;
    for (int m = 1; m < DKV_MUTANT_N; m++) {
        int caught = 0;
        for (int i = 0; i < N_LINES; i++) {
            bench b;
            const char *tensor = "-";
            if (!strstr(LINES[i], "heads=8:4") && !strstr(LINES[i], "heads=4:2")) continue;
            openBench(LINES[i], &b);
            runTruth(&b);
            runBlocked(&b, 2, (dkv_mutant)m);
            caught += !(compare(&b, &tensor) <= 1);
            closeBench(&b);
        }
        print_message("mutant %d: caught by %d lines\n", m, caught);
        assert_true(caught == 3);
    }
}

/* Every visible pair is in exactly one tile, none twice; a tile with vis = 1 holds visible pairs alone. */
static void test_traversal(void **s) {
    (void)s;
    for (int i = 0; i < N_LINES; i++) {
        bench b;
        dkv_head h;
        dkv_block k;
        dkv_err err;
        int64_t pairs = 0;
        openBench(LINES[i], &b);
        assert_int_equal(dkv_openHead(&b.p, &b.l, &b.in, 0, &h, &err), DKV_OK);
        assert_int_equal(dkv_openBlock(&h, &k, &err), DKV_OK);
        uint8_t *sees = malloc((size_t)(h.rows * DKV_TILE_KEYS));
        while (dkv_nextBlock(&h, &k)) {
            dkv_tile t = {.range = -1};
            int64_t last = 0;
            while (dkv_nextTile(&h, &k, &t)) {
                assert_true(t.j0 >= last && t.n > 0 && t.n <= DKV_TILE_KEYS);
                last = t.j1;
                dkv_tileSees(&h, &k, &t, sees);
                for (int64_t e = 0; e < (k.r1 - k.r0) * t.n; e++) {
                    bool want = dkv_maskSees(&b.p, k.node, k.r0 + e / t.n, t.j0 + e % t.n);
                    assert_true(sees[e] == want && (want || t.vis == 2));
                    pairs += want;
                }
            }
        }
        assert_int_equal(pairs, dkv_countPairs(&b.p));
        free(sees);
        dkv_closeBlock(&k);
        dkv_closeHead(&h);
        closeBench(&b);
    }
}

static void test_decode(void **s) {
    (void)s;
    static uint16_t in[65536];
    static double got[65536], want[65536];
    for (int i = 0; i < 65536; i++) in[i] = (uint16_t)i;
    for (int t = 0; t < 2; t++) {
        dualkv_dtype type = t ? DUALKV_FP16 : DUALKV_BF16;
        assert_false(dkv_decodeRows(in, type, 0, 1, 1, 0, 65536, got));
        dkv_decodeArray(in, type, 65536, want);
        for (int i = 0; i < 65536; i++) {
            assert_true(got[i] == want[i] || (isnan(got[i]) && isnan(want[i])));
            assert_true(signbit(got[i]) == signbit(want[i]) || isnan(got[i]));
        }
        for (int i = 0; i < 65536; i++)
            assert_true(dkv_decodeRows(in, type, i, 1, 1, 0, 1, got) == !!isfinite(want[i]));
    }
}

/* No more than inputs, outputs and 512 MiB, at the largest shapes and any number of threads. */
static void test_memory(void **s) {
    (void)s;
    const char *const lines[] = {"shape=32768+28x2048 heads=32:8 dim=128",
                                 "shape=2048+8x256 heads=8:2 dim=128",
                                 "shape=32768+28x2048 heads=32:1 dim=256 dtype=fp32"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        dkv_problem p;
        dkv_layout l;
        assert_int_equal(dkv_parseProblem(lines[i], NULL, &p, NULL), DKV_OK);
        assert_int_equal(dkv_makeLayout(&p, &l, NULL), DKV_OK);
        for (int threads = 0; threads <= 256; threads = threads ? threads * 2 : 1) {
            dkv_ref_options opt = {.threads = threads};
            int64_t bytes = dkv_refBlockedBytes(&l, &opt);
            assert_true(bytes > 0 && bytes <= (int64_t)512 << 20);
        }
        dkv_freeLayout(&l);
        dkv_freeProblem(&p);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_decode),    cmocka_unit_test(test_traversal),
                                       cmocka_unit_test(test_naive),     cmocka_unit_test(test_threads),
                                       cmocka_unit_test(test_isolation), cmocka_unit_test(test_mutants),
                                       cmocka_unit_test(test_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
