#include "bisect_show.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/fields.h"
#include "append.h"
#include "bisect_proc.h"
#include "record.h"
#include "version.h"

enum { BAR = 40, POSSIBLE_TOLD = 12 };

static const char *const verdicts[] = {"good", "bad", "skipped"};

/* "dQ.rms", "seconds"; "err/bound" without a metric. */
static void dkv_nameValue(const dkv_bisection *h, char *out, size_t n) {
    if (!h->metric) snprintf(out, n, "err/bound");
    else if (h->metric->tensor < 0 && h->tensor >= 0)
        snprintf(out, n, "%s.%s", dkv_tensorName((dkv_tensor_id)h->tensor), h->metric->name);
    else snprintf(out, n, "%s", h->metric->name);
}

static void sayValue(double x, char *out, size_t n) {
    if (isnan(x)) snprintf(out, n, "-");
    else snprintf(out, n, "%.4g", x);
}

void dkv_sayBegun(const dkv_bisection *h, FILE *f) {
    fprintf(f, "%ld commit%s from %.12s (good) to %.12s (bad): about %d to test, %d run%s each\n", h->between,
            h->between == 1 ? "" : "s", h->ends[0], h->ends[1], h->steps, h->runs_made, h->runs_made == 1 ? "" : "s");
    if (!h->linear) fprintf(f, "the good one is no ancestor of the bad one: where their histories part is tested, too\n");
    if (h->repo->dirty) fprintf(f, "note: changes in %s that are not committed are no part of this\n", h->repo->path);
}

void dkv_sayTested(const dkv_bisection *h, const dkv_tested *t, bool colour, FILE *f) {
    static const char *const tints[] = {"\033[32m", "\033[31m", "\033[33m"};
    const dkv_trial *r = &t->trial;
    char value[32], how[64] = "";
    sayValue(t->value, value, sizeof value);
    if (!r->built) snprintf(how, sizeof how, "known");
    else if (h->trying->build) snprintf(how, sizeof how, "built in %.3gs", r->seconds);
    fprintf(f, "  %-10s %s%-7s%s %10s  %-15s %.60s\n", t->info.brief, colour ? tints[r->verdict] : "", verdicts[r->verdict],
            colour ? "\033[0m" : "", value, how, t->info.subject);
    if (r->verdict == DKV_BV_SKIP) fprintf(f, "             %.200s\n", r->why[0] ? r->why : dkv_buildName(r->build));
    fflush(f);
}

/* ---- the answer ---- */

static int byPosition(const void *a, const void *b) {
    const dkv_tested *x = *(dkv_tested *const *)a, *y = *(dkv_tested *const *)b;
    return (x->info.position > y->info.position) - (x->info.position < y->info.position);
}

/* What was tested, in the order of history; NULL where out of memory. */
static const dkv_tested **inOrder(const dkv_bisection *h) {
    const dkv_tested **list = malloc(sizeof *list * (size_t)(h->n + 1));
    for (long i = 0; list && i < h->n; i++) list[i] = &h->list[i];
    if (list) qsort(list, (size_t)h->n, sizeof *list, byPosition);
    return list;
}

/* The last good one before. */
static const dkv_tested *before(const dkv_bisection *h, const dkv_tested *first) {
    const dkv_tested *last = NULL;
    for (long i = 0; i < h->n && first; i++) {
        const dkv_tested *t = &h->list[i];
        if (t->trial.verdict == DKV_BV_GOOD && t->info.position < first->info.position &&
            (!last || t->info.position > last->info.position))
            last = t;
    }
    return last;
}

