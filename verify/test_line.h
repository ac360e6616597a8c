/* One problem line, judged in the test's own process. For tests only; include once. The test's main must serve workers
 * (DKV_WORKER_ARG). */
#ifndef DKV_TEST_LINE_H
#define DKV_TEST_LINE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "check.h"

static dkv_result result[1]; /* of the last case */

/* On a worker that stays; `options` for all but data, level 1e-9 and one thread. */
__attribute__((unused)) static dkv_status judgeOn(dkv_worker *w, const char *line, dkv_case_options options) {
    dkv_problem p;
    dkv_err err = {DKV_OK, ""};
    options.data_dir = dkv_dataDir();
    options.level = 1e-9;
    options.threads = 1;
    if (dkv_parseProblem(line, dkv_knownFill, &p, &err)) fail_msg("%s: %s", line, err.text);
    dkv_runCase(&p, w, &options, result);
    dkv_freeProblem(&p);
    return result->status;
}

__attribute__((unused)) static dkv_status judgeLine(const char *spec, const char *line, double timeout, dkv_case_options options) {
    dkv_kernel_spec s;
    dkv_worker w;
    dkv_err err = {DKV_OK, ""};
    if (dkv_parseKernelSpec(spec, &s, &err)) fail_msg("%s: %s", spec, err.text);
    dkv_initWorker(&w, &s, timeout);
    judgeOn(&w, line, options);
    dkv_stopWorker(&w);
    return result->status;
}

/* What a check found in the last case. */
__attribute__((unused)) static const dkv_finding *findingOf(const char *check) {
    const dkv_check *c;
    for (int i = 0; (c = dkv_listCheck(i)); i++)
        if (strcmp(c->name, check) == 0) return &result->finding[i];
    fail_msg("no check '%s'", check);
    return NULL;
}

#endif
