/* perf.h: is a kernel slower than another? Both run in one process each, turn and turn about (AB, BA, AB, …), so that a
 * machine that gets slower meanwhile slows both. A round gives a ratio of times, forward and backward; of the median ratio the
 * rounds give an interval without any assumption about how times are distributed: of n independent rounds the median lies
 * below the k-th smallest ratio with the probability of at most k - 1 heads in n tosses. On a device, by its own events. */
#ifndef DKV_PERF_H
#define DKV_PERF_H

#include "worker.h"

typedef struct dkv_perf {
    int rounds;
    bool backward;
    double seconds[2][2];             /* medians: [kernel, baseline][forward, backward] */
    double ratio[2], low[2], high[2]; /* time of the kernel over that of the baseline, [forward, backward] */
    dkv_gpu_info gpu;                 /* of the kernel */
} dkv_perf;

/* The median of n >= 1 values, which it sorts. */
double dkv_median(double *x, int n);
/* Rounds that an interval at this level needs at least: with fewer it would be all numbers. */
int dkv_leastRounds(double level);
/* The interval of the median of n sorted values that leaves out at most `level` on each side. */
void dkv_rankInterval(const double *sorted, int n, double level, double *low, double *high);
/* Times kernel[0] against kernel[1] on a canonical line for about so many seconds. DKV_EREFUSED, with the reason, where one of
 * them refuses it; DKV_EHARNESS where one does not run. */
int dkv_compareSpeed(const char *line, const dkv_kernel_spec *const kernel[2], double timeout, double level, double seconds,
                     const char *data_dir, dkv_perf *out, dkv_err *err);

#endif
