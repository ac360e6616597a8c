/* Ranks the guesses: classes, pairs, what is claimed. See explain.h. */
#include "explain.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"
#include "hypothes.h"

#define BEST 3            /* guesses of a stage that are paired */
#define SECOND_FROM 0.5   /* a first step that explains less is no first step */
#define LEAST_MARGIN 0.02 /* of the key, between the first class and the second */
#define FITTED_PAIR 0.98  /* numbers fitted to two faults' errors at once: right where no more is left */
#define LEAST_BITS 16.0   /* information that tells some hundreds of hypotheses apart, with room */
#define BITS_EACH 12.0    /* more for each number fitted and each further hypothesis */
#define LEAST_BAD 4       /* wrong elements, and as many for each number fitted */
#define CLASSES_MAX 32
#define ALIKE_KEYS 0.01    /* keys nearer than this are ordered by what is simpler */
#define EMULATED_FLOPS 1e8 /* most that are emulated, for each second that there is */
#define CATALOGUE 100      /* emulations */
#define MADE_LATER 100000

static int compareKeys(const void *x, const void *y) {
    const dkv_guess *a = x, *b = y;
    const double ka = floor(a->key / ALIKE_KEYS) + 0.1 * a->parameters,
                 kb = floor(b->key / ALIKE_KEYS) + 0.1 * b->parameters;
    return ka < kb ? -1 : ka > kb ? 1 : a->order - b->order;
}

static void sortGuesses(dkv_inquiry *q) {
    qsort(q->guess, (size_t)q->n_guesses, sizeof *q->guess, compareKeys);
}

/* ---- two hypotheses ---- */

/* What a guess leaves of one stage, right tensors that it puts wrong included. */
static double leftOf(const dkv_inquiry *q, const dkv_guess *g, int32_t parts) {
    double left = 0;
    int wrong = 0;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!(parts >> id & 1)) continue;
        left += g->left[id];
        wrong += q->wrong[id];
    }
    return left / (wrong ? wrong : 1);
}

/* Of those that leave as much, the one that says least. */
static double rankOf(const dkv_inquiry *q, const dkv_guess *g, int32_t parts) {
    double fine = 0;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) fine += parts >> id & 1 ? g->fine[id] : 0;
    return leftOf(q, g, parts) + 1e-2 * fine + 1e-3 * g->parameters +
           1e-4 * __builtin_popcount((unsigned)(g->mask & ~parts)) * (g->parameters > 0);
}

static void bestOf(const dkv_inquiry *q, int32_t parts, int best[BEST]) {
    for (int i = 0; i < BEST; i++) best[i] = -1;
    for (int g = 0; g < q->n_guesses; g++) {
        const double rank = rankOf(q, &q->guess[g], parts);
        bool twin = false;
        if (!q->guess[g].whole) continue;
        for (int i = 0; i < BEST && best[i] >= 0; i++) twin |= rankOf(q, &q->guess[best[i]], parts) == rank;
        int at = BEST;
        while (at > 0 && (best[at - 1] < 0 || rank < rankOf(q, &q->guess[best[at - 1]], parts))) at--;
        if (twin || at == BEST) continue;
        memmove(best + at + 1, best + at, (size_t)(BEST - 1 - at) * sizeof *best);
        best[at] = g;
    }
}

/* a's change on top of b's. */
static void addChanges(dkv_inquiry *q, const dkv_guess *a, int32_t of_a, const dkv_guess *b, int32_t of_b) {
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        double *to = dkv_outputAt(&q->work.out, (dkv_tensor_id)id);
        for (int64_t i = 0; i < q->n[id]; i++) {
            const double clean = q->clean[id][i], x = of_a >> id & 1 ? dkv_guessAt(q, a, id, i) : clean;
            const double y = of_b >> id & 1 ? dkv_guessAt(q, b, id, i) : clean;
            to[i] = x == clean ? y : y == clean ? x : x + (y - clean);
        }
    }
    memset(&q->work.damage, 0, sizeof q->work.damage);
    q->work.damage.outside = a->damage.outside + b->damage.outside;
    q->work.damage.mutated = a->damage.mutated + b->damage.mutated;
}

