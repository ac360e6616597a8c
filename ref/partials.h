/* partials.h: sums of dK, dV and dQ that a kernel rounds on their way, as its arithmetic declares them. */
#ifndef DKV_PARTIALS_H
#define DKV_PARTIALS_H

#include "dkv_err.h"
#include "layout.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dkv_partials {
    bool heads, segments, rows; /* DUALKV_PARTIAL_*; all false where partial sums are not rounded. rows: segments, too */
    bool summed;                /* DUALKV_PARTIAL_SUMMED */
    int64_t dq_block;           /* 0: the running sum of dQ is not */
} dkv_partials;

dkv_partials dkv_partialsOf(const dualkv_arithmetic *a);
/* The arithmetic `a` of a kernel on replicated sequences, as one on the packed problem whose copies' gradients are added in
 * double precision. DKV_EHARNESS where that has no words here (fp32; partial sums in another format than the output). */
int dkv_sumCopies(const dualkv_arithmetic *a, dualkv_arithmetic *out, dkv_err *err);
/* Rows after which the running sums of a segment of `rows` query rows are rounded; 0: they are not. */
int64_t dkv_rowBlock(const dualkv_arithmetic *a, int64_t rows);
/* A divisor of all these blocks, at most `most`; `most` where there is none. */
int64_t dkv_commonRows(const dualkv_arithmetic *a, int64_t most);
/* For each key [tk]: how often a term of its sums is rounded on its way to the output, at most; how many such roundings
 * there are in one element's sum, over `heads` query heads. */
void dkv_countRoundings(const dkv_layout *l, const dualkv_arithmetic *a, int64_t heads, double *through, double *all);
/* The same for a row of a segment's dQ: key blocks, one less where the last rounding is the output's own. */
double dkv_queryRoundings(const dkv_layout *l, const dualkv_arithmetic *a, int32_t segment);

#ifdef __cplusplus
}
#endif
#endif
