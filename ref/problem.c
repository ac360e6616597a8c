#include "problem.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "word.h"

/* ---- words ---- */

int dkv_failWord(dkv_err *err, const dkv_word *w, const char *at, const char *fmt, ...) {
    char text[256], shown[128];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    /* A long word is shown around the place in question. */
    const char *from = w->begin, *to = w->end;
    if (to - from > 80) {
        if (at - from > 50) from = at - 50;
        if (to - from > 80) to = from + 80;
    }
    snprintf(shown, sizeof shown, "%s%.*s%s", from > w->begin ? "..." : "", (int)(to - from), from,
             to < w->end ? "..." : "");
    return dkv_fail(err, DKV_EUSER, "%s: %s (at character %d)", shown, text, (int)(at - w->line) + 1);
}

int dkv_readCount(const dkv_word *w, const char **pos, int64_t max, int64_t *out, dkv_err *err) {
    const char *s = *pos;
    if (s < w->end && *s == '-') return dkv_failWord(err, w, s, "a size cannot be negative");
    if (s >= w->end || *s < '0' || *s > '9') {
        if (s > w->value) return dkv_failWord(err, w, s, "a number is missing after '%c'", s[-1]);
        return dkv_failWord(err, w, s, "a number is missing");
    }
    int64_t x = 0;
    for (; s < w->end && *s >= '0' && *s <= '9'; s++)
        if (__builtin_mul_overflow(x, 10, &x) || __builtin_add_overflow(x, *s - '0', &x) || x > max)
            return dkv_failWord(err, w, *pos, "the number is above %" PRId64, max);
    *pos = s;
    *out = x;
    return 0;
}

void dkv_putText(dkv_text *t, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    size_t room = t->len < t->n ? t->n - t->len : 0;
    int wrote = vsnprintf(room ? t->out + t->len : NULL, room, fmt, ap);
    va_end(ap);
    t->len += wrote > 0 ? (size_t)wrote : 0;
}

int dkv_readRange(const dkv_word *w, const char **s, int64_t min, int64_t max, const char *what,
                      int64_t *out, dkv_err *err) {
    const char *at = *s;
    int code = dkv_readCount(w, s, max, out, err);
    if (!code && *out < min) code = dkv_failWord(err, w, at, "%s must be at least %" PRId64, what, min);
    return code;
}

bool dkv_takeChar(const dkv_word *w, const char **s, char c) {
    if (*s >= w->end || **s != c) return false;
    (*s)++;
    return true;
}

int dkv_atEnd(const dkv_word *w, const char *s, dkv_err *err) {
    return s == w->end ? 0 : dkv_failWord(err, w, s, "'%c' is not expected here", *s);
}

/* A finite decimal number up to `end`: no hexadecimal, no inf, no nan. Copied, so that strtod stops at the
 * end. */
int dkv_readReal(const dkv_word *w, const char **s, bool single, double *out, dkv_err *err) {
    char text[64];
    size_t n = 0;
    while (*s + n < w->end && strchr("0123456789+-.eE", (*s)[n]) && n < sizeof text - 1) n++;
    memcpy(text, *s, n);
    text[n] = 0;
    char *stop = text;
    double x = n ? single ? strtof(text, &stop) : strtod(text, &stop) : 0;
    if (stop == text || stop != text + n) return dkv_failWord(err, w, *s, "a decimal number is expected");
    if (!isfinite(x)) return dkv_failWord(err, w, *s, "the number is too large");
    *s += n;
    *out = x;
    return 0;
}

int dkv_readSeed(const dkv_word *w, const char **s, uint64_t *out, dkv_err *err) {
    const char *at = *s;
    uint64_t x = 0;
    for (; *s < w->end && **s >= '0' && **s <= '9'; (*s)++)
        if (__builtin_mul_overflow(x, (uint64_t)10, &x) ||
            __builtin_add_overflow(x, (uint64_t)(**s - '0'), &x))
            return dkv_failWord(err, w, at, "the seed is above 2^64 - 1");
    if (*s == at) return dkv_failWord(err, w, at, "a seed is a number from 0 to 2^64 - 1");
    *out = x;
    return 0;
}

