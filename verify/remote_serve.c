/* remote_serve.c: the oracle on the device, as the worker that holds it sees it. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "../ref/device.h"
#include "../ref/pages.h"
#include "gpu.h"
#include "guard.h"
#include "remote.h"
#include "remote_arena.h"
#include "spans.h"

#define KEPT ((int64_t)64 << 20) /* of the device for inputs, from question to question */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; what is older says no, and pages come one by one */
#endif

struct dkv_remote_server {
    void *so;
    const dkv_oracle_ops *oracle;
    const dkv_device_ops *device;
    void *inputs; /* on the device; KEPT bytes once there were any */
    dkv_remote_room room; /* of the last large question: the next one often lies there, too */
    dev_t device_of;      /* that file: its device and number */
    ino_t number;
};

static dkv_outcome findTables(dkv_remote_server *s, const char *plugin, char *why, size_t n) {
    dkv_oracle_ops_fn oracle = NULL;
    dkv_device_ops_fn device = NULL;
    s->so = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    if (!s->so) {
        snprintf(why, n, "cannot load: %.300s", dlerror());
        return DKV_W_ERROR;
    }
    *(void **)&oracle = dlsym(s->so, DKV_ORACLE_SYMBOL);
    *(void **)&device = dlsym(s->so, DKV_DEVICE_SYMBOL);
    if (!oracle || !device) {
        snprintf(why, n, "%.300s has no oracle", plugin);
        return DKV_W_ERROR;
    }
    s->oracle = oracle();
    s->device = device();
    if (s->oracle && s->device && s->oracle->size >= sizeof *s->oracle && s->device->size >= sizeof *s->device)
        return DKV_W_OK;
    snprintf(why, n, "%.300s is older than this program", plugin);
    return DKV_W_ERROR;
}

dkv_outcome dkv_openServer(const char *plugin, dkv_remote_server **out, dkv_gpu_info *info, char *why, size_t n) {
    dkv_gpu *gpu = NULL;
    dkv_err err = {0};
    dkv_guardShared(); /* any thread of the coordinator may have been the first to ask */
    *out = calloc(1, sizeof **out);
    if (!*out) return DKV_W_HARNESS;
    dkv_outcome o = findTables(*out, plugin, why, n);
    if (o == DKV_W_OK && dkv_openGpu((*out)->so, &gpu, info, &err)) {
        snprintf(why, n, "%s", err.text);
        o = DKV_W_HARNESS;
    } else if (o == DKV_W_OK && !gpu) {
        snprintf(why, n, "there is no CUDA device");
        o = DKV_W_ERROR;
    }
    dkv_closeGpu(gpu);
    return o;
}

void dkv_closeServer(dkv_remote_server *s) {
    if (s && s->room.base) munmap(s->room.base, s->room.bytes);
    if (s && s->inputs) s->device->release(s->inputs);
    if (s && s->so) dlclose(s->so);
    free(s);
}

/* What the device holds for one question. */
typedef struct job {
    dkv_problem p;
    dkv_layout l;
    bool has_layout;
    dkv_device_inputs in;
    const void *kernel_o;
    const float *kernel_lse;
    void *held; /* inputs that are more than the server keeps room for */
    dkv_device_oracle *oracle;
} job;

static dkv_outcome said(const dkv_remote_server *s, const char *text, char *why, size_t n) {
    snprintf(why, n, "%s", text[0] ? text : "it failed without a reason");
    return s->device->sync() ? DKV_W_CRASHED : DKV_W_HARNESS;
}

/* Too large for the device is a refusal, seen before anything is allocated. */
static dkv_outcome checkRoom(const dkv_remote_server *s, const dkv_arena_head *h, const job *j, char *why, size_t n) {
    const double gib = 1024.0 * 1024 * 1024;
    uint64_t left = 0, total = 0;
    double need = (double)s->oracle->bytes(&j->p, &j->l);
    for (int i = 0; i < DKV_N_INPUTS; i++) need += (double)h->input_bytes[i];
    if (s->device->memory(&left, &total)) return said(s, s->device->error(), why, n);
    if (need <= (double)left) return DKV_W_OK;
    snprintf(why, n, "it needs %.1f GiB of the device, %.1f are free", need / gib, (double)left / gib);
    return DKV_W_ERROR;
}

