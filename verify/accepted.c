#include "accepted.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/fields.h"
#include "../data/replace.h"
#include "../data/sha256.h"
#include "../ref/oracle.h"
#include "../ref/row.h"
#include "version.h"

#define SUM_KEY ",\"sum\":\""
enum { SUM_DIGITS = 16, SUM_TAIL = sizeof SUM_KEY - 1 + SUM_DIGITS + 2 }; /* with `"}` */

/* A whole number of a field that may hold anything. */
static int64_t wholeOf(double x) { return x >= -9e15 && x <= 9e15 ? (int64_t)x : 0; }

static void freeRow(dkv_accepted_row *r) {
    free(r->line);
    free(r->why);
}

void dkv_freeAccepted(dkv_accepted *a) {
    for (long i = 0; i < a->n; i++) freeRow(&a->rows[i]);
    free(a->rows);
    free(a->kernel);
    free(a->generator);
    free(a->program);
    free(a->oracle);
    free(a->commit);
    free(a->device);
    memset(a, 0, sizeof *a);
}

/* ---- rows: a record and a row of the file differ in a few names ---- */

static void takeArithmetic(dkv_accepted_row *r, const cJSON *n) {
    dualkv_arithmetic *a = &r->a;
    *a = (dualkv_arithmetic){.size = sizeof *a};
#define TAKE(field, looser)                                                                                  \
    do {                                                                                                     \
        double x = dkv_numberOf(n, #field, 0);                                                                   \
        if (_Generic(a->field, double : 1, default : 0)) a->field = (__typeof__(a->field))x;                 \
        else a->field = (__typeof__(a->field))wholeOf(x);                                                    \
    } while (0);
    DKV_ARITHMETIC_FIELDS(TAKE)
#undef TAKE
}

static int takeRow(dkv_accepted_row *r, const cJSON *o, bool record, dkv_err *err) {
    const cJSON *numbers = cJSON_GetObjectItemCaseSensitive(o, record ? "arithmetic_numbers" : "arithmetic");
    const cJSON *tensors = cJSON_GetObjectItemCaseSensitive(o, "tensors");
    memset(r, 0, sizeof *r);
    r->status = dkv_findStatus(dkv_textOf(o, "status"));
    if (r->status == DKV_ST_N || !dkv_textOf(o, "line")[0])
        return dkv_fail(err, DKV_EUSER, "not a row with line and status");
    r->line = strdup(dkv_textOf(o, "line"));
    r->why = strdup(r->status != DKV_ST_PASSED ? dkv_textOf(o, "why") : "");
    if (!r->line || !r->why) {
        freeRow(r);
        return dkv_fail(err, DKV_EHARNESS, "out of memory for accepted rows");
    }
    snprintf(r->bits, sizeof r->bits, "%.16s", dkv_textOf(o, "bits"));
    r->level = dkv_numberOf(o, "level", 0);
    r->judged = cJSON_IsObject(numbers);
    r->counted = record ? strcmp(dkv_textOf(cJSON_GetObjectItemCaseSensitive(o, "checks"), "launched"), "passed") == 0
                        : cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "counted"));
    r->declared = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "declared"));
    takeArithmetic(r, numbers);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const cJSON *t = cJSON_GetObjectItemCaseSensitive(tensors, dkv_tensorName((dkv_tensor_id)id));
        if (!cJSON_IsObject(t)) continue;
        r->tensor[id].there = true;
        r->tensor[id].rms = dkv_numberOf(t, record ? "twin_rms" : "rms", NAN);
        r->tensor[id].dof = dkv_numberOf(t, record ? "rms_dof" : "dof", NAN);
        r->tensor[id].ratio = dkv_numberOf(t, record ? "max_bound_ratio" : "ratio", NAN);
    }
    return 0;
}

static int growRows(dkv_accepted *a, dkv_err *err) {
    if (a->n < a->room) return 0;
    long room = a->room ? 2 * a->room : 256;
    dkv_accepted_row *rows = realloc(a->rows, (size_t)room * sizeof *rows);
    if (!rows) return dkv_fail(err, DKV_EHARNESS, "out of memory for accepted rows");
    a->rows = rows;
    a->room = room;
    return 0;
}

