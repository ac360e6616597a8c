/* Two kernels side by side: the same bits, the place where they part, which of them is wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "test_program.h"

#define LINE "shape=40+2x21 heads=2:1 dim=16"

static void two_kernels_are_compared(void **state) {
    (void)state;
    mustSay(0, "$B/dualkv compare emu emu+bm=64 " LINE, "they give the same bits");
    mustSay(0, "$B/dualkv compare emu emu+bn=16 " LINE, "they first part in LSE, within rounding");
    mustSay(1, "$B/dualkv compare emu emu+fault=D3 " LINE " --json $D/c.json",
            "they first part in LSE, beyond rounding");
    assert_non_null(strstr(output, "emu+fault=D3 is the one that is wrong there"));
    mustSay(0, "grep -c '\"comparison\":\"they first part in LSE' $D/c.json", "1");
    mustSay(1, "$B/dualkv compare emu+fault=F1 emu " LINE, "beyond rounding: ");
    assert_non_null(strstr(output, "they first part in dV"));
    assert_non_null(strstr(output, "segment 0 (prompt)"));
    mustSay(1, "$B/dualkv compare emu+fault=D3 emu+fault=D3 " LINE, "they give the same bits");
}

static void what_cannot_be_compared_is_said(void **state) {
    (void)state;
    mustSay(2, "$B/dualkv compare emu shape=3", "compare: two kernels, then a line");
    mustSay(2, "$B/dualkv compare emu nosuch " LINE, "nosuch");
    mustSay(2, "$B/dualkv compare emu emu smoke", "one line");
    mustSay(2, "$B/dualkv compare emu emu shape=3 heads=3:2", "heads");
    mustSay(3, "$B/dualkv compare emu $B/testkernels/plain.so:plain shape=3 softcap=2", "nothing to compare");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_kernels_are_compared),
        cmocka_unit_test(what_cannot_be_compared_is_said),
    };
    if (makeDir()) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
