/* launch.h: the kernels' entry points, as the plugin calls them. All queue work on `stream` and return the launch's error. */
#ifndef DKV_LAUNCH_H
#define DKV_LAUNCH_H

#include <cuda_runtime_api.h>

#include "args.cuh"

#define DKV_FOLD_TILES 64   /* 16-bit: query tiles (64 rows, 4 steps of k16) between folds of dK, dV into memory */
#define DKV_FOLD32_TILES 32 /* fp32: tiles of 64 between folds of every gradient */
#define DKV_SPLIT_ROWS 2048 /* a walk is not cut into parts of fewer rows */
#define DKV_KEY_TILE 64   /* forward: keys a tile, every head dim (part of the declared arithmetic) */

cudaError_t dkv_cudaForward16(const dkv_args *a, cudaStream_t stream);
cudaError_t dkv_cudaForward32(const dkv_args *a, cudaStream_t stream);
/* delta[h][t] = dO.O - dLSE, and the first `clear` bytes of dq_acc cleared. */
cudaError_t dkv_cudaDelta(const dkv_args *a, size_t clear, cudaStream_t stream);
/* dK, dV into dk_acc, dv_acc (one owner a key tile, folded in fixed order); dQ into dq_acc by atomics unless det. */
cudaError_t dkv_cudaBackward16(const dkv_args *a, int det, cudaStream_t stream);
cudaError_t dkv_cudaBackward32(const dkv_args *a, cudaStream_t stream);
/* dQ alone, one owner a query tile (the bitwise repeatable way), into dq_acc. */
cudaError_t dkv_cudaQueryGradient16(const dkv_args *a, cudaStream_t stream);
/* Sums the splits in order, scales, rounds to the output type; dSink. */
cudaError_t dkv_cudaConvert(const dkv_args *a, cudaStream_t stream);
/* 16-bit backward: keys a block owns, so that the plugin can size splits; columns of its sums (args.cuh). */
int dkv_cudaKeyRows(const dualkv_problem *p);
int dkv_cudaHeadDim(const dualkv_problem *p);
/* 16-bit backward: bytes of shared memory a block needs. */
size_t dkv_cudaBackwardShared(const dualkv_problem *p);
/* The matrix unit's arithmetic on the current device, as JSON (probe.cu). Waits. */
cudaError_t dkv_cudaProbe(char *json, size_t n);

extern const dualkv_kernel dkv_fp64Kernel; /* fp64.cu */

#endif
