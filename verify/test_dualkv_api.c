/* The public interface says what the rooms below it say: lines, expansion, masks, inputs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/dtype.h"
#include "../ref/small_problems.h"
#include "dualkv.h"

static dualkv_case *openLine(const char *line) {
    dualkv_error err;
    dualkv_case *c = NULL;
    if (dualkv_open(line, &c, &err)) fail_msg("%s: %s", line, err.text);
    return c;
}

static void errors_point_at_the_word(void **state) {
    (void)state;
    static const struct {
        const char *line;
        int code, position;
    } bad[] = {
        {"shape=4 dim=300", DUALKV_USER_ERROR, 13}, {"shape=4+", DUALKV_USER_ERROR, 9},
        {"shape=4 colour=red", DUALKV_USER_ERROR, 9}, {"", DUALKV_USER_ERROR, 0},
        {"shape=4 fill=nothing", DUALKV_USER_ERROR, 14}, {"shape=4+2 mask=bidir", DUALKV_REFUSED, 0},
    };
    dualkv_error err;
    char text[64];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dualkv_case *c = (void *)1;
        int code = dualkv_open(bad[i].line, &c, &err);
        assert_null(c);
        if (code != bad[i].code || err.code != code || err.position != bad[i].position || !err.text[0])
            fail_msg("'%s': %d at %d: %s", bad[i].line, code, err.position, err.text);
    }
    assert_int_equal(dualkv_open("shape=4+", &(dualkv_case *){NULL}, NULL), DUALKV_USER_ERROR);
    assert_int_equal(dualkv_canonical("dim=32   shape=7+2,2 seed=1", text, sizeof text, &err), DUALKV_OK);
    assert_string_equal(text, "shape=7+2x2 dim=32");
    assert_int_equal(dualkv_canonical("shape=7+2,2", text, 4, &err), DUALKV_USER_ERROR);
    dualkv_case *c = NULL;
    assert_int_equal(dualkv_open("shape=4 dim=8", &c, &err), DUALKV_OK);
    assert_int_equal(dualkv_inputs(c, DUALKV_PACKED, DUALKV_Q, DUALKV_BITS, NULL, 4 * 8 * 2, &err), DUALKV_USER_ERROR);
    assert_int_equal(dualkv_mask(c, 0, 1, NULL, &err), DUALKV_USER_ERROR);
    assert_int_equal(dualkv_encode(DUALKV_BF16, NULL, 1, text, &err), DUALKV_USER_ERROR);
    assert_int_equal(dualkv_decode(DUALKV_BF16, text, 1, NULL, &err), DUALKV_USER_ERROR);
    dualkv_close(c);
}

/* What a kernel is told of each segment is what the whole mask says of its rows and the keys of its ranges. */
static void checkVisible(const char *line, const dualkv_problem *v, const uint8_t *seen) {
    for (int32_t i = 0; i < v->n_segments; i++) {
        const dualkv_segment *s = &v->segments[i];
        const int64_t keys = s->context + s->k_len;
        uint8_t *own = malloc((size_t)(s->q_len * keys + 1)), *at = own;
        assert_int_equal(dualkv_visible(v, s, own, NULL), 0);
        for (int64_t r = 0; r < s->q_len; r++)
            for (int32_t g = 0; g < s->range_count; g++) {
                const dualkv_range *range = &v->ranges[s->range_begin + g];
                if (memcmp(at, seen + (s->q_start + r) * v->tk + range->k_start, (size_t)range->len)) fail_msg("%s: segment %d", line, i);
                at += range->len;
            }
        assert_true(at - own == s->q_len * keys);
        free(own);
    }
}

