#include "report_gather.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "../ref/problem.h"
#include "report_classes.h"

#define TEXT_MAX 600  /* bytes kept of a sentence */

/* A size that may be added up. */
static double sizeOf(const cJSON *o, const char *key) {
    double x = dkv_numberOf(o, key, 0);
    return x > 0 && x < 1e18 ? x : 0;
}

static char *keep(const char *s) { return strndup(s, TEXT_MAX); }

/* -1: out of memory. "" is no word. */
static int countWord(dkv_wordcount *w, const char *word) {
    int i = 0;
    if (!word[0]) return 0;
    while (i < w->n && strncmp(w->word[i], word, TEXT_MAX) != 0) i++;
    if (i == DKV_GATHER_WORDS) {
        w->more++;
        return 0;
    }
    if (i == w->n) {
        if (!(w->word[i] = keep(word))) return -1;
        w->count[w->n++] = 0;
    }
    w->count[i]++;
    return 0;
}

static void freeWords(dkv_wordcount *w) {
    for (int i = 0; i < w->n; i++) free(w->word[i]);
}

/* ---- strips ---- */

#define RATIO_DECADES 6.0 /* from 1e-4 to 1e2 */
#define RMS_MOST 3.0

double dkv_ratioOfBin(double i) { return pow(10, RATIO_DECADES * i / DKV_GATHER_BINS - 4); }
double dkv_rmsOfBin(double i) { return RMS_MOST * i / DKV_GATHER_BINS; }

double dkv_normalOfBin(double i) { return 16 * i / DKV_GATHER_BINS - 8; }

/* Values off an axis count at its end. */
static void addStrip(dkv_strip *s, double x, double place, bool outside) {
    int bin = !(place < DKV_GATHER_BINS) ? DKV_GATHER_BINS - 1 : place < 0 ? 0 : (int)place;
    s->bins[outside][bin]++;
    s->cases++;
    s->outside += outside;
    if (!(x <= s->most)) s->most = isnan(x) ? INFINITY : x;
}

static void addRatio(dkv_strip *s, double x) {
    double place = x <= 0 ? 0 : (log10(x) + 4) / RATIO_DECADES * DKV_GATHER_BINS;
    addStrip(s, x, place, !(x <= 1));
}

/* ---- a record of check ---- */

static int tensorId(const char *name) {
    int id = 0;
    while (id < DKV_N_OUTPUTS && strcmp(dkv_tensorName((dkv_tensor_id)id), name) != 0) id++;
    return id;
}

static dkv_gather_kernel *findKernel(dkv_gather *g, const char *name) {
    if (!name[0]) name = "(unnamed)";
    for (int i = 0; i < g->n_kernels; i++)
        if (i == DKV_GATHER_KERNELS - 1 || strncmp(g->kernels[i]->name, name, TEXT_MAX) == 0) return g->kernels[i];
    if (!g->kernels && !(g->kernels = calloc(DKV_GATHER_KERNELS, sizeof *g->kernels))) return NULL;
    dkv_gather_kernel *k = calloc(1, sizeof *k);
    if (!k) return NULL;
    k->name = keep(g->n_kernels == DKV_GATHER_KERNELS - 1 ? "(further kernels)" : name);
    if (!k->name) {
        free(k);
        return NULL;
    }
    for (int m = 0; m < DKV_GATHER_MASKS; m++)
        for (int d = 0; d < DKV_GATHER_DTYPES; d++)
            for (int t = 0; t < DKV_N_OUTPUTS; t++) k->rows[m][d][t].least_rms = k->rows[m][d][t].most_rms = NAN;
    return g->kernels[g->n_kernels++] = k;
}

