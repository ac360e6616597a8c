/* test_oracle.c: the oracle on the device against the CPU's, on every line of a suite: truth and bound within
 * what two fp64 evaluations may differ by, twin and sigma2 beside each other; then one large problem for
 * time. Needs a device; prints a table, the JSON record goes to the file named.
 *
 *     test_oracle LIBRARY SUITE JSON [LINE [ROWS KEYS]] */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/dtype.h"
#include "../ref/device.h"
#include "../ref/device_oracle.h"

static const dkv_oracle_ops *ops;
static const dkv_device_ops *dev;

typedef struct worst {
    double truth[DKV_N_OUTPUTS],
        bound[DKV_N_OUTPUTS]; /* largest |device - CPU| over what fp64 allows; largest |ratio - 1| */
    double twin[DKV_N_OUTPUTS],
        sigma[DKV_N_OUTPUTS]; /* share of elements off by > 0.1 sigma; largest |ln ratio| of mean sigma2 */
    int64_t n[DKV_N_OUTPUTS];
} worst;

typedef struct side { /* device copies */
    void *q, *k, *v, *d_o, *d_lse, *sink, *o, *lse;
    dkv_device_inputs in;
} side;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *upload(const void *x, size_t n) {
    void *p = NULL;
    if (!x) return NULL;
    if (dev->alloc(&p, n) || dev->copyIn(p, x, n, NULL)) {
        fprintf(stderr, "%s\n", dev->error());
        exit(3);
    }
    return p;
}

static side makeSide(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in) {
    side s = {0};
    size_t e = dkv_dtypeSize(p->dtype), tq = (size_t)l->view.tq, tk = (size_t)l->view.tk, hq = (size_t)p->hq;
    s.q = upload(in->q, e * tq * hq * (size_t)p->dqk);
    s.k = upload(in->k, e * tk * (size_t)(p->hkv * p->dqk));
    s.v = upload(in->v, e * tk * (size_t)(p->hkv * p->dv));
    s.d_o = upload(in->d_o, e * tq * hq * (size_t)p->dv);
    s.d_lse = upload(in->d_lse, 4 * tq * hq);
    s.sink = upload(in->sink, 4 * hq);
    s.in = (dkv_device_inputs){s.q, s.k, s.v, s.d_o, s.d_lse, s.sink};
    return s;
}

static void freeSide(side *s) {
    void *all[] = {s->q, s->k, s->v, s->d_o, s->d_lse, s->sink, s->o, s->lse};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]) dev->release(all[i]);
}

/* What two evaluations in fp64 may differ by: the bound of fp64 arithmetic, twice. */
static int fp64Bound(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in, dkv_oracle *o,
                     dkv_err *err) {
    dualkv_arithmetic a = {.size = sizeof a,
                           .unit = 0x1p-53,
                           .acc_unit = 0x1p-53,
                           .acc_step = 1,
                           .in_format = DUALKV_EXACT,
                           .s_format = DUALKV_EXACT,
                           .p_format = DUALKV_EXACT,
                           .ds_format = DUALKV_EXACT,
                           .out_format = DUALKV_EXACT,
                           .partial_format = DUALKV_EXACT,
                           .exp_error = 0x1p-51,
                           .log_error = 0x1p-51,
                           .tanh_error = 0x1p-50};
    dkv_ref_options opt = {0};
    return dkv_oracleBound(p, l, in, &a, &opt, o, err);
}

static int sameOdd(double a, double b) { return (isnan(a) && isnan(b)) || a == b; }

