/* compare: two kernels on one line, side by side, and where they first part. */
#include <cblas.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "../data/fill.h"
#include "../data/suite.h"
#include "check.h"
#include "cli.h"
#include "record.h"
#include "select.h"
#include "version.h"

typedef struct party { /* one kernel's case */
    dkv_result result;
    dkv_outputs got, bound; /* packed; copies */
    int64_t n[DKV_N_OUTPUTS];
    bool has;
    dkv_layout layout;
    dkv_err err;
} party;

typedef struct difference { /* of one tensor */
    bool both;
    int64_t n, bits; /* elements; of other bits */
    int64_t at;      /* of the largest difference over the sum of the bounds, -1: none */
    double most, a, b;
    char where[160];
} difference;

static void take(dkv_case *c, void *arg) {
    party *p = arg;
    if (!c->has_got || !c->has_oracle) return;
    if (dkv_makeLayout(c->p, &p->layout, &p->err)) return;
    p->has =
        !dkv_allocOutputs(&p->layout, &p->got, &p->err) && !dkv_allocOutputs(&p->layout, &p->bound, &p->err);
    dkv_countOutputs(&p->layout, p->n);
    for (int id = 0; id < DKV_N_OUTPUTS && p->has; id++) {
        const double *got = dkv_outputAt(&c->got, (dkv_tensor_id)id);
        if (c->kernel.d.absent >> id & 1 || !got) p->n[id] = 0;
        if (!p->n[id]) continue;
        memcpy(dkv_outputAt(&p->got, (dkv_tensor_id)id), got, (size_t)p->n[id] * sizeof *got);
        memcpy(dkv_outputAt(&p->bound, (dkv_tensor_id)id), dkv_outputAt(&c->oracle.bound, (dkv_tensor_id)id),
               (size_t)p->n[id] * sizeof *got);
    }
}

static void compareTensor(const party p[2], dkv_tensor_id id, difference *d) {
    const double *a = dkv_outputAt(&p[0].got, id), *b = dkv_outputAt(&p[1].got, id);
    const double *ba = dkv_outputAt(&p[0].bound, id), *bb = dkv_outputAt(&p[1].bound, id);
    *d = (difference){.at = -1};
    d->both = p[0].has && p[1].has && p[0].n[id] > 0 && p[1].n[id] > 0;
    d->n = d->both ? p[0].n[id] : 0;
    for (int64_t i = 0; i < d->n; i++) {
        if (memcmp(&a[i], &b[i], sizeof a[i]) == 0 || (isnan(a[i]) && isnan(b[i]))) continue;
        d->bits++;
        double over = isfinite(a[i]) && isfinite(b[i]) ? fabs(a[i] - b[i]) / (fabs(ba[i]) + fabs(bb[i]))
                                                       : (double)INFINITY;
        if (isnan(over) || (d->at >= 0 && !(over > d->most))) continue;
        d->most = over;
        d->at = i;
        d->a = a[i];
        d->b = b[i];
    }
    if (d->at >= 0) dkv_nameElement(&p[0].layout, id, d->at, d->where, sizeof d->where);
}

static const dkv_tensor_id order[DKV_N_OUTPUTS] = {DKV_LSE, DKV_O, DKV_DV, DKV_DK, DKV_DQ, DKV_DSINK};

/* The first tensor in which they differ by more than both roundings allow; else the first of other bits. */
static void sayFirst(const party p[2], const difference d[DKV_N_OUTPUTS], char *out, size_t n) {
    int at = -1;
    for (int i = 0; i < DKV_N_OUTPUTS && at < 0; i++)
        if (d[order[i]].most > 1) at = order[i];
    const bool beyond = at >= 0;
    for (int i = 0; i < DKV_N_OUTPUTS && at < 0; i++)
        if (d[order[i]].bits) at = order[i];
    if (!p[0].has || !p[1].has) {
        const party *q = p[0].has ? &p[1] : &p[0];
        snprintf(out, n, "nothing to compare: %.200s %s: %.300s", q->result.kernel,
                 dkv_statusRow(q->result.status)->name, q->result.why);
        return;
    }
    if (at < 0) {
        snprintf(out, n, "they give the same bits");
        return;
    }
    const difference *x = &d[at];
    size_t used = (size_t)snprintf(
        out, n,
        "they first part in %s%s: %lld of %lld elements have other bits, the largest difference is %.2g of "
        "what both roundings allow together, at %s: %.9g and %.9g",
        dkv_tensorName((dkv_tensor_id)at), beyond ? ", beyond rounding" : ", within rounding",
        (long long)x->bits, (long long)x->n, x->most, x->where, x->a, x->b);
    const double r[2] = {p[0].result.tensor[at].all.max_ratio, p[1].result.tensor[at].all.max_ratio};
    for (int k = 0; k < 2 && beyond && used < n; k++)
        if (r[k] > 1 && r[1 - k] <= 1)
            snprintf(out + used, n - used, "; %.200s is the one that is wrong there", p[k].result.kernel);
    if (beyond && r[0] > 1 && r[1] > 1 && used < n) snprintf(out + used, n - used, "; both are wrong there");
}

