/* Records and the tables made from them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/sha256.h"
#include "check.h"
#include "kernel_hash.h"
#include "record.h"
#include "select.h"

static const char line[] = "shape=200+3x77 heads=8:2 mask=window:64";

static dkv_result *example(dkv_status status) {
    dkv_result *r = calloc(1, sizeof *r);
    strcpy(r->line, line);
    strcpy(r->kernel, "emu+fault=D1");
    r->status = status;
    if (status != DKV_ST_PASSED) strcpy(r->why, "O is \"wrong\" \\ here");
    r->judged = true;
    strcpy(r->arithmetic_words, "fp32 accumulation");
    dkv_judgement *j = &r->tensor[DKV_O];
    *j = (dkv_judgement){.present = true, .twin = true};
    j->all = (dkv_part){.total = 100,
                        .bad = 3,
                        .nonfinite = 1,
                        .max_ratio = INFINITY,
                        .rms_z = 0.97,
                        .gain = -1e-5,
                        .truth_gain = -2e-3,
                        .rms_limit = 1.4,
                        .gain_limit = INFINITY,
                        .mean_z = NAN};
    r->phases.seconds[DKV_PHASE_KERNEL] = 1.2345;
    r->finding[0] = (dkv_finding){.state = DKV_CHECK_NOTE, .why = "run twice: 3 elements differ"};
    r->finding[1] = (dkv_finding){.state = DKV_CHECK_PASSED};
    j->region[1] = j->all;
    j->worst = (dkv_where){.group = 1,
                           .segment = 2,
                           .row = 3,
                           .head = 4,
                           .dim = 5,
                           .tile_edge = -1,
                           .region = 1,
                           .got = NAN,
                           .want = 0.25,
                           .bound = 0.01};
    return r;
}

static void every_key_is_there(void **state) {
    (void)state;
    static const char *const keys[] = {"line",   "kernel", "status",    "why",        "seconds",
                                       "device", "commit", "generator", "arithmetic", "tensors",
                                       "checks", "replay", "level", "compiler", "libraries", "started",
                                       "kernel_sha256"};
    dkv_result *r = example(DKV_ST_FAILED);
    char *json = dkv_printRecord(r);
    assert_non_null(json);
    assert_null(strchr(json, '\n'));
    cJSON *o = cJSON_Parse(json);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (!cJSON_HasObjectItem(o, keys[i])) fail_msg("no key '%s'", keys[i]);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(o, "status")), "FAILED");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(o, "why")), r->why);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(o, "replay")),
                        "dualkv replay 'shape=200+3x77 heads=8:2 mask=window:64' --kernel emu+fault=D1");
    const cJSON *phases = cJSON_GetObjectItem(o, "phases");
    assert_true(cJSON_GetArraySize(phases) == 1 && cJSON_GetNumberValue(cJSON_GetObjectItem(phases, "kernel")) == 1.23);
    cJSON *t = cJSON_GetObjectItem(cJSON_GetObjectItem(o, "tensors"), "O");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(t, "max_bound_ratio")), "inf");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(t, "twin_mean")), "nan");
    assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(t, "twin_rms")) == 0.97);
    assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(t, "twin_gain")) == -1e-5);
    assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(t, "truth_gain")) == -2e-3);
    assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(t, "bad")) == 3);
    assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(t, "total")) == 100);
    assert_non_null(cJSON_GetObjectItem(cJSON_GetObjectItem(t, "regions"), "response"));
    const cJSON *notes = cJSON_GetObjectItem(o, "notes");
    assert_int_equal(cJSON_GetArraySize(notes), 1);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(notes, dkv_listCheck(0)->name)), "run twice: 3 elements differ");
    cJSON *w = cJSON_GetObjectItem(t, "worst");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(w, "got")), "nan");
    assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(w, "want")) == 0.25);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(w, "region")), "response");
    assert_null(cJSON_GetObjectItem(cJSON_GetObjectItem(o, "tensors"), "dQ"));
    assert_null(cJSON_GetObjectItem(o, "waiver"));
    cJSON_Delete(o);
    free(json);
    free(r);
}

static void a_waiver_and_the_command_stand_in_the_record(void **state) {
    (void)state;
    char *words[] = {"./x/dualkv", "check", "shape=3", "it's", "--kernel", "emu"}, huge[600];
    char *many[] = {"dualkv", huge};
    dkv_result *r = example(DKV_ST_FAILED);
    dkv_nameCommand(6, words);
    char *json = dkv_printExcused(r, "known", "2030-01-31");
    cJSON *o = cJSON_Parse(json), *w = cJSON_GetObjectItem(o, "waiver");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(w, "reason")), "known");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(w, "until")), "2030-01-31");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(o, "command")), "dualkv check shape=3 'it'\\''s' --kernel emu");
    cJSON_Delete(o);
    free(json);
    memset(huge, 'x', sizeof huge - 1);
    huge[sizeof huge - 1] = 0;
    dkv_nameCommand(2, many);
    json = dkv_printRecord(r);
    o = cJSON_Parse(json);
    const char *command = cJSON_GetStringValue(cJSON_GetObjectItem(o, "command"));
    assert_true(strlen(command) < 400);
    assert_string_equal(command + strlen(command) - 4, " ...");
    cJSON_Delete(o);
    free(json);
    free(r);
}

static void replay_commands_survive_a_shell(void **state) {
    (void)state;
    static const char *const specs[] = {"emu+bm=64", "./my dir/it's.so:x", "a;b", "$(x)", "`x`", ""};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++) {
        char command[4096], shell[5000], back[400] = "";
        dkv_replayCommand(line, specs[i], command, sizeof command);
        snprintf(shell, sizeof shell, "dualkv() { printf '%%s|%%s' \"$2\" \"$4\"; }; %s", command);
        FILE *p = popen(shell, "r");
        assert_non_null(p);
        assert_non_null(fgets(back, sizeof back, p));
        pclose(p);
        char want[400];
        snprintf(want, sizeof want, "%s|%s", line, specs[i]);
        assert_string_equal(back, want);
    }
}

/* Of the file that a spec names; of the program itself where a kernel is compiled in. */
static void kernels_have_the_hash_of_their_file(void **state) {
    (void)state;
    char path[] = "/tmp/dualkv-test-XXXXXX.py", link[64], spec[80], hex[65], real[4096];
    dkv_err err = {0};
    FILE *f = fdopen(mkstemps(path, 3), "w");
    fputs("def f(q, k, v): return v\n", f);
    fclose(f);
    snprintf(link, sizeof link, "%.40s.link.py", path);
    assert_int_equal(symlink(path, link), 0);
    assert_int_equal(dkv_hashFile(path, hex, &err), 0);
    snprintf(spec, sizeof spec, "%s:f+a=1", link);
    assert_string_equal(dkv_kernelHash(spec), hex);
    assert_string_equal(dkv_kernelHash("/nowhere/k.so"), "");
    assert_string_equal(dkv_kernelHash("files:/tmp"), "");
    assert_non_null(realpath("/proc/self/exe", real));
    assert_int_equal(dkv_hashFile(real, hex, &err), 0);
    assert_string_equal(dkv_kernelHash("emu+bm=64"), hex);
    unlink(link);
    unlink(path);
}

