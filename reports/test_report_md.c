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
}

/* A name from outside neither makes markup nor drives a terminal. */
static void names_are_text(void **state) {
    (void)state;
    static const char record[] = "{\"line\":\"shape=3\",\"kernel\":\"a|b<i>\\u001b[31m\",\"status\":\"PASSED\",\"tensors\":{"
                                 "\"O\":{\"max_bound_ratio\":0.5},\"|<b>\":{\"max_bound_ratio\":0.5}}}";
    dkv_report r = {0};
    dkv_err err = {0};
    assert_int_equal(dkv_addReport(&r, record, &err), 0);
    assert_int_equal(r.n_rows, 1);
    for (int markdown = 0; markdown < 2; markdown++) {
        char *text = NULL;
        size_t n = 0;
        FILE *f = open_memstream(&text, &n);
        dkv_writeReportTable(&r, f, markdown);
        fclose(f);
        assert_null(strchr(text, 27));
        assert_non_null(strstr(text, markdown ? "| a\\|b&lt;i&gt;\xef\xbf\xbd\\[31m | causal |" : "a|b<i>?[31m causal"));
        free(text);
    }
    dkv_freeReport(&r);
}

/* What is off by a number of thirty digits has no column of thirty digits. */
static void large_errors_are_short(void **state) {
    (void)state;
    dkv_report r = {0};
    dkv_err err = {0};
    char *text = NULL;
    size_t n = 0;
    assert_int_equal(dkv_addReport(&r, RECORD("shape=3", "FAILED", "2.6591456e37", "0.9"), &err), 0);
    FILE *f = open_memstream(&text, &n);
    dkv_writeReportTable(&r, f, false);
    fclose(f);
    assert_non_null(strstr(text, " 2.66e+37 "));
    free(text);
    dkv_freeReport(&r);
}

static void kept_cases_are_capped(void **state) {
    (void)state;
    dkv_report r = {0};
    dkv_err err = {0};
    for (int i = 0; i < DKV_REPORT_CASES + 3; i++)
        assert_int_equal(dkv_addReport(&r, RECORD("shape=3", "FAILED", "2", "1"), &err), 0);
    assert_int_equal(r.n_cases, DKV_REPORT_CASES);
    assert_int_equal(r.cases_left_out, 3);
    assert_int_equal(r.total, DKV_REPORT_CASES + 3);
    dkv_freeReport(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_hold_the_worst),
        cmocka_unit_test(tensors_of_another_kind_are_left_out),
        cmocka_unit_test(bad_records_are_refused),
        cmocka_unit_test(names_are_text),
        cmocka_unit_test(large_errors_are_short),
        cmocka_unit_test(kept_cases_are_capped)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
