/* Times of `gate --perf`: against the accepted kernel, in the same run. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/fill.h"
#include "../data/replace.h"
#include "../data/sha256.h"
#include "../data/suite.h"
#include "../ref/mask.h"
#include "gate_run.h"
#include "session.h"

#define SECONDS 3.0 /* of a line, at least; more where the level wants more rounds than fit */

/* ---- which kernel ---- */

static bool isFile(const dkv_kernel_spec *k) { return k->kind == DKV_SPEC_SO || k->kind == DKV_SPEC_PYTHON; }

/* Path of the kept copy, malloc'ed; NULL where the kernel is no file (or memory is out). */
static char *dkv_keptKernel(const char *accepted, const dkv_kernel_spec *kernel) {
    char *path = NULL;
    if (!isFile(kernel)) return NULL;
    if (asprintf(&path, "%s.kernel%s", accepted, kernel->kind == DKV_SPEC_SO ? ".so" : ".py") < 0) return NULL;
    return path;
}

/* The accepted kernel's spec with the kept file instead of its own: what followed the path stays. */
static int specOfKept(const dkv_kernel_spec *accepted, const char *path, dkv_kernel_spec *out, dkv_err *err) {
    char text[2 * DKV_SPEC_MAX];
    size_t n = strlen(accepted->path);
    if (strncmp(accepted->text, accepted->path, n)) n = 0;
    snprintf(text, sizeof text, "%s%s%s", strchr(path, '/') ? "" : "./", path, accepted->text + n);
    return n ? dkv_parseKernelSpec(text, out, err)
             : dkv_fail(err, DKV_EUSER, "--perf: the accepted kernel '%.200s' cannot be found: --baseline-kernel names one",
                        accepted->text);
}

/* Is it the very file that was accepted? */
static int checkKept(const dkv_gate_run *r, const char *path, dkv_err *err) {
    char hex[65];
    int rc = dkv_hashFile(path, hex, err);
    if (rc || strcmp(hex, r->was.kernel_hash) == 0) return rc;
    return dkv_fail(err, DKV_EUSER, "--perf: '%s' is not the kernel that was accepted (its SHA-256 is another): --baseline-kernel names one",
                    path);
}

/* The spec of the accepted kernel, whose file may be gone by now. */
static void parseAccepted(const char *text, dkv_kernel_spec *out) {
    dkv_err err = {0};
    if (!dkv_parseKernelSpec(text, out, &err)) return;
    const char *dot = strstr(text, ".so"), *python = strstr(text, ".py");
    *out = (dkv_kernel_spec){.kind = !dot && !python ? DKV_SPEC_NAME : !dot || (python && python < dot) ? DKV_SPEC_PYTHON : DKV_SPEC_SO};
    snprintf(out->text, sizeof out->text, "%s", text);
    if (out->kind != DKV_SPEC_NAME)
        snprintf(out->path, sizeof out->path, "%.*s", (int)((out->kind == DKV_SPEC_SO ? dot : python) + 3 - text), text);
}

int dkv_findBaseline(dkv_gate_run *r, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    dkv_kernel_spec accepted;
    if (cli->baseline) return dkv_parseKernelSpec(cli->baseline, &r->baseline, err);
    if (!r->has_was)
        return dkv_fail(err, DKV_EUSER, "--perf: faster or slower than what? (--accepted FILE, or --baseline-kernel SPEC)");
    parseAccepted(r->was.kernel, &accepted);
    char *path = dkv_keptKernel(cli->accepted, &accepted);
    int rc;
    if (!path) rc = dkv_parseKernelSpec(r->was.kernel, &r->baseline, err);
    else if (access(path, F_OK) != 0)
        rc = dkv_fail(err, DKV_EUSER, "--perf: no '%s' (--accept --keep-kernel writes it): --baseline-kernel names the kernel to "
                      "time against", path);
    else {
        rc = specOfKept(&accepted, path, &r->baseline, err);
        if (!rc) rc = checkKept(r, path, err);
    }
    free(path);
    return rc;
}

