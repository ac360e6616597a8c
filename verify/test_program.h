/* The program, run from a test as a shell runs it. For tests only; include once, after cmocka.h.
 *
 *     int main(void) { if (makeDir()) return 1; … return removeDir() ? 1 : failed; }
 *
 * In commands $D is the test's own temporary folder (dir), $B the build folder ($DUALKV_BUILD, else build). */
#ifndef DKV_TEST_PROGRAM_H
#define DKV_TEST_PROGRAM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

static char dir[64] = "/tmp/dualkv-test-XXXXXX"; /* mkdtemp's template, then the folder */
static char output[1 << 20], trouble[1 << 20];   /* stdout and stderr of the last command */

__attribute__((unused)) static const char *build(void) {
    const char *b = getenv("DUALKV_BUILD");
    return b ? b : "build";
}

__attribute__((unused)) static int makeDir(void) { return mkdtemp(dir) ? 0 : -1; }

__attribute__((unused)) static int removeDir(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    return system(command);
}

/* The file `name` of the folder as text, cut to room; "" where there is none. */
__attribute__((unused)) static void readAll(const char *name, char *to, size_t room) {
    char path[200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(to, 1, room - 1, f) : 0;
    to[n] = 0;
    if (f) fclose(f);
}

/* Runs a shell command: fills output and trouble; its exit code, 128 + signal where it was killed. */
__attribute__((unused)) static int runShell(const char *command) {
    char *text = NULL;
    if (asprintf(&text, "D=%s; B=%s; { %s\n} >$D/out 2>$D/err </dev/null", dir, build(), command) < 0) return -1;
    int status = system(text);
    free(text);
    readAll("out", output, sizeof output);
    readAll("err", trouble, sizeof trouble);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Runs `dualkv WORDS`. */
__attribute__((unused)) static int run(const char *words) {
    char *text = NULL;
    if (asprintf(&text, "$B/dualkv %s", words) < 0) return -1;
    int code = runShell(text);
    free(text);
    return code;
}

__attribute__((unused)) static void mustExit(int want, const char *words) {
    int got = run(words);
    if (got != want) fail_msg("dualkv %s: exit %d instead of %d\n%s%s", words, got, want, output, trouble);
}

/* A shell command must end with that code and say that, on stdout or stderr. */
__attribute__((unused)) static void mustSay(int want, const char *command, const char *says) {
    int got = runShell(command);
    if (got != want || (!strstr(output, says) && !strstr(trouble, says)))
        fail_msg("%s: exit %d instead of %d, or it does not say '%s':\n%s%s", command, got, want, says, output, trouble);
}

#endif
