#include "../ref/device.h"

#include <cuda_runtime.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"

static char last_error[512];

static int failed(cudaError_t e, const char *what, int line) {
    if (e == cudaSuccess) return 0;
    (void)cudaGetLastError(); /* so that the next check does not report it again (a sticky error comes back
                                 anyway) */
    snprintf(last_error, sizeof last_error, "cuda/device.cu:%d: %s: %s (%s)", line, what,
             cudaGetErrorString(e), cudaGetErrorName(e));
    return 1;
}
#define TRY(call) failed(call, #call, __LINE__)

static const char *device_error(void) { return last_error; }

static int device_count(int *n) {
    cudaError_t e = cudaGetDeviceCount(n);
    if (e == cudaSuccess) return 0;
    *n = 0;
    (void)cudaGetLastError();
    return e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver
               ? 0
               : failed(e, "cudaGetDeviceCount", __LINE__);
}

static int device_select(int device) { return TRY(cudaSetDevice(device)); }

static int device_describe(int device, dkv_device_info *info) {
    cudaDeviceProp p;
    memset(info, 0, sizeof *info);
    if (TRY(cudaGetDeviceProperties(&p, device)) || TRY(cudaDriverGetVersion(&info->driver)) ||
        TRY(cudaRuntimeGetVersion(&info->runtime)))
        return 1;
    snprintf(info->name, sizeof info->name, "%.255s", p.name);
    snprintf(info->capability, sizeof info->capability, "%d.%d", p.major, p.minor);
    for (int i = 0; i < 16; i++)
        snprintf(info->uuid + 2 * i, 3, "%02x", (unsigned)(unsigned char)p.uuid.bytes[i]);
    info->sms = p.multiProcessorCount;
    info->l2_bytes = p.l2CacheSize;
    info->smem_bytes = (int32_t)p.sharedMemPerBlockOptin;
    info->memory = p.totalGlobalMem;
    return 0;
}

static int device_memory(uint64_t *free_bytes, uint64_t *total) {
    size_t f, t;
    if (TRY(cudaMemGetInfo(&f, &t))) return 1;
    *free_bytes = f;
    *total = t;
    return 0;
}

static int device_alloc(void **p, size_t n) { return TRY(cudaMalloc(p, n ? n : 1)); }
static int device_release(void *p) { return TRY(cudaFree(p)); }

static int device_queueIn(void *device, const void *host, size_t n, void *stream) {
    return TRY(cudaMemcpyAsync(device, host, n, cudaMemcpyHostToDevice, (cudaStream_t)stream));
}
static int device_queueOut(void *host, const void *device, size_t n, void *stream) {
    return TRY(cudaMemcpyAsync(host, device, n, cudaMemcpyDeviceToHost, (cudaStream_t)stream));
}
static int device_copyIn(void *device, const void *host, size_t n, void *stream) {
    return device_queueIn(device, host, n, stream) || TRY(cudaStreamSynchronize((cudaStream_t)stream));
}
static int device_copyOut(void *host, const void *device, size_t n, void *stream) {
    return device_queueOut(host, device, n, stream) || TRY(cudaStreamSynchronize((cudaStream_t)stream));
}
static int device_copy(void *to, const void *from, size_t n, void *stream) {
    return TRY(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, (cudaStream_t)stream));
}
static int device_fill(void *p, int byte, size_t n, void *stream) {
    return n ? TRY(cudaMemsetAsync(p, byte, n, (cudaStream_t)stream)) : 0;
}

/* ---- patterns and sums ---- */

#define BLOCKS 1056
#define THREADS 256

static __global__ void paint_kernel(uint16_t *p, uint32_t wide, size_t n) {
    const size_t head = (uintptr_t)p % 4 ? 1 : 0, words = (n - head) / 2, step = (size_t)gridDim.x * blockDim.x;
    uint32_t *w = (uint32_t *)(p + head);
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) w[i] = wide;
    if (blockIdx.x || threadIdx.x) return;
    if (head) p[0] = (uint16_t)wide;
    p[n - 1] = (uint16_t)wide;
}

static int device_paint(void *p, uint16_t pattern, size_t n, void *stream) {
    if (n < 2) return 0;
    paint_kernel<<<BLOCKS, THREADS, 0, (cudaStream_t)stream>>>((uint16_t *)p, pattern * 0x10001u, n / 2);
    return TRY(cudaGetLastError());
}

