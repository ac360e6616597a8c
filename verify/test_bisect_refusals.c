/* bisect where something is not as it should be: one line, the right exit, and the repository as it was. Compile flags. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "test_history.h"

#define WORDS "--kernel ./kernel.so:plain --repeats 1 --case " CASE " "
#define K     WORDS "--cache none --build " BUILD " "

static const int none[] = {0};
static const history short_history = {"c", false, 8, 6, 0, 0, none};

/* One line on stderr, notes aside, and nothing of an answer. */
static void mustRefuse(int want, const char *words, const char *says) {
    mustBisect(want, words);
    const char *line = strstr(trouble, "dualkv: ");
    if (!line || strchr(line, '\n') != line + strlen(line) - 1 || !strstr(line, says))
        fail_msg("dualkv bisect %s: does not say '%s' in one line:\n%s", words, says, trouble);
    if (strstr(output, "first bad commit")) fail_msg("dualkv bisect %s: an answer:\n%s", words, output);
}

static void words_are_checked(void **state) {
    (void)state;
    static const struct {
        int exit;
        const char *words, *says;
    } rows[] = {
        {2, "--good good --bad bad " WORDS "--build true --repo $D/nowhere", "cannot read"},
        {2, "--good good --bad bad " WORDS "--build true --repo $D/tmp", "is no git repository"},
        {2, "--good good --bad bad " WORDS "--build true --repo $D/c/kernel.c", "is not a folder"},
        {2, "--good good --bad nope --repo $D/c " K, "--bad: 'nope' names no commit"},
        {2, "--good v1.0 --bad bad --repo $D/c " K, "--good: 'v1.0' names no commit"},
        {2, "--good bad --bad good --repo $D/c " K, "the other way round?"},
        {2, "--good good --bad good~0 --repo $D/c " K, "the same commit"},
        {2, "--good=--upload-pack=x --bad bad --repo $D/c " K, "is no name of a commit"},
        {2, "--good good --bad \"$(printf 'a\\nb')\" --repo $D/c " K, "is no name of a commit"},
        {2, "--good good --bad 'main:kernel.c' --repo $D/c " K, "names no commit"},
        {2, "--good good --bad bad --repo $D/c --path nosuchfile " K, "touches these"},
        {2, "--good good --repo $D/c " K, "--bad is missing"},
        {2, "--good good --bad bad --repo $D/c --kernel ./kernel.so --build true", "--case"},
        {2, "--good good --bad bad --repo $D/c --kernel ./kernel.so --build true --case shape=x", "shape"},
        {2, "--good good --bad bad --repo $D/c --kernel /tmp/kernel.so --build true --case shape=3", "within the tree"},
        {2, "--good good --bad bad --repo $D/c --kernel ../kernel.so --build true --case shape=3", "within the tree"},
        {2, "--good good --bad bad --repo $D/c --kernel emo --build true --case shape=3", "did you mean 'emu'"},
        {2, "--good good --bad bad --repo $D/c --kernel emu --case shape=3", "this program's own"},
        {2, "--good good --bad bad --repo $D/c --kernel kernel.so --case shape=3", "which command makes it"},
        {2, "--good good --bad bad --repo $D/c --kernel k.py --case shape=3", "which function"},
        {2, "--good good --bad bad --repo $D/c --kernel files:$D --build true --case shape=3", "cannot be built again"},
        {2, "--good good --bad bad --repo $D/c --metric rmz " K, "--metric"},
        {2, "--good good --bad bad --repo $D/c --plot x.pdf " K, "--plot"},
        {2, "--good good --bad bad --repo $D/c --flaky 0.3 " K, "together"},
        {2, "--good good --bad bad --repo $D/c --flaky 2 " WORDS "--build true", "--flaky"},
        {2, "--good good --bad bad --repo $D/c --json /nowhere/x " K, "--json"},
        {2, "--good good --bad bad --repo $D/c --build true " WORDS "--cache $D/tmp", "is not a file"},
        {2, "--good good --bad bad --repo $D/c --build true " WORDS "--cache $D/c/kernel.c", "no"},
        {2, "--flags --repo $D/c --flags-good=-O1 " K, "--flags-bad is missing"},
        {2, "--flags --repo $D/c --flags-good=-O1 --flags-bad=-O1 " K, "the same flags"},
        {2, "--good good --bad bad --flags-bad x --repo $D/c " K, "without --flags"},
    };
    char *was = stateOf("c");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mustRefuse(rows[i].exit, rows[i].words, rows[i].says);
        mustBeAs("c", was);
    }
    free(was);
}

