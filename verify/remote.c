#include "remote.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../ref/dtype.h"
#include "../ref/pages.h"
#include "memory.h"
#include "remote_arena.h"
#include "spans.h"
#include "status.h"

#define CPU_RATE 3e10    /* FLOP/s of a core in the references (README, Measured) */
#define CPU_PASSES 6     /* truth, bound and twin cost so many plain references */
#define CPU_SECONDS 5    /* what may take longer on the CPU goes to the device, if the kernel is there anyway */
#define LARGE 1e12       /* FLOPs of a case that may need the device for itself */
#define DEVICE_RATE 1e12 /* FLOP/s below which a device no longer answers: a hang */

static const char *const modes[] = {"auto", "cpu", "cuda", "both"};
enum { N_MODES = sizeof modes / sizeof modes[0] };

const char *dkv_oracleName(dkv_oracle_mode m) { return modes[m]; }

int dkv_parseOracleMode(const char *word, dkv_oracle_mode *out, dkv_err *err) {
    for (int i = 0; i < N_MODES; i++) {
        if (strcmp(modes[i], word) != 0) continue;
        *out = (dkv_oracle_mode)i;
        return 0;
    }
    const char *near = dkv_nearestWord(word, modes, N_MODES);
    if (near) return dkv_fail(err, DKV_EUSER, "--oracle: unknown '%.80s': did you mean '%s'?", word, near);
    return dkv_fail(err, DKV_EUSER, "--oracle: unknown '%.80s' (auto, cpu, cuda or both)", word);
}

static double workOf(const dkv_problem *p) {
    return dkv_forwardFlops(p) + (p->grad ? dkv_backwardFlops(p) : 0);
}

/* ---- room ---- */

/* Its pages are free once this returns, though the device's process may still have them mapped. */
static void closeRoom(dkv_remote_room *m) {
    if (!m->base) return;
    munmap(m->base, m->bytes);
    if (ftruncate(m->fd, 0)) m->bytes = 0; /* then they are free when that process unmaps them */
    close(m->fd);
    memset(m, 0, sizeof *m);
}

/* The spare, if it is large enough. */
static int openRoom(dkv_remote *r, size_t bytes, dkv_remote_room *out) {
    dkv_remote_room spare = {0};
    pthread_mutex_lock(&r->lock);
    if (r->spare.base && bytes >= DKV_REMOTE_LARGE) {
        spare = r->spare;
        r->spare.base = NULL;
    }
    pthread_mutex_unlock(&r->lock);
    if (spare.base && spare.bytes >= bytes) {
        *out = spare;
        return 0;
    }
    closeRoom(&spare);
    *out = (dkv_remote_room){.bytes = bytes, .fd = memfd_create("dualkv-oracle", MFD_CLOEXEC)};
    void *base = out->fd >= 0 && ftruncate(out->fd, (off_t)bytes) == 0 ? dkv_mapFile(out->fd, bytes) : MAP_FAILED;
    if (base != MAP_FAILED) {
        out->base = base;
        return 0;
    }
    if (out->fd >= 0) close(out->fd);
    return -1;
}

/* Kept where as much again is free: the next case may need all that there is for something else. */
static void giveRoom(dkv_remote *r, dkv_remote_room *m) {
    if (m->bytes >= DKV_REMOTE_LARGE && dkv_availableMemory() > (double)m->bytes) {
        pthread_mutex_lock(&r->lock);
        const dkv_remote_room was = r->spare;
        r->spare = *m;
        *m = was;
        pthread_mutex_unlock(&r->lock);
    }
    closeRoom(m);
}

/* ---- life ---- */

