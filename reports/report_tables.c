#include "report_tables.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/problem.h"
#include "report_text.h"

enum { STRATA_SHOWN = 100, FAULTS_SHOWN = 12, FAILURES_OPEN = 20, NAME_SHOWN = 120 };

static const char *maskName(int m) { return dkv_maskName((dualkv_mask_kind)m); }
static const char *dtypeName(int d) { return dkv_dtypeName((dualkv_dtype)d); }

void dkv_beginTable(FILE *f, const char *caption, const char *of) {
    fprintf(f, "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"%s\"><table>\n<caption>%s", caption, caption);
    if (of) {
        fputs(": ", f);
        dkv_writeText(f, of, NAME_SHOWN);
    }
    fputs("</caption>\n", f);
}

void dkv_endTable(FILE *f) { fputs("</tbody></table></div>\n", f); }

static void writeHead(FILE *f, const char *const *names, int n) {
    fputs("<thead><tr>", f);
    for (int i = 0; i < n; i++) fprintf(f, "<th scope=\"col\">%s</th>", names[i]);
    fputs("</tr></thead><tbody>\n", f);
}

/* ---- errors ---- */

static void writeErrorCell(const dkv_gather_row *w, FILE *f) {
    if (!w->cases) {
        fputs("<td class=\"gap\">–</td>", f);
        return;
    }
    fputs(w->outside ? "<td class=\"bad n\"><b>" : "<td class=\"n\">", f);
    dkv_writeFigure(f, w->max_ratio);
    if (w->outside) fprintf(f, "</b>, %ld outside", w->outside);
    if (isfinite(w->most_rms)) fprintf(f, "<br><small>%.2f to %.2f</small>", w->least_rms, w->most_rms);
    fputs("</td>", f);
}

void dkv_writeErrorTable(const dkv_gather_kernel *k, FILE *f) {
    dkv_beginTable(f, "Worst error over bound (below it: range of the residual to the twin, rms z), by mask, dtype and tensor",
                   k->name);
    fputs("<thead><tr><th scope=\"col\">mask</th><th scope=\"col\">dtype</th><th scope=\"col\">cases</th>", f);
    for (int t = 0; t < DKV_N_OUTPUTS; t++) fprintf(f, "<th scope=\"col\">%s</th>", dkv_tensorName((dkv_tensor_id)t));
    fputs("</tr></thead><tbody>\n", f);
    for (int m = 0; m < DKV_GATHER_MASKS; m++)
        for (int d = 0; d < DKV_GATHER_DTYPES; d++) {
            long cases = 0;
            for (int t = 0; t < DKV_N_OUTPUTS; t++)
                if (k->rows[m][d][t].cases > cases) cases = k->rows[m][d][t].cases;
            if (!cases) continue;
            fprintf(f, "<tr><th scope=\"row\">%s</th><td>%s</td><td>%ld</td>", maskName(m), dtypeName(d), cases);
            for (int t = 0; t < DKV_N_OUTPUTS; t++) writeErrorCell(&k->rows[m][d][t], f);
            fputs("</tr>\n", f);
        }
    dkv_endTable(f);
}

/* ---- coverage ---- */

static void writeCell(const dkv_gather_cell *c, FILE *f) {
    if (!c->cases && !c->refused) {
        fputs("<td class=\"gap\">–</td>", f);
        return;
    }
    fprintf(f, c->defects ? "<td class=\"bad\">%ld" : "<td>%ld", c->cases);
    if (c->defects) fprintf(f, ", <b>%ld wrong</b>", c->defects);
    if (c->refused) fprintf(f, " <small>(%ld refused)</small>", c->refused);
    fputs("</td>", f);
}

static bool anyCase(const dkv_gather_cell *cells) {
    bool any = false;
    for (int e = 0; e < DKV_GATHER_EDGES; e++) any |= cells[e].cases || cells[e].refused;
    return any;
}

