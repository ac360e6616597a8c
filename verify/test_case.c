/* One case: correct kernels pass, every breakage has its status, whatever the layout of tokens and of memory.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "guard.h"
#include "kernel_broken.h"
#include "test_line.h"

static dkv_status runOften(const char *spec, const char *line, double timeout, int repeats) {
    return judgeLine(spec, line, timeout, (dkv_case_options){.repeats = repeats});
}

static dkv_status runLine(const char *spec, const char *line, double timeout) {
    return runOften(spec, line, timeout, 1);
}

static void mustBeIn(dkv_status want, const char *spec, const char *line, double timeout) {
    dkv_status got = runLine(spec, line, timeout);
    if (got != want)
        fail_msg("%s on '%s': %s instead of %s: %s", spec, line, dkv_statusRow(got)->name,
                 dkv_statusRow(want)->name, result->why);
}

static void mustBe(dkv_status want, const char *spec, const char *line) { mustBeIn(want, spec, line, 60); }

static void broken_kernels_have_their_status(void **state) {
    (void)state;
    const dkv_breakage *b;
    for (int i = 0; (b = dkv_listBreakage(i)); i++) {
        char spec[64];
        snprintf(spec, sizeof spec, "broken+how=%s", b->how);
        mustBeIn(b->expected, spec, b->line, b->timeout > 0 ? b->timeout : 60);
        assert_true((result->why[0] != 0) == (b->expected != DKV_ST_PASSED));
    }
}

static const char *const lines[] = {
    "shape=33+2x9 heads=4:2 dim=16 layout=fused",
    "shape=33k+9@20,5 heads=2:1 dim=8:24 dtype=fp16 layout=padded dlse=on",
    "shape=20+2x(5+2x3)/1+4 dim=40 layout=padded sinklogit=0.5 dlse=on",
    "shape=70+65,1 heads=7:1 dim=9 dtype=fp32 layout=strided softcap=8 alibi=on",
    "shape=0+2x17 heads=2:2 dim=1 mask=window:6:2",
    "shape=40+2x21 dim=8 mask=prefix layout=strided run=twice",
    "shape=40+2x21 dim=8 mask=full grad=off",
    "shape=40+2x21 dim=8 mask=block:8:0.5:3 run=aba layout=padded",
    "shape=64 dim=32 mask=chunk:10",
};

static void correct_kernels_pass(void **state) {
    (void)state;
    static const char *const kernels[] = {"ref", "ref-replicated", "emu", "emu-replicated",
                                          "emu+bm=16+bn=16"};
    for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++)
        for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
            mustBe(DKV_ST_PASSED, kernels[k], lines[i]);
            assert_true(result->judged && result->tensor[DKV_O].present);
            assert_true(result->tensor[DKV_O].all.max_ratio < 1);
        }
}

/* Each second of a case has one name, those of cases run between among them. A machine may take the time away in between: a
 * defect shows each time, that does not. */
static bool phasesMakeUpTheSeconds(void) {
    mustBe(DKV_ST_PASSED, "emu-replicated", "shape=96+2x33 dim=32 run=aba seed=4");
    double sum = 0;
    for (int i = 0; i < DKV_N_PHASES; i++) sum += result->phases.seconds[i];
    for (int i = DKV_PHASE_INPUTS; i <= DKV_PHASE_ORACLE; i++) assert_true(result->phases.seconds[i] > 0);
    return fabs(sum - result->seconds) < 0.01 * result->seconds + 1e-3 &&
           result->phases.seconds[DKV_PHASE_OTHER] < 0.1 * result->seconds;
}

static void phases_make_up_the_seconds(void **state) {
    (void)state;
    bool ok = false;
    for (int i = 0; i < 20 && !ok; i++) ok = phasesMakeUpTheSeconds();
    assert_true(ok);
}

static void strangers_are_judged_by_a_named_profile(void **state) {
    (void)state;
    char spec[600];
    const char *dir = getenv("DUALKV_BUILD");
    snprintf(spec, sizeof spec, "%s/testkernels/plain.so:plain", dir ? dir : "build");
    mustBe(DKV_ST_PASSED, spec,
           "shape=20+3x7/0+5 heads=4:2 dim=16 dtype=fp32 mask=window:5:1 layout=strided dlse=on");
    assert_string_equal(result->profile, "fp32");
    mustBe(DKV_ST_PASSED, spec, "shape=20+3x7/0+5 heads=4:2 dim=16");
    assert_true(result->profile[0] != 0);
    mustBe(DKV_ST_PASSED, spec, "shape=65+33,1,65 heads=2:1 fill=nanresp seed=501"); /* NaN is not no key */
    mustBe(DKV_ST_UNSUPPORTED, spec, "shape=3 softcap=2");
    assert_string_equal(result->why, "no score modifiers");
    snprintf(spec, sizeof spec, "%s/testkernels/plain.so:forward-only", dir ? dir : "build");
    mustBe(DKV_ST_UNSUPPORTED, spec, "shape=3");
    mustBe(DKV_ST_PASSED, spec, "shape=3+2 grad=off");
}

