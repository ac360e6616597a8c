/* Planted faults of known place: stage, region and rows must be those. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "diagnose.h"
#include "diagnose_set.h"
#include "guard.h"
#include "test_program.h"

static dkv_diagnosis *d; /* of the last case */

static void diagnose(const char *spec, const char *line, bool what) {
    dkv_kernel_spec s;
    dkv_problem p;
    dkv_err err = {0};
    const dkv_diagnose_options o = {.data_dir = dkv_dataDir(),
                                    .level = 1e-6,
                                    .timeout = 60,
                                    .seconds = 60,
                                    .threads = 1,
                                    .repeats = 2,
                                    .what = what};
    if (dkv_parseKernelSpec(spec, &s, &err) || dkv_parseProblem(line, dkv_knownFill, &p, &err))
        fail_msg("%s: %s", line, err.text);
    if (dkv_diagnoseLine(&p, &s, &o, d, &err)) fail_msg("%s: %s", line, err.text);
    dkv_freeProblem(&p);
}

#define PLAIN "shape=100+2x70 heads=4:2 dim=32"
#define MODIFIED "shape=90+2x40 heads=4:2 dim=32 dlse=on sinklogit=0.5 softcap=8"
typedef struct planted {
    const char *fault, *line;
    dkv_stage stage, second; /* of the first two spots; second 0: there is no other */
    const char *region, *says[2];
} planted;
static const planted known[] = {
    {"X1",
     PLAIN,
     DKV_STAGE_MASK,
     DKV_STAGE_B_MASK,
     "prompt-prompt, response-response",
     {"the key 1 position ahead", NULL}},
    {"A2", PLAIN, DKV_STAGE_B_MASK, 0, "response-response", {"every row of the responses", NULL}},
    {"A3", "shape=100+2x40 heads=4:2 dim=32", DKV_STAGE_B_MASK, 0, "response-prompt", {"keys 64-99", NULL}},
    {"D1", PLAIN, DKV_STAGE_SOFTMAX, 0, "response-prompt", {"of the responses", NULL}},
    {"D3", PLAIN, DKV_STAGE_LSE, 0, "rows of the responses", {"1.443 times", NULL}},
    {"F1",
     PLAIN,
     DKV_STAGE_REDUCE,
     0,
     "prompt-prompt, response-prompt",
     {"query head in the group 0", "left out"}},
    {"G3",
     MODIFIED,
     DKV_STAGE_DS,
     0,
     "prompt-prompt, response-prompt, response-response",
     {"dQ and dK", NULL}},
    {"L1", PLAIN, DKV_STAGE_MASK, 0, "keys of other branches", {"the last response", NULL}},
    {"L5", MODIFIED, DKV_STAGE_SCORES, DKV_STAGE_B_SCORES, "response-prompt", {"the responses", NULL}},
    {"X10", MODIFIED, DKV_STAGE_LSE, 0, "rows of prompt and responses", {"too small everywhere", NULL}},
    {"X12", PLAIN, DKV_STAGE_DELTA, 0, "rows of prompt and responses", {"dQ and dK", NULL}},
    {"X18", MODIFIED, DKV_STAGE_SUM, 0, "rows of the responses", {"more than the keys' weights", NULL}},
    {"X19", MODIFIED, DKV_STAGE_DSINK, 0, "", {"dSink", NULL}},
    {"K3", PLAIN, DKV_STAGE_REDUCE, 0, "keys of the prompt", {"0.5 times its value", NULL}},
    {"Y7", PLAIN, DKV_STAGE_DQ, 0, "rows of prompt and responses", {"head 3", "5.657 times"}},
    {"X20",
     "shape=100+2x64 heads=2:1 dim=32",
     DKV_STAGE_FORWARD,
     0,
     "rows of the prompt",
     {"tile 1 of 64 rows, its last", "not computed"}},
};

static void planted_faults_are_found_where_they_are(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        const planted *k = &known[i];
        char spec[64];
        snprintf(spec, sizeof spec, "emu+fault=%s", k->fault);
        diagnose(spec, k->line, false);
        bool right = d->n_spots == 1 + (k->second != 0) && d->spot[0].stage == k->stage &&
                     !strcmp(d->spot[0].region, k->region);
        if (k->second)
            right &= d->n_spots > 1 && d->spot[1].stage == k->second && !strcmp(d->spot[1].region, k->region);
        for (int s = 0; s < 2 && k->says[s]; s++) right &= strstr(d->sentence, k->says[s]) != NULL;
        if (!right)
            fail_msg("%s: %d spots, %s, %s: %s", k->fault, d->n_spots, dkv_stageRow(d->spot[0].stage)->name,
                     d->spot[0].region, d->sentence);
    }
}

static void sound_kernels_have_no_spot(void **state) {
    (void)state;
    static const char *const kernels[] = {"emu", "emu-replicated", "emu+bm=16+bn=32"};
    for (int k = 0; k < 3; k++) {
        diagnose(kernels[k], MODIFIED, true);
        assert_int_equal(d->result.status, DKV_ST_PASSED);
        assert_string_equal(d->sentence, "nothing is wrong");
        assert_int_equal(d->n_spots, 0);
    }
}

