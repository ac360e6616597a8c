#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/pages.h"
#include "case.h"
#include "dualkv.h"
#include "gpu.h"
#include "guard.h"
#include "remote.h"
#include "wire.h"

#define NOT_THE_SAME "one worker was prepared, another answered: does the kernel fork when it is loaded?"

/* What the worker holds between messages. */
typedef struct state {
    const dualkv_kernel *table; /* the kernel to serve; NULL: the one that the spec names */
    const char *options;
    dkv_kernel kernel;
    dkv_gpu *gpu; /* NULL: host memory, or no device */
    dkv_remote_server *oracle; /* instead of a kernel */
    dkv_problem problem;
    dkv_layout packed, replicated;
    void *last;                 /* where the last arena was mapped */
    uint8_t *kept;              /* a device's arena, which stays mapped until another file comes: its pages are many */
    size_t kept_bytes;
    dev_t device_of; /* that file: its device and number */
    ino_t number;
    const dualkv_problem *view; /* the problem as the kernel sees it */
} state;

static void dropProblem(state *s) {
    dkv_dropGpuProblem(s->gpu);
    if (s->view) {
        if (s->kernel.table.replicated) dkv_freeLayout(&s->replicated);
        dkv_freeLayout(&s->packed);
        dkv_freeProblem(&s->problem);
    }
    s->view = NULL;
}

static int takeProblem(state *s, const char *line, dkv_err *err) {
    dropProblem(s);
    int rc = dkv_parseProblem(line, dkv_knownFill, &s->problem, err);
    if (rc) return rc;
    rc = dkv_makeLayout(&s->problem, &s->packed, err);
    if (rc) goto no_layout;
    s->view = &s->packed.view;
    if (!s->kernel.table.replicated) return 0;
    rc = dkv_makeReplicated(&s->problem, &s->packed, &s->replicated, NULL, NULL, NULL, err);
    s->view = &s->replicated.view;
    if (!rc) return 0;
    s->view = NULL;
    dkv_freeLayout(&s->packed);
no_layout:
    dkv_freeProblem(&s->problem);
    return rc;
}

static void dropKept(state *s) {
    if (s->kept) munmap(s->kept, s->kept_bytes);
    s->kept = NULL;
}

static dkv_outcome openSpec(state *s, const dkv_request *q, dkv_reply *r) {
    dkv_err err;
    if (s->kernel.self && !s->table) return DKV_W_HARNESS;
    dropProblem(s); /* an attached worker is opened again by the next who uses it */
    dropKept(s);
    dkv_closeGpu(s->gpu);
    dkv_closeKernel(&s->kernel);
    s->gpu = NULL;
    const char *options = s->options ? s->options : q->spec.options;
    if (s->table ? dkv_openTable(q->spec.text, s->table, options, &s->kernel, &err)
                 : dkv_openKernel(&q->spec, &s->kernel, &err)) {
        snprintf(r->text, sizeof r->text, "%s", err.text);
        return DKV_W_ERROR;
    }
    if (!s->table && s->kernel.table.memory == DUALKV_HOST) dkv_limitWorker(dkv_availableMemory());
    r->description.memory = s->kernel.table.memory;
    r->description.replicated = s->kernel.table.replicated;
    if (s->kernel.table.memory != DUALKV_CUDA || !dkv_openGpu(s->kernel.so, &s->gpu, &r->gpu, &err))
        return DKV_W_OK;
    snprintf(r->text, sizeof r->text, "%s", err.text);
    return DKV_W_HARNESS;
}

