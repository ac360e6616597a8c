/* bench: time a kernel. `ref` runs in this process (its outputs stay fp64, no copies); any other in its
 * worker; on a device by the device's own clock. */
#include <cblas.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/clock.h"
#include "../ref/reference.h"
#include "../ref/mask.h"
#include "cli.h"
#include "perf.h"
#include "record.h"
#include "select.h"
#include "version.h"

#define RUNS_LEAST 3
#define RUNS_MOST 9
#define RUNS_SECONDS 3.0 /* enough of one line */

typedef struct timing {
    double forward, backward, oracle; /* seconds, medians; 0: not measured */
    double peak;                      /* resident bytes; on a device, of tensors and workspace there */
    dkv_gpu_info gpu;
} timing;

typedef struct bench {
    const dkv_problem *p;
    dkv_layout l;
    dkv_inputs in;
    char line[DKV_LINE_MAX + 1];
} bench;

/* Peak resident bytes since the last reset. */
static double peakBytes(bool reset) {
    char row[256];
    double kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(row, sizeof row, f))
        if (sscanf(row, "VmHWM: %lf", &kib) == 1) break;
    if (f) fclose(f);
    if (reset && (f = fopen("/proc/self/clear_refs", "w"))) {
        fputs("5", f);
        fclose(f);
    }
    return 1024 * kib;
}

/* The reference in this process: forward and backward, the first run of each not counted. */
static int timeReference(const bench *b, timing *t, dkv_err *err) {
    dkv_ref_options opt = {.threads = 0};
    dkv_outputs out = {0};
    double forward[RUNS_MOST], backward[RUNS_MOST], start = dkv_now();
    int n = 0, rc = dkv_allocOutputs(&b->l, &out, err);
    peakBytes(true);
    for (int i = -1; !rc && i < RUNS_MOST && (i < RUNS_LEAST || dkv_now() - start < RUNS_SECONDS); i++) {
        double t0 = dkv_now();
        rc = dkv_refBlockedForward(b->p, &b->l, &b->in, &opt, &out, err);
        double t1 = dkv_now();
        if (!rc && b->p->grad) rc = dkv_refBlockedBackward(b->p, &b->l, &b->in, &opt, &out, err);
        if (i < 0) continue;
        forward[n] = t1 - t0;
        backward[n++] = dkv_now() - t1;
    }
    if (!rc) {
        t->forward = dkv_median(forward, n);
        t->backward = b->p->grad ? dkv_median(backward, n) : 0;
        t->peak = peakBytes(false);
    }
    dkv_freeOutputs(&out);
    return rc;
}

/* Truth, bound and twin of a usual kernel, in this process. */
static int timeOracle(const bench *b, timing *t, dkv_err *err) {
    dkv_ref_options opt = {.threads = 0};
    dkv_oracle o = {0};
    dualkv_arithmetic a;
    const char *words;
    double seconds[RUNS_LEAST];
    dkv_outputs kernel = {0}; /* what a kernel left */
    int rc = dkv_allocOracle(&b->l, &o, err);
    if (!rc) rc = dkv_allocOutputs(&b->l, &kernel, err);
    if (!rc) rc = dkv_refBlockedForward(b->p, &b->l, &b->in, &opt, &kernel, err);
    if (!rc && !dkv_arithmeticProfile(0, b->p, &a, &words))
        rc = dkv_fail(err, DKV_EHARNESS, "no arithmetic profile");
    for (int i = 0; i < RUNS_LEAST && !rc; i++) {
        double t0 = dkv_now();
        rc = dkv_oracleAll(b->p, &b->l, &b->in, &a, &opt, kernel.o, kernel.lse, &o, err);
        seconds[i] = dkv_now() - t0;
    }
    if (!rc) t->oracle = dkv_median(seconds, RUNS_LEAST);
    dkv_freeOutputs(&kernel);
    dkv_freeOracle(&o);
    return rc;
}

static int timeKernel(const bench *b, dkv_worker *w, timing *t, dkv_err *err) {
    dkv_side side;
    double forward[RUNS_MOST], backward[RUNS_MOST], start = dkv_now();
    int n = 0;
    dkv_outcome o = dkv_openSide(&side, w, b->p, b->line, &b->l, &b->in);
    if (o == DKV_W_OK && side.d.refused) {
        dkv_fail(err, DKV_EREFUSED, "UNSUPPORTED: %.400s", side.d.reason);
        dkv_closeSide(&side);
        return DKV_EREFUSED;
    }
    for (int i = -1; o == DKV_W_OK && i < RUNS_MOST && (i < 1 || dkv_now() - start < RUNS_SECONDS); i++) {
        dkv_run run;
        o = dkv_runSide(&side, 0, &run);
        dkv_freeRun(&run);
        if (o != DKV_W_OK || i < 0) continue;
        forward[n] = run.seconds[0];
        backward[n++] = run.seconds[1];
        t->peak = run.peak > (int64_t)t->peak ? (double)run.peak : t->peak;
    }
    dkv_closeSide(&side);
    if (o != DKV_W_OK) return dkv_fail(err, DKV_EHARNESS, "%.450s", w->why);
    t->forward = dkv_median(forward, n);
    t->backward = b->p->grad ? dkv_median(backward, n) : 0;
    return 0;
}

