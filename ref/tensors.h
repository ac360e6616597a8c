/* tensors.h: the inputs and outputs of one problem in canonical form: packed, contiguous, unpadded. Kernels get
 * strided copies of these (verify/); references, bound and twin read these. */
#ifndef DKV_TENSORS_H
#define DKV_TENSORS_H

#include "dkv_err.h"
#include "layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Inputs, in the problem's dtype. */
typedef struct dkv_inputs {
    void *q;      /* [tq, hq, dqk]  */
    void *k;      /* [tk, hkv, dqk] */
    void *v;      /* [tk, hkv, dv]  */
    void *d_o;    /* [tq, hq, dv]; NULL where grad=off */
    float *d_lse; /* [hq, tq] or NULL */
    float *sink;  /* [hq] or NULL */
} dkv_inputs;

/* Outputs or anything shaped like them (truth, bound, twin), in double. Unused ones are NULL. */
typedef struct dkv_outputs {
    double *o;    /* [tq, hq, dv]   */
    double *lse;  /* [hq, tq]       */
    double *dq;   /* [tq, hq, dqk]  */
    double *dk;   /* [tk, hkv, dqk] */
    double *dv;   /* [tk, hkv, dv]  */
    double *dsink; /* [hq] or NULL  */
} dkv_outputs;

typedef enum dkv_tensor_id {
    DKV_O, DKV_LSE, DKV_DQ, DKV_DK, DKV_DV, DKV_DSINK, DKV_N_OUTPUTS
} dkv_tensor_id;

/* Elements of each tensor (0 where the problem does not have it); order as dkv_tensor_id. */
void dkv_countOutputs(const dkv_layout *l, int64_t n[DKV_N_OUTPUTS]);
double *dkv_outputAt(const dkv_outputs *o, dkv_tensor_id id);
const char *dkv_tensorName(dkv_tensor_id id); /* "O", "LSE", "dQ", ... */
/* Of rows of a root, or of its descendants: the two regions of a tensor. */
static inline const char *dkv_regionName(int response) { return response ? "response" : "prompt"; }

int dkv_allocOutputs(const dkv_layout *l, dkv_outputs *out, dkv_err *err); /* zeroed */
void dkv_freeOutputs(dkv_outputs *o);
int dkv_allocInputs(const dkv_layout *l, dkv_inputs *in, dkv_err *err);    /* zeroed; filled by data/fill.h */
void dkv_freeInputs(dkv_inputs *in);

/* Replicated inputs from packed ones (E applied; dO and dLSE zero on copies), and packed outputs from replicated
 * ones: O and LSE from each segment's own rows, gradients summed by E^T, dSink summed. */
int dkv_replicateInputs(const dkv_layout *packed, const dkv_layout *rep, const int64_t *q_source,
                        const int64_t *k_source, const uint8_t *q_own, const dkv_inputs *in, dkv_inputs *out,
                        dkv_err *err);
int dkv_packOutputs(const dkv_layout *packed, const dkv_layout *rep, const int64_t *q_source,
                    const int64_t *k_source, const uint8_t *q_own, const dkv_outputs *in, dkv_outputs *out,
                    dkv_err *err);

#ifdef __cplusplus
}
#endif
#endif
