/* sample.h: random problems as a function of (seed, n) only. Every key of the line is drawn (fill=recorded excepted: it needs
 * files), edges, zeros, ones and primes more often than chance would; every problem is admissible. */
#ifndef DKV_SAMPLE_H
#define DKV_SAMPLE_H

#include "../ref/problem.h"

/* Problem n of the sequence `seed`, with pairs * Hq * max(Dqk, Dv) <= work_cap (at least 1e4; larger shapes are drawn again,
 * smaller each time). */
int dkv_sampleProblem(uint64_t seed, uint64_t n, double work_cap, dkv_problem *p, dkv_err *err);
#endif