static __global__ void sum_kernel(const uint16_t *p, size_t n, unsigned long long *out) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    unsigned long long all = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        unsigned long long h = (i << 16 | p[i]) + 0x9E3779B97F4A7C15ull; /* the finaliser of splitmix64 */
        h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ull;
        h = (h ^ h >> 27) * 0x94D049BB133111EBull;
        all += h ^ h >> 31;
    }
    for (int by = 16; by; by /= 2) all += __shfl_down_sync(0xffffffffu, all, by);
    if (threadIdx.x % 32 == 0) atomicAdd(out, all);
}

static int device_sum(const void *p, size_t n, void *stream, uint64_t *out) {
    static unsigned long long *room; /* as long as the process */
    cudaStream_t s = (cudaStream_t)stream;
    *out = 0;
    if (n < 2) return 0;
    if (!room && TRY(cudaMalloc(&room, sizeof *room))) return 1;
    if (TRY(cudaMemsetAsync(room, 0, sizeof *room, s))) return 1;
    sum_kernel<<<BLOCKS, THREADS, 0, s>>>((const uint16_t *)p, n / 2, room);
    return TRY(cudaGetLastError()) || TRY(cudaMemcpyAsync(out, room, sizeof *room, cudaMemcpyDeviceToHost, s)) ||
           TRY(cudaStreamSynchronize(s));
}

/* ---- streams ---- */

static int device_openStream(void **stream) {
    return TRY(cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking));
}
static int device_closeStream(void *stream) { return TRY(cudaStreamDestroy((cudaStream_t)stream)); }
static int device_syncStream(void *stream) { return TRY(cudaStreamSynchronize((cudaStream_t)stream)); }
static int device_sync(void) { return TRY(cudaDeviceSynchronize()); }
static int device_check(void) { return TRY(cudaGetLastError()); }

static int device_beginGraph(void *stream) {
    return TRY(cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal));
}
static int device_endGraph(void *stream, void **graph) {
    cudaGraph_t g = NULL;
    *graph = NULL;
    if (TRY(cudaStreamEndCapture((cudaStream_t)stream, &g))) return 1;
    int rc = TRY(cudaGraphInstantiate((cudaGraphExec_t *)graph, g, 0));
    return TRY(cudaGraphDestroy(g)) || rc;
}
static int device_launchGraph(void *graph, void *stream) {
    return TRY(cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream));
}
static int device_closeGraph(void *graph) { return TRY(cudaGraphExecDestroy((cudaGraphExec_t)graph)); }

/* On half of the multiprocessors only: a kernel under test may need all registers of one, or another division
 * between shared memory and cache, and would otherwise wait for the busy kernel's end. */
#define BUSY_WORDS (1 << 22)
#define BUSY_THREADS 512
struct busy {
    cudaStream_t stream;
    volatile int *stop; /* pinned host memory */
    float *scratch;     /* [BUSY_WORDS], on the device */
};

static __device__ __forceinline__ uint64_t global_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__global__ void __launch_bounds__(BUSY_THREADS)
    busy_kernel(const volatile int *stop, float *scratch, uint64_t ns) {
    uint64_t end = global_ns() + ns;
    unsigned at = blockIdx.x * BUSY_THREADS + threadIdx.x;
    float x = (float)at;
    while (!*stop && global_ns() < end)
        for (int i = 0; i < 64; i++) {
            at = at * 1664525u + 1013904223u;
            float *p = scratch + at % BUSY_WORDS;
            x = fmaf(x, 0.5f, *p);
            *p = x;
        }
}

static busy *kept; /* one that is not running, for the next start: stream and memory take longer than most kernels under test */

static int closeBusy(busy *b) {
    int rc = b->stream ? TRY(cudaStreamDestroy(b->stream)) : 0;
    rc |= TRY(cudaFree(b->scratch)) | TRY(cudaFreeHost((void *)b->stop));
    free(b);
    return rc;
}

