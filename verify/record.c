#include "record.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/fields.h"
#include "../data/fill.h"
#include "../ref/word.h"
#include "accepted.h"
#include "append.h"
#include "kernel_hash.h"
#include "version.h"

void dkv_quoteWord(const char *text, char *out, size_t n) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+=_-./:,@";
    size_t at = 0;
    if (text[0] && strspn(text, plain) == strlen(text)) {
        snprintf(out, n, "%s", text);
        return;
    }
    if (n < 8) return;
    out[at++] = '\'';
    for (; *text && at + 6 < n; text++) {
        if (*text == '\'') {
            memcpy(out + at, "'\\''", 4);
            at += 4;
        } else {
            out[at++] = *text;
        }
    }
    out[at++] = '\'';
    out[at] = 0;
}

char *dkv_spellCommand(const char *name, const char *const (*options)[2], int n_options, const char *const *words, int n_words) {
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (!f) return NULL;
    fprintf(f, "dualkv %s", name);
    for (int i = 0; i < n_options + n_words; i++) {
        const char *word = i < n_options ? options[i][1] : words[i - n_options];
        char quoted[4 * PATH_MAX];
        if (!word) continue;
        dkv_quoteWord(word, quoted, sizeof quoted);
        if (i < n_options) fprintf(f, " %s", options[i][0]);
        fprintf(f, " %s", quoted);
    }
    if (fclose(f) == 0) return text;
    free(text);
    return NULL;
}

/* Options without which a replay is another case. */
static dkv_run_options named = {.repeats = DKV_REPEATS, .timeout = DKV_TIMEOUT, .budget = DKV_BUDGET};

void dkv_nameOptions(const dkv_run_options *options) { named = *options; }

static size_t appendReal(char *out, size_t n, size_t at, const char *option, double x) {
    char text[48];
    dkv_text t = {.out = text, .n = sizeof text};
    dkv_putReal(&t, x, false);
    return dkv_append(out, n, at, " %s %s", option, text);
}

size_t dkv_appendOptions(char *out, size_t n, size_t at, bool judging) {
    if (named.arithmetic) at = dkv_append(out, n, at, " --arithmetic %s", named.arithmetic);
    if (named.repeats != DKV_REPEATS) at = dkv_append(out, n, at, " --repeats %d", named.repeats);
    if (named.timeout != DKV_TIMEOUT) at = appendReal(out, n, at, "--timeout", named.timeout);
    if (named.level > 0) at = appendReal(out, n, at, "--level", named.level);
    else if (judging && named.budget != DKV_BUDGET) at = appendReal(out, n, at, "--budget", named.budget);
    if (judging && named.oracle) at = dkv_append(out, n, at, " --oracle %s", named.oracle);
    return at;
}

static void spellCase(const char *command, const char *line, const char *kernel, bool judging, char *out, size_t n) {
    char *quoted_line = malloc(DKV_LINE_MAX + 64), *quoted_kernel = malloc(4 * DKV_SPEC_MAX);
    if (quoted_line && quoted_kernel) {
        quoted_line[0] = '\'';
        snprintf(quoted_line + 1, DKV_LINE_MAX + 60, "%s'", line); /* a canonical line has no quotes */
        dkv_quoteWord(kernel, quoted_kernel, 4 * DKV_SPEC_MAX);
        int wrote = snprintf(out, n, "dualkv %s %s --kernel %s", command, quoted_line, quoted_kernel);
        const char *dir = strstr(line, " fill=file:") ? dkv_filesDir() : NULL;
        if (dir && strncmp(kernel, DKV_FILES_PREFIX, strlen(DKV_FILES_PREFIX)) && wrote > 0 && (size_t)wrote < n) {
            dkv_quoteWord(dir, quoted_kernel, 4 * DKV_SPEC_MAX);
            snprintf(out + wrote, n - (size_t)wrote, " --files %s", quoted_kernel);
        }
    }
    dkv_appendOptions(out, n, quoted_line && quoted_kernel ? strlen(out) : n, judging);
    free(quoted_line);
    free(quoted_kernel);
}

void dkv_replayCommand(const char *line, const char *kernel, char *out, size_t n) {
    spellCase("replay", line, kernel, true, out, n);
}

void dkv_shrinkCommand(const char *line, const char *kernel, char *out, size_t n) {
    spellCase("shrink", line, kernel, false, out, n);
}

