#include "report_template.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../data/sha256.h"
#include "../ref/row.h"
#include "report_survey.h"
#include "report_text.h"

enum { FILES_MOST = 64, PATH_ROOM = 4096, WORD_ROOM = 200 };

typedef struct file_row {
    char name[WORD_ROOM], hash[65];
    long records;
} file_row;

typedef struct filling {
    const char *path; /* of the template */
    dkv_survey survey;
    file_row files[FILES_MOST];
    int n_files;
    FILE *out;
} filling;

/* ---- records ---- */

/* What `gzip -dc` makes of the file; *child is waited for by closePacked. */
static FILE *openPacked(const char *path, pid_t *child) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return NULL;
    *child = fork();
    if (*child == 0) {
        const int silent = open("/dev/null", O_WRONLY | O_CLOEXEC); /* what fails is said here, in one line */
        dup2(ends[1], STDOUT_FILENO);
        if (silent >= 0) dup2(silent, STDERR_FILENO);
        execlp("gzip", "gzip", "-dc", "--", path, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    FILE *f = *child > 0 ? fdopen(ends[0], "r") : NULL;
    if (!f) close(ends[0]);
    return f;
}

static int closePacked(FILE *f, pid_t child) {
    int status = 0;
    fclose(f);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -1;
}

typedef struct taking {
    filling *w;
    const char *set;
    long n;
} taking;

static int takeRecord(char *row, size_t n, long number, void *arg, dkv_err *why) {
    taking *t = arg;
    (void)number;
    if (strlen(row) != n) return dkv_fail(why, DKV_EUSER, "no text");
    t->n++;
    return dkv_surveyRecord(&t->w->survey, t->set, row, why);
}

static int addRecords(filling *w, const char *word, dkv_err *err) {
    const char *slash = strrchr(w->path, '/'), *name = strrchr(word, '/');
    char path[PATH_ROOM], set[WORD_ROOM];
    pid_t child = 0;
    name = name ? name + 1 : word;
    const size_t n = strlen(name);
    const bool packed = n > 3 && strcmp(name + n - 3, ".gz") == 0;
    int at = snprintf(path, sizeof path, "%.*s%s", slash && word[0] != '/' ? (int)(slash - w->path) + 1 : 0, w->path, word);
    if (!word[0] || at >= (int)sizeof path || n >= sizeof set) return dkv_fail(err, DKV_EUSER, "@records: which file?");
    if (w->n_files == FILES_MOST) return dkv_fail(err, DKV_EUSER, "@records: more than %d files", FILES_MOST);
    snprintf(set, sizeof set, "%.*s", (int)strcspn(name, "."), name);
    file_row *row = &w->files[w->n_files];
    int rc = dkv_hashFile(path, row->hash, err);
    FILE *f = rc ? NULL : packed ? openPacked(path, &child) : fopen(path, "re");
    if (rc) return rc;
    if (!f) return dkv_fail(err, DKV_EUSER, "cannot read '%.200s': %s", path, strerror(errno));
    taking t = {.w = w, .set = set};
    rc = dkv_takeRows(f, path, takeRecord, &t, err);
    if (!packed) fclose(f);
    else if (closePacked(f, child) && !rc) rc = dkv_fail(err, DKV_EUSER, "cannot unpack '%.200s' with gzip", path);
    if (!rc && t.n == 0) rc = dkv_fail(err, DKV_EUSER, "'%.200s' holds no record", path);
    snprintf(row->name, sizeof row->name, "%s", name);
    row->records = t.n;
    w->n_files++;
    return rc;
}

/* ---- lines that begin with @ ---- */

static int findSet(const dkv_survey *s, const char *word, size_t n) {
    for (int i = 0; i < s->n_sets; i++)
        if (strlen(s->sets[i]) == n && strncmp(s->sets[i], word, n) == 0) return i;
    return -1;
}

static int writeTable(filling *w, dkv_survey_table table, const char *sets, dkv_err *err) {
    uint64_t mask = 0;
    for (const char *at = sets + strspn(sets, " "); *at; at += strspn(at, " ")) {
        const size_t n = strcspn(at, " ");
        const int set = findSet(&w->survey, at, n);
        if (set < 0) return dkv_fail(err, DKV_EUSER, "no @records above is called '%.*s'", (int)(n < 80 ? n : 80), at);
        mask |= (uint64_t)1 << set;
        at += n;
    }
    table(&w->survey, mask ? mask : UINT64_MAX, w->out);
    return 0;
}

/* SET KERNEL [WORDS] LINE */
static int writeOne(filling *w, char *words, dkv_err *err) {
    char *line = strstr(words, "shape="), *set = words, *kernel = words + strcspn(words, " ");
    if (!line || line == words || kernel >= line) return dkv_fail(err, DKV_EUSER, "@case: SET KERNEL [WORDS] LINE");
    line[-1] = 0;
    *kernel++ = 0;
    if (kernel >= line) return dkv_fail(err, DKV_EUSER, "@case: which kernel?");
    char *more = kernel + strcspn(kernel, " ");
    if (*more) *more++ = 0;
    const int at = findSet(&w->survey, set, strlen(set));
    if (at < 0) return dkv_fail(err, DKV_EUSER, "no @records above is called '%.80s'", set);
    return dkv_surveyCase(&w->survey, at, kernel, *more ? more : NULL, line, w->out, err);
}

static void writeFiles(const filling *w) {
    for (int i = 0; i < w->n_files; i++) {
        fputs("- ", w->out);
        dkv_markText(w->out, w->files[i].name, 0);
        fprintf(w->out, ": %ld records, SHA-256 %s\n", w->files[i].records, w->files[i].hash);
    }
}

static int fillLine(filling *w, char *row, dkv_err *err) {
    char *rest = row + 1 + strcspn(row + 1, " ");
    if (*rest) *rest++ = 0;
    rest += strspn(rest, " ");
    dkv_survey_table table = dkv_findSurveyTable(row + 1);
    if (strcmp(row, "@records") == 0) return addRecords(w, rest, err);
    if (strcmp(row, "@case") == 0) return writeOne(w, rest, err);
    if (table) return writeTable(w, table, rest, err);
    if (strcmp(row, "@files") == 0) writeFiles(w);
    else return dkv_fail(err, DKV_EUSER, "unknown '%.80s'", row);
    return 0;
}

int dkv_fillTemplate(const char *path, FILE *f, dkv_err *err) {
    filling *w = calloc(1, sizeof *w);
    char *row = NULL;
    size_t room = 0, n = 1;
    long number = 0;
    int rc = w ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory");
    FILE *in = rc ? NULL : fopen(path, "re");
    if (!rc && !in) rc = dkv_fail(err, DKV_EUSER, "cannot read '%.200s': %s", path, strerror(errno));
    if (!rc) w->path = path, w->out = f;
    while (!rc) {
        dkv_err why = {0};
        number++;
        rc = dkv_readRow(in, &row, &room, &n, &why);
        if (!rc && n == 0) break;
        if (!rc && strlen(row) != n) rc = dkv_fail(&why, DKV_EUSER, "no text");
        if (!rc && row[0] != '@') fputs(row, f);
        else if (!rc) {
            row[strcspn(row, "\r\n")] = 0;
            rc = fillLine(w, row, &why);
        }
        if (rc) dkv_fail(err, (dkv_code)rc, "%.200s:%ld: %.250s", path, number, why.text);
    }
    if (!rc && ferror(f)) rc = dkv_fail(err, DKV_EHARNESS, "cannot write the page: %s", strerror(errno));
    if (in) fclose(in);
    if (w) dkv_freeSurvey(&w->survey);
    free(w);
    free(row);
    return rc;
}
