/* The HTML page: its first screen's words, its size, and records that would break or script it. */
#include <sys/resource.h>
#include <time.h>

#include "report_classes.h"
#include "report_html.h"
#include "report_text.h"
#include "test_page.h"

#define TENSORS                                                                                                      \
    "\"tensors\":{\"O\":{\"max_bound_ratio\":0.5,\"twin_rms\":1.01,\"twin_rms_limit\":1.5,\"bad\":0,\"total\":64,"   \
    "\"regions\":{\"prompt\":{\"max_bound_ratio\":0.5},\"response\":{\"max_bound_ratio\":0.25}}}}"
#define RECORD(kernel, line, status, why, more)                                                                      \
    "{\"line\":\"" line "\",\"kernel\":\"" kernel "\",\"status\":\"" status "\",\"why\":\"" why                       \
    "\",\"seconds\":0.5,\"device\":\"a device\",\"commit\":\"abc\",\"replay\":\"dualkv replay x\"," more "}"
#define POWER(ratio) "\"power\":{\"longest\":29,\"scale_error\":0.001,\"strata\":{\"O response 17-64\":{\"first-key\":" ratio "}}}"

/* Every tag is closed in turn, and there is none that runs anything. */
static void assertWellFormed(const char *html) {
    static const char *const alone[] = {"meta", "link", "br", "!DOCTYPE"};
    char open[64][16];
    int depth = 0;
    for (const char *s = html; (s = strchr(s, '<')); s++) {
        bool closes = s[1] == '/', empty = false;
        char name[16];
        assert_int_equal(sscanf(s + 1 + closes, "%15[!A-Za-z0-9]", name), 1);
        assert_true(strcmp(name, "script") != 0 && strcmp(name, "img") != 0 && strcmp(name, "iframe") != 0);
        const char *end = strchr(s, '>');
        assert_non_null(end);
        for (size_t i = 0; i < 4; i++) empty |= strcmp(name, alone[i]) == 0;
        if (empty || end[-1] == '/') continue;
        if (!closes) {
            assert_true(depth < 64);
            strcpy(open[depth++], name);
        } else {
            assert_true(depth > 0);
            assert_string_equal(open[--depth], name);
        }
    }
    assert_int_equal(depth, 0);
    assert_null(strstr(html, "http://"));
    assert_null(strstr(html, "https://"));
}

static void pageOf(const dkv_gather *g) {
    writePage(g, dkv_writeHtml, "dualkv report --html a.html '<b>.jsonl'");
    assertWellFormed(page);
}

static const char *pageOfRecords(const char *const *records, size_t n) {
    dkv_gather g = {0};
    gatherAll(&g, records, n);
    pageOf(&g);
    dkv_freeGather(&g);
    return page;
}

static void text_is_escaped(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"<b a=\"x\" b='y'>&", "&lt;b a=&quot;x&quot; b=&#39;y&#39;&gt;&amp;"},
        {"\xc3\xa4\xe2\x89\xa0\xf0\x9d\x84\x9e", "\xc3\xa4\xe2\x89\xa0\xf0\x9d\x84\x9e"},
        {"\xc0\xbc\x80\xff", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* an overlong '<' among them */
        {"\xe2\x89", "\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* half a surrogate pair */
        {"a\xe2\x80\xae" "b\x1b[31m\x01", "a\xef\xbf\xbd" "b\xef\xbf\xbd[31m\xef\xbf\xbd"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *out = NULL;
        size_t n = 0;
        FILE *f = open_memstream(&out, &n);
        dkv_writeText(f, cases[i][0], 0);
        fclose(f);
        assert_string_equal(out, cases[i][1]);
        free(out);
    }
}

/* A command to be copied shows what is copied: nothing in it ends the block, or turns the direction of the text. */
static void code_is_shown_as_it_is(void **state) {
    (void)state;
    char *out = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&out, &n);
    dkv_markCode(f, "dualkv 'a*<b>'\xe2\x80\xae\n# \xff\t\xc3\xa4");
    fclose(f);
    assert_string_equal(out, "\n      dualkv 'a*<b>'\xef\xbf\xbd\xef\xbf\xbd# \xef\xbf\xbd\xef\xbf\xbd\xc3\xa4\n");
    free(out);
}

