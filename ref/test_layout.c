#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "layout.h"
#include "mask.h"
#include "small_problems.h"
#include "walk.h"

static void open_line(const char *line, dkv_problem *p, dkv_layout *l) {
    dkv_err err = {0};
    if (dkv_parseProblem(line, NULL, p, &err)) fail_msg("%s", err.text);
    if (dkv_makeLayout(p, l, &err)) fail_msg("%s", err.text);
}

static const char *const shapes[] = {
    "17",           "0+4x5",           "9+0",         "13+7,2x3/5+3x2",
    "20+3x(4+2x5)", "0+3x(0+2x5)",     "31k+4@7,4@0", "11+(6+5,(4+3)@9)",
    "8+(5+4@3)",    "1+2x(1+2x(1+1))", "7k+(2+3)/3",  "6+(5+4)@0,3@4",
};

static const char *const masks[] = {
    "causal",        "full",          "prefix",      "window:1",    "window:4", "window:4:3",
    "window:2:9",    "window:99",     "window:3:1",  "chunk:1",     "chunk:4",  "chunk:99",
    "block:1:0.5:3", "block:4:0.4:7", "block:3:0:1", "block:5:1:1",
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes, N_MASKS = sizeof masks / sizeof *masks };

/* Packed key rows that row r of segment s sees, in order, into out; returns how many. */
static int64_t row_keys(const dualkv_problem *v, const dualkv_segment *s, int64_t r, int64_t *out) {
    int64_t n = 0;
    for (int32_t k = 0; k < s->range_count; k++) {
        const dualkv_range *g = &v->ranges[s->range_begin + k];
        for (int64_t j = 0; j < g->len; j++)
            if (dkv_walkSees(v, s, g, r, j)) out[n++] = g->k_start + j;
    }
    return n;
}

static void test_ranges(void **state) {
    (void)state;
    dkv_problem p;
    dkv_layout l;
    open_line("shape=10+(6+5,0,(4+3)@9)/5k+2@3 heads=4:2 alibi=on", &p, &l);
    const dualkv_problem *v = &l.view;
    /* root 10 | 6 | 5 | 0 | 4 | 3 || 5k | 2 */
    assert_int_equal(v->n_segments, 8);
    assert_int_equal(v->tq, 30);
    assert_int_equal(v->tk, 35);
    assert_int_equal(v->max_q_len, 10);
    assert_int_equal(v->max_k_len, 21);
    const dualkv_segment *s = &v->segments[2]; /* the 5: sees 10, 6, itself */
    assert_int_equal(s->range_count, 3);
    assert_int_equal(s->context, 16);
    assert_int_equal(v->ranges[s->range_begin + 2].k_start, 16);
    assert_int_equal(v->ranges[s->range_begin + 2].pos, 16);
    s = &v->segments[3]; /* no token of its own */
    assert_int_equal(s->range_count, 2);
    s = &v->segments[5]; /* the 3 below (4 @9): 9 of the root, 4, itself */
    assert_int_equal(s->range_count, 3);
    assert_int_equal(s->context, 13);
    assert_int_equal(v->ranges[s->range_begin].len, 9);
    assert_int_equal(v->ranges[s->range_begin + 1].pos, 9);
    assert_int_equal(v->segments[6].q_len, 0);
    s = &v->segments[7];
    assert_int_equal(s->q_start, 28);
    assert_int_equal(s->k_start, 33);
    assert_int_equal(v->ranges[s->range_begin].k_start, 28);
    assert_int_equal(v->ranges[s->range_begin].len, 3);
    assert_non_null(v->alibi_slopes);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
}

