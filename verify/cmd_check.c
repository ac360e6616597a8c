/* check and replay: select, refuse before anything runs, run, say it in words. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/suite.h"
#include "../reports/report_md.h"
#include "cli.h"
#include "record.h"
#include "select.h"
#include "waiver.h"
#include "version.h"


enum { BLIND_TOLD = 4 };   /* strata that are named, unless --verbose */

typedef struct show {
    const dkv_cli *cli;
    dkv_record_file file;
    dkv_report report;
    FILE *out;               /* words; stderr where records go to stdout */
    bool colour, bar, every; /* every: say passed cases, too */
    bool suite;              /* lines of suites: judged together for what they had the power to see */
    bool several;            /* kernels: name them */
    bool printed;            /* what a kernel printed was shown */
    dkv_waivers waivers;
    long waived[DKV_ST_N], expired; /* defects that are excused; waivers that are over */
    dkv_refusals refused;
    dkv_behaviour behaves;          /* kernels that declare no arithmetic: as what */
    dkv_err trouble;
} show;

static const char *tint(const show *s, const dkv_result *r) {
    if (!s->colour) return "";
    return r->status == DKV_ST_PASSED         ? "\033[32m"
           : dkv_statusRow(r->status)->defect ? "\033[31m"
                                              : "\033[33m";
}

/* The largest share of what rounding allows, and where. */
static void sayMargin(const dkv_result *r, char *out, size_t n) {
    const char *name = NULL;
    double most = -1;
    out[0] = 0;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const dkv_judgement *j = &r->tensor[id];
        if (!j->present || j->all.total == 0 || !(j->all.max_ratio > most)) continue;
        most = j->all.max_ratio;
        name = dkv_tensorName((dkv_tensor_id)id);
    }
    if (r->judged && name) snprintf(out, n, "%s reaches %.2f of what rounding allows", name, most);
}

/* Which oracle judged, where there was a choice. */
static void sayOracle(const dkv_result *r, FILE *f) {
    const dkv_oracle_use *u = &r->oracle;
    if (u->note[0]) fprintf(f, "  judged on the CPU: %s\n", u->note);
    else if (u->by == DKV_ORACLE_CUDA || u->by == DKV_ORACLE_BOTH)
        fprintf(f, "  oracle%s on the device: %.3g s there (%.3g TFLOP/s), %.3g in all\n",
                u->by == DKV_ORACLE_BOTH ? ", also" : "", u->device_seconds,
                u->device_seconds > 0 ? u->flops / u->device_seconds / 1e12 : 0, u->seconds);
}

static void sayPhases(const dkv_result *r, FILE *f) {
    fprintf(f, "  of these:");
    for (int i = 0, n = 0; i < DKV_N_PHASES; i++)
        if (r->phases.seconds[i] >= 5e-4)
            fprintf(f, "%s %s %.3g", n++ ? "," : "", dkv_phaseName((dkv_phase)i), r->phases.seconds[i]);
    fprintf(f, "\n");
}

static void sayStatistics(const show *s, const dkv_result *r) {
    const dkv_check *c;
    FILE *f = s->out;
    if (!r->judged) return;
    fprintf(f, "  arithmetic: %s%s%s\n", r->arithmetic_words, r->profile[0] ? "; behaves as " : "",
            r->profile);
    fprintf(f, "  %-6s %10s %10s %10s %10s %10s %12s %8s\n", "tensor", "err/bound", "prompt", "response",
            "rms z", "limit", "gain", "outside");
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const dkv_judgement *j = &r->tensor[id];
        if (!j->present) continue;
        fprintf(f, "  %-6s %10.4f %10.4f %10.4f", dkv_tensorName((dkv_tensor_id)id), j->all.max_ratio,
                j->region[0].max_ratio, j->region[1].max_ratio);
        if (j->twin) fprintf(f, " %10.4f %10.4f %12.3e", j->all.rms_z, j->all.rms_limit, j->all.gain);
        else fprintf(f, " %10s %10s %12s", "-", "-", "-");
        fprintf(f, " %8lld\n", (long long)j->all.bad);
    }
    for (int i = 0; (c = dkv_listCheck(i)); i++) {
        static const char *const words[] = {"not applicable", "passed", "DEFECT", "note"};
        const dkv_finding *q = &r->finding[i];
        fprintf(f, "  %-10s %s%s%s\n", c->name, words[q->state], q->why[0] ? ": " : "", q->why);
    }
    fprintf(f, "  seconds: forward %.3g, backward %.3g, all %.3g\n", r->seconds_forward, r->seconds_backward,
            r->seconds);
    sayPhases(r, f);
    sayOracle(r, f);
}

