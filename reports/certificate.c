#include "certificate.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "../data/jsonfile.h"
#include "../data/sha256.h"
#include "../ref/row.h"
#include "../ref/tensors.h"
#include "../verify/status.h"

#define VERSION 1

/* -1: out of memory. "" is no word. */
static int countWord(dkv_cert_words *w, const char *word) {
    int i = 0;
    if (!word[0]) return 0;
    while (i < w->n && strcmp(w->word[i], word) != 0) i++;
    if (i == DKV_CERT_WORDS) {
        w->more++;
        return 0;
    }
    if (i == w->n) {
        if (!(w->word[i] = strdup(word))) return -1;
        w->n++;
    }
    w->count[i]++;
    return 0;
}

static void freeWords(dkv_cert_words *w) {
    for (int i = 0; i < w->n; i++) free(w->word[i]);
}

/* ---- records ---- */

static int addPlace(dkv_evidence *e, const cJSON *o) {
    const struct {
        dkv_cert_words *words;
        const char *field;
    } fields[] = {{&e->hashes, "kernel_sha256"}, {&e->capabilities, "capability"}, {&e->drivers, "driver"},     {&e->hosts, "host"},
                  {&e->commits, "commit"},       {&e->compilers, "compiler"},      {&e->libraries, "libraries"}, {&e->generators, "generator"},
                  {&e->oracles, "oracle"},       {&e->commands, "command"}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (countWord(fields[i].words, dkv_textOf(o, fields[i].field))) return -1;
    return 0;
}

static void addTensors(dkv_evidence *e, const cJSON *o) {
    double level = dkv_numberOf(o, "level", 0);
    bool fair = level > 0 && level < 1;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const cJSON *t = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(o, "tensors"), dkv_tensorName((dkv_tensor_id)id));
        double total = dkv_numberOf(t, "total", 0), ratio = dkv_numberOf(t, "max_bound_ratio", NAN), rms = dkv_numberOf(t, "twin_rms", NAN);
        if (!cJSON_IsObject(t)) continue;
        if (total > 0 && total < 1e18) e->tensor[id].elements += total;
        if (ratio > e->tensor[id].ratio) e->tensor[id].ratio = ratio;
        if (!isfinite(rms)) continue;
        if (!e->tensor[id].twin || rms < e->tensor[id].least_rms) e->tensor[id].least_rms = rms;
        if (!e->tensor[id].twin || rms > e->tensor[id].most_rms) e->tensor[id].most_rms = rms;
        e->tensor[id].twin = true;
        e->tests += fair;
    }
    if (fair) e->alarms += DKV_N_OUTPUTS * level;
    if (fair && level > e->level) e->level = level;
}

/* The problem, whichever words its line has, as a number. */
static int addLine(dkv_evidence *e, const dkv_problem *p) {
    char line[DKV_LINE_MAX + 1], hex[65];
    if (dkv_printProblem(p, line, sizeof line, NULL)) return -1;
    dkv_digestBytes(line, strlen(line), hex);
    hex[16] = 0;
    if (e->n_lines == e->room_lines) {
        long room = 2 * e->room_lines + 64;
        uint64_t *more = realloc(e->lines, (size_t)room * sizeof *more);
        if (!more) return -1;
        e->lines = more;
        e->room_lines = room;
    }
    e->lines[e->n_lines++] = strtoull(hex, NULL, 16);
    return 0;
}

static int compareLines(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Passed cases that are not the same problem again. */
static long countDistinct(const dkv_evidence *e) {
    long n = 0;
    if (e->n_lines) qsort(e->lines, (size_t)e->n_lines, sizeof *e->lines, compareLines);
    for (long i = 0; i < e->n_lines; i++) n += i == 0 || e->lines[i] != e->lines[i - 1];
    return n;
}

static int addPassed(dkv_evidence *e, const cJSON *o, const dkv_problem *p) {
    const cJSON *x;
    e->passed++;
    if (addLine(e, p)) return -1;
    e->undeclared += !cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "declared"));
    addTensors(e, o);
    cJSON_ArrayForEach(x, cJSON_GetObjectItemCaseSensitive(o, "not_judged"))
        if (cJSON_IsString(x) && countWord(&e->not_judged, x->valuestring)) return -1;
    if (countWord(&e->arithmetic, dkv_textOf(o, "arithmetic")) || countWord(&e->profiles, dkv_textOf(o, "profile"))) return -1;
    return dkv_addPowerRecord(&e->power, o) || dkv_addToScope(&e->scope, p) ? -1 : 0;
}

