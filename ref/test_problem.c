#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "problem.h"

static bool known(const char *word) { return !strcmp(word, "normal") || !strcmp(word, "recorded:a.b-c_1"); }

/* line -> canonical line; an empty second column: the line is canonical already. */
static const char *const good[][2] = {
    {"shape=8192+32x1024 heads=32:8 dim=128 seed=7", ""},
    {"shape=8192+32x1024 heads=32:8 dim=128 dtype=bf16 mask=causal fill=normal seed=7",
     "shape=8192+32x1024 heads=32:8 dim=128 seed=7"},
    {"shape=200+77,2x9/64+3x9", ""},
    {"shape=200+77,9,9/64+9,9,9", "shape=200+77,2x9/64+3x9"},
    {"shape=0+4x64", ""},
    {"shape=4096k+16@100,16@900", ""},
    {"shape=1000+3x(200+2x50)", ""},
    {"shape=1000+(200+50,50),(200+2x50),(200+50,1x50)", "shape=1000+3x(200+2x50)"},
    {"shape=10+2x3@10,3", "shape=10+3x3"},
    {"shape=10+2x(3+5@13)@10,(3+5@12)", "shape=10+2x(3+5),(3+5@12)"},
    {"shape=10+(3+5@2,5@3)@4", ""},
    {"shape=10+(3+2x(2+1@5))@0", "shape=10+(3+2x(2+1))@0"},
    {"shape=17", ""},
    {"shape=0+007", "shape=0+7"},
    {"shape=5k+0,3@0 grad=off layout=padded run=aba", ""},
    {"shape=1+1 dim=64:64", "shape=1+1"},
    {"shape=1+1 dim=192:128 dtype=fp32", ""},
    {"shape=1 mask=window:1", ""},
    {"shape=1 mask=window:5:0", "shape=1 mask=window:5"},
    {"shape=1 mask=window:5:3", ""},
    {"shape=1 mask=chunk:64", ""},
    {"shape=1 mask=block:64:0.10:18446744073709551615", "shape=1 mask=block:64:0.1:18446744073709551615"},
    {"shape=1 mask=block:1:0:0", ""},
    {"shape=1 mask=bidir", ""},
    {"shape=1 scale=0.125", "shape=1"},
    {"shape=1 scale=0.1250", "shape=1"},
    {"shape=1 scale=.1", "shape=1 scale=0.1"},
    {"shape=1 scale=100000", ""},
    {"shape=1 scale=1.5e-5", ""},
    {"shape=1 scale=0.000001", "shape=1 scale=1e-6"},
    {"shape=1 softcap=50.0 sinklogit=-0", "shape=1 softcap=50 sinklogit=0"},
    {"shape=1 softcap=off sinklogit=off alibi=off grad=on dlse=off", "shape=1"},
    {"shape=1 sinklogit=-1.25 alibi=on dlse=on run=graph layout=fused",
     "shape=1 alibi=on sinklogit=-1.25 dlse=on "
     "layout=fused run=graph"},
    {"  run=busy\tseed=18446744073709551615 shape=3\n", "shape=3 seed=18446744073709551615 run=busy"},
    {"shape=3 fill=recorded:a.b-c_1", ""},
    {"shape=1099511627775+1", ""},
};

static void test_round_trip(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        dkv_problem p, q;
        dkv_err err = {0};
        char a[DKV_LINE_MAX], b[DKV_LINE_MAX];
        const char *want = *good[i][1] ? good[i][1] : good[i][0];
        if (dkv_parseProblem(good[i][0], known, &p, &err)) fail_msg("%s", err.text);
        assert_int_equal(dkv_printProblem(&p, a, sizeof a, &err), 0);
        assert_string_equal(a, want);
        assert_int_equal(dkv_parseProblem(a, known, &q, &err), 0);
        assert_int_equal(dkv_printProblem(&q, b, sizeof b, &err), 0);
        assert_string_equal(a, b);
        assert_int_equal(p.n_nodes, q.n_nodes);
        for (int32_t n = 0; n < p.n_nodes; n++) {
            assert_int_equal(p.nodes[n].parent, q.nodes[n].parent);
            assert_int_equal(p.nodes[n].len, q.nodes[n].len);
            assert_int_equal(p.nodes[n].context, q.nodes[n].context);
        }
        char small[7];
        assert_int_equal(dkv_printProblem(&p, small, sizeof small, &err), DKV_EUSER);
        dkv_freeProblem(&p);
        dkv_freeProblem(&q);
    }
}

