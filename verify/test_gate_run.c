/* The gate from outside: where its files go, what becomes of them when a run is cut short or a disk is full, waivers,
 * annotations, times. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#include "test_program.h"

#define LINE "shape=33+5 dim=32 dtype=fp16"
#define GATE "$B/dualkv gate $D/lines --no-fuzz "

static char text[1 << 20];

static void putFile(const char *name, const char *content) {
    char path[200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(content, f);
    fclose(f);
}

static bool isThere(const char *name) {
    char path[200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return access(path, F_OK) == 0;
}

static void mustHold(const char *name, const char *says) {
    readAll(name, text, sizeof text);
    if (!strstr(text, says)) fail_msg("%s does not say '%s':\n%.3000s", name, says, text);
}

static void mustBeJunit(const char *name) {
    char command[300];
    for (int i = 0; i < 2; i++) {
        snprintf(command, sizeof command, "xmllint --nonet --noout --schema ${DUALKV_DATA:-data}/schemas/%s.xsd $D/%s",
                 i ? "junit-ant" : "junit-10", name);
        if (runShell(command)) fail_msg("%s", trouble);
    }
}

static void each_output_has_its_place(void **state) {
    (void)state;
    putFile("lines", LINE "\n");
    mustSay(0, GATE "--kernel emu --out $D/one", "compared with nothing");
    static const char *const files[] = {"records.jsonl", "junit.xml", "summary.md", "report.html"};
    char name[100];
    for (int i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "one/%s", files[i]);
        assert_true(isThere(name));
    }
    mustBeJunit("one/junit.xml");
    mustHold("one/junit.xml", "<property name=\"arithmetic-declared-1\" value=\"fp32 accumulation");
    mustHold("one/summary.md", "- arithmetic declared in 1 case: fp32 accumulation");
    mustHold("one/report.html", "<!DOCTYPE html>");
    mustSay(0, GATE "--kernel emu --out $D/two --json $D/a.jsonl --junit $D/a.xml --markdown $D/a.md --html $D/a.html "
               "--history $D/past", "a.html");
    assert_true(isThere("a.jsonl") && isThere("a.xml") && isThere("a.md") && isThere("a.html"));
    assert_int_equal(runShell("[ -z \"$(ls $D/two)\" ] && cmp $D/past/*.jsonl $D/a.jsonl && ls $D/past | grep -c jsonl$"), 0);
    assert_string_equal(output, "1\n");
    mustSay(2, GATE "--kernel emu --out $D/one --junit $D/one/summary.md", "named for two things");
    mustSay(2, GATE "--kernel emu --accepted $D/one/./records.jsonl --out $D/one --accept", "not a file that --accept wrote");
    mustSay(2, GATE "--kernel emu --out $D/lines", "--out: cannot make the folder");
    mustSay(2, GATE "--kernel emu --out $D/no/where", "--out: cannot make the folder");
    mustSay(2, GATE "--kernel emu --out $D/one --html $D/one", "--html: '");
    assert_true(isThere("one/summary.md")); /* a bad option drops nothing */
}

/* A full disk: one line, exit 3 (a defect that was found counts more), and the other files are there. */
static void a_full_disk_is_said(void **state) {
    (void)state;
    static const char *const options[] = {"--junit", "--markdown", "--html", "--json"};
    char command[400];
    for (int i = 0; i < 4; i++) {
        runShell("rm -rf $D/full");
        snprintf(command, sizeof command, GATE "--kernel emu --out $D/full %s /dev/full", options[i]);
        mustSay(3, command, "cannot write '/dev/full': No space left on device");
        assert_true(strchr(trouble, '\n') == trouble + strlen(trouble) - 1);
        assert_true(isThere("full/summary.md") == (i != 1));
        mustSay(0, "true", "");
        if (i != 1) mustHold("full/summary.md", i == 3 ? "# dualkv gate: NOTHING LEARNED" : "# dualkv gate: PASSED");
    }
    mustSay(1, GATE "--kernel emu+fault=D1 --out $D/full --markdown /dev/full", "cannot write '/dev/full'");
    assert_non_null(strstr(output, "FAILED: 1 defect in 1 case;"));
    mustSay(3, GATE "--kernel emu --out $D/full --accepted $D/full/acc --accept --json /dev/full", "nothing was accepted");
    assert_false(isThere("full/acc"));
    mustSay(3, GATE "--kernel emu --out $D/full >/dev/full", "cannot write to stdout");
    mustSay(3, "ulimit -f 1; " GATE "--kernel emu --out $D/full", "cannot write");
}

