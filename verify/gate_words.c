/* What is said of a run of `gate`: on a terminal, as Markdown, as annotations. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "../data/fill.h"
#include "../ref/oracle.h"
#include "gate_run.h"
#include "version.h"

enum {
    DETAILS = 20,     /* changes of a kind, and defects, that the summary lists */
    ANNOTATIONS = 10, /* of a kind, of a step: what the service shows */
    TEXT_MOST = 1500, /* bytes of one line or reason in the summary */
    TAIL = 6000       /* bytes of the summary that tables at its end may take */
};

bool dkv_isBad(dkv_status s) { return dkv_statusRow(s)->defect || s == DKV_ST_HARNESS_ERROR; }

static long sum(const long counts[DKV_ST_N]) {
    long n = 0;
    for (int i = 0; i < DKV_ST_N; i++) n += counts[i];
    return n;
}

static long dkv_gateDefects(const dkv_gate_run *r) {
    long n = r->expired;
    for (int i = 0; i < DKV_ST_N; i++)
        if (dkv_statusRow((dkv_status)i)->defect) n += r->counts[i] + r->fuzz_counts[i];
    return n;
}

static const char *verdict(const dkv_gate_run *r, int code) {
    return code == DKV_EXIT_DEFECT ? "FAILED" : r->interrupted ? "INTERRUPTED" : code == DKV_EXIT_OK ? "PASSED"
           : code == DKV_EXIT_WEAK ? "INCONCLUSIVE" : "NOTHING LEARNED";
}

/* Text for Markdown: whatever would be markup there, and control characters, replaced; cut. */
static void putPlain(FILE *f, const char *text) {
    const unsigned char *c = (const unsigned char *)text;
    for (int n = 0; *c && n < TEXT_MOST; c++, n++) {
        if (*c == '<') fputs("&lt;", f);
        else if (*c == '&') fputs("&amp;", f);
        else if (*c == '@') fputs("&#64;", f); /* mentions nobody */
        else if (strchr("`*_[]|\\~#!", *c)) fprintf(f, "\\%c", *c);
        else fputc(*c < 32 || *c > 126 ? '?' : *c, f);
    }
    if (*c) fputs(" ...", f);
}

/* The same where nothing is markup: an indented block. */
static void putCode(FILE *f, const char *text) {
    fprintf(f, "\n      ");
    for (int n = 0; *text && n < TEXT_MOST; text++, n++) fputc((unsigned char)*text < 32 || *text > 126 ? '?' : *text, f);
    fprintf(f, "%s\n\n", *text ? " ..." : "");
}

static void putText(FILE *f, const char *text, bool md) {
    if (md) putPlain(f, text);
    else fputs(text, f);
}

static void putCounts(FILE *f, const long counts[DKV_ST_N]) {
    bool first = true;
    for (int i = 0; i < DKV_ST_N; i++) {
        if (!counts[i]) continue;
        fprintf(f, "%s%ld %s", first ? "" : ", ", counts[i], dkv_statusRow((dkv_status)i)->name);
        first = false;
    }
    if (first) fprintf(f, "none ran");
}

static void putHeadline(const dkv_gate_run *r, FILE *f, int code, bool md) {
    long bad = dkv_gateDefects(r), found = dkv_countFindings(&r->gate);
    fprintf(f, md ? "# dualkv gate: %s\n\n**" : "%s: ", verdict(r, code));
    const long cases = sum(r->counts) + sum(r->fuzz_counts);
    fprintf(f, "%ld defect%s in %ld case%s", bad, bad == 1 ? "" : "s", cases, cases == 1 ? "" : "s");
    if (r->has_was && r->cli->accept) fprintf(f, "; changes against what was accepted before are accepted now");
    else if (r->has_was && !found) fprintf(f, "; nothing worse than the accepted records");
    else if (r->has_was || found) fprintf(f, "; %ld finding%s beside", found, found == 1 ? "" : "s");
    if (!r->has_was)
        fprintf(f, r->cli->accept ? "; accepted for the first time" : "; compared with nothing (--accepted FILE)");
    if (r->waived) fprintf(f, "; %ld waived", r->waived);
    if (r->expired == 1) fprintf(f, "; a waiver is over");
    if (r->expired > 1) fprintf(f, "; %ld waivers are over", r->expired);
    if (r->interrupted) fprintf(f, "; interrupted: the rest did not run");
    fprintf(f, md ? ".**\n\n" : "\n");
}

