/* Arithmetic of kernels that declare none: emulated kernels of known arithmetic, hidden, are named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "case.h"

typedef struct variant {
    const char *options;
    dualkv_dtype type;
    const char *words;
} variant;

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
    {"+delta=exact", DUALKV_BF16, "flash+delta, key tile 64"},
    {"+delta=exact+acc=tc+bn=32", DUALKV_FP16, "flash+delta on tensor cores, key tile 32"},
    {"+partials=low", DUALKV_BF16, "flash+partials, key tile 64"},
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
enum { N_VARIANTS = sizeof variants / sizeof variants[0] };

static void fit(const char *spec, const char *word, dualkv_dtype type, dkv_fits *out) {
    dkv_kernel_spec k;
    dkv_err err = {0};
    if (dkv_parseKernelSpec(spec, &k, &err) ||
        dkv_fitKernel(&k, word, 1u << type, 120, dkv_dataDir(), out, &err))
        fail_msg("%s: %s", spec, err.text);
}

/* At least 95 of 100, as the issue asks: one of these may be named wrongly. */
static void hidden_arithmetic_is_named(void **state) {
    (void)state;
    int right = 0;
    for (int i = 0; i < N_VARIANTS; i++) {
        char spec[200];
        dkv_fits fits;
        snprintf(spec, sizeof spec, "emu+undeclared%s", variants[i].options);
        fit(spec, "auto", variants[i].type, &fits);
        const dkv_fit *x = &fits.of[variants[i].type];
        bool same = x->known && !strcmp(x->words, variants[i].words);
        if (!same) print_message("%s (%s) is called '%s'\n", spec, dkv_dtypeName(variants[i].type), x->words);
        right += same;
    }
    assert_true(right * 100 >= 95 * N_VARIANTS);
}

static dkv_status judge(const char *spec, const char *line, const dkv_fits *fits, dkv_result *out) {
    dkv_case_options options = {.data_dir = dkv_dataDir(), .level = 1e-9, .threads = 1, .fits = fits};
    dkv_kernel_spec k;
    dkv_worker w;
    dkv_problem p = {0};
    dkv_err err = {0};
    if (dkv_parseKernelSpec(spec, &k, &err) || dkv_parseProblem(line, dkv_knownFill, &p, &err))
        fail_msg("%s: %s", line, err.text);
    dkv_initWorker(&w, &k, 60);
    dkv_runCase(&p, &w, &options, out);
    dkv_stopWorker(&w);
    dkv_freeProblem(&p);
    return out->status;
}

/* What a kernel declares stands: P rounded twice, to another 16-bit format first, is a defect, whatever is asked for. */
static void what_is_declared_stands(void **state) {
    (void)state;
    static const char *const line = "shape=100+3x70 heads=4:2";
    dkv_result *r = malloc(sizeof *r);
    dkv_fits fits;
    assert_non_null(r);
    for (size_t i = 0; i < 4; i++) {
        const char *spec = i % 2 ? "emu+fault=X9" : "emu+fault=X13"; /* P rounded twice; dS of rounded P */
        fit(spec, i < 2 ? "auto" : "eager", DUALKV_BF16, &fits);
        if (i < 2) assert_false(fits.of[DUALKV_BF16].known);
        assert_true(dkv_statusRow(judge(spec, line, &fits, r))->defect);
        assert_string_equal(r->profile, "");
    }
    free(r);
}

/* A case is judged by what was found; what that does not explain, as ever; and by name, it must fit. */
static void cases_are_judged_by_what_was_found(void **state) {
    (void)state;
    static const char *const line = "shape=33+2x40,7 heads=4:2 dim=32 mask=window:20 dlse=on";
    dkv_result *r = malloc(sizeof *r);
    dkv_fits fits;
    assert_non_null(r);
    fit("emu+undeclared+bn=32", "auto", DUALKV_BF16, &fits);
    assert_int_equal(judge("emu+undeclared+bn=32", line, &fits, r), DKV_ST_PASSED);
    assert_string_equal(r->profile, "flash, key tile 32");
    assert_int_equal(r->arithmetic.key_tile, 32);
    assert_int_equal(judge("emu+undeclared+bn=32+partials=low", line, &fits, r), DKV_ST_PASSED);
    assert_string_equal(r->profile, "partials");
    fit("emu+undeclared", "fp32", DUALKV_BF16, &fits);
    assert_int_equal(judge("emu+undeclared", line, &fits, r), DKV_ST_FAILED);
    fit("emu+undeclared", "normalised", DUALKV_BF16, &fits);
    assert_int_equal(judge("emu+undeclared", line, &fits, r), DKV_ST_IMPRECISE);
    fit("emu+undeclared", "flash", DUALKV_BF16, &fits);
    assert_int_equal(judge("emu+undeclared", line, &fits, r), DKV_ST_PASSED);
    free(r);
}

static void words(void **state) {
    (void)state;
    dkv_err err = {0};
    assert_int_equal(dkv_checkArithmeticWord("auto", &err), 0);
    assert_int_equal(dkv_checkArithmeticWord("tf32", &err), 0);
    assert_int_equal(dkv_checkArithmeticWord("fp16", &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "auto, fp32, fast, tf32, flash, normalised, delta, partials, delta-partials, copies, delta-copies, running, eager"));
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