static dkv_outcome describe(state *s, const dkv_request *q, dkv_reply *r) {
    dkv_err err = {0};
    dkv_description *d = &r->description;
    const dualkv_kernel *k = &s->kernel.table;
    if (!s->kernel.self || takeProblem(s, q->line, &err)) {
        snprintf(r->text, sizeof r->text, "%s", err.text[0] ? err.text : NOT_THE_SAME);
        return DKV_W_HARNESS;
    }
    for (dkv_layout *l = &s->packed; l;
         l = s->kernel.table.replicated && l == &s->packed ? &s->replicated : NULL) {
        l->view.max_q_len += q->overstate;
        l->view.max_k_len += q->overstate;
    }
    snprintf(d->name, sizeof d->name, "%s", k->name);
    snprintf(d->doc, sizeof d->doc, "%s", k->doc ? k->doc : "");
    d->memory = k->memory;
    d->alignment = k->alignment;
    d->replicated = k->replicated;
    d->has_backward = k->backward != NULL;
    d->counts_launches = k->launches != NULL;
    d->absent = k->absent;
    const char *reason = k->refuses(s->kernel.self, s->view);
    if (!reason && s->table && k->memory == DUALKV_CUDA && s->problem.run == DKV_GRAPH)
        reason = "run=graph: arrays of a Python function are made at each call, which a captured graph does not repeat";
    if (reason) {
        d->refused = 1;
        snprintf(d->reason, sizeof d->reason, "%s", reason);
        return DKV_W_OK;
    }
    d->arithmetic.size = sizeof d->arithmetic;
    if (k->arithmetic) k->arithmetic(s->kernel.self, s->view, &d->arithmetic);
    d->deterministic = k->deterministic ? k->deterministic(s->kernel.self, s->view) : 0;
    for (int b = 0; b < 2 && k->workspace; b++) d->workspace[b] = k->workspace(s->kernel.self, s->view, b);
    return DKV_W_OK;
}

/* In host memory: the call itself, with its wall time. */
static dkv_outcome launchHere(state *s, const dkv_request *q, uint8_t *base, dkv_reply *r) {
    const dualkv_kernel *k = &s->kernel.table;
    dualkv_launch l;
    struct timespec t0, t1;
    struct rusage usage;
    dkv_makeLaunch(&q->plan, base, s->view, q->backward, &l);
    clock_gettime(CLOCK_MONOTONIC, &t0);
    int rc = q->backward ? k->backward(s->kernel.self, &l, r->text, sizeof r->text)
                         : k->forward(s->kernel.self, &l, r->text, sizeof r->text);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    r->text[sizeof r->text - 1] = 0;
    r->seconds[0] = (double)(t1.tv_sec - t0.tv_sec) + 1e-9 * (double)(t1.tv_nsec - t0.tv_nsec);
    if (getrusage(RUSAGE_SELF, &usage) == 0) r->peak = usage.ru_maxrss * 1024;
    if (rc && !r->text[0]) snprintf(r->text, sizeof r->text, "it returned %d without a reason", rc);
    return rc ? DKV_W_ERROR : DKV_W_OK;
}

static dkv_outcome noDevice(dkv_reply *r) {
    snprintf(r->text, sizeof r->text, "the kernel needs a CUDA device, and there is none");
    return DKV_W_HARNESS;
}

static uint8_t *mapKept(state *s, size_t bytes, int fd) {
    struct stat file;
    if (fstat(fd, &file)) return MAP_FAILED;
    if (s->kept && s->kept_bytes == bytes && s->device_of == file.st_dev && s->number == file.st_ino) return s->kept;
    dropKept(s);
    uint8_t *at = dkv_mapFile(fd, bytes);
    if (at == MAP_FAILED) return at;
    s->kept = at;
    s->kept_bytes = bytes;
    s->device_of = file.st_dev;
    s->number = file.st_ino;
    return at;
}

/* The arena, where the last one was: a kernel that remembers by address is to be given the chance. With `move` somewhere
 * else. */
