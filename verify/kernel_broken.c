#include "kernel_broken.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kernel.h"

typedef struct broken {
    void *ref;
    const dkv_breakage *how;
    uint64_t launches;
    int calls; /* forward launches so far */
    char *old; /* O of an earlier launch */
    size_t old_bytes;
} broken;

#define SMALL "shape=5+2x3 heads=2:1 dim=8 dtype=bf16"
#define PADDED SMALL " layout=padded"

static const dkv_breakage table[] = {
    {"none", "does all of it right", SMALL, DKV_ST_PASSED},
    {"chatty", "is right, and prints a megabyte", SMALL, DKV_ST_PASSED},
    {"crash", "dereferences NULL in forward", SMALL, DKV_ST_CRASHED},
    {"abort", "aborts in backward, after saying why", SMALL, DKV_ST_CRASHED},
    {"exit", "calls exit(0) in forward", SMALL, DKV_ST_CRASHED},
    {"garbage", "writes into every open file descriptor", SMALL, DKV_ST_CRASHED},
    {"close", "closes every open file descriptor", SMALL, DKV_ST_CRASHED},
    {"hang", "never returns", SMALL, DKV_ST_TIMEOUT},
    {"error", "reports an error", SMALL, DKV_ST_NOT_RUN},
    {"fallback", "is right, but launches nothing of its own", SMALL, DKV_ST_NOT_RUN},
    {"refuse", "refuses every problem", SMALL, DKV_ST_UNSUPPORTED},
    {"babble", "refuses in several lines, none of them text", SMALL, DKV_ST_UNSUPPORTED},
    {"hungry", "wants a workspace of 2^45 bytes", SMALL, DKV_ST_HARNESS_ERROR},
    {"nothing", "returns success and writes nothing", SMALL, DKV_ST_UNWRITTEN},
    {"tail", "leaves the last row of dQ unwritten", SMALL, DKV_ST_UNWRITTEN},
    {"zeros", "writes zeros into every output", SMALL, DKV_ST_FAILED},
    {"nan", "leaves one NaN in O", SMALL, DKV_ST_FAILED},
    {"stale", "returns the O of its first launch again", SMALL " run=aba", DKV_ST_FAILED},
    {"mutates", "changes one bit of K", SMALL, DKV_ST_INPUT_MUTATED},
    {"rewrites", "changes LSE in backward", SMALL, DKV_ST_INPUT_MUTATED},
    {"after", "writes one element past the end of O", SMALL, DKV_ST_OUT_OF_BOUNDS},
    {"before", "writes one element before LSE", SMALL, DKV_ST_OUT_OF_BOUNDS},
    {"slack", "writes between the rows of O", PADDED, DKV_ST_OUT_OF_BOUNDS},
    {"maxima", "takes the longest lengths for facts: fails the last row where none is that long", SMALL, DKV_ST_FAILED},
    {"flaky", "promises repeatable bits, changes the last one of dV at each call", SMALL,
     DKV_ST_NONDETERMINISTIC},
};

const dkv_breakage *dkv_listBreakage(int i) {
    return i >= 0 && i < (int)(sizeof table / sizeof table[0]) ? &table[i] : NULL;
}

static void *openBroken(const char *options, char *err, size_t n) {
    broken *b = calloc(1, sizeof *b);
    for (size_t i = 0; b && i < sizeof table / sizeof table[0]; i++)
        if (strncmp(options, "how=", 4) == 0 && strcmp(options + 4, table[i].how) == 0) b->how = &table[i];
    if (b && b->how) b->ref = dkv_refKernel.open("", err, n);
    if (b && b->ref) return b;
    if (b && !b->how) snprintf(err, n, "wants how=WORD, not '%s'", options);
    free(b);
    return NULL;
}

static void closeBroken(void *self) {
    broken *b = self;
    dkv_refKernel.close(b->ref);
    free(b->old);
    free(b);
}

static bool is(const broken *b, const char *how) { return strcmp(b->how->how, how) == 0; }

static size_t workspace(void *self, const dualkv_problem *p, int backward) {
    (void)p, (void)backward;
    return is(self, "hungry") ? (size_t)1 << 45 : 0;
}

static const char *refuses(void *self, const dualkv_problem *p) {
    (void)p;
    if (is(self, "babble")) return "it\nrefuses\x1b[31m \xff";
    return is(self, "refuse") ? "it refuses everything" : NULL;
}

static void arithmetic(void *self, const dualkv_problem *p, dualkv_arithmetic *a) {
    dkv_refKernel.arithmetic(((broken *)self)->ref, p, a);
}

static int deterministic(void *self, const dualkv_problem *p) {
    (void)self;
    (void)p;
    return 1;
}

static uint64_t launches(void *self) { return ((broken *)self)->launches; }

static char *elementAt(const dualkv_tensor *t, size_t elt, int64_t row, int64_t head, int64_t dim) {
    return (char *)t->data + (row * t->row + head * t->head + dim) * (int64_t)elt;
}

static void setRows(const dualkv_tensor *t, size_t elt, int64_t rows, int64_t heads, int64_t dim, int byte) {
    for (int64_t i = 0; t->data && i < rows; i++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t c = 0; c < dim; c++) memset(elementAt(t, elt, i, h, c), byte, elt);
}

