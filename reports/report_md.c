#include "report_md.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "../ref/problem.h"
#include "../ref/row.h"

static dkv_report_row *findRow(dkv_report *r, const char *kernel, const char *mask, const char *dtype,
                               const char *tensor) {
    for (int i = 0; i < r->n_rows; i++) {
        dkv_report_row *w = &r->rows[i];
        if (strncmp(w->kernel, kernel, sizeof w->kernel - 1) == 0 && strcmp(w->mask, mask) == 0 &&
            strcmp(w->dtype, dtype) == 0 && strcmp(w->tensor, tensor) == 0)
            return w;
    }
    dkv_report_row *rows = realloc(r->rows, (size_t)(r->n_rows + 1) * sizeof *rows);
    if (!rows) return NULL;
    r->rows = rows;
    dkv_report_row *w = &rows[r->n_rows++];
    memset(w, 0, sizeof *w);
    snprintf(w->kernel, sizeof w->kernel, "%s", kernel);
    snprintf(w->mask, sizeof w->mask, "%s", mask);
    snprintf(w->dtype, sizeof w->dtype, "%s", dtype);
    snprintf(w->tensor, sizeof w->tensor, "%s", tensor);
    w->least_rms = w->most_rms = NAN;
    return w;
}

static int addTensors(dkv_report *r, const cJSON *o, const dkv_problem *p) {
    const cJSON *t;
    const cJSON *tensors = cJSON_GetObjectItemCaseSensitive(o, "tensors");
    cJSON_ArrayForEach(t, tensors) {
        if (!t->string || !cJSON_IsObject(t)) continue; /* a list, or a number: not ours */
        double ratio = dkv_numberOf(t, "max_bound_ratio", 0), rms = dkv_numberOf(t, "twin_rms", NAN);
        dkv_report_row *w =
            findRow(r, dkv_textOf(o, "kernel"), dkv_maskName(p->mask), dkv_dtypeName(p->dtype), t->string);
        if (!w) return -1;
        w->cases++;
        w->defects += dkv_numberOf(t, "bad", 0) > 0;
        if (!(ratio <= w->max_ratio)) w->max_ratio = isnan(ratio) ? INFINITY : ratio;
        if (!isfinite(rms)) continue;
        if (!(rms >= w->least_rms)) w->least_rms = rms;
        if (!(rms <= w->most_rms)) w->most_rms = rms;
    }
    return 0;
}

static int addCase(dkv_report *r, const cJSON *o) {
    dkv_report_case *cases = realloc(r->cases, (size_t)(r->n_cases + 1) * sizeof *cases);
    if (!cases) return -1;
    r->cases = cases;
    dkv_report_case *c = &cases[r->n_cases];
    c->line = strdup(dkv_textOf(o, "line"));
    c->kernel = strdup(dkv_textOf(o, "kernel"));
    c->status = strdup(dkv_textOf(o, "status"));
    c->why = strdup(dkv_textOf(o, "why"));
    c->replay = strdup(dkv_textOf(o, "replay"));
    r->n_cases++;
    return c->line && c->kernel && c->status && c->why && c->replay ? 0 : -1;
}

static void countStatus(dkv_report *r, const char *status) {
    int i = 0;
    while (i < r->n_statuses && strcmp(r->statuses[i], status) != 0) i++;
    if (i == 32) return;
    if (i == r->n_statuses) snprintf(r->statuses[r->n_statuses++], sizeof r->statuses[0], "%.23s", status);
    r->counts[i]++;
}

