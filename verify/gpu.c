#include "gpu.h"

#include <ctype.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../ref/device.h"
#include "spans.h"

/* Addresses on the device equal the offsets in the arena modulo this: twice the largest alignment. */
#define PHASE 8192
#define DELAY_BYTES ((size_t)64 << 20)
#define DELAY_FILLS 256 /* of DELAY_BYTES each: 5 ms at 3 TB/s */
#define BUSY_SECONDS 20.0
/* Small arenas are an image in one piece of memory that stays: no allocation, one copy each way. */
#define SMALL_BYTES ((int64_t)16 << 20)
#define PLACE_BYTES (SMALL_BYTES + 2 * PHASE)
#define TABLES_BYTES ((size_t)1 << 20)
#define TABLE_ALIGN 256
/* Large copies pass through pinned memory, in two halves, which several threads fill: pageable memory goes at 7 GB/s. */
#define PIPE_MOST ((int64_t)256 << 20)

/* Bytes [from, from + bytes) of the arena: the whole of an image, else a block with the gaps on both sides of it. */
typedef struct region {
    int64_t from, bytes;
    int64_t room;          /* bytes of raw */
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
    /* Two places for images (a move goes to the other), then the tables of a small problem; `host`, pinned, one place and
     * the tables. `used`: bytes at the present place that are not 0xFF. */
    void *slab, *slab_stage, *host;
    uint8_t *place[2];
    int at_place;
    int64_t used;
    bool image; /* the plan is one: n_regions is 1 */
    void *pipe;   /* pinned; NULL until a copy of pipe_bytes or more was made */
    int64_t pipe_bytes;
    uint64_t sum[DKV_N_SLOTS]; /* of a block on the device, as the arena holds it, too */
    bool summed[DKV_N_SLOTS];
    bool fetched; /* the arena holds what the device does: forward's was fetched, but for the workspace */
    void *tables; /* of the problem, where they are not in the slab */
    size_t tables_room;
    const uint8_t *segments, *ranges, *slopes;
    bool has_problem;
    bool exact; /* every allocation made anew, of its own size */
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

static int readEnvironment(dkv_gpu *g, dkv_err *err) {
    const char *exact = getenv("DUALKV_EXACT_MEMORY"), *pipe = getenv("DUALKV_PIPE_BYTES");
    char *end = NULL;
    g->exact = exact && exact[0];
    g->pipe_bytes = PIPE_MOST;
    if (!pipe || !pipe[0]) return 0;
    g->pipe_bytes = strtoll(pipe, &end, 10);
    if (*end || g->pipe_bytes < 1 || g->pipe_bytes > PIPE_MOST)
        return dkv_fail(err, DKV_EHARNESS, "DUALKV_PIPE_BYTES: '%.80s' is no number of bytes from 1 to %" PRId64, pipe, PIPE_MOST);
    return 0;
}

int dkv_openGpu(void *so, dkv_gpu **out, dkv_gpu_info *info, dkv_err *err) {
    dkv_device_info d;
    int devices = 0;
    *out = NULL;
    memset(info, 0, sizeof *info);
    dkv_gpu *g = calloc(1, sizeof *g);
    if (!g) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    int rc = readEnvironment(g, err);
    if (!rc) rc = findOps(so, g, err);
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

static void releaseRegions(const dkv_gpu *g, region *all) {
    for (int i = 0; i < DKV_N_SLOTS; i++) {
        g->ops->release(all[i].raw);
        g->ops->release(all[i].raw_stage);
    }
    memset(all, 0, DKV_N_SLOTS * sizeof *all);
}

static void dropGaps(dkv_gpu *g) {
    for (int i = 0; i < 2; i++) {
        free(g->gap[i]);
        g->gap[i] = NULL;
    }
}

static void dropRegions(dkv_gpu *g) {
    releaseRegions(g, g->region);
    g->n_regions = 0;
    dropGaps(g);
}

void dkv_dropGpuProblem(dkv_gpu *g) {
    if (!g) return;
    g->has_problem = false;
    if (!g->exact) return;
    g->ops->release(g->tables);
    g->tables = NULL;
    g->tables_room = 0;
}

void dkv_closeGpu(dkv_gpu *g) {
    if (!g) return;
    g->ops->release(g->tables);
    dropRegions(g);
    g->ops->releaseHost(g->pipe);
    g->ops->release(g->slab);
    g->ops->release(g->slab_stage);
    g->ops->releaseHost(g->host);
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

/* Memory for a region at its phase, all of it poison. */
static int allocRegion(const dkv_gpu *g, const region *r, void **raw, int64_t *room, uint8_t **at) {
    int64_t need = r->bytes + PHASE, take = need;
    if (!g->exact && need <= SMALL_BYTES)
        for (take = 1 << 16; take < need; take *= 2) {
        }
    if (!*raw || *room != take) {
        g->ops->release(*raw);
        *raw = NULL;
        if (g->ops->alloc(raw, (size_t)take)) return 1;
        *room = take;
    }
    if (g->ops->fill(*raw, 0xFF, (size_t)need, g->stream)) return 1;
    *at = (uint8_t *)*raw + (((uintptr_t)r->from - (uintptr_t)*raw) & (PHASE - 1));
    return 0;
}

static void releaseLarge(const dkv_gpu *g, region *r) {
    if (r->room <= SMALL_BYTES) return;
    g->ops->release(r->raw);
    r->raw = NULL;
    r->room = 0;
}

static uint8_t *atPhase(void *p) { return (uint8_t *)p + (-(uintptr_t)p & (PHASE - 1)); }

/* Once; without it, regions are allocated and copied one by one. All of it is 0xFF, NaN in every format. */
static bool openSlab(dkv_gpu *g) {
    const size_t bytes = 2 * (size_t)PLACE_BYTES + TABLES_BYTES;
    if (g->slab) return true;
    if (g->ops->alloc(&g->slab, bytes) ||
        (!g->host && g->ops->allocHost(&g->host, (size_t)PLACE_BYTES + TABLES_BYTES)) ||
        g->ops->fill(g->slab, 0xFF, bytes, g->stream)) { /* last: nothing is queued on what is released */
        g->ops->release(g->slab);
        g->slab = NULL;
        return false;
    }
    for (int i = 0; i < 2; i++) g->place[i] = atPhase(g->slab) + i * (PLACE_BYTES - PHASE);
    return true;
}

static bool fitsImage(dkv_gpu *g, const dkv_plan *plan) {
    return !g->exact && plan->size <= SMALL_BYTES && openSlab(g);
}

/* What a plan before it left behind its end goes with the first copy (sendArena). */
static int placeImage(dkv_gpu *g, const dkv_plan *plan, int move) {
    if (move && g->used && g->ops->fill(g->place[g->at_place], 0xFF, (size_t)g->used, g->stream)) return 1;
    if (move) {
        g->at_place ^= 1;
        g->used = 0;
    }
    for (int i = 0; i < DKV_N_SLOTS; i++) releaseLarge(g, &g->region[i]);
    g->region[0].from = 0;
    g->region[0].bytes = plan->size;
    g->region[0].at = g->place[g->at_place];
    g->region[0].stage = NULL;
    g->n_regions = 1;
    return 0;
}

static int allocPlan(dkv_gpu *g, const dkv_plan *plan, int move) {
    int64_t widest = 1;
    if (g->exact) dropRegions(g);
    dropGaps(g);
    g->n_regions = 0;
    g->plan = *plan;
    g->fetched = false;
    memset(g->summed, 0, sizeof g->summed);
    g->image = fitsImage(g, plan);
    if (g->image) return placeImage(g, plan, move);
    for (int i = 0; i <= plan->n_blocks; i++)
        if (gapEnd(plan, i) - gapBegin(plan, i) > widest) widest = gapEnd(plan, i) - gapBegin(plan, i);
    for (int i = 0; i < 2; i++) g->gap[i] = malloc((size_t)widest);
    if (!g->gap[0] || !g->gap[1]) return 1;
    for (int i = 0; i < plan->n_blocks; i++) {
        region *r = &g->region[g->n_regions++];
        r->from = gapBegin(plan, i);
        r->bytes = gapEnd(plan, i + 1) - r->from;
        g->ops->release(r->raw_stage);
        r->raw_stage = NULL;
        if (allocRegion(g, r, &r->raw, &r->room, &r->at)) return 1;
    }
    for (int i = plan->n_blocks; i < DKV_N_SLOTS; i++) releaseLarge(g, &g->region[i]); /* of a plan with more blocks */
    return 0;
}

/* Memory stays from launch to launch of a plan; `move`: the new is taken before the old is released, room allowing. */
static int placePlan(dkv_gpu *g, const dkv_plan *plan, int move) {
    region old[DKV_N_SLOTS];
    bool same = g->n_regions && memcmp(&g->plan, plan, sizeof *plan) == 0;
    if (same && !move) return 0;
    if (!same || g->image) return allocPlan(g, plan, move);
    memcpy(old, g->region, sizeof old);
    memset(g->region, 0, sizeof g->region);
    int rc = allocPlan(g, plan, move);
    releaseRegions(g, old);
    return rc ? allocPlan(g, plan, move) : 0;
}

/* Room for the problem's arrays: on the device, and here for the copy (to be freed, unless it is the slab's). */
static int findTables(dkv_gpu *g, size_t bytes, uint8_t **device, uint8_t **here) {
    if (g->slab && bytes <= TABLES_BYTES) {
        *device = (uint8_t *)g->slab + 2 * (size_t)PLACE_BYTES;
        *here = (uint8_t *)g->host + PLACE_BYTES;
        return 0;
    }
    if (bytes > g->tables_room) {
        g->ops->release(g->tables);
        g->tables = NULL;
        g->tables_room = 0;
        if (g->ops->alloc(&g->tables, bytes)) return 1;
        g->tables_room = bytes;
    }
    *device = g->tables;
    *here = malloc(bytes + 1);
    return *here == NULL;
}

/* The problem's arrays, one after another. In the slab the copy is queued only. */
static int placeProblem(dkv_gpu *g, const dualkv_problem *v) {
    const void *const from[] = {v->segments, v->ranges, v->alibi_slopes};
    const size_t bytes[] = {(size_t)v->n_segments * sizeof *v->segments, (size_t)v->n_ranges * sizeof *v->ranges,
                            v->alibi_slopes ? (size_t)v->hq * sizeof(float) : 0};
    const uint8_t **const to[] = {&g->segments, &g->ranges, &g->slopes};
    size_t at[4] = {0};
    uint8_t *device, *here;
    if (g->has_problem) return 0;
    for (int i = 0; i < 3; i++) at[i + 1] = at[i] + (bytes[i] + TABLE_ALIGN - 1) / TABLE_ALIGN * TABLE_ALIGN;
    if (findTables(g, at[3], &device, &here)) return 1;
    memset(here, 0, at[3]);
    for (int i = 0; i < 3; i++) {
        if (bytes[i]) memcpy(here + at[i], from[i], bytes[i]);
        *to[i] = from[i] ? device + at[i] : NULL;
    }
    const bool own = device == g->tables;
    int rc = at[3] == 0 ? 0
             : own      ? g->ops->copyIn(device, here, at[3], g->stream)
                        : g->ops->queueIn(device, here, at[3], g->stream);
    if (own) free(here);
    g->has_problem = !rc;
    return rc;
}

static void *onDevice(const dkv_gpu *g, int64_t offset) {
    if (g->image) return g->region[0].at + offset;
    for (int i = 0; i < g->n_regions; i++) {
        const dkv_block_place *b = &g->plan.block[i];
        if (offset >= b->offset && offset <= b->offset + b->bytes)
            return g->region[i].at + (offset - g->region[i].from);
    }
    return NULL;
}

/* The launch over the arena as it lies on the device. */
static void makeDeviceLaunch(const dkv_gpu *g, const dualkv_problem *v, int backward, dualkv_launch *l) {
    uint8_t *base = (uint8_t *)(uintptr_t)PHASE; /* only differences to it are formed */
    dkv_makeLaunch(&g->plan, base, v, backward, l);
    void **const pointers[] = {&l->q.data,   &l->k.data,   &l->v.data,     &l->o.data,
                               &l->lse.data, &l->d_o.data, &l->d_lse.data, &l->dq.data,
                               &l->dk.data,  &l->dv.data,  &l->workspace};
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++)
        if (*pointers[i]) *pointers[i] = onDevice(g, (uint8_t *)*pointers[i] - base);
    if (l->sink) l->sink = onDevice(g, (const uint8_t *)l->sink - base);
    if (l->dsink) l->dsink = onDevice(g, (uint8_t *)l->dsink - base);
    l->stream = g->stream;
    l->device_segments = (const dualkv_segment *)g->segments;
    l->device_ranges = (const dualkv_range *)g->ranges;
    l->device_alibi_slopes = (const float *)g->slopes;
}

/* ---- there and back ---- */

/* Between a small arena's file and memory, without a mapping whose pages would come one by one. */
static int moveBytes(int fd, bool write, uint8_t *memory, int64_t at, int64_t end) {
    while (at < end) {
        ssize_t n = write ? pwrite(fd, memory, (size_t)(end - at), at) : pread(fd, memory, (size_t)(end - at), at);
        if (n <= 0) return 1;
        memory += n;
        at += n;
    }
    return 0;
}

static int64_t halfPipe(const dkv_gpu *g) { return (g->pipe_bytes + 1) / 2; }
static uint8_t *sideOfPipe(const dkv_gpu *g, int64_t piece) { return (uint8_t *)g->pipe + piece % 2 * halfPipe(g); }

/* Bytes [at, at + bytes) of the arena to the device, and back. One half of the pipe is in flight while the other one is
 * filled, or emptied. */
static int copyIn(dkv_gpu *g, const dkv_gpu_launch *c, uint8_t *device, int64_t at, int64_t bytes) {
    const int64_t half = halfPipe(g);
    int rc = 0;
    if (bytes >= g->pipe_bytes && !g->pipe && g->ops->allocHost(&g->pipe, 2 * (size_t)half)) g->pipe = NULL;
    if (bytes < g->pipe_bytes || !g->pipe) return g->ops->copyIn(device, c->base + at, (size_t)bytes, g->stream);
    for (int64_t piece = 0, i = 0; i < bytes && !rc; piece++, i += half) {
        const int64_t n = bytes - i < half ? bytes - i : half;
        dkv_copySpans(sideOfPipe(g, piece), c->base + at + i, n);
        rc = g->ops->syncStream(g->stream) || g->ops->queueIn(device + i, sideOfPipe(g, piece), (size_t)n, g->stream);
    }
    return g->ops->syncStream(g->stream) || rc;
}

static int copyOut(const dkv_gpu *g, const dkv_gpu_launch *c, int64_t at, const uint8_t *device, int64_t bytes) {
    const int64_t half = halfPipe(g);
    if (bytes < g->pipe_bytes || !g->pipe) return g->ops->copyOut(c->base + at, device, (size_t)bytes, g->stream);
    int rc = g->ops->queueOut(g->pipe, device, (size_t)(bytes < half ? bytes : half), g->stream);
    for (int64_t piece = 0, i = 0; i < bytes && !rc; piece++, i += half) {
        const int64_t n = bytes - i < half ? bytes - i : half, left = bytes - i - n;
        rc = g->ops->syncStream(g->stream);
        if (!rc && left)
            rc = g->ops->queueOut(sideOfPipe(g, piece + 1), device + i + n, (size_t)(left < half ? left : half), g->stream);
        if (!rc) dkv_copySpans(c->base + at + i, sideOfPipe(g, piece), n);
    }
    return g->ops->syncStream(g->stream) || rc;
}

/* Is the block summed on the device instead of moved, where the launch may not write there? Small ones move as fast. */
static bool isSummed(const dkv_gpu *g, const dkv_gpu_launch *c, int i) {
    return c->run == DKV_SINGLE && !g->image && g->plan.block[i].role != DKV_ROLE_WORK && g->region[i].bytes >= g->pipe_bytes;
}

static bool mayWrite(const dkv_gpu *g, const dkv_gpu_launch *c, int i) {
    return g->plan.block[i].role == (c->backward ? DKV_ROLE_BACKWARD : DKV_ROLE_FORWARD);
}

static int sumBlock(const dkv_gpu *g, int i, uint64_t *sum) {
    const dkv_block_place *b = &g->plan.block[i];
    const region *r = &g->region[i];
    return g->ops->sum(r->at + (b->offset - r->from), (size_t)b->bytes, g->stream, sum);
}

/* A region as forward is to find it: where its block is an output's, all of it is the arena's pattern. */
static int sendRegion(dkv_gpu *g, const dkv_gpu_launch *c, int i) {
    const region *r = &g->region[i];
    uint16_t pattern;
    if (!isSummed(g, c, i)) return copyIn(g, c, r->at, r->from, r->bytes);
    memcpy(&pattern, c->base + r->from, sizeof pattern); /* of the gap before the block */
    if (!c->backward && g->plan.block[i].role != DKV_ROLE_INPUT ? g->ops->paint(r->at, pattern, (size_t)r->bytes, g->stream)
                                                              : copyIn(g, c, r->at, r->from, r->bytes))
        return 1;
    g->summed[i] = true;
    return sumBlock(g, i, &g->sum[i]);
}

/* Of an image the copy is queued only. */
static int sendArena(dkv_gpu *g, const dkv_gpu_launch *c, bool staged) {
    const bool known = c->backward && g->fetched && !staged && !c->resend;
    g->fetched = false;
    for (int i = 0; i < g->n_regions && !g->image; i++) {
        const region *r = &g->region[i];
        if (known && g->plan.block[i].role != DKV_ROLE_WORK) continue;
        if (staged ? copyIn(g, c, r->stage, r->from, r->bytes) : sendRegion(g, c, i)) return 1;
    }
    if (!g->image) return 0;
    const region *r = &g->region[0];
    int64_t n = r->bytes;
    if (moveBytes(c->fd, false, g->host, 0, n)) return 1;
    if (!staged && g->used > n) {
        memset((uint8_t *)g->host + n, 0xFF, (size_t)(g->used - n));
        n = g->used;
    }
    if (!staged) g->used = r->bytes;
    return g->ops->queueIn(staged ? r->stage : r->at, g->host, (size_t)n, g->stream);
}

/* Bytes [from, from + bytes) of a region into `to`. */
static int fetchBytes(const dkv_gpu *g, const region *r, int64_t from, int64_t bytes, bool staged, uint8_t *to) {
    return bytes && g->ops->copyOut(to, (staged ? r->stage : r->at) + (from - r->from), (size_t)bytes, g->stream);
}

/* A gap lies on the device twice, behind one block and before the next; a byte that changed in either counts.
 */
static int fetchGap(const dkv_gpu *g, int i, uint8_t *base, bool staged) {
    int64_t from = gapBegin(&g->plan, i), bytes = gapEnd(&g->plan, i) - from;
    const uint8_t *copy[2] = {base + from, base + from};
    for (int side = 0; side < 2; side++) {
        int of = i - 1 + side;
        if (of < 0 || of >= g->n_regions) continue;
        if (fetchBytes(g, &g->region[of], from, bytes, staged, g->gap[side])) return 1;
        copy[side] = g->gap[side];
    }
    for (int64_t j = 0; j < bytes; j++)
        if (copy[0][j] != base[from + j]) base[from + j] = copy[0][j];
        else base[from + j] = copy[1][j];
    return 0;
}

/* The bytes of a piece of the image, queued; then, once they are there, from the pinned memory to the arena. */
static int queuePiece(const dkv_gpu *g, int64_t from, int64_t to, bool staged) {
    const region *r = &g->region[0];
    return to > from && g->ops->queueOut((uint8_t *)g->host + from, (staged ? r->stage : r->at) + from, (size_t)(to - from),
                                         g->stream);
}

/* Workspace stays where it is, as the last block: nobody looks into it. */
static int fetchImage(const dkv_gpu *g, int fd, bool staged) {
    const dkv_block_place *last = &g->plan.block[g->plan.n_blocks - 1];
    const bool work = last->role == DKV_ROLE_WORK;
    const int64_t size = g->plan.size, first = work ? last->offset : size, second = work ? first + last->bytes : size;
    if (queuePiece(g, 0, first, staged) || queuePiece(g, second, size, staged) || g->ops->syncStream(g->stream)) return 1;
    return moveBytes(fd, true, g->host, 0, first) || moveBytes(fd, true, (uint8_t *)g->host + second, second, size);
}

static int fetchArena(dkv_gpu *g, const dkv_gpu_launch *c, bool staged) {
    uint8_t *base = c->base;
    if (g->image) return fetchImage(g, c->fd, staged);
    for (int i = 0; i <= g->n_regions; i++)
        if (fetchGap(g, i, base, staged)) return 1;
    for (int i = 0; i < g->n_regions; i++) {
        const dkv_block_place *b = &g->plan.block[i];
        if (b->role == DKV_ROLE_WORK) continue;
        const region *r = &g->region[i];
        const bool summed = !staged && isSummed(g, c, i);
        const uint64_t was = g->sum[i];
        if (summed && sumBlock(g, i, &g->sum[i])) return 1;
        if (summed && g->summed[i] && !mayWrite(g, c, i) && g->sum[i] == was) continue; /* the arena has it */
        g->summed[i] = summed;
        if (b->bytes && copyOut(g, c, b->offset, (staged ? r->stage : r->at) + (b->offset - r->from), b->bytes)) return 1;
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

static dkv_outcome runGraph(dkv_gpu *g, const dkv_gpu_launch *c, const dualkv_launch *l,
                            double *seconds, char *why, size_t n) {
    const dkv_device_ops *o = g->ops;
    void *graph = NULL;
    if (o->beginGraph(g->stream)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    dkv_outcome rc = callKernel(c, l, why, n);
    if (o->endGraph(g->stream, &graph) && rc == DKV_W_OK) rc = deviceFailed(g, DKV_W_ERROR, why, n);
    if (rc == DKV_W_ERROR && o->sync()) rc = DKV_W_CRASHED;
    for (int replay = 0; replay < 2 && rc == DKV_W_OK; replay++) {
        if (replay && (sendArena(g, c, false) || o->sync())) rc = deviceFailed(g, DKV_W_HARNESS, why, n);
        else if (o->recordEvent(g->first, g->stream) || o->launchGraph(graph, g->stream) ||
                 o->recordEvent(g->last, g->stream))
            rc = deviceFailed(g, DKV_W_ERROR, why, n);
        else rc = await(g, seconds, why, n);
    }
    if (graph && o->closeGraph(graph) && rc == DKV_W_OK) rc = deviceFailed(g, DKV_W_HARNESS, why, n);
    return rc;
}

/* Everything poison but the stage, which holds the arena. */
static int stageArena(dkv_gpu *g, const dkv_gpu_launch *c) {
    if (!g->delay && g->ops->alloc(&g->delay, DELAY_BYTES)) return 1;
    if (g->image && !g->slab_stage && g->ops->alloc(&g->slab_stage, (size_t)PLACE_BYTES)) return 1;
    for (int i = 0; i < g->n_regions; i++) {
        region *r = &g->region[i];
        int64_t room = 0;
        if (g->image) r->stage = atPhase(g->slab_stage);
        else if (!r->raw_stage && allocRegion(g, r, &r->raw_stage, &room, &r->stage)) return 1;
        if (g->ops->fill(r->at, 0xFF, (size_t)r->bytes, g->stream)) return 1;
    }
    return sendArena(g, c, true) || g->ops->sync();
}

static int queueStage(const dkv_gpu *g, bool back) {
    for (int i = 0; i < g->n_regions; i++) {
        const region *r = &g->region[i];
        if (g->ops->copy(back ? r->stage : r->at, back ? r->at : r->stage, (size_t)r->bytes, g->stream))
            return 1;
    }
    return 0;
}

static dkv_outcome runSide(dkv_gpu *g, const dkv_gpu_launch *c, const dualkv_launch *l, double *seconds,
                           char *why, size_t n) {
    if (stageArena(g, c)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    for (int i = 0; i < DELAY_FILLS; i++)
        if (g->ops->fill(g->delay, i, DELAY_BYTES, g->stream)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    if (queueStage(g, false)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    dkv_outcome o = callTimed(g, c, l, why, n);
    if (o == DKV_W_OK && queueStage(g, true)) return deviceFailed(g, DKV_W_HARNESS, why, n);
    return o == DKV_W_OK ? await(g, seconds, why, n) : o;
}

bool dkv_needsMapping(dkv_gpu *g, const dkv_plan *plan) { return !fitsImage(g, plan); }

dkv_outcome dkv_launchOnGpu(dkv_gpu *g, const dkv_gpu_launch *c, double *seconds, char *why, size_t n) {
    dualkv_launch l;
    dkv_outcome o = DKV_W_OK;
    if (placePlan(g, c->plan, c->move) || placeProblem(g, c->view) || sendArena(g, c, false) || g->ops->sync()) {
        o = deviceFailed(g, DKV_W_HARNESS, why, n);
        dropRegions(g);
        return o;
    }
    makeDeviceLaunch(g, c->view, c->backward, &l);
    if (c->run == DKV_SIDE || c->run == DKV_GRAPH || c->run == DKV_BUSY) {
        o = runPlain(g, c, &l, seconds, why, n);
        if (o == DKV_W_OK && (sendArena(g, c, false) || g->ops->sync()))
            o = deviceFailed(g, DKV_W_HARNESS, why, n);
        if (o != DKV_W_OK) return o;
    }
    o = c->run == DKV_SIDE    ? runSide(g, c, &l, seconds, why, n)
        : c->run == DKV_GRAPH ? runGraph(g, c, &l, seconds, why, n)
        : c->run == DKV_BUSY  ? runBusy(g, c, &l, seconds, why, n)
                              : runPlain(g, c, &l, seconds, why, n);
    if (o == DKV_W_OK && fetchArena(g, c, c->run == DKV_SIDE)) o = deviceFailed(g, DKV_W_HARNESS, why, n);
    g->fetched = o == DKV_W_OK && !c->backward && c->run == DKV_SINGLE;
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

static int sendInputs(dkv_gpu *g, const dkv_inputs *in) {
    const void *from[DKV_SLOT_O] = {in->q, in->k, in->v, in->d_o, in->d_lse, in->sink};
    for (int s = 0; s < DKV_SLOT_O; s++) {
        const dkv_view *w = &g->plan.view[s];
        size_t bytes = (size_t)g->plan.block[w->block].bytes;
        if (w->present && bytes && g->ops->copyIn(onDevice(g, w->offset), from[s], bytes, g->stream))
            return 1;
    }
    if (g->used < g->plan.size) g->used = g->plan.size;
    return g->ops->sync();
}

dkv_outcome dkv_timeOnGpu(dkv_gpu *g, const dkv_gpu_launch *c, const dkv_inputs *in, dkv_gpu_times *out,
                          char *why, size_t n) {
    dkv_gpu_launch call = *c;
    dualkv_launch l[2];
    double seconds[2][TIMED_MOST], spent = 0;
    int directions = c->view->grad ? 2 : 1;
    dkv_outcome o = DKV_W_OK;
    memset(out, 0, sizeof *out);
    if (placePlan(g, c->plan, 0) || placeProblem(g, c->view) || sendInputs(g, in))
        o = deviceFailed(g, DKV_W_HARNESS, why, n);
    for (int i = 0; i < g->plan.n_blocks; i++) out->bytes += g->plan.block[i].bytes;
    for (int b = 0; b < directions && o == DKV_W_OK; b++) makeDeviceLaunch(g, c->view, b, &l[b]);
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
