/* dualkv: one binary, one table of subcommands. Only this file ends the process with a status of its own. */
#include <fcntl.h>
#include <signal.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "guard.h"
#include "record.h"
#include "session.h"
#include "status.h"
#include "version.h"
#include "worker.h"

static const dkv_command commands[] = {
    {"check", DKV_CMD_CHECK, true, "[LINE|SUITE...] --kernel K", "judge a kernel on problem lines or suites",
     "LINE is a problem line, quoted or as several key=value words; SUITE a name of `dualkv list suites`,\n"
     "or a file of lines (a path: ./NAME). Without any: suite smoke. K is a name of `dualkv list kernels` or\n"
     "PATH.so[:NAME] or PATH.py:FUNCTION; its options follow as +KEY=VALUE or +FLAG. files:DIR is a suite (every case of the\n"
     "folder) and a kernel (the outputs in it). Exit: 0 passed, 1 a defect, 2 bad input, 3 nothing ran (all\n"
     "refused), 4 inconclusive.\n",
     dkv_cmdCheck},
    {"gate", DKV_CMD_GATE, true, "--kernel K [--accepted FILE] [SUITE...]", "may this kernel change be merged?",
     "Suite ci and the corpus (or what is given), then seeded fuzzing for the rest of --time. Writes records.jsonl, junit.xml,\n"
     "summary.md, report.html into --out. Against --accepted it reports changes: a status, a line newly refused, an error that\n"
     "grew beyond chance, bits that changed where repeatable ones are promised, looser arithmetic, another generator, oracle or\n"
     "program version; with --perf, times above --perf-limit. Equal shares of --budget for verdicts, fuzzing, comparing errors,\n"
     "and times. Interrupted, it writes what it has. Exit: as check's; 1 for any finding.\n",
     dkv_cmdGate},
    {"diagnose", DKV_CMD_DIAGNOSE, true, "LINE --kernel K", "where a kernel goes wrong, and what explains it",
     "The first tensor that is wrong, the stage, region, rows, heads and dims; then hypotheses, each with the share of the\n"
     "error that it explains. Backward is judged given the kernel's own O and LSE: a forward fault is named once. The kernel\n"
     "runs again on the same inputs (a race shows), and on others that show the weights it gives to keys. One that declares no\n"
     "arithmetic is held to what explains most of its tensors (--arithmetic: to another). Exit: as check's.\n",
     dkv_cmdDiagnose},
    {"report", DKV_CMD_REPORT, true, "[--out DIR] [--html FILE] [--markdown FILE] [--plots DIR] RECORDS...", "a page or tables from records",
     "RECORDS are files that --json wrote (check, gate, fuzz, bench, power). Lines that are no records are skipped and named.\n"
     "--html: a page for a sceptic; --markdown: a short one for a pull request; --plots: SVG files by gnuplot, where it is there.\n"
     "--template FILE --markdown OUT: a text of yours with tables of records: lines `@records FILE.jsonl[.gz]`, then `@verdicts`,\n"
     "`@refused`, `@profiles`, `@errors`, `@long`, `@bias`, `@repeats`, `@failed`, `@case SET KERNEL LINE`, `@files`.\n",
     dkv_cmdReport},
    {"history", DKV_CMD_HISTORY, false, "DIR|RECORDS... [--trend WHAT]", "records of many runs: list, filter, export, trends",
     "DIR: its *.jsonl, and those of the folders in it. The records are the truth; an SQLite index beside them is made from\n"
     "them, checked against them, and made anew whenever it is in doubt. Exit: 3 where nothing is left to show.\n",
     dkv_cmdHistory},
    {"certificate", DKV_CMD_CERTIFICATE, false, "RECORDS|GATE-FOLDER... --out CERT.json", "what was proved of a kernel, sealed",
     "Of one kernel (its file's SHA-256), on one device, from records that all count. None is made where a defect is not\n"
     "waived, fewer than 20 different cases passed, more than half was refused, or some small fault would not have been seen.\n"
     "The seal shows editing; it is no signature. Exit: 1 a defect, 2 bad records, 3 too little, 4 too weak.\n",
     dkv_cmdCertificate},
    {"covers", DKV_CMD_COVERS, false, "CERT.json LINE [--device NAME] [--kernel K]", "does a certificate speak for a problem?",
     "Each feature of the line (mask, dtype, head dims, GQA ratio, modifiers, gradients, layout, branching), and each pair of\n"
     "them, must have been judged in some case; each size must lie between the least and largest judged with that mask and\n"
     "dtype. Fill, seed and run are not compared. Exit: 0 inside, 1 outside, 2 bad input (an edited certificate, too).\n",
     dkv_cmdCovers},
    {"eligible", DKV_CMD_ELIGIBLE, false, "CERT.json config.json [--tokens N] [--forward]", "does a certificate speak for a model?",
     "config.json as Hugging Face has them. What each option makes of attention is asked as by `covers`, but for how prompts\n"
     "and responses share. Exit: 0 inside, 1 outside, 2 bad input, 4 nothing outside, and something not judged.\n",
     dkv_cmdEligible},
    {"replay", DKV_CMD_REPLAY, false, "LINE|FILE --kernel K [--bisect]",
     "one case again, with everything said of it",
     "FILE holds problem lines, or records (then their kernels are used, unless --kernel is given).\n"
     "--bisect: cases that say nothing give 125, bad input 128, as `git bisect run` wants.\n",
     dkv_cmdReplay},
    {"list", DKV_CMD_LIST, false, "kernels|masks|fills|checks|faults|suites|keys|statuses|conventions|arithmetics|device",
     "what there is, one a line",
     "keys: the words of a problem line; statuses: with their exit codes; conventions: how functions of Python files\n"
     "are called; arithmetics: what --arithmetic may name.\n",
     dkv_cmdList},
    {"compare", DKV_CMD_COMPARE, false, "K1 K2 LINE", "two kernels side by side, stage by stage",
     "Both are judged on the same inputs; then where they first part: bits, the largest difference, its place.\n"
     "Exit: as check's, of both; 3 where one of them refuses.\n",
     dkv_cmdCompare},
    {"bisect", DKV_CMD_BISECT, false, "--good A --bad B --build CMD --kernel K --case LINE", "the commit that broke a kernel",
     "git bisect in a worktree of its own (the repository and its checkout stay as they are): each commit's kernel is built\n"
     "and judged by this program. Commits that do not build, hang, or refuse the case are skipped. --metric finds drifts\n"
     "that fail nothing; --flags the compile flags that do harm. Results are cached: after Ctrl-C, or a crash, the same\n"
     "command goes on. Exit: 0 found, 2 bad input, 3 nothing learned (the ends are not as said), 4 only a range is known.\n",
     dkv_cmdBisect},
    {"bench", DKV_CMD_BENCH, false, "--kernel K LINE|SUITE... [--oracle]", "time a kernel, useful FLOPs only",
     "On a CPU, GFLOP/s beside those of dgemm in the same run; on a GPU, by its own clock, fresh inputs of the\n"
     "line, warmed up. Medians of several runs.\n", dkv_cmdBench},
    {"selftest", DKV_CMD_SELFTEST, false, "", "the harness on itself: mutated oracles, broken kernels", "",
     dkv_cmdSelftest},
    {"fuzz", DKV_CMD_FUZZ, false, "--kernel K [--time 60s | --cases N]", "cases that nobody thought of",
     "Case n is a function of (profile, seed, n). Every pair of mask, modifier, dtype, head dim, GQA ratio, edge,\n"
     "fill, layout and run comes first (the first 300 cases or so), then cases at random.\n",
     dkv_cmdFuzz},
    {"shrink", DKV_CMD_SHRINK, false, "LINE --kernel K", "the smallest line that fails for the same reason",
     "The same reason: the same status, and the same tensor first.\n", dkv_cmdShrink},
    {"power", DKV_CMD_POWER, false, "--kernel K [SUITE...]", "planted faults: which are found, and how soon",
     "For a kernel with planted faults (`dualkv list faults`). Also what usual tolerances would have found on\n"
     "the same cases. SUITE: whether it finds them alone. Exit: 1 a false alarm, 4 a fault was missed.\n",
     dkv_cmdPower},
    {"export", DKV_CMD_EXPORT, false, "LINE|SUITE... --out DIR|FILE.safetensors", "inputs of cases as safetensors",
     "One file a case, its line in the metadata. --outputs: what they give, too. Outputs (o, lse, dq, dk, dv,\n"
     "dsink) computed elsewhere and saved with the same metadata are judged by `dualkv check files:DIR`.\n"
     "In Python dualkv.load and dualkv.save read and write them (safetensors.numpy cannot read BF16).\n",
     dkv_cmdExport},
    {"import", DKV_CMD_IMPORT, false, "FILE.safetensors... [LINE] [--out DIR]", "check files of cases, take them into a folder",
     "LINE: for files that have none in their metadata. With q, k, v and no `generator` in the metadata a file is\n"
     "a captured case: its inputs are its own, and its line is fill=file:NAME.\n",
     dkv_cmdImport},
    {"init", DKV_CMD_INIT, false, "FILE.py:FUNCTION [--convention NAME]", "a Python kernel to start from, which passes",
     "Writes FILE.py, never over one that is there. Convention packed (the default) needs NumPy alone, others torch.\n",
     dkv_cmdInit},
    {"version", DKV_CMD_VERSION, false, "", "what was built, by what", "", dkv_cmdVersion},
    {"help", DKV_CMD_HELP, false, "[--all] [COMMAND]", "this page, or a command's", "", dkv_cmdHelp},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static const dkv_command *findCommand(const char *name, dkv_err *err) {
    const char *names[N_COMMANDS];
    for (int i = 0; i < N_COMMANDS; i++) {
        names[i] = commands[i].name;
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    }
    const char *near = dkv_nearestWord(name, names, N_COMMANDS);
    dkv_fail(err, DKV_EUSER, "unknown command '%s'%s%s%s", name,
             near ? ": did you mean '" : ": see `dualkv help --all`", near ? near : "", near ? "'?" : "");
    return NULL;
}

static void frontPage(bool all) {
    printf("dualkv: is a shared-prompt attention kernel exactly standard attention, up to rounding?\n\n");
    for (int i = 0; i < N_COMMANDS; i++)
        if (all || commands[i].front)
            printf("  dualkv %s%s%s\n      %s\n", commands[i].name, commands[i].usage[0] ? " " : "", commands[i].usage,
                   commands[i].doc);
    if (!all) printf("\nmore: dualkv help --all, dualkv help COMMAND\n");
    printf("\n  dualkv check 'shape=200+3x77 heads=8:2 dim=64 mask=causal' --kernel emu\n");
}

int dkv_cmdHelp(const dkv_cli *cli) {
    dkv_err err = {0};
    if (cli->n_words == 0) {
        frontPage(cli->all);
        return 0;
    }
    const dkv_command *c = findCommand(cli->words[0], &err);
    if (!c) return dkv_complain(&err);
    printf("dualkv %s%s%s\n  %s\n\n%s", c->name, c->usage[0] ? " " : "", c->usage, c->doc, c->details);
    dkv_printOptions(c->bit);
    return 0;
}

/* Closed standard descriptors would be taken by the next file or socket that is opened, and words would land in
 * records. They are opened the wrong way round, so that using them still fails. */
static void holdDescriptors(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_RDONLY : O_WRONLY) != fd) _exit(DKV_EXIT_NOTHING);
}

