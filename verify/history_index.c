#include "history_index.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../data/sha256.h"
#include "../ref/row.h"

#define APPLICATION 0x444b5648 /* "DKVH" */
enum { WAIT_MS = 3000, COLUMNS = 1 + DKV_HT_N + DKV_HN_N };
/* A file that changed this shortly before it was read may change again without another time: clocks of files tick. */
#define TICK INT64_C(2000000000)

static dkv_ix judge(int rc, dkv_err *err) {
    switch (rc & 0xff) {
    case SQLITE_OK:
    case SQLITE_ROW:
    case SQLITE_DONE: return DKV_IX_OK;
    case SQLITE_BUSY:
    case SQLITE_LOCKED: return DKV_IX_IN_USE;
    case SQLITE_READONLY:
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
    case SQLITE_AUTH:
    case SQLITE_FULL:
    case SQLITE_NOLFS:
    case SQLITE_IOERR: return DKV_IX_SHUT;
    case SQLITE_NOMEM: dkv_fail(err, DKV_EHARNESS, "out of memory for an index"); return DKV_IX_FAILED;
    default: return DKV_IX_BROKEN; /* corrupt, no database, tables that are not ours */
    }
}

static dkv_ix run(sqlite3 *db, const char *sql, dkv_err *err) {
    return judge(sqlite3_exec(db, sql, NULL, NULL, NULL), err);
}

/* The number that a statement without parameters gives. */
static dkv_ix ask(sqlite3 *db, const char *sql, int64_t *x, dkv_err *err) {
    sqlite3_stmt *s = NULL;
    int rc = sqlite3_prepare_v2(db, sql, -1, &s, NULL);
    if (rc == SQLITE_OK) rc = sqlite3_step(s);
    if (rc == SQLITE_ROW) *x = sqlite3_column_int64(s, 0);
    sqlite3_finalize(s);
    return rc == SQLITE_DONE ? DKV_IX_BROKEN : judge(rc, err);
}

/* number, "line", …: all columns of a row. */
static void writeColumns(FILE *f, const char *before, const char *text_type, const char *number_type) {
    fprintf(f, "%snumber%s", before, text_type[0] ? " INTEGER NOT NULL" : "");
    for (int i = 0; i < DKV_HT_N; i++) fprintf(f, ", \"%s\"%s", dkv_historyText(i), text_type);
    for (int i = 0; i < DKV_HN_N; i++) fprintf(f, ", \"%s\"%s", dkv_historyNumber(i), number_type);
}

static dkv_ix makeTables(sqlite3 *db, dkv_err *err) {
    char *sql = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&sql, &n);
    if (!f) return judge(SQLITE_NOMEM, err);
    fprintf(f, "BEGIN IMMEDIATE; PRAGMA application_id=%d; PRAGMA user_version=%d;"
               "CREATE TABLE IF NOT EXISTS file(id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL UNIQUE, dev INTEGER, ino INTEGER,"
               " size INTEGER, mtime INTEGER, ctime INTEGER, seen INTEGER, bytes INTEGER, hash TEXT, lines INTEGER,"
               " records INTEGER, others INTEGER, bad INTEGER, first_bad INTEGER, cut INTEGER, tail INTEGER, chain INTEGER,"
               " sum INTEGER);",
            APPLICATION, DKV_HISTORY_SCHEMA);
    writeColumns(f, "CREATE TABLE IF NOT EXISTS record(file INTEGER NOT NULL, ", " TEXT NOT NULL", " REAL");
    fprintf(f, ", PRIMARY KEY(file, number)) WITHOUT ROWID; COMMIT;");
    if (fclose(f)) {
        free(sql);
        return judge(SQLITE_NOMEM, err);
    }
    dkv_ix ix = run(db, sql, err);
    free(sql);
    if (ix) sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    return ix;
}