static void addTensor(dkv_gather_kernel *k, dkv_gather_row *w, int id, const cJSON *t) {
    const cJSON *regions = cJSON_GetObjectItemCaseSensitive(t, "regions");
    double ratio = dkv_numberOf(t, "max_bound_ratio", NAN), rms = dkv_numberOf(t, "twin_rms", NAN);
    w->cases++;
    w->outside += !(ratio <= 1);
    if (isnan(ratio)) ratio = INFINITY;
    if (ratio > w->max_ratio) w->max_ratio = ratio;
    if (ratio > k->worst || !k->worst_tensor[0]) {
        k->worst = ratio;
        snprintf(k->worst_tensor, sizeof k->worst_tensor, "%s", dkv_tensorName((dkv_tensor_id)id));
    }
    k->elements += sizeOf(t, "total");
    for (int i = 0; i < 2; i++) {
        const cJSON *part = cJSON_GetObjectItemCaseSensitive(regions, dkv_regionName(i));
        if (cJSON_IsObject(part)) addRatio(&k->ratio[id][i], dkv_numberOf(part, "max_bound_ratio", NAN));
    }
    if (!cJSON_GetObjectItemCaseSensitive(t, "twin_rms")) return;
    if (isfinite(rms)) {
        if (!(rms >= w->least_rms)) w->least_rms = rms;
        if (!(rms <= w->most_rms)) w->most_rms = rms;
    }
    addStrip(&k->rms[id], rms, rms / RMS_MOST * DKV_GATHER_BINS, !(rms <= dkv_numberOf(t, "twin_rms_limit", INFINITY)));
    double dof = dkv_numberOf(t, "rms_dof", NAN);
    if (!(dof > 0 && isfinite(dof) && isfinite(rms))) return;
    double x = (rms * rms - 1) * sqrt(dof / 2);
    addStrip(&k->normal[id], x, (x + 8) / 16 * DKV_GATHER_BINS, false);
}

static void addCover(dkv_gather_cell *c, dkv_status status) {
    bool refused = status == DKV_ST_UNSUPPORTED;
    c->refused += refused;
    c->cases += !refused;
    c->defects += dkv_statusRow(status)->defect;
}

static int addProblem(dkv_gather_kernel *k, const dkv_problem *p, const cJSON *o, dkv_status status) {
    const cJSON *x, *tensors = cJSON_GetObjectItemCaseSensitive(o, "tensors");
    unsigned edges = dkv_edgesOf(p), features = dkv_featuresOf(p);
    bool judged = cJSON_IsObject(tensors);
    if ((int)p->mask >= DKV_GATHER_MASKS || (int)p->dtype >= DKV_GATHER_DTYPES) return 0;
    addCover(&k->kinds[p->mask][p->dtype], status);
    for (int e = 0; e < DKV_GATHER_EDGES; e++)
        if (edges >> e & 1) addCover(&k->cover[p->mask][p->dtype][dkv_classOfDim(p)][e], status);
    k->judged += judged;
    for (int f = 0; judged && f < DKV_GATHER_FEATURES; f++) k->features[f] += features >> f & 1;
    if (judged)
        cJSON_ArrayForEach(x, tensors) {
            int id = x->string ? tensorId(x->string) : DKV_N_OUTPUTS;
            if (id < DKV_N_OUTPUTS && cJSON_IsObject(x)) addTensor(k, &k->rows[p->mask][p->dtype][id], id, x);
        }
    cJSON_ArrayForEach(x, cJSON_GetObjectItemCaseSensitive(o, "not_judged")) {
        const char *name = cJSON_GetStringValue(x);
        if (name && countWord(&k->not_judged, name)) return -1;
    }
    return 0;
}

static int addChecks(dkv_gather_kernel *k, const cJSON *o) {
    const cJSON *c;
    cJSON_ArrayForEach(c, cJSON_GetObjectItemCaseSensitive(o, "checks")) {
        const char *state = cJSON_GetStringValue(c);
        for (int i = 0; state && c->string && i < 3; i++)
            if (strcmp(state, dkv_findingName((dkv_finding_state)(DKV_CHECK_PASSED + i))) == 0 && countWord(&k->checks[i], c->string)) return -1;
    }
    return 0;
}

/* "reason (until 2030-01-31)", "" where nothing excuses the case; malloc'ed. */
static char *waiverOf(const cJSON *o) {
    const cJSON *w = cJSON_GetObjectItemCaseSensitive(o, "waiver");
    char *text = NULL;
    if (!cJSON_IsObject(w)) return strdup("");
    return asprintf(&text, "%.*s (until %.20s)", TEXT_MAX - 40, dkv_textOf(w, "reason"), dkv_textOf(w, "until")) < 0 ? NULL : text;
}

