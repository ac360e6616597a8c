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
                                       cmocka_unit_test(bad_records_are_refused),
                                       cmocka_unit_test(the_page_names_what_did_not_pass)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
