#include "dualkv.h"

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/dtype.h"
#include "../ref/mask.h"
#include "../ref/sequence.h"
#include "../ref/view.h"
#include "case.h"
#include "version.h"

struct dualkv_case {
    char line[DKV_LINE_MAX + 1];
    dkv_problem p;
    dkv_layout packed;
    pthread_mutex_t lock; /* of what follows, made when first asked for */
    bool replicated;
    dkv_layout rep;
    int64_t *q_source, *k_source;
    uint8_t *q_own;
};

struct dualkv_lines {
    dkv_suite suite;
};

/* ---- errors ---- */

/* Our error as theirs; the position is what a message about a word ends with. */
static int hand(const dkv_err *from, dualkv_error *to) {
    static const char mark[] = "(at character ";
    if (!to) return from->code;
    memset(to, 0, sizeof *to);
    to->code = from->code;
    snprintf(to->text, sizeof to->text, "%s", from->text);
    for (const char *at = strstr(to->text, mark); at; at = strstr(at + 1, mark))
        to->position = (int32_t)strtol(at + sizeof mark - 1, NULL, 10);
    return from->code;
}

static int complain(dualkv_error *to, dkv_code code, const char *text) {
    dkv_err err;
    dkv_fail(&err, code, "%s", text);
    return hand(&err, to);
}

static int succeed(dualkv_error *to) {
    if (to) memset(to, 0, sizeof *to);
    return DUALKV_OK;
}

/* ---- what this is ---- */

uint32_t dualkv_api(void) { return DUALKV_API; }
const char *dualkv_version(void) { return dkv_version(); }
const char *dualkv_commit(void) { return dkv_commit(); }
const char *dualkv_generator(void) { return DKV_GENERATOR; }
const char *dualkv_data_dir(void) { return dkv_dataDir(); }

/* ---- problem lines ---- */

int dualkv_canonical(const char *line, char *out, size_t n, dualkv_error *err) {
    dkv_problem p;
    dkv_err why = {0};
    if (!line || !out) return complain(err, DKV_EUSER, "dualkv_canonical: a NULL argument");
    int code = dkv_parseProblem(line, dkv_knownFill, &p, &why);
    if (!code) code = dkv_printProblem(&p, out, n, &why);
    dkv_freeProblem(&p);
    return code ? hand(&why, err) : succeed(err);
}

int dualkv_open(const char *line, dualkv_case **out, dualkv_error *err) {
    dkv_err why = {0};
    if (!line || !out) return complain(err, DKV_EUSER, "dualkv_open: a NULL argument");
    *out = NULL;
    dualkv_case *c = calloc(1, sizeof *c);
    if (!c) return complain(err, DKV_EHARNESS, "out of memory");
    pthread_mutex_init(&c->lock, NULL);
    int code = dkv_parseProblem(line, dkv_knownFill, &c->p, &why);
    if (!code) code = dkv_printProblem(&c->p, c->line, sizeof c->line, &why);
    if (!code) code = dkv_maskAdmissible(&c->p, &why);
    if (!code) code = dkv_makeLayout(&c->p, &c->packed, &why);
    if (code) {
        dualkv_close(c);
        return hand(&why, err);
    }
    *out = c;
    return succeed(err);
}

