#include "diagnose_set.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PENALTY 0.004 /* a step down the list of descriptions must fit better by so much */
#define FITS 0.6      /* of the union, below which a set is called scattered */
#define CHANCE 1e-6   /* residues are named where they would gather so with less probability */
#define NAMED 3       /* segments that are listed where they have nothing in common */
#define MODULI                                                                                               \
    12 /* tests among which that is divided: six moduli, from the segment's start and from the tensor's */

double dkv_gatherChance(const int64_t *off, const int64_t *total, int n) {
    double k = -1, g = 0, bad = 0, all = 0;
    for (int i = 0; i < n; i++) {
        bad += (double)off[i];
        all += (double)total[i];
        k += total[i] > 0;
    }
    if (k < 1 || bad <= 0 || bad >= all) return 1;
    for (int i = 0; i < n; i++) {
        double t = (double)total[i], x = (double)off[i], y = t - x;
        if (x > 0) g += 2 * x * log(x * all / (t * bad));
        if (y > 0) g += 2 * y * log(y * all / (t * (all - bad)));
    }
    double z = (cbrt(g / k) - (1 - 2 / (9 * k))) /
               sqrt(2 / (9 * k)); /* Wilson and Hilferty: cbrt of chi^2 is near normal */
    return 0.5 * erfc(z / sqrt(2));
}

/* ---- segments ---- */

typedef struct segment_facts {
    bool root, leaf, first, last; /* first, last: child of its parent */
    int64_t len, number;          /* of the child */
    int32_t depth, group, n_siblings;
} segment_facts;

static void takeFacts(const dkv_layout *l, bool keys, int32_t i, segment_facts *f) {
    const dualkv_problem *v = &l->view;
    const dualkv_segment *s = &v->segments[i];
    *f = (segment_facts){.root = s->parent < 0,
                         .leaf = true,
                         .first = true,
                         .last = true,
                         .depth = s->depth,
                         .group = s->group};
    f->len = keys ? s->k_len : s->q_len;
    f->n_siblings = 1;
    for (int32_t k = 0; k < v->n_segments && s->parent >= 0; k++) {
        if (k == i || v->segments[k].parent != s->parent) continue;
        f->n_siblings++;
        f->number += k < i;
        f->first &= k > i;
        f->last &= k < i;
    }
    f->leaf = i + 1 >= v->n_segments || v->segments[i + 1].depth <= s->depth;
}

enum {
    ALL,
    ROOTS,
    CHILDREN,
    DEEP,
    LEAVES,
    LAST,
    FIRST,
    NOT_FIRST,
    NOT_LAST,
    INNER,
    ONE_TOKEN,
    EVEN,
    ODD,
    ONE_GROUP,
    LATER_GROUPS,
    ONE,
    N_SEGMENT_KINDS
};

static bool segmentIs(int kind, const segment_facts *f, int32_t i, int32_t only) {
    switch (kind) {
    case ALL: return true;
    case ROOTS: return f->root;
    case CHILDREN: return !f->root;
    case DEEP: return f->depth > 1;
    case LEAVES: return f->leaf && !f->root;
    case LAST: return !f->root && f->last;
    case FIRST: return !f->root && f->first;
    case NOT_FIRST: return !f->root && !f->first;
    case NOT_LAST: return !f->root && !f->last;
    case INNER: return !f->root && !f->leaf;
    case ONE_TOKEN: return f->len == 1;
    case EVEN: return !f->root && f->number % 2 == 0;
    case ODD: return !f->root && f->number % 2 == 1;
    case ONE_GROUP: return f->group == only; /* `only`: then the group */
    case LATER_GROUPS: return f->group > 0;
    default: return i == only;
    }
}

