#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../ref/layout.h"
#include "../ref/mask.h"
#include "sample.h"

static void test_samples(void **state) {
    (void)state;
    enum { N = 3000 };
    static const char *const words[] = {
        "k+",           "@",       "(",          "/",        "mask=full", "mask=prefix",
        "chunk:",       "block:",  "window:",    "fp32",     "softcap=",  "alibi=on",
        "dlse=on",      "scale=",  "sinklogit=", "grad=off", "fused",     "padded",
        "strided",      "run=aba", "run=twice",  "=0+",      "+1",        "fill=needle",
        "fill=nanresp", ":1 ",     "dim=192:128"};
    enum { N_WORDS = sizeof words / sizeof *words };
    int seen[N_WORDS] = {0}, same = 0;
    double largest = 0;
    char line[DKV_LINE_MAX], again[DKV_LINE_MAX], previous[DKV_LINE_MAX] = "";
    for (uint64_t n = 0; n < N; n++) {
        dkv_problem p;
        dkv_err err = {0};
        if (dkv_sampleProblem(5, n, 1e6, &p, &err)) fail_msg("%s", err.text);
        assert_int_equal(dkv_printProblem(&p, line, sizeof line, &err), 0);
        assert_int_equal(dkv_maskAdmissible(&p, &err), 0);
        double work = (double)dkv_countPairs(&p) * p.hq * (p.dqk > p.dv ? p.dqk : p.dv);
        assert_true(work <= 1e6);
        largest = work > largest ? work : largest;
        dkv_freeProblem(&p);
        for (int w = 0; w < N_WORDS; w++) seen[w] += strstr(line, words[w]) != NULL;
        same += !strcmp(line, previous);
        strcpy(previous, line);
        if (n % 100) continue;
        assert_int_equal(dkv_sampleProblem(5, n, 1e6, &p, &err), 0);
        assert_int_equal(dkv_printProblem(&p, again, sizeof again, &err), 0);
        assert_string_equal(line, again);
        dkv_freeProblem(&p);
    }
    for (int w = 0; w < N_WORDS; w++)
        if (seen[w] < 10) fail_msg("'%s' is in %d of %d lines", words[w], seen[w], N);
    assert_true(largest > 5e5);
    assert_int_equal(same, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_samples)};
    return cmocka_run_group_tests_name("sample", tests, NULL, NULL);
}
