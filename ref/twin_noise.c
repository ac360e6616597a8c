/* twin_noise.c: see twin_noise.h. */
#include "twin_noise.h"

#include <stdlib.h>

/* E sum_{t>1} T_t^2 of a bridge from 0 to dot whose d terms have the mean square |a|^2 |b|^2/d^2. */
dkv_quick dkv_makeQuick(int64_t d) {
    double n = (double)d;
    return (dkv_quick){(n + 1) * (2 * n + 1) / (6 * n), (n + 1) / (6 * n), 1 / n};
}

static double runChain(const dkv_noise *z, const double *a, const double *b, int64_t d) {
    float t = 0;
    double acc = 0;
    if (z->truncates) {
        for (int64_t c = 0; c < d; c += z->step)
            acc = dkv_twinStep(acc, a + c, b + c, d - c < z->step ? d - c : z->step);
        return acc;
    }
    for (int64_t c = 0; c < d; c++) {
        float x = (float)a[c] * (float)b[c];
        t += x;
    }
    return t;
}

void dkv_startFit(dkv_chainFit *f) {
    memset(f, 0, sizeof *f);
    for (int e = 0; e < DKV_CHAIN_BINS; e++) f->var[e] = 1;
}

void dkv_sampleFit(const dkv_noise *z, const double *a, const double *b, int64_t n, int64_t d, double weight,
                   bool quick, dkv_chainFit *f) {
    dkv_quick q = dkv_makeQuick(d);
    float ua[256], ub[256], dot, sq;
    double na, nb;
    if (d > 256 || z->unit2 < 0x1p-80) return;
    for (int64_t i = 0; i < n; i++, a += d, b += d) {
        double sum = 0;
        dkv_unitRows(a, 1, d, ua, &na);
        dkv_unitRows(b, 1, d, ub, &nb);
        if (!(na > 0) || !(nb > 0)) continue;
        dkv_chainSquare(z, ua, ub, d, &dot, &sq);
        for (int64_t c = 0; c < d; c++) sum += a[c] * b[c];
        if (quick) sq = (float)dkv_quickSquares(q, sum * sum / (na * nb), 1);
        double e = runChain(z, a, b, d) - sum, unit = weight / (na * nb);
        int bin = dkv_chainBin(sq);
        if (!isfinite(e) || !isfinite(unit)) continue;
        f->model[bin] += weight * z->step2 * sq;
        f->real[bin] += e * e * unit;
        f->drift[bin] += e * sum * unit;
        f->size[bin] += sum * sum * unit;
        f->count[bin]++;
    }
}

/* Bins with few samples lean on their neighbours, and where nothing was sampled the model stands. */
void dkv_endFit(dkv_chainFit *f) {
    for (int e = 0; e < DKV_CHAIN_BINS; e++) {
        double model = 0, real = 0, drift = 0, size = 0, count = 0;
        for (int w = 0; w < DKV_CHAIN_BINS && count < 64; w++)
            for (int s = -1; s <= (w ? 1 : -1); s += 2) {
                int at = e + s * w;
                if (at < 0 || at >= DKV_CHAIN_BINS) continue;
                model += f->model[at], real += f->real[at], count += f->count[at];
                drift += f->drift[at], size += f->size[at];
            }
        if (count < 16 || !(model > 0)) continue;
        f->gain[e] = size > 0 ? (float)(drift / size) : 0;
        f->var[e] = (float)((real - (size > 0 ? drift * drift / size : 0)) / model);
    }
}

uint64_t dkv_hashBytes(uint64_t h, const void *x, size_t n) {
    const unsigned char *b = x;
    uint64_t w;
    for (; n >= 8; n -= 8, b += 8) {
        memcpy(&w, b, 8);
        h = (h ^ w) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 29;
    }
    for (; n; n--) h = (h ^ *b++) * 0x100000001b3ull;
    return h ^ h >> 32;
}

typedef struct entry {
    uint64_t hash;
    int64_t at;
    int32_t cls;
} entry;

static int compareEntries(const void *x, const void *y) {
    const entry *a = x, *b = y;
    if (a->cls != b->cls) return a->cls < b->cls ? -1 : 1;
    return a->hash < b->hash ? -1 : a->hash > b->hash;
}

int dkv_countEqual(const uint64_t *hash, const int32_t *cls, int64_t n, float *count, const double *x, double *mean,
                   dkv_err *err) {
    entry *all = malloc(sizeof *all * (size_t)(n ? n : 1));
    if (!all) return dkv_fail(err, DKV_EHARNESS, "out of memory: %lld rows to compare", (long long)n);
    for (int64_t i = 0; i < n; i++) all[i] = (entry){hash[i], i, cls[i]};
    qsort(all, (size_t)n, sizeof *all, compareEntries);
    for (int64_t i = 0, end; i < n; i = end) {
        for (end = i; end < n && compareEntries(&all[i], &all[end]) == 0; end++) {
        }
        double sum = 0;
        for (int64_t e = i; e < end && x; e++) sum += isfinite(x[all[e].at]) ? x[all[e].at] : 0;
        for (int64_t e = i; e < end; e++) {
            count[all[e].at] = (float)(end - i);
            if (x) mean[all[e].at] = sum / (double)(end - i);
        }
    }
    free(all);
    return DKV_OK;
}