int dkv_openRemote(dkv_remote *r, dkv_oracle_mode mode, const char *plugin, double timeout, dkv_err *err) {
    dkv_kernel_spec spec = {.name = "oracle", .text = "the oracle on the device"};
    memset(r, 0, sizeof *r);
    r->mode = mode;
    r->least = CPU_SECONDS;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->idle, NULL);
    if (plugin) snprintf(spec.path, sizeof spec.path, "%s", plugin);
    else if (!dkv_findBeside(DKV_CUDA_PLUGIN, spec.path, sizeof spec.path)) {
        r->absent = true;
        snprintf(r->why, sizeof r->why, "%s is not beside the program: `make cuda` builds it, where nvcc is",
                 DKV_CUDA_PLUGIN);
    }
    for (int i = 0; i < DKV_REMOTE_WORKERS; i++) {
        dkv_initWorker(&r->worker[i], &spec, timeout);
        r->worker[i].oracle = true;
    }
    if (mode == DKV_ORACLE_AUTO || mode == DKV_ORACLE_CPU) return 0;
    dkv_outcome o = r->absent ? DKV_W_ERROR : dkv_startWorker(&r->worker[0]);
    if (o == DKV_W_OK) return 0;
    dkv_fail(err, DKV_EHARNESS, "--oracle %s: %.400s", modes[mode], r->absent ? r->why : r->worker[0].why);
    dkv_closeRemote(r);
    return DKV_EHARNESS;
}

void dkv_closeRemote(dkv_remote *r) {
    closeRoom(&r->spare);
    for (int i = 0; i < DKV_REMOTE_WORKERS; i++) dkv_stopWorker(&r->worker[i]);
    pthread_cond_destroy(&r->idle);
    pthread_mutex_destroy(&r->lock);
}

bool dkv_wantsRemote(const dkv_remote *r, const dkv_problem *p, bool on_device, int threads) {
    if (!r || r->mode == DKV_ORACLE_CPU) return false;
    if (r->mode != DKV_ORACLE_AUTO) return true;
    return on_device && workOf(p) * CPU_PASSES > CPU_RATE * r->least * (threads > 1 ? threads : 1);
}

void dkv_dropRemoteTwin(dkv_remote_oracle *o) {
    const dkv_arena_head *h = o->room.base;
    int64_t n = 0;
    for (int part = DKV_PART_TWIN; h && part <= DKV_PART_SIGMA2; part++)
        for (int id = 0; id < DKV_N_OUTPUTS; id++)
            if (h->part_at[part][id] && (n == 0 || h->part_at[part][id] < n)) n = h->part_at[part][id];
    memset(&o->oracle.twin, 0, sizeof o->oracle.twin); /* they lie together, behind everything else */
    memset(&o->oracle.sigma2, 0, sizeof o->oracle.sigma2);
    if (n && o->room.bytes >= DKV_REMOTE_LARGE &&
        fallocate(o->room.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, n, (off_t)o->room.bytes - n))
        return; /* then they are free with the room */
}

void dkv_freeRemoteOracle(dkv_remote_oracle *o) {
    if (o->room.base) giveRoom(o->from, &o->room);
    memset(o, 0, sizeof *o);
}

/* ---- the question ---- */

static int64_t place(int64_t *end, int64_t bytes) {
    int64_t at = *end;
    *end += (bytes + DKV_ARENA_ALIGN - 1) / DKV_ARENA_ALIGN * DKV_ARENA_ALIGN;
    return at;
}

