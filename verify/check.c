#include "check.h"

#include <stdarg.h>
#include <stdio.h>

static const dkv_check table[] = {
#define C(function, name, doc) {name, doc, dkv_check##function},
    DKV_CHECKS(C)
#undef C
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
