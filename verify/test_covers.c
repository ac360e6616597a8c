/* A certificate from suite ci, as a user makes it: what it refuses and what it covers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "../ref/dualkv_kernel.h"
#include "test_program.h"

static void ci_gives_a_certificate(void **state) {
    (void)state;
    if (getenv("DUALKV_RECORDS")) /* `make verify` has just run it, and more */
        mustSay(0, "head -n $(grep -c '^[^#]' $DUALKV_DATA/suites/ci.txt) $DUALKV_RECORDS >$D/ci.jsonl", "");
    else
        mustSay(0, "$B/dualkv check ci --kernel emu --quiet --json $D/ci.jsonl", "");
    char kinds[60];
    snprintf(kinds, sizeof kinds, "%d kinds of mask and dtype", 3 * DUALKV_BIDIR); /* every mask but the last */
    mustSay(0, "$B/dualkv certificate $D/ci.jsonl --out $D/c.json", kinds);
    mustSay(0, "grep -c '\"sha256\":.\"'$(sha256sum <$D/ci.jsonl | cut -c-64) $D/c.json", "1");
    mustSay(0, "grep -c '\"sha256\":.\"'$(sha256sum <$B/dualkv | cut -c-64) $D/c.json", "1"); /* the kernel is compiled in */
    mustSay(0, "$B/dualkv certificate $D/ci.jsonl --out - | cmp - $D/c.json; $B/dualkv certificate $D/ci.jsonl --out $D/d.json; "
               "sed 's/d.json/c.json/; /\"seal\":/d' $D/d.json >$D/x; sed '/\"seal\":/d' $D/c.json | cmp - $D/x", ""); /* the same twice */
}

static void it_covers_what_was_judged(void **state) {
    (void)state;
    mustSay(0, "$B/dualkv covers $D/c.json 'shape=65+3x64 heads=8:1 dim=128' --kernel emu --device this", "INSIDE  shape=65+3x64");
    mustSay(0, "$B/dualkv covers $D/c.json shape=100+2x29 heads=2:1 dim=72 softcap=30", "softcap=30: not run itself: between 20 and 50");
    mustSay(0, "for l in $(grep -ho '\"line\":\"[^\"]*' $D/ci.jsonl | cut -c9- | sed -n '1~7p' | tr ' ' _); do "
               "$B/dualkv covers -q $D/c.json \"$(echo $l | tr _ ' ')\" >$D/y || { echo $l; cat $D/y; exit 7; }; done", "");
}

static void it_refuses_the_rest(void **state) {
    (void)state;
    mustSay(1, "$B/dualkv covers $D/c.json shape=16384+8x1024 heads=8:1 dim=128", "sight=17408: judged from 0 to");
    mustSay(1, "$B/dualkv covers $D/c.json shape=9+3 dim=100", "dim=100: never judged");
    mustSay(1, "$B/dualkv covers $D/c.json shape=9+3 heads=2:1 --device 'NVIDIA H200'", "device NVIDIA H200: the certificate is of cpu");
    mustSay(1, "$B/dualkv covers $D/c.json shape=9+3 heads=2:1 --kernel ref", "kernel ref: the certificate is of emu");
    mustSay(2, "sed 's/\"passed\":./&1/' $D/c.json >$D/e.json; $B/dualkv covers $D/e.json shape=1", "was edited: its seal");
    mustSay(2, "sed 's/cpu: /gpu: /' $D/c.json >$D/e.json; $B/dualkv eligible $D/e.json $D/e.json", "was edited");
    mustSay(2, "head -c 900 $D/c.json >$D/e.json; $B/dualkv covers $D/e.json shape=1", "not JSON from here on");
    mustSay(2, "$B/dualkv covers $D/ci.jsonl shape=1", "ci.jsonl:2: not JSON");
    mustSay(2, "$B/dualkv covers $D/c.json shape=-1", "shape");
    mustSay(2, "$B/dualkv covers $D/c.json", "a certificate and a problem line");
    mustSay(2, "$B/dualkv covers $D shape=1", "is not a file");
}

