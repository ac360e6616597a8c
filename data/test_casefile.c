/* Case files: what is written is read; whatever does not fit its line is refused with one line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "casefile.h"
#include "fill.h"
#include "sha256.h"

static char folder[] = "/tmp/dualkv_case_XXXXXX";
static const char line[] = "shape=3+2 heads=2:1 dim=4:2 dtype=fp32 sinklogit=0.5 dlse=on";

static const char *in_folder(const char *name) {
    static char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void clear(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s/*", folder);
    assert_int_equal(system(command), 0);
}

typedef struct problem {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    dkv_outputs out;
} problem;

static void open(problem *c, const char *text) {
    dkv_err err = {0};
    if (dkv_parseProblem(text, dkv_knownFill, &c->p, &err) || dkv_makeLayout(&c->p, &c->l, &err) ||
        dkv_allocInputs(&c->l, &c->in, &err) || dkv_allocOutputs(&c->l, &c->out, &err))
        fail_msg("%s", err.text);
}

static void shut(problem *c) {
    dkv_freeOutputs(&c->out);
    dkv_freeInputs(&c->in);
    dkv_freeLayout(&c->l);
    dkv_freeProblem(&c->p);
}

static void hashes_are_those_of_sha256sum(void **state) {
    (void)state;
    static const struct {
        size_t n;
        const char *hex;
    } rows[] = {{0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
                {3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}};
    char hex[65];
    dkv_err err = {0};
    for (size_t i = 0; i < 2; i++) {
        FILE *f = fopen(in_folder("h"), "w");
        fwrite("abc", 1, rows[i].n, f);
        fclose(f);
        assert_int_equal(dkv_hashFile(in_folder("h"), hex, &err), 0);
        assert_string_equal(hex, rows[i].hex);
    }
    for (size_t n = 50; n < 200000; n = n * 3 + 7) { /* around a block, over a chunk: against the tool itself */
        char command[500], want[65] = "";
        snprintf(command, sizeof command, "head -c %zu /dev/urandom >%s && sha256sum <%s", n, in_folder("h"), in_folder("h"));
        FILE *f = popen(command, "r");
        assert_int_equal(fread(want, 1, 64, f), 64);
        pclose(f);
        assert_int_equal(dkv_hashFile(in_folder("h"), hex, &err), 0);
        assert_string_equal(hex, want);
        char *bytes = malloc(n);
        dkv_digest d;
        dkv_startDigest(&d);
        f = fopen(in_folder("h"), "r");
        assert_int_equal(fread(bytes, 1, n, f), n);
        fclose(f);
        for (size_t at = 0, part = 1; at < n; at += part, part = part * 2 + 1) { /* piece by piece */
            if (part > n - at) part = n - at;
            dkv_addDigest(&d, bytes + at, part);
            dkv_endDigest(&d, hex); /* in between changes nothing */
        }
        assert_string_equal(hex, want);
        dkv_digest plain;
        dkv_startDigest(&plain);
        dkv_startDigest(&d);
        dkv_addDigest(&d, bytes, n / 64 * 64);
        dkv_addBlocksPlain(plain.h, (unsigned char *)bytes, n / 64);
        assert_memory_equal(plain.h, d.h, sizeof d.h);
        free(bytes);
    }
    assert_int_equal(dkv_hashFile(in_folder("none"), hex, &err), DKV_EUSER);
    clear();
}

