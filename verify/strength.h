/* strength.h: what a case has the power to see. Cheap faults are applied to the oracle's own result; one is caught where
 * some element leaves its bound. Strata: tensor x region x length class of the segment (tokens that it sees and has). A
 * single case is annotated; a suite whose cases catch a fault nowhere in a stratum is inconclusive there
 * (reports/report_power.h). */
#ifndef DKV_STRENGTH_H
#define DKV_STRENGTH_H

#include <stdbool.h>
#include <stddef.h>

#include "../ref/tensors.h"

typedef enum dkv_slip {
    DKV_SLIP_FIRST,    /* every row loses its first visible key */
    DKV_SLIP_LAST,     /* every row loses its last */
    DKV_SLIP_AHEAD,    /* and sees one too many */
    DKV_SLIP_SCALE,    /* scores 1 % too large */
    DKV_SLIP_HEAD,     /* the neighbour's KV head */
    DKV_SLIP_DELTA,    /* delta left out of dS */
    DKV_SLIP_RESPONSE, /* one response missing from its ancestors' dK and dV */
    DKV_SLIP_ZEROS,
    DKV_SLIP_OLD,      /* the outputs of another seed */
    DKV_N_SLIPS
} dkv_slip;

#define DKV_LENGTH_CLASSES 6

typedef struct dkv_strength {
    bool measured, sampled; /* sampled: too large for more than lost keys in some rows, and zeros */
    /* largest |faulty - truth| / bound: above 1 it is caught; negative: the fault cannot be there, or was not tried */
    float ratio[DKV_N_SLIPS][DKV_N_OUTPUTS][2][DKV_LENGTH_CLASSES];
    double longest; /* keys of the longest causal row of O or LSE where one lost key is caught */
} dkv_strength;

struct dkv_case;
/* After judging: fills c->result->strength. DKV_EHARNESS where out of memory. */
int dkv_measureStrength(struct dkv_case *c, dkv_err *err);

const char *dkv_slipName(int slip); /* a word, NULL past the end */
int dkv_lengthClass(int64_t tokens);
/* "O response 17-64", "dSink". */
void dkv_stratumName(int tensor, int region, int length, char *out, size_t n);
/* Smallest relative error of the scale, of a tensor's gain, that the bound would have shown; INFINITY: none. */
double dkv_leastScale(const dkv_strength *s);
double dkv_leastGain(const dkv_strength *s, dkv_tensor_id id);
/* "one lost key of up to 77, a scale error of 3e-05, a dK gain of 0.004"; "" where nothing was measured. */
void dkv_sayStrength(const dkv_strength *s, char *out, size_t n);

#endif
