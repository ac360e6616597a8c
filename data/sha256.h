/* sha256.h: SHA-256 (FIPS 180-4), so that a record can say which file its inputs came from, as sha256sum does. */
#ifndef DKV_SHA256_H
#define DKV_SHA256_H

#include <stddef.h>
#include <stdint.h>

#include "../ref/dkv_err.h"

/* Of a regular file's bytes, as 64 hexadecimal digits. DKV_EUSER where it cannot be read; a symbolic link is not followed. */
int dkv_hashFile(const char *path, char hex[65], dkv_err *err);
/* Of n bytes in memory. */
void dkv_digestBytes(const void *data, size_t n, char hex[65]);

/* Piece by piece: start, add…, end; a state may be ended and then added to further. */
typedef struct dkv_digest {
    uint32_t h[8];
    unsigned char rest[64];
    size_t have;    /* of rest */
    uint64_t total; /* bytes */
} dkv_digest;
void dkv_startDigest(dkv_digest *d);
void dkv_addDigest(dkv_digest *d, const void *data, size_t n);
void dkv_endDigest(const dkv_digest *d, char hex[65]);

/* Whole blocks of 64 bytes into a state, in plain C; the others use the processor's instructions where it has them. */
void dkv_addBlocksPlain(uint32_t h[8], const unsigned char *b, size_t blocks);
#endif
