/* wire.h: messages between coordinator (worker.c) and worker (worker_main.c). Same program, so plain structs.
 */
#ifndef DKV_WIRE_H
#define DKV_WIRE_H

#include "worker.h"

#define DKV_LOST_CHANNEL 113 /* exit code of a worker that can neither read nor answer: its kernel closed the channel */
#define DKV_WIRE_MAGIC 0x64764b31u
#define DKV_LINE_BYTES (DKV_LINE_MAX + 1)

typedef enum dkv_op {
    DKV_OP_OPEN = 1,
    DKV_OP_DESCRIBE,
    DKV_OP_LAUNCH,
    DKV_OP_TIME,
    DKV_OP_PROBE,
    DKV_OP_ORACLE_OPEN,
    DKV_OP_ORACLE
} dkv_op;

typedef struct dkv_request {
    uint32_t magic, sequence;
    int32_t op, backward;
    int64_t overstate;         /* DESCRIBE */
    int64_t bytes;             /* ORACLE: of the arena, whose descriptor comes along */
    int32_t move;              /* LAUNCH: at another address than the last one (else, if it can be, at the same) */
    int32_t resend;            /* LAUNCH: of a backward, whose arena is not what the last forward left */
    dkv_plan plan;             /* LAUNCH; with the arena's descriptor */
    dkv_kernel_spec spec;      /* OPEN */
    char line[DKV_LINE_BYTES]; /* DESCRIBE */
} dkv_request;

typedef struct dkv_reply {
    uint32_t magic, sequence;
    int32_t outcome; /* dkv_outcome, as far as the worker can tell */
    char text[512];
    dkv_description description;
    dkv_gpu_info gpu;  /* OPEN */
    double seconds[2]; /* LAUNCH, ORACLE: the first; TIME: forward, backward */
    double flops;      /* ORACLE */
    int64_t launches, peak;
    char json[8192]; /* PROBE */
} dkv_reply;

#endif
