/* test_history.h: synthetic repositories for the tests of bisect: many commits on one kernel, some of which break it. For
 * tests only; include once, after cmocka.h. */
#ifndef DKV_TEST_HISTORY_H
#define DKV_TEST_HISTORY_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test_program.h"

#define CASE  "'shape=20+9,5 heads=2:1 dim=16'"
#define BUILD "\"cc -O1 -shared -fPIC -I$HERE/ref -o kernel.so kernel.c -lm\""

typedef struct history {
    const char *name; /* folder within the tests' own */
    bool python;      /* the kernel is attention.py:attention, else kernel.c */
    int commits, fault, drift, flaky; /* from these on (flaky: this one alone); 0: none */
    const int *broken;                /* do not build; 0 behind the last */
} history;

/* ---- helpers ---- */

__attribute__((unused)) static char *readFile(const char *name) {
    char *text = (char *)malloc(1 << 18);
    assert_non_null(text);
    readAll(name, text, 1 << 18);
    return text;
}

/* A shell command in the folder of the tests' own; the program makes its worktrees in $D/tmp. */
__attribute__((unused)) static int shell(const char *command) {
    char *all = NULL;
    assert_true(asprintf(&all, "case $B in /*) ;; *) B=$PWD/$B;; esac; HERE=$PWD TMPDIR=$D/tmp; export D B HERE TMPDIR; (%s)",
                         command) > 0);
    int code = runShell(all);
    free(all);
    return code;
}

__attribute__((unused)) static void mustShell(const char *command) {
    int got = shell(command);
    if (got) fail_msg("%s: exit %d\n%s%s", command, got, output, trouble);
}

__attribute__((unused)) static void mustBisect(int want, const char *words) {
    char command[6000];
    snprintf(command, sizeof command, "$B/dualkv bisect %s", words);
    int got = shell(command);
    if (got != want) fail_msg("dualkv bisect %s: exit %d instead of %d\n%s%s", words, got, want, output, trouble);
}

__attribute__((unused)) static void mustHold(const char *text, const char *what) {
    if (!strstr(text, what)) fail_msg("no '%s' in:\n%s\n%s", what, text, trouble);
}

/* What must not change of a repository. */
__attribute__((unused)) static char *stateOf(const char *name) {
    char command[1000];
    snprintf(command, sizeof command,
             "cd \"$D/%s\" && git status --porcelain && git diff && git for-each-ref && git worktree list --porcelain && git "
             "rev-parse HEAD && cat .git/HEAD && git stash list && ls -A .git | grep -v packed-refs && ls -A $D/tmp",
             name);
    mustShell(command);
    return strdup(output);
}

__attribute__((unused)) static void mustBeAs(const char *name, const char *state) {
    char *now = stateOf(name);
    if (strcmp(now, state)) {
        size_t same = 0;
        while (now[same] == state[same]) same++;
        fail_msg("%s changed: '%.300s' instead of '%.300s'", name, now + same, state + same);
    }
    free(now);
}

/* ---- a history ---- */

__attribute__((unused)) static char *replace(char *text, const char *from, const char *to) {
    char *at = strstr(text, from), *out = NULL;
    if (!at) fail_msg("the kernel has no '%s'", from);
    assert_true(asprintf(&out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from)) > 0);
    free(text);
    return out;
}

__attribute__((unused)) static bool isIn(const int *list, int x) {
    while (list && *list && *list != x) list++;
    return list && *list;
}

/* Flaky: every second process that opens the kernel computes something else. */
#define C_LUCK                                                                                                         \
    "#include <stdio.h>\n#include <stdlib.h>\n"                                                                        \
    "static int unlucky(void) {\n"                                                                                     \
    "    static int luck = -1;\n    char path[200];\n    if (luck >= 0) return luck;\n"                                \
    "    snprintf(path, 200, \"%s/luck\", getenv(\"D\"));\n    FILE *f = fopen(path, \"a\");\n"                        \
    "    fputc('x', f);\n    luck = ftell(f) % 2;\n    fclose(f);\n    return luck;\n}\n"
#define PY_LUCK                                                                                                        \
    "import os\nopen(os.environ['D'] + '/luck', 'a').write('x')\n"                                                     \
    "UNLUCKY = os.path.getsize(os.environ['D'] + '/luck') % 2 == 1\n"
