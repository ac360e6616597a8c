#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../ref/dtype.h"
#include "../ref/mask.h"
#include "fill.h"
#include "rng.h"

typedef struct filled {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    double *q, *k, *v, *d_o;
} filled;

static double *decode(const void *in, dualkv_dtype t, int64_t n) {
    double *out = calloc((size_t)n + 1, sizeof *out);
    assert_non_null(out);
    if (in) dkv_decodeArray(in, t, (size_t)n, out);
    return out;
}

static void open_fill(const char *line, filled *f) {
    dkv_err err = {0};
    if (dkv_parseProblem(line, dkv_knownFill, &f->p, &err) || dkv_makeLayout(&f->p, &f->l, &err) ||
        dkv_allocInputs(&f->l, &f->in, &err) || dkv_fillInputs(&f->p, &f->l, "data", &f->in, &err))
        fail_msg("%s: %s", line, err.text);
    const dualkv_problem *v = &f->l.view;
    f->q = decode(f->in.q, f->p.dtype, v->tq * v->hq * v->dqk);
    f->k = decode(f->in.k, f->p.dtype, v->tk * v->hkv * v->dqk);
    f->v = decode(f->in.v, f->p.dtype, v->tk * v->hkv * v->dv);
    f->d_o = decode(f->in.d_o, f->p.dtype, v->tq * v->hq * v->dv);
}

static void close_fill(filled *f) {
    free(f->q);
    free(f->k);
    free(f->v);
    free(f->d_o);
    dkv_freeInputs(&f->in);
    dkv_freeLayout(&f->l);
    dkv_freeProblem(&f->p);
}

/* Scores of row r of segment seg, head h, into s [keys seen by the segment]; -inf where masked. Returns the
 * count. */
static int64_t row_scores(const filled *f, int32_t seg, int64_t r, int32_t h, double *s) {
    const dualkv_problem *v = &f->l.view;
    const dualkv_segment *g = &v->segments[seg];
    const double *q = f->q + ((g->q_start + r) * v->hq + h) * v->dqk;
    int32_t kvh = h / (v->hq / v->hkv);
    int64_t n = 0;
    for (int32_t i = 0; i < g->range_count; i++) {
        const dualkv_range *range = &v->ranges[g->range_begin + i];
        for (int64_t j = 0; j < range->len; j++, n++) {
            const double *k = f->k + ((range->k_start + j) * v->hkv + kvh) * v->dqk;
            s[n] = 0;
            for (int32_t c = 0; c < v->dqk; c++) s[n] += q[c] * k[c];
            s[n] = dkv_maskSees(&f->p, seg, r, n) ? s[n] * v->scale : -INFINITY;
        }
    }
    return n;
}

/* The key with most mass, and that mass. */
static double top_mass(const double *s, int64_t n, int64_t *at) {
    double sum = 0;
    *at = 0;
    for (int64_t j = 1; j < n; j++)
        if (s[j] > s[*at]) *at = j;
    for (int64_t j = 0; j < n; j++) sum += exp(s[j] - s[*at]);
    return 1 / sum;
}

