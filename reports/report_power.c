#include "report_power.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "report_text.h"

#define COLUMNS 16 /* faults of a table */

static double numberOf(const cJSON *x) {
    if (cJSON_IsNumber(x)) return x->valuedouble;
    const char *s = cJSON_GetStringValue(x);
    return s && strcmp(s, "inf") == 0 ? INFINITY : NAN;
}

/* Names are ours: what holds anything else is not one. */
static bool isName(const char *s, size_t most) {
    static const char usual[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-_. ";
    return s && s[0] && strlen(s) <= most && s[strspn(s, usual)] == 0;
}

static dkv_power_row *findRow(dkv_power_table *t, const char *kernel, const char *stratum, const char *fault) {
    for (int i = 0; i < t->n_rows; i++) {
        int at = t->next + i < t->n_rows ? t->next + i : t->next + i - t->n_rows;
        dkv_power_row *w = &t->rows[at];
        if (strcmp(w->stratum, stratum) == 0 && strcmp(w->fault, fault) == 0 &&
            strncmp(w->kernel, kernel, sizeof w->kernel - 1) == 0) {
            t->next = at + 1 < t->n_rows ? at + 1 : 0;
            return w;
        }
    }
    if (t->n_rows == DKV_POWER_ROWS) return NULL;
    if ((t->n_rows & (t->n_rows - 1)) == 0) { /* room for the next power of two */
        dkv_power_row *rows = realloc(t->rows, (size_t)(2 * t->n_rows + 1) * sizeof *rows);
        if (!rows) return NULL;
        t->rows = rows;
    }
    dkv_power_row *w = &t->rows[t->n_rows++];
    memset(w, 0, sizeof *w);
    snprintf(w->kernel, sizeof w->kernel, "%s", kernel);
    snprintf(w->stratum, sizeof w->stratum, "%s", stratum);
    snprintf(w->fault, sizeof w->fault, "%s", fault);
    return w;
}

/* The least of those seen; 0 stands for none. */
static void lower(double *least, double x) {
    if (x > 0 && isfinite(x) && (*least == 0 || x < *least)) *least = x;
}

int dkv_addPowerRecord(dkv_power_table *t, const cJSON *record) {
    const cJSON *power = cJSON_GetObjectItemCaseSensitive(record, "power"), *stratum, *fault;
    const char *kernel = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "kernel"));
    if (!cJSON_IsObject(power) || !kernel) return 0;
    t->cases++;
    double longest = numberOf(cJSON_GetObjectItemCaseSensitive(power, "longest"));
    if (longest > t->longest) t->longest = longest;
    lower(&t->scale, numberOf(cJSON_GetObjectItemCaseSensitive(power, "scale_error")));
    lower(&t->gain, numberOf(cJSON_GetObjectItemCaseSensitive(power, "dK_gain")));
    cJSON_ArrayForEach(stratum, cJSON_GetObjectItemCaseSensitive(power, "strata")) {
        cJSON_ArrayForEach(fault, stratum) {
            double ratio = numberOf(fault);
            if (!isName(stratum->string, 31) || !isName(fault->string, 15)) continue;
            dkv_power_row *w = findRow(t, kernel, stratum->string, fault->string);
            if (!w && t->n_rows == DKV_POWER_ROWS) continue;
            if (!w) return -1;
            w->cases++;
            w->caught += ratio > 1;
            if (ratio > w->best) w->best = ratio;
        }
    }
    return 0;
}

void dkv_freePowerTable(dkv_power_table *t) {
    free(t->rows);
    memset(t, 0, sizeof *t);
}

/* ---- strata in order ---- */

static int tensorOrder(const char *stratum) {
    static const char *const order[] = {"O ", "LSE ", "dQ ", "dK ", "dV "};
    for (int i = 0; i < 5; i++)
        if (strncmp(stratum, order[i], strlen(order[i])) == 0) return i;
    return 5;
}

static int byStratum(const void *a, const void *b) {
    const dkv_power_row *x = a, *y = b;
    char region[2][16] = {"", ""};
    long least[2] = {0, 0};
    int d = strcmp(x->kernel, y->kernel);
    if (!d) d = tensorOrder(x->stratum) - tensorOrder(y->stratum);
    if (d) return d;
    sscanf(x->stratum, "%*s %15s %ld", region[0], &least[0]);
    sscanf(y->stratum, "%*s %15s %ld", region[1], &least[1]);
    d = strcmp(region[0], region[1]);
    return d ? d : (least[0] > least[1]) - (least[0] < least[1]);
}

static bool isSame(const dkv_power_row *a, const dkv_power_row *b) {
    return strcmp(a->kernel, b->kernel) == 0 && strcmp(a->stratum, b->stratum) == 0;
}

