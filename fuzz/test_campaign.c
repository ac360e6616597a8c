/* Verdicts do not depend on threads, shards, or where a run was cut; records can be resumed; words of
 * options. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/suite.h"
#include "log.h"
#include "options.h"

#ifdef __SANITIZE_ADDRESS__
enum { CASES = 24, FIRST = 10 };
#else
enum { CASES = 48, FIRST = 20 }; /* FIRST: before the cut */
#endif

typedef struct verdicts {
    char text[CASES][160]; /* status and ratios of each case */
    int times[CASES];
    int stop_after;
    dkv_log *log;
} verdicts;

static int take(const dkv_fuzzed *f, void *arg) {
    verdicts *v = arg;
    const dkv_result *r = f->result;
    dkv_err err = {0};
    assert_true(f->n < CASES);
    snprintf(v->text[f->n], sizeof v->text[0], "%s %a %a %a %.60s", dkv_statusRow(r->status)->name,
             r->tensor[DKV_O].all.max_ratio, r->tensor[DKV_DK].all.rms_z, r->tensor[DKV_DQ].all.rms_limit,
             r->line);
    v->times[f->n]++;
    if (v->log) assert_int_equal(dkv_logCase(v->log, f, &err), 0);
    return --v->stop_after == 0;
}

static void run(const char *spec, const dkv_sampler *s, int jobs, uint64_t shard, uint64_t shards,
                verdicts *v) {
    dkv_kernel_spec kernel;
    dkv_err err = {0};
    assert_int_equal(dkv_parseKernelSpec(spec, &kernel, &err), 0);
    dkv_campaign c = {.kernel = &kernel,
                      .sampler = s,
                      .data_dir = dkv_dataDir(),
                      .cases = CASES,
                      .shard = shard,
                      .shards = shards,
                      .jobs = jobs,
                      .timeout = 60,
                      .budget = 1e-4,
                      .confirm = 2,
                      .report = take,
                      .arg = v};
    if (v->log) {
        c.done = v->log->done;
        c.n_done = v->log->n_done;
    }
    dkv_runCampaign(&c);
    if (c.trouble.code) fail_msg("%s", c.trouble.text);
}

static void threads_and_shards_change_nothing(void **state) {
    (void)state;
    static verdicts one, two, parts;
    dkv_sampler s;
    dkv_err err = {0};
    int defects = 0;
    memset(&one, 0, sizeof one), memset(&two, 0, sizeof two), memset(&parts, 0, sizeof parts);
    assert_int_equal(dkv_openSampler(DKV_QUICK, 3, &s, &err), 0);
    run("emu+fault=F1", &s, 1, 0, 1, &one);
    run("emu+fault=F1", &s, 3, 0, 1, &two);
    for (uint64_t i = 0; i < 3; i++) run("emu+fault=F1", &s, 2, i, 3, &parts);
    for (int i = 0; i < CASES; i++) {
        assert_string_equal(one.text[i], two.text[i]);
        assert_string_equal(one.text[i], parts.text[i]);
        assert_true(one.times[i] == 1 && two.times[i] == 1 && parts.times[i] == 1);
        defects += !strncmp(one.text[i], "FAILED", 6);
    }
    assert_in_range(defects, 5, CASES - 5);
    dkv_closeSampler(&s);
}

static long countLines(const char *path) {
    long n = 0;
    FILE *f = fopen(path, "r");
    for (int c; f && (c = fgetc(f)) != EOF;) n += c == '\n';
    if (f) fclose(f);
    return n;
}

