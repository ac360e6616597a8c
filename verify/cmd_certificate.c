#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../data/jsonfile.h"
#include "../data/replace.h"
#include "../data/sha256.h"
#include "../reports/certificate.h"
#include "../reports/eligible.h"
#include "cli.h"
#include "history_print.h"
#include "kernel_hash.h"
#include "record.h"
#include "version.h"
#include "worker.h"

/* ---- certificate ---- */

static int readFile(dkv_evidence *e, const char *word, const char *out, dkv_err *err) {
    char hash[65], *path = NULL;
    struct stat s;
    int rc = 0;
    if (stat(word, &s) != 0) return dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", word, strerror(errno));
    if (asprintf(&path, S_ISDIR(s.st_mode) ? "%s/records.jsonl" : "%s", word) < 0) return dkv_fail(err, DKV_EHARNESS, "out of memory for a path");
    char *real = realpath(path, NULL);
    if (!real) rc = dkv_fail(err, DKV_EUSER, "cannot read '%s': %s", path, strerror(errno));
    if (!rc && (stat(real, &s) != 0 || !S_ISREG(s.st_mode))) rc = dkv_fail(err, DKV_EUSER, "'%s' is not a file of records", path);
    if (!rc && dkv_isSameFile(real, out)) rc = dkv_fail(err, DKV_EUSER, "--out: '%s' holds the records", out);
    if (!rc) rc = dkv_hashFile(real, hash, err);
    if (!rc) rc = dkv_readEvidence(e, path, hash, err);
    free(real);
    free(path);
    return rc;
}

static int writeFile(const char *path, char *text, dkv_err *err) {
    size_t n = strlen(text);
    text[n++] = '\n'; /* in the place of its 0 */
    if (!path[0]) return dkv_fail(err, DKV_EUSER, "--out: no file name");
    if (strcmp(path, "-") == 0) return fwrite(text, 1, n, stdout) < n ? dkv_fail(err, DKV_EHARNESS, "cannot write to stdout") : 0;
    int rc = dkv_writeWhole(path, text, n);
    return rc ? dkv_fail(err, rc == -1 ? DKV_EUSER : DKV_EHARNESS, "--out: cannot write '%s': %s", path, strerror(errno)) : 0;
}

static void saySpan(const dkv_evidence *e) {
    double most = 0;
    long kinds = 0;
    for (int m = 0; m < DKV_SCOPE_MASKS; m++)
        for (int t = 0; t < DKV_SCOPE_DTYPES; t++) {
            const dkv_span *s = &e->scope.kind[m][t].size[DKV_SIZE_SIGHT];
            kinds += e->scope.kind[m][t].cases > 0;
            if (s->n && s->point[s->n - 1] > most) most = s->point[s->n - 1];
        }
    printf("  %ld cases passed, %ld refused, %d waived; %ld kinds of mask and dtype, sequences of up to %.0f tokens\n", e->passed, e->refused,
           e->waived.n, kinds, most);
    printf("  smallest fault seen (derived): ");
    dkv_writePowerWords(&e->power, stdout);
    printf("\n  budget of false alarms: %.2g\n", e->alarms);
}

int dkv_cmdCertificate(const dkv_cli *cli) {
    dkv_err err = {0};
    dkv_evidence *e = calloc(1, sizeof *e);
    const char *const options[][2] = {{"--kernel", cli->named}, {"--device", cli->device}, {"--out", cli->out}};
    char *text = NULL, *command = dkv_spellCommand("certificate", options, 3, cli->words, cli->n_words);
    int code = 0, rc = e && command ? 0 : dkv_fail(&err, DKV_EHARNESS, "out of memory for a certificate");
    if (rc) goto done;
    e->kernel = cli->named;
    e->device = cli->device;
    if (cli->n_words == 0) rc = dkv_fail(&err, DKV_EUSER, "certificate: of which records? (files that --json wrote, or a gate's folder)");
    else if (!cli->out) rc = dkv_fail(&err, DKV_EUSER, "certificate: --out FILE is missing (`-`: stdout)");
    for (int i = 0; i < cli->n_words && !rc; i++) rc = readFile(e, cli->words[i], cli->out, &err);
    if (!rc) rc = dkv_refuseCertificate(e, &code, &err);
    if (!rc && !(text = dkv_printCertificate(e, dkv_version(), command))) rc = dkv_fail(&err, DKV_EHARNESS, "out of memory for a certificate");
    if (!rc) rc = writeFile(cli->out, text, &err);
    if (!rc && strcmp(cli->out, "-") != 0) {
        printf("%s: certificate of %s on %s\n", cli->out, e->kernels.word[0], e->devices.word[0]);
        saySpan(e);
    }
done:
    free(text);
    free(command);
    if (e) dkv_freeEvidence(e);
    free(e);
    if (!rc) return DKV_EXIT_OK;
    int said = dkv_complain(&err);
    return err.code == DKV_EREFUSED ? code : said;
}

