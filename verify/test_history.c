/* The history: whatever happens to its index, the rows are those of the records; what stands in records breaks nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <math.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "history.h"
#include "history_print.h"

#define RECORD(line, kernel, status, commit, time, rms)                                                              \
    "{\"line\":\"" line "\",\"kernel\":\"" kernel "\",\"status\":\"" status "\",\"why\":\"\",\"seconds\":0.5,"        \
    "\"device\":\"a device\",\"commit\":\"" commit "\",\"started\":\"" time "\",\"tensors\":{\"dK\":{"                \
    "\"max_bound_ratio\":0.5,\"twin_rms\":" rms ",\"twin_gain\":\"-inf\",\"bad\":0,\"regions\":{\"prompt\":{"         \
    "\"max_bound_ratio\":0.25}}}}}\n"
#define ONE RECORD("shape=1", "emu", "PASSED", "aaa111", "2026-01-02T00:00:00Z", "1.5")
#define TWO RECORD("shape=2 mask=full", "emu", "FAILED", "bbb222", "2026-01-03T00:00:00Z", "\"nan\"")
#define THREE RECORD("shape=3", "cuda", "BIASED", "aaa111", "2026-01-01T00:00:00Z", "1.25")

static char folder[] = "/tmp/dualkv-history-XXXXXX";

static const char *in(const char *name) {
    static char paths[4][200];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void put(const char *name, const char *mode, const char *text) {
    FILE *f = fopen(in(name), mode);
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static int clean(void **state) {
    (void)state;
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s; mkdir %s", folder, folder);
    return system(command);
}

static int takeCsv(const dkv_history_row *row, void *arg) {
    dkv_writeCsvRow(arg, row);
    return 0;
}

/* All rows as text, malloc'ed; *h stays open. */
static char *rowsOf(dkv_history *h, const dkv_history_filter *filter) {
    static const dkv_history_filter all;
    char *text = NULL;
    size_t n = 0;
    dkv_err err = {0};
    FILE *f = open_memstream(&text, &n);
    if (dkv_eachRow(h, filter ? filter : &all, takeCsv, f, &err)) fail_msg("%s", err.text);
    fclose(f);
    return text;
}

static int countRows(dkv_history *h, dkv_history_filter filter) {
    char *text = rowsOf(h, &filter);
    int n = 0;
    for (const char *s = text; (s = strstr(s, "\r\n")); s += 2) n++;
    free(text);
    return n;
}

static char *readAll(const char *index, bool rebuild, long *read, char note[300]) {
    const char *words[] = {folder};
    dkv_history h;
    dkv_err err = {0};
    if (dkv_openHistory(words, 1, index, rebuild, &h, &err)) fail_msg("%s", err.text);
    char *text = rowsOf(&h, NULL);
    if (read) *read = h.read;
    if (note) strcpy(note, h.n_notes ? h.notes[0] : "");
    dkv_closeHistory(&h);
    return text;
}

/* The rows through the folder's index, and those read into memory: the same. `read`: lines that the index had to take. */
static void mustAgree(long read, const char *note_has) {
    char note[300], memory[300];
    long lines, all;
    char *index = readAll(NULL, false, &lines, note);
    char *plain = readAll("/proc/none.sqlite", false, &all, memory);
    assert_non_null(strstr(memory, "cannot be written"));
    assert_string_equal(index, plain);
    if (read >= 0) assert_int_equal(lines, read);
    if (note_has[0]) assert_non_null(strstr(note, note_has));
    else assert_string_equal(note, "");
    free(index);
    free(plain);
}