/* Cut in the middle of a record, as by kill -9, and gone on with: each case once, the same verdicts. */
static void a_cut_run_goes_on(void **state) {
    (void)state;
    static verdicts whole, cut;
    char path[] = "/tmp/dualkv-log-XXXXXX";
    dkv_sampler s, other;
    dkv_log log;
    dkv_err err = {0};
    long all = 0;
    memset(&whole, 0, sizeof whole), memset(&cut, 0, sizeof cut);
    close(mkstemp(path));
    assert_int_equal(dkv_openSampler(DKV_QUICK, 4, &s, &err), 0);
    run("emu", &s, 2, 0, 1, &whole);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_NEW, "emu", &s, &err), 0);
    cut.log = &log;
    cut.stop_after = FIRST;
    run("emu", &s, 2, 0, 1, &cut);
    assert_int_equal(dkv_closeLog(&log, &err), 0);
    assert_in_range(countLines(path), FIRST, FIRST + 2);
    FILE *f = fopen(path, "a");
    fputs("{\"line\":\"shape=3\",\"ker", f);
    fclose(f);
    cut.stop_after = 0;
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, "emu", &s, &err), 0);
    run("emu", &s, 2, 0, 1, &cut);
    for (int i = 0; i < CASES; i++) {
        assert_int_equal(cut.times[i], 1);
        assert_string_equal(cut.text[i], whole.text[i]);
    }
    assert_int_equal(dkv_closeLog(&log, &err), 0);
    assert_int_equal(countLines(path), CASES);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, "emu", &s, &err), 0);
    for (int i = 0; i < DKV_ST_N; i++) all += log.counts[i];
    assert_int_equal(all, CASES);
    dkv_closeLog(&log, &err);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, "emu+bm=16", &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "of kernel emu,"));
    assert_int_equal(dkv_openSampler(DKV_QUICK, 5, &other, &err), 0);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, "emu", &other, &err), DKV_EUSER);
    dkv_closeSampler(&other);
    other = s;
    other.forward = true; /* other cases */
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, "emu", &other, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "emu, 4, quick, forward"));
    char command[256]; /* edited by hand: a record twice, another line */
    snprintf(command, sizeof command, "tail -n 1 %s >> %s", path, path);
    assert_int_equal(system(command), 0);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, "emu", &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "stands twice"));
    snprintf(command, sizeof command, "sed -i '$d; 3s/shape=/shape=1+/' %s", path);
    assert_int_equal(system(command), 0);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, "emu", &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, ":3: case "));
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, "emu", &s, &err), DKV_EUSER);
    dkv_closeSampler(&s);
    unlink(path);
}

/* What was refused before a run went on is counted with the rest. */
static void refusals_stand_in_the_log(void **state) {
    (void)state;
    static verdicts v;
    char path[] = "/tmp/dualkv-log-XXXXXX";
    const char *kernel = "broken+how=refuse";
    dkv_sampler s;
    dkv_log log;
    dkv_err err = {0};
    memset(&v, 0, sizeof v);
    close(mkstemp(path));
    assert_int_equal(dkv_openSampler(DKV_QUICK, 4, &s, &err), 0);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_NEW, kernel, &s, &err), 0);
    v.log = &log;
    v.stop_after = CASES;
    run(kernel, &s, 1, 0, 1, &v);
    assert_int_equal(dkv_closeLog(&log, &err), 0);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, kernel, &s, &err), 0);
    assert_int_equal(log.counts[DKV_ST_UNSUPPORTED], CASES);
    assert_int_equal(log.refused.row[0].cases, CASES);
    dkv_closeLog(&log, &err);
    dkv_closeSampler(&s);
    unlink(path);
}

enum { WANTED = 5, ROOM = DKV_TRIES * WANTED };

typedef struct taken { /* which cases were told, and whether each was refused */
    char status[ROOM][20];
    int n, judged, stop_after;
    dkv_log *log;
} taken;

static int note(const dkv_fuzzed *f, void *arg) {
    taken *t = arg;
    dkv_err err = {0};
    assert_true(f->n < ROOM);
    assert_string_equal(t->status[f->n], "");
    snprintf(t->status[f->n], sizeof t->status[0], "%s", dkv_statusRow(f->result->status)->name);
    t->n++;
    t->judged += f->result->status != DKV_ST_UNSUPPORTED;
    if (t->log) assert_int_equal(dkv_logCase(t->log, f, &err), 0);
    return --t->stop_after == 0;
}

static bool runWanted(const char *spec, const dkv_sampler *s, int jobs, uint64_t shard, uint64_t shards, taken *t) {
    dkv_kernel_spec kernel;
    dkv_err err = {0};
    assert_int_equal(dkv_parseKernelSpec(spec, &kernel, &err), 0);
    dkv_campaign c = {.kernel = &kernel, .sampler = s, .data_dir = dkv_dataDir(), .cases = WANTED, .shard = shard, .shards = shards,
                      .jobs = jobs, .timeout = 60, .budget = 1e-4, .report = note, .arg = t};
    if (t->log) {
        c.done = t->log->done;
        c.refused = t->log->unsupported;
        c.n_done = t->log->n_done;
    }
    dkv_runCampaign(&c);
    if (c.trouble.code) fail_msg("%s", c.trouble.text);
    return c.short_of;
}