static void test_every_fill_is_finite(void **state) {
    (void)state;
    static const char *const dtypes[] = {"bf16", "fp16", "fp32"};
    static const char *const dims[] = {"1", "8", "72", "192:128", "256"};
    const char *help, *name;
    for (int i = 0; (name = dkv_listFill(i, &help)); i++) {
        assert_true(strlen(help) > 8);
        if (strchr(name, ':')) continue;
        assert_true(dkv_knownFill(name));
        for (int d = 0; d < 15; d++) {
            char line[200];
            filled f;
            snprintf(line, sizeof line,
                     "shape=19+7,2x5/0+3,0 heads=4:2 dim=%s dtype=%s mask=window:6:2 fill=%s seed=%d",
                     dims[d / 3], dtypes[d % 3], name, d);
            open_fill(line, &f);
            bool planted = strstr(name, "resp") != NULL;
            int64_t n = f.l.view.tq * 4 * f.p.dqk, odd = 0, zero = 0;
            for (int64_t e = 0; e < n; e++) odd += !isfinite(f.q[e]), zero += f.q[e] == 0;
            assert_true(planted ? odd == 5 * 4 * f.p.dqk || odd == 7 * 4 * f.p.dqk || odd == 3 * 4 * f.p.dqk
                                : !odd);
            assert_true(zero < n / 10 || !strcmp(name, "exact"));
            n = f.l.view.tk * 2 * f.p.dv;
            for (int64_t e = odd = 0; e < n; e++) odd += !isfinite(f.v[e]);
            assert_true(planted == (odd > 0));
            n = f.l.view.tq * 4 * f.p.dv;
            for (int64_t e = odd = zero = 0; e < n; e++) odd += !isfinite(f.d_o[e]), zero += f.d_o[e] == 0;
            assert_true(!odd && zero < n / 2);
            close_fill(&f);
        }
    }
    assert_false(dkv_knownFill("recorded"));
    assert_false(dkv_knownFill("recorded:"));
    assert_false(dkv_knownFill("norma"));
    assert_false(dkv_knownFill("normal:x"));
}

/* The definition, not the code: element (row, head, dim) is the deviate of its index. */
static void test_normal(void **state) {
    (void)state;
    filled f;
    open_fill("shape=5k+3,4/2 heads=3:1 dim=7:5 dtype=fp32 seed=9 dlse=on sinklogit=2", &f);
    for (int64_t i = 0; i < f.l.view.tq * 3 * 7; i++)
        assert_true(f.q[i] == (double)(float)dkv_normal(9, DKV_STREAM_Q, 0, (uint64_t)i));
    for (int64_t i = 0; i < f.l.view.tk * 5; i++)
        assert_true(f.v[i] == (double)(float)dkv_normal(9, DKV_STREAM_V, 0, (uint64_t)i));
    for (int64_t i = 0; i < f.l.view.tq * 3; i++)
        assert_true(f.in.d_lse[i] == (float)dkv_normal(9, DKV_STREAM_DLSE, 0, (uint64_t)i));
    for (int h = 0; h < 3; h++) assert_true(fabsf(f.in.sink[h] - 2) < 0.5f);
    assert_true(f.in.sink[0] != f.in.sink[1]);
    close_fill(&f);
}

/* Mass sits on one key, and over the rows each kind of edge is hit. */
static void test_needle(void **state) {
    (void)state;
    static const char *const masks[] = {"causal", "full", "window:33:3", "chunk:40", "block:8:0.3:5"};
    for (int m = 0; m < 5; m++) {
        char line[200];
        double s[1024];
        int64_t at;
        filled f;
        int first = 0, last = 0, start = 0, tile = 0, rows = 0;
        snprintf(line, sizeof line, "shape=150+90,70 heads=2:1 dim=64 mask=%s fill=needle", masks[m]);
        open_fill(line, &f);
        for (int32_t i = 0; i < 3; i++)
            for (int64_t r = 0; r < f.p.nodes[i].len; r++)
                for (int32_t h = 0; h < 2; h++) {
                    int64_t n = row_scores(&f, i, r, h, s), lo = 0, hi = n - 1;
                    while (lo < n && s[lo] == -INFINITY) lo++;
                    while (hi >= 0 && s[hi] == -INFINITY) hi--;
                    if (hi < 0) continue; /* sees no key */
                    assert_true(top_mass(s, n, &at) > 0.9);
                    rows++;
                    first += at == lo;
                    last += at == hi;
                    start += i && at == 150;
                    tile += at < 150 && at > 1 && (at + 1) % 16 < 3;
                }
        assert_true(rows > 300 && first > 10 && last > 10 && tile > 10);
        assert_true(start > (m == 4 ? 0 : 5) || m == 4);
        close_fill(&f);
    }
}

