#include "suite.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fill.h"

#ifndef DUALKV_DATADIR
#define DUALKV_DATADIR "/usr/local/share/dualkv"
#endif

static bool has_suites(const char *dir) {
    char path[PATH_MAX + 16];
    struct stat st;
    return snprintf(path, sizeof path, "%s/suites", dir) < (int)sizeof path && !stat(path, &st) &&
           S_ISDIR(st.st_mode);
}

/* suites/ near the file `path`: in a build folder's source tree, an installation, a bundle. */
static bool find_near(const char *path, char found[PATH_MAX]) {
    static const char *const beside[] = {"/../data", "/../share/dualkv", "/data"};
    char at[PATH_MAX + 32];
    snprintf(at, PATH_MAX, "%s", path);
    char *slash = strrchr(at, '/');
    for (size_t i = 0; slash && i < sizeof beside / sizeof *beside; i++) {
        strcpy(slash, beside[i]);
        if (strlen(at) < PATH_MAX && has_suites(at)) return strcpy(found, at);
    }
    return false;
}

const char *dkv_dataDir(void) {
    static char found[PATH_MAX];
    const char *named = getenv("DUALKV_DATA");
    if (named && *named) return named;
    if (*found) return found;
    char file[PATH_MAX];
    struct link_map *map = NULL;
    Dl_info info;
    /* In a shared library (of a Python, say) the library's place counts; a program's own map has no name. */
    if (dladdr1((void *)dkv_dataDir, &info, (void **)&map, RTLD_DL_LINKMAP) && map && map->l_name[0] &&
        realpath(map->l_name, file) && find_near(file, found))
        return found;
    ssize_t n = readlink("/proc/self/exe", file, sizeof file - 1);
    file[n > 0 ? n : 0] = 0;
    return find_near(file, found) ? found : strcpy(found, DUALKV_DATADIR);
}

