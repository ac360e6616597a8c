#include "reason.h"

#include <stdio.h>

/* In the order in which one depends on another, as the checks of values name them. */
static const dkv_tensor_id order[DKV_N_OUTPUTS] = {DKV_LSE, DKV_O, DKV_DV, DKV_DK, DKV_DQ, DKV_DSINK};

static bool isWrong(const dkv_judgement *j, dkv_status s) {
    if (!j->present) return false;
    switch (s) {
    case DKV_ST_LEAKED: return j->all.nonfinite > 0;
    case DKV_ST_FAILED: return j->failed;
    case DKV_ST_IMPRECISE:
    case DKV_ST_BIASED: return j->imprecise || j->biased;
    default: return false;
    }
}

dkv_reason dkv_reasonOf(const dkv_result *r) {
    dkv_reason out = {r->status, -1, ""};
    const dkv_check *c;
    for (int i = 0; i < DKV_N_OUTPUTS && r->judged && out.tensor < 0; i++)
        if (isWrong(&r->tensor[order[i]], r->status)) out.tensor = order[i];
    for (int i = 0; r->judged && !out.check[0] && (c = dkv_listCheck(i)); i++)
        if (r->finding[i].state == DKV_CHECK_DEFECT) out.check = c->name;
    return out;
}

long dkv_countReason(dkv_reasons *t, dkv_reason r, uint64_t which) {
    int i = 0;
    while (i < t->n && !dkv_sameReason(t->row[i].reason, r)) i++;
    if (i == DKV_REASON_ROWS) i--;
    if (i == t->n) {
        t->n++;
        t->row[i].reason = r;
        t->row[i].first = which;
    }
    if (which < t->row[i].first) t->row[i].first = which;
    return ++t->row[i].count;
}

void dkv_sayReason(dkv_reason r, char *out, size_t n) {
    const char *tensor = r.tensor < 0 ? "" : dkv_tensorName((dkv_tensor_id)r.tensor);
    snprintf(out, n, "%s%s%s%s%s%s", dkv_statusRow(r.status)->name, tensor[0] ? " " : "", tensor,
             r.check[0] ? " (" : "", r.check, r.check[0] ? ")" : "");
}
