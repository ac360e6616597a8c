#include "report_html.h"

#include <errno.h>
#include <string.h>

#include "report_svg.h"
#include "report_tables.h"
#include "report_text.h"
#include "report_trend.h"
#include "report_verdict.h"

enum {
    KERNELS_SHOWN = 12,          /* in full; of the others their verdict's word only */
    FAILURES_MOST = 2 << 20      /* bytes of the page after which no more failures are told */
};

static const char style[] =
    ":root{color-scheme:light dark;--ink:#1b1b1f;--paper:#fff;--soft:#55555f;--line:#c9c9d2;--no:#a8071a;--yes:#135e2c;"
    "--unsure:#7a4a00;--dot:#2357c5;--shade:#f3f3f7}\n"
    "@media(prefers-color-scheme:dark){:root{--ink:#e9e9ee;--paper:#16161a;--soft:#a9a9b5;--line:#45454f;--no:#ff8a8a;"
    "--yes:#7fd99a;--unsure:#f0bd6a;--dot:#86adff;--shade:#222229}}\n"
    "*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:62rem;font:1rem/1.5 system-ui,sans-serif;"
    "color:var(--ink);background:var(--paper);overflow-wrap:anywhere}h1{font-size:1.6rem;line-height:1.2}h2{font-size:1.25rem}"
    "h3{font-size:1.05rem}section.yes,section.no,section.unsure{border-left:.35rem solid;padding:.1rem 0 .1rem 1rem;"
    "margin:1.5rem 0}section.yes{border-color:var(--yes)}section.no{border-color:var(--no)}section.unsure{border-color:"
    "var(--unsure)}.yes .verdict strong,.yes>b{color:var(--yes)}.no .verdict strong,b.no,td.bad,tr.bad>td{color:var(--no)}"
    ".unsure .verdict strong,b.unsure{color:var(--unsure)}.verdict{font-size:1.15rem}dt{font-weight:600;margin-top:.6rem}"
    "dd{margin:0}ul{padding-left:1.2rem;margin:.2rem 0}.scroll{overflow-x:auto;margin:1rem 0}table{border-collapse:collapse;"
    "font-size:.875rem;overflow-wrap:normal}caption{text-align:left;font-weight:600;padding:.3rem 0}th,td{border-bottom:1px "
    "solid var(--line);padding:.25rem .6rem;text-align:left;vertical-align:top;font-variant-numeric:tabular-nums}thead th{"
    "background:var(--shade)}.gap,small,.soft{color:var(--soft)}svg{width:100%;max-width:36rem;height:auto;display:block;"
    "margin:.5rem 0}svg text{font:11px system-ui,sans-serif;fill:var(--ink)}.axis{stroke:var(--line)}.edge{stroke:var(--ink);"
    "stroke-dasharray:4 3}.trail{fill:none;stroke:var(--dot)}.dashed{stroke-dasharray:2 3}.in{fill:var(--dot);fill-opacity:.75}.out{fill:var(--no)}code,pre{font-family:ui-monospace,"
    "monospace;font-size:.85em}pre{white-space:pre-wrap;background:var(--shade);padding:.4rem .6rem;margin:.3rem 0}"
    ".maps{display:flex;flex-wrap:wrap;gap:1rem;margin:.6rem 0}figure.map{max-width:22rem;font-size:.85rem}svg.map{width:auto;max-width:100%}"
    ".seam{stroke:var(--ink);stroke-width:1}.m0{fill:#9db8e8;fill-opacity:.35}.m1{fill:#5f87d6;fill-opacity:.6}.m2{fill:#f0b429}"
    ".m3{fill:#e8710a}.m4{fill:#c5221f}.m5{fill:#7b1fa2}ul.key{list-style:none;padding:0}ul.key svg{display:inline;width:auto;"
    "vertical-align:middle;margin:0 .4rem 0 0}a{color:var(--dot)}figure{margin:0}.n{white-space:nowrap}summary{cursor:pointer;font-weight:600}nav a{margin-right:1rem;display:inline-block}\n";