/* A sentence, malloc'ed into *to unless there is one. */
static int keepSentence(char **to, const char *status, const char *line, const char *why) {
    if (*to) return 0;
    if (asprintf(to, "%s %.160s%s%.200s", status, line, why[0] ? ": " : "", why) >= 0) return 0;
    *to = NULL;
    return -1;
}

static int addDefect(dkv_evidence *e, const cJSON *o) {
    const cJSON *waiver = cJSON_GetObjectItemCaseSensitive(o, "waiver");
    char *sentence = NULL;
    if (!dkv_textOf(waiver, "reason")[0]) {
        e->defects++;
        return keepSentence(&e->defect, dkv_textOf(o, "status"), dkv_textOf(o, "line"), dkv_textOf(o, "why"));
    }
    if (asprintf(&sentence, "%.40s %.200s: waived until %.10s: %.200s", dkv_textOf(o, "status"), dkv_textOf(o, "line"),
                 dkv_textOf(waiver, "until"), dkv_textOf(waiver, "reason")) < 0) return -1;
    int bad = countWord(&e->waived, sentence);
    free(sentence);
    return bad;
}

static int addCase(dkv_evidence *e, const cJSON *o, const dkv_problem *p, dkv_status status) {
    const char *kernel = dkv_textOf(o, "kernel"), *device = dkv_textOf(o, "device");
    if ((e->kernel && strcmp(kernel, e->kernel) != 0) || (e->device && strcmp(device, e->device) != 0)) {
        e->others++;
        return 0;
    }
    e->total++;
    e->nameless += !dkv_textOf(o, "kernel_sha256")[0] || !device[0];
    if (countWord(&e->kernels, kernel) || countWord(&e->devices, device) || addPlace(e, o)) return -1;
    if (status == DKV_ST_UNSUPPORTED) {
        e->refused++;
        return countWord(&e->reasons, dkv_textOf(o, "why")[0] ? dkv_textOf(o, "why") : "(no reason)");
    }
    e->harness += status == DKV_ST_HARNESS_ERROR;
    e->weak += status == DKV_ST_INCONCLUSIVE;
    if (dkv_statusRow(status)->defect) return addDefect(e, o);
    return status == DKV_ST_PASSED ? addPassed(e, o, p) : 0;
}

int dkv_addEvidence(dkv_evidence *e, const char *json) {
    cJSON *o = cJSON_ParseWithOpts(json, NULL, true);
    dkv_status status = dkv_findStatus(dkv_textOf(o, "status"));
    dkv_problem p = {0};
    dkv_err why = {0};
    int rc = 0;
    double clean = dkv_numberOf(o, "clean_cases", -1), alarms = dkv_numberOf(o, "false_alarms", 0);
    if (dkv_textOf(o, "fault")[0] && cJSON_IsBool(cJSON_GetObjectItemCaseSensitive(o, "found"))) {
        bool control = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "control"));
        e->planted += !control;
        e->found += !control && cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "found"));
        rc = 1;
    } else if (clean >= 0 && clean < 1e12 && alarms >= 0 && alarms < 1e12) {
        e->clean_cases += (long)clean;
        e->false_alarms += (long)alarms;
        rc = 1;
    } else if (dkv_textOf(o, "kernel")[0] && dkv_parseProblem(dkv_textOf(o, "line"), NULL, &p, &why) == 0) {
        if (status < DKV_ST_N) rc = addCase(e, o, &p, status) ? -1 : 1;
        else if (cJSON_HasObjectItem(o, "ms_fwd")) rc = 1; /* of bench: says nothing here */
    }
    dkv_freeProblem(&p);
    cJSON_Delete(o);
    return rc;
}

