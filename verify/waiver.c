#include "waiver.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/row.h"
#include "kernel.h"

/* A day that exists, as it is written. */
static bool isDay(const char *word) {
    struct tm t = {0};
    int n = 0, y, m, d;
    if (strspn(word, "0123456789-") != 10 || word[10] || word[5] == '-' || word[8] == '-') return false;
    if (sscanf(word, "%4d-%2d-%2d%n", &y, &m, &d, &n) != 3 || n != 10) return false;
    t.tm_year = y - 1900;
    t.tm_mon = m - 1;
    t.tm_mday = d;
    t.tm_hour = 12;
    if (timegm(&t) == (time_t)-1 || y < 2000) return false;
    return t.tm_year == y - 1900 && t.tm_mon == m - 1 &&
           t.tm_mday == d; /* timegm moves the 30th of February */
}

/* Cuts `text` at `|` into n fields without the spaces around them; false: another number of fields, or an
 * empty one. */
static bool cutFields(char *text, char *field[], int n) {
    for (int i = 0; i < n; i++) {
        char *end = strchr(text, '|');
        if (!end != (i == n - 1)) return false;
        if (end) *end = 0;
        field[i] = text + strspn(text, " \t");
        for (size_t k = strlen(field[i]); k && strchr(" \t", field[i][k - 1]); k--) field[i][k - 1] = 0;
        if (!*field[i]) return false;
        text = end ? end + 1 : text;
    }
    return true;
}

static int checkLine(const char *line, dkv_err *err) {
    dkv_problem p = {0};
    char canonical[DKV_LINE_MAX + 1];
    int rc = dkv_parseProblem(line, dkv_knownFill, &p, err);
    if (!rc) rc = dkv_printProblem(&p, canonical, sizeof canonical, err);
    dkv_freeProblem(&p);
    if (!rc && strcmp(line, canonical))
        rc = dkv_fail(err, DKV_EUSER, "the canonical line is '%.300s'", canonical);
    return rc;
}

static int addWaiver(char *text, size_t n, long number, void *arg, dkv_err *err) {
    dkv_waivers *w = arg;
    char *field[4];
    dkv_kernel_spec spec;
    (void)n;
    text[strcspn(text, "\r\n")] = 0;
    for (const char *c = text; *c; c++) /* a reason goes to terminals */
        if (iscntrl((unsigned char)*c) && *c != '\t') return dkv_fail(err, DKV_EUSER, "not plain text");
    if (text[strspn(text, " \t")] == '#') return 0;
    if (!cutFields(text, field, 4))
        return dkv_fail(err, DKV_EUSER, "not LINE | KERNEL | REASON | YYYY-MM-DD");
    if (!isDay(field[3])) return dkv_fail(err, DKV_EUSER, "'%.40s' is not a day (YYYY-MM-DD)", field[3]);
    int rc = checkLine(field[0], err);
    if (!rc) rc = dkv_parseKernelSpec(field[1], &spec, err);
    if (!rc && dkv_findWaiver(w, field[0], field[1]))
        rc = dkv_fail(err, DKV_EUSER, "the same line and kernel again");
    if (rc) return rc;
    dkv_waiver *list = realloc(w->list, ((size_t)w->n + 1) * sizeof *list);
    if (!list) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    w->list = list;
    dkv_waiver *one = &list[w->n++];
    *one = (dkv_waiver){
        .line = strdup(field[0]), .kernel = strdup(field[1]), .reason = strdup(field[2]), .number = (int)number};
    memcpy(one->until, field[3], sizeof one->until);
    return one->line && one->kernel && one->reason ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory");
}

int dkv_loadWaivers(const char *given, dkv_waivers *out, dkv_err *err) {
    char own[4200];
    snprintf(own, sizeof own, "%s/waivers.txt", dkv_dataDir());
    const char *path = given ? given : own;
    FILE *f = fopen(path, "re");
    time_t now = time(NULL);
    struct tm day;
    *out = (dkv_waivers){0};
    strftime(out->today, sizeof out->today, "%Y-%m-%d", gmtime_r(&now, &day));
    if (!f && errno == ENOENT && !given) return 0;
    if (!f) return dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", path, strerror(errno));
    int rc = dkv_takeRows(f, path, addWaiver, out, err);
    fclose(f);
    if (rc) dkv_freeWaivers(out);
    return rc;
}

void dkv_freeWaivers(dkv_waivers *w) {
    for (int i = 0; i < w->n; i++) {
        free(w->list[i].line);
        free(w->list[i].kernel);
        free(w->list[i].reason);
    }
    free(w->list);
    w->list = NULL;
    w->n = 0;
}

const dkv_waiver *dkv_findWaiver(const dkv_waivers *w, const char *line, const char *kernel) {
    for (int i = 0; i < w->n; i++)
        if (!strcmp(w->list[i].line, line) && !strcmp(w->list[i].kernel, kernel)) return &w->list[i];
    return NULL;
}

bool dkv_isExpired(const dkv_waivers *w, const dkv_waiver *one) { return strcmp(one->until, w->today) < 0; }
