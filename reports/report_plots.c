#include "report_plots.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "../ref/problem.h"
#include "report_classes.h"
#include "report_trend.h"

enum { KERNELS_PLOTTED = 12, LABEL = 60 };

typedef struct plots {
    const char *folder;
    FILE *script;
    int n;
    dkv_err *err;
} plots;

/* A name from outside as a label: between single quotes nothing in it ends them or is a command. */
static void labelOf(const char *name, char out[LABEL + 1]) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +=-_./:,";
    size_t n = strlen(name), at = 0;
    for (size_t i = n > LABEL ? n - LABEL : 0; i < n; i++) out[at++] = strchr(plain, name[i]) ? name[i] : '?';
    out[at] = 0;
}

static FILE *openIn(plots *p, const char *name) {
    char path[PATH_MAX];
    FILE *f = NULL;
    if (snprintf(path, sizeof path, "%s/%s", p->folder, name) < (int)sizeof path) f = fopen(path, "we");
    else errno = ENAMETOOLONG;
    if (!f) dkv_fail(p->err, DKV_EUSER, "cannot write '%s/%s': %s", p->folder, name, strerror(errno));
    return f;
}

static int closeOut(plots *p, FILE *f) {
    int bad = ferror(f);
    return fclose(f) != 0 || bad ? dkv_fail(p->err, DKV_EHARNESS, "cannot write into '%s': %s", p->folder, strerror(errno)) : 0;
}

/* Data file of plot `what` of kernel k (0: of all); the script's lines that every plot has. */
static FILE *beginPlot(plots *p, const char *what, int k, const char *title, const char *of) {
    char name[80], label[LABEL + 1];
    snprintf(name, sizeof name, k ? "%s-%d.dat" : "%s.dat", what, k);
    FILE *f = openIn(p, name);
    if (!f) return NULL;
    labelOf(of, label);
    fprintf(p->script, "\nreset\nset terminal svg size 820,520 noenhanced font 'sans,13' background '#ffffff'\n"
                       "set grid lc rgb '#dddddd'\nset key noenhanced\n");
    name[strlen(name) - 4] = 0;
    fprintf(p->script, "set output '%s.svg'\nset title '%s%s%s' noenhanced\ndata = '%s.dat'\n", name, title, label[0] ? ": " : "", label, name);
    p->n++;
    return f;
}

/* ---- error over bound ---- */

static int plotRatios(plots *p, const dkv_gather_kernel *k, int number) {
    FILE *f = beginPlot(p, "ratio", number, "largest error over bound of each case", k->name);
    int row = 0;
    if (!f) return DKV_EUSER;
    fprintf(p->script, "set logscale x\nset format x '%%g'\nset xrange [7e-5:200]\nset xlabel 'error / bound (1: all that rounding can explain)'\n"
                       "set arrow from 1, graph 0 to 1, graph 1 nohead dt 2 lc rgb '#000000'\nset ytics (");
    for (int t = 0; t < DKV_N_OUTPUTS; t++)
        for (int r = 0; r < 2; r++) {
            const dkv_strip *s = &k->ratio[t][r];
            if (!s->cases) continue;
            fprintf(p->script, "%s'%s %s' %d", row ? ", " : "", dkv_tensorName((dkv_tensor_id)t), dkv_regionName(r), -row);
            for (int outside = 0; outside < 2; outside++)
                for (int i = 0; i < DKV_GATHER_BINS; i++)
                    if (s->bins[outside][i]) fprintf(f, "%.5g %d %ld %d\n", dkv_ratioOfBin(i + 0.5), -row, s->bins[outside][i], outside);
            row++;
        }
    fprintf(p->script, ")\nset yrange [%d:1]\nplot data using 1:($4==0?$2:1/0):(0.4+0.45*log10($3)) with points pt 7 ps variable "
                       "lc rgb '#2357c5' title 'within', data using 1:($4==1?$2:1/0):(0.4+0.45*log10($3)) with points pt 7 ps variable "
                       "lc rgb '#a8071a' title 'outside'\n", -row);
    return closeOut(p, f);
}

/* ---- residual to the twin ---- */

/* (rms^2 - 1) sqrt(dof / 2) of cases and tensors: about normal where the kernel rounds as it declares, and left of that where it
 * is more precise. */
static int plotResiduals(plots *p, const dkv_gather_kernel *k, int number) {
    long total = 0;
    for (int t = 0; t < DKV_N_OUTPUTS; t++) total += k->normal[t].cases;
    FILE *f = beginPlot(p, "residual", number, "residual to the twin, standardised", k->name);
    if (!f) return DKV_EUSER;
    for (int i = 0; i < DKV_GATHER_BINS; i++) {
        fprintf(f, "%.4g", dkv_normalOfBin(i + 0.5));
        for (int t = 0; t < DKV_N_OUTPUTS; t++) fprintf(f, " %ld", k->normal[t].bins[0][i] + k->normal[t].bins[1][i]);
        fputs("\n", f);
    }
    const double width = dkv_normalOfBin(1) - dkv_normalOfBin(0);
    fprintf(p->script, "set xrange [%g:%g]\nset xlabel '(rms z squared - 1) sqrt(dof / 2)'\nset ylabel 'cases and tensors'\n"
                       "set style fill solid 0.8\nset boxwidth %g\nset samples 400\nset style data histograms\nset style histogram rowstacked\n"
                       "normal(x) = %ld * %g * exp(-x * x / 2) / sqrt(2 * pi)\nplot ", dkv_normalOfBin(0),
            dkv_normalOfBin(DKV_GATHER_BINS), width, total, width);
    /* Boxes stacked by hand: sums of the columns up to each tensor, the tallest first. */
    for (int t = DKV_N_OUTPUTS - 1; t >= 0; t--) {
        fprintf(p->script, "data using 1:(");
        for (int s = 0; s <= t; s++) fprintf(p->script, "%s$%d", s ? "+" : "", s + 2);
        fprintf(p->script, ") with boxes lc %d title '%s', ", t + 1, dkv_tensorName((dkv_tensor_id)t));
    }
    fprintf(p->script, "normal(x) with lines lw 2 lc rgb '#000000' title 'normal: it rounds as it declares'\n");
    return closeOut(p, f);
}

