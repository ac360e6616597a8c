#include "kernel_broken.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include "kernel.h"

typedef struct broken {
    void *ref;
    const dkv_breakage *how;
    uint64_t launches;
    int calls; /* forward launches so far */
    char *old; /* O of an earlier launch */
    size_t old_bytes;
    const void *seen;     /* "address": that Q was at then */
    uint64_t seen_bits;   /* "content": of the first bytes */
} broken;

#define SMALL "shape=5+2x3 heads=2:1 dim=8 dtype=bf16"
#define PADDED SMALL " layout=padded"

static const dkv_breakage table[] = {
    {"none", "does all of it right", SMALL, DKV_ST_PASSED, 0},
    {"chatty", "is right, and prints a megabyte", SMALL, DKV_ST_PASSED, 0},
    {"slow", "is right, and sleeps a little less than it may", SMALL, DKV_ST_PASSED, 3},
    {"orphan", "is right, and leaves a process in a session of its own", SMALL, DKV_ST_PASSED, 0},
    {"peek", "is right, unless the coordinator's memory can be read", SMALL, DKV_ST_PASSED, 0},
    {"crash", "dereferences NULL in forward", SMALL, DKV_ST_CRASHED, 0},
    {"abort", "aborts in backward, after saying why", SMALL, DKV_ST_CRASHED, 0},
    {"exit", "calls exit(0) in forward", SMALL, DKV_ST_CRASHED, 0},
    {"_exit", "calls _exit(0) in backward", SMALL, DKV_ST_CRASHED, 0},
    {"vanish", "calls exit(0), and leaves a process in a session of its own", SMALL, DKV_ST_CRASHED, 0},
    {"garbage", "writes into every open file descriptor", SMALL, DKV_ST_CRASHED, 0},
    {"close", "closes every open file descriptor", SMALL, DKV_ST_CRASHED, 0},
    {"hang", "never returns", SMALL, DKV_ST_TIMEOUT, 0.4},
    {"stop", "stops itself (SIGSTOP)", SMALL, DKV_ST_TIMEOUT, 0.4},
    {"error", "reports an error", SMALL, DKV_ST_NOT_RUN, 0},
    {"greedy", "allocates until it is refused, and says so", SMALL, DKV_ST_NOT_RUN, 0},
    {"fallback", "is right, but launches nothing of its own", SMALL, DKV_ST_NOT_RUN, 0},
    {"refuse", "refuses every problem", SMALL, DKV_ST_UNSUPPORTED, 0},
    {"babble", "refuses in several lines, none of them text", SMALL, DKV_ST_UNSUPPORTED, 0},
    {"hungry", "wants a workspace of 2^45 bytes", SMALL, DKV_ST_HARNESS_ERROR, 0},
    {"nothing", "returns success and writes nothing", SMALL, DKV_ST_UNWRITTEN, 0},
    {"tail", "leaves the last row of dQ unwritten", SMALL, DKV_ST_UNWRITTEN, 0},
    {"late", "writes the last row of O a second after it returned", SMALL " grad=off", DKV_ST_UNWRITTEN, 0},
    {"zeros", "writes zeros into every output", SMALL, DKV_ST_FAILED, 0},
    {"copy", "writes its inputs into the outputs: Q, K, V, dO", SMALL, DKV_ST_FAILED, 0},
    {"nan", "leaves one NaN in O", SMALL, DKV_ST_FAILED, 0},
    {"workspace", "takes its workspace for zeroed", SMALL, DKV_ST_FAILED, 0},
    {"stale", "returns the O of its first launch again", SMALL " run=aba", DKV_ST_FAILED, 0},
    {"previous", "returns the outputs of the launch before", SMALL, DKV_ST_FAILED, 0},
    {"address", "remembers O by the address of Q", SMALL, DKV_ST_FAILED, 0},
    {"content", "remembers O by the first bytes of Q, K and V", "shape=5+2x3 heads=2:2 dim=32", DKV_ST_FAILED, 0},
    {"mutates", "changes one bit of K", SMALL, DKV_ST_INPUT_MUTATED, 0},
    {"mutates-do", "changes one bit of dO", SMALL, DKV_ST_INPUT_MUTATED, 0},
    {"rewrites", "changes LSE in backward", SMALL, DKV_ST_INPUT_MUTATED, 0},
    {"after", "writes one element past the end of O", SMALL, DKV_ST_OUT_OF_BOUNDS, 0},
    {"before", "writes one element before LSE", SMALL, DKV_ST_OUT_OF_BOUNDS, 0},
    {"slack", "writes between the rows of O", PADDED, DKV_ST_OUT_OF_BOUNDS, 0},
    {"maxima", "takes the longest lengths for facts: fails the last row where none is that long", SMALL, DKV_ST_FAILED,
     0},
    {"flaky", "promises repeatable bits, changes the last one of dV at each call", SMALL, DKV_ST_NONDETERMINISTIC, 0},
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
    return is(self, "hungry") ? (size_t)1 << 45 : is(self, "workspace") ? 64 : 0;
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

/* The inputs as outputs, as far as they go. */
static void copyInputs(const dualkv_launch *l, size_t elt, int backward) {
    const dualkv_problem *p = l->problem;
    int64_t qo = p->dqk < p->dv ? p->dqk : p->dv;
    for (int64_t t = 0; t < p->tq; t++)
        for (int64_t h = 0; h < p->hq; h++) {
            if (!backward) memcpy(elementAt(&l->o, elt, t, h, 0), elementAt(&l->q, elt, t, h, 0), (size_t)qo * elt);
            else memcpy(elementAt(&l->dq, elt, t, h, 0), elementAt(&l->d_o, elt, t, h, 0), (size_t)qo * elt);
        }
    for (int64_t t = 0; t < p->tk && backward; t++)
        for (int64_t h = 0; h < p->hkv; h++) {
            memcpy(elementAt(&l->dk, elt, t, h, 0), elementAt(&l->k, elt, t, h, 0), (size_t)p->dqk * elt);
            memcpy(elementAt(&l->dv, elt, t, h, 0), elementAt(&l->v, elt, t, h, 0), (size_t)p->dv * elt);
        }
}

/* A process that no signal to the kernel's process group reaches. Its number is the last thing printed. */
static void leaveProcess(void) {
    pid_t child = fork();
    if (child == 0) {
        setsid();
        for (;;) pause();
    }
    printf("orphan %d\n", (int)child);
    fflush(stdout);
}

#ifndef __SANITIZE_ADDRESS__
/* Can the parent's memory be read, by either way? (Where it lies may be seen; what is in it must not.) */
static bool canPeek(void) {
    char path[64];
    unsigned long from = 0;
    char byte;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)getppid());
    FILE *maps = fopen(path, "re");
    if (maps && fscanf(maps, "%lx", &from) != 1) from = 0;
    if (maps) fclose(maps);
    snprintf(path, sizeof path, "/proc/%d/mem", (int)getppid());
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool can = fd >= 0 && pread(fd, &byte, 1, (off_t)from) == 1;
    if (fd >= 0) close(fd);
    struct iovec here = {&byte, 1}, there = {(void *)from, 1};
    return can || process_vm_readv(getppid(), &here, 1, &there, 1, 0) == 1;
}
#endif

