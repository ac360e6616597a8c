/* emu_fault.h: the planted faults of the emulated kernel. One row a fault: id, the row of faults.md it comes
 * from (or "own"), 1 if it is a control that must not alarm, what it does. Each is one small edit where the
 * kernel takes that decision: faults of geometry in emu_fault.c, the others where F_id is named in the
 * kernel's files. "Own region": a segment's own keys; "prefix": the keys of its ancestors; "switch": the
 * first tile of a later range. */
#ifndef DKV_EMU_FAULT_H
#define DKV_EMU_FAULT_H

#include "emu_impl.h"

#define DKV_FAULTS(F)                                                                                        \
    F(A1, "A1", 0,                                                                                           \
      "own region: the causal limit uses the row in the segment, without the context before it")             \
    F(A2, "A2", 0, "as A1, in backward only")                                                                \
    F(A3, "A3", 0, "backward: the walk over prefix keys starts at the query tile of the key's number")       \
    F(A4, "A4", 0, "the diagonal is applied to prefix tiles as well")                                        \
    F(A7, "A7", 0, "backward ignores the mask")                                                              \
    F(B2, "B2", 0, "backward: columns past the range keep the score 0")                                      \
    F(B3, "B3", 0, "V past the range is not zeroed")                                                         \
    F(B5, "B5", 0,                                                                                           \
      "backward works on whole query tiles; LSE and delta of the rows past the end were never written")      \
    F(B6, "B6", 0,                                                                                           \
      "the delta pass rounds segments up to 8 rows, the main pass does not; it writes past its workspace")   \
    F(B8, "B8", 0, "head dims are handled in whole blocks of 64: the rest of a larger one is left out")      \
    F(C1, "C1", 0, "backward: exp(s - LSE) without the guard for LSE = -inf")                                \
    F(C2, "C2", 0, "a row without keys reports LSE = -49994")                                                \
    F(C3, "C3", 0, "own region: -inf less -inf where a row has seen nothing yet")                            \
    F(D1, "D1", 0, "the correction is 1 at the switch of ranges")                                            \
    F(D3, "D3", 0, "LSE of rows with a prefix is in base 2")                                                 \
    F(D4, "D4", 0, "the prefix's maximum is converted to base 2 at the switch, the own region's is not")     \
    F(D5, "D5", 0, "LSE of prefix and own region merged as a + log(1 + exp(b - a)), which overflows")        \
    F(D7, "D7", 0, "prefix scores kept in fp16 before scaling")                                              \
    F(E1, "E1", 0, "dK and dV of a prefix summed over the responses in 16 bit")                              \
    F(E2, "E2", 0, "O of the prefix rounded to 16 bit before the own region is added")                       \
    F(E4, "E4", 0, "delta summed in bf16")                                                                   \
    F(E5, "E5", 1, "exp flushes subnormal results: no harness may alarm")                                    \
    F(F1, "F1", 0, "dK and dV of a prompt keep only the last query head of the group")                       \
    F(F3, "F3", 0, "dK and dV of responses stored at padded tile offsets")                                   \
    F(G1, "G1", 0, "the gradient through LSE is left out")                                                   \
    F(G3, "G3", 0, "backward leaves out softcap's 1 - tanh^2")                                               \
    F(G5, "G5", 0, "ALiBi's distance in the own region leaves out the context")                              \
    F(H4, "H4", 0, "dQ is summed in an order that changes from call to call")                                \
    F(H5, "H5", 0, "dK and dV of a prompt: a response's part is stored, not added")                          \
    F(I1, "I1", 0, "gradients of the last, partial tile are not written")                                    \
    F(I4, "I4", 0, "backward reads dO with the strides of O")                                                \
    F(I7, "I7", 0, "more than 127 segments x heads: the launch fails and nobody looks")                      \
    F(I8, "I8", 0, "rows with a prefix: O advances by Dv a row instead of its stride")                       \
    F(J1, "J1", 0, "the key ranges of the first call are used in all later calls")                           \
    F(J2, "J2", 0, "block mask: backward reads the block list in units twice as large")                      \
    F(K1, "K1", 0, "backward reads the prompt's K and V of group 0 for every group")                         \
    F(K3, "K3", 0, "dK and dV of a prompt are averaged over its children")                                   \
    F(L1, "L1", 0, "forward: the own region starts where the first sibling starts")                          \
    F(L5, "L5", 0, "softcap and ALiBi are ignored on the prefix")                                            \
    F(L7, "L7", 0, "positions go on from sibling to sibling")                                                \
    F(L10, "L10", 0, "dK and dV of a prompt scaled by (N-1)/N, N children")                                  \
    F(X1, "own", 0, "own region: a row sees one key of the future")                                          \
    F(X2, "own", 0, "own region: a row does not see itself")                                                 \
    F(X3, "own", 0, "the window is one key too wide")                                                        \
    F(X4, "own", 0, "the last key of a prefix is lost")                                                      \
    F(X5, "own", 0, "columns past the range are not masked in forward")                                      \
    F(X6, "own", 0, "the scale is rounded to bf16")                                                          \
    F(X7, "own", 0, "forward: query head h reads KV head h mod Hkv")                                         \
    F(X8, "own", 0, "the row sum adds the rounded P")                                                        \
    F(X9, "own", 0, "dS is formed from the rounded P")                                                       \
    F(X10, "own", 0, "LSE leaves the sink out")                                                              \
    F(X11, "own", 0, "outputs are cut to 16 bit, not rounded")                                               \
    F(X12, "own", 0, "delta is left out")                                                                    \
    F(X13, "own", 0, "exp in half precision")                                                                \
    F(X14, "own", 0, "dK and dV of a prompt miss the last response")                                         \
    F(X15, "own", 0, "dQ rounded to 16 bit after each key tile")                                             \
    F(X16, "own", 0, "the last query tile stores one row of O too many")                                     \
    F(X17, "own", 0, "Q is scaled in the caller's buffer")                                                   \
    F(X18, "own", 0, "the sink is counted once a range")                                                     \
    F(X19, "own", 0, "dSink leaves out the prompt's rows")                                                   \
    F(X20, "own", 0, "a last, partial query tile is not computed")                                           \
    F(X21, "own", 0, "the row state of the head before is kept for the other query heads of a KV head")      \
    F(X22, "own", 0, "O is not corrected where the maximum grows by less than 1")                            \
    F(X23, "own", 0, "the last tile of a range of whole tiles is walked twice")                              \
    F(X24, "own", 0, "softcap is applied before the scale")                                                  \
    F(X25, "own", 0, "ALiBi's slope is that of head h / (Hq/Hkv)")                                           \
    F(X26, "own", 0, "ALiBi's distance is signed")                                                           \
    F(X27, "own", 0, "chunks begin one position early")                                                      \
    F(X28, "own", 0, "the window loses one of its sinks")                                                    \
    F(X29, "own", 0, "a context limit is ignored")                                                           \
    F(X30, "own", 0, "LSE is stored [Tq, Hq]")                                                               \
    F(X31, "own", 0, "keys of ancestors above the parent are not seen")                                      \
    F(X32, "own", 0, "backward: query head h reads KV head h mod Hkv")                                       \
    F(X33, "own", 0, "a key-only prompt gets no gradient")                                                   \
    F(Y1, "own", 0, "backward: the window is one key narrower")                                              \
    F(Y2, "own", 0, "own dK and dV of responses keep only the first query head of the group")                \
    F(Y3, "own", 0, "dSink sums the first query tile only")                                                  \
    F(Y4, "own", 0, "dV misses the rows of a last, partial query tile")                                      \
    F(Y5, "own", 0, "P is cut to 16 bit, not rounded")                                                       \
    F(Y6, "own", 0, "the row sum misses the last column of a whole key tile")                                \
    F(Y7, "own", 0, "dQ of the last head is not scaled")                                                     \
    F(Y8, "own", 0, "an odd head dim: the last dim is left out of q.k")                                      \
    F(Y9, "own", 0, "delta is read one head too early")                                                      \
    F(Y10, "own", 0, "dK and dV of a prompt miss descendants below its children")                            \
    F(Y11, "own", 0, "a context limit is ignored in backward")                                               \
    F(Y12, "own", 0, "1/l is rounded to fp16")                                                               \
    F(Y13, "own", 0, "softcap's tanh in half precision")                                                     \
    F(Y14, "own", 0, "the running maximum starts at 0")                                                      \
    F(Y15, "own", 0, "dK and dV of a prompt miss children beyond the eighth")                                \
    F(Y16, "own", 0, "a query tile's offset into Q is kept in 16 bits")                                      \
    F(Y17, "own", 0, "the gradient through LSE has the wrong sign")                                          \
    F(Y18, "own", 0, "forward: the sink logit is scaled")                                                    \
    F(Y19, "own", 0, "backward: the first row of a later query tile reads the LSE of the row before")        \
    F(Y20, "own", 0, "the last key tile stores one row of dV too many")                                      \
    F(Y21, "own", 0, "forward: scores are rounded to 16 bit")                                                \
    F(Y22, "own", 0, "dP is rounded to 16 bit before delta is subtracted")                                   \
    F(Y23, "own", 0, "a tile's part of dQ is lost now and then")                                             \
    F(Y24, "own", 0, "block mask: backward counts blocks from position 1")                                   \
    F(Y25, "own", 0, "prefix mask: backward takes the prompt for causal")                                    \
    F(Y26, "own", 0, "full mask: responses are causal within")                                               \
    F(Y27, "own", 0, "ALiBi is left out in backward")                                                        \
    F(Y28, "own", 0, "segments of one token get no dK and dV")                                               \
    F(Y29, "own", 0, "scores are clamped at 80")                                                             \
    F(Y30, "own", 0, "NaN in O is replaced by 0")                                                            \
    F(Y31, "own", 0, "forward reads K with the strides of V")                                                \
    F(Y32, "own", 0, "dLSE is read as [Tq, Hq]")                                                             \
    F(Y33, "own", 0, "dSink is written for the first Hkv heads only")                                        \
    F(Y34, "own", 0, "forward: fp32 Q is rounded to TF32")

