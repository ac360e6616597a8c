/* walk.h, which kernels walk by, enumerated against mask.c, which says what is meant. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "layout.h"
#include "mask.h"
#include "sequence.h"
#include "small_problems.h"
#include "walk.h"

static const char *now; /* the line being looked at, for messages */

/* The ranges of each segment, laid end to end, are its sequence; each starts at the first token of some
 * segment. */
static void checkRanges(const dkv_problem *p, const dkv_layout *l) {
    dkv_starts starts;
    dkv_err err;
    int64_t rows[64];
    assert_int_equal(dkv_makeStarts(p, &starts, &err), 0);
    assert_int_equal(l->view.tq, starts.tq);
    assert_int_equal(l->view.tk, starts.tk);
    for (int32_t n = 0; n < p->n_nodes; n++) {
        const dualkv_segment *s = &l->view.segments[n];
        int64_t at = 0;
        dkv_fillSequence(p, &starts, n, rows);
        assert_int_equal(s->q_start, starts.q[n]);
        assert_int_equal(s->k_start, starts.k[n]);
        for (int32_t i = 0; i < s->range_count; i++) {
            const dualkv_range *g = &l->view.ranges[s->range_begin + i];
            bool first = false;
            assert_int_equal(g->pos, at);
            assert_true(g->len > 0);
            for (int64_t c = 0; c < g->len; c++) assert_int_equal(rows[at++], g->k_start + c);
            for (int32_t m = 0; m < p->n_nodes; m++) first |= starts.k[m] == g->k_start;
            assert_true(first);
        }
        assert_int_equal(at, p->nodes[n].context + p->nodes[n].len);
    }
    dkv_freeStarts(&starts);
}

static int pairsSeen(const dkv_problem *p, int32_t n, const dualkv_range *g, int64_t r0, int64_t r1,
                     int64_t c0, int64_t c1) {
    int seen = 0;
    for (int64_t r = r0; r < r1; r++)
        for (int64_t c = c0; c < c1; c++) seen += dkv_maskSees(p, n, r, g->pos + c);
    return seen;
}

static void checkTile(const dkv_problem *p, const dkv_layout *l, int32_t n, const dualkv_range *g, int64_t r0,
                      int64_t r1, int64_t c0, int64_t c1) {
    const int seen = pairsSeen(p, n, g, r0, r1, c0, c1);
    const int want = !seen ? 0 : seen == (r1 - r0) * (c1 - c0) ? 1 : 2;
    const int got = dkv_walkTile(&l->view, &l->view.segments[n], g, r0, r1, c0, c1);
    if (got != want && (got != 2 || dkv_maskKeys(p) == DKV_KEYS_ALL)) fail_msg("%s: tile says %d, pairs say %d", now, got, want);
}

/* Nothing is visible outside [lo, hi); where the mask is an interval of keys, its ends are visible. */
static void checkSpan(const dkv_problem *p, const dkv_layout *l, int32_t n, const dualkv_range *g, int64_t r0,
                      int64_t r1) {
    int64_t lo, hi;
    dkv_walkSpan(&l->view, &l->view.segments[n], g, r0, r1, &lo, &hi);
    if (lo >= hi) {
        if (pairsSeen(p, n, g, r0, r1, 0, g->len)) fail_msg("%s: empty span, rows see keys", now);
        return;
    }
    assert_true(lo >= 0 && hi <= g->len);
    if (pairsSeen(p, n, g, r0, r1, 0, lo) || pairsSeen(p, n, g, r0, r1, hi, g->len))
        fail_msg("%s: rows see keys outside the span", now);
    if (dkv_maskKeys(p) == DKV_KEYS_GAPS) return;
    if (!pairsSeen(p, n, g, r0, r1, lo, lo + 1) || !pairsSeen(p, n, g, r0, r1, hi - 1, hi))
        fail_msg("%s: the span is wider than it needs to be", now);
}

static void checkRows(const dkv_problem *p, const dkv_layout *l, int32_t n, const dualkv_range *g, int64_t c0,
                      int64_t c1) {
    const int64_t q = l->view.segments[n].q_len;
    int64_t lo, hi;
    dkv_walkRows(&l->view, &l->view.segments[n], g, c0, c1, &lo, &hi);
    if (lo >= hi) {
        if (pairsSeen(p, n, g, 0, q, c0, c1)) fail_msg("%s: no rows, but some see the keys", now);
        return;
    }
    assert_true(lo >= 0 && hi <= q);
    if (pairsSeen(p, n, g, 0, lo, c0, c1) || pairsSeen(p, n, g, hi, q, c0, c1))
        fail_msg("%s: rows outside the range see the keys", now);
    if (dkv_maskKeys(p) == DKV_KEYS_ALL)
        assert_true(pairsSeen(p, n, g, lo, lo + 1, c0, c1) && pairsSeen(p, n, g, hi - 1, hi, c0, c1));
}

/* Rows as bit masks, from every offset: bits past the end of the range are 0. */
static void checkBits(const dkv_problem *p, const dkv_layout *l, int32_t n, const dualkv_range *g) {
    for (int64_t r = 0; r < l->view.segments[n].q_len; r++)
        for (int64_t c0 = 0; c0 < g->len; c0++) {
            const uint64_t bits = dkv_walkBits(&l->view, &l->view.segments[n], g, r, c0);
            for (int64_t b = 0; b < 64; b++)
                if ((bits >> b & 1) != (c0 + b < g->len && dkv_maskSees(p, n, r, g->pos + c0 + b)))
                    fail_msg("%s: segment %d row %d from key %d, bit %d", now, n, (int)r, (int)c0, (int)b);
        }
}