static void first_screen_of_a_pass(void **state) {
    (void)state;
    static const char *const records[] = {RECORD("emu", "shape=9+3 heads=2:1", "PASSED", "", TENSORS "," POWER("4")),
                                          RECORD("emu", "shape=9+3", "UNSUPPORTED", "no <GQA>", "\"runs\":1")};
    pageOfRecords(records, 2);
    assertSays("<strong>No difference found beyond rounding.</strong> No defect in 1 judged case: every one is within");
    assertSays("2 cases on 2 different problem lines: 1 PASSED, 1 UNSUPPORTED. 64 elements judged");
    assertSays("the largest error is 0.5 of what rounding allows (O)");
    assertSays("Device: a device; commit abc");
    assertSays("At best one lost key up to length 29; a scale error of 1.0e-03");
    assertSays("1 of 2 cases were refused by the kernel: no &lt;GQA&gt; (1)");
    assertSays("No stratum is blind");
    assertSays("No judged case has: mask full, prefix, window, chunk, block");
    assertSays("No judged case has: type fp16, fp32.");
    assertSays("softcap, ALiBi, a sink logit");
    assert_null(strstr(page, "Not equivalent"));
    assertSays("<section class=\"yes\">");
}

static void first_screen_of_a_defect(void **state) {
    (void)state;
    static const char *const records[] = {
        RECORD("emu", "shape=9+3", "PASSED", "", TENSORS),
        RECORD("emu", "shape=8", "INCONCLUSIVE", "weak", TENSORS),
        RECORD("emu", "shape=7", "BIASED", "dV: too large", "\"not_judged\":[\"LSE\"],\"checks\":{\"bound\":\"defect\"}," TENSORS)};
    pageOfRecords(records, 3);
    assertSays("<strong>Not equivalent.</strong> A defect in 1 of 3 cases that ran (1 BIASED). The first: dV: too large.");
    assertSays("<pre>dualkv replay x</pre>");
    assertSays("not judged (cases): LSE (1)");
    assertSays("Power was not measured");
    assert_true(strstr(page, "<b class=\"no\">BIASED") < strstr(page, "<b class=\"unsure\">INCONCLUSIVE"));
}

static void first_screen_of_what_is_not_known(void **state) {
    (void)state;
    static const char *const weak[] = {RECORD("emu", "shape=9", "INCONCLUSIVE", "weak", TENSORS)};
    static const char *const blind[] = {RECORD("emu", "shape=9", "PASSED", "", TENSORS "," POWER("0.5"))};
    static const char *const refused[] = {RECORD("emu", "shape=9", "UNSUPPORTED", "no", "\"runs\":1")};
    static const char *const broken[] = {RECORD("emu", "shape=9", "PASSED", "", TENSORS),
                                         RECORD("emu", "shape=9", "HARNESS_ERROR", "oh", "\"runs\":1")};
    pageOfRecords(weak, 1);
    assertSays("<strong>Inconclusive.</strong> No defect in 1 judged case; in 1 the evidence was too weak");
    pageOfRecords(blind, 1);
    assertSays("<strong>Inconclusive.</strong> No defect in 1 judged case; in 1 stratum some small fault");
    assertSays("<li>O response 17-64: no case would have seen first-key</li>");
    pageOfRecords(refused, 1);
    assertSays("<strong>Nothing was judged.</strong>");
    pageOfRecords(broken, 2);
    assertSays("<strong>Not shown.</strong> No defect in 1 judged case, but the harness itself failed in 1.");
}

