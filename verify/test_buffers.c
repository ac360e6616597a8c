/* Buffers: strides and what the poison finds, in every layout, packed and with a key-only prompt. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <unistd.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "buffers.h"
#include "spares.h"

static const char *const lines[] = {
    "shape=5+2x3 heads=4:2 dim=8:4 dlse=on sinklogit=1",
    "shape=7k+2@3,4 heads=3:1 dim=5 dtype=fp32 dlse=on",
    "shape=1 dim=1 dtype=fp16",
    "shape=0+0/4+1 heads=2:2 dim=3 grad=off sinklogit=0",
    "shape=0+1 dim=2",
};
enum { N_LINES = sizeof lines / sizeof lines[0] };

static bool shadowed = true; /* arenas of the fixtures */

typedef struct fixture {
    dkv_problem p;
    dkv_layout l;
    dkv_inputs in;
    dkv_plan plan;
    dkv_arena arena;
} fixture;

static void setUp(fixture *f, const char *line, dkv_layout_kind layout, int32_t align, size_t work) {
    dkv_err err = {0};
    memset(f, 0, sizeof *f);
    if (dkv_parseProblem(line, NULL, &f->p, &err) || dkv_makeLayout(&f->p, &f->l, &err) ||
        dkv_allocInputs(&f->l, &f->in, &err) ||
        dkv_planBuffers(&f->l.view, layout, align, false, work, 2 * work, &f->plan, &err) ||
        dkv_openArena(&f->plan, shadowed, &f->arena, &err))
        fail_msg("%s: %s", line, err.text);
    const dualkv_problem *v = &f->l.view;
    size_t e = dkv_dtypeSize(f->p.dtype);
    memset(f->in.q, 1, (size_t)(v->tq * v->hq * v->dqk) * e);
    memset(f->in.k, 2, (size_t)(v->tk * v->hkv * v->dqk) * e);
    memset(f->in.v, 3, (size_t)(v->tk * v->hkv * v->dv) * e);
    if (f->in.d_o) memset(f->in.d_o, 4, (size_t)(v->tq * v->hq * v->dv) * e);
    dkv_fillArena(&f->arena, dkv_poisonPattern(0, 0), &f->in, NULL);
}

static void tearDown(fixture *f) {
    dkv_closeArena(&f->arena);
    dkv_freeInputs(&f->in);
    dkv_freeLayout(&f->l);
    dkv_freeProblem(&f->p);
}

static uint8_t *at(const fixture *f, int slot, int64_t t, int64_t h, int64_t c) {
    const dkv_view *w = &f->arena.plan.view[slot];
    return f->arena.base + w->offset + (t * w->row + h * w->head + c) * w->elt;
}

/* Writes a different number into every output through the strides of the launch, the way a kernel does. */
static void writeOutputs(fixture *f, int backward, dkv_outputs *want) {
    double next = 1;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        dkv_slot s = dkv_outputSlot((dkv_tensor_id)id);
        const dkv_view *w = &f->arena.plan.view[s];
        double *to = dkv_outputAt(want, (dkv_tensor_id)id);
        bool fp32 = id == DKV_LSE || id == DKV_DSINK;
        if (!w->present || !to || (id >= DKV_DQ) != (backward != 0)) continue;
        for (int64_t t = 0; t < w->rows; t++)
            for (int64_t h = 0; h < w->heads; h++)
                for (int64_t c = 0; c < w->dim; c++) {
                    double x = fmod(next++, 200); /* exact in every type */
                    to[id == DKV_LSE ? h * w->rows + t : (t * w->heads + h) * w->dim + c] = x;
                    dkv_encodeArray(&x, fp32 ? DUALKV_FP32 : f->p.dtype, 1, at(f, (int)s, t, h, c));
                }
    }
}

