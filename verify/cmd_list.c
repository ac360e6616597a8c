#include <cblas.h>
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/emu.h"
#include "../ref/problem.h"
#include "case.h"
#include "cli.h"
#include "pyhost.h"
#include "version.h"
#include "worker.h"

/* Each lists its i-th row; NULL past the end. */
static const char *nthKernel(int i, const char **help) { return dkv_listKernel(i, help); }

static const char *nthCheck(int i, const char **help) {
    const dkv_check *c = dkv_listCheck(i);
    if (c) *help = c->doc;
    return c ? c->name : NULL;
}

static const char *nthFault(int i, const char **help) {
    static char text[256];
    const dkv_fault *f = dkv_listFault(i);
    if (!f) return NULL;
    snprintf(text, sizeof text, "%s%s (%s)", f->control ? "control, must pass: " : "", f->doc, f->kind);
    *help = text;
    return f->id;
}

static const char *nthSuite(int i, const char **help) {
    static char name[64], text[200];
    if (!dkv_listSuite(i, name, text)) return NULL;
    *help = text;
    return name;
}

static const char *nthStatus(int i, const char **help) {
    static char text[160];
    if (i >= DKV_ST_N) return NULL;
    const dkv_status_row *s = dkv_statusRow((dkv_status)i);
    if (i == DKV_ST_UNSUPPORTED) snprintf(text, sizeof text, "counted; %s", s->doc);
    else snprintf(text, sizeof text, "exit %d; %s", s->exit, s->doc);
    *help = text;
    return s->name;
}

static const char *nthConvention(int i, const char **help) {
    static dkv_convention c;
    if (!dkv_listConvention(i, &c)) return NULL;
    *help = c.doc;
    return c.name;
}

/* Every profile that some dtype knows, once (fp16 has those of bf16). */
static const char *nthArithmetic(int i, const char **help) {
    static const dkv_problem low = {.dtype = DUALKV_BF16}, full = {.dtype = DUALKV_FP32};
    dualkv_arithmetic a;
    const char *name, *other;
    int n = 0;
    if (i == 0) return *help = "the tightest of these that explains a kernel, with its key tile and order", "auto";
    for (int k = 0; (name = dkv_arithmeticProfile(k, &full, &a, help)); k++)
        if (++n == i) return name;
    for (int k = 0; (name = dkv_arithmeticProfile(k, &low, &a, help)); k++) {
        for (int j = 0; (other = dkv_arithmeticProfile(j, &full, &a, NULL)) && strcmp(other, name) != 0;) j++;
        if (!other && ++n == i) return name;
    }
    return NULL;
}

static const struct {
    const char *what;
    const char *(*nth)(int i, const char **help);
} lists[] = {{"kernels", nthKernel}, {"masks", dkv_listMask}, {"fills", dkv_listFill},
             {"checks", nthCheck},   {"faults", nthFault},    {"suites", nthSuite},
             {"keys", dkv_listKey},  {"statuses", nthStatus}, {"conventions", nthConvention},
             {"arithmetics", nthArithmetic}};
#define LIST_NAMES "kernels, masks, fills, checks, faults, suites, keys, statuses, conventions, arithmetics, device"
enum { N_LISTS = sizeof lists / sizeof lists[0] };

/* One unit and type of the probe (cuda/probe.cu): the loss per step where its chain was longest. */
static void sayUnit(const char *unit, const cJSON *type) {
    const cJSON *bits = cJSON_GetObjectItem(type, "aligned_bits");
    const cJSON *cut = cJSON_GetObjectItem(type, "toward_zero"), *chain = cJSON_GetObjectItem(type, "chain");
    const cJSON *last = cJSON_GetArrayItem(chain, cJSON_GetArraySize(chain) - 1);
    const cJSON *gain = cJSON_GetObjectItem(last, "gain_u"), *steps = cJSON_GetObjectItem(last, "n");
    if (!cJSON_IsNumber(bits) || !cJSON_IsNumber(gain) || !cJSON_IsNumber(steps)) return;
    printf("%-18s %s: products below 2^-%d of the largest are cut, sums %s, gain %.3g 2^-24 a step over %d "
           "steps\n",
           unit, type->string, bits->valueint, cJSON_IsTrue(cut) ? "toward zero" : "to nearest",
           gain->valuedouble, steps->valueint);
}

