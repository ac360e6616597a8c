/* The parts of bisect: intervals, runs, flags, the cache, programs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bisect_flags.h"
#include "bisect_metric.h"
#include "bisect_proc.h"
#include "gate.h"
#include "test_program.h"

/* ---- numbers ---- */

static void as_many_runs_as_needed(void **state) {
    (void)state;
    static const double ps[] = {0.05, 0.3, 0.5, 0.9};
    for (size_t i = 0; i < sizeof ps / sizeof *ps; i++) {
        int n = dkv_runsNeeded(ps[i], 1e-3, 9);
        assert_true(9 * pow(1 - ps[i], n) <= 1e-3);
        assert_true(n == 1 || 9 * pow(1 - ps[i], n - 1) > 1e-3);
    }
    assert_int_equal(dkv_runsNeeded(1, 1e-3, 9), 1);
}

static void metrics_have_names(void **state) {
    (void)state;
    dkv_metric m;
    dkv_err err = {0};
    assert_int_equal(dkv_parseMetric("dQ.rms", &m, &err), 0);
    assert_int_equal(m.kind, DKV_M_RMS);
    assert_int_equal(m.tensor, DKV_DQ);
    assert_int_equal(dkv_parseMetric("seconds", &m, &err), 0);
    assert_int_equal(m.tensor, -1);
    static const char *const wrong[] = {"", "rmz", "dX.rms", "dQ.seconds", "dQ.", ".rms", "rms.dQ"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        if (dkv_parseMetric(wrong[i], &m, &err) != DKV_EUSER) fail_msg("'%s' is taken for a metric", wrong[i]);
}

/* What lies within the factor of chance is inside, what lies beyond is not, on both sides. */
static void an_rms_has_its_interval(void **state) {
    (void)state;
    dkv_metric m;
    dkv_interval v;
    assert_int_equal(dkv_parseMetric("rms", &m, NULL), 0);
    dkv_rmsInterval(0.9, 400, 1e-5, &v);
    const double chance = dkv_chanceGrowth(400, 1e-5);
    assert_true(chance > 1.1 && chance < 1.4);
    assert_true(fabs(dkv_distanceFrom(&m, &v, 0.9 * chance * 0.999)) < 1);
    assert_true(dkv_distanceFrom(&m, &v, 0.9 * chance * 1.001) > 1);
    assert_true(dkv_distanceFrom(&m, &v, 0.9 / chance * 0.999) < -1);
    assert_true(isinf(dkv_distanceFrom(&m, &v, INFINITY)));
    assert_true(isnan(dkv_distanceFrom(&m, &v, NAN)));
    assert_true(dkv_distanceFrom(&m, &v, 0.9) == 0);
}

/* Student's t of 9 degrees exceeds 4.297 with probability 1e-3. */
static void a_sample_has_its_interval(void **state) {
    (void)state;
    dkv_metric m;
    dkv_interval v;
    double x[10], s = 0;
    assert_int_equal(dkv_parseMetric("bias", &m, NULL), 0);
    for (int i = 0; i < 10; i++) x[i] = i - 4.5;
    for (int i = 0; i < 10; i++) s += x[i] * x[i] / 9;
    dkv_sampleInterval(&m, 0.25, x, 10, 1e-3, &v);
    assert_true(fabs(v.high - 4.297 * sqrt(s * 1.1)) < 0.01);
    assert_true(fabs(v.low + v.high) < 1e-9);
    dkv_sampleInterval(&m, 1e6, x, 10, 1e-3, &v); /* the good end's own value is accepted */
    assert_true(v.high == 1e6);
    for (int i = 0; i < 10; i++) x[i] = 2; /* no spread: reproducible */
    dkv_sampleInterval(&m, 2, x, 10, 1e-3, &v);
    assert_true(v.low == 2 && v.high == 2);
    assert_true(isinf(dkv_distanceFrom(&m, &v, 2.0000001)));
    dkv_sampleInterval(&m, 2, x, 1, 1e-3, &v); /* one value says nothing of a spread */
    assert_true(isinf(v.high));
    assert_true(dkv_distanceFrom(&m, &v, 1e9) == 0);
}

static void the_middle_of_runs(void **state) {
    (void)state;
    double a[] = {3, 1, 2}, b[] = {4, 1, 3, 2}, c[] = {1, NAN}, d[] = {INFINITY, INFINITY};
    assert_true(dkv_medianOf(a, 3) == 2);
    assert_true(dkv_medianOf(b, 4) == 2.5);
    assert_true(isnan(dkv_medianOf(c, 2)));
    assert_true(isinf(dkv_medianOf(d, 2)));
    assert_true(isnan(dkv_medianOf(NULL, 0)));
}

/* ---- flags ---- */

typedef struct fake {
    const char *need[3]; /* all of them must be there; "!X": must be gone */
    const char *breaks;  /* with this it does not build */
    long tests;
} fake;

static bool hasWord(const char *flags, const char *word) {
    const size_t n = strlen(word);
    for (const char *at = flags; (at = strstr(at, word)); at++)
        if ((at == flags || at[-1] == ' ') && (!at[n] || at[n] == ' ')) return true;
    return false;
}

static int testFake(const char *flags, void *arg, dkv_bisect_verdict *out, dkv_err *err) {
    fake *f = arg;
    (void)err;
    f->tests++;
    *out = DKV_BV_BAD;
    for (int i = 0; i < 3 && f->need[i]; i++)
        if (hasWord(flags, f->need[i] + (f->need[i][0] == '!')) != (f->need[i][0] != '!')) *out = DKV_BV_GOOD;
    if (f->breaks && hasWord(flags, f->breaks) && *out == DKV_BV_GOOD) *out = DKV_BV_SKIP;
    return 0;
}

static void mustNeed(fake f, const char *good, const char *bad, const char *want) {
    char got[500] = "";
    dkv_err err = {0};
    dkv_flag_search s = {.test = testFake, .arg = &f};
    if (dkv_searchFlags(good, bad, &s, &err)) fail_msg("'%s' to '%s': %s", good, bad, err.text);
    for (int i = 0; i < s.n; i++)
        if (s.needed[i])
            snprintf(got + strlen(got), sizeof got - strlen(got), "%s%s ", s.changes[i].added ? "+" : "-", s.changes[i].text);
    if (strcmp(got, want)) fail_msg("'%s' to '%s': %s instead of %s (%ld tests)", good, bad, got, want, f.tests);
    dkv_freeFlagSearch(&s);
}

static void the_least_flags_are_found(void **state) {
    (void)state;
    mustNeed((fake){.need = {"-f"}}, "", "-a -b -c -d -e -f -g -h", "+-f ");
    mustNeed((fake){.need = {"-b", "-g"}}, "-O2", "-O2 -a -b -c -d -e -f -g -h", "+-b +-g ");
    mustNeed((fake){.need = {"-a", "-d", "-h"}}, "", "-a -b -c -d -e -f -g -h", "+-a +-d +-h ");
    mustNeed((fake){.need = {"!-safe"}}, "-safe -O2", "-O2 -x -y", "--safe ");
    mustNeed((fake){.need = {"!-safe", "-y"}}, "-safe -O2", "-O2 -x -y", "+-y --safe ");
    mustNeed((fake){.need = {"-c"}, .breaks = "-a"}, "", "-a -b -c -d", "+-c ");
    mustNeed((fake){.need = {"'-Xptxas -O1'"}}, "-O3", "-O3 '-Xptxas -O1' k.c=-ffast-math", "+'-Xptxas -O1' ");
}

static void flags_that_tell_nothing_are_refused(void **state) {
    (void)state;
    fake f = {.need = {"-x"}};
    dkv_flag_search s = {.test = testFake, .arg = &f};
    dkv_err err = {0};
    assert_int_equal(dkv_searchFlags("-a -b", "-b -a", &s, &err), DKV_EUSER);
    dkv_freeFlagSearch(&s);
    assert_int_equal(dkv_searchFlags("-a", "-a 'b", &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "not closed"));
    dkv_freeFlagSearch(&s);
    assert_int_equal(dkv_searchFlags("", "-a", &s, &err), DKV_EHARNESS); /* the bad set passes */
    assert_non_null(strstr(err.text, "--flags-bad"));
    dkv_freeFlagSearch(&s);
    assert_int_equal(dkv_searchFlags("-x", "-x -a", &s, &err), DKV_EHARNESS); /* the good one fails */
    assert_non_null(strstr(err.text, "--flags-good"));
    dkv_freeFlagSearch(&s);
}

static void flags_reach_the_build(void **state) {
    (void)state;
    assert_int_equal(dkv_setFlags("-O2 '-Xptxas -O1' a/k.c=-ffast-math a/k.c=-g", NULL), 0);
    assert_string_equal(getenv("DUALKV_FLAGS"), "-O2 -Xptxas -O1");
    assert_string_equal(getenv("DUALKV_FLAGS_a_k_c"), "-ffast-math -g");
    assert_int_equal(dkv_setFlags("-O1", NULL), 0);
    assert_string_equal(getenv("DUALKV_FLAGS"), "-O1");
    assert_null(getenv("DUALKV_FLAGS_a_k_c"));
}

/* ---- the cache ---- */

static void makeKey(char key[65], char c) {
    memset(key, c, 64);
    key[64] = 0;
}

static void rows_come_back(void **state) {
    (void)state;
    char path[100];
    dkv_bisect_cache c;
    dkv_bisect_row row = {.line = "shape=3", .run = 2, .status = DKV_ST_FAILED, .judged = true, .forward = 0.1}, got;
    snprintf(path, sizeof path, "%s/rows", dir);
    makeKey(row.key, 'a');
    strcpy(row.why, "because \"of\"\nthat");
    row.tensor[DKV_DQ] = (dkv_bisect_stat){true, true, INFINITY, 1.0 / 3, -0.25, 1e-300, 77};
    row.arithmetic.unit = 0x1p-24;
    row.arithmetic.key_tile = 64;
    assert_int_equal(dkv_openCache(path, &c, NULL), 0);
    assert_int_equal(dkv_addCached(&c, &row, NULL), 0);
    dkv_bisect_row failed = {.line = "", .build = DKV_BUILD_HUNG};
    makeKey(failed.key, 'b');
    assert_int_equal(dkv_addCached(&c, &failed, NULL), 0);
    dkv_closeCache(&c);
    assert_int_equal(runShell("printf '{\"key\":\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' >>$D/rows"), 0); /* killed while it wrote */
    for (int round = 0; round < 2; round++) {
        assert_int_equal(dkv_openCache(path, &c, NULL), 0);
        assert_int_equal(c.n, 2 + round);
        assert_int_equal(c.skipped, round); /* the half row has an end now */
        assert_true(dkv_findCached(&c, row.key, &got));
        assert_int_equal(got.status, DKV_ST_FAILED);
        assert_string_equal(got.why, row.why);
        assert_memory_equal(&got.tensor[DKV_DQ], &row.tensor[DKV_DQ], sizeof(dkv_bisect_stat));
        assert_true(got.arithmetic.unit == 0x1p-24 && got.arithmetic.key_tile == 64 && !got.tensor[DKV_O].there);
        assert_true(dkv_findCached(&c, failed.key, &got));
        assert_int_equal(got.build, DKV_BUILD_HUNG);
        char key[65];
        makeKey(key, 'c');
        assert_int_equal(dkv_findCached(&c, key, &got), round);
        memcpy(failed.key, key, sizeof key);
        assert_int_equal(dkv_addCached(&c, &failed, NULL), 0);
        makeKey(failed.key, 'b');
        dkv_closeCache(&c);
    }
}

static void what_is_no_cache_is_refused(void **state) {
    (void)state;
    static const char *const made[] = {"printf 'hello\\nworld\\n' >$D/no", "rm $D/no; mkdir $D/no", "rmdir $D/no; ln -s /nowhere/x $D/no"};
    char path[100];
    dkv_bisect_cache c;
    dkv_err err = {0};
    snprintf(path, sizeof path, "%s/no", dir);
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
        assert_int_equal(runShell(made[i]), 0);
        assert_int_equal(dkv_openCache(path, &c, &err), DKV_EUSER);
        dkv_closeCache(&c);
    }
}