/* Keeps the new pair only where it explains more than its parts. */
static int addPair(dkv_inquiry *q, int a, int32_t of_a, int b, int32_t of_b, double least, dkv_err *err) {
    char name[96], doc[300];
    addChanges(q, &q->guess[a], of_a, &q->guess[b], of_b);
    snprintf(name, sizeof name, "%.44s and %.44s", q->guess[a].name, q->guess[b].name);
    snprintf(doc, sizeof doc, "%.140s; and %.140s", q->guess[a].doc, q->guess[b].doc);
    dkv_guess *g = dkv_addGuess(q, "pair", name, doc, DKV_ALL_PARTS, &q->work);
    if (!g) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    g->parameters = 1 + q->guess[a].parameters + q->guess[b].parameters;
    if (g->share < least) dkv_dropGuess(q);
    return 0;
}

/* One hypothesis for forward, another for backward: backward was judged by the kernel's own O and LSE, so
 * they are independent. */
static int pairStages(dkv_inquiry *q, double single, dkv_err *err) {
    int f[BEST], b[BEST], rc = 0;
    if (!(q->wrong[DKV_O] || q->wrong[DKV_LSE])) return 0;
    if (!(q->wrong[DKV_DQ] || q->wrong[DKV_DK] || q->wrong[DKV_DV] || q->wrong[DKV_DSINK])) return 0;
    bestOf(q, DKV_FORWARD_PARTS, f);
    bestOf(q, DKV_GRADIENT_PARTS, b);
    for (int i = 0; i < BEST && !rc; i++)
        for (int j = 0; j < BEST && !rc; j++)
            if (f[i] >= 0 && b[j] >= 0 && f[i] != b[j])
                rc = addPair(q, f[i], DKV_FORWARD_PARTS, b[j], DKV_GRADIENT_PARTS, single + 0.02, err);
    return rc;
}

/* A second hypothesis on what the first leaves, as if their changes added. */
static int addSecond(dkv_inquiry *q, int first, dkv_err *err) {
    const int n = q->n_guesses;
    const double least = fmax(0.8, 1 - (1 - q->guess[first].share) / 2);
    int rc = 0;
    if (!q->guess[first].whole || q->guess[first].share < SECOND_FROM) return 0;
    for (int i = 0; i < n && !rc && !dkv_outOfTime(q); i++)
        if (i != first && q->guess[i].whole && q->guess[i].moves)
            rc = addPair(q, first, DKV_ALL_PARTS, i, DKV_ALL_PARTS, least, err);
    return rc;
}

/* ---- what is claimed ---- */

/* Enough wrong elements, and enough information in them, for so many numbers? */
static bool isTelling(const dkv_inquiry *q, const dkv_guess *g, char *why, size_t n) {
    double bits = 0;
    int64_t bad = 0;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!q->wrong[id]) continue;
        bits += q->bits[id];
        bad += q->bad[id];
    }
    if (bad == 0 && q->wrong[DKV_MEMORY]) return g->exact;
    if (!q->any_finite) { /* where a NaN stands says little of where it came from */
        if (g->exact && (strcmp(g->family, "fault") == 0 || strcmp(g->name, "unwritten") == 0)) return true;
        snprintf(why, n, "all that is wrong is NaN or infinite, which many causes would make it");
        return false;
    }
    if (bits >= LEAST_BITS + BITS_EACH * g->parameters && bad >= LEAST_BAD * (1 + g->parameters)) return true;
    snprintf(why, n, "%lld wrong elements (%.0f bits) are too few to tell causes apart; a larger line would",
             (long long)bad, bits);
    return false;
}