/* line, what the message says, the character that it points at (0: the whole line) */
static const struct {
    const char *line, *says;
    int at;
} bad[] = {
    {"shape=8192+3x", "shape=8192+3x: a number is missing after 'x' (at character 14)", 14},
    {"", "shape=... is missing", 0},
    {"seed=1", "shape=... is missing", 0},
    {"shape=", "empty shape", 7},
    {"shape=0", "empty shape", 7},
    {"shape=4k", "empty shape", 7},
    {"shape=4k+2x0", "empty shape", 7},
    {"shape=1 fil=normal", "unknown key 'fil', did you mean 'fill'?", 9},
    {"shape=1 wibblewobble=1", "unknown key 'wibblewobble', not one of shape, heads", 9},
    {"shape=1 seed=1 seed=1", "seed= is given twice", 16},
    {"shape=1 causal", "not of the form key=value", 9},
    {"shape=-1", "a size cannot be negative", 7},
    {"shape=1+-1", "a size cannot be negative", 9},
    {"shape=1099511627777", "the number is above 1099511627776", 7},
    {"shape=99999999999999999999999", "the number is above", 7},
    {"shape=1099511627776+1", "more than 2^40 tokens", 21},
    {"shape=1+1000000x2000000", "more than 2^40 tokens", 9},
    {"shape=1+1048576x1", "more than 1048576 segments", 9},
    {"shape=1+1000x(1+1000x(1+1000x1))", "more than 1048576 segments", 9},
    {"shape=1+99999999999x1", "more than 1048576 segments", 9},
    {"shape=1+(1+(1+(1+(1+(1+(1+(1+(1+(1+(1+(1+(1+(1+(1+(1+1))))))))))))))))", "deeper than 16 levels", 0},
    {"shape=100+5@101", "context limit 101 is above the 100 tokens that are there", 13},
    {"shape=100+2x(5+5@106)", "context limit 106 is above the 105", 18},
    {"shape=100+2x(5+5@56)@50", "context limit 56 is above the 55", 18},
    {"shape=100+(5+5", "')' is missing", 15},
    {"shape=100+5)", "')' without '('", 12},
    {"shape=100+(5)", "'+' and children are missing", 13},
    {"shape=100+0x5", "a count is at least 1", 11},
    {"shape=100++5", "a number is missing after '+'", 11},
    {"shape=100/", "a number is missing after '/'", 11},
    {"shape=1+2k", "'k' is not expected here", 10},
    {"shape=1 heads=3:2", "Hkv = 2 does not divide Hq = 3", 17},
    {"shape=1 heads=3", "':' is missing", 16},
    {"shape=1 heads=0:0", "Hq must be at least 1", 15},
    {"shape=1 heads=4097:1", "the number is above 4096", 15},
    {"shape=1 heads=2:0", "Hkv must be at least 1", 17},
    {"shape=1 dim=0", "a head dimension must be at least 1", 13},
    {"shape=1 dim=257", "the number is above 256", 13},
    {"shape=1 dim=64:257", "the number is above 256", 16},
    {"shape=1 dim=64:", "a number is missing after ':'", 16},
    {"shape=1 dim=64x", "'x' is not expected here", 15},
    {"shape=1 dtype=fp8", "unknown dtype 'fp8', did you mean 'fp16'?", 15},
    {"shape=1 mask=widow:3", "unknown mask 'widow', did you mean 'window'?", 14},
    {"shape=1 mask=window", "window:W[:S]", 20},
    {"shape=1 mask=window:0", "a window must be at least 1", 21},
    {"shape=1 mask=chunk:0", "a chunk must be at least 1", 20},
    {"shape=1 mask=block:0:0.5:1", "a block must be at least 1", 20},
    {"shape=1 mask=block:8:1.5:1", "a density is between 0 and 1", 22},
    {"shape=1 mask=block:8:-0.5:1", "a density is between 0 and 1", 22},
    {"shape=1 mask=block:8:nan:1", "a decimal number is expected", 22},
    {"shape=1 mask=block:8:0.5", "block:B:DENSITY:SEED", 25},
    {"shape=1 mask=block:8:0.5:", "a seed is a number", 26},
    {"shape=1 mask=causal:3", "':' is not expected here", 20},
    {"shape=1 scale=inf", "a decimal number is expected", 15},
    {"shape=1 scale=nan", "a decimal number is expected", 15},
    {"shape=1 scale=1e39", "the number is too large", 15},
    {"shape=1 scale=0", "must be from 1e-06 to 1e+06", 15},
    {"shape=1 scale=0x1p3", "'x' is not expected here", 16},
    {"shape=1 scale=", "a decimal number is expected", 15},
    {"shape=1 softcap=-1", "or off", 17},
    {"shape=1 sinklogit=1e9", "or off", 19},
    {"shape=1 seed=-1", "a seed is a number", 14},
    {"shape=1 seed=18446744073709551616", "the seed is above", 14},
    {"shape=1 fill=", "a fill's name is missing", 14},
    {"shape=1 fill=../etc", "'/' is not expected", 16},
    {"shape=1 fill=abnormal", "unknown fill 'abnormal'", 14},
    {"shape=1 alibi=yes", "unknown value 'yes'", 15},
    {"shape=1 dlse=on grad=off", "a gradient through LSE needs grad=on", 14},
    {"shape=9k+1 layout=fused", "key-only prompt", 19},
    {"shape=1 run=twise", "did you mean 'twice'?", 13},
    {"shape=1 \x01", "not plain text", 9},
};