/* Is it empty, ours, of this schema? */
static dkv_ix checkKind(sqlite3 *db, const char *path, bool ours, dkv_err *err) {
    int64_t tables = 0, application = 0, version = 0;
    dkv_ix ix = ask(db, "SELECT count(*) FROM sqlite_master", &tables, err);
    if (!ix) ix = ask(db, "PRAGMA application_id", &application, err);
    if (!ix) ix = ask(db, "PRAGMA user_version", &version, err);
    if (ix) return ix;
    if (application == 0 && version == 0 && tables == 0) return makeTables(db, err);
    if (application != APPLICATION) {
        if (ours) return DKV_IX_BROKEN;
        dkv_fail(err, DKV_EUSER, "--index: '%s' is a database of another program", path);
        return DKV_IX_FAILED;
    }
    if (version > DKV_HISTORY_SCHEMA) {
        dkv_fail(err, DKV_EUSER, "--index: '%s' has schema %" PRId64 ", which is later than this program's %d: name another", path,
                 version, DKV_HISTORY_SCHEMA);
        return DKV_IX_FAILED;
    }
    return version < DKV_HISTORY_SCHEMA ? DKV_IX_OLD : DKV_IX_OK;
}

/* synchronous=OFF: what a failing machine leaves is found broken, and a killed process leaves what it wrote. */
dkv_ix dkv_openIndex(const char *path, bool ours, sqlite3 **db, dkv_err *err) {
    int rc = sqlite3_open_v2(path, db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, NULL);
    if (rc != SQLITE_OK) return judge(rc, err);
    sqlite3_busy_timeout(*db, WAIT_MS);
    sqlite3_db_config(*db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    dkv_ix ix = run(*db, "PRAGMA trusted_schema=OFF; PRAGMA synchronous=OFF; PRAGMA cell_size_check=ON", err);
    return ix ? ix : checkKind(*db, path, ours, err);
}

/* ---- sums: FNV-1a, 64 bit; they find what broke, not who meant it ---- */

static uint64_t addSum(uint64_t sum, const void *data, size_t n) {
    const unsigned char *bytes = data;
    for (size_t i = 0; i < n; i++) sum = (sum ^ bytes[i]) * UINT64_C(0x100000001b3);
    return sum;
}

static uint64_t sumRow(uint64_t sum, const dkv_history_row *r) {
    sum = addSum(sum, &r->number, sizeof r->number);
    for (int i = 0; i < DKV_HT_N; i++) sum = addSum(sum, r->text[i], strlen(r->text[i]) + 1);
    sum = addSum(sum, &r->there, sizeof r->there);
    for (int i = 0; i < DKV_HN_N; i++) {
        double x = isnan(r->x[i]) ? -0.0 : r->x[i]; /* one NaN; -0 stands for nothing else */
        if (r->there >> i & 1) sum = addSum(sum, &x, sizeof x);
    }
    return sum;
}

typedef struct entry { /* a row of `file` */
    int64_t id, dev, ino, size, mtime, ctime, seen, bytes, lines, records, others, bad, first_bad, cut, tail;
    uint64_t chain, sum; /* of its rows; of these and of what stands here */
    char hash[65];
} entry;

#define FIRST_SUM UINT64_C(0xcbf29ce484222325)

static uint64_t sumEntry(const entry *e) {
    const int64_t what[] = {e->bytes, e->lines, e->records, e->others, e->bad, e->first_bad, e->cut, e->tail};
    return addSum(addSum(e->chain, what, sizeof what), e->hash, strlen(e->hash));
}

/* ---- one file ---- */

typedef struct indexer {
    sqlite3 *db;
    dkv_history_file *file;
    dkv_err *err;
    sqlite3_stmt *insert;
    entry e;
    bool known;
} indexer;

static const char *textAt(sqlite3_stmt *s, int i) {
    const char *text = (const char *)sqlite3_column_text(s, i);
    return text ? text : "";
}

static dkv_ix findEntry(indexer *x) {
    sqlite3_stmt *s = NULL;
    int64_t *const to[] = {&x->e.id, &x->e.dev, &x->e.ino, &x->e.size, &x->e.mtime, &x->e.ctime, &x->e.seen, &x->e.bytes,
                           &x->e.lines, &x->e.records, &x->e.others, &x->e.bad, &x->e.first_bad, &x->e.cut, &x->e.tail};
    enum { N = sizeof to / sizeof *to };
    x->e = (entry){.chain = FIRST_SUM};
    x->known = false;
    int rc = sqlite3_prepare_v2(x->db, "SELECT id, dev, ino, size, mtime, ctime, seen, bytes, lines, records, others, bad, first_bad,"
                                       " cut, tail, chain, sum, hash FROM file WHERE path=?", -1, &s, NULL);
    if (rc == SQLITE_OK) rc = sqlite3_bind_text(s, 1, x->file->path, -1, SQLITE_STATIC);
    if (rc == SQLITE_OK) rc = sqlite3_step(s);
    if (rc == SQLITE_ROW) {
        for (int i = 0; i < N; i++) *to[i] = sqlite3_column_int64(s, i);
        x->e.chain = (uint64_t)sqlite3_column_int64(s, N);
        x->e.sum = (uint64_t)sqlite3_column_int64(s, N + 1);
        snprintf(x->e.hash, sizeof x->e.hash, "%.64s", textAt(s, N + 2));
        x->known = true;
    }
    sqlite3_finalize(s);
    return judge(rc, x->err);
}

void dkv_takeColumns(sqlite3_stmt *s, dkv_history_row *row) {
    row->number = (long)sqlite3_column_int64(s, 1);
    row->there = 0;
    for (int i = 0; i < DKV_HT_N; i++) row->text[i] = textAt(s, 2 + i);
    for (int i = 0; i < DKV_HN_N; i++) {
        int at = 2 + DKV_HT_N + i, type = sqlite3_column_type(s, at);
        if (type == SQLITE_NULL) continue;
        row->x[i] = type == SQLITE_TEXT ? NAN : sqlite3_column_double(s, at);
        row->there |= UINT64_C(1) << i;
    }
}

static bool hasColumns(sqlite3_stmt *s) {
    bool right = sqlite3_column_count(s) == 1 + COLUMNS;
    for (int i = 0; i < DKV_HT_N && right; i++) right = strcmp(sqlite3_column_name(s, 2 + i), dkv_historyText(i)) == 0;
    for (int i = 0; i < DKV_HN_N && right; i++)
        right = strcmp(sqlite3_column_name(s, 2 + DKV_HT_N + i), dkv_historyNumber(i)) == 0;
    return right;
}

/* The sum of what stands there is that of what was written. */
static dkv_ix checkRows(indexer *x) {
    sqlite3_stmt *s = NULL;
    uint64_t sum = FIRST_SUM;
    dkv_history_row row = {0};
    int rc = sqlite3_prepare_v2(x->db, "SELECT * FROM record WHERE file=? ORDER BY number", -1, &s, NULL);
    if (rc == SQLITE_OK) rc = sqlite3_bind_int64(s, 1, x->e.id);
    if (rc == SQLITE_OK && !hasColumns(s)) rc = SQLITE_CORRUPT;
    while (rc == SQLITE_OK || rc == SQLITE_ROW) {
        if ((rc = sqlite3_step(s)) != SQLITE_ROW) break;
        dkv_takeColumns(s, &row);
        sum = sumRow(sum, &row);
    }
    sqlite3_finalize(s);
    if (rc != SQLITE_DONE) return judge(rc, x->err);
    return sum == x->e.chain && sumEntry(&x->e) == x->e.sum ? DKV_IX_OK : DKV_IX_BROKEN;
}

static dkv_ix insertRow(indexer *x, const dkv_history_row *row) {
    int rc = sqlite3_bind_int64(x->insert, 1, x->e.id);
    if (rc == SQLITE_OK) rc = sqlite3_bind_int64(x->insert, 2, row->number);
    for (int i = 0; i < DKV_HT_N && rc == SQLITE_OK; i++)
        rc = sqlite3_bind_text(x->insert, 3 + i, row->text[i], -1, SQLITE_STATIC);
    for (int i = 0; i < DKV_HN_N && rc == SQLITE_OK; i++) {
        int at = 3 + DKV_HT_N + i;
        if (!(row->there >> i & 1)) rc = sqlite3_bind_null(x->insert, at);
        else if (isnan(row->x[i])) rc = sqlite3_bind_text(x->insert, at, "nan", -1, SQLITE_STATIC);
        else rc = sqlite3_bind_double(x->insert, at, row->x[i]);
    }
    if (rc == SQLITE_OK) rc = sqlite3_step(x->insert);
    sqlite3_reset(x->insert);
    x->e.chain = sumRow(x->e.chain, row);
    return judge(rc, x->err);
}

static dkv_ix prepareInsert(indexer *x) {
    char *sql = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&sql, &n);
    if (!f) return judge(SQLITE_NOMEM, x->err);
    fprintf(f, "INSERT INTO record VALUES (?");
    for (int i = 0; i < COLUMNS; i++) fprintf(f, ", ?");
    fprintf(f, ")");
    int rc = fclose(f) ? SQLITE_NOMEM : sqlite3_prepare_v2(x->db, sql, -1, &x->insert, NULL);
    free(sql);
    return judge(rc, x->err);
}

