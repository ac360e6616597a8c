#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/row.h"
#include "report_gather.h"

#define LINE_GIVES_UP ((size_t)256 << 20) /* bytes: no line of a file, /dev/zero perhaps */

/* Passes over what is left of a line that is too long to be kept; false where it has no end in sight. */
static bool skipLine(FILE *f) {
    int c = 0;
    for (size_t n = 0; n < LINE_GIVES_UP; n++)
        if ((c = getc_unlocked(f)) == '\n' || c == EOF) return !ferror(f);
    return false;
}

/* A line that was read; -1: out of memory. */
static int takeLine(dkv_gather *g, dkv_gather_file *file, const char *row, size_t n) {
    if (!row[strspn(row, " \t\r\n")] && strlen(row) == n) return 0;
    int got = strlen(row) == n ? dkv_gatherRecord(g, row) : 0; /* a 0 byte: no text */
    if (got > 0) file->records++;
    else if (got == 0 && file->bad++ < DKV_GATHER_BAD) file->bad_lines[file->bad - 1] = file->lines;
    return got < 0 ? -1 : 0;
}

int dkv_gatherFile(dkv_gather *g, const char *path, const char *hash, dkv_err *err) {
    char *row = NULL;
    size_t room = 0, n = 1;
    int rc = 0;
    dkv_err why = {0};
    FILE *f = fopen(path, "re");
    if (!f) return dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", path, strerror(errno));
    dkv_gather_file *files = realloc(g->files, (size_t)(g->n_files + 1) * sizeof *files);
    if (files) g->files = files;
    dkv_gather_file *file = files ? &files[g->n_files++] : NULL;
    if (file) *file = (dkv_gather_file){.path = strdup(path), .hash = strdup(hash)};
    if (!file || !file->path || !file->hash) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for records");
    while (!rc) {
        rc = dkv_readRow(f, &row, &room, &n, &why);
        if (!rc && n == 0) break;
        file->lines++;
        if (rc == DKV_EUSER && n >= DKV_ROW_MAX && !ferror(f)) {
            if (file->bad++ < DKV_GATHER_BAD) file->bad_lines[file->bad - 1] = file->lines;
            rc = 0;
            if (skipLine(f)) continue;
            file->cut = true;
            if (file->lines == 1) rc = dkv_fail(err, DKV_EUSER, "%s: %s", path, why.text);
            break;
        }
        if (rc == DKV_EUSER && file->lines > 1) { /* what was read before stays */
            file->cut = true;
            rc = 0;
            break;
        }
        if (rc) dkv_fail(err, (dkv_code)rc, "%s: %s", path, why.text);
        else if (takeLine(g, file, row, n)) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for records");
    }
    free(row);
    fclose(f);
    return rc;
}