/* What is no matter of values has a sentence of its own, and a replicated kernel's faults have their place,
 * too. */
static void other_statuses_are_said(void **state) {
    (void)state;
    diagnose("emu+fault=X17", PLAIN, false);
    assert_non_null(strstr(d->sentence, "the kernel changes its inputs"));
    diagnose("emu+fault=X16", PLAIN, false);
    assert_non_null(strstr(d->sentence, "writes outside"));
    diagnose("emu-replicated+fault=X12", PLAIN, false);
    assert_int_equal(d->spot[0].stage, DKV_STAGE_DELTA);
}

/* ---- sets in words ---- */

static void describe(const char *line, int64_t (*off)(int64_t segment, int64_t row, int64_t len),
                     dkv_row_words *w) {
    dkv_problem p;
    dkv_layout l;
    dkv_err err = {0};
    uint8_t rows[2000] = {0};
    assert_int_equal(dkv_parseProblem(line, NULL, &p, &err), 0);
    assert_int_equal(dkv_makeLayout(&p, &l, &err), 0);
    for (int32_t i = 0; i < l.view.n_segments; i++)
        for (int64_t r = 0; r < l.view.segments[i].q_len; r++)
            rows[l.view.segments[i].q_start + r] = off(i, r, l.view.segments[i].q_len) != 0;
    dkv_describeRows(&l, false, rows, w);
    dkv_freeLayout(&l);
    dkv_freeProblem(&p);
}
static int64_t tileTwo(int64_t s, int64_t r, int64_t len) { return s == 0 && r >= 128 && r < 192 && len > 0; }
static int64_t lastOfAll(int64_t s, int64_t r, int64_t len) { return s > 0 && r == len - 1; }
static int64_t residue(int64_t s, int64_t r, int64_t len) { return r % 32 == 31 && s >= 0 && len > 0; }
static int64_t partial(int64_t s, int64_t r, int64_t len) { return r >= len / 64 * 64 && s >= 0; }
static int64_t someHigh(int64_t s, int64_t r, int64_t len) {
    return len > 0 && s >= 0 && r % 64 >= 48 && r % 3 != 0;
}
static int64_t noise(int64_t s, int64_t r, int64_t len) {
    uint64_t x = (uint64_t)(s * 1000 + r) * 0x9E3779B97F4A7C15ull; /* splitmix64's finaliser */
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return (x ^ x >> 31) % 5 == 0 && len > 0;
}

static void sets_have_words(void **state) {
    (void)state;
    dkv_row_words w;
    const char *line = "shape=400+3x77,50";
    describe(line, tileTwo, &w);
    assert_string_equal(w.rows, "rows 128-191 (tile 2 of 64 rows)");
    assert_string_equal(w.segments, "the prompt");
    describe(line, lastOfAll, &w);
    assert_string_equal(w.rows, "the last row");
    assert_string_equal(w.segments, "the responses");
    describe(line, residue, &w);
    assert_string_equal(w.rows, "rows with number mod 32 = 31");
    describe(line, partial, &w);
    assert_string_equal(w.rows, "the last, partial tile of 64 rows");
    describe(line, someHigh, &w);
    assert_non_null(strstr(w.pattern, "number mod 64 = 4"));
    describe(line, noise, &w);
    assert_non_null(strstr(w.rows, "scattered"));
    assert_string_equal(w.pattern, "");
    const int64_t even[4] = {5, 5, 5, 5}, odd[4] = {20, 0, 0, 0}, all[4] = {20, 20, 20, 20};
    assert_true(dkv_gatherChance(even, all, 4) > 0.5);
    assert_true(dkv_gatherChance(odd, all, 4) < 1e-9);
}

/* ---- the program ---- */

static void the_command_says_and_writes_it(void **state) {
    (void)state;
    mustSay(0, "$B/dualkv diagnose shape=9+2x5 dim=8 --kernel emu", "nothing is wrong");
    mustSay(1, "$B/dualkv diagnose shape=9+2x5 dim=8 --kernel emu+fault=X12 --json $D/d.json",
            "backward stage delta");
    mustSay(0, "grep -c '\"stage\":\"delta\"' $D/d.json", "1");
    mustSay(2, "$B/dualkv diagnose shape=9+2x5", "--kernel");
    mustSay(2, "$B/dualkv diagnose smoke --kernel emu", "one line");
    mustSay(2, "$B/dualkv diagnose shape=9+ --kernel emu", "shape");
    mustSay(2, "$B/dualkv diagnose shape=4 --kernel emu+bm=0", "bm");
}