static void compare(dkv_tensor_id id, int64_t n, const double *cpu, const double *gpu, const double *bound,
                    const double *cpu_b, const double *gpu_b, worst *w, int *bad) {
    for (int64_t i = 0; i < n; i++) {
        double t, b;
        if (!isfinite(cpu[i]) || !isfinite(gpu[i])) t = sameOdd(cpu[i], gpu[i]) ? 0 : INFINITY;
        else t = cpu[i] == gpu[i] ? 0 : fabs(cpu[i] - gpu[i]) / (2 * bound[i]);
        if (!isfinite(cpu_b[i]) || !isfinite(gpu_b[i])) b = sameOdd(cpu_b[i], gpu_b[i]) ? 0 : INFINITY;
        else b = cpu_b[i] == gpu_b[i] ? 0 : fabs(gpu_b[i] / cpu_b[i] - 1);
        if (!(t <= w->truth[id])) w->truth[id] = t;
        if (!(b <= w->bound[id])) w->bound[id] = b;
        *bad += !(t <= 1) + !(b <= 1e-6);
    }
    w->n[id] += n;
}

static void compareTwin(dkv_tensor_id id, int64_t n, const double *x, const double *y, const double *sx,
                        const double *sy, double *share, double *ratio) {
    double off = 0, a = 0, b = 0;
    (void)id;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i]) || !isfinite(sx[i])) continue;
        off += !(fabs(x[i] - y[i]) <= 0.1 * sqrt(sx[i]) || fabs(x[i] - y[i]) <= 1e-13 * fabs(x[i]));
        a += sx[i] > 0 ? log(sx[i]) : 0;
        b += sy[i] > 0 && sx[i] > 0 ? log(sy[i]) : 0;
    }
    *share = n > 0 ? off / (double)n : 0;
    *ratio = n > 0 ? (b - a) / (double)n : 0;
}

static int hostTwin(const dkv_problem *p, const dkv_layout *l, const dkv_inputs *in,
                    const dualkv_arithmetic *a, side *s, dkv_oracle *o, dkv_device_oracle *d, worst *w,
                    int *shown, dkv_err *err) {
    int64_t n[DKV_N_OUTPUTS];
    dkv_ref_options opt = {0};
    dkv_countOutputs(l, n);
    size_t e = dkv_dtypeSize(p->dtype), size_o = e * (size_t)n[DKV_O], size_l = 4 * (size_t)n[DKV_LSE];
    void *o16 = malloc(size_o + 8);
    float *lse = malloc(size_l + 8);
    double *ko = malloc(8 * (size_t)n[DKV_O] + 8), *kl = malloc(8 * (size_t)n[DKV_LSE] + 8);
    int rc = dev->alloc(&s->o, size_o + 8) || dev->alloc(&s->lse, size_l + 8) || ops->store(d, DKV_O, s->o) ||
             ops->store(d, DKV_LSE, s->lse) || dev->copyOut(o16, s->o, size_o, NULL) ||
             dev->copyOut(lse, s->lse, size_l, NULL) || ops->twin(d, s->o, s->lse);
    if (!rc) {
        dkv_decodeArray(o16, p->dtype, (size_t)n[DKV_O], ko);
        for (int64_t i = 0; i < n[DKV_LSE]; i++) kl[i] = lse[i];
        rc = dkv_oracleTwin(p, l, in, a, &opt, ko, kl, o, err);
    }
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++) {
        double share, ratio, *t = malloc(8 * (size_t)n[id] + 8), *v = malloc(8 * (size_t)n[id] + 8);
        if (n[id] > 0 && o->has_twin[id] != (ops->hasTwin(d, (dkv_tensor_id)id) != 0)) rc = 1;
        if (n[id] > 0 && o->has_twin[id] && !rc) {
            rc = ops->read(d, DKV_PART_TWIN, (dkv_tensor_id)id, t) ||
                 ops->read(d, DKV_PART_SIGMA2, (dkv_tensor_id)id, v);
            compareTwin((dkv_tensor_id)id, n[id], dkv_outputAt(&o->twin, (dkv_tensor_id)id), t,
                        dkv_outputAt(&o->sigma2, (dkv_tensor_id)id), v, &share, &ratio);
            if (share > w->twin[id]) w->twin[id] = share;
            if (fabs(ratio) > w->sigma[id]) w->sigma[id] = fabs(ratio);
            if (getenv("VERBOSE") && n[id] > 200 && (share > 0.01 || fabs(ratio) > 0.1))
                printf("      twin of %s [%lld]: %.3g off, ln ratio %.3g\n",
                       dkv_tensorName((dkv_tensor_id)id), (long long)n[id], share, ratio),
                    *shown = 1;
        }
        free(t);
        free(v);
    }
    free(o16);
    free(lse);
    free(ko);
    free(kl);
    return rc;
}

