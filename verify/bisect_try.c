#include "bisect_try.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/fill.h"
#include "../data/sha256.h"
#include "../data/suite.h"
#include "bisect_proc.h"
#include "session.h"
#include "version.h"

#define LEVEL_TESTS 1000 /* runs of a case in one bisect, at most: what its false alarms are divided by */
#define BUDGET      1e-4

static __attribute__((format(printf, 2, 3))) int makeKey(char key[65], const char *fmt, ...) {
    char *text = NULL;
    va_list ap;
    va_start(ap, fmt);
    int n = vasprintf(&text, fmt, ap);
    va_end(ap);
    if (n < 0) return 1;
    dkv_digestBytes(text, (size_t)n, key);
    free(text);
    return 0;
}

/* ---- the kernel's place ---- */

/* Which part of the spec is a path: up to the end of the first ".so" or ".py" that ends there. 0: a name. */
static size_t pathLength(const char *spec) {
    for (const char *s = strchr(spec, '.'); s; s = strchr(s + 1, '.'))
        if ((strncmp(s, ".so", 3) == 0 || strncmp(s, ".py", 3) == 0) && (!s[3] || s[3] == ':' || s[3] == '+'))
            return (size_t)(s + 3 - spec);
    return 0;
}

static bool isShared(const char *spec) {
    size_t n = pathLength(spec);
    return n && strncmp(spec + n - 3, ".so", 3) == 0;
}

static bool leavesTree(const char *path, size_t n) {
    for (const char *at = path; at < path + n;) {
        size_t len = strcspn(at, "/");
        if (len == 2 && strncmp(at, "..", 2) == 0) return true;
        at += len + 1;
    }
    return false;
}

static void placeOf(const dkv_trying *t, char *path, size_t n) {
    snprintf(path, n, "%s/%.*s", t->repo->tree, (int)pathLength(t->kernel), t->kernel);
}

static int checkKernel(const dkv_trying *t, dkv_err *err) {
    dkv_kernel_spec spec;
    const char *k = t->kernel;
    size_t n = pathLength(k);
    if (strncmp(k, "attached:", 9) == 0 || strncmp(k, DKV_FILES_PREFIX, strlen(DKV_FILES_PREFIX)) == 0)
        return dkv_fail(err, DKV_EUSER, "kernel '%.80s' cannot be built again: bisect needs PATH.so[:NAME] or PATH.py:FUNCTION", k);
    if (!n && t->build) return dkv_parseKernelSpec(k, &spec, err);
    if (!n) return dkv_fail(err, DKV_EUSER, "kernel '%.80s' is this program's own: nothing of it would be built again", k);
    if (k[0] == '/' || leavesTree(k, n))
        return dkv_fail(err, DKV_EUSER, "kernel '%.200s': a path within the tree that is built, as ./lib.so:NAME", k);
    if (strncmp(k + n - 3, ".py", 3) == 0 && k[n] != ':')
        return dkv_fail(err, DKV_EUSER, "kernel '%.80s': which function? %.*s:FUNCTION", k, (int)n, k);
    if (!t->build && isShared(k))
        return dkv_fail(err, DKV_EUSER, "kernel '%.80s': --build: which command makes it?", k);
    return 0;
}

int dkv_prepareTrying(dkv_trying *t, dkv_err *err) {
    char exe[PATH_MAX], hash[65] = "";
    ssize_t len = readlink("/proc/self/exe", exe, sizeof exe - 1);
    int rc = checkKernel(t, err);
    if (rc) return rc;
    if (t->n_lines == 0) return dkv_fail(err, DKV_EUSER, "--case: which line? (a problem line)");
    if (len > 0) {
        exe[len] = 0;
        rc = dkv_hashFile(exe, hash, err);
    }
    if (!rc && makeKey(t->base, "%s\n%s\n%s\n%s\n%zu %s\n%s\n%g %g %d", dkv_version(), hash, DKV_GENERATOR, dkv_hostDevice(),
                       t->build ? strlen(t->build) : 0, t->build ? t->build : "", t->kernel, t->build_timeout, t->timeout,
                       t->keep))
        rc = dkv_fail(err, DKV_EHARNESS, "out of memory");
    dkv_session s = {.data_dir = dkv_dataDir()};
    for (long i = 0; i < t->n_lines && !rc; i++) {
        dkv_item item = {t->lines[i], 0};
        s.items = &item;
        s.n_items = 1;
        rc = dkv_precheckItems(&s, err);
    }
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1); /* a module of one commit is never taken for another's of the same second */
    return rc;
}

