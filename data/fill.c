#include "fill.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "../ref/mask.h"
#include "casefile.h"
#include "recorded.h"
#include "rng.h"

/* Every element starts as a standard normal deviate; a fill changes the vectors of one (tensor, token, head).
 */
typedef enum tensor { T_Q, T_K, T_V, T_DO, N_TENSORS } tensor;
static const uint32_t streams[N_TENSORS] = {DKV_STREAM_Q, DKV_STREAM_K, DKV_STREAM_V, DKV_STREAM_DO};

typedef struct context {
    const dkv_problem *p;
    const dkv_layout *l;
    int32_t victim;
    dkv_recorded recorded;
} context;

/* One vector: token t of segment seg, head of the tensor, n elements, packed row `row`. */
typedef struct vec {
    tensor id;
    int32_t seg, head, kv_head, n;
    int64_t t, row;
    double *x;
} vec;

typedef void (*shape_fn)(const context *c, const vec *v);

/* ---- what fills are made of ---- */

static int32_t heads_of(const dkv_problem *p, tensor id) { return id == T_Q || id == T_DO ? p->hq : p->hkv; }
static int32_t dim_of(const dkv_problem *p, tensor id) { return id == T_Q || id == T_K ? p->dqk : p->dv; }

static void multiply(const vec *v, double factor) {
    for (int32_t i = 0; i < v->n; i++) v->x[i] *= factor;
}

/* +1 or -1: a fixed vector of signs for each KV head, `which` of several. */
static double sign_of(const context *c, uint32_t which, int32_t kv_head, int32_t i) {
    return dkv_draw32(c->p->seed, DKV_STREAM_SIGN, which, (uint64_t)kv_head * 256 + (uint64_t)i) & 1 ? 1 : -1;
}

/* x = a x + b signs */
static void blend(const context *c, const vec *v, double a, double b, uint32_t which) {
    for (int32_t i = 0; i < v->n; i++) v->x[i] = a * v->x[i] + b * sign_of(c, which, v->kv_head, i);
}

/* The factor b with which q = signs and k = b signs score `logit`; bounded so that no 16-bit type overflows.
 */
static double key_factor(const context *c, double logit) {
    double b = logit / (c->p->scale * c->p->dqk);
    return b > 1000 ? 1000 : b < -1000 ? -1000 : b;
}

static bool is_query(const vec *v) { return v->id == T_Q; }
static bool is_key(const vec *v) { return v->id == T_K; }

/* Position of the token, as a key, in the list of every segment that sees it. */
static int64_t position(const context *c, const vec *v) { return c->l->segments[v->seg].context + v->t; }

/* A normal vector again, at another row of the tensor or in a sub-stream of its own. */
static void redraw(const context *c, const vec *v, uint32_t sub, int64_t row) {
    int32_t heads = heads_of(c->p, v->id);
    dkv_fillNormals(c->p->seed, streams[v->id], sub,
                    ((uint64_t)row * (uint64_t)heads + (uint64_t)v->head) * (uint64_t)v->n, v->n, v->x);
}

/* ---- fills ---- */

static void fill_hot(const context *c, const vec *v) {
    (void)c;
    if (is_query(v)) multiply(v, 10);
}

static void fill_cold(const context *c, const vec *v) {
    (void)c;
    if (is_query(v)) multiply(v, 0x1p-10);
}

/* Raw dot products near 2^14 sqrt(D): beyond fp16 where a kernel keeps them so; meant for scale=0.0001 and
 * the like. */
static void fill_rawdot(const context *c, const vec *v) {
    (void)c;
    if (is_query(v) || is_key(v)) multiply(v, 128);
}

static void fill_outlier(const context *c, const vec *v) {
    if (v->id != T_K && v->id != T_V) return;
    for (int32_t k = 0; k <= v->n / 32; k++) /* the same channels for all tokens */
        v->x[dkv_draw32(c->p->seed, DKV_STREAM_PICK, v->id, (uint64_t)k) % (uint32_t)v->n] *= 30;
}

static void fill_dominant(const context *c, const vec *v) {
    const dkv_node *n = &c->p->nodes[v->seg];
    int64_t chosen = n->depth ? 0 : n->len / 2; /* below an empty root: each segment's first token */
    if (is_query(v)) blend(c, v, 1, 1, 0);
    if (is_key(v) && v->t == chosen && position(c, v) == chosen) blend(c, v, 0, key_factor(c, 14), 0);
}

