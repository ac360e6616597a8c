/* fill.h: inputs as a pure function of (problem line, tensor, index): the same on any machine, in any order, with any
 * number of threads. Counter-based (Random123's Philox 4x32-10). Fills: table in fill.c, one row each. */
#ifndef DKV_FILL_H
#define DKV_FILL_H

#include "../ref/tensors.h"

#define DKV_GENERATOR "1" /* version of the input generator, in every record; changes when any value would */

bool dkv_knownFill(const char *word); /* "recorded:NAME" included; whether the file exists is checked when filling */
const char *dkv_listFill(int i, const char **help); /* NULL past the end */

/* Fills all tensors of `in` (allocated by dkv_allocInputs). data_dir: where recorded/ lies. */
int dkv_fillInputs(const dkv_problem *p, const dkv_layout *l, const char *data_dir, dkv_inputs *in, dkv_err *err);

/* The segment whose inputs nanresp and infresp plant: a response that has tokens and no children, or the last group's root
 * where no segment is a response; -1 where nothing else could be kept apart from it. */
int32_t dkv_victimNode(const dkv_problem *p);
#endif