static void putManyLines(void) {
    static char many[1 << 20];
    size_t at = 0;
    for (int i = 1; i <= 20000; i++) at += (size_t)snprintf(many + at, sizeof many - at, "shape=3+2 dim=4 seed=%d\n", i);
    putFile("many", many);
}

/* Starts a gate over many lines, waits for some records, sends the signal; the exit code, or 128 + signal. */
static int cutShort(int signal_number) {
    char program[200], words[4][100];
    snprintf(program, sizeof program, "%s/dualkv", build());
    snprintf(words[0], sizeof words[0], "%s/many", dir);
    snprintf(words[1], sizeof words[1], "%s/cut", dir);
    snprintf(words[2], sizeof words[2], "%s/cut/acc", dir);
    pid_t child = fork();
    if (child == 0) {
        signal(signal_number, SIG_DFL);
        if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) _exit(99);
        execl(program, "dualkv", "gate", words[0], "--kernel", "emu", "--out", words[1], "--accepted", words[2], "--accept",
              (char *)NULL);
        _exit(99);
    }
    long n = 0;
    for (int i = 0; i < 600 && n < 5; i++) {
        nanosleep(&(struct timespec){0, 50000000}, NULL);
        readAll("cut/records.jsonl", text, sizeof text);
        n = 0;
        for (char *c = text; (c = strchr(c, '\n')); c++) n++;
    }
    int status = 0;
    kill(child, signal_number);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void a_run_cut_short_leaves_nothing_false(void **state) {
    (void)state;
    putManyLines();
    mustSay(0, GATE "--kernel emu --out $D/cut", "PASSED");
    assert_int_equal(cutShort(SIGINT), 130);
    mustHold("cut/summary.md", "# dualkv gate: INTERRUPTED");
    mustHold("cut/summary.md", "the rest did not run");
    mustHold("cut/report.html", "<!DOCTYPE html>");
    mustBeJunit("cut/junit.xml");
    assert_false(isThere("cut/acc"));
    assert_int_equal(runShell("[ $(wc -l <$D/cut/records.jsonl) = $(grep -c '<testcase.*shape' $D/cut/junit.xml) ]"), 0);
    runShell("rm $D/cut/records.jsonl");
    assert_int_equal(cutShort(SIGKILL), 128 + SIGKILL);
    assert_false(isThere("cut/summary.md") || isThere("cut/report.html") || isThere("cut/junit.xml") || isThere("cut/acc"));
    mustSay(0, "$B/dualkv report $D/cut/records.jsonl", "causal"); /* at most the last line is skipped */
}

static void waivers_excuse_until_their_day(void **state) {
    (void)state;
    putFile("waivers", LINE " | emu+fault=D1 | known, *soon* mended | 2099-01-31\nshape=9 | emu | gone | 2099-01-31\n");
    mustSay(0, GATE "--kernel emu --out $D/w --accepted $D/w/acc --accept", "accepted");
    mustSay(1, GATE "--kernel emu+fault=D1 --out $D/w --accepted $D/w/acc", "FINDING (status)");
    mustSay(0, GATE "--kernel emu+fault=D1 --out $D/w --accepted $D/w/acc --new-bits --waivers $D/waivers --annotations",
            "note (waived): " LINE ": was PASSED and is now FAILED, which is waived: known, *soon* mended");
    assert_non_null(strstr(output, "waived: " LINE ": FAILED, known, *soon* mended (until 2099-01-31)"));
    assert_null(strstr(output, "::error"));
    mustHold("w/summary.md", "known, \\*soon\\* mended (until 2099-01-31)");
    assert_null(strstr(text, "## Defects"));
    mustHold("w/records.jsonl", "\"waiver\":{\"reason\":\"known, *soon* mended\"");
    mustHold("w/junit.xml", "waived: known, *soon* mended");
    mustSay(0, "$B/dualkv gate shape=9 --no-fuzz --kernel emu --out $D/w --waivers $D/waivers", "needs no waiver any more: shape=9: PASSED, gone");
    putFile("waivers", LINE " | emu | old | 2020-01-31\n");
    mustSay(1, GATE "--kernel emu --out $D/w --accepted $D/w/acc --waivers $D/waivers --annotations",
            "::error title=dualkv gate%3A a waiver is over::" LINE ": old");
    mustHold("w/summary.md", "FINDING (a waiver is over)");
    mustBeJunit("w/junit.xml");
}

