/* phases.h: where the time of a case went. A case runs in one thread; what its phases start in others is waited for. */
#ifndef DKV_PHASES_H
#define DKV_PHASES_H

typedef enum dkv_phase {
    DKV_PHASE_OTHER,    /* what has no name */
    DKV_PHASE_INPUTS,   /* generated, and changed for checks */
    DKV_PHASE_FILL,     /* poison and inputs into the kernel's buffers */
    DKV_PHASE_KERNEL,   /* its process: started, asked, run, the way to its device and back */
    DKV_PHASE_GATHER,   /* buffers compared, outputs taken out of them */
    DKV_PHASE_ORACLE,   /* asked, until the answer is there */
    DKV_PHASE_JUDGE,    /* bound, statistics */
    DKV_PHASE_CHECKS,   /* comparisons of the other checks */
    DKV_PHASE_STRENGTH, /* what the case would have seen */
    DKV_PHASE_RELEASE,  /* memory given back */
    DKV_N_PHASES
} dkv_phase;

typedef struct dkv_phases {
    double seconds[DKV_N_PHASES];
    double since; /* of the phase that runs */
    dkv_phase now;
} dkv_phases;

const char *dkv_phaseName(dkv_phase s);

/* From here on this thread's time goes to `s`, in DKV_PHASE_OTHER; NULL: to nobody. What there was before. */
dkv_phases *dkv_countPhases(dkv_phases *s);
/* The phase that runs from here on; which one ran before, to be entered again. Nothing where nobody counts. */
dkv_phase dkv_enterPhase(dkv_phase s);

#endif
