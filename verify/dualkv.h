/* dualkv.h: the C interface of libdualkv.so: problem lines, layouts, inputs, suites. Plain C11 or C++, no other header of
 * this project needed; dualkv_kernel.h describes `dualkv_problem` for those who look into one. Only names that begin with
 * dualkv_ are exported. Judging is not here: the program `dualkv` does it, with kernels in processes of their own.
 *
 * A function that can fail returns a dualkv_code and fills *err (which may be NULL). Handles may be read by several
 * threads at a time. */
#ifndef DUALKV_H
#define DUALKV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DUALKV_API 2u /* of this header: grows when a name is added; names never change their meaning */

typedef struct dualkv_problem dualkv_problem; /* dualkv_kernel.h */
typedef struct dualkv_segment dualkv_segment; /* dualkv_kernel.h */
typedef struct dualkv_case dualkv_case;       /* a parsed line with its layouts */
typedef struct dualkv_lines dualkv_lines;     /* the lines of a suite */

typedef enum dualkv_code {
    DUALKV_OK = 0,
    DUALKV_USER_ERROR = 2,    /* a bad line, name, file or argument */
    DUALKV_HARNESS_ERROR = 3, /* out of memory, a system call failed */
    DUALKV_REFUSED = 5        /* well formed, but no such computation exists: an inadmissible mask */
} dualkv_code;

typedef struct dualkv_error {
    int32_t code;     /* dualkv_code */
    int32_t position; /* of the character in the line that is wrong, from 1; 0: none in particular */
    char text[504];   /* one line */
} dualkv_error;

/* ---- what this is ---- */

uint32_t dualkv_api(void);          /* DUALKV_API of the library */
const char *dualkv_version(void);   /* "0.1.0" */
const char *dualkv_commit(void);    /* of the sources */
const char *dualkv_generator(void); /* of the inputs: the same line gives the same values for the same generator */
/* The folder with suites/, corpus/ and recorded/: $DUALKV_DATA, else beside the library. */
const char *dualkv_data_dir(void);

/* ---- problem lines ---- */

/* The canonical form of a line, NUL-terminated, into out (n bytes; 4097 always do). */
int dualkv_canonical(const char *line, char *out, size_t n, dualkv_error *err);
/* Parses a line and checks that its mask is admissible. On failure *out is NULL. */
int dualkv_open(const char *line, dualkv_case **out, dualkv_error *err);
void dualkv_close(dualkv_case *c);
const char *dualkv_line(const dualkv_case *c); /* canonical */

/* ---- layouts ----
 *
 * Packed: per group the segments in depth-first order, groups one after another. Replicated: one ordinary sequence for
 * each segment that has queries: what it sees, then its own tokens. */
typedef enum dualkv_layout { DUALKV_PACKED = 0, DUALKV_REPLICATED = 1 } dualkv_layout;

/* The problem as a kernel of that layout receives it; it lives as long as the case. NULL: out of memory. In the
 * replicated one, each group is a sequence. */
const dualkv_problem *dualkv_view(const dualkv_case *c, int layout);
/* Sequences of the replicated layout. */
int64_t dualkv_sequences(const dualkv_case *c);
/* First row of each sequence of the replicated layout, and the number of all rows last: [sequences + 1]. Query and key
 * rows differ only below a key-only prompt. Either may be NULL. */
int dualkv_cu_seqlens(const dualkv_case *c, int64_t *cu_q, int64_t *cu_k, dualkv_error *err);
/* The expansion E: packed row of each replicated query row [replicated tq] and key row [replicated tk]; own [replicated
 * tq]: 1 where a query row is its segment's own (it carries dO and dLSE), 0 on a copy. Any may be NULL. */
int dualkv_expansion(const dualkv_case *c, int64_t *q_rows, int64_t *k_rows, uint8_t *own, dualkv_error *err);
/* Position of each query row [tq] and key row [tk] in the sequence of its own segment. Either may be NULL. */
int dualkv_positions(const dualkv_case *c, int layout, int64_t *q, int64_t *k, dualkv_error *err);
/* Which keys rows [first, first + rows) of the packed queries see: out [rows, packed tk], 1 or 0. */
int dualkv_mask(const dualkv_case *c, int64_t first, int64_t rows, uint8_t *out, dualkv_error *err);

/* Word of a mask by its number (dualkv_mask_kind); NULL past the end. */
const char *dualkv_mask_name(int mask);
/* The same of one segment, as a kernel is told of it: which of the keys of its ranges, laid end to end, each of its rows
 * sees: out [q_len, context + k_len]. Of the problem only mask and its parameters are read. */
int dualkv_visible(const dualkv_problem *p, const dualkv_segment *s, uint8_t *out, dualkv_error *err);

/* ---- tensors ---- */

typedef enum dualkv_input {
    DUALKV_Q = 0,    /* [tq, hq, dqk]  */
    DUALKV_K = 1,    /* [tk, hkv, dqk] */
    DUALKV_V = 2,    /* [tk, hkv, dv]  */
    DUALKV_DO = 3,   /* [tq, hq, dv]   absent where grad=off */
    DUALKV_DLSE = 4, /* [hq, tq]       fp32; absent unless dlse=on */
    DUALKV_SINK = 5, /* [hq]           fp32; absent unless sinklogit is given */
    DUALKV_N_INPUTS = 6
} dualkv_input;

typedef enum dualkv_form {
    DUALKV_BITS = 0,   /* as kernels get it: the line's dtype; DLSE and SINK are fp32 */
    DUALKV_FLOAT = 1,  /* the same values as float: exact for every dtype */
    DUALKV_DOUBLE = 2
} dualkv_form;

/* Shape of a tensor; returns the number of dimensions, 0 where the problem does not have it. */
int dualkv_shape(const dualkv_case *c, int layout, int input, int64_t shape[3]);
/* Its values, contiguous, into out, which has exactly `bytes` bytes. dO and dLSE of a replicated layout are zero on
 * copies. */
int dualkv_inputs(const dualkv_case *c, int layout, int input, int form, void *out, size_t bytes, dualkv_error *err);
/* n values between double and a dtype (dualkv_dtype of dualkv_kernel.h), rounded to nearest even. */
int dualkv_encode(int dtype, const double *in, size_t n, void *out, dualkv_error *err);
int dualkv_decode(int dtype, const void *in, size_t n, double *out, dualkv_error *err);

/* ---- suites ---- */

/* A suite's name, "corpus", or a path of a file of lines. */
int dualkv_open_suite(const char *name, dualkv_lines **out, dualkv_error *err);
void dualkv_close_suite(dualkv_lines *s);
int64_t dualkv_count_lines(const dualkv_lines *s);
const char *dualkv_suite_line(const dualkv_lines *s, int64_t i); /* canonical; NULL past the end */
/* Name of the i-th installed suite, 0 past the end. */
int dualkv_suite_name(int i, char *out, size_t n);

/* ---- serving ---- */

typedef struct dualkv_kernel dualkv_kernel; /* dualkv_kernel.h */
/* Makes the calling process a kernel worker: serves the socket `fd` (SOCK_SEQPACKET; its other end is a `dualkv` program of
 * the same build, --kernel attached:FD) with this kernel until it closes. `options`: what kernel->open gets; NULL: the
 * options of the spec. The kernel's functions are called from this thread. The socket stays open. Returns 0 when the other end closed it, else the exit
 * code for a process that served alone: 113 where it could not be read or written. */
int dualkv_serve(int fd, const dualkv_kernel *kernel, const char *options);

#ifdef __cplusplus
}
#endif
#endif
