/* word.h: one `key=value` word of a problem line while it is read, and the buffer that a line is printed
 * into. Internal to problem.c, shape.c and mask_table.c (its numbers are those of replay lines, too). */
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

int dkv_readRange(const dkv_word *w, const char **s, int64_t min, int64_t max, const char *what, int64_t *out, dkv_err *err);
int dkv_readSeed(const dkv_word *w, const char **s, uint64_t *out, dkv_err *err);
int dkv_readReal(const dkv_word *w, const char **s, bool single, double *out, dkv_err *err);
bool dkv_takeChar(const dkv_word *w, const char **s, char c);
int dkv_atEnd(const dkv_word *w, const char *s, dkv_err *err); /* an error where something is left */
/* Which of `names` (NULL after the last) is the text [s, e)? */
int dkv_readChoice(const dkv_word *w, const char *s, const char *e, const char *what, const char *const *names, int *out,
                   dkv_err *err);

void dkv_putReal(dkv_text *t, double x, bool single);
void dkv_putText(dkv_text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* shape=...: reads the whole value into p->nodes, or prints the word. */
int dkv_readShape(const dkv_word *w, dkv_problem *p, dkv_err *err);
int dkv_putShape(const dkv_problem *p, dkv_text *t, dkv_err *err);
/* mask=...: the word's value into p, or the word. */
int dkv_readMask(const dkv_word *w, dkv_problem *p, dkv_err *err);
void dkv_putMask(const dkv_problem *p, dkv_text *t);
#endif
