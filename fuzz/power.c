#include "power.h"

#include <cblas.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../ref/clock.h"
#include "../ref/emu.h"
#include "../verify/version.h"
#include "power_impl.h"

#define SHRINK_SECONDS 60
#define CLEAN_BLOCK 20 /* cases of one task */

int dkv_faultySpec(const dkv_power *p, int i, dkv_kernel_spec *out, dkv_err *err) {
    char text[DKV_SPEC_MAX + 40];
    snprintf(text, sizeof text, "%s+fault=%s", p->kernel.text, p->fault[i].id);
    return dkv_parseKernelSpec(text, out, err);
}

/* ---- tasks on several threads ---- */

typedef int (*task_fn)(dkv_power *p, long task, dkv_err *err);

typedef struct pool {
    dkv_power *p;
    task_fn run;
    long next, n, done;
    const char *what;
    pthread_mutex_t lock;
} pool;

static void *serve(void *arg) {
    pool *q = arg;
    for (;;) {
        dkv_err err = {0};
        pthread_mutex_lock(&q->lock);
        bool more = q->next < q->n && !dkv_stopRequested && !q->p->trouble.code;
        long task = q->next++;
        pthread_mutex_unlock(&q->lock);
        if (!more) return NULL;
        int rc = q->run(q->p, task, &err);
        pthread_mutex_lock(&q->lock);
        if (rc && !q->p->trouble.code) q->p->trouble = err;
        q->done++;
        if (q->p->say) {
            char text[80];
            snprintf(text, sizeof text, "%s: %ld of %ld", q->what, q->done, q->n);
            q->p->say(text, q->p->arg);
        }
        pthread_mutex_unlock(&q->lock);
    }
}

static void runTasks(dkv_power *p, const char *what, task_fn run, long n) {
    pool q = {.p = p, .run = run, .n = n, .what = what};
    pthread_t threads[64];
    int jobs = p->jobs < 64 ? p->jobs : 64, started = 0;
    if (p->trouble.code) return;
    pthread_mutex_init(&q.lock, NULL);
    for (; started < jobs && started < n; started++)
        if (pthread_create(&threads[started], NULL, serve, &q) != 0) break;
    if (n && !started) dkv_fail(&p->trouble, DKV_EHARNESS, "cannot start a thread");
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&q.lock);
}

/* ---- hunts ---- */

static dkv_case_options optionsFor(const dkv_power *p, double level) {
    return (dkv_case_options){.data_dir = p->data_dir,
                              .level = p->level > 0 ? p->level : level,
                              .threads = 1,
                              .repeats = p->repeats};
}

/* Runs a line; 1: a defect that the clean kernel does not show, 0: none, -1: *err. */
static int tryLine(dkv_power *p, const dkv_problem *problem, double level, dkv_worker *faulty, dkv_result *r,
                   dkv_result *clean, dkv_err *err) {
    dkv_case_options options = optionsFor(p, level);
    dkv_runCase(problem, faulty, &options, r);
    if (r->status == DKV_ST_HARNESS_ERROR) {
        dkv_fail(err, DKV_EHARNESS, "%.160s: %.300s", r->line, r->why);
        return -1;
    }
    if (r->stopped || !dkv_statusRow(r->status)->defect) return 0;
    if (!clean) return 1;
    dkv_runAlone(&p->kernel, problem, &options, p->timeout, clean);
    return !dkv_statusRow(clean->status)->defect;
}

