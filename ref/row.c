#include "row.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int grow(char **row, size_t *room, dkv_err *err) {
    size_t more = *room ? 2 * *room : 4096;
    char *wider = realloc(*row, more);
    if (!wider) return dkv_fail(err, DKV_EHARNESS, "out of memory for a row");
    *row = wider;
    *room = more;
    return 0;
}

int dkv_readRow(FILE *f, char **row, size_t *room, size_t *n, dkv_err *err) {
    int c = 0;
    *n = 0;
    while (c != '\n' && (c = getc_unlocked(f)) != EOF) {
        if (*n >= DKV_ROW_MAX) return dkv_fail(err, DKV_EUSER, "the row is longer than %zu bytes", DKV_ROW_MAX);
        if (*n + 2 > *room && grow(row, room, err)) return DKV_EHARNESS;
        (*row)[(*n)++] = (char)c;
    }
    if (ferror(f)) return dkv_fail(err, DKV_EUSER, "cannot be read: %s", strerror(errno));
    if (*n) (*row)[*n] = 0;
    return 0;
}

int dkv_takeRows(FILE *f, const char *path, dkv_row_fn take, void *arg, dkv_err *err) {
    char *row = NULL;
    size_t room = 0, n = 0;
    dkv_err why = {0};
    int rc = 0;
    for (long number = 1; !rc; number++) {
        rc = dkv_readRow(f, &row, &room, &n, &why);
        if (!rc && n == 0) break;
        if (!rc && (row[strspn(row, " \t\r\n")] || strlen(row) < n)) rc = take(row, n, number, arg, &why); /* a 0 byte is no blank */
        if (rc) dkv_fail(err, (dkv_code)rc, "%s:%ld: %s", path, number, why.text);
    }
    free(row);
    return rc;
}
