/* gate: suite, corpus, fuzzing; what changed against what was accepted; one folder with everything. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../fuzz/log.h"
#include "../fuzz/options.h"
#include "../reports/report_junit.h"
#include "../reports/report_md.h"
#include "cli.h"
#include "gate.h"
#include "record.h"
#include "select.h"
#include "version.h"
#include "waiver.h"

#define DEVICE_TIMEOUT 120 /* seconds that the oracle on a device may take beside its work */
#define TIME           120 /* seconds of the whole, unless told otherwise */
#define SHARES         3   /* of the false alarms: verdicts, fuzzing, comparisons */
#define CONFIRM        24  /* fuzzed defects that are tried again in a fresh process */
#define DETAILS        20  /* changes of a kind, and defects, that the summary lists */
#define ANNOTATIONS    10  /* of a step: what the service shows */

typedef struct run {
    const dkv_cli *cli;
    char *records, *junit_path, *summary, *accepted_path; /* owned */
    dkv_record_file file;
    dkv_log log;
    dkv_report report;
    dkv_junit junit;
    dkv_accepted was, now;
    bool has_was, suites, fuzzed;
    dkv_gate gate;
    dkv_waivers waivers;
    dkv_refusals refused;
    long counts[DKV_ST_N], fuzz_counts[DKV_ST_N], waived, expired, blind, total;
    double start, level;
    dkv_profile profile;
    uint64_t seed;
    dkv_err trouble;
} run;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- the cases ---- */

static void sayDefect(const run *r, const dkv_result *q) {
    char *replay = malloc(DKV_LINE_MAX + 4 * DKV_SPEC_MAX);
    if (replay) {
        dkv_replayCommand(q->line, q->kernel, replay, DKV_LINE_MAX + 4 * DKV_SPEC_MAX);
        printf("%s  %s\n  %s\n  replay: %s\n", dkv_statusRow(q->status)->name, q->line, q->why, replay);
    }
    free(replay);
    if (r->cli->verbose && q->printed[0]) printf("  it printed: %.200s\n", q->printed);
    fflush(stdout);
}

static bool isBad(dkv_status s) { return dkv_statusRow(s)->defect || s == DKV_ST_HARNESS_ERROR; }

/* Its waiver, where it has one that still holds; counts. */
static const char *applyWaiver(run *r, const dkv_result *q) {
    const dkv_waiver *w = dkv_findWaiver(&r->waivers, q->line, q->kernel);
    if (!w) return NULL;
    if (dkv_isExpired(&r->waivers, w)) {
        r->expired++;
        printf("%s\n  its waiver ended on %s, which is a failure: %s\n", q->line, w->until, w->reason);
        return NULL;
    }
    if (!dkv_statusRow(q->status)->defect) return NULL;
    r->waived++;
    r->counts[q->status]--;
    r->counts[DKV_ST_PASSED]++;
    return w->reason;
}

/* To all but the file: report, JUnit, words. */
static int note(run *r, const dkv_result *q, const char *json, const char *suite, const char *excused) {
    int rc = dkv_addReport(&r->report, json, &r->trouble);
    if (!rc) rc = dkv_addJunitRecord(&r->junit, suite, json, excused, &r->trouble);
    if (isBad(q->status) || r->cli->verbose) sayDefect(r, q);
    return rc;
}

static void takeResult(const dkv_result *q, long index, long total, void *arg) {
    run *r = arg;
    dkv_err err = {0};
    r->counts[q->status]++;
    if (q->status == DKV_ST_UNSUPPORTED) dkv_countRefusal(&r->refused, q->why);
    const char *excused = applyWaiver(r, q);
    const dkv_waiver *w = excused ? dkv_findWaiver(&r->waivers, q->line, q->kernel) : NULL;
    char *json = dkv_printExcused(q, excused, w ? w->until : NULL);
    int rc = json ? dkv_writeRecord(&r->file, json, &err) : dkv_fail(&err, DKV_EHARNESS, "out of memory for a record");
    if (!rc) rc = dkv_addAccepted(&r->now, json, &err);
    if (!rc) rc = note(r, q, json, "suite", excused);
    else if (!r->trouble.code) r->trouble = err;
    if (rc) dkv_stopRequested = 1; /* records that cannot be kept: no use in going on */
    free(json);
    if (!r->cli->quiet && total >= 20 && (index + 1) * 4 / total != index * 4 / total) {
        printf("%ld of %ld checked\n", index + 1, total);
        fflush(stdout);
    }
}