static void test_dominant(void **state) {
    (void)state;
    filled f;
    double s[512];
    int64_t at;
    open_fill("shape=150+90,70/0+40 heads=2:1 fill=dominant", &f);
    for (int64_t r = 80; r < 150; r++) {
        assert_true(top_mass(s, row_scores(&f, 0, r, 1, s), &at) > 0.9);
        assert_int_equal(at, 75);
    }
    for (int64_t r = 0; r < 70; r++) assert_true(top_mass(s, row_scores(&f, 2, r, 0, s), &at) > 0.9);
    for (int64_t r = 0; r < 40; r++) assert_true(top_mass(s, row_scores(&f, 4, r, 0, s), &at) > 0.9);
    close_fill(&f);
}

/* Where the largest score of each row lies, and its size. */
static void test_order_and_shift(void **state) {
    (void)state;
    filled f;
    double s[512];
    int64_t at, late = 0, early = 0;
    open_fill("shape=150+90 fill=ascending", &f);
    for (int64_t r = 0; r < 90; r++) {
        top_mass(s, row_scores(&f, 1, r, 0, s), &at);
        late += at >= 150 + r - 30;
    }
    assert_true(late > 80);
    close_fill(&f);
    open_fill("shape=150+90 fill=descending", &f);
    for (int64_t r = 0; r < 90; r++) {
        top_mass(s, row_scores(&f, 1, r, 0, s), &at);
        early += at < 40;
    }
    assert_true(early > 80);
    close_fill(&f);
    open_fill("shape=20+10 fill=lowlogit", &f);
    for (int64_t r = 0; r < 10; r++) {
        int64_t n = row_scores(&f, 1, r, 0, s);
        top_mass(s, n, &at);
        assert_true(s[at] < -90 && s[at] > -110);
    }
    close_fill(&f);
    for (int own = 0; own < 2; own++) {
        open_fill(own ? "shape=20+10 fill=ownhot" : "shape=20+10 fill=prefixhot", &f);
        for (int64_t r = 0; r < 10; r++) {
            row_scores(&f, 1, r, 0, s);
            double gap = s[20] - s[3];
            assert_true(fabs(own ? gap - 100 : gap + 100) < 20);
        }
        close_fill(&f);
    }
}

static void test_structure(void **state) {
    (void)state;
    filled f;
    open_fill("shape=9+3x(4+2x5),2/9+4 heads=2:1 dim=8 fill=duplicated", &f);
    const dualkv_segment *s = f.l.view.segments;
    for (int e = 0; e < 4 * 16; e++) assert_true(f.q[s[1].q_start * 16 + e] == f.q[s[7].q_start * 16 + e]);
    for (int e = 0; e < 5 * 8; e++) assert_true(f.v[s[2].k_start * 8 + e] == f.v[s[6].k_start * 8 + e]);
    for (int e = 0; e < 2 * 16; e++)
        assert_true(f.d_o[s[1].q_start * 16 + e] == f.d_o[s[10].q_start * 16 + e]);
    assert_true(f.k[0] != f.k[s[11].k_start * 8] && f.k[0] != f.k[s[1].k_start * 8]);
    close_fill(&f);
    open_fill("shape=9+5 heads=2:2 dim=8 fill=dupkeys", &f);
    for (int e = 0; e < 16; e++) assert_true(f.k[4 * 16 + e] == f.k[7 * 16 + e] && f.k[e] != f.k[4 * 16 + e]);
    assert_true(f.v[4 * 16] != f.v[5 * 16]);
    close_fill(&f);
    open_fill("shape=9+5 heads=2:2 dim=8 fill=constv", &f);
    for (int t = 1; t < 14; t++)
        for (int e = 0; e < 16; e++) assert_true(f.v[t * 16 + e] == f.v[e]);
    assert_true(f.v[0] != f.v[8] && f.d_o[0] != f.d_o[16]);
    close_fill(&f);
    open_fill("shape=90+50 dim=8 fill=ties", &f);
    int same[3] = {0};
    for (int t = 0; t < 140; t++)
        for (int u = 0; u < 3; u++) same[u] += f.k[t * 8] == f.k[u * 8];
    assert_true(same[0] > 20);
    close_fill(&f);
    open_fill("shape=90+50 dim=8 fill=exact dlse=on", &f);
    for (int e = 0; e < 140 * 8; e++)
        assert_true(f.q[e] == 0 && f.v[e] == floor(f.v[e]) && fabs(f.v[e]) <= 8);
    for (int e = 0; e < 140; e++) assert_true(f.in.d_lse[e] == floorf(f.in.d_lse[e]));
    close_fill(&f);
    open_fill("shape=90+50 fill=aligned", &f);
    double dot = 0, dd = 0, vv = 0;
    for (int e = 0; e < 64; e++) dot += f.v[e] * f.d_o[e], dd += f.d_o[e] * f.d_o[e], vv += f.v[e] * f.v[e];
    assert_true(dot / sqrt(dd * vv) > 0.95);
    close_fill(&f);
}

