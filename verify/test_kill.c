/* kill -9 at moments that nobody chose, while records are written and while they are indexed: what was told is in the
 * file, and the index gives the rows of the files. Four times; DUALKV_KILLS=50 (make test-long) as often as that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "test_program.h"

enum { TOLD_MAX = 4096 };

static int countKills(void) {
    const char *n = getenv("DUALKV_KILLS");
    return n && atoi(n) > 0 ? atoi(n) : 4;
}

static uint64_t drawn = 88172645463325252u;

/* A moment of up to `most` seconds, longer ones more rarely. */
static void waitUpTo(double most) {
    drawn ^= drawn << 13;
    drawn ^= drawn >> 7;
    drawn ^= drawn << 17;
    double u = (double)(drawn >> 11) * 0x1p-53, seconds = most * u * u;
    struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

/* Starts the program; what it says comes out of *from. */
static pid_t start(const char *const *words, int *from) {
    int ends[2];
    char program[300];
    snprintf(program, sizeof program, "%s/dualkv", build());
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int nowhere = open("/dev/null", O_RDWR);
        dup2(nowhere, 0);
        dup2(ends[1], 1);
        dup2(nowhere, 2);
        close(ends[0]);
        close(ends[1]);
        execv(program, (char *const *)words);
        _exit(127);
    }
    close(ends[1]);
    *from = ends[0];
    return pid;
}

/* Whole lines of `from` that begin with a status: the problem lines, to told. Reads until its end. */
static int readTold(int from, char **told) {
    static char text[1 << 20];
    size_t n = 0;
    ssize_t got;
    int count = 0;
    while (n < sizeof text - 1 && (got = read(from, text + n, sizeof text - 1 - n)) > 0) n += (size_t)got;
    text[n] = 0;
    for (char *s = text, *end; (end = strchr(s, '\n')); s = end + 1) {
        *end = 0;
        char *line = strstr(s, "  shape=");
        if (s[0] < 'A' || s[0] > 'Z' || !line || count == TOLD_MAX) continue;
        char *tail = strstr(line + 2, "  ");
        if (tail) *tail = 0;
        told[count++] = line + 2;
    }
    return count;
}

/* Every told line has its record, whole; what follows the last whole line is the only thing that may be cut. */
static void mustHold(const char *path, char **told, int n) {
    static char *lines[2 * TOLD_MAX];
    int held = 0, found = 0;
    char *row = NULL;
    size_t room = 0;
    ssize_t len;
    FILE *f = fopen(path, "r");
    while (f && (len = getline(&row, &room, f)) > 0) {
        if (row[len - 1] != '\n') break;
        cJSON *o = cJSON_Parse(row);
        const char *line = cJSON_GetStringValue(cJSON_GetObjectItem(o, "line"));
        if (!line) fail_msg("%s: a line that ends is no record: %.200s", path, row);
        assert_true(held < 2 * TOLD_MAX);
        lines[held++] = strdup(line);
        cJSON_Delete(o);
    }
    for (int i = 0; i < n; i++) {
        int k = 0;
        while (k < held && strcmp(lines[k], told[i]) != 0) k++;
        if (k == held) fail_msg("%s: told, and not in the records: %s", path, told[i]);
        found++;
    }
    assert_int_equal(found, n);
    for (int i = 0; i < held; i++) free(lines[i]);
    free(row);
    if (f) fclose(f);
}

static void killWriter(int i, long *told_in_all) {
    static char *told[TOLD_MAX];
    char path[120];
    int from;
    snprintf(path, sizeof path, "%s/%c%d.jsonl", dir, i % 2 ? 'f' : 'c', i);
    const char *const check[] = {"dualkv", "check", "smoke", "--kernel", "emu", "-v", "--jobs", "2", "--json", path, NULL};
    const char *const fuzz[] = {"dualkv", "fuzz", "--kernel", "emu", "--cases", "100", "-v", "--jobs", "2", "--json", path, NULL};
    pid_t pid = start(i % 2 ? fuzz : check, &from);
    struct pollfd first = {.fd = from, .events = POLLIN};
    if (i % 4 != 3) poll(&first, 1, 60000); /* else at a moment from the start on, with nothing told perhaps */
    waitUpTo(2.5);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    int n = readTold(from, told);
    close(from);
    mustHold(path, told, n);
    *told_in_all += n;
}

/* Ends before, in the middle, after; twice in a row at times. Then an index that goes on, one made anew and one in memory. */
static void killIndexer(double whole) {
    char index[120];
    int from;
    snprintf(index, sizeof index, "%s/i.sqlite", dir);
    const char *const words[] = {"dualkv", "history", dir, "--index", index, "--csv", "/dev/null", NULL};
    pid_t pid = start(words, &from);
    waitUpTo(1.5 * whole);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(from);
}

static void mustAgree(void) {
    mustSay(0, "$B/dualkv history $D --index $D/i.sqlite --csv $D/1.csv && "
               "$B/dualkv history $D --index $D/i.sqlite --rebuild --csv $D/2.csv && "
               "$B/dualkv history $D --index /proc/none.sqlite --csv $D/3.csv && "
               "cmp $D/1.csv $D/2.csv && cmp $D/2.csv $D/3.csv && wc -l $D/1.csv", "1.csv");
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void nothing_told_is_lost(void **state) {
    (void)state;
    int kills = countKills();
    long told = 0, records;
    for (int i = 0; i < kills; i++) killWriter(i, &told);
    assert_int_equal(runShell("for i in 1 2 3 4 5 6 7 8; do cat $D/[cf]*.jsonl | grep '}$'; done >$D/more.jsonl"), 0);
    double from = seconds();
    mustSay(0, "$B/dualkv history $D --index $D/i.sqlite --csv /dev/null", "");
    double whole = seconds() - from;
    for (int i = 0; i < kills; i++) {
        if (i % 3 == 0) assert_int_equal(runShell("rm -f $D/i.sqlite $D/i.sqlite-journal"), 0);
        if (i % 3 == 1) assert_int_equal(runShell("head -40 $D/more.jsonl >$D/x && cat $D/x >>$D/more.jsonl"), 0);
        killIndexer(whole);
        if (kills <= 8 || i % 5 == 4) mustAgree();
    }
    mustAgree();
    assert_int_equal(sscanf(output, "%ld", &records), 1);
    assert_true(told > 0 && records > told);
    print_message("%d kills of writers: %ld cases told, all in the records; %d of indexers: %ld rows each time\n", kills, told, kills,
                  records - 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(nothing_told_is_lost)};
    if (makeDir()) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