static void writeTop(const dkv_gather *g, FILE *f) {
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
          "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
          "img-src data:\">\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
          "<meta name=\"referrer\" content=\"no-referrer\"><link rel=\"icon\" href=\"data:,\">\n<title>", f);
    if (g->n_kernels) {
        dkv_writeText(f, g->kernels[0]->name, 60);
        fprintf(f, ": %s", dkv_verdictWord(g->kernels[0]));
    } else fputs("Measurements", f);
    fprintf(f, " – DualKV Verify</title>\n<style>%s</style></head><body>\n<main>\n<h1>Equivalence report</h1>\n", style);
    fputs("<p>Is the kernel's attention over packed, shared prompts exactly standard attention over the replicated "
          "sequences, up to the rounding of its arithmetic? Judged element by element against a truth in double precision. "
          "1 is all that rounding can explain; <a href=\"#derived\">how the limits come about</a>.</p>\n", f);
    long bad = 0;
    bool cut = false;
    for (int i = 0; i < g->n_files; i++) bad += g->files[i].bad, cut |= g->files[i].cut;
    if (cut) fputs("<p><strong>A file could not be read to its end</strong> (<a href=\"#provenance\">which</a>).</p>\n", f);
    if (bad) {
        fputs("<p><strong>", f);
        dkv_writeCount(f, bad, "line was no record and was skipped", "lines were no records and were skipped");
        fputs("</strong> (<a href=\"#provenance\">which</a>): what they said is not on this page.</p>\n", f);
    }
}

static void writeVerdicts(const dkv_gather *g, FILE *f) {
    for (int i = 0; i < g->n_kernels && i < KERNELS_SHOWN; i++) dkv_writeVerdict(g->kernels[i], f);
    if (g->n_kernels > KERNELS_SHOWN) fputs("<p>Further kernels, not shown in full:</p><ul>\n", f);
    for (int i = KERNELS_SHOWN; i < g->n_kernels; i++) {
        fputs("<li>", f);
        dkv_writeText(f, g->kernels[i]->name, 120);
        fprintf(f, ": %s, %ld cases</li>\n", dkv_verdictWord(g->kernels[i]), g->kernels[i]->total);
    }
    if (g->n_kernels > KERNELS_SHOWN) fputs("</ul>\n", f);
}

/* Tables of each kernel under one heading; anyone: whether there is something to show of it. */
static void eachKernel(const dkv_gather *g, const char *title, const char *id, const char *words,
                       bool (*has)(const dkv_gather_kernel *), void (*write)(const dkv_gather_kernel *, FILE *), FILE *f) {
    bool any = false;
    for (int i = 0; i < g->n_kernels && i < KERNELS_SHOWN; i++) {
        if (!has(g->kernels[i])) continue;
        if (!any) fprintf(f, "<h2 id=\"%s\">%s</h2>\n<p>%s</p>\n", id, title, words);
        any = true;
        write(g->kernels[i], f);
    }
    if (!any) fprintf(f, "<h2 id=\"%s\">%s</h2>\n<p>Nothing in these records.</p>\n", id, title);
}

static bool isJudged(const dkv_gather_kernel *k) { return k->judged > 0; }
static bool hasCases(const dkv_gather_kernel *k) { return k->total > 0; }
static bool hasTrend(const dkv_gather_kernel *k) { return k->n_commits > 1; }
static bool hasPower(const dkv_gather_kernel *k) { return k->power.n_rows > 0; }
static bool isUnwell(const dkv_gather_kernel *k) { return k->n_cases > 0; }

static void writeErrors(const dkv_gather_kernel *k, FILE *f) {
    bool twin = false;
    for (int t = 0; t < DKV_N_OUTPUTS; t++) twin |= k->rms[t].cases > 0;
    fputs("<h3>", f);
    dkv_writeText(f, k->name, 120);
    fputs("</h3>\n<figure>\n", f);
    dkv_drawRatios(k, f);
    if (twin) dkv_drawResiduals(k, f);
    fputs("<figcaption class=\"soft\">A dot: the cases of one place, larger with their number (in its title).</figcaption>"
          "</figure>\n", f);
    dkv_writeErrorTable(k, f);
    dkv_writeCheckTable(k, f);
}

static void writeCover(const dkv_gather_kernel *k, FILE *f) {
    dkv_writeCoverage(k, f);
    dkv_writeReasons(k, f);
}

static void writeUnwell(const dkv_gather_kernel *k, FILE *f) {
    fputs("<h3>", f);
    dkv_writeText(f, k->name, 120);
    fputs("</h3>\n", f);
    if (k->mapped) dkv_writeMapKey(f);
    dkv_writeFailures(k, f, FAILURES_MOST);
}