void dualkv_close(dualkv_case *c) {
    if (!c) return;
    free(c->q_source);
    free(c->k_source);
    free(c->q_own);
    dkv_freeLayout(&c->rep);
    dkv_freeLayout(&c->packed);
    dkv_freeProblem(&c->p);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

const char *dualkv_line(const dualkv_case *c) { return c->line; }

/* ---- layouts ---- */

/* Maps that fit nowhere are refused before they are allocated: memory is overcommitted. */
static int makeReplicated(dualkv_case *c, dkv_err *err) {
    const double rows = dkv_countReplicated(&c->p);
    if (rows * (2 * sizeof(int64_t) + 1) > dkv_availableMemory())
        return dkv_fail(err, DKV_EUSER, "the replicated layout has %.3g rows: too many for this machine", rows);
    int code = dkv_makeReplicated(&c->p, &c->packed, &c->rep, &c->q_source, &c->k_source, &c->q_own, err);
    c->replicated = code == 0;
    return code;
}

/* The layout, NULL with an error. */
static const dkv_layout *layoutOf(const dualkv_case *handle, int layout, dkv_err *err) {
    dualkv_case *c = (dualkv_case *)handle; /* what is made when first asked for does not change the case */
    int code = 0;
    if (layout == DUALKV_PACKED) return &c->packed;
    if (layout != DUALKV_REPLICATED) {
        dkv_fail(err, DKV_EUSER, "layout %d: neither packed nor replicated", layout);
        return NULL;
    }
    pthread_mutex_lock(&c->lock);
    if (!c->replicated) code = makeReplicated(c, err);
    pthread_mutex_unlock(&c->lock);
    return code ? NULL : &c->rep;
}

const dualkv_problem *dualkv_view(const dualkv_case *c, int layout) {
    dkv_err why;
    const dkv_layout *l = layoutOf(c, layout, &why);
    return l ? &l->view : NULL;
}

int64_t dualkv_sequences(const dualkv_case *c) {
    int64_t n = 0;
    for (int32_t i = 0; i < c->p.n_nodes; i++) n += c->p.nodes[i].len > 0 && !c->p.nodes[i].key_only;
    return n;
}

int dualkv_cu_seqlens(const dualkv_case *c, int64_t *cu_q, int64_t *cu_k, dualkv_error *err) {
    dkv_err why = {0};
    const dkv_layout *l = layoutOf(c, DUALKV_REPLICATED, &why);
    if (!l) return hand(&why, err);
    for (int32_t i = 0, seen = -1; i < l->view.n_segments; i++) {
        const dualkv_segment *s = &l->segments[i];
        if (s->group == seen) continue;
        seen = s->group;
        if (cu_q) cu_q[seen] = s->q_start;
        if (cu_k) cu_k[seen] = s->k_start;
    }
    if (cu_q) cu_q[l->view.n_groups] = l->view.tq;
    if (cu_k) cu_k[l->view.n_groups] = l->view.tk;
    return succeed(err);
}

int dualkv_expansion(const dualkv_case *c, int64_t *q_rows, int64_t *k_rows, uint8_t *own, dualkv_error *err) {
    dkv_err why = {0};
    const dkv_layout *l = layoutOf(c, DUALKV_REPLICATED, &why);
    if (!l) return hand(&why, err);
    if (q_rows) memcpy(q_rows, c->q_source, (size_t)l->view.tq * sizeof *q_rows);
    if (k_rows) memcpy(k_rows, c->k_source, (size_t)l->view.tk * sizeof *k_rows);
    if (own) memcpy(own, c->q_own, (size_t)l->view.tq);
    return succeed(err);
}

int dualkv_positions(const dualkv_case *c, int layout, int64_t *q, int64_t *k, dualkv_error *err) {
    dkv_err why = {0};
    const dkv_layout *l = layoutOf(c, layout, &why);
    if (!l) return hand(&why, err);
    for (int32_t i = 0; i < l->view.n_segments; i++) {
        const dualkv_segment *s = &l->segments[i];
        for (int64_t t = 0; q && t < s->q_len; t++) q[s->q_start + t] = s->context + t;
        for (int64_t t = 0; k && t < s->k_len; t++) k[s->k_start + t] = s->context + t;
    }
    return succeed(err);
}

int dualkv_mask(const dualkv_case *c, int64_t first, int64_t rows, uint8_t *out, dualkv_error *err) {
    dkv_err why = {0};
    dkv_starts starts = {0};
    if (!c || !out) return complain(err, DKV_EUSER, "dualkv_mask: a NULL argument");
    const int64_t tk = c->packed.view.tk;
    if (first < 0 || rows < 0 || first > c->packed.view.tq || rows > c->packed.view.tq - first)
        return complain(err, DKV_EUSER, "dualkv_mask: no such rows");
    int64_t *sequence = malloc((size_t)(c->packed.view.max_k_len + 1) * sizeof *sequence);
    int code = sequence ? dkv_makeStarts(&c->p, &starts, &why) : dkv_fail(&why, DKV_EHARNESS, "out of memory");
    if (!code) memset(out, 0, (size_t)rows * (size_t)tk);
    for (int32_t n = 0; n < c->p.n_nodes && !code; n++) {
        const dkv_node *node = &c->p.nodes[n];
        int64_t begin = first - starts.q[n], end = begin + rows; /* own rows that are asked for */
        if (begin < 0) begin = 0;
        if (end > node->len) end = node->len;
        if (node->key_only || begin >= end) continue;
        dkv_fillSequence(&c->p, &starts, n, sequence);
        for (int64_t r = begin; r < end; r++)
            for (int64_t j = 0; j < node->context + node->len; j++)
                if (dkv_maskSees(&c->p, n, r, j)) out[(starts.q[n] + r - first) * tk + sequence[j]] = 1;
    }
    dkv_freeStarts(&starts);
    free(sequence);
    return code ? hand(&why, err) : succeed(err);
}

const char *dualkv_mask_name(int mask) {
    const dkv_mask_row *row = dkv_maskRow(mask);
    return row ? row->name : NULL;
}

int dualkv_visible(const dualkv_problem *p, const dualkv_segment *s, uint8_t *out, dualkv_error *err) {
    dkv_err why = {0};
    dkv_problem one = {0};
    if (!p || !s || !out) return complain(err, DKV_EUSER, "dualkv_visible: a NULL argument");
    if (!dkv_maskRow(p->mask)) return complain(err, DKV_EUSER, "dualkv_visible: no such mask");
    dualkv_problem v = *p;
    v.n_segments = 1;
    v.segments = s;
    int code = dkv_problemOfView(&v, &one, &why);
    if (code) return hand(&why, err);
    const int64_t keys = s->context + s->k_len;
    for (int64_t r = 0; r < s->q_len; r++)
        for (int64_t j = 0; j < keys; j++) out[r * keys + j] = dkv_maskSees(&one, 0, r, j);
    dkv_freeProblem(&one);
    return succeed(err);
}

/* ---- tensors ---- */

int dualkv_shape(const dualkv_case *c, int layout, int input, int64_t shape[3]) {
    dkv_err why;
    const dkv_layout *l = layoutOf(c, layout, &why);
    if (!l) return 0;
    const dualkv_problem *v = &l->view;
    const int64_t shapes[DUALKV_N_INPUTS][3] = {
        {v->tq, v->hq, v->dqk}, {v->tk, v->hkv, v->dqk}, {v->tk, v->hkv, v->dv},
        {v->tq, v->hq, v->dv},  {v->hq, v->tq, 1},       {v->hq, 1, 1},
    };
    const int ranks[DUALKV_N_INPUTS] = {3, 3, 3, v->grad ? 3 : 0, v->grad && v->dlse ? 2 : 0, v->sink ? 1 : 0};
    if (input < 0 || input >= DUALKV_N_INPUTS) return 0;
    memcpy(shape, shapes[input], sizeof shapes[input]);
    return ranks[input];
}

/* Bytes of one element as kernels get it. */
static size_t sizeOf(const dualkv_case *c, int input) {
    return input == DUALKV_DLSE || input == DUALKV_SINK ? 4 : dkv_dtypeSize(c->p.dtype);
}

/* Fills one packed tensor. */
static int fillPacked(const dualkv_case *c, int input, void *out, dkv_err *err) {
    dkv_inputs in = {0};
    void **to[DUALKV_N_INPUTS] = {&in.q, &in.k, &in.v, &in.d_o, NULL, NULL};
    if (input == DUALKV_DLSE) in.d_lse = out;
    else if (input == DUALKV_SINK) in.sink = out;
    else *to[input] = out;
    return dkv_fillInputs(&c->p, &c->packed, dkv_dataDir(), &in, err);
}

/* Rows of a replicated tensor from the packed one. */
static void expand(const dualkv_case *c, int input, const int64_t shape[3], const char *from, char *to) {
    const bool keys = input == DUALKV_K || input == DUALKV_V, lse = input == DUALKV_DLSE;
    const bool own = input == DUALKV_DO || lse;
    const int64_t rows = lse ? shape[1] : shape[0], heads = lse ? shape[0] : 1, n = c->packed.view.tq;
    const int64_t *source = keys ? c->k_source : c->q_source;
    const size_t bytes = lse ? 4 : (size_t)shape[1] * (size_t)shape[2] * sizeOf(c, input);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < rows; t++) {
            char *row = to + (size_t)(h * rows + t) * bytes;
            if (own && !c->q_own[t]) memset(row, 0, bytes);
            else memcpy(row, from + (size_t)(h * n + source[t]) * bytes, bytes);
        }
}

