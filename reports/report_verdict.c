#include "report_verdict.h"

#include <math.h>

#include "../ref/problem.h"
#include "report_tables.h"
#include "report_text.h"

dkv_verdict dkv_sumUp(const dkv_gather_kernel *k) {
    dkv_verdict v = {.unsure = k->counts[DKV_ST_INCONCLUSIVE], .harness = k->counts[DKV_ST_HARNESS_ERROR], .judged = k->judged};
    for (int s = 0; s < DKV_ST_N; s++) v.defects += dkv_statusRow((dkv_status)s)->defect ? k->counts[s] : 0;
    v.waived = k->waived;
    v.defects -= v.waived;
    v.blind = dkv_writeBlindStrata(k, NULL);
    return v;
}

static const char *wordOf(const dkv_verdict *v) {
    if (v->defects) return "Not equivalent";
    if (v->waived) return "Known defects only";
    if (v->judged == 0) return "Nothing was judged";
    if (v->harness) return "Not shown";
    if (v->unsure || v->blind) return "Inconclusive";
    return "No difference found beyond rounding";
}

const char *dkv_verdictWord(const dkv_gather_kernel *k) {
    dkv_verdict v = dkv_sumUp(k);
    return wordOf(&v);
}

void dkv_writeWords(const dkv_wordcount *w, bool counts, FILE *f) {
    if (!w->n) fputs("not in the records", f);
    for (int i = 0; i < w->n && i < 12; i++) {
        if (i) fputs("; ", f);
        dkv_writeText(f, w->word[i], 200);
        if (counts) fprintf(f, " (%ld)", w->count[i]);
    }
    if (w->n > 12 || w->more) fputs("; and others", f);
}

static void writeStatuses(const dkv_gather_kernel *k, bool defects, FILE *f) {
    const char *between = "";
    for (int s = 0; s < DKV_ST_N; s++) {
        if (!k->counts[s] || (defects && !dkv_statusRow((dkv_status)s)->defect)) continue;
        fprintf(f, "%s%ld %s", between, k->counts[s], dkv_statusRow((dkv_status)s)->name);
        between = ", ";
    }
}

const dkv_gather_case *dkv_firstDefect(const dkv_gather_kernel *k) {
    for (int i = 0; i < k->n_cases; i++)
        if (dkv_statusRow(k->cases[i].status)->defect && !k->cases[i].waived[0]) return &k->cases[i];
    return NULL;
}

static void writeSentence(const dkv_gather_kernel *k, const dkv_verdict *v, FILE *f) {
    const dkv_gather_case *c = dkv_firstDefect(k);
    long ran = k->total - k->counts[DKV_ST_UNSUPPORTED];
    fprintf(f, "<p class=\"verdict\"><strong>%s.</strong> ", wordOf(v));
    if (v->defects) {
        fprintf(f, "A defect in %ld of ", v->defects + v->waived);
        dkv_writeCount(f, ran, "case that ran (", "cases that ran (");
        writeStatuses(k, true, f);
        fputs(").", f);
        if (c && c->why[0]) fputs(" The first: ", f);
        if (c) dkv_writeText(f, c->why, 300);
        if (c && c->why[0]) fputs(".", f);
        if (v->waived) fprintf(f, " Waivers excuse %ld of them.", v->waived);
    } else if (v->waived) {
        fprintf(f, "A defect in %ld of ", v->waived);
        dkv_writeCount(f, ran, "case that ran (", "cases that ran (");
        writeStatuses(k, true, f);
        fputs("), each of them excused by a waiver for a while: known, not mended.", f);
    } else if (v->judged == 0) {
        fputs("No case ended with outputs to judge: ", f);
        writeStatuses(k, false, f);
        fputs(". Nothing follows from this.", f);
    } else {
        fputs("No defect in ", f);
        dkv_writeCount(f, v->judged, "judged case", "judged cases");
        if (v->harness) fprintf(f, ", but the harness itself failed in %ld", v->harness);
        if (v->unsure) fprintf(f, "; in %ld the evidence was too weak to say (INCONCLUSIVE)", v->unsure);
        if (v->blind) {
            fputs("; in ", f);
            dkv_writeCount(f, v->blind, "stratum", "strata");
            fputs(" some small fault would not have been seen", f);
        }
        fputs(v->harness || v->unsure || v->blind ? "." : ": every one is within what its arithmetic's rounding allows.", f);
    }
    fputs("</p>\n", f);
}

static void writeNames(FILE *f, const char *what, const bool *has, int n, bool wanted, const char *(*name)(int)) {
    const char *between = what;
    for (int i = 0; i < n; i++) {
        if (has[i] != wanted) continue;
        fprintf(f, "%s%s", between, name(i));
        between = ", ";
    }
    if (between != what) fputs(". ", f);
}

static const char *maskName(int i) { return dkv_maskName((dualkv_mask_kind)i); }
static const char *dtypeName(int i) { return dkv_dtypeName((dualkv_dtype)i); }

/* Which masks and dtypes some judged case has. */
static void findJudged(const dkv_gather_kernel *k, bool masks[DKV_GATHER_MASKS], bool dtypes[DKV_GATHER_DTYPES]) {
    for (int m = 0; m < DKV_GATHER_MASKS; m++)
        for (int d = 0; d < DKV_GATHER_DTYPES; d++)
            for (int t = 0; t < DKV_N_OUTPUTS; t++)
                if (k->rows[m][d][t].cases) masks[m] = dtypes[d] = true;
}

