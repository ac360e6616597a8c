#include "fit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fill.h"
#include "../ref/dtype.h"
#include "../ref/partials.h"
#include "case.h"

#define LEVEL   1e-6 /* of the tests that the likeliest candidate must pass */
#define CLIP    100.0
#define CERTAIN 0x1p-10 /* as in judge.c */
#define CANDIDATES 64   /* room for one list */

/* Kernels may know few head dimensions and group sizes. */
static const char *const sizes[] = {"heads=4:2 dim=64", "heads=4:2 dim=128", "heads=4:4 dim=64", "heads=4:4 dim=128",
                                    "heads=4:1 dim=32", "heads=4:4 dim=16",  "heads=2:1 dim=256"};
enum { N_SIZES = sizeof sizes / sizeof sizes[0] };

static const int tile_sizes[] = {0, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256}; /* 0: P normalised first */
enum { N_TILES = sizeof tile_sizes / sizeof tile_sizes[0] };

typedef struct candidate {
    dualkv_arithmetic a;
    char words[DKV_FIT_WORDS];
    double score; /* mean of ln sigma^2 + z^2, of each tensor, added: the lower the likelier */
} candidate;

typedef struct probe {
    candidate *all, best;
    int n;
    bool of_queries; /* the likeliest by LSE and dQ alone */
    bool declared, found;
    double misfit;
    dkv_err err;
} probe;

int dkv_checkArithmeticWord(const char *word, dkv_err *err) {
    char names[400] = "auto";
    if (!strcmp(word, "auto")) return 0;
    for (int type = DUALKV_FP32; type >= 0; type--) {
        dkv_problem p = {.dtype = (dualkv_dtype)type};
        dualkv_arithmetic a;
        const char *name;
        for (int i = 0; type != DUALKV_FP16 && (name = dkv_arithmeticProfile(i, &p, &a, NULL)); i++) {
            if (!strcmp(name, word)) return 0;
            if (strstr(names, name)) continue;
            snprintf(names + strlen(names), sizeof names - strlen(names), ", %s", name);
        }
    }
    return dkv_fail(err, DKV_EUSER, "--arithmetic: '%.40s' is none of %s", word, names);
}

/* ---- one candidate ---- */

static double scoreTensor(const dkv_oracle *o, dkv_tensor_id id, const double *got, int64_t n, int32_t format) {
    const double *twin = dkv_outputAt(&o->twin, id), *sigma2 = dkv_outputAt(&o->sigma2, id);
    double sum = 0, count = 0;
    for (int64_t i = 0; i < n; i++) {
        double h = dkv_ulp(twin[i], format), e = got[i] - twin[i], s2 = sigma2[i], z2;
        if (!isfinite(e) || !isfinite(s2)) continue;
        s2 = fmax(s2 / (h * h), CERTAIN * CERTAIN);
        z2 = e * e / (h * h * s2);
        sum += log(s2) + fmin(z2, CLIP);
        count++;
    }
    return count > 0 ? sum / count : 0;
}

static bool isJudged(const dkv_case *c, int id) {
    return c->oracle.has_twin[id] && !(c->kernel.d.absent >> id & 1) && dkv_outputAt(&c->got, (dkv_tensor_id)id);
}

static int scoreCandidate(dkv_case *c, candidate *x, bool of_queries, dkv_err *err) {
    int64_t n[DKV_N_OUTPUTS];
    int rc = dkv_consultTwin(c, &x->a, false, err);
    dkv_countOutputs(&c->packed, n);
    x->score = 0;
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++)
        if (isJudged(c, id) && id != DKV_DSINK && !(id == DKV_O && c->p->grad) &&
            !(of_queries && (id == DKV_DK || id == DKV_DV)))
            x->score += scoreTensor(&c->oracle, (dkv_tensor_id)id, dkv_outputAt(&c->got, (dkv_tensor_id)id), n[id],
                                    id == DKV_LSE ? DUALKV_FP32 : x->a.out_format);
    return rc;
}