static void elements_are_where_the_strides_say(void **state) {
    shadowed = *state == NULL;
    for (int i = 0; i < N_LINES; i++)
        for (int layout = DKV_CONTIGUOUS; layout <= DKV_STRIDED; layout++) {
            fixture f;
            dkv_outputs want, got;
            dkv_damage d = {0};
            dkv_err err;
            int64_t n[DKV_N_OUTPUTS];
            setUp(&f, lines[i], (dkv_layout_kind)layout, 1, 100);
            assert_int_equal(dkv_allocOutputs(&f.l, &want, &err), 0);
            assert_int_equal(dkv_allocOutputs(&f.l, &got, &err), 0);
            dkv_countOutputs(&f.l, n);
            for (int b = 0; b <= f.p.grad; b++) {
                for (int id = b ? DKV_DQ : 0; id < (b ? DKV_N_OUTPUTS : DKV_DQ); id++)
                    assert_int_equal(dkv_countPoison(&f.arena, (dkv_tensor_id)id, NULL), n[id]);
                writeOutputs(&f, b, &want);
                dkv_gatherOutputs(&f.arena, f.p.dtype, b, &got);
                dkv_checkArena(&f.arena, b, &d);
                for (int id = b ? DKV_DQ : 0; id < (b ? DKV_N_OUTPUTS : DKV_DQ); id++)
                    assert_int_equal(dkv_countPoison(&f.arena, (dkv_tensor_id)id, NULL), 0);
            }
            if (d.outside || d.mutated)
                fail_msg("%s, layout %d: %s %s", lines[i], layout, d.outside_where, d.mutated_where);
            for (int id = 0; id < DKV_N_OUTPUTS; id++)
                if (n[id])
                    assert_memory_equal(dkv_outputAt(&want, (dkv_tensor_id)id),
                                        dkv_outputAt(&got, (dkv_tensor_id)id),
                                        (size_t)n[id] * sizeof(double));
            dkv_freeOutputs(&want);
            dkv_freeOutputs(&got);
            tearDown(&f);
        }
}

/* Every byte of the arena belongs to exactly one thing, and whoever touches another's is told so. */
static void every_stray_byte_is_found(void **state) {
    shadowed = *state == NULL;
    for (int layout = DKV_CONTIGUOUS; layout <= DKV_STRIDED; layout++)
        for (int backward = 0; backward < 2; backward++) {
            fixture f;
            dkv_outputs want;
            dkv_err err;
            setUp(&f, lines[0], (dkv_layout_kind)layout, 1, 100);
            assert_int_equal(dkv_allocOutputs(&f.l, &want, &err), 0);
            uint8_t *owner = calloc(1, (size_t)f.plan.size), *before = malloc((size_t)f.plan.size);
            uint8_t *shadow = calloc(1, (size_t)f.plan.size);
            for (int s = 0; s < DKV_N_SLOTS;
                 s++) { /* 1: input, 2: of forward, 3: of backward, 4: workspace */
                const dkv_view *w = &f.plan.view[s];
                for (int64_t t = 0; w->present && t < w->rows; t++)
                    for (int64_t h = 0; h < w->heads; h++)
                        for (int64_t c = 0; c < w->dim * w->elt; c++) {
                            uint8_t *o = owner + (at(&f, s, t, h, 0) - f.arena.base) + c;
                            assert_int_equal(*o, 0);
                            *o = s < DKV_SLOT_O ? 1 : s < DKV_SLOT_DQ ? 2 : s < DKV_SLOT_WORK ? 3 : 4;
                        }
            }
            writeOutputs(&f, 0, &want);
            if (backward) dkv_checkArena(&f.arena, 0, &(dkv_damage){0});
            memcpy(before, f.arena.base, (size_t)f.plan.size);
            if (shadowed) memcpy(shadow, f.arena.shadow, (size_t)f.plan.size);
            for (int64_t i = 0; i < f.plan.size; i += layout == DKV_CONTIGUOUS ? 1 : 7) {
                dkv_damage d = {0};
                if (!shadowed && backward) dkv_checkArena(&f.arena, 0, &d); /* backward's check forgets what forward left */
                f.arena.base[i] ^= 0x55;
                dkv_checkArena(&f.arena, backward, &d);
                bool may = owner[i] == 4 || owner[i] == (backward ? 3 : 2);
                bool input = owner[i] == 1 || (backward && owner[i] == 2);
                if (may && (d.outside || d.mutated)) fail_msg("byte %lld: false alarm", (long long)i);
                if (!may && !d.outside && !d.mutated) fail_msg("byte %lld: not found", (long long)i);
                const bool summed = !shadowed && owner[i] == 2; /* of that a whole piece differs */
                if (input && (summed ? d.mutated < 1 : d.mutated != 1))
                    fail_msg("byte %lld: an input, %s", (long long)i, d.outside_where);
                f.arena.base[i] = before[i];
                if (shadowed) memcpy(f.arena.shadow, shadow, (size_t)f.plan.size); /* forward's check keeps what it saw of O */
            }
            free(owner);
            free(before);
            free(shadow);
            dkv_freeOutputs(&want);
            tearDown(&f);
        }
}

