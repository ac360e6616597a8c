/* The gate over the history of a repository: a kernel of twelve commits, two of them bad, each judged against what was accepted
 * of the last good one; then what else must not be merged. DUALKV_GATE_FULL: on suite ci and the corpus (make test-long). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdbool.h>
#include <unistd.h>

#include "test_program.h"

#define FIRST "verify/testkernels/first_commit.c"
#define GIT "git -C $D/repo -c user.name=test -c user.email=test@example.invalid -c commit.gpgsign=false -c core.hooksPath=/dev/null "

typedef struct edit {
    const char *message;
    const char *pairs[3][2]; /* what is replaced by what; none: undoes the edit before */
    int exit;
    const char *says; /* in the summary */
} edit;

static const edit commits[] = {
    {"A kernel", {{"", ""}}, 0, "compared with nothing"},
    {"A comment", {{"static uint64_t launched;", "static uint64_t launched; /* so far */"}}, 0, "nothing worse than the accepted"},
    {"The head of K, once a score",
     {{"load(&l->k, key, h / (p->hq / p->hkv), c)", "load(&l->k, key, kvh, c)"},
      {"    float sum = 0;\n", "    float sum = 0;\n    int kvh = h / (p->hq / p->hkv);\n"}},
     0, "nothing worse"},
    {"The prompt's last key", {{"len = range->len;", "len = range->len - (g + 1 < s->range_count);"}}, 1,
     "lines have a worse status; first shape=33+5,2x9 dim=16 seed=2: was PASSED and is now FAILED: "},
    {"Undo", {{NULL}}, 0, "nothing worse"},
    {"Full masks",
     {{"    default: return", "    case DUALKV_FULL: return 1;\n    default: return"},
      {"p->mask != DUALKV_CAUSAL", "p->mask != DUALKV_CAUSAL && p->mask != DUALKV_FULL"}},
     0, "note (better): shape=40+2x21 dim=16 mask=full: was UNSUPPORTED and is now PASSED"},
    {"A better name", {{"static void unattend(", "static void backwardRow("}, {"(back) unattend(", "(back) backwardRow("}}, 0,
     "nothing worse"},
    {"P is rounded already", {{"float ds = rounded(w *", "float ds = rounded(low *"}}, 1, "was PASSED and is now IMPRECISE: "},
    {"Undo", {{NULL}}, 0, "nothing worse"},
    {"Says what it is", {{"\"a row at a time\"", "\"a row and a key range at a time\""}}, 0, "nothing worse"},
    {"Windows",
     {{"    case DUALKV_FULL:",
       "    case DUALKV_WINDOW: return j <= i && (j > i - p->window || j < p->window_sinks);\n    case DUALKV_FULL:"},
      {"p->mask != DUALKV_FULL", "p->mask != DUALKV_FULL && p->mask != DUALKV_WINDOW"}},
     0, "note (better): shape=70 dim=16 mask=window:16: was UNSUPPORTED and is now PASSED"},
    {"Refusals say more", {{"\"bf16 only\"", "\"no type but bf16\""}}, 0, "nothing worse"},
};
enum { N_COMMITS = sizeof commits / sizeof commits[0] };

static const edit others[] = {
    {"a new refusal", {{" && p->mask != DUALKV_WINDOW", ""}}, 1,
     "FINDING (refused): shape=70 dim=16 mask=window:16: was PASSED and is now refused: mask"},
    {"a silent fallback", {{"launched++;", ""}}, 1, "was PASSED and is now NOT\\_RUN: "},
    {"nothing is counted", {{", .launches = launches", ""}}, 1, "FINDING (less to check): less can be checked in 4 lines"},
    {"an output less", {{".alignment = 2,", ".alignment = 2, .absent = 1 << 1,"}}, 1, "LSE is not given any more"},
    {"a looser declaration", {{"ldexp(1, -22)", "ldexp(1, -14)"}}, 1, "error of exp 2.384e-07 -> 6.104e-05"},
    {"other bits", {{"for (int c = 0; c < p->dqk; c++) sum +=", "for (int c = p->dqk - 1; c >= 0; c--) sum +="}}, 1,
     "the bits changed where repeatable ones are promised"},
};

static char source[1 << 16], before[1 << 16], page[1 << 20];

static void apply(const edit *e) {
    static char other[1 << 16];
    if (!e->pairs[0][0]) {
        strcpy(source, before);
        return;
    }
    strcpy(before, source);
    for (int i = 0; i < 3 && e->pairs[i][0]; i++) {
        char *at = strstr(source, e->pairs[i][0]);
        if (!at) fail_msg("%s: no '%s' in the source", e->message, e->pairs[i][0]);
        snprintf(other, sizeof other, "%.*s%s%s", (int)(at - source), source, e->pairs[i][1], at + strlen(e->pairs[i][0]));
        strcpy(source, other);
    }
}