static void nameSegments(int kind, const dkv_layout *l, const segment_facts *f, int32_t i, char *out,
                         size_t n) {
    static const char *const words[] = {[ROOTS] = "the prompts",
                                        [CHILDREN] = "the responses",
                                        [DEEP] = "the segments below the responses",
                                        [LEAVES] = "the segments without children",
                                        [LAST] = "the last response of a prompt",
                                        [FIRST] = "the first response of a prompt",
                                        [NOT_FIRST] = "all responses but a prompt's first",
                                        [NOT_LAST] = "all responses but a prompt's last",
                                        [INNER] = "the responses that have children",
                                        [ONE_TOKEN] = "the segments of one token",
                                        [EVEN] = "responses 0, 2, 4...",
                                        [ODD] = "responses 1, 3, 5...",
                                        [LATER_GROUPS] = "all groups but the first"};
    const bool one = l->view.n_groups == 1;
    if (kind == ALL)
        snprintf(out, n,
                 l->view.n_segments == 1 ? "the prompt"
                 : one                   ? "the prompt and its responses"
                                         : "all segments");
    else if (kind == ROOTS && one)
        snprintf(out, n, "the prompt");
    else if (kind == LAST && one)
        snprintf(out, n, "the last response");
    else if (kind == FIRST && one)
        snprintf(out, n, "the first response");
    else if (kind == NOT_FIRST && one)
        snprintf(out, n, "all responses but the first");
    else if (kind == NOT_LAST && one)
        snprintf(out, n, "all responses but the last");
    else if (kind == ONE_GROUP)
        snprintf(out, n, "group %d", f[i].group);
    else if (kind != ONE)
        snprintf(out, n, "%s", words[kind]);
    else if (f[i].root)
        snprintf(out, n, "the prompt of group %d", f[i].group);
    else if (one && f[i].depth == 1)
        snprintf(out, n, "response %lld", (long long)f[i].number);
    else
        snprintf(out, n, "segment %d (response %lld of group %d)", i, (long long)f[i].number, f[i].group);
}

/* "the prompt of group 0, response 1 and response 2" */
static void listSegments(const dkv_layout *l, const segment_facts *f, const int64_t *bad, int32_t involved,
                         char *out, size_t n) {
    size_t at = 0;
    int32_t said = 0;
    for (int32_t i = 0; i < l->view.n_segments && at < n; i++) {
        if (!bad[i]) continue;
        if (said) at += (size_t)snprintf(out + at, n - at, said + 1 == involved ? " and " : ", ");
        if (at < n) nameSegments(f[i].root && l->view.n_groups == 1 ? ROOTS : ONE, l, f, i, out + at, n - at);
        if (at < n) at += strlen(out + at);
        said++;
    }
}

static void describeSegments(const dkv_layout *l, const segment_facts *f, const int64_t *bad, char *out,
                             size_t n) {
    int32_t first = -1, involved = 0, some = 0, kind = -1;
    double best = 0;
    for (int32_t i = 0; i < l->view.n_segments; i++) {
        some += f[i].len > 0;
        if (!bad[i]) continue;
        if (first < 0) first = i;
        involved++;
    }
    snprintf(out, n, "%d of %d segments", involved, some);
    for (int k = 0; k < N_SEGMENT_KINDS && first >= 0; k++) {
        int both = 0, either = 0, named = 0;
        for (int32_t i = 0; i < l->view.n_segments; i++) {
            if (!f[i].len) continue;
            bool is = segmentIs(k, &f[i], i, k == ONE_GROUP ? f[first].group : first);
            named += is;
            both += is && bad[i];
            either += is || bad[i];
        }
        /* a segment alone is told by its name where it is one of several of its kind */
        if (k == ONE_GROUP && l->view.n_groups == 1) continue;
        if ((k == EVEN || k == ODD) && named < 2) continue; /* one is no pattern */
        double fit = either ? (double)both / either - PENALTY * k : 0;
        if (fit > best && fit > 0.8) {
            best = fit;
            kind = k;
        }
    }
    if (kind >= 0) nameSegments(kind, l, f, first, out, n);
    else if (involved <= NAMED) listSegments(l, f, bad, involved, out, n);
}

/* ---- rows ---- */

enum {
    EVERY,
    LAST_ROW,
    FIRST_ROW,
    INTERVAL,
    FROM,
    UP_TO,
    NOT_RESIDUE,
    PARTIAL,
    LAST_ROWS,
    RESIDUE,
    HALF_LOW,
    HALF_HIGH,
    TILES_ODD,
    TILES_EVEN,
    N_ROW_KINDS
};
typedef struct row_rule {
    int kind;
    int64_t a, b; /* of an interval; modulus and residue; tile */
} row_rule;
typedef struct row_fact {
    int64_t r, len;
    bool bad;
} row_fact;

