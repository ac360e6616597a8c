/* cli.h: the command line: one table of options (cli.c), one of subcommands (main.c). */
#ifndef DKV_CLI_H
#define DKV_CLI_H

#include <stdbool.h>

#include "kernel.h"

#define DKV_KERNELS_MAX 16 /* kernels of one run */

#define DKV_LIST_MAX    64 /* words of an option that may be given again */

/* Which commands take an option. */
enum {
    DKV_CMD_CHECK = 1,
    DKV_CMD_REPLAY = 2,
    DKV_CMD_LIST = 4,
    DKV_CMD_BENCH = 8,
    DKV_CMD_SELFTEST = 16,
    DKV_CMD_REPORT = 32,
    DKV_CMD_VERSION = 64,
    DKV_CMD_HELP = 128,
    DKV_CMD_FUZZ = 256,
    DKV_CMD_SHRINK = 512,
    DKV_CMD_POWER = 1024,
    DKV_CMD_EXPORT = 2048,
    DKV_CMD_IMPORT = 4096,
    DKV_CMD_INIT = 8192,
    DKV_CMD_GATE = 16384,
    DKV_CMD_BISECT = 32768,
    DKV_CMD_HISTORY = 1 << 20,
    DKV_CMD_CERTIFICATE = 1 << 21,
    DKV_CMD_COVERS = 1 << 22,
    DKV_CMD_ELIGIBLE = 1 << 23,
    DKV_CMD_DIAGNOSE = 1 << 24,
    DKV_CMD_COMPARE = 1 << 25
};

typedef struct dkv_cli {
    dkv_kernel_spec kernels[DKV_KERNELS_MAX];
    int n_kernels;
    const char *convention;
    const char *json, *markdown, *html, *plots, *pattern, *waivers, *files, *arithmetic;
    const char *judge;                  /* --oracle of check */
    const char *out, *outputs, *layout; /* of export, import; out also of gate */
    const char *accepted, *junit, *history; /* of gate */
    const char *baseline, *perf_lines, *perf_json;
    bool accept, annotations, new_bits, no_fuzz, keep_kernel, perf;
    double floor, perf_limit;
    bool where;          /* of diagnose */
    const char *exclude;
    dkv_kernel_spec peer;
    bool has_peer, quiet, verbose, bisect, all, oracle, forward;
    double timeout, budget, level;
    int jobs, repeats, cases, seeds, reseed;
    const char *named, *status, *since, *commit, *line, *device, *tensor, *csv, *trend, *index; /* of history */
    bool rebuild;
    int tokens; /* of eligible */
    const char *seed, *time, *shard, *profile, *faults; /* words of fuzz/options.h */
    bool resume, no_shrink, no_matrix;
    const char *repo, *good, *bad, *build, *subject, *metric, *cache, *plot, *flags_good, *flags_bad; /* of bisect */
    const char *case_lines[DKV_LIST_MAX], *paths[DKV_LIST_MAX + 1];
    int n_case_lines, n_paths, runs;
    bool by_flags, incremental;
    double build_timeout, flaky, error_probability;
    const char **words; /* the rest, owned array of borrowed strings */
    int n_words;
} dkv_cli;

typedef struct dkv_command {
    const char *name;
    unsigned bit;
    bool front;                     /* on the front page */
    const char *usage;              /* what follows the name */
    const char *doc;                /* one line */
    const char *details;            /* for `help NAME`, may be "" */
    int (*run)(const dkv_cli *cli); /* returns the exit code */
} dkv_command;

int dkv_parseCli(unsigned command, int argc, char **argv, dkv_cli *out, dkv_err *err);
void dkv_freeCli(dkv_cli *cli);
/* Options that a command takes, one a line, on stdout. */
void dkv_printOptions(unsigned command);
/* `dualkv: …` on stderr; returns the exit code of err->code. */
int dkv_complain(const dkv_err *err);
/* Is colour wanted on stdout? (a terminal, NO_COLOR not set) */
bool dkv_wantsColour(void);

/* The pages or the table of files of records: words, html and markdown of `cli`. */
int dkv_makeReport(const dkv_cli *cli, dkv_err *err);

int dkv_cmdCheck(const dkv_cli *cli);
int dkv_cmdReplay(const dkv_cli *cli);
int dkv_cmdList(const dkv_cli *cli);
int dkv_cmdBench(const dkv_cli *cli);
int dkv_cmdSelftest(const dkv_cli *cli);
int dkv_cmdReport(const dkv_cli *cli);
int dkv_cmdVersion(const dkv_cli *cli);
int dkv_cmdHelp(const dkv_cli *cli);
int dkv_cmdExport(const dkv_cli *cli);
int dkv_cmdImport(const dkv_cli *cli);
int dkv_cmdInit(const dkv_cli *cli);
int dkv_cmdGate(const dkv_cli *cli);
int dkv_cmdHistory(const dkv_cli *cli);
int dkv_cmdCertificate(const dkv_cli *cli);
int dkv_cmdCovers(const dkv_cli *cli);
int dkv_cmdEligible(const dkv_cli *cli);
int dkv_cmdDiagnose(const dkv_cli *cli);
int dkv_cmdCompare(const dkv_cli *cli);
int dkv_cmdBisect(const dkv_cli *cli);
int dkv_cmdFuzz(const dkv_cli *cli); /* this and the next two: fuzz/ */
int dkv_cmdShrink(const dkv_cli *cli);
int dkv_cmdPower(const dkv_cli *cli);

#endif
