/* gate: suite, corpus, times, fuzzing; what changed against what was accepted; one folder with everything. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/replace.h"
#include "../data/suite.h"
#include "../fuzz/options.h"
#include "../ref/clock.h"
#include "gate_run.h"
#include "version.h"

#define TELL_EACH      20  /* defects of one reason that are told one by one: of the suite, */
#define TELL_FUZZED    3   /* of fuzzing */
#define TIME           120 /* seconds of the whole, unless told otherwise */
#define CONFIRM        24  /* fuzzed defects that are tried again in a fresh process */

typedef dkv_gate_run run;

/* ---- the cases ---- */

static void sayDefect(run *r, const dkv_result *q, bool fuzzed) {
    const long most = fuzzed ? TELL_FUZZED : TELL_EACH;
    const long times = dkv_isBad(q->status) ? dkv_countReason(&r->told[fuzzed], dkv_reasonOf(q), 0) : 0;
    if (times > most && !r->cli->verbose) return;
    char *replay = malloc(DKV_REPLAY_MAX);
    if (replay) {
        dkv_replayCommand(q->line, q->kernel, replay, DKV_REPLAY_MAX);
        printf("%s  %s\n  %s\n  replay: %s\n", dkv_statusRow(q->status)->name, q->line, q->why, replay);
        dkv_shrinkCommand(q->line, q->kernel, replay, DKV_REPLAY_MAX);
        if (fuzzed) printf("  shrink: %s\n", replay);
    }
    free(replay);
    if (r->cli->verbose && q->printed[0]) printf("  it printed: %.200s\n", q->printed);
    if (times == most && !r->cli->verbose) printf("  more of this reason are counted, not told: the records have them\n");
    fflush(stdout);
}

/* Its waiver, where it has one that excuses this; counts. */
static const dkv_waiver *applyWaiver(run *r, const dkv_result *q) {
    const dkv_waiver *w = dkv_findWaiver(&r->waivers, q->line, q->kernel);
    if (!w) return NULL;
    r->met[w - r->waivers.list] = (uint8_t)(1 + q->status);
    if (dkv_isExpired(&r->waivers, w)) {
        r->expired++;
        printf("%s\n  its waiver ended on %s, which is a failure: %s\n", q->line, w->until, w->reason);
        return NULL;
    }
    if (!dkv_statusRow(q->status)->defect) return NULL;
    r->waived++;
    r->counts[q->status]--;
    r->counts[DKV_ST_PASSED]++;
    return w;
}

static void countArithmetic(run *r, const dkv_result *q) {
    int i = 0;
    if (!q->judged) return;
    while (i < DKV_GATE_ARITHMETICS - 1 && r->arithmetic[i].cases &&
           (r->arithmetic[i].declared != q->declared || strcmp(r->arithmetic[i].words, q->arithmetic_words)))
        i++;
    if (!r->arithmetic[i].cases)
        snprintf(r->arithmetic[i].words, sizeof r->arithmetic[i].words, "%s", q->arithmetic_words);
    else if (i == DKV_GATE_ARITHMETICS - 1) strcpy(r->arithmetic[i].words, "others");
    r->arithmetic[i].declared = q->declared;
    r->arithmetic[i].cases++;
}

/* To all but the file: report, JUnit, words. */
static int note(run *r, const dkv_result *q, const char *json, const char *suite, const char *excused) {
    int rc = dkv_addReport(&r->report, json, &r->trouble);
    if (!rc) rc = dkv_addJunitRecord(&r->junit, suite, json, excused, &r->trouble);
    if (r->cli->verbose || (dkv_isBad(q->status) && !excused)) sayDefect(r, q, !strcmp(suite, "fuzz"));
    return rc;
}

