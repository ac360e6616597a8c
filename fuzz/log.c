#include "log.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/fields.h"
#include "../data/fill.h"
#include "../ref/row.h"
#include "../verify/kernel_hash.h"
#include "../verify/version.h"

#define CASES_MAX ((uint64_t)1 << 28) /* of a log: its bits are kept in memory */

static int growBits(uint8_t **bits, uint64_t from, uint64_t to, dkv_err *err) {
    uint8_t *more = realloc(*bits, to / 8);
    if (!more) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    memset(more + from / 8, 0, (to - from) / 8);
    *bits = more;
    return 0;
}

static int setDone(dkv_log *log, uint64_t n, bool refused, dkv_err *err) {
    const uint64_t bits = (n | 8191) + 1;
    const uint8_t bit = (uint8_t)(1 << n % 8);
    if (n >= log->n_done) {
        if (growBits(&log->done, log->n_done, bits, err) || growBits(&log->unsupported, log->n_done, bits, err))
            return DKV_EHARNESS;
        log->n_done = bits;
    }
    if (log->done[n / 8] & bit) return dkv_fail(err, DKV_EUSER, "case %" PRIu64 " stands twice", n);
    log->done[n / 8] |= bit;
    if (refused) log->unsupported[n / 8] |= bit;
    return 0;
}

static void freeBits(dkv_log *log) {
    free(log->done);
    free(log->unsupported);
    log->done = log->unsupported = NULL;
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

/* The value that ` OPTION VALUE` has among options; the default where it is not there. */
static void findValue(const char *options, const char *option, char *out, size_t n) {
    const size_t length = strlen(option);
    snprintf(out, n, "the default");
    for (const char *at = options; (at = strstr(at, option)); at += length)
        if (at > options && at[-1] == ' ' && at[length] == ' ') {
            snprintf(out, n, "%.*s", (int)strcspn(at + length + 1, " "), at + length + 1);
            return;
        }
}

/* Was the record made with the options that this run has? Its replay line has those that verdicts depend on. */
static int compareOptions(const char *line, const char *kernel, const char *replay, dkv_err *err) {
    static const char *const names[] = {"--arithmetic", "--repeats", "--timeout", "--level", "--budget", "--oracle"};
    char is[64], was[64], options[400] = "";
    char *own = malloc(DKV_REPLAY_MAX);
    if (!own) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    dkv_appendOptions(options, sizeof options, 0, true);
    dkv_replayCommand(line, kernel, own, DKV_REPLAY_MAX);
    const size_t common = strlen(own) - strlen(options);
    int rc = strcmp(own, replay) ? dkv_fail(err, DKV_EUSER, "was made by '%.200s', not '%.200s'", replay, own) : 0;
    for (size_t i = 0; i < sizeof names / sizeof *names && rc && !strncmp(own, replay, common); i++) {
        findValue(options, names[i], is, sizeof is);
        findValue(replay + common, names[i], was, sizeof was);
        if (!strcmp(is, was)) continue;
        rc = dkv_fail(err, DKV_EUSER, "is of a run with another %s: %s; here it is %s", names[i], was, is);
        break;
    }
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
        number->valuedouble != (double)(uint64_t)number->valuedouble || status == DKV_ST_N)
        return dkv_fail(err, DKV_EUSER, "not a record of a fuzzing run");
    if (strcmp(dkv_textOf(o, "kernel"), log->kernel) || strcmp(dkv_textOf(fuzz, "profile"), profile) ||
        strcmp(dkv_textOf(fuzz, "seed"), seed) || cJSON_HasObjectItem(fuzz, "forward") != log->sampler->forward)
        return dkv_fail(
            err, DKV_EUSER, "is of kernel %.80s, seed %.24s, profile %.24s%s; this run is of %.80s, %s, %s%s",
            dkv_textOf(o, "kernel"), dkv_textOf(fuzz, "seed"), dkv_textOf(fuzz, "profile"), cJSON_HasObjectItem(fuzz, "forward") ? ", forward" : "",
            log->kernel, seed, profile, log->sampler->forward ? ", forward" : "");
    const char *was = dkv_textOf(o, "kernel_sha256"), *is = dkv_kernelHash(log->kernel);
    if (was[0] && is[0] && strcmp(was, is))
        return dkv_fail(err, DKV_EUSER, "is of another build of %.80s (SHA-256 %.12s...; it is %.12s... now)", log->kernel, was, is);
    if (strcmp(dkv_textOf(o, "generator"), DKV_GENERATOR))
        return dkv_fail(err, DKV_EUSER, "is of inputs of generator %.24s; they are made by generator %s now",
                        dkv_textOf(o, "generator"), DKV_GENERATOR);
    if (strcmp(dkv_textOf(o, "commit"), dkv_commit()))
        return dkv_fail(err, DKV_EUSER, "is of this program at commit %.40s; it is %.40s now", dkv_textOf(o, "commit"), dkv_commit());
    log->counts[status]++;
    if (status == DKV_ST_UNSUPPORTED) dkv_countRefusal(&log->refused, dkv_textOf(o, "why"));
    dkv_countBehaviour(&log->behaves, dkv_textOf(o, "profile"));
    int rc = compareLine(log, (uint64_t)number->valuedouble, dkv_textOf(o, "line"), err);
    if (!rc) rc = compareOptions(dkv_textOf(o, "line"), log->kernel, dkv_textOf(o, "replay"), err);
    return rc ? rc : setDone(log, (uint64_t)number->valuedouble, status == DKV_ST_UNSUPPORTED, err);
}