static void zeros(const dualkv_launch *l, size_t elt, int backward) {
    const dualkv_problem *p = l->problem;
    if (backward) {
        setRows(&l->dq, elt, p->tq, p->hq, p->dqk, 0);
        setRows(&l->dk, elt, p->tk, p->hkv, p->dqk, 0);
        setRows(&l->dv, elt, p->tk, p->hkv, p->dv, 0);
    } else {
        setRows(&l->o, elt, p->tq, p->hq, p->dv, 0);
        setRows(&l->lse, 4, p->tq, p->hq, 1, 0);
    }
}

/* What never comes back, or not in peace. */
static void misbehave(broken *b, int backward) {
    static const char noise[] = "not a message of the harness";
    struct rlimit files;
    if (is(b, "crash") && !backward) *(volatile int *)NULL = 1;
    if (is(b, "abort") && backward) {
        fprintf(stderr, "the accumulator is empty\n");
        abort();
    }
    if (is(b, "exit")) exit(0);
    while (is(b, "hang")) pause();
    for (int i = 0; is(b, "chatty") && i < 16384; i++)
        puts("chatter chatter chatter chatter chatter chatter chatter chatter");
    if (!is(b, "garbage") && !is(b, "close")) return;
    int most = getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < 1024 ? (int)files.rlim_cur : 1024;
    for (int fd = 3; fd < most; fd++)
        if (is(b, "close")) close(fd);
        else if (write(fd, noise, sizeof noise) < 0) continue;
}

/* Is no segment as long as the problem says? */
static bool overstated(const dualkv_problem *p) {
    int64_t longest = 0;
    for (int32_t i = 0; i < p->n_segments; i++)
        if (p->segments[i].q_len > longest) longest = p->segments[i].q_len;
    return p->max_q_len > longest;
}

/* Damage done after the right result is there. */
static void spoil(broken *b, const dualkv_launch *l, size_t elt, int backward) {
    const dualkv_problem *p = l->problem;
    if (is(b, "zeros")) zeros(l, elt, backward);
    if (is(b, "mutates") && !backward) *elementAt(&l->k, elt, 0, 0, 0) ^= 1;
    if (is(b, "rewrites") && backward) *elementAt(&l->lse, 4, 0, 0, 0) ^= 1;
    if (is(b, "nan") && !backward) memset(elementAt(&l->o, elt, p->tq - 1, 0, 0), 0xFF, elt);
    if (is(b, "after") && !backward) memset(elementAt(&l->o, elt, p->tq - 1, p->hq - 1, p->dv), 0, elt);
    if (is(b, "before") && !backward) memset((char *)l->lse.data - 4, 0, 4);
    if (is(b, "slack") && !backward) memset(elementAt(&l->o, elt, 0, p->hq - 1, p->dv), 0, elt);
    if (is(b, "flaky") && backward) *elementAt(&l->dv, elt, 0, 0, 0) ^= (char)(~b->calls & 1);
    if (is(b, "maxima") && !backward && overstated(p)) memset(elementAt(&l->o, elt, p->tq - 1, 0, 0), 0, elt);
    if (is(b, "tail") && backward) /* poison again: copied from the guard before Q */
        for (int64_t h = 0; h < p->hq; h++)
            for (int64_t c = 0; c < p->dqk; c++)
                memcpy(elementAt(&l->dq, elt, p->tq - 1, h, c), (char *)l->q.data - elt, elt);
}

/* Keeps the first O, gives it again whenever the sizes allow. */
static void reuse(broken *b, const dualkv_launch *l, size_t elt) {
    size_t bytes = (size_t)(l->problem->tq * l->o.row) * elt;
    if (!b->old && (b->old = malloc(bytes))) {
        memcpy(b->old, l->o.data, bytes);
        b->old_bytes = bytes;
    } else if (b->old) {
        memcpy(l->o.data, b->old, bytes < b->old_bytes ? bytes : b->old_bytes);
    }
}

static int run(void *self, const dualkv_launch *l, int backward, char *err, size_t n) {
    broken *b = self;
    size_t elt = l->problem->dtype == DUALKV_FP32 ? 4 : 2;
    int rc = 0;
    b->calls += !backward;
    misbehave(b, backward);
    if (is(b, "error")) {
        snprintf(err, n, "the grid is too large");
        return 7;
    }
    if (!is(b, "nothing"))
        rc = (backward ? dkv_refKernel.backward : dkv_refKernel.forward)(b->ref, l, err, n);
    if (!rc) spoil(b, l, elt, backward);
    if (!rc && is(b, "stale") && !backward) reuse(b, l, elt);
    b->launches += !rc && !is(b, "fallback");
    return rc;
}

static int forward(void *self, const dualkv_launch *l, char *err, size_t n) {
    return run(self, l, 0, err, n);
}
static int backward(void *self, const dualkv_launch *l, char *err, size_t n) {
    return run(self, l, 1, err, n);
}

const dualkv_kernel dkv_brokenKernel = {.size = sizeof(dualkv_kernel),
                                        .abi = DUALKV_ABI,
                                        .name = "broken",
                                        .doc = "broken on purpose, +how=WORD: for selftest",
                                        .memory = DUALKV_HOST,
                                        .alignment = 1,
                                        .open = openBroken,
                                        .close = closeBroken,
                                        .refuses = refuses,
                                        .workspace = workspace,
                                        .arithmetic = arithmetic,
                                        .deterministic = deterministic,
                                        .forward = forward,
                                        .backward = backward,
                                        .launches = launches};