static int device_stopBusy(void *handle, int *beside) {
    busy *b = (busy *)handle;
    if (!b) return 0;
    if (beside) {
        *beside = cudaStreamQuery(b->stream) == cudaErrorNotReady;
        (void)cudaGetLastError(); /* "not ready" is no error */
    }
    *b->stop = 1;
    if (TRY(cudaStreamSynchronize(b->stream))) return closeBusy(b), 1;
    if (kept) return closeBusy(b);
    kept = b;
    return 0;
}

static int openBusy(busy **out) {
    busy *b = (busy *)calloc(1, sizeof *b);
    *out = NULL;
    if (!b) return failed(cudaErrorMemoryAllocation, "calloc", __LINE__);
    if (TRY(cudaHostAlloc((void **)&b->stop, sizeof(int), cudaHostAllocMapped)) ||
        TRY(cudaMalloc(&b->scratch, BUSY_WORDS * sizeof(float))) ||
        TRY(cudaMemset(b->scratch, 0, BUSY_WORDS * sizeof(float))) ||
        TRY(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking)))
        return closeBusy(b), 1;
    *out = b;
    return 0;
}

static int device_startBusy(double seconds, void **handle) {
    int device, sms = 0;
    busy *b = kept;
    *handle = NULL;
    kept = NULL;
    if (!b && openBusy(&b)) return 1;
    *b->stop = 0;
    if (TRY(cudaGetDevice(&device)) || TRY(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)))
        return closeBusy(b), 1;
    busy_kernel<<<(unsigned)((sms + 1) / 2), BUSY_THREADS, 0, b->stream>>>(b->stop, b->scratch,
                                                                           (uint64_t)(seconds * 1e9));
    if (TRY(cudaGetLastError())) return closeBusy(b), 1;
    *handle = b;
    return 0;
}

static int device_openEvent(void **event) { return TRY(cudaEventCreate((cudaEvent_t *)event)); }
static int device_closeEvent(void *event) { return TRY(cudaEventDestroy((cudaEvent_t)event)); }
static int device_recordEvent(void *event, void *stream) {
    return TRY(cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream));
}
static int device_elapsed(void *first, void *last, float *ms) {
    return TRY(cudaEventSynchronize((cudaEvent_t)last)) ||
           TRY(cudaEventElapsedTime(ms, (cudaEvent_t)first, (cudaEvent_t)last));
}

static_assert(sizeof(cudaIpcMemHandle_t) == DKV_IPC_BYTES, "the handle's size is part of this ABI");
static int device_exportBuffer(void *p, uint8_t handle[DKV_IPC_BYTES]) {
    cudaIpcMemHandle_t h;
    if (TRY(cudaIpcGetMemHandle(&h, p))) return 1;
    memcpy(handle, &h, sizeof h);
    return 0;
}
static int device_openBuffer(const uint8_t handle[DKV_IPC_BYTES], void **p) {
    cudaIpcMemHandle_t h;
    memcpy(&h, handle, sizeof h);
    return TRY(cudaIpcOpenMemHandle(p, h, cudaIpcMemLazyEnablePeerAccess));
}
static int device_closeBuffer(void *p) { return TRY(cudaIpcCloseMemHandle(p)); }

static int device_allocHost(void **p, size_t n) { return TRY(cudaMallocHost(p, n ? n : 1)); }
static int device_releaseHost(void *p) { return TRY(cudaFreeHost(p)); }

static int device_probe(char *json, size_t n) { return TRY(dkv_cudaProbe(json, n)); }

extern "C" __attribute__((visibility("default"))) const dkv_device_ops *dkv_deviceOps(void) {
    static const dkv_device_ops ops = {
        sizeof(dkv_device_ops),
        0,
        device_error,
        device_count,
        device_select,
        device_describe,
        device_memory,
        device_alloc,
        device_release,
        device_copyIn,
        device_copyOut,
        device_copy,
        device_fill,
        device_openStream,
        device_closeStream,
        device_syncStream,
        device_sync,
        device_check,
        device_beginGraph,
        device_endGraph,
        device_launchGraph,
        device_closeGraph,
        device_startBusy,
        device_stopBusy,
        device_openEvent,
        device_closeEvent,
        device_recordEvent,
        device_elapsed,
        device_exportBuffer,
        device_openBuffer,
        device_closeBuffer,
        device_probe,
        device_allocHost,
        device_releaseHost,
        device_queueIn,
        device_queueOut,
        device_paint,
        device_sum,
    };
    return &ops;
}
