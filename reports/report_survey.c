#include "report_survey.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "../ref/problem.h"
#include "report_text.h"

enum { SETS_MOST = 64, CASES_MOST = 20000, LONG_TOKENS = 4096 };

/* ---- taking records in ---- */

static int findSet(dkv_survey *s, const char *name) {
    for (int i = 0; i < s->n_sets; i++)
        if (strcmp(s->sets[i], name) == 0) return i;
    char **sets = s->n_sets < SETS_MOST ? realloc(s->sets, (size_t)(s->n_sets + 1) * sizeof *sets) : NULL;
    if (!sets) return -1;
    s->sets = sets;
    return (sets[s->n_sets] = strdup(name)) ? s->n_sets++ : -1;
}

/* The word after --arithmetic in the command that replays the case. */
static void findHeld(const char *replay, char *out, size_t n) {
    const char *at = strstr(replay, " --arithmetic ");
    out[0] = 0;
    if (at) snprintf(out, n, "%.*s", (int)strcspn(at + 14, " "), at + 14);
}

/* A defect of these checks may also be that of a case run between. */
static int repeatedIn(const cJSON *o, dkv_status status) {
    static const char *const checks[] = {"repeat", "sequence"};
    int found = 0;
    for (int i = 0; i < 2; i++) {
        const char *state = dkv_textOf(cJSON_GetObjectItemCaseSensitive(o, "checks"), checks[i]);
        if (strcmp(state, "passed") == 0 && !found) found = 1;
        if (strcmp(state, "note") == 0 || (strcmp(state, "defect") == 0 && status == DKV_ST_NONDETERMINISTIC)) found = 2;
    }
    return found;
}

int dkv_surveyRecord(dkv_survey *s, const char *name, const char *json, dkv_err *err) {
    dkv_problem p = {0};
    dkv_err why = {0};
    cJSON *o = cJSON_ParseWithOpts(json, NULL, true);
    dkv_survey_case c = {.record = o, .status = dkv_findStatus(dkv_textOf(o, "status"))};
    const char *kernel = dkv_textOf(o, "kernel"), *slash = strrchr(kernel, '/');
    int rc = 0;
    if (!cJSON_IsObject(o) || c.status >= DKV_ST_N || !kernel[0] ||
        dkv_parseProblem(dkv_textOf(o, "line"), NULL, &p, &why))
        rc = dkv_fail(err, DKV_EUSER, "not a record of check");
    else if (s->n == CASES_MOST)
        rc = dkv_fail(err, DKV_EUSER, "more than %d records", CASES_MOST);
    if (!rc && s->n == s->room) {
        long room = s->room ? 2 * s->room : 256;
        dkv_survey_case *cases = realloc(s->cases, (size_t)room * sizeof *cases);
        if (cases) s->cases = cases, s->room = room;
        else rc = dkv_fail(err, DKV_EHARNESS, "out of memory for records");
    }
    if (!rc && (c.set = findSet(s, name)) < 0) rc = dkv_fail(err, DKV_EUSER, "more than %d sets of records", SETS_MOST);
    if (!rc) {
        c.tokens = dkv_countQueries(&p);
        c.repeated = repeatedIn(o, c.status);
        snprintf(c.kernel, sizeof c.kernel, "%s", slash ? slash + 1 : kernel);
        snprintf(c.fill, sizeof c.fill, "%s", p.fill);
        findHeld(dkv_textOf(o, "replay"), c.held, sizeof c.held);
        s->cases[s->n++] = c;
    }
    dkv_freeProblem(&p);
    if (rc) cJSON_Delete(o);
    return rc;
}

void dkv_freeSurvey(dkv_survey *s) {
    for (long i = 0; i < s->n; i++) cJSON_Delete(s->cases[i].record);
    for (int i = 0; i < s->n_sets; i++) free(s->sets[i]);
    free(s->cases);
    free(s->sets);
    memset(s, 0, sizeof *s);
}

/* ---- groups: the cases of a kernel in a set ---- */

typedef struct group {
    const dkv_survey_case **cases;
    long n;
    const char *kernel, *set;
} group;

static const cJSON *tensorsOf(const dkv_survey_case *c) { return cJSON_GetObjectItemCaseSensitive(c->record, "tensors"); }
static bool isJudged(const dkv_survey_case *c) { return cJSON_IsObject(tensorsOf(c)); }

static bool isOf(const dkv_survey_case *c, int set, const char *kernel) { return c->set == set && strcmp(c->kernel, kernel) == 0; }

typedef void (*group_fn)(const group *g, FILE *f);

