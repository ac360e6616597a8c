#include <stdio.h>

#include "../reports/report_md.h"
#include "cli.h"
#include "status.h"

int dkv_cmdReport(const dkv_cli *cli) {
    dkv_report r = {0};
    dkv_err err = {0};
    int rc = 0;
    if (cli->n_words == 0)
        rc = dkv_fail(&err, DKV_EUSER, "report: which records? (a file that --json wrote)");
    for (int i = 0; i < cli->n_words && !rc; i++) rc = dkv_readReport(&r, cli->words[i], &err);
    if (!rc && r.total == 0) rc = dkv_fail(&err, DKV_EHARNESS, "report: no record in what was given");
    if (!rc && cli->markdown) rc = dkv_writeReportPage(&r, cli->markdown, &err);
    else if (!rc) dkv_writeReportTable(&r, stdout, false);
    dkv_freeReport(&r);
    return rc ? dkv_complain(&err) : DKV_EXIT_OK;
}