/* One line, its end included where it has one. */
static dkv_ix takeLine(indexer *x, const char *line, size_t n) {
    dkv_history_row row = {.number = (long)x->e.lines + 1};
    bool blank = !line[strspn(line, " \t\r\n")] && strlen(line) == n;
    cJSON *keep = NULL;
    dkv_ix ix = DKV_IX_OK;
    int kind = blank ? 3 : strlen(line) == n ? dkv_parseRow(line, &row, &keep) : 0; /* a 0 byte: no text */
    if (kind == 1) {
        ix = insertRow(x, &row);
        x->e.records++;
    } else if (kind == 2) {
        x->e.others++;
    } else if (kind == 0) {
        if (x->e.bad++ == 0) x->e.first_bad = row.number;
    }
    cJSON_Delete(keep);
    return ix;
}

static dkv_ix dropRows(indexer *x) {
    sqlite3_stmt *s = NULL;
    const int64_t id = x->e.id;
    int rc = sqlite3_prepare_v2(x->db, "DELETE FROM record WHERE file=?", -1, &s, NULL);
    if (rc == SQLITE_OK) rc = sqlite3_bind_int64(s, 1, id);
    if (rc == SQLITE_OK) rc = sqlite3_step(s);
    sqlite3_finalize(s);
    x->e = (entry){.id = id, .chain = FIRST_SUM};
    return judge(rc, x->err);
}

