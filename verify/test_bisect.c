/* bisect from outside: synthetic repositories of 200 commits on one kernel, some of which break it. The right commit, few
 * builds, the same answer after an interrupt; the user's repository as it was, whatever happens. */
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

#include "test_history.h"

/* ---- commits ---- */

/* What halves best, 100 or 101, says nothing: the one is flaky, the other does not build. */
static const int broken[] = {20, 41, 61, 62, 63, 88, 99, 101, 160, 161, 177, 190, 0};
static const history c_history = {"c", false, 200, 137, 58, 100, broken};
static const history python_history = {"py", true, 200, 137, 58, 100, broken};

#define C_WORDS  "--repo $D/c --good good --kernel ./kernel.so:plain --build " BUILD " --case " CASE
#define PY_WORDS "--repo $D/py --good good --kernel attention.py:attention --case " CASE

/* Starts it, ends it by a signal once `rows` results are cached. */
static void interrupt(const char *words, const char *cache, int rows, int with) {
    char command[2000];
    snprintf(command, sizeof command, "$B/dualkv bisect %s & pid=$!; for i in $(seq 1500); do [ $(wc -l <$D/%s 2>/dev/null || echo 0) -ge %d ] && break; "
             "sleep 0.02; done; kill -%d $pid; wait $pid", words, cache, rows, with);
    int code = shell(command);
    if (code != 128 + with) fail_msg("%s: exit %d\n%s%s", command, code, output, trouble);
}

/* All that is asked of a history, the kernel whichever. */
static void mustBeBisected(const history *h, const char *words) {
    char all[2000], undo[200];
    makeHistory(h);
    char *was = stateOf(h->name);
    snprintf(all, sizeof all, "%s --bad bad --cache $D/a.cache --json $D/a.jsonl", words);
    mustBisect(0, all);
    mustFind("a.jsonl", h->fault, 12);
    if (!strstr(output, "1 flaky") && !strstr(output, "could not be built")) fail_msg("nothing was skipped:\n%s", output);
    mustHold(output, "1 file changed");
    mustBeAs(h->name, was);
    mustBisect(0, all); /* everything is known */
    mustFind("a.jsonl", h->fault, 0);

    snprintf(all, sizeof all, "%s --bad bad --cache $D/b.cache --json $D/b.jsonl", words);
    interrupt(all, "b.cache", 5, SIGINT);
    mustHold(trouble, "goes on from here");
    mustBeAs(h->name, was);
    interrupt(all, "b.cache", 9, SIGKILL);
    mustShell("printf '{\"key\":\"0123' >>$D/b.cache"); /* a row that was being written */
    mustBisect(0, all);
    mustFind("b.jsonl", h->fault, 9);
    mustBeAs(h->name, was);

    snprintf(all, sizeof all, "%s --bad main~80 --cache $D/a.cache --json $D/m.jsonl --metric rms --plot $D/m.svg", words);
    mustBisect(0, all);
    mustFind("m.jsonl", h->drift, 12);
    mustHold(output, ".rms 0.");
    mustBeAs(h->name, was);
    snprintf(all, sizeof all, "%s --bad main~80 --cache $D/a.cache", words); /* which fails nothing */
    mustBisect(3, all);
    mustHold(trouble, "fails no case");
    mustBeAs(h->name, was);
    free(was);
    snprintf(undo, sizeof undo, "rm -f $D/?.cache $D/?.jsonl $D/luck");
    mustShell(undo);
}

static void a_c_kernel_is_bisected(void **state) {
    (void)state;
    mustBeBisected(&c_history, C_WORDS);
}

/* A drift that fails nothing, since the kernel declares nothing, does where all are held to what the good end does. */
static void all_commits_are_held_to_the_good_ends_arithmetic(void **state) {
    (void)state;
    static const char words[] = "--repo $D/c --good good --bad main~80 --kernel ./kernel.so:plain --build " BUILD
                                " --case 'shape=150+70,50 heads=2:1 dim=16' --repeats 1 --cache $D/h.cache --json $D/h.jsonl";
    char all[2000];
    mustBisect(3, words);
    mustHold(trouble, "fails no case");
    snprintf(all, sizeof all, "%s --arithmetic auto", words);
    mustBisect(0, all);
    mustFind("h.jsonl", c_history.drift, 12);
    mustHold(output, "all are held to fp32 (bf16)");
    snprintf(all, sizeof all, "%s --arithmetic fp32", words);
    mustBisect(0, all);
    mustFind("h.jsonl", c_history.drift, 12);
    mustHold(output, " --kernel ./kernel.so:plain --arithmetic fp32\n"); /* the replay line */
    snprintf(all, sizeof all, "%s --arithmetic nope", words);
    mustBisect(2, all);
    mustHold(trouble, "'nope' is none of auto");
}

static void a_python_kernel_is_bisected(void **state) {
    (void)state;
#ifdef __SANITIZE_ADDRESS__ /* the library cannot be loaded into a Python that is built without it */
    skip();
#endif
    setenv("DUALKV_PYTHON", "/usr/bin/python3", 1);
    mustBeBisected(&python_history, PY_WORDS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_c_kernel_is_bisected), cmocka_unit_test(all_commits_are_held_to_the_good_ends_arithmetic), cmocka_unit_test(a_python_kernel_is_bisected),
    };
    if (startHistories()) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