static void damage_says_where(void **state) {
    shadowed = *state == NULL;
    fixture f;
    dkv_damage d = {0};
    setUp(&f, "shape=5+2x3 heads=4:2 dim=8", DKV_CONTIGUOUS, 16, 0);
    memset(at(&f, DKV_SLOT_O, 10, 3, 8), 0, 6); /* right behind the last element of 11 rows, 4 heads */
    dkv_checkArena(&f.arena, 0, &d);
    assert_int_equal(d.outside, 6);
    assert_non_null(strstr(d.outside_where, "6 bytes written after O, the nearest 0"));
    tearDown(&f);
    setUp(&f, "shape=5+2x3 heads=4:2 dim=8", DKV_FUSED, 1, 0);
    memset(&d, 0, sizeof d);
    *at(&f, DKV_SLOT_V, 1, 0, 0) ^= 1;
    dkv_checkArena(&f.arena, 0, &d);
    assert_int_equal(d.mutated, 1);
    assert_non_null(strstr(d.mutated_where, "1 bytes of V changed by forward"));
    tearDown(&f);
}

/* ---- replicated inputs and outputs, spread and summed in the arena ---- */

typedef struct spread {
    dkv_layout l;
    dkv_inputs in;
    int64_t *q_source, *k_source;
    uint8_t *q_own;
    dkv_plan plan;
    dkv_arena shadowed, lean;
    dkv_expansion expand;
} spread;

static void openSpread(fixture *f, spread *s, dkv_layout_kind layout) {
    dkv_err err = {0};
    memset(s, 0, sizeof *s);
    for (int64_t i = 0; i < f->l.view.tq * f->p.hq * f->p.dqk; i++) ((uint8_t *)f->in.q)[i] = (uint8_t)(i * 7);
    for (int64_t i = 0; i < f->l.view.tk * f->p.hkv * f->p.dv; i++) ((uint8_t *)f->in.v)[i] = (uint8_t)(i * 11);
    for (int64_t i = 0; f->in.d_lse && i < f->l.view.tq * f->p.hq; i++) f->in.d_lse[i] = (float)i;
    if (dkv_makeReplicated(&f->p, &f->l, &s->l, &s->q_source, &s->k_source, &s->q_own, &err) ||
        dkv_replicateInputs(&f->l, &s->l, s->q_source, s->k_source, s->q_own, &f->in, &s->in, &err) ||
        dkv_planBuffers(&s->l.view, layout, 1, false, 100, 200, &s->plan, &err) ||
        dkv_openArena(&s->plan, true, &s->shadowed, &err) || dkv_openArena(&s->plan, false, &s->lean, &err))
        fail_msg("%s", err.text);
    s->expand = (dkv_expansion){s->q_source, s->k_source, s->q_own, f->l.view.tq};
    dkv_fillArena(&s->shadowed, dkv_poisonPattern(0, 1), &s->in, NULL);
    dkv_fillArena(&s->lean, dkv_poisonPattern(0, 1), &f->in, &s->expand);
    assert_memory_equal(s->shadowed.base, s->lean.base, (size_t)s->plan.size);
}

static void closeSpread(spread *s) {
    dkv_closeArena(&s->shadowed);
    dkv_closeArena(&s->lean);
    dkv_freeInputs(&s->in);
    dkv_freeLayout(&s->l);
    free(s->q_source);
    free(s->k_source);
    free(s->q_own);
}

