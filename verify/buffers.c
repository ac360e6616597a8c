#include "buffers.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../ref/dtype.h"
#include "../ref/pages.h"
#include "pieces.h"
#include "spans.h"

static const char *const names[DKV_N_SLOTS] = {"Q",   "K",  "V",  "dO", "dLSE",  "sink",     "O",
                                               "LSE", "dQ", "dK", "dV", "dSink", "workspace"};


dkv_slot dkv_outputSlot(dkv_tensor_id id) {
    static const dkv_slot slots[DKV_N_OUTPUTS] = {DKV_SLOT_O,  DKV_SLOT_LSE, DKV_SLOT_DQ,
                                                  DKV_SLOT_DK, DKV_SLOT_DV,  DKV_SLOT_DSINK};
    return slots[id];
}

static dkv_role roleOf(int s) {
    return s < DKV_SLOT_O      ? DKV_ROLE_INPUT
           : s < DKV_SLOT_DQ   ? DKV_ROLE_FORWARD
           : s < DKV_SLOT_WORK ? DKV_ROLE_BACKWARD
                               : DKV_ROLE_WORK;
}

/* ---- placing ---- */

static int64_t roundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* Sizes are judged in double first: dims are at most 2^40 rows x 2^31 heads x 2^8, far from a double's
 * limits. */
static bool fits(double elements) { return elements < 0x1p58; }

static int setShape(dkv_plan *p, const dualkv_problem *v, dkv_err *err) {
    int32_t e = v->dtype == DUALKV_FP32 ? 4 : 2;
    const struct {
        int64_t rows, heads, dim;
        int32_t elt, present;
    } shape[DKV_N_SLOTS] = {
        {v->tq, v->hq, v->dqk, e, 1},
        {v->tk, v->hkv, v->dqk, e, 1},
        {v->tk, v->hkv, v->dv, e, 1},
        {v->tq, v->hq, v->dv, e, v->grad},
        {v->tq, v->hq, 1, 4, v->grad && v->dlse},
        {1, v->hq, 1, 4, v->sink},
        {v->tq, v->hq, v->dv, e, 1},
        {v->tq, v->hq, 1, 4, 1},
        {v->tq, v->hq, v->dqk, e, v->grad},
        {v->tk, v->hkv, v->dqk, e, v->grad},
        {v->tk, v->hkv, v->dv, e, v->grad},
        {1, v->hq, 1, 4, v->grad && v->sink},
        {0, 1, 1, 1, 0},
    };
    for (int s = 0; s < DKV_N_SLOTS; s++) {
        dkv_view *w = &p->view[s];
        w->present = shape[s].present != 0;
        w->rows = shape[s].rows;
        w->heads = shape[s].heads;
        w->dim = shape[s].dim;
        w->elt = shape[s].elt;
        if (!fits(2.0 * (double)w->rows * ((double)w->heads * (double)w->dim + 4096)))
            return dkv_fail(err, DKV_EUSER, "%s would have more than 2^58 elements", names[s]);
    }
    return 0;
}

/* Strides of one view; a block of one view has `elements` of them. */
static int64_t setStrides(dkv_view *w, int s, dkv_layout_kind layout, int32_t align) {
    int64_t step = align > w->elt ? align / w->elt : 1, width = w->heads * w->dim;
    bool like_lse = s == DKV_SLOT_LSE || s == DKV_SLOT_DLSE;
    bool vector = s == DKV_SLOT_SINK || s == DKV_SLOT_DSINK;
    if (vector) {
        w->row = w->heads;
        w->head = 1;
    } else if (like_lse) { /* [H, T]; padded: slack after each head; strided: [T, H] for one of the two */
        bool tokens_first = layout == DKV_STRIDED && s == DKV_SLOT_LSE;
        int64_t slack = layout == DKV_PADDED ? (s == DKV_SLOT_LSE ? 3 : 5) : 0;
        w->row = tokens_first ? w->heads + 1 : 1;
        w->head = tokens_first ? 1 : w->rows + slack;
        return tokens_first ? w->rows * w->row : w->heads * w->head;
    } else if (layout == DKV_STRIDED && s != DKV_SLOT_DO) { /* [H, T, D + slack] */
        w->row = roundUp(w->dim, step) + step;
        w->head = w->rows * w->row + step;
        return w->heads * w->head;
    } else {
        int64_t slack = layout == DKV_PADDED    ? step * (s == DKV_SLOT_DO ? 3 : 1 + s % 2)
                        : layout == DKV_STRIDED ? 5 * step
                                                : 0;
        w->head = layout == DKV_CONTIGUOUS || layout == DKV_FUSED ? w->dim : roundUp(w->dim, step);
        w->row = w->heads * w->head + slack;
        (void)width;
    }
    return w->rows * w->row;
}

