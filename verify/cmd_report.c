#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "../data/sha256.h"
#include "../reports/report_html.h"
#include "../reports/report_md.h"
#include "cli.h"
#include "status.h"

/* The command that makes the page again, malloc'ed. */
static char *commandOf(const dkv_cli *cli) {
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (!f) return NULL;
    fprintf(f, "dualkv report --html ");
    for (int i = -1; i < cli->n_words; i++) {
        char word[4 * 4096];
        dkv_quoteWord(i < 0 ? cli->html : cli->words[i], word, sizeof word);
        fprintf(f, "%s%s", i < 0 ? "" : " ", word);
    }
    if (fclose(f) == 0) return text;
    free(text);
    return NULL;
}

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

static int writeHtml(const dkv_cli *cli, dkv_err *err) {
    dkv_gather g = {0};
    char *command = commandOf(cli);
    int rc = command ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory for a command");
    long records = 0, bad = 0;
    for (int i = 0; i < cli->n_words && !rc; i++) rc = gatherFile(&g, cli->words[i], err);
    for (int i = 0; i < g.n_files; i++) {
        records += g.files[i].records;
        bad += g.files[i].bad;
    }
    if (!rc && records == 0) rc = dkv_fail(err, DKV_EHARNESS, "report: no record in what was given");
    if (!rc) rc = dkv_writeHtml(&g, cli->html, command, err);
    if (!rc && bad) fprintf(stderr, "dualkv: report: %ld lines were no records and were skipped (%s says which)\n", bad, cli->html);
    dkv_freeGather(&g);
    free(command);
    return rc;
}

/* A table on stdout, or a page of Markdown. */
static int writeTables(const dkv_cli *cli, dkv_err *err) {
    dkv_report r = {0};
    int rc = 0;
    for (int i = 0; i < cli->n_words && !rc; i++) rc = dkv_readReport(&r, cli->words[i], err);
    if (!rc && r.total == 0) rc = dkv_fail(err, DKV_EHARNESS, "report: no record in what was given");
    if (!rc && cli->markdown) rc = dkv_writeReportPage(&r, cli->markdown, err);
    else if (!rc) dkv_writeReportTable(&r, stdout, false);
    dkv_freeReport(&r);
    return rc;
}

int dkv_cmdReport(const dkv_cli *cli) {
    dkv_err err = {0};
    int rc = 0;
    if (cli->n_words == 0)
        rc = dkv_fail(&err, DKV_EUSER, "report: which records? (a file that --json wrote)");
    if (!rc && cli->html) rc = writeHtml(cli, &err);
    if (!rc && (cli->markdown || !cli->html)) rc = writeTables(cli, &err);
    return rc ? dkv_complain(&err) : DKV_EXIT_OK;
}