/* ---- covers ---- */

typedef struct asking {
    bool quiet;
    int outside;
} asking;

static void sayAnswer(const char *word, const char *what, const char *why) {
    printf("  %-10s ", word);
    dkv_writePlain(stdout, what, 200);
    printf(": ");
    dkv_writePlain(stdout, why, 400);
    printf("\n");
}

static void takeCovered(const dkv_covered *c, void *arg) {
    asking *a = arg;
    a->outside += !c->inside;
    if (!c->inside || !a->quiet) sayAnswer(c->inside ? "inside" : "OUTSIDE", c->what, c->why);
}

/* `this`: the device of this machine that a certificate of that kind of device can mean. */
static int findDevice(const dkv_certificate *c, char *out, size_t n, dkv_err *err) {
    dkv_kernel_spec spec;
    dkv_worker w;
    if (strncmp(c->device, "cpu", 3) == 0) {
        snprintf(out, n, "%s", dkv_hostDevice());
        return 0;
    }
    snprintf(out, n, "no CUDA device");
    if (dkv_parseKernelSpec("cuda", &spec, err)) return dkv_fail(err, DKV_EHARNESS, "--device this: there is no plugin to ask (`make cuda`)");
    dkv_initWorker(&w, &spec, 120);
    if (dkv_startWorker(&w) == DKV_W_OK && w.gpu.name[0]) snprintf(out, n, "%s", w.gpu.name);
    dkv_stopWorker(&w);
    return 0;
}

static int askDevice(const dkv_cli *cli, const dkv_certificate *c, asking *a, dkv_err *err) {
    char name[200];
    dkv_covered q = {.key = "device"};
    if (!cli->device) return 0;
    if (strcmp(cli->device, "this") == 0) {
        int rc = findDevice(c, name, sizeof name, err);
        if (rc) return rc;
    } else snprintf(name, sizeof name, "%s", cli->device);
    q.inside = strcmp(name, c->device) == 0;
    snprintf(q.what, sizeof q.what, "device %.100s", name);
    snprintf(q.why, sizeof q.why, q.inside ? "that of the certificate" : "the certificate is of %.150s", c->device);
    takeCovered(&q, a);
    return 0;
}

static int askKernel(const dkv_cli *cli, const dkv_certificate *c, asking *a, dkv_err *err) {
    dkv_covered q = {.key = "kernel"};
    if (cli->n_kernels == 0) return 0;
    if (cli->n_kernels > 1) return dkv_fail(err, DKV_EUSER, "covers: one --kernel");
    const char *spec = cli->kernels[0].text, *hash = dkv_kernelHash(spec), *mine = strrchr(spec, '/'), *its = strrchr(c->kernel, '/');
    bool named = strcmp(mine ? mine + 1 : spec, its ? its + 1 : c->kernel) == 0, same = hash[0] && strcmp(hash, c->hash) == 0;
    q.inside = named && same;
    snprintf(q.what, sizeof q.what, "kernel %.100s", spec);
    if (q.inside) snprintf(q.why, sizeof q.why, "that of the certificate (SHA-256 %.12s…)", hash);
    else if (!named) snprintf(q.why, sizeof q.why, "the certificate is of %.150s", c->kernel);
    else snprintf(q.why, sizeof q.why, "its file is another: SHA-256 %.12s…, certified %.12s…", hash[0] ? hash : "not known", c->hash);
    takeCovered(&q, a);
    return 0;
}

/* The words of a line, which may be quoted as one. */
static int joinWords(const dkv_cli *cli, int from, char *line, size_t n, dkv_err *err) {
    size_t at = 0;
    for (int i = from; i < cli->n_words; i++) {
        int wrote = snprintf(line + at, n - at, "%s%s", at ? " " : "", cli->words[i]);
        if (wrote < 0 || (size_t)wrote >= n - at) return dkv_fail(err, DKV_EUSER, "covers: the line is longer than %d bytes", DKV_LINE_MAX);
        at += (size_t)wrote;
    }
    return 0;
}