/* What the kernel's process printed, of a case that did not come through: a traceback, most often. The first one of a run,
 * or all of them. */
static void sayPrinted(show *s, const dkv_result *r) {
    if (!r->printed[0] || (s->printed && !s->cli->verbose)) return;
    if (r->status != DKV_ST_NOT_RUN && r->status != DKV_ST_CRASHED && r->status != DKV_ST_TIMEOUT) return;
    s->printed = true;
    fprintf(s->out, "  it printed:\n    ");
    for (const char *c = r->printed; *c; c++) {
        if (*c == '\n' && c[1]) fprintf(s->out, "\n    ");
        else if (*c != '\n') fputc((unsigned char)*c < 32 || (unsigned char)*c > 126 ? '?' : *c, s->out);
    }
    fprintf(s->out, "\n");
}

static void clearBar(const show *s) {
    if (s->bar) fprintf(stderr, "\r\033[K");
}

static void sayCase(show *s, const dkv_result *r) {
    char *replay = malloc(DKV_REPLAY_MAX), margin[120], sees[200];
    const dkv_status_row *row = dkv_statusRow(r->status);
    bool told = s->every || (r->status != DKV_ST_PASSED && r->status != DKV_ST_UNSUPPORTED);
    if (s->cli->quiet) told = row->defect || r->status == DKV_ST_HARNESS_ERROR;
    if (!told || !replay) {
        free(replay);
        return;
    }
    clearBar(s);
    sayMargin(r, margin, sizeof margin);
    fprintf(s->out, "%s%s%s  %s", tint(s, r), row->name, s->colour ? "\033[0m" : "", r->line);
    if (s->several) fprintf(s->out, "  [%s]", r->kernel);
    const char *why = r->status == DKV_ST_PASSED ? margin : r->why;
    if (r->status == DKV_ST_PASSED && r->why[0]) fprintf(s->out, "\n  %s", r->why);
    fprintf(s->out, why[0] ? "\n  %s\n" : "\n", why);
    dkv_sayStrength(&r->strength, sees, sizeof sees);
    if (sees[0])
        fprintf(s->out, "  %s %s\n", row->defect ? "these inputs would also show" : "it would have seen", sees);
    if (r->status != DKV_ST_PASSED) {
        dkv_replayCommand(r->line, r->kernel, replay, DKV_REPLAY_MAX);
        fprintf(s->out, "  replay: %s\n", replay);
    }
    sayPrinted(s, r);
    if (s->cli->verbose) sayStatistics(s, r);
    fflush(s->out);
    free(replay);
}

static void sayProgress(const show *s, long done, long total) {
    if (s->cli->quiet || total < 20) return;
    if (s->bar) {
        enum { WIDTH = 30 };
        char bar[WIDTH + 1];
        long full = done * WIDTH / total;
        for (int i = 0; i < WIDTH; i++) bar[i] = i < full ? '#' : '.';
        bar[WIDTH] = 0;
        fprintf(stderr, "\r[%s] %ld/%ld", bar, done, total);
        if (done == total) clearBar(s);
    } else if (done * 4 / total != (done - 1) * 4 / total) {
        fprintf(s->out, "%ld of %ld checked\n", done, total);
        fflush(s->out);
    }
}

/* w: the case's own. */
static void applyWaiver(show *s, const dkv_result *r, const dkv_waiver *w, bool over) {
    if (over) {
        s->expired++;
        fprintf(s->out, "  its waiver ended on %s, which is a failure: %s\n", w->until, w->reason);
    } else if (dkv_statusRow(r->status)->defect) {
        s->waived[r->status]++;
        fprintf(s->out, "  waived until %s: %s\n", w->until, w->reason);
    } else
        fprintf(s->out, "%s\n  its waiver (until %s) is not needed any more: %s\n", r->line, w->until,
                w->reason);
}