static int oneCase(const char *line, int profile, const dkv_oracle_settings *set, worst *w, int *bad,
                   int with_twin) {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    dkv_oracle o = {0}, exact = {0};
    dkv_err err = {0};
    dualkv_arithmetic a;
    dkv_ref_options opt = {.exact_products = true};
    dkv_device_oracle *d = NULL;
    int64_t n[DKV_N_OUTPUTS];
    int before = *bad, shown = 0;
    if (dkv_parseProblem(line, dkv_knownFill, &p, &err)) return 0;
    const char *name = dkv_arithmeticProfile(profile, &p, &a, NULL);
    if (!name) {
        dkv_freeProblem(&p);
        return 0;
    }
    a.key_tile = 64;
    int rc = dkv_makeLayout(&p, &l, &err) || dkv_allocInputs(&l, &in, &err) ||
             dkv_fillInputs(&p, &l, dkv_dataDir(), &in, &err) || dkv_allocOracle(&l, &o, &err) ||
             dkv_allocOracle(&l, &exact, &err) || fp64Bound(&p, &l, &in, &exact, &err) ||
             dkv_oracleBound(&p, &l, &in, &a, &opt, &o, &err);
    side s = makeSide(&p, &l, &in);
    if (!rc) rc = ops->open(&p, &l, &s.in, &a, set, &d) || ops->bound(d);
    dkv_countOutputs(&l, n);
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++) {
        double *t = malloc(8 * (size_t)n[id] + 8), *b = malloc(8 * (size_t)n[id] + 8);
        int was = *bad;
        if (n[id] > 0) {
            rc = ops->read(d, DKV_PART_TRUTH, (dkv_tensor_id)id, t) ||
                 ops->read(d, DKV_PART_BOUND, (dkv_tensor_id)id, b);
            worst one = {0};
            compare((dkv_tensor_id)id, n[id], dkv_outputAt(&o.truth, (dkv_tensor_id)id), t,
                    dkv_outputAt(&exact.bound, (dkv_tensor_id)id), dkv_outputAt(&o.bound, (dkv_tensor_id)id),
                    b, &one, bad);
            if (*bad > was)
                printf("    %s: %d off, truth %.3g, bound %.3g\n", dkv_tensorName((dkv_tensor_id)id),
                       *bad - was, one.truth[id], one.bound[id]);
            if (!(one.truth[id] <= w->truth[id])) w->truth[id] = one.truth[id];
            if (!(one.bound[id] <= w->bound[id])) w->bound[id] = one.bound[id];
            w->n[id] += n[id];
        }
        free(t);
        free(b);
    }
    if (!rc && with_twin) rc = hostTwin(&p, &l, &in, &a, &s, &o, d, w, &shown, &err);
    if (rc || shown || *bad > before)
        printf("  ^ %s [%s] %s %s\n", line, name, err.text, rc ? ops->error() : "");
    ops->close(d);
    freeSide(&s);
    dkv_freeOracle(&o);
    dkv_freeOracle(&exact);
    dkv_freeInputs(&in);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
    return rc ? -1 : 1;
}