/* Room for what is merely not known cannot be taken by defects, nor the other way. */
static int addCase(dkv_gather_kernel *k, const cJSON *o, dkv_status status) {
    char *waived = waiverOf(o);
    if (!waived || countWord(&k->waivers, waived)) {
        free(waived);
        return -1;
    }
    k->waived += waived[0] && dkv_statusRow(status)->defect;
    const char *line = dkv_textOf(o, "line"), *replay = dkv_textOf(o, "replay");
    bool defect = dkv_statusRow(status)->defect;
    if (!k->cases && !(k->cases = calloc(DKV_GATHER_CASES, sizeof *k->cases))) {
        free(waived);
        return -1;
    }
    if (k->kept[defect] >= (defect ? DKV_GATHER_CASES - DKV_GATHER_OTHERS : DKV_GATHER_OTHERS)) {
        k->cases_left_out++;
        free(waived);
        return 0;
    }
    k->kept[defect]++;
    dkv_gather_case *c = &k->cases[k->n_cases++];
    bool fits = strlen(line) < TEXT_MAX && strlen(replay) < 2 * TEXT_MAX; /* half a command is none */
    c->line = keep(line);
    c->why = keep(dkv_textOf(o, "why"));
    c->replay = strdup(fits ? replay : "");
    c->waived = waived;
    c->status = status;
    if (k->mapped < DKV_GATHER_MAPPED && dkv_readPictures(o, &c->maps, &c->n_maps)) return -1;
    k->mapped += c->n_maps > 0;
    return c->line && c->why && c->replay ? 0 : -1;
}

static void putLine(uint64_t *lines, size_t room, uint64_t hash, size_t *n) {
    size_t at = hash & (room - 1);
    while (lines[at] && lines[at] != hash) at = (at + 1) & (room - 1);
    *n += lines[at] == 0;
    lines[at] = hash;
}

/* FNV-1a, mixed: two lines in 2^64 are taken for one. */
static uint64_t hashLine(const char *line) {
    uint64_t hash = 14695981039346656037u;
    for (; *line; line++) hash = (hash ^ (unsigned char)*line) * 1099511628211u;
    hash ^= hash >> 32;
    return hash ? hash : 1;
}

static int countLine(dkv_gather_kernel *k, uint64_t hash) {
    if (2 * k->n_lines >= k->room) {
        size_t room = k->room ? 2 * k->room : 64, n = 0;
        uint64_t *lines = calloc(room, sizeof *lines);
        if (!lines) return -1;
        for (size_t i = 0; i < k->room; i++)
            if (k->lines[i]) putLine(lines, room, k->lines[i], &n);
        free(k->lines);
        k->lines = lines;
        k->room = room;
    }
    putLine(k->lines, k->room, hash, &k->n_lines);
    return 0;
}

static int addPlace(dkv_gather *g, const cJSON *o) {
    int bad = countWord(&g->devices, dkv_textOf(o, "device")) | countWord(&g->hosts, dkv_textOf(o, "host")) |
              countWord(&g->drivers, dkv_textOf(o, "driver")) | countWord(&g->commits, dkv_textOf(o, "commit")) |
              countWord(&g->compilers, dkv_textOf(o, "compiler")) | countWord(&g->generators, dkv_textOf(o, "generator")) |
              countWord(&g->oracles, dkv_textOf(o, "oracle")) | countWord(&g->flags, dkv_textOf(o, "flags")) |
              countWord(&g->libraries, dkv_textOf(o, "libraries")) | countWord(&g->started, dkv_textOf(o, "started")) |
              countWord(&g->commands, dkv_textOf(o, "command"));
    double level = dkv_numberOf(o, "level", 0);
    g->seconds += sizeOf(o, "seconds");
    if (level > 0 && level < 1) {
        if (g->least_level == 0 || level < g->least_level) g->least_level = level;
        if (level > g->most_level) g->most_level = level;
    }
    return bad ? -1 : 0;
}

