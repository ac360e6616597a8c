#include "append.h"

#include <stdarg.h>
#include <stdio.h>

size_t dkv_append(char *out, size_t n, size_t at, const char *fmt, ...) {
    va_list ap;
    if (at >= n) return at;
    va_start(ap, fmt);
    const int wrote = vsnprintf(out + at, n - at, fmt, ap);
    va_end(ap);
    return wrote < 0 ? at : at + (size_t)wrote;
}
