/* fake_cuda.c: a device in host memory, with the table of ref/device.h, and the emulated kernel as a kernel
 * on it (memory DUALKV_CUDA), so that the way to a device and back can be tested without one.
 *
 * It is as unkind as a device may be: what is queued on a stream runs when somebody waits for the stream or
 * the device, not before; work on the default stream (NULL) runs at once. Memory comes filled with 0xA5.
 * Every pointer of a launch must lie in memory of alloc(), and have room for its tensor.
 *
 *     fake+how=WORD   rows of `ways` below say what goes wrong; further options are the emulated kernel's
 *
 * Environment: DUALKV_FAKE_DEVICES (default 1), DUALKV_FAKE_ROOM: bytes that alloc() gives in all, DUALKV_FAKE_PINNED:
 * bytes that allocHost() gives at a time, DUALKV_FAKE_PAGEABLE: bytes from which on a copy from or to host memory that is
 * not pinned fails, DUALKV_FAKE_COPY=N: the N-th copy that is waited for fails. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../ref/device.h"
#include "../../ref/emu.h"

enum { BUFFERS_MOST = 256, TASKS_MOST = 4096, TEXT = 200 };
#define PASTIME ((size_t)16 << 20) /* a longer fill only passes the time: it writes one page */

typedef enum way {
    RIGHT,
    NULL_STREAM,  /* works on the default stream */
    LAUNCH_ERROR, /* an error that is over once it was read */
    STICKY,       /* an error that stays */
    AFTER,        /* writes one element past the end of O */
    FAR_BEFORE,   /* writes 3000 bytes before LSE */
    MUTATES,      /* changes K */
    WAITS,        /* waits for its stream, which no capture allows */
    ONCE,         /* does nothing when its graph is replayed again */
    REMEMBERS,    /* gives the O that it gave before for the same address of Q */
    PINNED,       /* works on the addresses of its first launch alone: O is zero elsewhere */
    HOST_POINTER, /* reads the problem's arrays where they are in host memory: right */
    PEEKS,        /* adds what lies 300,000 bytes behind LSE, times zero: NaN where nothing of an earlier problem is left,
                   * an error that stays where no memory is */
    N_WAYS
} way;
static const char *const ways[N_WAYS] = {"right", "null-stream", "launch-error", "sticky",
                                         "after", "far-before",  "mutates",      "waits",
                                         "once",  "remembers",   "pinned",       "host-pointer", "peeks"};

typedef struct kernel_self {
    void *emu;
    way how;
    uint64_t launches;
    const void *seen; /* where Q was at first, O then, and its bytes */
    char *kept;
    size_t kept_bytes;
} kernel_self;

typedef struct task { /* a copy, a fill, an event or a kernel */
    void *to;
    const void *from;
    size_t n;
    int byte; /* -1: copy */
    double *event;
    kernel_self *kernel;
    int backward, done;
    dualkv_launch launch;
    dualkv_problem problem;
} task;

typedef struct stream {
    task *tasks;
    int n;
} stream;

static struct buffer {
    char *p;
    size_t n;
} buffers[BUFFERS_MOST], pinned[BUFFERS_MOST];
static size_t taken;
static long copies; /* that were waited for */
static stream *streams[8];
static stream *capturing; /* its tasks from `captured` on belong to the graph */
static int captured, spoiled, sticky, pending, is_busy;
static char text[TEXT];

static int fail(const char *why) {
    snprintf(text, sizeof text, "fake_cuda.c: %s", why);
    return 1;
}
static int dead(void) { return sticky ? fail("an illegal memory access was encountered") : 0; }
static const char *error(void) { return text; }

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- memory ---- */

static int within(const struct buffer *all, const void *p, size_t n) {
    for (const struct buffer *b = all; b < all + BUFFERS_MOST; b++)
        if (b->p && (const char *)p >= b->p && (const char *)p + n <= b->p + b->n) return 1;
    return 0;
}
static int holds(const void *p, size_t n) { return within(buffers, p, n); }

/* A number of the environment, or what there is without it. */
static size_t setting(const char *name, size_t otherwise) {
    const char *word = getenv(name);
    return word ? (size_t)atoll(word) : otherwise;
}