/* A lost dLSE is within the loosest bound, but has a direction; a dQ rounded after each key tile has none: that is no pass. */
static void strangers_that_nothing_explains_do_not_pass(void **state) {
    (void)state;
    char spec[600];
    const char *dir = getenv("DUALKV_BUILD");
    snprintf(spec, sizeof spec, "%s/testkernels/careless.so", dir ? dir : "build");
    mustBe(DKV_ST_PASSED, spec, "shape=65+2x33,1 heads=2:2 dim=40");
    mustBe(DKV_ST_BIASED, spec, "shape=65+2x33,1 heads=2:2 dim=40 dlse=on");
    assert_string_equal(result->profile, "");
    assert_non_null(strstr(result->why, "dLSE counts"));
    mustBe(DKV_ST_INCONCLUSIVE, "emu+undeclared+fault=X15", "shape=130+2x66,1 heads=2:2 dim=40");
    assert_string_equal(result->profile, "");
    assert_non_null(strstr(result->why, "declares no arithmetic"));
}

static void planted_faults_are_found(void **state) {
    (void)state;
    mustBe(DKV_ST_PASSED, "emu", "shape=200+3x77 heads=4:2 dim=32");
    assert_true(dkv_statusRow(runLine("emu+fault=D3", "shape=200+3x77 heads=4:2 dim=32", 60))->defect);
    assert_true(dkv_statusRow(runLine("emu+fault=F1", "shape=200+3x77 heads=4:2 dim=32", 60))->defect);
}

/* A tile is lost in the 53rd backward pass: two runs do not see it. */
static void rare_differences_need_repeats(void **state) {
    (void)state;
    const char *line = "shape=5 dim=8 mask=full fill=exact";
    assert_int_equal(runOften("emu+fault=Y23", line, 60, 1), DKV_ST_PASSED);
    assert_int_equal(result->runs, 2);
    assert_int_equal(runOften("emu+fault=Y23", line, 60, 100), DKV_ST_NONDETERMINISTIC);
    assert_int_equal(result->runs, 53);
    assert_non_null(strstr(result->why, "run 53 times"));
    assert_int_equal(runOften("emu", line, 60, 100), DKV_ST_PASSED);
    assert_int_equal(result->runs, 101);
}

/* Without a word from the oracle on values: a response that sees its sibling's keys, one that is given its
 * row's copy. */
static void siblings_are_kept_apart(void **state) {
    (void)state;
    static const char *const some[] = {"shape=20+3x7/9+5 heads=4:2 dim=16 dlse=on",
                                       "shape=20+3x7 dim=16 dtype=fp32",
                                       "shape=30k+9@20,5 heads=2:1 dim=8 dtype=fp16 sinklogit=1"};
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        mustBe(DKV_ST_PASSED, "emu", some[i]);
        assert_int_equal(findingOf("siblings")->state, DKV_CHECK_PASSED);
        mustBe(DKV_ST_PASSED, "emu-replicated", some[i]);
        assert_int_equal(findingOf("siblings")->state, DKV_CHECK_PASSED);
        runLine("emu+fault=L1", some[i], 60);
        assert_int_equal(findingOf("siblings")->state, DKV_CHECK_DEFECT);
        assert_int_equal(findingOf("siblings")->status, DKV_ST_LEAKED);
    }
    mustBe(DKV_ST_PASSED, "emu", "shape=20 dim=16");
    assert_int_equal(findingOf("siblings")->state, DKV_NOT_APPLICABLE);
    mustBe(DKV_ST_FAILED, "emu+fault=D1", "shape=200+3x77 heads=4:2 dim=32"); /* wrong, by no sibling's doing */
    assert_int_equal(findingOf("siblings")->state, DKV_CHECK_PASSED);
}

