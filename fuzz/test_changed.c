/* A kernel's file that is changed while a run goes on: the run ends there, and what is known is of one file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/suite.h"
#include "../verify/guard.h"
#include "../verify/session.h"
#include "shrink.h"

static char path[] = "/tmp/dualkv-changed-XXXXXX.so";
static dkv_kernel_spec kernel;

/* A copy of one of the test kernels, in the same file as the one before. */
static void place(const char *file, const char *rest) {
    const char *dir = getenv("DUALKV_BUILD");
    char text[400];
    dkv_err err = {0};
    snprintf(text, sizeof text, "cp %s/testkernels/%s %s", dir ? dir : "build", file, path);
    assert_int_equal(system(text), 0);
    snprintf(text, sizeof text, "%s:%s", path, rest);
    if (dkv_parseKernelSpec(text, &kernel, &err) || dkv_probeKernels(&kernel, 1, 60, NULL, &err)) fail_msg("%s", err.text);
}

/* Behind what a loader reads. */
static void change(void) {
    FILE *f = fopen(path, "a");
    assert_non_null(f);
    fputs("x", f);
    fclose(f);
}

typedef struct told {
    long n, other;
    char why[600];
} told;

static void takeResult(const dkv_result *r, long index, long total, void *arg) {
    told *t = arg;
    (void)total;
    t->n++;
    t->other += r->changed;
    if (r->changed) snprintf(t->why, sizeof t->why, "%s", r->why);
    else assert_int_equal(r->status, DKV_ST_PASSED);
    if (index == 0) assert_int_equal(utimensat(AT_FDCWD, path, NULL, 0), 0); /* touched: the same bytes */
    if (index == 1) change();
}

static void a_session_ends_there(void **state) {
    (void)state;
    char line[] = "shape=9+2x5 dim=8";
    const dkv_item items[] = {{line, 0}, {line, 0}, {line, 0}, {line, 0}, {line, 0}};
    told t = {0};
    place("plain.so", "plain");
    dkv_session s = {.kernels = &kernel, .n_kernels = 1, .items = items, .n_items = 5, .jobs = 1, .timeout = 60, .budget = 1e-4,
                     .data_dir = dkv_dataDir(), .report = takeResult, .arg = &t};
    dkv_runSession(&s);
    assert_int_equal(t.n, 3);
    assert_int_equal(t.other, 1);
    assert_non_null(strstr(t.why, "the kernel's file was changed during the run (SHA-256 "));
    assert_int_equal(s.counts[DKV_ST_PASSED], 2);
    assert_int_equal(s.counts[DKV_ST_HARNESS_ERROR], 3); /* and the two that were not run */
    dkv_err err = {0};
    assert_int_equal(dkv_probeKernels(&kernel, 1, 60, NULL, &err), 0); /* another run begins with the file as it is */
    t = (told){0};
    s.n_items = 1;
    dkv_runSession(&s);
    assert_int_equal(s.counts[DKV_ST_PASSED], 1);
}

static int takeCase(const dkv_fuzzed *f, void *arg) {
    told *t = arg;
    (void)f;
    if (++t->n == 2) change();
    return 0;
}

static void a_campaign_ends_there(void **state) {
    (void)state;
    told t = {0};
    dkv_sampler sampler;
    dkv_err err = {0};
    place("plain.so", "plain");
    assert_int_equal(dkv_openSampler(DKV_QUICK, 4, &sampler, &err), 0);
    dkv_campaign c = {.kernel = &kernel, .sampler = &sampler, .data_dir = dkv_dataDir(), .cases = 50, .shards = 1, .jobs = 1,
                      .timeout = 60, .budget = 1e-4, .report = takeCase, .arg = &t};
    dkv_runCampaign(&c);
    assert_int_equal(t.n, 2);
    assert_int_equal(c.trouble.code, DKV_EHARNESS);
    assert_non_null(strstr(c.trouble.text, "and those after it: the kernel's file was changed"));
    dkv_closeSampler(&sampler);
}

static void changeOnce(const char *line, long trials, void *arg) {
    told *t = arg;
    (void)line, (void)trials;
    if (++t->n == 2) change();
}

static void shrinking_ends_there(void **state) {
    (void)state;
    told t = {0};
    dkv_problem p;
    dkv_err err = {0};
    dkv_shrinking s = {.kernel = &kernel, .timeout = 60, .step = changeOnce, .arg = &t,
                       .options = {.data_dir = dkv_dataDir(), .threads = 1, .level = 1e-8}};
    s.result = malloc(sizeof *s.result);
    assert_non_null(s.result);
    place("planted.so", "planted+fault=P2");
    assert_int_equal(dkv_parseProblem("shape=40+3x20 heads=4:2 dim=16", NULL, &p, &err), 0);
    assert_int_equal(dkv_shrinkLine(&p, &s, &err), 0);
    assert_true(s.changed && !s.minimal && t.n == 2);
    assert_int_equal(dkv_shrinkLine(&p, &s, &err), DKV_EHARNESS); /* still another file than the run began with */
    assert_non_null(strstr(err.text, "nothing was shrunk: the kernel's file"));
    dkv_freeProblem(&p);
    free(s.result);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_session_ends_there),
        cmocka_unit_test(a_campaign_ends_there),
        cmocka_unit_test(shrinking_ends_there),
    };
    dkv_guardCoordinator();
    int fd = mkstemps(path, 3);
    if (fd < 0 || close(fd)) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
