/* buffers_sum.c: outputs of a replicated view, packed row by row, so that no more than the arena ever holds them whole. */
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "buffers.h"
#include "spans.h"

/* ---- where the copies are ---- */

typedef struct copies {
    int64_t *start; /* [packed rows + 1] */
    int64_t *row;   /* rows of the view, in order, by packed row */
} copies;

static void dropCopies(copies *c) {
    free(c->start);
    free(c->row);
    c->start = c->row = NULL;
}

static int findCopies(int64_t packed_rows, int64_t rows, const int64_t *source, copies *c, dkv_err *err) {
    c->start = calloc((size_t)packed_rows + 2, sizeof *c->start);
    c->row = malloc(((size_t)rows + 1) * sizeof *c->row);
    if (!c->start || !c->row) {
        dropCopies(c);
        return dkv_fail(err, DKV_EHARNESS, "out of memory for the places of %lld copies", (long long)rows);
    }
    for (int64_t t = 0; t < rows; t++) c->start[source[t] + 2]++;
    for (int64_t s = 0; s < packed_rows; s++) c->start[s + 2] += c->start[s + 1];
    for (int64_t t = 0; t < rows; t++) c->row[c->start[source[t] + 1]++] = t;
    return 0;
}

/* ---- sums ---- */

typedef struct sum_loop {
    const dkv_view *w;
    uint8_t *base;
    dualkv_dtype t;
    const copies *of;
    double *out;
} sum_loop;

static void sumSpan(int64_t first, int64_t end, int span, void *arg) {
    const sum_loop *l = arg;
    const dkv_view *w = l->w;
    double part[DKV_DIM_MAX];
    (void)span;
    for (int64_t s = first; s < end; s++)
        for (int64_t h = 0; h < w->heads; h++) {
            double *to = l->out + (s * w->heads + h) * w->dim;
            memset(to, 0, (size_t)w->dim * sizeof *to);
            for (int64_t k = l->of->start[s]; k < l->of->start[s + 1]; k++) {
                dkv_decodeArray(dkv_elementRow(w, l->base, l->of->row[k], h), l->t, (size_t)w->dim, part);
                for (int64_t c = 0; c < w->dim; c++) to[c] += part[c];
            }
        }
}

static int sumGradients(const dkv_arena *a, dualkv_dtype t, const dkv_layout *packed, const dkv_outputs *out,
                        dkv_err *err) {
    const dkv_expansion *e = a->expand;
    copies q = {0}, k = {0};
    int rc = findCopies(packed->view.tq, a->plan.view[DKV_SLOT_DQ].rows, e->q_source, &q, err);
    if (rc) return rc;
    rc = findCopies(packed->view.tk, a->plan.view[DKV_SLOT_DK].rows, e->k_source, &k, err);
    for (int id = DKV_DQ; id <= DKV_DV && !rc; id++) {
        const dkv_view *w = &a->plan.view[dkv_outputSlot((dkv_tensor_id)id)];
        sum_loop l = {w, a->base, t, id == DKV_DQ ? &q : &k, dkv_outputAt(out, (dkv_tensor_id)id)};
        dkv_eachSpan(id == DKV_DQ ? packed->view.tq : packed->view.tk, (double)w->rows * (double)(w->heads * w->dim),
                     sumSpan, &l);
    }
    const dkv_view *sink = &a->plan.view[DKV_SLOT_DSINK];
    if (sink->present && out->dsink && !rc)
        dkv_decodeArray(dkv_elementRow(sink, a->base, 0, 0), DUALKV_FP32, (size_t)sink->heads, out->dsink);
    dropCopies(&q);
    dropCopies(&k);
    return rc;
}

typedef struct own_loop {
    const dkv_arena *a;
    dualkv_dtype t;
    const dkv_outputs *out;
} own_loop;

static void ownSpan(int64_t first, int64_t end, int span, void *arg) {
    const own_loop *l = arg;
    const dkv_view *o = &l->a->plan.view[DKV_SLOT_O], *lse = &l->a->plan.view[DKV_SLOT_LSE];
    const dkv_expansion *e = l->a->expand;
    (void)span;
    for (int64_t t = first; t < end; t++)
        for (int64_t h = 0; h < o->heads && e->q_own[t]; h++) {
            const int64_t s = e->q_source[t];
            dkv_decodeArray(dkv_elementRow(o, l->a->base, t, h), l->t, (size_t)o->dim,
                            l->out->o + (s * o->heads + h) * o->dim);
            dkv_decodeArray(dkv_elementRow(lse, l->a->base, t, h), DUALKV_FP32, 1, l->out->lse + h * e->packed_tq + s);
        }
}