static void putTimes(const dkv_gate_run *r, FILE *f, bool md) {
    static const char *const words[2] = {"forward", "backward"};
    for (int i = 0; i < r->n_timed; i++) {
        const dkv_gate_timed *t = &r->timed[i];
        fprintf(f, "%stime, ", md ? "- " : "  ");
        putText(f, t->line, md);
        fprintf(f, ": ");
        if (t->why[0]) {
            fprintf(f, "not compared: ");
            putText(f, t->why, md);
        }
        for (int d = 0; !t->why[0] && d < (t->perf.backward ? 2 : 1); d++)
            fprintf(f, "%s%s %.3g times the accepted kernel's %.3g ms (%.3g to %.3g)", d ? "; " : "", words[d], t->perf.ratio[d],
                    1e3 * t->perf.seconds[1][d], t->perf.low[d], t->perf.high[d]);
        fprintf(f, "\n");
    }
}

static void putWaivers(const dkv_gate_run *r, FILE *f, bool md) {
    for (int i = 0; i < r->waivers.n; i++) {
        const dkv_waiver *w = &r->waivers.list[i];
        if (!r->met[i]) continue;
        const dkv_status_row *row = dkv_statusRow((dkv_status)(r->met[i] - 1));
        bool over = dkv_isExpired(&r->waivers, w);
        fprintf(f, "%s%s: ", md ? "- " : "  ", over ? "FINDING (a waiver is over)" : row->defect ? "waived" : "needs no waiver any more");
        putText(f, w->line, md);
        fprintf(f, ": %s, ", row->name);
        putText(f, w->reason, md);
        fprintf(f, " (until %s)\n", w->until);
    }
}

void dkv_sayGate(const dkv_gate_run *r, FILE *f, int code, bool md) {
    char text[4096];
    putHeadline(r, f, code, md);
    for (int k = 0; k < DKV_CH_N; k++) {
        dkv_sayChanges(&r->gate, (dkv_change_kind)k, text, sizeof text);
        if (!text[0]) continue;
        fprintf(f, "%s%s (%s): ", md ? "- " : "  ", dkv_isFinding(&r->gate, (dkv_change_kind)k) ? "FINDING" : "note",
                dkv_changeRow((dkv_change_kind)k)->name);
        putText(f, text, md);
        fprintf(f, "\n");
    }
    putTimes(r, f, md);
    putWaivers(r, f, md);
    fprintf(f, "%ssuite: ", md ? "- " : "  ");
    putCounts(f, r->counts);
    fprintf(f, "\n");
    if (r->fuzzed) {
        fprintf(f, "%sfuzzing, seed %" PRIu64 ": ", md ? "- " : "  ", r->seed);
        putCounts(f, r->fuzz_counts);
        fprintf(f, "\n");
    } else fprintf(f, "%sno fuzzing%s\n", md ? "- " : "  ", r->cli->no_fuzz || r->interrupted ? "" : ": no time was left (--time)");
    if (r->blind)
        fprintf(f, "%sINCONCLUSIVE in %ld strat%s (the HTML page names them): no case would have seen a small fault there\n",
                md ? "- " : "  ", r->blind, r->blind == 1 ? "um" : "a");
    if (md) fprintf(f, "\n");
}

/* A defect that no waiver excuses? */
static bool counts(const dkv_gate_run *r, const dkv_report_case *c) {
    const dkv_waiver *w = dkv_findWaiver(&r->waivers, c->line, c->kernel);
    return dkv_isBad(dkv_findStatus(c->status)) && !(w && !dkv_isExpired(&r->waivers, w));
}

/* ---- the summary ---- */

static bool isFull(FILE *f, int left) {
    fflush(f);
    return ftell(f) > DKV_GATE_SUMMARY_MOST - TAIL - left;
}

