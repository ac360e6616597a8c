#include "sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

/* First 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void add_block(uint32_t h[8], const unsigned char *b) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)b[4 * i] << 24 | (uint32_t)b[4 * i + 1] << 16 | (uint32_t)b[4 * i + 2] << 8 | b[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
    uint32_t s0 = h[0], s1 = h[1], s2 = h[2], s3 = h[3], s4 = h[4], s5 = h[5], s6 = h[6], s7 = h[7]; /* in registers */
    for (int i = 0; i < 64; i++) {
        uint32_t one = s7 + (turn(s4, 6) ^ turn(s4, 11) ^ turn(s4, 25)) + ((s4 & s5) ^ (~s4 & s6)) + constants[i] + w[i];
        uint32_t two = (turn(s0, 2) ^ turn(s0, 13) ^ turn(s0, 22)) + ((s0 & s1) ^ (s0 & s2) ^ (s1 & s2));
        s7 = s6, s6 = s5, s5 = s4, s4 = s3 + one;
        s3 = s2, s2 = s1, s1 = s0, s0 = one + two;
    }
    uint32_t s[8] = {s0, s1, s2, s3, s4, s5, s6, s7};
    for (int i = 0; i < 8; i++) h[i] += s[i];
}

void dkv_addBlocksPlain(uint32_t h[8], const unsigned char *b, size_t blocks) {
    for (; blocks; blocks--, b += 64) add_block(h, b);
}

#ifdef __x86_64__
static bool has_sha(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

/* Four rounds a step by the processor's own instructions, on the state as they want it: words f e b a and h g d c. */
__attribute__((target("sha,sse4.1"))) static void add_fast(uint32_t h[8], const unsigned char *b, size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)h), 0xb1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(h + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);
    for (; blocks; blocks--, b += 64) {
        __m128i w[4], abef_was = abef, cdgh_was = cdgh;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i *now = &w[i % 4], before = w[(i + 3) % 4]; /* words t-16 to t-13; t-4 to t-1 */
            if (i < 4)
                *now = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(b + 16 * i)), big_endian);
            else
                *now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(*now, w[(i + 1) % 4]),
                                                          _mm_alignr_epi8(before, w[(i + 2) % 4], 4)), before);
            __m128i k = _mm_add_epi32(*now, _mm_loadu_si128((const __m128i *)(constants + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, k);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(k, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_was);
        cdgh = _mm_add_epi32(cdgh, cdgh_was);
    }
    low = _mm_shuffle_epi32(abef, 0x1b);
    high = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)h, _mm_blend_epi16(low, high, 0xf0));
    _mm_storeu_si128((__m128i *)(h + 4), _mm_alignr_epi8(high, low, 8));
}
#endif

static void add_blocks(uint32_t h[8], const unsigned char *b, size_t blocks) {
#ifdef __x86_64__
    static int fast = -1; /* the same from every thread */
    if (fast < 0) fast = has_sha();
    if (fast) {
        add_fast(h, b, blocks);
        return;
    }
#endif
    dkv_addBlocksPlain(h, b, blocks);
}

static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

/* The last bytes, fewer than 64, in a buffer with room for 128; total: of all. */
static void finish(uint32_t h[8], unsigned char *data, size_t have, uint64_t total, char hex[65]) {
    size_t end = have < 56 ? 64 : 128;
    memset(data + have, 0, end - have);
    data[have] = 0x80;
    for (int i = 0; i < 8; i++) data[end - 1 - (size_t)i] = (unsigned char)(total * 8 >> 8 * i);
    add_blocks(h, data, end / 64);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", h[i]);
}

void dkv_digestBytes(const void *data, size_t n, char hex[65]) {
    const unsigned char *bytes = data;
    unsigned char last[128];
    uint32_t h[8];
    size_t whole = n / 64 * 64;
    memcpy(h, start, sizeof h);
    add_blocks(h, bytes, whole / 64);
    if (n > whole) memcpy(last, bytes + whole, n - whole);
    finish(h, last, n - whole, n, hex);
}

void dkv_startDigest(dkv_digest *d) {
    *d = (dkv_digest){0};
    memcpy(d->h, start, sizeof d->h);
}

void dkv_addDigest(dkv_digest *d, const void *data, size_t n) {
    const unsigned char *bytes = data;
    d->total += n;
    while (n) {
        if (d->have == 0 && n >= 64) { /* whole blocks where they lie */
            add_blocks(d->h, bytes, n / 64);
            bytes += n / 64 * 64;
            n %= 64;
            continue;
        }
        size_t part = n < 64 - d->have ? n : 64 - d->have;
        memcpy(d->rest + d->have, bytes, part);
        bytes += part;
        n -= part;
        d->have += part;
        if (d->have < 64) return;
        add_blocks(d->h, d->rest, 1);
        d->have = 0;
    }
}

void dkv_endDigest(const dkv_digest *d, char hex[65]) {
    unsigned char last[128];
    uint32_t h[8];
    memcpy(h, d->h, sizeof h);
    memcpy(last, d->rest, d->have);
    finish(h, last, d->have, d->total, hex);
}

int dkv_hashFile(const char *path, char hex[65], dkv_err *err) {
    enum { CHUNK = 1 << 16 };
    uint32_t h[8];
    unsigned char *data = malloc(CHUNK + 72);
    uint64_t total = 0;
    memcpy(h, start, sizeof h);
    size_t have = 0;
    ssize_t got = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    while (data && fd >= 0 && ((got = read(fd, data + have, CHUNK - have)) > 0 || (got < 0 && errno == EINTR))) {
        if (got < 0) continue;
        total += (uint64_t)got;
        have += (size_t)got;
        size_t whole = have / 64 * 64;
        add_blocks(h, data, whole / 64);
        memmove(data, data + whole, have -= whole);
    }
    if (fd >= 0) close(fd);
    if (!data || got < 0) {
        free(data);
        return dkv_fail(err, DKV_EUSER, "%s: cannot be read: %s", path, strerror(errno));
    }
    finish(h, data, have, total, hex);
    free(data);
    return 0;
}