static void sayPlot(const dkv_bisection *h, FILE *f) {
    const dkv_tested **list = inOrder(h);
    char name[40];
    double low = INFINITY, high = -INFINITY;
    bool logs = !h->metric || dkv_isLogarithmic(h->metric);
    dkv_nameValue(h, name, sizeof name);
    for (long i = 0; i < h->n; i++) {
        double x = h->list[i].value;
        if (!isfinite(x) || (logs && !(x > 0))) continue;
        low = fmin(low, x);
        high = fmax(high, x);
    }
    if (!list || !(high > -INFINITY)) {
        free(list);
        return;
    }
    fprintf(f, "\n  %6s %-10s %-7s %10s%s\n", "commit", "", "", name, logs && high > 10 * low ? "  (bars: logarithmic)" : "");
    logs = logs && high > 10 * low;
    double from = logs ? log(low) - 0.1 * (log(high) - log(low)) : low > 0 ? 0 : low, to = logs ? log(high) : fmax(high, 0);
    for (long i = 0; i < h->n; i++) {
        const dkv_tested *t = list[i];
        char value[32], bar[BAR + 1];
        double at = logs && t->value > 0 ? log(t->value) : t->value;
        int n = isnan(at) || !(to > from) ? 0 : isinf(at) ? BAR : (int)lrint(BAR * (at - from) / (to - from));
        n = n < 0 ? 0 : n > BAR ? BAR : n;
        memset(bar, '#', sizeof bar);
        bar[n] = 0;
        sayValue(t->value, value, sizeof value);
        fprintf(f, "  %6ld %-10s %-7s %10s  %s\n", t->info.position, t->info.brief, verdicts[t->trial.verdict], value, bar);
    }
    free(list);
}

static void sayStep(const dkv_bisection *h, const dkv_tested *first, FILE *f) {
    const dkv_tested *last = before(h, first);
    char name[40], from[32], to[32];
    dkv_nameValue(h, name, sizeof name);
    if (!last) return;
    sayValue(last->value, from, sizeof from);
    sayValue(first->value, to, sizeof to);
    fprintf(f, "  %s %s -> %s", name, from, to);
    if (h->metric && dkv_isLogarithmic(h->metric) && isfinite(first->value) && last->value > 0)
        fprintf(f, ", %.3g times", first->value / last->value);
    else if (h->metric && isfinite(first->value)) fprintf(f, ", a step of %.3g", first->value - last->value);
    fprintf(f, "\n");
    if (!h->metric) return;
    fprintf(f, "  accepted at the good end: %.4g, and what chance explains around it, %.4g to %.4g", h->interval.at,
            h->interval.low, h->interval.high);
    if (h->interval.sample > 1)
        fprintf(f, "\n  (%d %s of the good end, Student's t)\n", h->interval.sample,
                dkv_isTime(h->metric) ? "runs" : "further seeds");
    else fprintf(f, "\n  (seeds are fixed; the ratio of two rms of %.3g independent rows)\n", h->interval.dof);
}

static void saySurety(const dkv_bisection *h, FILE *f) {
    long skipped = 0, flaky = 0;
    for (long i = 0; i < h->n; i++) {
        skipped += h->list[i].trial.build != DKV_BUILD_OK;
        flaky += h->list[i].trial.flaky && h->list[i].trial.verdict == DKV_BV_SKIP;
    }
    fprintf(f, "  %ld commits tested, %ld of them built", h->n, h->trying->builds);
    if (skipped) fprintf(f, "; %ld could not be built", skipped);
    if (flaky) fprintf(f, "; %ld flaky, left out", flaky);
    if (h->trying->reused) fprintf(f, "; %ld runs were known", h->trying->reused);
    fprintf(f, "\n");
    const int n = h->runs_made;
    if (h->metric)
        fprintf(f, "  the middle of %d run%s each; chance alone leaves the interval with probability below %.2g\n", n,
                n == 1 ? "" : "s", h->error);
    else if (h->flaky > 0)
        fprintf(f, "  a bad commit is taken to fail in each run with probability %.3g, a good one never: all of its %d runs pass "
                   "with\n  probability %.2g, so the answer is wrong with probability below %.2g\n",
                h->flaky, n, pow(1 - h->flaky, n), fmin(1, h->steps * pow(1 - h->flaky, n)));
    else if (n == 1) fprintf(f, "  one run each: a commit that fails now and then would not be noticed (--repeats, --flaky)\n");
    else
        fprintf(f, "  %d runs each, which must agree: one that fails in half of its runs is mistaken with probability %.2g\n", n,
                2 * pow(0.5, n));
}