/* Pairs seen, row by row, are those that the layout counts; and no row sees another group. */
static void masks_are_those_of_the_reference(void **state) {
    (void)state;
    char line[200];
    int checked = 0;
    for (size_t s = 0; s < sizeof dkv_small_shapes / sizeof *dkv_small_shapes; s++)
        for (size_t m = 0; dkv_smallMask(m); m++) {
            dkv_problem p;
            dualkv_case *c = NULL;
            snprintf(line, sizeof line, "shape=%s mask=%s dim=4", dkv_small_shapes[s], dkv_smallMask(m));
            if (dualkv_open(line, &c, NULL) == DUALKV_REFUSED) continue;
            assert_non_null(c);
            assert_int_equal(dkv_parseProblem(line, NULL, &p, NULL), 0);
            const dualkv_problem *v = dualkv_view(c, DUALKV_PACKED);
            uint8_t *seen = malloc((size_t)(v->tq * v->tk + 1)), *row = malloc((size_t)v->tk + 1);
            int64_t pairs = 0;
            assert_int_equal(dualkv_mask(c, 0, v->tq, seen, NULL), 0);
            for (int64_t i = 0; i < v->tq * v->tk; i++) pairs += seen[i];
            if (pairs != dkv_countPairs(&p)) fail_msg("%s: %lld pairs", line, (long long)pairs);
            for (int64_t t = 0; t < v->tq; t++) {
                assert_int_equal(dualkv_mask(c, t, 1, row, NULL), 0);
                assert_memory_equal(row, seen + t * v->tk, (size_t)v->tk);
            }
            checkVisible(line, v, seen);
            assert_int_equal(dualkv_mask(c, 1, v->tq, seen, NULL), DUALKV_USER_ERROR);
            free(seen);
            free(row);
            dkv_freeProblem(&p);
            dualkv_close(c);
            checked++;
        }
    assert_true(checked > 100);
}

static void sequences_of_a_tree(void **state) {
    (void)state;
    static const int64_t cu[] = {0, 3, 6, 10, 16}, from[] = {0, 1, 2, 0, 3, 4, 0, 1, 2, 5, 0, 1, 2, 5, 6, 7};
    static const uint8_t mine[] = {1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1};
    static const int64_t at[] = {0, 1, 2, 1, 2, 3, 4, 5}, cu_q[] = {0, 2, 3}, cu_k[] = {0, 5, 9};
    int64_t q[16], k[16];
    uint8_t own[16];
    dualkv_case *c = openLine("shape=3+2@1,(1+2) dim=4");
    assert_int_equal(dualkv_sequences(c), 4);
    assert_int_equal(dualkv_view(c, DUALKV_REPLICATED)->tq, 16);
    assert_int_equal(dualkv_cu_seqlens(c, q, k, NULL), 0);
    assert_memory_equal(q, cu, sizeof cu);
    assert_memory_equal(k, cu, sizeof cu);
    assert_int_equal(dualkv_expansion(c, q, k, own, NULL), 0);
    assert_memory_equal(q, from, sizeof from);
    assert_memory_equal(k, from, sizeof from);
    assert_memory_equal(own, mine, sizeof mine);
    assert_int_equal(dualkv_positions(c, DUALKV_PACKED, q, NULL, NULL), 0);
    assert_memory_equal(q, at, sizeof at);
    dualkv_close(c);
    c = openLine("shape=4k+2@3,1@3 dim=4"); /* a context has keys alone */
    assert_int_equal(dualkv_cu_seqlens(c, q, k, NULL), 0);
    assert_memory_equal(q, cu_q, sizeof cu_q);
    assert_memory_equal(k, cu_k, sizeof cu_k);
    assert_null(dualkv_view(c, 7));
    dualkv_close(c);
}

static size_t elements(const dualkv_case *c, int layout, int input) {
    int64_t shape[3];
    int rank = dualkv_shape(c, layout, input, shape);
    return rank ? (size_t)(shape[0] * shape[1] * shape[2]) : 0;
}

