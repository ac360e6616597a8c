/* The certificate: when there is none, what lies inside it, what an edit does. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "certificate.h"
#include "../verify/status.h"

#define RECORD(line, status, more)                                                                                   \
    "{\"line\":\"" line "\",\"kernel\":\"k\",\"kernel_sha256\":\"aa\",\"status\":\"" status "\",\"why\":\"because\","  \
    "\"device\":\"d\",\"commit\":\"c\",\"generator\":\"1\",\"level\":1e-6,\"declared\":true,\"tensors\":{\"O\":{"      \
    "\"max_bound_ratio\":0.5,\"twin_rms\":1,\"total\":64}}," more "\"replay\":\"x\"}"
#define POWER(ratio) "\"power\":{\"longest\":29,\"scale_error\":0.001,\"strata\":{\"O response 17-64\":{\"first-key\":" ratio "}}},"
#define GOOD(line) RECORD(line, "PASSED", POWER("5"))

static dkv_evidence *evidence;

static void add(const char *json) { assert_int_equal(dkv_addEvidence(evidence, json), 1); }

/* Different problems of the same kind. */
static void addGood(int n) {
    char json[1000];
    for (int i = 1; i <= n; i++) {
        snprintf(json, sizeof json, GOOD("shape=20+2x16 seed=%d"), i);
        add(json);
    }
}

static int fresh(void **state) {
    (void)state;
    if (evidence) dkv_freeEvidence(evidence);
    else evidence = calloc(1, sizeof *evidence);
    addGood(20);
    return 0;
}

static int forget(void **state) {
    (void)state;
    dkv_freeEvidence(evidence);
    free(evidence);
    evidence = NULL;
    return 0;
}

static void mustRefuse(int code, const char *says) {
    dkv_err err = {0};
    int got = 0, rc = dkv_refuseCertificate(evidence, &got, &err);
    if (!rc || got != code || !strstr(err.text, says)) fail_msg("code %d instead of %d: '%s' lacks '%s'", got, code, err.text, says);
}

static void mustBe(void) {
    dkv_err err = {0};
    int code = 0;
    if (dkv_refuseCertificate(evidence, &code, &err)) fail_msg("%s", err.text);
}

static void twenty_good_cases_are_enough(void **state) {
    (void)state;
    mustBe();
    dkv_freeEvidence(evidence);
    addGood(19);
    for (int i = 0; i < 5; i++) add(GOOD("seed=1 shape=20+16,16")); /* the first again, in other words */
    mustRefuse(3, "19 different cases passed, fewer than 20");
    dkv_freeEvidence(evidence);
    mustRefuse(3, "no record");
}

static void a_defect_refuses_unless_waived(void **state) {
    (void)state;
    add(RECORD("shape=3", "FAILED", "\"waiver\":{\"reason\":\"known\",\"until\":\"2027-01-01\"},"));
    mustBe();
    char *text = dkv_printCertificate(evidence, "v", "cmd");
    assert_non_null(strstr(text, "FAILED shape=3: waived until 2027-01-01: known"));
    free(text);
    add(RECORD("shape=4", "BIASED", ""));
    mustRefuse(1, "1 defect; the first: BIASED shape=4: because");
}

static void a_harness_error_refuses(void **state) {
    (void)state;
    add(RECORD("shape=3", "HARNESS_ERROR", ""));
    mustRefuse(3, "harness");
}

static void what_is_inconclusive_refuses(void **state) {
    (void)state;
    add(RECORD("shape=3", "INCONCLUSIVE", ""));
    mustRefuse(4, "INCONCLUSIVE");
}

static void a_blind_stratum_refuses(void **state) {
    (void)state;
    add(RECORD("shape=3", "PASSED", "\"power\":{\"longest\":2,\"strata\":{\"dK prompt 1-16\":{\"scale\":0.5}}},"));
    mustRefuse(4, "dK prompt 1-16 (k): no case would have seen scale");
    dkv_freeEvidence(evidence);
    for (int i = 1; i <= 20; i++) {
        char json[1000];
        snprintf(json, sizeof json, RECORD("shape=%d", "PASSED", ""), i);
        add(json);
    }
    mustRefuse(4, "what would have been seen");
}

static void most_must_not_be_refused(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) add(RECORD("shape=3", "UNSUPPORTED", ""));
    mustBe();
    add(RECORD("shape=3", "UNSUPPORTED", ""));
    mustRefuse(3, "refused 21 of 41");
}