static void models_are_held_against_it(void **state) {
    (void)state;
    static const char start[] = "cat >$D/m.json <<E\n{\"model_type\":\"llama\",\"hidden_size\":1024,\"num_attention_heads\":8,\"num_key_value_heads\":1,"
                                "\"head_dim\":128,\"torch_dtype\":\"bfloat16\",\"attention_dropout\":";
    static const struct {
        int code;
        const char *rest, *says;
    } rows[] = {{0, "0,\"max_position_embeddings\":256}", "INSIDE  "},
                {0, "0,\"max_position_embeddings\":256,\"attn_logit_softcapping\":30}", "INSIDE  "},
                {1, "0.1,\"max_position_embeddings\":256}", "OUTSIDE    attention_dropout=0.1"},
                {1, "0,\"max_position_embeddings\":256,\"layer_types\":[\"linear_attention\",\"full_attention\"]}", "a recurrent layer"},
                {1, "0,\"max_position_embeddings\":32768}", "longest sequence (sight=32768): judged from 0 to"},
                {4, "0,\"max_position_embeddings\":256,\"attention_gizmo\":3}", "not judged attention_gizmo=3"},
                {2, "0,\"max_position_embeddings\":256", "m.json:2: not JSON"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char command[1000];
        snprintf(command, sizeof command, "%s%s\nE\n$B/dualkv eligible $D/c.json $D/m.json", start, rows[i].rest);
        mustSay(rows[i].code, command, rows[i].says);
    }
    mustSay(1, "sed '/softcap=/s/\"status\":\"PASSED\"/\"status\":\"UNSUPPORTED\"/' $D/ci.jsonl >$D/r.jsonl; "
               "$B/dualkv certificate $D/r.jsonl --out $D/r.json && $B/dualkv covers -q $D/r.json shape=9+3 heads=2:1 softcap=30", "softcap=on: never judged");
}

/* A softcap that is ignored, a kernel that is wrong in any way: no certificate at all. */
static void a_defect_leaves_none(void **state) {
    (void)state;
    mustSay(1, "{ cat $D/ci.jsonl; $B/dualkv check 'shape=64+9 heads=2:1 softcap=2' --kernel emu+fault=L5 --quiet --json - | grep '^{'; } | "
               "sed 's/emu+fault=L5/emu/' >$D/f.jsonl; $B/dualkv certificate $D/f.jsonl --out $D/f.json", "no certificate: 1 defect; the first: FAILED");
    mustSay(0, "[ ! -e $D/f.json ]", "");
    mustSay(3, "$B/dualkv check smoke --kernel emu --quiet --json $D/s.jsonl; head -7 $D/s.jsonl >$D/g.jsonl; "
               "$B/dualkv certificate $D/g.jsonl --out $D/f.json", "7 different cases passed, fewer than 20");
    mustSay(2, "$B/dualkv certificate $D/s.jsonl $D/s.jsonl --out $D/f.json", "hold the same records");
    mustSay(2, "$B/dualkv certificate $D/nothing.jsonl --out $D/f.json", "cannot read");
    mustSay(2, "$B/dualkv certificate $D --out $D/f.json", "records.jsonl");
    mustSay(2, "mkfifo $D/p; $B/dualkv certificate $D/p --out $D/f.json", "is not a file of records");
    mustSay(2, "echo x >>$D/g.jsonl; $B/dualkv certificate $D/g.jsonl --out $D/f.json", "g.jsonl:8: not a record");
    mustSay(2, "$B/dualkv certificate $D/s.jsonl", "--out FILE is missing");
    mustSay(2, "$B/dualkv certificate $D/s.jsonl --out /nowhere/c.json", "cannot write");
    mustSay(2, "mkfifo $D/q; $B/dualkv certificate $D/s.jsonl --out $D/q", "File exists");
    mustSay(2, "ln -s q $D/l; $B/dualkv certificate $D/s.jsonl --out $D/l", "File exists");
    mustSay(2, "$B/dualkv certificate $D/s.jsonl --out $D", "directory");
    mustSay(2, "ln $D/s.jsonl $D/t; $B/dualkv certificate $D/s.jsonl --out $D/t", "holds the records");
    mustSay(0, "[ -p $D/q ] && [ -p $D/l ] && touch $D/r && ln -s r $D/k && $B/dualkv certificate $D/s.jsonl --out $D/k && [ -L $D/k ] && [ -s $D/r ]", "");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(ci_gives_a_certificate), cmocka_unit_test(it_covers_what_was_judged),
                                       cmocka_unit_test(it_refuses_the_rest), cmocka_unit_test(models_are_held_against_it),
                                       cmocka_unit_test(a_defect_leaves_none)};
#ifdef __SANITIZE_ADDRESS__
    return 0; /* suite ci takes minutes there; reports/test_certificate.c runs the same code */
#endif
    if (makeDir()) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return removeDir() ? 1 : failed;
}
