/* The accepted file: round trip, edits, truncation. Changes: each kind found, and nothing else. The command from outside. */
#include <math.h>

#include "gate.h"
#include "test_program.h"

static char *inDir(const char *name) {
    static char path[4][200];
    static int at;
    at = (at + 1) % 4;
    snprintf(path[at], sizeof path[at], "%s/%s", dir, name);
    return path[at];
}

static char *readFile(const char *path, size_t *n) {
    FILE *f = fopen(path, "r");
    char *text = calloc(1, 1 << 20);
    assert_true(f && text);
    *n = fread(text, 1, (1 << 20) - 1, f);
    fclose(f);
    return text;
}

static void writeFile(const char *path, const char *text, size_t n) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    fclose(f);
}

/* A record as record.c writes it, as far as it is looked at. */
static void addRecord(dkv_accepted *a, const char *line, const char *status, const char *bits, double rms,
                      const char *numbers) {
    char json[1000];
    dkv_err err = {0};
    snprintf(json, sizeof json,
             "{\"checks\":{\"launched\":\"passed\"},\"line\":\"%s\",\"kernel\":\"k\",\"status\":\"%s\",\"why\":\"because\",\"device\":\"cpu\",\"commit\":\"c\","
             "\"generator\":\"1\",\"level\":1e-8,\"declared\":true,\"bits\":\"%s\",\"arithmetic_numbers\":{%s},"
             "\"tensors\":{\"O\":{\"max_bound_ratio\":0.25,\"twin_rms\":%.17g,\"rms_dof\":200},"
             "\"dV\":{\"max_bound_ratio\":\"inf\"}}}",
             line, status, bits, numbers, rms);
    assert_int_equal(dkv_addAccepted(a, json, &err), 0);
}

#define PLAIN "\"unit\":5.9604644775390625e-08,\"p_format\":0,\"key_tile\":64,\"exp_error\":1e-7"

static void fill(dkv_accepted *a) {
    memset(a, 0, sizeof *a);
    addRecord(a, "shape=7", "PASSED", "00000000000000aa", 0.9, PLAIN);
    addRecord(a, "shape=3", "PASSED", "00000000000000bb", 0.8, PLAIN);
    addRecord(a, "shape=5", "UNSUPPORTED", "", 0.7, PLAIN);
    addRecord(a, "shape=3", "PASSED", "00000000000000bb", 0.8, PLAIN); /* twice: stays once */
}

static void the_file_survives_a_round_trip(void **state) {
    (void)state;
    dkv_accepted a, b;
    dkv_err err = {0};
    size_t n, m;
    fill(&a);
    assert_int_equal(dkv_writeAccepted(&a, inDir("a"), &err), 0);
    assert_int_equal(dkv_readAccepted(inDir("a"), &b, &err), 0);
    assert_int_equal(b.n, 3);
    assert_string_equal(b.rows[0].line, "shape=3");
    assert_string_equal(b.rows[1].why, "because");
    assert_true(b.rows[2].tensor[DKV_O].rms == 0.9 && b.rows[2].tensor[DKV_DV].there);
    assert_true(isnan(b.rows[2].tensor[DKV_DV].rms) && isinf(b.rows[2].tensor[DKV_DV].ratio));
    assert_true(b.rows[0].counted && b.rows[0].a.unit == 0x1p-24 && b.rows[0].a.key_tile == 64 && b.rows[0].declared);
    assert_int_equal(dkv_writeAccepted(&b, inDir("b"), &err), 0);
    char *x = readFile(inDir("a"), &n), *y = readFile(inDir("b"), &m);
    assert_true(n == m && memcmp(x, y, n) == 0);
    dkv_gate g = {0};
    dkv_sortAccepted(&a);
    assert_int_equal(dkv_compareAccepted(&g, &a, &b, &err), 0);
    assert_int_equal(g.n, 0);
    free(x);
    free(y);
    dkv_freeAccepted(&a);
    dkv_freeAccepted(&b);
}

static void mustRefuse(const char *text, size_t n, const char *says) {
    dkv_accepted a;
    dkv_err err = {0};
    writeFile(inDir("bad"), text, n);
    assert_int_equal(dkv_readAccepted(inDir("bad"), &a, &err), DKV_EUSER);
    if (!strstr(err.text, says)) fail_msg("'%s' does not say '%s'", err.text, says);
    assert_int_equal(a.n, 0);
}

