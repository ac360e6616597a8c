/* Pages from a template: tables say what the records hold, nothing is left unfilled, and the report on PyTorch's kernels is
 * the one that its template and the committed records make. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "report_survey.h"
#include "report_template.h"

static char folder[] = "/tmp/dualkv-template-XXXXXX", *page;

static void put(const char *name, const char *text) {
    char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0 && fclose(f) == 0);
}

static int fill(const char *path, dkv_err *err) {
    size_t n = 0;
    free(page);
    FILE *f = open_memstream(&page, &n);
    int rc = dkv_fillTemplate(path, f, err);
    fclose(f);
    return rc;
}

static int fillText(const char *text, dkv_err *err) {
    char path[200];
    put("page.in", text);
    snprintf(path, sizeof path, "%s/page.in", folder);
    return fill(path, err);
}

static void assertSays(const char *words) {
    if (!strstr(page, words)) fail_msg("not on the page: %s\n%.60000s", words, page);
}

#define PART(rms, gain, truth)                                                                                        \
    "\"max_bound_ratio\":0.5,\"twin_rms\":" rms ",\"twin_rms_limit\":2,\"twin_gain\":" gain                           \
    ",\"twin_gain_limit\":1e-3,\"truth_gain\":" truth ",\"total\":64"
#define RECORD(line, kernel, status, why, more)                                                                       \
    "{\"line\":\"" line "\",\"kernel\":\"" kernel "\",\"status\":\"" status "\",\"why\":\"" why "\",\"commit\":\"abc\",\"replay\":\"" \
    "dualkv replay '" line "' --kernel " kernel " --arithmetic flash\"" more "}\n"
#define JUDGED(rms, gain, truth)                                                                                      \
    ",\"profile\":\"flash\",\"arithmetic\":\"P rounded\",\"tensors\":{\"dK\":{" PART(rms, gain, truth)                \
    ",\"regions\":{\"prompt\":{" PART(rms, gain, truth) "}}}}"

static const char records[] =
    RECORD("shape=4096", "a/x.py:f", "PASSED", "", JUDGED("1.5", "2e-4", "-1e-3") ",\"checks\":{\"repeat\":\"passed\"}")
    RECORD("shape=9", "x.py:f", "PASSED", "", JUDGED("1", "-5e-4", "2e-3") ",\"checks\":{\"sequence\":\"note\"},\"notes\":{\"sequence\":\"2 of 9\"}")
    RECORD("shape=8 fill=aligned", "x.py:f", "FAILED", "dK is <wrong>", JUDGED("0.5", "1e-4", "0") ",\"checks\":{\"repeat\":\"passed\"}")
    RECORD("shape=7", "x.py:f", "UNSUPPORTED", "no GQA", "") RECORD("shape=4", "z.py:h", "NOT_RUN", "", ",\"checks\":{\"sequence\":\"defect\"}")
    RECORD("shape=3", "z.py:h", "NONDETERMINISTIC", "", ",\"checks\":{\"repeat\":\"defect\"}")
    RECORD("shape=6", "y.py:g", "UNSUPPORTED", "no GQA", "") RECORD("shape=5", "y.py:g", "UNSUPPORTED", "no GQA", "");

static void tables_hold_the_records(void **state) {
    (void)state;
    dkv_err err = {0};
    put("one.jsonl", records);
    if (fillText("# Text\n@records one.jsonl\n@verdicts\n@refused one\n@profiles\n@errors\n@long\n@bias\n@repeats\n@failed\n@files\nend", &err))
        fail_msg("%s", err.text);
    assert_memory_equal(page, "# Text\n| kernel", 15);
    assertSays("| x.py:f | one | 4 | 3 | 1 | 192 | PASSED (2), FAILED (1) | flash | abc |\n");
    assertSays("| y.py:g | one | 2 | 0 | 2 | 0 | – | – | abc |\n");
    assertSays("- y.py:g (one): no GQA (2)\n");
    assertSays("| x.py:f | one | flash | 3 | P rounded |\n");
    assertSays("| x.py:f | one | others | dK | 2 | 0.5 | 1.50 (1.00 to 1.50) | 0.75 | 0.0005 | 0.5 |\n");
    assertSays("| x.py:f | one | aligned | dK | 1 | 0.5 | 0.50 (0.50 to 0.50) | 0.25 | 0.0001 | 0.1 |\n");
    assertSays("| 4096 | x.py:f | PASSED as flash |  |  |  | 0.5; 1.50 of 2.00 |  |\n");
    assertSays("+2.0e-04 of 0.001; -1.0e-03 |");
    assert_null(strstr(page, "| 9 | x.py:f |")); /* not long */
    assertSays("| x.py:f | one | 3 | 2 | 1 | shape=9: 2 of 9 |\n");
    assertSays("| z.py:h | one | 1 | 0 | 1 | shape=3:");
    assertSays("- **FAILED** x.py:f as flash, shape=8 fill=aligned: dK is &lt;wrong&gt;. Largest err/bound: dK 0.5 (rms z 0.50 of 2, gain +0.0e+00)");
    assertSays("\n      dualkv replay 'shape=8 fill=aligned' --kernel x.py:f --arithmetic flash\n");
    assertSays("- one.jsonl: 8 records, SHA-256 ");
    assert_string_equal(page + strlen(page) - 4, "\nend");
}

