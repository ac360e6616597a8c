#include "pieces.h"

#include <stdlib.h>
#include <string.h>

#include "buffers.h"
#include "spans.h"

typedef struct piece_loop {
    const uint8_t *from;
    int64_t bytes;
    uint64_t *sum;
} piece_loop;

static int64_t countPieces(int64_t bytes) { return (bytes + DKV_PIECE - 1) / DKV_PIECE; }
static int64_t sizeOf(int64_t piece, int64_t bytes) {
    const int64_t left = bytes - piece * DKV_PIECE;
    return left < DKV_PIECE ? left : DKV_PIECE;
}

/* Four chains: one would wait for its multiplications. */
static uint64_t sumBytes(const uint8_t *x, int64_t n) {
    uint64_t h[4] = {0, 1, 2, 3}, word[4], all = (uint64_t)n;
    int64_t i = 0;
    for (; i + (int64_t)sizeof word <= n; i += (int64_t)sizeof word) {
        memcpy(word, x + i, sizeof word);
        for (int c = 0; c < 4; c++) h[c] = dkv_mixBits(h[c], word[c]);
    }
    memset(word, 0, sizeof word);
    memcpy(word, x + i, (size_t)(n - i));
    for (int c = 0; c < 4; c++) all = dkv_mixBits(dkv_mixBits(all, h[c]), word[c]);
    return all;
}

static void sumSpan(int64_t first, int64_t end, int span, void *arg) {
    const piece_loop *l = arg;
    (void)span;
    for (int64_t k = first; k < end; k++) l->sum[k] = sumBytes(l->from + k * DKV_PIECE, sizeOf(k, l->bytes));
}

uint64_t *dkv_sumPieces(const uint8_t *from, int64_t bytes, uint64_t *room) {
    if (!room) room = malloc((size_t)(countPieces(bytes) + 1) * sizeof *room);
    piece_loop l = {from, bytes, room};
    if (room) dkv_eachSpan(countPieces(bytes), (double)bytes / 4, sumSpan, &l);
    return room;
}

int64_t dkv_comparePieces(const uint64_t *a, const uint64_t *b, int64_t bytes, int64_t *first) {
    int64_t n = 0;
    for (int64_t k = 0; k < countPieces(bytes); k++) {
        if (a[k] == b[k]) continue;
        if (n == 0) *first = k * DKV_PIECE;
        n += sizeOf(k, bytes);
    }
    return n;
}