static void takeResult(const dkv_result *q, long index, long total, void *arg) {
    run *r = arg;
    dkv_err err = {0};
    r->counts[q->status]++;
    if (q->status == DKV_ST_UNSUPPORTED) dkv_countRefusal(&r->refused, q->why);
    countArithmetic(r, q);
    const dkv_waiver *w = applyWaiver(r, q);
    const char *excused = w ? w->reason : NULL;
    char *json = dkv_printExcused(q, excused, w ? w->until : NULL);
    if (q->changed) dkv_fail(&r->trouble, DKV_EHARNESS, "%s", q->why);
    int rc = json ? dkv_writeRecord(&r->file, json, &err) : dkv_fail(&err, DKV_EHARNESS, "out of memory for a record");
    if (!rc) rc = dkv_addAccepted(&r->now, json, &err);
    if (!rc) r->now.rows[r->now.n - 1].excused = excused;
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

static int makeFolder(const char *option, const char *path, dkv_err *err) {
    struct stat s;
    if (!path[0]) return dkv_fail(err, DKV_EUSER, "%s: '' is no folder", option);
    if (mkdir(path, 0777) == 0) return 0;
    if (errno == EEXIST && stat(path, &s) == 0 && S_ISDIR(s.st_mode) && access(path, W_OK | X_OK) == 0) return 0;
    return dkv_fail(err, DKV_EUSER, "%s: cannot make the folder '%s': %s", option, path,
                    errno == EEXIST ? "something else is there" : strerror(errno));
}

/* Of two runs the second would take the first one's files away. The lock ends with the process, and with its workers: those
 * of a killed run take a moment to notice. */
static int lockFolder(const char *path, dkv_err *err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int i = 0; i < 30; i++) {
        if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return 0; /* not every file system has locks */
        usleep(100000);
    }
    close(fd);
    return dkv_fail(err, DKV_EUSER, "--out: another gate is writing into '%s'", path);
}

static int checkPlace(const char *option, const char *path, dkv_err *err) {
    if (strcmp(path, "-") == 0) return dkv_fail(err, DKV_EUSER, "%s: stdout holds the words; name a file", option);
    return dkv_checkOutPath(option, path, err);
}

/* No file of the run may be another one, or one that it reads. */
static int checkApart(const run *r, dkv_err *err) {
    const char *const paths[] = {r->records, r->perf_path, r->html, r->junit_path, r->summary, r->accepted_path,
                                 r->cli->waivers ? r->cli->waivers : "", r->cli->kernels[0].path};
    enum { N = sizeof paths / sizeof *paths };
    for (int i = 0; i < N; i++)
        for (int k = 0; k < i; k++)
            if (paths[i][0] && dkv_isSameFile(paths[i], paths[k]))
                return dkv_fail(err, DKV_EUSER, "gate: '%.200s' is named for two things", paths[i]);
    return 0;
}

static int openPlaces(run *r, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    const char *out = cli->out ? cli->out : "dualkv-gate";
    int rc = place(&r->records, cli->json, out, "records.jsonl", err);
    if (!rc) rc = place(&r->perf_path, cli->perf_json, out, "perf.jsonl", err);
    if (!rc) rc = place(&r->html, cli->html, out, "report.html", err);
    if (!rc) rc = place(&r->junit_path, cli->junit, out, "junit.xml", err);
    if (!rc) rc = place(&r->summary, cli->markdown, out, "summary.md", err);
    if (!rc) rc = place(&r->accepted_path, cli->accepted, out, "accepted.jsonl", err);
    /* With --accept the file may be missing; one that is there must be sound all the same. */
    bool read = !rc && cli->accepted && (!cli->accept || access(cli->accepted, F_OK) == 0);
    if (read) rc = dkv_readAccepted(cli->accepted, &r->was, err);
    r->has_was = read && !rc;
    if (!rc && cli->perf) rc = dkv_findBaseline(r, err);
    if (!rc) rc = makeFolder("--out", out, err);
    if (!rc) rc = lockFolder(out, err);
    if (!rc) rc = checkPlace("--json", r->records, err);
    if (!rc) rc = dkv_checkRecordPath(r->records, err);
    if (!rc) rc = checkPlace("--html", r->html, err);
    if (!rc && cli->perf) rc = checkPlace("--perf-json", r->perf_path, err);
    if (!rc) rc = checkPlace("--junit", r->junit_path, err);
    if (!rc) rc = checkPlace("--markdown", r->summary, err);
    if (!rc && cli->accept) rc = checkPlace("--accepted", r->accepted_path, err);
    if (!rc && cli->history) rc = makeFolder("--history", cli->history, err);
    if (!rc) rc = checkApart(r, err);
    r->file.path = r->records;
    r->perf_file.path = r->perf_path;
    return rc;
}