/* Time of every stage of a large problem, the truth itself as the kernel. */
static int timeCase(const char *line, const dkv_oracle_settings *set, int with_twin, FILE *json) {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    dkv_err err = {0};
    dualkv_arithmetic a;
    dkv_device_oracle *d = NULL;
    double s0, f0, s1, f1, s2 = 0, f2 = 0, start;
    int64_t n[DKV_N_OUTPUTS], bad = 0;
    if (dkv_parseProblem(line, dkv_knownFill, &p, &err)) return fprintf(stderr, "%s\n", err.text), 1;
    for (int i = 0; dkv_arithmeticProfile(i, &p, &a, NULL); i++)
        if (p.dtype != DUALKV_FP32 && !strcmp(dkv_arithmeticProfile(i, &p, &a, NULL), "flash")) break;
    a.key_tile = 64;
    start = now();
    if (dkv_makeLayout(&p, &l, &err) || dkv_allocInputs(&l, &in, &err) ||
        dkv_fillInputs(&p, &l, dkv_dataDir(), &in, &err))
        return fprintf(stderr, "%s\n", err.text), 1;
    printf("filled in %.1f s\n", now() - start);
    side s = makeSide(&p, &l, &in);
    dkv_countOutputs(&l, n);
    start = now();
    int rc = ops->open(&p, &l, &s.in, &a, set, &d);
    printf("opened in %.2f s\n", now() - start);
    fflush(stdout);
    if (!rc)
        rc = ops->cost(d, &s0, &f0) || ops->truth(d) || ops->cost(d, &s0, &f0) || ops->bound(d) ||
             ops->cost(d, &s1, &f1);
    if (rc) return fprintf(stderr, "%s\n", ops->error()), 1;
    printf("truth alone      %7.2f s  %6.1f TFLOP/s\n", s0, f0 / s0 / 1e12);
    printf("truth and bound  %7.2f s  %6.1f TFLOP/s\n", s1 - s0, (f1 - f0) / (s1 - s0) / 1e12);
    fflush(stdout);
    size_t e = dkv_dtypeSize(p.dtype);
    rc = dev->alloc(&s.o, e * (size_t)n[DKV_O]) || dev->alloc(&s.lse, 4 * (size_t)n[DKV_LSE]) ||
         ops->store(d, DKV_O, s.o) || ops->store(d, DKV_LSE, s.lse);
    if (!rc && with_twin) {
        rc = ops->twin(d, s.o, s.lse) || ops->cost(d, &s2, &f2);
        if (!rc) printf("twin             %7.2f s  %6.1f TFLOP/s\n", s2 - s1, (f2 - f1) / (s2 - s1) / 1e12);
    }
    start = now();
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++) {
        if (n[id] == 0) continue;
        void *got;
        int64_t v = ops->vectors(d, (dkv_tensor_id)id), used = 0;
        dkv_bound_vector *b = malloc(sizeof *b * (size_t)v);
        dkv_twin_vector *t = malloc(sizeof *t * (size_t)v);
        double top = 0, square = 0;
        rc = dev->alloc(&got, 8 * (size_t)n[id]) || ops->store(d, (dkv_tensor_id)id, got) ||
             ops->boundVectors(d, (dkv_tensor_id)id, got, b) ||
             (with_twin && ops->twinVectors(d, (dkv_tensor_id)id, got, 100, t));
        for (int64_t i = 0; i < v && !rc; i++) {
            bad += b[i].bad;
            top = b[i].ratio > top ? b[i].ratio : top;
            if (with_twin && t[i].used) square += t[i].square, used++;
        }
        dev->release(got);
        printf("%-5s rounded truth: err/bound %.3f, rms z %.3f, %lld elements\n",
               dkv_tensorName((dkv_tensor_id)id), top, used ? sqrt(square / (double)used) : 0,
               (long long)n[id]);
        free(b);
        free(t);
    }
    printf("reductions in %.2f s (host and device); %lld elements outside\n", now() - start, (long long)bad);
    if (json)
        fprintf(json,
                "\"line\":\"%s\",\"truth_s\":%.3f,\"truth_bound_s\":%.3f,\"twin_s\":%.3f,\"flops\":%.4g",
                line, s0, s1 - s0, s2 - s1, f2 > 0 ? f2 - f0 : f1 - f0);
    if (rc) fprintf(stderr, "%s\n", ops->error());
    ops->close(d);
    freeSide(&s);
    dkv_freeInputs(&in);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
    return rc;
}