static void sayPossible(const dkv_bisection *h, FILE *f) {
    fprintf(f, "\nonly commits that say nothing are left: the first bad one is any of %ld\n", h->end.n);
    for (long i = 0; i < h->end.n && i < POSSIBLE_TOLD; i++) {
        const dkv_tested *t = dkv_findTested(h, h->end.possible[i]);
        dkv_commit_info info;
        if (t) info = t->info;
        else if (dkv_describeCommit(h->repo, h->end.possible[i], h->ends[0], &info, NULL)) continue;
        fprintf(f, "  %-10s %.80s\n", info.brief, info.subject);
    }
    if (h->end.n > POSSIBLE_TOLD) fprintf(f, "  and %ld more\n", h->end.n - POSSIBLE_TOLD);
}

/* Shell words that build and judge it again. */
static void dkv_sayAgain(const dkv_bisection *h, const char *id, char *out, size_t n) {
    const dkv_trying *t = h->trying;
    static char repo[4 * PATH_MAX], build[1 << 16], kernel[8192], line[DKV_LINE_MAX + 64];
    const dkv_tested *x = dkv_findTested(h, id);
    const char *which = h->metric ? t->lines[h->line] : x && x->trial.worst ? x->trial.worst->line : t->lines[0];
    dkv_quoteWord(h->repo->path, repo, sizeof repo);
    dkv_quoteWord(t->build ? t->build : "true", build, sizeof build);
    dkv_quoteWord(t->kernel, kernel, sizeof kernel);
    dkv_quoteWord(which, line, sizeof line);
    size_t at = dkv_append(out, n, 0, "git -C %s worktree add --detach /tmp/%.12s %.12s && cd /tmp/%.12s%s%s && dualkv replay %s --kernel %s",
                           repo, id, id, id, t->build ? " && sh -c " : "", t->build ? build : "", line, kernel);
    dkv_appendOptions(out, n, at, true);
}

void dkv_sayAnswer(const dkv_bisection *h, FILE *f) {
    static char again[1 << 17];
    const dkv_tested *first = h->end.found ? dkv_findTested(h, h->end.first) : NULL;
    if (!first) {
        sayPossible(h, f);
        sayPlot(h, f);
        saySurety(h, f);
        return;
    }
    fprintf(f, "\nthe first bad commit: %s  (%s, %s)\n    %s\n", first->info.id, first->info.author, first->info.date,
            first->info.subject);
    char *stat = dkv_diffstat(h->repo, first->info.id);
    if (stat) fprintf(f, "%s", stat);
    free(stat);
    if (first->trial.why[0] && first->trial.worst)
        fprintf(f, "  %s: %s\n", dkv_statusRow(first->trial.worst->status)->name, first->trial.why);
    sayStep(h, first, f);
    sayPlot(h, f);
    fprintf(f, "\n");
    saySurety(h, f);
    dkv_sayAgain(h, first->info.id, again, sizeof again);
    fprintf(f, "  replay: %s\n", again);
}

/* ---- a drawing ---- */

static const char *kindOf(const char *path) {
    size_t n = strlen(path);
    return n > 4 && strcmp(path + n - 4, ".svg") == 0 ? "svg" : n > 4 && strcmp(path + n - 4, ".png") == 0 ? "png" : NULL;
}

