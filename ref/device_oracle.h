/* device_oracle.h: truth, bound and twin in double precision on a device. Plain C, no CUDA header: taken from
 * libdualkv_cuda.so by the symbol DKV_ORACLE_SYMBOL. cuBLAS is loaded at the first open.
 *
 * The same definitions as the CPU's oracle (ref/oracle.h): the bound's formulas are the same code
 * (bound_formula.h), the mask is the reference's (mask_pair.h). Products are cuBLAS dgemm; exp, log, tanh are
 * CUDA's fp64 functions (at most 1, 1, 2 ulp). Sums run in an order that the problem alone decides: the same
 * bits every time on one device.
 *
 *     open; bound; [kernel runs]; twin; for each part and tensor: read; alikeRows; close
 *
 * Every function returns 0, or non-zero; then error() says why. One thread at a time, but that truth and bound may be read
 * while twin runs. */
#ifndef DKV_DEVICE_ORACLE_H
#define DKV_DEVICE_ORACLE_H

#include "oracle.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_ORACLE_SYMBOL "dkv_oracleOps"

typedef struct dkv_device_oracle dkv_device_oracle;

typedef enum dkv_oracle_part {
    DKV_PART_TRUTH,
    DKV_PART_BOUND,
    DKV_PART_TWIN,
    DKV_PART_SIGMA2,
    DKV_N_PARTS
} dkv_oracle_part;

/* Inputs in the problem's dtype, canonical (packed, contiguous): device pointers. */
typedef struct dkv_device_inputs {
    const void *q, *k, *v, *d_o; /* d_o NULL where grad=off */
    const float *d_lse, *sink;   /* or NULL */
} dkv_device_inputs;

typedef struct dkv_oracle_settings {
    int64_t rows, keys; /* of the largest tile: stacked rows, keys; 0: chosen for speed */
    /* Called now and then with the share done of the stage, 0..1; returns non-zero to stop. May be NULL; else one KV
     * head comes after another. */
    int (*progress)(void *context, double share);
    void *context;
    int32_t lanes; /* KV heads side by side, at most; 0: chosen for speed. The same bits for any number */
} dkv_oracle_settings;

typedef struct dkv_oracle_ops {
    uint32_t size; /* of this struct; fields are only ever added at the end */
    uint32_t reserved;
    const char *(*error)(void);
    /* Bytes of device memory that open and bound need, about. */
    int64_t (*bytes)(const dkv_problem *p, const dkv_layout *l);
    /* p, l, a and the inputs must outlive the oracle. settings may be NULL. */
    int (*open)(const dkv_problem *p, const dkv_layout *l, const dkv_device_inputs *in,
                const dualkv_arithmetic *a, const dkv_oracle_settings *settings, dkv_device_oracle **out);
    void (*close)(dkv_device_oracle *o);
    int (*truth)(dkv_device_oracle *o); /* truth alone */
    int (*bound)(dkv_device_oracle *o); /* truth and bound */
    /* Conditioned on what the kernel left: device pointers, O [tq, hq, dv] in the problem's dtype, LSE [hq,
     * tq] fp32. After bound (or truth). An LSE where `store` has put the truth's stands for one that the kernel does not give. */
    int (*twin)(dkv_device_oracle *o, const void *kernel_o, const float *kernel_lse);
    int (*hasTwin)(const dkv_device_oracle *o, dkv_tensor_id id);
    /* A whole tensor as doubles to host memory. */
    int (*read)(dkv_device_oracle *o, dkv_oracle_part part, dkv_tensor_id id, double *host);
    /* Truth rounded to the tensor's type (fp32 for LSE, dSink) into device memory: the oracle as a kernel. */
    int (*store)(dkv_device_oracle *o, dkv_tensor_id id, void *device);
    /* Seconds of device time so far, and products (2mnk) of dgemm. */
    int (*cost)(dkv_device_oracle *o, double *seconds, double *flops);
    /* The truth's backward alone, from O and LSE as a kernel's forward left them (as for twin): a backward kernel. */
    int (*gradients)(dkv_device_oracle *o, const void *kernel_o, const float *kernel_lse);
    int (*alikeRows)(dkv_device_oracle *o, dkv_alike *out); /* after twin */
} dkv_oracle_ops;

typedef const dkv_oracle_ops *(*dkv_oracle_ops_fn)(void);

#ifdef __cplusplus
}
#endif
#endif