/* A block at an odd multiple of `align` (natural: a multiple of 256 and of it), a guard or more behind the
 * last. */
static dkv_block_place *addBlock(dkv_plan *p, int slot, int64_t bytes, int32_t align) {
    dkv_block_place *b = &p->block[p->n_blocks++];
    b->offset = p->natural ? roundUp(p->size + DKV_GUARD, align > 256 ? align : 256)
                           : roundUp(p->size + DKV_GUARD, 2 * (int64_t)align) + align;
    b->bytes = bytes;
    b->role = roleOf(slot);
    b->slot = slot;
    p->size = b->offset + bytes;
    return b;
}

static void placeAlone(dkv_plan *p, int s, dkv_layout_kind layout, int32_t align) {
    dkv_view *w = &p->view[s];
    int32_t a = align > w->elt ? align : w->elt;
    int64_t elements = setStrides(w, s, layout, a);
    w->block = p->n_blocks;
    w->offset = addBlock(p, s, elements * w->elt, a)->offset;
}

/* Three views side by side in each row: [T, Hq*Dqk + Hkv*Dqk + Hkv*Dv]. Q may have fewer rows than K. */
static void placeFused(dkv_plan *p, int s, int32_t align) {
    int64_t width = 0, rows = 0;
    for (int i = s; i < s + 3; i++) {
        width += p->view[i].heads * p->view[i].dim;
        rows = p->view[i].rows > rows ? p->view[i].rows : rows;
    }
    int32_t elt = p->view[s].elt, index = p->n_blocks;
    int64_t at = addBlock(p, s, rows * width * elt, align > elt ? align : elt)->offset;
    for (int i = s; i < s + 3; i++) {
        dkv_view *w = &p->view[i];
        w->row = width;
        w->head = w->dim;
        w->block = index;
        w->offset = at;
        at += w->heads * w->dim * elt;
    }
}

static int checkAlignment(const dkv_plan *p, int32_t align, dkv_err *err) {
    for (int s = 0; s < DKV_SLOT_WORK; s++) {
        const dkv_view *w = &p->view[s];
        bool tensor = s != DKV_SLOT_LSE && s != DKV_SLOT_DLSE && s != DKV_SLOT_SINK && s != DKV_SLOT_DSINK;
        if (!w->present || !tensor) continue;
        bool heads_off = w->heads > 1 && w->head * w->elt % align,
             rows_off = w->rows > 1 && w->row * w->elt % align;
        if (heads_off || rows_off || w->offset % align)
            return dkv_fail(err, DKV_EREFUSED,
                            "%s has a stride of %lld bytes in this layout; the kernel needs %d", names[s],
                            (long long)((heads_off ? w->head : w->row) * w->elt), align);
    }
    return 0;
}

int dkv_planBuffers(const dualkv_problem *v, dkv_layout_kind layout, int32_t align, bool natural,
                    size_t work_forward, size_t work_backward, dkv_plan *out, dkv_err *err) {
    memset(out, 0, sizeof *out);
    out->natural = natural;
    if (setShape(out, v, err)) return DKV_EUSER;
    if (work_forward > (size_t)1 << 46 || work_backward > (size_t)1 << 46)
        return dkv_fail(err, DKV_EUSER, "the kernel asks for a workspace of more than 2^46 bytes");
    for (int s = 0; s < DKV_SLOT_WORK; s++) {
        if (!out->view[s].present) continue;
        bool fused = layout == DKV_FUSED && (s == DKV_SLOT_Q || s == DKV_SLOT_DQ);
        if (fused) {
            placeFused(out, s, align);
            s += 2;
        } else {
            placeAlone(out, s, layout, align);
        }
    }
    out->workspace[0] = (int64_t)work_forward;
    out->workspace[1] = (int64_t)work_backward;
    int64_t most = work_forward > work_backward ? (int64_t)work_forward : (int64_t)work_backward;
    if (most) {
        dkv_view *w = &out->view[DKV_SLOT_WORK];
        w->present = 1;
        w->rows = roundUp(most, 2);
        w->row = w->head = 1;
        w->block = out->n_blocks;
        w->offset = addBlock(out, DKV_SLOT_WORK, w->rows, 256)->offset;
    }
    out->size = roundUp(out->size + DKV_GUARD, 4096);
    return checkAlignment(out, align, err);
}

/* ---- filling ---- */

uint16_t dkv_poisonPattern(uint32_t start, int i) {
    uint32_t k = start % 252 + (uint32_t)i;
    uint32_t low = 1 + k * 37 % 126; /* 7 bits, neither 0 (an infinity) nor all ones (what devices compute) */
    return (uint16_t)((k & 1 ? 0x7F80 : 0xFF80) | low);
}

