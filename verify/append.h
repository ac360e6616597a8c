/* append.h: a text put together piece by piece in room of a fixed size. */
#ifndef DKV_APPEND_H
#define DKV_APPEND_H

#include <stddef.h>

/* Writes at out[at]; returns where the next piece goes. n or more: no room is left, the text is cut, and nothing is added. */
size_t dkv_append(char *out, size_t n, size_t at, const char *fmt, ...) __attribute__((format(printf, 4, 5)));

#endif
