/* The other hidden kernels: delta, partial sums of every kind, fp32 and TF32, scores rounded. */
#include "test_fit.h"

static const variant variants[] = {
    {"+delta=exact", DUALKV_BF16, "flash+delta, key tile 64"},
    {"+delta=exact+acc=tc+bn=32", DUALKV_FP16, "flash+delta on tensor cores, key tile 32"},
    {"+partials=low", DUALKV_BF16, "flash+partials, key tile 64"},
    {"+ds=scaled+partials=low+acc=tc+bn=128", DUALKV_BF16, "flash+scaled+partials on tensor cores, key tile 128"},
    {"+ds=scaled", DUALKV_FP16, "flash+scaled, key tile 64"},
    {"+partials=low+acc=tc", DUALKV_FP16, "flash+partials on tensor cores, key tile 64"},
    {"+partials=segments", DUALKV_BF16, "flash+copies, key tile 64"},
    {"+partials=segments+acc=tc+bn=32", DUALKV_FP16, "flash+copies on tensor cores, key tile 32"},
    {"+partials=rows", DUALKV_BF16, "flash+running 64, key tile 64"},
    {"+partials=rows+bm=32+bn=32+delta=exact", DUALKV_FP16, "flash+delta+running 32, key tile 32"},
    {"+p=exact", DUALKV_BF16, "fp32"},
    {"+p=normalised+scores=low+partials=low+acc=tc", DUALKV_BF16, "eager on tensor cores"},
    {"+in=tf32", DUALKV_FP32, "tf32, key tile 64"},
    {"+bn=32", DUALKV_FP32, "fp32"},
};

static void hidden_arithmetic_is_named(void **state) {
    (void)state;
    mustBeNamed(variants, sizeof variants / sizeof variants[0]);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(hidden_arithmetic_is_named)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