/* Until malloc says no; none of it is touched. */
static int64_t takeAll(void) {
#ifdef __SANITIZE_ADDRESS__ /* a sanitizer's malloc takes real memory, and ends the process */
    return 0;
#endif
    enum { PART = 256 << 20 };
    void *first = NULL, **part;
    int64_t parts = 0;
    for (; (part = malloc(PART)); parts++) {
        *part = first;
        first = part;
    }
    while (first) {
        part = first;
        first = *part;
        free(part);
    }
    return parts;
}

static void *writeLater(void *at) {
    sleep(1);
    *(volatile char *)at = 0;
    return NULL;
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
    if (is(b, "_exit") && backward) _exit(0);
    if (is(b, "orphan") && b->calls == 1 && !backward) leaveProcess();
    if (is(b, "vanish")) {
        leaveProcess();
        exit(0);
    }
    if (is(b, "stop")) raise(SIGSTOP);
    if (is(b, "slow") && b->calls == 1 && !backward) usleep(2000000);
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

/* The last row is poison again, as in "tail", and a thread is on its way. */
static void leaveForLater(const dualkv_launch *l, size_t elt) {
    const dualkv_problem *p = l->problem;
    pthread_t thread;
    for (int64_t h = 0; h < p->hq; h++)
        for (int64_t c = 0; c < p->dv; c++) memcpy(elementAt(&l->o, elt, p->tq - 1, h, c), (char *)l->q.data - elt, elt);
    if (pthread_create(&thread, NULL, writeLater, elementAt(&l->o, elt, p->tq - 1, 0, 0)) == 0) pthread_detach(thread);
}

/* Damage done after the right result is there. */
static void spoil(broken *b, const dualkv_launch *l, size_t elt, int backward) {
    const dualkv_problem *p = l->problem;
    if (is(b, "zeros")) zeros(l, elt, backward);
    if (is(b, "copy")) copyInputs(l, elt, backward);
    if (is(b, "workspace") && !backward) memcpy(elementAt(&l->o, elt, 0, 0, 0), l->workspace, elt);
    if (is(b, "mutates-do") && backward) *elementAt(&l->d_o, elt, 0, 0, 0) ^= 1;
    if (is(b, "late") && !backward) leaveForLater(l, elt);
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

static void keep(broken *b, const void *o, size_t bytes) {
    free(b->old);
    b->old = malloc(bytes);
    b->old_bytes = b->old ? bytes : 0;
    if (b->old) memcpy(b->old, o, bytes);
}

/* Bits of the first 64 bytes of Q, K and V (of contiguous tensors that have them). */
static uint64_t firstBits(const dualkv_launch *l) {
    const void *const at[] = {l->q.data, l->k.data, l->v.data};
    uint64_t h = 0xcbf29ce484222325ull;
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 64; i++) h = (h ^ ((const uint8_t *)at[t])[i]) * 0x100000001b3ull;
    return h;
}

/* Gives an O that was kept. Which: that of the first launch; of the launch before; of one with Q at this address, or with
 * these first bytes. */
static void reuse(broken *b, const dualkv_launch *l, size_t elt) {
    size_t bytes = (size_t)(l->problem->tq * l->o.row) * elt;
    uint64_t bits = is(b, "content") ? firstBits(l) : 0;
    bool hit = b->old && b->old_bytes == bytes && (!is(b, "address") || b->seen == l->q.data) && b->seen_bits == bits;
    char *fresh = is(b, "previous") ? malloc(bytes) : NULL;
    if (fresh) memcpy(fresh, l->o.data, bytes);
    if (hit || (is(b, "stale") && b->old)) memcpy(l->o.data, b->old, bytes < b->old_bytes ? bytes : b->old_bytes);
    else keep(b, l->o.data, bytes);
    if (fresh) keep(b, fresh, bytes);
    free(fresh);
    b->seen = l->q.data;
    b->seen_bits = bits;
}

static int run(void *self, const dualkv_launch *l, int backward, char *err, size_t n) {
    broken *b = self;
    size_t elt = l->problem->dtype == DUALKV_FP32 ? 4 : 2;
    int rc = 0;
    b->calls += !backward;
    misbehave(b, backward);
    if (is(b, "greedy")) {
        snprintf(err, n, "refused after %lld parts of 256 MiB", (long long)takeAll());
        return 1;
    }
#ifndef __SANITIZE_ADDRESS__ /* the coordinator is open then, see guard.c */
    if (is(b, "peek") && canPeek()) {
        snprintf(err, n, "the coordinator's memory can be read");
        return 1;
    }
#endif
    if (is(b, "error")) {
        snprintf(err, n, "the grid is too large");
        return 7;
    }
    if (!is(b, "nothing"))
        rc = (backward ? dkv_refKernel.backward : dkv_refKernel.forward)(b->ref, l, err, n);
    if (!rc) spoil(b, l, elt, backward);
    if (!rc && !backward && (is(b, "stale") || is(b, "previous") || is(b, "address") || is(b, "content")))
        reuse(b, l, elt);
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
