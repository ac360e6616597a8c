/* One record as a row: which fields become which columns. */
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../data/fields.h"
#include "../ref/problem.h"
#include "history.h"

/* Column and field. */
static const struct {
    const char *name, *field;
} texts[DKV_HT_N] = {{"kind", NULL},           {"line", "line"},
                     {"kernel", "kernel"},     {"kernel_sha256", "kernel_sha256"},
                     {"status", "status"},     {"why", "why"},
                     {"time", "started"},      {"commit", "commit"},
                     {"device", "device"},     {"driver", "driver"},
                     {"generator", "generator"}, {"oracle", "oracle"},
                     {"arithmetic", "arithmetic"}, {"profile", "profile"},
                     {"replay", "replay"}};

static const char *const whole[DKV_HN_TENSORS] = {"seconds", "ms_fwd", "ms_bwd", "tflops_fwd", "tflops_bwd"};
static const struct {
    const char *name, *field, *region;
} each[DKV_HN_EACH] = {{"ratio", "max_bound_ratio", NULL},
                       {"ratio_prompt", "max_bound_ratio", "prompt"},
                       {"ratio_response", "max_bound_ratio", "response"},
                       {"rms", "twin_rms", NULL},
                       {"gain", "twin_gain", NULL},
                       {"mean", "twin_mean", NULL},
                       {"bad", "bad", NULL}};

const char *dkv_historyText(int i) { return i >= 0 && i < DKV_HT_N ? texts[i].name : NULL; }

const char *dkv_historyNumber(int i) {
    static char names[DKV_N_OUTPUTS][DKV_HN_EACH][32];
    if (i < 0 || i >= DKV_HN_N) return NULL;
    if (i < DKV_HN_TENSORS) return whole[i];
    int id = (i - DKV_HN_TENSORS) / DKV_HN_EACH, k = (i - DKV_HN_TENSORS) % DKV_HN_EACH;
    snprintf(names[id][k], sizeof names[id][k], "%s_%s", each[k].name, dkv_tensorName((dkv_tensor_id)id));
    return names[id][k];
}

_Static_assert(DKV_HN_N <= 64, "there: a bit a number");

int dkv_findNumber(const char *name) {
    for (int i = 0; i < DKV_HN_N; i++)
        if (strcmp(dkv_historyNumber(i), name) == 0) return i;
    return -1;
}

static void takeNumber(dkv_history_row *row, int i, const cJSON *o, const char *field) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, field);
    if (!cJSON_IsNumber(x) && !cJSON_IsString(x)) return;
    row->x[i] = dkv_numberOf(o, field, NAN) + 0.0; /* one zero, not two */
    row->there |= UINT64_C(1) << i;
}

int dkv_parseRow(const char *json, dkv_history_row *row, cJSON **keep) {
    cJSON *o = *keep = cJSON_ParseWithOpts(json, NULL, true);
    const cJSON *tensors = cJSON_GetObjectItemCaseSensitive(o, "tensors");
    dkv_problem p = {0};
    dkv_err err = {0};
    bool check = dkv_findStatus(dkv_textOf(o, "status")) < DKV_ST_N;
    row->there = 0;
    if (!cJSON_IsObject(o)) return 0;
    if (cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(o, "clean_cases")) ||
        cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(o, "accepted")) ||
        (dkv_textOf(o, "fault")[0] && cJSON_IsBool(cJSON_GetObjectItemCaseSensitive(o, "found"))))
        return 2;
    if (check && cJSON_HasObjectItem(o, "sum") && !cJSON_HasObjectItem(o, "kernel")) return 2; /* of an accepted file */
    if (!dkv_textOf(o, "kernel")[0] || (!check && !cJSON_HasObjectItem(o, "ms_fwd"))) return 0;
    if (dkv_parseProblem(dkv_textOf(o, "line"), NULL, &p, &err)) return 0;
    dkv_freeProblem(&p);
    for (int i = 0; i < DKV_HT_N; i++)
        row->text[i] = texts[i].field ? dkv_textOf(o, texts[i].field) : check ? "check" : "bench";
    for (int i = 0; i < DKV_HN_TENSORS; i++) takeNumber(row, i, o, whole[i]);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const cJSON *t = cJSON_GetObjectItemCaseSensitive(tensors, dkv_tensorName((dkv_tensor_id)id));
        const cJSON *regions = cJSON_GetObjectItemCaseSensitive(t, "regions");
        for (int k = 0; k < DKV_HN_EACH; k++)
            takeNumber(row, DKV_HN_TENSORS + id * DKV_HN_EACH + k,
                       each[k].region ? cJSON_GetObjectItemCaseSensitive(regions, each[k].region) : t, each[k].field);
    }
    return 1;
}

double dkv_worstOf(const dkv_history_row *row, int *tensor) {
    double worst = -1;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        int i = DKV_HN_TENSORS + id * DKV_HN_EACH + DKV_HN_RATIO;
        if (!(row->there >> i & 1)) continue;
        double x = isnan(row->x[i]) ? INFINITY : row->x[i];
        if (!(x > worst)) continue;
        worst = x;
        *tensor = id;
    }
    return worst;
}