/* fn for each kernel in each of the sets, in the order in which they came. */
static void eachGroup(const dkv_survey *s, uint64_t sets, group_fn fn, FILE *f) {
    const dkv_survey_case **cases = malloc(((size_t)s->n + 1) * sizeof(const dkv_survey_case *));
    for (int set = 0; cases && set < s->n_sets; set++) {
        if (!(sets >> set & 1)) continue;
        for (long i = 0; i < s->n; i++) {
            group g = {.cases = cases, .kernel = s->cases[i].kernel, .set = s->sets[set]};
            bool seen = s->cases[i].set != set;
            for (long k = 0; k < i && !seen; k++) seen = isOf(&s->cases[k], set, g.kernel);
            for (long k = i; k < s->n && !seen; k++)
                if (isOf(&s->cases[k], set, g.kernel)) cases[g.n++] = &s->cases[k];
            if (!seen) fn(&g, f);
        }
    }
    free(cases);
}

/* Words of the cases with how often each came, most frequent first. */
typedef const char *(*word_fn)(const dkv_survey_case *c); /* NULL: not counted */

typedef struct word_count {
    const char *word;
    const dkv_survey_case *first;
    long n;
} word_count;

static int byCount(const void *a, const void *b) {
    const word_count *x = a, *y = b;
    return x->n != y->n ? (x->n < y->n) - (x->n > y->n) : strcmp(x->word, y->word);
}

/* malloc'ed, *n of them; NULL where there is none, or no memory. */
static word_count *countWords(const group *g, word_fn word, int *n) {
    word_count *words = calloc((size_t)g->n + 1, sizeof *words);
    *n = 0;
    for (long i = 0; words && i < g->n; i++) {
        const char *w = word(g->cases[i]);
        int at = 0;
        if (!w) continue;
        while (at < *n && strcmp(words[at].word, w) != 0) at++;
        if (at == *n) words[(*n)++] = (word_count){.word = w, .first = g->cases[i]};
        words[at].n++;
    }
    if (words) qsort(words, (size_t)*n, sizeof *words, byCount);
    return words;
}

static void writeWords(const group *g, word_fn word, bool counts, FILE *f) {
    int n = 0;
    word_count *words = countWords(g, word, &n);
    if (n == 0) fputs("–", f);
    for (int i = 0; i < n; i++) {
        if (i) fputs(", ", f);
        dkv_markText(f, words[i].word, 200);
        if (counts) fprintf(f, " (%ld)", words[i].n);
    }
    free(words);
}

/* ---- verdicts, refusals, profiles ---- */

static const char *statusOf(const dkv_survey_case *c) {
    return c->status == DKV_ST_UNSUPPORTED ? NULL : dkv_statusRow(c->status)->name;
}
static const char *heldOf(const dkv_survey_case *c) {
    return c->status == DKV_ST_UNSUPPORTED ? NULL : c->held[0] ? c->held : "nothing declared";
}
static const char *commitOf(const dkv_survey_case *c) { return dkv_textOf(c->record, "commit"); }
static const char *refusalOf(const dkv_survey_case *c) {
    return c->status == DKV_ST_UNSUPPORTED ? dkv_textOf(c->record, "why") : NULL;
}
static const char *profileOf(const dkv_survey_case *c) {
    const char *name = dkv_textOf(c->record, "profile");
    return !isJudged(c) ? NULL : name[0] ? name : "none that is known";
}

static void verdictRow(const group *g, FILE *f) {
    long judged = 0, refused = 0;
    double elements = 0;
    for (long i = 0; i < g->n; i++) {
        const cJSON *t, *tensors = tensorsOf(g->cases[i]);
        judged += isJudged(g->cases[i]);
        refused += g->cases[i]->status == DKV_ST_UNSUPPORTED;
        cJSON_ArrayForEach(t, tensors) elements += dkv_numberOf(t, "total", 0);
    }
    fputs("| ", f);
    dkv_markText(f, g->kernel, 120);
    fputs(" | ", f);
    dkv_markText(f, g->set, 80);
    fprintf(f, " | %ld | %ld | %ld | %.3g | ", g->n, judged, refused, elements);
    writeWords(g, statusOf, true, f);
    fputs(" | ", f);
    writeWords(g, heldOf, false, f);
    fputs(" | ", f);
    writeWords(g, commitOf, false, f);
    fputs(" |\n", f);
}

static void writeVerdicts(const dkv_survey *s, uint64_t sets, FILE *f) {
    fputs("| kernel | records | lines | judged | refused | elements | verdicts | held to | commit |\n"
          "|---|---|---:|---:|---:|---:|---|---|---|\n", f);
    eachGroup(s, sets, verdictRow, f);
}

