/* fit.h: the arithmetic of kernels that declare none (--arithmetic). `auto`: before a run, a few problems of known
 * lines are run through the kernel, and of all combinations of named profile, accumulation, key tile and order, and
 * of how late the maximum is raised and whether a sink is in it from the start, the one under which its residuals are
 * likeliest is named; the run's cases are then judged by it, and those
 * that it does not explain as ever (case.c). A profile's name: the kernel is held to that. What a kernel
 * declares is never touched. */
#ifndef DKV_FIT_H
#define DKV_FIT_H

#include <stdbool.h>
#include <stdio.h>

#include "kernel.h"

#define DKV_FIT_WORDS 128

typedef struct dkv_fit { /* for one dtype */
    bool known;
    bool held;    /* named by the user: what does not fit is a defect */
    double misfit; /* largest rms z among the tensors, over its limit */
    dualkv_arithmetic a;
    char words[DKV_FIT_WORDS]; /* "flash on tensor cores, key tile 64, last tile first" */
} dkv_fit;

typedef struct dkv_fits {
    dkv_fit of[3]; /* by dualkv_dtype */
} dkv_fits;

/* Is `word` auto or the name of a profile? The error lists them. */
int dkv_checkArithmeticWord(const char *word, dkv_err *err);
/* The profile of that name for the dtypes whose bit (1 << dualkv_dtype) is in `types`: kernels are held to it. */
void dkv_nameFits(const char *word, unsigned types, dkv_fits *out);
/* Fills *out for the dtypes whose bit (1 << dualkv_dtype) is in `types`; `auto` runs the kernel. One that declares its arithmetic, refuses all probes or fits nothing leaves known = false. */
int dkv_fitKernel(const dkv_kernel_spec *kernel, const char *word, unsigned types, double timeout, const char *data_dir,
                  dkv_fits *out, dkv_err *err);
/* "it behaves as ... (bf16); as ... (fp32)", a line; nothing where nothing is known. */
void dkv_sayFits(const char *kernel, const dkv_fits *fits, FILE *f);

/* How many cases of a run behaved as what. */
#define DKV_BEHAVIOURS_MAX 24
typedef struct dkv_behaviour {
    struct {
        char words[DKV_FIT_WORDS];
        long cases;
    } row[DKV_BEHAVIOURS_MAX];
    int n;
} dkv_behaviour;
void dkv_countBehaviour(dkv_behaviour *t, const char *words);
void dkv_sayBehaviour(const dkv_behaviour *t, FILE *f);

#endif
