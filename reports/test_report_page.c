/* The page of Markdown: what it says first, what did not pass, its size, and records that would break or script it. */
#include "report_html.h"
#include "report_page.h"
#include "test_page.h"

#define TENSORS                                                                                                      \
    "\"tensors\":{\"O\":{\"max_bound_ratio\":0.5,\"twin_rms\":1.01,\"twin_rms_limit\":1.5,\"bad\":0,\"total\":64}}"
#define RECORD(line, status, why, more)                                                                              \
    "{\"line\":\"" line "\",\"kernel\":\"emu\",\"status\":\"" status "\",\"why\":\"" why                             \
    "\",\"seconds\":0.5,\"device\":\"cpu\",\"generator\":\"1\",\"replay\":\"dualkv replay x\"," more "}"

static void readPage(const dkv_gather *g, page_writer write) { writePage(g, write, "dualkv report --markdown a.md b.jsonl"); }

static void pageOf(const char *const *records, size_t n) {
    dkv_gather g = {0};
    gatherAll(&g, records, n);
    readPage(&g, dkv_writePage);
    dkv_freeGather(&g);
}

static void the_page_names_what_did_not_pass(void **state) {
    (void)state;
    static const char *const records[] = {RECORD("shape=3", "PASSED", "", "\"commit\":\"abc\"," TENSORS),
                                          RECORD("shape=5", "FAILED", "because", "\"commit\":\"abc\"," TENSORS)};
    dkv_gather g = {0};
    dkv_err err = {0};
    pageOf(records, 2);
    assertSays("## emu: Not equivalent\n\n- Cases: 1 PASSED, 1 FAILED, on 2 different lines.\n- The first defect: because\n");
    assertSays("- **FAILED** shape=5: because\n\n      dualkv replay x\n");
    assertSays("| emu | causal | bf16 | O | 2 | 0.500 | 1.01 .. 1.01 |  |");
    assertSays("On cpu; commit abc");
    assertSays("      dualkv report --markdown a.md b.jsonl\n");
    assert_int_equal(dkv_writePage(&g, "/nowhere/at/all.md", "", &err), DKV_EUSER);
}

/* A fault that no case catches, in a stratum where it could be, is named; one that cannot be there is not. */
static void power_is_summed_over_cases(void **state) {
    (void)state;
    static const char *const records[] = {
        RECORD("shape=3", "PASSED", "", "\"power\":{\"longest\":29,\"scale_error\":0.001,\"dK_gain\":\"inf\",\"strata\":{"
               "\"O response 17-64\":{\"first-key\":0.5,\"scale\":0.2},\"LSE prompt 1-16\":{\"first-key\":7}}}"),
        RECORD("shape=4", "PASSED", "", "\"power\":{\"longest\":103,\"scale_error\":1e-5,\"dK_gain\":0.02,\"strata\":{"
               "\"O response 17-64\":{\"first-key\":40,\"scale\":1},\"<b>\":{\"scale\":9},\"dK prompt 1-16\":{\"a|b\":9}}}"),
        RECORD("shape=5", "PASSED", "", "\"power\":{\"strata\":[3,{\"x\":1}]}"),
        RECORD("shape=5", "PASSED", "", "\"runs\":1")};
    pageOf(records, 4);
    assertSays("one lost key up to length 103; a scale error of 1.0e-05; a dK gain of 2.0e-02");
    assertSays("| kernel | stratum | first-key | scale |");
    assertSays("| emu | O response 17-64 | 1 of 2, 40 | **0 of 2, 1** |");
    assertSays("| emu | LSE prompt 1-16 | 1 of 1, 7 | |");
    assertSays("- O response 17-64: no case would have seen scale\n");
    assert_null(strstr(page, "a|b"));
}

static void refusals_are_told_by_reason(void **state) {
    (void)state;
    static const char *const records[] = {RECORD("shape=3", "UNSUPPORTED", "no <GQA>", "\"runs\":1"),
                                          RECORD("shape=4", "FAILED", "x", "\"runs\":1"),
                                          RECORD("shape=5", "UNSUPPORTED", "no <GQA>", "\"runs\":1")};
    pageOf(records, 3);
    assertSays("- Refused: 2 of 3 cases: no &lt;GQA&gt; (2)\n");
    assert_null(strstr(page, "shape=5"));
}

static void waived_defects_are_known_not_passed(void **state) {
    (void)state;
    static const char *const records[] = {
        RECORD("shape=3", "PASSED", "", TENSORS),
        RECORD("shape=4", "FAILED", "x", "\"waiver\":{\"reason\":\"a <known> one\",\"until\":\"2030-01-31\"}," TENSORS),
        RECORD("shape=5", "FAILED", "y", TENSORS)};
    pageOf(records, 2);
    assertSays("## emu: Known defects only\n");
    assertSays("- Waived: 1 defect: a &lt;known&gt; one (until 2030-01-31) (1)\n");
    assert_null(strstr(page, "The first defect"));
    pageOf(records, 3);
    assertSays("## emu: Not equivalent\n");
    assertSays("- The first defect: y\n");
    dkv_gather g = {0};
    gatherAll(&g, records, 2);
    readPage(&g, dkv_writeHtml);
    dkv_freeGather(&g);
    assertSays("<section class=\"unsure\">");
    assertSays("<strong>Known defects only.</strong> A defect in 1 of 2 cases that ran (1 FAILED), each of them excused by a waiver");
    assertSays("Waivers excuse 1 defect: a &lt;known&gt; one (until 2030-01-31) (1)");
}