/* ---- over commits ---- */

static int plotTrend(plots *p, const dkv_gather_kernel *k, int number) {
    dkv_gather_commit *list = dkv_sortCommits(k);
    if (!list) return dkv_fail(p->err, DKV_EHARNESS, "out of memory for commits");
    FILE *f = beginPlot(p, "trend", number, "over commits", k->name);
    if (!f) {
        free(list);
        return DKV_EUSER;
    }
    fprintf(p->script, "set logscale y\nset xtics rotate by -45 noenhanced (");
    for (int i = 0; i < k->n_commits; i++) {
        char label[LABEL + 1];
        labelOf(list[i].commit, label);
        fprintf(p->script, "%s'%.12s' %d", i ? ", " : "", label, i);
        double x[4] = {list[i].worst, list[i].rms_share, list[i].seconds, (double)list[i].defects};
        fprintf(f, "%d", i);
        for (int c = 0; c < 4; c++) {
            if (isfinite(x[c])) fprintf(f, " %.6g", x[c]);
            else fputs(" NaN", f);
        }
        fputs("\n", f);
    }
    fprintf(p->script, ")\nset xrange [-0.5:%d.5]\nset arrow from graph 0, first 1 to graph 1, first 1 nohead dt 2 lc rgb '#000000'\n"
                       "plot data using 1:2 with linespoints pt 7 lc rgb '#2357c5' title 'worst err/bound', data using 1:3 with "
                       "linespoints pt 5 lc rgb '#e8710a' title 'rms z over its limit', data using 1:4 with linespoints pt 4 "
                       "lc rgb '#777777' title 'seconds in the kernel', data using 1:($5>0?$2:1/0) with points pt 6 ps 2 lc rgb "
                       "'#a8071a' title 'with a defect'\n", k->n_commits - 1);
    free(list);
    return closeOut(p, f);
}

/* ---- roofline ---- */

static int plotRoofline(plots *p, const dkv_gather *g) {
    const dkv_card *card = NULL;
    double most = 1;
    FILE *f = beginPlot(p, "roofline", 0, "throughput against the roofline", "");
    if (!f) return DKV_EUSER;
    for (int i = 0; i < g->n_bench; i++)
        for (int back = 0; back < 2; back++) {
            const dkv_gather_bench *b = &g->bench[i];
            if (!(b->tflops[back] > 0 && b->intensity[back] > 0)) continue;
            fprintf(f, "%.6g %.6g %d\n", b->intensity[back], b->tflops[back], back);
            most = fmax(most, b->intensity[back]);
            if (!card) card = dkv_findCard(b->device);
        }
    fprintf(p->script, "set logscale xy\nset xrange [1:%g]\nset xlabel 'useful FLOPs per byte, each operand moved once'\nset ylabel "
                       "'TFLOP/s'\nset key left top\nplot ", 4 * most);
    if (card) {
        char label[LABEL + 1];
        labelOf(card->name, label);
        fprintf(p->script, "(x*%g<%g?x*%g:%g) with lines lw 2 lc rgb '#000000' title '%s, 16 bit (datasheet)', ", card->memory * 1e-12,
                card->half * 1e-12, card->memory * 1e-12, card->half * 1e-12, label);
    }
    fprintf(p->script, "data using 1:($3==0?$2:1/0) with points pt 7 lc rgb '#2357c5' title 'forward', data using 1:($3==1?$2:1/0) "
                       "with points pt 5 lc rgb '#e8710a' title 'backward'\n");
    return closeOut(p, f);
}

static bool hasRates(const dkv_gather *g) {
    bool any = false;
    for (int i = 0; i < g->n_bench; i++)
        for (int back = 0; back < 2; back++) any |= g->bench[i].tflops[back] > 0 && g->bench[i].intensity[back] > 0;
    return any;
}

int dkv_writePlots(const dkv_gather *g, const char *folder, int *n, dkv_err *err) {
    plots p = {.folder = folder, .err = err};
    int rc = 0;
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return dkv_fail(err, DKV_EUSER, "cannot make the folder '%s': %s", folder, strerror(errno));
    p.script = openIn(&p, "all.gp");
    if (!p.script) return DKV_EUSER;
    fputs("# Run by gnuplot in this folder: gnuplot all.gp\n", p.script);
    for (int i = 0; i < g->n_kernels && i < KERNELS_PLOTTED && !rc; i++) {
        const dkv_gather_kernel *k = g->kernels[i];
        long ratios = 0, residuals = 0;
        for (int t = 0; t < DKV_N_OUTPUTS; t++) {
            ratios += k->ratio[t][0].cases + k->ratio[t][1].cases;
            residuals += k->normal[t].cases;
        }
        if (ratios) rc = plotRatios(&p, k, i + 1);
        if (residuals && !rc) rc = plotResiduals(&p, k, i + 1);
        if (k->n_commits > 1 && !rc) rc = plotTrend(&p, k, i + 1);
    }
    if (hasRates(g) && !rc) rc = plotRoofline(&p, g);
    *n = p.n;
    int end = closeOut(&p, p.script);
    return rc ? rc : end;
}
