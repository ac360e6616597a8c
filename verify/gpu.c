#include "gpu.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/device.h"

/* Addresses on the device equal the offsets in the arena modulo this: twice the largest alignment. */
#define PHASE 8192
#define DELAY_BYTES ((size_t)64 << 20)
#define DELAY_FILLS 256 /* of DELAY_BYTES each: 5 ms at 3 TB/s */
#define BUSY_SECONDS 20.0

/* A block of the arena with the gaps on both sides of it: bytes [from, from + bytes) of the arena. */
typedef struct region {
    int64_t from, bytes;
    void *raw, *raw_stage; /* allocations; the stage only once it was needed */
    uint8_t *at, *stage;   /* where `from` is in them */
} region;

struct dkv_gpu {
    const dkv_device_ops *ops;
    void *so; /* of ops, where it is not the kernel's own */
    void *stream, *first, *last, *delay;
    dkv_plan plan; /* that the regions are for */
    int n_regions;
    region region[DKV_N_SLOTS];
    uint8_t *gap[2]; /* host: room for the largest gap, twice */
    void *segments, *ranges, *slopes;
    bool has_problem;
};

/* ---- opening ---- */

static int findOps(void *so, dkv_gpu *g, dkv_err *err) {
    char path[DKV_SPEC_MAX];
    dkv_device_ops_fn entry = NULL;
    *(void **)&entry = so ? dlsym(so, DKV_DEVICE_SYMBOL) : NULL;
    if (!entry) {
        if (!dkv_findBeside(DKV_CUDA_PLUGIN, path, sizeof path))
            return dkv_fail(err, DKV_EHARNESS, "a kernel in CUDA memory needs %s beside the program",
                            DKV_CUDA_PLUGIN);
        g->so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!g->so) return dkv_fail(err, DKV_EHARNESS, "cannot load: %.300s", dlerror());
        *(void **)&entry = dlsym(g->so, DKV_DEVICE_SYMBOL);
        if (!entry) return dkv_fail(err, DKV_EHARNESS, "%s has no symbol '%s'", path, DKV_DEVICE_SYMBOL);
    }
    g->ops = entry();
    if (!g->ops || g->ops->size < sizeof *g->ops)
        return dkv_fail(err, DKV_EHARNESS, "the device table is older than this program (%u bytes, not %zu)",
                        g->ops ? g->ops->size : 0, sizeof *g->ops);
    return 0;
}

/* The kernel driver's version, as /proc has it: the first word of digits and dots. */
static void readDriver(char *out, size_t n) {
    char row[256] = "";
    FILE *f = fopen("/proc/driver/nvidia/version", "re");
    out[0] = 0;
    if (!f) return;
    char *w = fgets(row, sizeof row, f) ? strtok(row, " \t\n") : NULL;
    for (; w && !out[0]; w = strtok(NULL, " \t\n"))
        if (isdigit((unsigned char)w[0]) && strchr(w, '.') && !w[strspn(w, "0123456789.")])
            snprintf(out, n, "%.40s, ", w);
    fclose(f);
}

int dkv_openGpu(void *so, dkv_gpu **out, dkv_gpu_info *info, dkv_err *err) {
    dkv_device_info d;
    int devices = 0;
    *out = NULL;
    memset(info, 0, sizeof *info);
    dkv_gpu *g = calloc(1, sizeof *g);
    if (!g) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    int rc = findOps(so, g, err);
    if (rc) goto done;
    const dkv_device_ops *o = g->ops;
    if (o->count(&devices)) rc = dkv_fail(err, DKV_EHARNESS, "%.450s", o->error());
    if (rc || devices == 0) goto done;
    if (o->select(0) || o->describe(0, &d) || o->openStream(&g->stream) || o->openEvent(&g->first) ||
        o->openEvent(&g->last)) {
        rc = dkv_fail(err, DKV_EHARNESS, "%.450s", o->error());
        goto done;
    }
    char driver[48];
    readDriver(driver, sizeof driver);
    snprintf(info->name, sizeof info->name, "%.127s", d.name);
    snprintf(info->capability, sizeof info->capability, "%.15s", d.capability);
    snprintf(info->driver, sizeof info->driver, "%sCUDA %d.%d", driver, d.driver / 1000,
             d.driver % 1000 / 10);
    info->sms = d.sms;
    info->memory = d.memory;
    *out = g;
    return 0;
done:
    if (g->so) dlclose(g->so);
    free(g);
    return rc;
}

