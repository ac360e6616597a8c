/* Rows of files from outside: with and without an end, with zeros, without end at all. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "row.h"

static void rows_come_one_by_one(void **state) {
    (void)state;
    char *row = NULL, text[] = "one\n\ntwo\0x\nlast";
    size_t room = 0, n = 0;
    dkv_err err = {0};
    FILE *f = fmemopen(text, sizeof text - 1, "r");
    assert_int_equal(dkv_readRow(f, &row, &room, &n, &err), 0);
    assert_int_equal(n, 4);
    assert_string_equal(row, "one\n");
    assert_int_equal(dkv_readRow(f, &row, &room, &n, &err), 0);
    assert_string_equal(row, "\n");
    assert_int_equal(dkv_readRow(f, &row, &room, &n, &err), 0);
    assert_int_equal(n, 6);
    assert_int_equal(dkv_readRow(f, &row, &room, &n, &err), 0);
    assert_string_equal(row, "last");
    assert_int_equal(dkv_readRow(f, &row, &room, &n, &err), 0);
    assert_int_equal(n, 0);
    fclose(f);
    free(row);
}

static void long_rows_grow(void **state) {
    (void)state;
    char *row = NULL, *text = malloc(10001);
    size_t room = 0, n = 0;
    dkv_err err = {0};
    memset(text, 'x', 10000);
    text[9999] = '\n';
    FILE *f = fmemopen(text, 10000, "r");
    assert_int_equal(dkv_readRow(f, &row, &room, &n, &err), 0);
    assert_int_equal(n, 10000);
    assert_memory_equal(row, text, 10000);
    fclose(f);
    free(row);
    free(text);
}

static void endless_files_and_folders_are_refused(void **state) {
    (void)state;
    char *row = NULL;
    size_t room = 0, n = 0;
    dkv_err err = {0};
    FILE *f = fopen("/dev/zero", "r");
    assert_int_equal(dkv_readRow(f, &row, &room, &n, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "longer than"));
    assert_true(room <= 2 * DKV_ROW_MAX);
    fclose(f);
    f = fopen("/", "r");
    assert_int_equal(dkv_readRow(f, &row, &room, &n, &err), DKV_EUSER);
    fclose(f);
    free(row);
}

static int takeRow(char *row, size_t n, long number, void *arg, dkv_err *why) {
    char **to = arg;
    (void)n;
    if (row[0] == '!') return dkv_fail(why, DKV_EUSER, "no such row");
    *to += sprintf(*to, "%ld:%s", number, row);
    return 0;
}

/* Blank ones are passed over, and counted; the first that is refused, or cannot be read, ends it and is named. */
static void rows_are_given_with_their_number(void **state) {
    (void)state;
    char text[] = "one\n \t\n\0x\nfour\n!\nsix\n", got[100] = "", *at = got;
    dkv_err err = {0};
    FILE *f = fmemopen(text, sizeof text - 1, "r");
    assert_int_equal(dkv_takeRows(f, "a/file", takeRow, &at, &err), DKV_EUSER);
    assert_string_equal(got, "1:one\n3:4:four\n");
    assert_string_equal(err.text, "a/file:5: no such row");
    fclose(f);
    f = fopen("/", "r");
    assert_int_equal(dkv_takeRows(f, "/", takeRow, &at, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "/:1: cannot be read"));
    fclose(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_come_one_by_one),
        cmocka_unit_test(long_rows_grow),
        cmocka_unit_test(endless_files_and_folders_are_refused),
        cmocka_unit_test(rows_are_given_with_their_number),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
