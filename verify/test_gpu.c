/* Kernels in device memory, on a device that is host memory (testkernels/fake_cuda.c): there and back, every
 * layout and way to run, errors that pass and errors that stay, timing, and machines without a device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "record.h"
#include "session.h"
#include "test_line.h"

static dkv_kernel_spec spec(const char *word) {
    char text[600];
    const char *dir = getenv("DUALKV_BUILD");
    dkv_kernel_spec s;
    dkv_err err = {0};
    snprintf(text, sizeof text, "%s/testkernels/fake_cuda.so:%s", dir ? dir : "build", word);
    if (dkv_parseKernelSpec(text, &s, &err)) fail_msg("%s", err.text);
    return s;
}

/* The status of a case; the worker stays for the next one if it is given. */
static dkv_status runWith(dkv_worker *w, const char *line) {
    return judgeOn(w, line, (dkv_case_options){.repeats = 1});
}

static void mustBe(dkv_status want, const char *word, const char *line, const char *says) {
    dkv_worker w;
    dkv_kernel_spec s = spec(word);
    dkv_initWorker(&w, &s, 60);
    dkv_status got = runWith(&w, line);
    dkv_stopWorker(&w);
    if (got != want || !strstr(result->why, says))
        fail_msg("%s on '%s': %s instead of %s: %s", word, line, dkv_statusRow(got)->name,
                 dkv_statusRow(want)->name, result->why);
}

static void right_kernels_pass(void **state) {
    (void)state;
    static const char *const lines[] = {
        "shape=33+2x9 heads=4:2 dim=16 layout=fused",
        "shape=33+2x9 heads=4:2 dim=16 layout=fused seed=2",
        "shape=33k+9@20,5 heads=2:1 dim=8:24 dtype=fp16 layout=padded dlse=on",
        "shape=20+2x(5+2x3)/1+4 dim=40 sinklogit=0.5 dlse=on alibi=on",
        "shape=70+65,1 heads=7:1 dim=9 dtype=fp32 layout=strided softcap=8 alibi=on",
        "shape=40+2x21 dim=8 mask=full grad=off",
        "shape=0+2x0,1 dim=8",
        "shape=40+2x21 dim=8 run=aba",
        "shape=40+2x21 dim=8 run=side sinklogit=1",
        "shape=40+2x21 dim=8 run=graph dlse=on",
        "shape=40+2x21 dim=8 run=busy",
    };
    dkv_worker w;
    dkv_kernel_spec s = spec("fake+bm=16+bn=16");
    dkv_initWorker(&w, &s, 60);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (runWith(&w, lines[i]) != DKV_ST_PASSED) fail_msg("%s: %s", lines[i], result->why);
    assert_int_equal(w.starts, 1);
    dkv_stopWorker(&w);
    mustBe(DKV_ST_PASSED, "fake+how=host-pointer", lines[0], "");
    mustBe(DKV_ST_PASSED, "fake-replicated", "shape=33+2x9 heads=4:2 dim=16", "");
    mustBe(DKV_ST_PASSED, "fake-replicated", "shape=33+2x9 heads=4:2 dim=16 run=graph", "");
}

#define SMALL "shape=5+2x3 heads=2:1 dim=8"

static void wrong_kernels_are_caught(void **state) {
    (void)state;
    mustBe(DKV_ST_OUT_OF_BOUNDS, "fake+how=after", SMALL, "after O");
    mustBe(DKV_ST_OUT_OF_BOUNDS, "fake+how=after", SMALL " seed=2 layout=padded", "after O");
    mustBe(DKV_ST_OUT_OF_BOUNDS, "fake+how=far-before", SMALL, "1 bytes written");
    mustBe(DKV_ST_INPUT_MUTATED, "fake+how=mutates", SMALL, "K changed");
    mustBe(DKV_ST_INPUT_MUTATED, "fake+how=mutates", SMALL " run=side", "K changed");
    mustBe(DKV_ST_FAILED, "fake+how=remembers", "shape=33 heads=2:2 dim=8 grad=off", "O at group 0");
    mustBe(DKV_ST_FAILED, "fake+how=pinned", "shape=33 heads=2:2 dim=8 grad=off", "the same data in other buffers");
    mustBe(DKV_ST_PASSED, "fake+how=null-stream", SMALL, "");
    mustBe(DKV_ST_UNWRITTEN, "fake+how=null-stream", SMALL " run=side", "O were never written");
    mustBe(DKV_ST_PASSED, "fake+how=waits", SMALL, "");
    mustBe(DKV_ST_NOT_RUN, "fake+how=waits", SMALL " run=graph", "capturing");
    mustBe(DKV_ST_PASSED, "fake+how=once", SMALL, "");
    mustBe(DKV_ST_UNWRITTEN, "fake+how=once", SMALL " run=graph", "never written");
    mustBe(DKV_ST_PASSED, "fake+how=once", SMALL " run=busy", "");
}

/* Nothing of an earlier problem is left behind the end of a later one, in the piece of memory that both lie in (so not
 * under DUALKV_EXACT_MEMORY, where no memory is there: blocks_alone). */
