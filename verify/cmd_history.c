#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli.h"
#include "history.h"
#include "history_print.h"

enum { TRENDS_MAX = 16 };

/* ---- what is wanted ---- */

static int parseStatuses(const char *words, uint32_t *out, dkv_err *err) {
    const char *names[DKV_ST_N + 1];
    for (int s = 0; s < DKV_ST_N; s++) names[s] = dkv_statusRow((dkv_status)s)->name;
    names[DKV_ST_N] = "defect";
    for (const char *w = words, *end; *w || w == words; w = *end ? end + 1 : end) {
        char name[40];
        end = w + strcspn(w, ",");
        snprintf(name, sizeof name, "%.*s", (int)(end - w < 39 ? end - w : 39), w);
        dkv_status s = dkv_findStatus(name);
        if (s < DKV_ST_N) *out |= UINT32_C(1) << s;
        else if (strcmp(name, "defect") == 0) {
            for (int k = 0; k < DKV_ST_N; k++)
                if (dkv_statusRow((dkv_status)k)->defect) *out |= UINT32_C(1) << k;
        } else {
            const char *near = dkv_nearestWord(name, names, DKV_ST_N + 1);
            return dkv_fail(err, DKV_EUSER, "--status: no status '%s'%s%s%s", name, near ? ": did you mean '" : " (`dualkv list statuses`)",
                            near ? near : "", near ? "'?" : "");
        }
    }
    return 0;
}

/* 2026-01-31, 2026-01-31T12:00:00Z, or how long ago: 12h, 30d. */
static int parseSince(const char *word, char out[24], dkv_err *err) {
    static const char shape[] = "dddd-dd-ddTdd:dd:ddZ";
    size_t n = strlen(word);
    char *end;
    double ago = strtod(word, &end);
    if (n && (*end == 'd' || *end == 'h') && !end[1] && ago >= 0 && ago < 1e6 && word[0] >= '0' && word[0] <= '9') {
        time_t then = time(NULL) - (time_t)(ago * (*end == 'd' ? 86400 : 3600));
        struct tm utc;
        if (gmtime_r(&then, &utc) && strftime(out, 24, "%Y-%m-%dT%H:%M:%SZ", &utc)) return 0;
    }
    bool fits = n == 10 || n == sizeof shape - 1;
    for (size_t i = 0; i < n && fits; i++)
        fits = shape[i] == 'd' ? word[i] >= '0' && word[i] <= '9' : word[i] == shape[i];
    if (!fits) return dkv_fail(err, DKV_EUSER, "--since: '%.80s' is no time such as 2026-01-31, 2026-01-31T12:00:00Z, 12h or 30d", word);
    snprintf(out, 24, "%s", word);
    return 0;
}

static int parseTensor(const char *word, int *out, dkv_err *err) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (strcmp(dkv_tensorName((dkv_tensor_id)id), word) == 0) {
            *out = 1 + id;
            return 0;
        }
    return dkv_fail(err, DKV_EUSER, "--tensor: '%.40s' is none of O, LSE, dQ, dK, dV, dSink", word);
}

typedef struct show {
    const dkv_cli *cli;
    dkv_history h;
    dkv_history_filter filter;
    char since[24];
    dkv_trend trends[TRENDS_MAX];
    int n_trends;
    FILE *csv;
    long counts[DKV_ST_N], benches, rows;
} show;

static int parseTrends(show *s, const char *words, dkv_err *err) {
    for (const char *w = words, *end; *w || w == words; w = *end ? end + 1 : end) {
        char name[64];
        end = w + strcspn(w, ",");
        snprintf(name, sizeof name, "%.*s", (int)(end - w < 63 ? end - w : 63), w);
        int number = dkv_parseTrend(name);
        char whole[72];
        snprintf(whole, sizeof whole, "%s:dK", name);
        if (number < 0 && dkv_parseTrend(whole) >= 0)
            return dkv_fail(err, DKV_EUSER, "--trend: %s of which output? %s, for one", name, whole);
        if (number < 0)
            return dkv_fail(err, DKV_EUSER, "--trend: '%s' is none of ratio, rms, gain, mean, bad of an output (rms:dK), seconds, "
                                            "ms_fwd, ms_bwd, tflops_fwd, tflops_bwd", name);
        if (s->n_trends == TRENDS_MAX) return dkv_fail(err, DKV_EUSER, "--trend: more than %d", TRENDS_MAX);
        s->trends[s->n_trends++].number = number;
    }
    return 0;
}