/* Does the likeliest explain all that its twin speaks of? */
static int testCandidate(dkv_case *c, const candidate *x, probe *p, dkv_err *err) {
    int rc = dkv_consultOracle(c, &x->a, true, err);
    p->found = true;
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++) {
        dkv_judgement j;
        if (!isJudged(c, id)) continue;
        rc = dkv_judgeTensor(&c->packed, &x->a, &c->oracle, (dkv_tensor_id)id,
                             dkv_outputAt(&c->got, (dkv_tensor_id)id), LEVEL, &j, err);
        p->found &= !rc && !j.failed && !j.imprecise && !j.biased;
        p->misfit = fmax(p->misfit, j.all.rms_z / j.all.rms_limit);
    }
    return rc;
}

/* Sums over segments say nothing of ordinary sequences; running ones in 16 bit are known of CPUs alone. */
static bool applies(const dkv_case *c, const candidate *x) {
    const dkv_partials part = dkv_partialsOf(&x->a);
    return part.rows ? c->kernel.d.memory == DUALKV_HOST : !part.segments || !c->kernel.d.replicated;
}

static void observe(dkv_case *c, void *arg) {
    probe *p = arg;
    int rc = 0, at = 0;
    if (c->kernel.d.arithmetic.declared) {
        p->declared = true;
        return;
    }
    for (int i = 0; i < p->n && !rc; i++) {
        if (!applies(c, &p->all[i])) continue; /* never the first */
        rc = scoreCandidate(c, &p->all[i], p->of_queries, &p->err);
        if (p->all[i].score < p->all[at].score) at = i;
    }
    p->best = p->all[at];
    if (!rc) rc = testCandidate(c, &p->best, p, &p->err);
    if (rc) p->found = false;
}

/* ---- the probes ---- */

/* Runs `shape` with the first sizes that the kernel takes. *size: which; N_SIZES: none. */
static int runProbe(dkv_worker *w, const char *shape, dualkv_dtype type, const char *data_dir, int *size, probe *p,
                    dkv_err *err) {
    dkv_fits plain = {0}; /* the observer judges: once is enough before */
    dkv_case_options options = {.data_dir = data_dir,
                                .level = LEVEL,
                                .threads = 1,
                                .nested = true,
                                .observe = observe,
                                .observe_arg = p,
                                .fits = &plain};
    const dkv_problem any = {.dtype = type};
    plain.of[type].known = plain.of[type].held = dkv_arithmeticProfile(0, &any, &plain.of[type].a, NULL) != NULL;
    dkv_result *r = malloc(sizeof *r);
    int rc = r ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for a probe");
    for (; *size < N_SIZES && !rc; ++*size) {
        char line[300];
        dkv_problem problem = {0};
        snprintf(line, sizeof line, "%s %s dtype=%s", shape, sizes[*size], dkv_dtypeName(type));
        rc = dkv_parseProblem(line, dkv_knownFill, &problem, err);
        if (!rc) dkv_runCase(&problem, w, &options, r);
        dkv_freeProblem(&problem);
        if (rc || r->status != DKV_ST_UNSUPPORTED) break;
    }
    free(r);
    if (!rc && p->err.code) {
        *err = p->err;
        rc = p->err.code;
    }
    return rc;
}

static void nearest(dualkv_arithmetic *a) {
    a->acc_truncates = 0;
    a->acc_step = 1;
    a->acc_unit = a->unit;
    a->acc_gain = 0;
}

/* How partial sums of gradients are rounded. */
typedef struct partial_kind {
    const char *word;
    int32_t of;      /* DUALKV_PARTIAL_* */
    int64_t block;   /* rows of dK and dV, keys of dQ; 0 with ROWS: as PyTorch's on a CPU */
} partial_kind;
static const partial_kind partial_kinds[] = {{"partials", DUALKV_PARTIAL_HEADS, 0},
                                             {"copies", DUALKV_PARTIAL_HEADS | DUALKV_PARTIAL_SEGMENTS, 0},
                                             {"running", DUALKV_PARTIAL_ROWS, 0},
                                             {"running 32", DUALKV_PARTIAL_ROWS, 32},
                                             {"running 64", DUALKV_PARTIAL_ROWS, 64},
                                             {"running 128", DUALKV_PARTIAL_ROWS, 128}};
enum { N_PARTIALS = sizeof partial_kinds / sizeof partial_kinds[0] };

