/* Errors with a direction, in a kernel that declares nothing and in an O whose key tile is not known. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "check.h"
#include "record.h"

#define LINE "shape=100+2x60 heads=2:2 dim=32"
#define DOMINANT "shape=300+40,9 heads=4:2 dim=8 fill=dominant seed=403 grad=off"
#define ALIGNED "shape=400+2x100 heads=2:2 dim=32 fill=aligned grad=off"

static dkv_result *result; /* of the last case */
static double most;        /* FLOPs of a case that is asked */

static dkv_status runSpec(const char *spec, const char *line, const dkv_fits *fits) {
    dkv_kernel_spec s;
    dkv_worker w;
    dkv_problem p;
    dkv_err err = {0};
    const dkv_case_options with = {.data_dir = dkv_dataDir(), .level = 1e-7, .threads = 1, .fits = fits, .leans_most = most};
    if (dkv_parseKernelSpec(spec, &s, &err) || dkv_parseProblem(line, dkv_knownFill, &p, &err))
        fail_msg("%s on %s: %s", spec, line, err.text);
    dkv_initWorker(&w, &s, 60);
    dkv_runCase(&p, &w, &with, result);
    dkv_stopWorker(&w);
    dkv_freeProblem(&p);
    return result->status;
}

static dkv_status runKernel(const char *kernel, const char *options, const char *line, const dkv_fits *fits) {
    char spec[600];
    const char *dir = getenv("DUALKV_BUILD");
    snprintf(spec, sizeof spec, "%s/testkernels/%s%s", dir ? dir : "build", kernel, options);
    return runSpec(spec, line, fits);
}

static dkv_status runCase(const char *options, const char *line, const dkv_fits *fits) {
    return runKernel("planted.so:planted+undeclared", options, line, fits);
}

/* BIASED by about so much in that tensor, in these words. */
static void mustLean(const char *options, const char *line, dkv_tensor_id id, double gain, const char *words) {
    const dkv_status got = runCase(options, line, NULL);
    const dkv_lean *l = &result->lean[id];
    if (got != DKV_ST_BIASED) fail_msg("%s on %s: %s (%s)", options, line, dkv_statusRow(got)->name, result->why);
    if (!l->found || fabs(l->gain - gain) > 0.1 * fabs(gain) || !(fabs(l->gain) > l->allowed))
        fail_msg("%s on %s: %g of %g (%g allowed)", options, line, l->gain, gain, l->allowed);
    if (!strstr(result->why, words)) fail_msg("%s on %s: no '%s' in: %s", options, line, words, result->why);
}

static void a_percent_is_seen_in_every_tensor(void **state) {
    (void)state;
    mustLean("+gain=O:1.01", LINE, DKV_O, 0.01, "too large, in every head; no known rounding explains more than 0.");
    mustLean("+gain=dQ:0.99", LINE, DKV_DQ, -0.01, "too small, in every head");
    mustLean("+gain=dK:1.01", LINE, DKV_DK, 0.01, "too large, in every KV head");
    mustLean("+gain=dV:0.98", LINE, DKV_DV, -0.02, "dV is 2 % too small, in every KV head");
    mustLean("+gain=scale:1.01", LINE, DKV_LSE, 0.01, "the softmax scale is 1 % too large, as LSE shows");
}

static void a_thousandth_is_seen_where_there_are_rows(void **state) {
    (void)state;
    mustLean("+gain=O:0.999", "shape=200+3x77 heads=4:2 dim=64 grad=off", DKV_O, -0.001, "too small, in every head");
    mustLean("+gain=LSE:1.001", LINE " grad=off", DKV_LSE, 0.001, "LSE is 0.1 % too large, in every head");
    mustLean("+gain=scale:0.999", LINE " grad=off", DKV_LSE, -0.001, "the softmax scale is 0.1 % too small");
    mustLean("+gain=dV:1.001", LINE " dtype=fp32", DKV_DV, 0.001, "dV is 0.1 % too large");
}

static void the_head_is_named(void **state) {
    (void)state;
    mustLean("+gain=O:1.02+head=1", LINE " grad=off", DKV_O, 0.02, "O is 2 % too large in head 1;");
    mustLean("+gain=dV:1.02+head=0", LINE, DKV_DV, 0.02, "dV is 2 % too large in KV head 0;");
}

/* careless.so forgets the gradient through LSE. */
static void what_is_left_out_is_named(void **state) {
    (void)state;
    assert_int_equal(runKernel("careless.so", "", LINE " dlse=on", NULL), DKV_ST_BIASED);
    if (!strstr(result->why, "dLSE counts ")) fail_msg("%s", result->why);
}

/* What leans, and by how much, is in the record. */
static void records_hold_it(void **state) {
    (void)state;
    assert_int_equal(runCase("+gain=dV:1.02", LINE, NULL), DKV_ST_BIASED);
    char *json = dkv_printRecord(result);
    assert_non_null(json);
    const char *at = strstr(json, "\"lean\":{\"direction\":\"itself\",\"gain\":0.0");
    assert_true(at && strstr(json, "\"dV\":") < at && !strstr(at + 1, "\"lean\":{"));
    assert_non_null(strstr(json, "\"lean\":\"defect\""));
    free(json);
}

