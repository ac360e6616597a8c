/* init: a Python kernel to start from, copied from the package's start/CONVENTION.py. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "pyhost.h"

#define PLACEHOLDER "my_attention" /* the function's name in the files of start/ */
enum { FILE_MAX = 65536 };

/* Words of the language, which name no function. */
static bool isKeyword(const char *name) {
    static const char *const words[] = {
        "False", "None",   "True",    "and",    "as",     "assert", "async", "await",    "break",  "class", "continue", "def",
        "del",   "elif",   "else",    "except", "finally", "for",   "from",  "global",   "if",     "import", "in",      "is",
        "lambda", "nonlocal", "not",  "or",     "pass",   "raise",  "return", "try",     "while",  "with",  "yield"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(words[i], name) == 0) return true;
    return false;
}

/* "FILE.py:FUNCTION" apart. */
static int parseTarget(const char *word, char *path, size_t n, const char **function, dkv_err *err) {
    const char *colon = strrchr(word, ':');
    size_t len = colon ? (size_t)(colon - word) : 0;
    if (len < 4 || len >= n || strncmp(colon - 3, ".py", 3) != 0)
        return dkv_fail(err, DKV_EUSER, "init: '%.200s' is not FILE.py:FUNCTION", word);
    snprintf(path, n, "%.*s", (int)len, word);
    *function = colon + 1;
    for (const char *c = colon + 1; *c || c == colon + 1; c++)
        if (!(isalpha((unsigned char)*c) || *c == '_' || (c > colon + 1 && isdigit((unsigned char)*c))))
            return dkv_fail(err, DKV_EUSER, "init: '%.100s' is not the name of a Python function", colon + 1);
    if (isKeyword(colon + 1)) return dkv_fail(err, DKV_EUSER, "init: '%s' is a word of Python itself", colon + 1);
    if (strlen(colon + 1) >= sizeof((dkv_kernel_spec *)0)->name)
        return dkv_fail(err, DKV_EUSER, "init: '%.40s...': a name longer than %zu bytes", colon + 1,
                        sizeof((dkv_kernel_spec *)0)->name - 1);
    return 0;
}

/* The text with the function's own name. */
static int writeText(int fd, const char *text, const char *function) {
    for (const char *at; (at = strstr(text, PLACEHOLDER)); text = at + strlen(PLACEHOLDER))
        if (dprintf(fd, "%.*s%s", (int)(at - text), text, function) < 0) return -1;
    return dprintf(fd, "%s", text) < 0 ? -1 : 0;
}

int dkv_cmdInit(const dkv_cli *cli) {
    static char text[FILE_MAX];
    const char *name = cli->convention ? cli->convention : "packed", *function = NULL;
    char path[PATH_MAX], from[PATH_MAX];
    dkv_err err = {0};
    int rc = 0;
    if (cli->n_words != 1) rc = dkv_fail(&err, DKV_EUSER, "init: which file? dualkv init FILE.py:FUNCTION");
    if (!rc) rc = parseTarget(cli->words[0], path, sizeof path, &function, &err);
    if (!rc) rc = dkv_checkConvention(name, &err);
    if (rc || !dkv_findPackage(from, sizeof from - 80)) return dkv_complain(&err);
    snprintf(from + strlen(from), 80, "/dualkv/start/%.40s.py", name);
    FILE *f = fopen(from, "re");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f) fclose(f);
    if (!n || n == sizeof text - 1) {
        dkv_fail(&err, DKV_EHARNESS, "init: cannot read '%.300s'", from);
        return dkv_complain(&err);
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        dkv_fail(&err, DKV_EUSER, errno == EEXIST ? "init: '%.300s' is there already: nothing written" : "init: cannot write '%.300s': %s",
                 path, strerror(errno));
        return dkv_complain(&err);
    }
    rc = writeText(fd, text, function);
    const int why = errno;
    if (close(fd) || rc) {
        dkv_fail(&err, DKV_EHARNESS, "init: cannot write '%.300s': %s", path, strerror(rc ? why : errno));
        unlink(path);
        return dkv_complain(&err);
    }
    printf("%s is there, and right. Judge it, then make it yours:\n\n  dualkv check ci --kernel %s%s:%s\n", path,
           strchr(path, '/') ? "" : "./", path, function);
    return 0;
}
