/* Pages from records, as text. For tests only; include once. */
#ifndef DKV_TEST_PAGE_H
#define DKV_TEST_PAGE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report_gather.h"

typedef int (*page_writer)(const dkv_gather *g, const char *path, const char *command, dkv_err *err);

static char *page; /* the last one, freed by the next */

__attribute__((unused)) static void gatherAll(dkv_gather *g, const char *const *records, size_t n) {
    for (size_t i = 0; i < n; i++) assert_int_equal(dkv_gatherRecord(g, records[i]), 1);
}

/* The page must be text throughout. */
__attribute__((unused)) static void writePage(const dkv_gather *g, page_writer write, const char *command) {
    char path[] = "/tmp/dualkv-test-XXXXXX";
    dkv_err err = {DKV_OK, ""};
    FILE *f = fdopen(mkstemp(path), "r");
    assert_non_null(f);
    assert_int_equal(write(g, path, command, &err), 0);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    size_t n = (size_t)ftell(f);
    rewind(f);
    free(page);
    page = (char *)calloc(n + 1, 1);
    assert_int_equal(fread(page, 1, n, f), n);
    fclose(f);
    unlink(path);
    assert_int_equal(strlen(page), n);
}

__attribute__((unused)) static void assertSays(const char *words) {
    if (!strstr(page, words)) fail_msg("not on the page: %s\n%.60000s", words, page);
}

#endif
