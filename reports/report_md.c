#include "report_md.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "../ref/problem.h"
#include "../ref/tensors.h"
#include "report_text.h"

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

/* Takes in the worst and the range of further cases; NAN: none has a twin. */
static void widenRow(dkv_report_row *w, long cases, long defects, double max_ratio, double least_rms, double most_rms) {
    w->cases += cases;
    w->defects += defects;
    if (!(max_ratio <= w->max_ratio)) w->max_ratio = isnan(max_ratio) ? INFINITY : max_ratio;
    if (isfinite(least_rms) && !(least_rms >= w->least_rms)) w->least_rms = least_rms;
    if (isfinite(most_rms) && !(most_rms <= w->most_rms)) w->most_rms = most_rms;
}

static bool isTensor(const char *name) {
    bool is = false;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) is |= strcmp(dkv_tensorName((dkv_tensor_id)id), name) == 0;
    return is;
}

static int addTensors(dkv_report *r, const cJSON *o, const dkv_problem *p) {
    const cJSON *t;
    const cJSON *tensors = cJSON_GetObjectItemCaseSensitive(o, "tensors");
    cJSON_ArrayForEach(t, tensors) {
        if (!t->string || !isTensor(t->string) || !cJSON_IsObject(t)) continue; /* not ours */
        double rms = dkv_numberOf(t, "twin_rms", NAN);
        dkv_report_row *w =
            findRow(r, dkv_textOf(o, "kernel"), dkv_maskName(p->mask), dkv_dtypeName(p->dtype), t->string);
        if (!w) return -1;
        widenRow(w, 1, dkv_numberOf(t, "bad", 0) > 0, dkv_numberOf(t, "max_bound_ratio", 0), rms, rms);
    }
    return 0;
}

static int addCase(dkv_report *r, const cJSON *o) {
    if (r->n_cases == DKV_REPORT_CASES) {
        r->cases_left_out++;
        return 0;
    }
    if (!r->cases && !(r->cases = calloc(DKV_REPORT_CASES, sizeof *r->cases))) return -1;
    dkv_report_case *c = &r->cases[r->n_cases];
    c->line = strdup(dkv_textOf(o, "line"));
    c->kernel = strdup(dkv_textOf(o, "kernel"));
    c->status = strdup(dkv_textOf(o, "status"));
    c->why = strdup(dkv_textOf(o, "why"));
    c->replay = strdup(dkv_textOf(o, "replay"));
    r->n_cases++;
    return c->line && c->kernel && c->status && c->why && c->replay ? 0 : -1;
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
    r->total += !rc;
    dkv_freeProblem(&p);
    cJSON_Delete(o);
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

/* The last characters, where paths differ, in `width` columns. */
static void writeEnd(FILE *f, const char *s, size_t width) {
    size_t n = strlen(s);
    for (size_t i = n > width ? n - width : 0; i < n; i++) fputc((unsigned char)s[i] < 32 || (unsigned char)s[i] > 126 ? '?' : s[i], f);
    fprintf(f, "%*s", (int)(n < width ? width - n : 0), "");
}

enum { KERNEL_MOST = 48 }; /* characters of a kernel's name in a table of plain text */

void dkv_writeReportTable(const dkv_report *r, FILE *f, bool markdown) {
    if (r->n_rows == 0) return;
    dkv_report_row *rows = malloc((size_t)r->n_rows * sizeof *rows);
    if (!rows) return;
    memcpy(rows, r->rows, (size_t)r->n_rows * sizeof *rows);
    qsort(rows, (size_t)r->n_rows, sizeof *rows, byName);
    int width = (int)strlen("kernel");
    for (int i = 0; i < r->n_rows; i++) width = strlen(rows[i].kernel) > (size_t)width ? (int)strlen(rows[i].kernel) : width;
    width = width < KERNEL_MOST ? width : KERNEL_MOST;
    if (markdown)
        fprintf(f,
                "| kernel | mask | dtype | tensor | cases | worst err/bound | residual to twin | outside |\n"
                "|---|---|---|---|---:|---:|---:|---:|\n");
    else
        fprintf(f, "%-*s %-7s %-5s %-6s %5s  %15s  %16s  %7s\n", width, "kernel", "mask", "dtype", "tensor",
                "cases", "worst err/bound", "residual to twin", "outside");
    for (int i = 0; i < r->n_rows; i++) {
        const dkv_report_row *w = &rows[i];
        char rms[40] = "-", bad[24] = "", worst[32];
        if (isfinite(w->most_rms)) snprintf(rms, sizeof rms, "%.2f .. %.2f", w->least_rms, w->most_rms);
        if (w->defects) snprintf(bad, sizeof bad, "%ld", w->defects);
        if (markdown) fputs("| ", f);
        if (markdown) dkv_markText(f, w->kernel, 0);
        else writeEnd(f, w->kernel, (size_t)width);
        snprintf(worst, sizeof worst, w->max_ratio < 1e6 ? "%.3f" : "%.3g", w->max_ratio);
        fprintf(f, markdown ? " | %s | %s | %s | %ld | %s | %s | %s |\n" : " %-7s %-5s %-6s %5ld  %15s  %16s  %7s\n",
                w->mask, w->dtype, w->tensor, w->cases, worst, rms, bad);
    }
    free(rows);
}

int dkv_tableOf(const dkv_gather *g, dkv_report *r) {
    for (int i = 0; i < g->n_kernels; i++)
        for (int m = 0; m < DKV_GATHER_MASKS; m++)
            for (int d = 0; d < DKV_GATHER_DTYPES; d++)
                for (int t = 0; t < DKV_N_OUTPUTS; t++) {
                    const dkv_gather_row *from = &g->kernels[i]->rows[m][d][t];
                    dkv_report_row *w = from->cases ? findRow(r, g->kernels[i]->name, dkv_maskName((dualkv_mask_kind)m),
                                                              dkv_dtypeName((dualkv_dtype)d), dkv_tensorName((dkv_tensor_id)t))
                                                    : NULL;
                    if (!w && from->cases) return -1;
                    if (w) widenRow(w, from->cases, from->outside, from->max_ratio, from->least_rms, from->most_rms);
                }
    return 0;
}
