/* twin_chain.c: what a long chain of products rounds, from where it was before and after a tile of its terms.
 */
#include "twin_impl.h"

dkv_chainStep dkv_evenStep(double n, double squares, double factor, double fold, double done) {
    dkv_chainStep k = {.count = n, .squares = squares, .factor = factor, .fold = fold, .done = done};
    k.g = (n + 1) / 2;
    k.g2 = (n + 1) * (2 * n + 1) / (6 * n);
    k.ff = (n + 1) / 6;
    k.share = k.g_first = k.f_first = 1 / n;
    return k;
}

#define LANES 8
typedef double lanes __attribute__((vector_size(8 * LANES)));
typedef int64_t places __attribute__((vector_size(8 * LANES)));

/* x[e] + the sum of those before it. */
#define PREFIX(x)                                                                                            \
    do {                                                                                                     \
        x += __builtin_shuffle(zero, x, (places){0, 8, 9, 10, 11, 12, 13, 14});                              \
        x += __builtin_shuffle(zero, x, (places){0, 0, 8, 9, 10, 11, 12, 13});                               \
        x += __builtin_shuffle(zero, x, (places){0, 0, 0, 0, 8, 9, 10, 11});                                 \
    } while (0)

/* Sums over the terms that round; n a multiple of LANES. */
DKV_CLONES
static void sumWalk(const double *w, int64_t n, double least, double inv, double inv2, dkv_chainStep *k) {
    const lanes zero = {0}, one = zero + 1;
    lanes count = zero, sum = zero, sum2 = zero, sum_f = zero, g0 = zero, f0 = zero;
    for (int64_t j = 0; j < n; j += LANES) {
        lanes x, g, f;
        memcpy(&x, w + j, sizeof x);
        x = (lanes)((places)x & INT64_MAX); /* |x| */
        lanes rounds = (lanes)((x > least) & (places)one);
        g = x * inv;
        f = x * x * inv2;
        PREFIX(g);
        PREFIX(f);
        g += g0;
        f += f0;
        g0 = zero + g[LANES - 1];
        f0 = zero + f[LANES - 1];
        lanes ff = f * (lanes)((f < 1) & (places)(1 - f));
        count += rounds;
        sum += rounds * g;
        sum2 += rounds * g * g;
        sum_f += rounds * ff;
    }
    for (int e = 0; e < LANES; e++) {
        k->count += count[e];
        k->g += sum[e];
        k->g2 += sum2[e];
        k->ff += sum_f[e];
    }
}

dkv_chainStep dkv_walkStep(const double *w, int64_t n, double least, double factor, double fold, double done) {
    dkv_chainStep k = {.factor = factor, .fold = fold, .done = done};
    double squares, sum = dkv_twinSizes(w, n, &squares), padded[DKV_TILE_KEYS];
    int64_t whole = (n + LANES - 1) / LANES * LANES, j = 0;
    k.squares = squares;
    if (!(squares > 0) || !(squares <= DBL_MAX)) return k;
    k.share = squares / (sum * sum);
    for (; j < n && !(fabs(w[j]) > least); j++) {
        k.g_first += fabs(w[j]) / sum;
        k.f_first += w[j] * w[j] / squares;
    }
    if (j == n) k.g_first = k.f_first = 0;
    else k.g_first += fabs(w[j]) / sum, k.f_first += w[j] * w[j] / squares;
    if (whole > n) { /* zeros round nothing */
        memcpy(padded, w, sizeof *w * (size_t)n);
        memset(padded + n, 0, sizeof *w * (size_t)(whole - n));
    }
    sumWalk(whole > n ? padded : w, whole, least, 1 / sum, 1 / squares, &k);
    return k;
}

static void addEach(const dkv_noise *z, dkv_spacing ulp, dkv_formula_sum *s, int64_t n, const double *p, double fade,
                    const double *rel, const float *equal) {
    for (int64_t j = 0; j < n; j++) dkv_formulaAdd(z, ulp, s, p[j] * fade, rel[j] * z->unit2, equal[j]);
}

#define CHOOSE(mask, a, b) ((lanes)(((places)(a) & (mask)) | ((places)(b) & ~(mask))))

