/* power: how soon planted faults are found, in words, JSON and Markdown. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/suite.h"
#include "../verify/cli.h"
#include "../verify/record.h"
#include "../verify/select.h"
#include "../verify/session.h"
#include "options.h"
#include "power_report.h"

#define CASES 200 /* of a hunt, unless --cases is given */

static void sayProgress(const char *text, void *arg) {
    (void)arg;
    fprintf(stderr, "\r\033[K%s", text);
}

static int prepare(const dkv_cli *cli, dkv_selection *suite, dkv_power *p, dkv_err *err) {
    *p = (dkv_power){.data_dir = dkv_dataDir(),
                     .cases = cli->cases ? (uint64_t)cli->cases : CASES,
                     .jobs = cli->jobs,
                     .seeds = cli->seeds ? cli->seeds : 3,
                     .repeats = cli->repeats,
                     .timeout = cli->timeout,
                     .budget = cli->budget,
                     .level = cli->level,
                     .shrink = !cli->no_shrink,
                     .matrix = !cli->no_matrix,
                     .faults = cli->faults};
    if (cli->n_kernels != 1)
        return dkv_fail(err, DKV_EUSER, "power: --kernel: one kernel, with planted faults");
    p->kernel = cli->kernels[0];
    if (p->kernel.path[0] || (strcmp(p->kernel.name, "emu") && strcmp(p->kernel.name, "emu-replicated")) ||
        strstr(p->kernel.options, "fault="))
        return dkv_fail(err, DKV_EUSER, "power: faults are planted in emu and emu-replicated, not in '%.80s'",
                        p->kernel.text);
    int rc = dkv_parseSeed(cli->seed, &p->seed, err);
    if (!rc) rc = dkv_parseProfile(cli->profile, &p->profile, err);
    if (!rc) rc = dkv_checkRecordPath(cli->json, err);
    if (!rc) rc = dkv_checkOutPath("--markdown", cli->markdown, err);
    if (!rc) rc = dkv_parseKernelSpec("emu-replicated", &p->peer, err);
    if (!rc) rc = dkv_probeKernels(cli->kernels, 1, cli->timeout, NULL, err);
    if (!rc && cli->n_words) rc = dkv_selectWords(cli->words, cli->n_words, suite, err);
    p->suite_lines = suite->lines;
    p->n_suite = suite->n;
    p->say = isatty(STDERR_FILENO) && !cli->quiet ? sayProgress : NULL;
    return rc;
}

static int writeFile(const dkv_power *p, const char *path, int (*write)(const dkv_power *, FILE *),
                     dkv_err *err) {
    FILE *f = !path ? NULL : strcmp(path, "-") ? fopen(path, "w") : stdout;
    if (!path) return 0;
    int bad = !f || write(p, f);
    if (f && f != stdout) bad |= fclose(f) != 0;
    return bad ? dkv_fail(err, DKV_EHARNESS, "cannot write '%s': %s", path, strerror(errno)) : 0;
}

static void sayFaults(const dkv_power *p, bool all) {
    for (int i = 0; i < p->n_faults; i++) {
        const dkv_fault_power *f = &p->fault[i];
        char reason[80];
        bool missed = false;
        for (int s = 0; s < p->seeds; s++) missed |= !f->hunts[s].found[0];
        if (!all && !(f->control ? f->hunts[0].found[0] : missed || (p->n_suite && !f->in_suite))) continue;
        printf("%-4s", f->id);
        for (int s = 0; s < p->seeds; s++) {
            if (f->hunts[s].found[0])
                printf(" %4" PRIu64, f->hunts[s].cases[0]);
            else
                printf("    –");
        }
        if (p->n_suite) printf("  %-5s", f->in_suite ? "suite" : "");
        reason[0] = 0;
        if (f->hunts[0].found[0]) dkv_sayReason(f->hunts[0].reason, reason, sizeof reason);
        printf("  %-26s %s%s\n", reason, f->control ? "control: " : "", f->doc);
        if (all && f->shrunk[0]) printf("     %s\n", f->shrunk);
    }
}

static int saySummary(const dkv_power *p, const dkv_power_summary *s) {
    printf("%d of %d planted faults found in each of %d seeds; median %g cases, at most %g\n", s->found,
           s->planted, p->seeds, s->median, s->worst);
    if (p->n_suite) printf("%d of %d found by the suite alone\n", s->in_suite, s->planted);
    printf("%" PRIu64 " false alarms in %" PRIu64
           " clean cases (%.1f a second)",
           p->false_alarms, p->clean_cases,
           (double)p->clean_cases / (p->clean_seconds > 0 ? p->clean_seconds : 1));
    if (s->controls) printf("; %d of %d controls raised one", s->controls_found, s->controls);
    printf("\n");
    for (int r = 0; r < DKV_N_RULES && p->matrix; r++)
        printf("%-8s finds %d of %d, with %" PRIu64 " false alarms in %" PRIu64 " cases: %s\n",
               dkv_ruleName(r), s->by_rule[r], s->planted, p->rule_alarms[r], p->cases, dkv_ruleDoc(r));
    if (p->false_alarms || s->controls_found) return DKV_EXIT_DEFECT;
    return s->found < s->planted ? DKV_EXIT_WEAK : DKV_EXIT_OK;
}

int dkv_cmdPower(const dkv_cli *cli) {
    static dkv_power p;
    dkv_selection suite = {0};
    dkv_err err = {0};
    int code = 0, rc = prepare(cli, &suite, &p, &err);
    dkv_catchSignals();
    if (!rc) rc = dkv_runPower(&p, &err);
    if (p.say) fprintf(stderr, "\r\033[K");
    if (p.stopped) rc = 0; /* whatever it broke off */
    if (!rc && !p.stopped) {
        dkv_power_summary s = dkv_summarisePower(&p);
        if (!cli->quiet && !(cli->json && !strcmp(cli->json, "-"))) sayFaults(&p, cli->verbose);
        rc = writeFile(&p, cli->json, dkv_writePowerJson, &err);
        if (!rc) rc = writeFile(&p, cli->markdown, dkv_writePowerMarkdown, &err);
        code = saySummary(&p, &s);
    }
    if (p.stopped && p.n_faults) { /* keep what is complete */
        fprintf(stderr, "dualkv: interrupted\n");
        rc = writeFile(&p, cli->json, dkv_writePowerJson, &err);
    }
    if (rc) code = dkv_complain(&err);
    if (p.stopped) code = 128 + dkv_stopRequested;
    dkv_freePower(&p);
    dkv_freeSelection(&suite);
    return code;
}