static int parseWishes(show *s, dkv_err *err) {
    const dkv_cli *cli = s->cli;
    int rc = 0;
    s->filter = (dkv_history_filter){.kernel = cli->named, .commit = cli->commit, .line = cli->line, .device = cli->device};
    if (cli->status) rc = parseStatuses(cli->status, &s->filter.statuses, err);
    if (!rc && cli->since && !(rc = parseSince(cli->since, s->since, err))) s->filter.since = s->since;
    if (!rc && cli->tensor) rc = parseTensor(cli->tensor, &s->filter.tensor, err);
    if (!rc && cli->trend) rc = parseTrends(s, cli->trend, err);
    return rc;
}

/* ---- what there is ---- */

static void writeRow(const show *s, const dkv_history_row *row) {
    int tensor = s->filter.tensor - 1, at;
    double worst = dkv_worstOf(row, &tensor);
    if (s->filter.tensor) tensor = s->filter.tensor - 1;
    dkv_writePlain(stdout, row->text[DKV_HT_STATUS][0] ? row->text[DKV_HT_STATUS] : "bench", 20);
    fputs("  ", stdout);
    dkv_writePlain(stdout, row->text[DKV_HT_COMMIT], 20);
    if (row->text[DKV_HT_TIME][0]) fputs("  ", stdout);
    dkv_writePlain(stdout, row->text[DKV_HT_TIME], 20);
    fputs("  ", stdout);
    dkv_writePlain(stdout, row->text[DKV_HT_KERNEL], 80);
    if (worst >= 0) {
        at = DKV_HN_TENSORS + tensor * DKV_HN_EACH;
        printf("  %s %.2g", dkv_tensorName((dkv_tensor_id)tensor), row->x[at + DKV_HN_RATIO]);
        if (s->filter.tensor && row->there >> (at + DKV_HN_RMS) & 1) printf(" rms %.3g", row->x[at + DKV_HN_RMS]);
    }
    if (row->there >> DKV_HN_MS_FWD & 1) printf("  %.4g ms", row->x[DKV_HN_MS_FWD]);
    if (row->there >> DKV_HN_MS_BWD & 1) printf(" + %.4g ms", row->x[DKV_HN_MS_BWD]);
    fputs("  ", stdout);
    dkv_writePlain(stdout, row->text[DKV_HT_LINE], 400);
    if (s->cli->verbose) {
        fputs("\n  ", stdout);
        dkv_writePlain(stdout, row->file, 400);
        printf(":%ld", row->number);
        if (row->text[DKV_HT_WHY][0]) fputs(": ", stdout);
        dkv_writePlain(stdout, row->text[DKV_HT_WHY], 600);
    }
    fputc('\n', stdout);
}

static int takeRow(const dkv_history_row *row, void *arg) {
    show *s = arg;
    dkv_status status = dkv_findStatus(row->text[DKV_HT_STATUS]);
    s->rows++;
    if (status < DKV_ST_N) s->counts[status]++;
    else s->benches++;
    for (int i = 0; i < s->n_trends; i++)
        if (dkv_addTrend(&s->trends[i], row)) return DKV_EHARNESS;
    if (s->n_trends) return 0;
    if (s->csv) dkv_writeCsvRow(s->csv, row);
    else writeRow(s, row);
    return 0;
}

/* What the listing is of; on stderr where stdout is the CSV. */
static void writeSummary(const show *s) {
    FILE *f = s->csv == stdout ? stderr : stdout;
    const char *between = ": ";
    fprintf(f, "%ld record%s in %d file%s", s->rows, s->rows == 1 ? "" : "s", s->h.n_files, s->h.n_files == 1 ? "" : "s");
    for (int i = 0; i < DKV_ST_N; i++) {
        if (!s->counts[i]) continue;
        fprintf(f, "%s%ld %s", between, s->counts[i], dkv_statusRow((dkv_status)i)->name);
        between = ", ";
    }
    if (s->benches) fprintf(f, "%s%ld of bench", between, s->benches);
    fputc('\n', f);
}