static int addCheck(dkv_gather *g, const cJSON *o, const dkv_problem *p, dkv_status status) {
    dkv_gather_kernel *k = findKernel(g, dkv_textOf(o, "kernel"));
    if (!k) return -1;
    g->total++;
    k->total++;
    k->counts[status]++;
    uint64_t hash = hashLine(dkv_textOf(o, "line"));
    if (countLine(k, hash) || dkv_addCommit(k, o, status, hash)) return -1;
    if (countWord(&k->devices, dkv_textOf(o, "device")) || countWord(&k->commits, dkv_textOf(o, "commit"))) return -1;
    if (addProblem(k, p, o, status) || addChecks(k, o) || addPlace(g, o) || dkv_addPowerRecord(&k->power, o)) return -1;
    if (countWord(&k->arithmetic, dkv_textOf(o, "arithmetic")) || countWord(&k->profiles, dkv_textOf(o, "profile")))
        return -1;
    if (status == DKV_ST_UNSUPPORTED) return countWord(&k->reasons, dkv_textOf(o, "why")[0] ? dkv_textOf(o, "why") : "(no reason)");
    return status == DKV_ST_PASSED ? 0 : addCase(k, o, status);
}

/* ---- bench, power ---- */

static void findRoof(dkv_gather_bench *b, const dkv_problem *p) {
    const dkv_card *card = dkv_findCard(b->device);
    for (int back = 0; back < 2; back++) {
        double flops = b->tflops[back] * b->ms[back] * 1e9, bytes = dkv_leastBytes(p, back);
        if (flops > 0 && bytes > 0) b->intensity[back] = flops / bytes;
        if (!card) continue;
        double rate = p->dtype == DUALKV_FP32 ? card->single : card->half;
        double by_memory = flops / bytes * card->memory;
        b->memory[back] = by_memory < rate;
        if (flops > 0 && bytes > 0) b->roof[back] = (b->memory[back] ? by_memory : rate) * 1e-12;
    }
}

static int addBench(dkv_gather *g, const cJSON *o, const dkv_problem *p) {
    if (g->n_bench == DKV_GATHER_BENCH) {
        g->bench_left_out++;
        return 0;
    }
    if (!g->bench && !(g->bench = calloc(DKV_GATHER_BENCH, sizeof *g->bench))) return -1;
    dkv_gather_bench *b = &g->bench[g->n_bench++];
    *b = (dkv_gather_bench){.line = keep(dkv_textOf(o, "line")),
                            .kernel = keep(dkv_textOf(o, "kernel")),
                            .device = keep(dkv_textOf(o, "device")),
                            .commit = keep(dkv_textOf(o, "commit")),
                            .started = keep(dkv_textOf(o, "started")),
                            .ms = {sizeOf(o, "ms_fwd"), sizeOf(o, "ms_bwd")},
                            .tflops = {sizeOf(o, "tflops_fwd"), sizeOf(o, "tflops_bwd")},
                            .peak_bytes = sizeOf(o, "peak_bytes"),
                            .dgemm = sizeOf(o, "gflops_dgemm")};
    if (!b->line || !b->kernel || !b->device || !b->commit || !b->started) return -1;
    findRoof(b, p);
    return addPlace(g, o);
}

static const char *dkv_gatherRule(int i) {
    static const char *const names[DKV_GATHER_RULES] = {"allclose", "nmse", "peer"};
    return i >= 0 && i < DKV_GATHER_RULES ? names[i] : NULL;
}

static int addFault(dkv_gather *g, const cJSON *o) {
    if (g->n_faults == DKV_GATHER_BENCH) return 0;
    if (!g->faults && !(g->faults = calloc(DKV_GATHER_BENCH, sizeof *g->faults))) return -1;
    dkv_gather_fault *f = &g->faults[g->n_faults++];
    f->fault = keep(dkv_textOf(o, "fault"));
    f->doc = keep(dkv_textOf(o, "doc"));
    f->check = keep(dkv_textOf(o, "check"));
    f->line = keep(dkv_textOf(o, "line"));
    f->found = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "found"));
    f->control = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, "control"));
    f->cases = sizeOf(o, "cases");
    const cJSON *suite = cJSON_GetObjectItemCaseSensitive(o, "in_suite");
    f->in_suite = cJSON_IsBool(suite) ? cJSON_IsTrue(suite) : -1;
    f->matrix = cJSON_HasObjectItem(o, dkv_gatherRule(0));
    for (int r = 0; r < DKV_GATHER_RULES; r++) f->rule[r] = sizeOf(o, dkv_gatherRule(r));
    return f->fault && f->doc && f->check && f->line ? 0 : -1;
}

