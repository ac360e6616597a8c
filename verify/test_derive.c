/* Identities between a case and problems made from it: correct kernels keep them all, each is broken by some fault. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "derive.h"
#include "test_line.h"

static void runLine(const char *spec, const char *line) {
    judgeLine(spec, line, 60, (dkv_case_options){.repeats = 1});
}

static const char *const checks[] = {"boundary", "plain", "permute", "future", "shift", "merge", "maxima"};
enum { BOUNDARY = 1, PLAIN = 2, PERMUTE = 4, FUTURE = 8, SHIFT = 16, MERGE = 32, MAXIMA = 64, ALL = 127 };

/* What applies to which line; all of it passes on correct kernels, in either layout. */
static const struct {
    const char *line;
    int applies;
} rows[] = {
    {"shape=20+7,5/9+5 heads=2:1 dim=8 dlse=on", ALL},
    {"shape=20+2x(5+2x3)/1+4 dim=8 sinklogit=0.5 dlse=on", ALL},
    {"shape=30+9 dim=4 dtype=fp32 fill=exact layout=fused", ALL & ~PERMUTE},
    {"shape=17 dim=8", BOUNDARY | FUTURE | SHIFT | MAXIMA},
    {"shape=20k+7@15,5 heads=2:2 dim=8:4 dtype=fp16", ALL & ~(BOUNDARY | PLAIN)},
    {"shape=20+9 dim=8 mask=window:6:2 alibi=on softcap=3", ALL & ~(PERMUTE | MERGE)},
    {"shape=20+5,9 dim=8 mask=full", PERMUTE | SHIFT | MERGE | MAXIMA},
    {"shape=20+5,9 dim=8 mask=prefix grad=off layout=padded", PERMUTE | FUTURE | SHIFT | MERGE | MAXIMA},
    {"shape=40+5,9 dim=8 mask=block:8:0.5:3", ALL & ~(PLAIN | MERGE)},
    {"shape=40+5 dim=8 mask=chunk:10 run=aba layout=strided", ALL & ~(PERMUTE | MERGE)},
    {"shape=12+5,3 dim=8 fill=nanresp seed=2", ALL & ~(PLAIN | SHIFT)},
    {"shape=0+3,0,1 dim=4", PERMUTE | FUTURE | SHIFT | MAXIMA},
};

static void correct_kernels_keep_identities(void **state) {
    (void)state;
    static const char *const kernels[] = {"emu", "emu-replicated", "emu+bm=16+bn=16", "ref"};
    for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++)
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            runLine(kernels[k], rows[i].line);
            if (result->status != DKV_ST_PASSED)
                fail_msg("%s on '%s': %s: %s", kernels[k], rows[i].line, dkv_statusRow(result->status)->name, result->why);
            for (int c = 0; c < 7; c++) {
                const dkv_finding *f = findingOf(checks[c]);
                bool applies = rows[i].applies >> c & 1;
                if ((f->state != DKV_NOT_APPLICABLE) != applies)
                    fail_msg("%s, '%s' on '%s': %s", kernels[k], checks[c], rows[i].line,
                             applies ? "does not run" : "runs, and should not");
            }
        }
}

static void each_identity_sees_a_fault(void **state) {
    (void)state;
    static const struct {
        const char *check, *spec, *line;
        dkv_status status;
    } faults[] = {
        {"boundary", "emu+fault=X1", "shape=20+7,5/9+5 heads=2:1 dim=8", DKV_ST_FAILED},
        {"boundary", "emu+fault=J1", "shape=20+7 heads=2:1 dim=8", DKV_ST_FAILED},
        {"plain", "emu+fault=A4", "shape=20+7 heads=2:1 dim=8", DKV_ST_FAILED},
        {"plain", "emu+fault=F1", "shape=20+7 heads=2:1 dim=8", DKV_ST_FAILED},
        {"permute", "emu+fault=L1", "shape=20+7,5/9+5 heads=2:1 dim=8", DKV_ST_FAILED},
        {"permute", "emu+fault=H5", "shape=20+7,5/9+5 heads=2:1 dim=8", DKV_ST_FAILED},
        {"future", "emu+fault=X1", "shape=20+7 heads=2:1 dim=8", DKV_ST_LEAKED},
        {"future", "emu+fault=Y23", "shape=20+7,5/9+5 heads=2:1 dim=8", DKV_ST_LEAKED},
        {"shift", "emu+fault=X30", "shape=20+7,5/9+5 heads=2:1 dim=8", DKV_ST_FAILED},
        {"merge", "emu+fault=D1", "shape=20+7 heads=2:1 dim=8", DKV_ST_FAILED},
        {"merge", "emu+fault=X13", "shape=20+7 heads=2:1 dim=8", DKV_ST_FAILED},
        {"maxima", "broken+how=maxima", "shape=20+7 heads=2:1 dim=8", DKV_ST_FAILED},
    };
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        runLine(faults[i].spec, faults[i].line);
        const dkv_finding *f = findingOf(faults[i].check);
        if (f->state != DKV_CHECK_DEFECT || f->status != faults[i].status)
            fail_msg("'%s' does not see %s on '%s': %s", faults[i].check, faults[i].spec, faults[i].line, f->why);
    }
}

/* The tolerance is the sum of two bounds: on either side of it. And an oracle that breaks an identity is not the kernel's. */
static void values_are_compared_at_the_bound(void **state) {
    (void)state;
    dkv_tally t = {0};
    dkv_compareValues(1, 1.5, 1, 1, 0.5, DKV_O, 3, &t);
    assert_true(t.compared == 1 && t.outside == 0 && t.bits == 1);
    dkv_compareValues(1, 1.5, 1, 1, 0.49, DKV_O, 3, &t);
    assert_true(t.outside == 1 && t.first == 3 && !t.oracle);
    dkv_compareValues(1, NAN, 1, 1, 0.49, DKV_O, 4, &t);
    assert_true(t.outside == 2 && t.first == 3);
    dkv_compareValues(1, 1, 1, 2, 0.5, DKV_LSE, 5, &t);
    assert_true(t.outside == 3 && t.oracle && t.id == DKV_LSE && t.now == 2);
}

/* A line does the same wherever it runs: small ones always, heavy ones never. */
static void what_is_worth_a_run_is_the_lines_own(void **state) {
    (void)state;
    static const char *const some[] = {"shape=20+7 dim=8", "shape=200+3x77 heads=8:1 dim=128 seed=%d",
                                       "shape=4096+16x2048 heads=32:8 dim=128"};
    for (int i = 0; i < 3; i++) {
        int yes = 0;
        for (int seed = 1; seed <= 300; seed++) {
            char line[120];
            dkv_problem p;
            dkv_case_options options = {.threads = 1};
            snprintf(line, sizeof line, some[i], seed);
            assert_int_equal(dkv_parseProblem(line, NULL, &p, NULL), 0);
            dkv_case c = {.p = &p, .line = line, .options = &options};
            yes += dkv_worthDeriving(&c, "merge");
            options.nested = true;
            assert_false(dkv_worthDeriving(&c, "merge"));
            dkv_freeProblem(&p);
        }
        if (i == 0) assert_int_equal(yes, 300);
        if (i == 1) assert_in_range(yes, 20, 90);
        if (i == 2) assert_int_equal(yes, 0);
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernels_keep_identities),
        cmocka_unit_test(each_identity_sees_a_fault),
        cmocka_unit_test(values_are_compared_at_the_bound),
        cmocka_unit_test(what_is_worth_a_run_is_the_lines_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
