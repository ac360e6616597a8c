#include "session.h"

#include <cblas.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/mask.h"
#include "kernel_hash.h"
#include "version.h"

/* One line, fit to run? */
static int precheckLine(const dkv_session *s, const char *line, bool replicated, double available,
                        dkv_err *err) {
    const double gib = 1024.0 * 1024 * 1024;
    dkv_problem p = {0};
    dkv_err why = {0};
    int rc = dkv_parseProblem(line, dkv_knownFill, &p, err);
    if (rc) return rc;
    if (dkv_maskAdmissible(&p, &why)) {
        rc = dkv_fail(err, DKV_EUSER, "not admissible: %s", why.text);
        goto done;
    }
    double need = s->timing ? dkv_estimateTiming(&p, replicated) : dkv_estimateCase(&p, replicated);
    if (need > available) {
        char rows[300] = "";
        if (!s->timing) dkv_sayMemory(&p, replicated, rows, sizeof rows);
        rc = dkv_fail(err, DKV_EUSER, "'%.160s' needs about %.1f GiB, %.1f GiB are free%s%s", line, need / gib,
                      available / gib, rows[0] ? ": " : "", rows);
        goto done;
    }
    if (strncmp(p.fill, "recorded:", 9) == 0 || strncmp(p.fill, "file:", 5) == 0) { /* is it there, does it fit? */
        dkv_layout l = {0};
        dkv_inputs in = {0};
        rc = dkv_makeLayout(&p, &l, err);
        if (!rc) rc = dkv_allocInputs(&l, &in, err);
        if (!rc) rc = dkv_fillInputs(&p, &l, s->data_dir, &in, err);
        dkv_freeInputs(&in);
        dkv_freeLayout(&l);
    }
done:
    dkv_freeProblem(&p);
    return rc;
}

static bool isReplicated(const dkv_session *s, const dkv_item *item) { return s->replicated && s->replicated[item->kernel]; }

int dkv_precheckItems(const dkv_session *s, dkv_err *err) {
    double available = dkv_availableMemory();
    for (long i = 0; i < s->n_items; i++) {
        const dkv_item *item = &s->items[i];
        int rc = precheckLine(s, item->line, isReplicated(s, item), available, err);
        if (rc) return rc;
    }
    return 0;
}

double dkv_countWork(const dkv_session *s) {
    double flops = 0;
    for (long i = 0; i < s->n_items; i++) {
        dkv_problem p = {0};
        if (dkv_parseProblem(s->items[i].line, NULL, &p, NULL) == 0)
            flops += dkv_forwardFlops(&p) + (p.grad ? dkv_backwardFlops(&p) : 0);
        dkv_freeProblem(&p);
    }
    return flops;
}

/* What came of a start. */
static int judgeStart(const dkv_worker *w, dkv_outcome o, const dkv_kernel_spec *kernel, const char *why, dkv_err *err) {
    if (o == DKV_W_OK && w->memory == DUALKV_CUDA && !w->gpu.name[0])
        return dkv_fail(err, DKV_EHARNESS, "kernel '%.100s' needs a CUDA device, and there is none", kernel->text);
    if (o == DKV_W_OK) return 0;
    if (o == DKV_W_ERROR) return dkv_fail(err, DKV_EUSER, "%s", why);
    if (o == DKV_W_HARNESS || o == DKV_W_STOPPED) return dkv_fail(err, DKV_EHARNESS, "%s", why);
    return dkv_fail(err, DKV_EUSER, "kernel '%.100s' cannot be loaded: %s", kernel->text, why);
}

int dkv_warmKernels(const dkv_kernel_spec *kernels, int n, double timeout, bool *replicated, dkv_worker *warm, dkv_err *err) {
    for (int i = 0; i < n; i++) {
        dkv_worker one, *w = warm ? &warm[i] : &one;
        dkv_initWorker(w, &kernels[i], timeout);
        dkv_pinKernel(kernels[i].text);
        const dkv_outcome o = dkv_startWorker(w);
        char why[sizeof w->why];
        strcpy(why, w->why);
        if (!warm || kernels[i].kind == DKV_SPEC_ATTACHED) dkv_stopWorker(w); /* of an attached one there is one channel */
        if (replicated) replicated[i] = w->replicated != 0;
        const int rc = judgeStart(w, o, &kernels[i], why, err);
        if (rc && warm) dkv_stopWorkers(warm, i + 1);
        if (rc) return rc;
    }
    return 0;
}

int dkv_probeKernels(const dkv_kernel_spec *kernels, int n, double timeout, bool *replicated, dkv_err *err) {
    return dkv_warmKernels(kernels, n, timeout, replicated, NULL, err);
}

void dkv_stopWorkers(dkv_worker *w, int n) {
    for (int i = 0; i < n; i++) dkv_stopWorker(&w[i]);
}

double dkv_testLevel(const dkv_session *s) {
    if (s->level > 0) return s->level;
    return s->budget / ((double)(s->n_items > 0 ? s->n_items : 1) * DKV_N_OUTPUTS);
}

/* ---- the pool ---- */

typedef struct pool {
    dkv_session *s;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    long next, reported;   /* next case to start; next to report */
    int running;           /* threads */
    bool other_file;       /* a kernel's was changed */
    double reserved, room; /* bytes of running cases, and what there was */
    dkv_result **done;     /* finished, not reported */
    double level;
    int threads; /* of one oracle */
    int probes;  /* DKV_MAP_PROBES, counted down */
} pool;

