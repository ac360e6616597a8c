/* worker.h: the process that a kernel under test runs in. Warm across cases, replaced when it dies.
 *
 * The worker is this program again (exec: nothing of the oracle's memory is mapped in it). One SOCK_SEQPACKET
 * socket carries fixed-size messages, an arena comes along as a file descriptor. What the kernel prints goes
 * into a pipe, of which the coordinator keeps the tail. A crash, exit(), a hang or garbage on the socket ends
 * the worker and becomes the case's outcome.
 *
 * For FILE.py:FUNCTION the worker is a Python interpreter that serves the same protocol (dkv_serveWorkerWith, through
 * libdualkv.so). An attached worker (attached:FD) was there before: nothing is started, nothing is ended, and once it is
 * lost there is no other. */
#ifndef DKV_WORKER_H
#define DKV_WORKER_H

#include <signal.h>
#include <sys/types.h>

#include "buffers.h"
#include "files.h"
#include "kernel.h"
#include "spares.h"

#define DKV_WORKER_ARG "worker" /* hidden subcommand: `PROGRAM worker FD` */
#define DKV_WORKER_TAIL 2048

/* The device of a kernel whose memory is DUALKV_CUDA. */
typedef struct dkv_gpu_info {
    char name[128];      /* "NVIDIA H200"; "": there is none */
    char capability[16]; /* "9.0" */
    char driver[64];     /* "570.86.15, CUDA 12.8" */
    int32_t sms, pad;
    uint64_t memory; /* bytes */
} dkv_gpu_info;

typedef enum dkv_outcome {
    DKV_W_OK,
    DKV_W_ERROR,   /* the kernel reported an error, in words */
    DKV_W_CRASHED, /* signal, exit(), garbage, a device that cannot be used any more */
    DKV_W_TIMEOUT,
    DKV_W_STOPPED, /* the run was interrupted */
    DKV_W_HARNESS  /* the worker could not be started or does not understand us */
} dkv_outcome;

/* What a kernel says of itself and of one problem. */
typedef struct dkv_description {
    char name[64], doc[200];
    int32_t memory, alignment, replicated, has_backward, counts_launches;
    int32_t refused; /* with `reason` */
    char reason[400];
    dualkv_arithmetic arithmetic; /* declared = 0: nothing */
    int32_t deterministic;
    uint64_t workspace[2]; /* forward, backward */
    int32_t absent;        /* outputs that it does not give (bits 1 << dkv_tensor_id): not judged */
} dkv_description;

typedef struct dkv_worker {
    pid_t pid; /* 0: none; -1: attached */
    int socket, output;
    uint32_t sequence;
    double timeout;    /* seconds for one answer */
    int64_t overstate; /* tokens added to the longest lengths of the problems that it is told of */
    bool move;         /* the next forward is to have its buffers at other addresses than the last run */
    bool resend;       /* the next backward's arena is not what the last forward left */
    dkv_kernel_spec spec;
    dkv_files files;                /* of a spec files:DIR, once started: there is no process then */
    bool oracle;                    /* serves the oracle on a device (remote.h), no kernel: spec.path is the plugin */
    dkv_spares spares;              /* arenas of cases that are over */
    int64_t starts;                 /* processes started so far */
    int32_t memory, replicated;     /* of the kernel; known once it is started */
    dkv_gpu_info gpu;               /* likewise */
    char tail[DKV_WORKER_TAIL + 1]; /* of what the kernel printed */
    bool tail_closed;               /* what follows in this case is of no use */
    size_t tail_n;
    char why[512]; /* of the last outcome that is not OK */
} dkv_worker;

/* Set by a signal handler: running calls return DKV_W_STOPPED. */
extern volatile sig_atomic_t dkv_stopRequested;

/* Its outputs lie in files: it can run nothing that is not there. */
bool dkv_isFiles(const dkv_worker *w);
void dkv_initWorker(dkv_worker *w, const dkv_kernel_spec *spec, double timeout);
/* Starts a process if there is none. DKV_W_ERROR: the kernel cannot be opened (a user error, in w->why). */
dkv_outcome dkv_startWorker(dkv_worker *w);
void dkv_stopWorker(dkv_worker *w);

/* Tells the worker the problem (canonical line) and asks what the kernel says about it. */
dkv_outcome dkv_describeCase(dkv_worker *w, const char *line, dkv_description *out);
/* Runs forward or backward of the described problem in the arena. *seconds: the call alone; *launches:
 * counted by the kernel during it (-1 where it does not count); *peak: the worker's peak resident bytes. Each
 * may be NULL. */
dkv_outcome dkv_launchCase(dkv_worker *w, const dkv_arena *a, int backward, double *seconds,
                           int64_t *launches, int64_t *peak);
/* Times the described problem on the device with inputs of its line: *seconds: medians of forward and
 * backward; *bytes: of tensors and workspace there. */
dkv_outcome dkv_timeCase(dkv_worker *w, double seconds[2], int64_t *bytes);
/* What the device's matrix unit keeps, as JSON (cuda/probe.cu). */
dkv_outcome dkv_probeDevice(dkv_worker *w, char *json, size_t n);
/* The question in an arena to the oracle on the device (remote.h), answered there; its device time and products. */
dkv_outcome dkv_askOracle(dkv_worker *w, int arena_fd, int64_t bytes, double *seconds, double *flops);
/* Last line that the kernel printed, "" if none. */
void dkv_lastOutput(const dkv_worker *w, char *out, size_t n);

/* The worker's own main: serves the socket `fd_word` until it closes. */
int dkv_serveWorker(const char *fd_word);
/* Serves a socket with this table for every kernel asked for, until it closes. `options` NULL: those of the spec. Changes
 * nothing of the process, and does not close the socket. */
int dkv_serveWorkerWith(int fd, const dualkv_kernel *table, const char *options);

#endif