/* Pairs against brute force, and every replicated row, copies included, sees what its packed row sees. */
static void check_line(const char *line) {
    dkv_problem p;
    dkv_layout l, rep;
    dkv_err err = {0};
    int64_t a[512], b[512], pairs = 0, *qs, *ks, own_rows = 0;
    uint8_t *own;
    open_line(line, &p, &l);
    for (int32_t i = 0; i < l.view.n_segments; i++)
        for (int64_t r = 0; r < l.view.segments[i].q_len; r++)
            pairs += row_keys(&l.view, &l.view.segments[i], r, a);
    if (dkv_countPairs(&p) != pairs)
        fail_msg("%s: %ld pairs, not %ld", line, (long)dkv_countPairs(&p), (long)pairs);
    if (dkv_makeReplicated(&p, &l, &rep, &qs, &ks, &own, &err)) fail_msg("%s", err.text);
    const dualkv_problem *v = &rep.view;
    for (int32_t i = 0; i < v->n_segments; i++)
        for (int64_t r = 0; r < v->segments[i].q_len; r++) {
            const dualkv_segment *s = &v->segments[i], *t = l.view.segments;
            int64_t row = s->q_start + r, n = row_keys(v, s, r, a);
            while (!(qs[row] >= t->q_start && qs[row] < t->q_start + t->q_len)) t++;
            if (row_keys(&l.view, t, qs[row] - t->q_start, b) != n)
                fail_msg("%s: replicated row %ld sees %ld keys", line, (long)row, (long)n);
            for (int64_t k = 0; k < n; k++) assert_int_equal(ks[a[k]], b[k]);
            own_rows += own[row];
        }
    assert_int_equal(own_rows, l.view.tq);
    free(qs);
    free(ks);
    free(own);
    dkv_freeLayout(&rep);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
}

static bool is_admissible(const char *line) {
    dkv_problem p;
    dkv_err err = {0};
    if (dkv_parseProblem(line, NULL, &p, &err)) fail_msg("%s: %s", line, err.text);
    const bool yes = dkv_maskAdmissible(&p, &err) == 0;
    dkv_freeProblem(&p);
    return yes;
}

static void test_pairs_and_copies(void **state) {
    (void)state;
    for (int s = 0; s < N_SHAPES; s++)
        for (size_t m = 0; m < N_MASKS || dkv_smallMask(m - N_MASKS); m++) {
            char line[200];
            const char *mask = m < N_MASKS ? masks[m] : dkv_smallMask(m - N_MASKS);
            snprintf(line, sizeof line, "shape=%s mask=%s", shapes[s], mask);
            if (is_admissible(line)) check_line(line);
        }
}

static void test_plain_or_chain(void **state) {
    (void)state;
    static const struct {
        const char *line;
        int segments, groups;
    } cases[] = {{"shape=9+2x3 mask=causal", 3, 3},
                 {"shape=9+2x3,0 mask=full", 5, 3},
                 {"shape=0+(0+2) mask=prefix", 3, 1},
                 {"shape=9k+2x3/4+1", 6, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dkv_problem p;
        dkv_layout l, rep;
        dkv_err err = {0};
        open_line(cases[i].line, &p, &l);
        assert_int_equal(dkv_makeReplicated(&p, &l, &rep, NULL, NULL, NULL, &err), 0);
        assert_int_equal(rep.view.n_segments, cases[i].segments);
        assert_int_equal(rep.view.n_groups, cases[i].groups);
        dkv_freeLayout(&rep);
        dkv_freeLayout(&l);
        dkv_freeProblem(&p);
    }
}

static void test_large(void **state) {
    (void)state;
    dkv_problem p;
    dkv_layout l;
    open_line("shape=8192+32x1024 heads=32:8 dim=128", &p, &l);
    int64_t pairs = (int64_t)8192 * 8193 / 2 + 32 * ((int64_t)1024 * 8192 + 1024 * 1025 / 2);
    assert_int_equal(dkv_countPairs(&p), pairs);
    assert_true(dkv_forwardFlops(&p) == 4.0 * 128 * 32 * (double)pairs);
    assert_true(dkv_backwardFlops(&p) == 10.0 * 128 * 32 * (double)pairs);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
    open_line("shape=1099511627776 mask=full", &p, &l);
    assert_true(dkv_countPairs(&p) == INT64_MAX);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
    open_line("shape=1048576 mask=block:1:0.5:1", &p, &l);
    assert_int_equal(dkv_countPairs(&p), ((int64_t)1 << 38) + ((int64_t)1 << 18)); /* half of the triangle */
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
}

static void test_slopes(void **state) {
    (void)state;
    float s[12];
    dkv_fillSlopes(8, s);
    for (int h = 0; h < 8; h++) assert_true(s[h] == 1.0f / (float)(2 << h));
    dkv_fillSlopes(12, s); /* 8 of 8 heads, then every other one of 16 */
    assert_true(s[7] == 1.0f / 256);
    assert_true(s[8] == 0.70710678f);
    assert_true(s[9] == 0.35355339f);
    dkv_fillSlopes(1, s);
    assert_true(s[0] == 1.0f / 256);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranges),         cmocka_unit_test(test_pairs_and_copies),
        cmocka_unit_test(test_plain_or_chain), cmocka_unit_test(test_large),
        cmocka_unit_test(test_slopes),
    };
    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