static void mixtures_are_no_evidence(void **state) {
    (void)state;
    static const char *const others[][2] = {
        {"\"kernel\":\"other\",\"device\":\"d\",\"kernel_sha256\":\"aa\",\"generator\":\"1\"", "several kernels ('k', 'other')"},
        {"\"kernel\":\"k\",\"device\":\"e\",\"kernel_sha256\":\"aa\",\"generator\":\"1\"", "several devices"},
        {"\"kernel\":\"k\",\"device\":\"d\",\"kernel_sha256\":\"bb\",\"generator\":\"1\"", "several versions of the kernel's file"},
        {"\"kernel\":\"k\",\"device\":\"d\",\"kernel_sha256\":\"aa\",\"generator\":\"2\"", "several versions of the input generator"}};
    for (int i = 0; i < 4; i++) {
        char json[400];
        fresh(NULL);
        snprintf(json, sizeof json, "{\"line\":\"shape=3\",\"status\":\"PASSED\",%s}", others[i][0]);
        add(json);
        mustRefuse(2, others[i][1]);
    }
    dkv_freeEvidence(evidence);
    evidence->kernel = "k"; /* named: the other is not looked at */
    addGood(20);
    add("{\"line\":\"shape=3\",\"kernel\":\"other\",\"status\":\"FAILED\"}");
    mustBe();
}

/* Cases that may be of another kernel do not count beside those whose file is known. */
static void nameless_records_refuse(void **state) {
    (void)state;
    add("{\"line\":\"shape=3\",\"kernel\":\"k\",\"device\":\"d\",\"generator\":\"1\",\"status\":\"PASSED\"}");
    mustRefuse(3, "1 of 21 records do not say which file");
    fresh(NULL);
    add("{\"line\":\"shape=3\",\"kernel\":\"k\",\"kernel_sha256\":\"aa\",\"generator\":\"1\",\"status\":\"PASSED\"}");
    mustRefuse(3, "or on which device");
}

