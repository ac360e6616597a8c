/* report_text.h: text from outside, as HTML, SVG or Markdown may hold it. */
#ifndef DKV_REPORT_TEXT_H
#define DKV_REPORT_TEXT_H

#include <stdio.h>

/* Writes s so that it is text and nothing else, between tags and in quoted attributes: & < > " ' are escaped; bytes that are
 * no UTF-8, control characters and those that turn the direction of text become U+FFFD. At most `most` bytes of s, then
 * "…"; 0: all. */
void dkv_writeText(FILE *f, const char *s, size_t most);
/* The same for Markdown, on one line: a backslash before what would be markup, no mention of anybody. */
void dkv_markText(FILE *f, const char *s, size_t most);
/* A line of code in Markdown's own indented block, where nothing is markup: the same bytes become U+FFFD, and new lines. */
void dkv_markCode(FILE *f, const char *s);
/* "12 cases", "1 case" */
void dkv_writeCount(FILE *f, long n, const char *one, const char *many);
/* x to three figures; "∞", "–" where it is none. */
void dkv_writeFigure(FILE *f, double x);

#endif