/* Each is skipped, with its line's number, or shown as text. */
static void hostile_records(void **state) {
    (void)state;
    char path[] = "/tmp/dualkv-test-XXXXXX";
    FILE *f = fdopen(mkstemp(path), "w");
    dkv_gather g = {0};
    dkv_err err = {0};
    fputs(RECORD("<script>alert(1)</script>", "shape=9", "FAILED", "</p><img src=x onerror=alert(1)>", TENSORS) "\n", f);
    fputs("{\"line\":\"shape=9\",\"kernel\":\"emu\",\"status\":\"PAS\n\n", f); /* truncated; an empty line */
    fputs(RECORD("emu", "shape=9", "<b>PASSED</b>", "", TENSORS) "\n", f);
    fputs(RECORD("emu", "shape=<i>9", "PASSED", "", TENSORS) "\n", f);
    fputs(RECORD("\xff\xfe\"\\u0000\\ud800", "shape=9", "PASSED", "", TENSORS) "\n", f);
    fputs(RECORD("e\xff\xc0\xbcscript>", "shape=9", "FAILED", "\\u202e\\u0001", "\"replay\":\"<!--\",\"tensors\":{\"O\":{"
                 "\"max_bound_ratio\":\"nan\",\"twin_rms\":1e999,\"total\":1e308,\"regions\":{\"prompt\":{\"max_bound_ratio\":"
                 "-1e999},\"<x>\":3}},\"<u>\":{},\"dQ\":[7]},\"checks\":{\"<s>\":\"defect\"},\"level\":-1e999,"
                 "\"power\":{\"longest\":1e999,\"strata\":{\"<em>\":{\"<q>\":\"nan\"}}}") "\n", f);
    fputs("[[[[[[]]]]]]\n7\nnull\n\"x\"\n", f);
    for (int i = 0; i < 5000; i++) fputc('[', f);
    fputs("\n" RECORD("emu", "shape=9", "PASSED", "", TENSORS), f);
    fputc(0, f); /* hides what follows it */
    fputs("x\n{\"line\":\"shape=9\",\"kernel\":\"<a>\",\"ms_fwd\":1e999,\"tflops_fwd\":\"nan\",\"device\":\"<H200>\"}\n", f);
    fputs("{\"fault\":\"<f>\",\"found\":false,\"doc\":\"<d>\",\"cases\":-1e999}\n{\"clean_cases\":1e999}\n", f);
    fclose(f);
    assert_int_equal(dkv_gatherFile(&g, path, "", &err), 0);
    assert_int_equal(g.files[0].records, 5);
    static const long bad[] = {2, 4, 5, 6, 8, 9, 10, 11, 12, 13};
    assert_int_equal(g.files[0].bad, 10);
    assert_memory_equal(g.files[0].bad_lines, bad, sizeof bad);
    pageOf(&g);
    assertSays("10 lines were no records and were skipped");
    assertSays("2, 4, 5, 6, 8, 9, 10, 11, 12, 13</td>");
    assertSays("&lt;script&gt;alert(1)&lt;/script&gt;</h2>");
    assertSays("&lt;/p&gt;&lt;img src=x onerror=alert(1)&gt;");
    assertSays("&lt;b&gt;.jsonl");
    assert_null(strstr(page, "nan<"));
    dkv_freeGather(&g);
    unlink(path);
}

static void rooflines(void **state) {
    (void)state;
    static const char *const records[] = {
        "{\"line\":\"shape=8192+32x1024 heads=32:8 dim=128\",\"kernel\":\"cuda\",\"device\":\"NVIDIA H200\",\"ms_fwd\":17.8,"
        "\"ms_bwd\":72.1,\"tflops_fwd\":293.5,\"tflops_bwd\":181,\"peak_bytes\":2694840320}",
        "{\"line\":\"shape=64\",\"kernel\":\"ref\",\"device\":\"cpu\",\"ms_fwd\":1,\"tflops_fwd\":0.05,\"gflops_dgemm\":100}"};
    pageOfRecords(records, 2);
    assertSays("30 % of 989 <small>(arithmetic)</small>");
    assertSays("18 % of 989");
    assertSays("2.51 GiB");
    assertSays("50 % of 100 GFLOP/s <small>(dgemm, measured)</small>");
}

static void kill_matrix(void **state) {
    (void)state;
    static const char *const records[] = {
        "{\"fault\":\"A1\",\"doc\":\"a limit\",\"control\":false,\"found\":true,\"cases\":18,\"in_suite\":true,\"allclose\":2,\"nmse\":null,"
        "\"peer\":3,\"check\":\"bound\",\"line\":\"shape=1+1\"}",
        "{\"fault\":\"B2\",\"doc\":\"a tail\",\"control\":false,\"found\":false,\"cases\":200,\"in_suite\":false,\"allclose\":null,\"nmse\":null,"
        "\"peer\":null}",
        "{\"fault\":\"E5\",\"doc\":\"a control\",\"control\":true,\"found\":false,\"cases\":200}",
        "{\"kernel\":\"emu\",\"clean_cases\":600,\"false_alarms\":0,\"false_alarms_allclose\":34}"};
    pageOfRecords(records, 4);
    assertSays("<li>1 of 2 planted faults found; 0 false alarms in 600 cases of the kernel without a fault</li>");
    assertSays("<li>1 of 2 by the suite alone</li>");
    assertSays("<li>1 of 2 by allclose at usual tolerances, on the same cases; 34 false alarms</li>");
    assertSays("<tr><th scope=\"row\">A1</th><td>a limit</td><td>18</td><td>yes</td><td>2</td><td class=\"gap\">no</td><td>3</td>");
    assertSays("<tr class=\"bad\"><th scope=\"row\">B2</th><td>a tail</td><td><b>no</b></td><td>no</td>");
    assertSays("<tr><th scope=\"row\">E5</th><td>a control</td><td>no, as it must</td><td>–</td>");
}

