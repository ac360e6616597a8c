/* twin_loops.c: the twin's plain loops over a block's or a tile's elements. */
#include "twin_impl.h"

#define LANES 8

/* Largest finite magnitude. */
DKV_CLONES
static double largest(const double *x, int64_t n) {
    double top[LANES] = {0}, best = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int e = 0; e < LANES; e++) {
            double a = fabs(x[i + e]);
            a = a <= DBL_MAX ? a : 0;
            top[e] = a > top[e] ? a : top[e];
        }
    for (; i < n; i++) {
        double a = fabs(x[i]);
        best = a > best && a <= DBL_MAX ? a : best;
    }
    for (int e = 0; e < LANES; e++) best = top[e] > best ? top[e] : best;
    return best;
}

/* A power of two at or above x > 0, 2^-most to 2^most. */
static double powerAbove(double x, int most) {
    int e;
    frexp(x, &e);
    return ldexp(1, e < -most ? -most : e > most ? most : e);
}

DKV_CLONES
static void squaresRow(const double *x, int64_t d, double by, float weight, float *out) {
    for (int64_t c = 0; c < d; c++) {
        double y = x[c] * by;
        float y2 = (float)(y * y);
        out[c] = fabs(y) <= 1 ? y2 * weight : 0;
    }
}

void dkv_twinSquares(const double *x, int64_t n, int64_t d, const float *weight, float *out, double *unit) {
    double top = largest(x, n * d);
    *unit = top > 0 ? powerAbove(top, 500) : 1;
    for (int64_t i = 0; i < n; i++) squaresRow(x + i * d, d, 1 / *unit, weight ? weight[i] : 1, out + i * d);
}

DKV_CLONES
static void addSquares(const double *x, int64_t d, double *out) {
    for (int64_t c = 0; c < d; c++) {
        double y = fabs(x[c]) <= DBL_MAX ? x[c] : 0;
        out[c] += y * y;
    }
}

void dkv_twinMeans(const double *x, int64_t n, int64_t d, const double *live, double *out) {
    double rows = 0;
    memset(out, 0, sizeof *out * (size_t)d);
    for (int64_t i = 0; i < n; i++) {
        if (live && live[i] == 0) continue;
        addSquares(x + i * d, d, out);
        rows++;
    }
    for (int64_t c = 0; c < d && rows > 0; c++) out[c] /= rows;
}

DKV_CLONES
static double squareSum(const double *x, int64_t n, double by) {
    double sum[LANES] = {0}, tail = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int e = 0; e < LANES; e++) sum[e] += (x[i + e] * by) * (x[i + e] * by);
    for (; i < n; i++) tail += (x[i] * by) * (x[i] * by);
    return dkv_sumOf(sum, LANES) + tail;
}

DKV_CLONES
static void scaleRow(const double *x, int64_t d, double by, double unit, float *out) {
    for (int64_t c = 0; c < d; c++) out[c] = (float)(x[c] * by * unit);
}

void dkv_unitRows(const double *x, int64_t n, int64_t d, float *out, double *norm2) {
    for (int64_t i = 0; i < n; i++, x += d, out += d) {
        double top = largest(x, d), unit = top > 0 ? powerAbove(top, 1000) : 1, sum = squareSum(x, d, 1 / unit);
        bool use = top > 0 && sum <= DBL_MAX; /* a NaN or an infinity is in the sum */
        norm2[i] = use ? sum * unit * unit : 0;
        if (use) scaleRow(x, d, 1 / unit, 1 / sqrt(sum), out);
        else memset(out, 0, sizeof *out * (size_t)d);
    }
}

DKV_CLONES
void dkv_twinAddFloats(const float *restrict x, int64_t n, double by, double *restrict out) {
    for (int64_t e = 0; e < n; e++) out[e] += by * x[e];
}

DKV_CLONES
void dkv_twinAddScaled(const double *restrict x, int64_t n, double by, double *restrict out) {
    for (int64_t e = 0; e < n; e++) out[e] += by * x[e];
}

DKV_CLONES
void dkv_twinFloats(const double *restrict x, int64_t n, double by, float *restrict out) {
    for (int64_t e = 0; e < n; e++) {
        double y = x[e] * by;
        out[e] = fabs(y) <= DBL_MAX ? (float)y : 0;
    }
}

DKV_CLONES
void dkv_twinMagnitudes(const double *restrict x, int64_t n, double by, float *restrict out) {
    for (int64_t e = 0; e < n; e++) {
        double y = fabs(x[e] * by);
        out[e] = y <= DBL_MAX ? (float)y : 0;
    }
}

DKV_CLONES
void dkv_twinWeigh(float *x, int64_t n, float by) {
    for (int64_t e = 0; e < n; e++) x[e] *= by;
}

DKV_CLONES
double dkv_twinCount(const double *x, int64_t n, double least, double *squares) {
    double count[LANES] = {0}, sum[LANES] = {0};
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int e = 0; e < LANES; e++) {
            count[e] += x[j + e] > least ? 1 : 0;
            sum[e] += x[j + e] * x[j + e];
        }
    for (; j < n; j++) {
        count[0] += x[j] > least ? 1 : 0;
        sum[0] += x[j] * x[j];
    }
    *squares = dkv_sumOf(sum, LANES);
    return dkv_sumOf(count, LANES);
}

DKV_CLONES
double dkv_twinWeighted(const float *w, const double *x, const float *y, int64_t n) {
    double sum[LANES] = {0}, tail = 0;
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int e = 0; e < LANES; e++) sum[e] += w[j + e] * x[j + e] * y[j + e];
    for (; j < n; j++) tail += w[j] * x[j] * y[j];
    return dkv_sumOf(sum, LANES) + tail;
}

DKV_CLONES
double dkv_twinDot(const float *x, const float *y, int64_t n) {
    double sum[LANES] = {0}, tail = 0;
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int e = 0; e < LANES; e++) sum[e] += (double)x[j + e] * y[j + e];
    for (; j < n; j++) tail += (double)x[j] * y[j];
    return dkv_sumOf(sum, LANES) + tail;
}

DKV_CLONES
double dkv_twinSizes(const double *x, int64_t n, double *squares) {
    double size[LANES] = {0}, sum[LANES] = {0};
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int e = 0; e < LANES; e++) {
            size[e] += fabs(x[j + e]);
            sum[e] += x[j + e] * x[j + e];
        }
    for (; j < n; j++) {
        size[0] += fabs(x[j]);
        sum[0] += x[j] * x[j];
    }
    *squares = dkv_sumOf(sum, LANES);
    return dkv_sumOf(size, LANES);
}