static void test_victim(void **state) {
    (void)state;
    static const struct {
        const char *shape;
        int32_t victim;
    } cases[] = {{"9", -1}, {"9/8", 1}, {"9+0", -1}, {"9/8+0", 1}, {"9+4", 1}, {"9+(4+2)", 2}, {"9+0,5", 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dkv_problem p;
        dkv_layout l;
        dkv_inputs in;
        dkv_err err = {0};
        char line[100];
        snprintf(line, sizeof line, "shape=%s fill=nanresp", cases[i].shape);
        assert_int_equal(dkv_parseProblem(line, dkv_knownFill, &p, &err), 0);
        assert_int_equal(dkv_victimNode(&p), cases[i].victim);
        assert_int_equal(dkv_makeLayout(&p, &l, &err), 0);
        assert_int_equal(dkv_allocInputs(&l, &in, &err), 0);
        assert_int_equal(dkv_fillInputs(&p, &l, "data", &in, &err), cases[i].victim < 0 ? DKV_EUSER : 0);
        dkv_freeInputs(&in);
        dkv_freeLayout(&l);
        dkv_freeProblem(&p);
    }
}

/* Tensors large enough for several threads: an element is still the deviate of its own index. */
static void test_threads(void **state) {
    filled f;
    (void)state;
    open_fill("shape=1500k+2x(700+3x101)/33 heads=8:2 dim=96:40 dtype=fp32 seed=5", &f);
    const dualkv_problem *v = &f.l.view;
    const double *got[4] = {f.q, f.k, f.v, f.d_o};
    const int64_t n[4] = {v->tq * v->hq * v->dqk, v->tk * v->hkv * v->dqk, v->tk * v->hkv * v->dv,
                          v->tq * v->hq * v->dv};
    const uint32_t stream[4] = {DKV_STREAM_Q, DKV_STREAM_K, DKV_STREAM_V, DKV_STREAM_DO};
    assert_true(n[0] > 5 << 18 && n[1] > 2 << 18);
    for (int i = 0; i < 4; i++) {
        double *want = malloc((size_t)n[i] * sizeof *want);
        assert_non_null(want);
        dkv_fillNormals(5, stream[i], 0, 0, n[i], want);
        for (int64_t j = 0; j < n[i]; j++)
            if (got[i][j] != (float)want[j]) fail_msg("tensor %d differs at %lld", i, (long long)j);
        free(want);
    }
    close_fill(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_fill_is_finite),
        cmocka_unit_test(test_normal),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_needle),
        cmocka_unit_test(test_dominant),
        cmocka_unit_test(test_order_and_shift),
        cmocka_unit_test(test_structure),
        cmocka_unit_test(test_victim),
    };
    return cmocka_run_group_tests_name("fill", tests, NULL, NULL);
}