/* Where everything goes. Sizes were counted before the case ran: they fit. */
static void layOut(dkv_arena_head *h, const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                   dkv_question question) {
    const int64_t elt = (int64_t)dkv_dtypeSize(p->dtype), tq = l->view.tq, tk = l->view.tk;
    const int64_t bytes[DKV_N_INPUTS] = {elt * tq * p->hq * p->dqk, elt * tk * p->hkv * p->dqk,
                                         elt * tk * p->hkv * p->dv, elt * tq * p->hq * p->dv,
                                         4 * tq * p->hq,            4 * (int64_t)p->hq};
    const void *const from[DKV_N_INPUTS] = {in->q, in->k, in->v, in->d_o, in->d_lse, in->sink};
    int64_t end = 0, n[DKV_N_OUTPUTS];
    *h = (dkv_arena_head){.magic = DKV_QUESTION_MAGIC, .question = question, .n_nodes = p->n_nodes, .problem = *p};
    place(&end, sizeof *h);
    h->nodes_at = place(&end, (int64_t)sizeof *p->nodes * p->n_nodes);
    for (int i = 0; i < DKV_N_INPUTS; i++)
        if (from[i]) {
            h->input_bytes[i] = bytes[i];
            h->input_at[i] = place(&end, bytes[i]);
        }
    dkv_countOutputs(l, n);
    if (question == DKV_ASK_TWIN) {
        h->o_at = place(&end, elt * n[DKV_O]);
        h->lse_at = place(&end, 4 * n[DKV_LSE]);
    }
    const int parts = question == DKV_ASK_TWIN ? DKV_N_PARTS : question == DKV_ASK_BOUND ? 2 : 1;
    for (int part = 0; part < parts; part++)
        for (int id = 0; id < DKV_N_OUTPUTS; id++)
            if (n[id] > 0) h->part_at[part][id] = place(&end, 8 * n[id]);
    h->bytes = end;
}

typedef struct encode_loop {
    const void *from;
    void *to;
    dualkv_dtype dtype; /* of what is encoded */
} encode_loop;

static void encodeSpan(int64_t first, int64_t end, int span, void *arg) {
    const encode_loop *c = arg;
    (void)span;
    dkv_encodeArray((const double *)c->from + first, c->dtype, (size_t)(end - first),
                    (uint8_t *)c->to + (size_t)first * dkv_dtypeSize(c->dtype));
}

static void writeQuestion(const dkv_arena_head *h, uint8_t *base, const dkv_problem *p, const dkv_inputs *in,
                          const int64_t n[DKV_N_OUTPUTS], const dkv_left *left) {
    const void *const from[DKV_N_INPUTS] = {in->q, in->k, in->v, in->d_o, in->d_lse, in->sink};
    memcpy(base, h, sizeof *h);
    memcpy(base + h->nodes_at, p->nodes, sizeof *p->nodes * (size_t)p->n_nodes);
    for (int i = 0; i < DKV_N_INPUTS; i++)
        if (h->input_bytes[i])
            dkv_copySpans(base + h->input_at[i], from[i], h->input_bytes[i]);
    if (h->question != DKV_ASK_TWIN) return;
    if (!(left->absent >> DKV_O & 1))
        dkv_eachSpan(n[DKV_O], (double)n[DKV_O], encodeSpan, &(encode_loop){left->o, base + h->o_at, p->dtype});
    if (!(left->absent >> DKV_LSE & 1))
        dkv_eachSpan(n[DKV_LSE], (double)n[DKV_LSE], encodeSpan, &(encode_loop){left->lse, base + h->lse_at, DUALKV_FP32});
}

/* The answer, if it is whole. */
static int readAnswer(dkv_remote_oracle *out, dkv_err *err) {
    uint8_t *base = out->room.base;
    const dkv_arena_head *h = out->room.base;
    dkv_outputs *parts[DKV_N_PARTS] = {&out->oracle.truth, &out->oracle.bound, &out->oracle.twin, &out->oracle.sigma2};
    for (int part = 0; part < DKV_N_PARTS; part++) {
        double **const to[DKV_N_OUTPUTS] = {&parts[part]->o,  &parts[part]->lse, &parts[part]->dq,
                                            &parts[part]->dk, &parts[part]->dv,  &parts[part]->dsink};
        for (int id = 0; id < DKV_N_OUTPUTS; id++) {
            if (!h->part_at[part][id]) continue;
            if (h->written[part][id] != 1)
                return dkv_fail(err, DKV_EHARNESS, "the oracle on the device left out a part of %s",
                                dkv_tensorName((dkv_tensor_id)id));
            *to[id] = (double *)(base + h->part_at[part][id]);
        }
    }
    for (int id = 0; id < DKV_N_OUTPUTS; id++) out->oracle.has_twin[id] = h->has_twin[id] != 0;
    out->oracle.alike = h->alike;
    return 0;
}