int dkv_addReport(dkv_report *r, const char *json, dkv_err *err) {
    dkv_problem p = {0};
    dkv_err why = {0};
    cJSON *o = cJSON_Parse(json);
    int rc = 0;
    if (!cJSON_IsObject(o) || !dkv_textOf(o, "status")[0])
        rc = dkv_fail(err, DKV_EUSER, "not a record: '%.*s'", (int)(strcspn(json, "\r\n") < 60 ? strcspn(json, "\r\n") : 60), json);
    else if (dkv_parseProblem(dkv_textOf(o, "line"), NULL, &p, &why))
        rc = dkv_fail(err, DKV_EUSER, "a record's line: %s", why.text);
    else if (addTensors(r, o, &p) || dkv_addPowerRecord(&r->power, o) || (strcmp(dkv_textOf(o, "status"), "PASSED") != 0 && addCase(r, o)))
        rc = dkv_fail(err, DKV_EHARNESS, "out of memory for records");
    if (!rc) {
        r->total++;
        r->seconds += dkv_numberOf(o, "seconds", 0);
        countStatus(r, dkv_textOf(o, "status"));
        snprintf(r->device, sizeof r->device, "%s", dkv_textOf(o, "device"));
        snprintf(r->commit, sizeof r->commit, "%s", dkv_textOf(o, "commit"));
        snprintf(r->generator, sizeof r->generator, "%s", dkv_textOf(o, "generator"));
    }
    dkv_freeProblem(&p);
    cJSON_Delete(o);
    return rc;
}

int dkv_readReport(dkv_report *r, const char *path, dkv_err *err) {
    char *row = NULL;
    size_t room = 0, n = 0;
    long number = 0;
    int rc = 0;
    dkv_err why = {0};
    FILE *f = fopen(path, "r");
    if (!f) return dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", path, strerror(errno));
    for (n = 1; !rc && n;) {
        number++;
        rc = dkv_readRow(f, &row, &room, &n, &why);
        if (!rc && n && row[strspn(row, " \t\r\n")]) rc = dkv_addReport(r, row, &why);
        if (rc) dkv_fail(err, (dkv_code)rc, "%s:%ld: %s", path, number, why.text);
    }
    free(row);
    fclose(f);
    return rc;
}

void dkv_freeReport(dkv_report *r) {
    for (long i = 0; i < r->n_cases; i++) {
        dkv_report_case *c = &r->cases[i];
        free(c->line);
        free(c->kernel);
        free(c->status);
        free(c->why);
        free(c->replay);
    }
    free(r->cases);
    free(r->rows);
    dkv_freePowerTable(&r->power);
    memset(r, 0, sizeof *r);
}

/* ---- writing ---- */

static int byName(const void *a, const void *b) {
    const dkv_report_row *x = a, *y = b;
    static const char *const order[] = {"O", "LSE", "dQ", "dK", "dV", "dSink"};
    int d = strcmp(x->kernel, y->kernel);
    if (!d) d = strcmp(x->mask, y->mask);
    if (!d) d = strcmp(x->dtype, y->dtype);
    for (int i = 0; !d && i < 6; i++)
        d = (strcmp(y->tensor, order[i]) == 0) - (strcmp(x->tensor, order[i]) == 0);
    return d;
}

/* The last n characters: where paths differ. */
static const char *endOf(const char *s, size_t n) { return strlen(s) > n ? s + strlen(s) - n : s; }

void dkv_writeReportTable(const dkv_report *r, FILE *f, bool markdown) {
    if (r->n_rows == 0) return;
    dkv_report_row *rows = malloc((size_t)r->n_rows * sizeof *rows);
    if (!rows) return;
    memcpy(rows, r->rows, (size_t)r->n_rows * sizeof *rows);
    qsort(rows, (size_t)r->n_rows, sizeof *rows, byName);
    if (markdown)
        fprintf(f,
                "| kernel | mask | dtype | tensor | cases | worst err/bound | residual to twin | outside |\n"
                "|---|---|---|---|---:|---:|---:|---:|\n");
    else
        fprintf(f, "%-14s %-7s %-5s %-6s %5s  %15s  %16s  %7s\n", "kernel", "mask", "dtype", "tensor",
                "cases", "worst err/bound", "residual to twin", "outside");
    for (int i = 0; i < r->n_rows; i++) {
        const dkv_report_row *w = &rows[i];
        char rms[40] = "-", bad[24] = "";
        if (isfinite(w->most_rms)) snprintf(rms, sizeof rms, "%.2f .. %.2f", w->least_rms, w->most_rms);
        if (w->defects) snprintf(bad, sizeof bad, "%ld", w->defects);
        fprintf(f,
                markdown ? "| %s | %s | %s | %s | %ld | %.3f | %s | %s |\n"
                         : "%-14.14s %-7s %-5s %-6s %5ld  %15.3f  %16s  %7s\n",
                markdown ? w->kernel : endOf(w->kernel, 14), w->mask, w->dtype, w->tensor, w->cases, w->max_ratio, rms, bad);
    }
    free(rows);
}

