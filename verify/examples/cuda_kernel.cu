/* cuda_kernel.cu: the smallest CUDA kernel that can be judged: causal attention in device memory, forward only, one thread a
 * row and head, with a running maximum. `forgetful` is wrong: it does not rescale what it has summed when the maximum grows.
 *
 *     nvcc -shared -Xcompiler -fPIC -O2 -Iref -o rows.so verify/examples/cuda_kernel.cu
 *     dualkv check smoke --forward --kernel ./rows.so:rows          # every case PASSED or UNSUPPORTED
 *     dualkv check smoke --forward --kernel ./rows.so:forgetful     # FAILED
 *
 * The program brings the buffers to the device (libdualkv_cuda.so lies beside it), guards and poisons them there, and waits
 * for the whole device. Work goes to launch->stream; segments and ranges are read from their copies on the device. */
#include <cuda_bf16.h>
#include <math.h>
#include <stdio.h>

#include "dualkv_kernel.h"

struct Args { /* by value: `problem` itself is in host memory */
    dualkv_tensor q, k, v, o, lse;
    const dualkv_segment *segments;
    const dualkv_range *ranges;
    int n_segments, hq, group, dqk, dv, forgets;
    int64_t tq;
    float scale;
};

static __device__ float load(const dualkv_tensor &t, int64_t row, int64_t head, int c) {
    return __bfloat162float(((const __nv_bfloat16 *)t.data)[row * t.row + head * t.head + c]);
}

static __global__ void attend(Args a) {
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = at / a.hq;
    int h = (int)(at % a.hq), kvh = h / a.group, i = 0;
    if (row >= a.tq) return;
    while (row >= a.segments[i].q_start + a.segments[i].q_len) i++; /* segments lie one after another */
    const dualkv_segment s = a.segments[i];
    float max = -INFINITY, sum = 0, acc[256] = {0};
    for (int g = 0; g < s.range_count; g++) { /* the prompt's keys, then its own */
        const dualkv_range range = a.ranges[s.range_begin + g];
        for (int64_t k = 0; k < range.len && range.pos + k <= s.context + row - s.q_start; k++) { /* causal */
            float x = 0;
            for (int c = 0; c < a.dqk; c++) x += load(a.q, row, h, c) * load(a.k, range.k_start + k, kvh, c);
            float up = fmaxf(max, x *= a.scale), rescale = a.forgets ? 1 : expf(max - up), w = expf(x - up);
            sum = sum * rescale + w;
            for (int c = 0; c < a.dv; c++) acc[c] = acc[c] * rescale + w * load(a.v, range.k_start + k, kvh, c);
            max = up;
        }
    }
    for (int c = 0; c < a.dv; c++)
        ((__nv_bfloat16 *)a.o.data)[row * a.o.row + h * a.o.head + c] = __float2bfloat16(sum == 0 ? 0 : acc[c] / sum);
    ((float *)a.lse.data)[row * a.lse.row + h * a.lse.head] = sum == 0 ? -INFINITY : max + logf(sum);
}

static uint64_t launched; /* so that nothing else can pass for this kernel */

static int forward(void *forgets, const dualkv_launch *l, char *err, size_t n) {
    const dualkv_problem *p = l->problem;
    Args a = {l->q, l->k, l->v, l->o, l->lse, l->device_segments, l->device_ranges, p->n_segments, p->hq, p->hq / p->hkv,
              p->dqk, p->dv, *(int *)forgets, p->tq, p->scale};
    if (p->tq == 0) return 0;
    attend<<<(unsigned)((p->tq * p->hq + 63) / 64), 64, 0, (cudaStream_t)l->stream>>>(a);
    launched++;
    cudaError_t e = cudaGetLastError();
    if (e != cudaSuccess) snprintf(err, n, "%s", cudaGetErrorString(e));
    return e != cudaSuccess;
}

static const char *refuses(void *, const dualkv_problem *p) {
    if (p->dtype != DUALKV_BF16) return "bf16 only";
    return p->mask != DUALKV_CAUSAL ? "causal only" : p->softcap > 0 || p->alibi || p->sink ? "no score modifiers" : NULL;
}

static int right = 0, wrong = 1; /* what `self` is */
static void *openRight(const char *, char *, size_t) { return &right; }
static void *openWrong(const char *, char *, size_t) { return &wrong; }
static void closeIt(void *) {}
static uint64_t launches(void *) { return launched; }

static dualkv_kernel make(const char *name, const char *doc, void *(*open)(const char *, char *, size_t)) {
    dualkv_kernel k = {};
    k.size = sizeof k;
    k.abi = DUALKV_ABI;
    k.name = name;
    k.doc = doc;
    k.memory = DUALKV_CUDA;
    k.alignment = 2;
    k.open = open;
    k.close = closeIt;
    k.refuses = refuses;
    k.forward = forward;
    k.launches = launches;
    return k;
}

extern "C" const dualkv_kernel *const *dualkv_kernels(uint32_t abi, int *count) {
    static const dualkv_kernel rows = make("rows", "a thread a row, running maximum", openRight);
    static const dualkv_kernel forgetful = make("forgetful", "the same without the rescale", openWrong);
    static const dualkv_kernel *const list[] = {&rows, &forgetful};
    *count = 2;
    return abi == DUALKV_ABI ? list : NULL;
}