static void ends_are_tested(void **state) {
    (void)state;
    static const struct {
        const char *words, *says;
    } rows[] = {
        {"--good bad~1 --bad bad --repo $D/c " K, "the good end bad~1"},
        {"--good good --bad main~5 --repo $D/c " K, "fails no case"},
        {"--good good --bad bad --repo $D/c --cache none --build 'echo no such compiler; exit 3' " WORDS, "ended with 3: no such compiler"},
        {"--good good --bad bad --repo $D/c --cache none --build true " WORDS, "no './kernel.so' after the build"},
        {"--good good --bad bad --repo $D/c --cache none --build 'echo junk >kernel.so' " WORDS, "cannot load"},
        {"--good good --bad bad --repo $D/c --cache none --build-timeout 0.5 --build 'sleep 1000 & sleep 1000' " WORDS, "longer than 0.5 s"},
        {"--good good --bad bad --repo $D/c --cache none --build " BUILD " --kernel ./kernel.so:nope --repeats 1 --case " CASE, "no kernel 'nope'"},
        {"--good good --bad bad --repo $D/c --cache none --build " BUILD " --kernel ./kernel.so:plain --case 'shape=3 dtype=fp16'", "no fp16"},
        {"--good good --bad main~3 --repo $D/c --metric rms " K, "does not tell the ends apart"},
    };
    char *was = stateOf("c");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mustRefuse(3, rows[i].words, rows[i].says);
        mustBeAs("c", was);
    }
    free(was);
}

/* Histories that are cut off, bare repositories, another place to stand. */
static void other_repositories(void **state) {
    (void)state;
    mustShell("git clone -q --depth 3 --no-local \"file://$D/c\" $D/shallow && cp -r $D/shallow $D/tmp/../shallow2");
    mustRefuse(2, "--good good --bad HEAD --repo $D/shallow " K, "(shallow): git fetch --unshallow");
    mustShell("cd $D/c && git worktree add -q --detach $D/other main~2 && echo x >>$D/other/kernel.c");
    char *was = stateOf("c");
    mustBisect(0, "--good good --bad bad --repo $D/other " K);
    mustHold(output, "change 6");
    mustBeAs("c", was);
    free(was);
    mustShell("cd $D/c && git bisect start --no-checkout bad good && git status --porcelain >$D/before; git rev-parse HEAD refs/bisect/bad >>$D/before");
    mustBisect(0, "--good good --bad bad --repo $D/c " K); /* the user's own bisect stays */
    mustHold(output, "change 6");
    mustShell("cd $D/c && (git status --porcelain; git rev-parse HEAD refs/bisect/bad) | diff - $D/before && git bisect reset && git "
              "worktree remove --force $D/other");
    mustShell("git clone -q --bare $D/c $D/bare && cd $D/bare && GIT_DIR=/nowhere $B/dualkv bisect --good good --bad bad " K);
    mustHold(output, "change 6");
}

