/* mask.c: pictures of every mask, blocks against single pairs, admissibility against its definition. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "mask.h"
#include "sequence.h"
#include "small_problems.h"

static dkv_problem parse(const char *shape, const char *mask) {
    char line[256];
    dkv_problem p;
    dkv_err err;
    snprintf(line, sizeof line, "shape=%s mask=%s", shape, mask);
    if (dkv_parseProblem(line, NULL, &p, &err)) fail_msg("%s: %s", line, err.text);
    return p;
}

/* One line a row, '#' where it sees the key; rows joined by '/'. */
static void picture(const char *shape, const char *mask, int32_t node, const char *want) {
    char got[512];
    size_t n = 0;
    dkv_problem p = parse(shape, mask);
    const dkv_node *x = &p.nodes[node];
    for (int64_t r = 0; r < x->len; r++) {
        if (r) got[n++] = '/';
        for (int64_t j = 0; j < x->context + x->len; j++) got[n++] = dkv_maskSees(&p, node, r, j) ? '#' : '.';
        assert_false(dkv_maskSees(&p, node, r, -1) || dkv_maskSees(&p, node, r, x->context + x->len));
    }
    got[n] = 0;
    if (strcmp(got, want)) fail_msg("shape=%s mask=%s node %d: %s, want %s", shape, mask, node, got, want);
    dkv_freeProblem(&p);
}

static void pictures(void **state) {
    (void)state;
    picture("3+2", "causal", 0, "#../##./###");
    picture("3+2", "causal", 1, "####./#####");
    picture("3+2@1", "causal", 1, "##./###");
    picture("3k+2@2", "causal", 1, "###./####");
    picture("3+2", "full", 0, "###/###/###");
    picture("3+2", "full", 1, "#####/#####");
    picture("3+2", "prefix", 0, "###/###/###");
    picture("3+2", "prefix", 1, "####./#####");
    picture("2+(2+2)", "prefix", 2, "#####./######");
    picture("3+2", "window:2", 0, "#../##./.##");
    picture("3+2", "window:2", 1, "..##./...##");
    picture("3+3", "window:1:2", 1, "##.#../##..#./##...#");
    picture("0+3", "window:1:2", 1, "#../##./###");
    picture("3+3", "chunk:2", 0, "#../##./..#");
    picture("3+3", "chunk:2", 1, "..##../....#./....##");
    picture("2+2", "block:2:1:5", 1, "###./####");
    picture("2+2", "block:2:0:5", 1, "..../....");
    picture("3+2", "bidir", 1, "#####/#####");
}

/* The pattern of the block mask is the hash over blocks of positions. */
static void block_pattern(void **state) {
    (void)state;
    dkv_problem p = parse("9+5", "block:3:0.4:11");
    for (int64_t r = 0; r < 5; r++)
        for (int64_t j = 0; j < 14; j++)
            assert_int_equal(dkv_maskSees(&p, 1, r, j),
                             j <= 9 + r && dualkv_block_kept(11, (9 + r) / 3, j / 3, 0.4));
    dkv_freeProblem(&p);
}

static void checkBlocks(const dkv_problem *p, int32_t n, int64_t *exact, int64_t *all) {
    const int64_t rows = p->nodes[n].len, keys = p->nodes[n].context + rows;
    for (int64_t r0 = 0; r0 < rows; r0++)
        for (int64_t r1 = r0 + 1; r1 <= rows; r1++)
            for (int64_t j0 = 0; j0 < keys; j0++)
                for (int64_t j1 = j0 + 1; j1 <= keys; j1++) {
                    int64_t seen = 0;
                    for (int64_t r = r0; r < r1; r++)
                        for (int64_t j = j0; j < j1; j++) seen += dkv_maskSees(p, n, r, j);
                    int want = !seen ? 0 : seen == (r1 - r0) * (j1 - j0) ? 1 : 2;
                    int got = dkv_maskBlock(p, n, r0, r1, j0, j1);
                    if (got != want && got != 2)
                        fail_msg("mask=%s: block says %d, pairs say %d", dkv_maskName(p->mask), got, want);
                    ++*all;
                    *exact += got == want;
                    if (dkv_maskKeys(p) == DKV_KEYS_ALL)
                        assert_int_equal(got, want);
                }
    assert_int_equal(dkv_maskBlock(p, n, 0, 0, 0, 1), 0);
    assert_int_equal(dkv_maskBlock(p, n, 0, 1, 1, 1), 0);
}

static void blocks_agree_with_pairs(void **state) {
    (void)state;
    int64_t exact = 0, all = 0;
    for (size_t s = 0; s < DKV_COUNT(dkv_small_shapes); s++)
        for (size_t m = 0; dkv_smallMask(m); m++) {
            dkv_problem p = parse(dkv_small_shapes[s], dkv_smallMask(m));
            for (int32_t n = 0; n < p.n_nodes; n++) checkBlocks(&p, n, &exact, &all);
            dkv_freeProblem(&p);
        }
    assert_true(exact > all / 10 * 9); /* it must be of use: nearly always exact */
}

/* The definition, by brute force: in the sequence of node n, the copy of row r of ancestor a (at the same
 * position, under its own segment's rule) must see exactly the packed keys that row sees. */