void dkv_addDevice(cJSON *o, const dkv_gpu_info *gpu) {
    cJSON_AddStringToObject(o, "device", gpu->name[0] ? gpu->name : dkv_hostDevice());
    if (!gpu->name[0]) return;
    cJSON_AddStringToObject(o, "capability", gpu->capability);
    cJSON_AddStringToObject(o, "driver", gpu->driver);
    cJSON_AddStringToObject(o, "host", dkv_hostDevice());
}

static char command[400];

void dkv_nameCommand(int argc, char **argv) {
    size_t at = 0;
    for (int i = 0; i < argc && at < sizeof command; i++) {
        char word[sizeof command];
        dkv_quoteWord(i ? argv[i] : "dualkv", word, sizeof word);
        at += (size_t)snprintf(command + at, sizeof command - at, i ? " %s" : "%s", word);
    }
    if (at >= sizeof command) strcpy(command + sizeof command - 6, " ...");
}

void dkv_addBuild(cJSON *o) {
    cJSON_AddStringToObject(o, "commit", dkv_commit());
    cJSON_AddStringToObject(o, "compiler", dkv_compiler());
    if (dkv_flags()[0]) cJSON_AddStringToObject(o, "flags", dkv_flags());
    cJSON_AddStringToObject(o, "libraries", dkv_libraries());
    cJSON_AddStringToObject(o, "started", dkv_startTime());
    if (command[0]) cJSON_AddStringToObject(o, "command", command);
}

static void addPart(cJSON *o, const dkv_part *p, bool twin) {
    dkv_addNumber(o, "max_bound_ratio", p->max_ratio);
    dkv_addNumber(o, "truth_gain", p->truth_gain);
    if (twin) {
        dkv_addNumber(o, "twin_rms", p->rms_z);
        dkv_addNumber(o, "twin_rms_limit", p->rms_limit);
        dkv_addNumber(o, "twin_gain", p->gain);
        dkv_addNumber(o, "twin_gain_limit", p->gain_limit);
        dkv_addNumber(o, "twin_mean", p->mean_z);
        dkv_addNumber(o, "rows", p->dof);
        dkv_addNumber(o, "rms_dof", p->rms_dof);
    }
    dkv_addNumber(o, "bad", (double)p->bad);
    dkv_addNumber(o, "nonfinite", (double)p->nonfinite);
    dkv_addNumber(o, "total", (double)p->total);
}

static void addWorst(cJSON *o, const dkv_where *w) {
    cJSON *worst = cJSON_AddObjectToObject(o, "worst");
    dkv_addNumber(worst, "group", (double)w->group);
    dkv_addNumber(worst, "segment", (double)w->segment);
    dkv_addNumber(worst, "row", (double)w->row);
    dkv_addNumber(worst, "head", (double)w->head);
    dkv_addNumber(worst, "dim", (double)w->dim);
    dkv_addNumber(worst, "got", w->got);
    dkv_addNumber(worst, "want", w->want);
    dkv_addNumber(worst, "bound", w->bound);
    cJSON_AddStringToObject(worst, "region", dkv_regionName(w->region));
    dkv_addNumber(worst, "tile_edge", (double)w->tile_edge);
}

static void addLean(cJSON *o, const dkv_lean *l) {
    static const char *const words[DKV_N_WAYS] = {"itself", "scale", "delta", "dLSE"};
    if (!l->found) return;
    cJSON *lean = cJSON_AddObjectToObject(o, "lean");
    cJSON_AddStringToObject(lean, "direction", words[l->way]);
    dkv_addNumber(lean, "gain", l->gain);
    dkv_addNumber(lean, "allowed", l->allowed);
}

static void addTensors(cJSON *o, const dkv_result *r) {
    cJSON *tensors = cJSON_AddObjectToObject(o, "tensors");
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const dkv_judgement *j = &r->tensor[id];
        if (!j->present) continue;
        cJSON *t = cJSON_AddObjectToObject(tensors, dkv_tensorName((dkv_tensor_id)id));
        addPart(t, &j->all, j->twin);
        if (r->peer[id] > 0) dkv_addNumber(t, "error_over_peer", r->peer[id]);
        cJSON *parts = cJSON_AddObjectToObject(t, "regions");
        for (int k = 0; k < 2; k++)
            if (j->region[k].total)
                addPart(cJSON_AddObjectToObject(parts, dkv_regionName(k)), &j->region[k], j->twin);
        if (j->all.total) addWorst(t, &j->worst);
        addLean(t, &r->lean[id]);
        dkv_addErrmap(t, "map", &r->map[id]);
    }
}

