/* lanes.c: see lanes.h. */
#include "lanes.h"

#include <cblas.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define THREADS_MAX 1024

int64_t dkv_countItems(const dkv_head *h) {
    dkv_block b = {.node = -1};
    int64_t n = 0;
    while (dkv_stepBlock(h, &b)) n += h->p->hkv;
    return n;
}

int dkv_countThreads(const dkv_ref_options *opt, int64_t n_items, int64_t bytes_each, int64_t room) {
    cpu_set_t cpus;
    int64_t n = opt ? opt->threads : 0, most = room / bytes_each;
    if (n <= 0) n = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    n = n > n_items ? n_items : n;
    n = n > most ? most : n;
    return n < 1 ? 1 : n > THREADS_MAX ? THREADS_MAX : (int)n;
}

int dkv_openLane(dkv_lanes *all, dkv_lane *t, const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                 dkv_err *err) {
    int code = dkv_openHead(p, l, in, 0, &t->h, err);
    t->all = all;
    t->item = t->block = -1;
    return code ? code : dkv_openBlock(&t->h, &t->b, err);
}

void dkv_closeLane(dkv_lane *t) {
    dkv_closeBlock(&t->b);
    dkv_closeHead(&t->h);
}

static void *runLane(void *arg) {
    dkv_lane *t = arg;
    dkv_lanes *w = t->all;
    int32_t hkv = t->h.p->hkv;
    for (;;) {
        pthread_mutex_lock(&w->lock);
        t->item = w->next < w->n_items ? w->next++ : -1;
        t->done = -1;
        if (t->item >= 0) t->h.kvh = (int32_t)(t->item % hkv);
        pthread_cond_broadcast(&w->moved);
        pthread_mutex_unlock(&w->lock);
        if (t->item < 0) return NULL;
        for (; t->block < t->item / hkv; t->block++) (void)dkv_stepBlock(&t->h, &t->b);
        dkv_loadBlock(&t->h, &t->b);
        w->run(t);
    }
}

void dkv_awaitTurn(dkv_lane *t, int64_t row, int64_t end) {
    dkv_lanes *w = t->all;
    bool wait = true;
    pthread_mutex_lock(&w->lock);
    t->done = row;
    pthread_cond_broadcast(&w->moved);
    while (wait) {
        wait = false;
        for (int i = 0; i < w->threads; i++) {
            const dkv_lane *o = w->lane[i];
            if (o->item >= 0 && o->item < t->item && o->h.kvh == t->h.kvh && o->done < end) wait = true;
        }
        if (wait) pthread_cond_wait(&w->moved, &w->lock);
    }
    pthread_mutex_unlock(&w->lock);
}

void dkv_runThreads(int n, void *(*run)(void *), void *const *arg) {
    pthread_t thread[THREADS_MAX];
    int had = openblas_get_num_threads(), started = 1;
    openblas_set_num_threads(1);
    while (started < n && pthread_create(&thread[started], NULL, run, arg[started]) == 0) started++;
    run(arg[0]);
    for (int i = 1; i < started; i++) pthread_join(thread[i], NULL);
    openblas_set_num_threads(had);
}

void dkv_runLanes(dkv_lanes *w) {
    w->next = 0;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->moved, NULL);
    dkv_runThreads(w->threads, runLane, (void *const *)w->lane);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->moved);
}
