#include "report_svg.h"

#include <math.h>

#include "report_text.h"

/* Units of the drawing: near a phone's pixels, so that letters stay readable there. */
enum { WIDTH = 400, LEFT = 96, RIGHT = 10, TOP = 8, ROW = 19, FOOT = 34 };

static double placeOf(double bin) { return LEFT + bin / DKV_GATHER_BINS * (WIDTH - LEFT - RIGHT); }

static void writeDots(const dkv_strip *s, double y, double (*value)(double), const char *name, FILE *f) {
    for (int outside = 0; outside < 2; outside++)
        for (int i = 0; i < DKV_GATHER_BINS; i++) {
            long n = s->bins[outside][i];
            if (!n) continue;
            fprintf(f, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\"><title>%s: ", outside ? "out" : "in",
                    placeOf(i + 0.5), y, 1.5 + 1.4 * log10((double)n), name);
            dkv_writeCount(f, n, "case", "cases");
            fprintf(f, ", %s %.2g</title></circle>\n", i == 0 ? "at most" : i == DKV_GATHER_BINS - 1 ? "at least" : "about",
                    value(i == 0 ? 1 : i));
        }
}

/* A row: its name, a line, its dots. */
static void drawRow(const dkv_strip *s, int row, double (*value)(double), const char *name, FILE *f) {
    double y = TOP + ROW * (row + 0.5);
    fprintf(f, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>", LEFT - 8, y + 4, name);
    fprintf(f, "<line class=\"axis\" x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\"/>\n", LEFT, y, WIDTH - RIGHT, y);
    writeDots(s, y, value, name, f);
}

static void openDrawing(int rows, const char *label, FILE *f) {
    fprintf(f, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s\">\n", WIDTH, TOP + ROW * rows + FOOT, label);
}

static void closeDrawing(int rows, double one, const double *ticks, const double *bins, int n, const char *axis,
                         FILE *f) {
    int low = TOP + ROW * rows;
    fprintf(f, "<line class=\"edge\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/>\n", placeOf(one), TOP, placeOf(one),
            low);
    for (int i = 0; i < n; i++)
        fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%g</text>\n", placeOf(bins[i]), low + 13, ticks[i]);
    fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n</svg>\n", (LEFT + WIDTH - RIGHT) / 2.0,
            low + 28, axis);
}

void dkv_drawRatios(const dkv_gather_kernel *k, FILE *f) {
    static const double ticks[] = {1e-4, 1e-3, 1e-2, 0.1, 1, 10};
    double bins[6];
    char name[40];
    int rows = 0;
    for (int i = 0; i < 6; i++) bins[i] = i * DKV_GATHER_BINS / 6.0;
    for (int t = 0; t < DKV_N_OUTPUTS; t++)
        for (int r = 0; r < 2; r++) rows += k->ratio[t][r].cases > 0;
    openDrawing(rows, "Error over bound of each case, by tensor and region; the table has the largest of each", f);
    int row = 0;
    for (int t = 0; t < DKV_N_OUTPUTS; t++)
        for (int r = 0; r < 2; r++) {
            if (!k->ratio[t][r].cases) continue;
            snprintf(name, sizeof name, "%s %s", dkv_tensorName((dkv_tensor_id)t), dkv_regionName(r));
            drawRow(&k->ratio[t][r], row++, dkv_ratioOfBin, name, f);
        }
    closeDrawing(rows, bins[4], ticks, bins, 6, "largest error / bound (1: all that rounding can explain)", f);
}

void dkv_drawResiduals(const dkv_gather_kernel *k, FILE *f) {
    static const double ticks[] = {0, 1, 2};
    static const double bins[] = {0, DKV_GATHER_BINS / 3.0, DKV_GATHER_BINS * 2 / 3.0};
    int rows = 0, row = 0;
    for (int t = 0; t < DKV_N_OUTPUTS; t++) rows += k->rms[t].cases > 0;
    openDrawing(rows, "Residual to the twin of each case, by tensor; the table has the range of each", f);
    for (int t = 0; t < DKV_N_OUTPUTS; t++)
        if (k->rms[t].cases) drawRow(&k->rms[t], row++, dkv_rmsOfBin, dkv_tensorName((dkv_tensor_id)t), f);
    closeDrawing(rows, bins[1], ticks, bins, 3, "rms z (1: the noise that the declared roundings leave)", f);
}