static void addChecks(cJSON *o, const dkv_result *r) {
    cJSON *checks = cJSON_AddObjectToObject(o, "checks"), *notes = NULL;
    const dkv_check *c;
    for (int i = 0; (c = dkv_listCheck(i)); i++) {
        const dkv_finding *f = &r->finding[i];
        if (dkv_findingName(f->state)) cJSON_AddStringToObject(checks, c->name, dkv_findingName(f->state));
        if (f->state != DKV_CHECK_NOTE || !f->why[0]) continue;
        if (!notes) notes = cJSON_AddObjectToObject(o, "notes");
        cJSON_AddStringToObject(notes, c->name, f->why);
    }
}

/* To three figures. */
static void addShort(cJSON *o, const char *key, double x) {
    char text[32];
    snprintf(text, sizeof text, "%.3g", x);
    dkv_addNumber(o, key, strtod(text, NULL));
}

static void addPower(cJSON *o, const dkv_strength *s) {
    char name[64];
    if (!s->measured) return;
    cJSON *power = cJSON_AddObjectToObject(o, "power"), *strata;
    if (s->sampled) cJSON_AddTrueToObject(power, "sampled");
    dkv_addNumber(power, "longest", s->longest);
    addShort(power, "scale_error", dkv_leastScale(s));
    addShort(power, "dK_gain", dkv_leastGain(s, DKV_DK));
    strata = cJSON_AddObjectToObject(power, "strata");
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        for (int region = 0; region < 2; region++)
            for (int k = 0; k < DKV_LENGTH_CLASSES; k++) {
                cJSON *stratum = NULL;
                for (int slip = 0; slip < DKV_N_SLIPS; slip++) {
                    if (s->ratio[slip][id][region][k] < 0) continue;
                    dkv_stratumName(id, region, k, name, sizeof name);
                    if (!stratum) stratum = cJSON_AddObjectToObject(strata, name);
                    addShort(stratum, dkv_slipName(slip), s->ratio[slip][id][region][k]);
                }
            }
}

static void addOracle(cJSON *o, const dkv_oracle_use *u) {
    if (u->by == DKV_ORACLE_AUTO) return;
    cJSON_AddStringToObject(o, "oracle", dkv_oracleName(u->by));
    dkv_addNumber(o, "oracle_seconds", u->seconds);
    if (u->by != DKV_ORACLE_CPU) dkv_addNumber(o, "oracle_device_seconds", u->device_seconds);
    if (u->by != DKV_ORACLE_CPU) dkv_addNumber(o, "oracle_device_flops", u->flops);
    if (u->note[0]) cJSON_AddStringToObject(o, "oracle_note", u->note);
}

/* What took any time. */
static void addPhases(cJSON *o, const dkv_phases *s) {
    cJSON *phases = NULL;
    for (int i = 0; i < DKV_N_PHASES; i++) {
        if (s->seconds[i] < 5e-4) continue;
        if (!phases) phases = cJSON_AddObjectToObject(o, "phases");
        addShort(phases, dkv_phaseName((dkv_phase)i), s->seconds[i]);
    }
}

char *dkv_printRecord(const dkv_result *r) { return dkv_printExcused(r, NULL, NULL); }

char *dkv_printExcused(const dkv_result *r, const char *reason, const char *until) {
    char *replay = malloc(DKV_REPLAY_MAX);
    cJSON *o = cJSON_CreateObject();
    char *text = NULL;
    if (!replay || !o) goto done;
    dkv_replayCommand(r->line, r->kernel, replay, DKV_REPLAY_MAX);
    cJSON_AddStringToObject(o, "line", r->line);
    cJSON_AddStringToObject(o, "kernel", r->kernel);
    if (dkv_kernelHash(r->kernel)[0]) cJSON_AddStringToObject(o, "kernel_sha256", dkv_kernelHash(r->kernel));
    cJSON_AddStringToObject(o, "status", dkv_statusRow(r->status)->name);
    cJSON_AddStringToObject(o, "why", r->why);
    if (reason) {
        cJSON *waiver = cJSON_AddObjectToObject(o, "waiver");
        cJSON_AddStringToObject(waiver, "reason", reason);
        cJSON_AddStringToObject(waiver, "until", until);
    }
    dkv_addNumber(o, "seconds", r->seconds);
    dkv_addNumber(o, "seconds_forward", r->seconds_forward);
    dkv_addNumber(o, "seconds_backward", r->seconds_backward);
    addPhases(o, &r->phases);
    addOracle(o, &r->oracle);
    dkv_addDevice(o, &r->gpu);
    dkv_addBuild(o);
    cJSON_AddStringToObject(o, "generator", DKV_GENERATOR);
    cJSON_AddStringToObject(o, "arithmetic", r->judged ? r->arithmetic_words : "");
    if (r->profile[0]) cJSON_AddStringToObject(o, "profile", r->profile);
    dkv_addNumber(o, "level", r->level);
    if (r->file[0]) {
        cJSON_AddStringToObject(o, "file", r->file);
        cJSON_AddStringToObject(o, "sha256", r->file_hash);
    }
    if (r->judged && r->absent) {
        cJSON *absent = cJSON_AddArrayToObject(o, "not_judged");
        for (int id = 0; id < DKV_N_OUTPUTS; id++)
            if (r->absent >> id & 1)
                cJSON_AddItemToArray(absent, cJSON_CreateString(dkv_tensorName((dkv_tensor_id)id)));
    }
    dkv_addNumber(o, "runs", r->runs);
    if (r->bits[0]) cJSON_AddStringToObject(o, "bits", r->bits);
    if (r->judged) {
        dkv_addArithmetic(o, "arithmetic_numbers", &r->arithmetic);
        cJSON_AddBoolToObject(o, "declared", r->declared);
        addTensors(o, r);
        addChecks(o, r);
        addPower(o, &r->strength);
        dkv_addErrmap(o, "weights_forward", &r->weights[0]);
        dkv_addErrmap(o, "weights_backward", &r->weights[1]);
    }
    cJSON_AddStringToObject(o, "replay", replay);
    text = cJSON_PrintUnformatted(o);
done:
    cJSON_Delete(o);
    free(replay);
    return text;
}