int dkv_gatherRecord(dkv_gather *g, const char *json) {
    dkv_problem p = {0};
    dkv_err err = {0};
    int rc = 0;
    cJSON *o = cJSON_ParseWithOpts(json, NULL, true);
    const cJSON *clean = cJSON_GetObjectItemCaseSensitive(o, "clean_cases");
    dkv_status status = dkv_findStatus(dkv_textOf(o, "status"));
    if (dkv_textOf(o, "fault")[0] && cJSON_IsBool(cJSON_GetObjectItemCaseSensitive(o, "found"))) {
        rc = addFault(g, o) ? -1 : 1;
    } else if (cJSON_IsNumber(clean)) {
        g->clean_cases += (long)sizeOf(o, "clean_cases");
        g->false_alarms += (long)sizeOf(o, "false_alarms");
        for (int r = 0; r < DKV_GATHER_RULES; r++) {
            char key[40];
            snprintf(key, sizeof key, "false_alarms_%s", dkv_gatherRule(r));
            g->rule_alarms[r] += (long)sizeOf(o, key);
        }
        rc = 1;
    } else if (dkv_textOf(o, "line")[0] && dkv_textOf(o, "kernel")[0] && dkv_parseProblem(dkv_textOf(o, "line"), NULL, &p, &err) == 0) {
        if (status < DKV_ST_N) rc = addCheck(g, o, &p, status) ? -1 : 1;
        else if (cJSON_GetObjectItemCaseSensitive(o, "ms_fwd")) rc = addBench(g, o, &p) ? -1 : 1;
    }
    dkv_freeProblem(&p);
    cJSON_Delete(o);
    return rc;
}

/* ---- the end ---- */

static void freeKernel(dkv_gather_kernel *k) {
    dkv_wordcount *const words[] = {&k->devices,    &k->commits,   &k->reasons,   &k->arithmetic, &k->profiles,
                                &k->not_judged, &k->waivers,   &k->checks[0], &k->checks[1], &k->checks[2]};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) freeWords(words[i]);
    for (int i = 0; i < k->n_cases; i++) {
        free(k->cases[i].line);
        free(k->cases[i].why);
        free(k->cases[i].replay);
        free(k->cases[i].waived);
        free(k->cases[i].maps);
    }
    dkv_freeCommits(k);
    free(k->cases);
    free(k->lines);
    free(k->name);
    dkv_freePowerTable(&k->power);
    free(k);
}

void dkv_freeGather(dkv_gather *g) {
    dkv_wordcount *const words[] = {&g->devices,   &g->hosts,      &g->drivers, &g->commits,
                                &g->compilers, &g->generators, &g->oracles, &g->flags,
                                &g->libraries, &g->started,    &g->commands};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) freeWords(words[i]);
    for (int i = 0; i < g->n_kernels; i++) freeKernel(g->kernels[i]);
    for (int i = 0; i < g->n_bench; i++) {
        free(g->bench[i].line);
        free(g->bench[i].kernel);
        free(g->bench[i].device);
        free(g->bench[i].commit);
        free(g->bench[i].started);
    }
    for (int i = 0; i < g->n_faults; i++) {
        free(g->faults[i].fault);
        free(g->faults[i].doc);
        free(g->faults[i].check);
        free(g->faults[i].line);
    }
    for (int i = 0; i < g->n_files; i++) {
        free(g->files[i].path);
        free(g->files[i].hash);
    }
    free(g->kernels);
    free(g->bench);
    free(g->faults);
    free(g->files);
    memset(g, 0, sizeof *g);
}
