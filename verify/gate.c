#include "gate.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/problem.h"
#include "append.h"

static const dkv_change_row rows[DKV_CH_N] = {
    [DKV_CH_STATUS] = {"status", "%ld lines have a worse status", true},
    [DKV_CH_REFUSED] = {"refused", "%ld lines are newly refused", true},
    [DKV_CH_MISSING] = {"missing", "%ld accepted lines did not run", true},
    [DKV_CH_GREW] = {"error grew", "the error grew in %ld lines", true},
    [DKV_CH_LOOSENED] = {"looser arithmetic", "the arithmetic is looser in %ld lines", true},
    [DKV_CH_UNSEEN] = {"less to check", "less can be checked in %ld lines", true},
    [DKV_CH_BITS] = {"bits", "the bits changed in %ld lines", true},
    [DKV_CH_GENERATOR] = {"generator", "%ld", true},
    [DKV_CH_PROGRAM] = {"program", "%ld", true},
    [DKV_CH_ORACLE] = {"oracle", "%ld", true},
    [DKV_CH_FLOOR] = {"coverage", "%ld", true},
    [DKV_CH_SLOWER] = {"slower", "%ld times are longer", true},
    [DKV_CH_BETTER] = {"better", "%ld lines have a better status", false},
    [DKV_CH_NEW] = {"new", "%ld lines are new", false},
    [DKV_CH_WAIVED] = {"waived", "%ld lines have a worse status that is excused", false},
    [DKV_CH_TIGHTENED] = {"arithmetic", "the arithmetic is another, not looser, in %ld lines", false},
    [DKV_CH_KERNEL] = {"kernel", "%ld", false},
    [DKV_CH_DEVICE] = {"device", "%ld", false},
};

const dkv_change_row *dkv_changeRow(dkv_change_kind k) { return &rows[k]; }

void dkv_freeGate(dkv_gate *g) {
    for (long i = 0; i < g->n; i++) {
        free(g->list[i].line);
        free(g->list[i].text);
    }
    free(g->list);
    memset(g, 0, sizeof *g);
}

int dkv_tellChange(dkv_gate *g, dkv_err *err, dkv_change_kind kind, const char *line, double size, const char *fmt, ...) {
    if (g->n == g->room) {
        long room = g->room ? 2 * g->room : 64;
        dkv_change *list = realloc(g->list, (size_t)room * sizeof *list);
        if (!list) return dkv_fail(err, DKV_EHARNESS, "out of memory for changes");
        g->list = list;
        g->room = room;
    }
    dkv_change *c = &g->list[g->n];
    *c = (dkv_change){.kind = kind, .line = strdup(line), .size = size};
    va_list args;
    va_start(args, fmt);
    int wrote = vasprintf(&c->text, fmt, args);
    va_end(args);
    if (wrote < 0) c->text = NULL;
    if (!c->line || !c->text) {
        free(c->line);
        free(c->text);
        return dkv_fail(err, DKV_EHARNESS, "out of memory for changes");
    }
    g->n++;
    g->counts[kind]++;
    return 0;
}

/* ---- what chance explains ---- */

/* Regularised incomplete beta function I_x(a, b), x below (a+1)/(a+b+2): its continued fraction (Lentz). */
static double betaFraction(double x, double a, double b) {
    double front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a, c = 1, d, f;
    d = 1 - (a + b) * x / (a + 1);
    f = d = 1 / d;
    for (int m = 1; m < 10000; m++) {
        double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
        double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
        d = 1 / (1 + even * d);
        c = 1 + even / c;
        f *= c * d;
        d = 1 / (1 + odd * d);
        c = 1 + odd / c;
        f *= c * d;
        if (fabs(c * d - 1) < 1e-14) break;
    }
    return front * f;
}

/* P(T > u sqrt(n)) of Student's t. */
static double tail(double u, double n) {
    double x = 1 / (1 + u * u), a = n / 2, b = 0.5;
    double i = x < (a + 1) / (a + b + 2) ? betaFraction(x, a, b) : 1 - betaFraction(1 - x, b, a);
    return i / 2;
}