/* A profile named by the user holds what its twin speaks of, and O leans all the same. */
static void an_o_without_a_key_tile_is_held(void **state) {
    (void)state;
    static dkv_fits fits;
    dkv_nameFits("flash", 7, &fits);
    assert_int_equal(runCase("", LINE, &fits), DKV_ST_PASSED);
    assert_true(result->lean[DKV_O].tested && !result->lean[DKV_DQ].tested);
    assert_int_equal(runCase("+gain=O:0.998", LINE " grad=off", &fits), DKV_ST_BIASED);
    assert_non_null(strstr(result->why, "% too small, in every head"));
    /* what is rounded makes O too large, and too small: also where what is named has partial sums */
    dkv_nameFits("partials", 7, &fits);
    if (runCase("", DOMINANT, &fits) != DKV_ST_PASSED) fail_msg("%s", result->why);
    assert_true(result->lean[DKV_O].tested);
    if (runCase("", ALIGNED, &fits) != DKV_ST_PASSED) fail_msg("%s", result->why);
    assert_int_equal(runCase("+gain=O:0.999", DOMINANT, &fits), DKV_ST_BIASED);
}

/* A profile's own key tiles are asked for whatever its partial sums: in replicated sequences, and where dK, dV and dQ are running sums. */
static void whatever_else_the_profile_rounds(void **state) {
    (void)state;
    static const struct {
        const char *kernel, *profile, *line;
    } of[] = {{"emu-replicated+undeclared+partials=low+bn=128", "partials", "shape=64+8x256 heads=2:2 dim=128 fill=aligned grad=off"},
              {"emu+undeclared+partials=rows+bn=256", "running", "shape=1000+2x500 heads=2:2 dim=16 fill=aligned grad=off"}};
    static dkv_fits fits;
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        dkv_nameFits(of[i].profile, 7, &fits);
        if (runSpec(of[i].kernel, of[i].line, &fits) != DKV_ST_PASSED || !result->lean[DKV_O].tested)
            fail_msg("%s on %s: %s (%s)", of[i].kernel, of[i].line, dkv_statusRow(result->status)->name, result->why);
        assert_int_equal(runCase("+gain=O:0.999", of[i].line, &fits), DKV_ST_BIASED);
        assert_non_null(strstr(result->why, "% too small, in every head"));
    }
}

static const dkv_finding *findingOf(const char *name) {
    for (int i = 0; dkv_listCheck(i); i++)
        if (!strcmp(dkv_listCheck(i)->name, name)) return &result->finding[i];
    fail_msg("no check %s", name);
    return NULL;
}

/* Too large to ask which roundings explain a slope: what is within chance passes, what is not is told. */
static void large_cases_are_looked_at(void **state) {
    (void)state;
    static dkv_fits fits;
    dkv_nameFits("partials", 7, &fits);
    most = 1;
    assert_int_equal(runCase("", LINE " grad=off", &fits), DKV_ST_PASSED);
    assert_true(result->lean[DKV_O].tested && !result->lean[DKV_O].open);
    assert_int_equal(findingOf("lean")->state, DKV_CHECK_PASSED);
    assert_int_equal(runCase("+gain=O:0.998", LINE " grad=off", &fits), DKV_ST_PASSED);
    const dkv_lean *l = &result->lean[DKV_O];
    assert_true(l->tested && l->open && !l->found && fabs(l->gain + 0.002) < 2e-4);
    assert_int_equal(findingOf("lean")->state, DKV_CHECK_NOTE);
    if (!strstr(findingOf("lean")->why, "% too small, in every head: not judged, ")) fail_msg("%s", findingOf("lean")->why);
    char *json = dkv_printRecord(result);
    assert_non_null(json);
    assert_true(strstr(json, "\"lean\":\"note\"") && strstr(json, "\"lean\":\"O is ") && !strstr(json, "\"direction\""));
    free(json);
    most = 0;
    assert_int_equal(runCase("+gain=O:0.998", LINE " grad=off", &fits), DKV_ST_BIASED);
}

/* Rounding that comes out alike in all rows is no lean: P near 1, equal rows, saturated softcaps, one key a row. */
static void rounding_does_not_lean(void **state) {
    (void)state;
    static const char *const lines[] = {
        LINE, LINE " fill=cold", LINE " fill=constv", LINE " fill=duplicated", LINE " softcap=0.01 fill=hot", LINE " mask=window:1",
        LINE " fill=aligned dtype=fp32", LINE " fill=ties", "shape=60k+2x70 heads=4:1 dim=8 dlse=on alibi=on sinklogit=1"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        const dkv_status got = runCase("", lines[i], NULL);
        if (got != DKV_ST_PASSED && got != DKV_ST_INCONCLUSIVE)
            fail_msg("%s: %s (%s)", lines[i], dkv_statusRow(got)->name, result->why);
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_percent_is_seen_in_every_tensor), cmocka_unit_test(a_thousandth_is_seen_where_there_are_rows),
        cmocka_unit_test(the_head_is_named),                 cmocka_unit_test(what_is_left_out_is_named),
        cmocka_unit_test(an_o_without_a_key_tile_is_held),   cmocka_unit_test(rounding_does_not_lean),
        cmocka_unit_test(records_hold_it),                   cmocka_unit_test(whatever_else_the_profile_rounds),
        cmocka_unit_test(large_cases_are_looked_at),
    };
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    result = calloc(1, sizeof *result);
    int failed = result ? cmocka_run_group_tests(tests, NULL, NULL) : 1;
    free(result);
    return failed;
}