/* The key that row t of segment seg is aimed at: one of the keys that it sees, cycling over the first, the
 * last, and those beside edges of ranges, windows, chunks and tiles. -1: it sees none. */
static int64_t aim(const context *c, int32_t seg, int64_t t, uint64_t turn) {
    const dkv_problem *p = c->p;
    const dualkv_segment *s = &c->l->segments[seg];
    int64_t at = s->context + t, all = s->context + s->k_len, list[96];
    int n = 0;
    int64_t low = p->mask == DUALKV_WINDOW  ? at - p->window + 1
                  : p->mask == DUALKV_CHUNK ? at / p->chunk * p->chunk
                  : p->mask == DUALKV_BLOCK ? at / p->block * p->block
                                            : 0;
    int64_t ends[] = {0,      1,      p->window_sinks - 1, p->window_sinks, low - 1, low, low + 1, at - 1, at,
                      at + 1, all - 1};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) list[n++] = ends[i];
    for (int32_t k = 0; k < s->range_count && k < DKV_DEPTH_MAX; k++) {
        const dualkv_range *g = &c->l->ranges[s->range_begin + k];
        uint32_t draw = dkv_draw32(p->seed, DKV_STREAM_PICK, 8, turn * DKV_DEPTH_MAX + (uint64_t)k);
        int64_t tile = 16 << (draw & 3), edge = (draw >> 2) % ((uint64_t)g->len / (uint64_t)tile + 1) * tile;
        int64_t beside[] = {g->pos, g->pos + g->len - 1, g->pos + edge - 1, g->pos + edge, g->pos + edge + 1};
        for (int i = 0; i < 5; i++) list[n++] = beside[i];
    }
    int seen = 0;
    for (int i = 0; i < n; i++)
        if (list[i] >= 0 && list[i] < all && dkv_maskSees(p, seg, t, list[i])) list[seen++] = list[i];
    if (seen) return list[turn % (uint64_t)seen];
    for (int64_t j = all - 1; j >= 0; j--) /* a block mask may have dropped all of these */
        if (dkv_maskSees(p, seg, t, j)) return j;
    return -1;
}

/* Keys on a sphere and q = a k: the key aimed at has the highest score of all. */
static void fill_needle(const context *c, const vec *v) {
    if (!is_query(v) && !is_key(v)) return;
    vec key = *v;
    if (is_query(v)) {
        const dualkv_segment *s = &c->l->segments[v->seg];
        int64_t j = aim(c, v->seg, v->t, (uint64_t)v->row * (uint64_t)c->p->hq + (uint64_t)v->head);
        if (j < 0) return;
        const dualkv_range *g = &c->l->ranges[s->range_begin];
        while (j >= g->pos + g->len) g++;
        key.id = T_K;
        key.head = v->kv_head;
        redraw(c, &key, 0, g->k_start + j - g->pos);
    }
    double norm = 0;
    for (int32_t i = 0; i < v->n; i++) norm += v->x[i] * v->x[i];
    multiply(v, sqrt(v->n / norm) * (is_query(v) ? key_factor(c, 40) : 1));
}

/* Equal scores, small integers: p = 1/n and every sum is exact in fp32 in any order. */
static void fill_exact(const context *c, const vec *v) {
    uint32_t wide = v->id == T_V ? 17 : 5; /* V -8..8; K, dO -2..2 */
    for (int32_t i = 0; i < v->n; i++) {
        uint64_t index =
            ((uint64_t)v->row * (uint64_t)heads_of(c->p, v->id) + (uint64_t)v->head) * (uint64_t)v->n;
        int32_t draw = (int32_t)(dkv_draw32(c->p->seed, streams[v->id], 1, index + (uint64_t)i) % wide);
        v->x[i] = is_query(v) ? 0 : draw - (int32_t)(wide / 2);
    }
}

static void fill_ties(const context *c, const vec *v) {
    if (is_key(v)) redraw(c, v, 0, dkv_draw32(c->p->seed, DKV_STREAM_PICK, 2, (uint64_t)v->row) % 3);
}

static void fill_constv(const context *c, const vec *v) {
    if (v->id == T_V) redraw(c, v, 0, 0);
}