/* Both kinds, both layouts; the inputs of a captured case come back bit for bit. */
static void cases_are_read_as_written(void **state) {
    (void)state;
    problem c = {0}, d = {0};
    dkv_casefile f;
    dkv_err err = {0};
    open(&c, line);
    assert_int_equal(dkv_fillInputs(&c.p, &c.l, "", &c.in, &err), 0);
    for (int i = 0; i < 20; i++) c.out.o[i] = i + 0x1p-30; /* rounded to fp32 */
    if (dkv_writeCaseFile(in_folder("made.safetensors"), line, &c.l, false, DKV_GENERATOR, "x", &c.in, &c.out, &err) ||
        dkv_writeCaseFile(in_folder("own.safetensors"), line, &c.l, false, NULL, NULL, &c.in, &c.out, &err))
        fail_msg("%s", err.text);
    for (int data = 0; data < 2; data++) {
        if (dkv_openCaseFile(folder, "made", data, &f, &err)) fail_msg("%s", err.text);
        assert_false(f.own_inputs || f.replicated);
        assert_string_equal(f.line, "shape=3+2 heads=2:1 dim=4:2 dtype=fp32 sinklogit=0.5 dlse=on");
        for (int t = 0; t < DKV_CT_N; t++) assert_non_null(f.tensor[t]);
        if (data) assert_true(((const float *)f.tensor[DKV_CT_O]->data)[19] == 19);
        dkv_closeCaseFile(&f);
        if (dkv_openCaseFile(folder, "own", data, &f, &err)) fail_msg("%s", err.text);
        assert_true(f.own_inputs);
        assert_string_equal(f.line, "shape=3+2 heads=2:1 dim=4:2 dtype=fp32 sinklogit=0.5 fill=file:own dlse=on");
        dkv_closeCaseFile(&f);
    }
    open(&d, "shape=3+2 heads=2:1 dim=4:2 dtype=fp32 sinklogit=0.5 fill=file:own dlse=on");
    assert_int_equal(dkv_fillInputs(&d.p, &d.l, "", &d.in, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "in which folder"));
    assert_int_equal(dkv_setFilesDir(folder, &err), 0);
    if (dkv_fillInputs(&d.p, &d.l, "", &d.in, &err)) fail_msg("%s", err.text);
    assert_memory_equal(c.in.q, d.in.q, 5 * 2 * 4 * 4);
    assert_memory_equal(c.in.v, d.in.v, 5 * 2 * 4);
    assert_memory_equal(c.in.d_o, d.in.d_o, 5 * 2 * 2 * 4);
    assert_memory_equal(c.in.d_lse, d.in.d_lse, 5 * 2 * 4);
    assert_memory_equal(c.in.sink, d.in.sink, 2 * 4);
    assert_int_equal(dkv_setFilesDir(folder, &err), 0);
    assert_int_equal(dkv_setFilesDir("/tmp", &err), DKV_EUSER);
    snprintf(d.p.fill, sizeof d.p.fill, "file:made");
    assert_int_equal(dkv_fillInputs(&d.p, &d.l, "", &d.in, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "generator's"));
    shut(&c);
    shut(&d);
    char **names;
    long n;
    assert_int_equal(dkv_listCaseFiles(folder, &names, &n, &err), 0);
    assert_int_equal(n, 2);
    assert_string_equal(names[1], "own");
    for (long i = 0; i < n; i++) free(names[i]);
    free(names);
    clear();
}

/* A file written by hand: q, k, v, o of a plain line of 2 tokens, but for what a row changes. */
static void write_raw(const char *name, const char *meta, const char *tensors, int floats) {
    static const float zeros[256];
    char header[2048];
    int n = snprintf(header, sizeof header, "{\"__metadata__\":{%s},%s}", meta, tensors);
    uint64_t length = (uint64_t)n;
    FILE *f = fopen(in_folder(name), "w");
    fwrite(&length, 8, 1, f);
    fwrite(header, 1, (size_t)n, f);
    fwrite(zeros, 4, (size_t)floats, f);
    fclose(f);
}

#define LINE "\"line\":\"shape=2 dim=1 dtype=fp32 grad=off\""
#define T(name, type, shape, from, to) "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":[" #from "," #to "]}"
#define Q T("q", "F32", "[2,1,1]", 0, 8)
#define KV T("k", "F32", "[2,1,1]", 8, 16) "," T("v", "F32", "[2,1,1]", 16, 24)