static bool rowIs(const row_rule *u, int64_t r, int64_t len) {
    switch (u->kind) {
    case EVERY: return true;
    case LAST_ROW: return r == len - 1;
    case FIRST_ROW: return r == 0;
    case INTERVAL: return r >= u->a && r <= u->b;
    case FROM: return r >= u->a;
    case UP_TO: return r <= u->b;
    case NOT_RESIDUE: return r % u->a != u->b;
    case PARTIAL: return r >= len / u->a * u->a;
    case LAST_ROWS: return len - 1 - r < u->a;
    case RESIDUE: return r % u->a == u->b;
    case HALF_LOW: return r % u->a < u->a / 2;
    case HALF_HIGH: return r % u->a >= u->a / 2;
    case TILES_ODD: return r / u->a % 2 == 1;
    default: return r / u->a % 2 == 0;
    }
}

static double fitRule(const row_rule *u, const row_fact *x, int64_t n) {
    int64_t both = 0, either = 0;
    for (int64_t i = 0; i < n; i++) {
        bool is = rowIs(u, x[i].r, x[i].len);
        both += is && x[i].bad;
        either += is || x[i].bad;
    }
    return either ? (double)both / (double)either - PENALTY * u->kind : 0;
}

static void try(row_rule u, const row_fact *x, int64_t n, row_rule *best, double *fit) {
    double f = fitRule(&u, x, n);
    if (!(f > *fit)) return;
    *fit = f;
    *best = u;
}

/* The residue modulo m that most of the bad (or good) rows have. */
static int64_t commonResidue(const row_fact *x, int64_t n, int64_t m, bool bad) {
    int64_t count[256] = {0}, best = 0;
    for (int64_t i = 0; i < n; i++) count[x[i].r % m] += x[i].bad == bad;
    for (int64_t k = 1; k < m; k++)
        if (count[k] > count[best]) best = k;
    return best;
}

static double bestRule(const row_fact *x, int64_t n, row_rule *best) {
    int64_t low = INT64_MAX, high = -1, back = -1, longest = 0;
    double fit = 0;
    for (int64_t i = 0; i < n; i++) {
        longest = x[i].len > longest ? x[i].len : longest;
        if (!x[i].bad) continue;
        low = x[i].r < low ? x[i].r : low;
        high = x[i].r > high ? x[i].r : high;
        back = x[i].len - 1 - x[i].r > back ? x[i].len - 1 - x[i].r : back;
    }
    *best = (row_rule){EVERY, 0, 0};
    if (high < 0) return 0;
    for (int k = EVERY; k <= FIRST_ROW; k++) try((row_rule){k, 0, 0}, x, n, best, &fit);
    for (int k = INTERVAL; k <= UP_TO; k++) try((row_rule){k, low, high}, x, n, best, &fit);
    try((row_rule){LAST_ROWS, back + 1, 0}, x, n, best, &fit);
    for (int64_t m = 2; m <= 256; m *= 2) {
        if (m >= 8 && m < 2 * longest) try((row_rule){PARTIAL, m, m}, x, n, best, &fit);
        if (best->kind == PARTIAL && fitRule(&(row_rule){PARTIAL, m, m}, x, n) >= fit) best->b = m;
        if (2 * m > longest) continue;
        try((row_rule){RESIDUE, m, commonResidue(x, n, m, true)}, x, n, best, &fit);
        if (m >= 8) try((row_rule){NOT_RESIDUE, m, commonResidue(x, n, m, false)}, x, n, best, &fit);
        for (int k = HALF_LOW; k < N_ROW_KINDS && m >= 8; k++) try((row_rule){k, m, 0}, x, n, best, &fit);
    }
    return fit + PENALTY * best->kind;
}

/* The largest tile that an interval is, "": none. */
static void nameTile(int64_t a, int64_t b, bool to_end, char *out, size_t n) {
    out[0] = 0;
    for (int64_t t = 8; t <= 512; t *= 2)
        if (a % t == 0 && (b + 1 == a + t || (to_end && b < a + t && b >= a + t / 2)))
            snprintf(out, n, " (tile %lld of %lld rows%s)", (long long)(a / t), (long long)t,
                     b + 1 == a + t ? "" : ", its last");
}