int dkv_cmdCovers(const dkv_cli *cli) {
    dkv_err err = {0};
    char line[DKV_LINE_MAX + 1] = "";
    dkv_problem p = {0};
    dkv_certificate *c = calloc(1, sizeof *c);
    asking a = {.quiet = cli->quiet};
    int rc = c ? 0 : dkv_fail(&err, DKV_EHARNESS, "out of memory for a certificate");
    if (!rc && cli->n_words < 2) rc = dkv_fail(&err, DKV_EUSER, "covers: a certificate and a problem line are needed");
    if (!rc) rc = joinWords(cli, 1, line, sizeof line, &err);
    if (!rc) rc = dkv_parseProblem(line, NULL, &p, &err);
    if (!rc) rc = dkv_readCertificate(cli->words[0], c, &err);
    if (!rc) rc = askKernel(cli, c, &a, &err);
    if (!rc) rc = askDevice(cli, c, &a, &err);
    if (!rc) dkv_askScope(&c->scope, &p, false, takeCovered, &a);
    if (!rc) {
        printf("%s  %s\n  %s: ", a.outside ? "OUTSIDE" : "INSIDE", line, cli->words[0]);
        dkv_writePlain(stdout, c->kernel, 100);
        printf(", SHA-256 %.12s…, on ", c->hash);
        dkv_writePlain(stdout, c->device, 100);
        printf("%s%.40s\n", c->driver[0] ? ", driver " : "", c->driver);
    }
    dkv_freeProblem(&p);
    if (c) dkv_freeCertificate(c);
    free(c);
    return rc ? dkv_complain(&err) : a.outside ? DKV_EXIT_DEFECT : DKV_EXIT_OK;
}

/* ---- eligible ---- */

int dkv_cmdEligible(const dkv_cli *cli) {
    static const char *const words[] = {"inside", "OUTSIDE", "not judged"};
    dkv_err err = {0};
    dkv_certificate *c = calloc(1, sizeof *c);
    dkv_eligible e = {0};
    cJSON *config = NULL;
    int rc = c ? 0 : dkv_fail(&err, DKV_EHARNESS, "out of memory for a certificate");
    if (!rc && cli->n_words != 2) rc = dkv_fail(&err, DKV_EUSER, "eligible: a certificate and a config.json are needed");
    if (!rc) rc = dkv_readCertificate(cli->words[0], c, &err);
    if (!rc) rc = dkv_readJsonFile(cli->words[1], &config, &err);
    if (!rc && dkv_readModel(config, &c->scope, cli->tokens, cli->forward, &e, &err)) {
        dkv_err why = err;
        rc = dkv_fail(&err, why.code, "%s: %s", cli->words[1], why.text);
    }
    for (int pass = 0; pass < 3 && !rc; pass++) { /* what is outside first */
        static const dkv_answer order[] = {DKV_OUTSIDE, DKV_NOT_JUDGED, DKV_INSIDE};
        for (int i = 0; i < e.n; i++)
            if (e.said[i].answer == order[pass] && (order[pass] != DKV_INSIDE || !cli->quiet))
                sayAnswer(words[order[pass]], e.said[i].option, e.said[i].why);
    }
    if (!rc && e.other[0] && cli->verbose) sayAnswer("unknown", e.other, "keys that say nothing of attention, as far as their names tell");
    if (!rc) {
        printf("%s  %s: ", e.outside ? "OUTSIDE" : e.not_judged ? "NOT WHOLLY JUDGED" : "INSIDE", cli->words[1]);
        dkv_writePlain(stdout, e.model, 60);
        printf("; %ld outside, %ld not judged\n", e.outside, e.not_judged);
        for (int i = 0; i < e.n_lines; i++) printf("  asked: %s\n", e.lines[i]);
        printf("  %s: ", cli->words[0]);
        dkv_writePlain(stdout, c->kernel, 100);
        printf(" on ");
        dkv_writePlain(stdout, c->device, 100);
        printf("\n");
    }
    long outside = e.outside, open = e.not_judged;
    cJSON_Delete(config);
    dkv_freeEligible(&e);
    if (c) dkv_freeCertificate(c);
    free(c);
    return rc ? dkv_complain(&err) : outside ? DKV_EXIT_DEFECT : open ? DKV_EXIT_WEAK : DKV_EXIT_OK;
}
