/* small_problems.h: problems small enough to enumerate, and inputs for them; for the tests of this room. */
#ifndef DKV_SMALL_PROBLEMS_H
#define DKV_SMALL_PROBLEMS_H

#include <stdio.h>
#include <string.h>

#include "dtype.h"
#include "mask.h"
#include "tensors.h"

static const char *const dkv_small_shapes[] = {
    "1",
    "2",
    "7",
    "5+1",
    "4+3",
    "4+2x3",
    "0+3",
    "0+2x4",
    "3+0",
    "3+2,0,4",
    "8+7,1,8",
    "6+3@2,2@0,4@5,1",
    "5k+3",
    "5k+2@2,3@4,2",
    "0k+3",
    "4k+0,1",
    "7k+2x1@3,(2+2@4,1)@5",
    "3+(2+2,1),2x(1+2x1)",
    "4+(3+(2+2x2),1@5,2@2)",
    "3+(2+(0+2),1)",
    "0+(0+(3+2x2))",
    "4+2/3+1",
    "2/0/3+2",
    "5k+2@3/4+2x1",
    "6+(4+3@8,3@3)@5,2",
    "6+(0+3,2@4)@5",
};

#define DKV_COUNT(a) (sizeof(a) / sizeof *(a))

/* The m-th mask of the table with parameters, "window:4:2", until the next call; NULL past the end. */
static inline const char *dkv_smallMask(size_t m) {
    static char text[64];
    const dkv_mask_row *row;
    for (int i = 0; (row = dkv_maskRow(i)) && i < DUALKV_BIDIR; i++)
        for (const char *at = row->tests;; at++) {
            const int n = (int)strcspn(at, " ");
            if (m-- == 0) {
                snprintf(text, sizeof text, "%s%s%.*s", row->name, n ? ":" : "", n, at);
                return text;
            }
            at += n;
            if (!*at) break;
        }
    return NULL;
}

/* Roughly normal (sum of four uniforms), variance 1; a function of (seed, stream, i). */
static inline double dkv_smallNormal(uint64_t seed, uint64_t stream, uint64_t i) {
    double sum = 0;
    for (uint64_t n = 0; n < 4; n++) {
        uint64_t x = (seed * 1000003 + stream * 7919 + i * 4 + n + 1) * 0x9E3779B97F4A7C15ull;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ x >> 27) * 0x94D049BB133111EBull;
        sum += (double)((x ^ x >> 31) >> 11) * 0x1p-53 - 0.5;
    }
    return sum * 1.7320508075688772;
}

static inline void dkv_fillSmallArray(void *x, dualkv_dtype t, int64_t n, uint64_t seed, uint64_t stream,
                                      double amplitude) {
    for (int64_t i = 0; x && i < n; i++) {
        double v = amplitude * dkv_smallNormal(seed, stream, (uint64_t)i);
        dkv_encodeArray(&v, t, 1, (char *)x + (size_t)i * dkv_dtypeSize(t));
    }
}

/* Allocates and fills the inputs; logits have about the standard deviation `hot`. */
static inline int dkv_makeSmallInputs(const dkv_problem *p, const dkv_layout *l, uint64_t seed, double hot,
                                      dkv_inputs *in, dkv_err *err) {
    int rc = dkv_allocInputs(l, in, err);
    if (rc) return rc;
    dkv_fillSmallArray(in->q, p->dtype, l->view.tq * p->hq * p->dqk, seed, 1, hot);
    dkv_fillSmallArray(in->k, p->dtype, l->view.tk * p->hkv * p->dqk, seed, 2, 1);
    dkv_fillSmallArray(in->v, p->dtype, l->view.tk * p->hkv * p->dv, seed, 3, 1);
    dkv_fillSmallArray(in->d_o, p->dtype, l->view.tq * p->hq * p->dv, seed, 4, 1);
    dkv_fillSmallArray(in->d_lse, DUALKV_FP32, l->view.tq * p->hq, seed, 5, 1);
    dkv_fillSmallArray(in->sink, DUALKV_FP32, p->hq, seed, 6, 1);
    return DKV_OK;
}
#endif
