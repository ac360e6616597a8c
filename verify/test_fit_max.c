/* Hidden kernels whose maximum is raised late, or has the sink in it from the start. */
#include "test_fit.h"
#include "test_line.h"

static const variant variants[] = {
    {"+lazy=8", DUALKV_BF16, "flash, key tile 64, maximum raised lazily by 2^8"},
    {"+lazy=8+bn=128+acc=tc", DUALKV_BF16, "flash on tensor cores, key tile 128, maximum raised lazily by 2^8"},
    {"+lazy=6+bn=32+order=down", DUALKV_FP16, "flash, key tile 32, last tile first, maximum raised lazily by 2^6"},
    {"+sink=first+bn=48+acc=tc+order=down", DUALKV_FP16, "flash on tensor cores, key tile 48, last tile first, sink first"},
    {"+lazy=8+sink=first+bn=32", DUALKV_FP16, "flash, key tile 32, maximum raised lazily by 2^8, sink first"},
    {"+sink=first+p=normalised", DUALKV_BF16, "normalised"},
};

static void hidden_arithmetic_is_named(void **state) {
    (void)state;
    mustBeNamed(variants, sizeof variants / sizeof variants[0]);
}

/* What was found judges sharply: it explains the kernel that it was found of, and no other. */
static void what_waits_is_no_rounding(void **state) {
    (void)state;
    static const char *const line = "shape=130+2x70 heads=4:2 scale=0.3 sinklogit=5";
    static const char *const specs[] = {"emu+undeclared", "emu+undeclared+lazy=8", "emu+undeclared+sink=first"};
    dkv_fits fits;
    for (int i = 1; i < 3; i++) {
        fit(specs[i], "auto", DUALKV_BF16, &fits);
        fits.of[DUALKV_BF16].held = true;
        for (int k = 0; k < 3; k++)
            assert_int_equal(judgeLine(specs[k], line, 60, (dkv_case_options){.fits = &fits}), i == k ? DKV_ST_PASSED : DKV_ST_IMPRECISE);
        assert_true((result->arithmetic.max_slack > 0) == (i == 1) && result->arithmetic.sink_first == (i == 2));
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(hidden_arithmetic_is_named), cmocka_unit_test(what_waits_is_no_rounding)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
