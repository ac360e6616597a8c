/* oracle_read.cu: results to the host. Pageable memory is filled through pinned pieces, by several threads: one copies at
 * 7 GB/s, four at about 20. */
#include <pthread.h>
#include <string.h>

#include "oracle_impl.cuh"

#define READERS 4
#define PIECE ((int64_t)16 << 20)
#define MANY (READERS * PIECE) /* bytes from which on threads pay */

typedef struct reader {
    const char *from;
    char *to;
    int64_t bytes;
    int device;
    char *pinned[2];
    cudaError_t error;
    pthread_t thread;
    bool beside;
} reader;

/* Two pieces in turn: one comes while the other is copied on. */
static cudaError_t readPieces(const reader *r, cudaStream_t stream, cudaEvent_t *there) {
    const int64_t pieces = (r->bytes + PIECE - 1) / PIECE;
    for (int64_t i = 0; i <= pieces; i++) {
        cudaError_t e = cudaSuccess;
        if (i < pieces) {
            const int64_t n = r->bytes - i * PIECE < PIECE ? r->bytes - i * PIECE : PIECE;
            e = cudaMemcpyAsync(r->pinned[i % 2], r->from + i * PIECE, (size_t)n, cudaMemcpyDeviceToHost, stream);
            if (!e) e = cudaEventRecord(there[i % 2], stream);
        }
        if (e) return e;
        if (i == 0) continue;
        const int64_t at = (i - 1) * PIECE, n = r->bytes - at < PIECE ? r->bytes - at : PIECE;
        e = cudaEventSynchronize(there[(i - 1) % 2]);
        if (e) return e;
        memcpy(r->to + at, r->pinned[(i - 1) % 2], (size_t)n);
    }
    return cudaSuccess;
}

static void *readThread(void *x) {
    reader *r = (reader *)x;
    cudaStream_t stream = NULL;
    cudaEvent_t there[2] = {NULL, NULL};
    cudaError_t e = cudaSetDevice(r->device);
    if (!e) e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (int i = 0; i < 2 && !e; i++) e = cudaEventCreateWithFlags(&there[i], cudaEventDisableTiming);
    if (!e) e = readPieces(r, stream, there);
    if (stream) cudaStreamSynchronize(stream);
    for (cudaEvent_t x : there)
        if (x) cudaEventDestroy(x);
    if (stream) cudaStreamDestroy(stream);
    r->error = e;
    return NULL;
}

/* Pinned memory of the process, once for all; NULL: there is none. */
static char *pinnedMemory(void) {
    static char *memory;
    void *x = NULL;
    if (!memory && cudaHostAlloc(&x, (size_t)(2 * MANY), cudaHostAllocDefault) == cudaSuccess) memory = (char *)x;
    if (!memory) (void)cudaGetLastError();
    return memory;
}

int dkv_readDoubles(const double *from, int64_t n, double *host) {
    const int64_t bytes = 8 * n, share = (n + READERS - 1) / READERS * 8;
    char *pinned = bytes >= MANY ? pinnedMemory() : NULL;
    reader all[READERS] = {};
    int device = 0;
    if (!pinned) {
        DKV_TRY_CUDA(cudaMemcpy(host, from, (size_t)bytes, cudaMemcpyDeviceToHost));
        return 0;
    }
    DKV_TRY_CUDA(cudaGetDevice(&device));
    for (int i = 0; i < READERS; i++) {
        reader *r = &all[i];
        const int64_t at = i * share, left = bytes - at < share ? bytes - at : share;
        *r = reader{(const char *)from + at, (char *)host + at, left, device, {pinned + 2 * i * PIECE, pinned + (2 * i + 1) * PIECE},
                    cudaSuccess, {}, false};
        r->beside = i + 1 < READERS && pthread_create(&r->thread, NULL, readThread, r) == 0;
        if (!r->beside) readThread(r);
    }
    for (reader &r : all)
        if (r.beside) pthread_join(r.thread, NULL);
    for (const reader &r : all) DKV_TRY_CUDA(r.error);
    return 0;
}