/* Shortest text that reads back as x: 17 digits always do for a double, 9 for a float. */
void dkv_putReal(dkv_text *t, double x, bool single) {
    char text[48];
    if (x == floor(x) && fabs(x) < 1e6) {
        dkv_putText(t, "%.0f", x == 0 ? 0.0 : x);
        return;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (single ? strtof(text, NULL) == (float)x : strtod(text, NULL) == x) break;
    }
    char *e = strchr(text, 'e');
    if (!e) {
        dkv_putText(t, "%s", text);
        return;
    }
    *e++ = 0;
    dkv_putText(t, "%se%ld", text, strtol(e, NULL, 10)); /* 1e+05 is 1e5 */
}

static int distance(const char *a, size_t n, const char *b) {
    size_t m = strlen(b), row[32];
    if (n >= 31 || m >= 31) return 99;
    for (size_t j = 0; j <= m; j++) row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t corner = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t best = corner + (a[i - 1] != b[j - 1]);
            corner = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return (int)row[m];
}

/* ---- choices ---- */

static const char *const dtype_names[] = {"bf16", "fp16", "fp32", NULL};
static const char *const onoff_names[] = {"off", "on", NULL};
static const char *const layout_names[] = {"contiguous", "fused", "padded", "strided", NULL};
static const char *const run_names[] = {"single", "twice", "aba", "side", "graph", "busy", NULL};

/* Which of `names` is the text [s, e)? Otherwise the message suggests the nearest. */
int dkv_readChoice(const dkv_word *w, const char *s, const char *e, const char *what,
                       const char *const *names, int *out, dkv_err *err) {
    int nearest = 0, least = 100;
    for (int i = 0; names[i]; i++) {
        if (strlen(names[i]) == (size_t)(e - s) && !memcmp(s, names[i], (size_t)(e - s))) {
            *out = i;
            return 0;
        }
        int d = distance(s, (size_t)(e - s), names[i]);
        if (d < least) {
            least = d;
            nearest = i;
        }
    }
    char list[200] = "";
    size_t len = 0;
    for (int i = 0; names[i] && len < sizeof list; i++)
        len += (size_t)snprintf(list + len, sizeof list - len, "%s%s", i ? ", " : "", names[i]);
    if (least <= 2)
        return dkv_failWord(err, w, s, "unknown %s '%.*s', did you mean '%s'?", what,
                            (int)(e - s > 40 ? 40 : e - s), s, names[nearest]);
    return dkv_failWord(err, w, s, "unknown %s '%.*s', not one of %s", what, (int)(e - s > 40 ? 40 : e - s),
                        s, list);
}

static int read_switch(const dkv_word *w, bool *out, dkv_err *err) {
    int on = 0, code = dkv_readChoice(w, w->value, w->end, "value", onoff_names, &on, err);
    *out = on == 1;
    return code;
}

/* ---- keys ---- */

static int parse_shape(const dkv_word *w, dkv_problem *p, dkv_err *err) { return dkv_readShape(w, p, err); }

static int parse_heads(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    const char *s = w->value;
    int64_t hq, hkv;
    int code = dkv_readRange(w, &s, 1, DKV_HEADS_MAX, "Hq", &hq, err);
    if (code) return code;
    if (!dkv_takeChar(w, &s, ':')) return dkv_failWord(err, w, s, "heads are Hq:Hkv, ':' is missing");
    const char *at = s;
    if ((code = dkv_readRange(w, &s, 1, DKV_HEADS_MAX, "Hkv", &hkv, err))) return code;
    if (hq % hkv) return dkv_failWord(err, w, at, "Hkv = %d does not divide Hq = %d", (int)hkv, (int)hq);
    p->hq = (int32_t)hq;
    p->hkv = (int32_t)hkv;
    return dkv_atEnd(w, s, err);
}

static void print_heads(const dkv_problem *p, dkv_text *t) {
    if (p->hq != 1 || p->hkv != 1) dkv_putText(t, " heads=%" PRId32 ":%" PRId32, p->hq, p->hkv);
}

static int parse_dim(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    const char *s = w->value;
    int64_t dqk, dv;
    int code = dkv_readRange(w, &s, 1, DKV_DIM_MAX, "a head dimension", &dqk, err);
    dv = dqk;
    if (!code && dkv_takeChar(w, &s, ':')) code = dkv_readRange(w, &s, 1, DKV_DIM_MAX, "a head dimension", &dv, err);
    if (code) return code;
    p->dqk = (int32_t)dqk;
    p->dv = (int32_t)dv;
    return dkv_atEnd(w, s, err);
}

