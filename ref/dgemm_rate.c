/* dgemm_rate.c: what this machine's dgemm reaches, for the ratio that `dualkv bench` prints. */
#include <cblas.h>
#include <stdlib.h>

#include "clock.h"
#include "reference.h"

#define N 2048

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
    start = dkv_now();
    while (runs < MOST && (runs < 3 || dkv_now() - start < seconds)) {
        double t = dkv_now();
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, N, N, 1.0, x, N, x + n, N, 0.0,
                    x + 2 * n, N);
        took[runs++] = dkv_now() - t;
    }
    openblas_set_num_threads(had);
    qsort(took, (size_t)runs, sizeof *took, compare);
    rate = 2.0 * N * (double)N * N / took[runs / 2] * 1e-9;
    free(x);
    return rate;
}