/* ---- programs ---- */

static void programs_are_contained(void **state) {
    (void)state;
    const char *loud[] = {"sh", "-c", "head -c 300000000 /dev/zero; echo; echo the last line", NULL};
    dkv_program p = {.argv = loud, .ends_only = true, .timeout = 60};
    char last[100];
    assert_int_equal(dkv_runProgram(&p, NULL), 0);
    assert_int_equal(p.code, 0);
    assert_true(p.bytes > 300000000 && strlen(p.last) <= DKV_LASTS_MAX);
    dkv_lastLine(p.last, last, sizeof last);
    assert_string_equal(last, "the last line");
    const char *hangs[] = {"sh", "-c", "sleep 100 & echo x; trap '' TERM; sleep 100", NULL};
    p = (dkv_program){.argv = hangs, .timeout = 0.3, .out = p.out};
    assert_int_equal(dkv_runProgram(&p, NULL), 0);
    assert_true(p.timed_out && p.seconds < 30);
    assert_string_equal(p.out, "x\n");
    const char *daemon[] = {"sh", "-c", "sleep 100 & echo y >&2; exit 7", NULL}; /* holds the pipe open */
    p = (dkv_program){.argv = daemon, .timeout = 60, .out = p.out};
    assert_int_equal(dkv_runProgram(&p, NULL), 0);
    assert_int_equal(p.code, 7);
    assert_true(!p.timed_out && p.seconds < 30);
    assert_string_equal(p.last, "y\n");
    const char *none[] = {"/no/such/program", NULL};
    p = (dkv_program){.argv = none, .out = p.out};
    assert_int_equal(dkv_runProgram(&p, NULL), DKV_EHARNESS);
    const char *echo[] = {"cat", NULL};
    p = (dkv_program){.argv = echo, .input = "told", .out = p.out};
    assert_int_equal(dkv_runProgram(&p, NULL), 0);
    assert_string_equal(p.out, "told");
    dkv_freeProgram(&p);
}

int main(void) {
    if (makeDir()) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_many_runs_as_needed),      cmocka_unit_test(metrics_have_names),
        cmocka_unit_test(an_rms_has_its_interval),     cmocka_unit_test(a_sample_has_its_interval),
        cmocka_unit_test(the_middle_of_runs),          cmocka_unit_test(the_least_flags_are_found),
        cmocka_unit_test(flags_that_tell_nothing_are_refused), cmocka_unit_test(flags_reach_the_build),
        cmocka_unit_test(rows_come_back),              cmocka_unit_test(what_is_no_cache_is_refused),
        cmocka_unit_test(programs_are_contained),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
