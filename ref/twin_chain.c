/* twin_chain.c: what a long chain of products rounds, from where it was before and after a tile of its terms.
 */
#include "twin_impl.h"

dkv_chainStep dkv_evenStep(double n, double squares, double factor, double fold) {
    dkv_chainStep k = {.count = n, .squares = squares, .factor = factor, .fold = fold};
    k.g = (n + 1) / 2;
    k.g2 = (n + 1) * (2 * n + 1) / (6 * n);
    k.ff = (n + 1) / 6;
    k.share = k.g_first = k.f_first = 1 / n;
    return k;
}

dkv_chainStep dkv_walkStep(const double *w, int64_t n, double least, double factor, double fold) {
    dkv_chainStep k = {.factor = factor, .fold = fold};
    double sum = 0, squares = 0, g = 0, f = 0;
    for (int64_t j = 0; j < n; j++) {
        sum += fabs(w[j]);
        squares += w[j] * w[j];
    }
    k.squares = squares;
    if (!(squares > 0) || !(squares <= DBL_MAX)) return k;
    k.share = squares / (sum * sum);
    sum = 1 / sum;
    squares = 1 / squares;
    for (int64_t j = 0; j < n; j++) {
        double x = fabs(w[j]);
        g += x * sum;
        f += x * x * squares;
        if (!(x > least)) continue;
        if (k.count == 0) k.g_first = g, k.f_first = f;
        k.count++;
        k.g += g;
        k.g2 += g * g;
        k.ff += f < 1 ? f * (1 - f) : 0;
    }
    return k;
}

DKV_CLONES
void dkv_twinChain(const dkv_noise *z, dkv_chainStep k, int64_t d, const double *before, const double *after,
                   const double *mean2, double *out) {
    double n = k.count, within = k.fold < n ? k.fold : n, step = z->step2, s0 = k.squares;
    double unit = k.fold > 0 ? z->unit2 / k.fold : step, inner = k.fold > 0 ? step * within / 2 : 0;
    double least = z->prod_p2 > 0 ? n * z->least2 : 0, first = z->truncates ? 0 : 1;
    double one2 = k.g_first * k.g_first, one = k.f_first < 1 ? k.f_first * (1 - k.f_first) : 0, inv = 1 / n;
    if (n < 1) return;
    for (int64_t c = 0; c < d; c++) {
        double b = before[c], e = after[c] - b, e2 = e * e, s = s0 * mean2[c], random = s - e2 * k.share;
        random = random > 0 ? random : 0;
        double near = n * b * b + 2 * k.g * b * e + k.g2 * e2 + k.ff * random;
        near -= b == 0 ? first * (one2 * e2 + one * random) : 0; /* the first term is added to 0 */
        near = near > 0 ? near : 0;
        out[c] += k.factor * (unit * near + inner * (e2 * within * inv + s) + least);
    }
}
