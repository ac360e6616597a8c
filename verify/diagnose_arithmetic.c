/* Which arithmetic a kernel that declares none is held to while it is diagnosed. One that is fitted to all of its outputs
 * would be fitted to its fault, too, or to nothing. So: the profile that explains most of its tensors, the tightest of such;
 * backward is judged given the kernel's own O and LSE, and a fault leaves most tensors as they must be. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../ref/partials.h"
#include "diagnose.h"

#define SHAPE "shape=70+2x40,20" /* beside the line's own sizes, mask and modifiers */

typedef struct vote { /* of one profile */
    const char *name;
    unsigned explains; /* bits 1 << dkv_tensor_id */
    double near;       /* share of the elements within two sigma of its twin, added over tensors */
} vote;

enum { PROFILES_MAX = 32 };

typedef struct ballot {
    vote of[PROFILES_MAX]; /* tightest first */
    int n;
    unsigned judged; /* tensors */
    bool declared, came; /* came: the kernel ran */
    double level;
    dkv_err err;
} ballot;

static int countBits(unsigned x) {
    int n = 0;
    for (; x; x &= x - 1) n++;
    return n;
}

static double shareNear(const dkv_oracle *o, dkv_tensor_id id, const double *got, int64_t n) {
    const double *twin = dkv_outputAt(&o->twin, id), *sigma2 = dkv_outputAt(&o->sigma2, id);
    int64_t near = 0;
    for (int64_t i = 0; i < n && o->has_twin[id]; i++) near += fabs(got[i] - twin[i]) <= 2 * sqrt(sigma2[i]);
    return n > 0 ? (double)near / (double)n : 0;
}

/* The tensors that a profile explains. */
static int askProfile(dkv_case *c, const dualkv_arithmetic *a, ballot *b, vote *v) {
    int64_t n[DKV_N_OUTPUTS];
    int rc = dkv_consultOracle(c, a, true, &b->err);
    dkv_countOutputs(&c->packed, n);
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++) {
        const double *got = dkv_outputAt(&c->got, (dkv_tensor_id)id);
        dkv_judgement j = {0};
        if (!got || c->kernel.d.absent >> id & 1) continue;
        b->judged |= 1u << id;
        rc = dkv_judgeTensor(&c->packed, a, &c->oracle, (dkv_tensor_id)id, got, b->level, &j, &b->err);
        if (!rc && !j.failed && !j.imprecise && !j.biased) v->explains |= 1u << id;
        if (id == DKV_O && c->p->grad) continue; /* few have a twin of it */
        v->near += rc ? 0 : shareNear(&c->oracle, (dkv_tensor_id)id, got, n[id]);
    }
    return rc;
}

static void observe(dkv_case *c, void *arg) {
    ballot *b = arg;
    dualkv_arithmetic a;
    const char *name;
    int rc = 0;
    b->came = true;
    b->declared = c->kernel.d.arithmetic.declared != 0;
    for (int i = 0; !b->declared && !rc && b->n < PROFILES_MAX && (name = dkv_arithmeticProfile(i, c->kernel.p, &a, NULL)); i++) {
        if (dkv_partialsOf(&a).rows && c->kernel.d.memory != DUALKV_HOST) continue; /* of CPUs */
        b->of[b->n].name = name;
        rc = askProfile(c, &a, b, &b->of[b->n++]);
    }
}

static int runBallot(dkv_worker *w, const dkv_problem *p, const dkv_diagnose_options *o, ballot *b, dkv_err *err) {
    dualkv_arithmetic a;
    static dkv_fits first; /* the observer judges: once is enough before */
    const dkv_case_options options = {.data_dir = o->data_dir, .level = o->level, .threads = o->threads, .nested = true,
                                      .observe = observe, .observe_arg = b, .fits = &first};
    dkv_result *r = malloc(sizeof *r);
    if (!r) return dkv_fail(err, DKV_EHARNESS, "out of memory for a result");
    dkv_nameFits(dkv_arithmeticProfile(0, p, &a, NULL), 1u << p->dtype, &first);
    b->level = o->level;
    dkv_runCase(p, w, &options, r);
    const bool stopped = r->stopped;
    free(r);
    if (stopped) return dkv_fail(err, DKV_EHARNESS, "interrupted before anything was judged");
    if (b->err.code) *err = b->err;
    return (int)b->err.code;
}

