/* The program from outside: exit codes, one-line errors that write nothing, records, interruption. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test_program.h"

static void user_errors_are_one_line(void **state) {
    (void)state;
    static const struct {
        const char *words, *says;
    } rows[] = {
        {"chekc", "did you mean 'check'"},
        {"check --kernal emu", "did you mean '--kernel'"},
        {"check shape=3", "--kernel"},
        {"check shape=3 --kernel emo", "did you mean 'emu'"},
        {"check shape=3 --kernel emu+bm=0", "bm"},
        {"check shape=3 --kernel emu+what=0", "what"},
        {"replay shape=3 --kernel", "SPEC is missing"},
        {"check shape=3 --kernel ./nope.so", "cannot read"},
        {"check shape=3 --kernel $B/testkernels/hostile_crash.so", "Aborted"},
        {"check shap=3 --kernel emu", "shap"},
        {"check shape=3 shape=3+ --kernel emu", "shape"},
        {"check 'shape=3 shape=4' --kernel emu", "shape"},
        {"check shape=3 dim=0 --kernel emu", "dim"},
        {"check shape=3 dim=257 --kernel emu", "dim"},
        {"check shape=3 heads=3:2 --kernel emu", "heads"},
        {"check shape=-3 --kernel emu", "shape"},
        {"check 'shape=3+(4' --kernel emu", "shape"},
        {"check shape=99999999999999999999 --kernel emu", "shape"},
        {"check shape=3+4@9 --kernel emu", "@"},
        {"check shape=3+4 mask=bidir --kernel emu", "admissible"},
        {"check shape=30000000000+4 --kernel emu", "GiB"},
        {"check shape=3 fill=nope --kernel emu", "nope"},
        {"check shape=3 fill=recorded:nope --kernel emu", "nope"},
        {"check nosuite --kernel emu", "nosuite"},
        {"check shape=3 --kernel emu --jobs 0", "--jobs"},
        {"check shape=3 --kernel emu --jobs 1.5", "--jobs"},
        {"check shape=3 --kernel emu --timeout x", "--timeout"},
        {"check shape=3 --kernel emu --budget 2", "--budget"},
        {"check shape=3 --kernel emu --quiet=1", "takes no value"},
        {"check shape=3 --kernel emu --quiet --verbose", "together"},
        {"check shape=3 --kernel emu --json /nowhere/at/all", "--json"},
        {"check shape=3 --kernel emu --json $D/nodir/", "no folder"},
        {"check shape=3 --kernel emu --json $D/a.jsonl --json $D/r.jsonl", "given twice"},
        {"check shape=3 --kernel emu --jobs=1 -j 2", "given twice"},
        {"check shape=3 --kernel emu --waivers /dev/zero", "longer than"},
        {"check shape=3 --kernel emu --waivers /", "cannot be read"},
        {"report /dev/zero", "longer than"},
        {"check shape=3 --kernel emu --markdown x", "--markdown"},
        {"replay --kernel emu", "which line"},
        {"list kernel", "did you mean 'kernels'"},
        {"list", "kernels"},
        {"list devise", "did you mean 'device'"},
        {"check shape=3 --kernel emu --convention nope", "unknown convention 'nope'"},
        {"check shape=3 --kernel emu --convention spda", "did you mean 'sdpa'"},
        {"check shape=3 --kernel emu --convention a+b", "unknown convention 'a+b'"},
        {"check shape=3 --kernel emu --convention sdpa", "--convention sdpa: no kernel here is a function of a Python file"},
        {"fuzz --kernel emu --cases 3 --convention packed", "no kernel here is a function"},
        {"shrink shape=3 --kernel emu --arithmetic nope", "'nope' is none of auto"},
        {"bench --kernel ref", "which lines"},
        {"bench shape=3", "--kernel"},
        {"report", "which records"},
        {"report $D/none.jsonl", "cannot read"},
        {"version now", "now"},
        {"selftest now", "now"},
        {"help chekc", "did you mean"},
        {"check shape=3 --kernel attached:999", "999 is no open socket"},
        {"init $D/class.py:class", "a word of Python itself"},
        {"init $D/long.py:a123456789012345678901234567890123456789012345678901234567890123456789", "longer than 63"},
        {"init $D/nodir/k.py:f", "No such file or directory"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char words[512];
        bool json = strncmp(rows[i].words, "check", 5) == 0 && !strstr(rows[i].words, "--json");
        snprintf(words, sizeof words, "%s%s", rows[i].words, json ? " --json $D/r.jsonl" : "");
        mustExit(2, words);
        size_t n = strlen(trouble);
        if (strncmp(trouble, "dualkv: ", 8) || n < 10 || strchr(trouble, '\n') != trouble + n - 1 ||
            output[0])
            fail_msg("dualkv %s: not one line on stderr alone:\n%s%s", words, trouble, output);
        if (!strstr(trouble, rows[i].says))
            fail_msg("dualkv %s: does not say '%s': %s", words, rows[i].says, trouble);
        char path[128];
        snprintf(path, sizeof path, "%s/r.jsonl", dir);
        assert_true(access(path, F_OK) < 0); /* nothing written */
    }
}

