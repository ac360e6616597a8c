/* Plots: data and script for each thing that there is, run by gnuplot where it is there; names that would be commands are not. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report_plots.h"
#include "test_page.h"

static char dir[] = "/tmp/dualkv-test-XXXXXX", text[1 << 16];

#define RECORD(kernel, commit, ratio, rms)                                                                           \
    "{\"line\":\"shape=9+3\",\"kernel\":\"" kernel "\",\"status\":\"PASSED\",\"why\":\"\",\"commit\":\"" commit "\",\"seconds_forward\":" \
    "0.5,\"tensors\":{\"O\":{\"max_bound_ratio\":" ratio ",\"twin_rms\":" rms ",\"twin_rms_limit\":1.5,\"rms_dof\":50,\"regions\":{" \
    "\"prompt\":{\"max_bound_ratio\":" ratio "},\"response\":{\"max_bound_ratio\":0.25}}}}}"

static int gather(const char *const *records, size_t n, const char *folder) {
    dkv_gather g = {0};
    dkv_err err = {0};
    int plots = 0;
    gatherAll(&g, records, n);
    assert_int_equal(dkv_writePlots(&g, folder, &plots, &err), 0);
    dkv_freeGather(&g);
    return plots;
}

static const char *readIn(const char *folder, const char *name) {
    char path[300];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    text[f ? fread(text, 1, sizeof text - 1, f) : 0] = 0;
    if (f) fclose(f);
    return text;
}

/* Runs the script where there is gnuplot; every plot is then there. */
static void plot(const char *folder, const char *const *names, size_t n) {
    char command[400];
    if (system("command -v gnuplot >/dev/null") != 0) return;
    snprintf(command, sizeof command, "cd %s && gnuplot -d all.gp 2>err", folder);
    if (system(command) != 0) fail_msg("gnuplot: %s", readIn(folder, "err"));
    for (size_t i = 0; i < n; i++)
        if (!strstr(readIn(folder, names[i]), "</svg>") && strlen(text) < sizeof text - 1) fail_msg("%s: %s", names[i], text);
}

static void everything_is_plotted(void **state) {
    (void)state;
    char folder[100];
    static const char *const names[] = {"ratio-1.svg", "residual-1.svg", "trend-1.svg", "roofline.svg"};
    static const char *const records[] = {
        RECORD("emu", "aaa", "0.5", "1.1"), RECORD("emu", "bbb", "2.5", "0.9"),
        "{\"line\":\"shape=8192+32x1024 heads=32:8 dim=128\",\"kernel\":\"cuda\",\"device\":\"NVIDIA H200\",\"ms_fwd\":17.8,\"ms_bwd\":72.1,"
        "\"tflops_fwd\":293.5,\"tflops_bwd\":181}"};
    snprintf(folder, sizeof folder, "%s/all", dir);
    assert_int_equal(gather(records, 3, folder), 4);
    assert_non_null(strstr(readIn(folder, "roofline.dat"), " 293.5 0\n"));
    assert_non_null(strstr(readIn(folder, "trend-1.dat"), "0 0.5 "));
    assert_non_null(strstr(readIn(folder, "ratio-1.dat"), " 0 1 1\n")); /* O of the prompt, one case, outside */
    assert_non_null(strstr(readIn(folder, "all.gp"), "(x*4.8<989.4?x*4.8:989.4)"));
    plot(folder, names, 4);
}

/* gnuplot runs commands in backquotes and after system, and a quote ends a label. */
static void names_are_no_commands(void **state) {
    (void)state;
    char folder[100], trap[200];
    static const char *const names[] = {"ratio-1.svg", "residual-1.svg", "trend-1.svg"};
    static const char *const records[] = {
        RECORD("x'; system('touch pwned'); print '`touch pwned`\\n!touch pwned\\\\", "a'`touch pwned`", "\"nan\"", "1e999"),
        RECORD("x'; system('touch pwned'); print '`touch pwned`\\n!touch pwned\\\\", "\\\"$(touch pwned)\\u0007", "1e-300", "-1e999")};
    snprintf(folder, sizeof folder, "%s/hostile", dir);
    assert_int_equal(gather(records, 2, folder), 2); /* no residual is finite */
    readIn(folder, "all.gp");
    assert_null(strchr(text, '`'));
    assert_null(strstr(text, "system("));
    assert_null(strstr(text, "\n!"));
    plot(folder, (const char *const[]){names[0], names[2]}, 2);
    snprintf(trap, sizeof trap, "%s/pwned", folder);
    assert_int_not_equal(access(trap, F_OK), 0);
}

static void nothing_to_plot(void **state) {
    (void)state;
    char folder[100];
    dkv_gather g = {0};
    dkv_err err = {0};
    int n = 7;
    static const char *const records[] = {"{\"line\":\"shape=9\",\"kernel\":\"emu\",\"status\":\"UNSUPPORTED\",\"why\":\"no\"}"};
    snprintf(folder, sizeof folder, "%s/none", dir);
    assert_int_equal(gather(records, 1, folder), 0);
    assert_int_equal(dkv_writePlots(&g, "/nowhere/at/all", &n, &err), DKV_EUSER);
    assert_non_null(strstr(err.text, "/nowhere/at/all"));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(everything_is_plotted), cmocka_unit_test(names_are_no_commands),
                                       cmocka_unit_test(nothing_to_plot)};
    char command[100];
    if (!mkdtemp(dir)) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(command, sizeof command, "rm -rf %s", dir);
    return system(command) ? 1 : failed;
}
