/* coherent.h: how many independent observations the residuals of a tensor's vectors are. */
#ifndef DKV_COHERENT_H
#define DKV_COHERENT_H

#include <stdbool.h>
#include <stdint.h>

/* Vectors whose sums run over the same rows with the same weights err alike, however many they are (keys that all rows see
 * with equal P: dK of each is a multiple of one sum). Then their twins are parallel, and what is left of their residuals,
 * `gain` of the twin taken off, is parallel with the same factors: with t, e of unit length the mean over pairs of
 * (t_j . t_k)(e_j . e_k) = |sum_j t_j e_j^T|^2 / n^2 is 1, and 1/n where they err independently. Parallel twins alone say
 * nothing (one query row: dK of each key is a multiple of q, and dS of each has an error of its own); nor do parallel
 * residuals. So n / (1 + what |..|^2 / n exceeds 1 and its own chance, 3 sqrt(2) where all are parallel), at most n. */
typedef struct dkv_residuals {
    const double *got, *twin, *sigma2;
    int64_t d;
    double gain;
} dkv_residuals;

/* A sum over vectors: begins as zeros. */
typedef struct dkv_coherence {
    double n, m[16][16];
} dkv_coherence;

/* The vector at `at`; weight: one over how many are equal to it, in all. */
void dkv_addResidual(const dkv_residuals *r, int64_t at, double weight, dkv_coherence *sum);
double dkv_independentVectors(const dkv_coherence *sum); /* INFINITY: nothing says that they err alike */

#endif
