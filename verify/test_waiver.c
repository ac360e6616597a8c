/* Waivers are parsed strictly, match exactly, and end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/suite.h"
#include "waiver.h"

static int load(const char *text, dkv_waivers *w, dkv_err *err) {
    char path[] = "/tmp/dualkv-waivers-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
    int rc = dkv_loadWaivers(path, w, err);
    unlink(path);
    return rc;
}

static void waivers_match_exactly(void **state) {
    (void)state;
    dkv_waivers w;
    dkv_err err = {0};
    assert_int_equal(
        load("# comment\n\n shape=3+2x5 seed=7 | emu+bm=16 | slow | 2026-02-28 \nshape=3|emu|x|2999-12-31\n",
             &w, &err),
        0);
    assert_int_equal(w.n, 2);
    const dkv_waiver *one = dkv_findWaiver(&w, "shape=3+2x5 seed=7", "emu+bm=16");
    assert_non_null(one);
    assert_string_equal(one->reason, "slow");
    assert_null(dkv_findWaiver(&w, "shape=3+2x5 seed=7", "emu"));
    assert_null(dkv_findWaiver(&w, "shape=3+2x5", "emu+bm=16"));
    strcpy(w.today, "2026-02-28");
    assert_false(dkv_isExpired(&w, one));
    strcpy(w.today, "2026-03-01");
    assert_true(dkv_isExpired(&w, one));
    assert_false(dkv_isExpired(&w, dkv_findWaiver(&w, "shape=3", "emu")));
    dkv_freeWaivers(&w);
}

static void what_is_not_a_waiver_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *text, *says;
    } rows[] = {
        {"shape=3 | emu | x\n", "LINE | KERNEL | REASON"},
        {"shape=3 | emu | x | 2027-01-01 | y\n", "LINE | KERNEL | REASON"},
        {"shape=3 | emu |  | 2027-01-01\n", "LINE | KERNEL | REASON"},
        {"shape=3 | emu | x | 2027-02-30\n", "not a day"},
        {"shape=3 | emu | x | 2027-1-01\n", "not a day"},
        {"shape=3 | emu | x | 2027-+1-01\n", "not a day"},
        {"shape=3 | emu | x | tomorrow\n", "not a day"},
        {"shape=3 | emu | x\033[31m | 2027-01-01\n", "not plain text"},
        {"shape=3 | emu | x | 2027-01-011\n", "not a day"},
        {"shape=3 dim=64 | emu | x | 2027-01-01\n", "canonical"},
        {"shape=3+ | emu | x | 2027-01-01\n", "shape"},
        {"shape=3 | emmu | x | 2027-01-01\n", "emu"},
        {"shape=3 | emu | x | 2027-01-01\nshape=3 | emu | y | 2028-01-01\n", ":2: the same"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        dkv_waivers w;
        dkv_err err = {0};
        assert_int_equal(load(rows[i].text, &w, &err), DKV_EUSER);
        if (!strstr(err.text, rows[i].says)) fail_msg("%s says: %s", rows[i].text, err.text);
    }
    dkv_waivers w;
    dkv_err err = {0};
    assert_int_equal(dkv_loadWaivers("/nonexistent/w", &w, &err), DKV_EUSER);
    char *data = strdup(dkv_dataDir());
    setenv("DUALKV_DATA", "/nonexistent", 1);
    assert_int_equal(dkv_loadWaivers(NULL, &w, &err), 0);
    assert_int_equal(w.n, 0);
    setenv("DUALKV_DATA", data, 1);
    free(data);
}

static void our_own_files_are_read(void **state) {
    (void)state;
    char path[4200];
    dkv_waivers w;
    dkv_suite corpus;
    dkv_err err = {0};
    snprintf(path, sizeof path, "%s/waivers.txt", dkv_dataDir());
    if (dkv_loadWaivers(path, &w, &err)) fail_msg("%s", err.text);
    for (int i = 0; i < w.n; i++) assert_false(dkv_isExpired(&w, &w.list[i]));
    dkv_freeWaivers(&w);
    if (dkv_loadSuite("corpus", &corpus, &err)) fail_msg("%s", err.text);
    assert_true(corpus.n > 50);
    assert_string_equal(corpus.name, "corpus");
    dkv_freeSuite(&corpus);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(waivers_match_exactly),
        cmocka_unit_test(what_is_not_a_waiver_is_refused),
        cmocka_unit_test(our_own_files_are_read),
    };
    return cmocka_run_group_tests_name("waiver", tests, NULL, NULL);
}
