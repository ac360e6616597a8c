#include "history_print.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of the UTF-8 character at s, 0: none that is one. */
static size_t lengthOf(const unsigned char *s) {
    size_t n = s[0] < 0x80 ? 1 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3 : s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (n == 3 && ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] >= 0xa0))) return 0; /* overlong, surrogates */
    if (n == 4 && ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] >= 0x90))) return 0;
    return n;
}

void dkv_writePlain(FILE *f, const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    for (size_t used = 0, len; *s; s += len, used += len) {
        len = lengthOf(s);
        bool control = *s < 32 || *s == 127 || (s[0] == 0xc2 && s[1] < 0xa0); /* C1, too */
        if (used + (len ? len : 1) > n) {
            fputs("...", f);
            return;
        }
        if (len && !control) fwrite(s, 1, len, f);
        else fputc('?', f);
        if (!len) len = 1;
    }
}

/* ---- CSV ---- */

static void endCell(FILE *f, bool last) { fputs(last ? "\r\n" : ",", f); }

void dkv_writeCell(FILE *f, const char *text, bool last) {
    const unsigned char *s = (const unsigned char *)text;
    bool formula = *s && strchr("=+-@\t\r\n", *s) != NULL, quoted = formula || strpbrk(text, "\",\r\n") != NULL;
    if (quoted) fputc('"', f);
    if (formula) fputc('\'', f);
    for (size_t len; *s; s += len) {
        len = lengthOf(s);
        if (!len || (*s < 32 && *s != '\n' && *s != '\r' && *s != '\t') || *s == 127) {
            fputc('?', f);
            len = len ? len : 1;
            continue;
        }
        if (*s == '"') fputc('"', f);
        fwrite(s, 1, len, f);
    }
    if (quoted) fputc('"', f);
    endCell(f, last);
}