static void edits_and_truncation_are_named(void **state) {
    (void)state;
    dkv_accepted a;
    dkv_err err = {0};
    size_t n;
    fill(&a);
    assert_int_equal(dkv_writeAccepted(&a, inDir("a"), &err), 0);
    dkv_freeAccepted(&a);
    char *good = readFile(inDir("a"), &n), *row[5] = {good}, *bad = malloc(2 * n);
    for (int i = 1; i < 5; i++) row[i] = strchr(row[i - 1], '\n') + 1;
    assert_true(row[4] == good + n);
    for (size_t i = 0; i < n; i++) { /* every byte counts */
        memcpy(bad, good, n);
        bad[i] ^= 1;
        writeFile(inDir("bad"), bad, n);
        assert_int_equal(dkv_readAccepted(inDir("bad"), &a, &err), DKV_EUSER);
        assert_non_null(strstr(err.text, "/bad:"));
    }
    for (size_t i = 0; i < n; i += 7) {
        writeFile(inDir("bad"), good, i);
        assert_int_equal(dkv_readAccepted(inDir("bad"), &a, &err), DKV_EUSER);
    }
    memcpy(bad, good, n);
    *strstr(bad + (row[2] - good), "0.7") = '1'; /* a digit of the second row */
    mustRefuse(bad, n, ":3: was edited");
    mustRefuse(good, (size_t)(row[3] - good), ":4: the file ends here: 2 cases of 3");
    mustRefuse(good, n - 20, ":4: the file ends in the middle");
    memcpy(bad, good, n);
    memcpy(bad + n, row[3], (size_t)(row[4] - row[3]));
    mustRefuse(bad, n + (size_t)(row[4] - row[3]), ":5: is not in its place");
    size_t at = (size_t)(row[1] - good);
    memcpy(bad, good, at);
    memcpy(bad + at, row[2], (size_t)(row[3] - row[2]));
    memcpy(bad + at + (row[3] - row[2]), row[1], (size_t)(row[2] - row[1]));
    memcpy(bad + (row[3] - good), row[3], (size_t)(row[4] - row[3]));
    mustRefuse(bad, n, ":3: is not in its place");
    dkv_accepted other = {0}; /* a sound row of another file, of the same length */
    size_t m;
    addRecord(&other, "shape=7", "PASSED", "00000000000000ac", 0.9, PLAIN);
    assert_int_equal(dkv_writeAccepted(&other, inDir("other"), &err), 0);
    dkv_freeAccepted(&other);
    char *foreign = readFile(inDir("other"), &m), *last = strchr(foreign, '\n') + 1;
    assert_int_equal(strlen(last), row[4] - row[3]);
    memcpy(bad, good, n);
    memcpy(bad + (row[3] - good), last, strlen(last));
    mustRefuse(bad, n, ":1: its sha256 is not that");
    free(foreign);
    mustRefuse("", 0, ":1: empty");
    mustRefuse("{}\n", 3, ":1: not a file");
    mustRefuse("[[[[\n", 5, ":1: not a file");
    free(bad);
    free(good);
}

/* One line before, one after: exactly these kinds are told. */
static void mustTell(const dkv_accepted *was, const dkv_accepted *now, unsigned kinds, const char *says) {
    dkv_gate g = {0};
    dkv_err err = {0};
    char text[1000], all[16000];
    size_t at = 0;
    unsigned got = 0;
    assert_int_equal(dkv_compareAccepted(&g, was, now, &err), 0);
    for (int k = 0; k < DKV_CH_N; k++) {
        got |= g.counts[k] ? 1u << k : 0;
        dkv_sayChanges(&g, (dkv_change_kind)k, text, sizeof text);
        at += (size_t)snprintf(all + at, sizeof all - at, "%s\n", text);
    }
    if (got != kinds || !strstr(all, says)) fail_msg("%x instead of %x; '%s' in '%s'?", got, kinds, says, all);
    dkv_freeGate(&g);
}