static void setPartials(dualkv_arithmetic *a, const partial_kind *k, dualkv_dtype type) {
    a->partial_format = k ? (int32_t)type : DUALKV_EXACT;
    a->partial_of = k ? k->of : 0;
    if (k && k->of == DUALKV_PARTIAL_ROWS) dkv_roundRunning(a);
    if (!k || !k->block) return;
    a->row_block = a->dq_block = k->block;
    a->row_block2 = a->row_from2 = a->row_block3 = a->row_from3 = 0;
    a->exp_error = 0x1p-22;
}

/* Every profile, with delta either way where it is rounded at all. How partial sums are rounded, what only O tells (P
 * normalised first; the key tile) and what only large scores tell (the accumulation) is left for later. Returns how many. */
static int listFormats(dualkv_dtype type, candidate *out) {
    const dkv_problem p = {.dtype = type};
    dualkv_arithmetic a;
    const char *name;
    int n = 0;
    for (int i = 0; (name = dkv_arithmeticProfile(i, &p, &a, NULL)); i++) {
        bool eager = a.s_format != DUALKV_EXACT;
        if (a.delta_exact || a.ds_scaled || (a.partial_format != DUALKV_EXACT && !eager) || (a.p_normalised && !eager)) continue;
        for (int delta = 0; delta < (type == DUALKV_FP32 ? 1 : 2); delta++) {
            candidate *x = &out[n++];
            x->a = a;
            x->a.delta_exact = delta;
            setPartials(&x->a, NULL, type);
            snprintf(x->words, sizeof x->words, "%s%s", name, delta ? "+delta" : "");
        }
    }
    return n;
}

/* The same with partial sums in every way; where dQ's are rounded, too, it could not tell how delta is. */
static int listPartials(const candidate *from, dualkv_dtype type, candidate *out) {
    const bool eager = from->a.s_format != DUALKV_EXACT;
    const int name = (int)strcspn(from->words, "+");
    int n = 0;
    for (int i = 0; i <= N_PARTIALS && type != DUALKV_FP32; i++) {
        const partial_kind *k = i ? &partial_kinds[i - 1] : NULL;
        const bool own = eager && i == 1; /* what its name says already */
        for (int other = 0; other < (k && k->of == DUALKV_PARTIAL_ROWS ? 2 : 1); other++) {
            candidate *x = &out[n++];
            *x = *from;
            x->a.delta_exact ^= other;
            setPartials(&x->a, k, type);
            snprintf(x->words, sizeof x->words, "%.*s%s%s%s", name, from->words, x->a.delta_exact ? "+delta" : "",
                     own ? "" : k ? "+" : eager ? "-" : "", own ? "" : k ? k->word : eager ? "partials" : "");
        }
    }
    return n;
}

/* The same with dS as it is, and scaled before it is rounded. */
static int listScaled(const candidate *from, candidate *out) {
    const int name = (int)strcspn(from->words, "+");
    if (dkv_unitRoundoff(from->a.ds_format) <= from->a.unit) return 0;
    out[0] = out[1] = *from;
    out[1].a.ds_scaled = 1;
    snprintf(out[1].words, sizeof out[1].words, "%.*s+scaled%.60s", name, from->words, from->words + name);
    return 2;
}

/* The same with both kinds of accumulation. */
static int listSums(const candidate *from, candidate *out) {
    if (!from->a.acc_truncates) return 0;
    out[0] = out[1] = *from;
    nearest(&out[0].a);
    snprintf(out[1].words, sizeof out[1].words, "%.30s on tensor cores", from->words);
    return 2;
}

#define TILES "shape=300+2x9 grad=off seed=42"
#define LN2   0.69314718055994531
#define LAZY  8 /* as in FlashAttention-4: scores of TILES differ by less */

/* Doublings that a maximum may wait for; the last are as well never, in 16 bits of exponent. */
static const int slacks[] = {LAZY, 4, 5, 6, 7, 10, 12, 15};
enum { N_SLACKS = sizeof slacks / sizeof slacks[0] };

static void setSlack(candidate *x, int doublings) {
    const size_t had = strlen(x->words);
    x->a.max_slack = doublings * LN2;
    snprintf(x->words + had, sizeof x->words - had, ", maximum raised lazily by 2^%d", doublings);
}