static void putChanges(const dkv_gate_run *r, FILE *f) {
    for (int k = 0; k < DKV_CH_N; k++) {
        long told = 0;
        if (r->gate.counts[k] < 2 || isFull(f, 4000)) continue;
        fprintf(f, "<details><summary>%s: %ld lines</summary>\n\n", dkv_changeRow((dkv_change_kind)k)->name,
                r->gate.counts[k]);
        for (long i = 0; i < r->gate.n && told < DETAILS && !isFull(f, 4000); i++) {
            if ((int)r->gate.list[i].kind != k) continue;
            fprintf(f, "- ");
            putPlain(f, r->gate.list[i].line);
            fprintf(f, ": ");
            putPlain(f, r->gate.list[i].text);
            fprintf(f, "\n");
            told++;
        }
        if (told < r->gate.counts[k]) fprintf(f, "- and %ld more: see the records\n", r->gate.counts[k] - told);
        fprintf(f, "\n</details>\n\n");
    }
}

static void putCases(const dkv_gate_run *r, FILE *f) {
    long told = 0, all = 0;
    for (long i = 0; i < r->report.n_cases; i++) {
        const dkv_report_case *c = &r->report.cases[i];
        if (!counts(r, c)) continue;
        if (!all++) fprintf(f, "## Defects\n\n");
        if (told >= DETAILS || isFull(f, 24000)) continue;
        fprintf(f, "- **%s** ", c->status);
        putPlain(f, c->line);
        fprintf(f, ": ");
        putPlain(f, c->why);
        fprintf(f, "\n");
        putCode(f, c->replay);
        told++;
    }
    if (told < all) fprintf(f, "And %ld more: see the records.\n\n", all - told);
}

static void putArithmetic(const dkv_gate_run *r, FILE *f) {
    for (int i = 0; i < DKV_GATE_ARITHMETICS && r->arithmetic[i].cases; i++) {
        const long n = r->arithmetic[i].cases;
        fprintf(f, "- arithmetic %s %ld case%s: ", r->arithmetic[i].declared ? "declared in" : "not declared, judged in", n, n == 1 ? "" : "s");
        putPlain(f, r->arithmetic[i].words);
        fprintf(f, "\n");
    }
    fprintf(f, "\n");
}

static void putProvenance(const dkv_gate_run *r, FILE *f) {
    fprintf(f, "Kernel ");
    putPlain(f, r->cli->kernels[0].text);
    fprintf(f, " on ");
    putPlain(f, r->now.device ? r->now.device : "?");
    fprintf(f, "; dualkv %s, commit %s, generator %s, oracle %s; %.3g s. False alarms of everything here together: below %g.\n",
            dkv_version(), dkv_commit(), DKV_GENERATOR, DKV_ORACLE_VERSION, r->seconds, r->cli->budget);
    if (r->gate.least_growth > 0)
        fprintf(f, "Seeds are fixed. An error is said to have grown where the ratio of its rms to the accepted one is "
                   "larger than chance explains at %.2g false alarms a test: from %.3g times on, the more the fewer "
                   "independent rows there are.\n",
                r->level, r->gate.least_growth);
    if (r->n_timed)
        fprintf(f, "Times are ratios of runs that took turns; a kernel is slower where the whole interval of the median ratio "
                   "lies above %.3g (--perf-limit).\n", r->cli->perf_limit);
    fprintf(f, "\n");
}

static void putSummary(const dkv_gate_run *r, FILE *f, int code) {
    dkv_sayGate(r, f, code, true);
    putProvenance(r, f);
    putArithmetic(r, f);
    putCases(r, f);
    putChanges(r, f);
    fprintf(f, "## What was checked\n\n");
    dkv_writeReportTable(&r->report, f, true);
    if (r->blind && !isFull(f, -TAIL + 2000)) {
        fprintf(f, "\n## What would not have been seen\n\n");
        dkv_writeBlind(&r->report.power, f, "- ", DETAILS);
    }
}

/* Cuts behind the last whole line that there is room for. */
static size_t cut(const char *text, size_t n) {
    if (n <= DKV_GATE_SUMMARY_MOST - 100) return n;
    n = DKV_GATE_SUMMARY_MOST - 100;
    while (n > 0 && text[n - 1] != '\n') n--;
    return n;
}

