#include "check.h"

#include <stdarg.h>
#include <stdio.h>

/* In the order in which a defect decides the case: a value is believed only if the memory is sound. */
static const dkv_check table[] = {
    {"launched", "the kernel ran its own code, no fallback (where it counts launches)", dkv_checkLaunched},
    {"guards", "nothing outside the outputs was written: guards, slack between rows", dkv_checkGuards},
    {"inputs", "inputs, and in backward O and LSE, are as they were", dkv_checkInputs},
    {"written", "no output element still holds the poison, under two patterns", dkv_checkWritten},
    {"isolation", "a NaN or Inf of one branch does not reach another", dkv_checkIsolation},
    {"finite", "NaN or Inf only where the truth is", dkv_checkFinite},
    {"bound", "every element within what rounding allows", dkv_checkBound},
    {"copies", "replicated kernels: every copy of a shared row agrees with it", dkv_checkCopies},
    {"siblings", "changing other branches changes nothing in one (bits: only reported)", dkv_checkSiblings},
    {"sum-dv", "sum of dV over keys = sum of dO over rows (less the sink's share)", dkv_checkSumDv},
    {"euler", "sum of q.dq = sum of k.dk", dkv_checkEuler},
    {"boundary", "where the prompt ends changes nothing", dkv_checkBoundary},
    {"plain", "a prompt and its only response are one sequence", dkv_checkPlain},
    {"permute", "responses in another order are the same responses (bits: only reported)", dkv_checkPermute},
    {"future", "changing later tokens changes nothing before them (bits: only reported)", dkv_checkFuture},
    {"shift", "a constant added to V is added to O", dkv_checkShift},
    {"merge", "the context cut in two and merged by LSE gives the whole", dkv_checkMerge},
    {"maxima", "overstated longest lengths change nothing (bits: only reported)", dkv_checkMaxima},
    {"sequence", "run=aba: other cases between two runs change nothing, and pass", dkv_checkSequence},
    {"repeat", "two runs give the same bits where that is promised", dkv_checkRepeat},
    {"reuse", "other data in the same buffers, then the same in others: nothing is remembered", dkv_checkReuse},
    {"twin", "no more rounding than declared, no bias that it does not explain", dkv_checkTwin},
    {"lean", "where no twin speaks: no tensor, region or head leans in a direction that no known rounding has", dkv_checkLean},
    {"peer", "error beside that of the same-precision replicated peer (never decides)", dkv_checkPeer},
};
_Static_assert(sizeof table / sizeof table[0] <= DKV_CHECKS_MAX, "room for every check");

const dkv_check *dkv_listCheck(int i) {
    return i >= 0 && i < (int)(sizeof table / sizeof table[0]) ? &table[i] : NULL;
}

void dkv_find(dkv_finding *f, dkv_finding_state state, dkv_status status, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f->why, sizeof f->why, fmt, ap);
    va_end(ap);
    f->state = state;
    f->status = status;
}

void dkv_nameElement(const dkv_layout *l, dkv_tensor_id id, int64_t index, char *out, size_t n) {
    const dualkv_problem *v = &l->view;
    const dkv_vectors g = dkv_vectorsOf(v, id);
    const int64_t vector = index / g.d, row = g.by_head ? vector % g.rows : vector / g.heads,
                  head = g.by_head ? vector / g.rows : vector % g.heads, c = g.by_head ? -1 : index % g.d;
    if (g.sums) {
        snprintf(out, n, "head %lld", (long long)index);
        return;
    }
    const int32_t i = dkv_segmentOf(l, g.keys, row);
    const dualkv_segment *s = &v->segments[i];
    int wrote = snprintf(out, n, "group %d, segment %d (%s) row %lld, head %lld", s->group, i, dkv_regionName(s->depth > 0),
                         (long long)(row - dkv_firstRow(s, &g)), (long long)head);
    if (c >= 0 && wrote > 0 && (size_t)wrote < n)
        snprintf(out + wrote, n - (size_t)wrote, ", dim %lld", (long long)c);
}