static void writeDerived(FILE *f) {
    static const char *const rows[][3] = {
        {"truth", "computed in double precision, checked against a second reference and against <code>__float128</code>",
         "<cite>ref/TOLERANCE.md</cite>, “How it is computed”"},
        {"bound (err/bound)", "derived for each element from the declared arithmetic; no number is tuned",
         "<cite>ref/TOLERANCE.md</cite>, “Accumulation”, “Score”, “Softmax, forward”, “Backward”"},
        {"what the bound assumes", "stated, not shown", "<cite>ref/TOLERANCE.md</cite>, “What is assumed”"},
        {"twin (predicted value, size of its noise)",
         "derived from the declared rounding points; one number is calibrated, how much chains over identical rows share",
         "<cite>ref/TOLERANCE-TWIN.md</cite>, “What the twin computes”, “What is left to explain”"},
        {"limits of residual, slope and mean",
         "derived from the budget of false alarms; the allowances for the size of the noise, a mean and a gain are calibrated",
         "<cite>ref/TOLERANCE-TWIN.md</cite>, “Verdict”, “Calibration”"},
        {"profile of a kernel that declares nothing", "chosen: the tightest of the known ones that fits",
         "<cite>ref/TOLERANCE-TWIN.md</cite>, “Kernels that declare nothing”"},
        {"power", "measured on each case's own truth and bound", "this page, “Power”"},
        {"times", "measured; rooflines are the vendor's", "this page, “Throughput”"}};
    fputs("<h2 id=\"derived\">What is derived, what is calibrated</h2>\n", f);
    dkv_beginTable(f, "Where each limit comes from", NULL);
    fputs("<thead><tr><th scope=\"col\">what</th><th scope=\"col\">comes from</th><th scope=\"col\">page, section</th></tr>"
          "</thead><tbody>\n", f);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        fprintf(f, "<tr><th scope=\"row\">%s</th><td>%s</td><td>%s</td></tr>\n", rows[i][0], rows[i][1], rows[i][2]);
    dkv_endTable(f);
}

static void writeFile(const dkv_gather_file *file, FILE *f) {
    fputs("<tr><th scope=\"row\"><code>", f);
    dkv_writeText(f, file->path, 300);
    fputs("</code></th><td><code>", f);
    dkv_writeText(f, file->hash[0] ? file->hash : "not a file", 64);
    fprintf(f, "</code></td><td>%ld</td><td>%ld</td><td>", file->records, file->bad);
    for (long i = 0; i < file->bad && i < DKV_GATHER_BAD; i++) fprintf(f, "%s%ld", i ? ", " : "", file->bad_lines[i]);
    if (file->bad > DKV_GATHER_BAD) fputs(", …", f);
    if (file->cut) fprintf(f, "%s not read beyond line %ld", file->bad ? ";" : "", file->lines);
    fputs("</td></tr>\n", f);
}

static void writeFact(FILE *f, const char *name, const dkv_wordcount *w) {
    fprintf(f, "<dt>%s</dt><dd>", name);
    dkv_writeWords(w, false, f);
    fputs("</dd>\n", f);
}