static void memory_is_clean(void **state) {
    (void)state;
    dkv_worker w;
    unsetenv("DUALKV_EXACT_MEMORY");
    dkv_kernel_spec s = spec("fake+how=peeks");
    dkv_initWorker(&w, &s, 60);
    runWith(&w, "shape=200 heads=4:4 dim=64 dtype=fp32");
    assert_int_equal(runWith(&w, SMALL " dtype=fp32"), DKV_ST_FAILED);
    assert_int_equal(runWith(&w, SMALL " dtype=fp32"), DKV_ST_FAILED);
    assert_int_equal(w.starts, 1);
    dkv_stopWorker(&w);
}

/* Where there is no room for an image, or for a sanitizer, each block lies in an allocation of its own. */
static void blocks_alone(void **state) {
    (void)state;
    static const char *const names[] = {"DUALKV_FAKE_ROOM", "DUALKV_EXACT_MEMORY", "DUALKV_FAKE_PINNED"};
    static const char *const values[] = {"1000000", "1", "1000"};
    for (int i = 0; i < 3; i++) {
        setenv(names[i], values[i], 1);
        mustBe(DKV_ST_PASSED, "fake", SMALL, "");
        mustBe(DKV_ST_PASSED, "fake", SMALL " run=aba", "");
        mustBe(DKV_ST_OUT_OF_BOUNDS, "fake+how=after", SMALL, "after O");
        mustBe(DKV_ST_OUT_OF_BOUNDS, "fake+how=far-before", SMALL, "1 bytes written");
        if (i > 0) mustBe(DKV_ST_UNWRITTEN, "fake+how=null-stream", SMALL " run=side", "O were never written");
        mustBe(DKV_ST_FAILED, "fake+how=pinned", "shape=33 heads=2:2 dim=8 grad=off", "the same data in other buffers");
        mustBe(DKV_ST_CRASHED, "fake+how=peeks", SMALL " dtype=fp32", "illegal memory access");
        unsetenv(names[i]);
    }
}

/* DUALKV_*: settings of the device and of copies through pinned memory, NULL: none. The tensors of LONG have 51,200 bytes each. */
static void setPipe(const char *bytes, const char *pageable, const char *pinned, const char *copy) {
    const char *const names[] = {"DUALKV_PIPE_BYTES", "DUALKV_FAKE_PAGEABLE", "DUALKV_FAKE_PINNED", "DUALKV_FAKE_COPY"};
    const char *const values[] = {bytes, pageable, pinned, copy};
    for (int i = 0; i < 4; i++)
        if (values[i]) setenv(names[i], values[i], 1);
        else unsetenv(names[i]);
}

#define LONG "shape=150+50 heads=2:2"

/* Pieces of several sizes: many and a short last one, exactly one, all that are smaller than the pipe go straight. */
static void large_copies_go_through_pinned_memory(void **state) {
    (void)state;
    static const char *const sizes[] = {"12000", "12800", "51200", "40001"};
    setenv("DUALKV_EXACT_MEMORY", "1", 1);
    setPipe(NULL, "12000", NULL, NULL);
    mustBe(DKV_ST_HARNESS_ERROR, "fake", LONG, "a large copy of pageable memory"); /* the device sees it */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        setPipe(sizes[i], sizes[i], NULL, NULL);
        mustBe(DKV_ST_PASSED, "fake", LONG, "");
        mustBe(DKV_ST_PASSED, "fake", LONG " layout=padded dlse=on run=aba", "");
        mustBe(DKV_ST_OUT_OF_BOUNDS, "fake+how=after", LONG, "after O");
        mustBe(DKV_ST_INPUT_MUTATED, "fake+how=mutates", LONG, "K changed");
    }
    mustBe(DKV_ST_PASSED, "fake", LONG " run=side", "");
    mustBe(DKV_ST_PASSED, "fake", LONG " run=graph", "");
    setPipe("12000", NULL, "11999", NULL); /* none can be had: straight, then */
    mustBe(DKV_ST_PASSED, "fake", LONG, "");
    setPipe("12000", "12000", "11999", NULL);
    mustBe(DKV_ST_HARNESS_ERROR, "fake", LONG, "a large copy of pageable memory");
    static const char *const wrong[] = {"0", "-1", "1e3", "x", "999999999999", "99999999999999999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        setPipe(wrong[i], NULL, NULL, NULL);
        mustBe(DKV_ST_HARNESS_ERROR, "fake", SMALL, "DUALKV_PIPE_BYTES: '");
    }
    setPipe(NULL, NULL, NULL, NULL);
    unsetenv("DUALKV_EXACT_MEMORY");
}

