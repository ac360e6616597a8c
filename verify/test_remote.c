/* The oracle in a process of its own, on a device that is host memory (testkernels/fake_oracle.c): it judges as the
 * CPU's does, and whatever becomes of it is words, never a pass. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "record.h"
#include "test_line.h"

static dkv_result other[1]; /* the same case, judged otherwise */

static void pathOf(char *text, size_t n) {
    const char *dir = getenv("DUALKV_BUILD");
    snprintf(text, n, "%s/testkernels/fake_cuda.so", dir ? dir : "build");
}

static void judge(const char *kernel, const char *line, dkv_remote *remote) {
    judgeLine(kernel, line, 60, (dkv_case_options){.remote = remote});
}

/* Opens, judges one case, closes; `how` is what goes wrong. */
static dkv_status judgeBy(dkv_oracle_mode mode, const char *how, double timeout, const char *kernel, const char *line) {
    char path[500];
    dkv_remote r;
    dkv_err err = {0};
    pathOf(path, sizeof path);
    if (how) setenv("DUALKV_FAKE_ORACLE", how, 1);
    if (dkv_openRemote(&r, mode, path, timeout, &err)) fail_msg("%s", err.text);
    judge(kernel, line, &r);
    dkv_closeRemote(&r);
    unsetenv("DUALKV_FAKE_ORACLE");
    return result->status;
}

static void judges_as_the_cpu_does(void **state) {
    static char plain[500];
    (void)state;
    static const char *const cases[][2] = {
        {"emu", "shape=33+2x9 heads=4:2 dim=16 sinklogit=1 dlse=on"},
        {"emu", "shape=33k+9@20,5 heads=2:1 dim=8:24 dtype=fp16 alibi=on"},
        {"emu", "shape=40+2x21 dim=8 mask=full grad=off dtype=fp32 softcap=8"},
        {"emu", "shape=0+2x0,1 dim=8"},
        {"emu-replicated", "shape=33+2x9 heads=4:2 dim=16 fill=duplicated"},
        {"emu+fault=D1", "shape=200+77,2x9 heads=4:2"},
        {"emu+fault=X4", "shape=200+77,2x9 heads=4:2"},
        {"ref-replicated", "shape=33+2x9 heads=4:2 dim=16"}, /* declares nothing */
        {plain, "shape=33+2x9 heads=4:2 dim=16"}, /* gives no LSE: the truth stands in for it */
    };
    const char *dir = getenv("DUALKV_BUILD");
    snprintf(plain, sizeof plain, "%s/testkernels/plain.so:no-lse", dir ? dir : "build");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        judge(cases[i][0], cases[i][1], NULL);
        *other = *result;
        judgeBy(DKV_ORACLE_CUDA, NULL, 60, cases[i][0], cases[i][1]);
        if (result->status != other->status || strcmp(result->why, other->why) != 0)
            fail_msg("%s on '%s': %s: %s; on the CPU %s: %s", cases[i][0], cases[i][1],
                     dkv_statusRow(result->status)->name, result->why, dkv_statusRow(other->status)->name, other->why);
        assert_int_equal(other->oracle.by, DKV_ORACLE_CPU);
        assert_int_equal(result->oracle.by, DKV_ORACLE_CUDA);
        assert_true(result->oracle.device_seconds >= 0.5 && result->oracle.flops >= 1e9);
        for (int id = 0; id < DKV_N_OUTPUTS; id++)
            if (memcmp(&result->tensor[id], &other->tensor[id], sizeof result->tensor[id]) != 0)
                fail_msg("%s on '%s': %s is judged otherwise", cases[i][0], cases[i][1], dkv_tensorName((dkv_tensor_id)id));
    }
}

#define SMALL "shape=5+2x3 heads=2:1 dim=8"

static void both_must_agree(void **state) {
    (void)state;
    assert_int_equal(judgeBy(DKV_ORACLE_BOTH, "exact", 60, "emu", SMALL), DKV_ST_PASSED);
    assert_int_equal(judgeBy(DKV_ORACLE_BOTH, "exact", 60, "emu-replicated", SMALL), DKV_ST_PASSED);
    assert_int_equal(judgeBy(DKV_ORACLE_BOTH, "exact", 60, "emu", "shape=65+64,63 dtype=fp16 fill=needle"), DKV_ST_PASSED);
    assert_int_equal(result->oracle.by, DKV_ORACLE_BOTH);
    assert_int_equal(judgeBy(DKV_ORACLE_BOTH, "off", 60, "emu", SMALL), DKV_ST_HARNESS_ERROR);
    assert_non_null(strstr(result->why, "oracles disagree: truth of O"));
    assert_int_equal(judgeBy(DKV_ORACLE_CUDA, "off", 60, "emu", SMALL), DKV_ST_FAILED);
}

static void *judgeInThread(void *remote) {
    judge("emu", SMALL, remote);
    return NULL;
}