static int setText(char **to, const char *text, dkv_err *err) {
    char *copy = strdup(text);
    if (!copy) return dkv_fail(err, DKV_EHARNESS, "out of memory for accepted rows");
    free(*to);
    *to = copy;
    return 0;
}

static int takeHead(dkv_accepted *a, const cJSON *o, const char *program, const char *oracle, dkv_err *err) {
    int rc = setText(&a->kernel, dkv_textOf(o, "kernel"), err);
    if (!rc) rc = setText(&a->generator, dkv_textOf(o, "generator"), err);
    if (!rc) rc = setText(&a->program, program, err);
    if (!rc) rc = setText(&a->oracle, oracle, err);
    if (!rc) rc = setText(&a->commit, dkv_textOf(o, "commit"), err);
    return rc ? rc : setText(&a->device, dkv_textOf(o, "device"), err);
}

int dkv_addAccepted(dkv_accepted *a, const char *record, dkv_err *err) {
    cJSON *o = cJSON_Parse(record);
    int rc = o ? growRows(a, err) : dkv_fail(err, DKV_EUSER, "not JSON");
    if (!rc) rc = takeHead(a, o, dkv_version(), DKV_ORACLE_VERSION, err);
    if (!rc) rc = takeRow(&a->rows[a->n], o, true, err);
    a->n += !rc;
    cJSON_Delete(o);
    return rc;
}

static int byLine(const void *x, const void *y) {
    const dkv_accepted_row *a = x, *b = y;
    return strcmp(a->line, b->line);
}

void dkv_sortAccepted(dkv_accepted *a) {
    long kept = 0;
    if (a->n) qsort(a->rows, (size_t)a->n, sizeof *a->rows, byLine);
    for (long i = 0; i < a->n; i++) {
        if (kept && strcmp(a->rows[kept - 1].line, a->rows[i].line) == 0) freeRow(&a->rows[--kept]);
        a->rows[kept++] = a->rows[i];
    }
    a->n = kept;
}

const dkv_accepted_row *dkv_findAccepted(const dkv_accepted *a, const char *line) {
    const dkv_accepted_row key = {.line = (char *)line};
    return a->n ? bsearch(&key, a->rows, (size_t)a->n, sizeof key, byLine) : NULL;
}

/* ---- writing ---- */

void dkv_addArithmetic(cJSON *o, const char *key, const dualkv_arithmetic *a) {
    cJSON *n = cJSON_AddObjectToObject(o, key);
#define ADD(field, looser) dkv_addNumber(n, #field, (double)a->field);
    DKV_ARITHMETIC_FIELDS(ADD)
#undef ADD
}

static cJSON *makeRow(const dkv_accepted_row *r) {
    cJSON *o = cJSON_CreateObject(), *tensors;
    cJSON_AddStringToObject(o, "line", r->line);
    cJSON_AddStringToObject(o, "status", dkv_statusRow(r->status)->name);
    if (r->why[0] && r->status == DKV_ST_UNSUPPORTED) cJSON_AddStringToObject(o, "why", r->why);
    if (r->bits[0]) cJSON_AddStringToObject(o, "bits", r->bits);
    if (!r->judged) return o;
    dkv_addNumber(o, "level", r->level);
    cJSON_AddBoolToObject(o, "declared", r->declared);
    cJSON_AddBoolToObject(o, "counted", r->counted);
    dkv_addArithmetic(o, "arithmetic", &r->a);
    tensors = cJSON_AddObjectToObject(o, "tensors");
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!r->tensor[id].there) continue;
        cJSON *t = cJSON_AddObjectToObject(tensors, dkv_tensorName((dkv_tensor_id)id));
        if (!isnan(r->tensor[id].rms)) {
            dkv_addNumber(t, "rms", r->tensor[id].rms);
            dkv_addNumber(t, "dof", r->tensor[id].dof);
        }
        dkv_addNumber(t, "ratio", r->tensor[id].ratio);
    }
    return o;
}