static void each_change_is_found_alone(void **state) {
    (void)state;
    static const struct {
        const char *line, *status, *bits;
        double rms;
        const char *numbers, *says;
        unsigned kinds;
    } rows[] = {
        {"shape=3", "PASSED", "aa", 0.8, PLAIN, "", 0},
        {"shape=3", "PASSED", "ab", 0.8, PLAIN, "aa -> ab", 1u << DKV_CH_BITS},
        {"shape=3", "PASSED", "", 0.8, PLAIN, "not promised any more", 1u << DKV_CH_BITS},
        {"shape=3", "PASSED", "aa", 1.16, PLAIN, "", 0}, /* chance: 1.49 times at 1e-8 and 200 rows */
        {"shape=3", "PASSED", "aa", 1.28, PLAIN, "of O grew 1.6 times (rms against the twin 0.8 -> 1.28", 1u << DKV_CH_GREW},
        {"shape=3", "PASSED", "aa", 0.1, PLAIN, "", 0},
        {"shape=3", "FAILED", "ab", 9, PLAIN, "was PASSED and is now FAILED: because", 1u << DKV_CH_STATUS},
        {"shape=3", "NOT_RUN", "", 9, PLAIN, "was PASSED and is now NOT_RUN", 1u << DKV_CH_STATUS},
        {"shape=3", "UNSUPPORTED", "", 0.8, PLAIN, "now refused: because", 1u << DKV_CH_REFUSED},
        {"shape=4", "PASSED", "aa", 0.8, PLAIN, "did not run", 1u << DKV_CH_MISSING | 1u << DKV_CH_NEW},
        {"shape=3", "PASSED", "aa", 0.8, "\"unit\":5.9604644775390625e-08,\"p_format\":0,\"key_tile\":64,\"exp_error\":3e-7",
         "error of exp 1e-07 -> 3e-07", 1u << DKV_CH_LOOSENED},
        {"shape=3", "PASSED", "aa", 0.8, PLAIN ",\"max_slack\":25", "slack of the running maximum none -> 25", 1u << DKV_CH_LOOSENED},
        {"shape=3", "PASSED", "aa", 9, "\"unit\":5.9604644775390625e-08,\"p_format\":2,\"key_tile\":64,\"exp_error\":1e-7",
         "P rounded to bf16 -> rounded to fp32", 1u << DKV_CH_TIGHTENED},
        {"shape=3", "PASSED", "aa", 1.28, "\"unit\":5.9604644775390625e-08,\"p_format\":0,\"key_tile\":32,\"exp_error\":1e-7",
         "key tile 64 -> 32", 1u << DKV_CH_TIGHTENED},
        {"shape=3", "PASSED", "aa", 1.6, "\"unit\":5.9604644775390625e-08,\"p_format\":0,\"key_tile\":32,\"exp_error\":1e-7",
         "grew 1.6 times", 1u << DKV_CH_TIGHTENED | 1u << DKV_CH_GREW},
    };
    dkv_accepted was = {0}, failed = {0};
    addRecord(&was, "shape=3", "PASSED", "aa", 0.8, PLAIN);
    addRecord(&failed, "shape=3", "CRASHED", "aa", 0.8, PLAIN);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        dkv_accepted now = {0};
        addRecord(&now, rows[i].line, rows[i].status, rows[i].bits, rows[i].rms, rows[i].numbers);
        mustTell(&was, &now, rows[i].kinds, rows[i].says);
        dkv_freeAccepted(&now);
    }
    mustTell(&failed, &was, 1u << DKV_CH_BETTER, "was CRASHED and is now PASSED");
    dkv_accepted now = {0};
    addRecord(&now, "shape=3", "PASSED", "ab", 9, PLAIN);
    now.rows[0].counted = false;
    now.rows[0].tensor[DKV_DV].there = false;
    now.rows[0].tensor[DKV_O].rms = 0.8;
    strcpy(now.rows[0].bits, "aa");
    mustTell(&was, &now, 1u << DKV_CH_UNSEEN, "launches are not counted any more");
    now.rows[0].counted = now.rows[0].tensor[DKV_DV].there = true;
    strcpy(now.rows[0].bits, "ab");
    now.rows[0].tensor[DKV_O].rms = 9;
    strcpy(now.generator, "2");
    mustTell(&was, &now, 1u << DKV_CH_GENERATOR, "version 2 and was 1");
    strcpy(now.generator, "1");
    now.program[0] ^= 1;
    mustTell(&was, &now, 1u << DKV_CH_PROGRAM, "accept anew");
    now.program[0] ^= 1;
    now.oracle[0] ^= 1;
    mustTell(&was, &now, 1u << DKV_CH_ORACLE, "are those of oracle version");
    now.oracle[0] ^= 1;
    strcpy(now.device, "gpu");
    now.rows[0].tensor[DKV_O].rms = 0.8;
    mustTell(&was, &now, 1u << DKV_CH_DEVICE, "bits are not compared");
    strcpy(now.device, "cpu");
    now.rows[0].status = DKV_ST_FAILED;
    now.rows[0].excused = "known";
    mustTell(&was, &now, 1u << DKV_CH_WAIVED, "now FAILED, which is waived: known");
    dkv_freeAccepted(&now);
    now = (dkv_accepted){0}; /* one sentence on many fields is cut where it says so */
    addRecord(&now, "shape=3", "PASSED", "aa", 0.8,
              "\"unit\":0.1,\"acc_unit\":0.1,\"acc_truncates\":1,\"acc_step\":16,\"acc_gain\":0.1,\"in_format\":2,\"s_format\":2,"
              "\"p_format\":2,\"ds_format\":2,\"partial_format\":2,\"key_tile\":32,\"exp_error\":0.1,\"log_error\":0.1");
    mustTell(&was, &now, 1u << DKV_CH_LOOSENED, " ...\n");
    was.rows[0].declared = now.rows[0].declared = false; /* a wrong kernel fits what is loosest */
    now.rows[0].status = DKV_ST_FAILED;
    mustTell(&was, &now, 1u << DKV_CH_STATUS, "now FAILED");
    dkv_freeAccepted(&now);
    dkv_freeAccepted(&was);
    dkv_freeAccepted(&failed);
}

