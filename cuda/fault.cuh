/* fault.cuh: planted faults of the CUDA kernels, for a test build only (make cuda-faults, -DDKV_CUDA_FAULTS). One row
 * a fault: id, what it does; ids of emu_fault.h where the fault is the same, Z: only here. Each is one small edit
 * where FAULT or PLANT names it. The usual build has none of it: FAULT is 0 there, PLANT its last argument.
 * Spec of a faulty kernel: cuda+fault=ID. */
#ifndef DKV_CUDA_FAULT_H
#define DKV_CUDA_FAULT_H

#ifdef DKV_CUDA_FAULTS
#include <cuda_bf16.h>
#include <string.h>

#define DKV_CUDA_FAULT_TABLE(F)                                                                               \
    F(X1, "forward: a row sees what the next row sees, one key of the future")                               \
    F(X5, "forward: columns past the range are not masked")                                                  \
    F(B3, "forward: V past the range is not zeroed")                                                         \
    F(D1, "forward: the maximum is overwritten before the correction is formed, at the switch of ranges")    \
    F(X22, "forward: O is not corrected where the maximum grows by less than 1")                             \
    F(D3, "forward: LSE of rows with a prefix is in base 2")                                                 \
    F(C2, "forward: a row without keys reports LSE = -49994")                                                \
    F(X7, "forward: query head h reads KV head h mod Hkv")                                                   \
    F(Y16, "forward: a segment's offset into Q is kept in 16 bits")                                          \
    F(X20, "forward: a last, partial query tile is not computed")                                            \
    F(X16, "forward: the last query tile stores one row of O too many")                                      \
    F(X17, "forward: Q is scaled in the caller's buffer")                                                    \
    F(Z1, "forward: Q and K are read before their copies have arrived")                                     \
    F(Z2, "forward: the sink is left out")                                                                   \
    F(X6, "the scale is rounded to bf16")                                                                    \
    F(X12, "delta is left out")                                                                              \
    F(G1, "the gradient through LSE is left out")                                                            \
    F(E4, "delta is summed in bf16")                                                                         \
    F(Y9, "backward: delta is read one head too early")                                                      \
    F(Z3, "backward: a row sees what the next row sees, one key of the future")                              \
    F(F1, "backward: the walk over rows keeps only the last query head of the group")                        \
    F(X14, "backward: dK and dV of a prompt miss the last response")                                         \
    F(E1, "backward: dK and dV are rounded to 16 bit at each fold")                                          \
    F(H5, "backward: a fold of dK and dV is stored, not added")                                              \
    F(H1, "backward: parts of dQ are added without atomics")                                                 \
    F(H2, "backward: no barrier between P, dS in shared memory and the products that read them")             \
    F(Z4, "backward: the sum of dQ is not cleared first")                                                    \
    F(I3, "backward: the conversion pass runs on the default stream")                                        \
    F(Z5, "dQ is not scaled")                                                                                \
    F(Y3, "dSink sums an eighth of the rows")

enum {
    DKV_NO_FAULT,
#define F(id, doc) DKV_FAULT_##id,
    DKV_CUDA_FAULT_TABLE(F)
#undef F
};

#define FAULT(a, id) ((a).fault == DKV_FAULT_##id)
#define PLANT(a, id, faulty, right) (FAULT(a, id) ? (faulty) : (right))
#define DKV_FAULT_FIELD int fault;
#define TAKE_FAULT(word, n, self) dkv_takeFault(word, n, &(self)->fault)
#define GIVE_FAULT(self, a) ((a)->fault = (self)->fault)
#define DKV_FAULT_WORD(id, doc) " " #id
#define DKV_KNOWN_OPTIONS "det, fault=ID, ID one of" DKV_CUDA_FAULT_TABLE(DKV_FAULT_WORD)

/* Takes the word fault=ID of n characters; 0: it is none. */
static inline int dkv_takeFault(const char *word, size_t n, int *fault) {
    static const char *const ids[] = {
#define F(id, doc) #id,
        DKV_CUDA_FAULT_TABLE(F)
#undef F
    };
    const size_t skip = 6; /* of "fault=" */
    if (n <= skip || memcmp(word, "fault=", skip)) return 0;
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if (strlen(ids[i]) == n - skip && !memcmp(word + skip, ids[i], n - skip)) *fault = (int)i + 1;
    return *fault != DKV_NO_FAULT;
}
static inline __host__ __device__ float dkv_faultBf16(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}
#else
#define FAULT(a, id) 0
#define PLANT(a, id, faulty, right) (right)
#define DKV_FAULT_FIELD
#define TAKE_FAULT(word, n, self) 0
#define GIVE_FAULT(self, a) ((void)(self))
#define DKV_KNOWN_OPTIONS "det"
#endif
#endif
