/* emu_impl.h: what emu.c, emu_tile.c, emu_forward.c, emu_backward.c and emu_fault.c share. */
#ifndef DKV_EMU_IMPL_H
#define DKV_EMU_IMPL_H

#include "emu.h"
#include "emu_math.h"
#include "walk.h"

#define DKV_EMU_TILE_MAX 1024 /* largest bm, bn */

/* An instance: the options of its kernel spec. */
typedef struct dkv_emu {
    int bm, bn; /* query rows and keys a tile */
    int tc;     /* acc=tc */
    int down;   /* order=down: last key tile first */
    int fault;  /* dkv_faultId */
    int undeclared;   /* says nothing about its arithmetic */
    int p_exact;      /* P and dS kept in fp32 */
    int p_normalised; /* P divided by its sum before it is rounded */
    int delta_exact;  /* delta from O before its rounding */
    int ds_scaled;    /* dS times the scale before it is rounded */
    int partials;     /* DUALKV_PARTIAL_*: of dK, dV; with _ROWS, running sums of dQ, too, after each key tile */
    int tf32;         /* fp32 operands, P and dS rounded to TF32 */
    int low_scores;   /* scores and dP rounded to 16 bit */
    int lazy;         /* the maximum is raised where it grows by more than a factor 2^lazy */
    int sink_first;   /* the maximum starts from the sink */
    float *exact_o;   /* backward's own forward: O before its rounding [tq, hq, dv], and nothing else is stored */
    uint64_t launches;
    uint64_t tiles; /* fault Y23: backward's, so far */
    dualkv_range *first_ranges; /* fault J1: the ranges of the first call, owned */
    int64_t n_first_ranges;
    char why[160]; /* of the last refusal */
} dkv_emu;

/* One pair of tiles: rows [r0, r0 + m) of segment s, query head h, against the keys at offsets [c0, c0 + bn)
 * of range g, of which the first nv belong to it. */
typedef struct dkv_emuTile {
    const dualkv_problem *p;
    const dualkv_segment *s;
    const dualkv_range *g;
    int64_t r0, c0;
    int m, nv, h;
    int kind;       /* as dkv_walkTile: 1 all visible, 2 look at each */
    int own, later; /* the range is the segment's own; the first tile walked of a later range */
} dkv_emuTile;

static inline int dkv_emuPad(int n) { return (n + 15) / 16 * 16; } /* floats a row of a scratch tile */
static inline size_t dkv_emuSize(int32_t dtype) { return dtype == DUALKV_FP32 ? 4 : 2; }
static inline float *dkv_emuAt(dualkv_tensor t, int64_t row, int64_t head) { /* LSE-like, fp32 */
    return (float *)t.data + row * t.row + head * t.head;
}

/* Rows [row, row + n) of one head as floats: out[i*ld + c], or out[c*ld + i] if `turned`. Rows from `end` on
 * are zeros. */
void dkv_emuLoad(const dualkv_problem *p, dualkv_tensor t, int head, int64_t row, int n, int64_t end, int d,
                 float *out, int ld, int turned);
/* Rounds to the problem's dtype and stores one row. */
void dkv_emuStore(const dualkv_problem *p, dualkv_tensor t, int head, int64_t row, int d, const float *in);

/* s [m, ld]: raw products q.k on entry, final scores on return (-inf where masked or past the range). cap [m,
 * ld] (or NULL) receives tanh(s/softcap) where softcap is on. */
void dkv_emuScores(const dkv_emu *e, const dkv_emuTile *t, float *s, float *cap, int ld);

/* Rounds to what P and dS are kept in. */
void dkv_emuRoundP(const dkv_emu *e, const dualkv_problem *p, float *x, int64_t n);
/* Rounds operands (in=tf32), scores or dP (scores=low) where the options ask for it. */
void dkv_emuRoundIn(const dkv_emu *e, float *x, int64_t n);
void dkv_emuRoundScores(const dkv_emu *e, const dualkv_problem *p, float *x, int64_t n);

/* Zeroed scratch of n floats, or NULL. */
float *dkv_emuScratch(size_t n);

int dkv_emuForward(dkv_emu *e, const dualkv_launch *l); /* 0, or -1: out of memory */
int dkv_emuBackward(dkv_emu *e, const dualkv_launch *l);
/* Backward's workspace: dQ accumulators fp32 [tq, hq, pad(dqk)], then delta fp32 [hq, tq] and one unused
 * place. SIZE_MAX on overflow. */
size_t dkv_emuWorkspace(const dualkv_problem *p);

#endif