/* Values of F's quantiles from tables: F(0.99; 10, 10) = 4.849, F(0.95; 120, 120) = 1.352, F(0.99; 1, 1) = 4052. */
static void chance_is_that_of_tables(void **state) {
    (void)state;
    static const double rows[][3] = {{10, 0.01, 4.849}, {120, 0.05, 1.352}, {1, 0.01, 4052.2}, {4, 0.025, 9.605}};
    for (int i = 0; i < 4; i++) {
        double q = dkv_chanceGrowth(rows[i][0], rows[i][1]);
        if (!(fabs(q * q / rows[i][2] - 1) < 1e-3)) fail_msg("%g: %g instead of %g", rows[i][0], q * q, rows[i][2]);
    }
    assert_true(dkv_chanceGrowth(0, 0.01) == INFINITY && dkv_chanceGrowth(10, 0) == INFINITY);
    assert_true(fabs(log(dkv_chanceGrowth(1e6, 1e-8)) * 1e3 - 5.612) < 0.01); /* normal: z / sqrt(n) */
}

static void a_kernel_that_refuses_most_fails(void **state) {
    (void)state;
    dkv_accepted a;
    dkv_gate g = {0};
    dkv_err err = {0};
    char text[500];
    fill(&a);
    dkv_sortAccepted(&a);
    assert_int_equal(dkv_checkFloor(&g, &a, 50, &err), 0);
    assert_int_equal(dkv_countFindings(&g), 0);
    assert_int_equal(dkv_checkFloor(&g, &a, 70, &err), 0);
    assert_int_equal(dkv_countFindings(&g), 1);
    dkv_sayChanges(&g, DKV_CH_FLOOR, text, sizeof text);
    assert_non_null(strstr(text, "refuses 1 of 3 lines, 1 of them for 'because': it takes 66.7 %"));
    dkv_freeGate(&g);
    dkv_freeAccepted(&a);
}

/* ---- from outside ---- */

static void mustEnd(int code, const char *words, const char *says) {
    char command[2000];
    snprintf(command, sizeof command, "$B/dualkv gate $D/lines --out $D/gate %s", words);
    mustSay(code, command, says);
}

