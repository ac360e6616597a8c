#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "emu_fault.h"

float *dkv_emuScratch(size_t n) {
    if (n == 0) n = 1;
    if (n > SIZE_MAX / sizeof(float) - 64) return NULL;
    size_t bytes = (n * sizeof(float) + 63) / 64 * 64;
    float *x = aligned_alloc(64, bytes);
    if (x) memset(x, 0, bytes);
    return x;
}

void dkv_emuLoad(const dualkv_problem *p, dualkv_tensor t, int head, int64_t row, int n, int64_t end, int d,
                 float *out, int ld, int turned) {
    int64_t size = (int64_t)dkv_emuSize(p->dtype);
    float one[256];
    for (int i = 0; i < n; i++) {
        float *to = turned ? one : out + (int64_t)i * ld;
        if (row + i < end)
            dkv_emuDecode((const char *)t.data + ((row + i) * t.row + head * t.head) * size, p->dtype, d, to);
        else
            memset(to, 0, (size_t)d * sizeof *to);
        if (turned)
            for (int c = 0; c < d; c++) out[(int64_t)c * ld + i] = one[c];
    }
}

void dkv_emuStore(const dualkv_problem *p, dualkv_tensor t, int head, int64_t row, int d, const float *in) {
    int64_t size = (int64_t)dkv_emuSize(p->dtype);
    dkv_emuEncode(in, p->dtype, d, (char *)t.data + (row * t.row + head * t.head) * size);
}

void dkv_emuRoundP(const dkv_emu *e, const dualkv_problem *p, float *x, int64_t n) {
    if (e->tf32)
        dkv_emuRoundIn(e, x, n);
    else if (!e->p_exact)
        dkv_emuRound(x, n, p->dtype);
}

void dkv_emuRoundIn(const dkv_emu *e, float *x, int64_t n) {
    for (int64_t i = 0; i < n && e->tf32; i += 1 << 20)
        dkv_faultTf32(x + i, (int)(n - i < 1 << 20 ? n - i : 1 << 20));
}

void dkv_emuRoundScores(const dkv_emu *e, const dualkv_problem *p, float *x, int64_t n) {
    if (e->low_scores) dkv_emuRound(x, n, p->dtype);
}

/* Column c is at distance |far - c|. */
static void subtractBias(const dkv_emu *e, const dkv_emuTile *t, float *x, int64_t far) {
    const float slope = t->p->alibi_slopes[e->fault == F_X25 ? t->h / (t->p->hq / t->p->hkv) : t->h];
    for (int c = 0; c < e->bn; c++) x[c] -= slope * (float)(e->fault == F_X26 ? far - c : llabs(far - c));
}

/* scale, softcap, ALiBi, mask: in this order. */
void dkv_emuScores(const dkv_emu *e, const dkv_emuTile *t, float *s, float *cap, int ld) {
    const dualkv_problem *p = t->p;
    int64_t past =
        t->s->context - t->g->pos - t->c0; /* position of row r less that of column c: r - c + past */
    if (e->fault == F_G5 && t->own) past -= t->s->context;
    const int late = e->fault == F_X24 && p->softcap > 0.0f;
    for (int i = 0; i < t->m; i++) {
        float *x = s + (int64_t)i * ld;
        int64_t r = t->r0 + i;
        for (int c = 0; c < e->bn && !late; c++) x[c] *= p->scale;
        if (p->softcap > 0.0f) {
            for (int c = 0; c < e->bn; c++) x[c] /= p->softcap;
            dkv_emuTanh(x, e->bn);
            if (e->fault == F_Y13) dkv_emuRound(x, e->bn, DUALKV_FP16);
            if (cap) memcpy(cap + (int64_t)i * ld, x, (size_t)e->bn * sizeof *x);
            for (int c = 0; c < e->bn; c++) x[c] *= p->softcap;
        }
        for (int c = 0; c < e->bn && late; c++) x[c] *= p->scale;
        if (p->alibi) subtractBias(e, t, x, r + past);
        if (t->kind != 1)
            for (int c = 0; c < t->nv; c++)
                if (!dkv_walkSees(p, t->s, t->g, r, t->c0 + c)) x[c] = -INFINITY;
        for (int c = t->nv; c < e->bn && e->fault != F_X5; c++) x[c] = -INFINITY;
    }
}
