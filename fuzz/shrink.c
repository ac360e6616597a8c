#include "shrink.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/clock.h"
#include "simplify.h"

#define FIRST_TRIES 5 /* of the line that is given */
#define TRIES_MAX 20
#define MISSED 0.02    /* chance that a flaky failure is missed in all runs of a trial */
#define SEEN_MAX 65536 /* lines that are remembered */

typedef struct memory { /* of lines that did not fail for the reason: hashes, open addressing */
    uint64_t hash[2 * SEEN_MAX];
    int n;
} memory;

/* Was the line there before? Remembers it. Two lines of one hash cost no more than a step not taken. */
static bool wasSeen(memory *m, const char *line) {
    uint64_t h = 14695981039346656037ull;
    for (; *line; line++) h = (h ^ (uint8_t)*line) * 1099511628211ull;
    h += h == 0;
    size_t at = h % (2 * SEEN_MAX);
    while (m->hash[at] && m->hash[at] != h) at = (at + 1) % (2 * SEEN_MAX);
    bool seen = m->hash[at] == h;
    if (!seen && m->n < SEEN_MAX) {
        m->hash[at] = h;
        m->n++;
    }
    return seen;
}

static dkv_reason runOnce(dkv_shrinking *s, const dkv_problem *p) {
    dkv_runAlone(s->kernel, p, &s->options, s->timeout, s->result);
    s->trials++;
    s->changed |= s->result->changed;
    return dkv_reasonOf(s->result);
}

/* Does it fail for the reason, in any of the runs of a trial? s->result is of that run. */
static bool fails(dkv_shrinking *s, const dkv_problem *p) {
    for (int i = 0; i < s->tries && !dkv_stopRequested && !s->changed; i++)
        if (dkv_sameReason(runOnce(s, p), s->reason)) return true;
    return false;
}

/* The first line: which reason, how often. Its most frequent defect is the reason. */
static bool tryFirst(dkv_shrinking *s, const dkv_problem *p) {
    dkv_reason seen[FIRST_TRIES];
    int count[FIRST_TRIES] = {0}, n = 0, best = 0;
    for (s->tried = 0; s->tried < FIRST_TRIES && !dkv_stopRequested; s->tried++) {
        dkv_reason r = runOnce(s, p);
        int i = 0;
        if (dkv_stopRequested || s->changed) break; /* that run was cut */
        if (!dkv_statusRow(r.status)->defect) continue;
        while (i < n && !dkv_sameReason(seen[i], r)) i++;
        if (i == n) seen[n++] = r;
        count[i]++;
        if (count[i] > count[best]) best = i;
    }
    if (n == 0) return false;
    s->reason = seen[best];
    s->failed = count[best];
    double missed = 1 - (double)s->failed / s->tried;
    s->tries = missed > 0 ? (int)ceil(log(MISSED) / log(missed)) : 1;
    if (s->tries > TRIES_MAX) s->tries = TRIES_MAX;
    return true;
}

/* A kernel may need an earlier call to go wrong: the line twice, or with others between. */
static bool tryAfter(dkv_shrinking *s, dkv_problem *p) {
    static const dkv_run_kind kinds[] = {DKV_TWICE, DKV_ABA};
    const dkv_run_kind first = p->run;
    if (tryFirst(s, p)) return true;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kinds[i] == first) continue;
        p->run = kinds[i];
        s->after = tryFirst(s, p);
        if (s->after) return true;
    }
    p->run = first;
    return false;
}

/* One pass over all edits of the line as it gets simpler; how many were taken, -1: out of memory or time. */
static int passOnce(dkv_shrinking *s, memory *m, double end, dkv_problem *p) {
    int taken = 0, n;
    dkv_cut *list = dkv_listCuts(p, &n);
    for (int i = 0; list && i < n; i++) {
        dkv_problem q;
        char line[DKV_LINE_MAX + 1];
        if (dkv_stopRequested || s->changed || dkv_now() > end) {
            free(list);
            return -1;
        }
        if (!dkv_applyCut(p, &list[i], &q)) continue;
        if (dkv_printProblem(&q, line, sizeof line, NULL) || wasSeen(m, line) || !fails(s, &q)) {
            dkv_freeProblem(&q);
            continue;
        }
        dkv_freeProblem(p);
        *p = q;
        taken++;
        strcpy(s->line, line);
        if (s->step) s->step(line, s->trials, s->arg);
        free(list);
        list = dkv_listCuts(
            p, &n); /* of the simpler line; those before i were just tried in much the same form */
    }
    free(list);
    return list ? taken : -1;
}

int dkv_shrinkLine(const dkv_problem *first, dkv_shrinking *s, dkv_err *err) {
    dkv_problem p = {0};
    memory *m = calloc(1, sizeof *m);
    double end = s->seconds > 0 ? dkv_now() + s->seconds : INFINITY;
    int rc = m ? dkv_copyProblem(first, &p, err) : dkv_fail(err, DKV_EHARNESS, "out of memory"), taken;
    s->trials = 0;
    s->tries = 1;
    s->after = s->minimal = s->changed = false;
    if (rc) goto done;
    if (!tryAfter(s, &p)) {
        if (dkv_stopRequested) {
            rc = dkv_fail(err, DKV_EREFUSED, "interrupted before the line was seen to fail: nothing is shrunk yet");
            goto done;
        }
        if (s->changed) {
            rc = dkv_fail(err, DKV_EHARNESS, "nothing was shrunk: %.400s", s->result->why);
            goto done;
        }
        rc = dkv_fail(err, DKV_EREFUSED,
                      "nothing to shrink: the line does not fail in a fresh process (%d runs of it: %s)",
                      FIRST_TRIES, dkv_statusRow(s->result->status)->name);
        goto done;
    }
    rc = dkv_printProblem(&p, s->line, sizeof s->line, err);
    if (rc) goto done;
    while ((taken = passOnce(s, m, end, &p)) > 0) {}
    s->minimal = taken == 0 && !s->changed;
    fails(s, &p); /* the result of the line itself */
done:
    dkv_freeProblem(&p);
    free(m);
    return rc;
}
