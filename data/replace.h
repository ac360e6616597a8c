/* replace.h: a finished file put where another may be. */
#ifndef DKV_REPLACE_H
#define DKV_REPLACE_H

/* As rename, of a file beside `path`; where that is a link, to what it means. What is no plain file (a device, a pipe, a
 * folder) is left as it is: -1, errno EEXIST, or EISDIR. */
int dkv_replaceFile(const char *temporary, const char *path);

#endif