static void dropRegions(dkv_gpu *g) {
    for (int i = 0; i < g->n_regions; i++) {
        g->ops->release(g->region[i].raw);
        g->ops->release(g->region[i].raw_stage);
    }
    memset(g->region, 0, sizeof g->region);
    g->n_regions = 0;
    for (int i = 0; i < 2; i++) {
        free(g->gap[i]);
        g->gap[i] = NULL;
    }
}

void dkv_dropGpuProblem(dkv_gpu *g) {
    if (!g) return;
    g->ops->release(g->segments);
    g->ops->release(g->ranges);
    g->ops->release(g->slopes);
    g->segments = g->ranges = g->slopes = NULL;
    g->has_problem = false;
}

void dkv_closeGpu(dkv_gpu *g) {
    if (!g) return;
    dkv_dropGpuProblem(g);
    dropRegions(g);
    g->ops->release(g->delay);
    g->ops->closeEvent(g->first);
    g->ops->closeEvent(g->last);
    g->ops->closeStream(g->stream);
    if (g->so) dlclose(g->so);
    free(g);
}

/* ---- placing ---- */

/* What the device said; CRASHED where it says so again, for then it will say nothing else. */
static dkv_outcome deviceFailed(const dkv_gpu *g, dkv_outcome otherwise, char *why, size_t n) {
    const char *text = g->ops->error();
    snprintf(why, n, "%s", text[0] ? text : "out of memory");
    return g->ops->sync() ? DKV_W_CRASHED : otherwise;
}

static int64_t gapBegin(const dkv_plan *p, int i) {
    return i ? p->block[i - 1].offset + p->block[i - 1].bytes : 0;
}
static int64_t gapEnd(const dkv_plan *p, int i) { return i < p->n_blocks ? p->block[i].offset : p->size; }

/* Memory for a region, all of it poison, at its phase. */
static int allocRegion(const dkv_gpu *g, const region *r, void **raw, uint8_t **at) {
    size_t n = (size_t)r->bytes + PHASE;
    if (g->ops->alloc(raw, n) || g->ops->fill(*raw, 0xFF, n, g->stream)) return 1;
    *at = (uint8_t *)*raw + (((uintptr_t)r->from - (uintptr_t)*raw) & (PHASE - 1));
    return 0;
}

static int allocPlan(dkv_gpu *g, const dkv_plan *plan) {
    int64_t widest = 1;
    dropRegions(g);
    g->plan = *plan;
    for (int i = 0; i <= plan->n_blocks; i++)
        if (gapEnd(plan, i) - gapBegin(plan, i) > widest) widest = gapEnd(plan, i) - gapBegin(plan, i);
    for (int i = 0; i < 2; i++) g->gap[i] = malloc((size_t)widest);
    if (!g->gap[0] || !g->gap[1]) return 1;
    for (int i = 0; i < plan->n_blocks; i++) {
        region *r = &g->region[g->n_regions++];
        r->from = gapBegin(plan, i);
        r->bytes = gapEnd(plan, i + 1) - r->from;
        if (allocRegion(g, r, &r->raw, &r->at)) return 1;
    }
    return 0;
}

/* Memory stays from launch to launch of a plan; `move`: the new is taken before the old is released, room allowing. */
static int placePlan(dkv_gpu *g, const dkv_plan *plan, int move) {
    region old[DKV_N_SLOTS];
    int n_old = 0;
    bool same = g->n_regions && memcmp(&g->plan, plan, sizeof *plan) == 0;
    if (same && !move) return 0;
    if (same) {
        memcpy(old, g->region, sizeof old);
        n_old = g->n_regions;
        g->n_regions = 0;
    }
    int rc = allocPlan(g, plan);
    for (int i = 0; i < n_old; i++) {
        g->ops->release(old[i].raw);
        g->ops->release(old[i].raw_stage);
    }
    return rc && n_old ? allocPlan(g, plan) : rc;
}

static int sendArray(const dkv_gpu *g, const void *from, size_t bytes, void **to) {
    return g->ops->alloc(to, bytes) || (bytes && g->ops->copyIn(*to, from, bytes, g->stream));
}

static int placeProblem(dkv_gpu *g, const dualkv_problem *v) {
    if (g->has_problem) return 0;
    dkv_dropGpuProblem(g);
    if (sendArray(g, v->segments, (size_t)v->n_segments * sizeof *v->segments, &g->segments) ||
        sendArray(g, v->ranges, (size_t)v->n_ranges * sizeof *v->ranges, &g->ranges) ||
        (v->alibi_slopes && sendArray(g, v->alibi_slopes, (size_t)v->hq * sizeof(float), &g->slopes)))
        return 1;
    g->has_problem = true;
    return 0;
}