static int allocate(void **p, size_t n) {
    *p = NULL;
    if (dead()) return 1;
    if (taken + n > setting("DUALKV_FAKE_ROOM", SIZE_MAX)) return fail("out of memory");
    for (int i = 0; i < BUFFERS_MOST; i++) {
        if (buffers[i].p) continue;
        *p = buffers[i].p = aligned_alloc(256, (n + 511) / 256 * 256);
        if (!*p) return fail("out of memory");
        buffers[i].n = n;
        memset(*p, 0xA5, n);
        taken += n;
        return 0;
    }
    return fail("too many buffers");
}

static int release(void *p) {
    for (int i = 0; p && i < BUFFERS_MOST; i++)
        if (buffers[i].p == p) {
            free(p);
            taken -= buffers[i].n;
            buffers[i] = (struct buffer){NULL, 0};
            return 0;
        }
    return p ? fail("release of what was not allocated") : 0;
}

/* ---- kernels ---- */

static int tensorMissing(const dualkv_tensor *t, int64_t rows, int64_t heads, int64_t dim, size_t elt) {
    if (!t->data || rows == 0 || heads == 0) return 0;
    int64_t last = (rows - 1) * t->row + (heads - 1) * t->head + dim;
    return !holds(t->data, (size_t)last * elt);
}

/* Is everything that the launch points at on the device? */
static int misplaced(const dualkv_launch *l, int backward) {
    const dualkv_problem *p = l->problem;
    size_t e = p->dtype == DUALKV_FP32 ? 4 : 2;
    const dualkv_tensor *t[] = {&l->q, &l->o, &l->d_o, &l->dq}, *u[] = {&l->k, &l->v, &l->dk, &l->dv};
    const int32_t td[] = {p->dqk, p->dv, p->dv, p->dqk}, ud[] = {p->dqk, p->dv, p->dqk, p->dv};
    for (int i = 0; i < 4; i++)
        if (tensorMissing(t[i], p->tq, p->hq, td[i], e) || tensorMissing(u[i], p->tk, p->hkv, ud[i], e))
            return 1;
    if (!l->q.data || !l->k.data || !l->v.data || !l->o.data || !l->lse.data) return 1;
    if (backward && (!l->d_o.data || !l->dq.data || !l->dk.data || !l->dv.data)) return 1;
    size_t hq = (size_t)p->hq * sizeof(float);
    return tensorMissing(&l->lse, p->tq, p->hq, 1, 4) || tensorMissing(&l->d_lse, p->tq, p->hq, 1, 4) ||
           (p->sink && !holds(l->sink, hq)) || (backward && p->sink && !holds(l->dsink, hq)) ||
           (p->alibi && !holds(l->device_alibi_slopes, hq)) ||
           !holds(l->device_segments, (size_t)p->n_segments * sizeof *l->device_segments) ||
           !holds(l->device_ranges, (size_t)p->n_ranges * sizeof *l->device_ranges) ||
           (l->workspace_size && !holds(l->workspace, l->workspace_size));
}

static void misremember(kernel_self *k, const dualkv_launch *l) {
    size_t n = (size_t)(l->problem->tq * l->o.row) * (l->problem->dtype == DUALKV_FP32 ? 4 : 2);
    if (!k->kept || n != k->kept_bytes) {
        free(k->kept);
        k->kept = malloc(n);
        k->kept_bytes = n;
        k->seen = l->q.data;
        if (k->kept) memcpy(k->kept, l->o.data, n);
    } else if (k->how == REMEMBERS && k->seen == l->q.data) {
        memcpy(l->o.data, k->kept, n);
    } else if (k->how == PINNED && k->seen != l->q.data) {
        memset(l->o.data, 0, n);
    }
}

static void runKernel(task *t) {
    char err[TEXT] = "";
    kernel_self *k = t->kernel;
    if (k->how == ONCE && t->done++) return;
    t->launch.problem = &t->problem;
    int rc = t->backward ? dkv_emuKernel.backward(k->emu, &t->launch, err, sizeof err)
                         : dkv_emuKernel.forward(k->emu, &t->launch, err, sizeof err);
    if (rc) fail(err);
    pending |= rc;
    const dualkv_problem *p = &t->problem;
    if (k->how == AFTER && !t->backward) memset((uint16_t *)t->launch.o.data + p->tq * t->launch.o.row, 0, 2);
    if (k->how == FAR_BEFORE && !t->backward) memset((char *)t->launch.lse.data - 3000, 0, 1);
    if ((k->how == REMEMBERS || k->how == PINNED) && !t->backward) misremember(k, &t->launch);
    if (k->how == PEEKS && !t->backward && p->dtype == DUALKV_FP32) {
        const float *far = (float *)((char *)t->launch.lse.data + 300000);
        /* In the buffer of LSE: what another one holds there is chance. */
        if (holds(t->launch.lse.data, 300000 + sizeof *far)) *(float *)t->launch.o.data += 0 * *far;
        else sticky = 1;
    }
    if (k->how == MUTATES && !t->backward) *(uint16_t *)t->launch.k.data ^= 1;
}

