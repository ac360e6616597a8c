/* JUnit: well-formed whatever is in names and texts, counts right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report_junit.h"

static char text[1 << 20];

static const char *written(dkv_junit *j) {
    char path[] = "/tmp/dualkv-junit-XXXXXX";
    dkv_err err = {0};
    int fd = mkstemp(path);
    assert_int_equal(dkv_writeJunit(j, path, &err), 0);
    FILE *f = fdopen(fd, "r");
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    unlink(path);
    return text;
}

/* Tags nest, attributes are quoted, entities are known, characters are XML's: all that a parser would ask of this subset. */
static int isWellFormed(const char *s) {
    char open[16][40];
    int depth = 0, roots = 0, quoted = 0, tag = 0;
    s = strchr(s, '\n'); /* the declaration */
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c < 32 && c != '\n' && c != '\t') return 0;
        if (c == '&') {
            size_t n = strcspn(s, ";");
            if (!(s[n] && (!strncmp(s, "&amp;", 5) || !strncmp(s, "&lt;", 4) || !strncmp(s, "&gt;", 4) ||
                           !strncmp(s, "&quot;", 6) || !strncmp(s, "&#10;", 5) || !strncmp(s, "&#9;", 4) ||
                           !strncmp(s, "&#13;", 5))))
                return 0;
        } else if (tag && c == '"') quoted = !quoted;
        else if (c == '<') {
            if (tag) return 0;
            size_t n = strcspn(s + 1, " >/");
            if (s[1] == '/') {
                n = strcspn(s + 2, ">");
                if (!depth || strlen(open[depth - 1]) != n || strncmp(open[--depth], s + 2, n)) return 0;
                s += 2 + n;
                continue;
            }
            if (depth == 16 || n > 38 || (roots += depth == 0) > 1) return 0;
            snprintf(open[depth++], 40, "%.*s", (int)n, s + 1);
            tag = 1;
        } else if (tag && !quoted && c == '>') {
            depth -= s[-1] == '/';
            tag = 0;
        }
    }
    return depth == 0 && !tag && roots == 1;
}

/* Under the schemas of Jenkins and of Ant. */
static void isValid(const char *xml) {
    char path[] = "/tmp/dualkv-junit-XXXXXX", command[200];
    static const char *const schemas[] = {"junit-10", "junit-ant"};
    const char *data = getenv("DUALKV_DATA");
    int fd = mkstemp(path);
    assert_int_equal(write(fd, xml, strlen(xml)), (ssize_t)strlen(xml));
    close(fd);
    for (int i = 0; i < 2; i++) {
        snprintf(command, sizeof command, "xmllint --nonet --noout --schema %s/schemas/%s.xsd %s 2>&1", data ? data : "data",
                 schemas[i], path);
        if (system(command)) fail_msg("%s is not valid under %s", path, schemas[i]);
    }
    unlink(path);
}

static void hostile_names_stay_names(void **state) {
    (void)state;
    static const char *const names[] = {"a<b>&\"'c", "\x01\x02\x1b[31m", "\xff\xfe", "\xc0\x80", "\xc1\xbc\xc1\xbc", "\xed\xa0\x80", "\xef\xbf\xbf\xef\xbf\xbe",
                                        "]]>", "<script>alert(1)</script>", "line\nline\ttab\r", "\xe2\x82", "\xf4\x90\x80\x80",
                                        "\xe2\x82\xac", "", "&amp;"};
    enum { N = sizeof names / sizeof names[0] };
    dkv_junit j = {0};
    dkv_err err = {0};
    for (int i = 0; i < N; i++)
        assert_int_equal(dkv_addJunitProperty(&j, "kernel", names[i], &err), 0);
    for (int i = 0; i < N; i++)
        assert_int_equal(dkv_addJunit(&j, names[i % 3], names[i], names[i], -1e300, (dkv_junit_end)(i % 4), names[i], names[i],
                                      names[i], &err), 0);
    const char *xml = written(&j);
    assert_true(isWellFormed(xml));
    assert_null(strstr(xml, "<script"));
    assert_null(strpbrk(xml, "\x01\x02\x1b\xff\xfe\xc0\xc1\xf4"));
    assert_null(strstr(xml, "\xed\xa0\x80"));
    assert_null(strstr(xml, "\xef\xbf\xbf"));
    assert_null(strstr(xml, "\xef\xbf\xbe"));
    assert_non_null(strstr(xml, "name=\"a&lt;b&gt;&amp;&quot;'c\""));
    assert_non_null(strstr(xml, "name=\"\xe2\x82\xac\""));
    assert_non_null(strstr(xml, "name=\"line&#10;line&#9;tab&#13;\""));
    assert_non_null(strstr(xml, " tests=\"5\" failures=\"1\" errors=\"1\" skipped=\"1\""));
    isValid(xml);
    dkv_freeJunit(&j);
    assert_string_equal(written(&j) + 39, "<testsuites>\n</testsuites>\n");
    assert_false(isWellFormed("\n<a><b></a></b>") || isWellFormed("\n<a>&x;</a>") || isWellFormed("\n<a><b></a>"));
}

static void records_end_as_they_ended(void **state) {
    (void)state;
    static const struct {
        const char *status, *want;
    } rows[] = {{"PASSED", "time=\"1.500\"/>"},          {"FAILED", "<failure type=\"FAILED\" message=\"FAILED: wrong &lt;here&gt;\">replay it</failure>"},
                {"HARNESS_ERROR", "<error type="}, {"UNSUPPORTED", "<skipped message=\"UNSUPPORTED: wrong"},
                {"INCONCLUSIVE", "<skipped message="}};
    dkv_err err = {0};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        dkv_junit j = {0};
        char json[300];
        snprintf(json, sizeof json, "{\"line\":\"shape=3\",\"kernel\":\"emu\",\"status\":\"%s\",\"why\":\"wrong <here>\","
                 "\"seconds\":1.5,\"replay\":\"replay it\"}", rows[i].status);
        assert_int_equal(dkv_addJunitRecord(&j, "suite", json, NULL, &err), 0);
        const char *xml = written(&j);
        assert_true(isWellFormed(xml));
        if (!strstr(xml, rows[i].want) || !strstr(xml, "<testcase name=\"shape=3\" classname=\"emu\""))
            fail_msg("no %s in %s", rows[i].want, xml);
        dkv_freeJunit(&j);
    }
    dkv_junit j = {0};
    assert_int_equal(dkv_addJunitRecord(&j, "s", "{\"line\":\"shape=3\",\"status\":\"FAILED\",\"why\":\"w\"}", "known", &err), 0);
    assert_non_null(strstr(written(&j), "<skipped message=\"FAILED: w; waived: known\">"));
    assert_int_equal(dkv_addJunitRecord(&j, "s", "{\"line\":7", NULL, &err), DKV_EUSER);
    dkv_freeJunit(&j);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hostile_names_stay_names),
        cmocka_unit_test(records_end_as_they_ended),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
