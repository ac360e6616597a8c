/* diagnose_set.h: a set of rows, heads or dims in words. Of a list of simple descriptions (all; one; an
 * interval; a tile; a residue; the first, the last, a partial tile) the one that fits best is taken: the
 * share of members in the union of the set and what the description names; the simpler one where two fit
 * alike. */
#ifndef DKV_DIAGNOSE_SET_H
#define DKV_DIAGNOSE_SET_H

#include "../ref/layout.h"

/* off [tokens]: query rows, or key rows where `keys`. Words: which segments; which of their rows; whether
 * the rows gather at residues, with the probability that they would by chance. */
typedef struct dkv_row_words {
    char segments[120], rows[200], pattern[200];
    double fit; /* 0..1 of the rows' description */
} dkv_row_words;
void dkv_describeRows(const dkv_layout *l, bool keys, const uint8_t *off, dkv_row_words *out);
/* n items of which off[i] > 0 are members; `one`, `many`: "head", "heads"; g: members of a group (query
 * heads of a KV head; 0: none). */
void dkv_describeItems(const uint8_t *off, int64_t n, int64_t g, const char *one, const char *many, char *out,
                       size_t size);
/* Probability that counts off[i] of total[i] over n classes differ so much by chance (G test). */
double dkv_gatherChance(const int64_t *off, const int64_t *total, int n);
#endif
