/* The house rules of includes: each header compiles alone as C11 (and under nvcc where there is one), and
 * each room includes only the rooms below it. Runs from the root of the source tree. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What each room may include, its own name first. */
static const char *const rooms[][6] = {
    {"ref"},
    {"data", "ref"},
    {"cuda", "ref"},
    {"verify", "data", "ref"},
    {"fuzz", "verify", "data", "ref"},
    {"reports", "verify", "data", "ref"}, /* of these what reads records only: see mayInclude */
};
#define N_ROOMS (sizeof rooms / sizeof *rooms)

static int runCommand(const char *fmt, const char *file, char *out, size_t n) {
    char command[1024];
    snprintf(command, sizeof command, fmt, file, file);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t got = fread(out, 1, n - 1, pipe);
    out[got] = 0;
    while (fgetc(pipe) != EOF) continue;
    return pclose(pipe);
}

static void eachHeader(const char *what, const char *command) {
    int checked = 0;
    char out[4000];
    for (size_t r = 0; r < N_ROOMS; r++) {
        char pattern[64];
        glob_t found;
        if (!strcmp(rooms[r][0], "cuda")) continue;
        snprintf(pattern, sizeof pattern, "%s/*.h", rooms[r][0]);
        if (glob(pattern, 0, NULL, &found)) continue;
        for (size_t i = 0; i < found.gl_pathc; i++, checked++)
            if (runCommand(command, found.gl_pathv[i], out, sizeof out))
                fail_msg("%s: not as %s:\n%s", found.gl_pathv[i], what, out);
        globfree(&found);
    }
    assert_true(checked >= 10); /* fewer: not run from the root */
}

/* Twice over, so that a header without a guard fails as well. */
static void headers_compile_alone(void **state) {
    (void)state;
    eachHeader("C11",
               "printf '#include \"%s\"\\n#include \"%s\"\\n' | ${CC:-gcc} -std=c11 -D_GNU_SOURCE -Wall "
               "-Wextra -Werror -I. -fsyntax-only -xc - 2>&1");
}

/* One unit with every header: nvcc takes seconds a run, and that each is complete was shown above. */
static void headers_compile_under_nvcc(void **state) {
    (void)state;
    static char unit[8000], out[4000];
    char name[] = "/tmp/dkv_headers_XXXXXX.cu";
    if (runCommand("command -v ${NVCC:-nvcc}", "", out, sizeof out)) {
        print_message("no nvcc: skipped\n");
        skip();
    }
    size_t n = 0;
    for (size_t r = 0; r < N_ROOMS; r++) {
        char pattern[64];
        glob_t found;
        snprintf(pattern, sizeof pattern, "%s/*.%s", rooms[r][0], strcmp(rooms[r][0], "cuda") ? "h" : "{h,cuh}");
        if (glob(pattern, GLOB_BRACE, NULL, &found)) continue;
        for (size_t i = 0; i < found.gl_pathc; i++) {
            if (strstr(found.gl_pathv[i], ".sh")) continue; /* scripts */
            n += (size_t)snprintf(unit + n, sizeof unit - n, "#include \"%s\"\n", found.gl_pathv[i]);
            assert_true(n < sizeof unit);
        }
        globfree(&found);
    }
    int fd = mkstemps(name, 3);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "w");
    assert_non_null(f);
    fputs(unit, f);
    fclose(f);
    int status = runCommand("${NVCC:-nvcc} -arch=sm_80 -D_GNU_SOURCE -I. -o /dev/null -cuda %s 2>&1", name,
                            out, sizeof out);
    remove(name);
    if (status) fail_msg("under nvcc:\n%s", out);
}

static int mayInclude(size_t room, const char *target, const char *file) {
    if (!strcmp(rooms[room][0], "reports") && !strcmp(target, "verify") && strncmp(file, "record", 6))
        return 0;
    if (!strcmp(rooms[room][0], "reports") && !strcmp(target, "data") && strcmp(file, "fields.h") && strcmp(file, "jsonfile.h") &&
        strcmp(file, "sha256.h"))
        return 0;
    for (int i = 0; rooms[room][i]; i++)
        if (!strcmp(rooms[room][i], target)) return 1;
    return 0;
}