static void statuses_give_exits(void **state) {
    (void)state;
    mustExit(0, "check shape=5+2x3 dim=8 --kernel emu");
    mustExit(0, "check shape=5+2x3 dim=8 'shape=3 dim=4' --kernel emu --kernel ref --quiet");
    assert_string_equal(output, "");
    mustExit(1, "check shape=5+2x3 dim=8 shape=4 --kernel broken+how=crash");
    assert_non_null(strstr(output, "2 CRASHED"));
    assert_non_null(strstr(output, "replay: dualkv replay 'shape=5+2x3 dim=8' --kernel broken+how=crash"));
    mustExit(1, "check shape=5+2x3 dim=8 --kernel broken+how=zeros --kernel emu");
    assert_non_null(strstr(output, "1 PASSED, 1 FAILED"));
    mustExit(1, "check shape=5+2x3 dim=8 --kernel broken+how=hang --timeout 0.3");
    mustExit(3, "check shape=5+2x3 dim=8 --kernel broken+how=refuse");
    mustSay(3, "cp $B/dualkv $D/alone && $D/alone check shape=3 --kernel cuda", "libdualkv_cuda.so is not beside");
    mustSay(3, "$D/alone check shape=3 --kernel emu --oracle cuda", "libdualkv_cuda.so is not beside");
    mustExit(1, "replay shape=5+2x3 dim=8 --kernel broken+how=zeros --bisect");
    mustExit(125, "replay shape=5+2x3 dim=8 --kernel broken+how=refuse --bisect");
    mustExit(128, "replay shape=-5 --kernel emu --bisect");
    mustExit(128, "replay shape=5 --kernel emo --bisect");
    mustExit(0, "replay shape=5+2x3 dim=8 --kernel emu --bisect");
}

/* What a profile that a kernel is held to found, shrink finds again, and its line says under which. */
/* A race that shows in the 53rd run needs as many again. */
static void repeats_are_in_the_replay_line(void **state) {
    (void)state;
    mustExit(1, "check shape=20+7 --kernel emu+fault=Y23 --repeats 100 --json $D/y.jsonl");
    assert_non_null(strstr(output, "NONDETERMINISTIC"));
    assert_non_null(strstr(output, "replay: dualkv replay 'shape=20+7' --kernel emu+fault=Y23 --repeats 100\n"));
    mustExit(0, "check shape=20+7 --kernel emu+fault=Y23 --json $D/y.jsonl");
    readAll("y.jsonl", output, sizeof output);
    assert_null(strstr(output, "--repeats"));
}

