/* power_impl.h: what power.c and rules.c share. */
#ifndef DKV_POWER_IMPL_H
#define DKV_POWER_IMPL_H

#include "power.h"

/* The kernel with fault i. */
int dkv_faultySpec(const dkv_power *p, int i, dkv_kernel_spec *out, dkv_err *err);
/* The kill matrix for the faults part, part + parts, ...; parts may run at the same time. */
int dkv_runMatrixPart(dkv_power *p, int part, int parts, dkv_err *err);

#endif
