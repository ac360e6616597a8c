#include "dkv_err.h"

#include <stdarg.h>
#include <stdio.h>

int dkv_fail(dkv_err *err, dkv_code code, const char *fmt, ...) {
    if (!err) return code;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->text, sizeof err->text, fmt, ap);
    va_end(ap);
    err->code = code;
    for (char *c = err->text; *c; c++)
        if ((unsigned char)*c < 32 || *c == 127) *c = '?'; /* hostile text stays on one line */
    return code;
}