/* Each option that a verdict depends on is in the command that is printed, and that command comes to the same. */
static void a_replay_line_reproduces_its_verdict(void **state) {
    (void)state;
    static const struct {
        const char *words, *options, *says;
    } rows[] = {
        {"check shape=5+2x3 dim=8 --kernel broken+how=hang --timeout 0.3", " --timeout 0.3", "1 TIMEOUT"},
        {"check shape=20+7 --kernel emu+fault=Y22 --level 0.5 --budget 1e-3", " --level 0.5", "1 IMPRECISE"},
        {"check shape=20+7 --kernel emu+fault=Y22 --budget 0.5", " --budget 0.5", "1 IMPRECISE"},
        {"check shape=5+2x3 dim=8 --kernel broken+how=zeros --oracle cpu --repeats 0", " --repeats 0 --oracle cpu", "1 FAILED"},
        {"fuzz --cases 1 --kernel broken+how=zeros --oracle cpu --timeout 60 --budget 1e-5", " --timeout 60 --budget 1e-5 --oracle cpu",
         "1 FAILED"},
        {"check shape=5+2x3 dim=8 --kernel broken+how=zeros --timeout 120 --budget 1e-4 --repeats 1", "", "1 FAILED"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char again[1024];
        mustExit(1, rows[i].words);
        const char *at = strstr(output, "replay: dualkv ");
        if (!at) fail_msg("%s: no replay line: %s", rows[i].words, output);
        at += strlen("replay: dualkv ");
        snprintf(again, sizeof again, "%.*s", (int)strcspn(at, "\n"), at);
        const char *kernel = strstr(again, " --kernel ") + strlen(" --kernel ");
        assert_string_equal(kernel + strcspn(kernel, " "), rows[i].options);
        const char *shrink = strstr(output, "shrink: dualkv "); /* takes neither --budget nor --oracle */
        if (shrink) assert_non_null(strstr(shrink, "zeros --timeout 60\n"));
        mustExit(1, again);
        if (!strstr(output, rows[i].says)) fail_msg("dualkv %s: not %s: %s", again, rows[i].says, output);
    }
}

static void shrink_takes_an_arithmetic(void **state) {
    (void)state;
    mustExit(3, "shrink shape=20+7 heads=2:1 --kernel $B/testkernels/plain.so:plain");
    mustExit(0, "shrink shape=20+7 heads=2:1 --kernel $B/testkernels/plain.so:plain --arithmetic eager");
    assert_non_null(strstr(output, "IMPRECISE "));
    assert_non_null(strstr(output, "plain.so:plain --arithmetic eager\n"));
}

static void an_empty_selection_is_no_pass(void **state) {
    (void)state;
    char path[128];
    snprintf(path, sizeof path, "%s/none.txt", dir);
    FILE *f = fopen(path, "w");
    fputs("# nothing here\n\n", f);
    fclose(f);
    mustExit(3, "check $D/none.txt --kernel emu --json $D/r.jsonl");
    snprintf(path, sizeof path, "%s/r.jsonl", dir);
    assert_true(access(path, F_OK) < 0);
}

static long countLines(const char *text) {
    long n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static void records_replay_and_report(void **state) {
    (void)state;
    char records[1 << 16];
    mustExit(1, "check shape=5+2x3 dim=8 'shape=7 dim=4 mask=full' shape=6+1 dim=8 layout=padded "
                "--kernel broken+how=slack --json $D/a.jsonl --jobs 3");
    readAll("a.jsonl", records, sizeof records);
    assert_int_equal(countLines(records), 3);
    assert_true(strstr(records, "5+2x3") < strstr(records, "mask=full")); /* in the order of the cases */
    assert_non_null(strstr(records, "\"status\":\"OUT_OF_BOUNDS\""));
    mustExit(1, "replay $D/a.jsonl");
    assert_non_null(strstr(output, "2 FAILED, 1 OUT_OF_BOUNDS"));
    mustExit(0, "replay $D/a.jsonl --kernel emu");
    mustExit(0, "report $D/a.jsonl");
    assert_non_null(strstr(output, "causal"));
    mustExit(0, "report --markdown $D/a.md $D/a.jsonl");
    readAll("a.md", records, sizeof records);
    assert_non_null(strstr(records, "**OUT_OF_BOUNDS**"));
    mustExit(2, "report --html $D/a.jsonl $D/a.jsonl");
    mustExit(2, "report --html $D/x --markdown $D/x $D/a.jsonl");
    mustExit(2, "report --markdown - $D/a.jsonl");
    mustExit(0, "report --html $D/a.html $D/a.jsonl"); /* which are still there */
    readAll("a.html", records, sizeof records);
    assert_non_null(strstr(records, "<strong>Not equivalent.</strong> A defect in 3 of 3 cases that ran"));
    mustExit(0, "check shape=5+2x3 dim=8 --kernel emu --json -");
    assert_int_equal(output[0], '{');
    assert_int_equal(countLines(output), 1);
}

/* A kernel that writes into whatever it finds open must not reach the records. */
static void records_go_over_nothing_that_is_read(void **state) {
    (void)state;
    static char before[8192], after[8192];
    static const char *const rows[] = {"replay $D/read.jsonl --json $D/read.jsonl", "check $D/read.jsonl --kernel emu --json $D/read.jsonl",
                                       "check shape=3 --kernel emu --waivers $D/read.jsonl --json $D//read.jsonl",
                                       "check shape=3 --kernel $D/k.so:plain --json $D/k.so",
                                       "power --kernel emu --faults D1 --json $D/p --markdown $D/p"};
    mustExit(0, "check shape=3 shape=4 --kernel emu --json $D/read.jsonl");
    assert_int_equal(runShell("cp $B/testkernels/plain.so $D/k.so"), 0);
    readAll("read.jsonl", before, sizeof before);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mustExit(2, rows[i]);
        if (!strstr(trouble, "named for something else")) fail_msg("dualkv %s: %s", rows[i], trouble);
    }
    readAll("read.jsonl", after, sizeof after);
    assert_string_equal(before, after);
}

static void records_are_out_of_reach(void **state) {
    (void)state;
    static char records[1 << 16];
    mustExit(1, "check shape=5+2x3 shape=4 shape=3 shape=2 --kernel broken+how=garbage --jobs 1 "
                "--json $D/g.jsonl 3</dev/null 4</dev/null");
    readAll("g.jsonl", records, sizeof records);
    assert_int_equal(countLines(records), 4);
    assert_null(strstr(records, "not a message"));
}

/* With stdout and stderr closed, nothing else may take their place: records hold records, and the exit says that the
 * words could not be written. */
static void closed_descriptors_stay_out_of_records(void **state) {
    (void)state;
    char command[600], record[32];
    snprintf(command, sizeof command,
             "%s/dualkv check 'shape=3+2 dim=4' --kernel emu --json %s/closed.jsonl >&- 2>&- <&-", build(), dir);
    assert_int_equal(WEXITSTATUS(system(command)), 3);
    readAll("closed.jsonl", output, sizeof output);
    assert_int_equal(countLines(output), 1);
    snprintf(record, sizeof record, "%.15s", output);
    assert_string_equal(record, "{\"line\":\"shape=");
}

/* Where OpenBLAS's threads cannot get their memory, the program still ends. */
static void short_memory_ends(void **state) {
    (void)state;
    char program[400];
    snprintf(program, sizeof program, "ulimit -v 150000; timeout 20 %s/dualkv list masks >/dev/null 2>&1", build());
    assert_int_not_equal(WEXITSTATUS(system(program)), 124);
}

/* After SIGINT the finished records are there, the summary is printed, and the exit is 130. */
static void keepsRecordsOn(int signal_number) {
    char path[128], program[256], json[128];
    snprintf(path, sizeof path, "%s/many.txt", dir);
    snprintf(program, sizeof program, "%s/dualkv", build());
    snprintf(json, sizeof json, "%s/i.jsonl", dir);
    FILE *f = fopen(path, "w");
    for (int i = 1; i <= 20000; i++) fprintf(f, "shape=3+2 dim=4 seed=%d\n", i);
    fclose(f);
    pid_t child = fork();
    if (child == 0) {
        char out[128];
        snprintf(out, sizeof out, "%s/out", dir);
        signal(signal_number, SIG_DFL); /* also where the tests themselves run under nohup */
        if (!freopen(out, "w", stdout)) _exit(99);
        execl(program, "dualkv", "check", path, "--kernel", "emu", "--json", json, (char *)NULL);
        _exit(99);
    }
    output[0] = 0;
    for (int i = 0; i < 600 && countLines(output) < 5; i++) {
        nanosleep(&(struct timespec){0, 50000000}, NULL);
        readAll("i.jsonl", output, sizeof output);
    }
    int status = 0;
    kill(child, signal_number);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 128 + signal_number);
    readAll("i.jsonl", output, sizeof output);
    long n = countLines(output);
    assert_true(n >= 5 && n < 20000);
    assert_int_equal(output[strlen(output) - 1], '\n');
    readAll("out", output, sizeof output);
    assert_non_null(strstr(output, "interrupted, "));
    unlink(json);
}

