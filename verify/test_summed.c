/* Replicated problems whose outputs are summed in the arena: the same verdicts as where every copy is kept, and the memory
 * that was counted. */
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
#include "guard.h"

static dkv_status runLine(const char *spec, const char *line, bool summed, dkv_result *out) {
    dkv_kernel_spec s;
    dkv_worker w;
    dkv_problem p;
    dkv_err err = {0};
    dkv_case_options options = {.data_dir = dkv_dataDir(), .level = 1e-9, .threads = 1, .repeats = 1};
    const double usual = dkv_summedFrom;
    if (dkv_parseKernelSpec(spec, &s, &err) || dkv_parseProblem(line, dkv_knownFill, &p, &err))
        fail_msg("%s: %s", line, err.text);
    dkv_initWorker(&w, &s, 60);
    dkv_summedFrom = summed ? 0 : INFINITY;
    dkv_runCase(&p, &w, &options, out);
    dkv_summedFrom = usual;
    dkv_stopWorker(&w);
    dkv_freeProblem(&p);
    return out->status;
}

static dkv_finding *findingOf(dkv_result *r, const char *check) {
    const dkv_check *c;
    for (int i = 0; (c = dkv_listCheck(i)); i++)
        if (strcmp(c->name, check) == 0) return &r->finding[i];
    fail_msg("no check '%s'", check);
    return NULL;
}

static const char *const lines[] = {
    "shape=128+3x40 heads=4:2 dim=32",
    "shape=64+2x17,9 heads=4:1 dim=16 dtype=fp16 layout=fused dlse=on",
    "shape=33k+9@20,5 heads=2:1 dim=8:24 layout=padded dlse=on",
    "shape=20+2x(5+2x3)/1+4 dim=40 layout=strided sinklogit=0.5",
    "shape=64+5x30 heads=2:2 dim=16 mask=window:20:2 fill=aligned",
    "shape=40+2x21 dim=8 mask=prefix run=twice",
    "shape=40+2x21 dim=8 mask=full run=aba",
    "shape=128+6x64 heads=8:2 dim=64 grad=off",
    "shape=64+40x8 heads=4:1 dim=16 fill=duplicated", /* errors of equal copies are the same: never summed */
};
static const char *const kernels[] = {"emu-replicated", "emu-replicated+partials=low"};

static void verdicts_are_the_same(void **state) {
    (void)state;
    dkv_result *kept = malloc(sizeof *kept), *summed = malloc(sizeof *summed);
    for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++)
        for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
            if (runLine(kernels[k], lines[i], false, kept) != DKV_ST_PASSED ||
                runLine(kernels[k], lines[i], true, summed) != DKV_ST_PASSED)
                fail_msg("%s on '%s': %s, %s", kernels[k], lines[i], kept->why, summed->why);
            assert_int_equal(findingOf(summed, "copies")->state, DKV_CHECK_PASSED);
            assert_int_equal(findingOf(summed, "repeat")->state, findingOf(kept, "repeat")->state);
            for (int id = 0; id < DKV_N_OUTPUTS; id++) {
                const dkv_judgement *a = &kept->tensor[id], *b = &summed->tensor[id];
                assert_int_equal(a->present, b->present);
                assert_int_equal(a->all.total, b->all.total);
                if (!a->present) continue;
                if (getenv("DUALKV_SHOW"))
                    printf("%-30s %-60s %-5s err/bound %.3f %.3f rms %.3f %.3f\n", kernels[k], lines[i],
                           dkv_tensorName((dkv_tensor_id)id), a->all.max_ratio, b->all.max_ratio, a->all.rms_z, b->all.rms_z);
                /* Bounds of sums know of each rounding by its terms' magnitudes, not by the copy's value. */
                assert_true(b->all.max_ratio <= 1.2 * a->all.max_ratio);
                assert_true(b->all.max_ratio >= (id == DKV_DK || id == DKV_DV ? 0.1 : 0.5) * a->all.max_ratio);
                assert_true(fabs(a->all.rms_z - b->all.rms_z) < 0.15);
            }
        }
    free(kept);
    free(summed);
}

static void faults_are_found(void **state) {
    (void)state;
    static const char *const faults[] = {"D1", "D3", "F1"};
    dkv_result *r = malloc(sizeof *r);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        char spec[64];
        snprintf(spec, sizeof spec, "emu-replicated+fault=%s", faults[i]);
        const bool kept = dkv_statusRow(runLine(spec, lines[0], false, r))->defect;
        const bool summed = dkv_statusRow(runLine(spec, lines[0], true, r))->defect;
        if (kept != summed) fail_msg("%s: %d where every copy is kept, %d where they are summed", spec, kept, summed);
    }
    assert_int_equal(runLine("emu-replicated", "shape=30+2x7 dim=8 dtype=fp32", true, r), DKV_ST_PASSED); /* never summed */
    free(r);
}

static double readPeak(void) {
    char row[256];
    double kib = NAN;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(row, sizeof row, f)) sscanf(row, "VmHWM: %lf", &kib);
    if (f) fclose(f);
    return kib * 1024;
}

/* What is counted is what is taken: no less, and not three times more. */
static void memory_is_what_was_counted(void **state) {
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    skip(); /* it holds back what was freed, and has memory of its own */
#endif
    const char *line = "shape=2048+28x64 heads=2:1 dim=128 mask=window:8";
    dkv_result *r = malloc(sizeof *r);
    dkv_problem p;
    dkv_err err;
    double usual = dkv_summedFrom;
    FILE *f = fopen("/proc/self/clear_refs", "w"); /* 5: the peak begins anew */
    if (!f || fputs("5", f) < 0 || fclose(f) != 0) skip();
    const double before = readPeak();
    assert_int_equal(runLine("emu-replicated", line, true, r), DKV_ST_PASSED);
    const double peak = readPeak() - before;
    assert_int_equal(dkv_parseProblem(line, NULL, &p, &err), 0);
    dkv_summedFrom = 0;
    const double counted = dkv_estimateCase(&p, true);
    dkv_summedFrom = INFINITY;
    const double kept = dkv_estimateCase(&p, true);
    dkv_summedFrom = usual;
    if (getenv("DUALKV_SHOW")) printf("counted %.0f MiB, peak %.0f MiB; %.0f where copies are kept\n", counted / 0x1p20, peak / 0x1p20, kept / 0x1p20);
    if (peak > counted || peak < counted / 3) fail_msg("counted %.0f MiB, taken %.0f", counted / 0x1p20, peak / 0x1p20);
    assert_true(kept > 4 * counted);
    dkv_freeProblem(&p);
    free(r);
}

static void the_paper_fits(void **state) {
    (void)state;
    dkv_problem p;
    dkv_err err;
    char words[300];
    assert_int_equal(dkv_parseProblem("shape=32768+28x2048 heads=32:8 dim=128", NULL, &p, &err), 0);
    assert_true(dkv_estimateCase(&p, true) < 0x1p30 * 86);
    assert_true(dkv_estimateCase(&p, false) < 0x1p30 * 52);
    dkv_sayMemory(&p, true, words, sizeof words);
    assert_non_null(strstr(words, "kernel's buffers 38."));
    dkv_freeProblem(&p);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    dkv_guardCoordinator();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(verdicts_are_the_same),
        cmocka_unit_test(faults_are_found),
        cmocka_unit_test(memory_is_what_was_counted),
        cmocka_unit_test(the_paper_fits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
