/* replace.h: a finished file put where another may be. */
#ifndef DKV_REPLACE_H
#define DKV_REPLACE_H

#include <stdbool.h>

/* As rename, of a file beside `path`; where that is a link, to what it means. What is no plain file (a device, a pipe, a
 * folder) is left as it is: -1, errno EEXIST, or EISDIR. */
int dkv_replaceFile(const char *temporary, const char *path);
/* Would writing the one change the other? Also where one of them is not there yet, by the same name. */
bool dkv_isSameFile(const char *a, const char *b);

#endif
