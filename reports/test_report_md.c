/* Tables from records: worst and range over cases, what did not pass, hostile files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report_md.h"

#define RECORD(line, status, ratio, rms)                                                                     \
    "{\"line\":\"" line "\",\"kernel\":\"emu\",\"status\":\"" status                                         \
    "\",\"why\":\"because\",\"seconds\":0.5,"                                                                \
    "\"device\":\"cpu\",\"commit\":\"abc\",\"generator\":\"1\",\"replay\":\"dualkv replay "                  \
    "x\",\"tensors\":{\"O\":"                                                                                \
    "{\"max_bound_ratio\":" ratio ",\"twin_rms\":" rms ",\"bad\":0,\"total\":9}}}"

static void rows_hold_the_worst(void **state) {
    (void)state;
    dkv_report r = {0};
    dkv_err err = {0};
    assert_int_equal(dkv_addReport(&r, RECORD("shape=3", "PASSED", "0.25", "0.9"), &err), 0);
    assert_int_equal(dkv_addReport(&r, RECORD("shape=4", "PASSED", "0.5", "1.1"), &err), 0);
    assert_int_equal(dkv_addReport(&r, RECORD("shape=4 mask=full", "PASSED", "0.75", "\"nan\""), &err), 0);
    assert_int_equal(dkv_addReport(&r, RECORD("shape=5", "FAILED", "\"inf\"", "1"), &err), 0);
    assert_int_equal(r.total, 4);
    assert_int_equal(r.n_rows, 2);
    assert_int_equal(r.rows[0].cases, 3);
    assert_true(isinf(r.rows[0].max_ratio));
    assert_true(r.rows[0].least_rms == 0.9 && r.rows[0].most_rms == 1.1);
    assert_true(r.rows[1].max_ratio == 0.75 && isnan(r.rows[1].most_rms));
    assert_int_equal(r.n_cases, 1);
    assert_string_equal(r.cases[0].replay, "dualkv replay x");
    dkv_freeReport(&r);
}

/* A fault that no case catches, in a stratum where it could be, is named; one that cannot be there is not. */
static void power_is_summed_over_cases(void **state) {
    (void)state;
    static const char *const records[] = {
        "{\"line\":\"shape=3\",\"kernel\":\"emu\",\"status\":\"PASSED\",\"power\":{\"longest\":29,\"scale_error\":0.001,"
        "\"dK_gain\":\"inf\",\"strata\":{\"O response 17-64\":{\"first-key\":0.5,\"scale\":0.2},\"LSE prompt 1-16\":"
        "{\"first-key\":7}}}}",
        "{\"line\":\"shape=4\",\"kernel\":\"emu\",\"status\":\"PASSED\",\"power\":{\"longest\":103,\"scale_error\":1e-5,"
        "\"dK_gain\":0.02,\"strata\":{\"O response 17-64\":{\"first-key\":40,\"scale\":1}}}}",
        "{\"line\":\"shape=5\",\"kernel\":\"emu\",\"status\":\"PASSED\",\"power\":{\"strata\":[3,{\"x\":1}]}}",
        "{\"line\":\"shape=5\",\"kernel\":\"emu\",\"status\":\"PASSED\"}"};
    char path[] = "/tmp/dualkv-test-XXXXXX", text[8192] = "";
    dkv_report r = {0};
    dkv_err err = {0};
    for (size_t i = 0; i < 4; i++) assert_int_equal(dkv_addReport(&r, records[i], &err), 0);
    assert_int_equal(r.power.cases, 3);
    assert_int_equal(dkv_countBlind(&r.power), 1);
    close(mkstemp(path));
    assert_int_equal(dkv_writeReportPage(&r, path, &err), 0);
    FILE *f = fopen(path, "r");
    assert_true(fread(text, 1, sizeof text - 1, f) > 0);
    fclose(f);
    assert_non_null(strstr(text, "one lost key up to length 103; a scale error of 1.0e-05; a dK gain of 2.0e-02"));
    assert_non_null(strstr(text, "| kernel | stratum | first-key | scale |"));
    assert_non_null(strstr(text, "| emu | O response 17-64 | 1 of 2, 40 | **0 of 2, 1** |"));
    assert_non_null(strstr(text, "| emu | LSE prompt 1-16 | 1 of 1, 7 | |"));
    assert_non_null(strstr(text, "- O response 17-64 (emu): no case would have seen scale\n"));
    unlink(path);
    dkv_freeReport(&r);
}