/* ---- streams ---- */

static void runTask(task *t) {
    if (t->kernel) runKernel(t);
    else if (t->event) *t->event = now();
    else if (t->byte >= 0) memset(t->to, t->byte, t->n < PASTIME ? t->n : 4096);
    else memcpy(t->to, t->from, t->n);
}

static int queue(stream *s, const task *t) {
    task now_ = *t;
    if (dead()) return 1;
    if (!s) {
        runTask(&now_);
        return 0;
    }
    if (s->n == TASKS_MOST) return fail("too many tasks");
    s->tasks[s->n++] = *t;
    return 0;
}

static int syncStream(void *handle) {
    stream *s = handle;
    if (capturing && (!s || s == capturing)) {
        spoiled = 1;
        return fail("operation not permitted when stream is capturing");
    }
    for (int i = 0; s && i < s->n; i++) runTask(&s->tasks[i]);
    if (s) s->n = 0;
    return dead();
}

static int check(void) {
    int rc = pending;
    pending = 0;
    return rc | dead();
}

static int sync(void) {
    for (int i = 0; i < 8; i++)
        if (streams[i] && syncStream(streams[i])) return 1;
    return check();
}

static int openStream(void **handle) {
    for (int i = 0; i < 8; i++) {
        if (streams[i]) continue;
        stream *s = calloc(1, sizeof *s);
        *handle = streams[i] = s;
        if (s) s->tasks = calloc(TASKS_MOST, sizeof *s->tasks);
        return s && s->tasks ? 0 : fail("out of memory");
    }
    return fail("too many streams");
}

static int closeStream(void *handle) {
    for (int i = 0; i < 8; i++)
        if (streams[i] == handle) streams[i] = NULL;
    free(((stream *)handle)->tasks);
    free(handle);
    return 0;
}

static int copy(void *to, const void *from, size_t n, void *s) {
    if (!holds(to, n) || !holds(from, n)) return fail("copy of what is not on the device");
    return queue(s, &(task){.to = to, .from = from, .n = n, .byte = -1});
}
static int refused(const void *host, size_t n) {
    if (n >= setting("DUALKV_FAKE_PAGEABLE", SIZE_MAX) && !within(pinned, host, n)) return fail("a large copy of pageable memory");
    return ++copies == (long)setting("DUALKV_FAKE_COPY", 0) ? fail("the copy failed") : 0;
}
static int queueIn(void *to, const void *from, size_t n, void *s) {
    if (!holds(to, n) || holds(from, 1)) return fail("a copy to the device: wrong side");
    return refused(from, n) || queue(s, &(task){.to = to, .from = from, .n = n, .byte = -1});
}
static int queueOut(void *to, const void *from, size_t n, void *s) {
    if (!holds(from, n) || holds(to, 1)) return fail("a copy from the device: wrong side");
    return refused(to, n) || queue(s, &(task){.to = to, .from = from, .n = n, .byte = -1});
}
static int copyIn(void *to, const void *from, size_t n, void *s) { return queueIn(to, from, n, s) || syncStream(s); }
static int copyOut(void *to, const void *from, size_t n, void *s) { return queueOut(to, from, n, s) || syncStream(s); }
static int paint(void *to, uint16_t pattern, size_t n, void *s) {
    if (!holds(to, n) || (uintptr_t)to % 2 || n % 2) return fail("a pattern for what is not on the device");
    if (syncStream(s)) return 1;
    for (size_t i = 0; i < n / 2; i++) ((uint16_t *)to)[i] = pattern;
    return 0;
}
static int sum(const void *from, size_t n, void *s, uint64_t *out) {
    *out = 0;
    if (!holds(from, n) || (uintptr_t)from % 2 || n % 2) return fail("a sum of what is not on the device");
    if (syncStream(s)) return 1;
    for (size_t i = 0; i < n / 2; i++) *out += (((const uint16_t *)from)[i] + 1) * (i * 2654435761u + 1);
    return 0;
}
static int fill(void *to, int byte, size_t n, void *s) {
    if (!holds(to, n)) return fail("fill of what is not on the device");
    return queue(s, &(task){.to = to, .n = n, .byte = byte & 255});
}

