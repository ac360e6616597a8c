/* device.h: device memory, streams, graphs and timing for whoever runs kernels whose memory is DUALKV_CUDA.
 * Plain C, no CUDA header: the program never links CUDA, it takes this table from libdualkv_cuda.so by the
 * symbol DKV_DEVICE_SYMBOL.
 *
 * Every function returns 0, or non-zero; then error() says what failed, with file:line and CUDA's own words.
 * One thread at a time. Never fork once any function but count() of a machine without a device was called.
 * Streams do not wait for the default stream, nor it for them. */
#ifndef DKV_DEVICE_H
#define DKV_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_DEVICE_SYMBOL "dkv_deviceOps"
#define DKV_IPC_BYTES 64

typedef struct dkv_device_info {
    char name[256];          /* "NVIDIA H200" */
    char capability[16];     /* "9.0" */
    char uuid[40];           /* hexadecimal */
    int32_t driver, runtime; /* CUDA versions, 1000 major + 10 minor */
    int32_t sms, l2_bytes;
    int32_t smem_bytes; /* shared memory that a block may opt in to */
    int32_t reserved;
    uint64_t memory; /* bytes */
} dkv_device_info;

typedef struct dkv_device_ops {
    uint32_t size; /* of this struct; fields are only ever added at the end */
    uint32_t reserved;
    const char *(*error)(void); /* of the last function that failed; "" before any */

    int (*count)(int *n); /* 0 devices (or no driver) is no error: *n = 0 */
    int (*select)(int device);
    int (*describe)(int device, dkv_device_info *info);
    int (*memory)(uint64_t *free, uint64_t *total);

    int (*alloc)(void **p, size_t n); /* 256-aligned, contents undefined; n 0 gives a pointer too */
    int (*release)(void *p);          /* NULL is allowed */
    /* Copies and fills are queued on `stream`; the two copies have ended when they return. */
    int (*copyIn)(void *device, const void *host, size_t n, void *stream);
    int (*copyOut)(void *host, const void *device, size_t n, void *stream);
    int (*copy)(void *to, const void *from, size_t n, void *stream); /* device to device */
    int (*fill)(void *p, int byte, size_t n, void *stream);

    int (*openStream)(void **stream);
    int (*closeStream)(void *stream);
    int (*syncStream)(void *stream);
    int (*sync)(void);  /* the whole device; reports errors of everything queued before */
    int (*check)(void); /* errors that launches left behind; does not wait */

    /* What is queued on `stream` between begin and end goes into a graph instead of running. */
    int (*beginGraph)(void *stream);
    int (*endGraph)(void *stream, void **graph); /* ends the capture in any case */
    int (*launchGraph)(void *graph, void *stream);
    int (*closeGraph)(void *graph);

    /* A kernel on a stream of its own that computes and moves memory on half of the multiprocessors beside
     * other work, until stopBusy or `seconds` have passed. In between, sync() and release() wait for it.
     * *beside: 1 where it was still running when stopBusy was called (NULL: not asked). */
    int (*startBusy)(double seconds, void **busy);
    int (*stopBusy)(void *busy, int *beside);

    int (*openEvent)(void **event);
    int (*closeEvent)(void *event);
    int (*recordEvent)(void *event, void *stream);
    int (*elapsed)(void *first, void *last, float *ms); /* waits for `last` */

    /* A buffer of alloc() for another process; open and close there, release here afterwards. */
    int (*exportBuffer)(void *p, uint8_t handle[DKV_IPC_BYTES]);
    int (*openBuffer)(const uint8_t handle[DKV_IPC_BYTES], void **p);
    int (*closeBuffer)(void *p);

    /* What the matrix unit keeps and truncates, as one JSON object (probe.cu says what its fields mean). */
    int (*probe)(char *json, size_t n);

    /* Host memory that copies reach without another copy on the way. */
    int (*allocHost)(void **p, size_t n);
    int (*releaseHost)(void *p); /* NULL is allowed */
    /* Copies between such memory and the device, queued only. */
    int (*queueIn)(void *device, const void *host, size_t n, void *stream);
    int (*queueOut)(void *host, const void *device, size_t n, void *stream);

    /* Every two bytes of [p, p + n), both even, become `pattern`; queued. */
    int (*paint)(void *p, uint16_t pattern, size_t n, void *stream);
    /* A sum over [p, p + n), both even, in which every two bytes and their place count; waits for the stream. Other contents
     * have the same sum once in 2^64. */
    int (*sum)(const void *p, size_t n, void *stream, uint64_t *out);
} dkv_device_ops;

const dkv_device_ops *dkv_deviceOps(void);
typedef const dkv_device_ops *(*dkv_device_ops_fn)(void);

#ifdef __cplusplus
}
#endif
#endif
