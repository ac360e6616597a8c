#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../data/replace.h"
#include "../data/sha256.h"
#include "../reports/report_html.h"
#include "../reports/report_md.h"
#include "../reports/report_page.h"
#include "../reports/report_plots.h"
#include "../reports/report_template.h"
#include "cli.h"
#include "record.h"
#include "status.h"

static int gatherFile(dkv_gather *g, const char *path, dkv_err *err) {
    char hash[65] = "";
    struct stat s;
    if (stat(path, &s) == 0 && S_ISREG(s.st_mode)) { /* a pipe can be read once only */
        char *real = realpath(path, NULL);
        int rc = dkv_hashFile(real ? real : path, hash, err);
        free(real);
        if (rc) return rc;
    }
    return dkv_gatherFile(g, path, hash, err);
}

static int writeTable(const dkv_gather *g, dkv_err *err) {
    dkv_report r = {0};
    int rc = dkv_tableOf(g, &r) ? dkv_fail(err, DKV_EHARNESS, "out of memory for a table") : 0;
    if (!rc) dkv_writeReportTable(&r, stdout, false);
    dkv_freeReport(&r);
    return rc;
}

/* What was skipped, and where: on stderr, so that it is seen whatever is written. */
static void saySkipped(const dkv_gather *g) {
    for (int i = 0; i < g->n_files; i++) {
        const dkv_gather_file *f = &g->files[i];
        if (f->cut) fprintf(stderr, "dualkv: report: '%s' was not read beyond line %ld\n", f->path, f->lines);
        if (!f->bad) continue;
        fprintf(stderr, "dualkv: report: %s: %ld %s skipped:", f->path, f->bad, f->bad == 1 ? "line was no record and was" : "lines were no records and were");
        for (long b = 0; b < f->bad && b < 10; b++) fprintf(stderr, " %ld", f->bad_lines[b]);
        fprintf(stderr, f->bad > 10 ? " ...\n" : "\n");
    }
}

/* gnuplot's exit code; 127 where there is none. */
static int runGnuplot(const char *folder) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        if (chdir(folder) == 0) execlp("gnuplot", "gnuplot", "-d", "all.gp", (char *)NULL); /* -d: no settings of the user */
        _exit(errno == ENOENT ? 127 : 126);
    }
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    return child > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 126;
}

static int writePlots(const dkv_gather *g, const char *folder, dkv_err *err) {
    int n = 0, rc = dkv_writePlots(g, folder, &n, err);
    if (rc || n == 0) return rc;
    int code = runGnuplot(folder);
    if (code == 127) printf("no gnuplot here: data and script of %d plots are in %s (gnuplot all.gp)\n", n, folder);
    else if (code) return dkv_fail(err, DKV_EHARNESS, "gnuplot ended with %d; data and script are in '%s'", code, folder);
    else printf("%d plots: %s/*.svg\n", n, folder);
    return 0;
}

/* No page may be written over another or over records. */
static int checkPlaces(const dkv_cli *cli, dkv_err *err) {
    const char *const names[] = {"--html", "--markdown"}, *const places[] = {cli->html, cli->markdown};
    for (int k = 0; k < 2; k++) {
        if (!places[k]) continue;
        if (!places[k][0] || strcmp(places[k], "-") == 0) return dkv_fail(err, DKV_EUSER, "%s: name a file", names[k]);
        for (int i = 0; i < cli->n_words; i++)
            if (dkv_isSameFile(cli->words[i], places[k])) return dkv_fail(err, DKV_EUSER, "%s: '%s' holds the records", names[k], places[k]);
    }
    return cli->html && cli->markdown && dkv_isSameFile(cli->html, cli->markdown)
               ? dkv_fail(err, DKV_EUSER, "report: '%.200s' is named for two things", cli->html) : 0;
}

