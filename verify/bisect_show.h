/* bisect_show.h: a bisect in words, as a plot in text, as a plot by gnuplot, as JSON. */
#ifndef DKV_BISECT_SHOW_H
#define DKV_BISECT_SHOW_H

#include <stdio.h>

#include "bisect.h"

void dkv_sayBegun(const dkv_bisection *h, FILE *f);
void dkv_sayTested(const dkv_bisection *h, const dkv_tested *t, bool colour, FILE *f);
/* The commit, its diffstat, the step, the plot, how sure this is, how to see it again. */
void dkv_sayAnswer(const dkv_bisection *h, FILE *f);
/* SVG or PNG, by the name's end. DKV_EUSER: neither (checked before anything runs with h NULL); DKV_EHARNESS: no gnuplot. */
int dkv_drawBisection(const dkv_bisection *h, const char *path, dkv_err *err);
/* An object each, malloc'ed; NULL where out of memory. */
char *dkv_printTested(const dkv_bisection *h, const dkv_tested *t);
char *dkv_printAnswer(const dkv_bisection *h);

#endif