static bool isRefused(const dkv_report_case *c) { return strcmp(c->status, "UNSUPPORTED") == 0; }

static bool isSameRefusal(const dkv_report_case *a, const dkv_report_case *b) {
    return isRefused(a) && isRefused(b) && strcmp(a->why, b->why) == 0 && strcmp(a->kernel, b->kernel) == 0;
}

/* Refusals are told by reason, with the first line of each. */
static void writeRefusals(const dkv_report *r, FILE *f) {
    const char *before = "\n## What was refused\n\n";
    for (long i = 0, n; i < r->n_cases; i++) {
        const dkv_report_case *c = &r->cases[i];
        for (n = 0; n < i && !isSameRefusal(&r->cases[n], c); n++) continue;
        if (!isRefused(c) || n < i) continue;
        long count = 0;
        for (long k = i; k < r->n_cases; k++) count += isSameRefusal(&r->cases[k], c);
        fprintf(f, "%s- %ld by %s: %s; first `%s`\n", before, count, c->kernel, c->why, c->line);
        before = "";
    }
}

static void writeCases(const dkv_report *r, FILE *f) {
    const char *before = "\n## What did not pass\n";
    for (long i = 0; i < r->n_cases; i++) {
        const dkv_report_case *c = &r->cases[i];
        if (isRefused(c)) continue;
        fputs(before, f);
        before = "";
        fprintf(f, "\n- **%s** `%s`: %s\n\n      %s\n", c->status, c->line, c->why, c->replay);
    }
}

static void writePower(const dkv_report *r, FILE *f) {
    if (r->power.cases == 0) return;
    fprintf(f, "\n## Power\n\nThe smallest fault that would have been seen: ");
    dkv_writePowerWords(&r->power, f);
    fprintf(f, ".\n\nCheap faults applied to the truth itself, by stratum (tensor, region, tokens that a segment sees and "
               "has): caught by how many of the cases where it could be, largest error over its bound. Empty: it cannot be "
               "there.\n\n");
    dkv_writePowerTable(&r->power, f);
    if (dkv_countBlind(&r->power)) {
        fprintf(f, "\n**INCONCLUSIVE** in these strata:\n\n");
        dkv_writeBlind(&r->power, f, "- ", INT_MAX);
    }
}

int dkv_writeReportPage(const dkv_report *r, const char *path, dkv_err *err) {
    FILE *f = fopen(path, "w");
    if (!f) return dkv_fail(err, DKV_EUSER, "cannot write '%s': %s", path, strerror(errno));
    fprintf(f,
            "# Equivalence report\n\n%ld cases on %s; commit %s, input generator %s; %.1f s of checking.\n\n",
            r->total, r->device[0] ? r->device : "an unnamed device", r->commit, r->generator, r->seconds);
    for (int i = 0; i < r->n_statuses; i++)
        fprintf(f, "%s%ld %s", i ? ", " : "", r->counts[i], r->statuses[i]);
    fprintf(f, ".\n\nWorst err/bound: 1 is all that the declared arithmetic's rounding can explain. Residual "
               "to twin: rms of "
               "(result - predicted) over its predicted size, about 1 for a kernel that rounds as it "
               "declares; lower is "
               "more precise.\n\n");
    dkv_writeReportTable(r, f, true);
    writePower(r, f);
    writeCases(r, f);
    writeRefusals(r, f);
    int bad = ferror(f);
    if (fclose(f) != 0 || bad)
        return dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", path, strerror(errno));
    return 0;
}
