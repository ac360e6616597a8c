/* Simpler lines are problems, differ, and end; shrinking keeps the reason and ends small; flaky and stateful
 * kernels. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/layout.h"
#include "../ref/mask.h"
#include "shrink.h"
#include "simplify.h"

static dkv_problem parse(const char *line) {
    dkv_problem p;
    dkv_err err = {0};
    if (dkv_parseProblem(line, dkv_knownFill, &p, &err)) fail_msg("%s: %s", line, err.text);
    return p;
}

static void edits_give_admissible_lines(void **state) {
    (void)state;
    dkv_sampler s;
    dkv_err err = {0};
    long made = 0;
    assert_int_equal(dkv_openSampler(DKV_QUICK, 9, &s, &err), 0);
    for (uint64_t n = 0; n < 120; n++) {
        dkv_problem p, q;
        int edits;
        char before[DKV_LINE_MAX + 1], after[DKV_LINE_MAX + 1];
        assert_int_equal(dkv_sampleCase(&s, n, &p, &err), 0);
        assert_int_equal(dkv_printProblem(&p, before, sizeof before, &err), 0);
        dkv_cut *list = dkv_listCuts(&p, &edits);
        assert_true(edits > 10);
        for (int i = 0; i < edits; i++) {
            if (!dkv_applyCut(&p, &list[i], &q)) continue;
            assert_int_equal(dkv_printProblem(&q, after, sizeof after, &err), 0);
            assert_string_not_equal(before, after);
            assert_int_equal(dkv_maskAdmissible(&q, &err), 0);
            assert_true(dkv_countKeys(&q) <= dkv_countKeys(&p) && q.n_nodes <= p.n_nodes && q.hq <= p.hq);
            assert_true(q.dqk <= p.dqk && q.dv <= p.dv);
            dkv_freeProblem(&q);
            made++;
        }
        free(list);
        dkv_freeProblem(&p);
    }
    dkv_closeSampler(&s);
    assert_true(made > 3000);
}

static bool reaches(const char *from, const char *to) {
    dkv_problem p = parse(from), q;
    int n;
    bool found = false;
    dkv_cut *list = dkv_listCuts(&p, &n);
    for (int i = 0; i < n && !found; i++) {
        char line[DKV_LINE_MAX + 1];
        if (!dkv_applyCut(&p, &list[i], &q)) continue;
        assert_int_equal(dkv_printProblem(&q, line, sizeof line, NULL), 0);
        found = !strcmp(line, to);
        dkv_freeProblem(&q);
    }
    free(list);
    dkv_freeProblem(&p);
    return found;
}

static void edits_keep_the_rest(void **state) {
    (void)state;
    assert_true(reaches("shape=9+3,4/7+2", "shape=7+2"));
    assert_true(reaches("shape=9+3,(4+1,2)@5,6", "shape=9+3,1,2,6"));
    assert_true(reaches("shape=9+3,(4+1,2)@5,6", "shape=9+3,(4+1,2),6"));
    assert_true(reaches("shape=9+3,(4+1,2)@5,6", "shape=9+3,6"));
    assert_true(reaches("shape=9+3,(4+1@3,2)@5,6", "shape=9+3,1@3,2,6"));
    assert_true(reaches("shape=9+3,4@7", "shape=7+3,4") && reaches("shape=9+3,4@7", "shape=8+3,4@7"));
    assert_true(reaches("shape=9k+3", "shape=9+3") && reaches("shape=20+8x5", "shape=20+4x5"));
    assert_true(reaches("shape=9 heads=12:3", "shape=9 heads=4:1") &&
                reaches("shape=9 dim=72", "shape=9 dim=18:72"));
    assert_true(reaches("shape=9 mask=window:8:3", "shape=9 mask=window:8") &&
                reaches("shape=9 mask=full", "shape=9"));
    assert_true(reaches("shape=9 fill=hot seed=3", "shape=9 seed=3") &&
                reaches("shape=9 run=aba", "shape=9"));
}

static int shrink(const char *spec, const char *line, dkv_shrinking *s, dkv_err *err) {
    static dkv_kernel_spec kernel;
    static dkv_result result;
    char path[700];
    const char *dir = getenv("DUALKV_BUILD");
    snprintf(path, sizeof path, spec[0] == '/' ? "%s/testkernels%s" : "%.0s%s", dir ? dir : "build", spec);
    if (dkv_parseKernelSpec(path, &kernel, err)) fail_msg("%s", err->text);
    dkv_problem p = parse(line);
    *s = (dkv_shrinking){.kernel = &kernel,
                         .timeout = 20,
                         .result = &result,
                         .options = {.data_dir = dkv_dataDir(), .level = 1e-8, .threads = 1, .repeats = 1}};
    int rc = dkv_shrinkLine(&p, s, err);
    dkv_freeProblem(&p);
    return rc;
}

#ifdef __SANITIZE_ADDRESS__
#define LARGE "shape=70+5x9/20+3x9 heads=8:2 dim=10 fill=heavy layout=fused seed=7 dlse=on"
enum { FAULTS = 1, MOODS = 2, FLAKY = 0 };
#else
#define LARGE "shape=203+5x33,77/50+3x9 heads=8:2 dim=40 fill=heavy layout=fused seed=7 dlse=on"
enum { FAULTS = 4, MOODS = 6, FLAKY = 2 }; /* FLAKY: of the moods, at least */
#endif