/* Exit code of the run: a waived defect counts as passed, a waiver that is over as a defect. */
static int exitOf(const show *s, const dkv_session *session) {
    long counts[DKV_ST_N];
    for (int i = 0; i < DKV_ST_N; i++) {
        counts[i] = session->counts[i] - s->waived[i];
        counts[DKV_ST_PASSED] += i == DKV_ST_PASSED ? 0 : s->waived[i];
    }
    counts[DKV_ST_FAILED] += s->expired;
    counts[DKV_ST_INCONCLUSIVE] += s->suite && !session->stopped && dkv_countBlind(&s->report.power) > 0;
    return dkv_runExit(counts);
}

static void takeResult(const dkv_result *r, long index, long total, void *arg) {
    show *s = arg;
    dkv_err err = {0};
    const dkv_waiver *w = dkv_findWaiver(&s->waivers, r->line, r->kernel);
    const bool over = w && dkv_isExpired(&s->waivers, w), excused = w && !over && dkv_statusRow(r->status)->defect;
    char *json = dkv_printExcused(r, excused ? w->reason : NULL, excused ? w->until : NULL);
    int rc = json ? dkv_writeRecord(&s->file, json, &err) : dkv_fail(&err, DKV_EHARNESS, "out of memory for a record");
    sayCase(s, r); /* once it is kept: what was told outlives a kill */
    if (!s->every && r->status == DKV_ST_UNSUPPORTED) dkv_countRefusal(&s->refused, r->why);
    dkv_countBehaviour(&s->behaves, r->profile);
    if (w) applyWaiver(s, r, w, over);
    if (rc || dkv_addReport(&s->report, json, &err)) {
        if (!s->trouble.code) s->trouble = err;
        dkv_stopRequested = 1; /* records that cannot be kept: no use in going on */
    }
    free(json);
    sayProgress(s, index + 1, total);
}

/* What the cases together had the power to see, and the strata in which they had not. */
static void sayPower(const show *s) {
    const dkv_power_table *t = &s->report.power;
    int blind = dkv_countBlind(t);
    if (t->cases == 0) return;
    if (!s->cli->quiet) {
        fprintf(s->out, "together they would have seen ");
        dkv_writePowerWords(t, s->out);
        fprintf(s->out, "\n");
    }
    if (!blind) return;
    fprintf(s->out, "INCONCLUSIVE in %d %s:\n", blind, blind == 1 ? "stratum" : "strata");
    dkv_writeBlind(t, s->out, "  ", s->cli->verbose ? blind : BLIND_TOLD);
    if (blind > BLIND_TOLD && !s->cli->verbose)
        fprintf(s->out, "  and %d more: --verbose names them, so does the report\n", blind - BLIND_TOLD);
}

static void saySummary(const show *s, const dkv_session *session) {
    FILE *f = s->out;
    bool first = true;
    long waived = 0;
    clearBar(s);
    if (!s->cli->quiet && session->n_items >= 20) dkv_writeReportTable(&s->report, f, false);
    if (s->cli->quiet && exitOf(s, session) == DKV_EXIT_OK) return;
    fprintf(f, "%s%ld of %ld cases: ", session->stopped ? "interrupted, " : "", session->finished,
            session->n_items);
    for (int i = 0; i < DKV_ST_N; i++) {
        if (!session->counts[i]) continue;
        fprintf(f, "%s%ld %s", first ? "" : ", ", session->counts[i], dkv_statusRow((dkv_status)i)->name);
        first = false;
    }
    for (int i = 0; i < DKV_ST_N; i++) waived += s->waived[i];
    if (waived) fprintf(f, "; %ld waived", waived);
    if (s->expired) fprintf(f, s->expired == 1 ? "; a waiver is over" : "; %ld waivers are over", s->expired);
    fprintf(f, first ? "none ran\n" : "\n");
    dkv_sayRefusals(&s->refused, f);
    dkv_sayBehaviour(&s->behaves, f);
    if (s->suite && !session->stopped) sayPower(s);
    fflush(f);
}