void dkv_writeCoverage(const dkv_gather_kernel *k, FILE *f) {
    int empty = 0;
    dkv_beginTable(f, "Coverage: cases run, by mask, dtype, head dimension and what their shapes have (a case may have several)",
                  k->name);
    fputs("<thead><tr><th scope=\"col\">mask</th><th scope=\"col\">dtype</th><th scope=\"col\">head dim</th>", f);
    for (int e = 0; e < DKV_GATHER_EDGES; e++) fprintf(f, "<th scope=\"col\">%s</th>", dkv_gatherEdge(e));
    fputs("</tr></thead><tbody>\n", f);
    for (int m = 0; m < DUALKV_BIDIR; m++) /* the last mask is refused by definition */
        for (int d = 0; d < DKV_GATHER_DTYPES; d++)
            for (int i = 0; i < DKV_GATHER_DIMS; i++) {
                if (!anyCase(k->cover[m][d][i])) {
                    empty++;
                    continue;
                }
                fprintf(f, "<tr><th scope=\"row\">%s</th><td>%s</td><td class=\"n\">%s</td>", maskName(m), dtypeName(d), dkv_gatherDim(i));
                for (int e = 0; e < DKV_GATHER_EDGES; e++) writeCell(&k->cover[m][d][i][e], f);
                fputs("</tr>\n", f);
            }
    dkv_endTable(f);
    if (!empty) return;
    fprintf(f, "<p>No case at all in %d of %d combinations of mask, dtype and head dimension: ", empty,
            DUALKV_BIDIR * DKV_GATHER_DTYPES * DKV_GATHER_DIMS);
    const char *between = "";
    for (int m = 0; m < DUALKV_BIDIR; m++)
        for (int d = 0; d < DKV_GATHER_DTYPES; d++)
            for (int i = 0; i < DKV_GATHER_DIMS; i++)
                if (!anyCase(k->cover[m][d][i])) {
                    fprintf(f, "%s%s %s %s", between, maskName(m), dtypeName(d), dkv_gatherDim(i));
                    between = "; ";
                }
    fputs(".</p>\n", f);
}

/* ---- power ---- */

static bool sameStratum(const dkv_power_row *a, const dkv_power_row *b) { return strcmp(a->stratum, b->stratum) == 0; }

int dkv_writeBlindStrata(const dkv_gather_kernel *k, FILE *f) {
    dkv_power_row *rows = dkv_sortPowerRows(&k->power);
    int blind = 0;
    for (int i = 0, end; rows && i < k->power.n_rows; i = end) {
        int n = 0;
        for (end = i; end < k->power.n_rows && sameStratum(&rows[end], &rows[i]); end++) {
            if (rows[end].caught) continue;
            if (n++ == 0) blind++;
            if (!f || blind > STRATA_SHOWN || n > FAULTS_SHOWN) continue;
            fputs(n == 1 ? "<li>" : ", ", f);
            if (n == 1) dkv_writeText(f, rows[i].stratum, 0);
            if (n == 1) fputs(": no case would have seen ", f);
            dkv_writeText(f, rows[end].fault, 0);
        }
        if (f && n && blind <= STRATA_SHOWN) fputs(n > FAULTS_SHOWN ? ", and more</li>\n" : "</li>\n", f);
    }
    free(rows);
    return blind;
}

static int findColumns(const dkv_power_row *rows, int n, const char *columns[FAULTS_SHOWN]) {
    int found = 0;
    for (int i = 0; i < n; i++) {
        int c = 0;
        while (c < found && strcmp(columns[c], rows[i].fault) != 0) c++;
        if (c == found && found < FAULTS_SHOWN) columns[found++] = rows[i].fault;
    }
    return found;
}

static void writeStratum(const dkv_power_row *rows, int n, const char *const *columns, int n_columns, FILE *f) {
    fputs("<tr><th scope=\"row\">", f);
    dkv_writeText(f, rows[0].stratum, 0);
    fputs("</th>", f);
    for (int c = 0; c < n_columns; c++) {
        const dkv_power_row *w = NULL;
        for (int i = 0; i < n; i++)
            if (strcmp(rows[i].fault, columns[c]) == 0) w = &rows[i];
        if (!w) {
            fputs("<td class=\"gap\">–</td>", f);
            continue;
        }
        fprintf(f, "<td%s>%ld of %ld, ", w->caught ? "" : " class=\"bad\"", w->caught, w->cases);
        dkv_writeFigure(f, w->best);
        fputs("</td>", f);
    }
    fputs("</tr>\n", f);
}