static int beginGraph(void *s) {
    if (capturing) return fail("a capture is under way");
    capturing = s;
    captured = capturing->n;
    spoiled = 0;
    return dead();
}

static int endGraph(void *s, void **graph) {
    stream *from = s, *g = calloc(1, sizeof *g);
    *graph = g;
    if (!g || from != capturing) return fail("no capture on this stream");
    g->n = from->n - captured;
    g->tasks = calloc((size_t)g->n + 1, sizeof *g->tasks);
    memcpy(g->tasks, from->tasks + captured, (size_t)g->n * sizeof *g->tasks);
    from->n = captured;
    capturing = NULL;
    if (!spoiled) return dead();
    free(g->tasks);
    free(g);
    *graph = NULL;
    return fail("the capture was invalidated");
}

/* Runs at once, like everything before it on the stream: the graph's tasks remember what they did. */
static int launchGraph(void *graph, void *s) {
    stream *g = graph;
    if (syncStream(s)) return 1;
    for (int i = 0; i < g->n; i++) runTask(&g->tasks[i]);
    return dead();
}

static int closeGraph(void *graph) {
    free(((stream *)graph)->tasks);
    free(graph);
    return 0;
}

static int openEvent(void **event) {
    *event = calloc(1, sizeof(double));
    return *event ? 0 : fail("out of memory");
}
static int closeEvent(void *event) {
    free(event);
    return 0;
}
static int recordEvent(void *event, void *s) { return queue(s, &(task){.event = event}); }
static int elapsed(void *first, void *last, float *ms) {
    *ms = (float)(1e3 * (*(double *)last - *(double *)first));
    return dead();
}

/* ---- the rest of the table ---- */

static int count(int *n) {
    const char *word = getenv("DUALKV_FAKE_DEVICES");
    *n = word ? atoi(word) : 1;
    return 0;
}
static int selectDevice(int device) { return device ? fail("no such device") : 0; }
static int describe(int device, dkv_device_info *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "Fake %d", device);
    snprintf(info->capability, sizeof info->capability, "0.1");
    info->driver = info->runtime = 12040;
    info->sms = 1;
    info->memory = (uint64_t)1 << 30;
    return 0;
}
static int memory(uint64_t *free_bytes, uint64_t *total) {
    *total = (uint64_t)1 << 30;
    *free_bytes = *total - taken;
    return 0;
}
static int startBusy(double seconds, void **busy) {
    (void)seconds;
    *busy = &is_busy;
    is_busy = 1;
    return dead();
}
static int stopBusy(void *busy, int *beside) {
    (void)busy;
    if (beside) *beside = is_busy;
    is_busy = 0;
    return dead();
}
static int noExport(void *p, uint8_t handle[DKV_IPC_BYTES]) { return (void)p, (void)handle, fail("no IPC"); }
static int noOpen(const uint8_t handle[DKV_IPC_BYTES], void **p) {
    return (void)p, (void)handle, fail("no IPC");
}
static int noClose(void *p) { return (void)p, fail("no IPC"); }
static int probe(char *json, size_t n) {
    snprintf(json, n, "{\"mma_sync\": null, \"wgmma\": null}");
    return 0;
}

static int allocHost(void **p, size_t n) {
    *p = NULL;
    for (int i = 0; i < BUFFERS_MOST && n <= setting("DUALKV_FAKE_PINNED", SIZE_MAX); i++) {
        if (pinned[i].p) continue;
        *p = malloc(n ? n : 1);
        pinned[i] = (struct buffer){*p, n};
        break;
    }
    return *p ? dead() : fail("out of pinned memory");
}
static int releaseHost(void *p) {
    for (int i = 0; p && i < BUFFERS_MOST; i++)
        if (pinned[i].p == p) pinned[i] = (struct buffer){NULL, 0};
    free(p);
    return 0;
}

const dkv_device_ops *dkv_deviceOps(void) {
    static const dkv_device_ops table = {
        .size = sizeof table,
        .error = error,
        .count = count,
        .select = selectDevice,
        .describe = describe,
        .memory = memory,
        .alloc = allocate,
        .release = release,
        .copyIn = copyIn,
        .copyOut = copyOut,
        .copy = copy,
        .fill = fill,
        .openStream = openStream,
        .closeStream = closeStream,
        .syncStream = syncStream,
        .sync = sync,
        .check = check,
        .beginGraph = beginGraph,
        .endGraph = endGraph,
        .launchGraph = launchGraph,
        .closeGraph = closeGraph,
        .startBusy = startBusy,
        .stopBusy = stopBusy,
        .openEvent = openEvent,
        .closeEvent = closeEvent,
        .recordEvent = recordEvent,
        .elapsed = elapsed,
        .exportBuffer = noExport,
        .openBuffer = noOpen,
        .closeBuffer = noClose,
        .probe = probe,
        .allocHost = allocHost,
        .releaseHost = releaseHost,
        .queueIn = queueIn,
        .queueOut = queueOut,
        .paint = paint,
        .sum = sum,
    };
    return &table;
}