/* A kernel that declares nothing: what the user holds it to, or what explains most of it. */
static void strangers_are_held_to_an_arithmetic(void **state) {
    (void)state;
#define STRANGER(WORDS, GAIN) \
    "$B/dualkv diagnose 'shape=100+2x60 heads=2:2 dim=32' --where --kernel $B/testkernels/planted.so:planted+undeclared" GAIN WORDS
    mustSay(1, STRANGER("", "+gain=dV:1.01"), "held to flash, the tightest that explains all but dV on a"); /* as auto */
    mustSay(1, STRANGER(" --arithmetic flash", "+gain=dV:1.01"), "--arithmetic flash\n");
    assert_non_null(strstr(output, "1.01 times its value explains 0.9"));
    assert_non_null(strstr(output, "all of it: times 1.01\n"));
    /* auto: not fitted to the fault, but to the other tensors; replay lines name what it was held to. */
    mustSay(1, STRANGER(" --arithmetic auto", "+gain=dK:1.01"), "held to flash, the tightest that explains all but dK on a");
    assert_non_null(strstr(output, "dK is less precise than declared"));
    assert_non_null(strstr(output, " --arithmetic flash\n"));
    mustSay(1, STRANGER(" --arithmetic auto", "+fault=P6"), "they miss keys 64-99");
    assert_non_null(strstr(output, "the nearest, which explains none"));
    mustSay(0, "$B/dualkv diagnose 'shape=100+2x60 heads=4:2 dim=32' --kernel emu+undeclared+partials=low --arithmetic auto",
            "held to partials, the tightest that explains all its tensors");
    assert_non_null(strstr(output, "; flash explains all but dK and dV: --arithmetic flash, if that is meant"));
    mustSay(0, "$B/dualkv diagnose 'shape=9+2x5 dim=8' --kernel emu --arithmetic auto", "nothing is wrong");
    assert_null(strstr(output, "held to"));
    mustSay(0, "$B/dualkv diagnose 'shape=9+2x5 dim=8 dtype=fp32' --kernel emu+undeclared --arithmetic flash", "flash is none of fp32");
    mustSay(2, STRANGER(" --arithmetic nope", ""), "'nope' is none of auto");
}

/* Ctrl-C once values are judged: what was found by then is told and written; before that there is nothing to tell. */
static void an_interrupted_diagnosis_is_told(void **state) {
    (void)state;
#define CUT(OPTIONS) \
    "rm -f $D/cut.json; $B/dualkv diagnose 'shape=40+3x20 heads=4:2 dim=16' --json $D/cut.json --kernel " \
    "$B/testkernels/planted.so:planted" OPTIONS
    mustSay(130, CUT("+fault=P2+interrupt=6"), "interrupted; so far: dV is wrong, backward stage P^T dO");
    assert_non_null(strstr(output, "interrupted: what follows is incomplete"));
    mustSay(0, "grep -c '\"interrupted\":true.*\"status\":\"FAILED\"' $D/cut.json", "1");
    mustSay(130, CUT("+fault=P2+interrupt=6 --quiet"), "interrupted; so far: dV is wrong");
    mustSay(130, CUT("+interrupt=6"), "interrupted; so far: no row of any tensor is off\nINTERRUPTED  shape=40");
    mustSay(130, CUT("+interrupt=1"), "interrupted before anything was judged");
    mustSay(1, "test -e $D/cut.json", "");
}

/* Faults of another kernel, of kinds that the catalogue has not. All of them: fuzz/unseen.sh. */
static void faults_of_no_catalogue(void **state) {
    (void)state;
#define UNSEEN(LINE, FAULT) "$B/dualkv diagnose '" LINE "' --kernel $B/testkernels/planted.so:planted+fault=" FAULT
    mustSay(1, UNSEEN("shape=40+3x20 heads=2:1 dim=16", "P9 --where"), "every row of response 1,");
    mustSay(1, UNSEEN("shape=70+2x40 heads=2:1 dim=32", "P12 --where"),
            "all rows but those with number mod 32 = 0 of");
    mustSay(1, UNSEEN("shape=60+2x40 heads=4:2 dim=32 softcap=3", "P15 --where"),
            "own rows, query head in the group 1: left out");
    mustSay(1, UNSEEN("shape=60+3x20 heads=4:2 dim=32", "P1 --where"), "head 2; pairs");
    mustSay(1, UNSEEN("shape=40+3x20 heads=4:2 dim=16", "P2"), "KV head 1, response 2 counts 2 times");
    mustSay(1, UNSEEN("shape=50+2x40 heads=2:1 dim=32", "P10"), "rows of dQ hold others'");
    mustSay(1, UNSEEN("shape=40+3x20 heads=4:2 dim=32 sinklogit=0.5", "P14"), "  1.000  Y18 and");
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planted_faults_are_found_where_they_are),
        cmocka_unit_test(sound_kernels_have_no_spot),
        cmocka_unit_test(other_statuses_are_said),
        cmocka_unit_test(sets_have_words),
        cmocka_unit_test(the_command_says_and_writes_it),
        cmocka_unit_test(strangers_are_held_to_an_arithmetic),
        cmocka_unit_test(an_interrupted_diagnosis_is_told),
        cmocka_unit_test(faults_of_no_catalogue),
    };
    dkv_guardCoordinator();
    openblas_set_num_threads(1);
    d = malloc(sizeof *d);
    if (!d || makeDir()) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(d);
    return removeDir() ? 1 : failed;
}
