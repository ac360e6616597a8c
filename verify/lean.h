/* lean.h: does a tensor lean in a known direction, where no twin vouches for it? Of a kernel that declares nothing and fits
 * no profile, and of an O whose key tile is not known, the bound alone decides, and a scale that is off by a percent may pass
 * it. Rounding has no direction: the residual to the truth, regressed on
 *
 *   itself   the tensor (kernel = (1 + a) truth)
 *   scale    its derivative by the logarithm of the softmax scale (O, LSE)
 *   delta, dLSE   the share of either in dQ and dK
 *
 * has a slope of 0, but for what is allowed of each part (the tensor, its prompts, its responses, each head):
 *
 *   chance      standard error from the rows (equal ones count once), at the case's level over all tests made of the tensor
 *   roundings   the largest slope that any known arithmetic shows here, of either sign: that of round(twin) - truth, plus
 *               what its sigma leaves at full coherence. Twins are asked only where chance does not explain the slope
 *   functions   largest declared errors of exp, log and tanh, all of one sign
 *   truncation  of a slope that is negative alone: what the longest chain may lose on a tensor core
 *
 * Weights are 1/bound^2. TOLERANCE-TWIN.md, "Where no twin speaks". */
#ifndef DKV_LEAN_H
#define DKV_LEAN_H

#include <stdbool.h>

#include "../ref/tensors.h"

typedef enum dkv_way { DKV_WAY_ITSELF, DKV_WAY_SCALE, DKV_WAY_DELTA, DKV_WAY_DLSE, DKV_N_WAYS } dkv_way;

typedef struct dkv_lean {
    bool tested, found;
    bool open;            /* more than chance, and known arithmetic was not asked: not judged */
    dkv_way way;
    double gain, allowed; /* of the part that is told: a, and how large it may be */
    bool as_cut;          /* no larger a loss than one cut to the tensor's type in place of a rounding takes */
    char where[64];       /* ", in every head" */
} dkv_lean;

struct dkv_case;
/* After judging: fills c->result->lean[]. `vouched`: bits of tensors that are held to a twin. `fits`: some arithmetic explains
 * the case; then further directions than the tensors themselves are left out. Not `ask`, for the case is too large to ask its
 * oracle many times: some rows and chance alone; a slope beyond that is told and not judged. Leaves the oracle as it was. */
int dkv_judgeLeans(struct dkv_case *c, unsigned vouched, bool fits, bool ask, dkv_err *err);
/* "O is 1.9 % too large, in every head", and what is allowed, or that nobody was asked; "" where nothing leans. */
void dkv_sayLean(const dkv_lean *l, dkv_tensor_id id, char *out, size_t n);

#endif
