/* selftest: what the harness is for, tried on itself. Every row must come out as the table says. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/reference.h"
#include "../ref/vexp.h"
#include "cli.h"
#include "kernel_broken.h"
#include "session.h"

typedef struct tally {
    const dkv_cli *cli;
    long passed, failed;
} tally;

static void say(tally *t, bool good, const char *what, const char *result) {
    t->passed += good;
    t->failed += !good;
    if (!good || !t->cli->quiet) printf("%-5s %s: %s\n", good ? "ok" : "WRONG", what, result);
    fflush(stdout);
}

/* ---- mutated oracles ---- */

static const char *const mutants[DKV_MUTANT_N] = {
    "no mistake",     "the diagonal masked", "scale 1 % off", "LSE in base 2", "a neighbour's KV head",
    "delta left out", "keys one row early", "the first key masked", "one key too many"};

static const char *const oracle_lines[] = {
    "shape=37+3x11/5+2 heads=4:2 dim=8 dlse=on",
    "shape=70+2x33@50 heads=2:2 dim=16 mask=window:24:2 sinklogit=0.5",
    "shape=40k+5@30,9 heads=2:1 dim=8:4 dtype=fp16 softcap=5 alibi=on",
};

/* Largest difference between blocked and naive over what both may err by in fp64. */
static int crossCheck(const char *line, dkv_mutant mutant, double *ratio, dkv_err *err) {
    const dkv_gauge_errors vector = {DKV_VEXP_ULP * 0x1p-52, 0x1p-52, DKV_VTANH_ULP * 0x1p-52, 4};
    dkv_ref_options opt = {.threads = 1, .mutant = mutant};
    dkv_problem p = {0};
    dkv_layout l = {0};
    dkv_inputs in = {0};
    dkv_outputs naive = {0}, blocked = {0}, bound[2] = {{0}, {0}};
    int64_t n[DKV_N_OUTPUTS];
    int rc = dkv_parseProblem(line, NULL, &p, err);
    if (!rc) rc = dkv_makeLayout(&p, &l, err);
    if (!rc) rc = dkv_allocInputs(&l, &in, err);
    if (!rc) rc = dkv_fillInputs(&p, &l, dkv_dataDir(), &in, err);
    if (!rc) rc = dkv_allocOutputs(&l, &naive, err);
    if (!rc) rc = dkv_allocOutputs(&l, &blocked, err);
    for (int i = 0; i < 2 && !rc; i++) {
        rc = dkv_allocOutputs(&l, &bound[i], err);
        if (!rc) rc = dkv_refGauge(&p, &l, &in, i ? &vector : NULL, &bound[i], err);
    }
    if (!rc) rc = dkv_refNaive(&p, &l, &in, &naive, err);
    if (!rc) rc = dkv_refBlocked(&p, &l, &in, &opt, &blocked, err);
    if (!rc) dkv_countOutputs(&l, n);
    *ratio = 0;
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++)
        for (int64_t i = 0; i < n[id]; i++) {
            double x = dkv_outputAt(&naive, (dkv_tensor_id)id)[i],
                   y = dkv_outputAt(&blocked, (dkv_tensor_id)id)[i];
            double allowed =
                dkv_outputAt(&bound[0], (dkv_tensor_id)id)[i] + dkv_outputAt(&bound[1], (dkv_tensor_id)id)[i];
            if (x == y) continue;
            double share = fabs(x - y) / allowed;
            if (!(share <= *ratio)) *ratio = isnan(share) ? INFINITY : share;
        }
    for (int i = 0; i < 2; i++) dkv_freeOutputs(&bound[i]);
    dkv_freeOutputs(&blocked);
    dkv_freeOutputs(&naive);
    dkv_freeInputs(&in);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
    return rc;
}

static void testMutants(tally *t) {
    for (int m = 0; m < DKV_MUTANT_N; m++) {
        double worst = 0;
        dkv_err err = {0};
        int rc = 0;
        for (size_t i = 0; i < sizeof oracle_lines / sizeof oracle_lines[0] && !rc; i++) {
            double ratio;
            rc = crossCheck(oracle_lines[i], (dkv_mutant)m, &ratio, &err);
            if (ratio > worst) worst = ratio;
        }
        char what[80], result[600];
        snprintf(what, sizeof what, "oracle with %s", mutants[m]);
        if (rc) snprintf(result, sizeof result, "%s", err.text);
        else snprintf(result, sizeof result, "blocked and naive differ by %.3g of their fp64 bounds", worst);
        say(t, !rc && (m ? worst > 1 : worst <= 1), what, result);
    }
}