/* V and dO nearly parallel: dP and delta are large and cancel. */
static void fill_aligned(const context *c, const vec *v) {
    if (v->id == T_V) blend(c, v, 0.1, 1, 1);
    if (v->id == T_DO) blend(c, v, 0.1, 1 + 0.1 * v->x[0], 1);
}

static void fill_huge(const context *c, const vec *v) {
    bool half = c->p->dtype == DUALKV_FP16; /* its largest number is 65504 */
    if (v->id == T_V) multiply(v, half ? 0x1p5 : 0x1p40);
    if (v->id == T_DO) multiply(v, half ? 0x1p2 : 0x1p20);
}

/* Half of V's numbers below the type's normal range (for fp32 just above it: only products are subnormal). */
static void fill_subnormal(const context *c, const vec *v) {
    static const double smallest[] = {
        [DUALKV_BF16] = 0x1p-126, [DUALKV_FP16] = 0x1p-14, [DUALKV_FP32] = 0x1p-118};
    if (v->id == T_V) multiply(v, smallest[c->p->dtype]);
}

/* A stream for each (group, depth): siblings are the same token for token. */
static void fill_duplicated(const context *c, const vec *v) {
    const dkv_node *n = &c->p->nodes[v->seg];
    redraw(c, v, 1 + (uint32_t)n->group * DKV_DEPTH_MAX + (uint32_t)n->depth, v->t);
}

static void fill_dupkeys(const context *c, const vec *v) {
    if (is_key(v)) redraw(c, v, 0, v->row / 4);
}

/* Logits rise by 40 from the first position to the last: the running maximum moves at every tile. */
static void slope(const context *c, const vec *v, double rise) {
    int64_t last = c->l->view.max_k_len > 1 ? c->l->view.max_k_len - 1 : 1;
    if (is_query(v)) blend(c, v, 0.25, 1, 0);
    if (is_key(v)) blend(c, v, 0.25, key_factor(c, rise * ((double)position(c, v) / (double)last - 0.5)), 0);
}

static void fill_ascending(const context *c, const vec *v) { slope(c, v, 40); }
static void fill_descending(const context *c, const vec *v) { slope(c, v, -40); }

/* Adds `logit` to the scores of this key; queries are the signs and a little noise. */
static void shift(const context *c, const vec *v, double logit) {
    if (is_query(v)) blend(c, v, 0.05, 1, 0);
    if (is_key(v)) blend(c, v, 1, key_factor(c, logit), 0);
}

static void fill_lowlogit(const context *c, const vec *v) { shift(c, v, -100); }
static void fill_prefixhot(const context *c, const vec *v) {
    shift(c, v, c->p->nodes[v->seg].depth ? 0 : 100);
}
static void fill_ownhot(const context *c, const vec *v) { shift(c, v, c->p->nodes[v->seg].depth ? 100 : 0); }

/* Student's t with 3 degrees of freedom, cut at 60; whole rows of Q and K differ in size as well. */
static void fill_heavy(const context *c, const vec *v) {
    double y[3];
    uint64_t base = ((uint64_t)v->row * (uint64_t)heads_of(c->p, v->id) + (uint64_t)v->head) * 257;
    double row =
        is_query(v) || is_key(v) ? 2 * dkv_uniform(dkv_draw32(c->p->seed, DKV_STREAM_TAIL, v->id, base)) : 1;
    for (int32_t i = 0; i < v->n; i++) {
        dkv_fillNormals(c->p->seed, DKV_STREAM_TAIL, 8 + (uint32_t)v->id, (base + 1 + (uint64_t)i) * 4, 3, y);
        double x = row * v->x[i] / sqrt((y[0] * y[0] + y[1] * y[1] + y[2] * y[2]) / 3);
        v->x[i] = x > 60 ? 60 : x < -60 ? -60 : x;
    }
}

static void plant(const context *c, const vec *v, double what) {
    if (v->seg != c->victim || v->id == T_DO) return;
    for (int32_t i = 0; i < v->n; i++) v->x[i] = what;
}

static void fill_nanresp(const context *c, const vec *v) { plant(c, v, NAN); }
static void fill_infresp(const context *c, const vec *v) { plant(c, v, INFINITY); }

static void fill_recorded(const context *c, const vec *v) {
    if (v->id != T_DO) dkv_readRecorded(&c->recorded, v->seg, v->t, v->id, v->head, v->x);
}