/* dS computed from P rounded to bf16. */
#define C_DRIFT                                                                                                        \
    "unsigned bits;\n    memcpy(&bits, &w, 4);\n    bits = (bits + 0x8000) & 0xFFFF0000u;\n    memcpy(&w, &bits, 4);\n" \
    "    float ds = p->scale * w *"
#define PY_DRIFT "ds = (p.astype(np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32) *"

/* The kernel at commit i. */
__attribute__((unused)) static char *kernelAt(const history *h, const char *base, int i) {
    const char *const c_words[] = {"return p->scale * sum", "return 1.05f * p->scale * sum",
                                   "return (unlucky() ? 1.1f : 1.0f) * p->scale * sum", "float ds = p->scale * w *", C_DRIFT};
    const char *const py_words[] = {"s = scale *", "s = 1.05 * scale *", "s = (1.1 if UNLUCKY else 1.0) * scale *", "ds = p *",
                                    PY_DRIFT};
    const char *const *words = h->python ? py_words : c_words, *bad = h->python ? "def broken(:\n" : "#error broken\n";
    char *text = strdup(base), *out = NULL;
    if (h->fault && i >= h->fault) text = replace(text, words[0], words[1]);
    else if (i == h->flaky) text = replace(text, words[0], words[2]);
    if (h->drift && i >= h->drift) text = replace(text, words[3], words[4]);
    assert_true(asprintf(&out, "%s%s change %d%s\n%s%s", isIn(h->broken, i) ? bad : "", h->python ? "#" : "/*", i,
                         h->python ? "" : " */", i != h->flaky ? "" : h->python ? PY_LUCK : C_LUCK, text) > 0);
    free(text);
    return out;
}

__attribute__((unused)) static void makeHistory(const history *h) {
    char path[200], command[1000];
    char *base = readFile(h->python ? "base.py" : "base.c");
    const char *file = h->python ? "attention.py" : "kernel.c";
    snprintf(path, sizeof path, "%s/import", dir);
    FILE *f = fopen(path, "w");
    assert_true(f && base[0]);
    for (int i = 1; i <= h->commits; i++) {
        char *text = kernelAt(h, base, i);
        fprintf(f, "commit refs/heads/main\ncommitter A U Thor <a@example.org> %d +0000\ndata <<EOM\nchange %d\nEOM\n",
                1700000000 + 60 * i, i);
        fprintf(f, "M 100644 inline %s\ndata %zu\n%s\n", file, strlen(text), text);
        if (i == 1 || i == h->commits)
            fprintf(f, "reset refs/tags/%s\nfrom refs/heads/main\n", i == 1 ? "good" : "bad");
        free(text);
    }
    fclose(f);
    free(base);
    snprintf(command, sizeof command,
             "mkdir $D/%s && cd $D/%s && git init -q -b main . && git fast-import --quiet <$D/import && git reset -q --hard && echo "
             "dirty >>%s && echo mine >untracked",
             h->name, h->name, file);
    mustShell(command);
}

/* ---- what the records say ---- */

__attribute__((unused)) static double numberOf(const char *text, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = text ? strstr(text, quoted) : NULL;
    return at ? strtod(at + strlen(quoted), NULL) : -1;
}

__attribute__((unused)) static void mustFind(const char *json, int commit, int most) {
    char want[64];
    char *text = readFile(json), *answer = strstr(text, "{\"bisect\":\"answer\"");
    snprintf(want, sizeof want, "\"subject\":\"change %d\"", commit);
    if (!answer || !strstr(answer, want)) fail_msg("not %s:\n%s\n%s", want, answer ? answer : text, output);
    if (numberOf(answer, "builds") > most) fail_msg("more than %d builds:\n%s\n%s", most, answer, output);
    free(text);
}

/* The tests' folder, with the kernels that histories begin with. */
__attribute__((unused)) static int startHistories(void) {
    if (makeDir()) return -1;
    return shell("mkdir $D/tmp && cp verify/testkernels/plain.c $D/base.c && cd $D && DUALKV_PYTHON=/usr/bin/python3 $B/dualkv init "
                 "base.py:attention");
}

#endif