static void checkSegment(const dkv_problem *p, const dkv_layout *l, int32_t n) {
    const dualkv_segment *s = &l->view.segments[n];
    for (int32_t i = 0; i < s->range_count; i++) {
        const dualkv_range *g = &l->view.ranges[s->range_begin + i];
        for (int64_t r = 0; r < s->q_len; r++)
            for (int64_t c = 0; c < g->len; c++)
                if (!!dkv_walkSees(&l->view, s, g, r, c) != dkv_maskSees(p, n, r, g->pos + c))
                    fail_msg("%s: segment %d row %d key %d differ", now, n, (int)r, (int)(g->pos + c));
        checkBits(p, l, n, g);
        for (int64_t r0 = 0; r0 < s->q_len; r0++)
            for (int64_t r1 = r0 + 1; r1 <= s->q_len; r1++) {
                checkSpan(p, l, n, g, r0, r1);
                for (int64_t c0 = 0; c0 < g->len; c0++)
                    for (int64_t c1 = c0 + 1; c1 <= g->len; c1++) checkTile(p, l, n, g, r0, r1, c0, c1);
            }
        for (int64_t c0 = 0; c0 < g->len; c0++)
            for (int64_t c1 = c0 + 1; c1 <= g->len; c1++) checkRows(p, l, n, g, c0, c1);
    }
}

/* The loop of a kernel, both ways round: every visible pair is met once, through tiles of bm rows and bn keys
 * that begin where spans begin. */
static void checkLoop(const dkv_problem *p, const dkv_layout *l, int64_t bm, int64_t bn) {
    int64_t forward = 0, backward = 0, want = dkv_countPairs(p);
    for (int32_t n = 0; n < p->n_nodes; n++) {
        const dualkv_segment *s = &l->view.segments[n];
        for (int32_t i = 0; i < s->range_count; i++) {
            const dualkv_range *g = &l->view.ranges[s->range_begin + i];
            int64_t lo, hi;
            for (int64_t r0 = 0; r0 < s->q_len; r0 += bm) {
                const int64_t r1 = dkv_walkMin(r0 + bm, s->q_len);
                dkv_walkSpan(&l->view, s, g, r0, r1, &lo, &hi);
                for (int64_t c = lo / bn * bn; c < hi; c += bn) {
                    const int64_t end = dkv_walkMin(c + bn, g->len);
                    if (!dkv_walkTile(&l->view, s, g, r0, r1, c, end)) continue;
                    forward += pairsSeen(p, n, g, r0, r1, c, end);
                }
            }
            for (int64_t c = 0; c < g->len; c += bn) {
                const int64_t end = dkv_walkMin(c + bn, g->len);
                dkv_walkRows(&l->view, s, g, c, end, &lo, &hi);
                for (int64_t r0 = lo / bm * bm; r0 < hi; r0 += bm) {
                    const int64_t r1 = dkv_walkMin(r0 + bm, s->q_len);
                    if (!dkv_walkTile(&l->view, s, g, r0, r1, c, end)) continue;
                    backward += pairsSeen(p, n, g, r0, r1, c, end);
                }
            }
        }
    }
    if (forward != want || backward != want)
        fail_msg("%s: %dx%d tiles meet %lld and %lld of %lld pairs", now, (int)bm, (int)bn,
                 (long long)forward, (long long)backward, (long long)want);
}

/* Ranges longer than a word of bits. */
static void long_rows(void **state) {
    (void)state;
    for (size_t m = 0; dkv_smallMask(m); m++) {
        char line[256];
        dkv_problem p;
        dkv_layout l;
        dkv_err err;
        snprintf(line, sizeof line, "shape=70+131,66 mask=%s", dkv_smallMask(m));
        now = line;
        if (dkv_parseProblem(line, NULL, &p, &err) || dkv_makeLayout(&p, &l, &err)) fail_msg("%s", err.text);
        for (int32_t n = 0; n < p.n_nodes; n++)
            for (int32_t i = 0; i < l.view.segments[n].range_count; i++)
                checkBits(&p, &l, n, &l.view.ranges[l.view.segments[n].range_begin + i]);
        checkLoop(&p, &l, 64, 64);
        checkLoop(&p, &l, 17, 32);
        dkv_freeLayout(&l);
        dkv_freeProblem(&p);
    }
}

static void walk_is_the_mask(void **state) {
    (void)state;
    static const int64_t tile[][2] = {{1, 1}, {2, 3}, {3, 2}, {4, 4}, {8, 5}, {64, 64}};
    int problems = 0;
    for (size_t i = 0; i < DKV_COUNT(dkv_small_shapes); i++)
        for (size_t m = 0; dkv_smallMask(m); m++) {
            char line[256];
            dkv_problem p;
            dkv_layout l;
            dkv_err err;
            snprintf(line, sizeof line, "shape=%s mask=%s", dkv_small_shapes[i], dkv_smallMask(m));
            now = line;
            if (dkv_parseProblem(line, NULL, &p, &err)) fail_msg("%s: %s", line, err.text);
            if (dkv_maskAdmissible(&p, &err) == 0) {
                assert_int_equal(dkv_makeLayout(&p, &l, &err), 0);
                checkRanges(&p, &l);
                for (int32_t n = 0; n < p.n_nodes; n++) checkSegment(&p, &l, n);
                for (size_t t = 0; t < DKV_COUNT(tile); t++) checkLoop(&p, &l, tile[t][0], tile[t][1]);
                dkv_freeLayout(&l);
                problems++;
            }
            dkv_freeProblem(&p);
        }
    assert_true(problems > 300);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(walk_is_the_mask), cmocka_unit_test(long_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
