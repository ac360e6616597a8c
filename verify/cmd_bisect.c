/* bisect: the commit from which on a kernel fails, or the flags with which it does. */
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bisect_flags.h"
#include "bisect_show.h"
#include "cli.h"
#include "record.h"
#include "select.h"

#define BUILD_TIMEOUT 1800.0 /* seconds of one build, unless told otherwise */
#define ERROR         1e-3   /* probability of a wrong answer by chance, unless told otherwise */

typedef struct run {
    const dkv_cli *cli;
    dkv_repo repo;
    dkv_bisect_cache cache;
    dkv_trying trying;
    dkv_selection lines;
    dkv_metric metric;
    dkv_bisection hunt;
    dkv_record_file file;
    FILE *out;
    bool colour;
    dkv_err trouble; /* of the records */
} run;

/* ---- before anything runs ---- */

static int needWords(const dkv_cli *cli, dkv_err *err) {
    const bool flags = cli->by_flags;
    const struct {
        const char *name, *value;
        bool of_flags, of_commits;
    } rows[] = {{"--kernel", cli->subject, true, true},   {"--good", cli->good, false, true},
                {"--bad", cli->bad, false, true},         {"--flags-good", cli->flags_good, true, false},
                {"--flags-bad", cli->flags_bad, true, false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!rows[i].value && (flags ? rows[i].of_flags : rows[i].of_commits))
            return dkv_fail(err, DKV_EUSER, "bisect: %s is missing", rows[i].name);
        if (rows[i].value && !flags && !rows[i].of_commits) return dkv_fail(err, DKV_EUSER, "%s without --flags", rows[i].name);
    }
    if (flags && cli->good) return dkv_fail(err, DKV_EUSER, "--flags is of one commit: --bad, without --good");
    if (flags && (cli->metric || cli->plot || cli->n_paths))
        return dkv_fail(err, DKV_EUSER, "--flags together with --metric, --plot or --path");
    if (flags && !cli->build) return dkv_fail(err, DKV_EUSER, "--flags: --build: which command uses $DUALKV_FLAGS?");
    if (cli->runs && cli->flaky > 0) return dkv_fail(err, DKV_EUSER, "--repeats and --flaky together: the runs follow from --flaky");
    if (cli->metric && cli->flaky > 0) return dkv_fail(err, DKV_EUSER, "--metric and --flaky together");
    if (cli->build && !cli->build[0]) return dkv_fail(err, DKV_EUSER, "--build: the command is empty");
    return cli->plot ? dkv_drawBisection(NULL, cli->plot, err) : 0;
}

static int selectLines(run *r, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    const int n = cli->n_case_lines + cli->n_words;
    const char **words = calloc((size_t)n + 1, sizeof *words);
    if (!words) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int i = 0; i < cli->n_case_lines; i++) words[i] = cli->case_lines[i];
    for (int i = 0; i < cli->n_words; i++) words[cli->n_case_lines + i] = cli->words[i];
    int rc = dkv_selectWords(words, n, &r->lines, err);
    free(words);
    return rc;
}

/* Where results are kept, unless told: the user's folder for such things. NULL: there is none. */
static char *usualCache(void) {
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    char *path = NULL;
    const bool given = xdg && xdg[0] == '/';
    if (!given && !(home && home[0] == '/')) return NULL;
    if (asprintf(&path, "%s%s/dualkv/bisect.jsonl", given ? xdg : home, given ? "" : "/.cache") < 0) return NULL;
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0777);
        *slash = '/';
    }
    return path;
}

static int openCache(run *r, dkv_err *err) {
    const char *given = r->cli->cache;
    char *usual = NULL;
    if (given && strcmp(given, "none") == 0) return dkv_openCache(NULL, &r->cache, err);
    if (given) return dkv_openCache(given, &r->cache, err);
    usual = usualCache();
    int rc = usual ? dkv_openCache(usual, &r->cache, err) : 0;
    if (rc || !usual) {
        fprintf(stderr, "note: results are not kept: %s\n", rc ? err->text : "no HOME (--cache FILE)");
        dkv_closeCache(&r->cache);
        *err = (dkv_err){0};
    }
    free(usual);
    return 0;
}

static int prepare(run *r, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    int rc = needWords(cli, err);
    if (!rc && cli->metric) rc = dkv_parseMetric(cli->metric, &r->metric, err);
    if (!rc) rc = selectLines(r, err);
    if (!rc && cli->arithmetic) rc = dkv_checkArithmeticWord(cli->arithmetic, err);
    if (!rc) rc = dkv_checkRecordPath(cli->json, err);
    r->trying = (dkv_trying){.repo = &r->repo, .cache = &r->cache, .build = cli->build, .kernel = cli->subject,
                             .build_timeout = cli->build_timeout > 0 ? cli->build_timeout : BUILD_TIMEOUT,
                             .timeout = cli->timeout, .keep = cli->incremental, .lines = r->lines.lines,
                             .n_lines = r->lines.n};
    if (!rc) rc = dkv_openRepo(cli->repo ? cli->repo : ".", &r->repo, err);
    if (!rc) rc = dkv_prepareTrying(&r->trying, err);
    if (!rc) rc = openCache(r, err);
    if (!rc && r->cache.skipped)
        fprintf(stderr, "note: %ld lines of '%s' are no rows of a cache, and are left out\n", r->cache.skipped, r->cache.path);
    return rc;
}

