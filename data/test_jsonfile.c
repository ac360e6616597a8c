/* JSON from outside: one line for whatever is wrong with it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "jsonfile.h"

static char path[] = "/tmp/dualkv-test-XXXXXX";

static int readText(const char *text, size_t n, dkv_err *err) {
    cJSON *o = NULL;
    FILE *f = fopen(path, "w");
    assert_int_equal(fwrite(text, 1, n, f), n);
    fclose(f);
    int rc = dkv_readJsonFile(path, &o, err);
    assert_true((rc == 0) == (o != NULL));
    cJSON_Delete(o);
    return rc;
}

static void what_is_wrong_is_said(void **state) {
    (void)state;
    static const struct {
        const char *text, *says;
    } rows[] = {{"", "not JSON"}, {"   \n", "not JSON"}, {"[1]", "not a JSON object"}, {"7", "not a JSON object"}, {"{\"a\":1", ":1: not JSON"},
                {"{\"a\":1}\n}", "not JSON"}, {"{\n\n\"a\":nan}", ":3: not JSON"}, {"{\"a\":NaN}", "not JSON"}, {"{\"a\":1e999}", "at a is beyond"},
                {"{\"a\":1,\"b\":{\"c\":1,\"d\":2,\"c\":3}}", "'c' stands twice"}, {"{\"a\":\"\xff\"}", "byte 7 is no text in UTF-8"},
                {"{\"a\":\"\xc3", "byte 7"}, {"{\"x\":[-1e400]}", "beyond"}};
    dkv_err err = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_int_equal(readText(rows[i].text, strlen(rows[i].text), &err), DKV_EUSER);
        if (!strstr(err.text, rows[i].says)) fail_msg("%s: '%s'", rows[i].text, err.text);
        assert_null(strchr(err.text, '\n'));
    }
    assert_int_equal(readText("{\"a\":1}\0", 8, &err), DKV_EUSER); /* a byte 0 */
    assert_int_equal(readText("\n {\"a\":[1,{\"b\":null}],\"c\":\"\xc3\xa9\"} \n", strlen("\n {\"a\":[1,{\"b\":null}],\"c\":\"\xc3\xa9\"} \n"), &err), 0);
}

static void depth_and_size_have_an_end(void **state) {
    (void)state;
    dkv_err err = {0};
    size_t n = 1 << 20;
    char *deep = malloc(n);
    for (size_t i = 0; i < n; i++) deep[i] = "{\"a\":"[i % 5];
    assert_int_equal(readText(deep, n, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "nested too deep"));
    free(deep);
    assert_int_equal(truncate(path, (off_t)DKV_JSONFILE_MAX + 1), 0);
    cJSON *o;
    assert_int_equal(dkv_readJsonFile(path, &o, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "more than 32 MiB"));
}

static void what_is_no_file(void **state) {
    (void)state;
    cJSON *o = NULL;
    dkv_err err = {0};
    char pipe[80];
    snprintf(pipe, sizeof pipe, "%s.pipe", path);
    assert_int_equal(mkfifo(pipe, 0600), 0);
    assert_int_equal(dkv_readJsonFile(pipe, &o, &err), DKV_EUSER); /* and does not wait */
    assert_int_equal(dkv_readJsonFile("/tmp", &o, &err), DKV_EUSER);
    assert_int_equal(dkv_readJsonFile("/dev/zero", &o, &err), DKV_EUSER);
    assert_int_equal(dkv_readJsonFile("/nowhere", &o, &err), DKV_EUSER);
    assert_null(o);
    unlink(pipe);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_is_wrong_is_said), cmocka_unit_test(depth_and_size_have_an_end),
                                       cmocka_unit_test(what_is_no_file)};
    close(mkstemp(path));
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
