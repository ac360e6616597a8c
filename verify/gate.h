/* gate.h: what changed between what was accepted (accepted.h) and a run. Pure: no I/O, no processes.
 *
 * An error that grew: seeds are fixed, so truth, twin and expected deviations are the same, and rms z of a tensor is the
 * root of a mean square of n degrees of freedom (those of the rows: judge.h). Were nothing changed but how values happen
 * to round, the ratio of two such squares would follow F(n, n), for which t = sqrt(n)/2 (q - 1/q), q the ratio of the
 * rms, follows Student's t of n degrees. So q up to exp(asinh(t / sqrt(n))), t the quantile that is exceeded with the
 * probability of one test of the run, is chance; more is a finding, with its size. Where key tile, order or the like are
 * others than accepted, an rms below 1 (less than predicted) counts as 1; where a precision is, errors are not compared:
 * their unit, the predicted deviation, is another. */
#ifndef DKV_GATE_H
#define DKV_GATE_H

#include "accepted.h"

typedef enum dkv_change_kind {
    DKV_CH_STATUS,    /* a worse status */
    DKV_CH_REFUSED,   /* a line newly refused */
    DKV_CH_MISSING,   /* an accepted line that did not run */
    DKV_CH_GREW,      /* an error beyond what chance explains */
    DKV_CH_LOOSENED,  /* arithmetic */
    DKV_CH_UNSEEN,    /* an output that it does not give any more, launches that it does not count any more */
    DKV_CH_BITS,      /* where repeatable ones are promised; or that promise withdrawn */
    DKV_CH_GENERATOR, /* other inputs: errors and bits are not compared */
    DKV_CH_PROGRAM,   /* another version of this program: the same */
    DKV_CH_ORACLE,    /* of what judges: truth, bound, twin: the same */
    DKV_CH_FLOOR,     /* refuses too much */
    DKV_CH_SLOWER,    /* than the accepted kernel, in the same run (perf.h) */
    DKV_CH_BETTER,    /* this and all below: told, no finding */
    DKV_CH_NEW,
    DKV_CH_WAIVED, /* a worse status that a waiver excuses */
    DKV_CH_TIGHTENED,
    DKV_CH_KERNEL,
    DKV_CH_DEVICE, /* another one: bits are not compared */
    DKV_CH_N
} dkv_change_kind;

typedef struct dkv_change_row {
    const char *name, *many; /* a word; "%ld lines …", of several */
    bool finding;
} dkv_change_row;
const dkv_change_row *dkv_changeRow(dkv_change_kind k);

typedef struct dkv_change {
    dkv_change_kind kind;
    char *line; /* owned; "" where it is of the whole run */
    char *text; /* owned: one sentence without the line */
    double size;
} dkv_change;

typedef struct dkv_gate {
    bool new_bits; /* in: other bits are no finding */
    const char *asked; /* in: words of a run that is not of the usual lines, or NULL */
    bool partial;  /* in: the run was interrupted, and lines that did not run are none */
    dkv_change *list;
    long n, room, counts[DKV_CH_N];
    double least_growth; /* out: the smallest ratio that chance does not explain, of all tests made; 0: none made */
} dkv_gate;

/* Both sorted. */
int dkv_compareAccepted(dkv_gate *g, const dkv_accepted *was, const dkv_accepted *now, dkv_err *err);
/* A kernel that refuses more than 100 - percent of the lines fails. */
int dkv_checkFloor(dkv_gate *g, const dkv_accepted *now, double percent, dkv_err *err);
/* Adds a change that is found elsewhere; `line` may be "". */
__attribute__((format(printf, 6, 7))) int dkv_tellChange(dkv_gate *g, dkv_err *err, dkv_change_kind kind, const char *line,
                                                         double size, const char *fmt, ...);
/* A field of an arithmetic (DKV_ARITHMETIC_FIELDS) that changed, in words: "error of exp 1e-07 -> 3e-07". */
void dkv_sayField(const char *field, double was, double now, char *out, size_t n);
/* Changes that are findings. */
long dkv_countFindings(const dkv_gate *g);
bool dkv_isFinding(const dkv_gate *g, dkv_change_kind k);
/* One sentence on all changes of a kind; "" where there are none. */
void dkv_sayChanges(const dkv_gate *g, dkv_change_kind k, char *out, size_t n);
void dkv_freeGate(dkv_gate *g);

/* The largest ratio of two rms of n degrees of freedom that chance explains at this level. INFINITY: any. */
double dkv_chanceGrowth(double n, double level);

#endif
