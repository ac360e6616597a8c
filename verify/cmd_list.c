#include <cblas.h>
#include <stdio.h>
#include <string.h>

#include "../data/fill.h"
#include "../data/suite.h"
#include "../ref/emu.h"
#include "../ref/problem.h"
#include "case.h"
#include "cli.h"
#include "version.h"

/* Each lists its i-th row; NULL past the end. */
static const char *nthKernel(int i, const char **help) { return dkv_listKernel(i, help); }

static const char *nthCheck(int i, const char **help) {
    const dkv_check *c = dkv_listCheck(i);
    if (c) *help = c->doc;
    return c ? c->name : NULL;
}

static const char *nthFault(int i, const char **help) {
    static char text[256];
    const dkv_fault *f = dkv_listFault(i);
    if (!f) return NULL;
    snprintf(text, sizeof text, "%s%s (%s)", f->control ? "control, must pass: " : "", f->doc, f->kind);
    *help = text;
    return f->id;
}

static const char *nthSuite(int i, const char **help) {
    static char name[64], text[200];
    if (!dkv_listSuite(i, name, text)) return NULL;
    *help = text;
    return name;
}

static const char *nthStatus(int i, const char **help) {
    static char text[160];
    if (i >= DKV_ST_N) return NULL;
    const dkv_status_row *s = dkv_statusRow((dkv_status)i);
    if (i == DKV_ST_UNSUPPORTED) snprintf(text, sizeof text, "counted; %s", s->doc);
    else snprintf(text, sizeof text, "exit %d; %s", s->exit, s->doc);
    *help = text;
    return s->name;
}

static const struct {
    const char *what;
    const char *(*nth)(int i, const char **help);
} lists[] = {{"kernels", nthKernel}, {"masks", dkv_listMask}, {"fills", dkv_listFill},
             {"checks", nthCheck},   {"faults", nthFault},    {"suites", nthSuite},
             {"keys", dkv_listKey},  {"statuses", nthStatus}};
enum { N_LISTS = sizeof lists / sizeof lists[0] };

int dkv_cmdList(const dkv_cli *cli) {
    const char *names[N_LISTS];
    dkv_err err;
    for (int k = 0; k < N_LISTS; k++) names[k] = lists[k].what;
    if (cli->n_words != 1) {
        dkv_fail(&err, DKV_EUSER,
                 "list: one of kernels, masks, fills, checks, faults, suites, keys, statuses");
        return dkv_complain(&err);
    }
    for (int k = 0; k < N_LISTS; k++) {
        const char *help = "", *name;
        if (strcmp(lists[k].what, cli->words[0]) != 0) continue;
        for (int i = 0; (name = lists[k].nth(i, &help)); i++) printf("%-18s %s\n", name, help ? help : "");
        return 0;
    }
    const char *near = dkv_nearestWord(cli->words[0], names, N_LISTS);
    dkv_fail(&err, DKV_EUSER, "list: unknown list '%s'%s%s%s", cli->words[0], near ? ": did you mean '" : "",
             near ? near : "", near ? "'?" : "");
    return dkv_complain(&err);
}

int dkv_cmdVersion(const dkv_cli *cli) {
    dkv_err err;
    if (cli->n_words) {
        dkv_fail(&err, DKV_EUSER, "version takes no words ('%s')", cli->words[0]);
        return dkv_complain(&err);
    }
    printf("dualkv %s, commit %s\ncompiler %s\nblas %s\nabi %u, input generator %s\ndevice %s, %d "
           "cores\ndata %s\n",
           dkv_version(), dkv_commit(), dkv_compiler(), openblas_get_config(), DUALKV_ABI, DKV_GENERATOR,
           dkv_hostDevice(), dkv_hostCores(), dkv_dataDir());
    return 0;
}
