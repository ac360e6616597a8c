#include "explain.h"

#include <stdio.h>
#include <string.h>

int dkv_explain(const dkv_explain_in *in, dkv_hypothesis *out, int cap, dkv_err *err) {
    if (!in || !in->p || !in->got || !in->oracle || cap < 1) {
        dkv_fail(err, DKV_EHARNESS, "explain: nothing to explain");
        return -1;
    }
    memset(out, 0, sizeof *out);
    snprintf(out->family, sizeof out->family, "unknown");
    snprintf(out->name, sizeof out->name, "unknown");
    snprintf(out->sentence, sizeof out->sentence, "no hypothesis explains %.0f %% of the error", 100 * DKV_EXPLAIN_CLAIM);
    return 1;
}