static int takeRow(char *row, size_t n, long number, void *arg, dkv_err *err) {
    dkv_evidence *e = arg;
    int got = strlen(row) == n ? dkv_addEvidence(e, row) : 0;
    (void)number;
    if (got < 0) return dkv_fail(err, DKV_EHARNESS, "out of memory for a certificate");
    if (!got) return dkv_fail(err, DKV_EUSER, "not a record (nothing is certified on part of a file)");
    e->files[e->n_files - 1].records++;
    return 0;
}

int dkv_readEvidence(dkv_evidence *e, const char *path, const char *hash, dkv_err *err) {
    for (int i = 0; i < e->n_files; i++)
        if (strcmp(e->files[i].hash, hash) == 0)
            return dkv_fail(err, DKV_EUSER, "'%s' and '%s' hold the same records: nothing counts twice", e->files[i].path, path);
    dkv_cert_file *files = realloc(e->files, (size_t)(e->n_files + 1) * sizeof *files);
    if (!files) return dkv_fail(err, DKV_EHARNESS, "out of memory for records");
    e->files = files;
    dkv_cert_file *file = &files[e->n_files++];
    *file = (dkv_cert_file){.path = strdup(path), .hash = strdup(hash)};
    if (!file->path || !file->hash) return dkv_fail(err, DKV_EHARNESS, "out of memory for records");
    FILE *f = fopen(path, "re");
    if (!f) return dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", path, strerror(errno));
    int rc = dkv_takeRows(f, path, takeRow, e, err);
    fclose(f);
    return rc;
}

void dkv_freeEvidence(dkv_evidence *e) {
    dkv_cert_words *const words[] = {&e->kernels,   &e->hashes,     &e->devices,    &e->capabilities, &e->drivers,  &e->hosts,
                                     &e->commits,   &e->compilers,  &e->libraries,  &e->generators,   &e->oracles,  &e->commands,
                                     &e->arithmetic, &e->profiles,  &e->not_judged, &e->reasons,      &e->waived};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) freeWords(words[i]);
    for (int i = 0; i < e->n_files; i++) {
        free(e->files[i].path);
        free(e->files[i].hash);
    }
    free(e->files);
    free(e->lines);
    free(e->defect);
    dkv_freePowerTable(&e->power);
    memset(e, 0, sizeof *e);
}

/* ---- may there be one? ---- */

static int mixed(const dkv_cert_words *w, const char *what, const char *remedy, dkv_err *err) {
    if (w->n < 2) return 0;
    return dkv_fail(err, DKV_EUSER, "certificate: the records are of several %s ('%.100s', '%.100s'%s)%s", what, w->word[0], w->word[1],
                    w->n > 2 ? ", …" : "", remedy);
}

