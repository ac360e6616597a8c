/* Where the errors of planted faults lie, from the records of the program: tiles of rows x heads, tiles of queries x keys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdbool.h>

#include <cjson/cJSON.h>

#include "test_program.h"

#define LINE "shape=130+2x70,9 heads=4:2"

static cJSON *record; /* of the last case, freed by the next */

static void check(int exit, const char *words) {
    char command[400];
    snprintf(command, sizeof command, "check %s --json -", words);
    mustExit(exit, command);
    cJSON_Delete(record);
    record = cJSON_Parse(output);
    assert_non_null(record);
}

/* The cells of a map, by row; its columns in *width. */
static const char *cellsOf(const char *tensor, const char *name, int *width) {
    const cJSON *o = tensor ? cJSON_GetObjectItem(cJSON_GetObjectItem(record, "tensors"), tensor) : record, *n;
    const cJSON *map = cJSON_GetObjectItem(o, name), *columns = cJSON_GetObjectItem(map, "columns");
    if (!map) return NULL;
    *width = 0;
    cJSON_ArrayForEach(n, cJSON_GetObjectItem(columns, cJSON_HasObjectItem(columns, "tiles") ? "tiles" : "heads")) *width += n->valueint;
    return cJSON_GetStringValue(cJSON_GetObjectItem(map, "cells"));
}

static bool isBeyond(char c) { return c == '!' || (c > 'P' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

/* Tiles of 64: prompt rows 0 to 2, responses 3-4, 5-6, 7. */
static void assertMap(const char *tensor, const char *name, const char *want) {
    int width;
    const char *cells = cellsOf(tensor, name, &width);
    if (!cells) fail_msg("no map %s of %s", name, tensor ? tensor : "the case");
    assert_int_equal(strlen(cells), strlen(want));
    for (int i = 0; want[i]; i++) {
        char is = cells[i] == '.' ? '.' : isBeyond(cells[i]) ? 'x' : 'o';
        if (is != want[i] && want[i] != '?') fail_msg("%s: cell %d, %d is '%c' instead of %c\n%s", name, i / width, i % width, cells[i], want[i], cells);
    }
}

static void a_limit_without_the_context(void **state) {
    (void)state;
    check(1, "'" LINE "' --kernel emu+fault=A1");
    assertMap("O", "map", "oooo" "oooo" "oooo" "xxxx" "xxxx" "xxxx" "xxxx" "xxxx");
    assertMap(NULL, "weights_forward",
              "o......." "oo......" "ooo....." "xxxx...." "xxxxx..." "xxx..x.." "xxx..xx." "xxx....x");
    assertMap(NULL, "weights_backward",
              "o......." "oo......" "ooo....." "xxxx...." "xxxxx..." "xxx..x.." "xxx..xx." "xxx....x");
}

/* The forward is right; dK and dV of a prompt lose a head, so that the weights of its keys are wrong in dV. */
static void gradients_summed_wrongly_have_right_weights(void **state) {
    (void)state;
    check(1, "'" LINE "' --kernel emu+fault=F1"); /* dK, dV of a prompt keep one query head of the group */
    assert_null(cJSON_GetObjectItem(cJSON_GetObjectItem(cJSON_GetObjectItem(record, "tensors"), "O"), "map"));
    assertMap("dK", "map", "xx" "xx" "xx" "oo" "oo" "oo" "oo" "oo");
    assertMap(NULL, "weights_forward",
              "o......." "oo......" "ooo....." "oooo...." "ooooo..." "ooo..o.." "ooo..oo." "ooo....o");
    assertMap(NULL, "weights_backward",
              "x......." "xx......" "xxx....." "xxxo...." "xxxoo..." "xxx..o.." "xxx..oo." "xxx....o");
}

/* A kernel that is imprecise within its bound: the residual, a letter a cell. */
static void within_the_bound(void **state) {
    (void)state;
    int width;
    check(1, "'shape=200+2x80 heads=4:2' --kernel emu+fault=X9");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(record, "status")), "IMPRECISE");
    bool any = false;
    for (int i = 0; i < 3; i++) any |= cellsOf((const char *const[]){"dQ", "dK", "dV"}[i], "map", &width) != NULL;
    assert_true(any);
}

/* A hundred segments: a stretch of them; long ones: larger tiles; many heads: several a cell. */
static void maps_stay_small(void **state) {
    (void)state;
    int width;
    check(1, "'shape=20+100x3 heads=96:1 dim=16' --kernel emu+fault=A1");
    const char *cells = cellsOf("O", "map", &width);
    assert_true(cells && width == 32 && strlen(cells) == 40 * 32);
    cells = cellsOf(NULL, "weights_forward", &width);
    assert_true(cells && width <= 16 && strlen(cells) <= (size_t)(40 * width));
    check(1, "'shape=3000+2x20 dim=16 grad=off' --kernel emu+fault=A1");
    cells = cellsOf("O", "map", &width);
    assert_true(cells && width == 1 && strlen(cells) <= 40);
}

static void what_passes_has_none(void **state) {
    (void)state;
    check(0, "'" LINE "' --kernel emu");
    assert_null(strstr(output, "\"map\""));
    assert_null(strstr(output, "weights_"));
}

/* The runs more are made for the first failures of a run only. */
static void probes_are_few(void **state) {
    (void)state;
    int with = 0;
    run("check smoke --kernel emu+fault=X2 --json $D/records --quiet");
    assert_int_equal(runShell("grep -c weights_forward $D/records"), 0);
    with = atoi(output);
    assert_int_equal(runShell("grep -c '\"map\"' $D/records"), 0);
    assert_true(with > 0 && with <= 6 && atoi(output) > with);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_limit_without_the_context),
                                       cmocka_unit_test(gradients_summed_wrongly_have_right_weights),
                                       cmocka_unit_test(within_the_bound),
                                       cmocka_unit_test(maps_stay_small),
                                       cmocka_unit_test(what_passes_has_none),
                                       cmocka_unit_test(probes_are_few)};
    if (makeDir()) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cJSON_Delete(record);
    return removeDir() ? 1 : failed;
}