/* A number of its own in every element of every output. */
static void scribble(spread *s, const dkv_problem *p) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const dkv_view *w = &s->plan.view[dkv_outputSlot((dkv_tensor_id)id)];
        bool fp32 = id == DKV_LSE || id == DKV_DSINK;
        double next = id;
        for (int64_t t = 0; w->present && t < w->rows; t++)
            for (int64_t h = 0; h < w->heads; h++)
                for (int64_t c = 0; c < w->dim; c++, next++) {
                    double x = sin(next);
                    dkv_encodeArray(&x, fp32 ? DUALKV_FP32 : p->dtype, 1, dkv_elementRow(w, s->lean.base, t, h) + c * w->elt);
                }
    }
}

static bool isNot(double x, int64_t at, void *arg) {
    (void)at;
    return x != *(const double *)arg;
}

static void outputs_are_summed_as_they_were_packed(void **state) {
    (void)state;
    for (int i = 0; i < N_LINES; i++)
        for (int layout = DKV_CONTIGUOUS; layout <= DKV_STRIDED; layout++) {
            fixture f;
            spread s;
            dkv_outputs rep, want, got;
            dkv_err err = {0};
            int64_t n[DKV_N_OUTPUTS];
            uint64_t bits = 0, other = 0;
            double odd = 12345, found = 0;
            setUp(&f, lines[i], DKV_CONTIGUOUS, 1, 0);
            openSpread(&f, &s, (dkv_layout_kind)layout);
            scribble(&s, &f.p);
            assert_int_equal(dkv_allocOutputs(&s.l, &rep, &err), 0);
            assert_int_equal(dkv_allocOutputs(&f.l, &want, &err), 0);
            assert_int_equal(dkv_allocOutputs(&f.l, &got, &err), 0);
            for (int b = 0; b <= f.p.grad; b++) {
                dkv_gatherOutputs(&s.lean, f.p.dtype, b, &rep);
                assert_int_equal(dkv_sumOutputs(&s.lean, f.p.dtype, b, &f.l, &got, &bits, &err), 0);
            }
            assert_int_equal(dkv_packOutputs(&f.l, &s.l, s.q_source, s.k_source, s.q_own, &rep, &want, &err), 0);
            dkv_countOutputs(&f.l, n);
            for (int id = 0; id < DKV_N_OUTPUTS; id++)
                if (n[id])
                    assert_memory_equal(dkv_outputAt(&want, (dkv_tensor_id)id), dkv_outputAt(&got, (dkv_tensor_id)id),
                                        (size_t)n[id] * sizeof(double));
            const dkv_view *o = &s.plan.view[DKV_SLOT_O];
            for (int64_t t = 0; t < o->rows; t++) { /* a copy that is another */
                dkv_encodeArray(&odd, f.p.dtype, 1, dkv_elementRow(o, s.lean.base, t, o->heads - 1));
                dkv_decodeArray(dkv_elementRow(o, s.lean.base, t, o->heads - 1), f.p.dtype, 1, &odd);
                int64_t at = dkv_findCopy(&s.lean, f.p.dtype, isNot, &odd, &found);
                if (s.q_own[t]) {
                    assert_int_equal(at, -1);
                } else {
                    assert_int_equal(at, (s.q_source[t] * o->heads + o->heads - 1) * o->dim);
                    break;
                }
                double back = 0.5;
                dkv_encodeArray(&back, f.p.dtype, 1, dkv_elementRow(o, s.lean.base, t, o->heads - 1));
            }
            for (int b = 0; b <= f.p.grad; b++)
                assert_int_equal(dkv_sumOutputs(&s.lean, f.p.dtype, b, &f.l, &got, &other, &err), 0);
            if (o->rows) assert_true(bits != other);
            dkv_freeOutputs(&rep);
            dkv_freeOutputs(&want);
            dkv_freeOutputs(&got);
            closeSpread(&s);
            tearDown(&f);
        }
}