/* Goes past the bytes that are known already; *same: they are what they were. */
static int skipKnown(const entry *e, FILE *f, dkv_digest *d, bool *same) {
    char chunk[65536], hex[65];
    int64_t left = e->bytes;
    while (left > 0) {
        size_t got = fread(chunk, 1, left < (int64_t)sizeof chunk ? (size_t)left : sizeof chunk, f);
        if (got == 0) break;
        dkv_addDigest(d, chunk, got);
        left -= (int64_t)got;
    }
    dkv_endDigest(d, hex);
    *same = left == 0 && strcmp(hex, e->hash) == 0;
    return ferror(f) ? -1 : 0;
}

static dkv_ix readNew(indexer *x, FILE *f, long *read) {
    char *line = NULL;
    size_t room = 0, n = 0;
    bool same = false;
    dkv_err why = {0};
    dkv_digest d;
    dkv_ix ix = DKV_IX_OK;
    dkv_startDigest(&d);
    if (x->known && !x->e.tail && !x->e.cut && skipKnown(&x->e, f, &d, &same)) {
        dkv_fail(x->err, DKV_EUSER, "cannot read '%s': %s", x->file->shown, strerror(errno));
        return DKV_IX_FAILED;
    }
    if (!same) {
        ix = dropRows(x);
        dkv_startDigest(&d);
        rewind(f);
    }
    while (!ix) {
        if (dkv_readRow(f, &line, &room, &n, &why)) {
            x->e.cut = 1;
            if (x->e.lines == 0) {
                dkv_fail(x->err, DKV_EUSER, "%s:1: %s", x->file->shown, why.text);
                ix = DKV_IX_FAILED;
            }
            break;
        }
        if (n == 0) break;
        ++*read;
        ix = takeLine(x, line, n);
        x->e.tail = line[n - 1] != '\n';
        if (x->e.tail) break;
        dkv_addDigest(&d, line, n);
        x->e.bytes += (int64_t)n;
        x->e.lines++;
    }
    free(line);
    dkv_endDigest(&d, x->e.hash);
    return ix;
}