/* As kernels get it, into out. */
static int fillBits(const dualkv_case *c, int layout, int input, const int64_t shape[3], void *out, dkv_err *err) {
    int64_t packed[3];
    if (layout == DUALKV_PACKED || input == DUALKV_SINK) return fillPacked(c, input, out, err);
    dualkv_shape(c, DUALKV_PACKED, input, packed);
    size_t bytes = (size_t)packed[0] * (size_t)packed[1] * (size_t)packed[2] * sizeOf(c, input);
    void *from = malloc(bytes + 1);
    if (!from) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    int code = fillPacked(c, input, from, err);
    if (!code) expand(c, input, shape, from, out);
    free(from);
    return code;
}

/* n values of a dtype as float or double. */
static void widen(const char *from, dualkv_dtype dtype, size_t n, int form, void *out) {
    double part[1024];
    const size_t size = dkv_dtypeSize(dtype);
    for (size_t at = 0; at < n; at += 1024) {
        size_t m = n - at < 1024 ? n - at : 1024;
        dkv_decodeArray(from + at * size, dtype, m, part);
        for (size_t i = 0; i < m; i++)
            if (form == DUALKV_FLOAT) ((float *)out)[at + i] = (float)part[i];
            else ((double *)out)[at + i] = part[i];
    }
}