/* On a device: everything in the worker, inputs too. */
static int timeDevice(const bench *b, dkv_worker *w, timing *t, dkv_err *err) {
    dkv_description d = {0};
    double seconds[2] = {0};
    int64_t bytes = 0;
    dkv_outcome o = dkv_describeCase(w, b->line, &d);
    if (o == DKV_W_OK && d.refused) return dkv_fail(err, DKV_EREFUSED, "UNSUPPORTED: %.400s", d.reason);
    if (o == DKV_W_OK && b->p->grad && !d.has_backward)
        return dkv_fail(err, DKV_EREFUSED, "UNSUPPORTED: it has no backward (grad=off times its forward)");
    if (o == DKV_W_OK) o = dkv_timeCase(w, seconds, &bytes);
    if (o != DKV_W_OK) return dkv_fail(err, DKV_EHARNESS, "%.450s", w->why);
    t->forward = seconds[0];
    t->backward = seconds[1];
    t->peak = (double)bytes;
    t->gpu = w->gpu;
    return 0;
}

static void sayDeviceTiming(const bench *b, const char *kernel, const timing *t, bool quiet) {
    if (!quiet) printf("%s  [%s]\n", b->line, kernel);
    printf("  forward  %10.3f ms  %8.1f TFLOP/s\n", 1e3 * t->forward,
           dkv_forwardFlops(b->p) / t->forward / 1e12);
    if (t->backward > 0)
        printf("  backward %10.3f ms  %8.1f TFLOP/s\n", 1e3 * t->backward,
               dkv_backwardFlops(b->p) / t->backward / 1e12);
    printf("  %s; %.2f GiB of tensors and workspace\n", t->gpu.name, t->peak / 1073741824);
    fflush(stdout);
}

static void sayTiming(const bench *b, const char *kernel, const timing *t, double dgemm, bool quiet) {
    double f = dkv_forwardFlops(b->p), k = dkv_backwardFlops(b->p);
    if (!quiet) printf("%s  [%s]\n", b->line, kernel);
    printf("  forward  %10.3f ms  %8.2f GFLOP/s  %.2f of dgemm\n", 1e3 * t->forward, f / t->forward / 1e9,
           f / t->forward / 1e9 / dgemm);
    if (t->backward > 0)
        printf("  backward %10.3f ms  %8.2f GFLOP/s  %.2f of dgemm\n", 1e3 * t->backward,
               k / t->backward / 1e9, k / t->backward / 1e9 / dgemm);
    printf("  dgemm %.2f GFLOP/s on %d cores; peak memory %.1f MiB\n", dgemm, dkv_hostCores(),
           t->peak / 1048576);
    if (t->oracle > 0)
        printf("  truth, bound and twin %.3f ms: %.2f times the plain reference\n", 1e3 * t->oracle,
               t->oracle / (t->forward + t->backward));
    fflush(stdout);
}

static char *timingRecord(const bench *b, const char *kernel, const timing *t, double dgemm) {
    cJSON *o = cJSON_CreateObject();
    double f = dkv_forwardFlops(b->p) / t->forward / 1e9;
    double k = t->backward > 0 ? dkv_backwardFlops(b->p) / t->backward / 1e9 : 0;
    cJSON_AddStringToObject(o, "line", b->line);
    cJSON_AddStringToObject(o, "kernel", kernel);
    dkv_addDevice(o, &t->gpu);
    dkv_addBuild(o);
    cJSON_AddNumberToObject(o, "ms_fwd", 1e3 * t->forward);
    cJSON_AddNumberToObject(o, "ms_bwd", 1e3 * t->backward);
    cJSON_AddNumberToObject(o, "tflops_fwd", f / 1e3);
    cJSON_AddNumberToObject(o, "tflops_bwd", k / 1e3);
    cJSON_AddNumberToObject(o, "peak_bytes", t->peak);
    if (!t->gpu.name[0]) {
        cJSON_AddNumberToObject(o, "gflops_dgemm", dgemm);
        cJSON_AddNumberToObject(o, "ratio_fwd", f / dgemm);
        cJSON_AddNumberToObject(o, "ratio_bwd", k / dgemm);
    }
    if (t->oracle > 0) cJSON_AddNumberToObject(o, "ms_oracle", 1e3 * t->oracle);
    char *text = cJSON_PrintUnformatted(o);
    cJSON_Delete(o);
    return text;
}

