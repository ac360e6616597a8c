#include "spans.h"

#include <stdatomic.h>

#include "../ref/lanes.h"
#include "version.h"

#define ELEMENTS_A_THREAD 1e6

typedef struct loop {
    int64_t n;
    dkv_span_fn f;
    void *arg;
    atomic_int next;
} loop;

static void *work(void *arg) {
    loop *l = arg;
    for (int i; (i = atomic_fetch_add(&l->next, 1)) < DKV_SPANS;) {
        const int64_t each = l->n / DKV_SPANS, more = l->n % DKV_SPANS;
        const int64_t first = i * each + (i < more ? i : more);
        l->f(first, first + each + (i < more), i, l->arg);
    }
    return NULL;
}

void dkv_eachSpan(int64_t n, double elements, dkv_span_fn f, void *arg) {
    loop l = {.n = n, .f = f, .arg = arg};
    void *all[DKV_SPANS];
    int threads = dkv_hostCores();
    if (threads > elements / ELEMENTS_A_THREAD) threads = (int)(elements / ELEMENTS_A_THREAD);
    if (threads > DKV_SPANS) threads = DKV_SPANS;
    for (int i = 0; i < threads; i++) all[i] = &l;
    if (threads > 1) dkv_runThreads(threads, work, all);
    work(&l);
}