void dkv_writeStrata(const dkv_gather_kernel *k, FILE *f) {
    const char *columns[FAULTS_SHOWN];
    dkv_power_row *rows = dkv_sortPowerRows(&k->power);
    if (!rows || !k->power.n_rows) {
        free(rows);
        return;
    }
    int n = findColumns(rows, k->power.n_rows, columns), shown = 0;
    dkv_beginTable(f, "Power: cases that would have caught a small fault of the truth itself, and its largest error over bound",
                  k->name);
    fputs("<thead><tr><th scope=\"col\">tensor, region, tokens</th>", f);
    for (int c = 0; c < n; c++) {
        fputs("<th scope=\"col\">", f);
        dkv_writeText(f, columns[c], 0);
        fputs("</th>", f);
    }
    fputs("</tr></thead><tbody>\n", f);
    for (int i = 0, end; i < k->power.n_rows && shown < STRATA_SHOWN; i = end, shown++) {
        for (end = i; end < k->power.n_rows && sameStratum(&rows[end], &rows[i]); end++) continue;
        writeStratum(&rows[i], end - i, columns, n, f);
    }
    dkv_endTable(f);
    if (shown == STRATA_SHOWN) fprintf(f, "<p>The first %d strata; the records have all.</p>\n", STRATA_SHOWN);
    free(rows);
}

/* ---- checks, refusals, failures ---- */

void dkv_writeCheckTable(const dkv_gather_kernel *k, FILE *f) {
    static const char *const head[] = {"check", "passed", "defect", "note"};
    const char *names[3 * DKV_GATHER_WORDS];
    int n = 0;
    for (int s = 0; s < 3; s++)
        for (int i = 0; i < k->checks[s].n; i++) {
            int at = 0;
            while (at < n && strcmp(names[at], k->checks[s].word[i]) != 0) at++;
            if (at == n) names[n++] = k->checks[s].word[i];
        }
    if (!n) return;
    dkv_beginTable(f, "What each check said, in cases", k->name);
    writeHead(f, head, 4);
    for (int i = 0; i < n; i++) {
        fputs("<tr><th scope=\"row\">", f);
        dkv_writeText(f, names[i], 60);
        fputs("</th>", f);
        for (int s = 0; s < 3; s++) {
            long count = 0;
            for (int w = 0; w < k->checks[s].n; w++)
                if (strcmp(k->checks[s].word[w], names[i]) == 0) count = k->checks[s].count[w];
            fprintf(f, count && s == 1 ? "<td class=\"bad\">%ld</td>" : "<td>%ld</td>", count);
        }
        fputs("</tr>\n", f);
    }
    dkv_endTable(f);
}

void dkv_writeReasons(const dkv_gather_kernel *k, FILE *f) {
    static const char *const head[] = {"cases", "reason"};
    if (!k->reasons.n) return;
    dkv_beginTable(f, "Refused, by the kernel's own reason", k->name);
    writeHead(f, head, 2);
    for (int i = 0; i < k->reasons.n; i++) {
        fprintf(f, "<tr><td>%ld</td><td>", k->reasons.count[i]);
        dkv_writeText(f, k->reasons.word[i], 200);
        fputs("</td></tr>\n", f);
    }
    if (k->reasons.more) fprintf(f, "<tr><td>%ld</td><td>for further reasons (see the records)</td></tr>\n", k->reasons.more);
    dkv_endTable(f);
}