/* Every line with every kernel; a line of a record with that record's kernel. */
static int makeItems(const dkv_selection *sel, const dkv_cli *cli, dkv_kernel_spec kernels[DKV_KERNELS_MAX], int *n_kernels,
                     dkv_item **out, long *n, dkv_err *err) {
    long each = cli->n_kernels ? cli->n_kernels : 1;
    memcpy(kernels, cli->kernels, sizeof cli->kernels);
    *n_kernels = cli->n_kernels;
    *out = calloc((size_t)(sel->n * each + 1), sizeof **out);
    if (!*out) return dkv_fail(err, DKV_EHARNESS, "out of memory for cases");
    for (long i = 0; i < sel->n; i++)
        for (long k = 0; k < each; k++) {
            int kernel = (int)k;
            if (!cli->n_kernels) {
                const char *spec = sel->kernels[i];
                if (!spec)
                    return dkv_fail(err, DKV_EUSER,
                                    "--kernel: which kernel? `dualkv list kernels` names them");
                for (kernel = 0; kernel < *n_kernels; kernel++)
                    if (strcmp(kernels[kernel].text, spec) == 0) break;
                if (kernel == DKV_KERNELS_MAX)
                    return dkv_fail(err, DKV_EUSER, "more than %d kernels", DKV_KERNELS_MAX);
                if (kernel == *n_kernels && dkv_parseKernelSpec(spec, &kernels[(*n_kernels)++], err)) return err->code;
            }
            (*out)[(*n)++] = (dkv_item){sel->lines[i], kernel};
        }
    return 0;
}

/* What kernels that declare no arithmetic behave as (--arithmetic), before any of their cases runs. */
static int fitKernels(const show *s, const dkv_session *session, dkv_fits *fits, dkv_err *err) {
    const char *word = s->cli->arithmetic;
    int rc = word ? dkv_checkArithmeticWord(word, err) : 0;
    unsigned types = 0;
    for (long i = 0; i < session->n_items && word; i++) {
        dkv_problem p = {0};
        if (!dkv_parseProblem(session->items[i].line, NULL, &p, NULL)) types |= 1u << p.dtype;
        dkv_freeProblem(&p);
    }
    for (int k = 0; k < session->n_kernels && word && !rc; k++) {
        rc = dkv_fitKernel(&session->kernels[k], word, types, session->timeout, session->data_dir, &fits[k], err);
        if (!rc && !s->cli->quiet) dkv_sayFits(session->kernels[k].text, &fits[k], s->out);
    }
    return rc;
}

/* Useful FLOP/s: of a core for each of truth, bound and twin; of an H200 for all three (data/measurements, check-cuda-full). */
#define CORE_RATE 1e10
#define DEVICE_RATE 3e12

static void sayEstimate(double flops, dkv_oracle_mode mode) {
    const bool device = mode == DKV_ORACLE_CUDA;
    const double minutes = flops / (device ? DEVICE_RATE : CORE_RATE * dkv_hostCores()) / 60;
    if (minutes <= 1) return;
    fprintf(stderr, device ? "about %.3g minutes of an H200 for truth, bound and twin\n"
                           : "about %.3g minutes at 10 GFLOP/s a core for each of truth, bound and twin\n",
            minutes);
}