static bool slowAdmissible(const dkv_problem *p) {
    dkv_starts starts;
    int64_t rows[64], own[64];
    bool ok = true;
    dkv_err err;
    assert_int_equal(dkv_makeStarts(p, &starts, &err), 0);
    for (int32_t n = 0; n < p->n_nodes; n++) {
        const dkv_node *x = &p->nodes[n];
        if (x->key_only || !x->len) continue;
        dkv_fillSequence(p, &starts, n, rows);
        for (int32_t a = x->parent; a >= 0; a = p->nodes[a].parent) {
            const dkv_node *y = &p->nodes[a];
            if (y->key_only) continue;
            dkv_fillSequence(p, &starts, a, own);
            for (int64_t r = 0; r < y->len && y->context + r < x->context; r++) {
                if (rows[y->context + r] != own[y->context + r]) continue; /* no copy of it here */
                for (int64_t j = 0; j < y->context + y->len; j++) {
                    bool there = j < x->context && rows[j] == own[j];
                    if (dkv_maskSees(p, a, r, j) && !there) ok = false;
                }
            }
        }
    }
    dkv_freeStarts(&starts);
    return ok;
}

static void admissible_by_definition(void **state) {
    (void)state;
    int refused = 0;
    for (size_t s = 0; s < DKV_COUNT(dkv_small_shapes); s++)
        for (size_t m = 0; dkv_smallMask(m); m++) {
            dkv_problem p = parse(dkv_small_shapes[s], dkv_smallMask(m));
            dkv_err err = {0};
            int rc = dkv_maskAdmissible(&p, &err);
            assert_true(rc == DKV_OK || (rc == DKV_EREFUSED && (int)err.code == rc && *err.text));
            if ((rc == DKV_OK) != slowAdmissible(&p))
                fail_msg("shape=%s mask=%s: %s", dkv_small_shapes[s], dkv_smallMask(m),
                         rc ? err.text : "admitted");
            refused += rc != DKV_OK;
            dkv_freeProblem(&p);
        }
    assert_true(refused >= 5);
}

static void refusal(const char *shape, const char *mask, const char *want) {
    dkv_problem p = parse(shape, mask);
    dkv_err err = {0};
    int rc = dkv_maskAdmissible(&p, &err);
    assert_int_equal(rc, *want ? DKV_EREFUSED : DKV_OK);
    assert_string_equal(err.text, want);
    dkv_freeProblem(&p);
}

static void refusals_name_row_and_key(void **state) {
    (void)state;
    refusal("17+2x3", "bidir",
            "mask=bidir: row 0 of the prompt (group 0) would see key 17, a token of response 0");
    refusal("4/17+0,3@5", "bidir",
            "mask=bidir: row 0 of the prompt (group 1) would see key 5, a token of response 1");
    refusal("0+3,(2+0,2)", "bidir",
            "mask=bidir: row 0 of response 1 (group 0) would see key 2, a token of branch 1 at depth 2 "
            "(segment 4)");
    refusal("5k+3", "bidir", "mask=bidir: no shared row here would see a descendant; say mask=full");
    refusal("5+3@2", "full",
            "mask=full: row 0 of the prompt (group 0) sees key 2, which its copy before response 0 would not "
            "see: "
            "@2 cuts through its segment");
    refusal("5+3@2", "prefix",
            "mask=prefix: row 0 of the prompt (group 0) sees key 2, which its copy before response 0 would "
            "not see: "
            "@2 cuts through its segment");
    refusal(
        "6+(0+3)@5", "prefix",
        "mask=prefix: row 0 of the prompt (group 0) sees key 5, which its copy before branch 0 at depth 2 "
        "(segment 2) would not see: @5 cuts through its segment");
    refusal("5+3@0", "full", "");
    refusal("5k+3@2", "full", "");
    refusal("5k+3@2", "prefix", "");
    refusal("5+3@2", "causal", "");
    refusal("2+(4+3@4)", "prefix", "");
    refusal("2+(4+3@4)", "full",
            "mask=full: row 0 of response 0 (group 0) sees key 4, which its copy before branch 0 at depth 2 "
            "(segment 2) "
            "would not see: @4 cuts through its segment");
}

/* Every row of the table: its texts read and print the same, its word is its own, tests of it exist with and without the
 * parameter that may be left out. */
static void rows_are_whole(void **state) {
    (void)state;
    bool seen[DKV_MASK_PARAMETERS * (DUALKV_BIDIR + 1)] = {false};
    const char *text;
    for (size_t m = 0; (text = dkv_smallMask(m)); m++) {
        char line[200], again[200];
        dkv_err err = {0};
        dkv_problem p = parse("3+2", text);
        snprintf(line, sizeof line, "shape=3+2 mask=%s", text);
        assert_int_equal(dkv_printProblem(&p, again, sizeof again, &err), 0);
        assert_string_equal(again, p.mask == DUALKV_CAUSAL ? "shape=3+2" : line);
        seen[dkv_maskVariant(&p)] = true;
        dkv_freeProblem(&p);
    }
    dualkv_mask_kind mask;
    bool with;
    for (int i = 0; (text = dkv_listVariant(i, &mask, &with)); i++)
        if (!seen[i]) fail_msg("mask %s has no parameters for tests in its row", text);
    const dkv_mask_row *row;
    for (int i = 0; (row = dkv_maskRow(i)); i++) {
        assert_true(strlen(row->help) > 10 && strncmp(row->form, row->name, strlen(row->name)) == 0);
        assert_true(!row->parameter[0].kind || *row->needs);
        for (int k = 0; k < i; k++) assert_string_not_equal(row->name, dkv_maskRow(k)->name);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_whole),
        cmocka_unit_test(pictures),
        cmocka_unit_test(block_pattern),
        cmocka_unit_test(blocks_agree_with_pairs),
        cmocka_unit_test(admissible_by_definition),
        cmocka_unit_test(refusals_name_row_and_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
