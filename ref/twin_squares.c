/* twin_squares.c: what chains along the head dimension round (twin_noise.h), from checkpoints along each chain.
 *
 * Between checkpoints T_a and T_b, l products apart, a sum of random terms has E sum T_t^2 = T_a^2 (l-1)/2 + T_b^2
 * (l+1)/2. The first addition, to 0, is exact. Of a product's own rounding, E sum x^2 = (T_b - T_a)^2.
 *
 * A product of matrices whose accumulator is looked at on the way, so that no library has it: ROWS rows by KEYS keys
 * at a time stay in registers. */
#include "twin_impl.h"

#define CHECKPOINTS 8
#define ROWS 4
#define LANE 16 /* floats of a vector: two vectors of keys */
#define KEYS (2 * LANE)
#define DIM_MAX 256

typedef float vec __attribute__((vector_size(4 * LANE)));

typedef struct checkpoints {
    int64_t n, end[CHECKPOINTS];
    float weight[CHECKPOINTS], own; /* of T^2 there; of a piece's square */
} checkpoints;

static checkpoints makeCheckpoints(const dkv_noise *z, int64_t d) {
    checkpoints c = {.n = d < CHECKPOINTS ? d : CHECKPOINTS, .own = (float)(z->prod2 / z->step2)};
    for (int64_t k = 0; k < c.n; k++) {
        int64_t l = d * (k + 1) / c.n - d * k / c.n;
        c.end[k] = d * (k + 1) / c.n;
        c.weight[k] = (float)(l + 1) / 2 - (k == 0 ? 1 / (float)l : 0);
        if (k > 0) c.weight[k - 1] += (float)(l - 1) / 2;
    }
    return c;
}

void dkv_chainSquare(const dkv_noise *z, const float *a, const float *b, int64_t d, float *dot, float *sq) {
    checkpoints k = makeCheckpoints(z, d);
    float t = 0, before = 0, sum = 0;
    for (int64_t e = 0, c = 0; e < k.n; e++) {
        for (; c < k.end[e]; c++) t += a[c] * b[c];
        sum += k.weight[e] * (t * t) + k.own * (t - before) * (t - before);
        before = t;
    }
    *dot = t;
    *sq = sum;
}

/* Rows a[0..ROWS-1] against KEYS keys, keys [d, KEYS]. */
DKV_CLONES
static void squareBlock(const checkpoints *k, const float *const *a, const float *keys, float *dot, float *sq) {
    const vec zero = {0};
    vec t00 = zero, t01 = zero, t10 = zero, t11 = zero, t20 = zero, t21 = zero, t30 = zero, t31 = zero;
    vec t[ROWS][2], before[ROWS][2] = {{zero, zero}}, sum[ROWS][2] = {{zero, zero}};
    const float *a0 = a[0], *a1 = a[1], *a2 = a[2], *a3 = a[3];
    for (int64_t e = 0, c = 0; e < k->n; e++) {
        for (; c < k->end[e]; c++) {
            vec x, y;
            memcpy(&x, keys + c * KEYS, sizeof x);
            memcpy(&y, keys + c * KEYS + LANE, sizeof y);
            t00 += a0[c] * x;
            t01 += a0[c] * y;
            t10 += a1[c] * x;
            t11 += a1[c] * y;
            t20 += a2[c] * x;
            t21 += a2[c] * y;
            t30 += a3[c] * x;
            t31 += a3[c] * y;
        }
        t[0][0] = t00, t[0][1] = t01, t[1][0] = t10, t[1][1] = t11;
        t[2][0] = t20, t[2][1] = t21, t[3][0] = t30, t[3][1] = t31;
        for (int i = 0; i < ROWS; i++)
            for (int h = 0; h < 2; h++) sum[i][h] += k->weight[e] * (t[i][h] * t[i][h]);
        for (int i = 0; k->own > 0 && i < ROWS; i++)
            for (int h = 0; h < 2; h++) {
                vec x = t[i][h] - before[i][h];
                sum[i][h] += k->own * x * x;
                before[i][h] = t[i][h];
            }
    }
    memcpy(dot, t, sizeof t);
    memcpy(sq, sum, sizeof sum);
}

void dkv_chainSquares(const dkv_noise *z, const float *a, const float *b, int64_t m, int64_t n, int64_t d, float *dot,
                      float *sq) {
    float keys[DIM_MAX * KEYS] __attribute__((aligned(64))), x[ROWS * KEYS], y[ROWS * KEYS];
    checkpoints k = makeCheckpoints(z, d);
    for (int64_t j0 = 0; j0 < n; j0 += KEYS) {
        int64_t w = n - j0 < KEYS ? n - j0 : KEYS;
        if (w < KEYS) memset(keys, 0, sizeof *keys * (size_t)(d * KEYS));
        for (int64_t j = 0; j < w; j++)
            for (int64_t c = 0; c < d; c++) keys[c * KEYS + j] = b[(j0 + j) * d + c];
        for (int64_t i0 = 0; i0 < m; i0 += ROWS) {
            const float *row[ROWS];
            for (int64_t e = 0; e < ROWS; e++) row[e] = a + (i0 + e < m ? i0 + e : m - 1) * d;
            squareBlock(&k, row, keys, x, y);
            for (int64_t e = 0; e < ROWS && i0 + e < m; e++) {
                memcpy(dot + (i0 + e) * n + j0, x + e * KEYS, sizeof *x * (size_t)w);
                memcpy(sq + (i0 + e) * n + j0, y + e * KEYS, sizeof *y * (size_t)w);
            }
        }
    }
}