/* Never called: dkv_readCaseInputs reads the whole file. */
static void fill_file(const context *c, const vec *v) { (void)c, (void)v; }

/* ---- the table ---- */

typedef struct fill_row {
    const char *name, *help;
    shape_fn shape; /* NULL: normal deviates as they are */
} fill_row;

static const fill_row fills[] = {
    {"normal", "standard normal Q, K, V, dO", NULL},
    {"hot", "large logits: Q times 10", fill_hot},
    {"cold", "tiny logits: Q times 2^-10", fill_cold},
    {"rawdot", "Q and K times 128: raw dot products beyond fp16, for a small scale", fill_rawdot},
    {"outlier", "a few channels of K and V times 30", fill_outlier},
    {"dominant", "one key takes most of the mass", fill_dominant},
    {"needle", "each row's mass on one key: first, last, beside range and tile edges", fill_needle},
    {"exact", "equal scores, V and dO small integers", fill_exact},
    {"ties", "three different keys, so that scores tie", fill_ties},
    {"constv", "V the same for all tokens: O must be V", fill_constv},
    {"aligned", "V and dO nearly parallel: dP and delta cancel", fill_aligned},
    {"huge", "V and dO large, results within the type's range", fill_huge},
    {"subnormal", "V at the type's smallest normal number", fill_subnormal},
    {"duplicated", "siblings identical token for token", fill_duplicated},
    {"dupkeys", "keys in fours of the same vector", fill_dupkeys},
    {"ascending", "logits rise along the keys: the running maximum always moves", fill_ascending},
    {"descending", "logits fall along the keys", fill_descending},
    {"lowlogit", "logits near -100", fill_lowlogit},
    {"prefixhot", "the prompt's logits 100 above the others", fill_prefixhot},
    {"ownhot", "the prompt's logits 100 below the others", fill_ownhot},
    {"heavy", "heavy tails (Student's t, 3 degrees of freedom), rows of unequal size", fill_heavy},
    {"nanresp", "NaN in one response's q, k, v: no sibling may see it", fill_nanresp},
    {"infresp", "infinity in one response's q, k, v", fill_infresp},
    {"recorded:NAME", "Q, K, V recorded from a model, recorded/NAME.safetensors", fill_recorded},
    {"file:NAME", "all inputs of a captured case, DIR/NAME.safetensors (--files DIR, files:DIR)", fill_file},
};
enum { N_FILLS = sizeof fills / sizeof *fills };

static const fill_row *find_fill(const char *word) {
    for (int i = 0; i < N_FILLS; i++) {
        size_t stem = strcspn(fills[i].name, ":");
        if (fills[i].name[stem]
                ? !strncmp(word, fills[i].name, stem + 1) && word[stem + 1] && word[stem + 1] != '.'
                : !strcmp(word, fills[i].name))
            return &fills[i];
    }
    return NULL;
}

bool dkv_knownFill(const char *word) { return find_fill(word) != NULL; }

const char *dkv_listFill(int i, const char **help) {
    if (i < 0 || i >= N_FILLS) return NULL;
    *help = fills[i].help;
    return fills[i].name;
}

int32_t dkv_victimNode(const dkv_problem *p) {
    int32_t found = -1, count = 0, last_root = -1;
    for (int pass = 0; pass < 2; pass++) {
        int32_t pick = count ? (int32_t)(p->seed % (uint64_t)count) : -1;
        count = 0;
        for (int32_t i = 0; i < p->n_nodes; i++) {
            bool leaf = i + 1 == p->n_nodes || p->nodes[i + 1].parent != i;
            if (p->nodes[i].depth == 0 && p->nodes[i].len && p->n_groups > 1) last_root = i;
            if (!p->nodes[i].depth || !leaf || !p->nodes[i].len) continue;
            if (pass && count == pick) found = i;
            count++;
        }
    }
    return found >= 0 ? found : last_root;
}

/* ---- filling ---- */