/* The identities alone, on a truth and a kernel's outputs that are made here. */
static void identities_need_no_oracle(void **state) {
    (void)state;
    static const char *const some[] = {"shape=20+3x7/4+5 heads=4:2 dim=8 sinklogit=0.5 dlse=on",
                                       "shape=30+9,5 heads=2:1 dim=4 mask=window:5:1 softcap=3 alibi=on",
                                       "shape=9k+5@4,3 heads=2:2 dim=8 mask=full fill=hot"};
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++)
        for (int broken = 0; broken < 5; broken++) {
            dkv_problem p;
            dkv_case c = {.p = &p};
            dkv_err err = {0};
            dkv_ref_options one = {.threads = 1};
            dkv_finding sum = {0}, euler = {0};
            if (dkv_parseProblem(some[i], dkv_knownFill, &p, &err) || dkv_makeLayout(&p, &c.packed, &err) ||
                dkv_allocInputs(&c.packed, &c.in, &err) || dkv_allocOracle(&c.packed, &c.oracle, &err) ||
                dkv_allocOutputs(&c.packed, &c.got, &err) ||
                dkv_fillInputs(&p, &c.packed, dkv_dataDir(), &c.in, &err) ||
                dkv_refBlocked(&p, &c.packed, &c.in, &one, &c.oracle.truth, &err) ||
                dkv_refBlocked(&p, &c.packed, &c.in, &one, &c.got, &err))
                fail_msg("%s", err.text);
            int64_t n[DKV_N_OUTPUTS];
            dkv_countOutputs(&c.packed, n); /* bounds: small */
            for (int id = 0; id < DKV_N_OUTPUTS; id++)
                for (int64_t k = 0; k < n[id]; k++)
                    dkv_outputAt(&c.oracle.bound, (dkv_tensor_id)id)[k] = 1e-9;
            if (broken == 1) c.got.dv[n[DKV_DV] - 1] += 1e-3;
            if (broken == 2) c.oracle.truth.dv[0] += 1e-3;
            if (broken == 3) c.got.dq[0] += 1e-3;
            if (broken == 4) c.oracle.truth.dk[n[DKV_DK] - 1] += 1e-3;
            dkv_checkSumDv(&c, &sum);
            dkv_checkEuler(&c, &euler);
            assert_int_equal(sum.state, broken == 1 || broken == 2 ? DKV_CHECK_DEFECT : DKV_CHECK_PASSED);
            assert_int_equal(euler.state, broken == 3 || broken == 4 ? DKV_CHECK_DEFECT : DKV_CHECK_PASSED);
            if (broken == 1) assert_int_equal(sum.status, DKV_ST_FAILED);
            if (broken == 2) assert_int_equal(sum.status, DKV_ST_HARNESS_ERROR);
            if (broken == 4) assert_int_equal(euler.status, DKV_ST_HARNESS_ERROR);
            dkv_freeOutputs(&c.got);
            dkv_freeOracle(&c.oracle);
            dkv_freeInputs(&c.in);
            dkv_freeLayout(&c.packed);
            dkv_freeProblem(&p);
        }
}

static void memory_is_counted_before_it_is_taken(void **state) {
    (void)state;
    dkv_problem p;
    dkv_err err;
    assert_true(dkv_availableMemory() > 1e6);
    assert_int_equal(dkv_parseProblem("shape=1024+8x1024 heads=8:2 dim=128", NULL, &p, &err), 0);
    double packed = dkv_estimateCase(&p, false), replicated = dkv_estimateCase(&p, true);
    double tensors = 9216.0 * (8 + 2) * 256; /* elements of inputs or of outputs */
    assert_true(packed > tensors * (2 + 8 * 4) && packed < tensors * 200);
    assert_true(replicated > packed);
    dkv_freeProblem(&p);
    assert_int_equal(dkv_parseProblem("shape=100000000000+8x1024 dim=128", NULL, &p, &err), 0);
    assert_true(dkv_estimateCase(&p, false) > dkv_availableMemory());
    dkv_freeProblem(&p);
}

static void exits_follow_the_statuses(void **state) {
    (void)state;
    static const struct {
        dkv_status a, b;
        int exit, bisect;
    } rows[] = {{DKV_ST_PASSED, DKV_ST_PASSED, 0, 0},
                {DKV_ST_PASSED, DKV_ST_FAILED, 1, 1},
                {DKV_ST_HARNESS_ERROR, DKV_ST_LEAKED, 1, 1},
                {DKV_ST_HARNESS_ERROR, DKV_ST_PASSED, 3, 125},
                {DKV_ST_INCONCLUSIVE, DKV_ST_PASSED, 4, 125},
                {DKV_ST_UNSUPPORTED, DKV_ST_PASSED, 0, 125},
                {DKV_ST_UNSUPPORTED, DKV_ST_UNSUPPORTED, 3, 125}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        long counts[DKV_ST_N] = {0};
        counts[rows[i].a]++;
        counts[rows[i].b]++;
        assert_int_equal(dkv_runExit(counts), rows[i].exit);
        assert_int_equal(dkv_bisectExit(rows[i].exit, counts), rows[i].bisect);
    }
    assert_int_equal(dkv_runExit((long[DKV_ST_N]){0}), 3);
    assert_int_equal(dkv_bisectExit(2, NULL), 128);
    for (int s = 0; s < DKV_ST_N; s++)
        assert_int_equal(dkv_findStatus(dkv_statusRow((dkv_status)s)->name), s);
    assert_int_equal(dkv_findStatus("FINE"), DKV_ST_N);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    dkv_guardCoordinator();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(broken_kernels_have_their_status),
        cmocka_unit_test(correct_kernels_pass),
        cmocka_unit_test(phases_make_up_the_seconds),
        cmocka_unit_test(strangers_are_judged_by_a_named_profile),
        cmocka_unit_test(strangers_that_nothing_explains_do_not_pass),
        cmocka_unit_test(planted_faults_are_found),
        cmocka_unit_test(rare_differences_need_repeats),
        cmocka_unit_test(identities_need_no_oracle),
        cmocka_unit_test(siblings_are_kept_apart),
        cmocka_unit_test(memory_is_counted_before_it_is_taken),
        cmocka_unit_test(exits_follow_the_statuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