/* Points of one verdict; numbers that cannot be drawn are left out. */
static void putPoints(const dkv_bisection *h, FILE *f, int verdict, bool logs) {
    const dkv_tested **list = inOrder(h);
    fprintf(f, "$%s << EOD\n", verdicts[verdict]);
    for (long i = 0; list && i < h->n; i++)
        if ((int)list[i]->trial.verdict == verdict && isfinite(list[i]->value) && (!logs || list[i]->value > 0))
            fprintf(f, "%ld %.17g\n", list[i]->info.position, list[i]->value);
    fprintf(f, "EOD\n");
    free(list);
}

static char *makeScript(const dkv_bisection *h, const char *path) {
    char *text = NULL, name[40];
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    double low = INFINITY, high = -INFINITY;
    if (!f) return NULL;
    for (long i = 0; i < h->n; i++) {
        if (!isfinite(h->list[i].value)) continue;
        low = fmin(low, h->list[i].value);
        high = fmax(high, h->list[i].value);
    }
    const bool logs = low > 0 && high > 10 * low;
    dkv_nameValue(h, name, sizeof name);
    for (int v = 0; v < 3; v++) putPoints(h, f, v, logs);
    fprintf(f, "set terminal %s size 900,480\nset output '%s", kindOf(path), path[0] == '/' ? "" : "./");
    for (const char *c = path; *c; c++) fprintf(f, *c == '\'' ? "''" : "%c", *c);
    fprintf(f, "'\nset xlabel 'commits since the good end'\nset ylabel '%s' noenhanced\nset key top left box opaque\nset grid\nset pointsize 1.5\n%s", name,
            logs ? "set logscale y\n" : "");
    if (h->metric && h->interval.sample)
        fprintf(f, "low = %.17g\nhigh = %.17g\n", h->interval.low, h->interval.high);
    fprintf(f, "plot [-1:%ld] ", h->between + 1);
    if (h->metric && h->interval.sample && isfinite(h->interval.high) && (!logs || h->interval.low > 0))
        fprintf(f, "low lc rgb '#888888' dt 2 notitle, high lc rgb '#888888' dt 2 title 'accepted', ");
    fprintf(f, "$good pt 7 lc rgb '#2a7d3f' title 'good', $bad pt 7 lc rgb '#b3261e' title 'bad', "
               "$skipped pt 6 lc rgb '#888888' title 'skipped'\n");
    fclose(f);
    return text;
}

int dkv_drawBisection(const dkv_bisection *h, const char *path, dkv_err *err) {
    const char *argv[] = {"gnuplot", "-", NULL};
    char why[300];
    if (!kindOf(path)) return dkv_fail(err, DKV_EUSER, "--plot: '%.80s' ends neither in .svg nor in .png", path);
    for (const char *c = path; *c; c++)
        if ((unsigned char)*c < 32) return dkv_fail(err, DKV_EUSER, "--plot: '%.80s' is no name for a file", path);
    if (!h) return 0;
    char *script = makeScript(h, path);
    if (!script) return dkv_fail(err, DKV_EHARNESS, "out of memory for a plot");
    dkv_program p = {.argv = argv, .input = script, .timeout = 60, .ends_only = true};
    int rc = dkv_runProgram(&p, err);
    dkv_lastLine(p.last, why, sizeof why);
    if (!rc && p.code) rc = dkv_fail(err, DKV_EHARNESS, "gnuplot: %s", why[0] ? why : "failed without a word");
    dkv_freeProgram(&p);
    free(script);
    return rc;
}

/* ---- JSON ---- */

static char *finish(cJSON *o) {
    char *text = cJSON_PrintUnformatted(o);
    cJSON_Delete(o);
    return text;
}