/* LSE's gradient (whole numbers where all is to be exact) and the sink logits. */
static void fill_rest(const context *c, bool whole, dkv_inputs *in) {
    const dkv_problem *p = c->p;
    for (int64_t i = 0; in->d_lse && i < c->l->view.tq * p->hq; i++) {
        double x = dkv_normal(p->seed, DKV_STREAM_DLSE, 0, (uint64_t)i);
        in->d_lse[i] = (float)(whole ? floor(x + 0.5) : x);
    }
    for (int32_t h = 0; in->sink && h < p->hq; h++)
        in->sink[h] =
            (float)(p->sinklogit + dkv_uniform(dkv_draw32(p->seed, DKV_STREAM_SINK, 0, (uint64_t)h)) - 0.5);
}

/* Rows [first, end) of one tensor: what one thread fills. */
typedef struct share {
    const context *c;
    shape_fn shape;
    tensor id;
    int64_t first, end;
    char *out;
} share;

static void *fill_rows(void *arg) {
    const share *w = arg;
    const context *c = w->c;
    const dkv_problem *p = c->p;
    int32_t heads = heads_of(p, w->id), n = dim_of(p, w->id), ratio = heads / p->hkv;
    size_t bytes = (size_t)n * dkv_dtypeSize(p->dtype);
    bool query = w->id == T_Q || w->id == T_DO;
    double x[DKV_DIM_MAX];
    for (int32_t i = 0; i < p->n_nodes; i++) {
        const dualkv_segment *s = &c->l->segments[i];
        int64_t start = query ? s->q_start : s->k_start, len = query ? s->q_len : s->k_len;
        int64_t from = w->first > start ? w->first - start : 0;
        int64_t to = w->end < start + len ? w->end - start : len;
        for (int64_t t = from; t < to; t++)
            for (int32_t h = 0; h < heads; h++) {
                vec v = {w->id, i, h, h / ratio, n, t, start + t, x};
                redraw(c, &v, 0, v.row);
                if (w->shape) w->shape(c, &v);
                size_t vector = (size_t)v.row * (size_t)heads + (size_t)h;
                dkv_encodeArray(x, p->dtype, (size_t)n, w->out + vector * bytes);
            }
    }
    return NULL;
}

/* An element depends on nothing but its index, so threads may share a tensor; small ones need none. */
enum { THREADS_MOST = 256, ELEMENTS_A_THREAD = 1 << 18 };

static void fill_tensor(const context *c, shape_fn shape, tensor id, void *out) {
    int64_t rows = id == T_Q || id == T_DO ? c->l->view.tq : c->l->view.tk;
    int64_t elements = rows * heads_of(c->p, id) * dim_of(c->p, id);
    share shares[THREADS_MOST];
    pthread_t threads[THREADS_MOST];
    cpu_set_t cpus;
    int n = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1, started = 0;
    if (n > elements / ELEMENTS_A_THREAD) n = (int)(elements / ELEMENTS_A_THREAD);
    n = n < 1 ? 1 : n > THREADS_MOST ? THREADS_MOST : n;
    for (int i = 0; i < n; i++)
        shares[i] = (share){c, shape, id, rows / n * i, i + 1 < n ? rows / n * (i + 1) : rows, out};
    while (started < n - 1 && pthread_create(&threads[started], NULL, fill_rows, &shares[started]) == 0)
        started++;
    for (int i = started; i < n; i++) fill_rows(&shares[i]);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

int dkv_fillInputs(const dkv_problem *p, const dkv_layout *l, const char *data_dir, dkv_inputs *in,
                   dkv_err *err) {
    const fill_row *row = find_fill(p->fill);
    if (!row) return dkv_fail(err, DKV_EUSER, "fill=%s: unknown fill", p->fill);
    if (row->shape == fill_file) return dkv_readCaseInputs(p, l, in, err);
    context c = {.p = p, .l = l, .victim = dkv_victimNode(p)};
    if ((row->shape == fill_nanresp || row->shape == fill_infresp) && c.victim < 0)
        return dkv_fail(err, DKV_EUSER, "fill=%s: needs a response, or a second group", p->fill);
    if (row->shape == fill_recorded) {
        int code = dkv_openRecorded(p, data_dir, &c.recorded, err);
        if (code) return code;
    }
    void *out[N_TENSORS] = {in->q, in->k, in->v, in->d_o};
    for (int id = 0; id < N_TENSORS; id++)
        if (out[id]) fill_tensor(&c, row->shape, (tensor)id, out[id]);
    fill_rest(&c, row->shape == fill_exact, in);
    dkv_closeRecorded(&c.recorded);
    return 0;
}