/* The same with P normalised first, or by key tiles of each size and order; these alone where the maximum is raised late. */
static int listTiles(const candidate *from, bool late, candidate *out) {
    int n = 0;
    if (from->a.s_format != DUALKV_EXACT || dkv_unitRoundoff(from->a.p_format) <= from->a.unit) return 0;
    for (int i = late; i < N_TILES; i++)
        for (int down = 0; down < (i ? 2 : 1); down++) {
            const int size = tile_sizes[i];
            candidate *x = &out[n++];
            *x = *from;
            x->a.p_normalised = !size;
            x->a.key_tile = size;
            x->a.key_order = down;
            if (size)
                snprintf(x->words, sizeof x->words, "%.46s, key tile %d%s", from->words, size,
                         down ? ", last tile first" : "");
            else
                snprintf(x->words, sizeof x->words, "normalised%s", strncmp(from->words, "flash", 5) ? "" : from->words + 5);
            if (late) setSlack(x, LAZY);
        }
    return n;
}

/* The same, with maxima that wait for more or less. */
static int listSlacks(const candidate *from, candidate *out) {
    char *last;
    for (int i = 0; i < N_SLACKS; i++) {
        out[i] = *from;
        if ((last = strstr(out[i].words, ", maximum"))) *last = 0;
        setSlack(&out[i], slacks[i]);
    }
    return N_SLACKS;
}

/* The same, with the sink last and first. */
static int listSinks(const candidate *from, candidate *out) {
    out[0] = out[1] = *from;
    const size_t had = strlen(out[1].words);
    out[1].a.sink_first = 1;
    snprintf(out[1].words + had, sizeof out[1].words - had, ", sink first");
    return 2;
}

static void accept(const probe *p, dkv_fit *out) {
    out->known = true;
    out->a = p->best.a;
    out->misfit = fmax(out->misfit, p->misfit);
    memcpy(out->words, p->best.words, sizeof out->words);
}

/* O by key tiles; where none explains it, by those of a maximum that is raised late, and how late, which larger scores tell;
 * then, where a kernel takes sinks, whether they are in the maximum from the start. `from`: all else. */
static int fitTiles(dkv_worker *w, dualkv_dtype type, const char *data_dir, const candidate *from, int *size, dkv_fit *out,
                    dkv_err *err) {
    candidate *all = malloc(sizeof *all * CANDIDATES);
    probe tiles = {.all = all}, late = {.all = all}, slack = {.all = all}, sinks = {.all = all};
    int rc = all ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for key tiles"), other = *size;
    if (rc) return rc;
    tiles.n = listTiles(from, false, all);
    if (tiles.n) rc = runProbe(w, TILES, type, data_dir, size, &tiles, err);
    if (!rc && tiles.n && !tiles.found && *size < N_SIZES) {
        late.n = listTiles(from, true, all);
        rc = runProbe(w, TILES, type, data_dir, size, &late, err);
        slack.n = listSlacks(&late.best, all);
        if (!rc) rc = runProbe(w, TILES " scale=0.5", type, data_dir, &other, &slack, err);
        tiles = slack.found ? slack : late; /* a kernel may not take another scale */
    }
    if (rc || !tiles.found) goto done;
    accept(&tiles, out);
    if (tiles.best.a.p_normalised) goto done;
    sinks.n = listSinks(&tiles.best, all);
    other = *size;
    rc = runProbe(w, "shape=120+2x9 grad=off sinklogit=4 seed=45", type, data_dir, &other, &sinks, err);
    if (!rc && sinks.found && sinks.best.a.sink_first) accept(&sinks, out);
done:
    free(all);
    return rc;
}

/* Formats from gradients and LSE; the accumulation from LSE of large scores; the key tile from O: a kernel whose O no
 * tile explains has none. */