/* Thousands of refusals for a few reasons are a few lines; failures each have theirs. */
static void refusals_are_told_by_reason(void **state) {
    (void)state;
    char path[] = "/tmp/dualkv-test-XXXXXX", text[8192] = "";
    dkv_report r = {0};
    dkv_err err = {0};
    assert_int_equal(dkv_addReport(&r, RECORD("shape=3", "UNSUPPORTED", "0", "0"), &err), 0);
    assert_int_equal(dkv_addReport(&r, RECORD("shape=4", "FAILED", "2", "1"), &err), 0);
    assert_int_equal(dkv_addReport(&r, RECORD("shape=5", "UNSUPPORTED", "0", "0"), &err), 0);
    close(mkstemp(path));
    assert_int_equal(dkv_writeReportPage(&r, path, &err), 0);
    FILE *f = fopen(path, "r");
    assert_true(fread(text, 1, sizeof text - 1, f) > 0);
    fclose(f);
    assert_non_null(strstr(text, "## What did not pass\n\n- **FAILED** `shape=4`: because\n"));
    assert_non_null(strstr(text, "## What was refused\n\n- 2 by emu: because; first `shape=3`\n"));
    assert_null(strstr(text, "shape=5"));
    unlink(path);
    dkv_freeReport(&r);
}

static void tensors_of_another_kind_are_left_out(void **state) {
    (void)state;
    static const char *const odd[] = {"[1,{},3]", "7", "{\"O\":5}", "null"};
    dkv_report r = {0};
    dkv_err err = {0};
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        char json[200];
        snprintf(json, sizeof json, "{\"status\":\"PASSED\",\"line\":\"shape=3\",\"tensors\":%s}", odd[i]);
        assert_int_equal(dkv_addReport(&r, json, &err), 0);
        assert_int_equal(dkv_addReport(&r, json, &err), 0);
    }
    assert_int_equal(r.n_rows, 0);
    dkv_freeReport(&r);
}

static void bad_records_are_refused(void **state) {
    (void)state;
    static const char *const bad[] = {"",
                                      "{",
                                      "[]",
                                      "7",
                                      "{\"status\":\"PASSED\"}",
                                      "{\"status\":7,\"line\":\"shape=3\"}",
                                      "{\"status\":\"PASSED\",\"line\":\"shape=-3\"}"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        dkv_report r = {0};
        dkv_err err = {0};
        assert_int_equal(dkv_addReport(&r, bad[i], &err), DKV_EUSER);
        assert_int_equal(r.total, 0);
        dkv_freeReport(&r);
    }
    dkv_report r = {0};
    dkv_err err = {0};
    assert_int_equal(dkv_readReport(&r, "/nowhere/records.jsonl", &err), DKV_EUSER);
}

static void the_page_names_what_did_not_pass(void **state) {
    (void)state;
    char path[] = "/tmp/dualkv-test-XXXXXX", text[8192] = "";
    dkv_report r = {0};
    dkv_err err = {0};
    close(mkstemp(path));
    assert_int_equal(dkv_addReport(&r, RECORD("shape=3", "PASSED", "0.25", "0.9"), &err), 0);
    assert_int_equal(dkv_addReport(&r, RECORD("shape=5", "FAILED", "2.5", "1"), &err), 0);
    assert_int_equal(dkv_writeReportPage(&r, path, &err), 0);
    FILE *f = fopen(path, "r");
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    assert_true(n > 0);
    assert_non_null(strstr(text, "2 cases on cpu; commit abc"));
    assert_non_null(strstr(text, "1 PASSED, 1 FAILED"));
    assert_non_null(strstr(text, "| emu | causal | bf16 | O | 2 | 2.500 |"));
    assert_non_null(strstr(text, "**FAILED** `shape=5`: because"));
    assert_non_null(strstr(text, "dualkv replay x"));
    assert_int_equal(dkv_writeReportPage(&r, "/nowhere/at/all.md", &err), DKV_EUSER);
    dkv_freeReport(&r);
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_hold_the_worst),
        cmocka_unit_test(power_is_summed_over_cases),
        cmocka_unit_test(refusals_are_told_by_reason),
        cmocka_unit_test(tensors_of_another_kind_are_left_out),
        cmocka_unit_test(bad_records_are_refused),
                                       cmocka_unit_test(the_page_names_what_did_not_pass)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