static void paint(uint8_t *at, int64_t bytes, uint16_t pattern) {
    uint64_t wide = pattern * 0x0001000100010001ull;
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) memcpy(at + i, &wide, 8);
    memcpy(at + i, &wide, (size_t)(bytes - i));
}

/* Small ones in powers of two, so that a spare fits often. */
static int64_t roomFor(const dkv_plan *plan) {
    int64_t room = 1 << 16;
    if (plan->size > DKV_ARENA_SMALL) return plan->size;
    while (room < plan->size) room *= 2;
    return room;
}

int dkv_openArena(const dkv_plan *plan, bool shadow, dkv_arena *a, dkv_err *err) {
    memset(a, 0, sizeof *a);
    a->plan = *plan;
    a->room = roomFor(plan);
    a->fd = memfd_create("dualkv-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    a->base = MAP_FAILED;
    /* Sealed, so that a kernel cannot cut it off under our feet: what is not there any more is a SIGBUS for us, too. */
    if (a->fd >= 0 && ftruncate(a->fd, a->room) == 0 &&
        fcntl(a->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        a->base = dkv_mapFile(a->fd, (size_t)a->room);
    if (shadow) a->shadow = malloc((size_t)a->room);
    if (a->base != MAP_FAILED && (a->shadow || !shadow)) return 0;
    dkv_closeArena(a);
    return dkv_fail(err, DKV_EHARNESS, "cannot allocate %lld bytes for the kernel's buffers",
                    (long long)plan->size);
}

static void dropKept(dkv_arena *a) {
    for (int i = 0; i < DKV_N_SLOTS; i++) {
        free(a->kept[i]);
        a->kept[i] = NULL;
    }
}

/* A worker may still have a large one mapped: its pages are free once this returns. */
void dkv_closeArena(dkv_arena *a) {
    if (a->room > DKV_ARENA_SMALL && a->fd >= 0 && fallocate(a->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, a->room))
        a->plan.size = 0; /* then they are free when the worker maps another */
    if (a->base && a->base != MAP_FAILED) munmap(a->base, (size_t)a->room);
    if (a->room && a->fd >= 0) close(a->fd);
    free(a->shadow);
    dropKept(a);
    memset(a, 0, sizeof *a);
    a->fd = -1;
}

/* Canonical order is [row, head, dim], for LSE-like tensors [head, row]. Calls with one run of elements each.
 */
typedef void (*run_fn)(uint8_t *at, int64_t index, int64_t n, int64_t stride, void *arg);

static void eachRun(const dkv_view *w, bool like_lse, uint8_t *base, run_fn f, void *arg) {
    if (like_lse) {
        for (int64_t h = 0; h < w->heads; h++)
            f(dkv_elementRow(w, base, 0, h), h * w->rows, w->rows, w->row * w->elt, arg);
        return;
    }
    for (int64_t t = 0; t < w->rows; t++)
        for (int64_t h = 0; h < w->heads; h++)
            f(dkv_elementRow(w, base, t, h), (t * w->heads + h) * w->dim, w->dim, w->elt, arg);
}

static bool isLse(int s) { return s == DKV_SLOT_LSE || s == DKV_SLOT_DLSE; }

/* The same by several threads, for what keeps no count. */
typedef struct run_loop {
    const dkv_view *w;
    uint8_t *base;
    run_fn f;
    void *arg;
} run_loop;

static void runSpan(int64_t first, int64_t end, int span, void *arg) {
    const run_loop *l = arg;
    (void)span;
    for (int64_t t = first; t < end; t++)
        for (int64_t h = 0; h < l->w->heads; h++)
            l->f(dkv_elementRow(l->w, l->base, t, h), (t * l->w->heads + h) * l->w->dim, l->w->dim, l->w->elt, l->arg);
}

static void everyRun(const dkv_view *w, bool like_lse, uint8_t *base, run_fn f, void *arg) {
    run_loop l = {w, base, f, arg};
    if (like_lse) eachRun(w, true, base, f, arg);
    else dkv_eachSpan(w->rows, (double)w->rows * (double)(w->heads * w->dim), runSpan, &l);
}

typedef struct copy_arg {
    const uint8_t *from;
    int64_t elt;
    bool same; /* of a comparison */
} copy_arg;

static void copyIn(uint8_t *at, int64_t index, int64_t n, int64_t stride, void *arg) {
    const copy_arg *c = arg;
    if (stride == c->elt) memcpy(at, c->from + index * c->elt, (size_t)(n * c->elt));
    else
        for (int64_t i = 0; i < n; i++)
            memcpy(at + i * stride, c->from + (index + i) * c->elt, (size_t)c->elt);
}

void dkv_putTensor(dkv_arena *a, dkv_slot s, const void *from) {
    const dkv_view *w = &a->plan.view[s];
    copy_arg c = {from, w->elt, true};
    if (w->present) eachRun(w, isLse(s), a->base, copyIn, &c);
}

static void compareRun(uint8_t *at, int64_t index, int64_t n, int64_t stride, void *arg) {
    copy_arg *c = arg;
    for (int64_t i = 0; i < n; i++)
        c->same &= memcmp(at + i * stride, c->from + (index + i) * c->elt, (size_t)c->elt) == 0;
}

bool dkv_holdsTensor(const dkv_arena *a, dkv_slot s, const void *want) {
    const dkv_view *w = &a->plan.view[s];
    copy_arg c = {want, w->elt, true};
    if (w->present) eachRun(w, isLse(s), a->base, compareRun, &c);
    return c.same;
}

enum { PAGE = 4096 };

/* ---- inputs of a view from those of the packed one ---- */

typedef struct expand_loop {
    const dkv_view *w;
    uint8_t *base;
    const uint8_t *from;
    const int64_t *source;  /* NULL: row by row */
    const uint8_t *own;     /* NULL: every row has its values; else the others are zero */
    int64_t rows;           /* of `from` */
    bool like_lse, compare; /* compare: writes nothing, marks spans that differ */
    bool differs[DKV_SPANS];
} expand_loop;

static bool isZero(const uint8_t *x, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++)
        if (x[i]) return false;
    return true;
}

static void expandSpan(int64_t first, int64_t end, int span, void *arg) {
    expand_loop *l = arg;
    const dkv_view *w = l->w;
    const bool whole = !l->like_lse && w->head == w->dim; /* heads side by side: a row in one piece */
    const int64_t pieces = whole ? 1 : w->heads, bytes = (whole ? w->heads : 1) * w->dim * w->elt;
    for (int64_t t = first; t < end; t++)
        for (int64_t h = 0; h < pieces; h++) {
            const int64_t s = l->source ? l->source[t] : t;
            const uint8_t *x = l->from + (l->like_lse ? h * l->rows + s : (s * w->heads + h) * w->dim) * w->elt;
            uint8_t *to = dkv_elementRow(w, l->base, t, h);
            const bool zero = l->own && !l->own[t];
            if (l->compare) l->differs[span] |= zero ? !isZero(to, bytes) : memcmp(to, x, (size_t)bytes) != 0;
            else if (zero) memset(to, 0, (size_t)bytes);
            else memcpy(to, x, (size_t)bytes);
        }
}

static expand_loop inputLoop(const dkv_arena *a, int s, uint8_t *base) {
    const dkv_inputs *in = a->in;
    const dkv_expansion *e = a->expand;
    const void *const from[DKV_SLOT_O] = {in->q, in->k, in->v, in->d_o, in->d_lse, in->sink};
    const bool by_key = s == DKV_SLOT_K || s == DKV_SLOT_V, moves = e && s != DKV_SLOT_SINK;
    return (expand_loop){.w = &a->plan.view[s],
                         .base = base,
                         .from = from[s],
                         .source = !moves ? NULL : by_key ? e->k_source : e->q_source,
                         .own = moves && (s == DKV_SLOT_DO || s == DKV_SLOT_DLSE) ? e->q_own : NULL,
                         .rows = e ? e->packed_tq : a->plan.view[s].rows,
                         .like_lse = isLse(s)};
}

/* An input's elements into `base` + its offset. */
static void writeInput(const dkv_arena *a, int s, uint8_t *base) {
    expand_loop l = inputLoop(a, s, base);
    if (l.w->present && l.from)
        dkv_eachSpan(l.w->rows, (double)l.w->rows * (double)(l.w->heads * l.w->dim), expandSpan, &l);
}

/* Painted as a whole arena is: the pattern's bytes by the parity of the offset. */
static void paintFrom(uint8_t *to, int64_t offset, int64_t bytes, uint16_t pattern) {
    paint(to, bytes, offset & 1 ? (uint16_t)(pattern >> 8 | pattern << 8) : pattern);
}

/* Elements alone, side by side: nothing between them. */
static bool isDense(const dkv_arena *a, int i) {
    int64_t bytes = 0;
    for (int s = 0; s < DKV_SLOT_WORK; s++) {
        const dkv_view *w = &a->plan.view[s];
        if (w->present && w->block == i) bytes += w->rows * w->heads * w->dim * w->elt;
    }
    return bytes == a->plan.block[i].bytes;
}

/* An input's block that dkv_fillArena writes whole. */
static bool isGiven(const dkv_arena *a, int i) {
    if (a->plan.block[i].role != DKV_ROLE_INPUT || !isDense(a, i)) return false;
    for (int s = 0; s < DKV_SLOT_O; s++)
        if (a->plan.view[s].present && a->plan.view[s].block == i && !inputLoop(a, s, a->base).from) return false;
    return true;
}

/* [first, end) of a block's pages; 0 bytes past its end. */
static int64_t spanOfPages(const dkv_arena *a, int64_t *first, int64_t end) {
    *first *= PAGE;
    end = end * PAGE < a->plan.size ? end * PAGE : a->plan.size;
    return *first < end ? end - *first : 0;
}

typedef struct paint_loop {
    const dkv_arena *a;
    bool given[DKV_N_SLOTS]; /* blocks of which inputs cover each byte: nothing of a pattern would be left there */
} paint_loop;

static void paintSpan(int64_t first, int64_t end, int span, void *arg) {
    const paint_loop *l = arg;
    const dkv_arena *a = l->a;
    uint8_t *base = a->shadow ? a->shadow : a->base;
    int64_t bytes = spanOfPages(a, &first, end);
    const int64_t last = first + bytes;
    (void)span;
    for (int i = 0; i < a->plan.n_blocks && first < last; i++) {
        const int64_t from = a->plan.block[i].offset, to = from + a->plan.block[i].bytes;
        if (!l->given[i] || to <= first || from >= last) continue;
        if (from > first) paintFrom(base + first, first, from - first, a->pattern);
        first = to;
    }
    if (first < last) paintFrom(base + first, first, last - first, a->pattern);
}

static void showSpan(int64_t first, int64_t end, int span, void *arg) {
    const dkv_arena *a = arg;
    const int64_t bytes = spanOfPages(a, &first, end);
    (void)span;
    if (bytes) memcpy(a->base + first, a->shadow + first, (size_t)bytes);
}

void dkv_fillArena(dkv_arena *a, uint16_t pattern, const dkv_inputs *in, const dkv_expansion *expand) {
    a->pattern = pattern;
    a->in = in;
    a->expand = expand;
    dropKept(a);
    const int64_t pages = a->plan.size / PAGE + 1;
    paint_loop l = {.a = a};
    for (int i = 0; i < a->plan.n_blocks; i++) l.given[i] = !a->shadow && isGiven(a, i);
    dkv_eachSpan(pages, (double)a->plan.size / 4, paintSpan, &l);
    for (int s = 0; s < DKV_SLOT_O; s++) writeInput(a, s, a->shadow ? a->shadow : a->base);
    if (a->shadow) dkv_eachSpan(pages, (double)a->plan.size / 4, showSpan, a);
    dkv_poisonWorkspace(a);
}

void dkv_poisonWorkspace(dkv_arena *a) {
    const dkv_view *w = &a->plan.view[DKV_SLOT_WORK];
    if (w->present) paint(a->base + w->offset, w->rows, a->pattern ^ 0x8000);
}

/* ---- reading back ---- */

typedef struct gather_arg {
    double *out;
    dualkv_dtype t;
    int elt;
} gather_arg;

static void gatherRun(uint8_t *at, int64_t index, int64_t n, int64_t stride, void *arg) {
    const gather_arg *g = arg;
    if (stride == g->elt) dkv_decodeArray(at, g->t, (size_t)n, g->out + index);
    else
        for (int64_t i = 0; i < n; i++) dkv_decodeArray(at + i * stride, g->t, 1, g->out + index + i);
}

void dkv_gatherOutputs(const dkv_arena *a, dualkv_dtype t, int backward, const dkv_outputs *out) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        dkv_slot s = dkv_outputSlot((dkv_tensor_id)id);
        const dkv_view *w = &a->plan.view[s];
        double *to = dkv_outputAt(out, (dkv_tensor_id)id);
        if (!w->present || !to || (roleOf(s) == DKV_ROLE_BACKWARD) != (backward != 0)) continue;
        bool fp32 = s == DKV_SLOT_LSE || s == DKV_SLOT_DSINK;
        gather_arg g = {to, fp32 ? DUALKV_FP32 : t, w->elt};
        everyRun(w, isLse(s), a->base, gatherRun, &g);
    }
}