/* LANES terms at a time where each moves the sum and none is alike the one before it: the usual case. */
DKV_CLONES
void dkv_twinAddTerms(const dkv_noise *z, dkv_spacing ulp, dkv_formula_sum *s, int64_t n, const double *p,
                      double fade, const double *rel, const float *equal) {
    const lanes zero = {0}, one = zero + 1;
    const double stuck = z->stuck;
    lanes noise = zero, squares = zero;
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        lanes x, r, eq, after, before, u, last, last_u;
        memcpy(&x, p + j, sizeof x);
        memcpy(&r, rel + j, sizeof r);
        for (int e = 0; e < LANES; e++) eq[e] = equal[j + e];
        x *= fade;
        r *= z->unit2;
        after = x;
        PREFIX(after);
        if (after[LANES - 1] == 0) continue; /* nothing is added */
        after += s->part;
        before = __builtin_shuffle(zero + s->part, after, (places){0, 8, 9, 10, 11, 12, 13, 14});
        u = (lanes)((places)after & 0x7ff0000000000000);
        u = CHOOSE((u > ulp.least), u, zero + ulp.least) * ulp.scale;
        last = __builtin_shuffle(zero + s->last, x, (places){0, 8, 9, 10, 11, 12, 13, 14});
        last_u = __builtin_shuffle(zero + s->last_u, u, (places){0, 8, 9, 10, 11, 12, 13, 14});
        places small = x < before, plain = CHOOSE(small, x, before) > stuck * CHOOSE(small, before, x);
        lanes off = (lanes)((places)(x - 1) & INT64_MAX), gap = x - last;
        plain &= (off >= 0.5 * stuck) & ((u != last_u) | (gap * gap + 2 * r > u * u * (1.0 / 64)));
        int64_t all = -1;
        for (int e = 0; e < LANES; e++) all &= plain[e];
        if (!all) {
            addEach(z, ulp, s, LANES, p + j, fade, rel + j, equal + j);
            continue;
        }
        lanes each = u * u * CHOOSE((eq > 1), eq, one), own = r * eq;
        each[LANES - 1] = own[LANES - 1] = 0; /* the last by the formula: the next may be alike */
        squares += each;
        noise += own;
        s->part = after[LANES - 2];
        s->last = x[LANES - 2];
        s->last_u = u[LANES - 2];
        addEach(z, ulp, s, 1, p + j + LANES - 1, fade, rel + j + LANES - 1, equal + j + LANES - 1);
    }
    addEach(z, ulp, s, n - j, p + j, fade, rel + j, equal + j);
    for (int e = 0; e < LANES; e++) {
        s->squares += squares[e];
        s->noise += noise[e];
    }
}

DKV_CLONES
void dkv_twinChain(const dkv_noise *z, dkv_chainStep k, int64_t d, const double *before, const double *after,
                   const double *mean2, double *out) {
    const double n = k.count, step = z->step2, s0 = k.squares, folds = k.fold > 0 ? z->unit2 / k.fold : 0;
    const double least = z->prod_p2 > 0 ? n * z->least2 : 0, first = z->truncates ? 0 : 1;
    const double one2 = k.g_first * k.g_first, one = k.f_first < 1 ? k.f_first * (1 - k.f_first) : 0;
    if (n < 1) return;
    const dkv_formula_fold f = dkv_formulaFold(
        (dkv_formula_step){n, s0, k.g, k.g2, k.ff, k.share, k.g_first, k.f_first}, k.fold, k.done, z->truncates);
    for (int64_t c = 0; c < d; c++) {
        double b = before[c], in = f.inside * b, e = after[c] - b, e2 = e * e, s = s0 * mean2[c], random = s - e2 * k.share;
        random = random > 0 ? random : 0;
        double near = f.count * (in * in + f.path * s / n) + 2 * f.g * in * e + f.g2 * e2 + f.ff * random;
        double all = n * b * b + 2 * k.g * b * e + k.g2 * e2 + k.ff * random;
        near -= b == 0 || f.fresh ? first * (one2 * e2 + one * random) : 0; /* the first term is added to 0 */
        near = near > 0 ? near : 0;
        out[c] += k.factor * (step * near + folds * (all > 0 ? all : 0) + least);
    }
}
