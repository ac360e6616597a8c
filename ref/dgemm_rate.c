/* dgemm_rate.c: what this machine's dgemm reaches, for the ratio that `dualkv bench` prints. */
#include <cblas.h>
#include <stdlib.h>
#include <time.h>

#include "reference.h"

#define N 2048

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double dkv_dgemmRate(int threads, double seconds) {
    enum { MOST = 256 };
    size_t n = (size_t)N * N;
    double *x = malloc(3 * n * sizeof *x), took[MOST], start, rate = 0;
    int runs = 0, had = openblas_get_num_threads();
    if (!x) return 0;
    for (size_t i = 0; i < 3 * n; i++) x[i] = (double)(i * 2654435761u % 1009) * 0x1p-9 - 1;
    if (threads > 0) openblas_set_num_threads(threads);
    start = now();
    while (runs < MOST && (runs < 3 || now() - start < seconds)) {
        double t = now();
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, N, N, 1.0, x, N, x + n, N, 0.0,
                    x + 2 * n, N);
        took[runs++] = now() - t;
    }
    openblas_set_num_threads(had);
    qsort(took, (size_t)runs, sizeof *took, compare);
    rate = 2.0 * N * (double)N * N / took[runs / 2] * 1e-9;
    free(x);
    return rate;
}
