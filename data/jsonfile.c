#include "jsonfile.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int readBytes(const char *path, char **text, size_t *n, dkv_err *err) {
    struct stat s;
    ssize_t got = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &s) != 0) {
        int rc = dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return rc;
    }
    *n = 0;
    *text = NULL;
    if (!S_ISREG(s.st_mode)) dkv_fail(err, DKV_EUSER, "'%s' is not a file", path);
    else if (s.st_size > (off_t)DKV_JSONFILE_MAX)
        dkv_fail(err, DKV_EUSER, "'%s' has more than %zu MiB", path, DKV_JSONFILE_MAX >> 20);
    else if (!(*text = malloc((size_t)s.st_size + 1))) dkv_fail(err, DKV_EHARNESS, "out of memory for '%s'", path);
    while (*text && *n < (size_t)s.st_size && (got = read(fd, *text + *n, (size_t)s.st_size - *n)) > 0) *n += (size_t)got;
    close(fd);
    if (*text && got < 0 && s.st_size) {
        dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", path, strerror(errno));
        free(*text);
        *text = NULL;
    }
    if (!*text) return (int)err->code;
    (*text)[*n] = 0;
    return 0;
}

/* The first byte that is no UTF-8 (or 0); n: none. */
static size_t findBadByte(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    for (size_t i = 0, len; i < n; i += len) {
        len = s[i] == 0 ? 0 : s[i] < 0x80 ? 1 : s[i] >= 0xc2 && s[i] < 0xe0 ? 2 : (s[i] & 0xf0) == 0xe0 ? 3
              : s[i] >= 0xf0 && s[i] < 0xf5 ? 4 : 0;
        if (!len || len > n - i) return i;
        for (size_t k = 1; k < len; k++)
            if ((s[i + k] & 0xc0) != 0x80) return i;
    }
    return n;
}

static int compareNames(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

static int checkKeys(const char *path, const cJSON *o, dkv_err *err) {
    size_t n = (size_t)cJSON_GetArraySize(o), i = 0;
    const char **names = malloc((n + 1) * sizeof *names);
    const cJSON *x;
    int rc = names ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for '%s'", path);
    if (!names) return rc;
    cJSON_ArrayForEach(x, o) names[i++] = x->string;
    if (n) qsort(names, n, sizeof *names, compareNames);
    for (i = 1; i < n && !rc; i++)
        if (strcmp(names[i - 1], names[i]) == 0) rc = dkv_fail(err, DKV_EUSER, "%s: '%.80s' stands twice in one object", path, names[i]);
    free(names);
    return rc;
}

static int checkTree(const char *path, const cJSON *o, dkv_err *err) {
    const cJSON *x;
    int rc = cJSON_IsObject(o) ? checkKeys(path, o, err) : 0;
    if (cJSON_IsNumber(o) && !isfinite(o->valuedouble))
        return dkv_fail(err, DKV_EUSER, "%s: a number%s%.80s is beyond what a double holds", path, o->string ? " at " : "",
                        o->string ? o->string : "");
    if (!rc && (cJSON_IsObject(o) || cJSON_IsArray(o)))
        for (x = o->child; x && !rc; x = x->next) rc = checkTree(path, x, err);
    return rc;
}

int dkv_readJsonFile(const char *path, cJSON **out, dkv_err *err) {
    char *text = NULL;
    const char *end = NULL;
    size_t n = 0;
    int rc = readBytes(path, &text, &n, err);
    *out = NULL;
    if (rc) return rc;
    size_t bad = findBadByte(text, n);
    if (bad < n) rc = dkv_fail(err, DKV_EUSER, "%s: byte %zu is no text in UTF-8", path, bad + 1);
    else if (!(*out = cJSON_ParseWithLengthOpts(text, n + 1, &end, true))) {
        size_t at = end && end >= text && end <= text + n ? (size_t)(end - text) : 0;
        long line = 1;
        for (size_t i = 0; i < at; i++) line += text[i] == '\n';
        rc = dkv_fail(err, DKV_EUSER, "%s:%ld: not JSON from here on, or nested too deep", path, line);
    } else if (!cJSON_IsObject(*out)) rc = dkv_fail(err, DKV_EUSER, "%s: not a JSON object", path);
    if (!rc) rc = checkTree(path, *out, err);
    free(text);
    if (!rc) return 0;
    cJSON_Delete(*out);
    *out = NULL;
    return rc;
}