static int takeFuzzed(const dkv_fuzzed *f, void *arg) {
    run *r = arg;
    char *json = dkv_printRecord(f->result);
    int rc = json ? dkv_logCase(&r->log, f, &r->trouble)
                  : dkv_fail(&r->trouble, DKV_EHARNESS, "out of memory for a record");
    if (!rc) rc = note(r, f->result, json, "fuzz", NULL);
    free(json);
    return rc;
}

/* ---- before anything runs ---- */

static int place(char **to, const char *given, const char *folder, const char *name, dkv_err *err) {
    if (given ? asprintf(to, "%s", given) < 0 : asprintf(to, "%s/%s", folder, name) < 0) {
        *to = NULL;
        return dkv_fail(err, DKV_EHARNESS, "out of memory for a path");
    }
    return 0;
}

static int makeFolder(const char *path, dkv_err *err) {
    struct stat s;
    if (!path[0]) return dkv_fail(err, DKV_EUSER, "--out: '' is no folder");
    if (mkdir(path, 0777) == 0) return 0;
    if (errno == EEXIST && stat(path, &s) == 0 && S_ISDIR(s.st_mode) && access(path, W_OK | X_OK) == 0) return 0;
    return dkv_fail(err, DKV_EUSER, "--out: cannot make the folder '%s': %s", path,
                    errno == EEXIST ? "something else is there" : strerror(errno));
}

static int checkPlace(const char *option, const char *path, dkv_err *err) {
    dkv_err why = {0};
    if (strcmp(path, "-") == 0) return dkv_fail(err, DKV_EUSER, "%s: stdout holds the words; name a file", option);
    if (!dkv_checkRecordPath(path, &why)) return 0;
    const char *text = strchr(why.text, ' ');
    return dkv_fail(err, DKV_EUSER, "%s:%s", option, text ? text : why.text);
}

static int openPlaces(run *r, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    const char *out = cli->out ? cli->out : "dualkv-gate";
    int rc = place(&r->records, cli->json, out, "records.jsonl", err);
    if (!rc) rc = place(&r->junit_path, cli->junit, out, "junit.xml", err);
    if (!rc) rc = place(&r->summary, cli->markdown, out, "summary.md", err);
    if (!rc) rc = place(&r->accepted_path, cli->accepted, out, "accepted.jsonl", err);
    /* With --accept the file may be missing; one that is there must be sound all the same. */
    bool read = !rc && cli->accepted && (!cli->accept || access(cli->accepted, F_OK) == 0);
    if (read) rc = dkv_readAccepted(cli->accepted, &r->was, err);
    r->has_was = read && !rc;
    if (!rc) rc = makeFolder(out, err);
    if (!rc) rc = checkPlace("--json", r->records, err);
    if (!rc) rc = checkPlace("--junit", r->junit_path, err);
    if (!rc) rc = checkPlace("--markdown", r->summary, err);
    if (!rc && cli->accept) rc = checkPlace("--accepted", r->accepted_path, err);
    r->file.path = r->records;
    return rc;
}

static int loadWaivers(run *r, dkv_err *err) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/waivers.txt", dkv_dataDir());
    return dkv_loadWaivers(r->cli->waivers ? r->cli->waivers : path, r->cli->waivers != NULL, &r->waivers, err);
}

static int checkWords(const run *r, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    if (cli->n_kernels != 1) return dkv_fail(err, DKV_EUSER, "gate: --kernel: one kernel (`dualkv list kernels`)");
    if (cli->quiet && cli->verbose) return dkv_fail(err, DKV_EUSER, "--quiet and --verbose together");
    if (cli->no_fuzz && (cli->cases || cli->seed || cli->profile))
        return dkv_fail(err, DKV_EUSER, "--no-fuzz together with options of fuzzing");
    if (cli->new_bits && !cli->accepted) return dkv_fail(err, DKV_EUSER, "--new-bits: against what? (--accepted FILE)");
    return 0;
}

