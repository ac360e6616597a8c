/* vexp.h: vectorised exp for the blocked references: y[i] = exp(x[i]), fp64, maximum error DKV_VEXP_ULP ulp over the whole
 * range (tested against quad), -inf -> 0, +inf -> inf, NaN -> NaN, gradual underflow kept. Bitwise the same on every
 * machine: no FMA contraction, no dependence on vector width. y may be x. */
#ifndef DKV_VEXP_H
#define DKV_VEXP_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_VEXP_ULP 1.5 /* stated bound; test_vexp measures and asserts it */
void dkv_vexp(const double *x, double *y, size_t n);

#ifdef __cplusplus
}
#endif
#endif