static void lines_end_small(void **state) {
    (void)state;
    static const char *const faults[4] = {"F1", "L1", "X16", "X9"};
    dkv_shrinking s;
    dkv_err err = {0};
    for (size_t i = 0; i < FAULTS; i++) {
        char spec[40];
        snprintf(spec, sizeof spec, "emu+fault=%s", faults[i]);
        if (shrink(spec, LARGE, &s, &err)) fail_msg("%s: %s", spec, err.text);
        dkv_problem p = parse(s.line);
        int segments = 0;
        for (int k = 0; k < p.n_nodes; k++) segments += p.nodes[k].len > 0;
        if (segments > 2 || p.n_nodes > 3 || p.hq > 2) fail_msg("%s: %s", spec, s.line);
        assert_true(s.minimal && !s.after && s.failed == s.tried);
        assert_true(dkv_sameReason(dkv_reasonOf(s.result), s.reason));
        assert_string_equal(s.result->line, s.line);
        dkv_freeProblem(&p);
    }
    assert_int_equal(shrink("emu", LARGE, &s, &err), DKV_EREFUSED);
}

/* The first call's key ranges are kept: alone nothing is wrong, where no check runs another shape. */
static void a_kernel_that_remembers(void **state) {
    (void)state;
    dkv_shrinking s;
    dkv_err err = {0};
    if (shrink("emu+fault=J1", "shape=60 mask=full", &s, &err)) fail_msg("%s", err.text);
    assert_true(s.after && strstr(s.line, "run=aba"));
}

/* Cut before anything is known, which is not the line's doing. */
static void an_interrupt_is_said(void **state) {
    (void)state;
    dkv_shrinking s;
    dkv_err err = {0};
    dkv_stopRequested = 2;
    int rc = shrink("emu+fault=F1", "shape=30+3x9 heads=4:2", &s, &err);
    dkv_stopRequested = 0;
    assert_int_equal(rc, DKV_EREFUSED);
    if (strncmp(err.text, "interrupted", 11)) fail_msg("%s", err.text);
}

static void a_kernel_that_crashes_now_and_then(void **state) {
    (void)state;
    dkv_shrinking s;
    dkv_err err = {0};
    int flaky = 0;
    for (int i = 0; i < MOODS; i++) {
        int rc = shrink("/moody.so", "shape=30+3x9 heads=4:2", &s, &err);
        if (rc) continue; /* in the mood five times */
        assert_int_equal(s.reason.status, DKV_ST_CRASHED);
        dkv_problem p = parse(s.line);
        if (s.failed < s.tried && dkv_countQueries(&p) == 6) flaky += s.tries > 1;
        dkv_freeProblem(&p);
    }
    assert_true(flaky >= FLAKY);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(edits_give_admissible_lines),
        cmocka_unit_test(edits_keep_the_rest),
        cmocka_unit_test(lines_end_small),
        cmocka_unit_test(a_kernel_that_remembers),
        cmocka_unit_test(an_interrupt_is_said),
        cmocka_unit_test(a_kernel_that_crashes_now_and_then),
    };
    return cmocka_run_group_tests_name("shrink", tests, NULL, NULL);
}
