/* Kernel specs and the registry; shared objects that must be refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel.h"
#include "kernel_broken.h"
#include "worker.h"

static const char *build(const char *name) {
    static char path[512];
    const char *dir = getenv("DUALKV_BUILD");
    snprintf(path, sizeof path, "%s/testkernels/%s", dir ? dir : "build", name);
    return path;
}

static void specs_are_taken_apart(void **state) {
    (void)state;
    dkv_kernel_spec s;
    dkv_err err;
    assert_int_equal(dkv_parseKernelSpec("emu+bm=64+bn=32+det", &s, &err), 0);
    assert_string_equal(s.name, "emu");
    assert_string_equal(s.options, "bm=64,bn=32,det");
    assert_string_equal(s.path, "");
    char text[600];
    snprintf(text, sizeof text, "%s:plain+a=b", build("plain.so"));
    assert_int_equal(dkv_parseKernelSpec(text, &s, &err), 0);
    assert_string_equal(s.name, "plain");
    assert_string_equal(s.path, build("plain.so"));
    assert_string_equal(s.options, "a=b");
    assert_int_equal(dkv_parseKernelSpec(build("plain.so"), &s, &err), 0);
    assert_string_equal(s.name, "");
    assert_int_equal(dkv_parseKernelSpec("verify/testkernels/dishonest.py:zeros+convention=packed", &s, &err), 0);
    assert_int_equal(s.kind, DKV_SPEC_PYTHON);
    assert_string_equal(s.name, "zeros");
    assert_string_equal(s.path, "verify/testkernels/dishonest.py");
    assert_string_equal(s.options, "convention=packed");
    assert_int_equal(dkv_parseKernelSpec("attached:7=mine.py:f+lse", &s, &err), 0);
    assert_int_equal(s.kind, DKV_SPEC_ATTACHED);
    assert_int_equal(s.fd, 7);
    assert_string_equal(s.text, "mine.py:f+lse"); /* what records and words call it */
}

static void bad_specs_point_at_the_word(void **state) {
    (void)state;
    static const struct {
        const char *spec, *says;
    } rows[] = {{"emo", "did you mean 'emu'"},
                {"", "name is missing"},
                {"+x", "name is missing"},
                {"emu+", "empty"},
                {"emu++x", "empty"},
                {"emu+a,b", "comma"},
                {"./no.so", "cannot read"},
                {"./no.py:f", "cannot read"},
                {"verify/testkernels/dishonest.py", "which function"},
                {"verify/testkernels/dishonest.py:", "which function"},
                {"attached:", "socket is missing"},
                {"attached:x", "socket is missing"},
                {"attached:3x", "socket is missing"},
                {"./no.so:", "name is missing"},
                {"zzzzzzzzzzzz", "list kernels"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        dkv_kernel_spec s;
        dkv_err err = {0};
        assert_int_equal(dkv_parseKernelSpec(rows[i].spec, &s, &err), DKV_EUSER);
        if (!strstr(err.text, rows[i].says)) fail_msg("'%s' gives: %s", rows[i].spec, err.text);
    }
    dkv_kernel_spec s;
    dkv_err err;
    char *longest = calloc(1, 3 * DKV_SPEC_MAX);
    memset(longest, 'x', 3 * DKV_SPEC_MAX - 1);
    assert_int_equal(dkv_parseKernelSpec(longest, &s, &err), DKV_EUSER);
    longest[200] = 0;
    assert_int_equal(dkv_parseKernelSpec(longest, &s, &err), DKV_EUSER);
    free(longest);
}

static void every_listed_kernel_opens(void **state) {
    (void)state;
    const char *name, *doc;
    for (int i = 0; (name = dkv_listKernel(i, &doc)); i++) {
        dkv_kernel_spec s;
        dkv_kernel k;
        dkv_err err = {0};
        char spec[64];
        snprintf(spec, sizeof spec, "%s%s", name, strcmp(name, "broken") ? "" : "+how=none");
        assert_int_equal(dkv_parseKernelSpec(spec, &s, &err), 0);
        if (dkv_openKernel(&s, &k, &err)) fail_msg("%s: %s", spec, err.text);
        assert_string_equal(k.table.name, name);
        assert_non_null(doc);
        dkv_closeKernel(&k);
    }
    dkv_kernel_spec s;
    dkv_kernel k;
    dkv_err err = {0};
    assert_int_equal(dkv_parseKernelSpec("ref+x=1", &s, &err), 0);
    assert_int_equal(dkv_openKernel(&s, &k, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "x=1"));
}

/* Each in a worker, as the program does it: loading may crash. */
static void hostile_objects_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *file, *says;
        dkv_outcome outcome;
    } rows[] = {{"hostile_none.so", "no symbol", DKV_W_ERROR},
                {"hostile_abi.so", "ABI 2", DKV_W_ERROR},
                {"hostile_size.so", "size 8", DKV_W_ERROR},
                {"hostile_forward.so", "forward is NULL", DKV_W_ERROR},
                {"hostile_open.so", "no such device", DKV_W_ERROR},
                {"hostile_list.so", "does not support", DKV_W_ERROR},
                {"hostile_empty.so", "exports 0", DKV_W_ERROR},
                {"hostile_null.so", "is NULL", DKV_W_ERROR},
                {"hostile_name.so", "name is NULL", DKV_W_ERROR},
                {"hostile_crash.so", "Aborted", DKV_W_CRASHED},
                {"plain.so", "exports 3", DKV_W_ERROR}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        dkv_kernel_spec s;
        dkv_worker w;
        dkv_err err = {0};
        if (dkv_parseKernelSpec(build(rows[i].file), &s, &err)) fail_msg("%s", err.text);
        dkv_initWorker(&w, &s, 20);
        dkv_outcome o = dkv_startWorker(&w);
        if (o != rows[i].outcome || !strstr(w.why, rows[i].says))
            fail_msg("%s: %d, %s", rows[i].file, o, w.why);
        assert_int_equal(w.pid, 0);
        dkv_stopWorker(&w);
    }
}

static void near_words(void **state) {
    (void)state;
    static const char *const words[] = {"check", "report", "replay"};
    assert_string_equal(dkv_nearestWord("chekc", words, 3), "check");
    assert_string_equal(dkv_nearestWord("repaly", words, 3), "replay");
    assert_null(dkv_nearestWord("xyzzy", words, 3));
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(specs_are_taken_apart),
        cmocka_unit_test(bad_specs_point_at_the_word),
        cmocka_unit_test(every_listed_kernel_opens),
        cmocka_unit_test(hostile_objects_are_refused),
        cmocka_unit_test(near_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