static void alignment_is_given_or_refused(void **state) {
    shadowed = *state == NULL;
    for (int layout = DKV_CONTIGUOUS; layout <= DKV_STRIDED; layout++)
        for (int32_t align = 1; align <= 256; align *= 2) {
            fixture f;
            dkv_err err = {0};
            dkv_plan plan;
            setUp(&f, "shape=5+2x3 heads=4:2 dim=24:40", (dkv_layout_kind)layout, 1, 0);
            int rc = dkv_planBuffers(&f.l.view, (dkv_layout_kind)layout, align, false, 0, 0, &plan, &err);
            bool can =
                align <= 16 || layout == DKV_PADDED || layout == DKV_STRIDED; /* 48 and 80 byte heads */
            assert_int_equal(rc, can ? 0 : DKV_EREFUSED);
            for (int s = 0; s < DKV_SLOT_WORK && can; s++) {
                const dkv_view *w = &plan.view[s];
                if (!w->present || s == DKV_SLOT_LSE) continue;
                assert_int_equal(w->offset % align, 0);
                assert_int_equal(w->row * w->elt % align, 0);
                assert_int_equal(w->head * w->elt % align, 0);
            }
            tearDown(&f);
        }
}

/* Odd multiples of what is needed, or what an allocator would give; the strides are the same. */
static void addresses_are_odd_or_natural(void **state) {
    (void)state;
    for (int layout = DKV_CONTIGUOUS; layout <= DKV_STRIDED; layout++)
        for (int32_t align = 2; align <= 4096; align *= 2) {
            fixture f;
            dkv_err err = {0};
            dkv_plan odd, natural;
            setUp(&f, "shape=5+2x3 heads=4:2 dim=256 dtype=fp32", (dkv_layout_kind)layout, 1, 0);
            int rc = dkv_planBuffers(&f.l.view, (dkv_layout_kind)layout, align, false, 99, 0, &odd, &err);
            rc |= dkv_planBuffers(&f.l.view, (dkv_layout_kind)layout, align, true, 99, 0, &natural, &err);
            for (int i = 0; i < odd.n_blocks && !rc; i++) {
                int32_t a = odd.block[i].slot == DKV_SLOT_WORK ? 256 : align < 4 ? 4 : align;
                assert_int_equal(odd.block[i].offset % (2 * a), a);
                assert_int_equal(natural.block[i].offset % (align > 256 ? align : 256), 0);
                assert_int_equal(odd.block[i].bytes, natural.block[i].bytes);
            }
            assert_int_equal(rc, align <= 1024 || layout >= DKV_PADDED ? 0 : DKV_EREFUSED);
            tearDown(&f);
        }
}

static void strides_of_dO_are_its_own(void **state) {
    (void)state;
    for (int layout = DKV_PADDED; layout <= DKV_STRIDED; layout++) {
        fixture f;
        setUp(&f, lines[0], (dkv_layout_kind)layout, 1, 0);
        const dkv_view *o = &f.plan.view[DKV_SLOT_O], *d = &f.plan.view[DKV_SLOT_DO];
        const dkv_view *lse = &f.plan.view[DKV_SLOT_LSE], *dlse = &f.plan.view[DKV_SLOT_DLSE];
        assert_true(o->row != d->row);
        assert_true(lse->row != dlse->row || lse->head != dlse->head);
        tearDown(&f);
    }
}

static void patterns_are_nan_in_every_type(void **state) {
    (void)state;
    uint16_t first[4];
    for (int i = 0; i < 300; i++) {
        uint16_t x = dkv_poisonPattern(7, i);
        for (int k = 0; k < 4; k++) first[k] = dkv_poisonPattern((uint32_t)i, k);
        for (int k = 0; k < 4; k++) /* the runs of a case differ */
            for (int j = 0; j < k; j++) assert_int_not_equal(first[k], first[j]);
        uint32_t wide = x * 0x10001u;
        float f;
        memcpy(&f, &wide, sizeof f);
        assert_true(isnan(dkv_decode16(x, DUALKV_BF16)) && isnan(dkv_decode16(x, DUALKV_FP16)) && isnan(f));
        if (i) assert_true(x != dkv_poisonPattern(7, i - 1));
    }
}

