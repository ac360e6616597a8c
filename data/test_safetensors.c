#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "../ref/dtype.h"
#include "fill.h"
#include "safetensors.h"

static char folder[] = "/tmp/dualkv_test_XXXXXX";

static const char *in_folder(const char *name) {
    static char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static int set_up(void **state) {
    (void)state;
    return !mkdtemp(folder) || mkdir(in_folder("recorded"), 0755);
}

static int tear_down(void **state) {
    (void)state;
    static const char *const names[] = {"a.st", "recorded/tiny.safetensors", "recorded"};
    for (int i = 0; i < 3; i++) remove(in_folder(names[i]));
    return rmdir(folder); /* fails if a temporary file was left */
}

static void test_round_trip(void **state) {
    (void)state;
    uint8_t bytes[3] = {1, 2, 3};
    float floats[6] = {1, 2, 3, 4, 5, -0.f};
    uint16_t halves[2] = {7, 9};
    dkv_st_tensor t[] = {{"odd \"name\"", "U8", 1, {3}, bytes, 3, 0},
                         {"f", "F32", 2, {2, 3}, floats, 24, 0},
                         {"empty", "F64", 2, {0, 1ll << 40}, NULL, 0, 0},
                         {"scalar pair", "BF16", 1, {2}, halves, 4, 0}};
    const char *keys[] = {"shape", "licence"}, *values[] = {"3+1", "a \\ b\n"};
    dkv_st_file f;
    dkv_err err = {0};
    const char *path = in_folder("a.st");
    if (dkv_writeSafetensors(path, t, 4, keys, values, 2, &err)) fail_msg("%s", err.text);
    if (dkv_readSafetensors(path, &f, &err)) fail_msg("%s", err.text);
    assert_int_equal(f.n_tensors, 4);
    for (int i = 0; i < 4; i++) {
        const dkv_st_tensor *x = dkv_findTensor(&f, t[i].name);
        assert_non_null(x);
        assert_string_equal(x->dtype, t[i].dtype);
        assert_int_equal(x->bytes, t[i].bytes);
        assert_memory_equal(x->shape, t[i].shape, sizeof x->shape);
        if (x->bytes) assert_memory_equal(x->data, t[i].data, (size_t)x->bytes);
    }
    assert_string_equal(dkv_findMeta(&f, "licence"), values[1]);
    assert_null(dkv_findMeta(&f, "nothing"));
    assert_null(dkv_findTensor(&f, "g"));
    dkv_freeSafetensors(&f);
    t[1].bytes = 20;
    assert_int_equal(dkv_writeSafetensors(path, t, 4, NULL, NULL, 0, &err), DKV_EHARNESS);
    assert_int_equal(dkv_writeSafetensors("/nonexistent/a", t, 1, NULL, NULL, 0, &err), DKV_EUSER);
}

#define ENTRY "\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]"

static const struct {
    const char *header;
    int length;       /* as the file says; 0: the header's own */
    int data;         /* bytes of data */
    const char *says; /* NULL: a good file */
} files[] = {
    {"{\"a\":{" ENTRY "}}  ", 0, 8, NULL},
    {"{}", 0, 0, NULL},
    {"{\"a\":{" ENTRY "}}", 1000, 8, "beyond the file"},
    {"{\"a\":{" ENTRY "}}", -1, 8, "beyond 100 MiB"},
    {"{\"a\":{" ENTRY "}", 0, 8, "not a JSON object"},
    {"[1]", 0, 0, "not a JSON object"},
    {"hello", 0, 0, "not a JSON object"},
    {"{\"a\":{" ENTRY "}} x", 0, 8, "not a JSON object"},
    {"{\"a\\u0000b\":{" ENTRY "}}", 0, 8, "a NUL"},
    {"{\"\":{" ENTRY "}}", 0, 8, "empty or too long"},
    {"{\"a\":{" ENTRY "},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[8,8]}}", 0, 8, "twice"},
    {"{\"a\":{" ENTRY "},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}", 0, 8, "overlaps"},
    {"{\"a\":{" ENTRY "},\"b\":{" ENTRY "}}", 0, 8, "overlaps"},
    {"{\"a\":{" ENTRY "}}", 0, 9, "belong to no tensor"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}", 0, 8, "belong to no tensor"},
    {"{\"a\":{" ENTRY "}}", 0, 7, "outside"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 0, 8, "outside"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 0, 8, "not two whole numbers"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,1e300]}}", 0, 8, "not two whole numbers"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,9]}}", 0, 8, "not two whole numbers"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 0, 8, "need 12 bytes"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,8]}}", 0, 8, "need 4 bytes"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967298],\"data_offsets\":[0,8]}}", 0, 8,
     "overflows"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 0, 8, "not a whole number"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.5],\"data_offsets\":[0,8]}}", 0, 8, "not a whole number"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}}", 0, 8,
     "at most 8 sizes"},
    {"{\"a\":{\"dtype\":\"F33\",\"shape\":[2],\"data_offsets\":[0,8]}}", 0, 8, "unknown dtype"},
    {"{\"a\":{\"dtype\":5,\"shape\":[2],\"data_offsets\":[0,8]}}", 0, 8, "unknown dtype"},
    {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 0, 8, "unknown dtype"},
    {"{\"a\":5}", 0, 8, "unknown dtype"},
    {"{\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
     "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
     0, 6, "not aligned"},
    {"{\"__metadata__\":{\"a\":1}}", 0, 0, "not a string"},
    {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, 0, "twice"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, 0, "one map"},
    {"{\"__metadata__\":[]}", 0, 0, "one map"},
};

