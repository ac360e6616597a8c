#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "../ref/layout.h"
#include "../ref/mask.h"
#include "../ref/small_problems.h"
#include "fill.h"
#include "suite.h"

/* ---- what a line of `ci` covers: values of factors ---- */

typedef struct value {
    const char *factor, *name;
    bool (*has)(const dkv_problem *p, const char *name);
} value;

static bool has_dtype(const dkv_problem *p, const char *name) {
    return !strcmp(dkv_dtypeName(p->dtype), name);
}

static const char *variant(int i) {
    dualkv_mask_kind mask;
    bool with;
    return dkv_listVariant(i, &mask, &with);
}

static bool has_mask(const dkv_problem *p, const char *name) { return !strcmp(variant(dkv_maskVariant(p)), name); }

static bool has_dim(const dkv_problem *p, const char *name) {
    char text[20];
    snprintf(text, sizeof text, p->dqk == p->dv ? "%d" : "%d:%d", (int)p->dqk, (int)p->dv);
    return !strcmp(text, name);
}

static bool has_ratio(const dkv_problem *p, const char *name) { return p->hq / p->hkv == atoi(name); }
static bool has_fill(const dkv_problem *p, const char *name) { return !strcmp(p->fill, name); }
static bool has_scale(const dkv_problem *p, const char *name) { return (void)name, p->scale_given; }
static bool has_softcap(const dkv_problem *p, const char *name) { return (void)name, p->softcap > 0; }
static bool has_alibi(const dkv_problem *p, const char *name) { return (void)name, p->alibi; }
static bool has_sink(const dkv_problem *p, const char *name) { return (void)name, p->sink; }
static bool has_dlse(const dkv_problem *p, const char *name) { return (void)name, p->dlse; }
static bool has_layout(const dkv_problem *p, const char *name) {
    static const char *const names[] = {"contiguous", "fused", "padded", "strided"};
    return !strcmp(names[p->layout], name);
}
static bool has_run(const dkv_problem *p, const char *name) {
    return (p->run == DKV_SINGLE && *name == 's') || (p->run == DKV_TWICE && *name == 't') ||
           (p->run == DKV_ABA && *name == 'a');
}

static int children(const dkv_problem *p, int32_t i) {
    int n = 0;
    for (int32_t k = i + 1; k < p->n_nodes; k++) n += p->nodes[k].parent == i;
    return n;
}

static bool is_cut(const dkv_problem *p, int32_t i) {
    const dkv_node *n = &p->nodes[i];
    return n->parent >= 0 && n->context < p->nodes[n->parent].context + p->nodes[n->parent].len;
}

static bool is_prime(int64_t n) {
    for (int64_t k = 2; k * k <= n; k++)
        if (n % k == 0) return false;
    return n > 1;
}

static bool has_shape(const dkv_problem *p, const char *name) {
    bool primes = true;
    if (!strcmp(name, "two groups")) return p->n_groups > 1;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        const dkv_node *n = &p->nodes[i];
        int64_t beside = n->len > 96 ? n->len - 128 : n->len - 64; /* of a tile of 64 or 128 */
        primes = primes && is_prime(n->len);
        if (!strcmp(name, "P=0") && !n->depth && !n->len) return true;
        if (!strcmp(name, "R=0") && n->depth && !n->len) return true;
        if (!strcmp(name, "N=1") && !n->depth && children(p, i) == 1) return true;
        if (!strcmp(name, "length 1") && n->len == 1) return true;
        if (!strcmp(name, "tile-1") && beside == -1) return true;
        if (!strcmp(name, "tile") && beside == 0) return true;
        if (!strcmp(name, "tile+1") && beside == 1) return true;
        if (!strcmp(name, "depth 3") && n->depth == 2) return true;
        if (!strcmp(name, "no response") && !n->depth && !children(p, i)) return true;
        if (!strcmp(name, "key-only, cut") && i && is_cut(p, i) && p->nodes[n->parent].key_only) return true;
        if (!strcmp(name, "cut") && i && is_cut(p, i) && !p->nodes[n->parent].key_only) return true;
        if (!strcmp(name, "ragged") && i > 2 && n->depth == 1 && p->nodes[i - 1].depth == 1 &&
            p->nodes[i - 2].depth == 1 && n->len != p->nodes[i - 1].len && p->nodes[i - 2].len != n->len &&
            p->nodes[i - 1].len != p->nodes[i - 2].len)
            return true;
    }
    return !strcmp(name, "primes") && primes;
}