/* A worker that is idle: the first for large cases, any other rather than that for small ones. */
static int takeWorker(dkv_remote *r, bool large) {
    int found = -1;
    pthread_mutex_lock(&r->lock);
    for (;;) {
        for (int i = large ? 0 : DKV_REMOTE_WORKERS - 1; i >= 0 && found < 0; i--)
            if (!r->busy[i]) found = i;
        if (found >= 0) break;
        pthread_cond_wait(&r->idle, &r->lock);
    }
    r->busy[found] = true;
    pthread_mutex_unlock(&r->lock);
    return found;
}

static void giveWorker(dkv_remote *r, int i) {
    pthread_mutex_lock(&r->lock);
    r->busy[i] = false;
    pthread_cond_broadcast(&r->idle);
    pthread_mutex_unlock(&r->lock);
}

/* There is no device: there will be none for the next case, either. */
static bool isAbsent(dkv_remote *r, const char *why, dkv_err *err) {
    pthread_mutex_lock(&r->lock);
    if (why && !r->absent) {
        r->absent = true;
        snprintf(r->why, sizeof r->why, "the oracle on the device: %.400s", why);
    }
    const bool absent = r->absent;
    if (absent) dkv_fail(err, DKV_EREFUSED, "%s", r->why);
    pthread_mutex_unlock(&r->lock);
    return absent;
}

static int ask(dkv_remote *r, int fd, int64_t bytes, double work, dkv_remote_oracle *out, dkv_err *err) {
    if (isAbsent(r, NULL, err)) return DKV_EREFUSED;
    const int at = takeWorker(r, work > LARGE);
    dkv_worker *w = &r->worker[at];
    const bool fresh = w->pid == 0;
    const double patience = w->timeout;
    dkv_outcome o = dkv_startWorker(w);
    const bool none = o == DKV_W_ERROR && fresh;
    if (o == DKV_W_OK) {
        w->timeout += work * CPU_PASSES / DEVICE_RATE;
        o = dkv_askOracle(w, fd, bytes, &out->seconds, &out->flops);
        w->timeout = patience;
    }
    int rc = 0;
    if (none) rc = isAbsent(r, w->why, err) ? DKV_EREFUSED : 0;
    else if (o != DKV_W_OK)
        rc = dkv_fail(err, o == DKV_W_ERROR ? DKV_EREFUSED : DKV_EHARNESS, "the oracle on the device%s: %.400s",
                      o == DKV_W_CRASHED ? " crashed" : "", w->why);
    giveWorker(r, at);
    return rc;
}

int dkv_askRemote(dkv_remote *r, dkv_question question, const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                  const dualkv_arithmetic *a, const dkv_left *left, dkv_remote_oracle *out, dkv_err *err) {
    dkv_arena_head *h = calloc(1, sizeof *h);
    int64_t n[DKV_N_OUTPUTS];
    int rc = 0;
    memset(out, 0, sizeof *out);
    if (h) {
        layOut(h, p, l, in, question);
        h->arithmetic = *a;
        h->absent = left->absent;
    }
    if (!h || openRoom(r, (size_t)h->bytes, &out->room)) {
        rc = dkv_fail(err, DKV_EHARNESS, "cannot allocate %lld bytes for the oracle on the device",
                      h ? (long long)h->bytes : 0);
        goto done;
    }
    out->from = r;
    dkv_countOutputs(l, n);
    writeQuestion(h, out->room.base, p, in, n, left);
    rc = ask(r, out->room.fd, h->bytes, workOf(p), out, err);
    if (!rc) rc = readAnswer(out, err);
    if (rc) dkv_freeRemoteOracle(out);
done:
    free(h);
    return rc;
}
