/* word.h: one `key=value` word of a problem line while it is read, and the buffer that a line is printed
 * into. Internal to problem.c and shape.c. */
#ifndef DKV_WORD_H
#define DKV_WORD_H

#include "problem.h"

/* The word is [begin, end) of line; its value is [value, end). */
typedef struct dkv_word {
    const char *line, *begin, *value, *end;
} dkv_word;

typedef struct dkv_text {
    char *out;
    size_t n, len; /* len may pass n: then the text did not fit */
} dkv_text;

/* "WORD: MESSAGE (at character N)", N counted from 1 in the line; returns DKV_EUSER. */
int dkv_failWord(dkv_err *err, const dkv_word *w, const char *at, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* A decimal number of at most max at *pos, which moves past it. */
int dkv_readCount(const dkv_word *w, const char **pos, int64_t max, int64_t *out, dkv_err *err);

void dkv_putText(dkv_text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* shape=...: reads the whole value into p->nodes, or prints the word. */
int dkv_readShape(const dkv_word *w, dkv_problem *p, dkv_err *err);
int dkv_putShape(const dkv_problem *p, dkv_text *t, dkv_err *err);
#endif
