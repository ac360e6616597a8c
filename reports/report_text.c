#include "report_text.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

/* Length of the UTF-8 character at s (Unicode, table 3-7), 0 where there is none; *code its number. */
static int readCharacter(const unsigned char *s, unsigned *code) {
    int n = s[0] < 0x80 ? 1 : s[0] >= 0xc2 && s[0] <= 0xdf ? 2 : (s[0] & 0xf0) == 0xe0 ? 3 : s[0] >= 0xf0 && s[0] <= 0xf4 ? 4 : 0;
    *code = n == 1 ? s[0] : s[0] & (0xffu >> (n + 1));
    for (int i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
        *code = *code << 6 | (s[i] & 0x3f);
    }
    if ((n == 3 && *code < 0x800) || (n == 4 && (*code < 0x10000 || *code > 0x10ffff))) return 0;
    return *code >= 0xd800 && *code <= 0xdfff ? 0 : n;
}

static int isHidden(unsigned c) {
    return (c < 0x20 && c != '\t' && c != '\n') || (c >= 0x7f && c < 0xa0) || (c >= 0x200b && c <= 0x200f) ||
           (c >= 0x2028 && c <= 0x202e) || (c >= 0x2060 && c <= 0x2069) || c == 0xfeff || (c & 0xfffe) == 0xfffe;
}

/* One character of n bytes; markdown: or of HTML. */
static void writeCharacter(FILE *f, const unsigned char *s, int n, unsigned code, bool markdown) {
    if (n == 0 || isHidden(code)) fputs("\xef\xbf\xbd", f);
    else if (code == '&') fputs("&amp;", f);
    else if (code == '<') fputs("&lt;", f);
    else if (code == '>') fputs("&gt;", f);
    else if (markdown && code == '@') fputs("&#64;", f);
    else if (markdown && (code == '\n' || code == '\t')) fputc(' ', f);
    else if (markdown && code < 0x80 && strchr("`*_[]|\\~#!$", (int)code)) fprintf(f, "\\%c", (int)code);
    else if (!markdown && code == '"') fputs("&quot;", f);
    else if (!markdown && code == '\'') fputs("&#39;", f);
    else fwrite(s, 1, (size_t)n, f);
}

static void writeEscaped(FILE *f, const char *text, size_t most, bool markdown) {
    const unsigned char *s = (const unsigned char *)text;
    for (unsigned code; *s;) {
        if (most && (size_t)(s - (const unsigned char *)text) >= most) {
            fputs("…", f);
            return;
        }
        int n = readCharacter(s, &code);
        writeCharacter(f, s, n, code, markdown);
        s += n ? n : 1;
    }
}

void dkv_writeText(FILE *f, const char *s, size_t most) { writeEscaped(f, s, most, false); }
void dkv_markText(FILE *f, const char *s, size_t most) { writeEscaped(f, s, most, true); }

void dkv_markCode(FILE *f, const char *text) {
    fputs("\n      ", f);
    for (const unsigned char *s = (const unsigned char *)text; *s;) {
        unsigned code;
        const int n = readCharacter(s, &code);
        if (n == 0 || isHidden(code) || code == '\n' || code == '\t') fputs("\xef\xbf\xbd", f);
        else fwrite(s, 1, (size_t)n, f);
        s += n ? n : 1;
    }
    fputs("\n", f);
}

void dkv_writeCount(FILE *f, long n, const char *one, const char *many) { fprintf(f, "%ld %s", n, n == 1 ? one : many); }

void dkv_writeFigure(FILE *f, double x) {
    if (isnan(x)) fputs("–", f);
    else if (isinf(x)) fputs(x > 0 ? "∞" : "−∞", f);
    else fprintf(f, "%.3g", x);
}
