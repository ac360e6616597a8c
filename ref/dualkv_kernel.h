/* dualkv_kernel.h: the public kernel ABI of DualKV Verify.
 *
 * A kernel under test is a `dualkv_kernel` table, built in or exported by a shared object through
 *
 *     const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count);
 *
 * Plain C, no other header of this project needed; compiles as C11, C++ and under nvcc. Versioned by
 * struct size: every struct begins with `size`, set by whoever fills it; fields are only ever added at the end.
 *
 * Words. A problem has groups; a group is a tree of token segments whose root is the prompt. A segment sees a
 * list of key ranges, root first, its own tokens last. Everything is packed: segments in depth-first order,
 * groups one after another.
 *
 *     Q, dQ [Tq, Hq, Dqk]   K, dK [Tk, Hkv, Dqk]   V, dV [Tk, Hkv, Dv]   O, dO [Tq, Hq, Dv]
 *     LSE, dLSE [Hq, Tq] fp32 (natural logarithm, scale, modifiers and sink included)
 *     sink, dSink [Hq] fp32
 *
 * Tq < Tk only where a prompt is key-only (it has keys and no queries). Query head h uses KV head h / (Hq/Hkv).
 * Score of query at position p and key at position j, in this order:
 *     s = scale * q.k;  s = softcap * tanh(s / softcap) if softcap > 0;  s -= slope[h] * |p - j| if alibi;
 *     mask (s = -inf);  softmax over the visible keys and, if sink, one more logit sink[h] whose value is 0.
 * A row that sees no key: O = 0, LSE = -inf (with a sink: LSE = sink[h]), gradients 0.
 */
#ifndef DUALKV_KERNEL_H
#define DUALKV_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DUALKV_ABI 1u

typedef enum dualkv_dtype { DUALKV_BF16 = 0, DUALKV_FP16 = 1, DUALKV_FP32 = 2 } dualkv_dtype;

/* Masks, over positions. A token's position is the number of tokens that its segment sees before it.
 * p: position of the query; j: position of the key in the list of keys that the query's segment sees. */
typedef enum dualkv_mask_kind {
    DUALKV_CAUSAL = 0, /* j <= p */
    DUALKV_FULL = 1,   /* all ancestors' keys it sees and its whole segment */
    DUALKV_PREFIX = 2, /* rows of a root segment: the whole root; other rows: causal */
    DUALKV_WINDOW = 3, /* j <= p and (j > p - window or j < window_sinks) */
    DUALKV_CHUNK = 4,  /* j <= p and j / chunk == p / chunk */
    DUALKV_BLOCK = 5,  /* j <= p and dualkv_block_kept(block_seed, p / block, j / block, block_density) */
    DUALKV_BIDIR       /* always the last: inadmissible, never given to a kernel. A kernel refuses numbers that it does not know */
} dualkv_mask_kind;

/* One key range: `len` rows of K and V from packed row `k_start`; its first key has position `pos`. */
typedef struct dualkv_range {
    int64_t k_start, len, pos;
} dualkv_range;

/* One segment. Its queries are rows q_start.. of Q (q_len = 0 if key-only, else k_len); its own keys are rows
 * k_start.. of K. ranges[range_begin .. range_begin + range_count) is all that it sees, in order of position,
 * zero-length ranges left out, its own range last (absent if k_len = 0). context = tokens seen before its own. */
typedef struct dualkv_segment {
    int32_t group, parent; /* parent: index of a segment, -1 for a root */
    int32_t depth;         /* 0 for a root */
    int32_t range_count;
    int64_t range_begin;
    int64_t q_start, q_len, k_start, k_len, context;
} dualkv_segment;

typedef struct dualkv_problem {
    uint32_t size;
    int32_t n_groups, n_segments;
    int32_t hq, hkv, dqk, dv;
    int32_t dtype; /* dualkv_dtype of Q, K, V, O, dO, dQ, dK, dV */
    int64_t n_ranges, tq, tk;
    int64_t max_q_len, max_k_len; /* over segments: longest q_len; most keys seen (context + k_len) */
    const dualkv_segment *segments;
    const dualkv_range *ranges;
    int32_t mask; /* dualkv_mask_kind */
    int32_t alibi, sink, dlse, grad;
    int64_t window, window_sinks, chunk, block;
    double block_density;
    uint64_t block_seed;
    float scale, softcap; /* softcap 0: off */
    const float *alibi_slopes; /* [hq], NULL if off; host memory */
} dualkv_problem;

