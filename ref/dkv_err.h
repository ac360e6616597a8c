/* dkv_err.h: errors as values. A function that can fail returns 0 or a dkv_code and fills *err with one line
 * that points at the word, the file or the row that is wrong. Libraries never print and never exit. */
#ifndef DKV_ERR_H
#define DKV_ERR_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dkv_code {
    DKV_OK = 0,
    DKV_EUSER = 2,    /* bad line, file, option, unknown name: the program's exit 2 */
    DKV_EHARNESS = 3, /* out of memory, a system call failed: exit 3 */
    DKV_EREFUSED = 5  /* well formed but not admissible or not supported; text is the reason */
} dkv_code;

typedef struct dkv_err {
    dkv_code code;
    char text[504]; /* one line, no newline */
} dkv_err;

/* Formats the message (control characters replaced) and returns code. err may be NULL. */
int dkv_fail(dkv_err *err, dkv_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif
#endif
