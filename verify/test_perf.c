/* Intervals of a median by rank, against tables and by trial; a race of a kernel against itself and against slower ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "perf.h"
#include "test_program.h"

/* Of n = 10 at 2.5 % a side tables give the 2nd and 9th value, of 20 the 6th and 15th, of 50 the 18th and 33rd. */
static void ranks_are_those_of_tables(void **state) {
    (void)state;
    static const int rows[][3] = {{10, 2, 9}, {20, 6, 15}, {50, 18, 33}, {6, 1, 6}};
    double x[50], low, high;
    for (int i = 0; i < 50; i++) x[i] = i + 1;
    for (int i = 0; i < 4; i++) {
        dkv_rankInterval(x, rows[i][0], 0.025, &low, &high);
        if (low != rows[i][1] || high != rows[i][2]) fail_msg("n = %d: %g to %g", rows[i][0], low, high);
    }
    dkv_rankInterval(x, 5, 0.025, &low, &high);
    assert_true(low == 0 && isinf(high));
    dkv_rankInterval(x, 0, 0.5, &low, &high);
    assert_true(low == 0 && isinf(high));
    assert_int_equal(dkv_leastRounds(0.025), 6);
    assert_int_equal(dkv_leastRounds(1e-6), 20);
}

/* However lopsided the values are, the median lies outside no more often than was asked for. */
static void intervals_hold_the_median(void **state) {
    (void)state;
    double x[31], low, high;
    int below = 0, above = 0;
    uint64_t h = 1;
    for (int t = 0; t < 20000; t++) {
        for (int i = 0; i < 31; i++) {
            h = h * 6364136223846793005u + 1442695040888963407u;
            x[i] = exp(10 * ldexp((double)(h >> 11), -53)); /* the median is exp(5) */
        }
        for (int i = 1; i < 31; i++)
            for (int k = i; k > 0 && x[k] < x[k - 1]; k--) {
                double y = x[k];
                x[k] = x[k - 1];
                x[k - 1] = y;
            }
        dkv_rankInterval(x, 31, 0.05, &low, &high);
        below += exp(5) < low;
        above += exp(5) > high;
    }
    assert_true(below < 1100 && above < 1100 && below > 300); /* 5 % of 20000, and not a tenth of it */
}

static void race(const char *a, const char *b, const char *line, double level, dkv_perf *out, int want) {
    dkv_kernel_spec spec[2];
    dkv_err err = {0};
    const dkv_kernel_spec *const both[2] = {&spec[0], &spec[1]};
    assert_int_equal(dkv_parseKernelSpec(a, &spec[0], &err), 0);
    assert_int_equal(dkv_parseKernelSpec(b, &spec[1], &err), 0);
    int rc = dkv_compareSpeed(line, both, 60, level, 0.2, dkv_dataDir(), out, &err);
    if (rc != want) fail_msg("%s against %s: %d: %s", a, b, rc, err.text);
}

static void races_are_fair(void **state) {
    (void)state;
    dkv_perf t;
    char fake[300];
    race("emu", "emu", "shape=60+2x9 heads=2:1", 1e-5, &t, 0);
    assert_true(t.rounds >= 17 && t.backward && t.low[0] <= 1.05 && t.low[1] <= 1.05 && t.high[0] >= 1 / 1.05);
    assert_true(t.low[0] <= t.ratio[0] && t.ratio[0] <= t.high[0]);
    race("emu+fault=nope", "emu", "shape=5", 0.1, &t, DKV_EHARNESS);
    race("emu", "broken+how=refuse", "shape=5", 0.1, &t, DKV_EREFUSED);
    race("emu", "broken+how=crash", "shape=5", 0.1, &t, DKV_EHARNESS);
    snprintf(fake, sizeof fake, "%s/testkernels/fake_cuda.so:fake", build());
    race(fake, fake, "shape=20 grad=off", 0.05, &t, 0); /* by the events of a device */
    assert_true(!t.backward && t.gpu.name[0] && t.ratio[0] > 0);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_are_those_of_tables),
        cmocka_unit_test(intervals_hold_the_median),
        cmocka_unit_test(races_are_fair),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