int dkv_copyBytes(const char *from, int to, dkv_err *err) {
    char block[1 << 16];
    FILE *f = fopen(from, "re");
    size_t n = 1;
    bool bad = !f;
    while (!bad && (n = fread(block, 1, sizeof block, f)) > 0)
        for (size_t at = 0; at < n && !bad;) {
            ssize_t wrote = write(to, block + at, n - at);
            if (wrote < 0 && errno == EINTR) continue;
            bad = wrote <= 0;
            at += bad ? 0 : (size_t)wrote;
        }
    bad = bad || ferror(f) || fsync(to);
    int rc = bad ? dkv_fail(err, DKV_EHARNESS, "cannot copy '%s': %s", from, strerror(errno)) : 0;
    if (f) fclose(f);
    return rc;
}

int dkv_keepKernel(dkv_gate_run *r, dkv_err *err) {
    const dkv_kernel_spec *k = &r->cli->kernels[0];
    if (!isFile(k)) return 0;
    char *real = realpath(k->path, NULL), *path = dkv_keptKernel(r->accepted_path, k), *temporary = NULL;
    int rc = real && path && asprintf(&temporary, "%s.XXXXXX", path) > 0 ? dkv_hashFile(real, r->now.kernel_hash, err)
             : dkv_fail(err, DKV_EHARNESS, "cannot read '%s'", k->path);
    if (!rc && r->cli->keep_kernel) {
        int fd = mkostemp(temporary, O_CLOEXEC);
        rc = fd >= 0 ? dkv_copyBytes(real, fd, err) : dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", temporary, strerror(errno));
        if (!rc && (fchmod(fd, 0755) || dkv_replaceFile(temporary, path)))
            rc = dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        if (fd >= 0 && rc) unlink(temporary);
    }
    free(real);
    free(path);
    free(temporary);
    return rc;
}

/* ---- which lines ---- */

typedef struct candidate {
    const char *line;
    double flops;
} candidate;

static int byWork(const void *x, const void *y) {
    const candidate *a = x, *b = y;
    return a->flops != b->flops ? (a->flops < b->flops) - (a->flops > b->flops) : strcmp(a->line, b->line);
}

/* Useful work of a line that can be timed, 0 where it cannot: it did not pass, or it is a way to run. */
static double workOf(const dkv_gate_run *r, const char *line, bool named) {
    const dkv_accepted_row *row = dkv_findAccepted(&r->now, line);
    dkv_problem p = {0};
    double flops = 0;
    if (!named && (!row || row->status != DKV_ST_PASSED)) return 0;
    if (dkv_parseProblem(line, dkv_knownFill, &p, NULL) == 0 && (named || p.run == DKV_SINGLE))
        flops = dkv_forwardFlops(&p) + (p.grad ? dkv_backwardFlops(&p) : 0);
    dkv_freeProblem(&p);
    return flops;
}

static int chooseLines(dkv_gate_run *r, const dkv_selection *lines, bool named, dkv_err *err) {
    candidate *c = calloc((size_t)lines->n + 1, sizeof *c);
    long n = 0;
    for (long i = 0; c && i < lines->n; i++) {
        double flops = workOf(r, lines->lines[i], named);
        if (flops > 0) c[n++] = (candidate){lines->lines[i], flops};
    }
    if (c) qsort(c, (size_t)n, sizeof *c, byWork);
    if (!named && n > DKV_GATE_TIMED) n = DKV_GATE_TIMED;
    r->timed = calloc((size_t)n + 1, sizeof *r->timed);
    for (long i = 0; c && r->timed && i < n; i++) {
        r->timed[i].line = strdup(c[i].line);
        if (!r->timed[i].line) break;
        r->n_timed++;
    }
    free(c);
    return r->timed && r->n_timed == n ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for lines to time");
}

/* ---- the records: as bench writes them, and against what ---- */

static void addRatio(cJSON *versus, const char *key, const dkv_perf *t, int d) {
    cJSON *o = cJSON_AddObjectToObject(versus, key);
    cJSON_AddNumberToObject(o, "ratio", t->ratio[d]);
    cJSON_AddNumberToObject(o, "low", t->low[d]);
    if (isfinite(t->high[d])) cJSON_AddNumberToObject(o, "high", t->high[d]);
    else cJSON_AddStringToObject(o, "high", "inf");
}