static void huge_sizes_are_refused(void **state) {
    (void)state;
    dkv_plan plan;
    dkv_err err = {0};
    dualkv_problem v = {
        .size = sizeof v, .hq = 1 << 30, .hkv = 1, .dqk = 256, .dv = 256, .tq = (int64_t)1 << 40, .tk = 1};
    assert_int_equal(dkv_planBuffers(&v, DKV_CONTIGUOUS, 1, false, 0, 0, &plan, &err), DKV_EUSER);
    v.tq = v.hq = 1;
    assert_int_equal(dkv_planBuffers(&v, DKV_CONTIGUOUS, 1, false, SIZE_MAX, 0, &plan, &err), DKV_EUSER);
}

/* A kernel holds the descriptor, or can have it from the mapping: cut off, the memory would end us, too. */
static void nobody_cuts_the_arena(void **state) {
    (void)state;
    fixture f;
    dkv_arena a;
    dkv_err err = {0};
    setUp(&f, lines[0], DKV_CONTIGUOUS, 1, 0);
    assert_int_equal(dkv_openArena(&f.plan, true, &a, &err), 0);
    assert_true(ftruncate(a.fd, 0) < 0 && errno == EPERM);
    assert_true(ftruncate(a.fd, f.plan.size * 2) < 0);
    ((volatile uint8_t *)a.base)[f.plan.size - 1] = 1;
    dkv_closeArena(&a);
    tearDown(&f);
}

/* The same pages again for another plan, all of them written anew; the largest stay; a lean one and one that is too large do not. */
static void spares_are_used_again(void **state) {
    (void)state;
    dkv_spares spares = {0};
    dkv_err err = {0};
    dkv_arena a, b;
    fixture small, f;
    shadowed = true;
    setUp(&small, lines[0], DKV_CONTIGUOUS, 2, 0);
    setUp(&f, lines[1], DKV_PADDED, 2, 1000);
    dkv_plan large = f.plan;
    large.size = DKV_ARENA_SMALL + 4096;
    assert_int_equal(dkv_takeArena(&spares, &f.plan, true, &a, &err), 0);
    memset(a.base, 0, (size_t)a.room);
    memset(a.shadow, 0, (size_t)a.room);
    const uint8_t *was = a.base;
    dkv_giveArena(&spares, &a);
    assert_int_equal(dkv_takeArena(&spares, &f.plan, false, &a, &err), 0);
    assert_null(a.shadow);
    dkv_giveArena(&spares, &a);
    assert_int_equal(dkv_takeArena(&spares, &large, true, &b, &err), 0);
    dkv_giveArena(&spares, &b);
    for (int i = 0; i < DKV_SPARES; i++) assert_true(!spares.arena[i].room || spares.arena[i].base == was);
    const fixture *const of[] = {&f, &small};
    for (int i = 0; i < 2; i++) {
        const dkv_arena *want = &of[i]->arena;
        assert_int_equal(dkv_takeArena(&spares, &of[i]->plan, true, &a, &err), 0);
        if (i == 0 || small.plan.size <= a.room) assert_ptr_equal(a.base, was);
        dkv_fillArena(&a, dkv_poisonPattern(0, 0), &of[i]->in, NULL);
        assert_memory_equal(a.base, want->base, (size_t)of[i]->plan.size);
        assert_memory_equal(a.shadow, want->shadow, (size_t)of[i]->plan.size);
        dkv_giveArena(&spares, &a);
    }
    dkv_dropSpares(&spares);
    tearDown(&f);
    tearDown(&small);
}

int main(void) {
    static int lean; /* no shadow */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(spares_are_used_again),
        cmocka_unit_test_prestate(elements_are_where_the_strides_say, &lean),
        cmocka_unit_test_prestate(every_stray_byte_is_found, &lean),
        cmocka_unit_test_prestate(damage_says_where, &lean),
        cmocka_unit_test(outputs_are_summed_as_they_were_packed),
        cmocka_unit_test(elements_are_where_the_strides_say),
        cmocka_unit_test(every_stray_byte_is_found),
        cmocka_unit_test(damage_says_where),
        cmocka_unit_test(alignment_is_given_or_refused),
        cmocka_unit_test(addresses_are_odd_or_natural),
        cmocka_unit_test(strides_of_dO_are_its_own),
        cmocka_unit_test(patterns_are_nan_in_every_type),
        cmocka_unit_test(huge_sizes_are_refused),
        cmocka_unit_test(nobody_cuts_the_arena),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
