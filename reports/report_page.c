#include "report_page.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "report_md.h"
#include "report_text.h"
#include "report_trend.h"
#include "report_verdict.h"

enum {
    KERNELS_SHOWN = 8,
    CASES_SHOWN = 20, /* of a kernel */
    BLIND_SHOWN = 12, /* strata */
    ROWS_MOST = 14 << 10, /* bytes of a table; of all that did not pass */
    CASES_MOST = 20 << 10
};

static void markWords(const dkv_wordcount *w, bool counts, FILE *f) {
    if (!w->n) fputs("not in the records", f);
    for (int i = 0; i < w->n && i < 6; i++) {
        if (i) fputs("; ", f);
        dkv_markText(f, w->word[i], 160);
        if (counts) fprintf(f, " (%ld)", w->count[i]);
    }
    if (w->n > 6 || w->more) fputs("; and others", f);
}

static void markVerdict(const dkv_gather_kernel *k, FILE *f) {
    dkv_verdict v = dkv_sumUp(k);
    const dkv_gather_case *c = dkv_firstDefect(k);
    const char *between = "";
    fputs("\n## ", f);
    dkv_markText(f, k->name, 120);
    fprintf(f, ": %s\n\n- Cases: ", dkv_verdictWord(k));
    for (int s = 0; s < DKV_ST_N; s++)
        if (k->counts[s]) {
            fprintf(f, "%s%ld %s", between, k->counts[s], dkv_statusRow((dkv_status)s)->name);
            between = ", ";
        }
    fprintf(f, ", on %zu different lines.\n", k->n_lines);
    if (c) {
        fputs("- The first defect: ", f);
        dkv_markText(f, c->why, 300);
        fputs("\n", f);
    }
    if (k->judged) {
        fprintf(f, "- %.3g elements judged, each against its own bound; the largest error is ", k->elements);
        dkv_writeFigure(f, k->worst);
        fprintf(f, " of what rounding allows (%s). On ", k->worst_tensor);
        markWords(&k->devices, false, f);
        fputs("; commit ", f);
        markWords(&k->commits, false, f);
        fputs("\n", f);
    }
    fputs("- What would have been seen: ", f);
    if (k->power.cases) dkv_writePowerWords(&k->power, f);
    else fputs("not in the records", f);
    if (k->counts[DKV_ST_UNSUPPORTED]) {
        fprintf(f, "\n- Refused: %ld of %ld cases: ", k->counts[DKV_ST_UNSUPPORTED], k->total);
        markWords(&k->reasons, true, f);
    }
    if (v.waived) {
        fputs("\n- Waived: ", f);
        dkv_writeCount(f, v.waived, "defect: ", "defects: ");
        markWords(&k->waivers, true, f);
    }
    if (v.blind) fprintf(f, "\n- INCONCLUSIVE in %d strata (below)", v.blind);
    fputs("\n", f);
}

static void markCase(const dkv_gather_case *c, FILE *f) {
    fprintf(f, "\n- **%s** ", dkv_statusRow(c->status)->name);
    dkv_markText(f, c->line, 300);
    fputs(": ", f);
    dkv_markText(f, c->why[0] ? c->why : "no reason given", 300);
    if (c->waived[0]) fputs(" Waived: ", f);
    dkv_markText(f, c->waived, 200);
    fputs("\n", f);
    if (c->replay[0]) dkv_markCode(f, c->replay);
}

/* Defects first; what is left out is counted. */
static void markCases(const dkv_gather_kernel *k, long start, FILE *f) {
    long told = 0, left = k->cases_left_out;
    for (int defect = 1; defect >= 0; defect--)
        for (int i = 0; i < k->n_cases; i++) {
            if (dkv_statusRow(k->cases[i].status)->defect != (bool)defect) continue;
            if (told == CASES_SHOWN || ftell(f) - start > CASES_MOST) left++;
            else markCase(&k->cases[i], f);
            told += told < CASES_SHOWN;
        }
    if (left) fprintf(f, "\n%ld more are in the records.\n", left);
}

static void markPower(const dkv_gather_kernel *k, FILE *f) {
    char *text = NULL;
    size_t n = 0;
    FILE *m = open_memstream(&text, &n);
    if (!m) return;
    dkv_writePowerTable(&k->power, m);
    if (fclose(m) == 0 && n < ROWS_MOST) fputs(text, f);
    else fputs("The table is too large for this page; that of `--html` has it.\n", f);
    free(text);
    if (dkv_countBlind(&k->power)) {
        fprintf(f, "\n**INCONCLUSIVE** in these strata:\n\n");
        dkv_markBlind(&k->power, f, BLIND_SHOWN);
    }
}