static void sayTable(const party p[2], const difference d[DKV_N_OUTPUTS], FILE *f) {
    fprintf(f, "  %-6s %21s %21s %21s %10s %10s  %s\n", "tensor", "err/bound", "rms z", "gain", "same bits",
            "apart", "most at");
    for (int i = 0; i < DKV_N_OUTPUTS; i++) {
        const dkv_tensor_id id = order[i];
        const dkv_judgement *j[2] = {&p[0].result.tensor[id], &p[1].result.tensor[id]};
        if (!j[0]->present && !j[1]->present) continue;
        fprintf(f, "  %-6s", dkv_tensorName(id));
        for (int what = 0; what < 3; what++)
            for (int k = 0; k < 2; k++) {
                const double x[3] = {j[k]->all.max_ratio, j[k]->all.rms_z, j[k]->all.gain};
                if (!j[k]->present || (what && !j[k]->twin))
                    fprintf(f, " %10s", "-");
                else
                    fprintf(f, " %10.3g", x[what]);
            }
        if (!d[id].both)
            fprintf(f, " %10s %10s\n", "-", "-");
        else
            fprintf(f, " %9.2f%% %10.3g  %s\n", 100.0 * (double)(d[id].n - d[id].bits) / (double)d[id].n,
                    d[id].most, d[id].most > 1e-9 ? d[id].where : "");
    }
    fprintf(f, "  seconds: forward %.3g and %.3g, backward %.3g and %.3g\n", p[0].result.seconds_forward,
            p[1].result.seconds_forward, p[0].result.seconds_backward, p[1].result.seconds_backward);
}

static char *printComparison(const party p[2], const difference d[DKV_N_OUTPUTS], const char *sentence) {
    cJSON *o = cJSON_CreateObject(), *tensors, *cases;
    cJSON_AddStringToObject(o, "comparison", sentence);
    tensors = cJSON_AddObjectToObject(o, "tensors");
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!d[id].both) continue;
        cJSON *t = cJSON_AddObjectToObject(tensors, dkv_tensorName((dkv_tensor_id)id));
        dkv_addNumber(t, "total", (double)d[id].n);
        dkv_addNumber(t, "other_bits", (double)d[id].bits);
        dkv_addNumber(t, "apart", d[id].most);
        cJSON_AddStringToObject(t, "where", d[id].where);
    }
    cases = cJSON_AddArrayToObject(o, "cases");
    bool all = true;
    for (int k = 0; k < 2; k++) {
        char *record = dkv_printRecord(&p[k].result);
        cJSON *one = record ? cJSON_Parse(record) : NULL;
        all &= one != NULL;
        if (one) cJSON_AddItemToArray(cases, one);
        free(record);
    }
    char *text = all ? cJSON_PrintUnformatted(o) : NULL;
    cJSON_Delete(o);
    return text;
}