static void the_command_passes_and_fails_where_it_should(void **state) {
    (void)state;
    static const char lines[] = "shape=33+5 dim=32 dtype=fp16\n"; /* one line: no promise about what it has the power to see */
    size_t n;
    writeFile(inDir("lines"), lines, sizeof lines - 1);
    mustEnd(0, "--kernel emu --no-fuzz --accepted $D/acc --accept", "accepted for the first time");
    mustEnd(0, "--kernel emu --no-fuzz --accepted $D/acc", "nothing worse than the accepted records");
    mustEnd(0, "--kernel emu --cases 3 --accepted $D/acc", "fuzzing, seed 1: 3 PASSED");
    char *records = readFile(inDir("gate/records.jsonl"), &n);
    int count = 0;
    for (char *c = records; (c = strchr(c, '\n')); c++) count++;
    assert_int_equal(count, 4);
    free(records);
    mustEnd(1, "--kernel emu+bn=16 --no-fuzz --accepted $D/acc", "FINDING (bits)");
    mustEnd(0, "--kernel emu+bn=16 --no-fuzz --accepted $D/acc --new-bits", "note (bits)");
    mustEnd(1, "--kernel emu+fault=D1 --no-fuzz --accepted $D/acc --annotations",
            "::error title=dualkv gate%3A status::shape=33+5 dim=32 dtype=fp16: was PASSED and is now FAILED");
    char *summary = readFile(inDir("gate/summary.md"), &n);
    assert_true(!strncmp(summary, "# dualkv gate: FAILED\n", 22));
    assert_non_null(strstr(summary, "dualkv replay 'shape=33+5 dim=32 dtype=fp16' --kernel emu+fault=D1"));
    free(summary);
    mustEnd(1, "--kernel emu+acc=tc --no-fuzz --accepted $D/acc", "FINDING (looser arithmetic)");
    assert_non_null(strstr(output, "accumulation to nearest -> truncating; products in an accumulation step 1 -> 16"));
    mustEnd(1, "--kernel $B/examples/plain_kernel.so:plain --no-fuzz --accepted $D/acc", "FINDING (refused)");
    mustEnd(1, "--kernel $B/examples/plain_kernel.so:plain --no-fuzz", "refuses 1 of 1 lines, 1 of them for '");
    mustEnd(0, "shape=9 --kernel $B/examples/plain_kernel.so:plain --forward --cases 3", "nothing (--accepted FILE)");
    mustEnd(1, "--kernel broken+how=fallback --no-fuzz --accepted $D/acc", "was PASSED and is now NOT_RUN");
    mustEnd(0, "shape=9 shape=9 --kernel emu --no-fuzz --accepted $D/more --accept", "2 lines, for 1 of the cases are a line that had been there");
    mustSay(1, "$B/dualkv gate shape=9 --out $D/gate --kernel emu --no-fuzz --accepted $D/more", "and did not run (only shape=9 was asked for");
    mustEnd(2, "--kernel emu --no-fuzz --accepted $D/nope", "cannot read");
    mustEnd(2, "--kernel emu --kernel ref", "one kernel");
    mustEnd(2, "--kernel emu --json -", "--json: stdout");
    mustEnd(2, "--kernel emu --no-fuzz --cases 3", "--no-fuzz");
    char *good = readFile(inDir("acc"), &n);
    *strstr(good, "PASSED\",\"bits") = 'F';
    writeFile(inDir("acc"), good, n);
    mustEnd(2, "--kernel emu --no-fuzz --accepted $D/acc", "acc:2: was edited");
    assert_true(!output[0] && strchr(trouble, '\n') == trouble + strlen(trouble) - 1); /* one line */
    mustEnd(2, "--kernel emu --no-fuzz --accepted $D/acc --accept", "acc:2: was edited");
    free(good);
}

int main(void) {
    if (makeDir()) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_file_survives_a_round_trip),
        cmocka_unit_test(edits_and_truncation_are_named),
        cmocka_unit_test(each_change_is_found_alone),
        cmocka_unit_test(chance_is_that_of_tables),
        cmocka_unit_test(a_kernel_that_refuses_most_fails),
        cmocka_unit_test(the_command_passes_and_fails_where_it_should),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