static void *onDevice(const dkv_gpu *g, int64_t offset) {
    for (int i = 0; i < g->n_regions; i++) {
        const dkv_block_place *b = &g->plan.block[i];
        if (offset >= b->offset && offset <= b->offset + b->bytes)
            return g->region[i].at + (offset - g->region[i].from);
    }
    return NULL;
}

/* The launch over an arena at `base`, its pointers moved to the device. */
static void makeDeviceLaunch(const dkv_gpu *g, const dualkv_problem *v, uint8_t *base, int backward,
                             dualkv_launch *l) {
    dkv_makeLaunch(&g->plan, base, v, backward, l);
    void **const pointers[] = {&l->q.data,   &l->k.data,   &l->v.data,     &l->o.data,
                               &l->lse.data, &l->d_o.data, &l->d_lse.data, &l->dq.data,
                               &l->dk.data,  &l->dv.data,  &l->workspace};
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++)
        if (*pointers[i]) *pointers[i] = onDevice(g, (uint8_t *)*pointers[i] - base);
    if (l->sink) l->sink = onDevice(g, (const uint8_t *)l->sink - base);
    if (l->dsink) l->dsink = onDevice(g, (uint8_t *)l->dsink - base);
    l->stream = g->stream;
    l->device_segments = g->segments;
    l->device_ranges = g->ranges;
    l->device_alibi_slopes = g->slopes;
}

/* ---- there and back ---- */

static int sendArena(const dkv_gpu *g, const uint8_t *base, bool staged) {
    for (int i = 0; i < g->n_regions; i++) {
        const region *r = &g->region[i];
        if (g->ops->copyIn(staged ? r->stage : r->at, base + r->from, (size_t)r->bytes, g->stream)) return 1;
    }
    return 0;
}

/* A gap lies on the device twice, behind one block and before the next; a byte that changed in either counts.
 */
static int fetchGap(const dkv_gpu *g, int i, uint8_t *base, bool staged) {
    int64_t from = gapBegin(&g->plan, i), bytes = gapEnd(&g->plan, i) - from;
    const uint8_t *copy[2] = {base + from, base + from};
    for (int side = 0; side < 2; side++) {
        int of = i - 1 + side;
        if (of < 0 || of >= g->n_regions) continue;
        const region *r = &g->region[of];
        const uint8_t *at = (staged ? r->stage : r->at) + (from - r->from);
        if (bytes && g->ops->copyOut(g->gap[side], at, (size_t)bytes, g->stream)) return 1;
        copy[side] = g->gap[side];
    }
    for (int64_t j = 0; j < bytes; j++)
        if (copy[0][j] != base[from + j]) base[from + j] = copy[0][j];
        else base[from + j] = copy[1][j];
    return 0;
}

/* Workspace stays where it is: nobody looks into it. */
static int fetchArena(const dkv_gpu *g, uint8_t *base, bool staged) {
    for (int i = 0; i <= g->n_regions; i++)
        if (fetchGap(g, i, base, staged)) return 1;
    for (int i = 0; i < g->n_regions; i++) {
        const dkv_block_place *b = &g->plan.block[i];
        const uint8_t *from = staged ? g->region[i].stage : g->region[i].at;
        if (b->role == DKV_ROLE_WORK || b->bytes == 0) continue;
        if (g->ops->copyOut(base + b->offset, from + (b->offset - g->region[i].from), (size_t)b->bytes,
                            g->stream))
            return 1;
    }
    return 0;
}

/* ---- running ---- */

/* Queues the kernel's work. The device is not waited for. */
static dkv_outcome callKernel(const dkv_gpu_launch *c, const dualkv_launch *l, char *why, size_t n) {
    why[0] = 0;
    int rc = c->backward ? c->kernel->backward(c->self, l, why, n) : c->kernel->forward(c->self, l, why, n);
    why[n - 1] = 0;
    if (rc && !why[0]) snprintf(why, n, "it returned %d without a reason", rc);
    return rc ? DKV_W_ERROR : DKV_W_OK;
}