static void writeEvidence(const dkv_gather_kernel *k, FILE *f) {
    bool masks[DKV_GATHER_MASKS] = {false}, dtypes[DKV_GATHER_DTYPES] = {false};
    findJudged(k, masks, dtypes);
    fputs("<dt>On what evidence</dt><dd>", f);
    dkv_writeCount(f, k->total, "case on ", "cases on ");
    dkv_writeCount(f, (long)k->n_lines, "problem line: ", "different problem lines: ");
    writeStatuses(k, false, f);
    fputs(". ", f);
    if (k->judged) {
        fprintf(f, "%.3g elements judged, each against its own bound; the largest error is ", k->elements);
        dkv_writeFigure(f, k->worst);
        fprintf(f, " of what rounding allows (%s). ", k->worst_tensor);
    }
    writeNames(f, "Types: ", dtypes, DKV_GATHER_DTYPES, true, dtypeName);
    writeNames(f, "Masks: ", masks, DKV_GATHER_MASKS, true, maskName);
    fputs("Device: ", f);
    dkv_writeWords(&k->devices, false, f);
    fputs("; commit ", f);
    dkv_writeWords(&k->commits, false, f);
    fputs(".</dd>\n<dt>Held to which arithmetic</dt><dd>", f);
    if (k->profiles.n) {
        fputs("It declares none, and behaves as: ", f);
        dkv_writeWords(&k->profiles, true, f);
    } else if (!k->arithmetic.n) {
        fputs("Not in the records.", f);
    } else if (k->arithmetic.n == 1) {
        dkv_writeText(f, k->arithmetic.word[0], 300);
    } else {
        fprintf(f, "<details><summary>%d, by type and problem</summary><ul>\n", k->arithmetic.n);
        for (int i = 0; i < k->arithmetic.n; i++) {
            fprintf(f, "<li>%ld cases: ", k->arithmetic.count[i]);
            dkv_writeText(f, k->arithmetic.word[i], 300);
            fputs("</li>\n", f);
        }
        fputs("</ul></details>", f);
    }
    fputs("</dd>\n", f);
}

static void writePower(const dkv_gather_kernel *k, FILE *f) {
    fputs("<dt>What would have been seen</dt><dd>", f);
    if (k->power.cases == 0) {
        fputs("Not in the records.</dd>\n", f);
        return;
    }
    fputs("At best ", f);
    dkv_writePowerWords(&k->power, f);
    fprintf(f, ". Smaller faults may be there and pass. Measured on the inputs of %ld cases (<a href=\"#power\">by stratum</a>)."
               "</dd>\n", k->power.cases);
}

static void writeUnchecked(const dkv_gather_kernel *k, const dkv_verdict *v, FILE *f) {
    bool masks[DKV_GATHER_MASKS] = {false}, dtypes[DKV_GATHER_DTYPES] = {false}, features[DKV_GATHER_FEATURES];
    findJudged(k, masks, dtypes);
    masks[DUALKV_BIDIR] = true; /* inadmissible: not asked for */
    for (int i = 0; i < DKV_GATHER_FEATURES; i++) features[i] = k->features[i] > 0;
    fputs("<dt>What was not checked</dt><dd><ul>\n", f);
    if (k->counts[DKV_ST_UNSUPPORTED]) {
        fprintf(f, "<li>%ld of %ld cases were refused by the kernel: ", k->counts[DKV_ST_UNSUPPORTED], k->total);
        dkv_writeWords(&k->reasons, true, f);
        fputs("</li>\n", f);
    } else fputs("<li>Nothing was refused.</li>\n", f);
    if (v->blind) {
        fputs("<li>Strata in which some small fault would have gone unseen:<ul>\n", f);
        dkv_writeBlindStrata(k, f);
        fputs("</ul></li>\n", f);
    } else fputs(k->power.cases ? "<li>No stratum is blind to a fault that could be there.</li>\n"
                                : "<li>Power was not measured: what would have been missed is not known.</li>\n", f);
    if (k->not_judged.n) {
        fputs("<li>Outputs that were not given and so not judged (cases): ", f);
        dkv_writeWords(&k->not_judged, true, f);
        fputs("</li>\n", f);
    }
    if (v->waived) {
        fputs("<li>Waivers excuse ", f);
        dkv_writeCount(f, v->waived, "defect: ", "defects: ");
        dkv_writeWords(&k->waivers, true, f);
        fputs("</li>\n", f);
    } else fputs("<li>No waiver excuses anything in these records.</li>\n", f);
    fputs("<li>", f);
    writeNames(f, "No judged case has: mask ", masks, DKV_GATHER_MASKS, false, maskName);
    writeNames(f, "No judged case has: type ", dtypes, DKV_GATHER_DTYPES, false, dtypeName);
    writeNames(f, "No judged case has: ", features, DKV_GATHER_FEATURES, false, dkv_gatherFeature);
    fputs("Combinations without a case are listed <a href=\"#coverage\">below</a>.</li>\n"
          "<li>Every problem that is not among these lines: this is evidence, not a formal proof.</li>\n</ul></dd>\n", f);
}

void dkv_writeVerdict(const dkv_gather_kernel *k, FILE *f) {
    dkv_verdict v = dkv_sumUp(k);
    bool good = v.judged && !v.defects && !v.waived && !v.unsure && !v.harness && !v.blind;
    fprintf(f, "<section class=\"%s\"><h2>", v.defects ? "no" : good ? "yes" : "unsure");
    dkv_writeText(f, k->name, 120);
    fputs("</h2>\n", f);
    writeSentence(k, &v, f);
    fputs("<dl>\n", f);
    writeEvidence(k, f);
    writePower(k, f);
    writeUnchecked(k, &v, f);
    fputs("</dl></section>\n", f);
}
