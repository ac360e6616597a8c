/* history_index.h: the SQLite side of history.h, for history.c alone. */
#ifndef DKV_HISTORY_INDEX_H
#define DKV_HISTORY_INDEX_H

#include "history.h"

struct sqlite3_stmt;

/* What became of a database. Anything but DKV_IX_FAILED is mended by the caller. */
typedef enum dkv_ix {
    DKV_IX_OK,
    DKV_IX_BROKEN,   /* not what was written: to be made anew */
    DKV_IX_OLD,      /* of an earlier schema: likewise */
    DKV_IX_IN_USE,   /* by another process, for longer than is waited */
    DKV_IX_SHUT,     /* cannot be read or written here */
    DKV_IX_FAILED    /* *err says why */
} dkv_ix;

/* Opens it, makes the tables where it is empty. ours: a file that is another program's is broken, not refused. */
dkv_ix dkv_openIndex(const char *path, bool ours, struct sqlite3 **db, dkv_err *err);
/* Rows of one file as it is now: those that are there are held against their sum, what is new is read. Fills f; *read:
 * plus the lines read. */
dkv_ix dkv_indexFile(struct sqlite3 *db, dkv_history_file *f, long *read, dkv_err *err);
/* The row of a statement over all columns of `record`; texts live until its next step. */
void dkv_takeColumns(struct sqlite3_stmt *s, dkv_history_row *row);
/* Drops what was read of files that are gone. */
dkv_ix dkv_forgetGone(struct sqlite3 *db, dkv_err *err);

#endif
