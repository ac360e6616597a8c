#include "replace.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int dkv_replaceFile(const char *temporary, const char *path) {
    struct stat s;
    if (stat(path, &s) != 0) return rename(temporary, path);
    if (!S_ISREG(s.st_mode)) {
        errno = S_ISDIR(s.st_mode) ? EISDIR : EEXIST;
        return -1;
    }
    char *real = realpath(path, NULL);
    int rc = real ? rename(temporary, real) : -1, why = errno;
    free(real);
    errno = why;
    return rc;
}

bool dkv_isSameFile(const char *a, const char *b) {
    struct stat s, t;
    if (strcmp(a, b) == 0) return true;
    return stat(a, &s) == 0 && stat(b, &t) == 0 && S_ISREG(s.st_mode) && s.st_dev == t.st_dev && s.st_ino == t.st_ino;
}
