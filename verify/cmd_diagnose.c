/* diagnose: where a kernel goes wrong on one line, and what explains it. */
#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../fuzz/options.h"
#include "cli.h"
#include "diagnose.h"
#include "record.h"
#include "select.h"
#include "version.h"

enum {
    REPEATS = 3
}; /* further runs, unless told otherwise: what changes from run to run is no matter of values */

/* One line, fit to run with this kernel. */
static int prepare(const dkv_cli *cli, dkv_problem *p, dkv_err *err) {
    dkv_selection sel = {0};
    bool replicated = false;
    *p = (dkv_problem){0};
    if (cli->n_kernels != 1)
        return dkv_fail(err, DKV_EUSER, "diagnose: --kernel: one kernel (`dualkv list kernels` names them)");
    if (!cli->n_words) return dkv_fail(err, DKV_EUSER, "diagnose: which line?");
    int rc = dkv_selectWords(cli->words, cli->n_words, &sel, err);
    if (!rc && sel.n != 1) rc = dkv_fail(err, DKV_EUSER, "diagnose: one line, not %ld", sel.n);
    dkv_item item = {rc ? NULL : sel.lines[0], 0};
    const dkv_session session = {
        .items = &item, .n_items = 1, .kernels = cli->kernels, .replicated = &replicated, .n_kernels = 1, .data_dir = dkv_dataDir()};
    if (!rc) rc = dkv_checkRecordPath(cli->json, err);
    if (!rc && cli->arithmetic) rc = dkv_checkArithmeticWord(cli->arithmetic, err);
    if (!rc) rc = dkv_probeKernels(cli->kernels, 1, cli->timeout, &replicated, err);
    if (!rc) rc = dkv_precheckItems(&session, err);
    if (!rc) rc = dkv_parseProblem(item.line, NULL, p, err);
    dkv_freeSelection(&sel);
    return rc;
}

/* What kernels that declare no arithmetic are held to, chosen where none is named; replay lines name it. */
static int holdTo(const dkv_cli *cli, const dkv_problem *p, dkv_diagnose_options *o, dkv_err *err) {
    static dkv_fits fits;
    static dkv_choice choice;
    const char *name = cli->arithmetic ? cli->arithmetic : "auto";
    if (strcmp(name, "auto")) snprintf(choice.words, sizeof choice.words, "held to %.80s, as asked", name);
    else if (dkv_chooseArithmetic(p, &cli->kernels[0], o, &choice, err)) return (int)err->code;
    else name = choice.name;
    if (name) dkv_nameFits(name, 1u << p->dtype, &fits);
    if (name && !fits.of[p->dtype].known)
        snprintf(choice.words, sizeof choice.words, "%.80s is none of %s, so it is held to none", name, dkv_dtypeName(p->dtype));
    dkv_nameOptions(&(dkv_run_options){name, cli->judge, cli->repeats, cli->timeout, cli->level, cli->budget});
    o->fits = &fits;
    o->held = choice.words;
    return 0;
}

static int writeJson(const dkv_cli *cli, const dkv_diagnosis *d, dkv_err *err) {
    dkv_record_file file = {.path = cli->json};
    if (!cli->json) return 0;
    char *json = dkv_printDiagnosis(d);
    int rc =
        json ? dkv_writeRecord(&file, json, err) : dkv_fail(err, DKV_EHARNESS, "out of memory for a record");
    free(json);
    return rc ? rc : dkv_closeRecords(&file, err);
}

int dkv_cmdDiagnose(const dkv_cli *cli) {
    dkv_problem p;
    dkv_err err = {0};
    double seconds = 0;
    dkv_diagnosis *d = calloc(1, sizeof *d);
    FILE *f = cli->json && strcmp(cli->json, "-") == 0 ? stderr : stdout;
    const bool bad = !d || prepare(cli, &p, &err) || (cli->time && dkv_parseTime(cli->time, &seconds, &err));
    dkv_diagnose_options options = {.data_dir = dkv_dataDir(),
                                    .level = cli->level > 0 ? cli->level : cli->budget / DKV_N_OUTPUTS,
                                    .timeout = cli->timeout,
                                    .seconds = seconds,
                                    .threads = dkv_hostCores(),
                                    .repeats = cli->repeats > 1 ? cli->repeats : REPEATS,
                                    .what = !cli->where,
                                    .exclude = cli->exclude};
    openblas_set_num_threads(1); /* parallel over heads, not inside a product */
    if (!bad) dkv_catchSignals();
    if (bad || holdTo(cli, &p, &options, &err)) {
        if (!d) dkv_fail(&err, DKV_EHARNESS, "out of memory");
        else dkv_freeProblem(&p);
        free(d);
        const int wrong = dkv_complain(&err);
        return dkv_stopRequested ? 128 + dkv_stopRequested : wrong;
    }
    int code = dkv_diagnoseLine(&p, &cli->kernels[0], &options, d, &err);
    if (code)
        code = dkv_complain(&err);
    else {
        long counts[DKV_ST_N] = {0};
        counts[d->result.status] = 1;
        code = dkv_runExit(counts);
        if (cli->quiet)
            fprintf(f, "%s\n", d->sentence);
        else
            dkv_sayDiagnosis(d, f, cli->verbose);
        if (writeJson(cli, d, &err)) code = dkv_complain(&err);
    }
    dkv_freeProblem(&p);
    free(d);
    return dkv_stopRequested ? 128 + dkv_stopRequested : code;
}
