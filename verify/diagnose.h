/* diagnose.h: where a kernel goes wrong: stage of the algorithm, region, rows, heads, dims.
 *
 * Tensors in the order in which one depends on another: LSE and O; then dQ, dK, dV, dSink against the
 * backward of the kernel's *own* O and LSE, so that a forward fault is named once. What the kernel does not
 * show it is asked for with other inputs of the same problem: V one-hot (O is the weight of each key), dO
 * one-hot (dV is the backward's weight). */
#ifndef DKV_DIAGNOSE_H
#define DKV_DIAGNOSE_H

#include "case.h"
#include "explain.h"

/* Stages, one row of the table in diagnose.c each, in the order of the algorithm. */
typedef enum dkv_stage {
    DKV_STAGE_NONE,
    DKV_STAGE_SCORES,   /* forward: Q K^T and what modifies it */
    DKV_STAGE_MASK,     /* forward: which keys a row sees */
    DKV_STAGE_SOFTMAX,  /* forward: running maximum and the correction */
    DKV_STAGE_SUM,      /* forward: row sum, normalisation */
    DKV_STAGE_LSE,      /* forward: LSE alone */
    DKV_STAGE_PV,       /* forward: P V */
    DKV_STAGE_O,        /* forward: O's rounding, store */
    DKV_STAGE_FORWARD,  /* forward: no probe told which */
    DKV_STAGE_B_SCORES, /* backward: recomputed scores */
    DKV_STAGE_B_MASK,   /* backward: pairs that are walked */
    DKV_STAGE_B_P,      /* backward: P from score and LSE */
    DKV_STAGE_DELTA,
    DKV_STAGE_DS,       /* dP, dS */
    DKV_STAGE_DQ,       /* dS K: product, sum, scale, store */
    DKV_STAGE_DK,       /* dS^T Q */
    DKV_STAGE_DV,       /* P^T dO */
    DKV_STAGE_REDUCE,   /* the sum of dK and dV over rows, heads, responses; their store */
    DKV_STAGE_DSINK,
    DKV_STAGE_BACKWARD, /* backward: no test told which */
    DKV_N_STAGES
} dkv_stage;

typedef struct dkv_stage_row {
    const char *name, *words;
} dkv_stage_row;
const dkv_stage_row *dkv_stageRow(dkv_stage s);

/* Rows of one tensor that are off: outside the bound or not finite; or, where the arithmetic is known, with
 * a residual to the twin of more than DKV_OFF_NOISE times what the declared roundings leave. */
#define DKV_OFF_NOISE 4.0
typedef struct dkv_tensor_where {
    bool present, given_own; /* judged; against the backward of the kernel's own O and LSE */
    int64_t rows, off, outside, nonfinite; /* rows x heads: all, off, of these beyond the bound; NaN or Inf */
    double worst;                          /* largest err/bound */
    double noise, gain, mean; /* of the twin's residual: rms z, slope, mean z; NAN without a twin */
    double scaled, scaled_share; /* factor that explains the error best, and the share of it */
    double growth, growth_p;     /* exponent of a row's error with the number of its keys, chance; or NAN */
    char segments[120], rows_words[200], heads[120], dims[120], pattern[200];
} dkv_tensor_where;

#define DKV_SPOTS_MAX 3
typedef struct dkv_spot { /* one place where something first goes wrong */
    dkv_stage stage;
    dkv_tensor_id tensor; /* that shows it first */
    unsigned tensors;     /* all that it explains, bits 1 << dkv_tensor_id */
    double share;         /* of the rows, or of the error, that the stage's test explains; NAN: no test */
    bool precision;       /* within the bound: a matter of rounding */
    char region[120];     /* "response-prompt": rows of a response against keys of the prompt */
    char detail[300];     /* what the test saw: "they miss the key of their own position" */
    char sentence[800];
} dkv_spot;

typedef struct dkv_repeats {
    int runs;                  /* of the same inputs, the judged one included */
    int differing;             /* of those, with other bits */
    int64_t elements[DKV_N_OUTPUTS]; /* of other bits, most in any run */
    double beyond[DKV_N_OUTPUTS];    /* largest difference over the bound */
    char where[400];                 /* which tensors, which rows of the first of them; "" where none differ */
} dkv_repeats;

#define DKV_HYPOTHESES_MAX 8
typedef struct dkv_diagnosis {
    dkv_result result;
    char sentence[1000]; /* the first line */
    char held[300];      /* the arithmetic it is held to, of a kernel that declares none; "": none was asked for */
    dkv_tensor_where tensor[DKV_N_OUTPUTS];
    int n_spots;
    dkv_spot spot[DKV_SPOTS_MAX];
    dkv_repeats repeats;
    int probes;         /* runs of the kernel on other inputs */
    int n_hypotheses;
    dkv_hypothesis hypothesis[DKV_HYPOTHESES_MAX];
    bool interrupted; /* by a signal: what is here was known by then */
    char note[400]; /* why there are none; what was cut short */
} dkv_diagnosis;

typedef struct dkv_diagnose_options {
    const char *data_dir;
    double level, timeout, seconds; /* seconds: no probe is started later; 0: 30 */
    int threads, repeats;           /* repeats: further runs of the same inputs */
    bool what;                      /* hypotheses, too */
    const char *exclude;            /* of them, names; or NULL */
    const dkv_fits *fits;
    const char *held;               /* what kernels that declare nothing are held to, in words; or NULL */
} dkv_diagnose_options;

/* For a kernel that declares no arithmetic: the name of the profile it is to be held to (NULL: none, or it declares one), and
 * in words which of its tensors that explains. Runs it on a small problem of the line's sizes, mask and modifiers. */
typedef struct dkv_choice {
    const char *name;
    char words[300];
} dkv_choice;
int dkv_chooseArithmetic(const dkv_problem *p, const dkv_kernel_spec *kernel, const dkv_diagnose_options *o, dkv_choice *out,
                         dkv_err *err);

/* Runs the case in a worker of its own and diagnoses it. 0, also where a signal came once values were judged
 * (out->interrupted); or DKV_EHARNESS. */
int dkv_diagnoseLine(const dkv_problem *p, const dkv_kernel_spec *kernel, const dkv_diagnose_options *options,
                     dkv_diagnosis *out, dkv_err *err);

/* Text for `f`; one line of JSON, malloc'ed, NULL where out of memory. */
void dkv_sayDiagnosis(const dkv_diagnosis *d, FILE *f, bool verbose);
char *dkv_printDiagnosis(const dkv_diagnosis *d);

#endif