static void writeProvenance(const dkv_gather *g, const char *command, FILE *f) {
    bool dirty = false;
    for (int i = 0; i < g->commits.n; i++) dirty |= strstr(g->commits.word[i], "-dirty") != NULL;
    fputs("<h2 id=\"provenance\">Provenance</h2>\n", f);
    dkv_beginTable(f, "Records that this page was made from", NULL);
    fputs("<thead><tr><th scope=\"col\">file</th><th scope=\"col\">SHA-256</th><th scope=\"col\">records</th>"
          "<th scope=\"col\">skipped</th><th scope=\"col\">lines that were skipped</th></tr></thead><tbody>\n", f);
    for (int i = 0; i < g->n_files && i < 200; i++) writeFile(&g->files[i], f);
    dkv_endTable(f);
    if (g->n_files > 200) fprintf(f, "<p>The first 200 of %d files.</p>\n", g->n_files);
    fputs("<dl>\n", f);
    writeFact(f, dirty ? "Commit (<b class=\"unsure\">dirty: not everything was committed</b>)" : "Commit", &g->commits);
    writeFact(f, "Compiler", &g->compilers);
    writeFact(f, "Its flags", &g->flags);
    writeFact(f, "Libraries", &g->libraries);
    writeFact(f, "Device", &g->devices);
    writeFact(f, "Driver", &g->drivers);
    writeFact(f, "Host", &g->hosts);
    writeFact(f, "Input generator", &g->generators);
    writeFact(f, "Oracle", &g->oracles);
    writeFact(f, "Runs began", &g->started);
    fputs("<dt>Records made by</dt><dd>", f);
    if (!g->commands.n) fputs("not in the records", f);
    for (int i = 0; i < g->commands.n && i < 12; i++) {
        fputs("<pre>", f);
        dkv_writeText(f, g->commands.word[i], 500);
        fputs("</pre>", f);
    }
    if (g->commands.n > 12 || g->commands.more) fputs("and others", f);
    fputs("</dd>\n", f);
    if (g->most_level > 0)
        fprintf(f, "<dt>False alarms allowed</dt><dd>%.2g to %.2g for each test of a tensor</dd>\n", g->least_level,
                g->most_level);
    fprintf(f, "<dt>Checking took</dt><dd>%.1f s in all; seeds stand in the problem lines</dd>\n<dt>This page made by</dt><dd><pre>",
            g->seconds);
    dkv_writeText(f, command, 4000);
    fputs("</pre></dd></dl>\n", f);
}

static void writeBody(const dkv_gather *g, const char *command, FILE *f) {
    writeVerdicts(g, f);
    bool trends = false;
    for (int i = 0; i < g->n_kernels && i < KERNELS_SHOWN; i++) trends |= hasTrend(g->kernels[i]);
    fputs("<nav aria-label=\"Sections\"><a href=\"#failures\">What did not pass</a> <a href=\"#errors\">Errors</a> "
          "<a href=\"#coverage\">Coverage</a> <a href=\"#power\">Power</a> ", f);
    if (g->n_faults || g->clean_cases) fputs("<a href=\"#faults\">Planted faults</a> ", f);
    if (g->n_bench) fputs("<a href=\"#throughput\">Throughput</a> ", f);
    if (trends) fputs("<a href=\"#trends\">Over commits</a> ", f);
    fputs("<a href=\"#derived\">Derived or calibrated</a> <a href=\"#provenance\">Provenance</a></nav>\n", f);
    eachKernel(g, "What did not pass", "failures", "With the sentence of the verdict and the command that runs the case "
               "again.", isUnwell, writeUnwell, f);
    eachKernel(g, "Errors", "errors", "Error over bound, by tensor and region of the rows; residual to the twin, the value "
               "that the declared roundings predict.", isJudged, writeErrors, f);
    eachKernel(g, "Coverage", "coverage", "A dash: no case.", hasCases, writeCover, f);
    eachKernel(g, "Power", "power", "Small faults put into the truth itself, by tensor, region and number of tokens that a "
               "segment sees and has: caught by how many of the cases where the fault could be; its largest error over bound.",
               hasPower, dkv_writeStrata, f);
    if (g->n_faults || g->clean_cases) fputs("<h2 id=\"faults\">Planted faults</h2>\n", f);
    if (g->n_faults) dkv_writeFaults(g, f);
    else if (g->clean_cases)
        fprintf(f, "<p>False alarms on the kernel without a fault: %ld in %ld cases.</p>\n", g->false_alarms, g->clean_cases);
    if (g->n_bench) {
        fputs("<h2 id=\"throughput\">Throughput</h2>\n", f);
        dkv_writeBench(g, f);
    }
    if (trends)
        eachKernel(g, "Over commits", "trends", "By commit of this toolkit (and, of a kernel in a file, by what the file holds), in the order "
                   "in which the runs began. Times are those of the checking runs: comparable only on one machine, and where the lines are "
                   "the same.", hasTrend, dkv_writeTrend, f);
    writeDerived(f);
    writeProvenance(g, command, f);
    fputs("</main></body></html>\n", f);
}

int dkv_writeHtml(const dkv_gather *g, const char *path, const char *command, dkv_err *err) {
    FILE *f = fopen(path, "we");
    if (!f) return dkv_fail(err, DKV_EUSER, "cannot write '%s': %s", path, strerror(errno));
    writeTop(g, f);
    writeBody(g, command, f);
    int bad = ferror(f);
    if (fclose(f) != 0 || bad) return dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", path, strerror(errno));
    return 0;
}