/* An oracle that would compute for a minute holds nothing up: the other case's record is kept, the exit is 130 (also for git
 * bisect, which stops then), the worker is gone. (Where the machine is so slow that the oracle has not begun, the same.) */
static void an_oracle_holds_up_no_interrupt(void **state) {
    (void)state;
    static const char *const ways[] = {"check", "replay --bisect", "gate --no-fuzz --out $D/held"};
    for (int i = 0; i < 3; i++) {
        char command[800];
        snprintf(command, sizeof command,
                 "rm -f $D/h.jsonl; $B/dualkv %s shape=3 shape=40000 --jobs 2 --kernel broken+how=nothing --json $D/h.jsonl & p=$!; "
                 "for i in $(seq 300); do [ -s $D/h.jsonl ] && break; sleep 0.1; done; sleep 1; w=$(cat /proc/$p/task/*/children); "
                 "kill -INT $p; timeout 40 tail --pid=$p -f /dev/null || { kill -9 $p; exit 99; }; wait $p; c=$?; "
                 "for i in $w; do [ -e /proc/$i ] && grep -q worker /proc/$i/cmdline && exit 98; done; "
                 "[ $(wc -l <$D/h.jsonl) = 1 ] || exit 97; exit $c",
                 ways[i]);
        mustSay(130, command, "interrupted");
    }
}