static void print_dim(const dkv_problem *p, dkv_text *t) {
    if (p->dqk == 64 && p->dv == 64) return;
    dkv_putText(t, " dim=%" PRId32, p->dqk);
    if (p->dv != p->dqk) dkv_putText(t, ":%" PRId32, p->dv);
}

static int parse_dtype(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    int i = 0, code = dkv_readChoice(w, w->value, w->end, "dtype", dtype_names, &i, err);
    p->dtype = (dualkv_dtype)i;
    return code;
}

static void print_dtype(const dkv_problem *p, dkv_text *t) {
    if (p->dtype != DUALKV_BF16) dkv_putText(t, " dtype=%s", dtype_names[p->dtype]);
}

/* A float within [low, high], or (off not NULL) the word "off". */
static int read_float(const dkv_word *w, double low, double high, bool *off, float *out, dkv_err *err) {
    const char *s = w->value;
    if (off) {
        *off = w->end - s == 3 && !memcmp(s, "off", 3);
        if (*off) return 0;
    }
    double x;
    int code = dkv_readReal(w, &s, true, &x, err);
    if (!code) code = dkv_atEnd(w, s, err);
    if (!code && !(x >= (float)low && x <= (float)high))
        code = dkv_failWord(err, w, w->value, "must be from %g to %g%s", low, high, off ? ", or off" : "");
    *out = (float)x;
    return code;
}

static int parse_scale(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    p->scale_given = true;
    return read_float(w, 1e-6, 1e6, NULL, &p->scale, err);
}

static void print_scale(const dkv_problem *p, dkv_text *t) {
    if (!p->scale_given) return;
    dkv_putText(t, " scale=");
    dkv_putReal(t, p->scale, true);
}

static int parse_softcap(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    bool off;
    return read_float(w, 1e-6, 1e6, &off, &p->softcap, err);
}

static void print_softcap(const dkv_problem *p, dkv_text *t) {
    if (!(p->softcap > 0)) return;
    dkv_putText(t, " softcap=");
    dkv_putReal(t, p->softcap, true);
}

static int parse_alibi(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    return read_switch(w, &p->alibi, err);
}

static void print_alibi(const dkv_problem *p, dkv_text *t) {
    if (p->alibi) dkv_putText(t, " alibi=on");
}

static int parse_sinklogit(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    bool off;
    int code = read_float(w, -1e4, 1e4, &off, &p->sinklogit, err);
    p->sink = !off;
    return code;
}

static void print_sinklogit(const dkv_problem *p, dkv_text *t) {
    if (!p->sink) return;
    dkv_putText(t, " sinklogit=");
    dkv_putReal(t, p->sinklogit, true);
}

static int parse_fill(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    size_t n = (size_t)(w->end - w->value);
    if (!n) return dkv_failWord(err, w, w->end, "a fill's name is missing");
    if (n >= sizeof p->fill) return dkv_failWord(err, w, w->value, "a fill's name has at most 63 characters");
    for (const char *s = w->value; s < w->end; s++)
        if (!strchr("abcdefghijklmnopqrstuvwxyz0123456789:_.-", *s))
            return dkv_failWord(err, w, s, "'%c' is not expected in a fill's name", *s);
    memcpy(p->fill, w->value, n);
    p->fill[n] = 0;
    return 0;
}

static void print_fill(const dkv_problem *p, dkv_text *t) {
    if (strcmp(p->fill, "normal")) dkv_putText(t, " fill=%s", p->fill);
}

static int parse_seed(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    const char *s = w->value;
    int code = dkv_readSeed(w, &s, &p->seed, err);
    return code ? code : dkv_atEnd(w, s, err);
}

static void print_seed(const dkv_problem *p, dkv_text *t) {
    if (p->seed != 1) dkv_putText(t, " seed=%" PRIu64, p->seed);
}

static int parse_grad(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    return read_switch(w, &p->grad, err);
}

static void print_grad(const dkv_problem *p, dkv_text *t) {
    if (!p->grad) dkv_putText(t, " grad=off");
}

static int parse_dlse(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    return read_switch(w, &p->dlse, err);
}

static void print_dlse(const dkv_problem *p, dkv_text *t) {
    if (p->dlse) dkv_putText(t, " dlse=on");
}

static int parse_layout(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    int i = 0, code = dkv_readChoice(w, w->value, w->end, "layout", layout_names, &i, err);
    p->layout = (dkv_layout_kind)i;
    return code;
}