static void write_file(const char *path, const char *header, int64_t length, int data) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    for (int i = 0; i < 8; i++) fputc((int)(length >> 8 * i & 255), f);
    fputs(header, f);
    for (int i = 0; i < data; i++) fputc(i, f);
    assert_int_equal(fclose(f), 0);
}

static void test_hostile(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        dkv_st_file f;
        dkv_err err = {0};
        const char *path = in_folder("a.st");
        write_file(path, files[i].header,
                   files[i].length ? files[i].length : (int64_t)strlen(files[i].header), files[i].data);
        int code = dkv_readSafetensors(path, &f, &err);
        if (!files[i].says) {
            assert_int_equal(code, 0);
            dkv_freeSafetensors(&f);
            continue;
        }
        if (code != DKV_EUSER || !strstr(err.text, files[i].says) || strncmp(err.text, path, strlen(path)))
            fail_msg("%zu: code %d, '%s' has no '%s'", i, code, err.text, files[i].says);
        assert_null(f.buffer);
    }
}

/* Every beginning of a good file is refused. */
static void test_truncated(void **state) {
    (void)state;
    char whole[300], name[200];
    strcpy(name, in_folder("a.st"));
    write_file(name, files[0].header, (int64_t)strlen(files[0].header), 8);
    FILE *f = fopen(name, "rb");
    size_t n = fread(whole, 1, sizeof whole, f);
    fclose(f);
    for (size_t k = 0; k < n; k++) {
        dkv_st_file st;
        dkv_err err = {0};
        f = fopen(name, "wb");
        fwrite(whole, 1, k, f);
        fclose(f);
        assert_int_equal(dkv_readSafetensors(name, &st, &err), DKV_EUSER);
    }
    dkv_st_file st;
    dkv_err err = {0};
    assert_int_equal(dkv_readSafetensors(folder, &st, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "not a regular file"));
    assert_int_equal(dkv_readSafetensors("/nonexistent/a", &st, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "No such file"));
}