static void refusedItem(const group *g, FILE *f) {
    int n = 0;
    word_count *words = countWords(g, refusalOf, &n);
    free(words);
    if (n == 0) return;
    fputs("- ", f);
    dkv_markText(f, g->kernel, 120);
    fputs(" (", f);
    dkv_markText(f, g->set, 80);
    fputs("): ", f);
    writeWords(g, refusalOf, true, f);
    fputs("\n", f);
}

static void writeRefused(const dkv_survey *s, uint64_t sets, FILE *f) { eachGroup(s, sets, refusedItem, f); }

static void profileRows(const group *g, FILE *f) {
    int n = 0;
    word_count *words = countWords(g, profileOf, &n);
    for (int i = 0; i < n; i++) {
        fputs("| ", f);
        dkv_markText(f, g->kernel, 120);
        fputs(" | ", f);
        dkv_markText(f, g->set, 80);
        fputs(" | ", f);
        dkv_markText(f, words[i].word, 120);
        fprintf(f, " | %ld | ", words[i].n);
        dkv_markText(f, dkv_textOf(words[i].first->record, "arithmetic"), 400);
        fputs(" |\n", f);
    }
    free(words);
}

static void writeProfiles(const dkv_survey *s, uint64_t sets, FILE *f) {
    fputs("| kernel | records | behaves as | lines | that is, in the first of them |\n|---|---|---|---:|---|\n", f);
    eachGroup(s, sets, profileRows, f);
}

/* ---- errors ---- */

/* A tensor of a case, or a region of it; NULL where there is none. */
static const cJSON *tensorOf(const dkv_survey_case *c, int id, int region) {
    const cJSON *t = cJSON_GetObjectItemCaseSensitive(tensorsOf(c), dkv_tensorName((dkv_tensor_id)id));
    const cJSON *regions = cJSON_GetObjectItemCaseSensitive(t, "regions");
    if (region >= 0) t = cJSON_GetObjectItemCaseSensitive(regions, dkv_regionName(region));
    return cJSON_IsObject(t) ? t : NULL;
}