/* ---- running ---- */

/* Suite and corpus; DKV_EUSER before anything runs. */
static int runSuite(run *r, const dkv_selection *sel, dkv_fits *fits, dkv_session *session, dkv_err *err) {
    static dkv_remote remote; /* static: outlives an interrupted run's threads, as the session does */
    const dkv_cli *cli = r->cli;
    bool replicated;
    dkv_item *items = calloc((size_t)sel->n + 1, sizeof *items);
    if (!items) return dkv_fail(err, DKV_EHARNESS, "out of memory for cases");
    for (long i = 0; i < sel->n; i++) items[i] = (dkv_item){sel->lines[i], 0};
    *session = (dkv_session){.kernels = cli->kernels, .n_kernels = 1, .items = items, .n_items = sel->n,
                             .jobs = cli->jobs, .timeout = cli->timeout, .budget = cli->budget / SHARES,
                             .repeats = cli->repeats, .strength = true, .fits = cli->arithmetic ? fits : NULL,
                             .remote = &remote, .data_dir = dkv_dataDir(), .report = takeResult, .arg = r};
    int rc = sel->n ? 0 : dkv_fail(err, DKV_EHARNESS, "no case was selected, so nothing was learned");
    if (!rc) rc = dkv_probeKernels(cli->kernels, 1, cli->timeout, &replicated, err);
    if (!rc) rc = dkv_precheckItems(session, &replicated, err);
    if (!rc && cli->arithmetic) rc = dkv_checkArithmeticWord(cli->arithmetic, err);
    if (!rc && cli->arithmetic)
        rc = dkv_fitKernel(cli->kernels, cli->arithmetic, 7, cli->timeout, dkv_dataDir(), fits, err);
    if (!rc) rc = dkv_openRemote(&remote, DKV_ORACLE_AUTO, NULL, DEVICE_TIMEOUT, err);
    if (rc) {
        free(items);
        return rc;
    }
    dkv_nameArithmetic(cli->arithmetic);
    r->level = dkv_testLevel(session);
    dkv_catchSignals();
    dkv_runSession(session);
    if (session->stopped) return 0; /* threads may still read the items */
    dkv_closeRemote(&remote);
    free(items);
    return 0;
}

static int runFuzz(run *r, double seconds, const dkv_fits *fits, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    dkv_sampler sampler = {0};
    dkv_campaign c = {.kernel = &cli->kernels[0], .fits = cli->arithmetic ? fits : NULL, .sampler = &sampler,
                      .data_dir = dkv_dataDir(), .cases = (uint64_t)cli->cases, .shards = 1, .seconds = seconds,
                      .jobs = cli->jobs, .repeats = cli->repeats, .timeout = cli->timeout,
                      .budget = cli->budget / SHARES, .confirm = CONFIRM, .report = takeFuzzed, .arg = r};
    int rc = dkv_openSampler(r->profile, r->seed, &sampler, err);
    sampler.forward = cli->forward;
    if (!rc) rc = dkv_openLog(&r->log, r->records, false, cli->kernels[0].text, &sampler, err);
    if (!rc) {
        r->log.file.append = true; /* behind the suite's */
        dkv_runCampaign(&c);
        r->fuzzed = true;
        memcpy(r->fuzz_counts, c.counts, sizeof c.counts);
        if (c.trouble.code && !r->trouble.code) r->trouble = c.trouble;
        rc = dkv_closeLog(&r->log, err);
    }
    dkv_closeSampler(&sampler);
    return rc;
}

/* ---- outputs ---- */

static long sum(const long counts[DKV_ST_N]) {
    long n = 0;
    for (int i = 0; i < DKV_ST_N; i++) n += counts[i];
    return n;
}

static long defects(const run *r) {
    long n = r->expired;
    for (int i = 0; i < DKV_ST_N; i++)
        if (dkv_statusRow((dkv_status)i)->defect) n += r->counts[i] + r->fuzz_counts[i];
    return n;
}

