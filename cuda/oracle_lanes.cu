/* oracle_lanes.cu: several KV heads at a time, each on a stream of its own, whose work a thread of its own queues. Heads
 * share no sums, so that the number of lanes changes no bit. */
#include <pthread.h>
#include <stdlib.h>

#include "oracle_impl.cuh"

#define LANES_FROM 1e11 /* products of a forward from which on a second lane's memory is sooner had than waited for */
#define MEMORY_SHARE 0.6 /* of what is free: kernels and other oracles want some of it */

typedef struct lane_work {
    dkv_device_oracle *lane;
    dkv_head_fn f;
    const void *arg;
    int32_t first, step, heads, device;
    int *failed; /* of all lanes */
    int rc;
    pthread_t thread;
    bool beside;
} lane_work;

static void runLane(lane_work *w) {
    for (int32_t kvh = w->first; kvh < w->heads && !w->rc; kvh += w->step) {
        if (__atomic_load_n(w->failed, __ATOMIC_RELAXED)) return;
        w->rc = w->f(w->lane, kvh, w->arg);
    }
    if (w->rc) __atomic_store_n(w->failed, 1, __ATOMIC_RELAXED);
}

static void *laneThread(void *x) {
    lane_work *w = (lane_work *)x;
    const cudaError_t e = cudaSetDevice(w->device);
    if (e) w->rc = dkv_oracleFail(__FILE__, __LINE__, "%s", cudaGetErrorString(e));
    runLane(w);
    return NULL;
}

int dkv_eachHead(dkv_device_oracle *o, dkv_head_fn f, const void *arg) {
    lane_work work[DKV_LANES] = {};
    int device = 0, failed = 0, rc = 0;
    DKV_TRY_CUDA(cudaGetDevice(&device));
    DKV_TRY_CUDA(cudaEventRecord(o->fork, o->stream));
    for (int i = 1; i < o->lanes; i++) DKV_TRY_CUDA(cudaStreamWaitEvent(o->lane[i]->stream, o->fork, 0));
    for (int i = o->lanes - 1; i >= 0; i--) {
        lane_work *w = &work[i];
        *w = lane_work{i ? o->lane[i] : o, f, arg, i, o->lanes, o->p->hkv, device, &failed, 0, {}, false};
        w->beside = i > 0 && pthread_create(&w->thread, NULL, laneThread, w) == 0;
        if (!w->beside) runLane(w);
    }
    for (int i = 0; i < o->lanes; i++) {
        if (work[i].beside) pthread_join(work[i].thread, NULL);
        rc |= work[i].rc;
    }
    for (int i = 1; i < o->lanes && !rc; i++) {
        DKV_TRY_CUDA(cudaEventRecord(o->lane[i]->fork, o->lane[i]->stream));
        DKV_TRY_CUDA(cudaStreamWaitEvent(o->stream, o->lane[i]->fork, 0));
    }
    return rc;
}

static int32_t chooseLanes(const dkv_device_oracle *o) {
    const double bytes = dkv_laneBytes(o);
    size_t left = 0, total = 0;
    int32_t lanes = o->set.lanes > 0 ? o->set.lanes : dkv_forwardFlops(o->p) < LANES_FROM ? 1 : DKV_LANES;
    lanes = o->set.progress ? 1 : lanes < o->p->hkv ? lanes : o->p->hkv;
    lanes = lanes < 1 ? 1 : lanes < DKV_LANES ? lanes : DKV_LANES;
    if (lanes > 1 && cudaMemGetInfo(&left, &total) != cudaSuccess) return 1;
    const double room = MEMORY_SHARE * (double)left - dkv_twinBytes(o);
    while (lanes > 1 && (lanes - 1) * bytes > room) lanes--;
    return lanes;
}

static int openLane(const dkv_device_oracle *o, int i, dkv_device_oracle *l) {
    cudaStream_t stream = NULL;
    *l = *o;
    l->stream = NULL;
    l->fork = l->begin = l->end = NULL;
    l->twin = NULL;
    l->flops = l->seconds = 0;
    l->handle = o->blas->handle[i];
    DKV_TRY_CUDA(cudaEventCreateWithFlags(&l->fork, cudaEventDisableTiming));
    DKV_TRY_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    l->stream = stream; /* from here on it has memory to be freed */
    DKV_TRY(dkv_allocateHead(l));
    if (o->blas->setStream(l->handle, stream) != CUBLAS_STATUS_SUCCESS)
        return dkv_oracleFail(__FILE__, __LINE__, "cuBLAS takes no stream");
    return 0;
}

static void closeLane(dkv_device_oracle *l) {
    dkv_closeTwin(l);
    if (l->stream) {
        dkv_freeHead(l);
        cudaStreamSynchronize(l->stream);
        cudaStreamDestroy(l->stream);
    }
    if (l->fork) cudaEventDestroy(l->fork);
    free(l);
}

int dkv_openLanes(dkv_device_oracle *o) {
    const int32_t lanes = chooseLanes(o);
    o->lanes = 1;
    DKV_TRY_CUDA(cudaEventCreateWithFlags(&o->fork, cudaEventDisableTiming));
    DKV_TRY(dkv_loadBlas(lanes, &o->blas));
    while (o->lanes < lanes) {
        dkv_device_oracle *l = (dkv_device_oracle *)malloc(sizeof *l);
        if (!l || openLane(o, o->lanes, l)) { /* somebody else was faster: those there are will do */
            if (l) closeLane(l);
            break;
        }
        o->lane[o->lanes++] = l;
    }
    return 0;
}

void dkv_closeLanes(dkv_device_oracle *o) {
    for (int i = 1; i < o->lanes; i++) closeLane(o->lane[i]);
    if (o->fork) cudaEventDestroy(o->fork);
}