static dkv_ix writeEntry(indexer *x, const struct stat *s, int64_t seen) {
    entry *e = &x->e;
    sqlite3_stmt *q = NULL;
    e->sum = sumEntry(e);
    const int64_t values[] = {e->id, (int64_t)s->st_dev, (int64_t)s->st_ino, (int64_t)s->st_size,
                              s->st_mtim.tv_sec * INT64_C(1000000000) + s->st_mtim.tv_nsec,
                              s->st_ctim.tv_sec * INT64_C(1000000000) + s->st_ctim.tv_nsec, seen, e->bytes, e->lines,
                              e->records, e->others, e->bad, e->first_bad, e->cut, e->tail, (int64_t)e->chain, (int64_t)e->sum};
    enum { N = sizeof values / sizeof *values };
    int rc = sqlite3_prepare_v2(x->db, "REPLACE INTO file(id, dev, ino, size, mtime, ctime, seen, bytes, lines, records, others, bad,"
                                       " first_bad, cut, tail, chain, sum, path, hash)"
                                       " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", -1, &q, NULL);
    for (int i = 0; i < N && rc == SQLITE_OK; i++) rc = sqlite3_bind_int64(q, i + 1, values[i]);
    if (rc == SQLITE_OK) rc = sqlite3_bind_text(q, N + 1, x->file->path, -1, SQLITE_STATIC);
    if (rc == SQLITE_OK) rc = sqlite3_bind_text(q, N + 2, e->hash, -1, SQLITE_STATIC);
    if (rc == SQLITE_OK) rc = sqlite3_step(q);
    sqlite3_finalize(q);
    return judge(rc, x->err);
}

/* A number that no file had before: another process may remember the number of a file that went. */
static dkv_ix takeNumber(indexer *x) {
    sqlite3_stmt *s = NULL;
    int rc = sqlite3_prepare_v2(x->db, "INSERT INTO file(path) VALUES (?)", -1, &s, NULL);
    if (rc == SQLITE_OK) rc = sqlite3_bind_text(s, 1, x->file->path, -1, SQLITE_STATIC);
    if (rc == SQLITE_OK) rc = sqlite3_step(s);
    sqlite3_finalize(s);
    x->e.id = sqlite3_last_insert_rowid(x->db);
    return judge(rc, x->err);
}

