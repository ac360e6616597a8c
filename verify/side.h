/* side.h: one kernel on one problem: what it says of it, its view (packed or replicated), its buffers and its
 * runs. The kernel under test is a side; so are the same-precision peer and the other case of a call
 * sequence. */
#ifndef DKV_SIDE_H
#define DKV_SIDE_H

#include "worker.h"

typedef struct dkv_run {
    dkv_outputs out; /* shaped for the kernel's view; of a summed side packed */
    uint64_t bits;   /* of a summed side: of all that the kernel gave, copies too */
    double seconds[2];
    int64_t launches[2], peak;
    dkv_damage damage;
    int64_t poison[DKV_N_OUTPUTS],
        first[DKV_N_OUTPUTS]; /* elements that still hold the poison; index of the first */
    bool done;
} dkv_run;

typedef struct dkv_side {
    dkv_worker *w;
    dkv_description d;
    const dkv_problem *p; /* as the kernel sees it: the case's own, or `rep` */
    const dkv_layout *l;
    const dkv_inputs *in;
    dkv_problem rep; /* replicated kernels only, with the expansion */
    dkv_layout rep_layout;
    dkv_inputs rep_in;
    int64_t *q_source, *k_source;
    uint8_t *q_own;
    /* A replicated problem too large to be held twice: `in` are the packed inputs, which are spread in the arena, and what
     * the kernel gives is summed there; the oracle is that of the packed problem, with sums over copies (partials.h). */
    bool summed;
    const dkv_layout *packed;
    dkv_expansion expand;
    dkv_arena arena;
    bool has_arena;
    uint32_t poison; /* where its patterns begin */
    /* Not NULL (dkv_takesBetween): a forward of these inputs goes in the same buffers before each backward, as layers of a model do (arenas up to
     * DKV_ARENA_SMALL; its outputs are nobody's). */
    const dkv_inputs *between;
} dkv_side;

/* Elements of the replicated outputs from which on a side is summed (16-bit ones; fp32 copies' roundings have no twin). Never
 * with fill=duplicated: the variances of equal copies add as deviations, those of a sum as if they were independent. */
extern double dkv_summedFrom;
bool dkv_isSummed(const dkv_problem *p);

/* Asks the kernel about the problem (canonical `line`; `packed`, `in`: its layout and inputs, borrowed) and,
 * unless it is refused (s->d.refused), prepares view and buffers. An outcome that is not OK has its words in
 * w->why. */
dkv_outcome dkv_openSide(dkv_side *s, dkv_worker *w, const dkv_problem *p, const char *line,
                         const dkv_layout *packed, const dkv_inputs *in);
void dkv_closeSide(dkv_side *s);

/* One forward and, with gradients, one backward under the poison of run `index`; out->out is allocated here.
 */
dkv_outcome dkv_runSide(dkv_side *s, int index, dkv_run *out);
void dkv_freeRun(dkv_run *r);

/* Can another forward go between (side.between)? */
bool dkv_takesBetween(const dkv_side *s);

/* The run's outputs packed (for a packed kernel, or a summed side: the same arrays; else its own). */
int dkv_packRun(const dkv_side *s, const dkv_layout *packed, const dkv_outputs *from, dkv_outputs *to,
                dkv_err *err);
void dkv_freePacked(const dkv_side *s, dkv_outputs *packed);
/* Are copies' outputs kept, row by row? */
bool dkv_isSpread(const dkv_side *s);
/* The layout of dkv_run.out. */
const dkv_layout *dkv_runLayout(const dkv_side *s);

#endif
