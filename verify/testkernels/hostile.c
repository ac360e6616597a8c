/* hostile.c: shared objects that must be refused with one line: HOW is one of the words below. */
#include <stdlib.h>
#include <string.h>

#include "dualkv_kernel.h"

enum { none, abi, size, forward, open, list, empty, null, crash, name };

static void *openInstance(const char *options, char *err, size_t n) {
    static int instance;
    (void)options;
    if (HOW != open) return &instance;
    strncpy(err, "no such device", n);
    return NULL;
}
static void closeInstance(void *self) { (void)self; }
static const char *refuses(void *self, const dualkv_problem *p) {
    (void)self, (void)p;
    return NULL;
}
static int run(void *self, const dualkv_launch *l, char *err, size_t n) {
    (void)self, (void)l, (void)err, (void)n;
    return 0;
}

static const dualkv_kernel table = {.size = HOW == size ? 8 : sizeof(dualkv_kernel),
                                    .abi = HOW == abi ? DUALKV_ABI + 1 : DUALKV_ABI,
                                    .name = HOW == name ? NULL : "hostile",
                                    .alignment = 1,
                                    .open = openInstance,
                                    .close = closeInstance,
                                    .refuses = refuses,
                                    .forward = HOW == forward ? NULL : run};

#define NONE_none 1
#define PASTE(a, b) a##b
#define IS_NONE(how) PASTE(NONE_, how)
#if IS_NONE(HOW)
#define dualkv_kernels dualkv_kernels_misspelt
#endif

const dualkv_kernel *const *dualkv_kernels(uint32_t version, int *count);
const dualkv_kernel *const *dualkv_kernels(uint32_t version, int *count) {
    static const dualkv_kernel *const tables[] = {&table}, *const nulls[] = {NULL};
    (void)version;
    if (HOW == crash) abort();
    *count = HOW == empty ? 0 : 1;
    return HOW == list ? NULL : HOW == null ? nulls : tables;
}