typedef struct poison_arg {
    uint16_t pattern;
    int elt;
    int64_t count, first;
} poison_arg;

static void poisonRun(uint8_t *at, int64_t index, int64_t n, int64_t stride, void *arg) {
    poison_arg *p = arg;
    for (int64_t i = 0; i < n; i++) {
        uint16_t x, y;
        memcpy(&x, at + i * stride, sizeof x);
        memcpy(&y, at + i * stride + p->elt - 2, sizeof y); /* of two bytes: the same */
        if (x != p->pattern || y != p->pattern) continue;
        if (p->count++ == 0) p->first = index + i;
    }
}

typedef struct poison_loop {
    const dkv_view *w;
    uint8_t *base;
    poison_arg span[DKV_SPANS];
} poison_loop;

static void poisonSpan(int64_t first, int64_t end, int span, void *arg) {
    poison_loop *l = arg;
    const dkv_view *w = l->w;
    for (int64_t t = first; t < end; t++)
        for (int64_t h = 0; h < w->heads; h++)
            poisonRun(dkv_elementRow(w, l->base, t, h), (t * w->heads + h) * w->dim, w->dim, w->elt, &l->span[span]);
}

int64_t dkv_countPoison(const dkv_arena *a, dkv_tensor_id id, int64_t *first) {
    dkv_slot s = dkv_outputSlot(id);
    const dkv_view *w = &a->plan.view[s];
    poison_arg p = {a->pattern, w->elt, 0, 0};
    poison_loop l = {.w = w, .base = a->base};
    if (w->present && isLse(s)) eachRun(w, true, a->base, poisonRun, &p);
    for (int i = 0; i < DKV_SPANS; i++) l.span[i] = p;
    if (w->present && !isLse(s))
        dkv_eachSpan(w->rows, (double)w->rows * (double)(w->heads * w->dim), poisonSpan, &l);
    for (int i = 0; i < DKV_SPANS && !isLse(s); i++) {
        if (p.count == 0) p.first = l.span[i].first;
        p.count += l.span[i].count;
    }
    if (first) *first = p.first;
    return p.count;
}

