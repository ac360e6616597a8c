/* bisect_proc.h: programs that a bisect runs (git, the build command), each in a process group of its own, its output kept
 * as far as there is room, all that it leaves behind ended with it. */
#ifndef DKV_BISECT_PROC_H
#define DKV_BISECT_PROC_H

#include <stdbool.h>
#include <stddef.h>

#include "../ref/dkv_err.h"

#define DKV_OUTPUT_MAX (1 << 20) /* bytes kept of a program whose output is wanted */
#define DKV_LASTS_MAX  4096      /* of one of which only the end is */

typedef struct dkv_program {
    const char *const *argv;   /* argv[0] is looked for on the PATH */
    const char *dir;           /* where it runs; NULL: here */
    char *const *envp;         /* NULL: this process's */
    const char *input;         /* its stdin; NULL: nothing */
    double timeout;            /* seconds; 0: as long as it takes */
    bool heedless;             /* goes on when the run is to stop */
    bool ends_only;            /* stdout and stderr together, their last DKV_LASTS_MAX bytes; else stdout, and the last of
                                * stderr beside it */
    char *out;                 /* out: owned, a string; what was kept */
    size_t n;                  /* out: its bytes */
    char last[DKV_LASTS_MAX + 1]; /* out: of stderr (ends_only: as out) */
    long long bytes;           /* out: all that it wrote */
    int code;                  /* out: its exit status; 128 + signal where it was killed */
    bool timed_out, stopped;   /* out: why it was killed */
    double seconds;            /* out */
} dkv_program;

/* DKV_EHARNESS where it cannot be started at all; how it ended is in *p. */
int dkv_runProgram(dkv_program *p, dkv_err *err);
void dkv_freeProgram(dkv_program *p);
/* The last line that says something of what it wrote, without control characters. */
void dkv_lastLine(const char *text, char *out, size_t n);
/* The first that speaks of an error, as of a build; the last, where none does. */
void dkv_errorLine(const char *text, char *out, size_t n);

#endif
