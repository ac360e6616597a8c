/* The house rules of includes (design, "The house"): each header compiles alone as C11 (and under nvcc where there is one),
 * each room includes only the rooms below it, kernels and references share no mask. Runs from the root of the source tree. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <ctype.h>
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
    {"reports", "verify", "data", "ref"}, /* of verify and data what reads records only: see mayInclude */
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

/* All that reports know of a run is in its records: beside these, names of statuses, and how JSON is read. */
static int readsRecords(const char *target, const char *file) {
    static const char *const open[] = {"verify/status.h", "data/fields.h", "data/jsonfile.h", "data/sha256.h"};
    char path[300];
    int found = !strcmp(target, "ref") || !strcmp(target, "reports");
    snprintf(path, sizeof path, "%s/%s", target, file);
    for (size_t i = 0; i < sizeof open / sizeof *open; i++) found |= !strcmp(path, open[i]);
    return found;
}

static int mayInclude(size_t room, const char *target, const char *file) {
    if (!strcmp(rooms[room][0], "reports") && !readsRecords(target, file)) return 0;
    for (int i = 0; rooms[room][i]; i++)
        if (!strcmp(rooms[room][i], target)) return 1;
    return 0;
}

#define PROGRAM_HEADER "gate_run.h" /* stands on all rooms itself: for the program alone */

/* "../ROOM/FILE" and "ROOM/FILE" name a room; a plain name is a neighbour and must exist. Returns 1 if it is
 * right. */
static int checkInclude(size_t room, const char *include) {
    char target[64], path[300];
    const char *rest = strncmp(include, "../", 3) ? include : include + 3, *slash = strchr(rest, '/');
    if (!slash) {
        if (!strcmp(rest, PROGRAM_HEADER)) return 0;
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
    static const char *const files[] = {"verify/main.c", "verify/" PROGRAM_HEADER, "verify/gate_perf.c", "verify/gate_words.c"};
    int is = !strncmp(path, "verify/cmd_", 11) || !strncmp(path, "cuda/test_", 10);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) is |= !strcmp(path, files[i]);
    return is;
}

static int mayUse(size_t room, const char *library) {
    return strncmp(library, "cuda", 4) != 0 || !strcmp(rooms[room][0], "cuda");
}

static int checkFile(size_t room, const char *path) {
    char line[1000], include[200];
    int seen = 0;
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, " # include <%199[^>]>", include) == 1 && !mayUse(room, include))
            fail_msg("%s may not include <%s>: the program starts without CUDA", path, include);
        if (sscanf(line, " # include \"%199[^\"]\"", include) != 1) continue;
        seen++;
        if (!isProgram(path) && !checkInclude(room, include)) fail_msg("%s may not include \"%s\"", path, include);
    }
    fclose(f);
    return seen;
}

