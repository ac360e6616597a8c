/* pages.h: large arrays on large pages, where the system has them: a page's first touch costs more than what is done with
 * it, and a 2 MiB page costs little more than one of 4 KiB. */
#ifndef DKV_PAGES_H
#define DKV_PAGES_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_PAGES_LARGE ((size_t)64 << 20) /* bytes from which on it is worth asking */

/* Asks for large pages for what lies wholly in [at, at + bytes). */
void dkv_askLargePages(void *at, size_t bytes);
/* A file's first `bytes`, shared, readable and writable, where large pages fit. MAP_FAILED as mmap; munmap frees it. */
void *dkv_mapFile(int fd, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
