/* waiver.h: known failures that are put up with for a while. One a line, fields parted by `|`:
 *
 *     PROBLEM LINE | KERNEL SPEC | REASON | YYYY-MM-DD
 *
 * A waiver excuses a defect of that kernel on that line (both exact; the line in canonical form) up to and on
 * the day given. After it, the waiver itself is a failure, whatever the kernel does. `#` starts a comment
 * line. */
#ifndef DKV_WAIVER_H
#define DKV_WAIVER_H

#include <stdbool.h>

#include "../ref/dkv_err.h"

typedef struct dkv_waiver {
    char *line, *kernel, *reason; /* owned */
    char until[11];
    int number; /* of the file's line */
} dkv_waiver;

typedef struct dkv_waivers {
    dkv_waiver *list;
    int n;
    char today[11]; /* UTC */
} dkv_waivers;

/* DKV_EUSER: a line that is not a waiver (field missing, line not canonical, no such kernel, no such day,
 * twice the same), a file that is not there. NULL: waivers.txt of the data, where there is one. */
int dkv_loadWaivers(const char *path, dkv_waivers *out, dkv_err *err);
void dkv_freeWaivers(dkv_waivers *w);

/* The waiver of a line and a kernel, or NULL. */
const dkv_waiver *dkv_findWaiver(const dkv_waivers *w, const char *line, const char *kernel);
bool dkv_isExpired(const dkv_waivers *w, const dkv_waiver *one);

#endif
