/* test_fit.h: hidden arithmetic must be named; what test_fit.c and test_fit_sums.c share, two programs for two cores. */
#ifndef DKV_TEST_FIT_H
#define DKV_TEST_FIT_H

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

static void fit(const char *spec, const char *word, dualkv_dtype type, dkv_fits *out) {
    dkv_kernel_spec k;
    dkv_err err = {DKV_OK, ""};
    if (dkv_parseKernelSpec(spec, &k, &err) ||
        dkv_fitKernel(&k, word, 1u << type, 120, dkv_dataDir(), out, &err))
        fail_msg("%s: %s", spec, err.text);
}

/* At least 95 of 100; under sanitizers one in four. */
static void mustBeNamed(const variant *variants, int n) {
    int right = 0, all = 0;
#ifdef __SANITIZE_ADDRESS__
    const int step = 4;
#else
    const int step = 1;
#endif
    for (int i = 0; i < n; i += step) {
        char spec[200];
        dkv_fits fits;
        snprintf(spec, sizeof spec, "emu+undeclared%s", variants[i].options);
        fit(spec, "auto", variants[i].type, &fits);
        const dkv_fit *x = &fits.of[variants[i].type];
        bool same = x->known && !strcmp(x->words, variants[i].words);
        if (!same) print_message("%s (%s) is called '%s'\n", spec, dkv_dtypeName(variants[i].type), x->words);
        right += same;
        all++;
    }
    assert_true(all > 0 && right * 100 >= 95 * all);
}

#endif
