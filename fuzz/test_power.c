/* The rules object to what they say; the catalogue is as large as promised; a small measurement adds up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/suite.h"
#include "../ref/emu.h"
#include "power_report.h"

static void rules_object(void **state) {
    (void)state;
    enum { N = 100 };
    double truth[N], got[N], peer[N];
    for (int i = 0; i < N; i++) {
        truth[i] = got[i] = i % 7 - 3;
        peer[i] = truth[i] + 1e-3;
    }
    for (int r = 0; r < DKV_N_RULES; r++) assert_false(dkv_ruleObjects((dkv_rule)r, got, truth, peer, N));
    got[50] += 1.9e-3; /* within twice the peer's error */
    for (int r = 0; r < DKV_N_RULES; r++) assert_false(dkv_ruleObjects((dkv_rule)r, got, truth, peer, N));
    got[50] += 0.2e-3;
    assert_false(dkv_ruleObjects(DKV_RULE_ALLCLOSE, got, truth, peer, N));
    assert_false(dkv_ruleObjects(DKV_RULE_NMSE, got, truth, peer, N));
    assert_true(dkv_ruleObjects(DKV_RULE_PEER, got, truth, peer, N));
    assert_false(dkv_ruleObjects(DKV_RULE_PEER, got, truth, NULL, N));
    got[49] = 0.0101, truth[49] = 0;
    assert_true(dkv_ruleObjects(DKV_RULE_ALLCLOSE, got, truth, peer, N));
    assert_false(dkv_ruleObjects(DKV_RULE_NMSE, got, truth, peer, N));
    got[3] += 0.5; /* 0.25 of about 400 */
    assert_true(dkv_ruleObjects(DKV_RULE_NMSE, got, truth, peer, N));
    truth[3] = NAN, truth[49] = INFINITY, got[49] = 0; /* left out */
    assert_false(dkv_ruleObjects(DKV_RULE_NMSE, got, truth, peer, N));
    assert_false(dkv_ruleObjects(DKV_RULE_ALLCLOSE, got, truth, peer, N));
    got[7] = NAN;
    for (int r = 0; r < DKV_N_RULES; r++) assert_true(dkv_ruleObjects((dkv_rule)r, got, truth, peer, N));
}

static void the_catalogue_is_large(void **state) {
    (void)state;
    int rows = 0, own = 0, controls = 0;
    const dkv_fault *f;
    for (int i = 0; (f = dkv_listFault(i)); i++) {
        controls += f->control;
        if (!strcmp(f->kind, "own"))
            own++;
        else
            rows += !f->control;
        for (int k = 0; k < i; k++) assert_string_not_equal(dkv_listFault(k)->id, f->id);
    }
    assert_true(rows >= 40 && own >= 30 && controls >= 1);
}

static void run(dkv_power *p, const char *faults) {
    static char line[] = "shape=40+3x9 heads=4:2 dim=16";
    static char *lines[] = {line};
    dkv_err err = {0};
    *p = (dkv_power){.data_dir = dkv_dataDir(),
                     .seed = 1,
                     .seeds = 2,
                     .cases = 8,
                     .jobs = 2,
                     .repeats = 1,
                     .timeout = 60,
                     .budget = 1e-4,
                     .level = 1e-12,
                     .shrink = true,
                     .matrix = true,
                     .suite_lines = lines,
                     .n_suite = 1,
                     .faults = faults};
    assert_int_equal(dkv_parseKernelSpec("emu+bm=32+bn=32", &p->kernel, &err), 0);
    assert_int_equal(dkv_parseKernelSpec("emu-replicated", &p->peer, &err), 0);
    if (dkv_runPower(p, &err)) fail_msg("%s", err.text);
}

static void a_measurement_adds_up(void **state) {
    (void)state;
    dkv_power p;
    run(&p, "F1,D3,E5,H5");
    dkv_power_summary s = dkv_summarisePower(&p);
    assert_int_equal(p.n_faults, 4);
    assert_true(s.planted == 3 && s.controls == 1 && s.controls_found == 0 && s.found == 3 &&
                s.in_suite == 3);
    assert_true(p.clean_cases == 16 && s.median >= 1 && s.worst <= 8 && s.by_tool == 3);
    for (int i = 0; i < p.n_faults; i++) {
        const dkv_fault_power *f = &p.fault[i];
        assert_int_equal(f->control, !f->hunts[0].found[0]);
        assert_int_equal(f->control, !f->shrunk[0]);
        if (!f->control) assert_true(f->segments <= 2 && f->heads <= 2);
        for (int r = 0; r < DKV_N_RULES; r++) assert_in_range(f->hunts[0].cases[1 + r], 1, 8);
    }
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    assert_int_equal(dkv_writePowerJson(&p, f), 0);
    fclose(f);
    assert_non_null(strstr(text, "\"fault\":\"F1\"") && strstr(text, "\"clean_cases\":16") ? text : NULL);
    assert_true(strstr(text, "\"in_suite\":true") && strstr(text, "\"allclose\":") && strstr(text, "\"false_alarms_peer\":"));
    free(text);
    /* interrupted while it judged by the usual rules: nothing is said of what did not come to its end */
    dkv_power cut = p;
    cut.stopped = true;
    cut.rules_done = cut.shrink_done = false;
    f = open_memstream(&text, &size);
    assert_int_equal(dkv_writePowerJson(&cut, f), 0);
    fclose(f);
    assert_true(strstr(text, "\"in_suite\":true") && strstr(text, "\"clean_cases\":16") && !strstr(text, "allclose") &&
                !strstr(text, "_peer"));
    free(text);
    cut.suite_done = cut.clean_done = false;
    f = open_memstream(&text, &size);
    assert_int_equal(dkv_writePowerJson(&cut, f), 0);
    fclose(f);
    assert_true(strstr(text, "\"fault\":\"F1\"") && !strstr(text, "in_suite") && !strstr(text, "clean_cases"));
    free(text);
    f = open_memstream(&text, &size);
    assert_int_equal(dkv_writePowerMarkdown(&p, f), 0);
    fclose(f);
    assert_non_null(strstr(text, "| **faults found, of 3** |"));
    free(text);
    dkv_freePower(&p);
}

static void unknown_faults_are_refused(void **state) {
    (void)state;
    dkv_power p = {.faults = "F1,Z9", .seeds = 1};
    dkv_err err = {0};
    assert_int_equal(dkv_runPower(&p, &err), DKV_EUSER);
    assert_string_equal(err.text, "--faults: 'Z9' is none of `dualkv list faults`");
    dkv_freePower(&p);
    p = (dkv_power){.faults = "F1,", .seeds = 1};
    assert_int_equal(dkv_runPower(&p, &err), DKV_EUSER);
    dkv_freePower(&p);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules_object),
        cmocka_unit_test(the_catalogue_is_large),
        cmocka_unit_test(a_measurement_adds_up),
        cmocka_unit_test(unknown_faults_are_refused),
    };
    return cmocka_run_group_tests_name("power", tests, NULL, NULL);
}