static void describe(const dkv_inquiry *q, const dkv_guess *g, dkv_hypothesis *h) {
    size_t at;
    memset(h, 0, sizeof *h);
    snprintf(h->family, sizeof h->family, "%s", g->family);
    snprintf(h->name, sizeof h->name, "%s", g->name);
    h->share = g->share;
    h->parameters = g->parameters;
    h->exact = g->exact;
    memcpy(h->value, g->value, sizeof h->value);
    at = (size_t)snprintf(h->sentence, sizeof h->sentence, "%s (%.0f %% of the error", g->doc,
                          floor(100 * g->share));
    for (int id = 0, n = 0; id < DKV_N_OUTPUTS; id++) {
        h->tensor_share[id] = q->wrong[id] ? fmax(0, 1 - g->left[id]) : NAN;
        if (!q->wrong[id]) continue;
        h->stage |= DKV_FORWARD_PARTS >> id & 1 ? DKV_FORWARD_ONLY : DKV_BACKWARD_ONLY;
        if (at < sizeof h->sentence)
            at += (size_t)snprintf(h->sentence + at, sizeof h->sentence - at, "%s%s %.0f %%",
                                   n++ ? ", " : ": ", dkv_tensorName((dkv_tensor_id)id),
                                   floor(100 * h->tensor_share[id]));
    }
    if (at < sizeof h->sentence)
        snprintf(h->sentence + at, sizeof h->sentence - at, "%s)", g->exact ? ", to the last bit" : "");
}

static void addMember(dkv_hypothesis *h, const char *name) {
    for (int i = 0; i < h->n_members && i < DKV_CLASS_MAX; i++)
        if (strcmp(h->members[i], name) == 0) return;
    if (h->n_members < DKV_CLASS_MAX) snprintf(h->members[h->n_members], sizeof h->members[0], "%.63s", name);
    h->n_members++;
}

/* One of each class, best first, with its members. */
static int rankClasses(const dkv_inquiry *q, dkv_hypothesis *out, int first[], int cap) {
    int n = 0;
    for (int g = 0; g < q->n_guesses; g++) {
        const dkv_guess *a = &q->guess[g];
        int c = 0;
        if (a->share <= 0) continue;
        while (c < n && !dkv_sameGuess(q, &q->guess[first[c]], a)) c++;
        if (c == n) {
            if (n == cap) continue;
            describe(q, a, &out[n]);
            first[n++] = g;
        }
        addMember(&out[c], a->name);
    }
    return n;
}

/* May the first class be named as the cause? Else *why. */
static bool isClaimed(const dkv_inquiry *q, const int first[], int n, char *why, size_t size) {
    const dkv_guess *a = n ? &q->guess[first[0]] : NULL, *b = n > 1 ? &q->guess[first[1]] : NULL;
    why[0] = 0;
    if (!a || a->share < DKV_EXPLAIN_CLAIM) {
        snprintf(why, size, "no hypothesis explains %.0f %% of the error%s", 100 * DKV_EXPLAIN_CLAIM,
                 q->catalogue && q->model
                     ? ""
                     : "; the line is too large for most of them, a smaller one would tell more");
        return false;
    }
    if (!strcmp(a->family, "pair") && a->parameters > 1 && a->share < FITTED_PAIR) {
        snprintf(why, size, "numbers fitted beside another fault explain %.0f %% of the error",
                 floor(100 * a->share));
        return false;
    }
    if (!isTelling(q, a, why, size)) return false;
    if (!b || b->key >= DKV_EXPLAIN_MARGIN * a->key + LEAST_MARGIN) return true;
    if (a->exact && q->exactlike && b->key >= LEAST_MARGIN / 10) return true;
    snprintf(why, size, "'%s' and '%s' explain it about as well", a->name, b->name);
    return false;
}