/* A copy that fails, wherever it is, is the harness's error, and the same worker's next case is right. */
static void failing_copies_are_told(void **state) {
    (void)state;
    setenv("DUALKV_EXACT_MEMORY", "1", 1);
    int failed = 0;
    for (int n = 1; n <= 400; n += 1 + n / 2) {
        char number[16];
        dkv_worker w;
        dkv_kernel_spec s = spec("fake");
        snprintf(number, sizeof number, "%d", n);
        setPipe("12000", "12000", NULL, number);
        dkv_initWorker(&w, &s, 60);
        dkv_status got = runWith(&w, LONG);
        if (got == DKV_ST_PASSED) got = runWith(&w, LONG); /* that copy may be the next case's */
        if (got == DKV_ST_HARNESS_ERROR && strstr(result->why, "the copy failed")) failed++;
        else if (got != DKV_ST_PASSED) fail_msg("copy %d: %s: %s", n, dkv_statusRow(got)->name, result->why);
        if (runWith(&w, LONG) != DKV_ST_PASSED) fail_msg("after copy %d: %s", n, result->why);
        assert_int_equal(w.starts, 1);
        dkv_stopWorker(&w);
    }
    assert_true(failed > 8);
    setPipe(NULL, NULL, NULL, NULL);
    unsetenv("DUALKV_EXACT_MEMORY");
}

/* An error that passes is the case's alone; one that stays ends the worker, and the next case has a fresh
 * one. */
static void device_errors_are_words(void **state) {
    (void)state;
    dkv_worker w;
    dkv_kernel_spec s = spec("fake+how=launch-error");
    dkv_initWorker(&w, &s, 60);
    assert_int_equal(runWith(&w, SMALL), DKV_ST_NOT_RUN);
    assert_non_null(strstr(result->why, "invalid configuration"));
    assert_true(w.pid > 0);
    dkv_stopWorker(&w);
    s = spec("fake+how=sticky");
    dkv_initWorker(&w, &s, 60);
    for (int i = 1; i <= 2; i++) {
        assert_int_equal(runWith(&w, SMALL), DKV_ST_CRASHED);
        assert_non_null(strstr(result->why, "illegal memory access"));
        assert_int_equal(w.pid, 0);
        assert_int_equal(w.starts, i);
    }
    setenv("DUALKV_FAKE_ROOM", "100000", 1);
    mustBe(DKV_ST_HARNESS_ERROR, "fake", SMALL, "out of memory");
    unsetenv("DUALKV_FAKE_ROOM");
    mustBe(DKV_ST_PASSED, "fake", SMALL, "");
}

static void records_name_the_device(void **state) {
    (void)state;
    mustBe(DKV_ST_PASSED, "fake", SMALL, "");
    char *json = dkv_printRecord(result);
    assert_non_null(json);
    assert_non_null(strstr(json, "\"device\":\"Fake 0\",\"capability\":\"0.1\",\"driver\":\""));
    assert_non_null(strstr(json, "CUDA 12.4\",\"host\":\""));
    free(json);
}

static void no_device_is_said_before_anything_runs(void **state) {
    (void)state;
    dkv_kernel_spec s = spec("fake");
    dkv_err err = {0};
    bool replicated = true;
    assert_int_equal(dkv_probeKernels(&s, 1, 20, &replicated, &err), 0);
    setenv("DUALKV_FAKE_DEVICES", "0", 1);
    assert_int_equal(dkv_probeKernels(&s, 1, 20, &replicated, &err), DKV_EHARNESS);
    assert_non_null(strstr(err.text, "needs a CUDA device"));
    mustBe(DKV_ST_HARNESS_ERROR, "fake", SMALL, "needs a CUDA device");
    unsetenv("DUALKV_FAKE_DEVICES");
}

static void timing_is_the_devices(void **state) {
    (void)state;
    static const char *const words[] = {"fake", "fake-replicated"};
    for (int i = 0; i < 2; i++) {
        dkv_worker w;
        dkv_description d;
        dkv_kernel_spec s = spec(words[i]);
        double seconds[2] = {0};
        int64_t bytes = 0;
        char json[200] = "";
        dkv_initWorker(&w, &s, 60);
        assert_int_equal(dkv_describeCase(&w, "shape=9+2x3 dim=8 fill=hot sinklogit=1 dlse=on", &d),
                         DKV_W_OK);
        if (dkv_timeCase(&w, seconds, &bytes) != DKV_W_OK) fail_msg("%s", w.why);
        assert_true(seconds[0] > 0 && seconds[1] > 0 && bytes >= 15 * 8 * 2 * 8);
        assert_int_equal(dkv_describeCase(&w, "shape=9+2x3 dim=8 grad=off", &d), DKV_W_OK);
        if (dkv_timeCase(&w, seconds, &bytes) != DKV_W_OK) fail_msg("%s", w.why);
        assert_true(seconds[0] > 0 && seconds[1] == 0);
        assert_int_equal(dkv_probeDevice(&w, json, sizeof json), DKV_W_OK);
        assert_non_null(strstr(json, "mma_sync"));
        dkv_stopWorker(&w);
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_kernels_pass),
        cmocka_unit_test(wrong_kernels_are_caught),
        cmocka_unit_test(memory_is_clean),
        cmocka_unit_test(blocks_alone),
        cmocka_unit_test(large_copies_go_through_pinned_memory),
        cmocka_unit_test(failing_copies_are_told),
        cmocka_unit_test(device_errors_are_words),
        cmocka_unit_test(records_name_the_device),
        cmocka_unit_test(no_device_is_said_before_anything_runs),
        cmocka_unit_test(timing_is_the_devices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
