/* remote_arena.h: a question to the oracle on a device and its answer, in one shared mapping. Both sides are the same
 * program, so plain structs; offsets from the start of the mapping, 0: not there. */
#ifndef DKV_REMOTE_ARENA_H
#define DKV_REMOTE_ARENA_H

#include "../ref/device_oracle.h"

#define DKV_QUESTION_MAGIC 0x64766b6f7261636cull
#define DKV_ARENA_ALIGN 4096

enum { DKV_IN_Q, DKV_IN_K, DKV_IN_V, DKV_IN_DO, DKV_IN_DLSE, DKV_IN_SINK, DKV_N_INPUTS };

typedef struct dkv_arena_head {
    uint64_t magic;
    int64_t bytes;       /* of the mapping */
    int32_t question, n_nodes;
    dkv_problem problem; /* its nodes lie at nodes_at */
    dualkv_arithmetic arithmetic;
    int64_t nodes_at, input_at[DKV_N_INPUTS], input_bytes[DKV_N_INPUTS];
    int64_t o_at, lse_at; /* what the kernel left, in the problem's type and fp32 */
    int32_t absent;       /* of these, bits 1 << dkv_tensor_id: the truth stands in for it */
    int64_t part_at[DKV_N_PARTS][DKV_N_OUTPUTS]; /* doubles, as dkv_outputs has them */
    /* the answer */
    int32_t written[DKV_N_PARTS][DKV_N_OUTPUTS], has_twin[DKV_N_OUTPUTS];
    dkv_alike alike;
} dkv_arena_head;

#endif