/* A small recording: q[t][h][c] = t + h/8 + c/64 exactly in bf16 for these sizes. */
static void write_recording(const char *shape, int tokens) {
    static uint16_t q[64 * 4], k[64 * 2], v[64 * 3];
    for (int t = 0; t < tokens; t++)
        for (int c = 0; c < 4; c++) {
            q[t * 4 + c] = dkv_encode16(t + 0.5 * (c / 2) + 0.25 * (c % 2), DUALKV_BF16);
            if (c < 2) k[t * 2 + c] = dkv_encode16(-t - 0.25 * c, DUALKV_BF16);
            if (c < 3) v[t * 3 + c] = dkv_encode16(t + 0.25 * c, DUALKV_BF16);
        }
    dkv_st_tensor t[] = {{"q", "BF16", 3, {tokens, 2, 2}, q, tokens * 8, 0},
                         {"k", "BF16", 3, {tokens, 1, 2}, k, tokens * 4, 0},
                         {"v", "BF16", 3, {tokens, 1, 3}, v, tokens * 6, 0}};
    const char *keys[] = {"shape"};
    dkv_err err = {0};
    if (dkv_writeSafetensors(in_folder("recorded/tiny.safetensors"), t, 3, keys, &shape, 1, &err))
        fail_msg("%s", err.text);
}

static int fill_line(const char *line, dkv_problem *p, dkv_layout *l, dkv_inputs *in, dkv_err *err) {
    int code = dkv_parseProblem(line, dkv_knownFill, p, err);
    *l = (dkv_layout){0};
    *in = (dkv_inputs){0};
    if (!code) code = dkv_makeLayout(p, l, err);
    if (!code) code = dkv_allocInputs(l, in, err);
    if (!code) code = dkv_fillInputs(p, l, folder, in, err);
    return code;
}

static void test_recorded(void **state) {
    (void)state;
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    dkv_err err = {0};
    write_recording("6+4,3", 13);
    if (fill_line("shape=5+2,3,4/6+1 heads=4:2 dim=2:3 dtype=fp32 fill=recorded:tiny", &p, &l, &in, &err))
        fail_msg("%s", err.text);
    /* problem rows: prompt 0..4, responses 5 6 | 7 8 9 | 10..13, second prompt 14..19, response 20 */
    static const int source[] = {0, 1, 2, 3, 4, 6, 7, 10, 11, 12, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6};
    const float *q = in.q, *k = in.k, *v = in.v, *d_o = in.d_o;
    for (int t = 0; t < 21; t++) {
        for (int h = 0; h < 4; h++)
            for (int c = 0; c < 2; c++)
                assert_true(q[(t * 4 + h) * 2 + c] == source[t] + 0.5f * (h % 2) + 0.25f * c);
        for (int h = 0; h < 2; h++) assert_true(k[(t * 2 + h) * 2 + 1] == -source[t] - 0.25f);
        assert_true(v[t * 6 + 5] == source[t] + 0.5f);
    }
    assert_true(d_o[0] != d_o[3] && d_o[0] != 0);
    dkv_freeInputs(&in);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
    static const char *const bad[][3] = {
        {"6+4,3", "shape=7 dim=2:3 fill=recorded:tiny", "prompt 0 of 7 tokens is asked for, 6 are recorded"},
        {"6+4,3", "shape=6+4,4 dim=2:3 fill=recorded:tiny", "response 1 of 4 tokens is asked for, 3"},
        {"6+4,3", "shape=6+(1+1) dim=2:3 fill=recorded:tiny", "no branches"},
        {"6+4,3", "shape=6 dim=2 fill=recorded:tiny", "v was recorded with head dimension 3"},
        {"6+4,3", "shape=6 dim=2:3 fill=recorded:none", "No such file"},
        {"13", "shape=6+1 dim=2:3 fill=recorded:tiny", "no responses are recorded"},
        {"6+4", "shape=6 dim=2:3 fill=recorded:tiny", "not one group of its 13 tokens"},
        {"6+(4+3)", "shape=6 dim=2:3 fill=recorded:tiny", "not a prompt and responses"},
        {"6+4,,3", "shape=6 dim=2:3 fill=recorded:tiny", "is not a shape"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_recording(bad[i][0], 13);
        if (fill_line(bad[i][1], &p, &l, &in, &err) != DKV_EUSER || !strstr(err.text, bad[i][2]))
            fail_msg("%s: %s", bad[i][1], err.text);
        dkv_freeInputs(&in);
        dkv_freeLayout(&l);
        dkv_freeProblem(&p);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_recorded),
    };
    return cmocka_run_group_tests_name("safetensors", tests, set_up, tear_down);
}