/* ---- bits ---- */

typedef struct bits_loop {
    const dkv_view *w;
    uint8_t *base;
    uint64_t span[DKV_SPANS];
} bits_loop;

/* Four chains: one would wait for its multiplications. */
static void bitsSpan(int64_t first, int64_t end, int span, void *arg) {
    bits_loop *l = arg;
    const dkv_view *w = l->w;
    const int64_t bytes = w->dim * w->elt;
    uint64_t h[4] = {0, 1, 2, 3}, word[4];
    for (int64_t t = first; t < end; t++)
        for (int64_t k = 0; k < w->heads; k++) {
            const uint8_t *x = dkv_elementRow(w, l->base, t, k);
            int64_t i = 0;
            for (; i + (int64_t)sizeof word <= bytes; i += (int64_t)sizeof word) {
                memcpy(word, x + i, sizeof word);
                for (int c = 0; c < 4; c++) h[c] = dkv_mixBits(h[c], word[c]);
            }
            if (i == bytes) continue;
            memset(word, 0, sizeof word);
            memcpy(word, x + i, (size_t)(bytes - i));
            for (int c = 0; c < 4; c++) h[c] = dkv_mixBits(h[c], word[c]);
        }
    for (int c = 0; c < 4; c++) l->span[span] = dkv_mixBits(l->span[span], h[c]);
}

static void addBits(const dkv_arena *a, dkv_slot s, uint64_t *bits) {
    bits_loop l = {.w = &a->plan.view[s], .base = a->base};
    if (!l.w->present) return;
    dkv_eachSpan(l.w->rows, (double)l.w->rows * (double)(l.w->heads * l.w->dim), bitsSpan, &l);
    for (int i = 0; i < DKV_SPANS; i++) *bits = dkv_mixBits(*bits, l.span[i]);
}

int dkv_sumOutputs(const dkv_arena *a, dualkv_dtype t, int backward, const dkv_layout *packed, const dkv_outputs *out,
                   uint64_t *bits, dkv_err *err) {
    const dkv_view *o = &a->plan.view[DKV_SLOT_O];
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if ((id >= DKV_DQ) == (backward != 0)) addBits(a, dkv_outputSlot((dkv_tensor_id)id), bits);
    if (backward) return sumGradients(a, t, packed, out, err);
    own_loop l = {a, t, out};
    dkv_eachSpan(o->rows, (double)packed->view.tq * (double)(o->heads * o->dim), ownSpan, &l);
    return 0;
}

/* ---- copies of O ---- */

typedef struct copy_loop {
    const dkv_arena *a;
    dualkv_dtype t;
    dkv_copy_fn ok;
    void *arg;
    int64_t at[DKV_SPANS];
    double value[DKV_SPANS];
} copy_loop;

static void copySpan(int64_t first, int64_t end, int span, void *arg) {
    copy_loop *l = arg;
    const dkv_view *w = &l->a->plan.view[DKV_SLOT_O];
    const dkv_expansion *e = l->a->expand;
    double x[DKV_DIM_MAX];
    l->at[span] = -1;
    for (int64_t t = first; t < end; t++)
        for (int64_t h = 0; h < w->heads && !e->q_own[t]; h++) {
            dkv_decodeArray(dkv_elementRow(w, l->a->base, t, h), l->t, (size_t)w->dim, x);
            for (int64_t c = 0; c < w->dim; c++) {
                if (l->ok(x[c], (e->q_source[t] * w->heads + h) * w->dim + c, l->arg)) continue;
                l->at[span] = (e->q_source[t] * w->heads + h) * w->dim + c;
                l->value[span] = x[c];
                return;
            }
        }
}

int64_t dkv_findCopy(const dkv_arena *a, dualkv_dtype t, dkv_copy_fn ok, void *arg, double *value) {
    const dkv_view *w = &a->plan.view[DKV_SLOT_O];
    copy_loop l = {.a = a, .t = t, .ok = ok, .arg = arg};
    dkv_eachSpan(w->rows, (double)w->rows * (double)(w->heads * w->dim), copySpan, &l);
    for (int i = 0; i < DKV_SPANS; i++) {
        if (l.at[i] < 0) continue;
        *value = l.value[i];
        return l.at[i];
    }
    return -1;
}
