#include "history.h"

#include <dirent.h>
#include <errno.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "history_index.h"

enum { FOLDERS_DEEP = 8 };

static void note(dkv_history *h, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void note(dkv_history *h, const char *fmt, ...) {
    dkv_err line; /* control characters replaced */
    va_list args;
    char text[400];
    if (h->n_notes == DKV_HISTORY_NOTES) return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    dkv_fail(&line, DKV_EUSER, "%s", text);
    snprintf(h->notes[h->n_notes++], sizeof h->notes[0], "%.299s", line.text);
}

/* ---- which files ---- */

/* A file that is named twice counts once. */
static int addFile(dkv_history *h, const char *path, dkv_err *err) {
    char *real = realpath(path, NULL), *shown = strdup(path);
    dkv_history_file *files = realloc(h->files, (size_t)(h->n_files + 1) * sizeof *files);
    if (files) h->files = files;
    int rc = !shown || !files ? dkv_fail(err, DKV_EHARNESS, "out of memory for names of files")
             : !real          ? dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", path, strerror(errno))
                              : 0;
    bool known = rc != 0;
    for (int i = 0; i < h->n_files && !known; i++) known = strcmp(h->files[i].path, real) == 0;
    if (!known) {
        h->files[h->n_files++] = (dkv_history_file){.path = real, .shown = shown};
        return 0;
    }
    free(real);
    free(shown);
    return rc;
}

static int byName(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }

static int addFolder(dkv_history *h, const char *path, int deep, dkv_err *err) {
    static const char ending[] = ".jsonl";
    struct dirent **names = NULL;
    int rc = 0, n = scandir(path, &names, NULL, byName);
    if (n < 0) return dkv_fail(err, DKV_EUSER, "cannot read the folder '%s': %s", path, strerror(errno));
    for (int i = 0; i < n; i++) {
        const char *name = names[i]->d_name;
        size_t len = strlen(name);
        char *below = NULL;
        struct stat s;
        if (!rc && name[0] != '.') {
            bool slash = path[0] && path[strlen(path) - 1] == '/';
            if (asprintf(&below, "%s%s%s", path, slash ? "" : "/", name) < 0) below = NULL;
            if (!below) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for names of files");
            else if (lstat(below, &s) != 0) rc = 0; /* gone meanwhile */
            else if (S_ISDIR(s.st_mode) && deep > 0) rc = addFolder(h, below, deep - 1, err);
            else if (S_ISREG(s.st_mode) && len > sizeof ending - 1 && strcmp(name + len - (sizeof ending - 1), ending) == 0)
                rc = addFile(h, below, err);
        }
        free(below);
        free(names[i]);
    }
    free(names);
    return rc;
}

static int addWord(dkv_history *h, const char *word, dkv_err *err) {
    struct stat s;
    if (stat(word, &s) != 0) return dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", word, strerror(errno));
    if (S_ISDIR(s.st_mode)) return addFolder(h, word, FOLDERS_DEEP, err);
    if (!S_ISREG(s.st_mode)) return dkv_fail(err, DKV_EUSER, "'%s' is neither a folder nor a file of records", word);
    return addFile(h, word, err);
}

/* ---- which index ---- */

/* NULL in *path: the memory. */
static int placeIndex(const char *const *words, int n, const char *index, char **path, dkv_err *err) {
    static const char ending[] = ".sqlite";
    struct stat s;
    *path = NULL;
    if (index) {
        size_t len = strlen(index);
        if (len < sizeof ending || strcmp(index + len - (sizeof ending - 1), ending) != 0)
            return dkv_fail(err, DKV_EUSER, "--index: '%.200s' does not end in %s", index, ending);
        if (stat(index, &s) == 0 && !S_ISREG(s.st_mode))
            return dkv_fail(err, DKV_EUSER, "--index: '%.200s' is not a regular file", index);
        *path = strdup(index);
    } else if (n == 1 && stat(words[0], &s) == 0 && S_ISDIR(s.st_mode)) {
        if (asprintf(path, "%s/%s", words[0], DKV_HISTORY_FILE) < 0) *path = NULL;
    } else return 0;
    return *path ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for the name of an index");
}

static dkv_ix fill(dkv_history *h, const char *path, bool ours, dkv_err *err) {
    dkv_ix ix = dkv_openIndex(path, ours, &h->db, err);
    for (int i = 0; i < h->n_files && !ix; i++) ix = dkv_indexFile(h->db, &h->files[i], &h->read, err);
    return ix;
}

static void closeIndex(dkv_history *h) {
    sqlite3_close(h->db);
    h->db = NULL;
    h->read = 0;
}

/* The journal first: alone it would be played back into the next database of that name. */
static void removeIndex(const char *path) {
    char *journal = NULL;
    if (asprintf(&journal, "%s-journal", path) >= 0) {
        unlink(journal);
        free(journal);
    }
    unlink(path);
}

static dkv_ix useIndex(dkv_history *h, const char *path, bool ours, bool rebuild, dkv_err *err) {
    dkv_ix ix = DKV_IX_OK;
    if (rebuild) { /* only what is ours, or broken, is removed */
        ix = dkv_openIndex(path, ours, &h->db, err);
        closeIndex(h);
        if (ix == DKV_IX_FAILED || ix == DKV_IX_SHUT) return ix;
        removeIndex(path);
    }
    ix = fill(h, path, ours, err);
    if (ix == DKV_IX_BROKEN || ix == DKV_IX_OLD) {
        note(h, ix == DKV_IX_OLD ? "index %s is of an earlier schema: made anew" : "index %s is broken: made anew", path);
        closeIndex(h);
        removeIndex(path);
        ix = fill(h, path, ours, err);
    }
    if (!ix) {
        dkv_err ignored = {0};
        dkv_forgetGone(h->db, &ignored); /* takes nothing from what is asked for: may wait */
    }
    return ix;
}

int dkv_openHistory(const char *const *words, int n, const char *index, bool rebuild, dkv_history *h, dkv_err *err) {
    char *path = NULL;
    int rc = 0;
    dkv_ix ix = DKV_IX_SHUT;
    memset(h, 0, sizeof *h);
    if (n == 0) return dkv_fail(err, DKV_EUSER, "history: which records? (a folder, or files that --json wrote)");
    for (int i = 0; i < n && !rc; i++) rc = addWord(h, words[i], err);
    if (!rc && h->n_files == 0) rc = dkv_fail(err, DKV_EUSER, "no file *.jsonl in '%s'", words[0]);
    if (!rc) rc = placeIndex(words, n, index, &path, err);
    if (rc) goto done;
    if (path) {
        ix = useIndex(h, path, !index, rebuild, err);
        if (ix == DKV_IX_IN_USE) note(h, "index %s is in use: the records are read without it", path);
        else if (ix && ix != DKV_IX_FAILED) note(h, "index %s cannot be written: the records are read without it", path);
    }
    if (ix && ix != DKV_IX_FAILED) {
        closeIndex(h);
        ix = fill(h, ":memory:", true, err);
        if (ix && ix != DKV_IX_FAILED) dkv_fail(err, DKV_EHARNESS, "no index could be made in memory");
    }
    rc = ix ? (int)err->code : 0;
done:
    free(path);
    return rc;
}

void dkv_closeHistory(dkv_history *h) {
    for (int i = 0; i < h->n_files; i++) {
        free(h->files[i].path);
        free(h->files[i].shown);
    }
    free(h->files);
    sqlite3_close(h->db);
    memset(h, 0, sizeof *h);
}

/* ---- reading ---- */

typedef struct query {
    char sql[1600];
    const char *bound[8 + DKV_ST_N]; /* after the file, which is the first */
    int n;
} query;

static void addClause(query *q, const char *clause, const char *text, int times) {
    size_t at = strlen(q->sql);
    if (!text) return;
    snprintf(q->sql + at, sizeof q->sql - at, "%s", clause);
    while (times--) q->bound[q->n++] = text;
}

static int prepare(sqlite3 *db, const dkv_history_filter *f, sqlite3_stmt **out) {
    query q = {.sql = "SELECT * FROM record WHERE file=?"};
    addClause(&q, " AND kernel=?", f->kernel, 1);
    addClause(&q, " AND substr(\"commit\", 1, length(?))=?", f->commit, 2);
    addClause(&q, " AND instr(line, ?)>0", f->line, 1);
    addClause(&q, " AND instr(device, ?)>0", f->device, 1);
    addClause(&q, " AND time>=?", f->since, 1);
    addClause(&q, " AND status IN (NULL", f->statuses ? "" : NULL, 0);
    for (int s = 0; s < DKV_ST_N; s++)
        if (f->statuses >> s & 1) addClause(&q, ", ?", dkv_statusRow((dkv_status)s)->name, 1);
    addClause(&q, ")", f->statuses ? "" : NULL, 0);
    if (f->tensor) {
        int i = DKV_HN_TENSORS + (f->tensor - 1) * DKV_HN_EACH + DKV_HN_RATIO;
        addClause(&q, " AND \"", "", 0);
        addClause(&q, dkv_historyNumber(i), "", 0);
        addClause(&q, "\" IS NOT NULL", "", 0);
    }
    addClause(&q, " ORDER BY number", "", 0);
    int rc = sqlite3_prepare_v2(db, q.sql, -1, out, NULL);
    for (int i = 0; i < q.n && rc == SQLITE_OK; i++) rc = sqlite3_bind_text(*out, 2 + i, q.bound[i], -1, SQLITE_STATIC);
    return rc;
}

int dkv_eachRow(dkv_history *h, const dkv_history_filter *f, dkv_history_take take, void *arg, dkv_err *err) {
    sqlite3_stmt *s = NULL;
    int rc = prepare(h->db, f, &s), stop = 0;
    for (int i = 0; i < h->n_files && rc == SQLITE_OK && !stop; i++) {
        dkv_history_row row = {.file = h->files[i].shown};
        sqlite3_reset(s);
        rc = sqlite3_bind_int64(s, 1, h->files[i].id);
        while (rc == SQLITE_OK && !stop && (rc = sqlite3_step(s)) == SQLITE_ROW) {
            dkv_takeColumns(s, &row);
            stop = take(&row, arg);
            rc = SQLITE_OK;
        }
        if (rc == SQLITE_DONE) rc = SQLITE_OK;
    }
    if (rc != SQLITE_OK) stop = dkv_fail(err, DKV_EHARNESS, "the index cannot be read: %s", sqlite3_errmsg(h->db));
    sqlite3_finalize(s);
    return stop;
}
