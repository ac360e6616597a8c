/* What cases have the power to see: measured values against what faulty kernels do, closed forms against the reference run
 * again, weak suites from outside. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "strength_rows.h"
#include "test_line.h"
#include "test_program.h"

static dkv_strength rows; /* what an observer measured again */

static void loseAgain(dkv_case *c, void *arg) {
    dkv_strength whole = c->result->strength;
    bool *all = calloc((size_t)c->p->n_nodes, sizeof *all);
    float *cell = &c->result->strength.ratio[0][0][0][0];
    (void)arg;
    for (int32_t i = 0; i < c->p->n_nodes; i++) all[i] = !c->p->nodes[i].key_only;
    for (size_t i = 0; i < sizeof whole.ratio / sizeof *cell; i++) cell[i] = -1;
    dkv_loseKeys(c, all);
    rows = c->result->strength;
    c->result->strength = whole;
    free(all);
}

static const dkv_strength *measure(const char *line, bool closed) {
    judgeLine("emu", line, 60, (dkv_case_options){.strength = true, .observe = closed ? loseAgain : NULL});
    if (result->status != DKV_ST_PASSED || !result->strength.measured) fail_msg("%s: %s", line, result->why);
    return &result->strength;
}

/* Everything is seen where nothing hides; with V constant O shows neither a lost key nor a scale, LSE does. */
static void strong_and_weak_cases_are_told_apart(void **state) {
    (void)state;
    const dkv_strength *s = measure("shape=20+9,3 heads=4:2 dim=16 dtype=fp32 dlse=on", false);
    int k = dkv_lengthClass(29);
    for (int slip = 0; slip < DKV_N_SLIPS; slip++)
        for (int id = 0; id < DKV_DSINK; id++) {
            bool keys = id == DKV_DK || id == DKV_DV, back = id == DKV_DQ || id == DKV_DK;
            bool can = slip == DKV_SLIP_DELTA ? back : slip == DKV_SLIP_RESPONSE ? keys : true;
            for (int region = 0; region < 2; region++) {
                double ratio = s->ratio[slip][id][region][k];
                bool here = can && !(slip == DKV_SLIP_RESPONSE && region == 1);
                if (here ? !(ratio > 1) : ratio >= 0)
                    fail_msg("%s, %s, region %d: %g", dkv_slipName(slip), dkv_tensorName((dkv_tensor_id)id), region, ratio);
            }
        }
    assert_true(s->longest == 29 && dkv_leastScale(s) < 1e-4);
    s = measure("shape=20+9 dim=16 fill=constv", false);
    assert_true(s->ratio[DKV_SLIP_FIRST][DKV_O][1][k] >= 0 && s->ratio[DKV_SLIP_FIRST][DKV_O][1][k] <= 1);
    assert_true(s->ratio[DKV_SLIP_SCALE][DKV_O][0][k] >= 0 && s->ratio[DKV_SLIP_SCALE][DKV_O][0][k] <= 1);
    assert_true(s->ratio[DKV_SLIP_FIRST][DKV_LSE][1][k] > 1 && s->ratio[DKV_SLIP_ZEROS][DKV_O][1][k] > 1);
    assert_true(s->ratio[DKV_SLIP_HEAD][DKV_O][0][k] < 0); /* one KV head cannot be mistaken */
    s = measure("shape=5 dim=4 mask=window:1", false);      /* one key a row: nothing to shift */
    assert_true(s->ratio[DKV_SLIP_SCALE][DKV_O][0][0] < 0 && s->longest == 0);
    s = measure("shape=9+3 dim=4 mask=full grad=off", false);
    assert_true(s->ratio[DKV_SLIP_AHEAD][DKV_O][1][0] < 0 && s->ratio[DKV_SLIP_ZEROS][DKV_DQ][1][0] < 0);
}

static void measureWithoutLse(dkv_case *c, void *arg) {
    dkv_strength whole = c->result->strength;
    const int32_t absent = c->kernel.d.absent;
    dkv_err err = {DKV_OK, ""};
    (void)arg;
    c->kernel.d.absent = 1 << DKV_LSE;
    c->result->strength = (dkv_strength){0};
    assert_int_equal(dkv_measureStrength(c, &err), 0);
    rows = c->result->strength;
    c->kernel.d.absent = absent;
    c->result->strength = whole;
}

/* Of a kernel that gives no LSE, what LSE alone would show is not seen: with V constant a lost key, a small scale error. */
static void what_is_not_given_shows_nothing(void **state) {
    (void)state;
    const int k = dkv_lengthClass(29);
    judgeLine("emu", "shape=20+9 dim=16 fill=constv", 60,
              (dkv_case_options){.strength = true, .observe = measureWithoutLse});
    const dkv_strength *s = &result->strength;
    assert_true(s->ratio[DKV_SLIP_FIRST][DKV_LSE][1][k] > 1 && s->longest == 29);
    assert_true(rows.measured && rows.longest == 1); /* a row's only key */
    for (int slip = 0; slip < DKV_N_SLIPS; slip++)
        for (int region = 0; region < 2; region++) assert_true(rows.ratio[slip][DKV_LSE][region][k] < 0);
    assert_true(rows.ratio[DKV_SLIP_ZEROS][DKV_O][1][k] > 1 && dkv_leastScale(&rows) > 2 * dkv_leastScale(s));
}

