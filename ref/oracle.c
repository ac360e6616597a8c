/* oracle.c: allocation of what the bound and the twin fill. */
#include <string.h>

#include "oracle.h"

void dkv_freeOracle(dkv_oracle *o) {
    dkv_freeOutputs(&o->truth);
    dkv_freeOutputs(&o->bound);
    dkv_freeOutputs(&o->twin);
    dkv_freeOutputs(&o->sigma2);
    memset(o, 0, sizeof *o);
}

int dkv_allocOracle(const dkv_layout *l, dkv_oracle *o, dkv_err *err) {
    memset(o, 0, sizeof *o);
    int rc = dkv_allocOutputs(l, &o->truth, err);
    if (!rc) rc = dkv_allocOutputs(l, &o->bound, err);
    if (!rc) rc = dkv_allocOutputs(l, &o->twin, err);
    if (!rc) rc = dkv_allocOutputs(l, &o->sigma2, err);
    if (rc) dkv_freeOracle(o);
    return rc;
}
