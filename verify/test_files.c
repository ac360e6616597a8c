/* The kernel files:DIR, export and import, from outside: what is exported is judged; what is missing or wrong is said. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../data/safetensors.h"
#include "test_program.h"

/* Reads a case, changes it, writes it again under another name. drop: names of tensors left out; flip: one whose bytes
 * change; generator: keep that word of the metadata. */
static void rewrite(const char *from, const char *to, const char *drop, const char *flip, bool generator) {
    char path[200];
    dkv_st_file f;
    dkv_err err = {0};
    dkv_st_tensor kept[16];
    const char *keys[8], *values[8];
    int n = 0, m = 0;
    snprintf(path, sizeof path, "%s/%s", dir, from);
    if (dkv_readSafetensors(path, &f, &err)) fail_msg("%s", err.text);
    for (int i = 0; i < f.n_tensors; i++) {
        char word[200];
        snprintf(word, sizeof word, " %s ", f.tensors[i].name);
        if (drop && strstr(drop, word)) continue;
        if (flip && strcmp(flip, f.tensors[i].name) == 0) ((unsigned char *)(uintptr_t)f.tensors[i].data)[1] ^= 0x40;
        kept[n++] = f.tensors[i];
    }
    for (int i = 0; i < f.n_meta; i++) {
        if (!generator && strcmp(f.meta_keys[i], "generator") == 0) continue;
        keys[m] = f.meta_keys[i];
        values[m++] = f.meta_values[i];
    }
    snprintf(path, sizeof path, "%s/%s", dir, to);
    if (dkv_writeSafetensors(path, kept, n, keys, values, m, &err)) fail_msg("%s", err.text);
    dkv_freeSafetensors(&f);
}

#define A "'shape=20+2x9 heads=4:2 dim=16'"

static void what_is_exported_is_judged(void **state) {
    (void)state;
    mustSay(0, "$B/dualkv export " A " 'shape=9+4 dim=8 dtype=fp32 sinklogit=0.5 dlse=on layout=padded' 'shape=0+2x5 dim=4 grad=off' "
               "--out $D/a --outputs truth", "3 of 3 cases");
    mustSay(0, "$B/dualkv check files:$D/a --json $D/a.jsonl", "3 of 3 cases: 3 PASSED");
    mustSay(0, "grep -c '\"sha256\":\"'$(sha256sum <$(ls $D/a/0001*) | cut -c-64) $D/a.jsonl", "1");
    mustSay(0, "$B/dualkv export " A " 'shape=9k+4,7@3 dim=8' --out $D/b --outputs emu-replicated --layout replicated", "2 of 2");
    mustSay(0, "$B/dualkv check files:$D/b", "2 of 2 cases: 2 PASSED");
    mustSay(1, "$B/dualkv export " A " --out $D/c --outputs emu+fault=D1 && $B/dualkv check files:$D/c", "1 FAILED");
    mustSay(1, "$B/dualkv replay $D/a.jsonl --kernel broken+how=zeros -q", "FAILED");
    mustSay(3, "$B/dualkv check 'shape=7 dim=4' --kernel files:$D/a", "no file of");
    mustSay(4, "$B/dualkv export " A " --out $D/one.safetensors && mkdir $D/d && cp $D/one.safetensors $D/d && "
               "$B/dualkv check files:$D/d", "not given: O, LSE, dQ, dK, dV");
    assert_null(strstr(output, "behaves as"));
    assert_null(strstr(output, "would have seen"));
    mustSay(0, "$B/dualkv import $D/one.safetensors", "shape=20+2x9 heads=4:2 dim=16  [q k v do]");
}

