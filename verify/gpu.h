/* gpu.h: the worker's side of kernels whose memory is DUALKV_CUDA.
 *
 * The arena stays the truth: it lies in host memory and belongs to the coordinator. Before a launch it is copied to the
 * device byte for byte, guards and poison with it, to addresses that equal its offsets modulo 8192 (so each block is
 * aligned, or not, as the plan says); afterwards everything comes back, so that the coordinator's checks of guards,
 * poison and inputs hold as they are. The kernel runs on a stream that does not wait for the default stream; then the
 * whole device is waited for.
 *
 *   run=side   the inputs arrive by copies queued on the kernel's own stream behind milliseconds of other
 * work, and the outputs leave by copies queued behind it: work on any other stream sees poison or is lost
 *   run=graph  the launch is captured and replayed twice, everything poisoned again between
 *   run=busy   beside a kernel that keeps half of the multiprocessors busy
 * Each of the three runs the kernel once before (code is loaded at first use, which may wait for the device).
 *
 * Arenas up to 16 MiB are an image in one piece of device memory that each worker takes once: one copy there and one
 * back through pinned memory, by the copy engines, so that the kernel alone needs the multiprocessors (processes that
 * share a device get those in turns, and each turn is waited for). What an earlier problem left behind the image's end
 * is made 0xFF again. Larger ones lie block by block, each with the whole guards on both sides of it, in allocations of
 * their own; so do all with DUALKV_EXACT_MEMORY=1, made anew and exactly as large, so that compute-sanitizer sees where
 * they end. Copies of 256 MiB or more between blocks and the arena go through pinned memory of that size, in two halves of
 * which one is copied while all cores are at the other (DUALKV_PIPE_BYTES=N: of N bytes or more, so that tests need not be
 * large), or straight where none can be had.
 */
#ifndef DKV_GPU_H
#define DKV_GPU_H

#include "worker.h"

typedef struct dkv_gpu dkv_gpu;

/* Takes the device table from `so` (a kernel's shared object) or, where that exports none, from
 * libdualkv_cuda.so beside the program, and opens device 0. No device: *out NULL, info->name "", and 0. */
int dkv_openGpu(void *so, dkv_gpu **out, dkv_gpu_info *info, dkv_err *err);
void dkv_closeGpu(dkv_gpu *g);
/* The problem of the launches so far goes away. */
void dkv_dropGpuProblem(dkv_gpu *g);

typedef struct dkv_gpu_launch {
    const dualkv_kernel *kernel;
    void *self;
    const dualkv_problem *view;
    const dkv_plan *plan;
    dkv_run_kind run;
    int backward, move; /* move: in other memory than the last one */
    int resend;         /* the arena is not what the last forward left */
    int fd;             /* the arena */
    uint8_t *base;      /* where it is mapped; NULL where that is not needed */
} dkv_gpu_launch;

/* Must the arena of a launch be mapped? An image is read and written as a file. */
bool dkv_needsMapping(dkv_gpu *g, const dkv_plan *plan);
/* Runs one launch. *seconds: device time of the last run. `why`: words of an outcome
 * that is not OK; DKV_W_CRASHED where the device cannot be used any more. */
dkv_outcome dkv_launchOnGpu(dkv_gpu *g, const dkv_gpu_launch *c, double *seconds, char *why, size_t n);

typedef struct dkv_gpu_times {
    double seconds[2]; /* forward, backward (0 without gradients): medians of device times */
    int64_t bytes;     /* device memory of tensors and workspace */
    int32_t runs;
} dkv_gpu_times;

/* Times a kernel on inputs (canonical, host) in a plan of layout=contiguous; run and backward are not looked
 * at. */
dkv_outcome dkv_timeOnGpu(dkv_gpu *g, const dkv_gpu_launch *c, const dkv_inputs *in, dkv_gpu_times *out,
                          char *why, size_t n);

/* What the matrix unit keeps, as JSON (cuda/probe.cu). */
dkv_outcome dkv_probeGpu(dkv_gpu *g, char *json, size_t room, char *why, size_t n);

#endif