static unsigned edgesOf(const char *line) {
    dkv_problem p = {0};
    dkv_err err = {0};
    assert_int_equal(dkv_parseProblem(line, NULL, &p, &err), 0);
    unsigned edges = dkv_edgesOf(&p);
    dkv_freeProblem(&p);
    return edges;
}

static void classes_of_shapes(void **state) {
    (void)state;
    assert_int_equal(edgesOf("shape=20"), 1);
    assert_int_equal(edgesOf("shape=20+5"), 2);
    assert_int_equal(edgesOf("shape=20+5@3"), 2 | 8);
    assert_int_equal(edgesOf("shape=20k+5"), 2 | 8);
    assert_int_equal(edgesOf("shape=20+(5+5)"), 2 | 4);
    assert_int_equal(edgesOf("shape=20/1"), 1 | 16 | 64);
    assert_int_equal(edgesOf("shape=20+0"), 2 | 32);
    assert_int_equal(edgesOf("shape=129"), 1 | 128);
    assert_int_equal(edgesOf("shape=40+23"), 2 | 128);
}

static double cpuSeconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* 20,000 cases, most of them failures with long sentences full of what must be escaped and maps that cannot be drawn shorter, of
 * 100 kernels. The last thousands take no longer than the first. */
static void many_records(void **state) {
    (void)state;
    static char why[1000], cells[1601], record[8000];
    dkv_gather g = {0};
    struct rusage use;
    double start = cpuSeconds(), quarter[4] = {0};
    memset(why, '\'', sizeof why - 1);
    for (int i = 0; i < 1600; i++) cells[i] = (i + i / 40) % 2 ? 'A' : 'Z';
    for (int i = 0; i < 20000; i++) {
        snprintf(record, sizeof record,
                 RECORD("k%d", "shape=%d+%d seed=%d", "%s", "%s", TENSORS "," POWER("%d") ",\"weights_forward\":{\"rows\":{\"tile\":64,"
                        "\"tiles\":[20,20]},\"columns\":{\"tile\":64,\"tiles\":[40]},\"cells\":\"%s\"}"),
                 i % 300 + 1, i % 7, i + 1, i % 100, i % 5 ? "FAILED" : "PASSED", why, i % 9, cells);
        assert_int_equal(dkv_gatherRecord(&g, record), 1);
        if (i % 5000 == 4999) quarter[i / 5000] = cpuSeconds();
    }
    assert_true(quarter[3] - quarter[2] < 0.5 + 3 * (quarter[0] - start));
    pageOf(&g);
    double end = cpuSeconds();
    assert_int_equal(g.total, 20000);
    assert_int_equal(g.n_kernels, DKV_GATHER_KERNELS);
    assert_true(strlen(page) < (size_t)5 << 20);
    assert_true(end - start < 20); /* about one second, without sanitizers */
    getrusage(RUSAGE_SELF, &use);
    assert_true(use.ru_maxrss < 1 << 20);
    assertSays("more are in the records");
    assertSays("Further kernels, not shown in full");
    dkv_freeGather(&g);
}

static void same_records_same_bytes(void **state) {
    (void)state;
    static const char *const records[] = {RECORD("emu", "shape=9+3", "PASSED", "", TENSORS "," POWER("4"))};
    char *first = strdup(pageOfRecords(records, 1));
    assert_string_equal(pageOfRecords(records, 1), first);
    free(first);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_escaped), cmocka_unit_test(code_is_shown_as_it_is),
        cmocka_unit_test(first_screen_of_a_pass),
        cmocka_unit_test(first_screen_of_a_defect),
        cmocka_unit_test(first_screen_of_what_is_not_known),
        cmocka_unit_test(hostile_records),
        cmocka_unit_test(rooflines),
        cmocka_unit_test(kill_matrix),
        cmocka_unit_test(classes_of_shapes),
        cmocka_unit_test(many_records),
        cmocka_unit_test(same_records_same_bytes),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(page);
    return failed;
}