/* ---- what must not have changed ---- */

static void repaintRun(uint8_t *at, int64_t index, int64_t n, int64_t stride, void *arg) {
    const poison_arg *p = arg;
    uint32_t want = p->pattern * 0x10001u;
    (void)index;
    for (int64_t i = 0; i < n; i++) memcpy(at + i * stride, &want, (size_t)p->elt);
}

/* What cannot be compared was not seen to be whole. */
static void noRoom(dkv_damage *d) { d->no_room = true; }

typedef struct diff_loop {
    const uint8_t *got, *want;
    bool differs[DKV_SPANS];
} diff_loop;

static void diffSpan(int64_t first, int64_t end, int span, void *arg) {
    diff_loop *l = arg;
    l->differs[span] = end > first && memcmp(l->got + first, l->want + first, (size_t)(end - first)) != 0;
}

/* Bytes of [0, n) that differ; first and last of them. */
static int64_t countDiffering(const uint8_t *got, const uint8_t *want, int64_t n, int64_t *first, int64_t *last) {
    int64_t count = 0;
    bool any = false;
    diff_loop l = {.got = got, .want = want};
    if (n <= 0) return 0;
    dkv_eachSpan(n, (double)n / 4, diffSpan, &l);
    for (int i = 0; i < DKV_SPANS; i++) any |= l.differs[i];
    for (int64_t i = 0; i < n && any; i++)
        if (got[i] != want[i]) {
            if (count++ == 0) *first = i;
            *last = i;
        }
    return count;
}

