#include "bisect_cache.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/fields.h"
#include "../ref/row.h"
#include "accepted.h"

static const char *const build_names[DKV_BUILD_N] = {"built", "did not build", "the build hung", "no kernel came out",
                                                     "cannot be loaded"};

const char *dkv_buildName(dkv_build_state s) { return build_names[s]; }

/* ---- rows ---- */

static void addCase(cJSON *o, const dkv_bisect_row *row) {
    cJSON_AddStringToObject(o, "line", row->line);
    cJSON_AddNumberToObject(o, "run", row->run);
    cJSON_AddStringToObject(o, "status", dkv_statusRow(row->status)->name);
    dkv_addNumber(o, "seconds_forward", row->forward);
    dkv_addNumber(o, "seconds_backward", row->backward);
    if (!row->judged) return;
    cJSON *tensors = cJSON_AddObjectToObject(o, "tensors");
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const dkv_bisect_stat *s = &row->tensor[id];
        if (!s->there) continue;
        cJSON *t = cJSON_AddObjectToObject(tensors, dkv_tensorName((dkv_tensor_id)id));
        dkv_addNumber(t, "max_bound_ratio", s->ratio);
        if (!s->twin) continue;
        dkv_addNumber(t, "twin_rms", s->rms);
        dkv_addNumber(t, "twin_mean", s->mean);
        dkv_addNumber(t, "twin_gain", s->gain);
        dkv_addNumber(t, "rms_dof", s->dof);
    }
    dkv_addArithmetic(o, "arithmetic_numbers", &row->arithmetic);
    cJSON_AddBoolToObject(o, "declared", row->declared);
    if (row->partial) cJSON_AddTrueToObject(o, "partial");
    if (row->profile[0]) cJSON_AddStringToObject(o, "profile", row->profile);
}

char *dkv_printBisectRow(const dkv_bisect_row *row) {
    cJSON *o = cJSON_CreateObject();
    if (!o) return NULL;
    cJSON_AddStringToObject(o, "key", row->key);
    cJSON_AddStringToObject(o, "tree", row->tree);
    if (row->line[0]) addCase(o, row);
    else cJSON_AddStringToObject(o, "build", build_names[row->build]);
    cJSON_AddStringToObject(o, "why", row->why);
    char *text = cJSON_PrintUnformatted(o);
    cJSON_Delete(o);
    return text;
}

static bool isObject(const cJSON *o, const char *key) {
    return cJSON_IsObject(cJSON_GetObjectItemCaseSensitive(o, key));
}

static void readCase(const cJSON *o, dkv_bisect_row *row) {
    const cJSON *tensors = cJSON_GetObjectItemCaseSensitive(o, "tensors");
    row->forward = dkv_numberOf(o, "seconds_forward", 0);
    row->backward = dkv_numberOf(o, "seconds_backward", 0);
    row->judged = cJSON_IsObject(tensors);
    row->declared = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "declared"));
    row->partial = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "partial"));
    snprintf(row->profile, sizeof row->profile, "%s", dkv_textOf(o, "profile"));
    for (int id = 0; id < DKV_N_OUTPUTS && row->judged; id++) {
        const cJSON *t = cJSON_GetObjectItemCaseSensitive(tensors, dkv_tensorName((dkv_tensor_id)id));
        dkv_bisect_stat *s = &row->tensor[id];
        s->there = cJSON_IsObject(t);
        s->ratio = dkv_numberOf(t, "max_bound_ratio", NAN);
        s->rms = dkv_numberOf(t, "twin_rms", NAN);
        s->twin = s->there && cJSON_GetObjectItemCaseSensitive(t, "twin_rms");
        s->mean = dkv_numberOf(t, "twin_mean", NAN);
        s->gain = dkv_numberOf(t, "twin_gain", NAN);
        s->dof = dkv_numberOf(t, "rms_dof", NAN);
    }
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(o, "arithmetic_numbers");
    row->arithmetic.size = sizeof row->arithmetic;
    row->arithmetic.declared = row->declared;
    double x;
#define TAKE(field, looser)                                                                                            \
    x = dkv_numberOf(a, #field, 0);                                                                                    \
    if (x >= -1 && x <= 1e9) row->arithmetic.field = (__typeof__(row->arithmetic.field))x;
    DKV_ARITHMETIC_FIELDS(TAKE)
#undef TAKE
}

bool dkv_findCached(const dkv_bisect_cache *c, const char *key, dkv_bisect_row *row) {
    const char *json = NULL;
    for (long i = c->n; i-- > 0 && !json;)
        if (strcmp(c->rows[i].key, key) == 0) json = c->rows[i].json;
    cJSON *o = json ? cJSON_Parse(json) : NULL;
    if (!o) return false;
    memset(row, 0, sizeof *row);
    row->line = "";
    snprintf(row->key, sizeof row->key, "%s", key);
    snprintf(row->tree, sizeof row->tree, "%s", dkv_textOf(o, "tree"));
    snprintf(row->why, sizeof row->why, "%s", dkv_textOf(o, "why"));
    const char *build = dkv_textOf(o, "build");
    bool sound = true;
    if (build[0]) {
        while (row->build < DKV_BUILD_N && strcmp(build_names[row->build], build)) row->build++;
        sound = row->build < DKV_BUILD_N;
    } else {
        row->status = dkv_findStatus(dkv_textOf(o, "status"));
        sound = row->status < DKV_ST_N;
        if (sound) readCase(o, row);
    }
    cJSON_Delete(o);
    return sound;
}