static int runHunt(dkv_power *p, long task, dkv_err *err) {
    const int fault = (int)(task / p->seeds), seed = (int)(task % p->seeds);
    dkv_hunt *h = &p->fault[fault].hunts[seed];
    dkv_result *r = malloc(2 * sizeof *r);
    dkv_sampler sampler = {0};
    dkv_kernel_spec spec;
    dkv_worker w;
    int rc = r ? dkv_faultySpec(p, fault, &spec, err) : dkv_fail(err, DKV_EHARNESS, "out of memory");
    if (!rc) rc = dkv_openSampler(p->profile, p->seed + (uint64_t)seed, &sampler, err);
    double start = dkv_now();
    if (!rc) dkv_initWorker(&w, &spec, p->timeout);
    for (uint64_t n = 0; n < p->cases && !rc && !h->found[0] && !dkv_stopRequested; n++) {
        dkv_problem problem;
        rc = dkv_sampleCase(&sampler, n, &problem, err);
        if (rc) break;
        int found = tryLine(p, &problem, dkv_fuzzLevel(p->budget, n), &w, r, r + 1, err);
        dkv_freeProblem(&problem);
        if (found < 0) rc = (int)err->code;
        h->cases[0] = n + 1;
        h->found[0] = found > 0;
    }
    h->seconds = dkv_now() - start;
    if (h->found[0]) {
        h->reason = dkv_reasonOf(r);
        memcpy(h->line, r->line, sizeof h->line);
        memcpy(h->why, r->why, sizeof h->why);
    }
    if (spec.text[0] && r && sampler.cover.rows) dkv_stopWorker(&w);
    dkv_closeSampler(&sampler);
    free(r);
    return rc;
}

static int runClean(dkv_power *p, long task, dkv_err *err) {
    const long blocks = ((long)p->cases + CLEAN_BLOCK - 1) / CLEAN_BLOCK;
    const uint64_t first = (uint64_t)(task % blocks) * CLEAN_BLOCK;
    dkv_result *r = malloc(sizeof *r);
    dkv_sampler sampler = {0};
    dkv_worker w;
    int rc = r ? dkv_openSampler(p->profile, p->seed + (uint64_t)(task / blocks), &sampler, err)
               : dkv_fail(err, DKV_EHARNESS, "out of memory");
    dkv_initWorker(&w, &p->kernel, p->timeout);
    for (uint64_t n = first; n < first + CLEAN_BLOCK && n < p->cases && !rc && !dkv_stopRequested; n++) {
        dkv_problem problem;
        rc = dkv_sampleCase(&sampler, n, &problem, err);
        if (rc) break;
        int found = tryLine(p, &problem, dkv_fuzzLevel(p->budget, n), &w, r, NULL, err);
        dkv_freeProblem(&problem);
        if (found < 0) rc = (int)err->code;
        __atomic_add_fetch(&p->clean_cases, 1, __ATOMIC_RELAXED);
        __atomic_add_fetch(&p->false_alarms, found > 0, __ATOMIC_RELAXED);
    }
    dkv_stopWorker(&w);
    dkv_closeSampler(&sampler);
    free(r);
    return rc;
}

/* ---- suites ---- */

static int runSuite(dkv_power *p, long task, dkv_err *err) {
    dkv_fault_power *f = &p->fault[task];
    const double level = p->budget / ((double)p->n_suite * DKV_N_OUTPUTS);
    dkv_result *r = malloc(2 * sizeof *r);
    dkv_kernel_spec spec;
    dkv_worker w;
    int rc = r ? dkv_faultySpec(p, (int)task, &spec, err) : dkv_fail(err, DKV_EHARNESS, "out of memory");
    if (rc) {
        free(r);
        return rc;
    }
    dkv_initWorker(&w, &spec, p->timeout);
    for (long i = 0; i < p->n_suite && !rc && !f->in_suite && !dkv_stopRequested; i++) {
        dkv_problem problem;
        rc = dkv_parseProblem(p->suite_lines[i], dkv_knownFill, &problem, err);
        if (rc) break;
        int found = tryLine(p, &problem, level, &w, r, r + 1, err);
        dkv_freeProblem(&problem);
        if (found < 0) rc = (int)err->code;
        f->suite_cases = i + 1;
        f->in_suite = found > 0;
    }
    if (f->in_suite) memcpy(f->suite_line, r->line, sizeof f->suite_line);
    dkv_stopWorker(&w);
    free(r);
    return rc;
}

/* ---- small lines ---- */

