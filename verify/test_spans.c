/* Sorting by several threads: the order that qsort gives where no two are equal, and everything still there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "pieces.h"
#include "spans.h"

typedef struct item {
    uint32_t key, at;
    char rest[12];
} item;

static int compareItems(const void *x, const void *y) {
    const item *a = x, *b = y;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return a->at < b->at ? -1 : a->at > b->at;
}

static void sorts_as_one_thread_does(void **state) {
    (void)state;
    static const int64_t counts[] = {0, 1, 2, 1000, 100001, 100064, 300007};
    static const uint32_t keys[] = {1, 7, 1u << 31};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            const int64_t n = counts[i];
            item *a = malloc((size_t)(n + 1) * sizeof *a), *b = malloc((size_t)(n + 1) * sizeof *b);
            uint32_t x = 12345;
            for (int64_t e = 0; e < n; e++) {
                x = x * 1664525u + 1013904223u;
                a[e] = (item){.key = (x >> 3) % keys[k], .at = (uint32_t)e};
                memset(a[e].rest, (int)(x >> 24), sizeof a[e].rest);
            }
            memcpy(b, a, (size_t)n * sizeof *a);
            dkv_sortSpans(a, n, sizeof *a, compareItems);
            if (n) qsort(b, (size_t)n, sizeof *b, compareItems);
            assert_memory_equal(a, b, (size_t)n * sizeof *a);
            free(a);
            free(b);
        }
}

/* Each bit of a copy counts, wherever its piece, and it is said in which piece it was. */
static void pieces_tell_what_changed(void **state) {
    (void)state;
    static const int64_t sizes[] = {0, 1, 31, 32, 33, DKV_PIECE, DKV_PIECE + 1, 3 * DKV_PIECE - 5, 9 * DKV_PIECE + 40};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const int64_t n = sizes[k];
        uint8_t *a = malloc((size_t)n + 1), *b = malloc((size_t)n + 1);
        for (int64_t i = 0; i < n; i++) a[i] = (uint8_t)(i % 251 * (i >> 20 & 3)); /* the first piece is all zeros */
        dkv_copySpans(b, a, n);
        assert_memory_equal(a, b, (size_t)n);
        uint64_t *was = dkv_sumPieces(a, n, NULL), *now = dkv_sumPieces(b, n, NULL);
        int64_t first = -1;
        assert_int_equal(dkv_comparePieces(was, now, n, &first), 0);
        for (int64_t i = 0; i < n; i += i < 70 || i > n - 70 ? 1 : n / 7 + 1) {
            const int64_t piece = i / DKV_PIECE * DKV_PIECE, left = n - piece;
            b[i] ^= (uint8_t)(1 << i % 8);
            assert_ptr_equal(dkv_sumPieces(b, n, now), now);
            assert_int_equal(dkv_comparePieces(was, now, n, &first), left < DKV_PIECE ? left : DKV_PIECE);
            assert_int_equal(first, piece);
            b[i] = a[i];
        }
        if (n > DKV_PIECE) { /* the first and the last */
            b[0] ^= 1, b[n - 1] ^= 1;
            assert_int_equal(dkv_comparePieces(was, dkv_sumPieces(b, n, now), n, &first), DKV_PIECE + (n - 1) % DKV_PIECE + 1);
            assert_int_equal(first, 0);
        }
        free(was);
        free(now);
        free(a);
        free(b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(sorts_as_one_thread_does), cmocka_unit_test(pieces_tell_what_changed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