/* The line with a small shape and plain inputs. */
static int makeSmall(const dkv_problem *p, dkv_problem *small, dkv_err *err) {
    dkv_problem shape = {0};
    int rc = dkv_copyProblem(p, small, err);
    if (!rc) rc = dkv_parseProblem(SHAPE, NULL, &shape, err);
    if (rc) return rc;
    dkv_node *own = small->nodes;
    small->nodes = shape.nodes;
    small->n_nodes = shape.n_nodes;
    small->n_groups = shape.n_groups;
    shape.nodes = own;
    small->run = DKV_SINGLE;
    strcpy(small->fill, "normal");
    dkv_freeProblem(&shape);
    return 0;
}

/* "LSE, dQ and dK". */
static void sayTensors(unsigned which, char *out, size_t n) {
    int left = countBits(which);
    size_t at = 0;
    out[0] = 0;
    for (int id = 0; id < DKV_N_OUTPUTS && at < n; id++) {
        if (!(which >> id & 1)) continue;
        at += (size_t)snprintf(out + at, n - at, "%s%s", dkv_tensorName((dkv_tensor_id)id), --left > 1 ? ", " : left ? " and " : "");
    }
}

/* The one that explains most, the tightest of such; where none explains anything, the nearest. */
static const vote *countVotes(const ballot *b) {
    const vote *best = NULL;
    for (const vote *v = b->of; v < b->of + b->n; v++) {
        const int more = best ? countBits(v->explains) - countBits(best->explains) : 1;
        if (more > 0 || (more == 0 && !v->explains && v->near > best->near)) best = v;
    }
    return best;
}

/* What was chosen, what it leaves, and the tighter one that would do but for a few tensors. */
static void sayChoice(const ballot *b, const vote *best, char *out, size_t n) {
    char left[80];
    const vote *tighter = NULL;
    if (!best->explains) {
        snprintf(out, n, "held to %s, the nearest, which explains none of its tensors on a small problem", best->name);
        return;
    }
    for (const vote *v = b->of; v < best; v++)
        if (!tighter || countBits(v->explains) > countBits(tighter->explains)) tighter = v;
    sayTensors(b->judged & ~best->explains, left, sizeof left);
    size_t at = (size_t)snprintf(out, n, left[0] ? "held to %s, the tightest that explains all but %s on a small problem"
                                                 : "held to %s, the tightest that explains all its tensors on a small problem",
                                 best->name, left);
    if (!tighter || 2 * countBits(tighter->explains) < countBits(b->judged) || at >= n) return;
    sayTensors(b->judged & ~tighter->explains, left, sizeof left);
    snprintf(out + at, n - at, "; %s explains all but %s: --arithmetic %s, if that is meant", tighter->name, left, tighter->name);
}

int dkv_chooseArithmetic(const dkv_problem *p, const dkv_kernel_spec *kernel, const dkv_diagnose_options *o, dkv_choice *out,
                         dkv_err *err) {
    dkv_problem small = {0};
    dkv_worker w;
    memset(out, 0, sizeof *out);
    ballot *b = calloc(1, sizeof *b);
    int rc = b ? makeSmall(p, &small, err) : dkv_fail(err, DKV_EHARNESS, "out of memory");
    dkv_initWorker(&w, kernel, o->timeout);
    if (!rc) rc = runBallot(&w, &small, o, b, err);
    if (!rc && !b->came) rc = runBallot(&w, p, o, b, err); /* that shape is refused, perhaps */
    dkv_stopWorker(&w);
    const vote *best = b ? countVotes(b) : NULL;
    if (!rc && best) {
        out->name = best->name;
        sayChoice(b, best, out->words, sizeof out->words);
    }
    dkv_freeProblem(&small);
    free(b);
    return rc;
}