/* What an earlier run left: it must not be taken for this one's, should this one be killed. Devices and pipes stay. */
static void dropOld(const run *r) {
    const char *const paths[] = {r->records, r->perf_path, r->html, r->junit_path, r->summary};
    struct stat s;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (lstat(paths[i], &s) == 0 && S_ISREG(s.st_mode)) unlink(paths[i]);
}

static int loadWaivers(run *r, dkv_err *err) {
    int rc = dkv_loadWaivers(r->cli->waivers, &r->waivers, err);
    if (!rc && !(r->met = calloc((size_t)r->waivers.n + 1, 1))) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for waivers");
    return rc;
}

static int checkWords(const run *r, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    if (cli->n_kernels != 1) return dkv_fail(err, DKV_EUSER, "gate: --kernel: one kernel (`dualkv list kernels`)");
    if (cli->no_fuzz && (cli->cases || cli->seed || cli->profile))
        return dkv_fail(err, DKV_EUSER, "--no-fuzz together with options of fuzzing");
    if (cli->new_bits && !cli->accepted) return dkv_fail(err, DKV_EUSER, "--new-bits: against what? (--accepted FILE)");
    if (!cli->perf && (cli->baseline || cli->perf_lines || cli->perf_json))
        return dkv_fail(err, DKV_EUSER, "--baseline-kernel, --perf-lines, --perf-json: of --perf, which is not given");
    if (cli->keep_kernel && !cli->accept) return dkv_fail(err, DKV_EUSER, "--keep-kernel: with --accept");
    return 0;
}

/* ---- running ---- */