/* Element (row t, head h, dim c) is at data + t*row + h*head + c elements; the last dimension is contiguous.
 * LSE-like [H, T] tensors use head and row in the same way. Strides may be any positive value, 64-bit. */
typedef struct dualkv_tensor {
    void *data;
    int64_t row, head;
} dualkv_tensor;

typedef struct dualkv_launch {
    uint32_t size;
    const dualkv_problem *problem;              /* arrays in host memory */
    const dualkv_segment *device_segments;      /* the same arrays where the kernel runs (host: the same pointers) */
    const dualkv_range *device_ranges;
    const float *device_alibi_slopes;
    void *stream;    /* cudaStream_t, NULL on the host */
    void *workspace; /* workspace(problem) bytes, 256-aligned, contents undefined */
    size_t workspace_size;
    dualkv_tensor q, k, v;
    const float *sink; /* [hq] where the kernel runs; NULL if off */
    dualkv_tensor o, lse; /* forward: outputs. backward: inputs, exactly as forward left them */
    dualkv_tensor d_o, d_lse; /* backward inputs; d_lse.data NULL if dlse is off */
    dualkv_tensor dq, dk, dv; /* backward outputs */
    float *dsink;             /* [hq], NULL if off */
} dualkv_launch;

/* The arithmetic that a kernel declares (tolerance page: ref/TOLERANCE.md). The oracle turns it into a bound for
 * every element and a twin for every tensor; a kernel that declares nothing (declared = 0) is judged by the bound
 * of the loosest known profile, and the tightest profile that fits is named.
 * Formats: a dualkv_dtype, or DUALKV_EXACT where the value is kept in the accumulator's precision. */
#define DUALKV_EXACT (-1)
/* Which partial sums of dK and dV are rounded to partial_format: those of each query head; of each segment's rows; or the
 * running sum over a segment's rows, one query head after another, after each block of rows (the segments' sums are then
 * added in the accumulator's precision, and query heads have no sums of their own). */
#define DUALKV_PARTIAL_HEADS 1
#define DUALKV_PARTIAL_SEGMENTS 2
#define DUALKV_PARTIAL_ROWS 4
/* With SEGMENTS or ROWS: what was summed of a segment is an output of its own, and their sum is rounded no more. So are the
 * gradients of replicated sequences, which the harness adds up. */
#define DUALKV_PARTIAL_SUMMED 8
#define DUALKV_TF32 3 /* a format of operands only, never a dtype: 10 fraction bits, fp32's exponents */
typedef struct dualkv_arithmetic {
    uint32_t size;
    int32_t declared;
    double unit;          /* unit roundoff of the vector arithmetic: 2^-24 for fp32, 2^-53 for fp64 */
    double acc_unit;      /* largest error of one accumulation step of a matrix product, relative to the magnitudes summed:
                           * 2^-24 to nearest in fp32; (acc_step + 4) 2^-25 for the tensor core's truncating sum */
    int32_t acc_truncates; /* 0: to nearest; 1: toward zero (tensor cores) */
    int32_t acc_step;     /* products added in one step: 1 scalar, 16 for a k16 tensor core instruction */
    double acc_gain;      /* expected relative loss a step on sums of one sign (0 where to nearest) */
    int64_t acc_fold;     /* steps after which the accumulator is folded into a sum rounded to nearest; 0: never */
    int32_t in_format;    /* operands of the products rounded to (TF32 kernels; else DUALKV_EXACT) */
    int32_t s_format;     /* scores rounded to (eager 16-bit; else DUALKV_EXACT) */
    int32_t p_format;     /* P rounded to before P V and P^T dO */
    int32_t ds_format;    /* dS rounded to before dS K and dS^T Q */
    int32_t out_format;   /* O, dQ, dK, dV rounded to */
    int32_t partial_format; /* partial sums of dK and dV rounded to before they are summed (partial_of); else DUALKV_EXACT */
    int32_t p_normalised; /* 1: P divided by the row sum before it is rounded; 0: O divided after (flash) */
    int32_t delta_exact;  /* 0: delta = dO . (rounded O); 1: from O before its rounding */
    int32_t key_tile;     /* keys a tile, counted from the start of each key range; 0: undeclared */
    int32_t key_order;    /* 0: tiles in order of position; 1: last tile first */
    double exp_error, log_error, tanh_error; /* relative error of exp/exp2, log, tanh */
    int32_t flushes;      /* 1: subnormal results of vector arithmetic are flushed to zero */
    /* The same for gradients, where they are folded more often than S, dP and O: steps after which the accumulator of
     * dQ, and that of dK and dV, is added to a sum rounded to nearest (of unit `unit`); 0: as acc_fold. */
    int64_t acc_fold_dq, acc_fold_dkv;
    int32_t partial_of; /* DUALKV_PARTIAL_*, added; 0: of each query head */
    int32_t ds_scaled; /* 1: dS is multiplied by the scale before it is rounded, and dQ and dK are not after */
    /* DUALKV_PARTIAL_ROWS: rows a block, counted from a segment's first query row; in segments of at least row_from2 or
     * row_from3 rows (0: none are) row_block2 or row_block3. */
    int64_t row_block, row_block2, row_from2, row_block3, row_from3;
    /* Keys, counted from the start of each key range, after which the running sum of dQ is rounded to partial_format; 0:
     * never. */
    int64_t dq_block;
    /* The maximum m of exp(s - m), where P is not normalised first. It is raised to that of a tile only where that is larger
     * by more than max_slack (natural logarithm of scores as above: 8 ln 2 = 5.545 where a factor of 256 may wait; a sink met
     * last is as free; 0: always), so that P reaches e^max_slack: up to 25, 11 where P is fp16. sink_first: 1: it starts
     * from the sink's logit; 0: the sink comes last. Like all that is added here: set where a->size covers it. */
    double max_slack;
    int32_t sink_first;
} dualkv_arithmetic;