void dkv_takeResult(const dkv_result *r, dkv_bisect_row *row) {
    row->status = r->status;
    row->judged = r->judged;
    row->declared = r->declared;
    row->partial = r->absent != 0;
    row->forward = r->seconds_forward;
    row->backward = r->seconds_backward;
    row->arithmetic = r->arithmetic;
    snprintf(row->why, sizeof row->why, "%s", r->why);
    snprintf(row->profile, sizeof row->profile, "%s", r->profile);
    for (int id = 0; id < DKV_N_OUTPUTS && r->judged; id++) {
        const dkv_judgement *j = &r->tensor[id];
        row->tensor[id] = (dkv_bisect_stat){.there = j->present && j->all.total > 0, .twin = j->twin,
                                            .ratio = j->all.max_ratio, .rms = j->all.rms_z, .mean = j->all.mean_z,
                                            .gain = j->all.gain, .dof = j->all.rms_dof};
    }
}

/* ---- the file ---- */

static int keep(dkv_bisect_cache *c, const char *key, char *json, dkv_err *err) {
    if (c->n == c->room) {
        long room = c->room * 2 + 64;
        void *more = realloc(c->rows, (size_t)room * sizeof *c->rows);
        if (!more) {
            free(json);
            return dkv_fail(err, DKV_EHARNESS, "out of memory for cached results");
        }
        c->rows = more;
        c->room = room;
    }
    snprintf(c->rows[c->n].key, sizeof c->rows[c->n].key, "%s", key);
    c->rows[c->n++].json = json;
    return 0;
}

static int readLine(dkv_bisect_cache *c, const char *text, dkv_err *err) {
    cJSON *o = cJSON_Parse(text);
    const char *key = dkv_textOf(o, "key");
    bool sound = strlen(key) == 64 && (dkv_textOf(o, "build")[0] || dkv_textOf(o, "status")[0]) &&
                 (!dkv_textOf(o, "status")[0] || !isObject(o, "tensors") || isObject(o, "arithmetic_numbers"));
    char *copy = sound ? strdup(text) : NULL;
    int rc = 0;
    if (copy) rc = keep(c, key, copy, err);
    else c->skipped++;
    cJSON_Delete(o);
    return rc;
}

static int readAll(dkv_bisect_cache *c, FILE *f, dkv_err *err) {
    char *row = NULL;
    size_t room = 0, n = 1;
    int rc = 0, last = '\n';
    while (!rc && n) {
        rc = dkv_readRow(f, &row, &room, &n, err);
        if (rc || !n) break;
        last = row[n - 1];
        if (last != '\n') break; /* cut off while it was written */
        if (row[strspn(row, " \t\r\n")]) rc = readLine(c, row, err);
    }
    c->cut = !rc && last != '\n';
    free(row);
    return rc;
}

int dkv_openCache(const char *path, dkv_bisect_cache *c, dkv_err *err) {
    dkv_err why = {0};
    struct stat s;
    memset(c, 0, sizeof *c);
    if (!path) return 0;
    c->path = strdup(path);
    if (!c->path) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    if (stat(path, &s) == 0 && !S_ISREG(s.st_mode)) return dkv_fail(err, DKV_EUSER, "--cache: '%s' is not a file", path);
    c->f = fopen(path, "a+e");
    if (!c->f) return dkv_fail(err, DKV_EUSER, "--cache: cannot write '%s': %s", path, strerror(errno));
    rewind(c->f);
    int rc = readAll(c, c->f, &why);
    if (!rc && ferror(c->f)) rc = dkv_fail(&why, DKV_EUSER, "%s", strerror(errno));
    if (!rc && c->n == 0 && c->skipped > 0) rc = dkv_fail(&why, DKV_EUSER, "none of its lines is a row of a cache");
    if (rc) return dkv_fail(err, DKV_EUSER, "--cache: '%s': %.300s", path, why.text);
    return 0;
}

void dkv_closeCache(dkv_bisect_cache *c) {
    if (c->f) fclose(c->f);
    for (long i = 0; i < c->n; i++) free(c->rows[i].json);
    free(c->rows);
    free(c->path);
    memset(c, 0, sizeof *c);
}

int dkv_addCached(dkv_bisect_cache *c, const dkv_bisect_row *row, dkv_err *err) {
    char *json = dkv_printBisectRow(row);
    if (!json) return dkv_fail(err, DKV_EHARNESS, "out of memory for a cached result");
    if (c->f) {
        if (fprintf(c->f, "%s%s\n", c->cut ? "\n" : "", json) < 0 || fflush(c->f) != 0) {
            free(json);
            return dkv_fail(err, DKV_EHARNESS, "--cache: cannot write '%s': %s", c->path, strerror(errno));
        }
        c->cut = false;
    }
    return keep(c, row->key, json, err);
}
