/* The command: what it does to files that are there, how it goes on, what it says. */
#include "../verify/test_program.h"

#define FUZZ "$B/dualkv fuzz --kernel emu --jobs 2 "

/* Nothing that is there is lost: not the log of a run, nor anything else. */
static void a_log_is_not_replaced(void **state) {
    (void)state;
    static const char *const rows[] = {FUZZ "--cases 3 --json $D/f.jsonl", "$B/dualkv check shape=3 --kernel emu --json $D/f.jsonl",
                                       "$B/dualkv gate shape=3 --kernel emu --no-fuzz --out $D/gate --json $D/f.jsonl"};
    mustSay(0, FUZZ "--cases 3 --json $D/f.jsonl && cp $D/f.jsonl $D/copy", "3 PASSED");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mustSay(2, rows[i], "--resume");
        mustSay(0, "cmp $D/f.jsonl $D/copy", "");
    }
    mustSay(2, "echo mine > $D/notes; " FUZZ "--cases 3 --json $D/notes", "is not empty");
    mustSay(0, "cat $D/notes", "mine\n");
    mustSay(0, FUZZ "--cases 4 --resume --json $D/f.jsonl", "4 PASSED");
    mustSay(0, "wc -l < $D/f.jsonl", "4\n");
    mustSay(0, "for i in 1 2; do $B/dualkv check shape=3 --kernel emu --json $D/c.jsonl || exit; done; wc -l < $D/c.jsonl", "1\n");
    mustSay(0, "for i in 1 2; do $B/dualkv gate shape=3 --kernel emu --cases 2 --out $D/gate || exit; done; wc -l < $D/gate/records.jsonl", "3\n");
    mustSay(0, FUZZ "--cases 2 --json /dev/null; " FUZZ "--cases 2 --json - | wc -l", "2\n");
}

/* A log is of one run: of one kernel, seed, profile, and of the options that its verdicts depend on. */
static void other_options_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *options, *says;
    } rows[] = {{"--level 1e-9", "f.jsonl:1: is of a run with another --level: the default; here it is 1e-9"},
                {"--budget 1e-3", "another --budget: 0.01; here it is 0.001"},
                {"", "another --budget: 0.01; here it is the default"},
                {"--budget 0.01 --arithmetic auto", "another --arithmetic: the default; here it is auto"},
                {"--budget 0.01 --repeats 3", "another --repeats: the default; here it is 3"},
                {"--budget 0.01 --timeout 7", "another --timeout: the default; here it is 7"},
                {"--budget 0.01 --oracle cpu", "another --oracle: the default; here it is cpu"},
                {"--budget 0.01 --seed 2", "seed 1, profile quick; this run is of emu, 2, quick"},
                {"--budget 0.01 --profile deep", "this run is of emu, 1, deep"},
                {"--budget 0.01 --forward", "this run is of emu, 1, quick, forward"}};
    char command[400];
    mustSay(0, "rm -f $D/f.jsonl; " FUZZ "--cases 3 --budget 0.01 --json $D/f.jsonl && cp $D/f.jsonl $D/copy", "3 PASSED");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(command, sizeof command, FUZZ "--cases 5 --resume --json $D/f.jsonl %s", rows[i].options);
        mustSay(2, command, rows[i].says);
        assert_ptr_equal(strchr(trouble, '\n'), trouble + strlen(trouble) - 1); /* one line */
        mustSay(0, "cmp $D/f.jsonl $D/copy", "");
    }
    mustSay(2, "sed 's/\"commit\":\"/&x/' $D/copy > $D/g.jsonl; " FUZZ "--cases 5 --budget 0.01 --resume --json $D/g.jsonl",
            "of this program at commit x");
    mustSay(0, "$B/dualkv fuzz --kernel emu --cases 5 --budget 0.01 --resume --jobs 1 --shard 1/1 --json $D/f.jsonl", "5 PASSED");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_log_is_not_replaced),
        cmocka_unit_test(other_options_are_refused),
    };
    if (makeDir()) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
