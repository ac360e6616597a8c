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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_log_is_not_replaced),
    };
    if (makeDir()) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