double dkv_chanceGrowth(double n, double level) {
    double low = 0, high = 350; /* of asinh(u): the growth's logarithm */
    if (!(n > 0) || !(level > 0)) return INFINITY;
    if (n > 1e6) n = 1e6; /* a wider interval: never a false alarm more */
    if (level >= 0.5) return 1;
    if (tail(sinh(high), n) > level) return INFINITY;
    for (int i = 0; i < 80; i++) {
        double middle = (low + high) / 2;
        if (tail(sinh(middle), n) > level) low = middle;
        else high = middle;
    }
    return exp(high);
}

/* ---- arithmetic ---- */

/* Bits of a format's significand: what is kept of a value. */
static int formatBits(double f) {
    switch ((int)f) {
    case DUALKV_EXACT: return 53;
    case DUALKV_FP32: return 24;
    case DUALKV_TF32:
    case DUALKV_FP16: return 11;
    default: return 8;
    }
}

/* How one field differs: 1 looser, -1 tighter, 2 another. */
static int compareField(double was, double now, int looser) {
    if (was == now) return 0;
    switch (looser) {
    case 1: return now > was ? 1 : -1;
    case -1: return now < was ? 1 : -1;
    case 2: return formatBits(now) == formatBits(was) ? 2 : formatBits(now) < formatBits(was) ? 1 : -1;
    case 3: return was > 0 && (now == 0 || now > was) ? 1 : -1;
    default: return 2;
    }
}

/* 1: looser in some field; -1: tighter in some, looser in none; 2: other in kind only; 0: the same. Words of it. */
static int compareArithmetic(const dkv_accepted_row *was, const dkv_accepted_row *now, char *words, size_t n) {
    bool looser = was->declared && !now->declared, tighter = !was->declared && now->declared, other = false;
    size_t at = 0;
    words[0] = 0;
    if (looser) at = (size_t)snprintf(words, n, "nothing is declared any more");
#define COMPARE(field, way)                                                                                  \
    do {                                                                                                     \
        double x = (double)was->a.field, y = (double)now->a.field;                                           \
        int how = compareField(x, y, way);                                                                   \
        looser |= how == 1;                                                                                  \
        tighter |= how == -1;                                                                                \
        other |= how == 2;                                                                                   \
        char field_words[240];                                                                               \
        if (how) dkv_sayField(#field, x, y, field_words, sizeof field_words);                                \
        if (how) at = dkv_append(words, n, at, "%s%s", at ? "; " : "", field_words);                         \
    } while (0);
    DKV_ARITHMETIC_FIELDS(COMPARE)
#undef COMPARE
    if (at >= n) snprintf(words + n - 5, 5, " ...");
    return looser ? 1 : tighter ? -1 : other ? 2 : 0;
}

/* ---- one line ---- */

static int severity(dkv_status s) { return s == DKV_ST_PASSED ? 0 : dkv_statusRow(s)->defect ? 2 : 1; }

static int compareStatus(dkv_gate *g, const dkv_accepted_row *was, const dkv_accepted_row *now, const char *why,
                         dkv_err *err) {
    const char *a = dkv_statusRow(was->status)->name, *b = dkv_statusRow(now->status)->name;
    if (was->status == now->status) return 0;
    if (now->status == DKV_ST_UNSUPPORTED)
        return dkv_tellChange(g, err, DKV_CH_REFUSED, now->line, 0, "was %s and is now refused: %s", a, why);
    bool worse = severity(now->status) >= severity(was->status) && now->status != DKV_ST_PASSED;
    if (worse && now->excused)
        return dkv_tellChange(g, err, DKV_CH_WAIVED, now->line, 0, "was %s and is now %s, which is waived: %s", a, b,
                              now->excused);
    return dkv_tellChange(g, err, worse ? DKV_CH_STATUS : DKV_CH_BETTER, now->line, 0, "was %s and is now %s%s%s", a, b,
                          worse && why[0] ? ": " : "", worse ? why : "");
}

/* `other`: tiles or order are others, so that errors fall otherwise: what is predicted of them is then the least yardstick. */
static int compareErrors(dkv_gate *g, const dkv_accepted_row *was, const dkv_accepted_row *now, bool other,
                         dkv_err *err) {
    double most = 0, limit = 0, dof = 0;
    int worst = -1;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        double x = was->tensor[id].rms, y = now->tensor[id].rms;
        if (!was->tensor[id].there || !now->tensor[id].there || isnan(x) || isnan(y)) continue;
        double n = fmin(was->tensor[id].dof, now->tensor[id].dof), chance = dkv_chanceGrowth(n, now->level);
        if (!isfinite(chance)) continue;
        if (!g->least_growth || chance < g->least_growth) g->least_growth = chance;
        if (other && x < 1) x = 1;
        if (!(x > 0) || !(y > x * chance) || y / x < most) continue;
        most = y / x;
        limit = chance;
        dof = n;
        worst = id;
    }
    if (worst < 0) return 0;
    return dkv_tellChange(g, err, DKV_CH_GREW, now->line, most,
                "the error of %s grew %.3g times (rms against the twin %.3g -> %.3g; with %.3g independent rows chance "
                "explains at most %.3g times)",
                dkv_tensorName((dkv_tensor_id)worst), most, was->tensor[worst].rms, now->tensor[worst].rms, dof, limit);
}