static int prepare(const dkv_cli *cli, dkv_kernel_spec kernels[2], dkv_problem *p, dkv_err *err) {
    dkv_selection sel = {0};
    bool replicated[2] = {false, false};
    int rc = 0;
    *p = (dkv_problem){0};
    if (cli->n_words < 3) return dkv_fail(err, DKV_EUSER, "compare: two kernels, then a line");
    for (int k = 0; k < 2 && !rc; k++) rc = dkv_parseKernelSpec(cli->words[k], &kernels[k], err);
    if (!rc) rc = dkv_selectWords(cli->words + 2, cli->n_words - 2, &sel, err);
    if (!rc && sel.n != 1) rc = dkv_fail(err, DKV_EUSER, "compare: one line, not %ld", sel.n);
    char *line = rc ? NULL : sel.lines[0];
    const dkv_item items[2] = {{line, 0}, {line, 1}};
    const dkv_session session = {
        .items = items, .n_items = 2, .kernels = kernels, .replicated = replicated, .n_kernels = 2, .data_dir = dkv_dataDir()};
    if (!rc) rc = dkv_checkRecordPath(cli->json, err);
    if (!rc) rc = dkv_probeKernels(kernels, 2, cli->timeout, replicated, err);
    if (!rc) rc = dkv_precheckItems(&session, err);
    if (!rc) rc = dkv_parseProblem(line, NULL, p, err);
    dkv_freeSelection(&sel);
    return rc;
}

static void runParty(const dkv_cli *cli, const dkv_kernel_spec *kernel, const dkv_problem *p, party *out) {
    dkv_worker w;
    const dkv_case_options options = {.data_dir = dkv_dataDir(),
                                      .level =
                                          cli->level > 0 ? cli->level : cli->budget / (2 * DKV_N_OUTPUTS),
                                      .threads = dkv_hostCores(),
                                      .repeats = 1,
                                      .observe = take,
                                      .observe_arg = out};
    dkv_initWorker(&w, kernel, cli->timeout);
    dkv_runCase(p, &w, &options, &out->result);
    dkv_stopWorker(&w);
    out->has &= !out->result.changed;
}

/* Says it, writes it. */
static int finish(const dkv_cli *cli, const party p[2], dkv_err *err) {
    difference d[DKV_N_OUTPUTS];
    char sentence[1200];
    dkv_record_file file = {.path = cli->json};
    FILE *f = cli->json && strcmp(cli->json, "-") == 0 ? stderr : stdout;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) compareTensor(p, (dkv_tensor_id)id, &d[id]);
    sayFirst(p, d, sentence, sizeof sentence);
    fprintf(f, "%s\n", sentence);
    for (int k = 0; k < 2 && !cli->quiet; k++)
        fprintf(f, "%s  %s  %s%s%s\n", k ? "second" : "first ", dkv_statusRow(p[k].result.status)->name,
                p[k].result.kernel, p[k].result.why[0] ? ": " : "", p[k].result.why);
    if (!cli->quiet && (p[0].has || p[1].has)) sayTable(p, d, f);
    if (!cli->json) return 0;
    char *json = printComparison(p, d, sentence);
    int rc =
        json ? dkv_writeRecord(&file, json, err) : dkv_fail(err, DKV_EHARNESS, "out of memory for a record");
    free(json);
    return rc ? rc : dkv_closeRecords(&file, err);
}

int dkv_cmdCompare(const dkv_cli *cli) {
    static dkv_kernel_spec kernels[2];
    dkv_problem p;
    dkv_err err = {0};
    long counts[DKV_ST_N] = {0};
    party *parties = calloc(2, sizeof *parties);
    int code = parties ? prepare(cli, kernels, &p, &err) : dkv_fail(&err, DKV_EHARNESS, "out of memory");
    if (code) {
        if (parties) dkv_freeProblem(&p);
        free(parties);
        return dkv_complain(&err);
    }
    openblas_set_num_threads(1);
    dkv_catchSignals();
    for (int k = 0; k < 2 && !dkv_stopRequested; k++) {
        runParty(cli, &kernels[k], &p, &parties[k]);
        counts[parties[k].result.status]++;
    }
    if (!dkv_stopRequested) {
        code = dkv_runExit(counts);
        if (code == DKV_EXIT_OK && counts[DKV_ST_UNSUPPORTED]) code = DKV_EXIT_NOTHING; /* one alone is no comparison */
        if (finish(cli, parties, &err)) code = dkv_complain(&err);
    }
    for (int k = 0; k < 2; k++) {
        dkv_freeOutputs(&parties[k].got);
        dkv_freeOutputs(&parties[k].bound);
        dkv_freeLayout(&parties[k].layout);
    }
    dkv_freeProblem(&p);
    free(parties);
    return dkv_stopRequested ? 128 + dkv_stopRequested : code;
}