static int markTable(const dkv_gather *g, FILE *f) {
    dkv_report r = {0};
    char *text = NULL;
    size_t n = 0, shown = 0;
    FILE *m = open_memstream(&text, &n);
    int rc = m ? dkv_tableOf(g, &r) : -1;
    if (m && !rc) dkv_writeReportTable(&r, m, true);
    if (m && fclose(m) != 0) rc = -1;
    if (!rc && n) fprintf(f, "\n## Errors\n\nWorst err/bound: 1 is all that the declared arithmetic's rounding can explain. Residual "
                             "to twin: rms of (result - predicted) over its predicted size, about 1 for a kernel that rounds as it "
                             "declares; lower is more precise.\n\n");
    for (size_t end; !rc && shown < n && shown < ROWS_MOST; shown = end) { /* whole rows */
        end = shown + strcspn(text + shown, "\n") + 1;
        fwrite(text + shown, 1, end - shown, f);
    }
    if (shown < n) fprintf(f, "\nFurther rows: see the page of `--html`.\n");
    free(text);
    dkv_freeReport(&r);
    return rc;
}

static void markProvenance(const dkv_gather *g, const char *command, FILE *f) {
    const struct { const char *name; const dkv_wordcount *words; } facts[] = {
        {"commit", &g->commits}, {"compiler", &g->compilers}, {"flags", &g->flags},         {"libraries", &g->libraries},
        {"device", &g->devices}, {"driver", &g->drivers},     {"generator", &g->generators}, {"oracle", &g->oracles},
        {"began", &g->started},  {"made by", &g->commands}};
    fprintf(f, "\n## Provenance\n\n");
    for (int i = 0; i < g->n_files && i < 10; i++) {
        const dkv_gather_file *file = &g->files[i];
        fputs("- ", f);
        dkv_markText(f, file->path, 200);
        fprintf(f, ": %ld records, SHA-256 %s", file->records, file->hash[0] ? file->hash : "none (not a file)");
        if (file->bad) fprintf(f, "; %ld lines were no records and were skipped: ", file->bad);
        for (long b = 0; b < file->bad && b < DKV_GATHER_BAD; b++) fprintf(f, "%s%ld", b ? ", " : "", file->bad_lines[b]);
        if (file->bad > DKV_GATHER_BAD) fputs(", …", f);
        if (file->cut) fprintf(f, "; not read beyond line %ld", file->lines);
        fputs("\n", f);
    }
    if (g->n_files > 10) fprintf(f, "- and %d more files\n", g->n_files - 10);
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++) {
        if (!facts[i].words->n) continue;
        fprintf(f, "- %s: ", facts[i].name);
        markWords(facts[i].words, false, f);
        fputs("\n", f);
    }
    fprintf(f, "- %.1f s of checking; seeds stand in the lines\n- this page:\n", g->seconds);
    dkv_markCode(f, command);
}

static int markBody(const dkv_gather *g, const char *command, FILE *f) {
    int n = g->n_kernels < KERNELS_SHOWN ? g->n_kernels : KERNELS_SHOWN;
    long bad = 0;
    fprintf(f, "# Equivalence report\n");
    for (int i = 0; i < g->n_files; i++) bad += g->files[i].bad;
    if (bad) fprintf(f, "\n**%ld lines were no records and were skipped**: what they said is not here.\n", bad);
    for (int i = 0; i < n; i++) markVerdict(g->kernels[i], f);
    if (n < g->n_kernels) fprintf(f, "\n%d further kernels: see the page of `--html`.\n", g->n_kernels - n);
    long start = ftell(f);
    for (int i = 0, any = 0; i < n; i++) {
        if (!g->kernels[i]->n_cases) continue;
        if (!any++) fprintf(f, "\n## What did not pass\n");
        fputs("\n### ", f);
        dkv_markText(f, g->kernels[i]->name, 120);
        fputs("\n", f);
        markCases(g->kernels[i], start, f);
    }
    if (markTable(g, f)) return -1;
    for (int i = 0, any = 0; i < n && any < 2; i++) {
        if (!g->kernels[i]->power.n_rows) continue;
        if (!any++) fprintf(f, "\n## Power\n\nCheap faults applied to the truth itself, by stratum (tensor, region, tokens that a "
                               "segment sees and has): caught by how many of the cases where it could be, largest error over its "
                               "bound. Empty: it cannot be there.\n");
        fputs("\n", f);
        markPower(g->kernels[i], f);
    }
    for (int i = 0, any = 0; i < n && any < 4; i++) {
        if (g->kernels[i]->n_commits < 2) continue;
        if (!any++) fprintf(f, "\n## Over commits\n");
        fputs("\n", f);
        dkv_markText(f, g->kernels[i]->name, 120);
        fputs("\n\n", f);
        dkv_markTrend(g->kernels[i], f);
    }
    markProvenance(g, command, f);
    return 0;
}

int dkv_writePage(const dkv_gather *g, const char *path, const char *command, dkv_err *err) {
    FILE *f = fopen(path, "we");
    if (!f) return dkv_fail(err, DKV_EUSER, "cannot write '%s': %s", path, strerror(errno));
    int rc = markBody(g, command, f), bad = ferror(f);
    if (fclose(f) != 0 || bad || rc)
        return dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", path, rc ? "out of memory" : strerror(errno));
    return 0;
}
