/* tensors.c: sizes, refusals, and E against its transpose. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mask.h"
#include "sequence.h"
#include "small_problems.h"

typedef struct pair {
    dkv_problem p;
    dkv_layout packed, rep;
    int64_t *q_source, *k_source;
    uint8_t *own;
} pair;

static void openPair(const char *line, pair *a) {
    dkv_err err;
    if (dkv_parseProblem(line, NULL, &a->p, &err)) fail_msg("%s: %s", line, err.text);
    assert_int_equal(dkv_makeLayout(&a->p, &a->packed, &err), 0);
    assert_int_equal(
        dkv_makeReplicated(&a->p, &a->packed, &a->rep, &a->q_source, &a->k_source, &a->own, &err), 0);
}

static void closePair(pair *a) {
    free(a->q_source);
    free(a->k_source);
    free(a->own);
    dkv_freeLayout(&a->packed);
    dkv_freeLayout(&a->rep);
    dkv_freeProblem(&a->p);
}

static void counts(void **state) {
    (void)state;
    int64_t n[DKV_N_OUTPUTS];
    pair a;
    openPair("shape=5k+3,2 heads=4:2 dim=6:3 sinklogit=1", &a);
    dkv_countOutputs(&a.packed, n);
    const int64_t want[] = {5 * 4 * 3, 4 * 5, 5 * 4 * 6, 10 * 2 * 6, 10 * 2 * 3, 4};
    for (int i = 0; i < DKV_N_OUTPUTS; i++) assert_int_equal(n[i], want[i]);
    closePair(&a);
    openPair("shape=5+3 dim=6 grad=off", &a);
    dkv_inputs in;
    dkv_outputs out;
    dkv_err err;
    assert_int_equal(dkv_allocInputs(&a.packed, &in, &err), 0);
    assert_int_equal(dkv_allocOutputs(&a.packed, &out, &err), 0);
    assert_true(in.q && in.k && in.v && !in.d_o && !in.d_lse && !in.sink);
    assert_true(out.o && out.lse && !out.dq && !out.dk && !out.dv && !out.dsink);
    for (int i = 0; i < DKV_N_OUTPUTS; i++)
        assert_true((dkv_outputAt(&out, (dkv_tensor_id)i) != NULL) == (i <= DKV_LSE));
    assert_string_equal(dkv_tensorName(DKV_DSINK), "dSink");
    dkv_freeInputs(&in);
    dkv_freeOutputs(&out);
    closePair(&a);
}

/* Sizes beyond memory and beyond 64 bits: refused before anything is allocated, with the size. */
static void too_large(void **state) {
    (void)state;
    dkv_layout l = {.view = {.hq = 1 << 20, .hkv = 1 << 20, .dqk = 256, .dv = 256, .grad = 1}};
    const int64_t tokens[] = {(int64_t)1 << 34, (int64_t)1 << 40};
    for (int i = 0; i < 2; i++) {
        dkv_inputs in;
        dkv_outputs out;
        dkv_err err = {0};
        l.view.tq = l.view.tk = tokens[i];
        assert_int_equal(dkv_allocInputs(&l, &in, &err), DKV_EUSER);
        assert_non_null(strstr(err.text, "inputs need "));
        assert_int_equal(dkv_allocOutputs(&l, &out, &err), DKV_EUSER);
        assert_non_null(strstr(err.text, "GiB, this machine has "));
        assert_true(!in.q && !out.o);
    }
}

/* The copies are the rows that the problem tree says, own rows once each. */
static void sourcesFollowTheTree(const pair *a) {
    dkv_starts s;
    dkv_err err;
    int64_t rows[64], q = 0, k = 0;
    assert_int_equal(dkv_makeStarts(&a->p, &s, &err), 0);
    for (int32_t n = 0; n < a->p.n_nodes; n++) {
        const dkv_node *x = &a->p.nodes[n];
        if (x->key_only || !x->len) continue;
        dkv_fillSequence(&a->p, &s, n, rows);
        int32_t root = n;
        while (a->p.nodes[root].parent >= 0) root = a->p.nodes[root].parent;
        int64_t shift = 0; /* key rows without a query before this group's */
        for (int32_t m = 0; m <= root; m++)
            if (a->p.nodes[m].key_only) shift += a->p.nodes[m].len;
        for (int64_t j = 0; j < x->context + x->len; j++) {
            assert_int_equal(a->k_source[k++], rows[j]);
            if (a->p.nodes[root].key_only && rows[j] < s.k[root] + a->p.nodes[root].len) continue;
            assert_int_equal(a->q_source[q], rows[j] - shift);
            assert_int_equal(a->own[q++], j >= x->context);
        }
    }
    assert_int_equal(q, a->rep.view.tq);
    assert_int_equal(k, a->rep.view.tk);
    dkv_freeStarts(&s);
}

static double sumProduct(const double *a, const double *b, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}