#define AT(commit, started, ratio, seconds)                                                                          \
    RECORD("shape=3", "PASSED", "", "\"commit\":\"" commit "\",\"started\":\"" started "\",\"seconds_forward\":" seconds  \
           ",\"tensors\":{\"O\":{\"max_bound_ratio\":" ratio ",\"twin_rms\":0.9,\"twin_rms_limit\":1.8}}")

/* By when their runs began, not by where they stand in the file; times are compared on the same lines only. */
static void commits_in_order(void **state) {
    (void)state;
    static const char *const records[] = {AT("bbb", "2026-02-01T00:00:00Z", "0.7", "3"), AT("aaa", "2026-01-01T00:00:00Z", "0.5", "2"),
                                          AT("<c>", "2026-03-01T00:00:00Z", "\"nan\"", "1"), AT("<c>", "2026-03-02T00:00:00Z", "0.1", "1")};
    pageOf(records, 4);
    assertSays("| aaa | 2026-01-01T00:00:00Z | 1 | 0 | 0.5 | 0.9 | 0.5 | 2 |\n| bbb | 2026-02-01T00:00:00Z | 1 | 0 | 0.7 | 0.9 | 0.5 | 3 |\n"
               "| &lt;c&gt; | 2026-03-01T00:00:00Z | 2 | 0 | ∞ |");
    dkv_gather g = {0};
    gatherAll(&g, records, 4);
    readPage(&g, dkv_writeHtml);
    dkv_freeGather(&g);
    assertSays("<h2 id=\"trends\">Over commits</h2>");
    assertSays("<td>3 <small>(1.50 of the one before)</small></td>");
    assertSays("<td>2 <small>(other lines than the one before)</small></td>");
    pageOf(records, 1);
    assert_null(strstr(page, "Over commits"));
}

/* Nothing in them is markup, and each that is no record is skipped with the number of its line. */
static void hostile_records(void **state) {
    (void)state;
    char path[] = "/tmp/dualkv-test-XXXXXX";
    FILE *f = fdopen(mkstemp(path), "w");
    dkv_gather g = {0};
    dkv_err err = {0};
    fputs("{\"line\":\"shape=9\",\"kernel\":\"<script>a|b`c*\\n# @all ![x](http://x)\",\"status\":\"FAILED\",\"why\":\"</details>\\n\\n<img "
          "src=x>\",\"replay\":\"x\\n</pre><script>\\u001b\",\"device\":\"\xff\xc0\",\"tensors\":{\"O\":{\"max_bound_ratio\":1e999}}}\n", f);
    fputs("{\"line\":\"shape=9\",\"status\":\"PAS\n", f);
    for (int i = 0; i < 200000; i++) fputc('[', f); /* deep */
    fputs("\n\xff\xfe\n", f);
    for (size_t i = 0; i < (size_t)100 << 20; i += 1 << 16) { /* 100 MB in one line */
        static char junk[1 << 16];
        memset(junk, 'x', sizeof junk);
        fwrite(junk, 1, sizeof junk, f);
    }
    fputs("\n" RECORD("shape=3", "PASSED", "", TENSORS) "\nthe last, without an end", f);
    fclose(f);
    assert_int_equal(dkv_gatherFile(&g, path, "", &err), 0);
    static const long bad[] = {2, 3, 4, 5, 7};
    assert_int_equal(g.files[0].records, 2);
    assert_int_equal(g.files[0].bad, 5);
    assert_memory_equal(g.files[0].bad_lines, bad, sizeof bad);
    assert_false(g.files[0].cut);
    readPage(&g, dkv_writePage);
    assertSays("**5 lines were no records and were skipped**");
    assertSays("skipped: 2, 3, 4, 5, 7\n");
    assertSays("## &lt;script&gt;a\\|b\\`c\\* \\# &#64;all \\!\\[x\\](http://x): Not equivalent");
    assertSays("&lt;/details&gt;  &lt;img src=x&gt;");
    assertSays("\n      x\xef\xbf\xbd</pre><script>\xef\xbf\xbd\n"); /* a line of code: literal */
    assert_null(strstr(page, "\n#  @"));
    dkv_freeGather(&g);
    unlink(path);
}

/* 3,000 kernels' failures with long words: the page stays below 60 KiB. */
static void the_page_stays_small(void **state) {
    (void)state;
    static char why[800], record[3000];
    dkv_gather g = {0};
    memset(why, '*', sizeof why - 1);
    for (int i = 0; i < 3000; i++) {
        snprintf(record, sizeof record,
                 "{\"line\":\"shape=%d mask=%s dtype=%s\",\"kernel\":\"k%d%.100s\",\"status\":\"FAILED\",\"why\":\"%s\",\"replay\":\"%s\","
                 "\"commit\":\"%d\",\"device\":\"%s\",\"power\":{\"strata\":{\"O response %d-\":{\"scale\":0.1}}}," TENSORS "}",
                 i % 50 + 1, i % 2 ? "full" : "causal", i % 3 ? "fp16" : "fp32", i % 30, why, why, why, i % 40, why, i % 200);
        assert_int_equal(dkv_gatherRecord(&g, record), 1);
    }
    readPage(&g, dkv_writePage);
    if (strlen(page) >= 60 << 10) fail_msg("%zu bytes", strlen(page));
    assertSays("more are in the records.");
    assertSays("22 further kernels");
    dkv_freeGather(&g);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_page_names_what_did_not_pass),
                                       cmocka_unit_test(power_is_summed_over_cases),
                                       cmocka_unit_test(refusals_are_told_by_reason),
                                       cmocka_unit_test(waived_defects_are_known_not_passed),
                                       cmocka_unit_test(commits_in_order),
                                       cmocka_unit_test(hostile_records),
                                       cmocka_unit_test(the_page_stays_small)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