char *dkv_printTested(const dkv_bisection *h, const dkv_tested *t) {
    cJSON *o = cJSON_CreateObject();
    char name[40];
    const dkv_trial *r = &t->trial;
    if (!o) return NULL;
    dkv_nameValue(h, name, sizeof name);
    cJSON_AddStringToObject(o, "bisect", "tested");
    cJSON_AddStringToObject(o, "commit", t->info.id);
    cJSON_AddStringToObject(o, "tree", r->tree);
    cJSON_AddNumberToObject(o, "position", (double)t->info.position);
    cJSON_AddStringToObject(o, "subject", t->info.subject);
    cJSON_AddStringToObject(o, "verdict", verdicts[r->verdict]);
    cJSON_AddStringToObject(o, "build", dkv_buildName(r->build));
    cJSON_AddBoolToObject(o, "known", !r->built);
    dkv_addNumber(o, "build_seconds", r->seconds);
    cJSON_AddStringToObject(o, "metric", name);
    dkv_addNumber(o, "value", t->value);
    cJSON_AddNumberToObject(o, "runs", r->made);
    cJSON_AddNumberToObject(o, "failed", r->failed);
    cJSON_AddStringToObject(o, "why", r->why);
    cJSON *cases = cJSON_AddArrayToObject(o, "cases");
    for (long i = 0; i < (long)r->runs * r->n_lines && r->rows; i++) {
        char *text = r->there[i] ? dkv_printBisectRow(&r->rows[i]) : NULL;
        if (text) cJSON_AddItemToArray(cases, cJSON_CreateRaw(text));
        free(text);
    }
    return finish(o);
}

static void addStep(cJSON *o, const dkv_bisection *h, const dkv_tested *first) {
    const dkv_tested *last = before(h, first);
    char *stat = dkv_diffstat(h->repo, first->info.id);
    cJSON_AddStringToObject(o, "first_bad", first->info.id);
    cJSON_AddStringToObject(o, "subject", first->info.subject);
    cJSON_AddStringToObject(o, "author", first->info.author);
    cJSON_AddStringToObject(o, "date", first->info.date);
    cJSON_AddStringToObject(o, "why", first->trial.why);
    if (stat) cJSON_AddStringToObject(o, "diffstat", stat);
    if (last) {
        cJSON_AddStringToObject(o, "last_good", last->info.id);
        dkv_addNumber(o, "before", last->value);
    }
    dkv_addNumber(o, "after", first->value);
    free(stat);
}

char *dkv_printAnswer(const dkv_bisection *h) {
    static char again[1 << 17];
    cJSON *o = cJSON_CreateObject();
    char name[40];
    const dkv_tested *first = h->end.found ? dkv_findTested(h, h->end.first) : NULL;
    if (!o) return NULL;
    dkv_nameValue(h, name, sizeof name);
    cJSON_AddStringToObject(o, "bisect", "answer");
    if (first) addStep(o, h, first);
    else {
        cJSON *list = cJSON_AddArrayToObject(o, "possible");
        for (long i = 0; i < h->end.n; i++) cJSON_AddItemToArray(list, cJSON_CreateString(h->end.possible[i]));
    }
    cJSON_AddStringToObject(o, "good", h->ends[0]);
    cJSON_AddStringToObject(o, "bad", h->ends[1]);
    cJSON_AddNumberToObject(o, "commits", (double)h->between);
    cJSON_AddNumberToObject(o, "tested", (double)h->n);
    cJSON_AddNumberToObject(o, "builds", (double)h->trying->builds);
    cJSON_AddNumberToObject(o, "runs", h->runs_made);
    cJSON_AddStringToObject(o, "metric", name);
    if (h->metric) {
        dkv_addNumber(o, "accepted", h->interval.at);
        dkv_addNumber(o, "low", h->interval.low);
        dkv_addNumber(o, "high", h->interval.high);
        cJSON_AddStringToObject(o, "line", h->trying->lines[h->line]);
    }
    dkv_addNumber(o, "error_probability",
              h->metric ? h->error : h->flaky > 0 ? fmin(1, h->steps * pow(1 - h->flaky, h->runs_made)) : NAN);
    cJSON_AddStringToObject(o, "program", dkv_commit());
    if (first) {
        dkv_sayAgain(h, first->info.id, again, sizeof again);
        cJSON_AddStringToObject(o, "replay", again);
    }
    return finish(o);
}