static void putSource(void) {
    char path[200];
    snprintf(path, sizeof path, "%s/repo/kernel.c", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(source, f);
    assert_int_equal(fclose(f), 0);
}

static void build_it(void) {
    if (runShell("gcc -std=c11 -O1 -fPIC -shared -I ref $D/repo/kernel.c -lm -o $D/repo/mine.so")) fail_msg("%s", trouble);
}

static bool isFull(void) { return getenv("DUALKV_GATE_FULL") != NULL; }

/* Exit code of the gate; its summary is in page. On the whole suite the kernel refuses so much that the rest has not the power
 * for all strata: that ends INCONCLUSIVE, which is no finding. */
static int judge(const char *more) {
    static const char few[] = "'shape=64+2x24 heads=2:1 dim=32' 'shape=33+5,2x9 dim=16 seed=2' 'shape=40+2x21 dim=16 mask=full' "
                              "'shape=70 dim=16 mask=window:16' 'shape=20+7 dim=16 dtype=fp16'";
    char command[1000];
    snprintf(command, sizeof command, "$B/dualkv gate %s%s --floor 5 --kernel $D/repo/mine.so --no-fuzz --quiet --out $D/gate %s",
             few, isFull() ? " ci corpus" : "", more);
    int code = runShell(command);
    readAll("gate/summary.md", page, sizeof page);
    return isFull() && code == 4 ? 0 : code;
}

static void accept(const char *more) {
    char words[100];
    snprintf(words, sizeof words, "--accepted $D/accepted.jsonl --accept %s", more);
    if (judge(words)) fail_msg("not accepted: %s%s", output, trouble);
}

static void mustSayOnPage(const edit *e, int code, const char *more) {
    int got = judge(more);
    bool sentence = (isFull() || strstr(page, e->says)) && (!e->exit || strstr(page, "- FINDING (")) && (e->exit || !strstr(page, "FINDING"));
    if (got != code || !sentence) fail_msg("%s: exit %d instead of %d, or it does not say '%s':\n%.3000s%s", e->message, got, code, e->says, page, trouble);
}

static void twelve_commits_two_of_them_bad(void **state) {
    (void)state;
    FILE *f = fopen(FIRST, "r");
    assert_non_null(f);
    source[fread(source, 1, sizeof source - 1, f)] = 0;
    fclose(f);
    assert_int_equal(runShell("mkdir $D/repo && " GIT "init -q && echo mine.so >$D/repo/.gitignore"), 0);
    for (int i = 0; i < N_COMMITS; i++) {
        char command[500];
        apply(&commits[i]);
        putSource();
        snprintf(command, sizeof command, GIT "add -A && " GIT "commit -q -m \"%s\"", commits[i].message);
        if (runShell(command)) fail_msg("git: %s", trouble);
    }
    assert_int_equal(runShell(GIT "rev-list --reverse HEAD >$D/commits && wc -l <$D/commits"), 0);
    assert_int_equal(atoi(output), N_COMMITS);
    for (int i = 0; i < N_COMMITS; i++) {
        char command[300];
        snprintf(command, sizeof command, GIT "checkout -q $(sed -n %dp $D/commits)", i + 1);
        if (runShell(command)) fail_msg("git: %s", trouble);
        build_it();
        mustSayOnPage(&commits[i], commits[i].exit, i ? "--accepted $D/accepted.jsonl" : "");
        if (!commits[i].exit && (i == 0 || strstr(page, "note (better)"))) accept("");
    }
}

static void what_else_must_not_be_merged(void **state) {
    (void)state;
    build_it();
    accept("--keep-kernel");
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        apply(&others[i]);
        putSource();
        build_it();
        mustSayOnPage(&others[i], 1, "--accepted $D/accepted.jsonl");
        if (!strcmp(others[i].message, "other bits")) {
            assert_int_equal(judge("--accepted $D/accepted.jsonl --new-bits"), 0);
            assert_non_null(strstr(page, "note (bits)"));
        }
        strcpy(source, before);
    }
}

/* Against the copy that was kept when it was accepted. */
static void a_slower_kernel_is_found(void **state) {
    (void)state;
    static const edit slow = {"a slower score", {{"    return p->scale * sum;", "    for (volatile int i = 0; i < 3000; i++) continue;\n"
                               "    return p->scale * sum;"}}, 1,
                              "as long as the accepted kernel: "};
    const char *words = "--accepted $D/accepted.jsonl --budget 0.2 --perf --perf-lines 'shape=33+5,2x9 dim=16 seed=2'";
    putSource();
    build_it();
    if (judge(words)) fail_msg("the same kernel is slower:\n%s", page);
    assert_non_null(strstr(page, "- time, shape=33+5,2x9 dim=16 seed=2: forward "));
    apply(&slow);
    putSource();
    build_it();
    mustSayOnPage(&slow, 1, words);
    assert_non_null(strstr(page, "FINDING (slower)"));
    readAll("gate/perf.jsonl", page, sizeof page);
    assert_non_null(strstr(page, "\"versus\":{\"kernel\":\"/tmp/"));
    mustSay(1, "$B/dualkv gate shape=9 --kernel $D/repo/mine.so --no-fuzz --out $D/gate --perf --budget 0.2 --perf-lines "
               "'shape=33+5,2x9 dim=16' --baseline-kernel $D/accepted.jsonl.kernel.so:mine", "FINDING (slower)");
    mustSay(2, "$B/dualkv gate shape=9 --kernel $D/repo/mine.so --perf", "faster or slower than what?");
    assert_int_equal(runShell("cp $D/repo/mine.so $D/accepted.jsonl.kernel.so"), 0);
    assert_int_equal(judge(words), 2);
    assert_non_null(strstr(trouble, "is not the kernel that was accepted"));
    assert_int_equal(runShell("rm $D/accepted.jsonl.kernel.so"), 0);
    assert_int_equal(judge(words), 2);
    assert_non_null(strstr(trouble, "--accept --keep-kernel writes it"));
}

int main(void) {
    if (makeDir()) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(twelve_commits_two_of_them_bad),
        cmocka_unit_test(what_else_must_not_be_merged),
        cmocka_unit_test(a_slower_kernel_is_found),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