/* Prints an object with its sum as one line; deletes it. */
static int putLine(FILE *f, cJSON *o) {
    char *text = o ? cJSON_PrintUnformatted(o) : NULL, hex[65];
    int rc = -1;
    if (text) {
        size_t n = strlen(text) - 1; /* without the last brace */
        dkv_digestBytes(text, n, hex);
        rc = fprintf(f, "%.*s" SUM_KEY "%.16s\"}\n", (int)n, text, hex) < 0 ? -1 : 0;
    }
    free(text);
    cJSON_Delete(o);
    return rc;
}

static cJSON *makeHead(const dkv_accepted *a, const char *hex) {
    long counts[DKV_ST_N] = {0};
    cJSON *o = cJSON_CreateObject();
    for (long i = 0; i < a->n; i++) counts[a->rows[i].status]++;
    cJSON_AddNumberToObject(o, "accepted", 1);
    cJSON_AddStringToObject(o, "kernel", a->kernel);
    if (a->kernel_hash[0]) cJSON_AddStringToObject(o, "kernel_sha256", a->kernel_hash);
    cJSON_AddStringToObject(o, "generator", a->generator);
    cJSON_AddStringToObject(o, "program", a->program);
    cJSON_AddStringToObject(o, "oracle", a->oracle);
    cJSON_AddStringToObject(o, "commit", a->commit);
    cJSON_AddStringToObject(o, "device", a->device);
    dkv_addNumber(o, "cases", (double)a->n);
    cJSON *c = cJSON_AddObjectToObject(o, "counts");
    for (int i = 0; i < DKV_ST_N; i++)
        if (counts[i]) dkv_addNumber(c, dkv_statusRow((dkv_status)i)->name, (double)counts[i]);
    cJSON_AddStringToObject(o, "sha256", hex);
    return o;
}

int dkv_writeAccepted(dkv_accepted *a, const char *path, dkv_err *err) {
    char *rest = NULL, *all = NULL, hex[65];
    size_t n = 0, size = 0;
    int rc = 0;
    FILE *rows = open_memstream(&rest, &n);
    dkv_sortAccepted(a);
    for (long i = 0; rows && i < a->n && !rc; i++) rc = putLine(rows, makeRow(&a->rows[i]));
    if (!rows || !a->n || fclose(rows) || rc) {
        free(rest);
        return dkv_fail(err, DKV_EHARNESS, a->n ? "out of memory for accepted rows" : "nothing ran that could be accepted");
    }
    dkv_digestBytes(rest, n, hex);
    FILE *f = open_memstream(&all, &size);
    bool bad = !f || putLine(f, makeHead(a, hex)) || fwrite(rest, 1, n, f) != n;
    if (f && fclose(f)) bad = true;
    if (bad) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for accepted rows");
    else if (dkv_writeWhole(path, all, size)) rc = dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", path, strerror(errno));
    free(all);
    free(rest);
    return rc;
}

/* ---- reading ---- */

typedef struct reader {
    const char *path;
    long number; /* of the line, from 1 */
    long cases;
    char sha[65];
    FILE *rest;
    dkv_accepted *to;
} reader;

static bool isSound(const char *row, size_t n) {
    char hex[65];
    if (n < SUM_TAIL + 2) return false;
    size_t body = n - SUM_TAIL;
    dkv_digestBytes(row, body, hex);
    return memcmp(row + body, SUM_KEY, sizeof SUM_KEY - 1) == 0 &&
           memcmp(row + body + sizeof SUM_KEY - 1, hex, SUM_DIGITS) == 0 && memcmp(row + n - 2, "\"}", 2) == 0;
}