int dkv_makeReport(const dkv_cli *cli, dkv_err *err) {
    dkv_gather g = {0};
    int rc = 0;
    long records = 0;
    const char *const options[][2] = {{"--html", cli->html}, {"--markdown", cli->markdown}, {"--plots", cli->plots}};
    char *command = dkv_spellCommand("report", options, 3, cli->words, cli->n_words);
    if (cli->n_words == 0)
        rc = dkv_fail(err, DKV_EUSER, "report: which records? (a file that --json wrote)");
    else if (!command)
        rc = dkv_fail(err, DKV_EHARNESS, "out of memory for a command");
    if (!rc) rc = checkPlaces(cli, err);
    for (int i = 0; i < cli->n_words && !rc; i++) rc = gatherFile(&g, cli->words[i], err);
    for (int i = 0; i < g.n_files; i++) records += g.files[i].records;
    if (!rc) saySkipped(&g);
    if (!rc && records == 0) rc = dkv_fail(err, DKV_EHARNESS, "report: no record in what was given");
    if (!rc && cli->html) rc = dkv_writeHtml(&g, cli->html, command, err);
    if (!rc && cli->markdown) rc = dkv_writePage(&g, cli->markdown, command, err);
    if (!rc && cli->plots) rc = writePlots(&g, cli->plots, err);
    if (!rc && !cli->html && !cli->markdown && !cli->plots) rc = writeTable(&g, err);
    dkv_freeGather(&g);
    free(command);
    return rc;
}

/* --out DIR: what has no place of its own goes there. */
static int placeAll(dkv_cli *with, char paths[3][4200], dkv_err *err) {
    static const char *const names[3] = {"report.html", "report.md", "plots"};
    const char **const fields[3] = {&with->html, &with->markdown, &with->plots};
    if (!with->out) return 0;
    if (with->n_words && mkdir(with->out, 0777) != 0 && errno != EEXIST)
        return dkv_fail(err, DKV_EUSER, "cannot make the folder '%.200s': %s", with->out, strerror(errno));
    for (int i = 0; i < 3; i++) {
        if (*fields[i]) continue;
        if (snprintf(paths[i], sizeof paths[i], "%s/%s", with->out, names[i]) >= (int)sizeof paths[i])
            return dkv_fail(err, DKV_EUSER, "--out: too long a name: '%.80s'", with->out);
        *fields[i] = paths[i];
    }
    return 0;
}

/* A page whose text is the user's: it names its records itself. */
static int fillPage(const dkv_cli *cli, dkv_err *err) {
    char *text = NULL;
    size_t n = 0;
    if (cli->n_words || cli->html || cli->plots || cli->out || !cli->markdown)
        return dkv_fail(err, DKV_EUSER, "report: --template goes with --markdown OUT alone; its records stand in it (@records)");
    if (dkv_checkOutPath("--markdown", cli->markdown, err)) return DKV_EUSER;
    if (dkv_isSameFile(cli->pattern, cli->markdown)) return dkv_fail(err, DKV_EUSER, "report: '%.200s' is the template", cli->markdown);
    FILE *f = open_memstream(&text, &n);
    int rc = f ? dkv_fillTemplate(cli->pattern, f, err) : dkv_fail(err, DKV_EHARNESS, "out of memory for a page");
    if (f && fclose(f) != 0 && !rc) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for a page");
    if (!rc && strcmp(cli->markdown, "-") == 0 && fwrite(text, 1, n, stdout) != n)
        rc = dkv_fail(err, DKV_EHARNESS, "cannot write the page");
    else if (!rc && strcmp(cli->markdown, "-") != 0 && dkv_writeWhole(cli->markdown, text, n))
        rc = dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", cli->markdown, strerror(errno));
    free(text);
    return rc;
}

int dkv_cmdReport(const dkv_cli *cli) {
    char paths[3][4200];
    dkv_err err = {0};
    dkv_cli with = *cli;
    if (cli->pattern) return fillPage(cli, &err) ? dkv_complain(&err) : DKV_EXIT_OK;
    return placeAll(&with, paths, &err) || dkv_makeReport(&with, &err) ? dkv_complain(&err) : DKV_EXIT_OK;
}
