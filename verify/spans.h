/* spans.h: one loop over many rows, by several threads where it is worth it. The cut does not depend on their number. */
#ifndef DKV_SPANS_H
#define DKV_SPANS_H

#include <stddef.h>
#include <stdint.h>

#define DKV_SPANS 64 /* parts of a loop */

/* f(first, end, span) for the spans 0..DKV_SPANS-1 of [0, n), some of them empty; `elements`: how much work that is. */
typedef void (*dkv_span_fn)(int64_t first, int64_t end, int span, void *arg);
void dkv_eachSpan(int64_t n, double elements, dkv_span_fn f, void *arg);

/* memcpy by several threads. */
void dkv_copySpans(void *to, const void *from, int64_t bytes);

/* qsort by several threads. The order of elements that compare equal is not the same as qsort's. */
void dkv_sortSpans(void *base, int64_t n, size_t size, int (*compare)(const void *, const void *));

#endif