/* One line without its end. */
static int takeLine(reader *r, const char *row, size_t n, dkv_err *err) {
    cJSON *o = cJSON_ParseWithLength(row, n);
    dkv_err why = {0};
    int rc = 0;
    if (r->number == 1 && (!cJSON_IsObject(o) || dkv_numberOf(o, "accepted", 0) != 1))
        rc = dkv_fail(err, DKV_EUSER, "%s:1: not a file that --accept wrote", r->path);
    else if (!isSound(row, n) || !cJSON_IsObject(o))
        rc = dkv_fail(err, DKV_EUSER, "%s:%ld: was edited: its sum is not that of the line (accept anew: --accept)",
                      r->path, r->number);
    else if (r->number == 1) {
        double cases = dkv_numberOf(o, "cases", 0);
        r->cases = cases > 0 && cases < 1e9 ? (long)cases : 0;
        snprintf(r->sha, sizeof r->sha, "%.64s", dkv_textOf(o, "sha256"));
        rc = takeHead(r->to, o, dkv_textOf(o, "program"), dkv_textOf(o, "oracle"), err);
        snprintf(r->to->kernel_hash, sizeof r->to->kernel_hash, "%.64s", dkv_textOf(o, "kernel_sha256"));
    } else {
        rc = growRows(r->to, err);
        if (!rc && takeRow(&r->to->rows[r->to->n], o, false, &why))
            rc = dkv_fail(err, why.code, "%s:%ld: %s", r->path, r->number, why.text);
        r->to->n += !rc;
        if (!rc && r->to->n > 1 && byLine(&r->to->rows[r->to->n - 2], &r->to->rows[r->to->n - 1]) >= 0)
            rc = dkv_fail(err, DKV_EUSER, "%s:%ld: is not in its place (sorted by line)", r->path, r->number);
        if (!rc && fwrite(row, 1, n, r->rest) + (size_t)(fputc('\n', r->rest) == '\n') != n + 1)
            rc = dkv_fail(err, DKV_EHARNESS, "out of memory for accepted rows");
    }
    cJSON_Delete(o);
    return rc;
}

static int checkEnd(const reader *r, const char *rest, size_t n, dkv_err *err) {
    char hex[65];
    if (r->number == 0) return dkv_fail(err, DKV_EUSER, "%s:1: empty: not a file that --accept wrote", r->path);
    if (r->to->n < r->cases)
        return dkv_fail(err, DKV_EUSER, "%s:%ld: the file ends here: %ld cases of %ld that its first line promises",
                        r->path, r->number + 1, r->to->n, r->cases);
    if (r->to->n > r->cases)
        return dkv_fail(err, DKV_EUSER, "%s:%ld: one line more than the %ld that the first line promises", r->path,
                        r->cases + 2, r->cases);
    dkv_digestBytes(rest, n, hex);
    if (strcmp(hex, r->sha) != 0)
        return dkv_fail(err, DKV_EUSER, "%s:1: its sha256 is not that of the lines below: lines were exchanged",
                        r->path);
    return 0;
}

int dkv_readAccepted(const char *path, dkv_accepted *out, dkv_err *err) {
    reader r = {.path = path, .to = out};
    char *row = NULL, *rest = NULL;
    size_t room = 0, n = 0, size = 0;
    dkv_err why = {0};
    FILE *f = fopen(path, "re");
    int rc = 0;
    memset(out, 0, sizeof *out);
    if (!f) return dkv_fail(err, DKV_EUSER, "--accepted: cannot read '%s': %s", path, strerror(errno));
    r.rest = open_memstream(&rest, &size);
    if (!r.rest) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for accepted rows");
    while (!rc) {
        if (dkv_readRow(f, &row, &room, &n, &why)) {
            rc = dkv_fail(err, why.code, "%s:%ld: %s", path, r.number + 1, why.text);
            break;
        }
        if (n == 0) break;
        r.number++;
        if (row[n - 1] != '\n')
            rc = dkv_fail(err, DKV_EUSER, "%s:%ld: the file ends in the middle of this line", path, r.number);
        else rc = takeLine(&r, row, n - 1, err);
    }
    if (r.rest && fclose(r.rest) && !rc) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for accepted rows");
    if (!rc) rc = checkEnd(&r, rest, size, err);
    if (rc) dkv_freeAccepted(out);
    free(rest);
    free(row);
    fclose(f);
    return rc;
}