/* What a kernel refuses is not of the cases that are wanted; which are judged depends on nothing but the seed. */
static void refused_cases_are_made_up_for(void **state) {
    (void)state;
    static taken one, two, parts, cut;
    const char *dir = getenv("DUALKV_BUILD");
    char spec[256], path[] = "/tmp/dualkv-log-XXXXXX";
    dkv_sampler s;
    dkv_log log;
    dkv_err err = {0};
    memset(&one, 0, sizeof one), memset(&two, 0, sizeof two), memset(&parts, 0, sizeof parts), memset(&cut, 0, sizeof cut);
    snprintf(spec, sizeof spec, "%s/testkernels/plain.so:plain", dir ? dir : "build");
    assert_int_equal(dkv_openSampler(DKV_QUICK, 4, &s, &err), 0);
    assert_false(runWanted(spec, &s, 1, 0, 1, &one));
    assert_int_equal(one.judged, WANTED);
    assert_in_range(one.n, 2 * WANTED, ROOM);
    assert_false(runWanted(spec, &s, 3, 0, 1, &two));
    for (uint64_t i = 0; i < 3; i++) assert_false(runWanted(spec, &s, 2, i, 3, &parts));
    close(mkstemp(path));
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_NEW, spec, &s, &err), 0);
    cut.log = &log;
    cut.stop_after = one.n / 2; /* most of these are refused */
    runWanted(spec, &s, 1, 0, 1, &cut);
    assert_int_equal(dkv_closeLog(&log, &err), 0);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, spec, &s, &err), 0);
    cut.stop_after = 0;
    assert_false(runWanted(spec, &s, 2, 0, 1, &cut));
    assert_int_equal(dkv_closeLog(&log, &err), 0);
    unlink(path);
    for (int i = 0; i < ROOM; i++) {
        assert_string_equal(one.status[i], two.status[i]);
        assert_string_equal(one.status[i], parts.status[i]);
        assert_string_equal(one.status[i], cut.status[i]);
    }
    memset(&one, 0, sizeof one);
    assert_true(runWanted("broken+how=refuse", &s, 2, 0, 1, &one));
    assert_int_equal(one.n, ROOM);
    dkv_closeSampler(&s);
}

static void put(const char *path, const char *how, const char *text) {
    FILE *f = fopen(path, how);
    fputs(text, f);
    fclose(f);
}

static void mustRefuse(const char *path, const dkv_sampler *s, const char *says) {
    dkv_log log;
    dkv_err err = {0};
    struct stat before, after;
    assert_int_equal(stat(path, &before), 0);
    if (dkv_openLog(&log, path, DKV_LOG_RESUME, "emu", s, &err) != DKV_EUSER || !strstr(err.text, says))
        fail_msg("not refused with '%s': %s", says, err.text);
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(after.st_size, before.st_size);
}

/* What no run wrote is not cut off, and what two runs would write, or another build, is not mixed. */
static void foreign_records_are_left_alone(void **state) {
    (void)state;
    static verdicts v;
    static const struct {
        const char *edit, *says;
    } rows[] = {{"s/,\"case\":/,\"case\":0.5/", "not a record of a fuzzing run"},
                {"s/$/ and more/", "not JSON"},
                {"s/\"kernel_sha256\":\"...../\"kernel_sha256\":\"00000/", "of another build of emu"},
                {"s/\"generator\":\"/\"generator\":\"0/", "of inputs of generator 0"}};
    char path[] = "/tmp/dualkv-log-XXXXXX", command[256];
    dkv_sampler s;
    dkv_log log, second;
    dkv_err err = {0};
    memset(&v, 0, sizeof v);
    close(mkstemp(path));
    assert_int_equal(dkv_openSampler(DKV_QUICK, 4, &s, &err), 0);
    put(path, "w", "my only copy");
    mustRefuse(path, &s, ":1: not a record, and its end is missing");
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_NEW, "emu", &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "is not empty: --resume"));
    snprintf(command, sizeof command, "grep -q '^my only copy$' %s", path);
    assert_int_equal(system(command), 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        put(path, "w", "");
        assert_int_equal(dkv_openLog(&log, path, DKV_LOG_NEW, "emu", &s, &err), 0);
        memset(&v, 0, sizeof v);
        v.log = &log;
        v.stop_after = 1;
        run("emu", &s, 1, 0, 1, &v);
        if (i == 0) {
            assert_int_equal(dkv_openLog(&second, path, DKV_LOG_RESUME, "emu", &s, &err), DKV_EUSER);
            assert_non_null(strstr(err.text, "another run writes"));
        }
        assert_int_equal(dkv_closeLog(&log, &err), 0);
        put(path, "a", "{\"lin");
        assert_int_equal(dkv_openLog(&log, path, DKV_LOG_RESUME, "emu", &s, &err), 0);
        assert_int_equal(dkv_closeLog(&log, &err), 0);
        snprintf(command, sizeof command, "sed -i '%s' %s", rows[i].edit, path);
        assert_int_equal(system(command), 0);
        mustRefuse(path, &s, rows[i].says);
    }
    unlink(path);
    assert_int_equal(dkv_openLog(&log, path, DKV_LOG_NEW, "emu", &s, &err), 0);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(dkv_closeLog(&log, &err), 0); /* nothing was logged */
    assert_int_not_equal(access(path, F_OK), 0);
    dkv_closeSampler(&s);
}