/* The kernel between two events on its stream; errors of the launch, no waiting. */
static dkv_outcome callTimed(const dkv_gpu *g, const dkv_gpu_launch *c, const dualkv_launch *l, char *why,
                             size_t n) {
    if (g->ops->recordEvent(g->first, g->stream)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    dkv_outcome o = callKernel(c, l, why, n);
    if (o != DKV_W_OK) return g->ops->sync() ? DKV_W_CRASHED : o;
    if (g->ops->check() || g->ops->recordEvent(g->last, g->stream))
        return deviceFailed(g, DKV_W_ERROR, why, n);
    return DKV_W_OK;
}

static dkv_outcome await(const dkv_gpu *g, double *seconds, char *why, size_t n) {
    float ms = 0;
    if (g->ops->sync() || g->ops->elapsed(g->first, g->last, &ms))
        return deviceFailed(g, DKV_W_ERROR, why, n);
    *seconds = 1e-3 * (double)ms;
    return DKV_W_OK;
}

static dkv_outcome runPlain(const dkv_gpu *g, const dkv_gpu_launch *c, const dualkv_launch *l,
                            double *seconds, char *why, size_t n) {
    dkv_outcome o = callTimed(g, c, l, why, n);
    return o == DKV_W_OK ? await(g, seconds, why, n) : o;
}

static dkv_outcome runBusy(const dkv_gpu *g, const dkv_gpu_launch *c, const dualkv_launch *l, double *seconds,
                           char *why, size_t n) {
    void *busy = NULL;
    int beside = 0;
    if (g->ops->startBusy(BUSY_SECONDS, &busy)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    dkv_outcome o = callTimed(g, c, l, why, n);
    if (o == DKV_W_OK && g->ops->syncStream(g->stream)) o = deviceFailed(g, DKV_W_ERROR, why, n);
    if (g->ops->stopBusy(busy, &beside) && o == DKV_W_OK) o = deviceFailed(g, DKV_W_HARNESS, why, n);
    if (o == DKV_W_OK) o = await(g, seconds, why, n);
    if (o == DKV_W_OK && !beside) {
        snprintf(why, n, "the busy kernel had ended after %g s, before the kernel under test", BUSY_SECONDS);
        return DKV_W_HARNESS;
    }
    return o;
}

static dkv_outcome runGraph(const dkv_gpu *g, const dkv_gpu_launch *c, const dualkv_launch *l,
                            const uint8_t *base, double *seconds, char *why, size_t n) {
    const dkv_device_ops *o = g->ops;
    void *graph = NULL;
    if (o->beginGraph(g->stream)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    dkv_outcome rc = callKernel(c, l, why, n);
    if (o->endGraph(g->stream, &graph) && rc == DKV_W_OK) rc = deviceFailed(g, DKV_W_ERROR, why, n);
    if (rc == DKV_W_ERROR && o->sync()) rc = DKV_W_CRASHED;
    for (int replay = 0; replay < 2 && rc == DKV_W_OK; replay++) {
        if (replay && sendArena(g, base, false)) rc = deviceFailed(g, DKV_W_HARNESS, why, n);
        else if (o->recordEvent(g->first, g->stream) || o->launchGraph(graph, g->stream) ||
                 o->recordEvent(g->last, g->stream))
            rc = deviceFailed(g, DKV_W_ERROR, why, n);
        else rc = await(g, seconds, why, n);
    }
    if (graph && o->closeGraph(graph) && rc == DKV_W_OK) rc = deviceFailed(g, DKV_W_HARNESS, why, n);
    return rc;
}

/* Everything poison but the stage, which holds the arena. */
static int stageArena(dkv_gpu *g, const uint8_t *base) {
    if (!g->delay && g->ops->alloc(&g->delay, DELAY_BYTES)) return 1;
    for (int i = 0; i < g->n_regions; i++) {
        region *r = &g->region[i];
        if (!r->raw_stage && allocRegion(g, r, &r->raw_stage, &r->stage)) return 1;
        if (g->ops->fill(r->at, 0xFF, (size_t)r->bytes, g->stream)) return 1;
    }
    return sendArena(g, base, true) || g->ops->sync();
}

static int queueStage(const dkv_gpu *g, bool back) {
    for (int i = 0; i < g->n_regions; i++) {
        const region *r = &g->region[i];
        if (g->ops->copy(back ? r->stage : r->at, back ? r->at : r->stage, (size_t)r->bytes, g->stream))
            return 1;
    }
    return 0;
}

static dkv_outcome runSide(dkv_gpu *g, const dkv_gpu_launch *c, const dualkv_launch *l, const uint8_t *base,
                           double *seconds, char *why, size_t n) {
    if (stageArena(g, base)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    for (int i = 0; i < DELAY_FILLS; i++)
        if (g->ops->fill(g->delay, i, DELAY_BYTES, g->stream)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    if (queueStage(g, false)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    dkv_outcome o = callTimed(g, c, l, why, n);
    if (o == DKV_W_OK && queueStage(g, true)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    return o == DKV_W_OK ? await(g, seconds, why, n) : o;
}

dkv_outcome dkv_launchOnGpu(dkv_gpu *g, const dkv_gpu_launch *c, uint8_t *base, double *seconds, char *why,
                            size_t n) {
    dualkv_launch l;
    dkv_outcome o = DKV_W_OK;
    if (placePlan(g, c->plan, c->move) || placeProblem(g, c->view) || sendArena(g, base, false) || g->ops->sync()) {
        o = deviceFailed(g, DKV_W_HARNESS, why, n);
        dropRegions(g);
        return o;
    }
    makeDeviceLaunch(g, c->view, base, c->backward, &l);
    if (c->run == DKV_SIDE || c->run == DKV_GRAPH || c->run == DKV_BUSY) {
        o = runPlain(g, c, &l, seconds, why, n);
        if (o == DKV_W_OK && (sendArena(g, base, false) || g->ops->sync()))
            o = deviceFailed(g, DKV_W_HARNESS, why, n);
        if (o != DKV_W_OK) return o;
    }
    o = c->run == DKV_SIDE    ? runSide(g, c, &l, base, seconds, why, n)
        : c->run == DKV_GRAPH ? runGraph(g, c, &l, base, seconds, why, n)
        : c->run == DKV_BUSY  ? runBusy(g, c, &l, seconds, why, n)
                              : runPlain(g, c, &l, seconds, why, n);
    if (o == DKV_W_OK && fetchArena(g, base, c->run == DKV_SIDE)) o = deviceFailed(g, DKV_W_HARNESS, why, n);
    return o;
}

dkv_outcome dkv_probeGpu(dkv_gpu *g, char *json, size_t room, char *why, size_t n) {
    return g->ops->probe(json, room) ? deviceFailed(g, DKV_W_HARNESS, why, n) : DKV_W_OK;
}

/* ---- timing ---- */

#define WARM_SECONDS 0.3
#define WARM_LEAST 3
#define WARM_MOST 500
#define TIMED_SECONDS 2.0
#define TIMED_LEAST 5
#define TIMED_MOST 100

static int byValue(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int sendInputs(const dkv_gpu *g, const dkv_inputs *in) {
    const void *from[DKV_SLOT_O] = {in->q, in->k, in->v, in->d_o, in->d_lse, in->sink};
    for (int s = 0; s < DKV_SLOT_O; s++) {
        const dkv_view *w = &g->plan.view[s];
        size_t bytes = (size_t)g->plan.block[w->block].bytes;
        if (w->present && bytes && g->ops->copyIn(onDevice(g, w->offset), from[s], bytes, g->stream))
            return 1;
    }
    return g->ops->sync();
}

dkv_outcome dkv_timeOnGpu(dkv_gpu *g, const dkv_gpu_launch *c, const dkv_inputs *in, dkv_gpu_times *out,
                          char *why, size_t n) {
    dkv_gpu_launch call = *c;
    dualkv_launch l[2];
    double seconds[2][TIMED_MOST], spent = 0;
    uint8_t *base = (uint8_t *)(uintptr_t)PHASE; /* only differences to it are formed */
    int directions = c->view->grad ? 2 : 1;
    dkv_outcome o = DKV_W_OK;
    memset(out, 0, sizeof *out);
    if (placePlan(g, c->plan, 0) || placeProblem(g, c->view) || sendInputs(g, in))
        o = deviceFailed(g, DKV_W_HARNESS, why, n);
    for (int i = 0; i < g->n_regions; i++) out->bytes += g->plan.block[i].bytes;
    for (int b = 0; b < directions && o == DKV_W_OK; b++) makeDeviceLaunch(g, c->view, base, b, &l[b]);
    bool warm = false;
    for (int i = 1; o == DKV_W_OK && out->runs < TIMED_MOST; i++) {
        for (call.backward = 0; call.backward < directions && o == DKV_W_OK; call.backward++) {
            o = runPlain(g, &call, &l[call.backward], &seconds[call.backward][out->runs], why, n);
            spent += seconds[call.backward][out->runs];
        }
        if (warm) out->runs++;
        if (warm && out->runs >= TIMED_LEAST && spent > TIMED_SECONDS) break;
        if (!warm && ((i >= WARM_LEAST && spent > WARM_SECONDS) || i >= WARM_MOST)) {
            warm = true;
            spent = 0;
        }
    }
    for (int b = 0; b < directions && o == DKV_W_OK; b++) {
        qsort(seconds[b], (size_t)out->runs, sizeof **seconds, byValue);
        out->seconds[b] = seconds[b][out->runs / 2];
    }
    dropRegions(g);
    return o;
}
