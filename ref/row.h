/* row.h: the rows of a text file from outside, one at a time. */
#ifndef DKV_ROW_H
#define DKV_ROW_H

#include <stdio.h>

#include "dkv_err.h"

#define DKV_ROW_MAX ((size_t)16 << 20) /* bytes: no record is near it, /dev/zero is beyond */

/* The next row, its '\n' included where it has one, ended with a 0. *row (freed by the caller) grows to *room
 * bytes; *n is the row's length, 0 at the end of the file. DKV_EUSER: longer than DKV_ROW_MAX, or unreadable. */
int dkv_readRow(FILE *f, char **row, size_t *room, size_t *n, dkv_err *err);

#endif
