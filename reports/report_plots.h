/* report_plots.h: data and gnuplot scripts for what the page draws, and more, as SVG files. Names from records reach a script
 * only as letters, digits and a few signs in a quoted label; files have names of our own. */
#ifndef DKV_REPORT_PLOTS_H
#define DKV_REPORT_PLOTS_H

#include "report_gather.h"

/* Into the folder (made where it is missing): NAME.dat, and all.gp, which plots NAME.svg of each; run it there. *n: how many
 * plots it makes. DKV_EUSER: cannot be written. */
int dkv_writePlots(const dkv_gather *g, const char *folder, int *n, dkv_err *err);

#endif
