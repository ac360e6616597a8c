#include "report_junit.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../data/fields.h"

/* The character at s: its code point, 0xFFFD for what is not UTF-8 or no XML character; *n bytes long. */
static uint32_t takeCharacter(const unsigned char *s, size_t *n) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    size_t want = s[0] < 0x80 ? 1 : s[0] >> 5 == 6 ? 2 : s[0] >> 4 == 14 ? 3 : s[0] >> 3 == 30 ? 4 : 0;
    uint32_t c = want == 1 ? s[0] : want ? s[0] & (0x7Fu >> want) : 0;
    *n = 1;
    if (!want) return 0xFFFD;
    for (size_t i = 1; i < want; i++) {
        if (s[i] >> 6 != 2) return 0xFFFD; /* the end of the string is none, either */
        c = c << 6 | (s[i] & 0x3F);
    }
    *n = want;
    if (c < least[want] || c > 0x10FFFF || (c >= 0xD800 && c < 0xE000) || c == 0xFFFE || c == 0xFFFF) return 0xFFFD;
    return c >= 0x20 || c == '\t' || c == '\n' || c == '\r' ? c : 0xFFFD;
}

static void putXml(FILE *f, const char *text, int attribute) {
    const unsigned char *s = (const unsigned char *)text;
    for (size_t n; *s; s += n) {
        uint32_t c = takeCharacter(s, &n);
        if (c == 0xFFFD) fputs("\xEF\xBF\xBD", f);
        else if (c == '&') fputs("&amp;", f);
        else if (c == '<') fputs("&lt;", f);
        else if (c == '>') fputs("&gt;", f);
        else if (c == '"') fputs("&quot;", f);
        else if (c == '\r' || (attribute && (c == '\n' || c == '\t'))) fprintf(f, "&#%u;", (unsigned)c);
        else fwrite(s, 1, n, f);
    }
}

static void putAttribute(FILE *f, const char *name, const char *text) {
    fprintf(f, " %s=\"", name);
    putXml(f, text, 1);
    fputc('"', f);
}

static int findSuite(dkv_junit *j, const char *name) {
    int i = 0;
    while (i < j->n && strcmp(j->suite[i].name, name) != 0) i++;
    if (i < j->n) return i;
    if (i == DKV_JUNIT_SUITES || strlen(name) >= sizeof j->suite[i].name) return -1;
    memset(&j->suite[i], 0, sizeof j->suite[i]);
    strcpy(j->suite[i].name, name);
    j->suite[i].cases = open_memstream(&j->suite[i].text, &j->suite[i].size);
    if (!j->suite[i].cases) return -1;
    return j->n++;
}

int dkv_addJunit(dkv_junit *j, const char *suite, const char *group, const char *name, double seconds, dkv_junit_end end,
                 const char *type, const char *message, const char *text, dkv_err *err) {
    static const char *const words[] = {NULL, "failure", "error", "skipped"};
    int i = findSuite(j, suite);
    if (i < 0) return dkv_fail(err, DKV_EHARNESS, "no room for the JUnit suite '%.40s'", suite);
    FILE *f = j->suite[i].cases;
    if (!(seconds > 0 && seconds < 1e9)) seconds = 0;
    j->suite[i].n++;
    j->suite[i].ends[end]++;
    j->suite[i].seconds += seconds;
    fprintf(f, "    <testcase");
    putAttribute(f, "name", name);
    putAttribute(f, "classname", group);
    fprintf(f, " time=\"%.3f\"", seconds);
    if (!words[end]) {
        fprintf(f, "/>\n");
        return 0;
    }
    fprintf(f, ">\n      <%s", words[end]);
    if (end != DKV_JUNIT_SKIPPED) putAttribute(f, "type", type);
    putAttribute(f, "message", message);
    fputc('>', f);
    putXml(f, text, 0);
    fprintf(f, "</%s>\n    </testcase>\n", words[end]);
    return 0;
}

