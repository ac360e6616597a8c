#include "replace.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

int dkv_writeWhole(const char *path, const void *bytes, size_t n) {
    char *temporary = NULL;
    if (asprintf(&temporary, "%s.XXXXXX", path) < 0) return -1;
    int fd = mkostemp(temporary, O_CLOEXEC), rc = fd < 0 ? -1 : 0;
    FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (!rc && (!f || fchmod(fd, 0644) || fwrite(bytes, 1, n, f) != n || fflush(f) || fsync(fd))) rc = -2;
    if (f && fclose(f) && !rc) rc = -2;
    if (!rc) rc = dkv_replaceFile(temporary, path);
    const int why = errno;
    if (fd >= 0 && rc) unlink(temporary);
    free(temporary);
    errno = why;
    return rc;
}

bool dkv_isSameFile(const char *a, const char *b) {
    struct stat s, t;
    if (strcmp(a, b) == 0) return true;
    return stat(a, &s) == 0 && stat(b, &t) == 0 && S_ISREG(s.st_mode) && s.st_dev == t.st_dev && s.st_ino == t.st_ino;
}