static uint8_t *mapArena(state *s, const dkv_request *q, int fd) {
    const size_t n = (size_t)q->plan.size;
    const int shared = MAP_SHARED | (n > (size_t)1 << 26 ? MAP_POPULATE : 0); /* all pages at once, where there are many */
    void *taken = MAP_FAILED, *at = MAP_FAILED;
    if (q->move && s->last)
        taken = mmap(s->last, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    else if (s->last)
        at = mmap(s->last, n, PROT_READ | PROT_WRITE, shared | MAP_FIXED_NOREPLACE, fd, 0);
    if (at == MAP_FAILED) at = mmap(NULL, n, PROT_READ | PROT_WRITE, shared, fd, 0);
    if (taken != MAP_FAILED) munmap(taken, n);
    if (at != MAP_FAILED) s->last = at;
    return at;
}

static dkv_outcome launch(state *s, const dkv_request *q, int fd, dkv_reply *r) {
    const dualkv_kernel *k = &s->kernel.table;
    if (!s->view || fd < 0 || (q->backward && !k->backward)) {
        snprintf(r->text, sizeof r->text, "%s", s->view ? "the worker did not get the buffers: the limit on open files, lowered by the kernel?" : NOT_THE_SAME);
        return DKV_W_HARNESS;
    }
    if (k->memory == DUALKV_CUDA && !s->gpu) return noDevice(r);
    const bool maps = !s->gpu || dkv_needsMapping(s->gpu, &q->plan);
    uint8_t *base = !maps ? NULL : s->gpu ? mapKept(s, (size_t)q->plan.size, fd) : mapArena(s, q, fd);
    if (base == MAP_FAILED) {
        snprintf(r->text, sizeof r->text, "the worker cannot map %lld bytes", (long long)q->plan.size);
        return DKV_W_HARNESS;
    }
    uint64_t before = k->launches ? k->launches(s->kernel.self) : 0;
    dkv_gpu_launch there = {k, s->kernel.self, s->view, &q->plan, s->problem.run, q->backward, q->move, q->resend, fd, base};
    dkv_outcome o = s->gpu ? dkv_launchOnGpu(s->gpu, &there, r->seconds, r->text, sizeof r->text)
                           : launchHere(s, q, base, r);
    if (maps && !s->gpu) munmap(base, (size_t)q->plan.size);
    r->launches = k->launches ? (int64_t)(k->launches(s->kernel.self) - before) : -1;
    return o;
}

/* Inputs of the kernel's view: packed, or each sequence's own. */
static int makeInputs(state *s, dkv_inputs *in, dkv_err *err) {
    dkv_inputs packed = {0};
    dkv_layout rep = {0};
    int64_t *q_source = NULL, *k_source = NULL;
    uint8_t *q_own = NULL;
    int rc = dkv_allocInputs(&s->packed, &packed, err);
    if (!rc) rc = dkv_fillInputs(&s->problem, &s->packed, dkv_dataDir(), &packed, err);
    if (rc || !s->kernel.table.replicated) {
        *in = packed;
        return rc;
    }
    rc = dkv_makeReplicated(&s->problem, &s->packed, &rep, &q_source, &k_source, &q_own, err);
    if (!rc) rc = dkv_replicateInputs(&s->packed, &rep, q_source, k_source, q_own, &packed, in, err);
    dkv_freeInputs(&packed);
    dkv_freeLayout(&rep);
    free(q_source);
    free(k_source);
    free(q_own);
    return rc;
}

static dkv_outcome timeOnDevice(state *s, dkv_reply *r) {
    const dualkv_kernel *k = &s->kernel.table;
    dkv_gpu_times times = {0};
    dkv_inputs in = {0};
    dkv_plan plan;
    dkv_err err = {0};
    size_t work[2] = {0, 0};
    if (!s->view) return DKV_W_HARNESS;
    if (!s->gpu) return noDevice(r);
    for (int b = 0; b < 2 && k->workspace; b++) work[b] = k->workspace(s->kernel.self, s->view, b);
    int rc = dkv_planBuffers(s->view, DKV_CONTIGUOUS, k->alignment, true, work[0], work[1], &plan, &err);
    if (!rc) rc = makeInputs(s, &in, &err);
    dkv_gpu_launch c = {k, s->kernel.self, s->view, &plan, DKV_SINGLE, 0, 0, 0, -1, NULL};
    dkv_outcome o = DKV_W_HARNESS;
    if (rc) snprintf(r->text, sizeof r->text, "%s", err.text);
    else o = dkv_timeOnGpu(s->gpu, &c, &in, &times, r->text, sizeof r->text);
    dkv_freeInputs(&in);
    for (int b = 0; b < 2; b++) r->seconds[b] = times.seconds[b];
    r->peak = times.bytes;
    return o;
}

static dkv_outcome probe(state *s, dkv_reply *r) {
    return s->gpu ? dkv_probeGpu(s->gpu, r->json, sizeof r->json, r->text, sizeof r->text) : noDevice(r);
}

/* One message and, with a launch, the arena's descriptor. 0 at the end of the run. */
static ssize_t receive(int channel, dkv_request *q, int *fd) {
    struct iovec part = {q, sizeof *q};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    ssize_t n;
    while ((n = recvmsg(channel, &m, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) continue;
    *fd = -1;
    struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) memcpy(fd, CMSG_DATA(c), sizeof(int));
    return n;
}

static int serve(int channel, const dualkv_kernel *table, const char *options) {
    int fd = -1, lost = 0;
    ssize_t got = 0;
    dkv_request *q = malloc(sizeof *q);
    dkv_reply *r = malloc(sizeof *r);
    state *s = calloc(1, sizeof *s);
    if (s) s->table = table, s->options = options;
    while (!lost && q && r && s && (got = receive(channel, q, &fd)) == (ssize_t)sizeof *q && q->magic == DKV_WIRE_MAGIC) {
        memset(r, 0, sizeof *r);
        dkv_outcome o = q->op == DKV_OP_OPEN       ? openSpec(s, q, r)
                        : q->op == DKV_OP_DESCRIBE ? describe(s, q, r)
                        : q->op == DKV_OP_LAUNCH   ? launch(s, q, fd, r)
                        : q->op == DKV_OP_TIME     ? timeOnDevice(s, r)
                        : q->op == DKV_OP_PROBE    ? probe(s, r)
                        : q->op == DKV_OP_ORACLE_OPEN
                            ? dkv_openServer(q->spec.path, &s->oracle, &r->gpu, r->text, sizeof r->text)
                        : q->op == DKV_OP_ORACLE ? dkv_serveQuestion(s->oracle, fd, q->bytes, r->seconds, &r->flops,
                                                                     r->text, sizeof r->text)
                                                   : DKV_W_HARNESS;
        if (fd >= 0) close(fd);
        r->magic = DKV_WIRE_MAGIC;
        r->sequence = q->sequence;
        r->outcome = (int32_t)o;
        fflush(stdout);
        lost = send(channel, r, sizeof *r, MSG_NOSIGNAL) != (ssize_t)sizeof *r;
    }
    if (s) {
        dropProblem(s);
        dropKept(s);
        dkv_closeGpu(s->gpu);
        dkv_closeServer(s->oracle);
        dkv_closeKernel(&s->kernel);
    }
    free(q);
    free(r);
    free(s);
    return lost || got < 0 ? DKV_LOST_CHANNEL : 0;
}

int dkv_serveWorker(const char *fd_word) {
    dkv_guardWorker();
    setvbuf(stdout, NULL, _IOLBF, 0);
    return serve(atoi(fd_word), NULL, NULL);
}

int dkv_serveWorkerWith(int fd, const dualkv_kernel *table, const char *options) { return serve(fd, table, options); }

int dualkv_serve(int fd, const dualkv_kernel *kernel, const char *options) {
    return kernel ? dkv_serveWorkerWith(fd, kernel, options) : DKV_EUSER;
}
