/* row.h: the rows of a text file from outside, one at a time. */
#ifndef DKV_ROW_H
#define DKV_ROW_H

#include <stdio.h>

#include "dkv_err.h"

#define DKV_ROW_MAX ((size_t)16 << 20) /* bytes: no record is near it, /dev/zero is beyond */

/* The next row, its '\n' included where it has one, ended with a 0. *row (freed by the caller) grows to *room
 * bytes; *n is the row's length, 0 at the end of the file. DKV_EUSER: longer than DKV_ROW_MAX, or unreadable. */
int dkv_readRow(FILE *f, char **row, size_t *room, size_t *n, dkv_err *err);

/* take(row, n, number, arg, why) for each row of `f`, the file `path`, that holds more than blanks; number counts from 1. Ends
 * with the first that it refuses (an error code, its words in *why): then, and where a row cannot be read, *err is
 * "PATH:NUMBER: " and the words. */
typedef int (*dkv_row_fn)(char *row, size_t n, long number, void *arg, dkv_err *why);
int dkv_takeRows(FILE *f, const char *path, dkv_row_fn take, void *arg, dkv_err *err);

#endif
