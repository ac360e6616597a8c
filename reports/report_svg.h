/* report_svg.h: strips of dots as inline SVG: one row a tensor (and region), one dot for the cases of a bin, larger with their
 * number. Needs the colours of the page's style sheet (classes `in`, `out`, `axis`, `edge`). */
#ifndef DKV_REPORT_SVG_H
#define DKV_REPORT_SVG_H

#include <stdio.h>

#include "report_gather.h"

/* err/bound by tensor and region, on a logarithmic axis, the bound drawn at 1. */
void dkv_drawRatios(const dkv_gather_kernel *k, FILE *f);
/* rms of the residual to the twin by tensor, what is expected of the declared arithmetic drawn at 1. */
void dkv_drawResiduals(const dkv_gather_kernel *k, FILE *f);

#endif