/* ---- commits ---- */

static void writeJson(run *r, char *json) {
    dkv_err err = {0};
    if (!r->cli->json) {
        free(json);
        return;
    }
    int rc = json ? dkv_writeRecord(&r->file, json, &err) : dkv_fail(&err, DKV_EHARNESS, "out of memory for a record");
    if (rc && !r->trouble.code) r->trouble = err;
    if (rc) dkv_stopRequested = 1; /* records that cannot be kept: no use in going on */
    free(json);
}

static void begun(const dkv_bisection *h) {
    run *r = h->arg;
    if (!r->cli->quiet) dkv_sayBegun(h, r->out);
}

static void fitted(const dkv_bisection *h) {
    const run *r = h->arg;
    bool any = false;
    for (int type = 0; type < 3; type++) {
        const dkv_fit *fit = &h->held.of[type];
        if (r->cli->quiet || !fit->known) continue;
        fprintf(r->out, "%s%s (%s)", any ? ", " : "  all are held to ", fit->words, dkv_dtypeName((dualkv_dtype)type));
        any = true;
    }
    if (any) fprintf(r->out, "\n");
    else if (!r->cli->quiet) fprintf(r->out, "  the good end declares its arithmetic, or nothing fits it\n");
    fflush(r->out);
}

static void tested(const dkv_bisection *h, const dkv_tested *t) {
    run *r = h->arg;
    if (!r->cli->quiet) dkv_sayTested(h, t, r->colour, r->out);
    writeJson(r, dkv_printTested(h, t));
}

static int sayFound(run *r, dkv_err *err) {
    const dkv_bisection *h = &r->hunt;
    const char *plot = r->cli->plot;
    if (r->cli->quiet && h->end.found) fprintf(r->out, "%s\n", h->end.first);
    else dkv_sayAnswer(h, r->out);
    writeJson(r, dkv_printAnswer(h));
    int rc = plot ? dkv_drawBisection(h, plot, err) : 0;
    if (rc == DKV_EHARNESS) { /* the answer stands without a drawing */
        fprintf(stderr, "note: no plot: %s\n", err->text);
        rc = 0;
    } else if (plot && !rc && !r->cli->quiet) fprintf(r->out, "  plot: %s\n", plot);
    return rc ? rc : h->end.found ? DKV_EXIT_OK : DKV_EXIT_WEAK;
}

static int huntCommits(run *r, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    r->hunt = (dkv_bisection){.repo = &r->repo, .trying = &r->trying, .good = cli->good, .bad = cli->bad, .paths = cli->paths,
                         .metric = cli->metric ? &r->metric : NULL, .flaky = cli->flaky,
                         .error = cli->error_probability > 0 ? cli->error_probability : ERROR, .runs = cli->runs,
                         .arithmetic = cli->arithmetic, .begun = begun, .fitted = fitted, .tested = tested, .arg = r};
    int rc = dkv_runBisection(&r->hunt, err);
    return rc ? dkv_stopRequested ? 0 : dkv_complain(err) : sayFound(r, err);
}

/* ---- flags ---- */

static int testFlags(const char *flags, void *arg, dkv_bisect_verdict *out, dkv_err *err) {
    static const char *const words[] = {"passes", "fails", "skipped"};
    run *r = arg;
    dkv_trial t;
    r->trying.flags = flags;
    int rc = dkv_tryCommit(&r->trying, r->hunt.ends[1], false, &t, err);
    r->trying.flags = NULL;
    if (rc) return rc;
    *out = t.verdict;
    if (!r->cli->quiet) fprintf(r->out, "  %-8s %s\n", words[t.verdict], flags[0] ? flags : "(none)");
    if (!r->cli->quiet && t.verdict == DKV_BV_SKIP) fprintf(r->out, "           %.200s\n", t.why);
    fflush(r->out);
    dkv_freeTrial(&t);
    return 0;
}