static char *timeRecord(const dkv_gate_run *r, const dkv_gate_timed *timed, int k) {
    const dkv_perf *t = &timed->perf;
    dkv_problem p = {0};
    cJSON *o = cJSON_CreateObject();
    char *text = NULL;
    if (o && dkv_parseProblem(timed->line, dkv_knownFill, &p, NULL) == 0) {
        cJSON_AddStringToObject(o, "line", timed->line);
        cJSON_AddStringToObject(o, "kernel", k ? r->baseline.text : r->cli->kernels[0].text);
        dkv_addDevice(o, &t->gpu);
        dkv_addBuild(o);
        cJSON_AddNumberToObject(o, "ms_fwd", 1e3 * t->seconds[k][0]);
        cJSON_AddNumberToObject(o, "ms_bwd", 1e3 * t->seconds[k][1]);
        cJSON_AddNumberToObject(o, "tflops_fwd", dkv_forwardFlops(&p) / t->seconds[k][0] / 1e12);
        cJSON_AddNumberToObject(o, "tflops_bwd", t->backward ? dkv_backwardFlops(&p) / t->seconds[k][1] / 1e12 : 0);
        if (k == 0) {
            cJSON *versus = cJSON_AddObjectToObject(o, "versus");
            cJSON_AddStringToObject(versus, "kernel", r->baseline.text);
            cJSON_AddNumberToObject(versus, "rounds", t->rounds);
            addRatio(versus, "forward", t, 0);
            if (t->backward) addRatio(versus, "backward", t, 1);
        }
        text = cJSON_PrintUnformatted(o);
    }
    cJSON_Delete(o);
    dkv_freeProblem(&p);
    return text;
}

static int judgeTimes(dkv_gate_run *r, const dkv_gate_timed *timed, dkv_err *err) {
    static const char *const words[2] = {"forward", "backward"};
    const dkv_perf *t = &timed->perf;
    int rc = 0;
    for (int d = 0; d < (t->backward ? 2 : 1) && !rc; d++)
        if (t->low[d] > r->cli->perf_limit)
            rc = dkv_tellChange(&r->gate, err, DKV_CH_SLOWER, timed->line, t->ratio[d],
                                "%s takes %.3g times as long as the accepted kernel: %.3g ms, and %.3g ms; of %d rounds the "
                                "median ratio is between %.3g and %.3g, and %.3g is the limit",
                                words[d], t->ratio[d], 1e3 * t->seconds[0][d], 1e3 * t->seconds[1][d], t->rounds, t->low[d],
                                t->high[d], r->cli->perf_limit);
    for (int k = 0; k < 2 && !rc; k++) {
        char *json = timeRecord(r, timed, k);
        rc = json ? dkv_writeRecord(&r->perf_file, json, err) : dkv_fail(err, DKV_EHARNESS, "out of memory for a record");
        free(json);
    }
    return rc;
}

int dkv_timeGate(dkv_gate_run *r, const dkv_selection *lines, dkv_err *err) {
    const dkv_cli *cli = r->cli;
    const dkv_kernel_spec *const kernels[2] = {&cli->kernels[0], &r->baseline};
    int rc = chooseLines(r, lines, cli->perf_lines != NULL, err);
    double level = cli->budget / r->shares / (2 * (r->n_timed ? r->n_timed : 1));
    for (int i = 0; i < r->n_timed && !rc && !dkv_stopRequested; i++) {
        dkv_gate_timed *t = &r->timed[i];
        dkv_err why = {0};
        if (!cli->quiet) printf("timing %d of %d: %s\n", i + 1, r->n_timed, t->line);
        if (!cli->quiet) fflush(stdout);
        if (dkv_compareSpeed(t->line, kernels, cli->timeout, level, SECONDS, dkv_dataDir(), &t->perf, &why))
            snprintf(t->why, sizeof t->why, "%s", why.text);
        else rc = judgeTimes(r, t, err);
    }
    return rc;
}
