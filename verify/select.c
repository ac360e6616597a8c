#include "select.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/row.h"

/* Appends a line in its canonical form. */
static int addLine(dkv_selection *s, const char *text, const char *kernel, dkv_err *err) {
    dkv_problem p = {0};
    char line[DKV_LINE_MAX + 1];
    int rc = dkv_parseProblem(text, dkv_knownFill, &p, err);
    if (!rc) rc = dkv_printProblem(&p, line, sizeof line, err);
    dkv_freeProblem(&p);
    if (rc) return rc;
    if ((s->n & (s->n + 1)) == 0 || s->n == 0) { /* room for the next power of two */
        size_t room = (size_t)(s->n + 1) * 2;
        char **lines = realloc(s->lines, room * sizeof *lines);
        if (lines) s->lines = lines;
        char **kernels = realloc(s->kernels, room * sizeof *kernels);
        if (kernels) s->kernels = kernels;
        if (!lines || !kernels) return dkv_fail(err, DKV_EHARNESS, "out of memory for problem lines");
    }
    s->lines[s->n] = strdup(line);
    s->kernels[s->n] = kernel ? strdup(kernel) : NULL;
    if (!s->lines[s->n] || (kernel && !s->kernels[s->n])) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    s->n++;
    return 0;
}

/* Every case of a folder, with the kernel that answers with what is in it. */
static int addFiles(dkv_selection *s, const char *word, dkv_err *err) {
    dkv_files files;
    const char *dir = word + strlen(DKV_FILES_PREFIX);
    int rc = dkv_setFilesDir(dir, err);
    if (rc || (rc = dkv_openFiles(dir, &files, err))) return rc;
    for (long i = 0; i < files.n && !rc; i++) rc = addLine(s, files.lines[i], word, err);
    dkv_closeFiles(&files);
    return rc;
}

static int addSuite(dkv_selection *s, const char *name, dkv_err *err) {
    dkv_suite suite = {0};
    int rc = dkv_loadSuite(name, &suite, err);
    for (int i = 0; i < suite.n && !rc; i++) rc = addLine(s, suite.lines[i], NULL, err);
    s->from_suites += strcmp(name, "corpus") ? suite.n : 0; /* what failed once promises no power */
    dkv_freeSuite(&suite);
    return rc;
}

/* key=value words that stand alone are gathered until something else, or a second shape=, comes. */
typedef struct pending {
    char text[DKV_LINE_MAX + 2];
    bool shaped;
} pending;

static int flush(pending *p, dkv_selection *s, dkv_err *err) {
    int rc = p->text[0] ? addLine(s, p->text, NULL, err) : 0;
    p->text[0] = 0;
    p->shaped = false;
    return rc;
}

int dkv_selectWords(const char *const *words, int n, dkv_selection *out, dkv_err *err) {
    pending *p = calloc(1, sizeof *p);
    int rc = p ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int i = 0; i < n && !rc; i++) {
        const char *w = words[i], *equals = strchr(w, '='), *slash = strchr(w, '/');
        bool files = strncmp(w, DKV_FILES_PREFIX, strlen(DKV_FILES_PREFIX)) == 0;
        bool suite = files || !equals || (slash && slash < equals); /* a path may hold a '=' */
        bool whole = !suite && strpbrk(w, " \t\n");
        bool shape = strncmp(w, "shape=", 6) == 0;
        if (suite || whole || (shape && p->shaped)) rc = flush(p, out, err);
        if (rc) break;
        if (!*w) rc = dkv_fail(err, DKV_EUSER, "an empty word: a problem line, a suite or a path is expected");
        else if (files) rc = addFiles(out, w, err);
        else if (suite) rc = addSuite(out, w, err);
        else if (whole) rc = addLine(out, w, NULL, err);
        else {
            size_t at = strlen(p->text);
            if (at + strlen(w) + 2 > sizeof p->text)
                rc = dkv_fail(err, DKV_EUSER, "a problem line longer than %d bytes", DKV_LINE_MAX);
            else snprintf(p->text + at, sizeof p->text - at, "%s%s", at ? " " : "", w);
            p->shaped |= shape;
        }
    }
    if (!rc) rc = flush(p, out, err);
    free(p);
    return rc;
}

static int addRecord(char *json, size_t n, long number, void *arg, dkv_err *err) {
    dkv_selection *s = arg;
    cJSON *o = cJSON_Parse(json);
    const char *line = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(o, "line"));
    const char *kernel = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(o, "kernel"));
    int rc = 0;
    (void)n, (void)number;
    if (kernel && strncmp(kernel, DKV_FILES_PREFIX, strlen(DKV_FILES_PREFIX)) == 0)
        rc = dkv_setFilesDir(kernel + strlen(DKV_FILES_PREFIX), err);
    if (!rc) rc = line ? addLine(s, line, kernel, err) : dkv_fail(err, DKV_EUSER, "not a record: '%.60s'", json);
    cJSON_Delete(o);
    return rc;
}

int dkv_selectFile(const char *path, dkv_selection *out, dkv_err *err) {
    FILE *f = fopen(path, "r");
    if (!f) return dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", path, strerror(errno));
    const int first = ungetc(fgetc(f), f);
    int rc = first == '{' ? dkv_takeRows(f, path, addRecord, out, err) : 0;
    fclose(f);
    return first == '{' ? rc : addSuite(out, path, err);
}

static int changeLine(char **text, uint64_t reseed, bool forward, dkv_err *err) {
    dkv_problem p = {0};
    char line[DKV_LINE_MAX + 1];
    int rc = dkv_parseProblem(*text, dkv_knownFill, &p, err);
    if (rc) return rc;
    p.seed += reseed;
    if (forward) p.grad = p.dlse = false;
    rc = dkv_printProblem(&p, line, sizeof line, err);
    dkv_freeProblem(&p);
    if (rc) return rc;
    free(*text);
    *text = strdup(line);
    return *text ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory");
}

int dkv_reseedSelection(dkv_selection *s, uint64_t add, dkv_err *err) {
    int rc = 0;
    for (long i = 0; i < s->n && !rc; i++) rc = changeLine(&s->lines[i], add, false, err);
    return rc;
}

int dkv_forwardSelection(dkv_selection *s, dkv_err *err) {
    long kept = 0;
    int rc = 0;
    for (long i = 0; i < s->n && !rc; i++) {
        bool twice = false;
        rc = changeLine(&s->lines[i], 0, true, err);
        for (long k = 0; k < kept && !rc && !twice; k++) twice = strcmp(s->lines[k], s->lines[i]) == 0;
        if (rc) break;
        if (twice) {
            free(s->lines[i]);
            free(s->kernels[i]);
        } else {
            s->lines[kept] = s->lines[i];
            s->kernels[kept++] = s->kernels[i];
        }
        if (kept <= i) s->lines[i] = s->kernels[i] = NULL;
    }
    if (!rc) s->n = kept;
    return rc;
}

void dkv_freeSelection(dkv_selection *s) {
    for (long i = 0; i < s->n; i++) {
        free(s->lines[i]);
        free(s->kernels[i]);
    }
    free(s->lines);
    free(s->kernels);
    memset(s, 0, sizeof *s);
}