/* Every row, few enough to be sampled whole: the closed forms give what the reference gives. */
static void closed_forms_agree_with_the_reference(void **state) {
    (void)state;
    static const char *const some[] = {"shape=7+5,3 heads=2:1 dim=8 dtype=fp32", "shape=8+4 dim=8 softcap=3 alibi=on",
                                       "shape=8k+5@6,2 heads=2:2 dim=8:4 dtype=fp16", "shape=8+6 dim=4 mask=window:3:1",
                                       "shape=6+4 dim=8 sinklogit=1 mask=chunk:5"};
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        const dkv_strength *s = measure(some[i], true);
        for (int slip = DKV_SLIP_FIRST; slip <= DKV_SLIP_LAST; slip++)
            for (int id = DKV_O; id <= DKV_LSE; id++) {
                /* Responses: every row has two keys and more (of one, the reference loses the only one, too). */
                double a = s->ratio[slip][id][1][0], b = rows.ratio[slip][id][1][0];
                if (!(fabs(a - b) <= 1e-3 * fabs(b)) || !(b > 0))
                    fail_msg("%s: %s of %s: %g, closed form %g", some[i], dkv_slipName(slip),
                             dkv_tensorName((dkv_tensor_id)id), a, b);
            }
    }
}

static void large_cases_are_sampled(void **state) {
    (void)state;
    const dkv_strength *s = measure("shape=2600+9 heads=1:1 dim=32 fill=needle grad=off", false);
    assert_false(s->sampled);
    s = measure("shape=2100+40 heads=2:1 dim=32 fill=needle", false);
    assert_true(s->sampled);
    int k = dkv_lengthClass(2140);
    assert_true(s->ratio[DKV_SLIP_FIRST][DKV_LSE][1][k] > 1 && s->ratio[DKV_SLIP_LAST][DKV_O][1][k] > 1);
    assert_true(s->ratio[DKV_SLIP_SCALE][DKV_O][1][k] < 0 && s->ratio[DKV_SLIP_ZEROS][DKV_DK][0][k] > 1);
    assert_true(s->longest > 1024);
}

static void words_name_the_smallest_fault(void **state) {
    (void)state;
    char words[200], name[64];
    dkv_sayStrength(measure("shape=70+33 heads=2:1 dim=16", false), words, sizeof words);
    assert_non_null(strstr(words, "one lost key of up to 103"));
    assert_non_null(strstr(words, "a scale error of "));
    assert_non_null(strstr(words, "a dK gain of "));
    dkv_sayStrength(&(dkv_strength){0}, words, sizeof words);
    assert_string_equal(words, "");
    dkv_stratumName(DKV_O, 1, dkv_lengthClass(17), name, sizeof name);
    assert_string_equal(name, "O response 17-64");
    dkv_stratumName(DKV_DV, 0, dkv_lengthClass(8193), name, sizeof name);
    assert_string_equal(name, "dV prompt 8193-");
}

/* ---- from outside ---- */

/* `dualkv check` of a suite's lines; "": none but those in words. */
static int check(const char *words, const char *suite) {
    char command[600];
    snprintf(command, sizeof command, "printf '%s' >$D/suite; $B/dualkv check %s %s --kernel emu", suite, suite[0] ? "$D/suite" : "", words);
    return runShell(command);
}

static void weak_suites_are_inconclusive(void **state) {
    (void)state;
    assert_int_equal(check("", "shape=20+9 dim=16 fill=constv\nshape=20+9 dim=16 fill=constv seed=2\n"), 4);
    assert_non_null(strstr(output, "2 PASSED"));
    assert_non_null(strstr(output, "INCONCLUSIVE in "));
    assert_non_null(strstr(output, "O response 17-64 (emu): no case would have seen first-key"));
    assert_null(strstr(output, "LSE response 17-64 (emu)"));
    /* The same lines given by hand, or one alone, are annotated. */
    assert_int_equal(check("'shape=20+9 dim=16 fill=constv' 'shape=20+9 dim=16 fill=constv seed=2'", ""), 0);
    assert_null(strstr(output, "INCONCLUSIVE"));
    assert_non_null(strstr(output, "it would have seen one lost key of up to 29"));
    assert_int_equal(check("", "shape=20+9 dim=16 fill=constv\n"), 0);
    /* A case that sees what the others do not makes the suite whole. */
    assert_int_equal(check("", "shape=20+9 dim=16 fill=constv\nshape=20+9 dim=16 dtype=fp32\n"), 0);
    assert_non_null(strstr(output, "together they would have seen one lost key up to length 29"));
    /* A defect is a defect first. */
    assert_int_equal(check("--kernel emu+fault=D3", "shape=20+9 dim=16 fill=constv\nshape=9+9 dim=16 fill=constv\n"), 1);
}

static void smoke_has_power_everywhere(void **state) {
    (void)state;
    assert_int_equal(check("smoke", ""), 0);
    assert_null(strstr(output, "INCONCLUSIVE"));
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    if (makeDir()) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strong_and_weak_cases_are_told_apart), cmocka_unit_test(what_is_not_given_shows_nothing),
        cmocka_unit_test(closed_forms_agree_with_the_reference),
        cmocka_unit_test(large_cases_are_sampled),
        cmocka_unit_test(words_name_the_smallest_fault),
        cmocka_unit_test(weak_suites_are_inconclusive),
        cmocka_unit_test(smoke_has_power_everywhere),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