static void writeFailure(const dkv_gather_case *c, FILE *f) {
    const dkv_status_row *status = dkv_statusRow(c->status);
    fprintf(f, "<li><b class=\"%s\">%s</b> <code>", status->defect ? "no" : "unsure", status->name);
    dkv_writeText(f, c->line, 0);
    fputs("</code><br>", f);
    dkv_writeText(f, c->why[0] ? c->why : "no reason given", 0);
    if (c->waived[0]) fputs("<br>Waived: ", f);
    dkv_writeText(f, c->waived, 0);
    if (c->replay[0]) fputs("<pre>", f);
    dkv_writeText(f, c->replay, 0);
    if (c->replay[0]) fputs("</pre>", f);
    if (c->n_maps) dkv_drawPictures(c->maps, c->n_maps, c->line, f);
    fputs("</li>\n", f);
}

void dkv_writeFailures(const dkv_gather_kernel *k, FILE *f, long most) {
    long left = k->cases_left_out, told = 0;
    if (!k->n_cases) return;
    fputs("<ol class=\"cases\">\n", f);
    for (int defect = 1; defect >= 0; defect--)
        for (int i = 0; i < k->n_cases; i++) {
            if (dkv_statusRow(k->cases[i].status)->defect != (bool)defect) continue;
            if (ftell(f) >= most) {
                left++;
                continue;
            }
            if (told == FAILURES_OPEN)
                fprintf(f, "</ol><details><summary>The further ones</summary><ol class=\"cases\" start=\"%ld\">\n", told + 1);
            writeFailure(&k->cases[i], f);
            told++;
        }
    fputs(told > FAILURES_OPEN ? "</ol></details>\n" : "</ol>\n", f);
    if (left) fprintf(f, "<p>%ld more are in the records.</p>\n", left);
}

/* ---- throughput, planted faults ---- */

static void writeRate(const dkv_gather_bench *b, int back, FILE *f) {
    if (b->tflops[back] <= 0) {
        fputs("<td class=\"gap\">–</td><td class=\"gap\">–</td>", f);
        return;
    }
    fprintf(f, "<td>%.3g ms, %.3g TFLOP/s</td>", b->ms[back], b->tflops[back]);
    if (b->roof[back] > 0)
        fprintf(f, "<td>%.0f %% of %.0f <small>(%s)</small></td>", 100 * b->tflops[back] / b->roof[back], b->roof[back],
                b->memory[back] ? "memory" : "arithmetic");
    else if (b->dgemm > 0)
        fprintf(f, "<td>%.0f %% of %.3g GFLOP/s <small>(dgemm, measured)</small></td>", 1e5 * b->tflops[back] / b->dgemm,
                b->dgemm);
    else fputs("<td class=\"gap\">not known</td>", f);
}

static int byLine(const void *x, const void *y) {
    const dkv_gather_bench *a = *(const dkv_gather_bench *const *)x, *b = *(const dkv_gather_bench *const *)y;
    int d = strcmp(a->line, b->line);
    if (!d) d = strcmp(a->kernel, b->kernel);
    if (!d) d = strcmp(a->started, b->started);
    return d ? d : (a > b) - (a < b);
}

void dkv_writeBench(const dkv_gather *g, FILE *f) {
    static const char *const head[] = {"line", "kernel", "device", "commit", "forward", "of the roofline", "backward",
                                       "of the roofline", "peak memory"};
    const dkv_gather_bench *order[DKV_GATHER_BENCH];
    for (int i = 0; i < g->n_bench; i++) order[i] = &g->bench[i];
    qsort(order, (size_t)g->n_bench, sizeof *order, byLine);
    dkv_beginTable(f, "Throughput, useful FLOPs only, beside the device's roofline; of one line and kernel the oldest first", NULL);
    writeHead(f, head, 9);
    for (int i = 0; i < g->n_bench; i++) {
        const dkv_gather_bench *b = order[i];
        fputs("<tr><th scope=\"row\"><code>", f);
        dkv_writeText(f, b->line, 200);
        fputs("</code></th><td>", f);
        dkv_writeText(f, b->kernel, 60);
        fputs("</td><td>", f);
        dkv_writeText(f, b->device, 60);
        fputs("</td><td>", f);
        dkv_writeText(f, b->commit, 20);
        fputs("</td>", f);
        for (int back = 0; back < 2; back++) writeRate(b, back, f);
        fprintf(f, "<td>%.2f GiB</td></tr>\n", b->peak_bytes / 1073741824.0);
    }
    dkv_endTable(f);
    fputs("<p>Roofline: the lesser of the datasheet's dense rate and of its memory bandwidth times FLOPs per byte, each "
          "operand moved once. From the vendor, not measured here.</p>\n", f);
    if (g->bench_left_out) fprintf(f, "<p>%ld more are in the records.</p>\n", g->bench_left_out);
}