static void files_are_made_with_the_first_record(void **state) {
    (void)state;
    char path[] = "/tmp/dualkv-test-XXXXXX";
    dkv_err err = {0};
    close(mkstemp(path));
    unlink(path);
    dkv_record_file f = {.path = path};
    assert_int_equal(dkv_checkRecordPath(path, &err), 0);
    assert_true(access(path, F_OK) < 0);
    assert_int_equal(dkv_writeRecord(&f, "{}", &err), 0);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(dkv_closeRecords(&f, &err), 0);
    unlink(path);
    assert_int_equal(dkv_checkRecordPath("/nowhere/at/all.jsonl", &err), DKV_EUSER);
    assert_int_equal(dkv_checkRecordPath("/tmp", &err), DKV_EUSER);
    assert_int_equal(dkv_checkRecordPath("", &err), DKV_EUSER);
    assert_int_equal(dkv_checkRecordPath(NULL, &err), 0);
    char name[400];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = 0;
    assert_int_equal(dkv_checkOutPath("--markdown", name, &err), DKV_EUSER); /* no file system has such names */
    assert_int_equal(strncmp(err.text, "--markdown: cannot write 'xxx", 29), 0);
}

static void records_select_their_cases(void **state) {
    (void)state;
    char path[] = "/tmp/dualkv-test-XXXXXX";
    dkv_err err = {0};
    dkv_selection s = {0};
    dkv_result *r = example(DKV_ST_FAILED);
    char *json = dkv_printRecord(r);
    FILE *f = fdopen(mkstemp(path), "w");
    fprintf(f, "%s\n\n%s\n", json, json);
    fclose(f);
    assert_int_equal(dkv_selectFile(path, &s, &err), 0);
    assert_int_equal(s.n, 2);
    assert_string_equal(s.lines[0], line);
    assert_string_equal(s.kernels[1], "emu+fault=D1");
    dkv_freeSelection(&s);
    f = fopen(path, "w");
    fputs("{\"line\": 7}\n", f);
    fclose(f);
    assert_int_equal(dkv_selectFile(path, &s, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, ":1:"));
    dkv_freeSelection(&s);
    unlink(path);
    free(json);
    free(r);
}

static void words_make_lines(void **state) {
    (void)state;
    static const char *const words[] = {"shape=3", "dim=8",           "shape=4 dim=8", "shape=5",
                                        "shape=6", "mask=window:3:1", "seed=9"};
    static const char *const want[] = {"shape=3 dim=8", "shape=4 dim=8", "shape=5",
                                       "shape=6 mask=window:3:1 seed=9"};
    dkv_selection s = {0};
    dkv_err err = {0};
    assert_int_equal(dkv_selectWords(words, 7, &s, &err), 0);
    assert_int_equal(s.n, 4);
    for (int i = 0; i < 4; i++) assert_string_equal(s.lines[i], want[i]);
    dkv_freeSelection(&s);
    static const char *const twice[] = {"shape=3", "dim=8", "dim=9"};
    assert_int_equal(dkv_selectWords(twice, 3, &s, &err), DKV_EUSER);
    dkv_freeSelection(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_is_there),
        cmocka_unit_test(a_waiver_and_the_command_stand_in_the_record),
        cmocka_unit_test(replay_commands_survive_a_shell),
        cmocka_unit_test(kernels_have_the_hash_of_their_file),
        cmocka_unit_test(files_are_made_with_the_first_record),
        cmocka_unit_test(records_select_their_cases),
        cmocka_unit_test(words_make_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
