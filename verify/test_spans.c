/* Sorting by several threads: the order that qsort gives where no two are equal, and everything still there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

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

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(sorts_as_one_thread_does)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