typedef enum dualkv_memory { DUALKV_HOST = 0, DUALKV_CUDA = 1 } dualkv_memory;

typedef struct dualkv_kernel {
    uint32_t size;
    uint32_t abi;              /* DUALKV_ABI */
    const char *name;          /* word used in a kernel spec: [a-z0-9_-]+ */
    const char *doc;           /* one line */
    int32_t memory;            /* dualkv_memory: where the tensors must be */
    int32_t alignment;         /* bytes: data pointers and byte strides are multiples of it; at least the element */
    int32_t replicated;        /* 1: wants every problem as independent sequences (one root segment each) */
    int32_t absent;            /* outputs that it does not give, bits 1 << 0 (O), LSE, dQ, dK, dV, dSink; they are not judged */
    /* Opens an instance from the options of a kernel spec ("bm=64,bn=64,det"; "" if none). NULL and a one-line
     * reason in err (size n) if an option is unknown or out of range. */
    void *(*open)(const char *options, char *err, size_t n);
    void (*close)(void *self);
    /* NULL if this problem is supported, else the reason, one line, valid until the next call. */
    const char *(*refuses)(void *self, const dualkv_problem *p);
    /* Fills *a (zeroed, size set) with what is declared for this problem. NULL: declares nothing. */
    void (*arithmetic)(void *self, const dualkv_problem *p, dualkv_arithmetic *a);
    /* 1 where bitwise repeatable results are promised for this problem. NULL: never. */
    int (*deterministic)(void *self, const dualkv_problem *p);
    /* Bytes of workspace for forward (backward = 0) or backward (1). NULL: none. */
    size_t (*workspace)(void *self, const dualkv_problem *p, int backward);
    /* 0, or non-zero and a one-line reason in err. Work is queued on launch->stream. Backward may be NULL. */
    int (*forward)(void *self, const dualkv_launch *l, char *err, size_t n);
    int (*backward)(void *self, const dualkv_launch *l, char *err, size_t n);
    /* Launches of this kernel's own code so far (a fallback must not count). NULL: not counted. */
    uint64_t (*launches)(void *self);
} dualkv_kernel;

/* Entry point of a shared object. Returns a list of *count kernels, or NULL if `abi` is not supported. */
typedef const dualkv_kernel *const *(*dualkv_kernels_fn)(uint32_t abi, int *count);
#define DUALKV_KERNELS_SYMBOL "dualkv_kernels"

/* mask=block: is block (qb, kb) kept? A counter-based hash (splitmix64 finaliser), so that every kernel and the
 * reference can state the same pattern; its definition is part of the problem line's meaning. */
static inline
#ifdef __CUDACC__
__host__ __device__
#endif
int dualkv_block_kept(uint64_t seed, int64_t qb, int64_t kb, double density) {
    uint64_t x = seed * 0x9E3779B97F4A7C15ull + (uint64_t)qb * 0xD1B54A32D192ED03ull +
                 (uint64_t)kb * 0x8CB92BA72F3D8DD7ull + 0x2545F4914F6CDD1Dull;
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    x ^= x >> 31;
    return (double)(x >> 11) < density * 9007199254740992.0; /* 2^53 */
}

#ifdef __cplusplus
}
#endif
#endif
