/* export and import: cases as safetensors files (data/casefile.h), for outputs computed elsewhere, and back. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
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
#include "../ref/reference.h"
#include "case.h"
#include "cli.h"
#include "select.h"
#include "../ref/view.h"

typedef struct job {
    const dkv_cli *cli;
    bool one_file, replicated, truth;
    bool has_kernel;
    dkv_kernel_spec kernel;
    dkv_worker worker;
    long written, refused;
} job;

static bool endsAsFile(const char *path) {
    size_t n = strlen(path), ending = strlen(DKV_CASE_ENDING);
    return n > ending && strcmp(path + n - ending, DKV_CASE_ENDING) == 0;
}

static int makeFolder(const char *path, dkv_err *err) {
    struct stat s;
    if (stat(path, &s) == 0 && S_ISDIR(s.st_mode)) return 0;
    if (mkdir(path, 0777) == 0) return 0;
    return dkv_fail(err, DKV_EUSER, "--out: '%.300s' cannot be made: %s", path, strerror(errno));
}

/* ---- export ---- */

/* Inputs and layout of a case in the layout that goes out, and the expansion. */
typedef struct prepared {
    dkv_problem p;
    dkv_layout packed, rep;
    dkv_inputs in, rep_in;
    int64_t *q_source, *k_source;
    uint8_t *q_own;
} prepared;

static void release(prepared *c) {
    dkv_freeInputs(&c->rep_in);
    dkv_freeInputs(&c->in);
    dkv_freeLayout(&c->rep);
    dkv_freeLayout(&c->packed);
    dkv_freeProblem(&c->p);
    free(c->q_source);
    free(c->k_source);
    free(c->q_own);
}

static int prepareLine(const char *line, bool replicated, prepared *c, dkv_err *err) {
    memset(c, 0, sizeof *c);
    int rc = dkv_parseProblem(line, dkv_knownFill, &c->p, err);
    if (!rc) rc = dkv_maskAdmissible(&c->p, err);
    if (!rc && dkv_estimateCase(&c->p, replicated) > dkv_availableMemory())
        rc = dkv_fail(err, DKV_EUSER, "'%.300s' needs more memory than is free", line);
    if (!rc) rc = dkv_makeLayout(&c->p, &c->packed, err);
    if (!rc) rc = dkv_allocInputs(&c->packed, &c->in, err);
    if (!rc) rc = dkv_fillInputs(&c->p, &c->packed, dkv_dataDir(), &c->in, err);
    if (!rc && replicated) {
        rc = dkv_makeReplicated(&c->p, &c->packed, &c->rep, &c->q_source, &c->k_source, &c->q_own, err);
        if (!rc)
            rc = dkv_replicateInputs(&c->packed, &c->rep, c->q_source, c->k_source, c->q_own, &c->in, &c->rep_in, err);
    }
    return rc;
}

/* The truth, rounded; of a replicated layout that of its own problem. */
static int makeTruth(const prepared *c, bool replicated, dkv_outputs *out, dkv_err *err) {
    const dkv_ref_options one = {.threads = 1};
    dkv_problem rep = {0};
    const dkv_layout *l = replicated ? &c->rep : &c->packed;
    int rc = dkv_allocOutputs(l, out, err);
    if (!rc && replicated) rc = dkv_problemOfView(&l->view, &rep, err);
    if (!rc) rc = dkv_refBlocked(replicated ? &rep : &c->p, l, replicated ? &c->rep_in : &c->in, &one, out, err);
    dkv_freeProblem(&rep);
    return rc;
}

/* Outputs that a kernel does not give hold nothing of it. */
static void leaveOut(dkv_outputs *out, int32_t absent) {
    double **all[DKV_N_OUTPUTS] = {&out->o, &out->lse, &out->dq, &out->dk, &out->dv, &out->dsink};
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!(absent >> id & 1)) continue;
        free(*all[id]);
        *all[id] = NULL;
    }
}

/* What a kernel gives, in the layout that it takes (which is then the file's). 1: it refused. */
static int runKernel(job *j, const char *line, const prepared *c, dkv_outputs *out, dkv_err *err) {
    dkv_side s;
    dkv_run run = {0};
    dkv_outcome o = dkv_openSide(&s, &j->worker, &c->p, line, &c->packed, &c->in);
    int rc = 0;
    if (o == DKV_W_OK && s.d.refused) {
        fprintf(stderr, "%s: refused: %s\n", line, s.d.reason);
        rc = 1;
    } else if (o == DKV_W_OK && s.d.replicated != j->replicated) {
        rc = dkv_fail(err, DKV_EUSER, "kernel '%.100s' works on the %s layout: say --layout %s", j->kernel.text,
                      s.d.replicated ? "replicated" : "packed", s.d.replicated ? "replicated" : "packed");
    } else {
        if (o == DKV_W_OK) o = dkv_runSide(&s, 0, &run);
        if (o == DKV_W_OK) {
            *out = run.out;
            run.out = (dkv_outputs){0};
            leaveOut(out, s.d.absent);
        } else
            rc = dkv_fail(err, DKV_EHARNESS, "'%.100s' on '%.150s': %.200s", j->kernel.text, line, j->worker.why);
    }
    dkv_freeRun(&run);
    dkv_closeSide(&s);
    return rc;
}