/* ---- flags ---- */

/* The next item, of words in quotes or without: its length in *n; NULL: none is left. */
static const char *nextItem(const char *at, size_t *n, const char **end) {
    at += strspn(at, " \t\n");
    if (!*at) return NULL;
    if (*at == '\'' || *at == '"') {
        const char *close = strchr(at + 1, *at);
        *n = close ? (size_t)(close - at - 1) : strlen(at + 1);
        *end = close ? close + 1 : at + strlen(at);
        return at + 1;
    }
    *n = strcspn(at, " \t\n");
    *end = at + *n;
    return at;
}

static bool isOfFile(const char *item, size_t n) { return n && item[0] != '-' && memchr(item, '=', n); }

static int append(const char *name, const char *text, size_t n) {
    const char *was = getenv(name);
    char *now = NULL;
    if (asprintf(&now, "%s%s%.*s", was ? was : "", was && was[0] ? " " : "", (int)n, text) < 0) return 1;
    int rc = setenv(name, now, 1);
    free(now);
    return rc;
}

int dkv_setFlags(const char *flags, dkv_err *err) {
    char name[300];
    const char *end = flags, *item;
    size_t n = 0;
    extern char **environ;
    for (char **e = environ; *e;) { /* those of the set before */
        if (strncmp(*e, "DUALKV_FLAGS", 12) == 0 && strcspn(*e, "=") < sizeof name) {
            snprintf(name, sizeof name, "%.*s", (int)strcspn(*e, "="), *e);
            unsetenv(name);
            e = environ;
        } else e++;
    }
    int rc = setenv("DUALKV_FLAGS", "", 1);
    while (!rc && (item = nextItem(end, &n, &end))) {
        size_t file = isOfFile(item, n) ? (size_t)((const char *)memchr(item, '=', n) - item) : 0;
        if (file > 200) return dkv_fail(err, DKV_EUSER, "--flags: a file's name is too long: '%.40s...'", item);
        snprintf(name, sizeof name, "DUALKV_FLAGS%s%.*s", file ? "_" : "", (int)file, item);
        for (char *c = name; *c; c++)
            if (!((*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9'))) *c = '_';
        rc = append(name, item + (file ? file + 1 : 0), n - (file ? file + 1 : 0));
    }
    return rc ? dkv_fail(err, DKV_EHARNESS, "out of memory for flags") : 0;
}

/* ---- building ---- */

static int noteBuild(dkv_trial *out, dkv_build_state s, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int noteBuild(dkv_trial *out, dkv_build_state s, const char *fmt, ...) {
    va_list ap;
    out->build = s;
    va_start(ap, fmt);
    vsnprintf(out->why, sizeof out->why, fmt, ap);
    va_end(ap);
    return 0;
}

static int runBuild(dkv_trying *t, dkv_trial *out, dkv_err *err) {
    const char *argv[] = {"sh", "-c", t->build, NULL};
    char last[300], path[2 * PATH_MAX];
    dkv_program p = {.argv = argv, .dir = t->repo->tree, .timeout = t->build_timeout, .ends_only = true};
    int rc = 0;
    placeOf(t, path, sizeof path);
    if (t->build && t->keep && isShared(t->kernel)) unlink(path); /* the last one's must not pass for this one's */
    if (t->build) {
        rc = dkv_setFlags(t->flags ? t->flags : "", err);
        if (!t->flags) unsetenv("DUALKV_FLAGS");
        if (!rc) rc = dkv_runProgram(&p, err);
        out->seconds = p.seconds;
    }
    if (!rc && p.stopped) rc = dkv_fail(err, DKV_EHARNESS, "interrupted");
    dkv_errorLine(p.last, last, sizeof last);
    if (!rc && p.timed_out) noteBuild(out, DKV_BUILD_HUNG, "the build took longer than %g s", t->build_timeout);
    else if (!rc && p.code)
        noteBuild(out, DKV_BUILD_FAILED, "the build ended with %d%s%s", p.code, last[0] ? ": " : "", last);
    else if (!rc && pathLength(t->kernel) && access(path, R_OK))
        noteBuild(out, DKV_BUILD_MISSING, "no '%.*s' after the build", (int)pathLength(t->kernel), t->kernel);
    dkv_freeProgram(&p);
    return rc;
}

/* The spec as the tree has it. */
static int placeKernel(const dkv_trying *t, dkv_kernel_spec *spec, dkv_err *err) {
    size_t n = pathLength(t->kernel);
    char *text = NULL;
    if (!n) return dkv_parseKernelSpec(t->kernel, spec, err);
    const char *rest = t->kernel;
    if (strncmp(rest, "./", 2) == 0) rest += 2;
    if (asprintf(&text, "%s/%s", t->repo->tree, rest) < 0) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    int rc = dkv_parseKernelSpec(text, spec, err);
    free(text);
    return rc;
}

static int build(dkv_trying *t, dkv_trial *out, const char *key, dkv_err *err) {
    char changed[200];
    dkv_kernel_spec spec;
    dkv_err why = {0};
    if (strcmp(t->standing, key) == 0) return 0;
    t->standing[0] = 0;
    int rc = dkv_checkOut(t->repo, out->id, t->keep, err);
    if (!rc && t->build) t->builds++;
    out->built = true;
    if (!rc) rc = runBuild(t, out, err);
    if (rc || out->build != DKV_BUILD_OK) return rc;
    if (t->build && !t->told_changes && dkv_changedFile(t->repo, changed, sizeof changed, NULL) == 0 && changed[0]) {
        t->told_changes = true;
        fprintf(stderr, "note: the build changes files of the commit (%s): they are put back before each\n", changed);
    }
    rc = placeKernel(t, &spec, &why);
    if (!rc) rc = dkv_probeKernels(&spec, 1, t->timeout, NULL, &why);
    if (rc == DKV_EHARNESS) return dkv_fail(err, DKV_EHARNESS, "%s", dkv_stopRequested ? "interrupted" : why.text);
    if (rc) noteBuild(out, DKV_BUILD_USELESS, "%s", why.text);
    else snprintf(t->standing, sizeof t->standing, "%s", key);
    return 0;
}

/* ---- judging ---- */

typedef struct taker {
    dkv_bisect_row *row;
    bool got;
} taker;

static void takeOne(const dkv_result *r, long index, long total, void *arg) {
    taker *k = arg;
    (void)index, (void)total;
    dkv_takeResult(r, k->row);
    k->got = true;
}

static int runCase(dkv_trying *t, const char *line, dkv_bisect_row *row, dkv_err *err) {
    static dkv_kernel_spec spec; /* static: outlive an interrupted run's threads */
    static dkv_session session;
    static dkv_item item;
    static char text[DKV_LINE_MAX + 1];
    static taker k;
    int rc = placeKernel(t, &spec, err);
    if (rc) return rc;
    snprintf(text, sizeof text, "%s", line);
    item = (dkv_item){text, 0};
    k = (taker){row, false};
    session = (dkv_session){.kernels = &spec, .n_kernels = 1, .items = &item, .n_items = 1, .jobs = 1, .timeout = t->timeout,
                            .level = BUDGET / LEVEL_TESTS / DKV_N_OUTPUTS, .repeats = 1, .fits = t->held,
                            .data_dir = dkv_dataDir(), .report = takeOne, .arg = &k};
    dkv_runSession(&session);
    if (session.stopped || dkv_stopRequested) return dkv_fail(err, DKV_EHARNESS, "interrupted");
    return k.got ? 0 : dkv_fail(err, DKV_EHARNESS, "'%.200s' was not run", line);
}

static int keyOf(const dkv_trying *t, const char *tree, const char *line, int run, char key[65], dkv_err *err) {
    char held[65] = "";
    if (line[0] && t->held) dkv_digestBytes(t->held, sizeof *t->held, held);
    if (makeKey(key, "%s\n%s\n%zu %s\n%s\n%s\n%d", t->base, tree, t->flags ? strlen(t->flags) : 0, t->flags ? t->flags : "", line,
                held, run))
        return dkv_fail(err, DKV_EHARNESS, "out of memory");
    return 0;
}

/* One run of one line, on what was built, unless the cache knows it. */
static int tryLine(dkv_trying *t, const dkv_trial *on, const char *line, int run, dkv_bisect_row *row, dkv_err *err) {
    memset(row, 0, sizeof *row);
    int rc = keyOf(t, on->tree, line, run, row->key, err);
    char key[65];
    memcpy(key, row->key, sizeof key);
    if (!rc && dkv_findCached(t->cache, key, row)) t->reused++;
    else if (!rc) {
        memset(row, 0, sizeof *row);
        memcpy(row->key, key, sizeof key);
        snprintf(row->tree, sizeof row->tree, "%.71s", on->tree);
        row->line = line;
        row->run = run;
        rc = runCase(t, line, row, err);
        if (!rc && row->status != DKV_ST_HARNESS_ERROR) rc = dkv_addCached(t->cache, row, err);
    }
    row->line = line;
    row->run = run;
    return rc;
}

/* Judged whole, and no defect seen: also where not enough is known of its arithmetic to call that a pass. */
static bool isSound(const dkv_bisect_row *r) {
    return r->status == DKV_ST_PASSED || (r->status == DKV_ST_INCONCLUSIVE && r->judged && !r->partial);
}
static bool isFail(const dkv_bisect_row *r) { return dkv_statusRow(r->status)->defect; }

static dkv_bisect_row *rowAt(const dkv_trial *out, int run, long line) { return &out->rows[run * out->n_lines + line]; }

/* What the runs say together. */
static void conclude(const dkv_trying *t, dkv_trial *out) {
    const dkv_bisect_row *unknown = NULL, *failed = NULL;
    out->failed = out->made = 0;
    for (int run = 0; run < out->runs; run++) {
        bool fails = false, made = true;
        for (long i = 0; i < out->n_lines; i++) {
            const dkv_bisect_row *r = rowAt(out, run, i);
            made &= out->there[run * out->n_lines + i];
            if (!made) break;
            if (isFail(r)) {
                fails = true;
                if (!failed) failed = r;
            } else if (!isSound(r) && !unknown) unknown = r;
        }
        out->made += made;
        out->failed += made && fails;
    }
    out->flaky = out->failed > 0 && out->failed < out->made;
    out->worst = failed ? failed : unknown;
    if (out->failed && (t->any || !out->flaky)) {
        out->verdict = DKV_BV_BAD;
        snprintf(out->why, sizeof out->why, "%s", failed->why);
    } else if (out->flaky) {
        out->verdict = DKV_BV_SKIP;
        snprintf(out->why, sizeof out->why, "flaky: %d of %d runs failed (%.400s)", out->failed, out->made, failed->why);
    } else if (unknown) {
        out->verdict = DKV_BV_SKIP;
        snprintf(out->why, sizeof out->why, "%s: %.500s", dkv_statusRow(unknown->status)->name, unknown->why);
    } else out->verdict = DKV_BV_GOOD;
}

/* Every row that the cache has; the number that is missing. */
static long lookUp(dkv_trying *t, dkv_trial *out, dkv_err *err) {
    long missing = 0;
    for (int run = 0; run < out->runs; run++)
        for (long i = 0; i < out->n_lines; i++) {
            dkv_bisect_row *row = rowAt(out, run, i);
            char key[65];
            if (keyOf(t, out->tree, t->lines[i], run, key, err)) return -1;
            bool known = dkv_findCached(t->cache, key, row);
            row->line = t->lines[i];
            row->run = run;
            out->there[run * out->n_lines + i] = known;
            missing += !known;
        }
    return missing;
}

/* Do the runs so far decide? */
static bool isDecided(const dkv_trying *t, dkv_trial *out) {
    if (t->all_runs) return false;
    conclude(t, out);
    return out->made > 0 && (out->flaky || (t->any && out->failed));
}

static int judge(dkv_trying *t, dkv_trial *out, dkv_err *err) {
    int rc = 0;
    for (int run = 0; run < out->runs && !rc && !isDecided(t, out); run++)
        for (long i = 0; i < out->n_lines && !rc; i++) {
            bool *there = &out->there[run * out->n_lines + i];
            rc = tryLine(t, out, t->lines[i], run, rowAt(out, run, i), err);
            *there = !rc;
        }
    return rc;
}

static int isKnownFailure(dkv_trying *t, dkv_trial *out, dkv_err *err) {
    dkv_bisect_row row;
    char key[65];
    if (keyOf(t, out->tree, "", 0, key, err)) return -1;
    if (!dkv_findCached(t->cache, key, &row)) return 0;
    noteBuild(out, row.build, "%s", row.why);
    return row.build != DKV_BUILD_OK;
}

static int keepFailure(dkv_trying *t, const dkv_trial *out, dkv_err *err) {
    dkv_bisect_row row = {.line = "", .build = out->build};
    snprintf(row.tree, sizeof row.tree, "%.71s", out->tree);
    snprintf(row.why, sizeof row.why, "%s", out->why);
    int rc = keyOf(t, out->tree, "", 0, row.key, err);
    return rc ? rc : dkv_addCached(t->cache, &row, err);
}

int dkv_tryCommit(dkv_trying *t, const char *id, bool sure, dkv_trial *out, dkv_err *err) {
    memset(out, 0, sizeof *out);
    snprintf(out->id, sizeof out->id, "%s", id);
    out->n_lines = t->n_lines;
    out->runs = t->runs;
    out->rows = calloc((size_t)t->n_lines * (size_t)t->runs, sizeof *out->rows);
    out->there = calloc((size_t)t->n_lines * (size_t)t->runs, sizeof *out->there);
    int rc = out->rows && out->there ? dkv_treeOf(t->repo, id, out->tree, err) : dkv_fail(err, DKV_EHARNESS, "out of memory");
    long missing = rc ? 0 : lookUp(t, out, err);
    int failed = rc || missing <= 0 || sure ? 0 : isKnownFailure(t, out, err);
    if (missing < 0 || failed < 0) rc = DKV_EHARNESS;
    char key[65];
    if (!rc && missing > 0 && !failed && !isDecided(t, out)) {
        rc = keyOf(t, out->tree, "", 0, key, err);
        if (!rc) rc = build(t, out, key, err);
        if (!rc && out->build != DKV_BUILD_OK) rc = keepFailure(t, out, err);
    }
    if (!rc && out->build == DKV_BUILD_OK) {
        rc = judge(t, out, err);
        if (!rc) conclude(t, out);
    } else out->verdict = DKV_BV_SKIP;
    if (rc) dkv_freeTrial(out);
    return rc;
}

int dkv_fitCommit(dkv_trying *t, const char *id, const char *word, dkv_fits *out, dkv_err *err) {
    dkv_trial trial = {0};
    dkv_kernel_spec spec;
    unsigned types = 0;
    char key[65];
    if (strcmp(word, "auto")) {
        dkv_nameFits(word, 7, out);
        return 0;
    }
    for (long i = 0; i < t->n_lines; i++) {
        dkv_problem p = {0};
        if (!dkv_parseProblem(t->lines[i], dkv_knownFill, &p, NULL)) types |= 1u << p.dtype;
        dkv_freeProblem(&p);
    }
    snprintf(trial.id, sizeof trial.id, "%s", id);
    int rc = dkv_treeOf(t->repo, id, trial.tree, err);
    if (!rc) rc = keyOf(t, trial.tree, "", 0, key, err);
    if (!rc) rc = build(t, &trial, key, err);
    if (!rc && trial.build != DKV_BUILD_OK)
        rc = dkv_fail(err, DKV_EHARNESS, "--arithmetic auto: %.12s says nothing: %.300s", id, trial.why);
    if (!rc) rc = placeKernel(t, &spec, err);
    if (!rc) rc = dkv_fitKernel(&spec, word, types, t->timeout, dkv_dataDir(), out, err);
    for (int type = 0; type < 3; type++) out->of[type].held = out->of[type].known;
    return rc;
}

void dkv_freeTrial(dkv_trial *t) {
    free(t->rows);
    free(t->there);
    t->rows = NULL;
    t->there = NULL;
    t->worst = NULL;
}