/* Suite and corpus; DKV_EUSER before anything runs. */
static int runSuite(run *r, const dkv_selection *sel, dkv_fits *fits, dkv_session *session, dkv_err *err) {
    static dkv_remote remote; /* static: outlives an interrupted run's threads, as the session does */
    const dkv_cli *cli = r->cli;
    static bool replicated; /* static: outlives an interrupted run's threads */
    dkv_item *items = calloc((size_t)sel->n + 1, sizeof *items);
    if (!items) return dkv_fail(err, DKV_EHARNESS, "out of memory for cases");
    for (long i = 0; i < sel->n; i++) items[i] = (dkv_item){sel->lines[i], 0};
    *session = (dkv_session){.kernels = cli->kernels, .replicated = &replicated, .n_kernels = 1, .items = items, .n_items = sel->n,
                             .jobs = cli->jobs, .timeout = cli->timeout, .budget = cli->budget / r->shares,
                             .repeats = cli->repeats, .strength = true, .fits = cli->arithmetic ? fits : NULL,
                             .remote = &remote, .data_dir = dkv_dataDir(), .report = takeResult, .arg = r};
    int rc = sel->n ? 0 : dkv_fail(err, DKV_EHARNESS, "no case was selected, so nothing was learned");
    if (!rc) rc = dkv_probeKernels(cli->kernels, 1, cli->timeout, &replicated, err);
    if (!rc && cli->perf) rc = dkv_probeKernels(&r->baseline, 1, cli->timeout, NULL, err);
    if (!rc) rc = dkv_precheckItems(session, err);
    if (!rc && cli->arithmetic) rc = dkv_checkArithmeticWord(cli->arithmetic, err);
    if (!rc && cli->arithmetic)
        rc = dkv_fitKernel(cli->kernels, cli->arithmetic, 7, cli->timeout, dkv_dataDir(), fits, err);
    if (!rc) rc = dkv_openRemote(&remote, DKV_ORACLE_AUTO, NULL, DKV_REMOTE_TIMEOUT, err);
    if (rc) {
        free(items);
        return rc;
    }
    r->level = dkv_testLevel(session);
    dropOld(r);
    dkv_catchSignals();
    dkv_runSession(session);
    if (dkv_threadsLeft()) return 0; /* they may still read the items */
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
                      .budget = cli->budget / r->shares, .confirm = CONFIRM, .report = takeFuzzed, .arg = r};
    int rc = dkv_openSampler(r->profile, r->seed, &sampler, err);
    sampler.forward = cli->forward;
    if (!rc) rc = dkv_openLog(&r->log, r->records, DKV_LOG_BEHIND, cli->kernels[0].text, &sampler, err);
    if (!rc) {
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

static int exitOf(const run *r) {
    long counts[DKV_ST_N];
    bool timed = r->n_timed == 0 || !r->cli->perf;
    for (int i = 0; i < r->n_timed; i++) timed |= !r->timed[i].why[0];
    for (int i = 0; i < DKV_ST_N; i++) counts[i] = r->counts[i] + r->fuzz_counts[i];
    counts[DKV_ST_FAILED] += r->expired + (r->cli->accept ? r->gate.counts[DKV_CH_FLOOR] : dkv_countFindings(&r->gate));
    counts[DKV_ST_INCONCLUSIVE] += r->blind > 0 || (r->cli->perf && !r->interrupted && (!timed || r->n_timed == 0));
    return counts[DKV_ST_FAILED] ? DKV_EXIT_DEFECT : dkv_runExit(counts);
}

static int addChanges(run *r, dkv_err *err) {
    char text[4096];
    int rc = 0;
    for (int k = 0; k < DKV_CH_BETTER && !rc; k++) {
        const dkv_change_kind kind = (dkv_change_kind)k;
        if (!r->has_was && kind != DKV_CH_FLOOR && kind != DKV_CH_SLOWER) continue;
        if (kind == DKV_CH_SLOWER && !r->cli->perf) continue;
        dkv_sayChanges(&r->gate, kind, text, sizeof text);
        bool bad = text[0] && dkv_isFinding(&r->gate, kind) && (!r->cli->accept || kind == DKV_CH_FLOOR);
        rc = dkv_addJunit(&r->junit, "changes", "dualkv.gate", dkv_changeRow(kind)->name, 0,
                          bad ? DKV_JUNIT_FAILURE : text[0] ? DKV_JUNIT_SKIPPED : DKV_JUNIT_PASSED, "change", text, "", err);
    }
    for (int i = 0; i < r->waivers.n && !rc; i++)
        if (r->met[i] && dkv_isExpired(&r->waivers, &r->waivers.list[i]))
            rc = dkv_addJunit(&r->junit, "changes", "dualkv.gate", r->waivers.list[i].line, 0, DKV_JUNIT_FAILURE, "waiver",
                              "its waiver is over", r->waivers.list[i].reason, err);
    return rc;
}

static int addProperties(run *r, dkv_err *err) {
    char seed[32], name[64];
    snprintf(seed, sizeof seed, "%" PRIu64, r->seed);
    const char *const pairs[][2] = {{"kernel", r->cli->kernels[0].text}, {"device", r->now.device ? r->now.device : ""},
                                    {"dualkv", dkv_version()}, {"commit", dkv_commit()}, {"generator", r->now.generator ? r->now.generator : ""},
                                    {"oracle", r->now.oracle ? r->now.oracle : ""}, {"fuzz-seed", seed}};
    int rc = 0;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs && !rc; i++) rc = dkv_addJunitProperty(&r->junit, pairs[i][0], pairs[i][1], err);
    for (int i = 0; i < DKV_GATE_ARITHMETICS && r->arithmetic[i].cases && !rc; i++) {
        snprintf(name, sizeof name, "arithmetic-%s-%d", r->arithmetic[i].declared ? "declared" : "assumed", i + 1);
        rc = dkv_addJunitProperty(&r->junit, name, r->arithmetic[i].words, err);
    }
    return rc;
}

static int makePage(const run *r, dkv_err *err) {
    const char *paths[2] = {r->records, r->perf_path};
    dkv_cli page = {.html = r->html, .words = paths, .n_words = 1};
    struct stat s;
    if (stat(r->records, &s) != 0 || !S_ISREG(s.st_mode)) return 0; /* nothing that can be read again */
    page.n_words += r->perf_file.written && stat(r->perf_path, &s) == 0 && S_ISREG(s.st_mode);
    return dkv_makeReport(&page, err);
}

/* A copy of the records in the folder of --history, under a name that sorts by time, without the colons of that (not every
 * file system and archive takes them). */