void dkv_writeNumberCell(FILE *f, bool there, double x, bool last) {
    char text[40] = "";
    for (int digits = 6; there && isfinite(x) && digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    if (there && !isfinite(x)) snprintf(text, sizeof text, "%s", isnan(x) ? "nan" : x > 0 ? "inf" : "'-inf");
    fputs(text, f);
    endCell(f, last);
}

void dkv_writeCsvHead(FILE *f) {
    fputs("file,number,", f);
    for (int i = 0; i < DKV_HT_N; i++) dkv_writeCell(f, dkv_historyText(i), false);
    for (int i = 0; i < DKV_HN_N; i++) dkv_writeCell(f, dkv_historyNumber(i), i == DKV_HN_N - 1);
}

void dkv_writeCsvRow(FILE *f, const dkv_history_row *row) {
    dkv_writeCell(f, row->file, false);
    fprintf(f, "%ld,", row->number);
    for (int i = 0; i < DKV_HT_N; i++) dkv_writeCell(f, row->text[i], false);
    for (int i = 0; i < DKV_HN_N; i++) dkv_writeNumberCell(f, row->there >> i & 1, row->x[i], i == DKV_HN_N - 1);
}

/* ---- trends ---- */

int dkv_parseTrend(const char *word) {
    char name[64];
    const char *colon = strchr(word, ':');
    if (!colon) return dkv_findNumber(word);
    if (strncmp(word, "rms_z:", 6) == 0) snprintf(name, sizeof name, "rms_%s", colon + 1);
    else snprintf(name, sizeof name, "%.*s_%s", (int)(colon - word), word, colon + 1);
    int i = dkv_findNumber(name);
    return i < DKV_HN_TENSORS ? -1 : i;
}

static dkv_trend_point *findPoint(dkv_trend *t, const dkv_history_row *row) {
    for (int k = 0; k < t->n; k++) {
        int i = (t->last + k) % t->n;
        dkv_trend_point *p = &t->points[i];
        if (strcmp(p->commit, row->text[DKV_HT_COMMIT]) == 0 && strcmp(p->kernel, row->text[DKV_HT_KERNEL]) == 0 &&
            strcmp(p->hash, row->text[DKV_HT_KERNEL_HASH]) == 0) {
            t->last = i;
            return p;
        }
    }
    dkv_trend_point *points = realloc(t->points, (size_t)(t->n + 1) * sizeof *points);
    if (!points) return NULL;
    t->points = points;
    dkv_trend_point *p = &points[t->n++];
    *p = (dkv_trend_point){.kernel = strdup(row->text[DKV_HT_KERNEL]),
                           .commit = strdup(row->text[DKV_HT_COMMIT]),
                           .hash = strdup(row->text[DKV_HT_KERNEL_HASH]),
                           .time = strdup(row->text[DKV_HT_TIME]),
                           .first = t->rows};
    return p->kernel && p->commit && p->hash && p->time ? p : NULL;
}

int dkv_addTrend(dkv_trend *t, const dkv_history_row *row) {
    t->rows++;
    if (!(row->there >> t->number & 1)) return 0;
    dkv_trend_point *p = findPoint(t, row);
    if (!p) return -1;
    if (strcmp(row->text[DKV_HT_TIME], p->time) < 0) {
        char *time = strdup(row->text[DKV_HT_TIME]);
        if (!time) return -1;
        free(p->time);
        p->time = time;
    }
    if (p->n == p->room) {
        long room = p->room ? 2 * p->room : 64;
        double *values = realloc(p->values, (size_t)room * sizeof *values);
        if (!values) return -1;
        p->values = values;
        p->room = room;
    }
    double x = row->x[t->number];
    p->values[p->n++] = isnan(x) ? INFINITY : x;
    return 0;
}

static int bySize(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int byAge(const void *a, const void *b) {
    const dkv_trend_point *x = a, *y = b;
    int d = strcmp(x->kernel, y->kernel);
    if (!d) d = strcmp(x->time, y->time);
    return d ? d : (x->first > y->first) - (x->first < y->first);
}

void dkv_finishTrend(dkv_trend *t) {
    for (int i = 0; i < t->n; i++) qsort(t->points[i].values, (size_t)t->points[i].n, sizeof(double), bySize);
    if (t->n) qsort(t->points, (size_t)t->n, sizeof *t->points, byAge);
}

static double medianOf(const dkv_trend_point *p) {
    double low = p->values[(p->n - 1) / 2], high = p->values[p->n / 2];
    return low == high ? low : 0.5 * (low + high);
}

/* The medians of points [from, to) as blocks, between their least and largest; infinite ones are '!'. */
static void writeBlocks(const dkv_trend *t, int from, int to, FILE *f) {
    static const char *const blocks[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    double least = INFINITY, most = -INFINITY;
    for (int i = from; i < to; i++) {
        double x = medianOf(&t->points[i]);
        if (!isfinite(x)) continue;
        least = fmin(least, x);
        most = fmax(most, x);
    }
    for (int i = from; i < to; i++) {
        double x = medianOf(&t->points[i]);
        if (!isfinite(x)) fputc('!', f);
        else fputs(blocks[most > least ? (int)(7 * ((x - least) / (most - least)) + 0.5) : 0], f);
    }
}

void dkv_writeTrendTable(const dkv_trend *t, FILE *f) {
    for (int from = 0, to; from < t->n; from = to) {
        for (to = from; to < t->n && strcmp(t->points[to].kernel, t->points[from].kernel) == 0; to++) continue;
        fprintf(f, "%s of ", dkv_historyNumber(t->number));
        dkv_writePlain(f, t->points[from].kernel, 80);
        fputs("  ", f);
        writeBlocks(t, from, to, f);
        fprintf(f, "  (medians, oldest first)\n  %-21s %-15s %-20s %7s %10s %10s %10s\n", "commit", "kernel file", "first run",
                "records", "least", "median", "most");
        for (int i = from; i < to; i++) {
            const dkv_trend_point *p = &t->points[i];
            char *columns = NULL;
            size_t n = 0;
            FILE *m = open_memstream(&columns, &n);
            if (!m) return;
            const char *const words[] = {p->commit, p->hash, p->time};
            static const size_t widths[] = {21, 15, 20}, most[] = {18, 12, 20};
            for (int k = 0; k < 3; k++) {
                long start = ftell(m);
                if (words[k][0]) dkv_writePlain(m, words[k], most[k]);
                else fputc('-', m);
                fflush(m);
                fprintf(m, "%*s ", (int)widths[k] - (int)(ftell(m) - start), "");
            }
            fclose(m);
            fprintf(f, "  %s%7ld %10.4g %10.4g %10.4g\n", columns, p->n, p->values[0], medianOf(p), p->values[p->n - 1]);
            free(columns);
        }
    }
}

void dkv_writeTrendHead(FILE *f) { fputs("what,kernel,commit,kernel_sha256,first_run,records,least,median,most\r\n", f); }

void dkv_writeTrendCsv(const dkv_trend *t, FILE *f) {
    for (int i = 0; i < t->n; i++) {
        const dkv_trend_point *p = &t->points[i];
        dkv_writeCell(f, dkv_historyNumber(t->number), false);
        dkv_writeCell(f, p->kernel, false);
        dkv_writeCell(f, p->commit, false);
        dkv_writeCell(f, p->hash, false);
        dkv_writeCell(f, p->time, false);
        fprintf(f, "%ld,", p->n);
        dkv_writeNumberCell(f, true, p->values[0], false);
        dkv_writeNumberCell(f, true, medianOf(p), false);
        dkv_writeNumberCell(f, true, p->values[p->n - 1], true);
    }
}

void dkv_freeTrend(dkv_trend *t) {
    for (int i = 0; i < t->n; i++) {
        free(t->points[i].kernel);
        free(t->points[i].commit);
        free(t->points[i].hash);
        free(t->points[i].time);
        free(t->points[i].values);
    }
    free(t->points);
    memset(t, 0, sizeof *t);
}
