/* The covering array holds every pair and few rows; cases are functions of (profile, seed, n), admissible,
 * within the work allowed; the first ones bring every pair of what they promise; no key of the line is left
 * out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <inttypes.h>

#include "../data/fill.h"
#include "../ref/layout.h"
#include "../ref/mask.h"
#include "sample.h"

static void array_holds_every_pair(void **state) {
    (void)state;
    static const int levels[] = {7, 2, 1, 23, 11};
    enum { N = sizeof levels / sizeof *levels };
    for (uint64_t seed = 0; seed < 3; seed++) {
        dkv_cover c, again;
        dkv_err err = {0};
        int early = 0, all = 0;
        assert_int_equal(dkv_makeCover(seed, N, levels, &c, &err), 0);
        assert_int_equal(dkv_makeCover(seed, N, levels, &again, &err), 0);
        assert_int_equal(c.n_rows, again.n_rows);
        assert_memory_equal(c.rows, again.rows, (size_t)c.n_rows * sizeof *c.rows);
        assert_in_range(c.n_rows, 23 * 11, 23 * 11 * 5 / 4);
        for (int f = 0; f < N; f++)
            for (int g = f + 1; g < N; g++)
                for (int x = 0; x < levels[f]; x++)
                    for (int y = 0; y < levels[g]; y++) {
                        int r = 0;
                        while (r < c.n_rows && !(c.rows[r][f] == x && c.rows[r][g] == y)) r++;
                        if (r == c.n_rows) fail_msg("factors %d, %d: no row with %d, %d", f, g, x, y);
                        early += r < c.n_rows / 3;
                        all++;
                    }
        assert_true(early > all / 2);
        dkv_freeCover(&c);
        dkv_freeCover(&again);
    }
}

/* What a problem belongs to: words of its features. */
enum {
    N_MASKS_MAX = 32,
    N_FILLS_MAX = 64,
    MASKS = 0,
    MODS = MASKS + N_MASKS_MAX,
    TYPES = MODS + 8,
    RATIO = TYPES + 4,
    EDGES = RATIO + 8,
    FILLS = EDGES + 12,
    LAYOUTS = FILLS + N_FILLS_MAX,
    RUNS = LAYOUTS + 4,
    N_FEATURES = RUNS + 4
};

static void mark(const dkv_problem *p, bool has[N_FEATURES]) {
    const char *help, *name;
    memset(has, 0, N_FEATURES);
    has[MASKS + dkv_maskVariant(p)] = true;
    has[MODS + 0] = p->scale_given, has[MODS + 1] = p->softcap > 0, has[MODS + 2] = p->alibi;
    has[MODS + 3] = p->sink, has[MODS + 4] = p->dlse, has[MODS + 5] = !p->grad;
    has[TYPES + (int)p->dtype] = true;
    has[RATIO + (p->hq / p->hkv > 7 ? 7 : p->hq / p->hkv)] = true; /* 4 and 7, 8: classes of their own */
    for (int e = 0; e < DKV_N_EDGES; e++) has[EDGES + e] = dkv_hasEdge(p, (dkv_edge)e);
    for (int i = 0; (name = dkv_listFill(i, &help)); i++) has[FILLS + i] = !strcmp(name, p->fill);
    has[LAYOUTS + (int)p->layout] = true;
    has[RUNS + (int)p->run % 3] = true;
}

/* Pairs that cannot be: two of one kind; gradients off with a gradient through LSE; rawdot brings its own
 * scale; a planted response beside a lone prompt is another group's. Counted where neither feature is one of
 * those. */
static int kindOf(int f) {
    static const int ends[] = {MODS, TYPES, RATIO, EDGES, FILLS, LAYOUTS, RUNS, N_FEATURES};
    int k = 0;
    while (f >= ends[k]) k++;
    return k;
}

static void seedBringsEveryPair(uint64_t seed) {
    static int count[N_FEATURES][N_FEATURES];
    dkv_sampler s;
    dkv_err err = {0};
    bool has[N_FEATURES];
    assert_int_equal(dkv_openSampler(DKV_QUICK, seed, &s, &err), 0);
    uint64_t n = dkv_coveringCases(&s);
    assert_in_range(n, 200, 330);
    memset(count, 0, sizeof count);
    for (uint64_t i = 0; i < n; i++) {
        dkv_problem p;
        if (dkv_sampleCase(&s, i, &p, &err)) fail_msg("%s", err.text);
        mark(&p, has);
        dkv_freeProblem(&p);
        for (int f = 0; f < N_FEATURES; f++)
            for (int g = 0; g < N_FEATURES; g++) count[f][g] += has[f] && has[g];
    }
    dkv_closeSampler(&s);
    for (int f = 0; f < N_FEATURES; f++)
        for (int g = f + 1; g < N_FEATURES; g++)
            if (count[f][f] && count[g][g] && kindOf(f) != kindOf(g) && !count[f][g])
                fail_msg("seed %" PRIu64 ": no case with features %d and %d", seed, f, g);
    dualkv_mask_kind mask;
    bool with;
    const char *name, *help;
    for (int i = 0; (name = dkv_listVariant(i, &mask, &with)); i++)
        if (!count[MASKS + i][MASKS + i]) fail_msg("seed %" PRIu64 ": mask %s is never drawn", seed, name);
    for (int i = 0; (name = dkv_listFill(i, &help)); i++)
        if (!strchr(name, ':') && !count[FILLS + i][FILLS + i]) fail_msg("seed %" PRIu64 ": fill %s is never drawn", seed, name);
    int features = 0;
    for (int f = 0; f < N_FEATURES; f++) features += count[f][f] > 0;
    assert_true(features >= 7 + 6 + 3 + 6 + DKV_N_EDGES + 20 + 4 + 3);
}