static void what_does_not_fit_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *meta, *tensors;
        int floats;
        const char *says; /* NULL: it is taken */
    } rows[] = {
        {LINE, Q "," KV, 6, NULL},
        {LINE, T("o", "F32", "[2,1,1]", 0, 8), 2, NULL},
        {"\"lime\":\"shape=2\"", Q "," KV, 6, "'line', the problem line, is missing"},
        {"\"line\":\"shape=2 dim=0\"", Q "," KV, 6, "dim"},
        {"\"line\":\"shape=2 dim=1 dtype=fp32\"", Q "," KV, 6, "'do' is missing"},
        {"\"line\":\"shape=2 dim=1 dtype=fp32 grad=off sinklogit=1\"", Q "," KV, 6, "'sink' is missing"},
        {"\"line\":\"shape=3 dim=1 dtype=fp32 grad=off\"", Q "," KV, 6, "'q' is [2, 1, 1], the line wants [3, 1, 1]"},
        {"\"line\":\"shape=2 dim=1 grad=off\"", Q "," KV, 6, "'q' is F32, the line wants BF16"},
        {LINE ",\"layout\":\"sideways\"", Q "," KV, 6, "neither packed nor replicated"},
        {LINE ",\"layout\":\"replicated\"", Q "," KV, 6, "packed, not replicated"},
        {LINE ",\"generator\":\"0\"", Q "," KV, 6, "generator 0"},
        {LINE, Q, 2, "'k' is missing"},
        {LINE, Q "," KV "," T("dq", "F32", "[2,1,1]", 24, 32), 8, "'dq' is there, and the line has none"},
        {LINE, Q "," KV "," T("O", "F32", "[2,1,1]", 24, 32), 8, "'O' is none of"},
        {LINE, Q "," KV "," T("o", "F32", "[2,1]", 24, 32), 8, "'o' is [2, 1]"},
        {LINE, Q "," KV "," Q, 6, "there twice"},
        {LINE, Q "," KV, 5, "outside the file"},
        {LINE, Q "," KV, 7, "belong to no tensor"},
        {"\"line\":\"shape=2 fill=file:x dim=1 dtype=fp32 grad=off\"", T("o", "F32", "[2,1,1]", 0, 8), 2, "q, k, v are missing"},
        {"\"line\":\"shape=2 fill=nope dim=1 dtype=fp32 grad=off\"", T("o", "F32", "[2,1,1]", 0, 8), 2, "nope"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        dkv_casefile f;
        dkv_err err = {0};
        write_raw("x.safetensors", rows[i].meta, rows[i].tensors, rows[i].floats);
        int rc = dkv_openCaseFile(folder, "x", true, &f, &err);
        if (rows[i].says && (rc != DKV_EUSER || !strstr(err.text, rows[i].says) || strchr(err.text, '\n')))
            fail_msg("row %zu gives %d: '%s', not '%s'", i, rc, err.text, rows[i].says);
        if (!rows[i].says && rc) fail_msg("row %zu: %s", i, err.text);
        dkv_closeCaseFile(&f);
    }
    clear();
}

static void names_and_links_stay_in_the_folder(void **state) {
    (void)state;
    static const char *const bad[] = {"", ".x", "../x", "/etc/x", "a/b", "Big",
                                      "a234567890123456789012345678901234567890123456789012345678b"};
    dkv_casefile f;
    dkv_err err = {0};
    char **names;
    long n;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(dkv_openCaseFile(folder, bad[i], false, &f, &err), DKV_EUSER);
    assert_false(dkv_knownFill("file:.x") || dkv_knownFill("file:"));
    assert_true(dkv_knownFill("file:x.1-a_b"));
    assert_int_equal(dkv_listCaseFiles(folder, &names, &n, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "no .safetensors"));
    assert_int_equal(dkv_listCaseFiles(in_folder("none"), &names, &n, &err), DKV_EUSER);
    write_raw("x.safetensors", LINE, Q "," KV, 6);
    char to[200];
    strcpy(to, in_folder("y.safetensors"));
    assert_int_equal(symlink(in_folder("x.safetensors"), to), 0);
    assert_int_equal(dkv_openCaseFile(folder, "y", false, &f, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "symbolic link"));
    assert_int_equal(mkdir(in_folder("z.safetensors"), 0755), 0);
    assert_int_equal(dkv_openCaseFile(folder, "z", false, &f, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "not a regular file"));
    write_raw("Big.safetensors", LINE, Q "," KV, 6);
    assert_int_equal(dkv_listCaseFiles(folder, &names, &n, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "cannot say this name"));
    clear();
}

static void inputs_that_are_no_numbers_are_refused(void **state) {
    (void)state;
    problem c = {0};
    dkv_casefile f;
    dkv_err err = {0};
    open(&c, line);
    ((float *)c.in.k)[7] = NAN;
    assert_int_equal(dkv_writeCaseFile(in_folder("nan.safetensors"), line, &c.l, false, NULL, NULL, &c.in, NULL, &err), 0);
    assert_int_equal(dkv_openCaseFile(folder, "nan", false, &f, &err), 0); /* the header says nothing of it */
    dkv_closeCaseFile(&f);
    assert_int_equal(dkv_openCaseFile(folder, "nan", true, &f, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "1 elements of k are NaN or Inf, the first is number 7"));
    shut(&c);
    clear();
}

int main(void) {
    if (!mkdtemp(folder)) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hashes_are_those_of_sha256sum), cmocka_unit_test(cases_are_read_as_written),
        cmocka_unit_test(what_does_not_fit_is_refused),  cmocka_unit_test(names_and_links_stay_in_the_folder),
        cmocka_unit_test(inputs_that_are_no_numbers_are_refused),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return rmdir(folder) ? 1 : failed;
}