static int byNumber(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double larger(double most, double x) { return isnan(most) || x <= most ? most : x; } /* NaN wins, and stays */

static void errorRow(const group *g, bool aligned, int id, double *rms, FILE *f) {
    long cases = 0, n = 0;
    double ratio = 0, share = NAN, gain = NAN, gain_share = NAN;
    for (long i = 0; i < g->n; i++) {
        const cJSON *t = (strcmp(g->cases[i]->fill, "aligned") == 0) == aligned ? tensorOf(g->cases[i], id, -1) : NULL;
        if (!t) continue;
        cases++;
        ratio = larger(ratio, dkv_numberOf(t, "max_bound_ratio", NAN));
        const double z = dkv_numberOf(t, "twin_rms", NAN), a = fabs(dkv_numberOf(t, "twin_gain", NAN)),
                     most = dkv_numberOf(t, "twin_gain_limit", NAN);
        if (!isfinite(z)) continue;
        rms[n++] = z;
        share = fmax(share, z / dkv_numberOf(t, "twin_rms_limit", NAN)); /* fmax passes over NaN */
        if (!isfinite(most) || !(most > 0)) continue;                    /* too few rows to say */
        gain = fmax(gain, a);
        gain_share = fmax(gain_share, a / most);
    }
    if (!cases) return;
    fputs("| ", f);
    dkv_markText(f, g->kernel, 120);
    fputs(" | ", f);
    dkv_markText(f, g->set, 80);
    fprintf(f, " | %s | %s | %ld | ", aligned ? "aligned" : "others", dkv_tensorName((dkv_tensor_id)id), cases);
    dkv_writeFigure(f, ratio);
    if (n) {
        qsort(rms, (size_t)n, sizeof *rms, byNumber);
        fprintf(f, " | %.2f (%.2f to %.2f) | ", rms[n / 2], rms[0], rms[n - 1]);
    } else fputs(" | – | ", f);
    dkv_writeFigure(f, share);
    fputs(" | ", f);
    dkv_writeFigure(f, gain);
    fputs(" | ", f);
    dkv_writeFigure(f, gain_share);
    fputs(" |\n", f);
}

static void errorRows(const group *g, FILE *f) {
    double *rms = malloc(((size_t)g->n + 1) * sizeof *rms);
    for (int aligned = 0; rms && aligned < 2; aligned++)
        for (int id = 0; id < DKV_N_OUTPUTS; id++) errorRow(g, aligned, id, rms, f);
    free(rms);
}

static void writeErrors(const dkv_survey *s, uint64_t sets, FILE *f) {
    fputs("| kernel | records | fill | tensor | lines | largest err/bound | rms z: median (least to most) | largest, of its limit | "
          "largest gain beyond the twin | of its limit |\n|---|---|---|---|---:|---:|---:|---:|---:|---:|\n", f);
    eachGroup(s, sets, errorRows, f);
}

/* ---- long lines, each by itself ---- */

static int byLine(const void *a, const void *b) {
    const dkv_survey_case *x = *(const dkv_survey_case *const *)a, *y = *(const dkv_survey_case *const *)b;
    int d = strcmp(x->fill, y->fill); /* aligned first */
    if (!d) d = (x->tokens > y->tokens) - (x->tokens < y->tokens);
    if (!d) d = strcmp(dkv_textOf(x->record, "line"), dkv_textOf(y->record, "line"));
    if (!d) d = strcmp(x->kernel, y->kernel);
    return d ? d : (x > y) - (x < y);
}

typedef void (*row_fn)(const dkv_survey_case *c, FILE *f);

static void eachLong(const dkv_survey *s, uint64_t sets, row_fn row, FILE *f) {
    const dkv_survey_case **cases = malloc(((size_t)s->n + 1) * sizeof(const dkv_survey_case *));
    size_t n = 0;
    for (long i = 0; cases && i < s->n; i++)
        if (s->cases[i].tokens >= LONG_TOKENS && sets >> s->cases[i].set & 1 && isJudged(&s->cases[i]))
            cases[n++] = &s->cases[i];
    if (n) qsort(cases, n, sizeof *cases, byLine);
    for (size_t i = 0; i < n; i++) {
        const char *line = dkv_textOf(cases[i]->record, "line");
        fputs("| ", f);
        dkv_markText(f, strncmp(line, "shape=", 6) == 0 ? line + 6 : line, 200);
        fputs(" | ", f);
        dkv_markText(f, cases[i]->kernel, 120);
        fprintf(f, " | ");
        row(cases[i], f);
        fputs("\n", f);
    }
    free(cases);
}

static void longRow(const dkv_survey_case *c, FILE *f) {
    fprintf(f, "%s%s", dkv_statusRow(c->status)->name, c->held[0] ? " as " : "");
    dkv_markText(f, c->held, 80);
    fputs(" |", f);
    for (int id = 0; id < DKV_DSINK; id++) {
        const cJSON *t = tensorOf(c, id, -1);
        double z = dkv_numberOf(t, "twin_rms", NAN);
        fputs(" ", f);
        if (t) dkv_writeFigure(f, dkv_numberOf(t, "max_bound_ratio", NAN));
        if (isfinite(z)) fprintf(f, "; %.2f of %.2f", z, dkv_numberOf(t, "twin_rms_limit", NAN));
        fputs(" |", f);
    }
}

static void writeLong(const dkv_survey *s, uint64_t sets, FILE *f) {
    fputs("| line | kernel | verdict | O | LSE | dQ | dK | dV |\n|---|---|---|---:|---:|---:|---:|---:|\n", f);
    eachLong(s, sets, longRow, f);
}

static void biasRow(const dkv_survey_case *c, FILE *f) {
    static const struct { dkv_tensor_id id; int region; } cells[] = {{DKV_O, -1}, {DKV_DQ, -1}, {DKV_DK, 0},
                                                                    {DKV_DK, 1}, {DKV_DV, 0},  {DKV_DV, 1}};
    for (size_t i = 0; i < sizeof cells / sizeof *cells; i++) {
        const cJSON *t = tensorOf(c, (int)cells[i].id, cells[i].region);
        const double gain = dkv_numberOf(t, "twin_gain", NAN), truth = dkv_numberOf(t, "truth_gain", NAN);
        if (i) fputs(" ", f);
        if (isfinite(gain)) fprintf(f, "%+.1e of ", gain), dkv_writeFigure(f, dkv_numberOf(t, "twin_gain_limit", NAN));
        else fputs("–", f);
        if (isfinite(truth)) fprintf(f, "; %+.1e", truth);
        fputs(" |", f);
    }
}

static void writeBias(const dkv_survey *s, uint64_t sets, FILE *f) {
    fputs("| line | kernel | O | dQ | dK of prompts | dK of responses | dV of prompts | dV of responses |\n"
          "|---|---|---:|---:|---:|---:|---:|---:|\n", f);
    eachLong(s, sets, biasRow, f);
}

/* ---- repeats ---- */

static void repeatRow(const group *g, FILE *f) {
    long same = 0, other = 0;
    for (long i = 0; i < g->n; i++) same += g->cases[i]->repeated == 1, other += g->cases[i]->repeated == 2;
    if (same + other == 0) return;
    fputs("| ", f);
    dkv_markText(f, g->kernel, 120);
    fputs(" | ", f);
    dkv_markText(f, g->set, 80);
    fprintf(f, " | %ld | %ld | %ld | ", same + other, same, other);
    for (long i = 0, told = 0; i < g->n && told < 3; i++) {
        if (g->cases[i]->repeated != 2) continue;
        if (told++) fputs("; ", f);
        dkv_markText(f, dkv_textOf(g->cases[i]->record, "line"), 160);
        fputs(": ", f);
        const cJSON *notes = cJSON_GetObjectItemCaseSensitive(g->cases[i]->record, "notes");
        const char *note = dkv_textOf(notes, "repeat");
        dkv_markText(f, note[0] ? note : dkv_textOf(notes, "sequence"), 240);
    }
    fputs(" |\n", f);
}

static void writeRepeats(const dkv_survey *s, uint64_t sets, FILE *f) {
    fputs("| kernel | records | lines run again | the same bits | other bits | which |\n|---|---|---:|---:|---:|---|\n", f);
    eachGroup(s, sets, repeatRow, f);
}

/* ---- what did not pass, and single cases ---- */

static void writeNumbers(const dkv_survey_case *c, FILE *f) {
    for (int id = 0, any = 0; id < DKV_N_OUTPUTS; id++) {
        const cJSON *t = tensorOf(c, id, -1);
        if (!t) continue;
        const double z = dkv_numberOf(t, "twin_rms", NAN), gain = dkv_numberOf(t, "truth_gain", NAN);
        fprintf(f, "%s%s ", any++ ? ", " : " Largest err/bound: ", dkv_tensorName((dkv_tensor_id)id));
        dkv_writeFigure(f, dkv_numberOf(t, "max_bound_ratio", NAN));
        if (isfinite(z)) {
            fprintf(f, " (rms z %.2f of ", z);
            dkv_writeFigure(f, dkv_numberOf(t, "twin_rms_limit", NAN));
            if (isfinite(gain)) fprintf(f, ", gain %+.1e", gain);
            fputs(")", f);
        }
    }
}

static void writeCase(const dkv_survey_case *c, FILE *f) {
    const char *replay = dkv_textOf(c->record, "replay"), *why = dkv_textOf(c->record, "why");
    fprintf(f, "- **%s** ", dkv_statusRow(c->status)->name);
    dkv_markText(f, c->kernel, 120);
    if (c->held[0]) fputs(" as ", f);
    dkv_markText(f, c->held, 80);
    fputs(", ", f);
    dkv_markText(f, dkv_textOf(c->record, "line"), 300);
    if (why[0]) fputs(": ", f);
    dkv_markText(f, why, 500);
    fputs(".", f);
    writeNumbers(c, f);
    fprintf(f, " (commit ");
    dkv_markText(f, commitOf(c), 60);
    fputs(")\n", f);
    if (!replay[0]) return;
    dkv_markCode(f, replay);
    fputs("\n", f);
}

static void failedItems(const group *g, FILE *f) {
    for (long i = 0; i < g->n; i++)
        if (g->cases[i]->status != DKV_ST_PASSED && g->cases[i]->status != DKV_ST_UNSUPPORTED) writeCase(g->cases[i], f);
}

static void writeFailed(const dkv_survey *s, uint64_t sets, FILE *f) { eachGroup(s, sets, failedItems, f); }

int dkv_surveyCase(const dkv_survey *s, int set, const char *kernel, const char *words, const char *line, FILE *f,
                   dkv_err *err) {
    for (long i = s->n - 1; i >= 0; i--) {
        const dkv_survey_case *c = &s->cases[i];
        if (!isOf(c, set, kernel) || strcmp(dkv_textOf(c->record, "line"), line) != 0) continue;
        if (words && !strstr(dkv_textOf(c->record, "replay"), words)) continue;
        writeCase(c, f);
        return 0;
    }
    return dkv_fail(err, DKV_EUSER, "no record of %.100s%s%.60s on '%.200s'", kernel, words ? " with " : "",
                    words ? words : "", line);
}

static const struct { const char *name; dkv_survey_table write; } tables[] = {
    {"verdicts", writeVerdicts}, {"refused", writeRefused}, {"profiles", writeProfiles}, {"errors", writeErrors},
    {"long", writeLong},         {"bias", writeBias},       {"repeats", writeRepeats},   {"failed", writeFailed}};

dkv_survey_table dkv_findSurveyTable(const char *name) {
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (strcmp(tables[i].name, name) == 0) return tables[i].write;
    return NULL;
}
