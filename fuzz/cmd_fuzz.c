/* fuzz: a campaign in words, its records, its exit code. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/suite.h"
#include "../ref/clock.h"
#include "../verify/cli.h"
#include "../verify/record.h"
#include "../verify/session.h"
#include "log.h"
#include "options.h"

#define TELL_EACH 3 /* failures of one reason that are told in full */
#define CONFIRM 24 /* defects that are tried again in a fresh process */

typedef struct show {
    const dkv_cli *cli;
    dkv_log log;
    dkv_reasons reasons; /* of this run's cases */
    FILE *out; /* words; stderr where records go to stdout */
    bool bar;
    long finished, defects;
    dkv_err trouble;
    dkv_refusals refused;
    dkv_behaviour behaves; /* a kernel that declares no arithmetic: as what */
} show;

static void sayCommands(const show *s, const dkv_fuzzed *f) {
    char *replay = malloc(DKV_REPLAY_MAX);
    if (!replay) return;
    dkv_replayCommand(f->result->line, f->result->kernel, replay, DKV_REPLAY_MAX);
    fprintf(s->out, "  replay: %s\n", replay);
    dkv_shrinkCommand(f->result->line, f->result->kernel, replay, DKV_REPLAY_MAX);
    if (dkv_statusRow(f->result->status)->defect) fprintf(s->out, "  shrink: %s\n", replay);
    free(replay);
}

static void sayCase(show *s, const dkv_fuzzed *f) {
    const dkv_result *r = f->result;
    const dkv_status_row *row = dkv_statusRow(r->status);
    const bool bad = row->defect || r->status == DKV_ST_HARNESS_ERROR;
    const long times = bad ? dkv_countReason(&s->reasons, dkv_reasonOf(r), f->n) : 0;
    s->defects += row->defect;
    if (bad ? times > TELL_EACH && !s->cli->verbose : !s->cli->verbose) return;
    if (s->bar) fprintf(stderr, "\r\033[K");
    fprintf(s->out, "%s  %s  (case %" PRIu64 ")\n", row->name, r->line, f->n);
    if (r->why[0]) fprintf(s->out, "  %s\n", r->why);
    if (bad) sayCommands(s, f);
    if (f->alone == 0)
        fprintf(s->out, "  not in a fresh process: it needs what ran before%s%s\n",
                f->before[0] ? ", last " : "", f->before);
    if (times == TELL_EACH && !s->cli->verbose)
        fprintf(s->out, "  more of this reason are counted, not told\n");
    fflush(s->out);
}

static int takeCase(const dkv_fuzzed *f, void *arg) {
    show *s = arg;
    s->finished++;
    dkv_countBehaviour(&s->behaves, f->result->profile);
    if (f->result->status == DKV_ST_UNSUPPORTED) dkv_countRefusal(&s->refused, f->result->why);
    if (dkv_logCase(&s->log, f, &s->trouble)) return 1;
    sayCase(s, f);
    if (s->bar) fprintf(stderr, "\r%ld cases, %ld defects", s->finished, s->defects);
    return 0;
}

static void saySummary(const show *s, const dkv_campaign *c, const long counts[DKV_ST_N], double seconds) {
    bool first = true;
    char reason[80];
    long all = 0;
    if (s->bar) fprintf(stderr, "\r\033[K");
    for (int i = 0; i < DKV_ST_N; i++) all += counts[i];
    if (all > s->finished && s->reasons.n && !s->cli->quiet)
        fprintf(s->out, "in the %ld cases since --resume:\n", s->finished);
    for (int i = 0; i < s->reasons.n && !s->cli->quiet; i++) {
        dkv_sayReason(s->reasons.row[i].reason, reason, sizeof reason);
        fprintf(s->out, "%-32s %6ld, first in case %" PRIu64 "\n", reason, s->reasons.row[i].count,
                s->reasons.row[i].first);
    }
    if (s->cli->quiet && dkv_runExit(counts) == DKV_EXIT_OK) return;
    fprintf(s->out, "%s%ld cases of seed %" PRIu64 ", profile %s: ", c->stopped ? "interrupted, " : "", all,
            c->sampler->seed, dkv_profileName((int)c->sampler->profile));
    for (int i = 0; i < DKV_ST_N; i++) {
        if (!counts[i]) continue;
        fprintf(s->out, "%s%ld %s", first ? "" : ", ", counts[i], dkv_statusRow((dkv_status)i)->name);
        first = false;
    }
    fprintf(s->out, first ? "none ran" : "; %.1f a second",
            (double)c->finished / (seconds > 0 ? seconds : 1));
    fprintf(s->out, "\n");
    dkv_sayRefusals(&s->refused, s->out);
    if (c->short_of)
        fprintf(s->out, "  less than the %" PRIu64 " of --cases could be judged: the kernel refuses nearly all of %" PRIu64 "\n", c->cases,
                c->cases * DKV_TRIES);
    dkv_sayBehaviour(&s->behaves, s->out);
    fflush(s->out);
}

