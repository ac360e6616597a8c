/* simplify.h: lines one step simpler than a line: a group, a branch, tokens, heads, dims, an option less.
 * Every step makes the problem smaller or nearer to the defaults, so that a chain of them ends. */
#ifndef DKV_SIMPLIFY_H
#define DKV_SIMPLIFY_H

#include "../ref/problem.h"

typedef struct dkv_cut {
    int kind;            /* row of the table in simplify.c */
    int32_t node;        /* a segment; or the number of a choice */
    int32_t from, count; /* children: first, how many */
    int64_t value;
} dkv_cut;

/* Cuts of p, the large ones first, malloc'ed; *n of them. NULL: out of memory. */
dkv_cut *dkv_listCuts(const dkv_problem *p, int *n);
/* The edited problem: parsed, admissible, different from p. False where there is none. */
bool dkv_applyCut(const dkv_problem *p, const dkv_cut *e, dkv_problem *out);

#endif
