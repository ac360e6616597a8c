/* kernel_broken.h: a kernel that is broken on purpose, one way at a time (`broken+how=crash`): what the
 * harness must notice, and two controls that it must not mind. Used by selftest and by the tests. */
#ifndef DKV_KERNEL_BROKEN_H
#define DKV_KERNEL_BROKEN_H

#include "../ref/dualkv_kernel.h"
#include "status.h"

extern const dualkv_kernel dkv_brokenKernel;

typedef struct dkv_breakage {
    const char *how, *doc;
    const char *line;    /* a problem line on which it must show */
    dkv_status expected; /* DKV_ST_PASSED: a control */
    double timeout;      /* seconds for a launch; 0: any */
} dkv_breakage;

const dkv_breakage *dkv_listBreakage(int i); /* NULL past the end */

#endif