int dualkv_inputs(const dualkv_case *c, int layout, int input, int form, void *out, size_t bytes,
                  dualkv_error *err) {
    dkv_err why = {0};
    int64_t shape[3];
    size_t n, want;
    if (!c || !out) return complain(err, DKV_EUSER, "dualkv_inputs: a NULL argument");
    if (!layoutOf(c, layout, &why)) return hand(&why, err);
    if (form != DUALKV_BITS && form != DUALKV_FLOAT && form != DUALKV_DOUBLE)
        return complain(err, DKV_EUSER, "dualkv_inputs: no such form");
    int rank = dualkv_shape(c, layout, input, shape);
    if (!rank) return complain(err, DKV_EUSER, "dualkv_inputs: this problem does not have that tensor");
    const size_t element = form == DUALKV_FLOAT ? 4 : form == DUALKV_DOUBLE ? 8 : sizeOf(c, input);
    if (__builtin_mul_overflow((size_t)shape[0], (size_t)shape[1], &n) ||
        __builtin_mul_overflow(n, (size_t)shape[2], &n) || __builtin_mul_overflow(n, element, &want) || want != bytes) {
        dkv_fail(&why, DKV_EUSER, "dualkv_inputs: the buffer has %zu bytes, the tensor %lld x %lld x %lld elements of %zu",
                 bytes, (long long)shape[0], (long long)shape[1], (long long)shape[2], element);
        return hand(&why, err);
    }
    if (form == DUALKV_BITS) return fillBits(c, layout, input, shape, out, &why) ? hand(&why, err) : succeed(err);
    void *bits = malloc(n * sizeOf(c, input) + 1);
    if (!bits) return complain(err, DKV_EHARNESS, "out of memory");
    int code = fillBits(c, layout, input, shape, bits, &why);
    const bool fp32 = input == DUALKV_DLSE || input == DUALKV_SINK;
    if (!code) widen(bits, fp32 ? DUALKV_FP32 : c->p.dtype, n, form, out);
    free(bits);
    return code ? hand(&why, err) : succeed(err);
}

static bool isDtype(int dtype) { return dtype == DUALKV_BF16 || dtype == DUALKV_FP16 || dtype == DUALKV_FP32; }

int dualkv_encode(int dtype, const double *in, size_t n, void *out, dualkv_error *err) {
    if (!isDtype(dtype)) return complain(err, DKV_EUSER, "dualkv_encode: no such dtype");
    if (n && (!in || !out)) return complain(err, DKV_EUSER, "dualkv_encode: a NULL argument");
    dkv_encodeArray(in, (dualkv_dtype)dtype, n, out);
    return succeed(err);
}

int dualkv_decode(int dtype, const void *in, size_t n, double *out, dualkv_error *err) {
    if (!isDtype(dtype)) return complain(err, DKV_EUSER, "dualkv_decode: no such dtype");
    if (n && (!in || !out)) return complain(err, DKV_EUSER, "dualkv_decode: a NULL argument");
    dkv_decodeArray(in, (dualkv_dtype)dtype, n, out);
    return succeed(err);
}

/* ---- suites ---- */

int dualkv_open_suite(const char *name, dualkv_lines **out, dualkv_error *err) {
    dkv_err why = {0};
    if (!name || !out) return complain(err, DKV_EUSER, "dualkv_open_suite: a NULL argument");
    *out = calloc(1, sizeof **out);
    if (!*out) return complain(err, DKV_EHARNESS, "out of memory");
    if (dkv_loadSuite(name, &(*out)->suite, &why)) {
        free(*out);
        *out = NULL;
        return hand(&why, err);
    }
    return succeed(err);
}

void dualkv_close_suite(dualkv_lines *s) {
    if (s) dkv_freeSuite(&s->suite);
    free(s);
}

int64_t dualkv_count_lines(const dualkv_lines *s) { return s->suite.n; }

const char *dualkv_suite_line(const dualkv_lines *s, int64_t i) {
    return i >= 0 && i < s->suite.n ? s->suite.lines[i] : NULL;
}

int dualkv_suite_name(int i, char *out, size_t n) {
    char name[64], help[200];
    if (!dkv_listSuite(i, name, help) || strlen(name) >= n) return 0;
    strcpy(out, name);
    return 1;
}
