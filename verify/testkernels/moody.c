/* moody.c: a kernel that crashes now and then: in two processes of three, on problems of more than five query
 * rows; the rest it refuses. For the shrinker, which must cope. */
#include <stdlib.h>
#include <time.h>

#include "dualkv_kernel.h"

static int moody(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return t.tv_nsec / 1000 % 3 != 0;
}

static void *openIt(const char *options, char *err, size_t n) {
    (void)options, (void)err, (void)n;
    int *mood = malloc(sizeof *mood);
    if (mood) *mood = moody();
    return mood;
}

static const char *refuses(void *self, const dualkv_problem *p) {
    return !*(int *)self ? "not today" : p->tq <= 5 ? "too small" : NULL;
}

static int launch(void *self, const dualkv_launch *l, char *err, size_t n) {
    (void)self, (void)l, (void)err, (void)n;
    abort();
}

static const dualkv_kernel kernel = {.size = sizeof kernel,
                                     .abi = DUALKV_ABI,
                                     .name = "moody",
                                     .doc = "crashes now and then",
                                     .memory = DUALKV_HOST,
                                     .alignment = 2,
                                     .open = openIt,
                                     .close = free,
                                     .refuses = refuses,
                                     .forward = launch,
                                     .backward = launch};

const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count);
const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count) {
    static const dualkv_kernel *const list[] = {&kernel};
    *count = 1;
    return abi == DUALKV_ABI ? list : NULL;
}