int dkv_addJunitRecord(dkv_junit *j, const char *suite, const char *record, const char *excused, dkv_err *err) {
    cJSON *o = cJSON_Parse(record);
    const cJSON *seconds = cJSON_GetObjectItemCaseSensitive(o, "seconds");
    const char *status = dkv_textOf(o, "status"), *why = dkv_textOf(o, "why");
    dkv_junit_end end = DKV_JUNIT_FAILURE;
    int rc;
    if (!status[0] || !dkv_textOf(o, "line")[0]) {
        cJSON_Delete(o);
        return dkv_fail(err, DKV_EUSER, "not a record");
    }
    if (!strcmp(status, "PASSED")) end = DKV_JUNIT_PASSED;
    else if (!strcmp(status, "HARNESS_ERROR")) end = DKV_JUNIT_ERROR;
    else if (excused || !strcmp(status, "UNSUPPORTED") || !strcmp(status, "INCONCLUSIVE")) end = DKV_JUNIT_SKIPPED;
    char *message = NULL;
    if (asprintf(&message, "%s: %s%s%s", status, why, excused ? "; waived: " : "", excused ? excused : "") < 0)
        message = NULL;
    rc = dkv_addJunit(j, suite, dkv_textOf(o, "kernel"), dkv_textOf(o, "line"),
                      cJSON_IsNumber(seconds) ? seconds->valuedouble : 0, end, status, message ? message : status,
                      dkv_textOf(o, "replay"), err);
    free(message);
    cJSON_Delete(o);
    return rc;
}

int dkv_addJunitProperty(dkv_junit *j, const char *name, const char *value, dkv_err *err) {
    char *text = NULL, *all;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (!f) return dkv_fail(err, DKV_EHARNESS, "out of memory for JUnit");
    fputs("      <property", f);
    putAttribute(f, "name", name);
    putAttribute(f, "value", value);
    fputs("/>\n", f);
    if (fclose(f) || !(all = realloc(j->properties, j->properties_size + n))) {
        free(text);
        return dkv_fail(err, DKV_EHARNESS, "out of memory for JUnit");
    }
    memcpy(all + j->properties_size, text, n);
    j->properties = all;
    j->properties_size += n;
    free(text);
    return 0;
}

static void writeSuite(const dkv_junit *j, int i, const char *when, const char *host, FILE *f) {
    const long *ends = j->suite[i].ends;
    fprintf(f, "  <testsuite");
    putAttribute(f, "name", j->suite[i].name);
    fprintf(f, " package=\"dualkv\" id=\"%d\" timestamp=\"%s\"", i, when);
    putAttribute(f, "hostname", host[0] ? host : "localhost");
    fprintf(f, " tests=\"%ld\" failures=\"%ld\" errors=\"%ld\" skipped=\"%ld\" time=\"%.3f\">\n    <properties>\n",
            j->suite[i].n, ends[DKV_JUNIT_FAILURE], ends[DKV_JUNIT_ERROR], ends[DKV_JUNIT_SKIPPED], j->suite[i].seconds);
    if (j->properties) fwrite(j->properties, 1, j->properties_size, f);
    fputs("    </properties>\n", f);
    fflush(j->suite[i].cases);
    if (j->suite[i].text) fwrite(j->suite[i].text, 1, j->suite[i].size, f);
    fputs("    <system-out></system-out>\n    <system-err></system-err>\n  </testsuite>\n", f);
}

int dkv_writeJunit(dkv_junit *j, const char *path, dkv_err *err) {
    char when[32] = "", host[65] = "";
    time_t t = time(NULL);
    struct tm utc;
    if (gmtime_r(&t, &utc)) strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", &utc);
    if (gethostname(host, sizeof host - 1)) host[0] = 0;
    FILE *f = fopen(path, "we");
    if (!f) return dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", path, strerror(errno));
    fprintf(f, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n");
    for (int i = 0; i < j->n; i++) writeSuite(j, i, when, host, f);
    fprintf(f, "</testsuites>\n");
    bool bad = ferror(f) != 0;
    if (fclose(f) || bad) return dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", path, strerror(errno));
    return 0;
}

void dkv_freeJunit(dkv_junit *j) {
    for (int i = 0; i < j->n; i++) {
        fclose(j->suite[i].cases);
        free(j->suite[i].text);
    }
    free(j->properties);
    *j = (dkv_junit){0};
}
