/* report_junit.h: JUnit XML in the shape that CI servers share (data/schemas/): testsuites > testsuite > properties, testcase >
 * failure, error or skipped. Whatever is in names and texts: escaped, and bytes that are no XML characters replaced by
 * U+FFFD. */
#ifndef DKV_REPORT_JUNIT_H
#define DKV_REPORT_JUNIT_H

#include <stdio.h>

#include "../ref/dkv_err.h"

typedef enum dkv_junit_end { DKV_JUNIT_PASSED, DKV_JUNIT_FAILURE, DKV_JUNIT_ERROR, DKV_JUNIT_SKIPPED } dkv_junit_end;

enum { DKV_JUNIT_SUITES = 8 };
typedef struct dkv_junit {
    struct {
        char name[64];
        FILE *cases; /* into text */
        char *text;
        size_t size;
        long n, ends[4];
        double seconds;
    } suite[DKV_JUNIT_SUITES];
    int n;
    char *properties; /* of every suite, as XML; owned */
    size_t properties_size;
} dkv_junit;

/* Adds a test case; type, message, text: of an end that is not passed (message one line, text any). */
int dkv_addJunit(dkv_junit *j, const char *suite, const char *group, const char *name, double seconds, dkv_junit_end end,
                 const char *type, const char *message, const char *text, dkv_err *err);
/* A property of every suite; name: not empty. */
int dkv_addJunitProperty(dkv_junit *j, const char *name, const char *value, dkv_err *err);
/* Adds a record: a defect is a failure, a HARNESS_ERROR an error, a refusal or INCONCLUSIVE skipped. DKV_EUSER: none.
 * excused: why its defect does not count, or NULL. */
int dkv_addJunitRecord(dkv_junit *j, const char *suite, const char *record, const char *excused, dkv_err *err);
int dkv_writeJunit(dkv_junit *j, const char *path, dkv_err *err);
void dkv_freeJunit(dkv_junit *j);

#endif
