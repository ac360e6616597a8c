#include "campaign.h"

#include <cblas.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../ref/clock.h"
#include "../verify/version.h"

typedef struct pool {
    dkv_campaign *c;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t next;  /* case number */
    uint64_t limit; /* no number from here on is ours, as far as is known */
    int running;    /* cases: one that is refused moves the limit */
    double end;     /* monotonic; INFINITY: none */
    int confirm;    /* left */
    bool over;
    int threads; /* of one oracle */
} pool;

/* sum over n >= 0 of 1/((n+2) ln^2(n+2)) = 2.1097...: below 2.2. */
double dkv_fuzzLevel(double budget, uint64_t n) {
    double m = (double)n + 2, l = log(m);
    return budget / (2.2 * DKV_N_OUTPUTS * m * l * l);
}

void dkv_runAlone(const dkv_kernel_spec *kernel, const dkv_problem *p, const dkv_case_options *options,
                  double timeout, dkv_result *out) {
    dkv_worker w;
    dkv_initWorker(&w, kernel, timeout);
    dkv_runCase(p, &w, options, out);
    dkv_stopWorker(&w);
}

static bool hasBit(const uint8_t *bits, uint64_t n) { return bits && bits[n / 8] >> (n % 8) & 1; }

/* One more number, for one that was refused. Called with the lock held. */
static void moveLimit(pool *p) {
    const dkv_campaign *c = p->c;
    if (c->cases && p->limit < c->first + c->cases * DKV_TRIES) p->limit++;
    else p->c->short_of |= c->cases > 0;
}

/* At the limit: until a running case moves it, or none is left. Called with the lock held. */
static void awaitLimit(pool *p) {
    struct timespec until;
    p->over |= p->running == 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 100000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    if (!p->over) pthread_cond_timedwait(&p->changed, &p->lock, &until); /* a signal wakes nobody */
}

/* The next case that is not done, and ours or to be asked about; false: no more. */
static bool takeNumber(pool *p, uint64_t *n) {
    const dkv_campaign *c = p->c;
    bool found = false;
    pthread_mutex_lock(&p->lock);
    while (!p->over && !found) {
        p->over = dkv_stopRequested || dkv_now() > p->end;
        if (p->over) break;
        if (c->cases && p->next >= p->limit) {
            awaitLimit(p);
            continue;
        }
        *n = p->next++;
        if (*n < c->n_done && hasBit(c->done, *n)) {
            if (hasBit(c->refused, *n)) moveLimit(p);
            continue;
        }
        found = c->cases || *n % c->shards == c->shard;
    }
    p->running += found;
    pthread_mutex_unlock(&p->lock);
    return found;
}

static void giveNumber(pool *p, bool refused) {
    pthread_mutex_lock(&p->lock);
    p->running--;
    if (refused) moveLimit(p);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static void fail(pool *p, const dkv_err *err) {
    pthread_mutex_lock(&p->lock);
    if (!p->c->trouble.code) p->c->trouble = *err;
    p->over = true;
    pthread_mutex_unlock(&p->lock);
}

/* Is the defect there in a fresh process? */
static int confirmAlone(pool *p, const dkv_problem *problem, const dkv_case_options *options,
                        const dkv_result *r) {
    pthread_mutex_lock(&p->lock);
    bool wanted = p->confirm > 0;
    p->confirm -= wanted;
    pthread_mutex_unlock(&p->lock);
    dkv_result *again = wanted ? malloc(sizeof *again) : NULL;
    if (!again) return -1;
    dkv_case_options plain = *options;
    plain.peer = NULL;
    dkv_runAlone(p->c->kernel, problem, &plain, p->c->timeout, again);
    int alone = again->stopped || again->changed ? -1 : dkv_statusRow(again->status)->defect && again->status == r->status;
    free(again);
    return alone;
}

/* Runs a case of ours, or asks about another's. Was it refused? */
static bool runNumber(pool *p, uint64_t n, dkv_worker *w, dkv_worker *peer, char before[DKV_LINE_MAX + 1]) {
    dkv_campaign *c = p->c;
    const bool ours = n % c->shards == c->shard;
    dkv_case_options options = {.data_dir = c->data_dir,
                                .level = c->level > 0 ? c->level : dkv_fuzzLevel(c->budget, n),
                                .threads = p->threads,
                                .repeats = c->repeats,
                                .ask = !ours,
                                .fits = c->fits,
                                .remote = c->remote,
                                .peer = c->peer ? peer : NULL};
    dkv_problem problem = {0};
    dkv_err err = {0};
    dkv_result *r = malloc(sizeof *r);
    if (!r) dkv_fail(&err, DKV_EHARNESS, "out of memory for a result");
    if (!r || dkv_sampleCase(c->sampler, n, &problem, &err)) {
        fail(p, &err);
        free(r);
        return false;
    }
    dkv_runCase(&problem, w, &options, r);
    if (r->changed) {
        dkv_fail(&err, DKV_EHARNESS, "case %" PRIu64 " and those after it: %.400s", n, r->why);
        fail(p, &err);
    }
    dkv_fuzzed f = {n, r, -1, before};
    if (ours && !r->stopped && dkv_statusRow(r->status)->defect) f.alone = confirmAlone(p, &problem, &options, r);
    dkv_freeProblem(&problem);
    pthread_mutex_lock(&p->lock);
    if (ours && !r->stopped && !r->changed) {
        c->counts[r->status]++;
        c->finished++;
        if (c->report(&f, c->arg)) p->over = true;
    }
    pthread_mutex_unlock(&p->lock);
    if (ours) strcpy(before, r->line);
    const bool refused = !r->stopped && r->status == DKV_ST_UNSUPPORTED;
    free(r);
    return refused;
}

static void *serve(void *arg) {
    pool *p = arg;
    dkv_worker w, peer;
    char before[DKV_LINE_MAX + 1] = "";
    uint64_t n;
    dkv_initWorker(&w, p->c->kernel, p->c->timeout);
    dkv_initWorker(&peer, p->c->peer ? p->c->peer : p->c->kernel, p->c->timeout);
    while (takeNumber(p, &n)) giveNumber(p, runNumber(p, n, &w, &peer, before));
    dkv_stopWorker(&w);
    dkv_stopWorker(&peer);
    return NULL;
}

void dkv_runCampaign(dkv_campaign *c) {
    int cores = dkv_hostCores(), jobs = c->jobs > 0 ? c->jobs : cores, started = 0;
    pool p = {.c = c, .next = c->first, .limit = c->first + c->cases, .confirm = c->confirm};
    pthread_t *threads = calloc((size_t)jobs, sizeof *threads);
    p.end = c->seconds > 0 ? dkv_now() + c->seconds : INFINITY;
    p.threads = cores / jobs > 1 ? cores / jobs : 1;
    memset(c->counts, 0, sizeof c->counts);
    c->finished = 0;
    c->short_of = false;
    openblas_set_num_threads(1); /* parallel over cases and heads, not inside a product */
    pthread_mutex_init(&p.lock, NULL);
    pthread_cond_init(&p.changed, NULL);
    for (; threads && started < jobs; started++)
        if (pthread_create(&threads[started], NULL, serve, &p) != 0) break;
    if (!started) dkv_fail(&c->trouble, DKV_EHARNESS, "cannot start a thread");
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    c->stopped = dkv_stopRequested != 0;
    pthread_cond_destroy(&p.changed);
    pthread_mutex_destroy(&p.lock);
    free(threads);
}
