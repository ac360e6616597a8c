/* replace.h: a finished file put where another may be. */
#ifndef DKV_REPLACE_H
#define DKV_REPLACE_H

#include <stdbool.h>
#include <stddef.h>

/* As rename, of a file beside `path`; where that is a link, to what it means. What is no plain file (a device, a pipe, a
 * folder) is left as it is: -1, errno EEXIST, or EISDIR. */
int dkv_replaceFile(const char *temporary, const char *path);
/* These bytes as a file, whole or not at all, through one beside it. 0; -1: it cannot be made, or not be put there; -2: not
 * all of it could be written (a full disk). errno says why. */
int dkv_writeWhole(const char *path, const void *bytes, size_t n);
/* Would writing the one change the other? Also where one of them is not there yet, by the same name. */
bool dkv_isSameFile(const char *a, const char *b);

#endif