static void captured_cases_bring_their_inputs(void **state) {
    (void)state;
    runShell("mkdir $D/cap $D/other; $B/dualkv export " A " --out $D/whole.safetensors --outputs truth");
    rewrite("whole.safetensors", "cap/own.safetensors", NULL, NULL, false);
    rewrite("whole.safetensors", "cap/quiet.safetensors", " lse ", NULL, false);
    mustSay(0, "$B/dualkv check files:$D/cap --json $D/cap.jsonl", "2 of 2 cases: 2 PASSED");
    assert_non_null(strstr(output, "not judged, for it was not given: LSE"));
    mustSay(0, "cat $D/cap.jsonl", "\"not_judged\":[\"LSE\"]");
    mustSay(0, "$B/dualkv check files:$D/cap --kernel emu", "2 of 2 cases: 2 PASSED");
    mustSay(1, "$B/dualkv check files:$D/cap --kernel broken+how=zeros", "--kernel broken+how=zeros --files /tmp");
    mustSay(0, "$B/dualkv replay $D/cap.jsonl", "2 PASSED");
    mustSay(2, "$B/dualkv check shape=20+2x9 heads=4:2 dim=16 fill=file:own --kernel emu", "in which folder");
    mustSay(2, "$B/dualkv check shape=20+2x8 heads=4:2 dim=16 fill=file:own --kernel emu --files $D/cap", "the line wants");
    mustSay(2, "$B/dualkv check files:$D/cap --kernel files:$D/a", "two folders");
    rewrite("whole.safetensors", "cap/x.safetensors", " dq dv ", NULL, false); /* gradients are promised by the line */
    mustSay(4, "$B/dualkv check files:$D/cap", "not judged, for it was not given: dQ, dV");
    rewrite("whole.safetensors", "cap/x.safetensors", NULL, "dv", false);
    mustSay(1, "$B/dualkv check files:$D/cap", "dV:");
    rewrite("whole.safetensors", "cap/x.safetensors", " do ", NULL, false);
    mustSay(2, "$B/dualkv check files:$D/cap", "'do' is missing");
    /* what a kernel does not give is left out */
    runShell("mkdir $D/quiet");
    rewrite("whole.safetensors", "quiet/x.safetensors", " lse ", NULL, true);
    mustSay(0, "$B/dualkv export " A " --out $D/still --outputs files:$D/quiet && $B/dualkv check files:$D/still", "1 PASSED");
    assert_non_null(strstr(output, "not judged, for it was not given: LSE"));
    /* inputs of the generator, altered: the outputs are of something else */
    rewrite("whole.safetensors", "other/x.safetensors", NULL, "k", true);
    mustSay(1, "$B/dualkv check files:$D/other", "its k is not what generator 1 makes of its line");
    rewrite("whole.safetensors", "other/x.safetensors", NULL, NULL, true);
    rewrite("whole.safetensors", "other/y.safetensors", " q k v do ", NULL, true);
    mustSay(2, "$B/dualkv check files:$D/other", "'x' and 'y' are of the same line");
    runShell("rm $D/other/x.safetensors");
    mustSay(0, "$B/dualkv check files:$D/other", "1 PASSED");
}

static void files_are_taken_in(void **state) {
    (void)state;
    rewrite("whole.safetensors", "bare.safetensors", NULL, NULL, false);
    mustSay(0, "$B/dualkv import $D/bare.safetensors shape=20+2x9 heads=4:2 dim=16 --out $D/in", "fill=file:bare");
    mustSay(0, "$B/dualkv check files:$D/in", "1 PASSED");
    mustSay(2, "$B/dualkv import $D/bare.safetensors shape=21+2x9 heads=4:2 dim=16 --out $D/in", "the line wants [39, 4, 16]");
    mustSay(0, "$B/dualkv import $D/bare.safetensors shape=20+2x9 heads=4:2 dim=16 --out $D/in", "fill=file:bare"); /* the same again */
    rewrite("whole.safetensors", "other/bare.safetensors", NULL, "q", false);
    mustSay(2, "$B/dualkv import $D/other/bare.safetensors --out $D/in", "is there and another case");
    mustSay(0, "$B/dualkv check files:$D/in", "1 PASSED");
    mustSay(2, "$B/dualkv export " A " --out $D/whole.safetensors", "holds outputs: nothing is written over them");
    mustSay(0, "$B/dualkv import $D/whole.safetensors", "[q k v do o lse dq dk dv]");
    mustSay(0, "cp $D/whole.safetensors $D/again.safetensors; $B/dualkv export " A " --out $D/again.safetensors --outputs truth", "1 of 1");
    mustSay(2, "echo weights >$D/model.safetensors; $B/dualkv export " A " --out $D/model.safetensors --outputs truth", "is there and no case");
    mustSay(2, "$B/dualkv import $D/none.safetensors", "No such file");
    mustSay(2, "$B/dualkv import shape=3", "which files");
    mustSay(2, "head -c 100 $D/bare.safetensors >$D/cut.safetensors; $B/dualkv import $D/cut.safetensors", "beyond the file");
    static const struct {
        const char *words, *says;
    } rows[] = {{"export shape=3", "--out"},
                {"export --out $D/z", "which lines"},
                {"export shape=3 shape=4 --out $D/z.safetensors", "one file"},
                {"export shape=3 --out $D/nodir/z", "cannot be made"},
                {"export shape=3 --out $D/z --layout sideways", "sideways"},
                {"export shape=3 --out $D/z --outputs emo", "did you mean"},
                {"export shape=3 --out $D/z --outputs emu-replicated", "--layout replicated"},
                {"check files:$D/nodir", "No such file"},
                {"check shape=3 --kernel files:", "a folder is missing"},
                {"check shape=3 --kernel files:$D/out", "not a folder"},
                {"check shape=3 fill=file:Big --kernel emu", "not expected in a fill"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char words[300];
        snprintf(words, sizeof words, "$B/dualkv %s", rows[i].words);
        mustSay(2, words, rows[i].says);
    }
}

int main(void) {
    if (makeDir()) return 1;
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_is_exported_is_judged),
                                       cmocka_unit_test(captured_cases_bring_their_inputs),
                                       cmocka_unit_test(files_are_taken_in)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
