/* mask_pair.h: pair by pair and block by block what mask.c says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "mask.h"
#include "mask_pair.h"
#include "small_problems.h"

static void eachNode(void (*f)(const dkv_problem *, int32_t)) {
    for (size_t s = 0; s < DKV_COUNT(dkv_small_shapes); s++)
        for (size_t m = 0; m < DKV_COUNT(dkv_small_masks); m++) {
            char line[256];
            dkv_problem p;
            dkv_err err;
            snprintf(line, sizeof line, "shape=%s mask=%s", dkv_small_shapes[s], dkv_small_masks[m]);
            if (dkv_parseProblem(line, NULL, &p, &err)) fail_msg("%s: %s", line, err.text);
            for (int32_t n = 0; n < p.n_nodes; n++) f(&p, n);
            dkv_freeProblem(&p);
        }
}

static void checkPairs(const dkv_problem *p, int32_t n) {
    const dkv_mask_view v = dkv_viewMask(p, n);
    for (int64_t r = 0; r < p->nodes[n].len; r++)
        for (int64_t j = 0; j < v.context + v.len; j++)
            assert_int_equal(dkv_pairSees(&v, r, j), dkv_maskSees(p, n, r, j));
}

static void checkBlocks(const dkv_problem *p, int32_t n) {
    const dkv_mask_view v = dkv_viewMask(p, n);
    const int64_t rows = v.len, keys = v.context + v.len;
    for (int64_t r0 = 0; r0 < rows; r0++)
        for (int64_t r1 = r0; r1 <= rows; r1++)
            for (int64_t j0 = 0; j0 < keys; j0++)
                for (int64_t j1 = j0; j1 <= keys; j1++)
                    assert_int_equal(dkv_pairBlock(&v, r0, r1, j0, j1), dkv_maskBlock(p, n, r0, r1, j0, j1));
}

/* No pair is lost at the ends. */
static void checkTrims(const dkv_problem *p, int32_t n) {
    const dkv_mask_view v = dkv_viewMask(p, n);
    const int64_t keys = v.context + v.len;
    for (int64_t r0 = 0; r0 < v.len; r0++)
        for (int64_t r1 = r0 + 1; r1 <= v.len; r1++) {
            int64_t a = 0, b = keys;
            int vis = dkv_pairTrim(&v, r0, r1, &a, &b);
            assert_int_equal(vis, dkv_maskBlock(p, n, r0, r1, 0, keys));
            assert_int_equal(dkv_maskBlock(p, n, r0, r1, 0, a), 0);
            assert_int_equal(dkv_maskBlock(p, n, r0, r1, b, keys), 0);
            assert_true(0 <= a && a <= b && b <= keys && (vis != 1 || b - a == keys));
        }
}

static void pairs_agree(void **state) { (void)state, eachNode(checkPairs); }
static void blocks_agree(void **state) { (void)state, eachNode(checkBlocks); }
static void trims_keep_all_pairs(void **state) { (void)state, eachNode(checkTrims); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_agree),
        cmocka_unit_test(blocks_agree),
        cmocka_unit_test(trims_keep_all_pairs),
    };
    return cmocka_run_group_tests_name("mask_pair", tests, NULL, NULL);
}
