/* Kernels that misbehave do not stop a run, and kernels that do nothing pass no suite; what they leave behind is ended. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guard.h"
#include "kernel_broken.h"
#include "test_line.h"
#include "test_program.h"

static dkv_status runCase(const char *spec, const char *line) {
    return judgeLine(spec, line, 60, (dkv_case_options){.repeats = 1});
}

/* Whatever a kernel does in one case, its status is said, and the other cases are run. */
static void a_run_goes_on(void **state) {
    (void)state;
    const dkv_breakage *b;
    int defects = 0;
    for (int i = 0; (b = dkv_listBreakage(i)); i++) {
        char words[600], first[64];
        const dkv_status_row *want = dkv_statusRow(b->expected);
        snprintf(words, sizeof words, "check '%s' 'shape=4 dim=4' 'shape=7+2 dim=4' --kernel broken+how=%s --timeout %g --jobs 1",
                 b->line, b->how, b->timeout > 0 ? b->timeout : 60);
        int code = run(words);
        snprintf(first, sizeof first, "%s  shape=", want->name);
        if (strncmp(output, first, strlen(first)) != 0 || !strstr(output, "\n3 of 3 cases: "))
            fail_msg("dualkv %s: exit %d, not %s first, or not three cases:\n%s", words, code, want->name, output);
        if (want->defect && code != 1) fail_msg("dualkv %s: exit %d:\n%s", words, code, output);
        defects += want->defect;
    }
    assert_true(defects >= 25);
}

static int byWork(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A defect in each of a suite's smallest cases: those that have anything to compute, `most` of them. */
static int failsSuite(const char *suite, const char *how, int most) {
    dkv_suite s;
    dkv_err err = {0};
    char spec[64];
    int tried = 0;
    if (dkv_loadSuite(suite, &s, &err)) fail_msg("%s", err.text);
    struct {
        double work;
        int line;
    } *order = calloc((size_t)s.n + 1, sizeof *order);
    for (int i = 0; i < s.n; i++) {
        dkv_problem p;
        assert_int_equal(dkv_parseProblem(s.lines[i], dkv_knownFill, &p, &err), 0);
        order[i].line = i;
        order[i].work = dkv_forwardFlops(&p);
        dkv_freeProblem(&p);
    }
    qsort(order, (size_t)s.n, sizeof *order, byWork);
    snprintf(spec, sizeof spec, "broken+how=%s", how);
    for (int i = 0; i < s.n && tried < most && order[i].work < 1e7; i++) {
        if (order[i].work == 0) continue;
        dkv_status got = runCase(spec, s.lines[order[i].line]);
        if (!dkv_statusRow(got)->defect)
            fail_msg("suite %s, '%s': %s is %s: %s", suite, s.lines[order[i].line], spec, dkv_statusRow(got)->name,
                     result->why);
        tried++;
    }
    free(order);
    dkv_freeSuite(&s);
    return tried;
}

/* Zeros, the inputs again, the results of the launch before, nothing, and the right answer of somebody else. */
static void null_kernels_pass_no_suite(void **state) {
    (void)state;
    static const char *const kernels[] = {"zeros", "copy", "previous", "nothing", "fallback"};
    char name[64], help[200];
    int suites = 0;
    for (int i = 0; dkv_listSuite(i, name, help); i++) {
        int cases = 0;
        for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++) cases += failsSuite(name, kernels[k], 5);
        suites += cases > 0;
    }
    assert_true(suites >= 4); /* the cases of `paper` are too large for a test */
}

/* Processes in a session of their own, of a kernel that lives and of one that ended. */
static void nothing_is_left_behind(void **state) {
    (void)state;
    static const char *const specs[] = {"broken+how=orphan", "broken+how=vanish"};
    for (int i = 0; i < 2; i++) {
        int pid = 0;
        assert_int_equal(runCase(specs[i], "shape=5+2x3 heads=2:1 dim=8"), i ? DKV_ST_CRASHED : DKV_ST_PASSED);
        const char *word = strstr(result->printed, "orphan ");
        if (!word || sscanf(word, "orphan %d", &pid) != 1) fail_msg("it printed '%s'", result->printed);
        assert_true(kill(pid, 0) < 0 && errno == ESRCH);
    }
}

/* The example to begin with, as its page says: the right one passes, the wrong one fails with its place. */
static void the_example_is_judged(void **state) {
    (void)state;
    char words[300];
    snprintf(words, sizeof words, "check smoke recorded 'shape=200+3x77 heads=4:2' --forward --kernel $B/examples/plain_kernel.so:%s", "plain");
    assert_int_equal(run(words), 0);
    assert_non_null(strstr(output, " PASSED"));
    snprintf(words, sizeof words, "check 'shape=200+3x77 heads=4:2' --forward --kernel $B/examples/plain_kernel.so:%s", "forgetful");
    assert_int_equal(run(words), 1);
    if (!strstr(output, "times what rounding allows") || !strstr(output, "replay: dualkv replay")) fail_msg("%s", output);
}

static void what_cannot_be_opened_is_one_line(void **state) {
    (void)state;
    static const struct {
        const char *file, *says;
    } rows[] = {{"hostile_none.so", "no symbol 'dualkv_kernels'"},
                {"hostile_abi.so", "speaks ABI 2, this program ABI 1"},
                {"hostile_size.so", "its table says size 8"},
                {"hostile_forward.so", "forward is NULL"},
                {"hostile_open.so", "no such device"},
                {"hostile_list.so", "does not support ABI 1"},
                {"hostile_empty.so", "exports 0 kernels"},
                {"hostile_null.so", "table 0 of 1 is NULL"},
                {"hostile_name.so", "name is NULL"},
                {"hostile_crash.so", "cannot be loaded: signal 6 (Aborted)"},
                {"plain.so:plane", "no kernel 'plane' in it (it has 'plain', ...)"},
                {"plain.so", "exports 3 kernels; name one"},
                {"plain.so:plain+x=1", "takes no option"},
                {"../../nowhere.so", "No such file or directory"}};
    char words[600], path[128];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(words, sizeof words, "check shape=3 --kernel $B/testkernels/%s", rows[i].file);
        int code = run(words);
        if (code != 2 || !strstr(trouble, rows[i].says) || strchr(trouble, '\n') != trouble + strlen(trouble) - 1)
            fail_msg("dualkv %s: exit %d, or not one line that says '%s':\n%s", words, code, rows[i].says, trouble);
    }
    snprintf(path, sizeof path, "%s/text.so", dir);
    FILE *f = fopen(path, "w");
    fputs("this is no shared object, whatever its name says\n", f);
    fclose(f);
    assert_int_equal(run("check shape=3 --kernel $D/text.so"), 2);
    assert_non_null(strstr(trouble, "cannot load"));
    snprintf(path, sizeof path, "%s/folder.so", dir);
    assert_int_equal(mkdir(path, 0755), 0);
    assert_int_equal(run("check shape=3 --kernel $D/folder.so"), 2);
    assert_non_null(strstr(trouble, "cannot load"));
    snprintf(path, sizeof path, "%s/text.so", dir);
    assert_int_equal(chmod(path, 0), 0);
    assert_int_equal(run("check shape=3 --kernel $D/text.so"), 2);
    if (geteuid()) assert_non_null(strstr(trouble, "Permission denied"));
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    if (makeDir()) return 1;
    dkv_guardCoordinator();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_run_goes_on),
        cmocka_unit_test(null_kernels_pass_no_suite),
        cmocka_unit_test(nothing_is_left_behind),
        cmocka_unit_test(the_example_is_judged),
        cmocka_unit_test(what_cannot_be_opened_is_one_line),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