/* May a last line without its end be the beginning of a record, or the zeros that a machine leaves that lost its power? Else
 * it is not ours to cut off. */
static bool isRemnant(const char *row, size_t n, bool behind_records) {
    static const char begins[] = "{\"line\":\"";
    const size_t known = sizeof begins - 1;
    size_t zeros = 0;
    while (zeros < n && row[zeros] == 0) zeros++;
    return memcmp(row, begins, n < known ? n : known) == 0 || (behind_records && zeros == n);
}

/* One JSON object and nothing else. */
static cJSON *parseRow(const char *row, size_t n) {
    const char *end = NULL;
    cJSON *o = cJSON_ParseWithLengthOpts(row, n, &end, false);
    while (o && end < row + n && strchr(" \t\r\n", *end)) end++;
    if (!o || (end == row + n && cJSON_IsObject(o))) return o;
    cJSON_Delete(o);
    return NULL;
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
        if (n == 0) break;
        if (row[n - 1] != '\n') {
            if (!isRemnant(row, n, whole > 0))
                rc = dkv_fail(err, DKV_EUSER, "%s:%ld: not a record, and its end is missing", path, number);
            break;
        }
        cJSON *o = parseRow(row, n);
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

/* Keeps another run out. Nothing to do where records go to a pipe, or nowhere. */
static int hold(dkv_log *log, dkv_err *err) {
    const char *path = log->file.path;
    struct stat st;
    const bool there = path && stat(path, &st) == 0;
    if (!path || !strcmp(path, "-") || (there && !S_ISREG(st.st_mode))) return 0;
    log->held = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (log->held < 0) return dkv_fail(err, DKV_EUSER, "--json: cannot write '%s': %s", path, strerror(errno));
    log->made = !there;
    if (flock(log->held, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return 0; /* not every file system can */
    return dkv_fail(err, DKV_EUSER, "--json: another run writes '%s'", path);
}

static void letGo(dkv_log *log) {
    struct stat st;
    if (log->held < 0) return;
    if (log->made && fstat(log->held, &st) == 0 && st.st_size == 0) unlink(log->file.path);
    close(log->held);
    log->held = -1;
}

/* What is there stays: a run of hours, or somebody's only copy. */
static int checkEmpty(const char *path, dkv_err *err) {
    struct stat st;
    if (!path || !strcmp(path, "-") || stat(path, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size == 0) return 0;
    return dkv_fail(err, DKV_EUSER, "--json: '%s' is not empty: --resume goes on with the log of a run, a new run wants a new file", path);
}

int dkv_openLog(dkv_log *log, const char *path, dkv_log_mode mode, const char *kernel, const dkv_sampler *s, dkv_err *err) {
    *log = (dkv_log){.file = {.path = path, .append = mode != DKV_LOG_NEW}, .kernel = kernel, .sampler = s, .held = -1};
    if (mode == DKV_LOG_RESUME && (!path || !strcmp(path, "-")))
        return dkv_fail(err, DKV_EUSER, "--resume goes on with the file of --json");
    int rc = dkv_checkOutPath("--json", path, err);
    if (!rc) rc = hold(log, err);
    if (!rc && mode == DKV_LOG_NEW) rc = checkEmpty(path, err);
    if (!rc && mode == DKV_LOG_RESUME) rc = readRecords(log, path, err);
    if (!rc) return 0;
    freeBits(log);
    letGo(log);
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
    freeBits(log);
    const int rc = dkv_closeRecords(&log->file, err);
    letGo(log);
    return rc;
}