static void test_bad_lines(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dkv_problem p;
        dkv_err err = {0};
        char at[40];
        if (dkv_parseProblem(bad[i].line, known, &p, &err) != DKV_EUSER)
            fail_msg("accepted: %s", bad[i].line);
        if (!strstr(err.text, bad[i].says)) fail_msg("'%s' gave: %s", bad[i].line, err.text);
        snprintf(at, sizeof at, "(at character %d)", bad[i].at);
        if (bad[i].at && !strstr(err.text, at)) fail_msg("'%s' gave: %s", bad[i].line, err.text);
        assert_null(p.nodes);
        assert_null(strchr(err.text, '\n'));
    }
    char line[5000];
    dkv_problem p;
    dkv_err err = {0};
    memset(line, 'a', sizeof line - 1);
    line[sizeof line - 1] = 0;
    assert_int_equal(dkv_parseProblem(line, known, &p, &err), DKV_EUSER);
    memcpy(line, "shape=9+", 8);
    for (int i = 8; i < 4000; i++) line[i] = "1,"[i & 1];
    line[3999] = '!';
    line[4000] = 0;
    assert_int_equal(dkv_parseProblem(line, known, &p, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "'!' is not expected"));
    assert_true(strlen(err.text) < 200);
}

static void test_values(void **state) {
    (void)state;
    dkv_problem p, q;
    dkv_err err = {0};
    assert_int_equal(
        dkv_parseProblem("shape=10k+(3+2@5)@4/0+2x7 dim=16:8 softcap=2 scale=0.3", NULL, &p, &err), 0);
    assert_int_equal(p.n_nodes, 6);
    assert_int_equal(p.n_groups, 2);
    assert_int_equal(p.nodes[1].context, 4);
    assert_int_equal(p.nodes[2].context, 5);
    assert_int_equal(p.nodes[2].depth, 2);
    assert_int_equal(p.nodes[5].group, 1);
    assert_int_equal(p.nodes[5].parent, 3);
    assert_int_equal(dkv_countQueries(&p), 3 + 2 + 14);
    assert_int_equal(dkv_countKeys(&p), 10 + 3 + 2 + 14);
    assert_true(dkv_countReplicated(&p) == (4 + 3) + (5 + 2) + 14);
    assert_true(p.scale == 0.3f && p.softcap == 2 && p.dv == 8);
    assert_int_equal(dkv_copyProblem(&p, &q, &err), 0);
    dkv_freeProblem(&p);
    assert_int_equal(q.nodes[5].len, 7);
    dkv_freeProblem(&q);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_bad_lines),
        cmocka_unit_test(test_values),
    };
    return cmocka_run_group_tests_name("problem", tests, NULL, NULL);
}