#define V(factor, name)                                                                                      \
    { #factor, name, has_##factor }
static const value others[] = {
    V(dtype, "bf16"),
    V(dtype, "fp16"),
    V(dtype, "fp32"),
    V(dim, "1"),
    V(dim, "8"),
    V(dim, "40"),
    V(dim, "64"),
    V(dim, "72"),
    V(dim, "96"),
    V(dim, "128"),
    V(dim, "192:128"),
    V(dim, "256"),
    V(ratio, "1"),
    V(ratio, "2"),
    V(ratio, "3"),
    V(ratio, "7"),
    V(ratio, "8"),
    V(scale, "on"),
    V(softcap, "on"),
    V(alibi, "on"),
    V(sink, "on"),
    V(dlse, "on"),
    V(layout, "contiguous"),
    V(layout, "fused"),
    V(layout, "padded"),
    V(layout, "strided"),
    V(run, "single"),
    V(run, "twice"),
    V(run, "aba"),
    V(shape, "P=0"),
    V(shape, "R=0"),
    V(shape, "N=1"),
    V(shape, "length 1"),
    V(shape, "tile-1"),
    V(shape, "tile"),
    V(shape, "tile+1"),
    V(shape, "primes"),
    V(shape, "ragged"),
    V(shape, "two groups"),
    V(shape, "key-only, cut"),
    V(shape, "cut"),
    V(shape, "depth 3"),
    V(shape, "no response"),
};
enum { N_OTHERS = sizeof others / sizeof *others, VALUES_MAX = N_OTHERS + 64 };

/* The masks, what is above, the fills: rows of their own tables. */
static value values[VALUES_MAX];
static int n_values;

static void add_value(value v) {
    assert_true(n_values < VALUES_MAX);
    values[n_values++] = v;
}

static int make_values(void **state) {
    const char *name, *help;
    (void)state;
    for (int i = 0; (name = variant(i)); i++) add_value((value)V(mask, name));
    for (int i = 0; i < N_OTHERS; i++) add_value(others[i]);
    for (int i = 0; (name = dkv_listFill(i, &help)); i++)
        if (!strchr(name, ':')) add_value((value)V(fill, name));
    return 0;
}

static bool is_value(int i, const char *factor, const char *name) {
    return !strcmp(values[i].factor, factor) && !strcmp(values[i].name, name);
}

/* Pairs that no problem can have: refused when parsed, inadmissible, or without anything to isolate. */
static bool impossible(int a, int b) {
    dualkv_mask_kind mask;
    bool with;
    if (is_value(b, "shape", "cut") && !strcmp(values[a].factor, "mask"))
        return dkv_listVariant(a, &mask, &with) && dkv_maskRow(mask)->whole != DKV_WHOLE_NEVER;
    if (is_value(a, "layout", "fused") && is_value(b, "shape", "key-only, cut")) return true;
    return is_value(a, "shape", "no response") &&
           (is_value(b, "fill", "nanresp") || is_value(b, "fill", "infresp"));
}

static double work(const dkv_problem *p) {
    return (double)dkv_countPairs(p) * p->hq * (p->dqk > p->dv ? p->dqk : p->dv);
}

/* Every line is written canonically, is admissible and can be filled; no line is there twice. */
static void check_suite(const char *name, int least, bool fill) {
    dkv_suite s;
    dkv_err err = {0};
    char path[300], line[DKV_LINE_MAX];
    if (dkv_loadSuite(name, &s, &err)) fail_msg("%s", err.text);
    assert_string_equal(s.name, name);
    if (s.n < least) fail_msg("%s has %d lines", name, s.n);
    snprintf(path, sizeof path, "%s/suites/%s.txt", dkv_dataDir(), name);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    for (int i = 0; i < s.n;) {
        assert_non_null(fgets(line, sizeof line, f));
        line[strcspn(line, "\n")] = 0;
        if (*line && *line != '#') assert_string_equal(line, s.lines[i++]);
    }
    fclose(f);
    for (int i = 0; i < s.n; i++) {
        dkv_problem p;
        dkv_layout l;
        dkv_inputs in;
        for (int k = 0; k < i; k++)
            if (!strcmp(s.lines[i], s.lines[k])) fail_msg("%s: twice: %s", name, s.lines[i]);
        assert_int_equal(dkv_parseProblem(s.lines[i], dkv_knownFill, &p, &err), 0);
        if (dkv_maskAdmissible(&p, &err)) fail_msg("%s: %s", s.lines[i], err.text);
        if (fill) {
            assert_int_equal(dkv_makeLayout(&p, &l, &err), 0);
            assert_int_equal(dkv_allocInputs(&l, &in, &err), 0);
            if (dkv_fillInputs(&p, &l, dkv_dataDir(), &in, &err)) fail_msg("%s: %s", s.lines[i], err.text);
            dkv_freeInputs(&in);
            dkv_freeLayout(&l);
        }
        dkv_freeProblem(&p);
    }
    dkv_freeSuite(&s);
}

static void test_suites(void **state) {
    (void)state;
    check_suite("smoke", 25, true);
    check_suite("ci", 250, true);
    check_suite("edge", 50, false);
    check_suite("paper", 5, false);
    check_suite("recorded", 8, true);
}

typedef bool pairs[VALUES_MAX][VALUES_MAX];

static void find_pairs(const dkv_problem *p, pairs found) {
    bool has[VALUES_MAX];
    for (int a = 0; a < n_values; a++) has[a] = values[a].has(p, values[a].name);
    for (int a = 0; a < n_values; a++)
        for (int b = a + 1; b < n_values; b++) found[a][b] |= has[a] && has[b];
}

static int count_new(pairs found, pairs missing, bool take) {
    int n = 0;
    for (int a = 0; a < n_values; a++)
        for (int b = a + 1; b < n_values; b++) {
            n += found[a][b] && missing[a][b];
            if (take) missing[a][b] &= !found[a][b];
        }
    return n;
}

/* A line of the suite with mask or fill `v` in place of its own; false if that is no problem for ci. */
static bool with_value(const char *line, int v, int seed, dkv_problem *p) {
    char text[DKV_LINE_MAX + 200];
    dkv_err err;
    const bool mask = !strcmp(values[v].factor, "mask");
    const char *cut = strstr(line, mask ? " mask=" : " fill="), *rest = cut ? cut + 1 + strcspn(cut + 1, " ") : "";
    const int before = cut ? (int)(cut - line) : (int)strlen(line);
    for (size_t m = 0; mask ? dkv_smallMask(m) != NULL : m == 0; m++) {
        snprintf(text, sizeof text, "%.*s%s %s=%s", before, line, rest, values[v].factor, mask ? dkv_smallMask(m) : values[v].name);
        if (dkv_parseProblem(text, dkv_knownFill, p, &err)) continue;
        p->seed = (uint64_t)seed;
        if (values[v].has(p, values[v].name) && !dkv_maskAdmissible(p, &err) && work(p) <= 1e7) return true;
        dkv_freeProblem(p);
    }
    return false;
}

/* Lines that bring the pairs of a new mask or fill, from those that are there: each brings most of what is left. */
static void print_lines(const dkv_suite *s, pairs missing) {
    static pairs found;
    dkv_err err;
    char best[DKV_LINE_MAX];
    for (int seed = 1001, most = 1; most; seed++) {
        most = 0;
        for (int v = 0; v < n_values; v++) {
            bool wanted = false;
            for (int i = 0; i < n_values; i++) wanted |= missing[v][i] || missing[i][v];
            if (!wanted || (strcmp(values[v].factor, "mask") && strcmp(values[v].factor, "fill"))) continue;
            for (int i = 0; i < s->n; i++) {
                dkv_problem p;
                if (!with_value(s->lines[i], v, seed, &p)) continue;
                memset(found, 0, sizeof found);
                find_pairs(&p, found);
                const int n = count_new(found, missing, false);
                if (n > most && !dkv_printProblem(&p, best, sizeof best, &err)) most = n;
                dkv_freeProblem(&p);
            }
        }
        if (!most) return;
        dkv_problem p;
        assert_int_equal(dkv_parseProblem(best, NULL, &p, &err), 0);
        memset(found, 0, sizeof found);
        find_pairs(&p, found);
        (void)count_new(found, missing, true);
        dkv_freeProblem(&p);
        printf("%s\n", best);
    }
}

static void test_ci_covers(void **state) {
    (void)state;
    static pairs found, missing;
    dkv_suite s;
    dkv_err err = {0};
    double sum = 0;
    int first[2] = {-1, -1};
    if (dkv_loadSuite("ci", &s, &err)) fail_msg("%s", err.text);
    for (int i = 0; i < s.n; i++) {
        dkv_problem p;
        assert_int_equal(dkv_parseProblem(s.lines[i], NULL, &p, &err), 0);
        if (work(&p) > 1e7) fail_msg("work %g: %s", work(&p), s.lines[i]);
        sum += work(&p);
        find_pairs(&p, found);
        dkv_freeProblem(&p);
    }
    assert_true(sum < 6e8);
    for (int a = n_values - 1; a >= 0; a--)
        for (int b = n_values - 1; b > a; b--) {
            missing[a][b] = strcmp(values[a].factor, values[b].factor) && !impossible(a, b) && !found[a][b];
            if (missing[a][b]) first[0] = a, first[1] = b;
        }
    if (first[0] >= 0) {
        printf("lines that data/suites/ci.txt lacks:\n");
        print_lines(&s, missing);
    }
    dkv_freeSuite(&s);
    if (first[0] >= 0)
        fail_msg("ci has no line with %s %s and %s %s", values[first[0]].factor, values[first[0]].name,
                 values[first[1]].factor, values[first[1]].name);
}

static void test_paper_shapes(void **state) {
    (void)state;
    dkv_suite s;
    dkv_err err = {0};
    assert_int_equal(dkv_loadSuite("paper", &s, &err), 0);
    assert_string_equal(s.lines[4], "shape=8192+32x1024 heads=32:8 dim=128");
    dkv_freeSuite(&s);
}

static void load_text(const char *text, int want, const char *says) {
    char path[] = "/tmp/dualkv_suite_XXXXXX";
    dkv_suite s;
    dkv_err err = {0};
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
    int code = dkv_loadSuite(path, &s, &err);
    unlink(path);
    assert_int_equal(code, want);
    if (want) {
        if (!strstr(err.text, says)) fail_msg("%s", err.text);
        assert_null(s.lines);
    } else
        assert_int_equal(s.n, atoi(says));
    dkv_freeSuite(&s);
}

static void test_files(void **state) {
    (void)state;
    dkv_suite s;
    dkv_err err = {0};
    char name[64], help[200];
    int listed = 0;
    load_text("", 0, "0");
    load_text("# nothing\n\n  \t# here\n", 0, "0");
    load_text("  shape=3 # three\r\nshape=4", 0, "2");
    load_text("shape=3\nshape=4 fill=nope\n", DKV_EUSER, ":2: fill=nope: unknown fill 'nope'");
    load_text("\n\nshape=(3\n", DKV_EUSER, ":3: shape=(3: a number is missing");
    assert_int_equal(dkv_loadSuite("no-such-suite", &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "unknown suite 'no-such-suite'"));
    char *data = strdup(dkv_dataDir());
    assert_int_equal(setenv("DUALKV_DATA", "/no/such/folder", 1), 0);
    assert_int_equal(dkv_loadSuite("ci", &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "there is no folder /no/such/folder; DUALKV_DATA names"));
    assert_int_equal(setenv("DUALKV_DATA", data, 1), 0);
    free(data);
    assert_int_equal(dkv_loadSuite("./no/such/file.txt", &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "No such file"));
    assert_int_equal(dkv_loadSuite("/tmp", &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "a directory"));
    for (int i = 0; dkv_listSuite(i, name, help); i++, listed++) {
        assert_true(strlen(help) > 10 && help[0] != '#');
        assert_int_equal(dkv_loadSuite(name, &s, &err), 0);
        dkv_freeSuite(&s);
    }
    assert_true(listed >= 5);
    assert_false(dkv_listSuite(-1, name, help));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_suites),
        cmocka_unit_test(test_ci_covers),
        cmocka_unit_test(test_paper_shapes),
        cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests_name("suite", tests, make_values, NULL);
}
