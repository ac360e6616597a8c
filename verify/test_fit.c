/* Arithmetic of kernels that declare none: emulated kernels of known arithmetic, hidden, are named. Here: key tiles, orders,
 * accumulation, P normalised first; the rest of them in test_fit_sums.c. */
#include "test_fit.h"
#include "test_line.h"

static const variant variants[] = {
    {"", DUALKV_BF16, "flash, key tile 64"},
    {"+bn=16", DUALKV_BF16, "flash, key tile 16"},
    {"+bn=128+bm=32", DUALKV_BF16, "flash, key tile 128"},
    {"+bn=32+order=down", DUALKV_BF16, "flash, key tile 32, last tile first"},
    {"+bn=96", DUALKV_FP16, "flash, key tile 96"},
    {"+bn=256", DUALKV_FP16, "flash, key tile 256"},
    {"+order=down", DUALKV_FP16, "flash, key tile 64, last tile first"},
    {"+acc=tc", DUALKV_BF16, "flash on tensor cores, key tile 64"},
    {"+acc=tc+bn=128", DUALKV_FP16, "flash on tensor cores, key tile 128"},
    {"+acc=tc+bn=48+order=down", DUALKV_BF16, "flash on tensor cores, key tile 48, last tile first"},
    {"+p=normalised", DUALKV_BF16, "normalised"},
    {"+p=normalised+acc=tc", DUALKV_FP16, "normalised on tensor cores"},
};

static void hidden_arithmetic_is_named(void **state) {
    (void)state;
    mustBeNamed(variants, sizeof variants / sizeof variants[0]);
}

static dkv_status judge(const char *spec, const char *line, const dkv_fits *fits) {
    return judgeLine(spec, line, 60, (dkv_case_options){.fits = fits});
}

/* What a kernel declares stands: P rounded twice, to another 16-bit format first, is a defect, whatever is asked for. */
static void what_is_declared_stands(void **state) {
    (void)state;
    static const char *const line = "shape=100+3x70 heads=4:2";
    dkv_fits fits;
    for (size_t i = 0; i < 4; i++) {
        const char *spec = i % 2 ? "emu+fault=X9" : "emu+fault=X13"; /* P rounded twice; dS of rounded P */
        fit(spec, i < 2 ? "auto" : "eager", DUALKV_BF16, &fits);
        if (i < 2) assert_false(fits.of[DUALKV_BF16].known);
        assert_true(dkv_statusRow(judge(spec, line, &fits))->defect);
        assert_string_equal(result->profile, "");
    }
}

/* A case is judged by what was found; what that does not explain, as ever; and by name, it must fit. */
static void cases_are_judged_by_what_was_found(void **state) {
    (void)state;
    static const char *const line = "shape=33+2x40,7 heads=4:2 dim=32 mask=window:20 dlse=on";
    dkv_fits fits;
    fit("emu+undeclared+bn=32", "auto", DUALKV_BF16, &fits);
    assert_int_equal(judge("emu+undeclared+bn=32", line, &fits), DKV_ST_PASSED);
    assert_string_equal(result->profile, "flash, key tile 32");
    assert_int_equal(result->arithmetic.key_tile, 32);
    assert_int_equal(judge("emu+undeclared+bn=32+partials=low", line, &fits), DKV_ST_PASSED);
    assert_string_equal(result->profile, "partials");
    fit("emu+undeclared", "fp32", DUALKV_BF16, &fits);
    assert_int_equal(judge("emu+undeclared", line, &fits), DKV_ST_FAILED);
    fit("emu+undeclared", "normalised", DUALKV_BF16, &fits);
    assert_int_equal(judge("emu+undeclared", line, &fits), DKV_ST_IMPRECISE);
    fit("emu+undeclared", "flash", DUALKV_BF16, &fits);
    assert_int_equal(judge("emu+undeclared", line, &fits), DKV_ST_PASSED);
}

static void words(void **state) {
    (void)state;
    dkv_err err = {0};
    assert_int_equal(dkv_checkArithmeticWord("auto", &err), 0);
    assert_int_equal(dkv_checkArithmeticWord("tf32", &err), 0);
    assert_int_equal(dkv_checkArithmeticWord("fp16", &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "auto, fp32, fast, tf32, flash, normalised, delta, scaled, partials, delta-partials, scaled-partials, copies, delta-copies, running, eager"));
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hidden_arithmetic_is_named),
        cmocka_unit_test(what_is_declared_stands),
        cmocka_unit_test(cases_are_judged_by_what_was_found),
        cmocka_unit_test(words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