static void annotations_are_one_line_each(void **state) {
    (void)state;
    mustSay(0, GATE "--kernel emu --out $D/n --accepted $D/n/acc --accept", "accepted");
    runShell("sed -i '2s/PASSED/FAILED/' $D/n/acc");
    mustSay(2, GATE "--kernel emu --out $D/n --accepted $D/n/acc --annotations", "/n/acc,line=2,title=dualkv gate::was edited");
    assert_int_equal(strncmp(output, "::error file=/tmp/", 18), 0);
    mustSay(2, GATE "--kernel emo --annotations", "unknown kernel 'emo'");
#ifndef __SANITIZE_ADDRESS__ /* a Python that is not built with it cannot load the library */
    putFile("k,1:%.py", "CONVENTION = 'packed'\ndef f(q, k, v, problem):\n    raise ValueError('two, 100%\\nlines')\n");
    if (runShell("/usr/bin/python3 -c 'import numpy'")) return;
    runShell("DUALKV_PYTHON=/usr/bin/python3 " GATE "--forward --kernel \"$D/k,1:%.py:f\" --out $D/n --annotations");
    assert_null(strstr(output, "::error file=/tmp/k,")); /* such a path is no spec at all, or is escaped */
    putFile("k.py", "CONVENTION = 'packed'\ndef f(q, k, v, problem):\n    raise ValueError('two, 100%\\nlines')\n");
    mustSay(1, "DUALKV_PYTHON=/usr/bin/python3 " GATE "--forward --kernel $D/k.py:f --out $D/n --annotations", "::error file=");
    const char *at = strstr(output, "::error file=");
    assert_non_null(strstr(at, "/k.py,title=dualkv gate%3A NOT_RUN::" LINE " grad=off: "));
    assert_non_null(strstr(at, "100%25"));
#endif
}

/* At most ten errors, and a summary that a comment can hold, however much is wrong and however long the lines are. */
static void much_wrong_is_still_short(void **state) {
    (void)state;
    static char many[1 << 20];
    size_t at = 0;
    for (int i = 0; i < 60; i++) {
        at += (size_t)snprintf(many + at, sizeof many - at, "dim=2 grad=off seed=%d shape=1+", i + 1);
        for (int k = 0; k < 500; k++) at += (size_t)snprintf(many + at, sizeof many - at, "%d,", 1 + k % 2);
        at += (size_t)snprintf(many + at, sizeof many - at, "1\n");
    }
    putFile("long", many);
    mustSay(0, "$B/dualkv gate $D/long --no-fuzz --kernel emu --out $D/l --accepted $D/l/acc --accept", "accepted");
    mustSay(1, "$B/dualkv gate $D/long --no-fuzz --kernel broken+how=zeros --out $D/l --accepted $D/l/acc --annotations", "FAILED");
    int errors = 0;
    for (char *c = output; (c = strstr(c, "\n::error ")); c++) errors++;
    assert_int_equal(errors, 10);
    int told = 0;
    for (char *c = output; (c = strstr(c, "\n  replay: ")); c++) told++;
    assert_int_equal(told, 20);
    assert_non_null(strstr(output, "more of this reason are counted, not told"));
    readAll("l/summary.md", text, sizeof text);
    if (!(strlen(text) < 60000 && strstr(text, "## What was checked") && strstr(text, "more: see the records")))
        fail_msg("%zu bytes: %.2000s", strlen(text), text);
    mustBeJunit("l/junit.xml");
}

static void one_run_a_folder(void **state) {
    (void)state;
    mustSay(2, "mkdir $D/shared; flock $D/shared $B/dualkv gate shape=3 --kernel emu --time 1s --out $D/shared", "another gate is writing into");
    mustSay(0, "$B/dualkv gate shape=3 --kernel emu --time 1s --out $D/shared", "records");
}

int main(void) {
    if (makeDir()) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_run_a_folder),
        cmocka_unit_test(each_output_has_its_place),
        cmocka_unit_test(a_full_disk_is_said),
        cmocka_unit_test(a_run_cut_short_leaves_nothing_false),
        cmocka_unit_test(waivers_excuse_until_their_day),
        cmocka_unit_test(annotations_are_one_line_each),
        cmocka_unit_test(much_wrong_is_still_short),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