/* A process that a thread started serves the others when that thread has ended. */
static void outlives_the_thread_that_started_it(void **state) {
    (void)state;
    char path[500];
    pthread_t thread;
    dkv_remote r;
    dkv_err err = {0};
    pathOf(path, sizeof path);
    if (dkv_openRemote(&r, DKV_ORACLE_CUDA, path, 60, &err)) fail_msg("%s", err.text);
    assert_int_equal(pthread_create(&thread, NULL, judgeInThread, &r), 0);
    pthread_join(thread, NULL);
    const pid_t pid = r.worker[DKV_REMOTE_WORKERS - 1].pid;
    assert_int_equal(result->status, DKV_ST_PASSED);
    assert_true(pid > 0);
    nanosleep(&(struct timespec){0, 50000000}, NULL);
    judge("emu", SMALL, &r);
    if (result->status != DKV_ST_PASSED) fail_msg("%s", result->why);
    assert_int_equal(r.worker[DKV_REMOTE_WORKERS - 1].pid, pid);
    dkv_closeRemote(&r);
}

static void failures_are_words(void **state) {
    (void)state;
    static const struct {
        const char *how, *says;
        double timeout;
        bool cannot; /* a refusal: our own choice goes to the CPU */
    } ways[] = {{"crash", "crashed: signal 6", 60, false},
                {"hang", "no answer within", 0.3, false},
                {"error", "the product failed", 60, false},
                {"huge", "GiB of the device", 60, true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        assert_int_equal(judgeBy(DKV_ORACLE_CUDA, ways[i].how, ways[i].timeout, "emu", SMALL), DKV_ST_HARNESS_ERROR);
        if (!strstr(result->why, "the oracle on the device") || !strstr(result->why, ways[i].says))
            fail_msg("%s: %s", ways[i].how, result->why);
        assert_int_equal(judgeBy(DKV_ORACLE_BOTH, ways[i].how, ways[i].timeout, "emu", SMALL), DKV_ST_HARNESS_ERROR);
    }
}

/* Auto takes the device for a kernel there, where it is worth it; refused, the CPU judges and the record says so. */
static void auto_goes_to_the_cpu_when_refused(void **state) {
    (void)state;
    char path[500], kernel[600];
    dkv_remote r = {.mode = DKV_ORACLE_AUTO, .least = 5};
    dkv_problem p;
    dkv_err err = {0};
    assert_int_equal(dkv_parseProblem("shape=8192+4x1024 heads=8:2 dim=128", NULL, &p, &err), 0);
    assert_true(dkv_wantsRemote(&r, &p, true, 16));
    assert_false(dkv_wantsRemote(&r, &p, false, 16));
    r.mode = DKV_ORACLE_CPU;
    assert_false(dkv_wantsRemote(&r, &p, true, 16));
    assert_false(dkv_wantsRemote(NULL, &p, true, 16));
    dkv_freeProblem(&p);
    pathOf(path, sizeof path);
    snprintf(kernel, sizeof kernel, "%s:fake", path);
    static const struct {
        const char *how, *says;
    } ways[] = {{"huge", "GiB of the device"}, {"old", "is older"}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        setenv("DUALKV_FAKE_ORACLE", ways[i].how, 1);
        assert_int_equal(dkv_openRemote(&r, DKV_ORACLE_AUTO, path, 60, &err), 0);
        r.least = 0;
        judge(kernel, SMALL, &r);
        dkv_closeRemote(&r);
        unsetenv("DUALKV_FAKE_ORACLE");
        assert_int_equal(result->status, DKV_ST_PASSED);
        assert_int_equal(result->oracle.by, DKV_ORACLE_CPU);
        if (!strstr(result->oracle.note, ways[i].says)) fail_msg("%s: %s", ways[i].how, result->oracle.note);
        char *json = dkv_printRecord(result);
        assert_non_null(json);
        assert_non_null(strstr(json, "\"oracle\":\"cpu\""));
        assert_non_null(strstr(json, "\"oracle_note\":\"the oracle on the device"));
        free(json);
    }
    assert_int_equal(dkv_openRemote(&r, DKV_ORACLE_AUTO, path, 60, &err), 0);
    r.least = 0;
    judge(kernel, SMALL, &r);
    assert_int_equal(result->status, DKV_ST_PASSED);
    assert_int_equal(result->oracle.by, DKV_ORACLE_CUDA);
    dkv_closeRemote(&r);
}

static void no_device_is_said_first(void **state) {
    (void)state;
    char path[500];
    dkv_remote r;
    dkv_err err = {0};
    dkv_oracle_mode mode;
    pathOf(path, sizeof path);
    setenv("DUALKV_FAKE_DEVICES", "0", 1);
    assert_int_equal(dkv_openRemote(&r, DKV_ORACLE_CUDA, path, 60, &err), DKV_EHARNESS);
    assert_non_null(strstr(err.text, "no CUDA device"));
    unsetenv("DUALKV_FAKE_DEVICES");
    assert_int_equal(dkv_openRemote(&r, DKV_ORACLE_BOTH, "/nowhere/x.so", 60, &err), DKV_EHARNESS);
    assert_non_null(strstr(err.text, "/nowhere/x.so"));
    assert_int_equal(dkv_parseOracleMode("both", &mode, &err), 0);
    assert_int_equal(mode, DKV_ORACLE_BOTH);
    assert_int_equal(dkv_parseOracleMode("coda", &mode, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "'cuda'"));
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(judges_as_the_cpu_does),
        cmocka_unit_test(both_must_agree), cmocka_unit_test(outlives_the_thread_that_started_it),
        cmocka_unit_test(failures_are_words),
        cmocka_unit_test(auto_goes_to_the_cpu_when_refused),
        cmocka_unit_test(no_device_is_said_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