static int runShrink(dkv_power *p, long task, dkv_err *err) {
    dkv_fault_power *f = &p->fault[task];
    dkv_problem problem;
    dkv_kernel_spec spec;
    int seed = 0;
    while (seed < p->seeds && !f->hunts[seed].found[0]) seed++;
    if (seed == p->seeds) return 0;
    dkv_result *r = malloc(sizeof *r);
    int rc = r ? dkv_faultySpec(p, (int)task, &spec, err) : dkv_fail(err, DKV_EHARNESS, "out of memory");
    if (!rc) rc = dkv_parseProblem(f->hunts[seed].line, dkv_knownFill, &problem, err);
    if (!rc) {
        double start = dkv_now();
        dkv_shrinking s = {.kernel = &spec,
                           .options = optionsFor(p, 1e-8),
                           .timeout = p->timeout,
                           .seconds = SHRINK_SECONDS,
                           .result = r};
        dkv_err why = {0};
        if (!dkv_shrinkLine(&problem, &s, &why)) memcpy(f->shrunk, s.line, sizeof f->shrunk);
        dkv_freeProblem(&problem);
        f->trials = s.trials;
        f->shrink_seconds = dkv_now() - start;
        if (f->shrunk[0] && !dkv_parseProblem(f->shrunk, dkv_knownFill, &problem, err)) {
            for (int32_t i = 0; i < problem.n_nodes; i++) f->segments += problem.nodes[i].len > 0;
            f->heads = problem.hq;
            dkv_freeProblem(&problem);
        }
    }
    free(r);
    return rc;
}

/* ---- the whole ---- */

/* Is the id one of the comma list? */
static bool isListed(const char *list, const char *id) {
    size_t n = strlen(id);
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, id, n) && (at[n] == ',' || !at[n])) return true;
    return false;
}

static int listFaults(dkv_power *p, dkv_err *err) {
    const dkv_fault *f;
    int all = 0;
    while (dkv_listFault(all)) all++;
    p->fault = calloc((size_t)all + 1, sizeof *p->fault);
    if (!p->fault) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int i = 0; (f = dkv_listFault(i)); i++) {
        if (p->faults && !isListed(p->faults, f->id)) continue;
        dkv_fault_power *x = &p->fault[p->n_faults++];
        *x = (dkv_fault_power){.id = f->id, .kind = f->kind, .doc = f->doc, .control = f->control};
        x->hunts = calloc((size_t)p->seeds, sizeof *x->hunts);
        if (!x->hunts) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    }
    for (const char *at = p->faults; at; at += *at == ',') {
        const int n = (int)strcspn(at, ",");
        bool known = false;
        for (int i = 0; i < p->n_faults; i++) known |= !strncmp(p->fault[i].id, at, (size_t)n) && !p->fault[i].id[n];
        if (!known) return dkv_fail(err, DKV_EUSER, "--faults: '%.*s' is none of `dualkv list faults`", n < 80 ? n : 80, at);
        at += n;
        if (!*at) break;
    }
    return 0;
}

static int runMatrix(dkv_power *p, long task, dkv_err *err) {
    return dkv_runMatrixPart(p, (int)task, p->jobs, err);
}

int dkv_runPower(dkv_power *p, dkv_err *err) {
    int rc = listFaults(p, err);
    dkv_kernel_spec spec;
    if (p->jobs < 1) p->jobs = dkv_hostCores();
    if (!rc && p->n_faults) rc = dkv_faultySpec(p, 0, &spec, err);
    if (rc) return rc;
    openblas_set_num_threads(1); /* parallel over cases */
    runTasks(p, "planted faults", runHunt, (long)p->n_faults * p->seeds);
    double start = dkv_now();
    runTasks(p, "clean kernel", runClean, ((long)p->cases + CLEAN_BLOCK - 1) / CLEAN_BLOCK * p->seeds);
    p->clean_seconds = dkv_now() - start;
    p->clean_done = !dkv_stopRequested;
    if (p->n_suite) runTasks(p, "suite", runSuite, p->n_faults);
    p->suite_done = p->n_suite && !dkv_stopRequested;
    if (p->matrix) runTasks(p, "usual rules", runMatrix, p->jobs);
    p->rules_done = p->matrix && !dkv_stopRequested;
    if (p->shrink) runTasks(p, "shrinking", runShrink, p->n_faults); /* the longest, and what can most be spared */
    p->shrink_done = p->shrink && !dkv_stopRequested;
    p->stopped = dkv_stopRequested != 0;
    if (p->trouble.code) *err = p->trouble;
    return (int)p->trouble.code;
}

void dkv_freePower(dkv_power *p) {
    for (int i = 0; i < p->n_faults; i++) free(p->fault[i].hunts);
    free(p->fault);
    p->fault = NULL;
    p->n_faults = 0;
}