/* ---- the kernel ---- */

static void *openFake(const char *options, char *err, size_t n) {
    kernel_self *k = calloc(1, sizeof *k);
    if (!k) return NULL;
    if (strncmp(options, "how=", 4) == 0) {
        size_t len = strcspn(options + 4, ",");
        for (k->how = 0; k->how < N_WAYS; k->how++)
            if (strlen(ways[k->how]) == len && !memcmp(ways[k->how], options + 4, len)) break;
        options += 4 + len + (options[4 + len] == ',');
    }
    if (k->how < N_WAYS) k->emu = dkv_emuKernel.open(options, err, n);
    else snprintf(err, n, "how=%s is unknown", options);
    if (k->emu) return k;
    free(k);
    return NULL;
}

static void closeFake(void *self) {
    dkv_emuKernel.close(((kernel_self *)self)->emu);
    free(((kernel_self *)self)->kept);
    free(self);
}
static const char *refuses(void *self, const dualkv_problem *p) {
    return dkv_emuKernel.refuses(((kernel_self *)self)->emu, p);
}
static void arithmetic(void *self, const dualkv_problem *p, dualkv_arithmetic *a) {
    dkv_emuKernel.arithmetic(((kernel_self *)self)->emu, p, a);
}
static int deterministic(void *self, const dualkv_problem *p) {
    return dkv_emuKernel.deterministic(((kernel_self *)self)->emu, p);
}
static size_t workspace(void *self, const dualkv_problem *p, int backward) {
    return dkv_emuKernel.workspace ? dkv_emuKernel.workspace(((kernel_self *)self)->emu, p, backward) : 0;
}
static uint64_t launches(void *self) { return ((kernel_self *)self)->launches; }

static int launch(void *self, const dualkv_launch *l, int backward, char *err, size_t n) {
    kernel_self *k = self;
    task t = {.kernel = k, .backward = backward, .launch = *l, .problem = *l->problem};
    if (misplaced(l, backward)) {
        snprintf(err, n, "a pointer of the launch is not on the device");
        return 1;
    }
    if (!l->stream) {
        snprintf(err, n, "no stream");
        return 1;
    }
    if (k->how != HOST_POINTER) {
        t.problem.segments = l->device_segments;
        t.problem.ranges = l->device_ranges;
        t.problem.alibi_slopes = l->device_alibi_slopes;
    }
    k->launches++;
    if (k->how == STICKY) sticky = 1;
    if (k->how == LAUNCH_ERROR) pending = fail("invalid configuration argument");
    if (queue(k->how == NULL_STREAM ? NULL : l->stream, &t)) return 0; /* the device says why */
    if (k->how == WAITS && syncStream(l->stream)) {
        snprintf(err, n, "cannot wait: %s", text);
        return 1;
    }
    return 0;
}
static int forward(void *self, const dualkv_launch *l, char *err, size_t n) {
    return launch(self, l, 0, err, n);
}
static int backward_(void *self, const dualkv_launch *l, char *err, size_t n) {
    return launch(self, l, 1, err, n);
}

#define FAKE(word, rep)                                                                                      \
    {                                                                                                        \
        .size = sizeof(dualkv_kernel), .abi = DUALKV_ABI, .name = word, .doc = "emu on a device of its own", \
        .memory = DUALKV_CUDA, .alignment = 2, .replicated = rep, .open = openFake, .close = closeFake,      \
        .refuses = refuses, .arithmetic = arithmetic, .deterministic = deterministic,                        \
        .workspace = workspace, .forward = forward, .backward = backward_, .launches = launches              \
    }
static const dualkv_kernel fake = FAKE("fake", 0), fake_replicated = FAKE("fake-replicated", 1);

const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *n);
const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *n) {
    static const dualkv_kernel *const list[] = {&fake, &fake_replicated};
    *n = 2;
    return abi == DUALKV_ABI ? list : NULL;
}