static void sayUnknown(const dkv_inquiry *q, const char *why, dkv_hypothesis *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->family, sizeof out->family, "unknown");
    snprintf(out->name, sizeof out->name, "unknown");
    snprintf(out->sentence, sizeof out->sentence, "%s", why);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        out->tensor_share[id] = q->wrong[id] ? 0 : NAN;
        if (q->wrong[id]) out->stage |= DKV_FORWARD_PARTS >> id & 1 ? DKV_FORWARD_ONLY : DKV_BACKWARD_ONLY;
    }
    addMember(out, "unknown");
}

/* ---- from run to run ---- */

/* Wrong elements that another run on the same inputs has otherwise; *all: elements of any kind that differ;
 * *large: by more than rounding. */
static double changingShare(const dkv_inquiry *q, int64_t *all, bool *large) {
    int64_t wrong = 0, changing = 0;
    *all = 0;
    *large = false;
    for (int id = 0; id < DKV_N_OUTPUTS && q->in->again; id++) {
        const double *again = q->n[id] ? dkv_outputAt(q->in->again, (dkv_tensor_id)id) : NULL;
        const double *got = q->n[id] ? dkv_outputAt(q->in->got, (dkv_tensor_id)id) : NULL;
        for (int64_t i = 0; again && i < q->n[id]; i++) {
            const bool differs = got[i] != again[i] && !(isnan(got[i]) && isnan(again[i]));
            const bool bad = q->wrong[id] &&
                             !(fabs(got[i] - q->clean[id][i]) <= (q->gross ? q->noise[id][i] : 0));
            *all += differs;
            *large |= differs && !(fabs(got[i] - again[i]) <= 2 * q->noise[id][i]);
            wrong += bad;
            changing += bad && differs;
        }
    }
    return wrong ? (double)changing / (double)wrong : 0;
}

/* Results that change are a cause of their own: where nothing else is wrong, or where what is wrong changes.
 */
static bool sayOrder(const dkv_inquiry *q, dkv_hypothesis *h) {
    int64_t changing;
    bool large;
    const double share = changingShare(q, &changing, &large);
    if (!changing || (q->n_wrong && share < DKV_EXPLAIN_CLAIM)) return false;
    memset(h, 0, sizeof *h);
    snprintf(h->family, sizeof h->family, "order");
    snprintf(h->name, sizeof h->name, "run to run");
    snprintf(h->sentence, sizeof h->sentence,
             large ? "a race or a lost update: the results change from run to run by more than rounding "
                     "(%lld elements)"
                   : "the order of sums changes from run to run (%lld elements)",
             (long long)changing);
    h->share = q->n_wrong ? share : 1;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) h->tensor_share[id] = q->wrong[id] ? share : NAN;
    h->claimed = true;
    addMember(h, h->name);
    if (!dkv_isExcluded(q, large ? "Y23" : "H4"))
        addMember(h, large ? "Y23" : "H4"); /* the catalogue's own */
    return true;
}

/* ---- the whole ---- */

/* Query tiles that a kernel may have, where its arithmetic does not say. */
static int guessTiles(dkv_inquiry *q, dkv_err *err) {
    static const int tiles[] = {16, 32, 128};
    int rc = 0;
    for (size_t i = 0; i < sizeof tiles / sizeof *tiles && !rc && !q->in->emu && !dkv_outOfTime(q); i++) {
        rc = dkv_guessFaults(q, tiles[i], err);
        sortGuesses(q);
        if (q->n_guesses && q->guess[0].exact) break;
    }
    return rc;
}