static int exitOf(const run *r) {
    long counts[DKV_ST_N];
    for (int i = 0; i < DKV_ST_N; i++) counts[i] = r->counts[i] + r->fuzz_counts[i];
    counts[DKV_ST_FAILED] += r->expired + (r->cli->accept ? r->gate.counts[DKV_CH_FLOOR] : dkv_countFindings(&r->gate));
    counts[DKV_ST_INCONCLUSIVE] += r->blind > 0;
    return counts[DKV_ST_FAILED] ? DKV_EXIT_DEFECT : dkv_runExit(counts);
}

static const char *verdict(int code) {
    return code == DKV_EXIT_OK ? "PASSED" : code == DKV_EXIT_DEFECT ? "FAILED"
           : code == DKV_EXIT_WEAK ? "INCONCLUSIVE" : "NOTHING LEARNED";
}

/* Text for Markdown: whatever would be markup there, and control characters, replaced. */
static void putPlain(FILE *f, const char *text) {
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '<') fputs("&lt;", f);
        else if (*c == '&') fputs("&amp;", f);
        else if (strchr("`*_[]|\\~#!", *c)) fprintf(f, "\\%c", *c);
        else fputc(*c < 32 || *c > 126 ? '?' : *c, f);
    }
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

/* The verdict and each thing that changed, a sentence each. `md`: as a list of Markdown. */
static void putVerdict(const run *r, FILE *f, int code, bool md) {
    char text[4096];
    long bad = defects(r), found = dkv_countFindings(&r->gate);
    fprintf(f, md ? "# dualkv gate: %s\n\n**" : "%s: ", verdict(code));
    fprintf(f, "%ld defect%s in %ld cases", bad, bad == 1 ? "" : "s", sum(r->counts) + sum(r->fuzz_counts));
    if (r->has_was && r->cli->accept) fprintf(f, "; changes against what was accepted before are accepted now");
    else if (r->has_was && !found) fprintf(f, "; nothing worse than the accepted records");
    else if (r->has_was || found) fprintf(f, "; %ld finding%s beside", found, found == 1 ? "" : "s");
    if (!r->has_was)
        fprintf(f, r->cli->accept ? "; accepted for the first time" : "; compared with nothing (--accepted FILE)");
    if (r->waived) fprintf(f, "; %ld waived", r->waived);
    if (r->expired) fprintf(f, "; %ld waivers are over", r->expired);
    fprintf(f, md ? ".**\n\n" : "\n");
    for (int k = 0; k < DKV_CH_N; k++) {
        dkv_sayChanges(&r->gate, (dkv_change_kind)k, text, sizeof text);
        if (!text[0]) continue;
        fprintf(f, "%s%s (%s): ", md ? "- " : "  ", dkv_isFinding(&r->gate, (dkv_change_kind)k) ? "FINDING" : "note",
                dkv_changeRow((dkv_change_kind)k)->name);
        if (md) putPlain(f, text);
        else fputs(text, f);
        fprintf(f, "\n");
    }
    fprintf(f, "%ssuite: ", md ? "- " : "  ");
    putCounts(f, r->counts);
    fprintf(f, "\n");
    if (r->fuzzed) {
        fprintf(f, "%sfuzzing, seed %" PRIu64 ": ", md ? "- " : "  ", r->seed);
        putCounts(f, r->fuzz_counts);
        fprintf(f, "\n");
    } else fprintf(f, "%sno fuzzing%s\n", md ? "- " : "  ", r->cli->no_fuzz ? "" : ": no time was left (--time)");
    if (r->blind)
        fprintf(f, "%sINCONCLUSIVE in %ld strata: no case would have seen a small fault there\n", md ? "- " : "  ", r->blind);
    if (md) fprintf(f, "\n");
}