static int compareBits(dkv_gate *g, const dkv_accepted_row *was, const dkv_accepted_row *now, dkv_err *err) {
    if (!was->bits[0] || strcmp(was->bits, now->bits) == 0) return 0;
    if (!now->bits[0])
        return dkv_tellChange(g, err, DKV_CH_BITS, now->line, 0, "repeatable bits are not promised any more");
    return dkv_tellChange(g, err, DKV_CH_BITS, now->line, 0, "the bits changed where repeatable ones are promised (%s -> %s)",
                was->bits, now->bits);
}

/* What a kernel keeps to itself cannot be found wrong. */
static int compareSeen(dkv_gate *g, const dkv_accepted_row *was, const dkv_accepted_row *now, dkv_err *err) {
    int rc = 0;
    if (was->counted && !now->counted)
        rc = dkv_tellChange(g, err, DKV_CH_UNSEEN, now->line, 0,
                            "its launches are not counted any more, so that a fallback could pass for it");
    for (int id = 0; id < DKV_N_OUTPUTS && !rc; id++)
        if (was->tensor[id].there && !now->tensor[id].there)
            rc = dkv_tellChange(g, err, DKV_CH_UNSEEN, now->line, 0, "%s is not given any more",
                                dkv_tensorName((dkv_tensor_id)id));
    return rc;
}

static int compareRow(dkv_gate *g, const dkv_accepted_row *was, const dkv_accepted_row *now, bool alike, bool device,
                      dkv_err *err) {
    char words[400];
    int rc = compareStatus(g, was, now, now->why, err), how;
    if (rc || !was->judged || !now->judged) return rc;
    if (was->status != now->status && !was->declared && !now->declared) return 0; /* what fits wrong values says nothing */
    how = compareArithmetic(was, now, words, sizeof words);
    if (how)
        rc = dkv_tellChange(g, err, how == 1 ? DKV_CH_LOOSENED : DKV_CH_TIGHTENED, now->line, 0,
                  "the %s arithmetic is %s: %s", now->declared || was->declared ? "declared" : "fitting",
                  how == 1 ? "looser" : "another", words);
    if (!rc && was->status == now->status) rc = compareSeen(g, was, now, err);
    if (rc || !alike || was->status != now->status) return rc;
    if (how == 0 || how == 2) rc = compareErrors(g, was, now, how == 2, err); /* else the residuals have another unit */
    return rc || !device ? rc : compareBits(g, was, now, err);
}

/* What is of the whole run. `alike`: errors can be compared. */
static int compareHeads(dkv_gate *g, const dkv_accepted *was, const dkv_accepted *now, bool *alike, dkv_err *err) {
    bool generator = strcmp(was->generator, now->generator) == 0, program = strcmp(was->program, now->program) == 0;
    bool oracle = strcmp(was->oracle, now->oracle) == 0;
    int rc = 0;
    *alike = generator && program && oracle;
    if (!generator)
        rc = dkv_tellChange(g, err, DKV_CH_GENERATOR, "", 0,
                  "the generator of inputs is version %s and was %s: errors and bits cannot be compared, accept anew",
                  now->generator, was->generator);
    if (!rc && !program)
        rc = dkv_tellChange(g, err, DKV_CH_PROGRAM, "", 0,
                  "the program is version %s and was %s: errors and bits are not compared, accept anew", now->program,
                  was->program);
    if (!rc && !oracle)
        rc = dkv_tellChange(g, err, DKV_CH_ORACLE, "", 0,
                  "truth, bound and twin are those of oracle version %s and were of %s: errors and bits are not compared, "
                  "accept anew", now->oracle, was->oracle);
    if (!rc && strcmp(was->kernel, now->kernel) != 0)
        rc = dkv_tellChange(g, err, DKV_CH_KERNEL, "", 0, "the accepted kernel is %s, this one %s", was->kernel, now->kernel);
    if (!rc && strcmp(was->device, now->device) != 0)
        rc = dkv_tellChange(g, err, DKV_CH_DEVICE, "", 0, "accepted on %s, run on %s: bits are not compared", was->device,
                  now->device);
    return rc;
}

