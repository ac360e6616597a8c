/* view.h: a problem from what a kernel sees of it. The replicated layout is itself a problem; the references
 * want it as a tree of nodes. */
#ifndef DKV_VIEW_H
#define DKV_VIEW_H

#include "layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* *out (dkv_freeProblem) describes the same attention as *v; fill, seed, layout and run are defaults. */
int dkv_problemOfView(const dualkv_problem *v, dkv_problem *out, dkv_err *err);

#ifdef __cplusplus
}
#endif

#endif
