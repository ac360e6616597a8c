/* mask.h: the table of masks as data, the mask over a node of the problem tree, and which masks a tree admits. The rows, and
 * what each mask means: mask_pair.h. No kernel includes this file (kernels have their own, walk.h; a test enumerates both). */
#ifndef DKV_MASK_H
#define DKV_MASK_H

#include <stddef.h>

#include "mask_pair.h"
#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dkv_parameter_kind {
    DKV_PARAMETER_NONE,
    DKV_PARAMETER_COUNT, /* int64_t */
    DKV_PARAMETER_SHARE, /* double from 0 to 1 */
    DKV_PARAMETER_SEED   /* uint64_t */
} dkv_parameter_kind;

typedef struct dkv_mask_parameter {
    dkv_parameter_kind kind;
    size_t at; /* in dkv_problem */
    int64_t least;
    const char *name, *what, *draws, *variant; /* DKV_TAKES_... of mask_pair.h */
} dkv_mask_parameter;

enum { DKV_MASK_PARAMETERS = 3 };

typedef struct dkv_mask_row {
    const char *name, *form, *help; /* form: "window:W[:S]" */
    dkv_mask_whole whole;
    dkv_mask_keys keys;
    const char *needs, *tests; /* tests: texts of parameters, separated by blanks */
    dkv_mask_parameter parameter[DKV_MASK_PARAMETERS + 1];
} dkv_mask_row;

/* The row of mask m; NULL past the end. */
const dkv_mask_row *dkv_maskRow(int m);
/* What rows that do not see their whole segment see, with the problem's parameters. */
dkv_mask_keys dkv_maskKeys(const dkv_problem *p);
double dkv_maskParameter(const dkv_problem *p, const dkv_mask_parameter *q);

/* Masks as suites and the fuzzer tell them apart: without and with the parameter that may be left out, DUALKV_BIDIR left
 * out. *with: with it. NULL past the end. */
const char *dkv_listVariant(int i, dualkv_mask_kind *mask, bool *with);
int dkv_maskVariant(const dkv_problem *p); /* its number; -1: DUALKV_BIDIR */

/* Does every row of node `n` see its whole segment and all that it sees? */
bool dkv_maskWhole(const dkv_problem *p, int32_t n);

/* Does row r (0 <= r < len) of node `n` see key j (0 <= j < context + len, in order of position)? */
bool dkv_maskSees(const dkv_problem *p, int32_t n, int64_t r, int64_t j);

/* For a block of rows [r0, r1) and keys [j0, j1) of node n: 0 no pair visible, 1 all visible, 2 mixed
 * (may say 2 where a finer look would say 0 or 1, never the reverse). */
int dkv_maskBlock(const dkv_problem *p, int32_t n, int64_t r0, int64_t r1, int64_t j0, int64_t j1);

/* DKV_OK, or DKV_EREFUSED with the row and the key: a mask is admissible when no row sees a descendant or a sibling
 * branch, and when every copy of a row in the replicated layout sees exactly the keys that the packed row sees
 * (mask=full/prefix with a context limit that cuts through a segment with queries is refused for that reason). */
int dkv_maskAdmissible(const dkv_problem *p, dkv_err *err);

#ifdef __cplusplus
}
#endif
#endif