/* ---- what a block must hold, where there is no shadow ---- */

typedef struct pattern_loop {
    const uint8_t *got;
    int64_t offset;
    uint16_t pattern;
    bool differs[DKV_SPANS];
} pattern_loop;

/* All eight bytes are those before them: one comparison. */
static void patternSpan(int64_t first, int64_t end, int span, void *arg) {
    pattern_loop *l = arg;
    const int64_t n = end - first, head = n < 8 ? n : 8;
    uint8_t want[8];
    if (n <= 0) return;
    paintFrom(want, l->offset + first, 8, l->pattern);
    l->differs[span] = memcmp(l->got + first, want, (size_t)head) != 0 ||
                       (n > 8 && memcmp(l->got + first, l->got + first + 8, (size_t)(n - 8)) != 0);
}

static bool isPainted(const dkv_arena *a, int i) {
    const dkv_block_place *b = &a->plan.block[i];
    pattern_loop l = {.got = a->base + b->offset, .offset = b->offset, .pattern = a->pattern};
    bool any = false;
    dkv_eachSpan(b->bytes, (double)b->bytes / 4, patternSpan, &l);
    for (int k = 0; k < DKV_SPANS; k++) any |= l.differs[k];
    return !any;
}

/* Does an input's dense block hold what it was given? */
static bool isAsGiven(const dkv_arena *a, int i) {
    bool same = true;
    for (int s = 0; s < DKV_SLOT_O; s++) {
        expand_loop l = inputLoop(a, s, a->base);
        if (!l.w->present || l.w->block != i || !l.from) continue;
        l.compare = true;
        dkv_eachSpan(l.w->rows, (double)l.w->rows * (double)(l.w->heads * l.w->dim), expandSpan, &l);
        for (int k = 0; k < DKV_SPANS; k++) same &= !l.differs[k];
    }
    return same;
}