static int fitType(dkv_worker *w, dualkv_dtype type, const char *data_dir, dkv_fit *out, bool *declared, dkv_err *err) {
    int size = 0;
    candidate *all = malloc(sizeof *all * CANDIDATES);
    probe p = {.all = all, .of_queries = true}, partials = {.all = all}, scaled = {.all = all}, sums = {.all = all};
    const char *shape = "shape=70+2x40,20 seed=41";
    if (!all) return dkv_fail(err, DKV_EHARNESS, "out of memory for profiles");
    p.n = listFormats(type, all);
    int rc = runProbe(w, shape, type, data_dir, &size, &p, err);
    if (!rc && size == N_SIZES) { /* no gradients, perhaps */
        size = 0;
        shape = "shape=70+2x40,20 grad=off seed=41";
        rc = runProbe(w, shape, type, data_dir, &size, &p, err);
    }
    *declared = p.declared;
    if (rc || p.declared) goto done;
    partials.n = listPartials(&p.best, type, all);
    if (partials.n) {
        rc = runProbe(w, shape, type, data_dir, &size, &partials, err);
        p = partials;
    }
    if (rc) goto done;
    scaled.n = listScaled(&p.best, all);
    if (scaled.n && !p.of_queries) { /* a scale that is no power of two, which not every kernel takes */
        int other = size;
        rc = runProbe(w, "shape=70+2x40,20 scale=0.1 seed=44", type, data_dir, &other, &scaled, err);
        if (!rc && scaled.best.a.ds_scaled) p = scaled;
    }
    if (rc) goto done;
    sums.n = listSums(&p.best, all);
    if (sums.n) rc = runProbe(w, "shape=70+2x40,20 grad=off fill=hot seed=43", type, data_dir, &size, &sums, err);
    if (rc) goto done;
    if (sums.n && !sums.best.a.acc_truncates) { /* the same formats again, to be tested with the other sums */
        probe again = {.all = &sums.best, .n = 1};
        rc = runProbe(w, shape, type, data_dir, &size, &again, err);
        p = again;
    } else if (sums.n) {
        p.best = sums.best;
    }
    if (rc || !p.found) goto done;
    accept(&p, out);
    rc = fitTiles(w, type, data_dir, &p.best, &size, out, err);
done:
    free(all);
    return rc;
}

void dkv_nameFits(const char *word, unsigned types, dkv_fits *out) {
    memset(out, 0, sizeof *out);
    for (int type = 0; type < 3; type++) {
        const dkv_problem p = {.dtype = (dualkv_dtype)type};
        dkv_fit *fit = &out->of[type];
        const char *name;
        for (int i = 0; types >> type & 1 && !fit->known && (name = dkv_arithmeticProfile(i, &p, &fit->a, NULL)); i++)
            if (!strcmp(name, word)) {
                fit->known = fit->held = true;
                snprintf(fit->words, sizeof fit->words, "%s", name);
            }
    }
}

int dkv_fitKernel(const dkv_kernel_spec *kernel, const char *word, unsigned types, double timeout, const char *data_dir,
                  dkv_fits *out, dkv_err *err) {
    bool declared = false;
    int rc = dkv_checkArithmeticWord(word, err);
    dkv_worker w;
    dkv_nameFits(word, types, out);
    if (rc || strcmp(word, "auto")) return rc;
    dkv_initWorker(&w, kernel, timeout);
    for (int type = 0; type < 3 && !rc && !declared; type++)
        if (types >> type & 1) rc = fitType(&w, (dualkv_dtype)type, data_dir, &out->of[type], &declared, err);
    dkv_stopWorker(&w);
    if (declared) memset(out, 0, sizeof *out);
    return rc;
}

/* ---- words ---- */

void dkv_sayFits(const char *kernel, const dkv_fits *fits, FILE *f) {
    const char *before = "behaves as";
    for (int type = 0; type < 3; type++) {
        const dkv_fit *x = &fits->of[type];
        if (!x->known || x->held) continue;
        if (before[0] == 'b') fprintf(f, "%s declares no arithmetic: it ", kernel);
        fprintf(f, "%s %s (%s)", before, x->words, dkv_dtypeName((dualkv_dtype)type));
        before = "; as";
    }
    if (before[0] != 'b') fprintf(f, "\n");
}

void dkv_countBehaviour(dkv_behaviour *t, const char *words) {
    int k = 0;
    if (!words[0]) return;
    while (k < t->n && strcmp(t->row[k].words, words)) k++;
    if (k == DKV_BEHAVIOURS_MAX) k--; /* the last row: all others */
    if (k == t->n) snprintf(t->row[t->n++].words, DKV_FIT_WORDS, "%s", words);
    t->row[k].cases++;
}

void dkv_sayBehaviour(const dkv_behaviour *t, FILE *f) {
    for (int k = 0; k < t->n; k++)
        fprintf(f, "%s%s in %ld %s%s", k ? "; as " : "arithmetic not declared: it behaves as ", t->row[k].words,
                t->row[k].cases, t->row[k].cases == 1 ? "case" : "cases", k + 1 == t->n ? " (`dualkv list arithmetics`)\n" : "");
}