/* In one transaction: all of the file as it is now, or nothing. */
static dkv_ix update(indexer *x, FILE *f, const struct stat *s, int64_t seen, long *read) {
    dkv_ix ix = run(x->db, "BEGIN IMMEDIATE", x->err);
    if (ix) return ix;
    ix = findEntry(x); /* again: it is ours alone from here on */
    if (!ix && !x->known) ix = takeNumber(x);
    if (!ix) ix = prepareInsert(x);
    if (!ix) ix = readNew(x, f, read);
    if (!ix) ix = writeEntry(x, s, seen);
    sqlite3_finalize(x->insert);
    if (!ix) ix = run(x->db, "COMMIT", x->err);
    if (ix) sqlite3_exec(x->db, "ROLLBACK", NULL, NULL, NULL);
    return ix;
}

static bool isUnchanged(const entry *e, const struct stat *s) {
    int64_t mtime = s->st_mtim.tv_sec * INT64_C(1000000000) + s->st_mtim.tv_nsec;
    int64_t changed = s->st_ctim.tv_sec * INT64_C(1000000000) + s->st_ctim.tv_nsec;
    return e->dev == (int64_t)s->st_dev && e->ino == (int64_t)s->st_ino && e->size == s->st_size && e->mtime == mtime &&
           e->ctime == changed && changed < e->seen - TICK;
}

dkv_ix dkv_indexFile(sqlite3 *db, dkv_history_file *f, long *read, dkv_err *err) {
    indexer x = {.db = db, .file = f, .err = err};
    struct timespec now;
    struct stat s;
    FILE *in = NULL;
    dkv_ix ix;
    clock_gettime(CLOCK_REALTIME, &now);
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &s) != 0 || !(in = fdopen(fd, "r"))) {
        dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", f->shown, strerror(errno));
        if (fd >= 0) close(fd);
        return DKV_IX_FAILED;
    }
    if (!S_ISREG(s.st_mode)) {
        dkv_fail(err, DKV_EUSER, "'%s' is no file of records", f->shown);
        fclose(in);
        return DKV_IX_FAILED;
    }
    ix = run(db, "BEGIN", err); /* what is checked is of one moment */
    if (!ix) ix = findEntry(&x);
    if (!ix && x.known) ix = checkRows(&x);
    sqlite3_exec(db, "COMMIT", NULL, NULL, NULL);
    if (!ix && !(x.known && isUnchanged(&x.e, &s)))
        ix = update(&x, in, &s, now.tv_sec * INT64_C(1000000000) + now.tv_nsec, read);
    fclose(in);
    f->id = x.e.id;
    f->records = (long)x.e.records;
    f->others = (long)x.e.others;
    f->bad = (long)x.e.bad;
    f->first_bad = (long)x.e.first_bad;
    f->cut = x.e.cut != 0;
    return ix;
}

dkv_ix dkv_forgetGone(sqlite3 *db, dkv_err *err) {
    sqlite3_stmt *s = NULL, *records = NULL, *file = NULL;
    int rc = sqlite3_prepare_v2(db, "SELECT id, path FROM file", -1, &s, NULL);
    if (rc == SQLITE_OK) rc = sqlite3_prepare_v2(db, "DELETE FROM record WHERE file=?", -1, &records, NULL);
    if (rc == SQLITE_OK) rc = sqlite3_prepare_v2(db, "DELETE FROM file WHERE id=?", -1, &file, NULL);
    while (rc == SQLITE_OK && (rc = sqlite3_step(s)) == SQLITE_ROW) {
        rc = SQLITE_OK;
        if (access(textAt(s, 1), F_OK) == 0 || errno != ENOENT) continue;
        sqlite3_bind_int64(records, 1, sqlite3_column_int64(s, 0));
        sqlite3_bind_int64(file, 1, sqlite3_column_int64(s, 0));
        rc = sqlite3_step(records);
        if (rc == SQLITE_DONE) rc = sqlite3_step(file);
        if (rc == SQLITE_DONE) rc = SQLITE_OK;
        sqlite3_reset(records);
        sqlite3_reset(file);
    }
    sqlite3_finalize(s);
    sqlite3_finalize(records);
    sqlite3_finalize(file);
    return judge(rc, err);
}