static int runSelection(const dkv_cli *cli, const dkv_selection *sel, bool replay) {
    dkv_err err = {0};
    static dkv_kernel_spec kernels[DKV_KERNELS_MAX]; /* static: outlive an interrupted run's threads */
    static bool replicated[DKV_KERNELS_MAX];
    dkv_item *items = NULL;
    long n = 0;
    int n_kernels = 0, code = 0;
    static show s; /* so does this */
    s = (show){.cli = cli, .file = {.path = cli->json}, .out = stdout};
    if (cli->json && strcmp(cli->json, "-") == 0) s.out = stderr;
    s.colour = s.out == stdout && dkv_wantsColour();
    s.bar = isatty(STDERR_FILENO) && isatty(STDOUT_FILENO);
    if (makeItems(sel, cli, kernels, &n_kernels, &items, &n, &err) || (!replay && dkv_loadWaivers(cli->waivers, &s.waivers, &err))) {
        free(items);
        return dkv_complain(&err);
    }
    s.several = n_kernels > 1;
    s.suite = !replay && sel->from_suites > 1; /* lines given by hand promise nothing: annotated one by one */
    s.every = cli->verbose || replay || n < 20;
    static dkv_session session; /* as are these */
    static dkv_remote remote;
    dkv_oracle_mode mode = DKV_ORACLE_AUTO;
    session = (dkv_session){.kernels = kernels,
                            .replicated = replicated,
                            .n_kernels = n_kernels,
                            .items = items,
                            .n_items = n,
                            .jobs = cli->jobs,
                            .timeout = cli->timeout,
                            .budget = cli->budget,
                            .level = cli->level,
                            .repeats = cli->repeats,
                            .strength = true,
                            .peer = cli->has_peer ? &cli->peer : NULL,
                            .remote = &remote,
                            .data_dir = dkv_dataDir(),
                            .report = takeResult,
                            .arg = &s};
    if (n == 0) {
        dkv_fail(&err, DKV_EHARNESS, "no case was selected, so nothing was learned");
        free(items);
        return dkv_complain(&err);
    }
    static dkv_fits fits[DKV_KERNELS_MAX];
    static dkv_worker warm[DKV_KERNELS_MAX];
    session.fits = cli->arithmetic ? fits : NULL;
    if (dkv_checkRecordPath(cli->json, &err) ||
        dkv_warmKernels(kernels, n_kernels, cli->timeout, replicated, warm, &err)) {
        free(items);
        return dkv_complain(&err);
    }
    session.warm = warm;
    if ((cli->has_peer && dkv_probeKernels(&cli->peer, 1, cli->timeout, NULL, &err)) ||
        dkv_precheckItems(&session, &err) || fitKernels(&s, &session, fits, &err) ||
        (cli->judge && dkv_parseOracleMode(cli->judge, &mode, &err)) ||
        dkv_openRemote(&remote, mode, NULL, DKV_REMOTE_TIMEOUT, &err)) {
        dkv_stopWorkers(warm, n_kernels);
        free(items);
        return dkv_complain(&err);
    }
    if (!cli->quiet) sayEstimate(dkv_countWork(&session), mode);
    dkv_catchSignals();
    dkv_runSession(&session);
    if (!dkv_threadsLeft()) dkv_closeRemote(&remote);
    saySummary(&s, &session);
    code = exitOf(&s, &session);
    dkv_freeWaivers(&s.waivers);
    if (dkv_closeRecords(&s.file, &err) && !s.trouble.code) s.trouble = err;
    if (s.trouble.code) code = dkv_complain(&s.trouble);
    else if (session.stopped) code = 128 + dkv_stopRequested;
    if (cli->bisect) code = dkv_bisectExit(code, session.counts);
    dkv_freeReport(&s.report);
    if (!dkv_threadsLeft()) free(items);
    return code;
}

int dkv_cmdCheck(const dkv_cli *cli) {
    dkv_selection sel = {0};
    dkv_err err = {0};
    const char *smoke = "smoke";
    int rc = dkv_selectWords(cli->n_words ? cli->words : &smoke, cli->n_words ? cli->n_words : 1, &sel, &err);
    if (!rc && cli->forward) rc = dkv_forwardSelection(&sel, &err);
    if (!rc && cli->reseed) rc = dkv_reseedSelection(&sel, (uint64_t)cli->reseed, &err);
    int code = rc ? dkv_complain(&err) : runSelection(cli, &sel, false);
    if (!dkv_threadsLeft()) dkv_freeSelection(&sel);
    return code;
}

int dkv_cmdReplay(const dkv_cli *cli) {
    dkv_selection sel = {0};
    dkv_err err = {0};
    int rc = 0;
    bool file = cli->n_words == 1 && access(cli->words[0], R_OK) == 0;
    if (cli->n_words == 0)
        rc = dkv_fail(&err, DKV_EUSER, "replay: which line? (or a file of lines or records)");
    else
        rc = file ? dkv_selectFile(cli->words[0], &sel, &err)
                  : dkv_selectWords(cli->words, cli->n_words, &sel, &err);
    static dkv_cli loud; /* static: outlives an interrupted run's threads */
    loud = *cli;
    loud.verbose = !cli->quiet;
    int code = rc ? dkv_complain(&err) : runSelection(&loud, &sel, true);
    if (cli->bisect) code = dkv_bisectExit(code, NULL); /* what ended before any case ran */
    if (!dkv_threadsLeft()) dkv_freeSelection(&sel);
    return code;
}
