/* vexp.h: vectorised exp and tanh for the blocked references: y[i] = exp(x[i]), fp64, maximum error
 * DKV_VEXP_ULP ulp over the whole range (tested against quad), -inf -> 0, +inf -> inf, NaN -> NaN, gradual
 * underflow kept. Bitwise the same on every machine: no FMA contraction, no dependence on vector width. y
 * may be x. */
#ifndef DKV_VEXP_H
#define DKV_VEXP_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_VEXP_ULP 1.25 /* stated bounds; test_vexp measures and asserts them */
#define DKV_VTANH_ULP 3.0
void dkv_vexp(const double *x, double *y, size_t n);
/* y[i] = exp(x[i] - shift), the subtraction rounded once: the softmax's own form. */
void dkv_vexpShift(const double *x, double shift, double *y, size_t n);
void dkv_vtanh(const double *x, double *y, size_t n); /* sign of zero kept */

#ifdef __cplusplus
}
#endif
#endif