/* Reports what is finished and in order. Called with the lock held. */
static void reportDone(pool *p) {
    dkv_session *s = p->s;
    while (p->reported < s->n_items && p->done[p->reported]) {
        dkv_result *r = p->done[p->reported];
        p->done[p->reported] = NULL;
        const bool again = r->changed && p->other_file; /* told before: one of the cases that did not come to their end */
        p->other_file |= r->changed;
        if (!r->stopped && !again) {
            s->counts[r->status]++;
            s->finished++;
            s->report(r, p->reported, s->n_items, s->arg);
        }
        free(r);
        p->reported++;
    }
}

/* The end of an interrupted run: what is finished behind a gap counts, too. */
static void reportRest(pool *p) {
    for (; p->reported < p->s->n_items; p->reported++)
        if (p->done[p->reported]) {
            reportDone(p);
            p->reported--; /* reportDone stands behind it */
        }
}

static void runItem(pool *p, long index, dkv_worker *workers, dkv_worker *peer) {
    dkv_session *s = p->s;
    const dkv_item *item = &s->items[index];
    dkv_problem problem = {0};
    dkv_err err = {0};
    dkv_case_options options = {.data_dir = s->data_dir,
                                .level = p->level,
                                .threads = p->threads,
                                .repeats = s->repeats,
                                .strength = s->strength,
                                .fits = s->fits ? &s->fits[item->kernel] : NULL,
                                .remote = s->remote,
                                .probes = &p->probes,
                                .peer = s->peer ? peer : NULL};
    dkv_result *r = calloc(1, sizeof *r);
    if (!r || dkv_parseProblem(item->line, dkv_knownFill, &problem, &err)) {
        free(r); /* parsed before: only memory can be missing, and there is no result to carry that */
        return;
    }
    double need = dkv_estimateCase(&problem, isReplicated(s, item));
    pthread_mutex_lock(&p->lock);
    while (p->reserved > 0 && p->reserved + need > p->room && !dkv_stopRequested) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&p->changed, &p->lock, &until);
    }
    p->reserved += need;
    pthread_mutex_unlock(&p->lock);
    dkv_runCase(&problem, &workers[item->kernel], &options, r);
    dkv_freeProblem(&problem);
    pthread_mutex_lock(&p->lock);
    p->reserved -= need;
    p->done[index] = r;
    if (r->changed) p->next = s->n_items;
    reportDone(p);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static void *serve(void *arg) {
    pool *p = arg;
    dkv_session *s = p->s;
    dkv_worker *workers = calloc((size_t)s->n_kernels + 1, sizeof *workers);
    pthread_mutex_lock(&p->lock);
    dkv_worker *warm = workers ? s->warm : NULL;
    if (warm) s->warm = NULL;
    pthread_mutex_unlock(&p->lock);
    for (int k = 0; workers && k < s->n_kernels; k++)
        if (warm) workers[k] = warm[k];
        else dkv_initWorker(&workers[k], &s->kernels[k], s->timeout);
    if (workers && s->peer) dkv_initWorker(&workers[s->n_kernels], s->peer, s->timeout);
    for (;;) {
        pthread_mutex_lock(&p->lock);
        long index = workers && !dkv_stopRequested && p->next < s->n_items ? p->next++ : -1;
        pthread_mutex_unlock(&p->lock);
        if (index < 0) break;
        runItem(p, index, workers, &workers[s->n_kernels]);
    }
    for (int k = 0; workers && k <= s->n_kernels; k++) dkv_stopWorker(&workers[k]);
    free(workers);
    pthread_mutex_lock(&p->lock);
    p->running--;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* Waits for the threads; after a signal no longer than two seconds (an oracle cannot be interrupted). */
static bool awaitThreads(pool *p) {
    int patience = 20;
    while (p->running > 0 && patience > 0) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 100000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
        pthread_cond_timedwait(&p->changed, &p->lock, &until);
        if (dkv_stopRequested) patience--;
    }
    return p->running == 0;
}

static bool threads_left;

bool dkv_threadsLeft(void) { return threads_left; }

void dkv_runSession(dkv_session *s) {
    int cores = dkv_hostCores(), jobs = s->jobs > 0 ? s->jobs : cores, started = 0;
    for (int k = 0; k < s->n_kernels; k++)
        if (s->kernels[k].kind == DKV_SPEC_ATTACHED) jobs = 1; /* there is one of it */
    if (jobs > s->n_items) jobs = s->n_items > 0 ? (int)s->n_items : 1;
    static pool p; /* static: threads that outlive an interrupted run still use it */
    p = (pool){.s = s, .room = dkv_availableMemory(), .level = dkv_testLevel(s), .probes = DKV_MAP_PROBES};
    p.threads = cores / jobs > 1 ? cores / jobs : 1;
    p.done = calloc((size_t)s->n_items + 1, sizeof *p.done);
    pthread_t *threads = calloc((size_t)jobs, sizeof *threads);
    pthread_mutex_init(&p.lock, NULL);
    pthread_cond_init(&p.changed, NULL);
    memset(s->counts, 0, sizeof s->counts);
    openblas_set_num_threads(1); /* parallel over cases and heads, not inside a product */
    pthread_mutex_lock(&p.lock);
    for (; p.done && threads && started < jobs; started++) {
        if (pthread_create(&threads[started], NULL, serve, &p) != 0) break;
        p.running++;
    }
    bool all = awaitThreads(&p);
    s->stopped = dkv_stopRequested != 0;
    reportRest(&p);
    pthread_mutex_unlock(&p.lock);
    threads_left = !all;
    if (all) {
        for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
        free(p.done);
    }
    if (s->finished < s->n_items && !s->stopped) s->counts[DKV_ST_HARNESS_ERROR] += s->n_items - s->finished;
    free(threads);
}