/* ---- the comparator ---- */

/* A NaN, an Inf and a value just outside must fail, one just inside pass: !(err <= bound), as compiled here.
 */
static void testComparator(tally *t) {
    const struct {
        double error;
        bool fails;
        const char *what;
    } rows[] = {{NAN, true, "a NaN"},
                {INFINITY, true, "an Inf"},
                {2, true, "twice the bound"},
                {0.5, false, "half the bound"}};
    dkv_problem p = {0};
    dkv_layout l = {0};
    dkv_oracle o = {0};
    dualkv_arithmetic a = {.size = sizeof a};
    dkv_err err = {0};
    const char *words;
    int rc = dkv_parseProblem("shape=3 dim=2 grad=off", NULL, &p, &err);
    if (!rc) rc = dkv_makeLayout(&p, &l, &err);
    if (!rc) rc = dkv_allocOracle(&l, &o, &err);
    if (!rc && !dkv_arithmeticProfile(0, &p, &a, &words))
        rc = dkv_fail(&err, DKV_EHARNESS, "no arithmetic profile");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double got[6] = {0};
        dkv_judgement j = {0};
        char what[80];
        for (int k = 0; k < 6 && !rc; k++) o.bound.o[k] = 0.01;
        got[4] = rows[i].error * 0.01;
        if (!rc) rc = dkv_judgeTensor(&l, &a, &o, DKV_O, got, 1e-9, &j, &err);
        snprintf(what, sizeof what, "comparator on %s", rows[i].what);
        say(t, !rc && j.failed == rows[i].fails, what, rc ? err.text : j.failed ? "fails" : "passes");
    }
    dkv_freeOracle(&o);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
}

/* ---- broken kernels ---- */

static void testBreakage(tally *t, const dkv_breakage *b) {
    char spec[64], what[160], result[700];
    dkv_kernel_spec kernel;
    dkv_worker w;
    dkv_problem p = {0};
    dkv_err err = {0};
    dkv_case_options options = {.data_dir = dkv_dataDir(), .level = 1e-6, .threads = 1, .repeats = 1};
    dkv_result *r = calloc(1, sizeof *r);
    snprintf(spec, sizeof spec, "broken+how=%s", b->how);
    snprintf(what, sizeof what, "kernel that %s", b->doc);
    int rc = r ? dkv_parseKernelSpec(spec, &kernel, &err) : dkv_fail(&err, DKV_EHARNESS, "out of memory");
    if (!rc) rc = dkv_parseProblem(b->line, dkv_knownFill, &p, &err);
    if (rc) {
        say(t, false, what, err.text);
    } else {
        dkv_initWorker(&w, &kernel, b->timeout > 0 ? b->timeout : 20);
        dkv_runCase(&p, &w, &options, r);
        int again = w.pid ? 1 : dkv_startWorker(&w) == DKV_W_OK; /* and the next case has a worker */
        dkv_stopWorker(&w);
        snprintf(result, sizeof result, "%s%s%s%s", dkv_statusRow(r->status)->name, r->why[0] ? ", " : "",
                 r->why, again ? "" : "; no fresh worker after it");
        say(t, r->status == b->expected && again, what, result);
    }
    dkv_freeProblem(&p);
    free(r);
}

int dkv_cmdSelftest(const dkv_cli *cli) {
    tally t = {.cli = cli};
    const dkv_breakage *b;
    if (cli->n_words) {
        dkv_err err;
        dkv_fail(&err, DKV_EUSER, "selftest takes no words ('%.80s')", cli->words[0]);
        return dkv_complain(&err);
    }
    testMutants(&t);
    testComparator(&t);
    for (int i = 0; (b = dkv_listBreakage(i)); i++) testBreakage(&t, b);
    printf("%ld as expected, %ld not\n", t.passed, t.failed);
    return t.failed ? DKV_EXIT_DEFECT : DKV_EXIT_OK;
}