/* By Ctrl-C, and by a terminal that goes away. */
static void an_interrupt_keeps_the_records(void **state) {
    (void)state;
    keepsRecordsOn(SIGINT);
    keepsRecordsOn(SIGHUP);
}

/* Disk full, as far as a program can tell: one line, and no half of a file. */
static void init_leaves_no_half(void **state) {
    (void)state;
    char command[512], path[128];
    snprintf(path, sizeof path, "%s/half.py", dir);
    snprintf(command, sizeof command, "ulimit -f 1; exec %s/dualkv init %s:f%s >/dev/null 2>&1", build(), path,
             "23456789012345678901234567890123456789012345678901234567890123");
    int status = system(command);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 3);
    assert_true(access(path, F_OK) < 0);
}

static void everything_can_be_listed(void **state) {
    (void)state;
    static const char *const lists[] = {"kernels", "masks", "fills", "checks", "faults", "keys", "statuses", "arithmetics"};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        char words[64];
        snprintf(words, sizeof words, "list %s", lists[i]);
        mustExit(0, words);
        assert_true(countLines(output) >= 4);
    }
    assert_int_equal(countLines(output), 15);
    assert_non_null(strstr(output, "\ndelta-copies "));
    mustExit(0, "list suites");
    mustExit(0, "help --all");
    mustExit(0, "help check");
    assert_non_null(strstr(output, "--kernel SPEC"));
    mustExit(0, "check --help");
    mustExit(0, "version");
    assert_non_null(strstr(output, "OpenBLAS"));
    mustExit(0, "");
}

static void bench_writes_its_keys(void **state) {
    (void)state;
    static const char *const keys[] = {"\"ms_fwd\"",     "\"ms_bwd\"",       "\"tflops_fwd\"",
                                       "\"tflops_bwd\"", "\"gflops_dgemm\"", "\"ratio_fwd\"",
                                       "\"ratio_bwd\"",  "\"peak_bytes\""};
    mustExit(0, "bench shape=20+2x9 dim=16 --kernel emu --kernel ref --json $D/b.jsonl");
    readAll("b.jsonl", output, sizeof output);
    assert_int_equal(countLines(output), 2);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) assert_non_null(strstr(output, keys[i]));
    mustExit(3, "bench shape=20+2x9 dim=16 --kernel broken+how=refuse");
    mustExit(3, "bench shape=20+2x9 dim=16 --kernel broken+how=crash");
}

int main(void) {
    if (makeDir()) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(user_errors_are_one_line),
        cmocka_unit_test(closed_descriptors_stay_out_of_records), cmocka_unit_test(short_memory_ends),       cmocka_unit_test(statuses_give_exits),
        cmocka_unit_test(shrink_takes_an_arithmetic), cmocka_unit_test(repeats_are_in_the_replay_line),
        cmocka_unit_test(a_replay_line_reproduces_its_verdict),
        cmocka_unit_test(an_oracle_holds_up_no_interrupt),
        cmocka_unit_test(an_empty_selection_is_no_pass),  cmocka_unit_test(records_replay_and_report),
        cmocka_unit_test(records_go_over_nothing_that_is_read),
        cmocka_unit_test(records_are_out_of_reach),
        cmocka_unit_test(an_interrupt_keeps_the_records), cmocka_unit_test(everything_can_be_listed),
        cmocka_unit_test(bench_writes_its_keys),          cmocka_unit_test(init_leaves_no_half),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