/* Worktrees that have our names and are not ours, who only stands in one of ours, a checkout above one without its .git. */
static void what_others_own_stays(void **state) {
    (void)state;
    mustShell("cd $D/c && for n in dualkv-bisect-work dualkv-bisect-abcdef; do git worktree add -q --detach $D/$n main~1 && echo mine >$D/$n/mine; done");
    char *was = stateOf("c");
    mustBisect(0, "--good good --bad bad --repo $D/c " K);
    mustBeAs("c", was);
    mustShell("cat $D/dualkv-bisect-work/mine $D/dualkv-bisect-abcdef/mine");
    mustShell("cd $D/c && git worktree remove --force $D/dualkv-bisect-work && git worktree remove --force $D/dualkv-bisect-abcdef");
    free(was);
    was = stateOf("c");
    mustShell("$B/dualkv bisect --good good --bad bad --repo $D/c --cache none " WORDS "--build 'setsid sleep 300 & echo $! >$D/left; sleep 300' "
              "& pid=$!; for i in $(seq 500); do [ -s $D/left ] && break; sleep 0.02; done; kill -9 $pid; "
              "(cd $D/tmp/dualkv-bisect-* && exec sleep 300) >/dev/null 2>&1 & echo $! >$D/stands; sleep 0.2; kill -0 $(cat $D/left)");
    mustBisect(0, "--good good --bad bad --repo $D/c " K);
    mustShell("kill $(cat $D/stands) && ! grep -q 300 /proc/$(cat $D/left)/cmdline");
    mustBeAs("c", was);
    mustShell("mkdir $D/c/tmp && TMPDIR=$D/c/tmp $B/dualkv bisect --good good --bad bad --repo $D/c --cache none " WORDS
              "--build \"rm .git; cc -O1 -shared -fPIC -I$HERE/ref -o kernel.so kernel.c -lm\" && rmdir $D/c/tmp");
    mustHold(output, "change 6");
    mustBeAs("c", was);
    free(was);
}

/* Words of commits, files and messages that a shell, a terminal or git could take for something else. */
static void hostile_names(void **state) {
    (void)state;
    mustShell("git clone -q $D/c \"$D/a 'b' \\$(c)\" && cd \"$D/a 'b' \\$(c)\" && git checkout -q -B main good && git tag -- 'x y' 2>/dev/null; "
              "echo '/* more */' >>kernel.c && printf 'x' >\"$(printf -- '-q\\nz\\033[31m')\" && git add -A && "
              "git -c user.name=\"$(printf 'A\\033[2J\"x')\" -c user.email=a@b commit -qm \"$(printf 'evil \\033[2J \"quoted\" $(touch %s/pwned)' $D)\" && "
              "sed -i 's/return p->scale \\* sum/return 1.05f * p->scale * sum/' kernel.c && git -c user.name=A -c user.email=a@b commit -qam "
              "\"$(printf 'first\\tbad \\033]0;x\\007')\" && git update-ref refs/heads/-dash HEAD");
    mustBisect(0, "--good good --bad refs/heads/-dash --repo \"$D/a 'b' \\$(c)\" --json $D/h.jsonl --plot \"$D/it's.svg\" " K);
    mustHold(output, "first?bad");
    if (strchr(output, '\033') || strchr(output, '\007')) fail_msg("control characters:\n%s", output);
    mustShell("test ! -e $D/pwned && python3 -c 'import json,sys; [json.loads(l) for l in open(sys.argv[1])]' $D/h.jsonl");
    mustHold(output, "");
}

/* Builds that do what builds should not. */
static void builds_are_contained(void **state) {
    (void)state;
    char *was = stateOf("c");
    mustBisect(0, "--good good --bad bad --repo $D/c --cache none " WORDS
                  "--build \"head -c 200000000 /dev/zero; cc -O1 -shared -fPIC -I$HERE/ref -o kernel.so kernel.c -lm\"");
    mustHold(output, "change 6");
    mustBeAs("c", was);
    mustBisect(0, "--good good --bad bad --repo $D/c --cache none " WORDS
                  "--build \"echo '/* built */' >>kernel.c; rm -f .git/../gone; mkdir -p ro/x && chmod 555 ro; "
                  "cc -O1 -shared -fPIC -I$HERE/ref -o kernel.so kernel.c -lm\"");
    mustHold(output, "change 6");
    mustHold(trouble, "the build changes files of the commit (kernel.c)");
    mustBeAs("c", was);
    /* What an earlier build left does not pass for this one's: here only the good end's works. */
    mustBisect(4, "--good good --bad bad --repo $D/c --cache none --incremental " WORDS
                  "--build \"grep -q 'change [18] ' kernel.c || exit 0; cc -O1 -shared -fPIC -I$HERE/ref -o kernel.so kernel.c -lm\"");
    mustHold(output, "only commits that say nothing are left");
    mustBeAs("c", was);
    free(was);
}

