/* recorded.h: inputs recorded from a model, DIR/recorded/NAME.safetensors: q [T, Hq, Dqk], k [T, Hkv, Dqk], v
 * [T, Hkv, Dv] in BF16, rows packed as the file's metadata `shape` says (one prompt and its responses, like
 * 300+96,64,40). A problem's prompt is the recorded prompt's beginning, its response n the beginning of
 * response n mod count, its head h the recorded head h mod heads. Internal to fill.c. */
#ifndef DKV_RECORDED_H
#define DKV_RECORDED_H

#include "../ref/problem.h"
#include "safetensors.h"

typedef struct dkv_recorded {
    dkv_st_file file;
    const dkv_st_tensor *tensor[3]; /* q, k, v */
    int64_t *first;                 /* [problem's segments] recorded row of each segment's first token */
} dkv_recorded;

/* Opens the file of p->fill ("recorded:NAME") and checks it against the problem; DKV_EUSER where the head
 * dimensions differ or a segment is longer than what is recorded. */
int dkv_openRecorded(const dkv_problem *p, const char *data_dir, dkv_recorded *out, dkv_err *err);
void dkv_closeRecorded(dkv_recorded *r);
/* Token t of segment seg, tensor 0, 1, 2 (q, k, v), one head of the problem, into x. */
void dkv_readRecorded(const dkv_recorded *r, int32_t seg, int64_t t, int tensor, int32_t head, double *x);
#endif
