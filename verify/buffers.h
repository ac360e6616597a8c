/* buffers.h: the memory that a kernel under test works in.
 *
 * One arena (a memfd, mapped here and in the worker) holds blocks; a block holds one tensor, or the slices of
 * a fused one. Before every launch everything is poisoned with a 16-bit pattern that is a NaN in bf16, fp16
 * and (twice) fp32: guards around every block, slack between rows, outputs, workspace. So an input that is
 * read past its end gives NaN, an element never written still holds the pattern, and whatever lies outside
 * the outputs must not have changed.
 *
 *     | guard | block: rows with strides, slack between | guard | block | guard | ...
 *
 * Layouts: contiguous; fused (Q, K, V and dQ, dK, dV slices of one buffer); padded (slack after each row, O
 * and dO by different amounts); strided (head by head; dO token by token, LSE token by token). */
#ifndef DKV_BUFFERS_H
#define DKV_BUFFERS_H

#include "../ref/problem.h"
#include "../ref/tensors.h"

#define DKV_GUARD 4096 /* bytes, at least, before and after each block */

typedef enum dkv_slot {
    DKV_SLOT_Q,
    DKV_SLOT_K,
    DKV_SLOT_V,
    DKV_SLOT_DO,
    DKV_SLOT_DLSE,
    DKV_SLOT_SINK, /* inputs */
    DKV_SLOT_O,
    DKV_SLOT_LSE, /* of forward */
    DKV_SLOT_DQ,
    DKV_SLOT_DK,
    DKV_SLOT_DV,
    DKV_SLOT_DSINK, /* of backward */
    DKV_SLOT_WORK,  /* workspace */
    DKV_N_SLOTS
} dkv_slot;

typedef enum dkv_role { DKV_ROLE_INPUT, DKV_ROLE_FORWARD, DKV_ROLE_BACKWARD, DKV_ROLE_WORK } dkv_role;

typedef struct dkv_block_place {
    int64_t offset, bytes; /* from the start of the arena */
    int32_t role;          /* dkv_role */
    int32_t slot;          /* its first slot, to name it */
} dkv_block_place;

/* Element (t, h, c) is at offset + (t*row + h*head + c) * elt bytes. Workspace: rows = bytes, elt 1. */
typedef struct dkv_view {
    int32_t present, block;
    int64_t offset, rows, heads, dim, row, head;
    int32_t elt, pad;
} dkv_view;

typedef struct dkv_plan { /* plain data: the worker receives it as it is */
    int64_t size;         /* of the arena */
    int32_t n_blocks, natural;
    dkv_block_place block[DKV_N_SLOTS];
    dkv_view view[DKV_N_SLOTS];
    int64_t workspace[2]; /* bytes of forward, backward; one block serves both */
} dkv_plan;

/* What the poison found. */
typedef struct dkv_damage {
    int64_t outside, mutated; /* bytes changed outside the outputs; bytes of inputs changed */
    char outside_where[120],
        mutated_where[120]; /* in words: "40 bytes after O, the first 0 bytes from its end" */
    bool no_room; /* there was no memory to compare with: nothing is known */
} dkv_damage;

/* How the rows of a replicated view are those of the packed one (layout.h). */
typedef struct dkv_expansion {
    const int64_t *q_source, *k_source; /* the packed row of each */
    const uint8_t *q_own;               /* rows that carry dO and dLSE */
    int64_t packed_tq;
} dkv_expansion;

#define DKV_ARENA_SMALL ((int64_t)16 << 20) /* bytes: such arenas are taken again (spares.h) */

typedef struct dkv_arena {
    dkv_plan plan;
    int64_t room; /* bytes of the file, of base and of shadow; 0: none */
    int fd;
    uint8_t *base;   /* shared */
    uint8_t *shadow; /* private: what the arena must hold; NULL: large, so that is worked out from the fields below */
    uint16_t pattern;
    const dkv_inputs *in;        /* of the last dkv_fillArena, which must stay */
    const dkv_expansion *expand; /* likewise */
    uint64_t *kept[DKV_N_SLOTS]; /* by block: sums of what forward left in its pieces, until backward was checked */
} dkv_arena;