/* ---- the file ---- */

int dkv_checkOutPath(const char *option, const char *path, dkv_err *err) {
    char folder[PATH_MAX];
    struct stat s;
    if (!path || strcmp(path, "-") == 0) return 0;
    if (!path[0] || strlen(path) >= sizeof folder)
        return dkv_fail(err, DKV_EUSER, "%s: not a file name: '%.80s'", option, path);
    if (stat(path, &s) == 0) {
        if (S_ISDIR(s.st_mode)) return dkv_fail(err, DKV_EUSER, "%s: '%s' is a folder", option, path);
        if (access(path, W_OK) == 0) return 0;
        return dkv_fail(err, DKV_EUSER, "%s: cannot write '%s': %s", option, path, strerror(errno));
    }
    if (errno != ENOENT) return dkv_fail(err, DKV_EUSER, "%s: cannot write '%.80s': %s", option, path, strerror(errno));
    if (path[strlen(path) - 1] == '/') return dkv_fail(err, DKV_EUSER, "%s: no folder '%s'", option, path);
    strcpy(folder, path);
    const char *dir = dirname(folder);
    if (access(dir, W_OK | X_OK) == 0) return 0;
    return dkv_fail(err, DKV_EUSER, "%s: cannot write into '%s': %s", option, dir, strerror(errno));
}

/* Is the first record one of fuzz/log.h? */
static bool isFuzzLog(const char *path) {
    static const char mark[] = ",\"fuzz\":{\"profile\":\""; /* not within a string: its quotes would be escaped */
    struct stat s;
    FILE *f = stat(path, &s) == 0 && S_ISREG(s.st_mode) && s.st_size > 0 ? fopen(path, "re") : NULL;
    char *row = NULL;
    size_t room = 0;
    const ssize_t n = f ? getline(&row, &room, f) : -1;
    const bool found = n > 0 && memmem(row, (size_t)n, mark, sizeof mark - 1);
    free(row);
    if (f) fclose(f);
    return found;
}

int dkv_checkRecordPath(const char *path, dkv_err *err) {
    int rc = dkv_checkOutPath("--json", path, err);
    if (!rc && path && isFuzzLog(path))
        rc = dkv_fail(err, DKV_EUSER, "--json: '%s' is the log of a fuzzing run, which is not replaced: `fuzz --resume` goes on with it",
                      path);
    return rc;
}

int dkv_writeRecord(dkv_record_file *file, const char *json, dkv_err *err) {
    if (!file->path) return 0;
    const char *mode = file->append ? "ae" : "we"; /* e: workers do not inherit it */
    if (!file->f) file->f = strcmp(file->path, "-") == 0 ? stdout : fopen(file->path, mode);
    if (!file->f) return dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", file->path, strerror(errno));
    if (fprintf(file->f, "%s\n", json) < 0 || fflush(file->f) != 0)
        return dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", file->path, strerror(errno));
    file->written++;
    return 0;
}

int dkv_closeRecords(dkv_record_file *file, dkv_err *err) {
    int bad = file->f && file->f != stdout ? fclose(file->f) : 0;
    file->f = NULL;
    return bad ? dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", file->path, strerror(errno)) : 0;
}