dkv_power_row *dkv_sortPowerRows(const dkv_power_table *t) {
    dkv_power_row *rows = malloc((size_t)(t->n_rows + 1) * sizeof *rows);
    if (!rows) return NULL;
    if (t->n_rows) memcpy(rows, t->rows, (size_t)t->n_rows * sizeof *rows);
    qsort(rows, (size_t)t->n_rows, sizeof *rows, byStratum);
    return rows;
}

int dkv_countBlind(const dkv_power_table *t) {
    dkv_power_row *rows = dkv_sortPowerRows(t);
    int n = 0;
    for (int i = 0, end; rows && i < t->n_rows; i = end) {
        bool blind = false;
        for (end = i; end < t->n_rows && isSame(&rows[end], &rows[i]); end++) blind |= rows[end].caught == 0;
        n += blind;
    }
    free(rows);
    return n;
}

void dkv_writeBlind(const dkv_power_table *t, FILE *f, const char *before, int most) {
    dkv_power_row *rows = dkv_sortPowerRows(t);
    for (int i = 0, end; rows && i < t->n_rows && most > 0; i = end) {
        int n = 0;
        for (end = i; end < t->n_rows && isSame(&rows[end], &rows[i]); end++) {
            if (rows[end].caught) continue;
            if (n++) fprintf(f, ", %s", rows[end].fault);
            else fprintf(f, "%s%s (%s): no case would have seen %s", before, rows[i].stratum, rows[i].kernel, rows[end].fault);
        }
        if (!n) continue;
        fprintf(f, "\n");
        most--;
    }
    free(rows);
}

void dkv_markBlind(const dkv_power_table *t, FILE *f, int most) {
    dkv_power_row *rows = dkv_sortPowerRows(t);
    int told = 0;
    for (int i = 0, end; rows && i < t->n_rows; i = end) {
        int n = 0;
        for (end = i; end < t->n_rows && isSame(&rows[end], &rows[i]); end++) {
            if (rows[end].caught || (n == 0 && told >= most)) continue;
            if (n++) fprintf(f, ", %s", rows[end].fault);
            else fprintf(f, "- %s: no case would have seen %s", rows[i].stratum, rows[end].fault);
        }
        if (n) fputs("\n", f);
        told += n > 0;
    }
    if (told < dkv_countBlind(t)) fprintf(f, "- and %d more\n", dkv_countBlind(t) - told);
    free(rows);
}

void dkv_writePowerWords(const dkv_power_table *t, FILE *f) {
    const char *between = "";
    if (t->longest > 0) {
        fprintf(f, "one lost key up to length %.0f", t->longest);
        between = "; ";
    }
    if (t->scale > 0 && t->scale < 1) {
        fprintf(f, "%sa scale error of %.1e", between, t->scale);
        between = "; ";
    }
    if (t->gain > 0 && t->gain < 1) {
        fprintf(f, "%sa dK gain of %.1e", between, t->gain);
        between = "; ";
    }
    if (!between[0]) fprintf(f, "nothing");
}

void dkv_writePowerTable(const dkv_power_table *t, FILE *f) {
    const char *columns[COLUMNS];
    int n = 0;
    dkv_power_row *rows = dkv_sortPowerRows(t);
    for (int i = 0; rows && i < t->n_rows; i++) {
        int k = 0;
        while (k < n && strcmp(columns[k], t->rows[i].fault) != 0) k++;
        if (k == n && n < COLUMNS) columns[n++] = t->rows[i].fault;
    }
    if (!n) {
        free(rows);
        return;
    }
    fprintf(f, "| kernel | stratum |");
    for (int k = 0; k < n; k++) fprintf(f, " %s |", columns[k]);
    fprintf(f, "\n|---|---|");
    for (int k = 0; k < n; k++) fprintf(f, "---|");
    for (int i = 0, end; i < t->n_rows; i = end) {
        for (end = i; end < t->n_rows && isSame(&rows[end], &rows[i]); end++) continue;
        fputs("\n| ", f);
        dkv_markText(f, rows[i].kernel, 0);
        fprintf(f, " | %s |", rows[i].stratum);
        for (int k = 0; k < n; k++) {
            const dkv_power_row *w = NULL;
            for (int e = i; e < end; e++)
                if (strcmp(rows[e].fault, columns[k]) == 0) w = &rows[e];
            if (!w) fprintf(f, " |");
            else fprintf(f, w->caught ? " %ld of %ld, %.2g |" : " **%ld of %ld, %.2g** |", w->caught, w->cases, w->best);
        }
    }
    fprintf(f, "\n");
    free(rows);
}