static void rooms_include_downwards(void **state) {
    (void)state;
    static const char *const kinds[] = {"c", "h", "cu", "cuh", "inc"};
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

/* A kernel from elsewhere has the public header alone; what stands in for a device (fake_*) may look into ref/. */
static void kernels_of_others_see_the_public_header(void **state) {
    (void)state;
    static const char *const folders[] = {"verify/examples/*.c*", "verify/testkernels/*.c"};
    int seen = 0;
    for (size_t k = 0; k < 2; k++) {
        glob_t found;
        assert_int_equal(glob(folders[k], 0, NULL, &found), 0);
        for (size_t i = 0; i < found.gl_pathc; i++) {
            char line[1000], include[200];
            FILE *f = fopen(found.gl_pathv[i], "r");
            assert_non_null(f);
            while (fgets(line, sizeof line, f)) {
                if (sscanf(line, " # include \"%199[^\"]\"", include) != 1) continue;
                seen++;
                if (strcmp(include, "dualkv_kernel.h") && strcmp(include, "plain.c") &&
                    !(strstr(found.gl_pathv[i], "/fake_") && !strncmp(include, "../../ref/", 10)))
                    fail_msg("%s may not include \"%s\"", found.gl_pathv[i], include);
            }
            fclose(f);
        }
        globfree(&found);
    }
    assert_true(seen > 5);
}

/* What a file and all that it includes take in, by name: `what` among it? */
static int reaches(const char *path, const char *what, int depth) {
    char line[1000], include[200], next[600];
    const char *base = strrchr(path, '/') + 1;
    int found = !strcmp(base, what);
    FILE *f = !found && depth < 20 ? fopen(path, "r") : NULL;
    while (f && !found && fgets(line, sizeof line, f)) {
        if (sscanf(line, " # include \"%199[^\"]\"", include) != 1) continue;
        if (strncmp(include, "../", 3)) snprintf(next, sizeof next, "%.*s%s", (int)(base - path), path, include);
        else snprintf(next, sizeof next, "%s", include + 3);
        found = reaches(next, what, depth + 1);
    }
    if (f) fclose(f);
    return found;
}

/* Each of the two is written from the definitions alone; only tests see both. */
static void kernels_and_references_share_no_mask(void **state) {
    (void)state;
    static const char *const references[] = {"ref/ref_naive.c", "ref/ref_quad.c", "ref/ref_gauge.c", "ref/tiles.c", "ref/mask.c",
                                             "ref/truth.c", "cuda/oracle_impl.cuh"};
    static const char *const kernels[] = {"ref/emu.c", "ref/emu_forward.c", "ref/emu_backward.c", "ref/emu_tile.c", "cuda/forward.cu",
                                          "cuda/backward.cu", "cuda/simple32.cu", "cuda/passes.cu"};
    for (size_t i = 0; i < sizeof references / sizeof *references; i++)
        if (reaches(references[i], "walk.h", 0)) fail_msg("%s takes in the kernels' mask", references[i]);
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (reaches(kernels[i], "mask.h", 0) || reaches(kernels[i], "mask_pair.h", 0)) fail_msg("%s takes in the references' mask", kernels[i]);
    assert_true(reaches("ref/mask.c", "mask_pair.h", 0) && reaches("cuda/forward.cu", "walk.h", 0)); /* it looks */
}

/* Is there a line with the name as a word, and where `defined` one that begins in the first column, with a '(' and no end? */
static int names(const char *path, const char *name, int defined) {
    char line[1000];
    size_t n = strlen(name);
    int found = 0;
    FILE *f = fopen(path, "r");
    if (!f) fail_msg("%s: no such file", path);
    while (!found && fgets(line, sizeof line, f)) {
        const char *at = strstr(line, name);
        line[strcspn(line, "\n")] = 0;
        if (!at || (at > line && (isalnum(at[-1]) || at[-1] == '_')) || isalnum(at[n]) || at[n] == '_') continue;
        found = !defined || (isalpha(line[0]) && at[n] == '(' && line[strlen(line) - 1] != ';');
    }
    fclose(f);
    return found;
}

/* verify/WALK.md: each function is in its file, and named in that of an earlier hop. */
static void the_walk_is_true(void **state) {
    (void)state;
    enum { MOST = 100 };
    static char file[MOST][100];
    char line[1000], name[100];
    int n = 0;
    FILE *f = fopen("verify/WALK.md", "r");
    assert_non_null(f);
    while (n < MOST && fgets(line, sizeof line, f)) {
        const char *hop = strncmp(line, "| \xc2\xb7 ", 5) ? line + 2 : line + 5;
        if (line[0] != '|' || sscanf(hop, "`%99[^`]` | %99s |", name, file[n]) != 2) continue;
        int told = n == 0;
        for (int i = 0; i < n && !told; i++) told = names(file[i], name, 0);
        if (!names(file[n], name, 1)) fail_msg("%s is not in %s", name, file[n]);
        if (!told) fail_msg("%s: no earlier hop's file names it", name);
        n++;
    }
    fclose(f);
    assert_true(n > 40 && n < MOST);
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
    assert_true(checkInclude(REPORTS, "../verify/status.h") && checkInclude(REPORTS, "report_map.h"));
    assert_false(checkInclude(REPORTS, "../verify/record.h") || checkInclude(VERIFY, PROGRAM_HEADER));
    assert_true(mayUse(CUDA, "cuda_runtime_api.h") && !mayUse(VERIFY, "cuda.h"));
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
        cmocka_unit_test(kernels_of_others_see_the_public_header),
        cmocka_unit_test(kernels_and_references_share_no_mask),
        cmocka_unit_test(the_walk_is_true),
        cmocka_unit_test(files_are_short),
        cmocka_unit_test(the_rule_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
