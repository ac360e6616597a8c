#include "memory.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "side.h"

/* Tokens of a layout, and the bytes and elements that they make. */
typedef struct amount {
    double in, out, o, lse; /* elements of inputs, of outputs without LSE, of O, of LSE */
} amount;

static amount countRows(const dkv_problem *p, double q, double k) {
    const double wide = p->grad ? 1 : 0, dims = p->dqk + p->dv;
    return (amount){.in = q * p->hq * (p->dqk + wide * p->dv) + k * p->hkv * dims,
                    .out = q * p->hq * (p->dv + wide * p->dqk) + wide * k * p->hkv * dims,
                    .o = q * p->hq * p->dv,
                    .lse = q * p->hq};
}

int dkv_accountCase(const dkv_problem *p, bool replicated, dkv_memory_row rows[DKV_MEMORY_ROWS]) {
    const double tokens = dkv_countReplicated(p);
    const bool summed = replicated && dkv_isSummed(p), spread = replicated && !summed;
    const double elt = p->dtype == DUALKV_FP32 ? 4 : 2;
    const amount packed = countRows(p, (double)dkv_countQueries(p), (double)dkv_countKeys(p));
    const amount all = replicated ? countRows(p, tokens, tokens) : packed, held = summed ? packed : all;
    const double arena = (all.in + all.out) * elt + 4 * all.lse;
    const bool shadow = !summed && arena < DKV_ARENA_LARGE;
    const double run = 8 * (held.out + held.lse) + (spread ? 8 * (packed.out + packed.lse) : 0);
    const double answer = 4 * run, others = held.in * elt;
    /* While the oracle answers two runs are held; later one of a check and its inputs, and no twin, no variance. */
    const bool later = run + others > answer / 2;
    int n = 0;
    rows[n++] = (dkv_memory_row){"inputs", packed.in * elt};
    if (spread) rows[n++] = (dkv_memory_row){"replicated inputs", all.in * elt};
    rows[n++] = (dkv_memory_row){"kernel's buffers", arena};
    if (shadow) rows[n++] = (dkv_memory_row){"their second copy", arena};
    if (shadow) rows[n++] = (dkv_memory_row){"kernel's own", arena};
    rows[n++] = (dkv_memory_row){later ? "outputs of three runs" : "outputs of two runs", (later ? 3 : 2) * run};
    rows[n++] = (dkv_memory_row){"question to the oracle", (held.in + held.o) * elt + 4 * held.lse};
    rows[n++] = (dkv_memory_row){later ? "truth, bound" : "truth, bound, twin, variance", later ? answer / 2 : answer};
    if (later) rows[n++] = (dkv_memory_row){"other inputs of checks", others};
    rows[n++] = (dkv_memory_row){"the rest", 96.0 * 1048576};
    return n;
}

double dkv_estimateCase(const dkv_problem *p, bool replicated) {
    dkv_memory_row rows[DKV_MEMORY_ROWS];
    double total = 0;
    for (int n = dkv_accountCase(p, replicated, rows), i = 0; i < n; i++) total += rows[i].bytes;
    return total;
}

void dkv_sayMemory(const dkv_problem *p, bool replicated, char *out, size_t n) {
    dkv_memory_row rows[DKV_MEMORY_ROWS];
    const int count = dkv_accountCase(p, replicated, rows);
    const double total = dkv_estimateCase(p, replicated);
    size_t at = 0;
    out[0] = 0;
    for (int i = 0; i < count; i++) {
        if (rows[i].bytes * 20 < total || at >= n) continue;
        at += (size_t)snprintf(out + at, n - at, "%s%s %.1f", at ? ", " : "", rows[i].name, rows[i].bytes / 0x1p30);
    }
    if (at < n) snprintf(out + at, n - at, " GiB");
}

double dkv_estimateTiming(const dkv_problem *p, bool replicated) {
    const double more = replicated ? dkv_countReplicated(p) : 0, elt = p->dtype == DUALKV_FP32 ? 4 : 2;
    const double q = (double)dkv_countQueries(p) + more, k = (double)dkv_countKeys(p) + more;
    return 64.0 * 1048576 + (8 + elt) * (q * p->hq + k * p->hkv) * (p->dqk + p->dv);
}

static double readNumber(const char *path, const char *key) {
    char row[256];
    double value = INFINITY;
    FILE *f = fopen(path, "r");
    while (f && fgets(row, sizeof row, f))
        if (strncmp(row, key, strlen(key)) == 0 && sscanf(row + strlen(key), "%lf", &value) == 1) break;
    if (f) fclose(f);
    return value;
}

double dkv_availableMemory(void) {
    double free_bytes = 1024 * readNumber("/proc/meminfo", "MemAvailable:");
    double limit = readNumber("/sys/fs/cgroup/memory.max", ""),
           used = readNumber("/sys/fs/cgroup/memory.current", "");
    if (isfinite(limit) && isfinite(used) && limit - used < free_bytes) free_bytes = limit - used;
    return free_bytes;
}