static int countFiles(void) {
    sqlite3 *db;
    sqlite3_stmt *s;
    assert_int_equal(sqlite3_open(in(DKV_HISTORY_FILE), &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, "SELECT count(*) FROM file", -1, &s, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(s), SQLITE_ROW);
    int n = sqlite3_column_int(s, 0);
    sqlite3_finalize(s);
    sqlite3_close(db);
    return n;
}

static void the_index_follows_the_files(void **state) {
    (void)state;
    const struct timespec old[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    put("a.jsonl", "w", ONE TWO);
    mkdir(in("sub"), 0777);
    put("sub/b.jsonl", "w", THREE);
    put("notes.txt", "w", "not a record\n");
    mustAgree(3, "");
    mustAgree(0, "");
    put("a.jsonl", "a", THREE); /* appended: only that is read */
    mustAgree(1, "");
    put("a.jsonl", "a", "{\"line\":\"shape=4\",\"ker"); /* in the middle of a line */
    mustAgree(-1, "");
    put("a.jsonl", "a", "nel\":\"emu\",\"status\":\"PASSED\"}\n");
    mustAgree(-1, "");
    put("a.jsonl", "a", "{\"line\":\"shape=5\",\"kernel\":\"emu\",\"status\":\"PASSED\"}"); /* whole, without its end */
    mustAgree(-1, "");
    put("a.jsonl", "a", "\n" ONE);
    mustAgree(-1, "");
    put("a.jsonl", "w", TWO ONE); /* shorter */
    mustAgree(2, "");
    put("a.jsonl", "w", ONE TWO); /* as long, other bytes, and a time that says nothing */
    utimensat(AT_FDCWD, in("a.jsonl"), old, 0);
    mustAgree(2, "");
    assert_int_equal(countFiles(), 2);
    unlink(in("sub/b.jsonl"));
    mustAgree(0, "");
    assert_int_equal(countFiles(), 1); /* what is gone is forgotten */
    put("c.jsonl", "w", ""); /* nothing in it */
    mustAgree(0, "");
    char *before = readAll(NULL, false, NULL, NULL), *after = readAll(NULL, true, NULL, NULL);
    assert_string_equal(before, after);
    free(before);
    free(after);
}

/* A byte here and there, cut short, not a database at all: made anew, the same rows. */
static void a_broken_index_is_made_anew(void **state) {
    (void)state;
    char note[300];
    for (int i = 0; i < 40; i++) put("a.jsonl", i ? "a" : "w", ONE TWO THREE);
    char *want = readAll(NULL, true, NULL, NULL);
    struct stat s;
    const char *path = in(DKV_HISTORY_FILE);
    int anew = 0;
    assert_int_equal(stat(path, &s), 0);
    char *sound = malloc((size_t)s.st_size);
    FILE *f = fopen(path, "r");
    assert_int_equal(fread(sound, 1, (size_t)s.st_size, f), s.st_size);
    fclose(f);
    for (long at = 0; at < s.st_size + 3; at += at < 120 ? 1 : 509) {
        f = fopen(path, "w");
        size_t n = at < s.st_size ? (size_t)s.st_size : at == s.st_size ? 0 : (size_t)s.st_size / 2;
        fwrite(sound, 1, n, f);
        if (n > (size_t)at) {
            fseek(f, at, SEEK_SET);
            fputc(sound[at] ^ 0x14, f);
        }
        fclose(f);
        /* the version and the application are our word, and a later schema is refused */
        if ((at >= 60 && at < 64) || (at >= 68 && at < 72)) continue;
        char *got = readAll(NULL, false, NULL, note);
        if (strcmp(got, want) != 0) fail_msg("byte %ld: other rows", at);
        anew += strstr(note, "broken") != NULL;
        free(got);
    }
    assert_true(anew > 40); /* free bytes of pages may say anything */
    put(DKV_HISTORY_FILE, "w", "{\"not\":\"a database\"}\n");
    char *got = readAll(NULL, false, NULL, note);
    assert_string_equal(got, want);
    assert_non_null(strstr(note, "is broken: made anew"));
    free(got);
    free(sound);
    free(want);
}

static void execute(const char *path, const char *sql) {
    sqlite3 *db;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
}

/* A value that was changed by SQL, a row that is missing, one too many: found by the sums. */
static void changed_rows_are_found(void **state) {
    (void)state;
    static const char *const changes[] = {"UPDATE record SET status='PASSED' WHERE number=2",
                                          "UPDATE record SET rms_dK=1.5000000001 WHERE number=1",
                                          "DELETE FROM record WHERE number=3",
                                          "INSERT INTO record SELECT * FROM record WHERE 0; UPDATE record SET number=9 WHERE number=3",
                                          "UPDATE file SET lines=7",
                                          "UPDATE file SET chain=chain+1",
                                          "ALTER TABLE record RENAME COLUMN why TO wherefore",
                                          "DROP TABLE record"};
    put("a.jsonl", "w", ONE TWO THREE);
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        mustAgree(-1, "");
        execute(in(DKV_HISTORY_FILE), changes[i]);
        mustAgree(3, "is broken: made anew");
    }
}

static void schemas_are_told_apart(void **state) {
    (void)state;
    const char *words[] = {folder};
    char note[300];
    dkv_history h;
    dkv_err err = {0};
    put("a.jsonl", "w", ONE TWO);
    mustAgree(2, "");
    execute(in(DKV_HISTORY_FILE), "PRAGMA user_version=0");
    free(readAll(NULL, false, NULL, note));
    assert_non_null(strstr(note, "earlier schema: made anew"));
    execute(in(DKV_HISTORY_FILE), "PRAGMA user_version=2");
    assert_int_equal(dkv_openHistory(words, 1, NULL, false, &h, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "has schema 2, which is later than this program's 1"));
    dkv_closeHistory(&h);
    execute(in("other.sqlite"), "CREATE TABLE t(x); PRAGMA application_id=7");
    assert_int_equal(dkv_openHistory(words, 1, in("other.sqlite"), true, &h, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "another program"));
    dkv_closeHistory(&h);
    execute(in("other.sqlite"), "INSERT INTO t VALUES (1)"); /* is still there */
}

static void an_index_in_use_is_left_alone(void **state) {
    (void)state;
    sqlite3 *db;
    char note[300];
    put("a.jsonl", "w", ONE TWO);
    char *want = readAll(NULL, false, NULL, NULL);
    assert_int_equal(sqlite3_open(in(DKV_HISTORY_FILE), &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "BEGIN EXCLUSIVE", NULL, NULL, NULL), SQLITE_OK);
    char *got = readAll(NULL, false, NULL, note);
    assert_string_equal(got, want);
    assert_non_null(strstr(note, "is in use: the records are read without it"));
    sqlite3_close(db);
    free(got);
    free(want);
}

static void filters_are_no_sql(void **state) {
    (void)state;
    const char *words[] = {folder};
    dkv_history h;
    dkv_err err = {0};
    put("a.jsonl", "w", ONE TWO THREE RECORD("shape=4", "x' OR 1=1 --", "PASSED", "%", "2026-01-04T00:00:00Z", "2"));
    assert_int_equal(dkv_openHistory(words, 1, NULL, false, &h, &err), 0);
    assert_int_equal(countRows(&h, (dkv_history_filter){0}), 4);
    assert_int_equal(countRows(&h, (dkv_history_filter){.kernel = "emu"}), 2);
    assert_int_equal(countRows(&h, (dkv_history_filter){.kernel = "x' OR 1=1 --"}), 1);
    assert_int_equal(countRows(&h, (dkv_history_filter){.kernel = "em"}), 0);
    assert_int_equal(countRows(&h, (dkv_history_filter){.commit = "aaa"}), 2);
    assert_int_equal(countRows(&h, (dkv_history_filter){.commit = "%"}), 1);
    assert_int_equal(countRows(&h, (dkv_history_filter){.line = "mask=full"}), 1);
    assert_int_equal(countRows(&h, (dkv_history_filter){.line = "mask=%"}), 0);
    assert_int_equal(countRows(&h, (dkv_history_filter){.device = "device"}), 4);
    assert_int_equal(countRows(&h, (dkv_history_filter){.since = "2026-01-03"}), 2);
    assert_int_equal(countRows(&h, (dkv_history_filter){.statuses = 1u << DKV_ST_FAILED | 1u << DKV_ST_BIASED}), 2);
    assert_int_equal(countRows(&h, (dkv_history_filter){.tensor = 1 + DKV_DK}), 4);
    assert_int_equal(countRows(&h, (dkv_history_filter){.tensor = 1 + DKV_O}), 0);
    assert_int_equal(countRows(&h, (dkv_history_filter){.kernel = "emu", .statuses = 1u << DKV_ST_PASSED, .line = "shape=1", .commit = "a",
                                                        .since = "2026", .device = "a", .tensor = 1 + DKV_DK}), 1);
    dkv_closeHistory(&h);
}

static void hostile_lines_are_counted(void **state) {
    (void)state;
    const char *words[] = {folder};
    dkv_history h;
    dkv_err err = {0};
    char *deep = malloc(300001);
    memset(deep, '[', 300000);
    deep[300000] = 0;
    put("a.jsonl", "w", ONE "not json\n\n[1,2]\n{\"line\":7,\"kernel\":\"emu\",\"status\":\"PASSED\"}\n"
                            "{\"line\":\"shape=1\",\"kernel\":\"emu\",\"status\":\"SPLENDID\"}\n"
                            "{\"line\":\"shape=-1\",\"kernel\":\"emu\",\"status\":\"PASSED\"}\n"
                            "{\"line\":\"shape=1\",\"kernel\":\"\xff\x1b[31m<b>\",\"status\":\"PASSED\",\"seconds\":1e999,"
                            "\"tensors\":{\"dK\":[],\"O\":{\"max_bound_ratio\":\"nan\"}}}\n"
                            "{\"fault\":\"D1\",\"found\":true}\n{\"clean_cases\":7}\n{\"accepted\":1}\n");
    put("a.jsonl", "a", deep);
    put("a.jsonl", "a", "\n" ONE);
    FILE *f = fopen(in("a.jsonl"), "a");
    fwrite("{\"line\":\0}\n", 1, 11, f);
    fclose(f);
    assert_int_equal(dkv_openHistory(words, 1, NULL, false, &h, &err), 0);
    assert_int_equal(h.files[0].records, 3);
    assert_int_equal(h.files[0].others, 3);
    assert_int_equal(h.files[0].bad, 7);
    assert_int_equal(h.files[0].first_bad, 2);
    char *text = rowsOf(&h, NULL);
    assert_non_null(strstr(text, "?[31m<b>"));
    assert_null(strchr(text, '\x1b'));
    assert_non_null(strstr(text, ",nan,"));
    free(text);
    dkv_closeHistory(&h);
    mustAgree(-1, "");
    free(deep);
}

static void words_that_are_no_records(void **state) {
    (void)state;
    const char *pipe = in("p"), *words[] = {pipe};
    dkv_history h;
    dkv_err err = {0};
    mkfifo(pipe, 0600);
    assert_int_equal(dkv_openHistory(words, 1, NULL, false, &h, &err), DKV_EUSER); /* and does not wait */
    dkv_closeHistory(&h);
    words[0] = "/dev/zero";
    assert_int_equal(dkv_openHistory(words, 1, NULL, false, &h, &err), DKV_EUSER);
    dkv_closeHistory(&h);
    words[0] = "/nowhere";
    assert_int_equal(dkv_openHistory(words, 1, NULL, false, &h, &err), DKV_EUSER);
    dkv_closeHistory(&h);
    words[0] = folder; /* no *.jsonl */
    assert_int_equal(dkv_openHistory(words, 1, NULL, false, &h, &err), DKV_EUSER);
    dkv_closeHistory(&h);
    put("a.jsonl", "w", ONE);
    assert_int_equal(dkv_openHistory(words, 1, in("a.jsonl"), false, &h, &err), DKV_EUSER); /* records are no index */
    dkv_closeHistory(&h);
    char *rows = readAll(NULL, false, NULL, NULL);
    assert_non_null(strstr(rows, "shape=1"));
    free(rows);
}

static void cells_are_text_to_a_spreadsheet(void **state) {
    (void)state;
    static const struct {
        const char *text, *want;
    } rows[] = {{"", ","}, {"plain", "plain,"}, {"a,b", "\"a,b\","}, {"say \"x\"", "\"say \"\"x\"\"\","},
                {"two\nlines", "\"two\nlines\","}, {"=1+1", "\"'=1+1\","}, {"+x", "\"'+x\","}, {"-2", "\"'-2\","},
                {"@SUM(A1)", "\"'@SUM(A1)\","}, {"\t=1", "\"'\t=1\","}, {"a=b", "a=b,"}, {"\x1b[0m", "?[0m,"},
                {"\xc3\x28", "?(,"}, {"\xed\xa0\x80", "???,"}, {"caf\xc3\xa9", "caf\xc3\xa9,"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *text = NULL;
        size_t n = 0;
        FILE *f = open_memstream(&text, &n);
        dkv_writeCell(f, rows[i].text, false);
        fclose(f);
        assert_string_equal(text, rows[i].want);
        free(text);
    }
    static const struct {
        bool there;
        double x;
        const char *want;
    } numbers[] = {{false, 1, ","}, {true, 0.1, "0.1,"}, {true, -2.5, "-2.5,"}, {true, 1.0 / 3, "0.3333333333333333,"},
                   {true, NAN, "nan,"}, {true, -INFINITY, "'-inf,"}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char *text = NULL;
        size_t n = 0;
        FILE *f = open_memstream(&text, &n);
        dkv_writeNumberCell(f, numbers[i].there, numbers[i].x, false);
        fclose(f);
        assert_string_equal(text, numbers[i].want);
        free(text);
    }
}

static int takeTrend(const dkv_history_row *row, void *arg) { return dkv_addTrend(arg, row); }

/* By time, not by place; medians; NaN is the worst there is. */
static void trends_go_by_time(void **state) {
    (void)state;
    const char *words[] = {folder};
    static const dkv_history_filter all;
    dkv_history h;
    dkv_err err = {0};
    char *text = NULL;
    size_t n = 0;
    put("a.jsonl", "w", RECORD("shape=1", "emu", "PASSED", "ccc", "2026-03-01T00:00:00Z", "3")
                        RECORD("shape=1", "emu", "PASSED", "bbb", "2026-02-01T00:00:00Z", "\"nan\"")
                        RECORD("shape=1", "emu", "PASSED", "aaa", "2026-01-01T00:00:00Z", "2")
                        RECORD("shape=2", "emu", "PASSED", "aaa", "2026-01-01T00:00:00Z", "1")
                        RECORD("shape=3", "emu", "PASSED", "aaa", "2026-01-01T00:00:00Z", "1.25"));
    assert_int_equal(dkv_openHistory(words, 1, NULL, false, &h, &err), 0);
    dkv_trend t = {.number = dkv_parseTrend("rms_z:dK")};
    assert_int_equal(t.number, dkv_findNumber("rms_dK"));
    assert_int_equal(dkv_parseTrend("rms:dX"), -1);
    assert_int_equal(dkv_parseTrend("rms"), -1);
    assert_true(dkv_parseTrend("seconds") >= 0);
    assert_int_equal(dkv_eachRow(&h, &all, takeTrend, &t, &err), 0);
    dkv_finishTrend(&t);
    FILE *f = open_memstream(&text, &n);
    dkv_writeTrendCsv(&t, f);
    dkv_writeTrendTable(&t, f);
    fclose(f);
    assert_non_null(strstr(text, "rms_dK,emu,aaa,,2026-01-01T00:00:00Z,3,1,1.25,2\r\n"
                                 "rms_dK,emu,bbb,,2026-02-01T00:00:00Z,1,inf,inf,inf\r\n"
                                 "rms_dK,emu,ccc,,2026-03-01T00:00:00Z,1,3,3,3\r\n"));
    assert_non_null(strstr(text, "rms_dK of emu  ▁!█"));
    free(text);
    dkv_freeTrend(&t);
    dkv_closeHistory(&h);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(the_index_follows_the_files, clean),
        cmocka_unit_test_setup(a_broken_index_is_made_anew, clean),
        cmocka_unit_test_setup(changed_rows_are_found, clean),
        cmocka_unit_test_setup(schemas_are_told_apart, clean),
        cmocka_unit_test_setup(an_index_in_use_is_left_alone, clean),
        cmocka_unit_test_setup(filters_are_no_sql, clean),
        cmocka_unit_test_setup(hostile_lines_are_counted, clean),
        cmocka_unit_test_setup(words_that_are_no_records, clean),
        cmocka_unit_test(cells_are_text_to_a_spreadsheet),
        cmocka_unit_test_setup(trends_go_by_time, clean),
    };
    if (!mkdtemp(folder)) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    char command[100];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) ? 1 : failed;
}