static void first_cases_bring_every_pair(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed < 6; seed++) seedBringsEveryPair(seed);
}

static const char *const words[] = {
    "k+",      "@",      "(",           "/",         "mask=full", "mask=prefix", "chunk:",     "block:",
    "window:", "fp32",   "softcap=",    "alibi=on",  "dlse=on",   "scale=",      "sinklogit=", "grad=off",
    "fused",   "padded", "strided",     "run=aba",   "run=twice", "=0+",         "+1",         "fill=needle",
    "nanresp", ":1 ",    "dim=192:128", "recorded:", "=63",       "129",         "130",        "65"};
enum { N_WORDS = sizeof words / sizeof *words };

static void cases_are_functions_of_seed_and_number(void **state) {
    (void)state;
    enum { N = 4000 };
    int seen[N_WORDS] = {0}, same = 0;
    double largest = 0;
    char line[DKV_LINE_MAX], again[DKV_LINE_MAX], previous[DKV_LINE_MAX] = "";
    dkv_sampler s, other;
    dkv_problem back;
    dkv_err err = {0};
    assert_int_equal(dkv_openSampler(DKV_QUICK, 5, &s, &err), 0);
    assert_int_equal(dkv_openSampler(DKV_QUICK, 5, &other, &err), 0);
    for (uint64_t n = 0; n < N; n++) {
        dkv_problem p;
        if (dkv_sampleCase(&s, n, &p, &err)) fail_msg("%s", err.text);
        assert_int_equal(dkv_printProblem(&p, line, sizeof line, &err), 0);
        assert_int_equal(dkv_maskAdmissible(&p, &err), 0);
        double work = (double)dkv_countPairs(&p) * p.hq * (p.dqk > p.dv ? p.dqk : p.dv);
        assert_true(work <= s.work_cap);
        largest = work > largest ? work : largest;
        dkv_freeProblem(&p);
        for (int w = 0; w < N_WORDS; w++) seen[w] += strstr(line, words[w]) != NULL;
        same += !strcmp(line, previous);
        strcpy(previous, line);
        if (n % 50) continue;
        assert_int_equal(dkv_sampleCase(&other, N - 1 - n, &p, &err), 0); /* in another order */
        dkv_freeProblem(&p);
        assert_int_equal(dkv_sampleCase(&other, n, &p, &err), 0);
        assert_int_equal(dkv_printProblem(&p, again, sizeof again, &err), 0);
        assert_string_equal(line, again);
        dkv_freeProblem(&p);
        other.forward = true;
        assert_int_equal(dkv_sampleCase(&other, n, &p, &err), 0);
        assert_true(!p.grad && !p.dlse && dkv_printProblem(&p, again, sizeof again, &err) == 0);
        assert_int_equal(dkv_parseProblem(again, dkv_knownFill, &back, &err), 0);
        assert_true(!back.grad && back.seed == p.seed);
        dkv_freeProblem(&back);
        dkv_freeProblem(&p);
        other.forward = false;
    }
    dkv_closeSampler(&s);
    dkv_closeSampler(&other);
    for (int w = 0; w < N_WORDS; w++)
        if (seen[w] < 10) fail_msg("'%s' is in %d of %d lines", words[w], seen[w], N);
    assert_true(largest > 8e5);
    assert_int_equal(same, 0);
}

static void other_profiles_draw(void **state) {
    (void)state;
    for (int profile = DKV_DEEP; dkv_profileName(profile); profile++) {
        dkv_sampler s;
        dkv_err err = {0};
        double largest = 0;
        assert_int_equal(dkv_openSampler((dkv_profile)profile, 2, &s, &err), 0);
        for (uint64_t n = 0; n < 400; n++) {
            dkv_problem p;
            if (dkv_sampleCase(&s, n, &p, &err)) fail_msg("%s", err.text);
            double work = (double)dkv_countPairs(&p) * p.hq * (p.dqk > p.dv ? p.dqk : p.dv);
            largest = work > largest ? work : largest;
            if (profile == DKV_GPU) assert_true(p.dtype != DUALKV_FP32);
            dkv_freeProblem(&p);
        }
        assert_true(largest > s.work_cap / 2 && largest <= s.work_cap);
        dkv_closeSampler(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(array_holds_every_pair),
        cmocka_unit_test(first_cases_bring_every_pair),
        cmocka_unit_test(cases_are_functions_of_seed_and_number),
        cmocka_unit_test(other_profiles_draw),
    };
    return cmocka_run_group_tests_name("sample", tests, NULL, NULL);
}
