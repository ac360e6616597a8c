#include "pages.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define LARGE ((size_t)2 << 20)

void dkv_askLargePages(void *at, size_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)at + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)at + bytes) / page * page;
    if (bytes >= DKV_PAGES_LARGE) madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)at;
    (void)bytes;
#endif
}

void *dkv_mapFile(int fd, size_t bytes) {
    if (bytes < DKV_PAGES_LARGE) return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    /* A place whose address has the file's phase: room for that, what is too much of it given back. */
    uint8_t *room = mmap(NULL, bytes + LARGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return MAP_FAILED;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    const size_t before = (LARGE - (uintptr_t)room % LARGE) % LARGE, after = LARGE - before;
    uint8_t *at = mmap(room + before, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (at == MAP_FAILED) {
        munmap(room, bytes + LARGE);
        return MAP_FAILED;
    }
    if (before) munmap(room, before);
    if (after) munmap(room + before + whole, after);
    dkv_askLargePages(at, bytes);
    return at;
}
