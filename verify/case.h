/* case.h: where the stages meet: line -> problem -> inputs -> kernel in its worker -> oracle -> checks ->
 * result. */
#ifndef DKV_CASE_H
#define DKV_CASE_H

#include "errmap.h"
#include "fit.h"
#include "judge.h"
#include "lean.h"
#include "memory.h"
#include "remote.h"
#include "side.h"
#include "phases.h"
#include "status.h"
#include "strength.h"

#define DKV_CHECKS_MAX 32
#define DKV_RUNS_MAX 3

struct dkv_case;
typedef struct dkv_case_options {
    const char *data_dir;
    double level;     /* false-alarm probability of one statistical test */
    int threads;      /* of the oracle */
    int repeats;      /* extra runs where a kernel promises repeatable bits */
    bool nested;      /* a case between the runs of another */
    bool ask;         /* whether the kernel takes it, no more: UNSUPPORTED, or what the asking came to; else PASSED */
    bool strength;    /* measure what the case has the power to see */
    /* Called with everything still there once the checks have run; NULL: nobody looks. */
    void (*observe)(struct dkv_case *c, void *arg);
    void *observe_arg;
    const dkv_fits *fits; /* of a kernel that declares nothing (--arithmetic), or NULL */
    dkv_remote *remote; /* the oracle on a device, or NULL: the CPU judges */
    double leans_most; /* FLOPs of a case up to which check `lean` asks the oracle again; 0: 1e13 */
    int *probes; /* map the errors of what fails; of so many cases (counted down, by several threads) the weights; NULL: no maps */
    dkv_worker *peer; /* same-precision peer, or NULL: errors beside the kernel's, never deciding */
} dkv_case_options;

typedef struct dkv_finding {
    dkv_finding_state state;
    dkv_status status; /* of a defect */
    char why[400];     /* of a defect or a note */
} dkv_finding;

/* Which oracle judged. */
typedef struct dkv_oracle_use {
    dkv_oracle_mode by; /* cpu, cuda or both; auto: none did */
    char note[320];     /* why not the device, where that was meant; "" else */
    double seconds, device_seconds, flops; /* all of it; of the device alone; its products */
} dkv_oracle_use;

typedef struct dkv_result {
    char line[DKV_LINE_MAX + 1];
    char kernel[DKV_SPEC_MAX];
    dkv_status status;
    char why[600]; /* one sentence; "" where PASSED */
    bool stopped;  /* interrupted: no result */
    bool changed;  /* the kernel's file is not what it was when the run began (HARNESS_ERROR): it is of no use to go on */
    bool judged;   /* tensor[], arithmetic are there */
    bool declared; /* the arithmetic is the kernel's own word */
    char bits[17]; /* of the outputs judged, 16 hex digits; "" where repeatable bits are not promised */
    int runs;    /* of the kernel on this problem, those for other checks left out */
    double seconds, seconds_forward, seconds_backward, level;
    dkv_oracle_use oracle;
    dkv_phases phases; /* where `seconds` went */
    dkv_gpu_info gpu; /* that the kernel ran on */
    dualkv_arithmetic arithmetic;
    char arithmetic_words[240], profile[DKV_FIT_WORDS]; /* profile: named where the kernel declares nothing */
    dkv_judgement tensor[DKV_N_OUTPUTS];
    dkv_lean lean[DKV_N_OUTPUTS];
    double peer[DKV_N_OUTPUTS]; /* rms error over the peer's; 0: not there */
    dkv_finding finding[DKV_CHECKS_MAX];
    dkv_errmap map[DKV_N_OUTPUTS], weights[2]; /* of what is wrong; forward, backward */
    dkv_strength strength;
    char printed[DKV_WORKER_TAIL + 1]; /* the last that the kernel's process printed in this case */
    int32_t absent; /* outputs that the kernel does not give: bits 1 << dkv_tensor_id; not judged */
    char file[DKV_CASE_NAME_MAX + 16], file_hash[65]; /* the case's file, if it has one, and its SHA-256 */
} dkv_result;

/* What the checks look at. */
typedef struct dkv_case {
    const dkv_problem *p;
    const char *line;
    const dkv_case_options *options;
    dkv_layout packed;
    dkv_inputs in;
    dkv_side kernel;
    int n_runs; /* kept: the first two, then one that differs */
    dkv_run run[DKV_RUNS_MAX];
    int judged_run;     /* the one whose values are judged */
    dkv_status between; /* run=aba: of the worst case between */
    char between_why[320];
    dkv_outcome outcome; /* of the runs, words in the worker's why */
    bool has_oracle, has_rep_oracle, has_got;
    dkv_oracle oracle;     /* packed */
    dkv_oracle rep_oracle; /* of the replicated problem, where the kernel wants that */
    dkv_remote_oracle remote, rep_remote; /* whose arrays those are, where the device was asked */
    dkv_outputs got;       /* packed outputs of the judged run */
    dkv_result *result;
} dkv_case;

typedef struct dkv_check {
    const char *name, *doc;
    void (*run)(dkv_case *c, dkv_finding *f);
} dkv_check;

/* Checks in the order in which a defect decides the case. NULL past the end. */
const dkv_check *dkv_listCheck(int i);

/* Runs a parsed, admissible problem; always fills *out (HARNESS_ERROR where the harness failed). */
void dkv_runCase(const dkv_problem *p, dkv_worker *w, const dkv_case_options *options, dkv_result *out);

/* Truth, bound and (if asked) twin of a case that has run, under the arithmetic `a`. */
int dkv_consultOracle(dkv_case *c, const dualkv_arithmetic *a, bool twin, dkv_err *err);
/* The twin alone, under another arithmetic, after the CPU was consulted; truth and bound stay. forward: of O and LSE. */
int dkv_consultTwin(dkv_case *c, const dualkv_arithmetic *a, bool forward, dkv_err *err);
/* Frees what a case holds; not its problem, not its result. */
void dkv_freeCase(dkv_case *c);

#endif