static int guessAll(dkv_inquiry *q, dkv_err *err) {
    int rc = dkv_guessFaults(q, 0, err);
    if (!rc) rc = dkv_guessRoundings(q, err);
    sortGuesses(q);
    if (rc || (q->n_guesses && q->guess[0].exact)) return rc; /* to the last bit */
    rc = dkv_openModel(q, err);
    q->n_made = MADE_LATER; /* of those that are alike, edits are named before numbers, and numbers before
                               lists of keys */
    if (!rc) rc = dkv_guessFactors(q, err);
    if (!rc) rc = dkv_guessSums(q, err);
    if (!rc) rc = dkv_guessPlaces(q, err);
    q->n_made = 2 * MADE_LATER;
    if (!rc) rc = q->model ? dkv_guessKeys(q, err) : dkv_sampleKeys(q, err);
    q->n_made = 0;
    if (!rc) rc = dkv_guessEdits(q, err);
    q->n_made = 3 * MADE_LATER;
    if (rc) return rc;
    sortGuesses(q);
    const double single = q->n_guesses ? q->guess[0].share : 0;
    rc = pairStages(q, single, err);
    if (!rc && q->n_guesses && single < DKV_EXPLAIN_CLAIM) {
        rc = addSecond(q, 0, err);
        sortGuesses(q);
    }
    if (!rc && (!q->n_guesses || q->guess[0].share < DKV_EXPLAIN_CLAIM)) rc = guessTiles(q, err);
    return rc;
}

static int rank(dkv_inquiry *q, dkv_hypothesis *out, int cap, dkv_err *err) {
    int first[CLASSES_MAX];
    char why[300];
    const int most = cap < CLASSES_MAX ? cap : CLASSES_MAX;
    dkv_hypothesis *found = calloc((size_t)most, sizeof *found);
    if (!found) {
        dkv_fail(err, DKV_EHARNESS, "out of memory");
        return -1;
    }
    sortGuesses(q);
    int n = rankClasses(q, found, first, most), at = 0;
    if (isClaimed(q, first, n, why, sizeof why)) found[0].claimed = true;
    else if (sayOrder(q, &out[0])) at = 1;
    else sayUnknown(q, why, &out[at++]);
    for (int i = 0; i < n && at < cap; i++) out[at++] = found[i];
    if (at && (q->coverage[0][0] || q->coverage[1][0]))
        snprintf(out[0].evidence, sizeof out[0].evidence, "probes: %.520s%s%.520s", q->coverage[0],
                 q->coverage[0][0] && q->coverage[1][0] ? "; " : "", q->coverage[1]);
    free(found);
    return at;
}

/* What a right kernel prints: of the emulated kernel, or the truth where that takes too long. */
static int findClean(dkv_inquiry *q, dkv_err *err) {
    const dkv_explain_in *in = q->in;
    const double flops = dkv_forwardFlops(in->p) + (in->p->grad ? dkv_backwardFlops(in->p) : 0);
    int rc = DKV_REFUSED;
    if (flops <= EMULATED_FLOPS * q->seconds) {
        rc = dkv_openEmulator(q, err);
        const double start = dkv_inquirySeconds(q);
        if (!rc) rc = dkv_emulate(q, "", in->in, true, &q->work, err);
        q->catalogue = !rc && (dkv_inquirySeconds(q) - start) * CATALOGUE <= q->seconds;
    }
    if (rc && rc != DKV_REFUSED) return rc;
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (q->n[id])
            memcpy(q->clean[id], dkv_outputAt(rc ? &in->oracle->truth : &q->work.out, (dkv_tensor_id)id),
                   (size_t)q->n[id] * sizeof(double));
    return 0;
}

int dkv_explain(const dkv_explain_in *in, dkv_hypothesis *out, int cap, dkv_err *err) {
    dkv_inquiry q;
    int n = -1;
    if (!in || !in->p || !in->got || !in->oracle || !in->a || cap < 1) {
        dkv_fail(err, DKV_EHARNESS, "explain: nothing to explain");
        return -1;
    }
    int rc = dkv_openInquiry(&q, in, err);
    if (!rc) rc = findClean(&q, err);
    if (!rc) rc = dkv_weighErrors(&q, err);
    if (!rc && q.n_wrong) rc = guessAll(&q, err);
    if (!rc) n = q.n_wrong ? rank(&q, out, cap, err) : sayOrder(&q, out);
    dkv_closeModel(&q);
    dkv_closeEmulator(&q);
    dkv_closeInquiry(&q);
    return n;
}