/* On the CPU, beside dgemm before and after: speeds drift. */
static int timeHere(const dkv_cli *cli, bench *b, dkv_worker *w, bool reference, timing *t, double *dgemm,
                    dkv_err *err) {
    int rc = dkv_makeLayout(b->p, &b->l, err);
    if (!rc) rc = dkv_allocInputs(&b->l, &b->in, err);
    if (!rc) rc = dkv_fillInputs(b->p, &b->l, dkv_dataDir(), &b->in, err);
    if (rc) return rc;
    *dgemm = dkv_dgemmRate(dkv_hostCores(), 0.3);
    rc = reference ? timeReference(b, t, err) : timeKernel(b, w, t, err);
    timing plain = *t;
    if (!rc && cli->oracle && !reference) rc = timeReference(b, &plain, err);
    if (!rc && cli->oracle) rc = timeOracle(b, t, err);
    if (!rc) *dgemm = 0.5 * (*dgemm + dkv_dgemmRate(dkv_hostCores(), 0.3));
    return rc;
}

static int benchLine(const dkv_cli *cli, const char *line, int kernel, dkv_record_file *file, dkv_err *err) {
    dkv_problem p = {0};
    bench b = {.p = &p};
    timing t = {0};
    dkv_worker w;
    double dgemm = 0;
    const dkv_kernel_spec *spec = &cli->kernels[kernel];
    int rc = dkv_parseProblem(line, dkv_knownFill, &p, err);
    if (rc) return rc;
    snprintf(b.line, sizeof b.line, "%s", line);
    dkv_initWorker(&w, spec, cli->timeout);
    bool reference = strcmp(spec->text, "ref") == 0;
    if (!reference && dkv_startWorker(&w) != DKV_W_OK) rc = dkv_fail(err, DKV_EHARNESS, "%.450s", w.why);
    if (!rc && w.memory == DUALKV_CUDA) rc = timeDevice(&b, &w, &t, err);
    else if (!rc) rc = timeHere(cli, &b, &w, reference, &t, &dgemm, err);
    if (!rc) {
        char *json = timingRecord(&b, spec->text, &t, dgemm);
        if (t.gpu.name[0]) sayDeviceTiming(&b, spec->text, &t, cli->quiet);
        else sayTiming(&b, spec->text, &t, dgemm, cli->quiet);
        rc = json ? dkv_writeRecord(file, json, err) : dkv_fail(err, DKV_EHARNESS, "out of memory");
        free(json);
    }
    dkv_stopWorker(&w);
    dkv_freeInputs(&b.in);
    dkv_freeLayout(&b.l);
    dkv_freeProblem(&p);
    return rc;
}

int dkv_cmdBench(const dkv_cli *cli) {
    dkv_selection sel = {0};
    dkv_err err = {0};
    dkv_record_file file = {.path = cli->json};
    long timed = 0;
    int rc = cli->n_kernels
                 ? 0
                 : dkv_fail(&err, DKV_EUSER, "--kernel: which kernel? `dualkv list kernels` names them");
    if (!rc) rc = dkv_selectWords(cli->words, cli->n_words, &sel, &err);
    if (!rc && sel.n == 0) rc = dkv_fail(&err, DKV_EUSER, "bench: which lines? (a problem line or a suite)");
    dkv_item *items = rc ? NULL : calloc((size_t)sel.n, sizeof *items);
    for (long i = 0; items && i < sel.n; i++) items[i].line = sel.lines[i];
    bool replicated[DKV_KERNELS_MAX], any = false;
    dkv_session session = {
        .replicated = &any, .items = items, .n_items = items ? sel.n : 0, .data_dir = dkv_dataDir(), .timing = true};
    if (!rc) rc = dkv_checkRecordPath(cli->json, &err);
    if (!rc) rc = dkv_probeKernels(cli->kernels, cli->n_kernels, cli->timeout, replicated, &err);
    for (int k = 0; k < cli->n_kernels && !rc; k++) any = any || replicated[k];
    if (!rc) rc = dkv_precheckItems(&session, &err);
    for (long i = 0; i < sel.n && !rc; i++)
        for (int k = 0; k < cli->n_kernels && !rc; k++) {
            rc = benchLine(cli, sel.lines[i], k, &file, &err);
            if (rc == DKV_EREFUSED) {
                printf("%s  [%s]\n  %s\n", sel.lines[i], cli->kernels[k].text, err.text);
                rc = 0;
            } else {
                timed += !rc;
            }
        }
    int code = rc ? dkv_complain(&err) : timed ? DKV_EXIT_OK : DKV_EXIT_NOTHING;
    if (dkv_closeRecords(&file, &err)) code = dkv_complain(&err);
    free(items);
    dkv_freeSelection(&sel);
    return code;
}
