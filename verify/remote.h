/* remote.h: the oracle on a device (ref/device_oracle.h), in a process of its own: this program again, as a worker
 * that opens the CUDA plugin. The coordinator never touches CUDA.
 *
 * A few processes serve a whole session, one question each at a time, large ones one after another. A question is an arena (a memfd): the problem, its
 * inputs, the declared arithmetic and, for the twin, what the kernel left in O and LSE; the answer is written into
 * the same arena, which then is the case's oracle. What goes wrong is words: a refusal (no device, no memory there)
 * sends the case to the CPU's oracle where the choice was ours, and ends it where the device was asked for; a crash,
 * a hang or an answer that is not whole always ends the case as the harness's failure. */
#ifndef DKV_REMOTE_H
#define DKV_REMOTE_H

#include <pthread.h>

#include "../ref/oracle.h"
#include "worker.h"

typedef enum dkv_oracle_mode {
    DKV_ORACLE_AUTO, /* the device where a kernel runs on one and the CPU would take long */
    DKV_ORACLE_CPU,
    DKV_ORACLE_CUDA,
    DKV_ORACLE_BOTH /* the CPU judges; the device must agree with it */
} dkv_oracle_mode;

typedef enum dkv_question { DKV_ASK_TRUTH, DKV_ASK_BOUND, DKV_ASK_TWIN } dkv_question; /* each with those before it */

#define DKV_REMOTE_WORKERS 4
#define DKV_REMOTE_LARGE ((size_t)1 << 30) /* bytes of an arena from which on one is kept for the next question */

/* A file and its mapping. base NULL: none. */
typedef struct dkv_remote_room {
    void *base;
    size_t bytes;
    int fd;
} dkv_remote_room;

typedef struct dkv_remote {
    dkv_oracle_mode mode;
    pthread_mutex_t lock; /* of all but the workers that are busy */
    pthread_cond_t idle;
    dkv_worker worker[DKV_REMOTE_WORKERS];
    bool busy[DKV_REMOTE_WORKERS];
    double least;  /* auto: seconds on the CPU from which on the device is asked */
    dkv_remote_room spare; /* of an answer that nobody needs any more: its pages are there */
    bool absent;   /* there is no plugin or no device; not asked again */
    char why[512]; /* of that */
} dkv_remote;

/* An answer: an oracle whose arrays lie in the arena. */
typedef struct dkv_remote_oracle {
    dkv_oracle oracle;
    dkv_remote_room room;
    dkv_remote *from; /* where that goes back to */
    double seconds, flops; /* of the device */
} dkv_remote_oracle;

#define DKV_REMOTE_TIMEOUT 120 /* seconds that the oracle on a device may take beside its work, unless a test says otherwise */

/* Words of --oracle and of records; DKV_EUSER with the nearest one. */
const char *dkv_oracleName(dkv_oracle_mode m);
int dkv_parseOracleMode(const char *word, dkv_oracle_mode *out, dkv_err *err);

/* `plugin`: a path, or NULL: the one beside the program. `timeout`: seconds for an answer, beside the work's own.
 * cuda, both: DKV_EHARNESS where there is no plugin or no device; auto starts nothing until it is needed. */
int dkv_openRemote(dkv_remote *r, dkv_oracle_mode mode, const char *plugin, double timeout, dkv_err *err);
void dkv_closeRemote(dkv_remote *r);

/* Should this problem be judged by the device? `on_device`: the kernel runs on one; `threads`: the CPU oracle's. */
bool dkv_wantsRemote(const dkv_remote *r, const dkv_problem *p, bool on_device, int threads);

/* What the kernel left, for the twin: as doubles (values of the problem's type, LSE of fp32); `absent` (bits 1 <<
 * dkv_tensor_id): of what it does not give the device takes the truth, rounded to the type. */
typedef struct dkv_left {
    const double *o, *lse;
    int32_t absent;
} dkv_left;

/* DKV_OK; DKV_EREFUSED: the device cannot, in words; DKV_EHARNESS: it failed. */
int dkv_askRemote(dkv_remote *r, dkv_question question, const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                  const dualkv_arithmetic *a, const dkv_left *left, dkv_remote_oracle *out, dkv_err *err);
/* Twin and variances are not needed any more: their pages are given back where there are many. */
void dkv_dropRemoteTwin(dkv_remote_oracle *o);
void dkv_freeRemoteOracle(dkv_remote_oracle *o);

/* Do two oracles of the arithmetic `a` agree? Truths within twice the bound of fp64 arithmetic, bounds to 1e-6, twins but for a few elements
 * within a tenth of sigma. DKV_EHARNESS says where they do not. */
int dkv_compareOracles(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, const dualkv_arithmetic *a,
                       bool twin, int threads, const dkv_oracle *cpu, const dkv_oracle *device, dkv_err *err);

/* ---- the worker's side (remote_serve.c) ---- */

typedef struct dkv_remote_server dkv_remote_server;
/* Loads the plugin; the device's names. DKV_W_ERROR: there is none, in words. */
dkv_outcome dkv_openServer(const char *plugin, dkv_remote_server **out, dkv_gpu_info *gpu, char *why, size_t n);
void dkv_closeServer(dkv_remote_server *s);
/* Answers the question in the arena. */
dkv_outcome dkv_serveQuestion(dkv_remote_server *s, int fd, int64_t bytes, double *seconds, double *flops, char *why,
                              size_t n);

#endif
