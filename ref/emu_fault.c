#include "emu_fault.h"

#include <math.h>
#include <string.h>

static const dkv_fault faults[] = {
#define F(id, row, control, doc) {#id, row, doc, control},
    DKV_FAULTS(F)
#undef F
};
#define N_FAULTS (int)(sizeof faults / sizeof *faults)

const dkv_fault *dkv_listFault(int i) { return i >= 0 && i < N_FAULTS ? &faults[i] : NULL; }

dkv_faultId dkv_findFault(const char *id) {
    for (int i = 0; i < N_FAULTS; i++)
        if (!strcmp(faults[i].id, id)) return (dkv_faultId)(i + 1);
    return F_NONE;
}

/* Tokens of a segment's siblings (and theirs) between its parent's last token and its first. */
static int64_t countSiblings(const dualkv_problem *p, const dualkv_segment *s) {
    if (s->parent < 0) return 0;
    const dualkv_segment *up = &p->segments[s->parent];
    return s->k_start - (up->k_start + up->k_len);
}

static void useStaleRange(const dkv_emu *e, const dualkv_problem *p, int64_t i, dualkv_range *g) {
    if (!e->first_ranges || i >= e->n_first_ranges) return;
    *g = e->first_ranges[i];
    if (g->k_start > p->tk) g->k_start = p->tk;
    if (g->len > p->tk - g->k_start) g->len = p->tk - g->k_start;
}

static void ignoreLimit(const dualkv_problem *p, dualkv_range *g) {
    for (int i = 0; i < p->n_segments; i++)
        if (p->segments[i].k_len > 0 && p->segments[i].k_start == g->k_start) g->len = p->segments[i].k_len;
}

void dkv_emuLook(const dkv_emu *e, int backward, const dualkv_problem *p, const dualkv_segment *s,
                 const dualkv_range *g, dkv_emuView *v) {
    v->p = *p;
    v->s = *s;
    v->g = *g;
    v->own = s->k_len > 0 && g->k_start == s->k_start;
    int64_t siblings = e->fault == F_L1 || e->fault == F_L7 ? countSiblings(p, s) : 0;
    switch (e->fault) {
    case F_A1:
        if (v->own) v->s.context = 0;
        break;
    case F_A2:
        if (v->own && backward) v->s.context = 0;
        break;
    case F_A4:
        if (!v->own) v->s.context = 0;
        break;
    case F_A7:
        if (backward) v->p.mask = DUALKV_FULL;
        break;
    case F_J1: useStaleRange(e, p, g - p->ranges, &v->g); break;
    case F_J2:
        if (backward && p->mask == DUALKV_BLOCK) v->p.block = 2 * p->block;
        break;
    case F_L1:
        if (!v->own || backward) break;
        v->g.k_start -= siblings;
        v->g.len += siblings;
        v->s.context += siblings;
        break;
    case F_L5:
        if (!v->own) v->p.softcap = 0.0f, v->p.alibi = 0;
        break;
    case F_L7:
        v->s.context += siblings;
        if (v->own) v->g.pos += siblings;
        break;
    case F_X1:
        if (v->own) v->s.context++;
        break;
    case F_X2:
        if (v->own) v->s.context--;
        break;
    case F_X3: v->p.window++; break;
    case F_X4:
        if (!v->own) v->g.len--;
        break;
    case F_X27:
        if (p->mask == DUALKV_CHUNK) v->s.context++, v->g.pos++;
        break;
    case F_X28: v->p.window_sinks -= p->window_sinks > 0; break;
    case F_X29: ignoreLimit(p, &v->g); break;
    case F_Y1: v->p.window -= backward; break;
    case F_Y11:
        if (backward) ignoreLimit(p, &v->g);
        break;
    case F_Y24:
        if (backward && p->mask == DUALKV_BLOCK) v->s.context++, v->g.pos++;
        break;
    case F_Y25:
        if (backward && p->mask == DUALKV_PREFIX) v->p.mask = DUALKV_CAUSAL;
        break;
    case F_Y26:
        if (v->own && s->depth > 0 && p->mask == DUALKV_FULL) v->p.mask = DUALKV_CAUSAL;
        break;
    case F_Y27: v->p.alibi &= !backward; break;
    case F_X31:
        if (g - p->ranges < s->range_begin + s->range_count - 2) v->g.len = 0;
        break;
    case F_X6: dkv_emuRound(&v->p.scale, 1, DUALKV_BF16); break;
    default: break;
    }
}

void dkv_faultCut(const dualkv_problem *p, float *x, int n) {
    const uint32_t drop = dkv_fault16(p) == DUALKV_BF16 ? 0xffffu : 0x1fffu; /* fp16: of normal numbers */
    for (int i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        if (isfinite(x[i])) u &= ~drop;
        memcpy(&x[i], &u, sizeof u);
    }
}

void dkv_faultTf32(float *x, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        if (isfinite(x[i])) u = (u + 0x0fffu + (u >> 13 & 1u)) & ~0x1fffu;
        memcpy(&x[i], &u, sizeof u);
    }
}

dualkv_tensor dkv_faultStrides(dualkv_tensor t, dualkv_tensor other, int64_t rows, int heads) {
    const int64_t last = (rows - 1) * t.row + (heads - 1) * t.head;
    const int fits = (rows - 1) * other.row + (heads - 1) * other.head <= last;
    t.row = fits ? other.row : 0;
    t.head = fits ? other.head : 0;
    return t;
}

void dkv_faultFlush(float *x, int n) {
    for (int i = 0; i < n; i++)
        if (x[i] < 0x1p-126f) x[i] = 0.0f;
}
