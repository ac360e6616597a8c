#include "report_trend.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "report_tables.h"
#include "report_text.h"

enum { COMMIT_MAX = 60, STARTED_MAX = 20 };

static dkv_gather_commit *findCommit(dkv_gather_kernel *k, const char *commit) {
    for (int i = k->n_commits - 1; i >= 0; i--)
        if (strncmp(k->by_commit[i].commit, commit, COMMIT_MAX) == 0) return &k->by_commit[i];
    if (!k->by_commit && !(k->by_commit = calloc(DKV_GATHER_COMMITS, sizeof *k->by_commit))) return NULL;
    dkv_gather_commit *c = &k->by_commit[k->n_commits++];
    *c = (dkv_gather_commit){.worst = NAN, .rms = NAN, .rms_share = NAN};
    c->commit = strndup(commit, COMMIT_MAX);
    c->started = strdup("");
    return c->commit && c->started ? c : NULL;
}

/* NAN stands for none; what is no number counts as the largest. */
static void lift(double *most, double x) {
    if (isnan(x)) x = INFINITY;
    if (!(*most >= x)) *most = x;
}

static void addTensor(dkv_gather_commit *c, const cJSON *t) {
    lift(&c->worst, dkv_numberOf(t, "max_bound_ratio", NAN));
    double rms = dkv_numberOf(t, "twin_rms", NAN), limit = dkv_numberOf(t, "twin_rms_limit", NAN);
    if (!isfinite(rms)) return;
    lift(&c->rms, rms);
    if (limit > 0) lift(&c->rms_share, rms / limit);
}

static double secondsOf(const cJSON *o, const char *key) {
    double x = dkv_numberOf(o, key, 0);
    return x > 0 && x < 1e9 ? x : 0;
}

int dkv_addCommit(dkv_gather_kernel *k, const cJSON *record, dkv_status status, uint64_t hash) {
    const char *started = dkv_textOf(record, "started"), *file = dkv_textOf(record, "kernel_sha256");
    const cJSON *t;
    bool known = false;
    char commit[COMMIT_MAX];
    if (!dkv_textOf(record, "commit")[0]) return 0;
    snprintf(commit, sizeof commit, "%.40s%s%.10s", dkv_textOf(record, "commit"), file[0] ? " file " : "", file);
    for (int i = 0; i < k->n_commits && k->n_commits == DKV_GATHER_COMMITS; i++)
        known |= strncmp(k->by_commit[i].commit, commit, COMMIT_MAX) == 0;
    if (k->n_commits == DKV_GATHER_COMMITS && !known) {
        k->commits_left_out++;
        return 0;
    }
    dkv_gather_commit *c = findCommit(k, commit);
    if (!c) return -1;
    if (started[0] && (!c->started[0] || strncmp(started, c->started, STARTED_MAX) < 0)) {
        free(c->started);
        if (!(c->started = strndup(started, STARTED_MAX))) return -1;
    }
    c->cases++;
    c->defects += dkv_statusRow(status)->defect;
    c->lines += hash;
    c->seconds += secondsOf(record, "seconds_forward") + secondsOf(record, "seconds_backward");
    cJSON_ArrayForEach(t, cJSON_GetObjectItemCaseSensitive(record, "tensors"))
        if (t->string && cJSON_IsObject(t)) addTensor(c, t);
    return 0;
}

void dkv_freeCommits(dkv_gather_kernel *k) {
    for (int i = 0; i < k->n_commits; i++) {
        free(k->by_commit[i].commit);
        free(k->by_commit[i].started);
    }
    free(k->by_commit);
}

/* ---- in order ---- */

static int byStart(const void *a, const void *b) {
    const dkv_gather_commit *const *x = a, *const *y = b;
    int d = strcmp((*x)->started, (*y)->started);
    return d ? d : (*x > *y) - (*x < *y);
}

dkv_gather_commit *dkv_sortCommits(const dkv_gather_kernel *k) {
    const dkv_gather_commit *order[DKV_GATHER_COMMITS];
    dkv_gather_commit *list = k->n_commits ? malloc((size_t)k->n_commits * sizeof *list) : NULL;
    if (!list) return NULL;
    for (int i = 0; i < k->n_commits; i++) order[i] = &k->by_commit[i];
    qsort(order, (size_t)k->n_commits, sizeof *order, byStart);
    for (int i = 0; i < k->n_commits; i++) list[i] = *order[i];
    return list;
}

/* Times are compared where the lines are the same as those of the commit before. */
static bool isComparable(const dkv_gather_commit *list, int i) {
    return i > 0 && list[i].lines == list[i - 1].lines && list[i].cases == list[i - 1].cases && list[i - 1].seconds > 0 &&
           list[i].seconds > 0;
}

/* ---- drawing ---- */

enum { WIDTH = 400, LEFT = 40, RIGHT = 10, TOP = 8, HEIGHT = 110, FOOT = 34 };

/* From 0.01 to 100, logarithmic; what lies beyond is at the edge. */
static double placeOf(double x) {
    double at = isnan(x) || x <= 0.01 ? 0 : x >= 100 ? 1 : (log10(x) + 2) / 4;
    return TOP + HEIGHT * (1 - at);
}

