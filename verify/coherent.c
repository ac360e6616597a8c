/* coherent.c: see coherent.h. Vectors of more than SKETCH elements are folded into so many, each element with a sign and a
 * place of its own: products of the folded are those of the vectors in the mean. */
#include "coherent.h"

#include <math.h>
#include <string.h>

#define SKETCH 16

static uint64_t mixed(uint64_t h) {
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ h >> 27) * 0x94D049BB133111EBull;
    return h ^ h >> 31;
}

static void fold(double x, int64_t c, int64_t d, uint64_t salt, double *to) {
    const uint64_t h = mixed((uint64_t)c + 1 + (salt << 32));
    if (d <= SKETCH) to[c] = x;
    else to[h % SKETCH] += h >> 32 & 1 ? -x : x;
}

/* To unit length; false where there is none. */
static bool unit(double *x) {
    double sum = 0;
    for (int c = 0; c < SKETCH; c++) sum += x[c] * x[c];
    if (!(sum > 0 && sum <= 1e300)) return false;
    for (int c = 0; c < SKETCH; c++) x[c] /= sqrt(sum);
    return true;
}

void dkv_addResidual(const dkv_residuals *r, int64_t at, double weight, dkv_coherence *sum) {
    double t[SKETCH] = {0}, e[SKETCH] = {0};
    for (int64_t c = 0; c < r->d; c++) {
        const double x = r->twin[at + c], s = sqrt(r->sigma2[at + c]), y = (r->got[at + c] - x * (1 + r->gain)) / s;
        if (!(s > 0) || !isfinite(x / s) || !isfinite(y)) continue;
        fold(x / s, c, r->d, 1, t);
        fold(y, c, r->d, 2, e);
    }
    if (!unit(t) || !unit(e)) return;
    sum->n += weight;
    for (int a = 0; a < SKETCH; a++)
        for (int b = 0; b < SKETCH; b++) sum->m[a][b] += weight * t[a] * e[b];
}

double dkv_independentVectors(const dkv_coherence *sum) {
    double square = 0, more;
    for (int a = 0; a < SKETCH; a++)
        for (int b = 0; b < SKETCH; b++) square += sum->m[a][b] * sum->m[a][b];
    if (!(sum->n > 1)) return INFINITY;
    more = square / sum->n - 1 - 3 * sqrt(2);
    return more > 0 ? sum->n / (1 + more) : INFINITY;
}