static void writeNotes(const show *s) {
    long bad = 0;
    for (int i = 0; i < s->h.n_notes; i++) fprintf(stderr, "dualkv: history: %s\n", s->h.notes[i]);
    for (int i = 0; i < s->h.n_files; i++) {
        const dkv_history_file *file = &s->h.files[i];
        bad += file->bad;
        if (!file->bad && !file->cut) continue;
        if (bad > file->bad && !s->cli->verbose) continue;
        fputs("dualkv: history: ", stderr);
        dkv_writePlain(stderr, file->shown, 300);
        if (file->bad)
            fprintf(stderr, ":%ld: %ld line%s no record and %s skipped\n", file->first_bad, file->bad, file->bad == 1 ? " is" : "s are",
                    file->bad == 1 ? "was" : "were");
        else fputs(": a line is too long: what follows was not read\n", stderr);
    }
}

static int openCsv(show *s, dkv_err *err) {
    const char *path = s->cli->csv;
    char *real = path ? realpath(path, NULL) : NULL;
    bool mine = false;
    for (int i = 0; real && i < s->h.n_files; i++) mine |= strcmp(real, s->h.files[i].path) == 0;
    free(real);
    if (!path) return 0;
    if (mine) return dkv_fail(err, DKV_EUSER, "--csv: '%s' holds records", path);
    s->csv = strcmp(path, "-") == 0 ? stdout : fopen(path, "we");
    if (!s->csv) return dkv_fail(err, DKV_EUSER, "--csv: cannot write '%s': %s", path, strerror(errno));
    if (s->n_trends) dkv_writeTrendHead(s->csv);
    else dkv_writeCsvHead(s->csv);
    return 0;
}

static int writeTrends(show *s, dkv_err *err) {
    int points = 0;
    for (int i = 0; i < s->n_trends; i++) {
        dkv_trend *t = &s->trends[i];
        dkv_finishTrend(t);
        points += t->n;
        if (s->csv) dkv_writeTrendCsv(t, s->csv);
        else dkv_writeTrendTable(t, stdout);
    }
    return points ? 0 : dkv_fail(err, DKV_EHARNESS, "history: no record of these has %s", s->cli->trend);
}

int dkv_cmdHistory(const dkv_cli *cli) {
    dkv_err err = {0};
    show *s = calloc(1, sizeof *s);
    int rc = s ? 0 : dkv_fail(&err, DKV_EHARNESS, "out of memory");
    if (rc) return dkv_complain(&err);
    s->cli = cli;
    rc = parseWishes(s, &err);
    if (!rc) rc = dkv_openHistory(cli->words, cli->n_words, cli->index, cli->rebuild, &s->h, &err);
    if (!rc) writeNotes(s);
    if (!rc) rc = openCsv(s, &err);
    if (!rc && (rc = dkv_eachRow(&s->h, &s->filter, takeRow, s, &err)) && !err.code)
        rc = dkv_fail(&err, DKV_EHARNESS, "out of memory for trends");
    if (!rc && s->rows == 0) rc = dkv_fail(&err, DKV_EHARNESS, "history: no record in what was given is like that");
    if (!rc && s->n_trends) rc = writeTrends(s, &err);
    if (s->csv && s->csv != stdout && (ferror(s->csv) | fclose(s->csv)) && !rc)
        rc = dkv_fail(&err, DKV_EHARNESS, "cannot write '%s'", cli->csv);
    if (!rc && (!s->n_trends || s->csv)) writeSummary(s);
    for (int i = 0; i < s->n_trends; i++) dkv_freeTrend(&s->trends[i]);
    dkv_closeHistory(&s->h);
    free(s);
    return rc ? dkv_complain(&err) : DKV_EXIT_OK;
}