int dkv_refuseCertificate(const dkv_evidence *e, int *code, dkv_err *err) {
    char *blind = NULL;
    size_t n = 0;
    int rc = mixed(&e->kernels, "kernels", ": name one with --kernel", err);
    if (!rc) rc = mixed(&e->devices, "devices", ": name one with --device", err);
    if (!rc) rc = mixed(&e->hashes, "versions of the kernel's file", "", err);
    if (!rc) rc = mixed(&e->drivers, "drivers", "", err);
    if (!rc) rc = mixed(&e->generators, "versions of the input generator", "", err);
    if (rc) {
        *code = DKV_EXIT_USER;
        return rc;
    }
    *code = e->defects ? DKV_EXIT_DEFECT : DKV_EXIT_NOTHING;
    if (e->total == 0) return dkv_fail(err, DKV_EREFUSED, "no certificate: no record of such a case");
    if (e->defects)
        return dkv_fail(err, DKV_EREFUSED, "no certificate: %ld defect%s; the first: %s", e->defects, e->defects == 1 ? "" : "s", e->defect);
    if (e->harness) return dkv_fail(err, DKV_EREFUSED, "no certificate: the harness itself failed in %ld cases", e->harness);
    if (2 * e->refused > e->total)
        return dkv_fail(err, DKV_EREFUSED, "no certificate: the kernel refused %ld of %ld cases", e->refused, e->total);
    if (countDistinct(e) < DKV_CERT_LEAST_CASES)
        return dkv_fail(err, DKV_EREFUSED, "no certificate: %ld different cases passed, fewer than %d", countDistinct(e), DKV_CERT_LEAST_CASES);
    if (!e->hashes.n && e->kernels.n && strncmp(e->kernels.word[0], "files:", 6) != 0)
        return dkv_fail(err, DKV_EREFUSED, "no certificate: the records do not say which file the kernel was (kernel_sha256)");
    if (!e->hashes.n) return dkv_fail(err, DKV_EREFUSED, "no certificate: outputs that lie in files are of no kernel that could be named");
    if (e->nameless)
        return dkv_fail(err, DKV_EREFUSED, "no certificate: %ld of %ld records do not say which file the kernel was, or on which device",
                        e->nameless, e->total);
    *code = DKV_EXIT_WEAK;
    if (e->weak) return dkv_fail(err, DKV_EREFUSED, "no certificate: %ld cases are INCONCLUSIVE", e->weak);
    if (e->power.n_rows == 0) return dkv_fail(err, DKV_EREFUSED, "no certificate: the records do not say what would have been seen");
    int strata = dkv_countBlind(&e->power);
    if (!strata) return 0;
    FILE *f = open_memstream(&blind, &n);
    if (f) dkv_writeBlind(&e->power, f, "", 1);
    if (f) fclose(f);
    rc = dkv_fail(err, DKV_EREFUSED, "no certificate: some small fault would not have been seen in %d strata; the first: %.*s", strata,
                  (int)(blind ? strcspn(blind, "\n") : 0), blind ? blind : "");
    free(blind);
    return rc;
}

/* ---- the envelope ---- */

static void addWords(cJSON *o, const char *key, const dkv_cert_words *w) {
    cJSON *list = cJSON_AddArrayToObject(o, key);
    for (int i = 0; i < w->n; i++) cJSON_AddItemToArray(list, cJSON_CreateString(w->word[i]));
    if (w->more) cJSON_AddItemToArray(list, cJSON_CreateString("and others"));
}

static void addCounts(cJSON *o, const char *key, const dkv_cert_words *w) {
    cJSON *list = cJSON_AddArrayToObject(o, key);
    for (int i = 0; i < w->n; i++) {
        cJSON *x = cJSON_CreateObject();
        cJSON_AddStringToObject(x, "what", w->word[i]);
        cJSON_AddNumberToObject(x, "cases", (double)w->count[i]);
        cJSON_AddItemToArray(list, x);
    }
}

static const char *only(const dkv_cert_words *w) { return w->n ? w->word[0] : ""; }

static void addKernel(cJSON *o, const dkv_evidence *e) {
    cJSON *k = cJSON_AddObjectToObject(o, "kernel"), *d = cJSON_AddObjectToObject(o, "device"), *t;
    cJSON_AddStringToObject(k, "name", only(&e->kernels));
    cJSON_AddStringToObject(k, "sha256", only(&e->hashes));
    cJSON_AddStringToObject(k, "arithmetic_is", e->undeclared ? "not declared: held to the profile named" : "declared by the kernel");
    addCounts(k, "arithmetic", &e->arithmetic);
    if (e->profiles.n) addCounts(k, "behaves_as", &e->profiles);
    cJSON_AddStringToObject(d, "name", only(&e->devices));
    cJSON_AddStringToObject(d, "capability", only(&e->capabilities));
    cJSON_AddStringToObject(d, "driver", only(&e->drivers));
    addWords(d, "hosts", &e->hosts);
    t = cJSON_AddObjectToObject(o, "toolchain");
    addWords(t, "commits", &e->commits);
    addWords(t, "compilers", &e->compilers);
    addWords(t, "libraries", &e->libraries);
    addWords(t, "oracles", &e->oracles);
    cJSON_AddStringToObject(t, "generator", only(&e->generators));
}

