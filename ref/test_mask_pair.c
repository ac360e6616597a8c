/* mask_pair.h: pair by pair what the definitions say, written here once more. Blocks: test_mask.c. */
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
        for (size_t m = 0; dkv_smallMask(m); m++) {
            char line[256];
            dkv_problem p;
            dkv_err err;
            snprintf(line, sizeof line, "shape=%s mask=%s", dkv_small_shapes[s], dkv_smallMask(m));
            if (dkv_parseProblem(line, NULL, &p, &err)) fail_msg("%s: %s", line, err.text);
            for (int32_t n = 0; n < p.n_nodes; n++) f(&p, n);
            dkv_freeProblem(&p);
        }
}

/* design.md section 3, word for word. Masks that came later: what kernels walk by (test_walk.c) is the second definition. */
static bool defined(const dkv_problem *p, int32_t n, int64_t r, int64_t j) {
    const int64_t i = p->nodes[n].context + r;
    const bool causal = j <= i;
    switch ((int)p->mask) {
    case DUALKV_CAUSAL: return causal;
    case DUALKV_FULL:
    case DUALKV_BIDIR: return true;
    case DUALKV_PREFIX: return causal || p->nodes[n].parent < 0;
    case DUALKV_WINDOW: return causal && (j > i - p->window || j < p->window_sinks);
    case DUALKV_CHUNK: return causal && i - i % p->chunk == j - j % p->chunk;
    case DUALKV_BLOCK:
        return causal && dualkv_block_kept(p->block_seed, i / p->block, j / p->block, p->block_density);
    default: return dkv_maskSees(p, n, r, j);
    }
}

static void checkPairs(const dkv_problem *p, int32_t n) {
    const dkv_mask_view v = dkv_viewMask(p, n);
    for (int64_t r = -1; r <= p->nodes[n].len; r++)
        for (int64_t j = -1; j <= v.context + v.len; j++) {
            const bool exists = r >= 0 && r < v.len && j >= 0 && j < v.context + v.len;
            const bool sees = exists && defined(p, n, r, j);
            assert_int_equal(dkv_maskSees(p, n, r, j), sees);
            if (exists) assert_int_equal(dkv_pairSees(&v, r, j), sees);
        }
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

static void pairs_are_as_defined(void **state) { (void)state, eachNode(checkPairs); }
static void trims_keep_all_pairs(void **state) { (void)state, eachNode(checkTrims); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_are_as_defined),
        cmocka_unit_test(trims_keep_all_pairs),
    };
    return cmocka_run_group_tests_name("mask_pair", tests, NULL, NULL);
}