/* NUMBER-HASH: in the order of the lines, the same for the same line. */
static void nameCase(const char *line, long number, char name[DKV_CASE_NAME_MAX + 1]) {
    uint32_t h = 2166136261u;
    for (const char *s = line; *s; s++) h = (h ^ (uint8_t)*s) * 16777619u;
    snprintf(name, DKV_CASE_NAME_MAX + 1, "%04ld-%08x", number, h);
}

/* Over what is no case, or holds outputs that may have taken long, nothing is written; with --outputs those are replaced. */
static int mayReplace(const char *path, bool outputs, dkv_err *err) {
    dkv_st_file f = {0};
    dkv_err why = {0};
    if (access(path, F_OK) != 0) return 0;
    bool is_case = !dkv_readTensorsOf(path, false, &f, &why) && dkv_findMeta(&f, "line"), holds = false;
    for (int t = DKV_CT_O; t < DKV_CT_N && is_case; t++) holds |= dkv_findTensor(&f, dkv_caseTensorName((dkv_case_tensor)t)) != NULL;
    dkv_freeSafetensors(&f);
    if (!is_case) return dkv_fail(err, DKV_EUSER, "--out: '%.300s' is there and no case: nothing is written over it", path);
    if (holds && !outputs)
        return dkv_fail(err, DKV_EUSER, "--out: '%.300s' is there and holds outputs: nothing is written over them", path);
    return 0;
}

static int exportLine(job *j, const char *line, long number, dkv_err *err) {
    prepared c;
    dkv_outputs out = {0};
    char name[DKV_CASE_NAME_MAX + 1], path[PATH_MAX];
    nameCase(line, number, name);
    int rc = 0;
    if (j->one_file) snprintf(path, sizeof path, "%s", j->cli->out);
    else if (snprintf(path, sizeof path, "%s/%s" DKV_CASE_ENDING, j->cli->out, name) >= (int)sizeof path)
        return dkv_fail(err, DKV_EUSER, "--out: the path is too long");
    if (j->replicated && strstr(line, " fill=file:"))
        return dkv_fail(err, DKV_EUSER, "'%.200s': inputs of a captured case stay packed", line);
    if (mayReplace(path, j->truth || j->has_kernel, err)) return (int)err->code;
    rc = prepareLine(line, j->replicated, &c, err);
    if (!rc && j->truth) rc = makeTruth(&c, j->replicated, &out, err);
    if (!rc && j->has_kernel) rc = runKernel(j, line, &c, &out, err);
    bool own = strncmp(c.p.fill, "file:", 5) == 0;
    const dkv_layout *l = j->replicated ? &c.rep : &c.packed;
    if (!rc)
        rc = dkv_writeCaseFile(path, line, l, j->replicated, own ? NULL : DKV_GENERATOR,
                               j->has_kernel ? j->kernel.text : j->truth ? "truth" : NULL,
                               j->replicated ? &c.rep_in : &c.in, &out, err);
    j->written += rc == 0;
    j->refused += rc == 1;
    dkv_freeOutputs(&out);
    release(&c);
    return rc == 1 ? 0 : rc;
}

static int readOptions(const dkv_cli *cli, job *j, dkv_err *err) {
    static const char *const layouts[] = {"packed", "replicated"};
    *j = (job){.cli = cli};
    dkv_summedFrom = INFINITY; /* a file holds every copy */
    if (!cli->out) return dkv_fail(err, DKV_EUSER, "--out: where to? (a folder, or FILE" DKV_CASE_ENDING ")");
    if (!cli->n_words) return dkv_fail(err, DKV_EUSER, "export: which lines?");
    j->one_file = endsAsFile(cli->out);
    j->replicated = cli->layout && strcmp(cli->layout, layouts[1]) == 0;
    if (cli->layout && !j->replicated && strcmp(cli->layout, layouts[0]))
        return dkv_fail(err, DKV_EUSER, "--layout: '%.60s' is neither packed nor replicated", cli->layout);
    j->truth = cli->outputs && strcmp(cli->outputs, "truth") == 0;
    j->has_kernel = cli->outputs && !j->truth;
    int rc = j->has_kernel ? dkv_parseKernelSpec(cli->outputs, &j->kernel, err) : 0;
    if (!rc && j->has_kernel) {
        dkv_initWorker(&j->worker, &j->kernel, 120);
        if (dkv_startWorker(&j->worker) != DKV_W_OK) rc = dkv_fail(err, DKV_EUSER, "%s", j->worker.why);
    }
    return rc;
}