static void print_layout(const dkv_problem *p, dkv_text *t) {
    if (p->layout != DKV_CONTIGUOUS) dkv_putText(t, " layout=%s", layout_names[p->layout]);
}

static int parse_run(const dkv_word *w, dkv_problem *p, dkv_err *err) {
    int i = 0, code = dkv_readChoice(w, w->value, w->end, "run", run_names, &i, err);
    p->run = (dkv_run_kind)i;
    return code;
}

static void print_run(const dkv_problem *p, dkv_text *t) {
    if (p->run != DKV_SINGLE) dkv_putText(t, " run=%s", run_names[p->run]);
}

typedef struct key_row {
    const char *name, *help;
    int (*parse)(const dkv_word *w, dkv_problem *p, dkv_err *err);
    void (*print)(const dkv_problem *p, dkv_text *t); /* nothing where it is the default */
} key_row;

/* The shape is printed first, by dkv_putShape: it alone can fail. */
enum {
    SHAPE,
    HEADS,
    DIM,
    DTYPE,
    MASK,
    SCALE,
    SOFTCAP,
    ALIBI,
    SINKLOGIT,
    FILL,
    SEED,
    GRAD,
    DLSE,
    LAYOUT,
    RUN,
    N_KEYS
};
static const key_row keys[N_KEYS] = {
    [SHAPE] = {"shape", "groups P+CHILDREN joined by '/': 200+77,2x9/4096k+16@100 (no default)", parse_shape,
               NULL},
    [HEADS] = {"heads", "Hq:Hkv, Hkv divides Hq (1:1)", parse_heads, print_heads},
    [DIM] = {"dim", "Dqk or Dqk:Dv, 1..256 (64)", parse_dim, print_dim},
    [DTYPE] = {"dtype", "bf16, fp16, fp32 (bf16)", parse_dtype, print_dtype},
    [MASK] = {"mask", "which keys a row sees, see `list masks` (causal)", dkv_readMask, dkv_putMask},
    [SCALE] = {"scale", "factor of the scores (1/sqrt(Dqk))", parse_scale, print_scale},
    [SOFTCAP] = {"softcap", "c: scores become c tanh(score/c) (off)", parse_softcap, print_softcap},
    [ALIBI] = {"alibi", "on: scores fall with distance, usual geometric slopes (off)", parse_alibi,
               print_alibi},
    [SINKLOGIT] = {"sinklogit", "one more logit in the softmax, its value 0 (off)", parse_sinklogit,
                   print_sinklogit},
    [FILL] = {"fill", "what the inputs are, see `list fills` (normal)", parse_fill, print_fill},
    [SEED] = {"seed", "of the inputs, 0..2^64-1 (1)", parse_seed, print_seed},
    [GRAD] = {"grad", "off: forward only (on)", parse_grad, print_grad},
    [DLSE] = {"dlse", "on: a gradient comes in through LSE as well (off)", parse_dlse, print_dlse},
    [LAYOUT] = {"layout", "contiguous, fused, padded, strided (contiguous)", parse_layout, print_layout},
    [RUN] = {"run", "single, twice, aba, side, graph, busy (single)", parse_run, print_run},
};

/* ---- the line ---- */

static float default_scale(int32_t dqk) { return (float)(1.0 / sqrt((double)dqk)); }

/* What takes more than one word to decide; words[k].begin is NULL where key k is not on the line. */
static int finish(const dkv_word words[N_KEYS], dkv_fill_known known_fill, dkv_problem *p, dkv_err *err) {
    if (!p->nodes) return dkv_fail(err, DKV_EUSER, "shape=... is missing (as in shape=200+2x50)");
    if (known_fill && !known_fill(p->fill))
        return dkv_failWord(err, &words[FILL], words[FILL].value, "unknown fill '%s', see `dualkv list fills`", p->fill);
    if (p->dlse && !p->grad)
        return dkv_failWord(err, &words[DLSE], words[DLSE].value, "a gradient through LSE needs grad=on");
    if (p->layout == DKV_FUSED && dkv_countQueries(p) != dkv_countKeys(p))
        return dkv_failWord(
            err, &words[LAYOUT], words[LAYOUT].value,
            "one buffer cannot hold Q, K and V rows of a key-only prompt, which has no Q rows");
    if (!p->scale_given) p->scale = default_scale(p->dqk);
    if (p->scale == default_scale(p->dqk)) p->scale_given = false;
    return 0;
}