static void flags_are_found(void **state) {
    (void)state;
    static const char build[] = "--build \"cc -O1 -shared -fPIC -I$HERE/ref \\$DUALKV_FLAGS -o kernel.so kernel.c -lm\"";
    static const history unchanged = {"fl", false, 2, 0, 0, 0, none};
    char words[2000];
    makeHistory(&unchanged);
    mustShell("cd $D/fl && git checkout -q kernel.c && sed -i 's/return p->scale . sum/\\n#if defined A \\&\\& !defined B\\nsum *= "
              "1.05f;\\n#endif\\nreturn p->scale * sum/' kernel.c && git -c user.name=A -c user.email=a@b commit -qam flags && git tag flags");
    char *was = stateOf("fl");
    snprintf(words, sizeof words, "--flags --bad flags --repo $D/fl --cache none " WORDS "%s --flags-good '-O1 -DB -g' --flags-bad '-O2 -DA -g -DC -DD "
                                  "-funroll-loops' --json $D/f.jsonl", build);
    mustBisect(0, words);
    mustHold(output, "these are needed");
    mustHold(output, "with    -DA\n");
    mustHold(output, "without -DB\n");
    char *json = readFile("f.jsonl");
    mustHold(json, "\"added\":[\"-DA\"],\"taken_away\":[\"-DB\"]");
    free(json);
    mustBeAs("fl", was);
    snprintf(words, sizeof words, "--flags --bad flags --repo $D/fl --cache none " WORDS
                                  "--build 'cc -shared -fPIC -I'$HERE'/ref $DUALKV_FLAGS $DUALKV_FLAGS_kernel_c -o kernel.so kernel.c -lm' "
                                  "--flags-good '-O1' --flags-bad '-O1 kernel.c=-DA other.c=-DA'");
    mustBisect(0, words);
    mustHold(output, "with    kernel.c=-DA\n");
    mustBeAs("fl", was);
    snprintf(words, sizeof words, "--flags --bad flags --repo $D/fl --cache none " WORDS "%s --flags-good= --flags-bad=-DC", build);
    mustRefuse(3, words, "--flags-bad: with these the cases pass");
    mustBeAs("fl", was);
    free(was);
}

/* A commit that fails now and then is skipped, unless the bad end is such a one: then its rate is asked for. */
static void flaky_commits(void **state) {
    (void)state;
    static const history between = {"f", false, 3, 3, 0, 2, none}, at_end = {"g", false, 3, 0, 0, 3, none};
    makeHistory(&between);
    makeHistory(&at_end);
    mustBisect(4, "--good good --bad bad --repo $D/f --cache none --kernel ./kernel.so:plain --case " CASE " --build " BUILD);
    mustHold(output, "1 flaky, left out");
    mustHold(output, "any of 2");
    mustRefuse(3, "--good good --bad bad --repo $D/g --cache none --kernel ./kernel.so:plain --case " CASE " --build " BUILD,
               "with --flaky P");
    mustBisect(0, "--good good --bad bad --repo $D/g --cache none --kernel ./kernel.so:plain --flaky 0.5 --error-probability 0.1 --json $D/g.jsonl "
                  "--case " CASE " --build " BUILD);
    mustHold(output, "change 3");
    mustHold(output, "the answer is wrong with probability below");
    char *json = readFile("g.jsonl"), *answer = strstr(json, "\"answer\"");
    assert_true(numberOf(answer, "runs") >= 5); /* 2 commits at most, (1/2)^n each, below 0.1 */
    assert_true(numberOf(answer, "error_probability") <= 0.1);
    free(json);
}

static void history_of_all(void **state) {
    (void)state;
    makeHistory(&short_history);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(history_of_all),     cmocka_unit_test(words_are_checked),    cmocka_unit_test(ends_are_tested),
        cmocka_unit_test(other_repositories), cmocka_unit_test(what_others_own_stays),
        cmocka_unit_test(hostile_names),        cmocka_unit_test(builds_are_contained),
        cmocka_unit_test(flags_are_found),    cmocka_unit_test(flaky_commits),
    };
    if (startHistories()) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