/* Where a piece of the arena lies on the device; NULL: it is not there. */
static const void *inCopy(const uint8_t *copy, int64_t begin, int64_t at) { return at ? copy + (at - begin) : NULL; }

/* Inputs, and what the kernel left, lie one after another in the arena: one copy. */
static dkv_outcome sendInputs(dkv_remote_server *s, const dkv_arena_head *h, const uint8_t *base, job *j, char *why,
                              size_t n) {
    int64_t begin = INT64_MAX, end = 0, count[DKV_N_OUTPUTS], elt = j->p.dtype == DUALKV_FP32 ? 4 : 2;
    dkv_countOutputs(&j->l, count);
    const int64_t at[DKV_N_INPUTS + 2] = {h->input_at[0], h->input_at[1], h->input_at[2], h->input_at[3],
                                          h->input_at[4], h->input_at[5], h->o_at,        h->lse_at};
    for (int i = 0; i < DKV_N_INPUTS + 2; i++) {
        int64_t bytes = i < DKV_N_INPUTS ? h->input_bytes[i] : i == DKV_N_INPUTS ? elt * count[DKV_O] : 4 * count[DKV_LSE];
        if (at[i] == 0) continue;
        begin = at[i] < begin ? at[i] : begin;
        end = at[i] + bytes > end ? at[i] + bytes : end;
    }
    const int64_t bytes = end > begin ? end - begin : 0;
    void **to = bytes <= KEPT ? &s->inputs : &j->held;
    if ((!*to && s->device->alloc(to, (size_t)(bytes <= KEPT ? KEPT : bytes))) ||
        (bytes && s->device->copyIn(*to, base + begin, (size_t)bytes, NULL)))
        return said(s, s->device->error(), why, n);
    const uint8_t *x = *to;
    j->in = (dkv_device_inputs){inCopy(x, begin, at[DKV_IN_Q]),    inCopy(x, begin, at[DKV_IN_K]),
                                inCopy(x, begin, at[DKV_IN_V]),    inCopy(x, begin, at[DKV_IN_DO]),
                                inCopy(x, begin, at[DKV_IN_DLSE]), inCopy(x, begin, at[DKV_IN_SINK])};
    j->kernel_o = inCopy(x, begin, h->o_at);
    j->kernel_lse = inCopy(x, begin, h->lse_at);
    return DKV_W_OK;
}

/* The answer's pages, made while the device computes: page by page, while it copies, they would take longer than both. */
static void touchSpan(int64_t first, int64_t end, int span, void *arg) {
    uint8_t *base = arg;
    (void)span;
    if (end > first) madvise(base + first * DKV_ARENA_ALIGN, (size_t)(end - first) * DKV_ARENA_ALIGN, MADV_POPULATE_WRITE);
}

static void *touchAnswer(void *base) {
    const dkv_arena_head *h = base;
    const int64_t pages = h->bytes / DKV_ARENA_ALIGN;
    dkv_eachSpan(pages, (double)h->bytes / 4, touchSpan, base);
    return NULL;
}

/* Parts [from, end) of the answer. */
typedef struct reading {
    const dkv_oracle_ops *oracle;
    dkv_device_oracle *o;
    dkv_arena_head *h;
    uint8_t *base;
    int from, end, rc;
} reading;

static void *readParts(void *arg) {
    reading *r = arg;
    dkv_arena_head *h = r->h;
    for (int part = r->from; part < r->end && !r->rc; part++)
        for (int id = 0; id < DKV_N_OUTPUTS && !r->rc; id++) {
            if (!h->part_at[part][id]) continue;
            r->rc = r->oracle->read(r->o, (dkv_oracle_part)part, (dkv_tensor_id)id,
                                    (double *)(r->base + h->part_at[part][id]));
            h->written[part][id] = !r->rc;
        }
    return NULL;
}

static int runTwin(const dkv_oracle_ops *o, dkv_arena_head *h, job *j) {
    int rc = 0;
    if (h->absent >> DKV_O & 1) rc = o->store(j->oracle, DKV_O, (void *)j->kernel_o);
    if (!rc && h->absent >> DKV_LSE & 1) rc = o->store(j->oracle, DKV_LSE, (void *)j->kernel_lse);
    if (!rc) rc = o->twin(j->oracle, j->kernel_o, j->kernel_lse);
    if (!rc) rc = o->alikeRows(j->oracle, &h->alike);
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++) h->has_twin[id] = o->hasTwin(j->oracle, (dkv_tensor_id)id) != 0;
    return rc;
}