/* The block as it must be: the pattern, and inputs where they are. */
static uint8_t *makeBlock(const dkv_arena *a, int i) {
    const dkv_block_place *b = &a->plan.block[i];
    uint8_t *want = malloc((size_t)b->bytes + 1);
    if (!want) return NULL;
    paintFrom(want, b->offset, b->bytes, a->pattern);
    for (int s = 0; s < DKV_SLOT_O && b->role == DKV_ROLE_INPUT; s++)
        if (a->plan.view[s].present && a->plan.view[s].block == i) writeInput(a, s, want - b->offset);
    return want;
}

/* The gap before block i (or, for i = n_blocks, behind the last). */
static void checkGap(const dkv_arena *a, int i, dkv_damage *d) {
    const dkv_plan *p = &a->plan;
    int64_t from = i ? p->block[i - 1].offset + p->block[i - 1].bytes : 0;
    int64_t to = i < p->n_blocks ? p->block[i].offset : p->size, first = 0, last = 0;
    uint8_t *want = a->shadow ? NULL : malloc((size_t)(to - from) + 1);
    if (want) paintFrom(want, from, to - from, a->pattern);
    else if (!a->shadow) return noRoom(d);
    int64_t n = countDiffering(a->base + from, want ? want : a->shadow + from, to - from, &first, &last);
    free(want);
    if (n == 0) return;
    bool after = i > 0 && (i == p->n_blocks || first <= to - from - 1 - last); /* nearer to which neighbour? */
    const char *name = names[p->block[after ? i - 1 : i].slot];
    if (d->outside == 0)
        snprintf(d->outside_where, sizeof d->outside_where,
                 "%lld bytes written %s %s, the nearest %lld from its %s", (long long)n,
                 after ? "after" : "before", name, (long long)(after ? first : to - from - 1 - last),
                 after ? "end" : "start");
    d->outside += n;
}

/* A block whose elements this launch may write: everything but they must still hold the poison. */
static void checkSlack(const dkv_arena *a, int i, dkv_damage *d) {
    const dkv_block_place *b = &a->plan.block[i];
    int64_t first = 0, last = 0;
    if (isDense(a, i)) return;
    uint8_t *scratch = malloc((size_t)b->bytes + 1), *want = a->shadow ? NULL : makeBlock(a, i);
    if (!scratch || (!a->shadow && !want)) {
        free(scratch);
        free(want);
        return noRoom(d);
    }
    memcpy(scratch, a->base + b->offset, (size_t)b->bytes);
    for (int s = 0; s < DKV_N_SLOTS; s++) {
        const dkv_view *w = &a->plan.view[s];
        poison_arg p = {a->pattern, w->elt, 0, 0};
        if (w->present && w->block == i) everyRun(w, isLse(s), scratch - b->offset, repaintRun, &p);
    }
    int64_t n = countDiffering(scratch, want ? want : a->shadow + b->offset, b->bytes, &first, &last);
    free(scratch);
    free(want);
    if (n && d->outside == 0)
        snprintf(d->outside_where, sizeof d->outside_where,
                 "%lld bytes written between the rows of %s, the first at %lld", (long long)n, names[b->slot],
                 (long long)first);
    d->outside += n;
}

/* Bytes of pieces that are not as forward left them; *first: where the first of them begins. */
static int64_t countPieces(const dkv_arena *a, int i, int64_t *first, dkv_damage *d) {
    const dkv_block_place *b = &a->plan.block[i];
    uint64_t *now = dkv_sumPieces(a->base + b->offset, b->bytes, NULL);
    if (!now) noRoom(d);
    const int64_t n = now ? dkv_comparePieces(now, a->kept[i], b->bytes, first) : 0;
    free(now);
    return n;
}