static void addJudged(cJSON *o, const dkv_evidence *e) {
    cJSON *v = cJSON_AddObjectToObject(o, "evidence"), *tensors;
    cJSON_AddNumberToObject(v, "cases", (double)e->total);
    cJSON_AddNumberToObject(v, "passed", (double)e->passed);
    cJSON_AddNumberToObject(v, "refused", (double)e->refused);
    addCounts(v, "refusals", &e->reasons);
    addWords(v, "waived", &e->waived);
    addCounts(v, "not_judged", &e->not_judged);
    tensors = cJSON_AddObjectToObject(v, "tensors");
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (e->tensor[id].elements == 0) continue;
        cJSON *t = cJSON_AddObjectToObject(tensors, dkv_tensorName((dkv_tensor_id)id));
        cJSON_AddNumberToObject(t, "elements", e->tensor[id].elements);
        cJSON_AddNumberToObject(t, "max_bound_ratio", e->tensor[id].ratio);
        if (e->tensor[id].twin) cJSON_AddNumberToObject(t, "twin_rms_least", e->tensor[id].least_rms);
        if (e->tensor[id].twin) cJSON_AddNumberToObject(t, "twin_rms_most", e->tensor[id].most_rms);
    }
}

static void addDetectable(cJSON *o, const dkv_evidence *e) {
    cJSON *d = cJSON_AddObjectToObject(o, "smallest_fault_seen"), *a;
    cJSON_AddStringToObject(d, "how", "derived: each fault was applied to the oracle's own result and held against the bound of each element; "
                                      "nothing here was tuned");
    if (e->power.longest > 0) cJSON_AddNumberToObject(d, "lost_key_up_to_length", e->power.longest);
    if (e->power.scale > 0 && e->power.scale < 1) cJSON_AddNumberToObject(d, "scale_error", e->power.scale);
    if (e->power.gain > 0 && e->power.gain < 1) cJSON_AddNumberToObject(d, "dK_gain", e->power.gain);
    cJSON_AddNumberToObject(d, "cases_measured", (double)e->power.cases);
    cJSON_AddNumberToObject(d, "strata_by_fault", e->power.n_rows);
    cJSON_AddNumberToObject(d, "of_these_blind", dkv_countBlind(&e->power));
    if (e->planted) {
        cJSON *p = cJSON_AddObjectToObject(o, "planted_faults");
        cJSON_AddStringToObject(p, "how", "measured: `dualkv power` on kernels with planted faults");
        cJSON_AddNumberToObject(p, "planted", (double)e->planted);
        cJSON_AddNumberToObject(p, "found", (double)e->found);
        cJSON_AddNumberToObject(p, "clean_cases", (double)e->clean_cases);
        cJSON_AddNumberToObject(p, "false_alarms", (double)e->false_alarms);
    }
    a = cJSON_AddObjectToObject(o, "false_alarms");
    cJSON_AddStringToObject(a, "how", "budget: the levels of all tests of these records added up. Bounds and noise follow from the declared "
                                      "arithmetic (derived); allowances for the noise's size, a mean and a gain are calibrated");
    cJSON_AddNumberToObject(a, "budget", e->alarms);
    cJSON_AddNumberToObject(a, "level_of_a_test", e->level);
    cJSON_AddNumberToObject(a, "tests_against_the_twin", e->tests);
}

