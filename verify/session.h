/* session.h: many cases, several at a time: a pool of threads, each with a warm worker of its own. Results
 * come out in the order of the cases. */
#ifndef DKV_SESSION_H
#define DKV_SESSION_H

#include "case.h"

typedef struct dkv_item { /* one case to run */
    char *line;           /* canonical, owned */
    int kernel;           /* index into the kernels of the session */
} dkv_item;

/* Called for each finished case, in order, from one thread at a time. */
typedef void (*dkv_result_fn)(const dkv_result *r, long index, long total, void *arg);

typedef struct dkv_session {
    const dkv_kernel_spec *kernels;
    const bool *replicated; /* which of them want the replicated layout (dkv_probeKernels); NULL: none */
    int n_kernels;
    const dkv_item *items;
    long n_items;
    int jobs;
    double timeout, budget; /* false alarms of the whole run */
    double level;           /* of one test; 0: budget divided over all tests */
    int repeats;
    bool strength;               /* measure what each case has the power to see */
    const dkv_kernel_spec *peer; /* or NULL */
    dkv_worker *warm;            /* started workers of the kernels, which the first thread takes over; or NULL */
    const dkv_fits *fits;        /* of each kernel, or NULL */
    dkv_remote *remote;          /* the oracle on a device, or NULL */
    const char *data_dir;
    bool timing; /* no oracle: only inputs and outputs need memory */
    dkv_result_fn report;
    void *arg;
    long counts[DKV_ST_N]; /* out */
    long finished;         /* out: cases reported */
    bool stopped;          /* out: ended by a signal */
} dkv_session;

/* Opens each kernel once in a worker; replicated[n] (or NULL): which of them want the replicated layout.
 * DKV_EUSER where one cannot be opened, DKV_EHARNESS where its device is missing. */
int dkv_probeKernels(const dkv_kernel_spec *kernels, int n, double timeout, bool *replicated, dkv_err *err);
/* The same; the workers stay, for a session's `warm`. */
int dkv_warmKernels(const dkv_kernel_spec *kernels, int n, double timeout, bool *replicated, dkv_worker *warm, dkv_err *err);
void dkv_stopWorkers(dkv_worker *w, int n);
/* Parses every line, and refuses before anything runs: inadmissible masks, unknown fills, missing recordings,
 * sizes beyond memory. */
int dkv_precheckItems(const dkv_session *s, dkv_err *err);
/* Useful FLOPs, forward and backward, of all cases. */
double dkv_countWork(const dkv_session *s);
/* Level of one test: the budget over all the tests that this run may make. */
double dkv_testLevel(const dkv_session *s);
void dkv_runSession(dkv_session *s);
/* After a signal: does a thread of it still run? (An oracle cannot be interrupted; it is waited for two seconds.) Then nothing
 * that the session points at may be freed or leave its frame, and main leaves without waiting for anything. */
bool dkv_threadsLeft(void);
/* Installs handlers: the first SIGINT or SIGTERM ends the run cleanly. */
void dkv_catchSignals(void);

#endif