/* Reads one word [begin, end) of the line. */
static int read_word(const char *line, const char *begin, const char *end, dkv_word words[N_KEYS],
                     dkv_problem *p, dkv_err *err) {
    const char *names[N_KEYS + 1] = {NULL};
    for (int i = 0; i < N_KEYS; i++) names[i] = keys[i].name;
    dkv_word w = {line, begin, end, end};
    const char *eq = memchr(begin, '=', (size_t)(end - begin));
    if (!eq) return dkv_failWord(err, &w, begin, "not of the form key=value");
    w.value = eq + 1;
    int k = 0, code = dkv_readChoice(&w, begin, eq, "key", names, &k, err);
    if (code) return code;
    if (words[k].begin) return dkv_failWord(err, &w, begin, "%s= is given twice", keys[k].name);
    words[k] = w;
    return keys[k].parse(&w, p, err);
}

int dkv_parseProblem(const char *line, dkv_fill_known known_fill, dkv_problem *p, dkv_err *err) {
    dkv_word words[N_KEYS] = {0};
    *p = (dkv_problem){.hq = 1, .hkv = 1, .dqk = 64, .dv = 64, .seed = 1, .grad = true, .fill = "normal"};
    size_t n = strnlen(line, DKV_LINE_MAX);
    int code = 0;
    if (n == DKV_LINE_MAX)
        code = dkv_fail(err, DKV_EUSER, "the line is longer than %d characters", DKV_LINE_MAX - 1);
    for (size_t i = 0; i < n && !code; i++)
        if ((line[i] < 32 && !strchr("\t\r\n", line[i])) || line[i] > 126)
            code = dkv_fail(err, DKV_EUSER, "the line is not plain text (at character %zu)", i + 1);
    for (const char *s = line, *e; !code && *(s += strspn(s, " \t\r\n")); s = e) {
        e = s + strcspn(s, " \t\r\n");
        code = read_word(line, s, e, words, p, err);
    }
    if (!code) code = finish(words, known_fill, p, err);
    if (code) dkv_freeProblem(p);
    return code;
}

int dkv_printProblem(const dkv_problem *p, char *out, size_t n, dkv_err *err) {
    dkv_text t = {out, n, 0};
    if (n) out[0] = 0;
    int code = dkv_putShape(p, &t, err);
    if (code) return code;
    for (int i = 0; i < N_KEYS; i++)
        if (keys[i].print) keys[i].print(p, &t);
    if (t.len >= n)
        return dkv_fail(err, DKV_EUSER, "the canonical line has %zu characters, %zu fit", t.len, n - !!n);
    return 0;
}

int dkv_copyProblem(const dkv_problem *p, dkv_problem *out, dkv_err *err) {
    dkv_node *nodes = malloc(((size_t)p->n_nodes + 1) * sizeof *nodes);
    if (!nodes) {
        *out = (dkv_problem){0};
        return dkv_fail(err, DKV_EHARNESS, "out of memory");
    }
    if (p->n_nodes) memcpy(nodes, p->nodes, (size_t)p->n_nodes * sizeof *nodes);
    *out = *p;
    out->nodes = nodes;
    return 0;
}

void dkv_freeProblem(dkv_problem *p) {
    if (!p) return;
    free(p->nodes);
    *p = (dkv_problem){0};
}

int64_t dkv_countQueries(const dkv_problem *p) {
    int64_t n = 0;
    for (int32_t i = 0; i < p->n_nodes; i++) n += p->nodes[i].key_only ? 0 : p->nodes[i].len;
    return n;
}

double dkv_countReplicated(const dkv_problem *p) {
    double n = 0;
    for (int32_t i = 0; i < p->n_nodes; i++)
        if (!p->nodes[i].key_only && p->nodes[i].len) n += (double)(p->nodes[i].context + p->nodes[i].len);
    return n;
}

int64_t dkv_countKeys(const dkv_problem *p) {
    int64_t n = 0;
    for (int32_t i = 0; i < p->n_nodes; i++) n += p->nodes[i].len;
    return n;
}

const char *dkv_dtypeName(dualkv_dtype t) { return t >= 0 && t <= DUALKV_FP32 ? dtype_names[t] : "?"; }

const char *dkv_listKey(int i, const char **help) {
    if (i < 0 || i >= N_KEYS) return NULL;
    *help = keys[i].help;
    return keys[i].name;
}