static void hostile_lines_are_no_records(void **state) {
    (void)state;
    static const char *const lines[] = {"", "{", "[]", "null", "{\"line\":1}", "{\"line\":\"shape=1\",\"kernel\":\"k\",\"status\":\"GOOD\"}",
                                        "{\"line\":\"shape=x\",\"kernel\":\"k\",\"status\":\"PASSED\"}", "{\"clean_cases\":-1}"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (dkv_addEvidence(evidence, lines[i]) != 0) fail_msg("taken: %s", lines[i]);
    add("{\"line\":\"shape=1\",\"kernel\":\"k\",\"status\":\"PASSED\",\"level\":\"nan\",\"tensors\":{\"O\":{\"max_bound_ratio\":\"nan\",\"total\":1e300}}}");
    char path[] = "/tmp/dualkv-test-XXXXXX";
    dkv_err err = {0};
    FILE *f = fdopen(mkstemp(path), "w");
    fprintf(f, "%s\n\n%s\ngarbage\n", GOOD("shape=1"), GOOD("shape=2"));
    fclose(f);
    assert_int_equal(dkv_readEvidence(evidence, path, "h", &err), DKV_EUSER);
    assert_non_null(strstr(err.text, ":4: not a record"));
    unlink(path);
}

/* ---- the scope ---- */

static char answers[16384];

static void takeAnswer(const dkv_covered *c, void *arg) {
    size_t at = strlen(answers);
    (void)arg;
    if (!c->inside) snprintf(answers + at, sizeof answers - at, "%s: %s\n", c->what, c->why);
}

static void mustCover(const dkv_scope *s, const char *line, const char *outside) {
    dkv_problem p = {0};
    dkv_err err = {0};
    assert_int_equal(dkv_parseProblem(line, NULL, &p, &err), 0);
    answers[0] = 0;
    int n = dkv_askScope(s, &p, false, takeAnswer, NULL);
    dkv_freeProblem(&p);
    if ((n > 0) != (outside[0] != 0) || !strstr(answers, outside)) fail_msg("%s: %d outside:\n%s", line, n, answers);
}

static void the_rule(const dkv_scope *s) {
    mustCover(s, "shape=20+2x16", "");
    mustCover(s, "shape=20+2x16 seed=99 fill=hot run=twice", "");          /* how it is tested */
    mustCover(s, "shape=25+3x12 heads=2:2", "");                           /* between tested sizes, on a pair that was */
    mustCover(s, "shape=31+2x16", "P=31: judged from 20 to 30 only");
    mustCover(s, "shape=20+2x17", "R=17: judged from 8 to 16 only");
    mustCover(s, "shape=20+7x9", "N=7: judged from 2 to 4 only");
    mustCover(s, "shape=20+2x16 dim=72", "dim=72: never judged; judged: 64, 128");
    mustCover(s, "shape=20+2x16 softcap=30", "softcap=on: never judged");
    mustCover(s, "shape=20+2x16 dtype=fp16 dim=128", "dtype=fp16: never judged");
    mustCover(s, "shape=30+4x8 dim=128", "");
    mustCover(s, "shape=30+4x8 dim=128 mask=full", "mask=full: each was judged, the two never together"); /* the pair */
    mustCover(s, "shape=20+2x16 grad=off", "gradients=off: never judged");
    mustCover(s, "shape=20+2x16@5", "context=limited");
    mustCover(s, "shape=20+2x(8+1)", "branches=tree");
    mustCover(s, "shape=20+2x16/20+2x16", "groups=several");
    mustCover(s, "shape=20+2x16 heads=4:1", "gqa=4");
    mustCover(s, "shape=20+2x16 layout=fused", "layout=fused");
    mustCover(s, "shape=20+2x16 mask=full", "");
    mustCover(s, "shape=22+2x8 mask=window:9", "");
    mustCover(s, "shape=22+2x8 mask=window:5", "window=5: judged from 8 to 10 only");
    mustCover(s, "shape=20+2x16 mask=window:9", "P=20: judged from 22 to 22 only with window bf16"); /* sizes of that mask */
}

static void the_scope_says_what_is_inside(void **state) {
    (void)state;
    dkv_scope *back = calloc(1, sizeof *back);
    dkv_err err = {0};
    add(GOOD("shape=30+4x8 dim=128"));
    add(GOOD("shape=20+2x16 heads=2:2"));
    add(GOOD("shape=20+2x16 mask=full"));
    add(GOOD("shape=22+2x8 mask=window:8"));
    add(GOOD("shape=22+2x8 mask=window:10"));
    add(RECORD("shape=20+2x16 softcap=30", "UNSUPPORTED", "")); /* refused: not in it */
    the_rule(&evidence->scope);
    cJSON *o = dkv_printScope(&evidence->scope);
    assert_int_equal(dkv_readScope(o, back, &err), 0);
    the_rule(back);
    cJSON_Delete(o);
    free(back);
}

static void many_points_keep_their_ends(void **state) {
    (void)state;
    for (int i = 1; i <= 400; i++) {
        char json[600];
        snprintf(json, sizeof json, "{\"line\":\"shape=%d\",\"kernel\":\"k\",\"status\":\"PASSED\"}", (i * 37) % 401 + 1000);
        add(json);
    }
    const dkv_span *s = &evidence->scope.kind[DUALKV_CAUSAL][DUALKV_BF16].size[DKV_SIZE_P];
    assert_int_equal(s->n, DKV_SCOPE_POINTS);
    assert_true(s->point[0] == 20 && s->point[1] == 1001 && s->point[s->n - 1] == 1400);
    for (int i = 2; i < s->n; i++) assert_true(s->point[i] > s->point[i - 1] && s->point[i] - s->point[i - 1] < 60);
}

static void an_edited_file_is_refused(void **state) {
    (void)state;
    char path[] = "/tmp/dualkv-test-XXXXXX";
    dkv_err err = {0};
    dkv_certificate *c = calloc(1, sizeof *c);
    char *text = dkv_printCertificate(evidence, "0", "dualkv certificate r.jsonl --out c.json");
    assert_non_null(text);
    close(mkstemp(path));
    int tried = 0, kept = 0;
    for (size_t at = 0; at < strlen(text); at += at < 300 ? 1 : 13) {
        FILE *f = fopen(path, "w");
        char was = text[at];
        text[at] = was == '2' ? '3' : was == '\t' ? ' ' : was == 'a' ? 'b' : '2';
        fputs(text, f);
        fclose(f);
        text[at] = was;
        int rc = dkv_readCertificate(path, c, &err);
        tried++;
        if (rc) assert_int_equal(rc, DKV_EUSER);
        else {
            kept++;
            assert_true(was == '\t' || was == '\n'); /* spaces are not sealed */
            dkv_freeCertificate(c);
        }
    }
    assert_true(tried > 500 && kept < tried / 2);
    FILE *f = fopen(path, "w");
    fputs(text, f);
    fclose(f);
    assert_int_equal(dkv_readCertificate(path, c, &err), 0);
    assert_string_equal(c->kernel, "k");
    assert_string_equal(c->hash, "aa");
    mustCover(&c->scope, "shape=20+2x16", "");
    dkv_freeCertificate(c);
    truncate(path, (off_t)strlen(text) / 2);
    assert_int_equal(dkv_readCertificate(path, c, &err), DKV_EUSER);
    unlink(path);
    free(text);
    free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(twenty_good_cases_are_enough, fresh),
        cmocka_unit_test_setup(a_defect_refuses_unless_waived, fresh),
        cmocka_unit_test_setup(a_harness_error_refuses, fresh),
        cmocka_unit_test_setup(what_is_inconclusive_refuses, fresh),
        cmocka_unit_test_setup(a_blind_stratum_refuses, fresh),
        cmocka_unit_test_setup(most_must_not_be_refused, fresh),
        cmocka_unit_test_setup(mixtures_are_no_evidence, fresh),
        cmocka_unit_test_setup(nameless_records_refuse, fresh),
        cmocka_unit_test_setup(hostile_lines_are_no_records, fresh),
        cmocka_unit_test_setup(the_scope_says_what_is_inside, fresh),
        cmocka_unit_test_setup(many_points_keep_their_ends, fresh),
        cmocka_unit_test_setup_teardown(an_edited_file_is_refused, fresh, forget),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