static void putDetails(const run *r, FILE *f) {
    for (int k = 0; k < DKV_CH_N; k++) {
        long told = 0;
        if (r->gate.counts[k] < 2) continue;
        fprintf(f, "<details><summary>%s: %ld lines</summary>\n\n", dkv_changeRow((dkv_change_kind)k)->name,
                r->gate.counts[k]);
        for (long i = 0; i < r->gate.n && told < DETAILS; i++) {
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

static void putCases(const run *r, FILE *f) {
    long told = 0;
    for (long i = 0; i < r->report.n_cases && told < DETAILS; i++) {
        const dkv_report_case *c = &r->report.cases[i];
        if (!isBad(dkv_findStatus(c->status))) continue;
        if (!told++) fprintf(f, "## Defects\n\n");
        fprintf(f, "- **%s** ", c->status);
        putPlain(f, c->line);
        fprintf(f, ": ");
        putPlain(f, c->why);
        fprintf(f, "\n\n      ");
        for (const char *s = c->replay; *s; s++) fputc((unsigned char)*s < 32 ? '?' : *s, f);
        fprintf(f, "\n\n");
    }
}

static int writeSummary(const run *r, int code, dkv_err *err) {
    FILE *f = fopen(r->summary, "we");
    if (!f) return dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", r->summary, strerror(errno));
    putVerdict(r, f, code, true);
    fprintf(f, "Kernel ");
    putPlain(f, r->cli->kernels[0].text);
    fprintf(f, " on ");
    putPlain(f, r->now.device ? r->now.device : "?");
    fprintf(f, "; dualkv %s, commit %s, generator %s; %.3g s. False alarms of everything here together: below %g.\n",
            dkv_version(), dkv_commit(), DKV_GENERATOR, now() - r->start, r->cli->budget);
    if (r->gate.least_growth > 0)
        fprintf(f, "Seeds are fixed. An error is said to have grown where the ratio of its rms to the accepted one is "
                   "larger than chance explains at %.2g false alarms a test: from %.3g times on, the more the fewer "
                   "independent rows there are.\n",
                r->level, r->gate.least_growth);
    fprintf(f, "\n");
    putCases(r, f);
    putDetails(r, f);
    fprintf(f, "## What was checked\n\n");
    dkv_writeReportTable(&r->report, f, true);
    if (r->blind) {
        fprintf(f, "\n## What would not have been seen\n\n");
        dkv_writeBlind(&r->report.power, f, "- ", INT_MAX);
    }
    bool bad = ferror(f) != 0;
    if (fclose(f) || bad) return dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", r->summary, strerror(errno));
    return 0;
}

/* GitHub's workflow commands: a line each. */
static void annotate(const char *level, const char *title, const char *line, const char *text) {
    const char *parts[] = {line, line[0] ? ": " : "", text};
    printf("::%s title=dualkv gate%%3A %s::", level, title);
    for (int i = 0; i < 3; i++)
        for (const unsigned char *c = (const unsigned char *)parts[i]; *c; c++) {
            if (*c < 32 || *c == '%') printf("%%%02X", *c);
            else putchar(*c);
        }
    printf("\n");
}

static void annotateAll(const run *r) {
    char text[4096];
    int told = 0;
    for (int k = 0; k < DKV_CH_N; k++) {
        dkv_sayChanges(&r->gate, (dkv_change_kind)k, text, sizeof text);
        bool finding = dkv_isFinding(&r->gate, (dkv_change_kind)k);
        if (text[0]) annotate(finding ? "error" : "notice", dkv_changeRow((dkv_change_kind)k)->name, "", text);
        told += text[0] && finding;
    }
    for (long i = 0; i < r->report.n_cases && told < ANNOTATIONS; i++) {
        const dkv_report_case *c = &r->report.cases[i];
        if (!isBad(dkv_findStatus(c->status))) continue;
        annotate("error", c->status, c->line, c->why);
        told++;
    }
}

static int addChanges(run *r, dkv_err *err) {
    char text[4096];
    int rc = 0;
    for (int k = 0; k < DKV_CH_BETTER && !rc; k++) {
        const dkv_change_kind kind = (dkv_change_kind)k;
        if (!r->has_was && kind != DKV_CH_FLOOR) continue;
        dkv_sayChanges(&r->gate, kind, text, sizeof text);
        bool bad = text[0] && dkv_isFinding(&r->gate, kind) && (!r->cli->accept || kind == DKV_CH_FLOOR);
        rc = dkv_addJunit(&r->junit, "changes", "dualkv.gate", dkv_changeRow(kind)->name, 0,
                          bad ? DKV_JUNIT_FAILURE : text[0] ? DKV_JUNIT_SKIPPED : DKV_JUNIT_PASSED, "change", text, "", err);
    }
    return rc;
}

/* All files, and words. */
static int conclude(run *r, dkv_err *err) {
    int code;
    dkv_sortAccepted(&r->now);
    r->gate.new_bits = r->cli->new_bits;
    r->blind = r->suites ? dkv_countBlind(&r->report.power) : 0;
    int rc = dkv_checkFloor(&r->gate, &r->now, r->cli->floor, err);
    if (!rc && r->has_was) rc = dkv_compareAccepted(&r->gate, &r->was, &r->now, err);
    if (rc) return dkv_complain(err);
    code = exitOf(r);
    rc = addChanges(r, err);
    if (!rc) rc = dkv_writeJunit(&r->junit, r->junit_path, err);
    if (!rc) rc = writeSummary(r, code, err);
    if (!rc && r->cli->accept) rc = dkv_writeAccepted(&r->now, r->accepted_path, err);
    if (rc) return dkv_complain(err);
    if (!r->cli->quiet || code) putVerdict(r, stdout, code, false);
    if (!r->cli->quiet) dkv_sayRefusals(&r->refused, stdout);
    if (!r->cli->quiet)
        printf("  %s, %s, %s%s%s\n", r->summary, r->junit_path, r->records, r->cli->accept ? "; accepted: " : "",
               r->cli->accept ? r->accepted_path : "");
    if (r->cli->annotations) annotateAll(r);
    return code;
}

static void freeRun(run *r) {
    dkv_freeReport(&r->report);
    dkv_freeJunit(&r->junit);
    dkv_freeAccepted(&r->was);
    dkv_freeAccepted(&r->now);
    dkv_freeGate(&r->gate);
    dkv_freeWaivers(&r->waivers);
    free(r->records);
    free(r->junit_path);
    free(r->summary);
    free(r->accepted_path);
}

int dkv_cmdGate(const dkv_cli *cli) {
    static run r; /* static: outlive an interrupted run's threads */
    static dkv_session session;
    static dkv_fits fits;
    static const char *const usual[] = {"ci", "corpus"};
    dkv_selection sel = {0};
    dkv_err err = {0};
    double seconds = 0;
    r = (run){.cli = cli, .start = now()};
    int rc = checkWords(&r, &err);
    if (!rc) rc = dkv_parseSeed(cli->seed, &r.seed, &err);
    if (!rc) rc = dkv_parseTime(cli->time, &seconds, &err);
    if (!rc) rc = dkv_parseProfile(cli->profile, &r.profile, &err);
    if (!rc) rc = dkv_selectWords(cli->n_words ? cli->words : usual, cli->n_words ? cli->n_words : 2, &sel, &err);
    if (!rc && cli->forward) rc = dkv_forwardSelection(&sel, &err);
    if (!rc) rc = loadWaivers(&r, &err);
    if (!rc) rc = openPlaces(&r, &err);
    if (!seconds && !cli->cases) seconds = TIME;
    r.suites = sel.from_suites > 1;
    if (!rc) rc = runSuite(&r, &sel, &fits, &session, &err);
    if (!rc && dkv_closeRecords(&r.file, &err) && !r.trouble.code) r.trouble = err;
    double left = seconds > 0 ? seconds - (now() - r.start) : 0;
    bool fuzz = !rc && !cli->no_fuzz && !session.stopped && !r.trouble.code && (seconds > 0 ? left > 0 : cli->cases > 0);
    if (fuzz) rc = runFuzz(&r, left, &fits, &err);
    int code = rc ? dkv_complain(&err) : r.trouble.code ? dkv_complain(&r.trouble) : 0;
    if (!code && dkv_stopRequested) {
        fprintf(stderr, "dualkv: interrupted after %ld of %ld cases; records: %s\n", session.finished, session.n_items,
                r.records);
        code = 128 + dkv_stopRequested;
    } else if (!code) code = conclude(&r, &err);
    if (session.stopped) { /* threads in an oracle may still run: leave without unwinding */
        fflush(NULL);
        _exit(code);
    }
    dkv_freeSelection(&sel);
    freeRun(&r);
    return code;
}