static void addFiles(cJSON *o, const dkv_evidence *e, const char *command) {
    cJSON *list = cJSON_AddArrayToObject(o, "records"), *again;
    for (int i = 0; i < e->n_files; i++) {
        cJSON *f = cJSON_CreateObject();
        cJSON_AddStringToObject(f, "file", e->files[i].path);
        cJSON_AddStringToObject(f, "sha256", e->files[i].hash);
        cJSON_AddNumberToObject(f, "records", (double)e->files[i].records);
        cJSON_AddItemToArray(list, f);
    }
    again = cJSON_AddArrayToObject(o, "made_by");
    for (int i = 0; i < e->commands.n; i++) cJSON_AddItemToArray(again, cJSON_CreateString(e->commands.word[i]));
    cJSON_AddItemToArray(again, cJSON_CreateString(command));
}

/* The SHA-256 of the object without its seal, printed without spaces. NULL text: out of memory. */
static int sealOf(cJSON *o, char hex[65]) {
    cJSON *seal = cJSON_DetachItemFromObjectCaseSensitive(o, "seal");
    char *text = cJSON_PrintUnformatted(o);
    if (text) dkv_digestBytes(text, strlen(text), hex);
    free(text);
    if (seal) cJSON_AddItemToObject(o, "seal", seal);
    return text ? 0 : -1;
}

char *dkv_printCertificate(const dkv_evidence *e, const char *version, const char *command) {
    cJSON *o = cJSON_CreateObject();
    char hex[65], *text = NULL;
    cJSON_AddNumberToObject(o, "certificate", VERSION);
    cJSON_AddStringToObject(o, "program", version);
    cJSON_AddStringToObject(o, "claim", "On the problems of `scope` nothing was found in this kernel, on this device, that the rounding of its "
                                        "arithmetic does not explain, measured against standard attention over the replicated sequences. "
                                        "Evidence, not a formal proof.");
    addKernel(o, e);
    addJudged(o, e);
    addDetectable(o, e);
    cJSON_AddItemToObject(o, "scope", dkv_printScope(&e->scope));
    addFiles(o, e, command);
    cJSON_AddStringToObject(o, "expires", "never: it speaks of the bytes with this SHA-256, on this device and driver");
    cJSON_AddStringToObject(o, "seal_is", "SHA-256 of all but `seal`, printed without spaces: it shows editing, it is no signature");
    if (!sealOf(o, hex) && cJSON_AddStringToObject(o, "seal", hex)) text = cJSON_Print(o);
    cJSON_Delete(o);
    return text;
}

int dkv_readCertificate(const char *path, dkv_certificate *c, dkv_err *err) {
    dkv_err why = {0};
    char hex[65];
    memset(c, 0, sizeof *c);
    int rc = dkv_readJsonFile(path, &c->o, err);
    double version = dkv_numberOf(c->o, "certificate", 0);
    if (rc) return rc;
    const cJSON *kernel = cJSON_GetObjectItemCaseSensitive(c->o, "kernel"), *device = cJSON_GetObjectItemCaseSensitive(c->o, "device");
    c->kernel = dkv_textOf(kernel, "name");
    c->hash = dkv_textOf(kernel, "sha256");
    c->device = dkv_textOf(device, "name");
    c->driver = dkv_textOf(device, "driver");
    if (!(version >= 1)) rc = dkv_fail(err, DKV_EUSER, "%s: not a certificate", path);
    else if (version > VERSION) rc = dkv_fail(err, DKV_EUSER, "%s: a certificate of version %g; this program knows %d", path, version, VERSION);
    else if (sealOf(c->o, hex)) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for a certificate");
    else if (strcmp(hex, dkv_textOf(c->o, "seal")) != 0)
        rc = dkv_fail(err, DKV_EUSER, "%s: was edited: its seal is not that of what stands in it", path);
    else if (!c->kernel[0] || !c->device[0]) rc = dkv_fail(err, DKV_EUSER, "%s: names no kernel or no device", path);
    else if (dkv_readScope(cJSON_GetObjectItemCaseSensitive(c->o, "scope"), &c->scope, &why)) rc = dkv_fail(err, why.code, "%s: %s", path, why.text);
    if (rc) dkv_freeCertificate(c);
    return rc;
}

void dkv_freeCertificate(dkv_certificate *c) {
    cJSON_Delete(c->o);
    memset(c, 0, sizeof *c);
}