/* Both layouts, every tensor and form, against the generator and the library's own expansion. */
static void compareInputs(const char *line) {
    dualkv_case *c = openLine(line);
    dkv_problem p;
    dkv_layout l, r;
    dkv_inputs in[2];
    int64_t *qs, *ks;
    uint8_t *own;
    dkv_err err;
    assert_int_equal(dkv_parseProblem(line, NULL, &p, &err), 0);
    assert_int_equal(dkv_makeLayout(&p, &l, &err), 0);
    assert_int_equal(dkv_allocInputs(&l, &in[0], &err), 0);
    assert_int_equal(dkv_fillInputs(&p, &l, dkv_dataDir(), &in[0], &err), 0);
    assert_int_equal(dkv_makeReplicated(&p, &l, &r, &qs, &ks, &own, &err), 0);
    assert_int_equal(dkv_replicateInputs(&l, &r, qs, ks, own, &in[0], &in[1], &err), 0);
    for (int layout = 0; layout < 2; layout++) {
        const dkv_inputs *w = &in[layout];
        const void *want[DUALKV_N_INPUTS] = {w->q, w->k, w->v, w->d_o, w->d_lse, w->sink};
        for (int id = 0; id < DUALKV_N_INPUTS; id++) {
            const dualkv_dtype type = id < DUALKV_DLSE ? p.dtype : DUALKV_FP32;
            const size_t n = elements(c, layout, id), size = dkv_dtypeSize(type);
            uint8_t *bits = malloc(n * size + 1);
            double *wide = malloc((n + 1) * sizeof *wide), *truth = malloc((n + 1) * sizeof *truth);
            float *single = malloc((n + 1) * sizeof *single);
            assert_int_equal(want[id] != NULL, n > 0);
            assert_int_equal(dualkv_inputs(c, layout, id, DUALKV_BITS, bits, n * size + 1, NULL), DUALKV_USER_ERROR);
            if (n) {
                dkv_decodeArray(want[id], type, n, truth);
                assert_int_equal(dualkv_inputs(c, layout, id, DUALKV_BITS, bits, n * size, NULL), 0);
                assert_memory_equal(bits, want[id], n * size);
                assert_int_equal(dualkv_inputs(c, layout, id, DUALKV_DOUBLE, wide, n * 8, NULL), 0);
                assert_memory_equal(wide, truth, n * 8);
                assert_int_equal(dualkv_inputs(c, layout, id, DUALKV_FLOAT, single, n * 4, NULL), 0);
                for (size_t i = 0; i < n; i++) assert_true((double)single[i] == truth[i]);
                assert_int_equal(dualkv_encode((int)type, wide, n, bits, NULL), 0);
                assert_memory_equal(bits, want[id], n * size);
            }
            free(bits);
            free(wide);
            free(truth);
            free(single);
        }
        dkv_freeInputs(&in[layout]);
    }
    free(qs);
    free(ks);
    free(own);
    dkv_freeLayout(&l);
    dkv_freeLayout(&r);
    dkv_freeProblem(&p);
    dualkv_close(c);
}

static void inputs_are_those_of_the_generator(void **state) {
    (void)state;
    compareInputs("shape=5+3@2,(2+1x2)/4 heads=4:2 dim=8:12 sinklogit=0.5 dlse=on seed=9");
    compareInputs("shape=6k+3@2,4 heads=2:1 dim=8 dtype=fp16 mask=prefix");
    compareInputs("shape=700+30x20 heads=2:1 dim=16 dtype=fp32 grad=off fill=exact");
}

static void suites_are_their_lines(void **state) {
    (void)state;
    dualkv_lines *s = NULL;
    dkv_suite want;
    char name[64];
    int named = 0;
    dualkv_error err;
    assert_int_equal(dkv_loadSuite("smoke", &want, NULL), 0);
    assert_int_equal(dualkv_open_suite("smoke", &s, &err), 0);
    assert_int_equal(dualkv_count_lines(s), want.n);
    for (int i = 0; i < want.n; i++) assert_string_equal(dualkv_suite_line(s, i), want.lines[i]);
    assert_null(dualkv_suite_line(s, want.n));
    dualkv_close_suite(s);
    dkv_freeSuite(&want);
    for (int i = 0; dualkv_suite_name(i, name, sizeof name); i++) named += !strcmp(name, "ci");
    assert_int_equal(named, 1);
    assert_int_equal(dualkv_open_suite("nosuch", &s, &err), DUALKV_USER_ERROR);
    assert_null(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_point_at_the_word),
        cmocka_unit_test(masks_are_those_of_the_reference),
        cmocka_unit_test(sequences_of_a_tree),
        cmocka_unit_test(inputs_are_those_of_the_generator),
        cmocka_unit_test(suites_are_their_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