static void nameRule(const row_rule *u, int64_t longest, const char *row, char *out, size_t n) {
    long long a = (long long)u->a, b = (long long)u->b;
    char tile[60];
    switch (u->kind) {
    case EVERY: snprintf(out, n, "every %s", row); break;
    case LAST_ROW: snprintf(out, n, "the last %s", row); break;
    case FIRST_ROW: snprintf(out, n, "the first %s", row); break;
    case INTERVAL:
        nameTile(u->a, u->b, u->b == longest - 1, tile, sizeof tile);
        if (a == b)
            snprintf(out, n, "%s %lld", row, a);
        else
            snprintf(out, n, "%ss %lld-%lld%s", row, a, b, tile);
        break;
    case FROM:
        nameTile(u->a, longest - 1, true, tile, sizeof tile);
        snprintf(out, n, "%ss from %lld on%s", row, a, tile);
        break;
    case UP_TO: snprintf(out, n, "%ss 0-%lld", row, b); break;
    case PARTIAL:
        if (a == b)
            snprintf(out, n, "the last, partial tile of %lld %ss", a, row);
        else
            snprintf(out, n, "the last, partial tile of %lld to %lld %ss", a, b, row);
        break;
    case LAST_ROWS: snprintf(out, n, "the last %lld %ss", a, row); break;
    case RESIDUE: snprintf(out, n, "%ss with number mod %lld = %lld", row, a, b); break;
    case NOT_RESIDUE: snprintf(out, n, "all %ss but those with number mod %lld = %lld", row, a, b); break;
    case HALF_LOW: snprintf(out, n, "the first half of each tile of %lld %ss", a, row); break;
    case HALF_HIGH: snprintf(out, n, "the second half of each tile of %lld %ss", a, row); break;
    case TILES_ODD: snprintf(out, n, "every second tile of %lld %ss, from tile 1 on", a, row); break;
    default: snprintf(out, n, "every second tile of %lld %ss, from tile 0 on", a, row);
    }
}

/* Residues of bad rows, where they gather: the modulus of the smallest probability, the smallest where two
 * say the same. */
static void sayResidues(const row_fact *x, const int64_t *packed, int64_t n, const char *row, char *out,
                        size_t size) {
    double least = CHANCE / MODULI, most = 0;
    out[0] = 0;
    for (int origin = 0; origin < 2; origin++)
        for (int64_t m = 8; m <= 256 && m < n; m *= 2) {
            int64_t off[256] = {0}, total[256] = {0}, low = -1, high = -1, in = 0, all = 0, among = 0;
            for (int64_t i = 0; i < n; i++) {
                int64_t k = (origin ? packed[i] : x[i].r) % m;
                off[k] += x[i].bad;
                total[k]++;
                all += x[i].bad;
            }
            double chance = dkv_gatherChance(off, total, (int)m);
            for (int64_t k = 0; k < m; k++) {
                if (off[k] * n <= 2 * all * total[k]) continue; /* more than twice its share */
                if (low < 0) low = k;
                high = k;
                in += off[k];
            }
            for (int64_t k = low < 0 ? m : low; k <= high; k++) among += total[k];
            if (chance > least || low < 0 || (double)in / (double)all < most + 0.02) continue;
            if ((double)among > 0.6 * (double)n) continue;
            least = chance;
            most = (double)in / (double)all;
            char residues[48];
            if (low == high)
                snprintf(residues, sizeof residues, "%lld", (long long)low);
            else
                snprintf(residues, sizeof residues, "%lld-%lld", (long long)low, (long long)high);
            snprintf(out, size, "%.0f %% of them are %ss with %snumber mod %lld = %s (by chance: p %s %.0e)",
                     100 * most, row, origin ? "packed " : "", (long long)m, residues,
                     chance * MODULI < 1e-99 ? "<" : "=", fmax(chance * MODULI, 1e-99));
        }
}