/* Leaves without destructors: OpenBLAS's waits for its threads, for ever where memory is so short that they never
 * came up. (Sanitizers report from theirs.) So does it where threads of an interrupted run still compute. */
static void leave(int code) {
#ifdef __SANITIZE_ADDRESS__
    if (!dkv_threadsLeft()) exit(code);
#endif
    fflush(NULL);
    _exit(code);
}

static int runCommand(int argc, char **argv) {
    dkv_err err = {0};
    static dkv_cli cli; /* static: outlives an interrupted run's threads */
    const char *name = argc > 1 ? argv[1] : "help";
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) name = "help";
    if (strcmp(name, "--version") == 0) name = "version";
    const dkv_command *c = findCommand(name, &err);
    if (!c) return dkv_complain(&err);
    for (int i = 2; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            const char *word = c->name;
            return dkv_cmdHelp(&(dkv_cli){.words = &word, .n_words = 1});
        }
    dkv_nameCommand(argc, argv);
    int code = dkv_parseCli(c->bit, argc - (argc > 1 ? 2 : 1), argv + (argc > 1 ? 2 : 1), &cli, &err);
    dkv_nameOptions(&(dkv_run_options){cli.arithmetic, cli.judge, cli.repeats, cli.timeout, cli.level, cli.budget});
    code = code ? dkv_complain(&err) : c->run(&cli);
    for (int i = 2; i < argc && c->bit == DKV_CMD_REPLAY && code == DKV_EXIT_USER; i++)
        if (strcmp(argv[i], "--bisect") == 0) code = dkv_bisectExit(code, NULL);
    if (!dkv_threadsLeft()) dkv_freeCli(&cli);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "dualkv: cannot write to stdout\n");
        return code ? code : DKV_EXIT_NOTHING;
    }
    return code;
}

/* Thousands of small cases: what one frees the next takes, instead of pages that come and go. Large arrays go at once. */
static void keepMemory(void) {
    mallopt(M_MMAP_THRESHOLD, 16 << 20);
    mallopt(M_TRIM_THRESHOLD, 64 << 20);
    mallopt(M_TOP_PAD, 1 << 20);
}

int main(int argc, char **argv) {
    holdDescriptors();
    if (argc == 3 && strcmp(argv[1], DKV_WORKER_ARG) == 0) leave(dkv_serveWorker(argv[2]));
    signal(SIGXFSZ, SIG_IGN); /* a file at its size limit: the write fails, and that is said */
    dkv_guardCoordinator();
    keepMemory();
    leave(runCommand(argc, argv));
}