/* <E x, y> = <x, E^T y> for K, V, Q of small integers, exactly; dO of the replicated problem packs to dO. */
static void adjoint(const pair *a) {
    const dualkv_problem *v = &a->packed.view, *w = &a->rep.view;
    dkv_err err;
    dkv_inputs in, rep_in;
    dkv_outputs y, back;
    int64_t n[DKV_N_OUTPUTS];
    assert_int_equal(dkv_makeSmallInputs(&a->p, &a->packed, 3, 1, &in, &err), 0);
    const int64_t nk = v->tk * v->hkv * v->dqk, nv = v->tk * v->hkv * v->dv;
    const int64_t nq = v->tq * v->hq * v->dqk, no = v->tq * v->hq * v->dv;
    for (int64_t i = 0; i < nk; i++) ((float *)in.k)[i] = (float)(i * 7 % 23 - 11);
    for (int64_t i = 0; i < nv; i++) ((float *)in.v)[i] = (float)(i * 3 % 29 - 14);
    for (int64_t i = 0; i < nq; i++) ((float *)in.q)[i] = (float)(i * 5 % 19 - 9);
    assert_int_equal(
        dkv_replicateInputs(&a->packed, &a->rep, a->q_source, a->k_source, a->own, &in, &rep_in, &err), 0);
    assert_int_equal(dkv_allocOutputs(&a->rep, &y, &err), 0);
    assert_int_equal(dkv_allocOutputs(&a->packed, &back, &err), 0);
    dkv_countOutputs(&a->rep, n);
    for (int i = 0; i < DKV_N_OUTPUTS; i++)
        for (int64_t j = 0; j < n[i]; j++) dkv_outputAt(&y, (dkv_tensor_id)i)[j] = (double)(j * 13 % 17 - 8);
    dkv_decodeArray(rep_in.d_o, DUALKV_FP32, (size_t)n[DKV_O], y.o); /* so O packs to dO */
    for (int64_t j = 0; j < n[DKV_LSE]; j++) y.lse[j] = rep_in.d_lse[j];
    memset(back.dk, 0xff, (size_t)nk * sizeof(double)); /* old contents must not matter */
    assert_int_equal(dkv_packOutputs(&a->packed, &a->rep, a->q_source, a->k_source, a->own, &y, &back, &err),
                     0);
    double *x = calloc((size_t)(nk + nq + nv + no + n[DKV_DK] + n[DKV_DV] + n[DKV_DQ] + 1), sizeof *x);
    double *ex = x + nk + nq + nv + no;
    assert_non_null(x);
    dkv_decodeArray(in.k, DUALKV_FP32, (size_t)nk, x);
    dkv_decodeArray(rep_in.k, DUALKV_FP32, (size_t)n[DKV_DK], ex);
    assert_true(sumProduct(ex, y.dk, n[DKV_DK]) == sumProduct(x, back.dk, nk));
    dkv_decodeArray(in.v, DUALKV_FP32, (size_t)nv, x);
    dkv_decodeArray(rep_in.v, DUALKV_FP32, (size_t)n[DKV_DV], ex);
    assert_true(sumProduct(ex, y.dv, n[DKV_DV]) == sumProduct(x, back.dv, nv));
    dkv_decodeArray(in.q, DUALKV_FP32, (size_t)nq, x);
    dkv_decodeArray(rep_in.q, DUALKV_FP32, (size_t)n[DKV_DQ], ex);
    assert_true(sumProduct(ex, y.dq, n[DKV_DQ]) == sumProduct(x, back.dq, nq));
    dkv_decodeArray(in.d_o, DUALKV_FP32, (size_t)no, x);
    assert_memory_equal(x, back.o, (size_t)no * sizeof *x);
    for (int64_t j = 0; j < v->hq * v->tq; j++) assert_true(back.lse[j] == in.d_lse[j]);
    for (int h = 0; h < v->hq; h++) assert_true(back.dsink[h] == y.dsink[h] && rep_in.sink[h] == in.sink[h]);
    for (int64_t t = 0; t < w->tq; t++) /* copies carry no dO and no dLSE */
        for (int64_t h = 0; !a->own[t] && h < w->hq; h++) {
            assert_true(rep_in.d_lse[h * w->tq + t] == 0);
            for (int c = 0; c < w->dv; c++)
                assert_true(((float *)rep_in.d_o)[(t * w->hq + h) * w->dv + c] == 0);
        }
    free(x);
    dkv_freeInputs(&in);
    dkv_freeInputs(&rep_in);
    dkv_freeOutputs(&y);
    dkv_freeOutputs(&back);
}

static void expansion_and_its_transpose(void **state) {
    (void)state;
    static const char *const masks[] = {"causal", "full", "window:3:1"};
    for (size_t s = 0; s < DKV_COUNT(dkv_small_shapes); s++)
        for (size_t m = 0; m < DKV_COUNT(masks); m++) {
            char line[256];
            pair a;
            dkv_err err;
            snprintf(line, sizeof line, "shape=%s mask=%s heads=4:2 dim=3:2 dtype=fp32 sinklogit=1 dlse=on",
                     dkv_small_shapes[s], masks[m]);
            openPair(line, &a);
            if (!dkv_maskAdmissible(&a.p, &err)) {
                sourcesFollowTheTree(&a);
                adjoint(&a);
            }
            closePair(&a);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts),
        cmocka_unit_test(too_large),
        cmocka_unit_test(expansion_and_its_transpose),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