/* The device and what its matrix unit keeps, asked of a worker. */
static int listDevice(void) {
    dkv_kernel_spec spec;
    dkv_worker w;
    dkv_err err = {0};
    char text[8192];
    if (dkv_parseKernelSpec("cuda", &spec, &err)) {
        err.code = DKV_EHARNESS;
        return dkv_complain(&err);
    }
    dkv_initWorker(&w, &spec, 120);
    dkv_outcome o = dkv_startWorker(&w);
    if (o == DKV_W_OK && w.gpu.name[0]) o = dkv_probeDevice(&w, text, sizeof text);
    if (o != DKV_W_OK || !w.gpu.name[0]) {
        dkv_fail(&err, DKV_EHARNESS, "%.450s", o == DKV_W_OK ? "there is no CUDA device" : w.why);
        dkv_stopWorker(&w);
        return dkv_complain(&err);
    }
    printf("%-18s %s\n%-18s %s\n%-18s %s\n%-18s %d\n%-18s %.1f GiB\n", "device", w.gpu.name, "capability",
           w.gpu.capability, "driver", w.gpu.driver, "multiprocessors", w.gpu.sms, "memory",
           (double)w.gpu.memory / 1073741824);
    dkv_stopWorker(&w);
    cJSON *probe = cJSON_Parse(text);
    for (const cJSON *unit = probe ? probe->child : NULL; unit; unit = unit->next)
        for (const cJSON *type = unit->child; type; type = type->next) sayUnit(unit->string, type);
    cJSON_Delete(probe);
    printf("%-18s %s\n", "probe", text);
    return 0;
}

int dkv_cmdList(const dkv_cli *cli) {
    const char *names[N_LISTS + 1];
    dkv_err err;
    for (int k = 0; k < N_LISTS; k++) names[k] = lists[k].what;
    names[N_LISTS] = "device";
    if (cli->n_words != 1) {
        dkv_fail(&err, DKV_EUSER, "list: one of " LIST_NAMES);
        return dkv_complain(&err);
    }
    if (strcmp(cli->words[0], "device") == 0) return listDevice();
    for (int k = 0; k < N_LISTS; k++) {
        const char *help = "", *name;
        if (strcmp(lists[k].what, cli->words[0]) != 0) continue;
        int i = 0;
        for (; (name = lists[k].nth(i, &help)); i++) printf("%-18s %s\n", name, help ? help : "");
        if (i) return 0;
        dkv_fail(&err, DKV_EUSER, "list: no %s in '%.300s' (DUALKV_DATA names another folder)", lists[k].what,
                 dkv_dataDir());
        return dkv_complain(&err);
    }
    const char *near = dkv_nearestWord(cli->words[0], names, N_LISTS + 1);
    dkv_fail(&err, DKV_EUSER, "list: unknown list '%s'%s%s%s", cli->words[0],
             near ? ": did you mean '" : ": one of " LIST_NAMES, near ? near : "", near ? "'?" : "");
    return dkv_complain(&err);
}

int dkv_cmdVersion(const dkv_cli *cli) {
    dkv_err err;
    if (cli->n_words) {
        dkv_fail(&err, DKV_EUSER, "version takes no words ('%s')", cli->words[0]);
        return dkv_complain(&err);
    }
    printf("dualkv %s, commit %s\ncompiler %s\nblas %s\nabi %u, input generator %s\ndevice %s, %d "
           "cores\ndata %s\n",
           dkv_version(), dkv_commit(), dkv_compiler(), openblas_get_config(), DUALKV_ABI, DKV_GENERATOR,
           dkv_hostDevice(), dkv_hostCores(), dkv_dataDir());
    return 0;
}