void dkv_describeRows(const dkv_layout *l, bool keys, const uint8_t *off, dkv_row_words *out) {
    const dualkv_problem *v = &l->view;
    const char *row = keys ? "key" : "row";
    int64_t n = 0, all = keys ? v->tk : v->tq, longest = 0, members = 0;
    segment_facts *f = calloc((size_t)v->n_segments + 1, sizeof *f);
    int64_t *bad = calloc((size_t)v->n_segments + 1, sizeof *bad),
            *packed = calloc((size_t)all + 1, sizeof *packed);
    row_fact *x = calloc((size_t)all + 1, sizeof *x);
    memset(out, 0, sizeof *out);
    if (!f || !bad || !packed || !x) goto done;
    for (int32_t i = 0; i < v->n_segments; i++) {
        int64_t at = keys ? v->segments[i].k_start : v->segments[i].q_start;
        takeFacts(l, keys, i, &f[i]);
        for (int64_t r = 0; r < f[i].len; r++) bad[i] += off[at + r] > 0;
        members += bad[i];
        for (int64_t r = 0; r < f[i].len && bad[i]; r++) {
            packed[n] = at + r;
            x[n++] = (row_fact){r, f[i].len, off[at + r] > 0};
        }
        if (bad[i] && f[i].len > longest) longest = f[i].len;
    }
    if (!members) goto done;
    describeSegments(l, f, bad, out->segments, sizeof out->segments);
    row_rule best;
    out->fit = bestRule(x, n, &best);
    char words[120];
    nameRule(&best, longest, row, words, sizeof words);
    if (out->fit < FITS)
        snprintf(out->rows, sizeof out->rows, "%lld of %lld %ss, scattered", (long long)members, (long long)n,
                 row);
    else if (out->fit > 0.97 || best.kind == EVERY) {
        snprintf(out->rows, sizeof out->rows, "%s", words);
        if (best.kind == EVERY && members < n)
            snprintf(out->rows, sizeof out->rows, "nearly every %s (%lld of %lld)", row, (long long)members,
                     (long long)n);
    } else
        snprintf(out->rows, sizeof out->rows, "about %s (%lld of %lld)", words, (long long)members,
                 (long long)n);
    if (members < n && (out->fit < 0.97 || best.kind == EVERY))
        sayResidues(x, packed, n, row, out->pattern, sizeof out->pattern);
done:
    free(f);
    free(bad);
    free(packed);
    free(x);
}

/* ---- heads, dims ---- */

static bool itemIs(int kind, int64_t i, int64_t a, int64_t b, int64_t g) {
    switch (kind) {
    case 0: return true;
    case 1: return i == a;
    case 2: return i >= a && i <= b;
    case 3: return g > 1 && i % g == g - 1;
    case 4: return g > 1 && i % g == 0;
    case 5: return g > 1 && i % g != 0;
    case 6: return g > 1 && i % g != g - 1;
    case 7: return i % 2 == 1;
    default: return i % 2 == 0;
    }
}

void dkv_describeItems(const uint8_t *off, int64_t n, int64_t g, const char *one, const char *many, char *out,
                       size_t size) {
    int64_t low = -1, high = -1, count = 0;
    int best = -1;
    double fit = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!off[i]) continue;
        if (low < 0) low = i;
        high = i;
        count++;
    }
    out[0] = 0;
    if (!count) return;
    for (int k = 0; k < 9; k++) {
        int64_t both = 0, either = 0;
        for (int64_t i = 0; i < n; i++) {
            bool is = itemIs(k, i, low, high, g);
            both += is && off[i];
            either += is || off[i];
        }
        double f = either ? (double)both / (double)either - PENALTY * k : 0;
        if (f > fit + 1e-12) {
            fit = f;
            best = k;
        }
    }
    long long a = (long long)low, b = (long long)high;
    if (fit + PENALTY * best < 0.9)
        snprintf(out, size, "%lld of %lld %s (%lld-%lld)", (long long)count, (long long)n, many, a, b);
    else if (best == 0 && n == 1)
        snprintf(out, size, "the only %s", one);
    else if (best == 0)
        snprintf(out, size, "all %lld %s", (long long)n, many);
    else if (best == 1)
        snprintf(out, size, "%s %lld", one, a);
    else if (best == 2)
        snprintf(out, size, "%s %lld-%lld", many, a, b);
    else if (best == 3)
        snprintf(out, size, "the last query head of each KV head");
    else if (best == 4)
        snprintf(out, size, "the first query head of each KV head");
    else if (best == 5)
        snprintf(out, size, "all query heads of a KV head but the first");
    else if (best == 6)
        snprintf(out, size, "all query heads of a KV head but the last");
    else
        snprintf(out, size, "every second one of %lld %s, from %d on", (long long)n, many, best == 7 ? 1 : 0);
}