typedef enum dkv_faultId {
    F_NONE,
#define F(id, row, control, doc) F_##id,
    DKV_FAULTS(F)
#undef F
} dkv_faultId;

dkv_faultId dkv_findFault(const char *id); /* F_NONE: unknown */

/* What the kernel believes about one segment and one of its ranges; without a fault, copies. */
typedef struct dkv_emuView {
    dualkv_problem p;
    dualkv_segment s;
    dualkv_range g;
    int own; /* the range is the segment's own */
} dkv_emuView;
void dkv_emuLook(const dkv_emu *e, int backward, const dualkv_problem *p, const dualkv_segment *s,
                 const dualkv_range *g, dkv_emuView *v);

void dkv_faultCut(const dualkv_problem *p, float *x, int n); /* to 16 bit, toward zero */
void dkv_faultFlush(float *x, int n);                        /* subnormals to zero, x >= 0 */
void dkv_faultTf32(float *x, int n);
/* t with the strides of another tensor; all of its rows the first where those would leave its own rows. */
dualkv_tensor dkv_faultStrides(dualkv_tensor t, dualkv_tensor other, int64_t rows, int heads);

/* 16-bit format that a fault rounds to where the kernel would not. */
static inline int32_t dkv_fault16(const dualkv_problem *p) {
    return p->dtype == DUALKV_FP32 ? DUALKV_BF16 : p->dtype;
}

#endif
