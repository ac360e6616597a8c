#include "report_map.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "../ref/problem.h"
#include "../ref/tensors.h"
#include "report_text.h"

enum { NONE = -1, BOUND = 15, NOT_FINITE = 52 };

/* ---- from a record: anything may stand there ---- */

static bool readAxis(const cJSON *o, const char *key, dkv_picture_axis *a) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, key), *n;
    const cJSON *tiles = cJSON_GetObjectItemCaseSensitive(x, "tiles"), *cells = tiles;
    double first = dkv_numberOf(x, "first_segment", 0);
    int at = 0;
    *a = (dkv_picture_axis){.tile = dkv_numberOf(x, "tile", NAN)};
    if (!(a->tile >= 1 && a->tile <= 1e15) || !(first >= 0 && first <= 1e9)) return false;
    a->first = (int)first;
    if (!cells) cells = cJSON_GetObjectItemCaseSensitive(x, "heads");
    cJSON_ArrayForEach(n, cells) {
        if (!cJSON_IsNumber(n) || at == DKV_PICTURE_SIDE || !(n->valuedouble >= 0 && n->valuedouble <= DKV_PICTURE_SIDE)) return false;
        a->cells[at] = (uint8_t)n->valuedouble;
        a->total += a->cells[at++];
    }
    a->n = cJSON_IsArray(tiles) ? at : 0;
    return at > 0 && a->total > 0 && a->total <= DKV_PICTURE_SIDE;
}

static int levelOf(char c) {
    return c >= 'A' && c <= 'Z' ? c - 'A' : c >= 'a' && c <= 'z' ? c - 'a' + 26 : c == '!' ? NOT_FINITE : NONE;
}

static bool readPicture(const cJSON *o, const char *name, dkv_picture *p) {
    const char *cells = dkv_textOf(o, "cells");
    if (!cJSON_IsObject(o) || !readAxis(o, "rows", &p->rows) || !readAxis(o, "columns", &p->columns)) return false;
    if (strlen(cells) != (size_t)(p->rows.total * p->columns.total)) return false;
    for (int i = 0; cells[i]; i++) p->level[i] = (int8_t)levelOf(cells[i]);
    snprintf(p->name, sizeof p->name, "%s", name);
    return true;
}

int dkv_readPictures(const cJSON *record, dkv_picture **out, int *n) {
    static const char *const weights[2] = {"weights_forward", "weights_backward"};
    const cJSON *tensors = cJSON_GetObjectItemCaseSensitive(record, "tensors");
    dkv_picture *list = NULL;
    *n = 0;
    *out = NULL;
    for (int id = 0; id < DKV_N_OUTPUTS + 2 && *n < DKV_PICTURES; id++) {
        const char *name = id < 2 ? weights[id] : dkv_tensorName((dkv_tensor_id)(id - 2));
        const cJSON *o = id < 2 ? cJSON_GetObjectItemCaseSensitive(record, name)
                                : cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(tensors, name), "map");
        if (!cJSON_IsObject(o)) continue;
        if (!list && !(list = calloc(DKV_PICTURES, sizeof *list))) return -1;
        *n += readPicture(o, name, &list[*n]);
    }
    *out = list;
    return 0;
}

/* ---- words ---- */

/* "P0" a prompt, "R3" a response: segments by their number. */
static void nameSegment(const dkv_problem *p, int i, char *out, size_t n) {
    snprintf(out, n, "%c%d", i < p->n_nodes && !p->nodes[i].depth ? 'P' : 'R', i);
}

static void writeLevel(int level, FILE *f) {
    if (level == NOT_FINITE) fputs("not finite", f);
    else fprintf(f, "up to %.2g", pow(10, (level - BOUND) / 8.0));
}

/* The blocks (segment x segment, or x heads) that are beyond the bound, in words. */
static void writeBlocks(const dkv_picture *m, const dkv_problem *p, bool weights, FILE *f) {
    int told = 0, left = 0, wrong = 0, of = 0;
    for (int i = 0; i < m->rows.total * m->columns.total; i++) {
        wrong += m->level[i] > BOUND;
        of += m->level[i] >= 0;
    }
    fprintf(f, "%d of %d tiles beyond the bound", wrong, of);
    for (int i = 0, r0 = 0; i < m->rows.n; r0 += m->rows.cells[i++])
        for (int j = 0, c0 = 0; j < (m->columns.n ? m->columns.n : 1); c0 += m->columns.cells[j++]) {
            int most = NONE, bad = 0, all = 0;
            char row[24], column[24];
            for (int r = r0; r < r0 + m->rows.cells[i]; r++)
                for (int c = c0; c < c0 + m->columns.cells[j]; c++) {
                    int level = m->level[r * m->columns.total + c];
                    all += level >= 0;
                    bad += level > BOUND;
                    if (level > most) most = level;
                }
            if (!bad) continue;
            if (told == 8) {
                left++;
                continue;
            }
            nameSegment(p, m->rows.first + i, row, sizeof row);
            nameSegment(p, m->columns.first + j, column, sizeof column);
            fprintf(f, "%s%s%s%s %d of %d, ", told++ ? "; " : ": ", row, weights ? " on " : "", weights ? column : "", bad, all);
            writeLevel(most, f);
        }
    if (left) fprintf(f, "; and in %d more blocks", left);
    fputs(".\n", f);
}

/* ---- drawing ---- */

enum { LEFT = 34, TOP = 18, PAD = 4, SIDE = 300 };

