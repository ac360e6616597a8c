/* fake_oracle.c: the oracle of ref/device_oracle.h on the device that is host memory (fake_cuda.c): the CPU's own,
 * so that the way to a process that holds the oracle and back can be tested without a device.
 *
 * Environment: DUALKV_FAKE_ORACLE: crash, hang, error (words), huge (needs more memory than there is), off (truth, and
 * with it everything, is 1 per cent too large), old (a table of an older plugin), exact (magnitudes in fp64, as on
 * a device). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../ref/device_oracle.h"
#include "../../ref/dtype.h"

struct dkv_device_oracle {
    const dkv_problem *p;
    const dkv_layout *l;
    dkv_inputs in;
    dualkv_arithmetic a;
    dkv_oracle o;
    const void *stored_lse;
};

static char text[300];

static bool is(const char *how) {
    const char *word = getenv("DUALKV_FAKE_ORACLE");
    return word && strcmp(word, how) == 0;
}

static const char *error(void) { return text; }

static int fail(const dkv_err *err) {
    snprintf(text, sizeof text, "%.290s", err->text);
    return 1;
}

static int64_t bytes(const dkv_problem *p, const dkv_layout *l) {
    (void)p;
    (void)l;
    return is("huge") ? (int64_t)1 << 50 : 1;
}

/* The device is host memory: its pointers are as good as any. */
static int open_(const dkv_problem *p, const dkv_layout *l, const dkv_device_inputs *in, const dualkv_arithmetic *a,
                 const dkv_oracle_settings *settings, dkv_device_oracle **out) {
    dkv_err err = {0};
    (void)settings;
    dkv_device_oracle *o = *out = calloc(1, sizeof *o);
    if (!o) return 1;
    o->p = p;
    o->l = l;
    o->a = *a;
    o->in = (dkv_inputs){(void *)in->q, (void *)in->k, (void *)in->v, (void *)in->d_o, (float *)in->d_lse, (float *)in->sink};
    return dkv_allocOracle(l, &o->o, &err) ? fail(&err) : 0;
}

static void close_(dkv_device_oracle *o) {
    if (o) dkv_freeOracle(&o->o);
    free(o);
}

static int bound(dkv_device_oracle *o) {
    const dkv_ref_options opt = {.threads = 1, .exact_products = is("exact")};
    dkv_err err = {0};
    int64_t n[DKV_N_OUTPUTS];
    if (is("crash")) abort();
    while (is("hang")) pause();
    if (is("error")) return snprintf(text, sizeof text, "fake_oracle.c: the product failed");
    if (dkv_oracleBound(o->p, o->l, &o->in, &o->a, &opt, &o->o, &err)) return fail(&err);
    dkv_countOutputs(o->l, n);
    for (int id = 0; id < DKV_N_OUTPUTS && is("off"); id++)
        for (int64_t i = 0; i < n[id]; i++) dkv_outputAt(&o->o.truth, (dkv_tensor_id)id)[i] *= 1.01;
    return 0;
}

static int twin(dkv_device_oracle *o, const void *kernel_o, const float *kernel_lse) {
    const dkv_ref_options opt = {.threads = 1, .exact_products = is("exact"), .lse_stands_in = kernel_lse == o->stored_lse};
    dkv_err err = {0};
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(o->l, n);
    double *x = calloc((size_t)n[DKV_O] + 1, sizeof *x), *y = calloc((size_t)n[DKV_LSE] + 1, sizeof *y);
    int rc = 1;
    if (x && y) {
        dkv_decodeArray(kernel_o, o->p->dtype, (size_t)n[DKV_O], x);
        dkv_decodeArray(kernel_lse, DUALKV_FP32, (size_t)n[DKV_LSE], y);
        if (opt.lse_stands_in) memcpy(y, o->o.truth.lse, sizeof *y * (size_t)n[DKV_LSE]);
        rc = dkv_oracleTwin(o->p, o->l, &o->in, &o->a, &opt, x, y, &o->o, &err);
    }
    if (rc) fail(&err);
    free(x);
    free(y);
    return rc;
}

static int hasTwin(const dkv_device_oracle *o, dkv_tensor_id id) { return o->o.has_twin[id]; }

static int read_(dkv_device_oracle *o, dkv_oracle_part part, dkv_tensor_id id, double *host) {
    const dkv_outputs *const parts[DKV_N_PARTS] = {&o->o.truth, &o->o.bound, &o->o.twin, &o->o.sigma2};
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(o->l, n);
    memcpy(host, dkv_outputAt(parts[part], id), (size_t)n[id] * sizeof *host);
    return 0;
}

static int store(dkv_device_oracle *o, dkv_tensor_id id, void *device) {
    int64_t n[DKV_N_OUTPUTS];
    dkv_countOutputs(o->l, n);
    dkv_encodeArray(dkv_outputAt(&o->o.truth, id), id == DKV_LSE ? DUALKV_FP32 : o->p->dtype, (size_t)n[id], device);
    if (id == DKV_LSE) o->stored_lse = device;
    return 0;
}

static int cost(dkv_device_oracle *o, double *seconds, double *flops) {
    (void)o;
    *seconds = 0.5;
    *flops = 1e9;
    return 0;
}

static int alikeRows(dkv_device_oracle *o, dkv_alike *out) {
    *out = o->o.alike;
    return 0;
}

const dkv_oracle_ops *dkv_oracleOps(void);
const dkv_oracle_ops *dkv_oracleOps(void) {
    static dkv_oracle_ops ops = {.error = error,
                                 .bytes = bytes,
                                 .open = open_,
                                 .close = close_,
                                 .truth = bound,
                                 .bound = bound,
                                 .twin = twin,
                                 .hasTwin = hasTwin,
                                 .read = read_,
                                 .store = store,
                                 .cost = cost,
                                 .alikeRows = alikeRows};
    ops.size = is("old") ? 8 : sizeof ops;
    return &ops;
}
