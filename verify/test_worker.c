/* The worker process: warm across cases, replaced after it dies; whatever it does is words here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "../ref/emu.h"
#include "side.h"

static const char line[] = "shape=5+2x3 heads=2:1 dim=8";

typedef struct fixture {
    dkv_worker w;
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
} fixture;

static void setUp(fixture *f, const char *spec, double timeout) {
    dkv_kernel_spec s;
    dkv_err err = {0};
    memset(f, 0, sizeof *f);
    if (dkv_parseKernelSpec(spec, &s, &err) || dkv_parseProblem(line, NULL, &f->p, &err) ||
        dkv_makeLayout(&f->p, &f->l, &err) || dkv_allocInputs(&f->l, &f->in, &err))
        fail_msg("%s", err.text);
    dkv_initWorker(&f->w, &s, timeout);
}

static void tearDown(fixture *f) {
    dkv_stopWorker(&f->w);
    dkv_freeInputs(&f->in);
    dkv_freeLayout(&f->l);
    dkv_freeProblem(&f->p);
}

static dkv_outcome runOnce(fixture *f) {
    dkv_side s;
    dkv_run r = {0};
    dkv_outcome o = dkv_openSide(&s, &f->w, &f->p, line, &f->l, &f->in);
    if (o == DKV_W_OK && !s.d.refused) o = dkv_runSide(&s, 0, &r);
    dkv_freeRun(&r);
    dkv_closeSide(&s);
    return o;
}

static void stays_warm(void **state) {
    (void)state;
    fixture f;
    setUp(&f, "broken+how=none", 20);
    assert_int_equal(runOnce(&f), DKV_W_OK);
    pid_t first = f.w.pid;
    for (int i = 0; i < 5; i++) assert_int_equal(runOnce(&f), DKV_W_OK);
    assert_int_equal(f.w.pid, first);
    assert_int_equal(f.w.starts, 1);
    tearDown(&f);
    assert_true(kill(first, 0) < 0 && errno == ESRCH); /* reaped */
}

static void is_replaced_after_death(void **state) {
    (void)state;
    static const char *const specs[] = {"broken+how=crash", "broken+how=abort", "broken+how=exit",
                                        "broken+how=garbage", "broken+how=close"};
    static const char *const words[] = {"in forward", "accumulator is empty", "exit(0)", "channel", ""};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++) {
        fixture f;
        setUp(&f, specs[i], 20);
        for (int again = 1; again <= 2; again++) {
            assert_int_equal(runOnce(&f), DKV_W_CRASHED);
            assert_int_equal(f.w.starts, again);
            assert_int_equal(f.w.pid, 0);
            assert_non_null(strstr(f.w.why, words[i]));
        }
        tearDown(&f);
    }
}

static void hangs_are_ended(void **state) {
    (void)state;
    fixture f;
    struct timespec t0, t1;
    setUp(&f, "broken+how=hang", 0.3);
    clock_gettime(CLOCK_MONOTONIC, &t0);
    assert_int_equal(runOnce(&f), DKV_W_TIMEOUT);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    assert_true(t1.tv_sec - t0.tv_sec < 10);
    assert_int_equal(f.w.pid, 0);
    tearDown(&f);
}

static void interrupts_are_heard(void **state) {
    (void)state;
    fixture f;
    setUp(&f, "broken+how=hang", 600);
    assert_int_equal(dkv_startWorker(&f.w), DKV_W_OK);
    dkv_stopRequested = 1;
    dkv_outcome o = runOnce(&f);
    dkv_stopRequested = 0;
    assert_int_equal(o, DKV_W_STOPPED);
    tearDown(&f);
}

static void output_is_kept_apart(void **state) {
    (void)state;
    fixture f;
    char last[100];
    setUp(&f, "broken+how=chatty", 20);
    assert_int_equal(runOnce(&f), DKV_W_OK); /* prints more than a pipe holds */
    dkv_lastOutput(&f.w, last, sizeof last);
    assert_non_null(strstr(last, "chatter"));
    assert_true(f.w.tail_n <= DKV_WORKER_TAIL);
    tearDown(&f);
}