static void one_case_and_packed_records(void **state) {
    (void)state;
    dkv_err err = {0};
    char command[200];
    put("two.jsonl", records);
    snprintf(command, sizeof command, "gzip -f %s/two.jsonl", folder);
    assert_int_equal(system(command), 0);
    if (fillText("@records two.jsonl.gz\n@case two x.py:f --arithmetic flash shape=8 fill=aligned\n", &err)) fail_msg("%s", err.text);
    assertSays("- **FAILED** x.py:f");
    assert_null(strstr(page, "PASSED"));
}

/* What cannot be filled is an error that names the template's line, never a hole. */
static void nothing_is_left_open(void **state) {
    (void)state;
    static const char *const bad[][2] = {
        {"@nothing\n", "page.in:1: unknown '@nothing'"},
        {"x\n@records none.jsonl\n", "page.in:2: "},
        {"@records\n", "which file?"},
        {"@verdicts one\n", "no @records above is called 'one'"},
        {"@records one.jsonl\n@case one x.py:f shape=77\n", "page.in:2: no record of x.py:f on 'shape=77'"},
        {"@records one.jsonl\n@case one x.py:f --arithmetic partials shape=9\n", "with --arithmetic partials"},
        {"@records one.jsonl\n@case one x.py:f\n", "SET KERNEL [WORDS] LINE"},
        {"@records bad.jsonl\n", "bad.jsonl:2: not a record of check"},
        {"@records empty.jsonl\n", "holds no record"},
        {"@records bad.jsonl.gz\n", "gzip"}};
    put("one.jsonl", records);
    put("bad.jsonl", "\n{\"line\":\"shape=1\",\"kernel\":\"k\",\"status\":\"FINE\"}\n");
    put("bad.jsonl.gz", "no gzip");
    put("empty.jsonl", "\n");
    const int words = dup(STDERR_FILENO);
    FILE *told = tmpfile();
    assert_true(told && dup2(fileno(told), STDERR_FILENO) >= 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dkv_err err = {0};
        assert_int_equal(fillText(bad[i][0], &err), DKV_EUSER);
        if (!strstr(err.text, bad[i][1])) fail_msg("'%s' does not say '%s'", err.text, bad[i][1]);
    }
    struct stat st;
    assert_int_equal(fstat(STDERR_FILENO, &st), 0);
    dup2(words, STDERR_FILENO);
    close(words);
    fclose(told);
    assert_int_equal(st.st_size, 0); /* gzip says nothing of its own */
}

/* Runs from the root of the source tree. The page is made anew by the command that stands at its end. */
static void the_committed_report_is_that_of_its_records(void **state) {
    (void)state;
    dkv_err err = {0};
    char *committed = NULL;
    size_t room = 0;
    if (fill("reports/torch-h200.in", &err)) fail_msg("%s", err.text);
    FILE *f = fopen("reports/torch-h200.md", "r");
    assert_non_null(f);
    assert_true(getdelim(&committed, &room, 0, f) > 0);
    fclose(f);
    if (strcmp(committed, page) != 0)
        fail_msg("reports/torch-h200.md is not what its template and the records make: dualkv report --template "
                 "reports/torch-h200.in --markdown reports/torch-h200.md");
    free(committed);
}

static int makeFolder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int removeFolder(void **state) {
    static const char *const names[] = {"page.in", "one.jsonl", "two.jsonl.gz", "bad.jsonl", "bad.jsonl.gz", "empty.jsonl"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[200];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    free(page);
    return rmdir(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_hold_the_records), cmocka_unit_test(one_case_and_packed_records),
        cmocka_unit_test(nothing_is_left_open), cmocka_unit_test(the_committed_report_is_that_of_its_records)};
    return cmocka_run_group_tests(tests, makeFolder, removeFolder);
}