static int keepHistory(const run *r, dkv_err *err) {
    char path[PATH_MAX], temporary[PATH_MAX], when[40];
    size_t at = 0;
    for (const char *c = dkv_startTime(); *c && at < sizeof when - 1; c++)
        if (*c != ':' && *c != '-') when[at++] = *c;
    when[at] = 0;
    const char *const parts[2] = {r->records, r->perf_path};
    int n = snprintf(path, sizeof path, "%s/%s-%s-%d.jsonl", r->cli->history, when, dkv_commit(), (int)getpid());
    if (n < 0 || (size_t)n + 5 > sizeof path) return dkv_fail(err, DKV_EHARNESS, "--history: the name is too long");
    snprintf(temporary, sizeof temporary, "%.*s.part", (int)sizeof path - 6, path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    int rc = fd >= 0 ? 0 : dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", temporary, strerror(errno));
    for (int i = 0; i < (r->perf_file.written ? 2 : 1) && !rc; i++) rc = dkv_copyBytes(parts[i], fd, err);
    if (!rc && rename(temporary, path) != 0) rc = dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    if (fd >= 0 && rc) unlink(temporary);
    return rc;
}

/* Each of the files, also where another could not be written; the first that could not is said. */
static int writeAll(run *r, int code, bool accepted, dkv_err *err) {
    int (*const writers[])(run *, dkv_err *) = {addChanges, addProperties};
    dkv_err why[7] = {{0}};
    int n = 0;
    for (int i = 0; i < 2; i++) writers[i](r, &why[n++]);
    dkv_writeJunit(&r->junit, r->junit_path, &why[n++]);
    dkv_writeGateSummary(r, code, &why[n++]);
    makePage(r, &why[n++]);
    if (r->cli->history) keepHistory(r, &why[n++]);
    if (accepted && !dkv_keepKernel(r, &why[n])) dkv_writeAccepted(&r->now, r->accepted_path, &why[n]);
    for (int i = 0; i < 7; i++)
        if (why[i].code) {
            *err = why[i];
            return (int)err->code;
        }
    return 0;
}

/* What was asked for instead of the usual lines; NULL: nothing. */
static const char *nameAsked(run *r) {
    size_t at = 0;
    for (int i = 0; i < r->cli->n_words && at < sizeof r->asked; i++)
        at += (size_t)snprintf(r->asked + at, sizeof r->asked - at, "%s%.100s", i ? " " : "only ", r->cli->words[i]);
    if (r->cli->forward && at < sizeof r->asked) snprintf(r->asked + at, sizeof r->asked - at, "%s--forward", at ? " " : "only ");
    return r->asked[0] ? r->asked : NULL;
}

/* Words, all files, annotations; the exit code. */
static int conclude(run *r, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    r->again = r->now.n;
    dkv_sortAccepted(&r->now);
    r->again -= r->now.n;
    r->gate.new_bits = cli->new_bits;
    r->gate.asked = nameAsked(r);
    r->gate.partial = r->interrupted || r->trouble.code;
    r->blind = r->suites && !r->gate.partial ? dkv_countBlind(&r->report.power) : 0;
    r->seconds = dkv_now() - r->start;
    int rc = r->gate.partial ? 0 : dkv_checkFloor(&r->gate, &r->now, cli->floor, err);
    if (!rc && r->has_was) rc = dkv_compareAccepted(&r->gate, &r->was, &r->now, err);
    if (rc) return dkv_complain(err);
    int code = exitOf(r);
    if (r->trouble.code && code != DKV_EXIT_DEFECT) code = DKV_EXIT_NOTHING;
    if (!cli->quiet || code) dkv_sayGate(r, stdout, code, false);
    if (!cli->quiet) dkv_sayRefusals(&r->refused, stdout);
    bool accepted = cli->accept && !r->gate.partial && code != DKV_EXIT_NOTHING;
    int written = writeAll(r, code, accepted, err);
    if (!cli->quiet)
        printf("  %s, %s, %s, %s%s%s\n", r->summary, r->html, r->junit_path, r->records, accepted && !written ? "; accepted: " : "",
               accepted && !written ? r->accepted_path : "");
    if (!cli->quiet && accepted && !written && r->again)
        printf("  accepted: %ld lines, for %ld of the cases are a line that had been there\n", r->now.n, r->again);
    dkv_allowCommands(r);
    if (cli->annotations) dkv_annotateGate(r);
    if (cli->accept && !accepted)
        fprintf(stderr, "dualkv: nothing was accepted: %s\n", r->interrupted ? "the run was interrupted" : "nothing was learned");
    if (written && cli->annotations) dkv_annotateError(err->text);
    if (written) rc = dkv_complain(err);
    return r->interrupted ? 128 + r->interrupted : code == DKV_EXIT_DEFECT || !rc ? code : rc;
}

static void freeRun(run *r) {
    dkv_freeReport(&r->report);
    dkv_freeJunit(&r->junit);
    dkv_freeAccepted(&r->was);
    dkv_freeAccepted(&r->now);
    dkv_freeGate(&r->gate);
    dkv_freeWaivers(&r->waivers);
    for (int i = 0; i < r->n_timed; i++) free(r->timed[i].line);
    free(r->timed);
    free(r->met);
    free(r->records);
    free(r->perf_path);
    free(r->html);
    free(r->junit_path);
    free(r->summary);
    free(r->accepted_path);
}

/* Words and files, looked at before anything runs. */
static int prepare(run *r, dkv_selection *sel, double *seconds, dkv_err *err) {
    static const char *const usual[] = {"ci", "corpus"};
    const dkv_cli *cli = r->cli;
    int rc = checkWords(r, err);
    r->shares = 3 + cli->perf;
    if (!rc) rc = dkv_parseSeed(cli->seed, &r->seed, err);
    if (!rc) rc = dkv_parseTime(cli->time, seconds, err);
    if (!rc) rc = dkv_parseProfile(cli->profile, &r->profile, err);
    if (!rc) rc = dkv_selectWords(cli->n_words ? cli->words : usual, cli->n_words ? cli->n_words : 2, sel, err);
    if (!rc && cli->forward) rc = dkv_forwardSelection(sel, err);
    if (!rc && cli->perf_lines) rc = dkv_selectWords(&cli->perf_lines, 1, &r->perf_lines, err);
    if (!rc) rc = loadWaivers(r, err);
    if (!rc) rc = openPlaces(r, err);
    if (!*seconds && !cli->cases) *seconds = TIME;
    r->suites = sel->from_suites > 1;
    return rc;
}

int dkv_cmdGate(const dkv_cli *cli) {
    static run r; /* static: outlive an interrupted run's threads */
    static dkv_session session;
    static dkv_fits fits;
    dkv_selection sel = {0};
    dkv_err err = {0};
    double seconds = 0;
    r = (run){.cli = cli, .start = dkv_now()};
    int rc = prepare(&r, &sel, &seconds, &err);
    if (!rc && cli->annotations) dkv_stopCommands(&r);
    if (!rc) rc = runSuite(&r, &sel, &fits, &session, &err);
    if (rc) dkv_allowCommands(&r);
    if (rc && cli->annotations) dkv_annotateError(err.text);
    bool ran = !rc;
    if (!rc && dkv_closeRecords(&r.file, &err) && !r.trouble.code) r.trouble = err;
    if (!rc && cli->perf && !session.stopped && !r.trouble.code) {
        dkv_sortAccepted(&r.now);
        rc = dkv_timeGate(&r, cli->perf_lines ? &r.perf_lines : &sel, &err);
        if (!rc) rc = dkv_closeRecords(&r.perf_file, &err);
    }
    double left = seconds > 0 ? seconds - (dkv_now() - r.start) : 0;
    bool fuzz = !rc && !cli->no_fuzz && !dkv_stopRequested && !r.trouble.code && (seconds > 0 ? left > 0 : cli->cases > 0);
    if (fuzz) rc = runFuzz(&r, left, &fits, &err);
    if (!r.trouble.code) r.interrupted = dkv_stopRequested;
    if (rc && ran && !r.trouble.code) r.trouble = err;
    int code = ran ? conclude(&r, &err) : dkv_complain(&err);
    if (r.trouble.code) code = code == DKV_EXIT_DEFECT ? (dkv_complain(&r.trouble), code) : dkv_complain(&r.trouble);
    if (r.interrupted)
        fprintf(stderr, "dualkv: interrupted after %ld of %ld cases; records: %s\n", session.finished, session.n_items, r.records);
    if (dkv_threadsLeft()) return code;
    dkv_freeSelection(&sel);
    dkv_freeSelection(&r.perf_lines);
    freeRun(&r);
    return code;
}