int dkv_compareAccepted(dkv_gate *g, const dkv_accepted *was, const dkv_accepted *now, dkv_err *err) {
    bool alike, device = strcmp(was->device, now->device) == 0;
    int rc = compareHeads(g, was, now, &alike, err);
    for (long i = 0; i < was->n && !rc && !g->partial; i++)
        if (!dkv_findAccepted(now, was->rows[i].line))
            rc = dkv_tellChange(g, err, DKV_CH_MISSING, was->rows[i].line, 0, "was accepted as %s and did not run",
                      dkv_statusRow(was->rows[i].status)->name);
    for (long i = 0; i < now->n && !rc; i++) {
        const dkv_accepted_row *old = dkv_findAccepted(was, now->rows[i].line);
        rc = old ? compareRow(g, old, &now->rows[i], alike, device, err)
                 : dkv_tellChange(g, err, DKV_CH_NEW, now->rows[i].line, 0, "is new");
    }
    return rc;
}

int dkv_checkFloor(dkv_gate *g, const dkv_accepted *now, double percent, dkv_err *err) {
    dkv_refusals reasons = {0};
    long refused = 0;
    int most = 0;
    for (long i = 0; i < now->n; i++) {
        if (now->rows[i].status != DKV_ST_UNSUPPORTED) continue;
        refused++;
        dkv_countRefusal(&reasons, now->rows[i].why ? now->rows[i].why : "");
    }
    for (int k = 1; k < DKV_REASONS_MAX; k++)
        if (reasons.row[k].cases > reasons.row[most].cases) most = k;
    double taken = now->n ? 100.0 * (double)(now->n - refused) / (double)now->n : 0;
    if (taken >= percent) return 0;
    return dkv_tellChange(g, err, DKV_CH_FLOOR, "", 0,
                "the kernel refuses %ld of %ld lines, %ld of them for '%.199s': it takes %.3g %%, and at least %.3g %% are asked for "
                "(--floor)", refused, now->n, reasons.row[most].cases, reasons.row[most].why, taken, percent);
}

/* ---- in words ---- */

bool dkv_isFinding(const dkv_gate *g, dkv_change_kind k) {
    return rows[k].finding && !(k == DKV_CH_BITS && g->new_bits);
}

long dkv_countFindings(const dkv_gate *g) {
    long n = 0;
    for (int k = 0; k < DKV_CH_N; k++)
        if (dkv_isFinding(g, (dkv_change_kind)k)) n += g->counts[k];
    return n;
}

void dkv_sayChanges(const dkv_gate *g, dkv_change_kind k, char *out, size_t n) {
    const dkv_change *most = NULL;
    size_t at = 0;
    out[0] = 0;
    for (long i = 0; i < g->n; i++)
        if (g->list[i].kind == k && (!most || g->list[i].size > most->size)) most = &g->list[i];
    if (!most) return;
    if (g->counts[k] > 1 && most->line[0]) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        at = (size_t)snprintf(out, n, rows[k].many, g->counts[k]);
#pragma GCC diagnostic pop
        if (at < n) at += (size_t)snprintf(out + at, n - at, "; %s ", most->size > 0 ? "most of all" : "first");
    }
    if (at < n && most->line[0]) at += (size_t)snprintf(out + at, n - at, "%s: ", most->line);
    if (at < n) at += (size_t)snprintf(out + at, n - at, "%s", most->text);
    if (k == DKV_CH_MISSING && g->asked && at < n)
        snprintf(out + at, n - at, " (%s was asked for: what it runs wants an accepted file of its own)", g->asked);
}