static void errors_are_words(void **state) {
    (void)state;
    fixture f;
    setUp(&f, "broken+how=error", 20);
    assert_int_equal(runOnce(&f), DKV_W_ERROR);
    assert_string_equal(f.w.why, "the grid is too large");
    assert_true(f.w.pid > 0); /* it goes on */
    tearDown(&f);
    setUp(&f, "broken+how=nonsense", 20);
    assert_int_equal(runOnce(&f), DKV_W_ERROR);
    assert_non_null(strstr(f.w.why, "nonsense"));
    assert_int_equal(f.w.pid, 0);
    tearDown(&f);
}

static void refusals_are_one_line_of_text(void **state) {
    (void)state;
    fixture f;
    dkv_description d;
    setUp(&f, "broken+how=babble", 20);
    assert_int_equal(dkv_describeCase(&f.w, line, &d), DKV_W_OK);
    assert_true(d.refused);
    assert_string_equal(d.reason, "it?refuses?[31m ?");
    tearDown(&f);
    setUp(&f, "broken+how=hungry", 20);
    assert_int_equal(runOnce(&f), DKV_W_HARNESS);
    assert_non_null(strstr(f.w.why, "GiB"));
    tearDown(&f);
}

/* A worker does not outlive a channel that closes, and a line it cannot take is the harness's own fault. */
static void bad_lines_are_the_harness(void **state) {
    (void)state;
    fixture f;
    dkv_description d;
    setUp(&f, "broken+how=none", 20);
    assert_int_equal(dkv_describeCase(&f.w, "shape=-1", &d), DKV_W_HARNESS);
    assert_non_null(strstr(f.w.why, "shape"));
    assert_int_equal(dkv_describeCase(&f.w, line, &d), DKV_W_OK);
    assert_string_equal(d.name, "broken");
    tearDown(&f);
}

static void *serveEmu(void *fd) {
    dkv_serveWorkerWith(*(int *)fd, &dkv_emuKernel, NULL);
    return NULL;
}

/* It is used as it is, not ended with the one who used it, and once lost there is no other. */
static void an_attached_worker_is_one(void **state) {
    (void)state;
    int pair[2];
    char spec[64];
    pthread_t server;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    assert_int_equal(pthread_create(&server, NULL, serveEmu, &pair[1]), 0);
    snprintf(spec, sizeof spec, "attached:%d=somebody's", pair[0]);
    for (int again = 0; again < 2; again++) {
        fixture f;
        setUp(&f, spec, 20);
        assert_string_equal(f.w.spec.text, "somebody's");
        assert_int_equal(runOnce(&f), DKV_W_OK);
        tearDown(&f);
    }
    shutdown(pair[1], SHUT_RDWR);
    pthread_join(server, NULL);
    fixture f;
    setUp(&f, spec, 20);
    assert_int_equal(runOnce(&f), DKV_W_CRASHED);
    assert_non_null(strstr(f.w.why, "process of the kernel ended"));
    assert_int_equal(runOnce(&f), DKV_W_HARNESS);
    assert_non_null(strstr(f.w.why, "cannot be started again"));
    tearDown(&f);
    close(pair[0]);
    close(pair[1]);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stays_warm),
        cmocka_unit_test(is_replaced_after_death),
        cmocka_unit_test(hangs_are_ended),
        cmocka_unit_test(interrupts_are_heard),
        cmocka_unit_test(output_is_kept_apart),
        cmocka_unit_test(errors_are_words),
        cmocka_unit_test(refusals_are_one_line_of_text),
        cmocka_unit_test(bad_lines_are_the_harness),
        cmocka_unit_test(an_attached_worker_is_one), /* last: there is no other after it */
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