static void sayFlags(const run *r, const dkv_flag_search *s) {
    char build[1024], line[1024], kernel[1024], flags[1024], options[256] = "";
    fprintf(r->out, "\nof %d change%s, %s needed for the cases to fail:\n", s->n, s->n == 1 ? "" : "s",
            s->n_needed == 1 ? "one is" : "these are");
    for (int i = 0; i < s->n; i++)
        if (s->needed[i]) fprintf(r->out, "    %s %s\n", s->changes[i].added ? "with   " : "without", s->changes[i].text);
    fprintf(r->out, "  %ld sets tested, %ld built; without any one of these they do not fail\n", s->tests, r->trying.builds);
    dkv_quoteWord(s->flags, flags, sizeof flags);
    dkv_quoteWord(r->trying.build, build, sizeof build);
    dkv_quoteWord(r->trying.lines[0], line, sizeof line);
    dkv_quoteWord(r->trying.kernel, kernel, sizeof kernel);
    dkv_appendOptions(options, sizeof options, 0, true);
    if (!strchr(s->flags, '='))
        fprintf(r->out, "  replay: DUALKV_FLAGS=%s sh -c %s && dualkv replay %s --kernel %s%s\n", flags, build, line, kernel, options);
}

static char *printFlags(const run *r, const dkv_flag_search *s) {
    cJSON *o = cJSON_CreateObject(), *list;
    if (!o) return NULL;
    cJSON_AddStringToObject(o, "bisect", "flags");
    cJSON_AddStringToObject(o, "commit", r->hunt.ends[1]);
    cJSON_AddStringToObject(o, "flags", s->flags);
    for (int added = 1; added >= 0; added--) {
        list = cJSON_AddArrayToObject(o, added ? "added" : "taken_away");
        for (int i = 0; i < s->n; i++)
            if (s->needed[i] && s->changes[i].added == added)
                cJSON_AddItemToArray(list, cJSON_CreateString(s->changes[i].text));
    }
    cJSON_AddNumberToObject(o, "tested", (double)s->tests);
    cJSON_AddNumberToObject(o, "builds", (double)r->trying.builds);
    char *text = cJSON_PrintUnformatted(o);
    cJSON_Delete(o);
    return text;
}

static int huntFlags(run *r, dkv_err *err) {
    dkv_flag_search s = {.test = testFlags, .arg = r};
    r->hunt = (dkv_bisection){.repo = &r->repo, .trying = &r->trying};
    r->trying.runs = r->cli->flaky > 0 ? dkv_runsNeeded(r->cli->flaky, r->cli->error_probability > 0 ? r->cli->error_probability : ERROR,
                                                        DKV_FLAGS_MAX)
                     : r->cli->runs ? r->cli->runs : 1;
    r->trying.any = r->cli->flaky > 0;
    int rc = dkv_findCommit(&r->repo, "--bad", r->cli->bad ? r->cli->bad : "HEAD", r->hunt.ends[1], err);
    if (!rc) rc = dkv_openTree(&r->repo, r->hunt.ends[1], err);
    if (!rc && r->cli->arithmetic) {
        r->trying.flags = r->cli->flags_good;
        rc = dkv_fitCommit(&r->trying, r->hunt.ends[1], r->cli->arithmetic, &r->hunt.held, err);
        r->trying.flags = NULL;
        r->trying.held = &r->hunt.held;
    }
    if (!rc) rc = dkv_searchFlags(r->cli->flags_good, r->cli->flags_bad, &s, err);
    if (!rc && r->cli->quiet) fprintf(r->out, "%s\n", s.flags);
    else if (!rc) sayFlags(r, &s);
    if (!rc) writeJson(r, printFlags(r, &s));
    dkv_freeFlagSearch(&s);
    return rc ? dkv_stopRequested ? 0 : dkv_complain(err) : DKV_EXIT_OK;
}

int dkv_cmdBisect(const dkv_cli *cli) {
    static run r; /* static: outlives an interrupted run's threads */
    dkv_err err = {0};
    r = (run){.cli = cli, .out = stdout, .file = {.path = cli->json}};
    if (cli->json && strcmp(cli->json, "-") == 0) r.out = stderr;
    r.colour = r.out == stdout && dkv_wantsColour();
    dkv_catchSignals();
    int code = prepare(&r, &err) ? dkv_complain(&err) : cli->by_flags ? huntFlags(&r, &err) : huntCommits(&r, &err);
    dkv_closeTree(&r.repo);
    if (dkv_closeRecords(&r.file, &err) && !r.trouble.code) r.trouble = err;
    if (r.trouble.code) code = dkv_complain(&r.trouble);
    else if (dkv_stopRequested) {
        fprintf(stderr, "dualkv: interrupted; %s\n",
                r.cache.path ? "the same command goes on from here" : "results were not kept (--cache FILE)");
        code = 128 + dkv_stopRequested;
    }
    if (dkv_threadsLeft()) return code;
    dkv_freeBisection(&r.hunt);
    dkv_closeCache(&r.cache);
    dkv_closeRepo(&r.repo);
    dkv_freeSelection(&r.lines);
    return code;
}