static void drawTrend(const dkv_gather_commit *list, int n, FILE *f) {
    double step = (double)(WIDTH - LEFT - RIGHT) / (n > 1 ? n - 1 : 1);
    fprintf(f, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"Largest error over bound and largest residual over its "
               "limit, commit by commit; the table has the numbers\">\n", WIDTH, TOP + HEIGHT + FOOT);
    for (int d = -2; d <= 2; d++)
        fprintf(f, "<line class=\"%s\" x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">"
                   "%g</text>\n", d ? "axis" : "edge", LEFT, placeOf(pow(10, d)), WIDTH - RIGHT, placeOf(pow(10, d)), LEFT - 6,
                placeOf(pow(10, d)) + 4, pow(10, d));
    for (int what = 0; what < 2; what++) {
        fprintf(f, "<polyline class=\"%s\" points=\"", what ? "trail dashed" : "trail");
        for (int i = 0; i < n; i++)
            fprintf(f, "%.1f,%.1f ", LEFT + step * i, placeOf(what ? list[i].rms_share : list[i].worst));
        fputs("\"/>\n", f);
    }
    for (int i = 0; i < n; i++) {
        fprintf(f, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"><title>", list[i].defects ? "out" : "in",
                LEFT + step * i, placeOf(list[i].worst));
        dkv_writeText(f, list[i].commit, 20);
        fputs(": err/bound ", f);
        dkv_writeFigure(f, list[i].worst);
        fputs("</title></circle>\n", f);
    }
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">commits, oldest first (line: err/bound; dashed: residual over "
               "limit)</text>\n</svg>\n", WIDTH / 2, TOP + HEIGHT + 26);
}

/* ---- tables ---- */

static void writeRow(const dkv_gather_commit *list, int i, FILE *f) {
    const dkv_gather_commit *c = &list[i];
    fputs(c->defects ? "<tr class=\"bad\"><th scope=\"row\"><code>" : "<tr><th scope=\"row\"><code>", f);
    dkv_writeText(f, c->commit, 40);
    fputs("</code></th><td>", f);
    dkv_writeText(f, c->started[0] ? c->started : "–", STARTED_MAX);
    fprintf(f, "</td><td>%ld</td><td>%ld</td><td>", c->cases, c->defects);
    dkv_writeFigure(f, c->worst);
    fputs("</td><td>", f);
    dkv_writeFigure(f, c->rms);
    fputs("</td><td>", f);
    dkv_writeFigure(f, c->rms_share);
    fprintf(f, "</td><td>%.3g", c->seconds);
    if (isComparable(list, i)) fprintf(f, " <small>(%.2f of the one before)</small>", c->seconds / list[i - 1].seconds);
    else if (i) fputs(" <small>(other lines than the one before)</small>", f);
    fputs("</td></tr>\n", f);
}

void dkv_writeTrend(const dkv_gather_kernel *k, FILE *f) {
    static const char *const head[] = {"commit", "run began", "cases", "defects", "worst err/bound", "largest rms z",
                                       "largest rms z over its limit", "seconds in the kernel"};
    dkv_gather_commit *list = k->n_commits > 1 ? dkv_sortCommits(k) : NULL;
    if (!list) return;
    fputs("<h3>", f);
    dkv_writeText(f, k->name, 120);
    fputs("</h3>\n<figure>\n", f);
    drawTrend(list, k->n_commits, f);
    fputs("</figure>\n", f);
    dkv_beginTable(f, "Commit by commit, oldest first", k->name);
    fputs("<thead><tr>", f);
    for (size_t i = 0; i < sizeof head / sizeof *head; i++) fprintf(f, "<th scope=\"col\">%s</th>", head[i]);
    fputs("</tr></thead><tbody>\n", f);
    for (int i = 0; i < k->n_commits; i++) writeRow(list, i, f);
    dkv_endTable(f);
    if (k->commits_left_out) fprintf(f, "<p>%ld cases of further commits are in the records.</p>\n", k->commits_left_out);
    free(list);
}

void dkv_markTrend(const dkv_gather_kernel *k, FILE *f) {
    dkv_gather_commit *list = k->n_commits > 1 ? dkv_sortCommits(k) : NULL;
    if (!list) return;
    fprintf(f, "| commit | run began | cases | defects | worst err/bound | largest rms z | over its limit | seconds in the kernel |\n"
               "|---|---|---:|---:|---:|---:|---:|---:|\n");
    for (int i = k->n_commits > 20 ? k->n_commits - 20 : 0; i < k->n_commits; i++) {
        const dkv_gather_commit *c = &list[i];
        fputs("| ", f);
        dkv_markText(f, c->commit, 40);
        fputs(" | ", f);
        dkv_markText(f, c->started[0] ? c->started : "–", STARTED_MAX);
        fprintf(f, " | %ld | %ld | ", c->cases, c->defects);
        dkv_writeFigure(f, c->worst);
        fputs(" | ", f);
        dkv_writeFigure(f, c->rms);
        fputs(" | ", f);
        dkv_writeFigure(f, c->rms_share);
        fprintf(f, " | %.3g |\n", c->seconds);
    }
    free(list);
}