/* A kernel that breaks its process, or needs an earlier call to go wrong: reported, and the run goes on. */
static void bad_kernels_do_not_end_a_run(void **state) {
    (void)state;
    static verdicts v;
    dkv_sampler s;
    dkv_err err = {0};
    assert_int_equal(dkv_openSampler(DKV_QUICK, 6, &s, &err), 0);
    memset(&v, 0, sizeof v);
    run("broken+how=crash", &s, 2, 0, 1, &v);
    for (int i = 0; i < CASES; i++) assert_int_equal(strncmp(v.text[i], "CRASHED", 7), 0);
    dkv_closeSampler(&s);
}

static void levels_stay_within_the_budget(void **state) {
    (void)state;
    double sum = 0;
    for (uint64_t n = 0; n < 3000000; n++) sum += DKV_N_OUTPUTS * dkv_fuzzLevel(1e-4, n);
    sum += 1e-4 / (2.2 * log(3000000.0)); /* the rest: an integral */
    assert_true(sum < 1e-4 && sum > 0.9e-4);
    assert_true(dkv_fuzzLevel(1e-4, 20000) > 1e-13);
}

static void options_are_parsed_strictly(void **state) {
    (void)state;
    static const char *const bad_times[] = {"", "-3", "3d", "5 m", "inf", "0", "1e99", "nan", "0x10s m"};
    static const char *const bad_shards[] = {
        "", "0/3", "4/3", "1", "1/", "/2", "1/2x", "-1/2", "99999999999999999999/3"};
    static const char *const bad_seeds[] = {"", "-1", "1.5", "18446744073709551616", "7 "};
    dkv_err err = {0};
    double t;
    uint64_t i, n;
    dkv_profile p;
    for (size_t k = 0; k < sizeof bad_times / sizeof *bad_times; k++)
        assert_int_equal(dkv_parseTime(bad_times[k], &t, &err), DKV_EUSER);
    for (size_t k = 0; k < sizeof bad_shards / sizeof *bad_shards; k++)
        assert_int_equal(dkv_parseShard(bad_shards[k], &i, &n, &err), DKV_EUSER);
    for (size_t k = 0; k < sizeof bad_seeds / sizeof *bad_seeds; k++)
        assert_int_equal(dkv_parseSeed(bad_seeds[k], &n, &err), DKV_EUSER);
    assert_int_equal(dkv_parseProfile("quik", &p, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "did you mean 'quick'"));
    assert_true(!dkv_parseTime("1.5m", &t, &err) && t == 90);
    assert_true(!dkv_parseTime("60s", &t, &err) && t == 60 && !dkv_parseTime("2h", &t, &err) && t == 7200);
    assert_true(!dkv_parseShard("2/3", &i, &n, &err) && i == 1 && n == 3);
    assert_true(!dkv_parseSeed("18446744073709551615", &n, &err) && n == UINT64_MAX);
    assert_true(!dkv_parseProfile("gpu", &p, &err) && p == DKV_GPU && !dkv_parseProfile(NULL, &p, &err) &&
                p == DKV_QUICK);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_and_shards_change_nothing), cmocka_unit_test(a_cut_run_goes_on),
        cmocka_unit_test(refusals_stand_in_the_log), cmocka_unit_test(refused_cases_are_made_up_for),
        cmocka_unit_test(foreign_records_are_left_alone),
        cmocka_unit_test(bad_kernels_do_not_end_a_run),      cmocka_unit_test(levels_stay_within_the_budget),
        cmocka_unit_test(options_are_parsed_strictly),
    };
    return cmocka_run_group_tests_name("campaign", tests, NULL, NULL);
}