/* Truth and bound are copied while the device is at the twin. */
static int compute(const dkv_remote_server *s, dkv_arena_head *h, uint8_t *base, job *j) {
    const dkv_oracle_ops *o = s->oracle;
    int rc = o->open(&j->p, &j->l, &j->in, &h->arithmetic, NULL, &j->oracle);
    if (!rc) rc = h->question == DKV_ASK_TRUTH ? o->truth(j->oracle) : o->bound(j->oracle);
    if (rc) return rc;
    pthread_t reader;
    reading first = {o, j->oracle, h, base, DKV_PART_TRUTH, DKV_PART_TWIN, 0}, rest = {o, j->oracle, h, base, DKV_PART_TWIN, DKV_N_PARTS, 0};
    const bool twin = h->question == DKV_ASK_TWIN, beside = twin && pthread_create(&reader, NULL, readParts, &first) == 0;
    if (twin) rc = runTwin(o, h, j);
    if (beside) pthread_join(reader, NULL);
    else readParts(&first);
    if (twin && !rc && !first.rc) readParts(&rest);
    return rc ? rc : first.rc ? first.rc : rest.rc;
}

static void endJob(const dkv_remote_server *s, job *j) {
    if (j->oracle) s->oracle->close(j->oracle);
    s->device->release(j->held);
    if (j->has_layout) dkv_freeLayout(&j->l);
}

/* The question's file, mapped; NULL: it cannot be. Pages of one that was mapped before are not made again. */
static uint8_t *mapQuestion(dkv_remote_server *s, int fd, size_t bytes) {
    struct stat file;
    if (fstat(fd, &file) || file.st_size < (off_t)bytes) return NULL;
    if (s->room.base && s->device_of == file.st_dev && s->number == file.st_ino && s->room.bytes == (size_t)file.st_size)
        return s->room.base;
    if (s->room.base) munmap(s->room.base, s->room.bytes);
    s->room.bytes = (size_t)file.st_size;
    s->room.base = dkv_mapFile(fd, s->room.bytes);
    if (s->room.base == MAP_FAILED) s->room.base = NULL;
    s->device_of = file.st_dev;
    s->number = file.st_ino;
    return s->room.base;
}

dkv_outcome dkv_serveQuestion(dkv_remote_server *s, int fd, int64_t bytes, double *seconds, double *flops, char *why,
                              size_t n) {
    job j = {0};
    dkv_err err = {0};
    dkv_outcome o = DKV_W_HARNESS;
    if (!s || fd < 0 || bytes < (int64_t)sizeof(dkv_arena_head)) return o;
    uint8_t *base = mapQuestion(s, fd, (size_t)bytes);
    if (!base) {
        snprintf(why, n, "it cannot map %lld bytes", (long long)bytes);
        return o;
    }
    dkv_arena_head *h = (dkv_arena_head *)base;
    if (h->magic != DKV_QUESTION_MAGIC || h->bytes != bytes) goto done;
    j.p = h->problem;
    j.p.nodes = (dkv_node *)(base + h->nodes_at);
    if (dkv_makeLayout(&j.p, &j.l, &err)) {
        snprintf(why, n, "%s", err.text);
        goto done;
    }
    j.has_layout = true;
    o = checkRoom(s, h, &j, why, n);
    if (o == DKV_W_OK) o = sendInputs(s, h, base, &j, why, n);
    pthread_t toucher;
    const bool touches = o == DKV_W_OK && bytes >= (int64_t)DKV_REMOTE_LARGE && pthread_create(&toucher, NULL, touchAnswer, base) == 0;
    if (o == DKV_W_OK && compute(s, h, base, &j)) o = said(s, s->oracle->error(), why, n);
    if (touches) pthread_join(toucher, NULL);
    if (o == DKV_W_OK && s->oracle->cost(j.oracle, seconds, flops)) o = said(s, s->oracle->error(), why, n);
done:
    endJob(s, &j);
    if (s->room.bytes < DKV_REMOTE_LARGE) {
        munmap(base, s->room.bytes);
        s->room.base = NULL;
    }
    return o;
}
