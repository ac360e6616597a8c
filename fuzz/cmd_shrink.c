/* shrink: a line made small, in words. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/suite.h"
#include "../ref/clock.h"
#include "../verify/cli.h"
#include "../verify/record.h"
#include "../verify/select.h"
#include "../verify/session.h"
#include "options.h"
#include "shrink.h"

#define TRIALS 1000.0 /* among which the false alarms of the budget are divided */

static void sayStep(const char *line, long trials, void *arg) {
    const dkv_cli *cli = arg;
    if (cli->verbose) printf("  trial %-5ld %s\n", trials, line);
    if (cli->verbose) fflush(stdout);
}

static void sayShrunk(const dkv_shrinking *s, const char *first, double seconds) {
    char reason[80], *replay = malloc(DKV_REPLAY_MAX);
    dkv_sayReason(s->reason, reason, sizeof reason);
    if (s->after) printf("alone the line passes; it fails as a call after another\n");
    if (s->failed < s->tried)
        printf("flaky: %d of %d runs failed for this reason; each line is run up to %d times\n", s->failed,
               s->tried, s->tries);
    printf("%s after %ld trials in %.1f s%s\n", reason, s->trials, seconds,
           s->minimal          ? "; no simpler line fails"
           : dkv_stopRequested ? "; not minimal: interrupted"
           : s->changed        ? "; not minimal: the kernel's file was changed"
                               : "; not minimal: the time was over");
    if (s->minimal && !strcmp(first, s->line)) printf("the line was minimal already\n");
    if (s->result->why[0] && !dkv_stopRequested) printf("  %s\n", s->result->why);
    if (replay) {
        dkv_replayCommand(s->line, s->kernel->text, replay, DKV_REPLAY_MAX);
        printf("  replay: %s\n", replay);
    }
    free(replay);
    printf("%s\n", s->line);
}

static int parseLine(const dkv_cli *cli, dkv_problem *p, char line[DKV_LINE_MAX + 1], dkv_err *err) {
    dkv_selection sel = {0};
    int rc = 0;
    *p = (dkv_problem){0};
    if (cli->n_kernels != 1) return dkv_fail(err, DKV_EUSER, "shrink: --kernel: one kernel");
    rc = dkv_selectWords(cli->words, cli->n_words, &sel, err);
    if (!rc && sel.n != 1) rc = dkv_fail(err, DKV_EUSER, "shrink: one line, not %ld", sel.n);
    if (!rc) strcpy(line, sel.lines[0]);
    if (!rc) rc = dkv_parseProblem(line, NULL, p, err);
    dkv_freeSelection(&sel);
    return rc;
}

/* --arithmetic: the same as in the run that found the line. A simpler line may have another type. */
static int fitArithmetic(const dkv_cli *cli, dkv_fits *fits, dkv_err *err) {
    if (!cli->arithmetic) return 0;
    int rc = dkv_checkArithmeticWord(cli->arithmetic, err);
    if (!rc) rc = dkv_fitKernel(cli->kernels, cli->arithmetic, 7, cli->timeout, dkv_dataDir(), fits, err);
    return rc;
}

int dkv_cmdShrink(const dkv_cli *cli) {
    dkv_problem p;
    dkv_err err = {0};
    char line[DKV_LINE_MAX + 1];
    static dkv_shrinking s;
    dkv_item item = {line, 0};
    dkv_session session = {
        .items = &item, .n_items = 1, .kernels = cli->kernels, .n_kernels = 1, .data_dir = dkv_dataDir()};
    s = (dkv_shrinking){.kernel = &cli->kernels[0],
                        .timeout = cli->timeout,
                        .step = sayStep,
                        .arg = (void *)cli,
                        .options = {.data_dir = dkv_dataDir(), .threads = 1, .repeats = cli->repeats}};
    s.options.level = cli->level > 0 ? cli->level : 1e-4 / (TRIALS * DKV_N_OUTPUTS);
    static dkv_fits fits;
    if (parseLine(cli, &p, line, &err) || dkv_precheckItems(&session, &err) ||
        dkv_probeKernels(cli->kernels, 1, cli->timeout, NULL, &err) ||
        dkv_parseTime(cli->time, &s.seconds, &err) || fitArithmetic(cli, &fits, &err)) {
        dkv_freeProblem(&p);
        return dkv_complain(&err);
    }
    if (cli->arithmetic) s.options.fits = &fits;
    s.result = malloc(sizeof *s.result);
    dkv_catchSignals();
    double start = dkv_now();
    int rc = s.result ? dkv_shrinkLine(&p, &s, &err) : dkv_fail(&err, DKV_EHARNESS, "out of memory");
    dkv_freeProblem(&p);
    if (rc) {
        fprintf(stderr, "dualkv: %s\n", err.text);
        free(s.result);
        return dkv_stopRequested ? 128 + dkv_stopRequested : DKV_EXIT_NOTHING;
    }
    if (cli->quiet)
        printf("%s\n", s.line);
    else
        sayShrunk(&s, line, dkv_now() - start);
    free(s.result);
    return dkv_stopRequested ? 128 + dkv_stopRequested : s.changed ? DKV_EXIT_NOTHING : DKV_EXIT_OK;
}