/* Pixels of a cell. */
static int cellOf(const dkv_picture *m) {
    int most = m->rows.total > m->columns.total ? m->rows.total : m->columns.total, cell = SIDE / most;
    return cell > 18 ? 18 : cell;
}

/* Colours: within a tenth of the bound, within it, then beyond: to 10, to 1000, further, not finite. */
static int classOf(int level) {
    return level < 0 ? NONE : level <= 7 ? 0 : level <= BOUND ? 1 : level <= 23 ? 2 : level <= 39 ? 3 : level < NOT_FINITE ? 4 : 5;
}

static void drawCells(const dkv_picture *m, FILE *f) {
    const int cell = cellOf(m);
    for (int k = 0; k < 6; k++) {
        bool open = false;
        for (int r = 0; r < m->rows.total; r++)
            for (int c = 0, end; c < m->columns.total; c = end) {
                const int8_t *row = &m->level[r * m->columns.total];
                for (end = c + 1; end < m->columns.total && classOf(row[end]) == classOf(row[c]); end++) continue;
                if (classOf(row[c]) != k) continue;
                if (!open) fprintf(f, "<path class=\"m%d\" d=\"", k);
                open = true;
                fprintf(f, "M%d %dh%dv%dh-%dz", LEFT + cell * c, TOP + cell * r, cell * (end - c), cell, cell * (end - c));
            }
        if (open) fputs("\"/>\n", f);
    }
}

/* Edges of segments, and their names where there is room. */
static void drawEdges(const dkv_picture_axis *a, const dkv_problem *p, bool vertical, int cell, int across, FILE *f) {
    int at = 0;
    for (int i = 0; i <= a->n; i++) {
        const int place = (vertical ? LEFT : TOP) + cell * at, to = (vertical ? TOP : LEFT) + cell * across;
        if (vertical) fprintf(f, "<line class=\"seam\" x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\"/>", place, TOP - 3, place, to);
        else fprintf(f, "<line class=\"seam\" x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\"/>", LEFT - 3, place, to, place);
        if (i == a->n || !a->cells[i]) continue;
        const int wide = cell * a->cells[i];
        char name[24];
        nameSegment(p, a->first + i, name, sizeof name);
        if (vertical && wide >= 7 * (int)strlen(name))
            fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", place + wide / 2, TOP - 5, name);
        if (!vertical && wide >= 10)
            fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", LEFT - 5, place + wide / 2 + 4, name);
        at += a->cells[i];
    }
}

static void drawPicture(const dkv_picture *m, const dkv_problem *p, FILE *f) {
    const bool weights = m->columns.n > 0;
    const int cell = cellOf(m), width = LEFT + cell * m->columns.total + PAD, height = TOP + cell * m->rows.total + PAD;
    char title[200];
    if (!weights) snprintf(title, sizeof title, "%s: tiles of %.0f rows by %s", m->name, m->rows.tile, m->columns.tile > 1 ? "groups of heads" : "heads");
    else
        snprintf(title, sizeof title, "Weights of the %s: tiles of %.0f queries (down) by %.0f keys (across)",
                 strcmp(m->name, "weights_forward") == 0 ? "forward, by V one-hot" : "backward, by dO one-hot", m->rows.tile, m->columns.tile);
    fprintf(f, "<figure class=\"map\"><svg class=\"map\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s\">\n",
            width < 90 ? 90 : width, height, width < 90 ? 90 : width, height, title);
    drawCells(m, f);
    drawEdges(&m->rows, p, false, cell, m->columns.total, f);
    if (weights) drawEdges(&m->columns, p, true, cell, m->rows.total, f);
    else fprintf(f, "<text x=\"%d\" y=\"%d\">heads</text>\n", LEFT, TOP - 5);
    fprintf(f, "</svg><figcaption class=\"soft\">%s. ", title);
    writeBlocks(m, p, weights, f);
    fputs("</figcaption></figure>\n", f);
}

void dkv_writeMapKey(FILE *f) {
    static const char *const words[6] = {"within a tenth of the bound", "within the bound", "up to 10 times the bound",
                                         "up to 1000 times", "further", "not finite"};
    fputs("<details class=\"soft\"><summary>How to read the maps</summary><p>An output has an error for each row and head, none for a "
          "pair of query and key: so there are tiles of rows by heads of each wrong tensor (rows of O, LSE, dQ are queries, of dK, dV "
          "keys). Which pairs are wrong is asked by one run more, for the first failures of a run: with V one-hot by key tile, O is "
          "the weight that a row gives to the tile; with dO one-hot by query tile, dV is the weight in the backward. An error of dS "
          "alone is not seen so. Lines: edges of segments, P a prompt, R a response, with the segment's number; a blank tile sees nothing. Of a "
          "tensor within its bound, but imprecise or biased: its residual in units of the predicted noise.</p><ul class=\"key\">\n", f);
    for (int i = 0; i < 6; i++)
        fprintf(f, "<li><svg width=\"60\" height=\"20\" viewBox=\"0 0 60 20\" role=\"img\" aria-label=\"colour\"><path class=\"m%d\" "
                   "d=\"M0 2h56v16h-56z\"/></svg>%s</li>\n", i, words[i]);
    fputs("</ul></details>\n", f);
}

void dkv_drawPictures(const dkv_picture *list, int n, const char *line, FILE *f) {
    dkv_problem p = {0};
    dkv_err err = {0};
    if (dkv_parseProblem(line, NULL, &p, &err)) return;
    fputs("<div class=\"maps\">\n", f);
    for (int i = 0; i < n; i++) drawPicture(&list[i], &p, f);
    fputs("</div>\n", f);
    dkv_freeProblem(&p);
}