#define DKV_ARENA_LARGE ((int64_t)1 << 30) /* bytes from which on there is no shadow */

static inline uint8_t *dkv_elementRow(const dkv_view *w, uint8_t *base, int64_t t, int64_t h) {
    return base + w->offset + (t * w->row + h * w->head) * w->elt;
}

/* Places everything. `v`: the problem as the kernel sees it (packed or replicated). `align`: bytes, what the
 * kernel needs and no more: addresses are odd multiples of it; `natural`: multiples of 256, as allocators
 * give them (a kernel may have another path for those). DKV_EREFUSED where the layout cannot give it,
 * DKV_EUSER past 2^62. */
int dkv_planBuffers(const dualkv_problem *v, dkv_layout_kind layout, int32_t align, bool natural,
                    size_t work_forward, size_t work_backward, dkv_plan *out, dkv_err *err);

/* The poison of run `i` of a case: another one for each run, beginning anywhere (`start`, drawn afresh for each case), so
 * that no kernel can know it. */
uint16_t dkv_poisonPattern(uint32_t start, int i);

/* `shadow`: with a second copy of all that it must hold (of a large one, what must be there is compared with the inputs). */
int dkv_openArena(const dkv_plan *plan, bool shadow, dkv_arena *a, dkv_err *err);
void dkv_closeArena(dkv_arena *a);
/* Poisons everything and writes the inputs: the view's own or, with `expand`, the packed ones (no shadow then). */
void dkv_fillArena(dkv_arena *a, uint16_t pattern, const dkv_inputs *in, const dkv_expansion *expand);
/* Poisons the workspace again: its contents are undefined at each launch. With a pattern of its own: an output that was
 * computed from it is not one that was never written. */
void dkv_poisonWorkspace(dkv_arena *a);
/* Compares what the launch (backward = 0, 1) must not have changed. After forward O and LSE become inputs. */
void dkv_checkArena(dkv_arena *a, int backward, dkv_damage *d);
/* Writes a contiguous tensor into its place, and compares one with what is there. */
void dkv_putTensor(dkv_arena *a, dkv_slot s, const void *from);
bool dkv_holdsTensor(const dkv_arena *a, dkv_slot s, const void *want);
/* Outputs of a launch as doubles, into `out` (shaped for the kernel's problem). */
void dkv_gatherOutputs(const dkv_arena *a, dualkv_dtype t, int backward, const dkv_outputs *out);
/* Elements of an output that still hold the poison; *first: index [row, head, dim] (LSE: [head, row]) of the
 * first. */
int64_t dkv_countPoison(const dkv_arena *a, dkv_tensor_id id, int64_t *first);

/* A witness of which bits came out, a word at a time (the finaliser of splitmix64): no shield against malice. */
static inline uint64_t dkv_mixBits(uint64_t h, uint64_t word) {
    h = (h ^ word) + 0x9E3779B97F4A7C15ull;
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ h >> 27) * 0x94D049BB133111EBull;
    return h ^ h >> 31;
}
/* Outputs of a launch over expanded inputs, packed: O and LSE from each row that is its own, gradients summed over copies
 * in order of rows. *bits: of all outputs as they are, copies too. */
int dkv_sumOutputs(const dkv_arena *a, dualkv_dtype t, int backward, const dkv_layout *packed, const dkv_outputs *out,
                   uint64_t *bits, dkv_err *err);
/* The first element of O in a row that is a copy for which ok(value, packed index [row, head, dim]) is false: that index; -1. */
typedef bool (*dkv_copy_fn)(double value, int64_t packed_index, void *arg);
int64_t dkv_findCopy(const dkv_arena *a, dualkv_dtype t, dkv_copy_fn ok, void *arg, double *value);

dkv_slot dkv_outputSlot(dkv_tensor_id id);
/* The launch of a plan over `base`, for the worker. */
void dkv_makeLaunch(const dkv_plan *plan, uint8_t *base, const dualkv_problem *v, int backward,
                    dualkv_launch *out);

#endif