/* Bytes of a block that this launch may only read that are not as they were. */
static int64_t countChanged(const dkv_arena *a, int i, int64_t *first, dkv_damage *d) {
    const dkv_block_place *b = &a->plan.block[i];
    const uint8_t *got = a->base + b->offset;
    int64_t last = 0;
    if (a->shadow) return countDiffering(got, a->shadow + b->offset, b->bytes, first, &last);
    if (a->kept[i]) return countPieces(a, i, first, d);
    if (b->role == DKV_ROLE_INPUT ? isDense(a, i) && isAsGiven(a, i) : isPainted(a, i)) return 0;
    uint8_t *want = makeBlock(a, i);
    if (!want) noRoom(d);
    int64_t n = want ? countDiffering(got, want, b->bytes, first, &last) : 0;
    free(want);
    return n;
}

static void checkKept(const dkv_arena *a, int i, int backward, dkv_damage *d) {
    const dkv_block_place *b = &a->plan.block[i];
    int64_t first = 0, n = countChanged(a, i, &first, d);
    bool input = b->role == DKV_ROLE_INPUT || (backward && b->role == DKV_ROLE_FORWARD);
    if (n == 0) return;
    char *where = input ? d->mutated_where : d->outside_where;
    int64_t *count = input ? &d->mutated : &d->outside;
    const char *name = names[b->slot];
    for (int s = 0; s < DKV_SLOT_WORK; s++) { /* a fused block: which slice? */
        const dkv_view *w = &a->plan.view[s];
        int64_t in_row = (first + b->offset - w->offset) / w->elt;
        if (w->present && w->block == i && first + b->offset >= w->offset &&
            in_row % (w->row > 0 ? w->row : 1) < w->heads * w->dim)
            name = names[s];
    }
    if (*count == 0)
        snprintf(where, sizeof d->mutated_where, "%s%lld bytes of %s %s by %s, the first at byte %lld%s",
                 a->kept[i] ? "some of " : "", (long long)n, name, input ? "changed" : "written",
                 backward ? "backward" : "forward", (long long)first, a->kept[i] ? " or later" : "");
    *count += n;
}

/* What forward left is an input of backward. */
static void keepBlock(dkv_arena *a, int i, dkv_damage *d) {
    const dkv_block_place *b = &a->plan.block[i];
    const uint8_t *from = a->base + b->offset;
    if (a->shadow) dkv_copySpans(a->shadow + b->offset, from, b->bytes);
    else if (!(a->kept[i] = dkv_sumPieces(from, b->bytes, a->kept[i]))) noRoom(d);
}

void dkv_checkArena(dkv_arena *a, int backward, dkv_damage *d) {
    dkv_role written = backward ? DKV_ROLE_BACKWARD : DKV_ROLE_FORWARD;
    for (int i = 0; i <= a->plan.n_blocks; i++) checkGap(a, i, d);
    for (int i = 0; i < a->plan.n_blocks; i++) {
        const dkv_block_place *b = &a->plan.block[i];
        if (b->role == DKV_ROLE_WORK) continue;
        if ((dkv_role)b->role != written) checkKept(a, i, backward, d);
        else checkSlack(a, i, d);
        if (!backward && b->role == DKV_ROLE_FORWARD && a->plan.view[DKV_SLOT_DQ].present) keepBlock(a, i, d);
    }
    if (backward) dropKept(a);
}

/* ---- the launch ---- */

void dkv_makeLaunch(const dkv_plan *plan, uint8_t *base, const dualkv_problem *v, int backward,
                    dualkv_launch *out) {
    dualkv_tensor t[DKV_N_SLOTS];
    memset(out, 0, sizeof *out);
    memset(t, 0, sizeof t);
    for (int s = 0; s < DKV_N_SLOTS; s++) {
        const dkv_view *w = &plan->view[s];
        if (!w->present || (roleOf(s) == DKV_ROLE_BACKWARD && !backward)) continue;
        t[s] = (dualkv_tensor){base + w->offset, w->row, w->head};
    }
    out->size = sizeof *out;
    out->problem = v;
    out->device_segments = v->segments;
    out->device_ranges = v->ranges;
    out->device_alibi_slopes = v->alibi_slopes;
    out->workspace_size = (size_t)plan->workspace[backward ? 1 : 0];
    out->workspace = out->workspace_size ? t[DKV_SLOT_WORK].data : NULL;
    out->q = t[DKV_SLOT_Q];
    out->k = t[DKV_SLOT_K];
    out->v = t[DKV_SLOT_V];
    out->sink = t[DKV_SLOT_SINK].data;
    out->o = t[DKV_SLOT_O];
    out->lse = t[DKV_SLOT_LSE];
    if (!backward) return;
    out->d_o = t[DKV_SLOT_DO];
    out->d_lse = t[DKV_SLOT_DLSE];
    out->dq = t[DKV_SLOT_DQ];
    out->dk = t[DKV_SLOT_DK];
    out->dv = t[DKV_SLOT_DV];
    out->dsink = t[DKV_SLOT_DSINK].data;
}