int main(int argc, char **argv) {
    dkv_suite suite;
    dkv_err err = {0};
    worst w = {0};
    int bad = 0, cases = 0, failed = 0, twin = getenv("NO_TWIN") == NULL;
    dkv_oracle_settings set = {0};
    if (argc < 4) return fprintf(stderr, "usage: test_oracle LIBRARY SUITE JSON [LINE [ROWS KEYS]]\n"), 2;
    void *lib = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!lib) return fprintf(stderr, "%s\n", dlerror()), 2;
    dkv_oracle_ops_fn f;
    const dkv_device_ops *(*g)(void);
    *(void **)&f = dlsym(lib, DKV_ORACLE_SYMBOL);
    *(void **)&g = dlsym(lib, DKV_DEVICE_SYMBOL);
    if (!f || !g) return fprintf(stderr, "%s lacks %s\n", argv[1], DKV_ORACLE_SYMBOL), 2;
    ops = f();
    dev = g();
    int devices = 0;
    if (dev->count(&devices) || devices == 0 || dev->select(0)) return fprintf(stderr, "no device\n"), 3;
    FILE *json = fopen(argv[3], "w");
    if (dkv_loadSuite(argv[2], &suite, &err)) return fprintf(stderr, "%s\n", err.text), 2;
    const char *only = getenv("PROFILE");
    if (getenv("ROWS")) set.rows = atoll(getenv("ROWS"));
    if (getenv("KEYS")) set.keys = atoll(getenv("KEYS"));
    double start = now();
    for (int i = 0; i < suite.n; i++)
        for (int k = only ? atoi(only) : 0; k < (only ? atoi(only) + 1 : 8); k++) {
            int rc = oneCase(suite.lines[i], k, &set, &w, &bad, twin);
            cases += rc != 0;
            failed += rc < 0;
            fflush(stdout);
        }
    printf("%d cases, %d failed, %d elements off, %.1f s\n", cases, failed, bad, now() - start);
    printf("tensor  elements  |truth diff|/(2 fp64 bound)  |bound ratio - 1|  twin off by > 0.1 sigma  |mean "
           "ln sigma2 ratio|\n");
    if (json)
        fprintf(json, "{\"suite\":\"%s\",\"cases\":%d,\"failed\":%d,\"off\":%d,\"tensors\":{", argv[2], cases,
                failed, bad);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        printf("%-6s %9lld  %-26.4g  %-17.4g  %-23.4g  %.4g\n", dkv_tensorName((dkv_tensor_id)id),
               (long long)w.n[id], w.truth[id], w.bound[id], w.twin[id], w.sigma[id]);
        if (json)
            fprintf(json, "%s\"%s\":{\"n\":%lld,\"truth\":%.4g,\"bound\":%.4g,\"twin\":%.4g,\"sigma\":%.4g}",
                    id ? "," : "", dkv_tensorName((dkv_tensor_id)id), (long long)w.n[id],
                    isfinite(w.truth[id]) ? w.truth[id] : 1e300, isfinite(w.bound[id]) ? w.bound[id] : 1e300,
                    w.twin[id], w.sigma[id]);
    }
    if (json) fprintf(json, "}");
    int rc = 0;
    if (argc > 4) {
        if (argc > 6) set.rows = atoll(argv[5]), set.keys = atoll(argv[6]);
        if (json) fprintf(json, ",");
        rc = timeCase(argv[4], &set, twin, json);
    }
    if (json) fprintf(json, "}\n"), fclose(json);
    dkv_freeSuite(&suite);
    return rc || failed || bad;
}