int dkv_cmdExport(const dkv_cli *cli) {
    dkv_selection sel = {0};
    dkv_err err = {0};
    job j;
    int rc = readOptions(cli, &j, &err);
    if (!rc) rc = dkv_selectWords(cli->words, cli->n_words, &sel, &err);
    if (!rc && cli->forward) rc = dkv_forwardSelection(&sel, &err);
    if (!rc && j.one_file && sel.n != 1)
        rc = dkv_fail(&err, DKV_EUSER, "--out: %ld cases do not go into one file; name a folder", sel.n);
    if (!rc && !j.one_file) rc = makeFolder(cli->out, &err);
    for (long i = 0; i < sel.n && !rc; i++) rc = exportLine(&j, sel.lines[i], i + 1, &err);
    if (j.has_kernel) dkv_stopWorker(&j.worker);
    if (!rc) {
        printf("%ld of %ld cases written to %s", j.written, sel.n, cli->out);
        printf(j.refused ? ", %ld refused\n" : "\n", j.refused);
        if (!j.written) rc = dkv_fail(&err, DKV_EHARNESS, "nothing was written");
    }
    dkv_freeSelection(&sel);
    return rc ? dkv_complain(&err) : 0;
}

/* ---- import ---- */

static bool isSameCase(const dkv_casefile *a, const dkv_casefile *b) {
    bool same = a->replicated == b->replicated && strcmp(a->line, b->line) == 0;
    for (int t = 0; t < DKV_CT_N && same; t++) {
        const dkv_st_tensor *x = a->tensor[t], *y = b->tensor[t];
        same = !x == !y && (!x || (x->bytes == y->bytes && memcmp(x->data, y->data, (size_t)x->bytes) == 0));
    }
    return same;
}

/* Another case of that name is not replaced: the same again, and the file itself, are. */
static int mayTake(const dkv_casefile *f, const char *from, const char *to, const char *name, dkv_err *err) {
    dkv_casefile was = {0};
    dkv_err why = {0};
    if (access(to, F_OK) != 0 || dkv_isSameFile(from, to)) return 0;
    const bool readable = !dkv_openCasePath(to, name, NULL, true, &was, &why), same = readable && isSameCase(f, &was);
    if (readable) dkv_closeCaseFile(&was);
    return same ? 0 : dkv_fail(err, DKV_EUSER, "--out: '%.300s' is there and another case: nothing is written over it", to);
}

/* What stands in a file, in one line; with --out a copy of it as a case. */
static int importFile(const dkv_cli *cli, const char *path, const char *line, dkv_err *err) {
    char name[DKV_CASE_NAME_MAX + 1], to[PATH_MAX], hash[65], given[200] = "";
    dkv_casefile f;
    const char *stem = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    size_t n = strlen(stem), at = 0;
    if (!endsAsFile(path)) return dkv_fail(err, DKV_EUSER, "%.300s: not a " DKV_CASE_ENDING " file", path);
    n -= strlen(DKV_CASE_ENDING);
    if (!dkv_isCaseName(stem, n))
        return dkv_fail(err, DKV_EUSER, "%.300s: a line cannot say this name ([a-z0-9_.-], at most %d characters)", path,
                        DKV_CASE_NAME_MAX);
    snprintf(name, sizeof name, "%.*s", (int)n, stem);
    int rc = dkv_openCasePath(path, name, line, true, &f, err);
    if (rc) return rc;
    for (int t = 0; t < DKV_CT_N; t++)
        if (f.tensor[t])
            at += (size_t)snprintf(given + at, sizeof given - at, "%s%s", at ? " " : "", dkv_caseTensorName((dkv_case_tensor)t));
    if (cli->out) {
        rc = makeFolder(cli->out, err);
        if (!rc && snprintf(to, sizeof to, "%s/%s" DKV_CASE_ENDING, cli->out, name) >= (int)sizeof to)
            rc = dkv_fail(err, DKV_EUSER, "--out: the path is too long");
        if (!rc) rc = mayTake(&f, path, to, name, err);
        if (!rc) rc = dkv_copyCaseFile(&f, to, err);
    }
    if (!rc) rc = dkv_hashFile(cli->out ? to : path, hash, err);
    if (!rc) printf("%s  %s%s  [%s]\n  sha256 %s\n", name, f.line, f.replicated ? "  (replicated)" : "", given, hash);
    dkv_closeCaseFile(&f);
    return rc;
}

int dkv_cmdImport(const dkv_cli *cli) {
    char line[DKV_LINE_MAX + 1] = "";
    dkv_err err = {0};
    int files = 0, rc = 0;
    for (int i = 0; i < cli->n_words && !rc; i++) { /* words of the line, wherever they stand */
        size_t at = strlen(line);
        if (endsAsFile(cli->words[i])) files++;
        else if (at + strlen(cli->words[i]) + 2 > sizeof line) rc = dkv_fail(&err, DKV_EUSER, "a problem line that is too long");
        else snprintf(line + at, sizeof line - at, "%s%s", at ? " " : "", cli->words[i]);
    }
    if (!rc && !files) rc = dkv_fail(&err, DKV_EUSER, "import: which files? (FILE" DKV_CASE_ENDING ")");
    for (int i = 0; i < cli->n_words && !rc; i++)
        if (endsAsFile(cli->words[i])) rc = importFile(cli, cli->words[i], line[0] ? line : NULL, &err);
    return rc ? dkv_complain(&err) : 0;
}