int dkv_writeGateSummary(const dkv_gate_run *r, int code, dkv_err *err) {
    char *text = NULL;
    size_t n = 0;
    FILE *m = open_memstream(&text, &n), *f;
    if (m) putSummary(r, m, code);
    if (!m || fclose(m)) {
        free(text);
        return dkv_fail(err, DKV_EHARNESS, "out of memory for a summary");
    }
    f = fopen(r->summary, "we");
    size_t kept = cut(text, n);
    bool bad = !f || fwrite(text, 1, kept, f) != kept || (kept < n && fputs("\n(cut: see the records)\n", f) < 0);
    if (f && fclose(f)) bad = true;
    free(text);
    return bad ? dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", r->summary, strerror(errno)) : 0;
}

/* ---- annotations ---- */

/* A workflow command is a line: escaped as its runner undoes it; in a property also what ends one. */
static void putEscaped(const char *text, bool property) {
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c < 32 || *c == 127 || *c == '%' || (property && (*c == ':' || *c == ','))) printf("%%%02X", *c);
        else putchar(*c);
    }
}

void dkv_stopCommands(dkv_gate_run *r) {
    uint64_t word;
    if (getrandom(&word, sizeof word, 0) != sizeof word) word = (uint64_t)(uintptr_t)&word ^ (uint64_t)getpid() << 32;
    snprintf(r->stopped, sizeof r->stopped, "dualkv-%016" PRIx64, word);
    printf("::stop-commands::%s\n", r->stopped);
    fflush(stdout);
}

void dkv_allowCommands(dkv_gate_run *r) {
    if (r->stopped[0]) printf("::%s::\n", r->stopped);
    r->stopped[0] = 0;
}

static void annotate(const dkv_gate_run *r, const char *level, const char *title, const char *line, const char *text) {
    const dkv_kernel_spec *kernel = &r->cli->kernels[0];
    printf("::%s ", level);
    if (kernel->kind == DKV_SPEC_PYTHON) { /* shown beside the kernel's source */
        printf("file=");
        putEscaped(strncmp(kernel->path, "./", 2) ? kernel->path : kernel->path + 2, true);
        printf(",");
    }
    printf("title=dualkv gate%%3A ");
    putEscaped(title, true);
    printf("::");
    putEscaped(line, false);
    if (line[0]) printf(": ");
    putEscaped(text, false);
    printf("\n");
}

void dkv_annotateError(const char *text) {
    const char *colon = strchr(text, ':');
    char *end = NULL;
    long line = colon ? strtol(colon + 1, &end, 10) : 0;
    if (line > 0 && *end == ':' && !memchr(text, ' ', (size_t)(colon - text))) {
        char *file = strndup(text, (size_t)(colon - text));
        printf("::error file=");
        putEscaped(file ? file : "", true);
        printf(",line=%ld,title=dualkv gate::", line);
        putEscaped(end[1] == ' ' ? end + 2 : end + 1, false);
        free(file);
    } else {
        printf("::error title=dualkv gate::");
        putEscaped(text, false);
    }
    printf("\n");
}

void dkv_annotateGate(const dkv_gate_run *r) {
    char text[4096];
    int told = 0;
    for (int k = 0; k < DKV_CH_N; k++) {
        dkv_sayChanges(&r->gate, (dkv_change_kind)k, text, sizeof text);
        bool finding = dkv_isFinding(&r->gate, (dkv_change_kind)k);
        if (!text[0] || (finding && told == ANNOTATIONS)) continue;
        annotate(r, finding ? "error" : "notice", dkv_changeRow((dkv_change_kind)k)->name, "", text);
        told += finding;
    }
    for (int i = 0; i < r->waivers.n && told < ANNOTATIONS; i++) {
        const dkv_waiver *w = &r->waivers.list[i];
        if (!r->met[i] || !dkv_isExpired(&r->waivers, w)) continue;
        annotate(r, "error", "a waiver is over", w->line, w->reason);
        told++;
    }
    for (long i = 0; i < r->report.n_cases && told < ANNOTATIONS; i++) {
        const dkv_report_case *c = &r->report.cases[i];
        if (!counts(r, c)) continue;
        annotate(r, "error", c->status, c->line, c->why);
        told++;
    }
}
