#include "log.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/fields.h"
#include "../ref/row.h"

#define CASES_MAX ((uint64_t)1 << 28) /* of a log: its bits are kept in memory */

static int setDone(dkv_log *log, uint64_t n, dkv_err *err) {
    if (n >= log->n_done) {
        uint64_t bits = (n | 8191) + 1;
        uint8_t *done = realloc(log->done, bits / 8);
        if (!done) return dkv_fail(err, DKV_EHARNESS, "out of memory");
        memset(done + log->n_done / 8, 0, (bits - log->n_done) / 8);
        log->done = done;
        log->n_done = bits;
    }
    if (log->done[n / 8] >> n % 8 & 1) return dkv_fail(err, DKV_EUSER, "case %" PRIu64 " stands twice", n);
    log->done[n / 8] |= (uint8_t)(1 << n % 8);
    return 0;
}

/* Is `line` the case of that number? */
static int compareLine(const dkv_log *log, uint64_t n, const char *line, dkv_err *err) {
    char *own = malloc(DKV_LINE_MAX + 1);
    dkv_problem p = {0};
    int rc = own ? dkv_sampleCase(log->sampler, n, &p, err) : dkv_fail(err, DKV_EHARNESS, "out of memory");
    if (!rc) rc = dkv_printProblem(&p, own, DKV_LINE_MAX + 1, err);
    if (!rc && strcmp(own, line))
        rc = dkv_fail(err, DKV_EUSER, "case %" PRIu64 " of this run is another line: '%.120s'", n, own);
    dkv_freeProblem(&p);
    free(own);
    return rc;
}

/* One line of the file. */
static int takeRecord(dkv_log *log, const cJSON *o, dkv_err *err) {
    const cJSON *fuzz = cJSON_GetObjectItemCaseSensitive(o, "fuzz");
    const cJSON *number = cJSON_GetObjectItemCaseSensitive(fuzz, "case");
    const char *profile = dkv_profileName((int)log->sampler->profile);
    dkv_status status = dkv_findStatus(dkv_textOf(o, "status"));
    char seed[32];
    snprintf(seed, sizeof seed, "%" PRIu64, log->sampler->seed);
    if (!cJSON_IsNumber(number) || number->valuedouble < 0 || number->valuedouble >= (double)CASES_MAX ||
        status == DKV_ST_N)
        return dkv_fail(err, DKV_EUSER, "not a record of a fuzzing run");
    if (strcmp(dkv_textOf(o, "kernel"), log->kernel) || strcmp(dkv_textOf(fuzz, "profile"), profile) ||
        strcmp(dkv_textOf(fuzz, "seed"), seed) || cJSON_HasObjectItem(fuzz, "forward") != log->sampler->forward)
        return dkv_fail(
            err, DKV_EUSER, "is of kernel %.80s, seed %.24s, profile %.24s%s; this run is of %.80s, %s, %s%s",
            dkv_textOf(o, "kernel"), dkv_textOf(fuzz, "seed"), dkv_textOf(fuzz, "profile"), cJSON_HasObjectItem(fuzz, "forward") ? ", forward" : "",
            log->kernel, seed, profile, log->sampler->forward ? ", forward" : "");
    log->counts[status]++;
    int rc = compareLine(log, (uint64_t)number->valuedouble, dkv_textOf(o, "line"), err);
    return rc ? rc : setDone(log, (uint64_t)number->valuedouble, err);
}

/* Reads what is there; cuts off a last line without its end. */
static int readRecords(dkv_log *log, const char *path, dkv_err *err) {
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return dkv_fail(err, DKV_EUSER, "--resume: '%s' is not a regular file", path);
    FILE *f = fopen(path, "r");
    char *row = NULL;
    size_t room = 0, n = 1;
    long number = 0;
    off_t whole = 0;
    dkv_err why = {0};
    int rc = 0;
    if (!f && errno == ENOENT) return 0;
    if (!f) return dkv_fail(err, DKV_EUSER, "--resume: cannot read '%s': %s", path, strerror(errno));
    while (!rc && n) {
        number++;
        if ((rc = dkv_readRow(f, &row, &room, &n, &why))) {
            dkv_fail(err, (dkv_code)rc, "%s:%ld: %s", path, number, why.text);
            break;
        }
        if (n == 0 || row[n - 1] != '\n') break;
        cJSON *o = cJSON_ParseWithLength(row, n);
        rc = o ? takeRecord(log, o, &why) : dkv_fail(&why, DKV_EUSER, "not JSON");
        cJSON_Delete(o);
        if (rc) dkv_fail(err, (dkv_code)rc, "%s:%ld: %s", path, number, why.text);
        whole += (off_t)n;
    }
    free(row);
    fclose(f);
    if (!rc && truncate(path, whole) != 0)
        rc = dkv_fail(err, DKV_EUSER, "--resume: cannot write '%s': %s", path, strerror(errno));
    return rc;
}

int dkv_openLog(dkv_log *log, const char *path, bool resume, const char *kernel, const dkv_sampler *s,
                dkv_err *err) {
    *log = (dkv_log){.file = {.path = path, .append = resume}, .kernel = kernel, .sampler = s};
    if (resume && (!path || !strcmp(path, "-")))
        return dkv_fail(err, DKV_EUSER, "--resume goes on with the file of --json");
    int rc = dkv_checkRecordPath(path, err);
    if (!rc && resume) rc = readRecords(log, path, err);
    if (rc) free(log->done);
    return rc;
}

int dkv_logCase(dkv_log *log, const dkv_fuzzed *f, dkv_err *err) {
    if (!log->file.path) return 0;
    char *json = dkv_printRecord(f->result), *whole = NULL;
    const char *alone = f->alone < 0 ? "" : f->alone ? ",\"alone\":true" : ",\"alone\":false";
    int rc = json ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for a record");
    if (!rc && asprintf(&whole,
                        "%.*s,\"fuzz\":{\"profile\":\"%s\",\"seed\":\"%" PRIu64 "\",\"case\":%" PRIu64 "%s%s}}",
                        (int)strlen(json) - 1, json, dkv_profileName((int)log->sampler->profile),
                        log->sampler->seed, f->n, log->sampler->forward ? ",\"forward\":true" : "", alone) < 0) {
        whole = NULL;
        rc = dkv_fail(err, DKV_EHARNESS, "out of memory for a record");
    }
    if (!rc) rc = dkv_writeRecord(&log->file, whole, err);
    free(whole);
    free(json);
    return rc;
}

int dkv_closeLog(dkv_log *log, dkv_err *err) {
    free(log->done);
    log->done = NULL;
    return dkv_closeRecords(&log->file, err);
}