/* "../ROOM/FILE" and "ROOM/FILE" name a room; a plain name is a neighbour and must exist. Returns 1 if it is
 * right. */
static int checkInclude(size_t room, const char *include) {
    char target[64], path[300];
    const char *rest = strncmp(include, "../", 3) ? include : include + 3, *slash = strchr(rest, '/');
    if (!slash) {
        snprintf(path, sizeof path, "%s/%s", rooms[room][0], rest);
        FILE *f = fopen(path, "r");
        if (f) fclose(f);
        return f != NULL && rest == include;
    }
    if ((size_t)(slash - rest) >= sizeof target) return 0;
    memcpy(target, rest, (size_t)(slash - rest));
    target[slash - rest] = 0;
    return mayInclude(room, target, slash + 1);
}

/* The program stands on top of all rooms: main and its subcommands may include any; so may checks for a
 * device. */
static int isProgram(const char *path) {
    return !strncmp(path, "verify/cmd_", 11) || !strcmp(path, "verify/main.c") ||
           !strcmp(path, "verify/gate_run.h") || !strncmp(path, "cuda/test_", 10);
}

static int checkFile(size_t room, const char *path) {
    char line[1000], include[200];
    int seen = 0;
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, " # include \"%199[^\"]\"", include) != 1) continue;
        seen++;
        if (!isProgram(path) && !checkInclude(room, include)) fail_msg("%s may not include \"%s\"", path, include);
    }
    fclose(f);
    return seen;
}

static void rooms_include_downwards(void **state) {
    (void)state;
    static const char *const kinds[] = {"c", "h", "cu", "cuh"};
    int seen = 0;
    for (size_t r = 0; r < N_ROOMS; r++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            char pattern[64];
            glob_t found;
            snprintf(pattern, sizeof pattern, "%s/*.%s", rooms[r][0], kinds[k]);
            if (glob(pattern, 0, NULL, &found)) continue;
            for (size_t i = 0; i < found.gl_pathc; i++) seen += checkFile(r, found.gl_pathv[i]);
            globfree(&found);
        }
    assert_true(seen > 20);
}

/* What is longer than this is two things. */
enum { LINES_MOST = 800 };

static void files_are_short(void **state) {
    (void)state;
    int files = 0;
    for (size_t r = 0; r < N_ROOMS; r++) {
        char pattern[64];
        glob_t found;
        snprintf(pattern, sizeof pattern, "%s/*.{c,h,cu,cuh,py,sh}", rooms[r][0]);
        if (glob(pattern, GLOB_BRACE, NULL, &found)) continue;
        for (size_t i = 0; i < found.gl_pathc; i++, files++) {
            int lines = 0, c;
            FILE *f = fopen(found.gl_pathv[i], "r");
            assert_non_null(f);
            while ((c = fgetc(f)) != EOF) lines += c == '\n';
            fclose(f);
            if (lines > LINES_MOST) fail_msg("%s: %d lines, more than %d", found.gl_pathv[i], lines, LINES_MOST);
        }
        globfree(&found);
    }
    assert_true(files > 100);
}

/* The rule itself: what it must refuse. */
static void the_rule_refuses(void **state) {
    (void)state;
    enum { REF, DATA, CUDA, VERIFY, FUZZ, REPORTS };
    assert_true(checkInclude(VERIFY, "../ref/mask.h") && checkInclude(VERIFY, "../data/fill.h"));
    assert_true(checkInclude(REF, "mask.h") && checkInclude(CUDA, "../ref/walk.h"));
    assert_true(checkInclude(REPORTS, "../verify/record.h"));
    assert_false(checkInclude(REF, "../data/fill.h") || checkInclude(DATA, "../verify/judge.h"));
    assert_false(checkInclude(CUDA, "../data/fill.h") || checkInclude(VERIFY, "../fuzz/faults.h"));
    assert_true(checkInclude(REPORTS, "../data/fields.h"));
    assert_false(checkInclude(REPORTS, "../data/fill.h"));
    assert_false(checkInclude(REPORTS, "../verify/judge.h") || checkInclude(REF, "no_such_file.h"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(headers_compile_alone),
        cmocka_unit_test(headers_compile_under_nvcc),
        cmocka_unit_test(rooms_include_downwards),
        cmocka_unit_test(files_are_short),
        cmocka_unit_test(the_rule_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
