#include "spans.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

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

typedef struct copying {
    char *to;
    const char *from;
} copying;

static void copySpan(int64_t first, int64_t end, int span, void *arg) {
    const copying *c = arg;
    (void)span;
    memcpy(c->to + first, c->from + first, (size_t)(end - first));
}

void dkv_copySpans(void *to, const void *from, int64_t bytes) {
    dkv_eachSpan(bytes, (double)bytes / 4, copySpan, &(copying){to, from});
}

/* ---- sorting ---- */

#define SORT_ALONE 100000 /* elements up to which one thread sorts */
#define STEPS 16          /* of work for each element */

typedef struct sorting {
    char *from, *to;
    int64_t n, width; /* spans in a run that is sorted */
    size_t size;
    int (*compare)(const void *, const void *);
} sorting;

/* Where span i begins, as dkv_eachSpan cuts. */
static int64_t beginOf(int64_t n, int64_t i) {
    const int64_t each = n / DKV_SPANS, more = n % DKV_SPANS;
    return i >= DKV_SPANS ? n : i * each + (i < more ? i : more);
}

static void sortSpan(int64_t first, int64_t end, int span, void *arg) {
    const sorting *s = arg;
    (void)span;
    qsort(s->from + (size_t)first * s->size, (size_t)(end - first), s->size, s->compare);
}

/* Pairs of runs, merged from one array into the other. */
static void mergePairs(int64_t first, int64_t end, int span, void *arg) {
    const sorting *s = arg;
    const size_t size = s->size;
    (void)span;
    for (int64_t pair = first; pair < end; pair++) {
        const int64_t begin = 2 * pair * s->width;
        const char *a = s->from + (size_t)beginOf(s->n, begin) * size, *middle = s->from + (size_t)beginOf(s->n, begin + s->width) * size;
        const char *b = middle, *last = s->from + (size_t)beginOf(s->n, begin + 2 * s->width) * size;
        char *to = s->to + (a - s->from);
        for (; a < middle && b < last; to += size) {
            const char **take = s->compare(b, a) < 0 ? &b : &a;
            memcpy(to, *take, size);
            *take += size;
        }
        memcpy(to, a, (size_t)(middle - a));
        memcpy(to + (middle - a), b, (size_t)(last - b));
    }
}

void dkv_sortSpans(void *base, int64_t n, size_t size, int (*compare)(const void *, const void *)) {
    char *other = n > SORT_ALONE ? malloc((size_t)n * size) : NULL;
    sorting s = {base, other, n, 1, size, compare};
    if (!other) {
        if (n > 1) qsort(base, (size_t)n, size, compare);
        return;
    }
    dkv_eachSpan(n, STEPS * (double)n, sortSpan, &s);
    for (; s.width < DKV_SPANS; s.width *= 2) {
        dkv_eachSpan(DKV_SPANS / (2 * s.width), STEPS * (double)n, mergePairs, &s);
        char *const was = s.from;
        s.from = s.to;
        s.to = was;
    }
    if (s.from != base) memcpy(base, s.from, (size_t)n * size);
    free(other);
}
