/* A key lost far behind the first blocks, at a tile's edge or within, is seen by the long lines of `ci` alone. */
#include <stdio.h>
#include <stdlib.h>

#include "../data/suite.h"
#include "guard.h"
#include "test_line.h"

#define FAR 4096

/* Does some row see more keys than that? */
static bool isLong(const char *line) {
    dkv_problem p;
    dkv_err err = {0};
    assert_int_equal(dkv_parseProblem(line, dkv_knownFill, &p, &err), 0);
    bool found = false;
    for (int32_t i = 0; i < p.n_nodes; i++) found |= !p.nodes[i].key_only && p.nodes[i].context + p.nodes[i].len > FAR;
    dkv_freeProblem(&p);
    return found;
}

/* Has the kernel a defect on one of them? */
static bool isSeen(const dkv_suite *s, const char *spec) {
    bool seen = false;
    for (int i = 0; i < s->n && !seen; i++)
        seen = isLong(s->lines[i]) && dkv_statusRow(judgeLine(spec, s->lines[i], 60, (dkv_case_options){0}))->defect;
    return seen;
}

static void a_lost_key_is_seen(void **state) {
    (void)state;
    static const char *const found[] = {"+lose=4097", "+lose=8064", "+undeclared+lose=8169"};
    const char *dir = getenv("DUALKV_BUILD");
    char spec[400];
    dkv_suite s;
    dkv_err err = {0};
    assert_int_equal(dkv_loadSuite("ci", &s, &err), 0);
    snprintf(spec, sizeof spec, "%s/testkernels/planted.so:planted", dir ? dir : "build");
    const size_t stem = strlen(spec);
    assert_false(isSeen(&s, spec));
    for (size_t i = 0; i < sizeof found / sizeof *found; i++) {
        snprintf(spec + stem, sizeof spec - stem, "%s", found[i]);
        if (!isSeen(&s, spec)) fail_msg("%s: no long line of ci has a defect", spec);
    }
    dkv_freeSuite(&s);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) return dkv_serveWorker(argv[2]);
    dkv_guardCoordinator();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lost_key_is_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