static int parseOptions(const dkv_cli *cli, dkv_campaign *c, dkv_profile *profile, uint64_t *seed,
                        dkv_err *err) {
    *c = (dkv_campaign){.data_dir = dkv_dataDir(),
                        .cases = (uint64_t)cli->cases,
                        .jobs = cli->jobs,
                        .repeats = cli->repeats,
                        .timeout = cli->timeout,
                        .budget = cli->budget,
                        .level = cli->level,
                        .confirm = CONFIRM,
                        .peer = cli->has_peer ? &cli->peer : NULL,
                        .kernel = &cli->kernels[0]};
    int rc = dkv_parseSeed(cli->seed, seed, err);
    if (!rc) rc = dkv_parseTime(cli->time, &c->seconds, err);
    if (!rc) rc = dkv_parseShard(cli->shard, &c->shard, &c->shards, err);
    if (!rc) rc = dkv_parseProfile(cli->profile, profile, err);
    if (rc) return rc;
    if (cli->n_words)
        return dkv_fail(err, DKV_EUSER, "fuzz draws its lines: what is '%.80s' for?", cli->words[0]);
    if (cli->n_kernels != 1)
        return dkv_fail(err, DKV_EUSER, "fuzz: --kernel: one kernel (`dualkv list kernels`)");
    if (!c->cases && !(c->seconds > 0)) c->seconds = 60;
    if (dkv_probeKernels(cli->kernels, 1, cli->timeout, NULL, err)) return (int)err->code;
    return cli->has_peer ? dkv_probeKernels(&cli->peer, 1, cli->timeout, NULL, err) : 0;
}

int dkv_cmdFuzz(const dkv_cli *cli) {
    static show s;
    dkv_campaign c;
    dkv_sampler sampler = {0};
    dkv_profile profile;
    uint64_t seed;
    dkv_err err = {0};
    dkv_oracle_mode mode = DKV_ORACLE_AUTO;
    long counts[DKV_ST_N];
    s = (show){.cli = cli, .out = cli->json && !strcmp(cli->json, "-") ? stderr : stdout};
    s.bar = isatty(STDERR_FILENO) && isatty(STDOUT_FILENO) && !cli->quiet;
    bool bad = parseOptions(cli, &c, &profile, &seed, &err) ||
               (cli->judge && dkv_parseOracleMode(cli->judge, &mode, &err)) || dkv_openSampler(profile, seed, &sampler, &err);
    sampler.forward = cli->forward;
    if (bad || dkv_openLog(&s.log, cli->json, cli->resume ? DKV_LOG_RESUME : DKV_LOG_NEW, cli->kernels[0].text, &sampler, &err)) {
        dkv_closeSampler(&sampler);
        return dkv_complain(&err);
    }
    s.refused = s.log.refused;
    s.behaves = s.log.behaves;
    c.sampler = &sampler;
    c.done = s.log.done;
    c.refused = s.log.unsupported;
    c.n_done = s.log.n_done;
    c.report = takeCase;
    c.arg = &s;
    static dkv_fits fits;
    static dkv_remote remote;
    bad = dkv_openRemote(&remote, mode, NULL, DKV_REMOTE_TIMEOUT, &err);
    c.remote = &remote;
    bad = bad || (cli->arithmetic && dkv_fitKernel(c.kernel, cli->arithmetic, 7, c.timeout, c.data_dir, &fits, &err));
    if (bad) {
        dkv_err ignored;
        dkv_closeLog(&s.log, &ignored);
        dkv_closeSampler(&sampler);
        return dkv_complain(&err);
    }
    if (cli->arithmetic) c.fits = &fits;
    if (!cli->quiet) dkv_sayFits(c.kernel->text, &fits, s.out);
    dkv_catchSignals();
    double start = dkv_now();
    dkv_runCampaign(&c);
    const double took = dkv_now() - start;
    if (!c.stopped) dkv_closeRemote(&remote);
    for (int i = 0; i < DKV_ST_N; i++) counts[i] = c.counts[i] + s.log.counts[i];
    saySummary(&s, &c, counts, took);
    int code = dkv_runExit(counts);
    if (dkv_closeLog(&s.log, &err) && !s.trouble.code) s.trouble = err;
    if (c.trouble.code && !s.trouble.code) s.trouble = c.trouble;
    dkv_closeSampler(&sampler);
    if (s.trouble.code) return dkv_complain(&s.trouble);
    return c.stopped ? 128 + dkv_stopRequested : code;
}