/* How many of the faults (controls left out) were found, by this toolkit, its suite alone, and usual rules. */
static void sumFaults(const dkv_gather *g, FILE *f) {
    static const char *const words[DKV_GATHER_RULES] = {"allclose at usual tolerances", "normalised mean square error",
                                                       "error against a peer of the same precision"};
    long faults = 0, found = 0, suite = 0, suites = 0, matrix = 0, rule[DKV_GATHER_RULES] = {0};
    for (int i = 0; i < g->n_faults; i++) {
        const dkv_gather_fault *x = &g->faults[i];
        if (x->control) continue;
        faults++;
        found += x->found;
        suites += x->in_suite >= 0;
        suite += x->in_suite > 0;
        matrix += x->matrix;
        for (int r = 0; r < DKV_GATHER_RULES; r++) rule[r] += x->rule[r] > 0;
    }
    fprintf(f, "<ul><li>%ld of %ld planted faults found", found, faults);
    if (g->clean_cases) fprintf(f, "; %ld false alarms in %ld cases of the kernel without a fault", g->false_alarms, g->clean_cases);
    if (suites) fprintf(f, "</li>\n<li>%ld of %ld by the suite alone", suite, suites);
    for (int r = 0; r < DKV_GATHER_RULES && matrix; r++) {
        fprintf(f, "</li>\n<li>%ld of %ld by %s, on the same cases", rule[r], matrix, words[r]);
        if (g->clean_cases) fprintf(f, "; %ld false alarms", g->rule_alarms[r]);
    }
    fputs("</li></ul>\n", f);
}

static void writeKill(const dkv_gather_fault *x, FILE *f) {
    fputs(x->found == x->control ? "<tr class=\"bad\"><th scope=\"row\">" : "<tr><th scope=\"row\">", f);
    dkv_writeText(f, x->fault, 40);
    fputs("</th><td>", f);
    dkv_writeText(f, x->doc, 200);
    fputs("</td><td>", f);
    if (x->found) fprintf(f, "%.0f", x->cases);
    else fputs(x->control ? "no, as it must" : "<b>no</b>", f);
    fprintf(f, "</td><td>%s</td>", x->in_suite < 0 ? "–" : x->in_suite ? "yes" : "no");
    for (int r = 0; r < DKV_GATHER_RULES; r++) {
        if (!x->matrix) fputs("<td class=\"gap\">–</td>", f);
        else if (x->rule[r] > 0) fprintf(f, "<td>%.0f</td>", x->rule[r]);
        else fputs("<td class=\"gap\">no</td>", f);
    }
    fputs("<td>", f);
    dkv_writeText(f, x->check, 40);
    fputs("</td><td><code>", f);
    dkv_writeText(f, x->line, 200);
    fputs("</code></td></tr>\n", f);
}

void dkv_writeFaults(const dkv_gather *g, FILE *f) {
    static const char *const head[] = {"fault", "what it is", "cases until found", "by the suite", "allclose", "nmse", "peer",
                                       "found by", "smallest line"};
    sumFaults(g, f);
    dkv_beginTable(f, "Kill matrix: planted faults, and after how many cases they are found (with the slowest seed; usual rules: the first)", NULL);
    writeHead(f, head, 9);
    for (int i = 0; i < g->n_faults; i++) writeKill(&g->faults[i], f);
    dkv_endTable(f);
}