/* A name is [a-z0-9_-]+; everything else is a path. */
static bool is_name(const char *s) {
    return *s && strlen(s) < 64 && s[strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789_-")] == 0;
}

static int open_suite(const char *name, char path[PATH_MAX], FILE **f, dkv_err *err) {
    struct stat st;
    bool named = is_name(name);
    int n = named ? snprintf(path, PATH_MAX, "%s/suites/%s.txt", dkv_dataDir(), name)
                  : snprintf(path, PATH_MAX, "%s", name);
    if (n >= PATH_MAX) return dkv_fail(err, DKV_EUSER, "%.80s...: the path is too long", name);
    *f = fopen(path, "rbe");
    if (!*f && named && stat(dkv_dataDir(), &st))
        return dkv_fail(err, DKV_EUSER,
                        "suite '%s': there is no folder %s; DUALKV_DATA names the one with suites/, corpus/ and recorded/",
                        name, dkv_dataDir());
    if (!*f && named)
        return dkv_fail(err, DKV_EUSER, "unknown suite '%s' (`dualkv list suites` names them; %s: %s)", name, path,
                        strerror(errno));
    if (!*f) return dkv_fail(err, DKV_EUSER, "%s: %s", path, strerror(errno));
    if (fstat(fileno(*f), &st) || S_ISDIR(st.st_mode)) {
        fclose(*f);
        return dkv_fail(err, DKV_EUSER, "%s: a directory, not a file of problem lines", path);
    }
    return 0;
}

/* Parses one line (comment removed) and appends it in canonical form. */
static int add_line(dkv_suite *s, const char *path, int number, const char *line, int *room, dkv_err *err) {
    dkv_problem p;
    dkv_err why = {0};
    char text[DKV_LINE_MAX];
    int code = dkv_parseProblem(line, dkv_knownFill, &p, &why);
    if (!code) code = dkv_printProblem(&p, text, sizeof text, &why);
    dkv_freeProblem(&p);
    if (code) return dkv_fail(err, code, "%s:%d: %s", path, number, why.text);
    if (s->n == *room) {
        char **lines = realloc(s->lines, (size_t)(*room * 2 + 16) * sizeof *lines);
        if (!lines) return dkv_fail(err, DKV_EHARNESS, "out of memory");
        s->lines = lines;
        *room = *room * 2 + 16;
    }
    if (!(s->lines[s->n] = strdup(text))) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    s->n++;
    return 0;
}

/* Appends the lines of one file. */
static int add_file(const char *name, char path[PATH_MAX], dkv_suite *out, int *room, dkv_err *err) {
    char line[DKV_LINE_MAX + 2];
    FILE *f = NULL;
    int code = open_suite(name, path, &f, err);
    if (code) return code;
    for (int number = 1; !code && fgets(line, sizeof line, f); number++) {
        if (!strchr(line, '\n') && !feof(f)) {
            code = dkv_fail(err, DKV_EUSER, strlen(line) + 1 < sizeof line ? "%s:%d: a NUL in the line" : "%s:%d: the line is too long",
                            path, number);
            break;
        }
        line[strcspn(line, "#\r\n")] = 0;
        if (line[strspn(line, " \t")]) code = add_line(out, path, number, line, room, err);
    }
    if (!code && ferror(f))
        code = dkv_fail(err, DKV_EUSER, "%s: could not be read: %s", path, strerror(errno));
    fclose(f);
    return code;
}

static int is_suite_file(const struct dirent *d) {
    const char *dot = strrchr(d->d_name, '.');
    return dot && dot != d->d_name && !strcmp(dot, ".txt") && dot - d->d_name < 64;
}

/* Every file of corpus/, by name. */
static int add_corpus(dkv_suite *out, int *room, dkv_err *err) {
    char folder[PATH_MAX], file[PATH_MAX + 300], path[PATH_MAX];
    struct dirent **names = NULL;
    int code = 0;
    snprintf(folder, sizeof folder, "%s/corpus", dkv_dataDir());
    int n = scandir(folder, &names, is_suite_file, alphasort);
    if (n < 1) code = dkv_fail(err, DKV_EUSER, "no corpus in '%s'", folder);
    for (int i = 0; i < n && !code; i++) {
        snprintf(file, sizeof file, "%s/%s", folder, names[i]->d_name);
        code = add_file(file, path, out, room, err);
    }
    for (int i = 0; i < n; i++) free(names[i]);
    free(names);
    return code;
}

int dkv_loadSuite(const char *name, dkv_suite *out, dkv_err *err) {
    char path[PATH_MAX] = "corpus.txt";
    int room = 0;
    *out = (dkv_suite){0};
    int code = strcmp(name, "corpus") ? add_file(name, path, out, &room, err) : add_corpus(out, &room, err);
    const char *stem = strrchr(path, '/');
    snprintf(out->name, sizeof out->name, "%.63s", stem ? stem + 1 : path);
    char *dot = strrchr(out->name, '.');
    if (dot && dot != out->name) *dot = 0;
    if (code) dkv_freeSuite(out);
    return code;
}

void dkv_freeSuite(dkv_suite *s) {
    if (!s) return;
    for (int i = 0; i < s->n; i++) free(s->lines[i]);
    free(s->lines);
    *s = (dkv_suite){0};
}

bool dkv_listSuite(int i, char name[64], char help[200]) {
    char path[PATH_MAX + 300], line[400];
    struct dirent **names = NULL;
    snprintf(path, sizeof path, "%s/suites", dkv_dataDir());
    int n = scandir(path, &names, is_suite_file, alphasort);
    bool found = i >= 0 && i < n;
    help[0] = 0;
    if (n > 0 && i == n) {
        strcpy(name, "corpus");
        strcpy(help, "every line that failed once: all files of corpus/");
    }
    if (found) {
        snprintf(path, sizeof path, "%s/suites/%s", dkv_dataDir(), names[i]->d_name);
        snprintf(name, 64, "%.*s", (int)(strrchr(names[i]->d_name, '.') - names[i]->d_name),
                 names[i]->d_name);
        FILE *f = fopen(path, "rbe");
        if (f && fgets(line, sizeof line, f) && line[0] == '#') {
            line[strcspn(line, "\r\n")] = 0;
            snprintf(help, 200, "%.199s", line + 1 + strspn(line + 1, " "));
        }
        if (f) fclose(f);
    }
    for (int k = 0; k < n; k++) free(names[k]);
    free(names);
    return found || (n > 0 && i == n);
}
