/* eligible.h: a Hugging Face model configuration held against a certificate's scope. Each option that changes attention becomes
 * a word of the problem line, or a reason why the model's attention is none that was certified. What is known to happen
 * before (projections, RoPE, norms of Q and K) or after attention is passed over; a key that sounds like attention and is not
 * known is told as not judged. */
#ifndef DKV_ELIGIBLE_H
#define DKV_ELIGIBLE_H

#include "scope.h"

typedef enum dkv_answer { DKV_INSIDE, DKV_OUTSIDE, DKV_NOT_JUDGED } dkv_answer;

typedef struct dkv_said {
    dkv_answer answer;
    char option[200]; /* "attn_logit_softcapping=50" */
    char why[320];
} dkv_said;

typedef struct dkv_eligible {
    dkv_said *said; /* owned */
    int n;
    long outside, not_judged;
    char model[64];
    char lines[4][256]; /* one for each kind of attention that the layers have */
    int n_lines;
    char other[600]; /* names of keys that say nothing of attention as far as is known */
} dkv_eligible;

/* config: a parsed config.json. tokens: the longest sequence that is meant, 0: max_position_embeddings. DKV_EUSER: an option
 * of a kind that it cannot be (sliding_window: "yes"), or no heads. dkv_freeEligible frees in any case. */
int dkv_readModel(const cJSON *config, const dkv_scope *scope, int64_t tokens, bool forward, dkv_eligible *e, dkv_err *err);
void dkv_freeEligible(dkv_eligible *e);

#endif
