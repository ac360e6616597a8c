#include "cli.h"

#include <ctype.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../data/casefile.h"
#include "../data/replace.h"
#include "pyhost.h"
#include "record.h"
#include "status.h"

typedef enum kind { FLAG, WORD, NUMBER, COUNT, KERNEL, PEER, CASE, PATHS } kind;

typedef struct option {
    const char *name, *shorter, *arg, *doc;
    kind kind;
    size_t field;
    double least, most;
    unsigned commands;
} option;

#define FIELD(f) offsetof(dkv_cli, f)
#define RUNS (DKV_CMD_CHECK | DKV_CMD_REPLAY | DKV_CMD_FUZZ)
#define GATE DKV_CMD_GATE
#define HISTORY DKV_CMD_HISTORY
#define DIAGNOSE DKV_CMD_DIAGNOSE
#define COMPARE DKV_CMD_COMPARE
#define BISECT DKV_CMD_BISECT
#define TRIES (DKV_CMD_SHRINK | DKV_CMD_POWER)

static const option options[] = {
    {"--kernel", "-k", "SPEC", "kernel under test; may be given again", KERNEL, 0, 0, 0,
     RUNS | TRIES | DKV_CMD_BENCH | GATE | DIAGNOSE},
    {"--convention", NULL, "NAME", "how functions of Python files are called: `dualkv list conventions`", WORD,
     FIELD(convention), 0, 0, RUNS | TRIES | DKV_CMD_BENCH | DKV_CMD_INIT | GATE | DIAGNOSE},
    {"--json", NULL, "FILE", "write one JSON object a case (`-`: stdout), instead of what is there; never over a log of fuzz", WORD, FIELD(json), 0, 0,
     RUNS | DKV_CMD_POWER | DKV_CMD_BENCH | GATE | DIAGNOSE | COMPARE | BISECT},
    {"--jobs", "-j", "N", "cases at a time (default: as many as cores)", COUNT, FIELD(jobs), 1, 4096,
     RUNS | DKV_CMD_POWER | GATE},
    {"--timeout", NULL, "SECONDS", "longest wait for one launch (default 120)", NUMBER, FIELD(timeout), 1e-3,
     1e9, RUNS | TRIES | DKV_CMD_BENCH | GATE | DIAGNOSE | COMPARE | BISECT},
    {"--budget", NULL, "P", "false alarms of the whole run (default 1e-4)", NUMBER, FIELD(budget), 1e-300,
     0.5, RUNS | DKV_CMD_POWER | GATE | DIAGNOSE | COMPARE},
    {"--level", NULL, "P", "false alarms of each test, instead of the budget's share", NUMBER, FIELD(level),
     1e-300, 0.5, RUNS | TRIES | DIAGNOSE | COMPARE},
    {"--repeats", NULL, "N", "extra runs where repeatable bits are promised (default 1)", COUNT,
     FIELD(repeats), 0, 10000, RUNS | TRIES | GATE | DIAGNOSE},
    {"--peer", NULL, "SPEC", "report errors beside those of this kernel, too", PEER, 0, 0, 0, RUNS},
    {"--arithmetic", NULL, "NAME", "of kernels that declare none: `auto` finds what fits, a name holds them to it: `dualkv list arithmetics`",
     WORD, FIELD(arithmetic), 0, 0, RUNS | DKV_CMD_SHRINK | GATE | DIAGNOSE | BISECT},
    {"--bisect", NULL, NULL, "exit codes as `git bisect run` wants them", FLAG, FIELD(bisect), 0, 0,
     DKV_CMD_REPLAY},
    {"--oracle", NULL, "WHO", "who judges: auto (default: the device where that is quicker), cpu, cuda, both", WORD,
     FIELD(judge), 0, 0, DKV_CMD_CHECK | DKV_CMD_REPLAY | DKV_CMD_FUZZ},
    {"--oracle", NULL, NULL, "time truth, bound and twin against the plain reference", FLAG, FIELD(oracle), 0,
     0, DKV_CMD_BENCH},
    {"--markdown", NULL, "FILE", "where the report goes (default: a table on stdout; gate: summary.md in --out)", WORD,
     FIELD(markdown), 0, 0, DKV_CMD_REPORT | DKV_CMD_POWER | GATE},
    {"--html", NULL, "FILE", "the report as one self-contained page (gate: default report.html in --out)", WORD, FIELD(html), 0, 0,
     DKV_CMD_REPORT | GATE},
    {"--template", NULL, "FILE", "--markdown is this text, its @lines filled from the records that it names", WORD, FIELD(pattern), 0, 0,
     DKV_CMD_REPORT},
    {"--plots", NULL, "DIR", "plots as SVG (gnuplot), with their data and script", WORD, FIELD(plots), 0, 0, DKV_CMD_REPORT},
    {"--reseed", NULL, "N", "the same lines, each with another seed: its own plus N", COUNT, FIELD(reseed), 0,
     1e9, DKV_CMD_CHECK},
    {"--forward", NULL, NULL, "the same lines without gradients (grad=off); check: each once", FLAG, FIELD(forward), 0, 0,
     DKV_CMD_CHECK | DKV_CMD_FUZZ | DKV_CMD_EXPORT | GATE | DKV_CMD_ELIGIBLE},
    {"--files", NULL, "DIR", "where the files of fill=file:NAME lie", WORD, FIELD(files), 0, 0,
     RUNS | TRIES | DKV_CMD_BENCH | DKV_CMD_EXPORT | GATE | DIAGNOSE | COMPARE},
    {"--out", NULL, "PATH", "a folder, or FILE.safetensors (gate: a folder, default dualkv-gate)", WORD, FIELD(out), 0, 0,
     DKV_CMD_EXPORT | DKV_CMD_IMPORT | GATE},
    {"--out", NULL, "DIR", "report.html, report.md and plots into this folder", WORD, FIELD(out), 0, 0, DKV_CMD_REPORT},
    {"--out", NULL, "CERT.json", "where the certificate goes (`-`: stdout)", WORD, FIELD(out), 0, 0, DKV_CMD_CERTIFICATE},
    {"--outputs", NULL, "SPEC", "outputs, too: `truth`, or those of a kernel", WORD, FIELD(outputs), 0, 0, DKV_CMD_EXPORT},
    {"--layout", NULL, "WORD", "packed (default) or replicated", WORD, FIELD(layout), 0, 0, DKV_CMD_EXPORT},
    {"--waivers", NULL, "FILE", "known failures that are excused (default: waivers.txt of the data)", WORD,
     FIELD(waivers), 0, 0, DKV_CMD_CHECK | GATE},
    {"--seed", NULL, "N", "which sequence of cases (default 1)", WORD, FIELD(seed), 0, 0,
     DKV_CMD_FUZZ | DKV_CMD_POWER | GATE},
    {"--time", NULL, "TIME", "start nothing later: 90, 60s, 5m, 2h (fuzz without --cases 60s, gate 2m, diagnose 30s)", WORD,
     FIELD(time), 0, 0, DKV_CMD_FUZZ | DKV_CMD_SHRINK | GATE | DIAGNOSE},
    {"--cases", NULL, "N", "how many cases (fuzz, gate: that the kernel does not refuse)", COUNT, FIELD(cases), 1, 1e9, DKV_CMD_FUZZ | DKV_CMD_POWER | GATE},
    {"--shard", NULL, "I/N", "the I-th of N parts of the cases", WORD, FIELD(shard), 0, 0, DKV_CMD_FUZZ},
    {"--profile", NULL, "WORD", "quick, deep or gpu: how large the cases are (default quick)", WORD,
     FIELD(profile), 0, 0, DKV_CMD_FUZZ | DKV_CMD_POWER | GATE},
    {"--resume", NULL, NULL, "go on with the records of --json", FLAG, FIELD(resume), 0, 0, DKV_CMD_FUZZ},
    {"--seeds", NULL, "N", "how many seeds, from --seed on (default 3)", COUNT, FIELD(seeds), 1, 100,
     DKV_CMD_POWER},
    {"--no-shrink", NULL, NULL, "leave the lines as they were found", FLAG, FIELD(no_shrink), 0, 0,
     DKV_CMD_POWER},
    {"--no-matrix", NULL, NULL, "leave out what usual rules would have found", FLAG, FIELD(no_matrix), 0, 0,
     DKV_CMD_POWER},
    {"--faults", NULL, "ID,ID", "only these (default: all of `dualkv list faults`)", WORD, FIELD(faults), 0,
     0, DKV_CMD_POWER},
    {"--quiet", "-q", NULL, "defects only", FLAG, FIELD(quiet), 0, 0,
     RUNS | TRIES | DKV_CMD_BENCH | DKV_CMD_SELFTEST | GATE | DIAGNOSE | COMPARE | BISECT},
    {"--quiet", "-q", NULL, "what is outside, or not judged, only", FLAG, FIELD(quiet), 0, 0, DKV_CMD_COVERS | DKV_CMD_ELIGIBLE},
    {"--verbose", "-v", NULL, "also keys that say nothing of attention", FLAG, FIELD(verbose), 0, 0, DKV_CMD_ELIGIBLE},
    {"--verbose", "-v", NULL, "every case, every check, statistics, seconds by phase", FLAG, FIELD(verbose), 0, 0,
     RUNS | TRIES | GATE | DIAGNOSE | HISTORY},
    {"--accepted", NULL, "FILE", "what was accepted: changes against it are findings", WORD, FIELD(accepted), 0, 0, GATE},
    {"--accept", NULL, NULL, "take this run as accepted: writes FILE of --accepted (default: accepted.jsonl in --out)", FLAG,
     FIELD(accept), 0, 0, GATE},
    {"--floor", NULL, "PERCENT", "of the suite's lines that the kernel must not refuse (default 50)", NUMBER, FIELD(floor), 0,
     100, GATE},
    {"--new-bits", NULL, NULL, "other bits than the accepted ones are told, and no finding", FLAG, FIELD(new_bits), 0, 0, GATE},
    {"--no-fuzz", NULL, NULL, "the suite and the corpus alone", FLAG, FIELD(no_fuzz), 0, 0, GATE},
    {"--junit", NULL, "FILE", "where the JUnit XML goes (default: junit.xml in --out)", WORD, FIELD(junit), 0, 0, GATE},
    {"--perf", NULL, NULL, "times, too: against the accepted kernel, in turns; slower than --perf-limit is a finding", FLAG,
     FIELD(perf), 0, 0, GATE},
    {"--perf-limit", NULL, "R", "ratio of times above which the whole interval must lie (default 1.05)", NUMBER, FIELD(perf_limit),
     0.01, 1000, GATE},
    {"--perf-lines", NULL, "LINE|SUITE", "what is timed (default: the three longest lines that passed)", WORD, FIELD(perf_lines), 0,
     0, GATE},
    {"--perf-json", NULL, "FILE", "where records of times go (default: perf.jsonl in --out)", WORD, FIELD(perf_json), 0, 0, GATE},
    {"--baseline-kernel", NULL, "SPEC", "the accepted kernel of --perf (default: what --keep-kernel kept)", WORD, FIELD(baseline), 0,
     0, GATE},
    {"--keep-kernel", NULL, NULL, "with --accept: a copy of the kernel's file beside the accepted one, for --perf", FLAG,
     FIELD(keep_kernel), 0, 0, GATE},
    {"--history", NULL, "DIR", "a copy of the records in this folder, for `dualkv history`", WORD, FIELD(history), 0, 0, GATE},
    {"--annotations", NULL, NULL, "findings as GitHub workflow commands on stdout, too", FLAG, FIELD(annotations), 0, 0, GATE},
    {"--kernel", NULL, "SPEC", "of this kernel only, as its records name it", WORD, FIELD(named), 0, 0, HISTORY | DKV_CMD_CERTIFICATE},
    {"--status", NULL, "STATUS,…", "with one of these statuses only; `defect`: all that are one", WORD, FIELD(status), 0, 0, HISTORY},
    {"--since", NULL, "TIME", "since 2026-01-31 (or 2026-01-31T12:00:00Z, UTC), or of the last 12h, 30d only", WORD, FIELD(since), 0, 0,
     HISTORY},
    {"--commit", NULL, "START", "of commits that begin so only", WORD, FIELD(commit), 0, 0, HISTORY},
    {"--line", NULL, "TEXT", "whose problem line has this in it only", WORD, FIELD(line), 0, 0, HISTORY},
    {"--device", NULL, "TEXT", "of devices with this in their name only", WORD, FIELD(device), 0, 0, HISTORY},
    {"--device", NULL, "NAME", "of this device only (certificate); is it that one? `this`: the machine's (covers)", WORD, FIELD(device), 0, 0,
     DKV_CMD_CERTIFICATE | DKV_CMD_COVERS},
    {"--kernel", "-k", "SPEC", "is this the kernel that was certified? (its file's SHA-256)", KERNEL, 0, 0, 0, DKV_CMD_COVERS},
    {"--tokens", NULL, "N", "longest sequence that is meant (default: max_position_embeddings)", COUNT, FIELD(tokens), 1, 1e9, DKV_CMD_ELIGIBLE},
    {"--tensor", NULL, "NAME", "that judged this output only, and its numbers instead of the worst", WORD, FIELD(tensor), 0, 0, HISTORY},
    {"--csv", NULL, "FILE", "everything of these records as CSV (RFC 4180; `-`: stdout), or the trends", WORD, FIELD(csv), 0, 0, HISTORY},
    {"--trend", NULL, "WHAT,…", "over commits: ratio, rms, gain, mean, bad of a tensor (rms:dK), seconds, ms_fwd, tflops_bwd, …",
     WORD, FIELD(trend), 0, 0, HISTORY},
    {"--index", NULL, "FILE.sqlite", "where the index is kept (default: in the folder, for one; in memory, for files)", WORD,
     FIELD(index), 0, 0, HISTORY},
    {"--rebuild", NULL, NULL, "make the index anew", FLAG, FIELD(rebuild), 0, 0, HISTORY},
    {"--where", NULL, NULL, "where alone: no hypotheses", FLAG, FIELD(where), 0, 0, DIAGNOSE},
    {"--exclude", NULL, "NAME,NAME", "hypotheses that are left out", WORD, FIELD(exclude), 0, 0, DIAGNOSE},
    {"--repo", NULL, "DIR", "the repository (default: the one here)", WORD, FIELD(repo), 0, 0, BISECT},
    {"--good", NULL, "COMMIT", "one that passes", WORD, FIELD(good), 0, 0, BISECT},
    {"--bad", NULL, "COMMIT", "a later one that fails (--flags: the one that is built, default HEAD)", WORD, FIELD(bad), 0, 0,
     BISECT},
    {"--build", NULL, "COMMAND", "for sh, at the top of the tree; a failure is a commit that says nothing", WORD, FIELD(build), 0,
     0, BISECT},
    {"--kernel", "-k", "SPEC", "PATH.so[:NAME] or PATH.py:FUNCTION in the tree, once it is built", WORD, FIELD(subject), 0, 0,
     BISECT},
    {"--case", NULL, "LINE", "a problem line (or a suite) that tells good from bad; may be given again", CASE, 0, 0, 0, BISECT},
    {"--path", NULL, "PATH", "only commits that touch it; may be given again", PATHS, 0, 0, 0, BISECT},
    {"--metric", NULL, "NAME", "rms, bound, bias, gain (or TENSOR.rms, …), seconds, forward, backward: where it left its interval",
     WORD, FIELD(metric), 0, 0, BISECT},
    {"--repeats", NULL, "N", "runs of each commit, which must agree (default 3; times: 8)", COUNT, FIELD(runs), 1, 10000, BISECT},
    {"--flaky", NULL, "P", "a bad commit fails in a run with probability P: as many runs as that needs", NUMBER, FIELD(flaky),
     1e-4, 1, BISECT},
    {"--error-probability", NULL, "E", "of a wrong answer by chance (default 1e-3)", NUMBER, FIELD(error_probability), 1e-12, 0.5,
     BISECT},
    {"--build-timeout", NULL, "SECONDS", "longest wait for one build (default 1800)", NUMBER, FIELD(build_timeout), 1e-2, 1e9,
     BISECT},
    {"--incremental", NULL, NULL, "built files stay from commit to commit (else each is built from nothing)", FLAG,
     FIELD(incremental), 0, 0, BISECT},
    {"--cache", NULL, "FILE", "results, kept for the next time (default: dualkv/bisect.jsonl in ~/.cache; none: not at all)", WORD,
     FIELD(cache), 0, 0, BISECT},
    {"--plot", NULL, "FILE", "SVG or PNG of what was tested, by gnuplot", WORD, FIELD(plot), 0, 0, BISECT},
    {"--flags", NULL, NULL, "over compile flags, which the build finds in $DUALKV_FLAGS", FLAG, FIELD(by_flags), 0, 0, BISECT},
    {"--flags-good", NULL, "FLAGS", "with which the cases pass; FILE=FLAGS: in $DUALKV_FLAGS_FILE", WORD, FIELD(flags_good), 0, 0,
     BISECT},
    {"--flags-bad", NULL, "FLAGS", "with which they fail", WORD, FIELD(flags_bad), 0, 0, BISECT},
    {"--all", "-a", NULL, "every command", FLAG, FIELD(all), 0, 0, DKV_CMD_HELP},
};
enum { N_OPTIONS = sizeof options / sizeof options[0] };

static int parseNumber(const option *o, const char *value, double *x, dkv_err *err) {
    char *end;
    *x = strtod(value, &end);
    if (!*value || isspace((unsigned char)*value) || *end || !isfinite(*x))
        return dkv_fail(err, DKV_EUSER, "%s: '%.80s' is not a number", o->name, value);
    if (*x < o->least || *x > o->most || (o->kind == COUNT && *x != floor(*x)))
        return dkv_fail(err, DKV_EUSER, "%s: '%.80s' is not %s from %g to %g", o->name, value,
                        o->kind == COUNT ? "a whole number" : "a number", o->least, o->most);
    return 0;
}

static int addWord(const option *o, const char *value, const char **list, int *n, dkv_err *err) {
    if (*n == DKV_LIST_MAX) return dkv_fail(err, DKV_EUSER, "%s: given more than %d times", o->name, DKV_LIST_MAX);
    list[(*n)++] = value;
    return 0;
}

static bool mayRepeat(kind k) { return k == FLAG || k == KERNEL || k == CASE || k == PATHS; }

static int take(const option *o, const char *value, bool given[N_OPTIONS], dkv_cli *cli, dkv_err *err) {
    if (!mayRepeat(o->kind) && given[o - options])
        return dkv_fail(err, DKV_EUSER, "%s is given twice ('%.80s')", o->name, value);
    given[o - options] = true;
    void *field = (char *)cli + o->field;
    double x = 0;
    int rc = 0;
    switch (o->kind) {
    case FLAG: *(bool *)field = true; break;
    case WORD: *(const char **)field = value; break;
    case NUMBER:
    case COUNT:
        rc = parseNumber(o, value, &x, err);
        if (!rc && o->kind == COUNT) *(int *)field = (int)x;
        if (!rc && o->kind == NUMBER) *(double *)field = x;
        break;
    case KERNEL:
        if (cli->n_kernels == DKV_KERNELS_MAX)
            return dkv_fail(err, DKV_EUSER, "--kernel: more than %d kernels", DKV_KERNELS_MAX);
        rc = dkv_parseKernelSpec(value, &cli->kernels[cli->n_kernels], err);
        cli->n_kernels += !rc;
        break;
    case PEER:
        rc = dkv_parseKernelSpec(value, &cli->peer, err);
        cli->has_peer = !rc;
        break;
    case CASE: rc = addWord(o, value, cli->case_lines, &cli->n_case_lines, err); break;
    case PATHS: rc = addWord(o, value, cli->paths, &cli->n_paths, err); break;
    }
    return rc;
}

static int unknownOption(unsigned command, const char *word, size_t len, dkv_err *err) {
    const char *names[N_OPTIONS];
    char name[64];
    size_t n = 0;
    snprintf(name, sizeof name, "%.*s", (int)(len < 60 ? len : 60), word);
    for (int i = 0; i < N_OPTIONS; i++) {
        if (!(options[i].commands & command)) continue;
        names[n++] = options[i].name;
    }
    const char *near = dkv_nearestWord(name, names, n);
    return dkv_fail(err, DKV_EUSER, "unknown option '%s'%s%s%s", name, near ? ": did you mean '" : "",
                    near ? near : "", near ? "'?" : "");
}

/* One option at argv[i]; *used: how many words it took. */
static int parseOption(unsigned command, int left, char **argv, bool given[N_OPTIONS], dkv_cli *cli, int *used,
                       dkv_err *err) {
    const char *word = argv[0], *equals = strchr(word, '=');
    size_t len = equals ? (size_t)(equals - word) : strlen(word);
    for (int i = 0; i < N_OPTIONS; i++) {
        const option *o = &options[i];
        bool named = strlen(o->name) == len && strncmp(o->name, word, len) == 0;
        bool brief = o->shorter && strcmp(o->shorter, word) == 0;
        if (!(o->commands & command) || (!named && !brief)) continue;
        *used = 1;
        if (o->kind == FLAG) {
            if (equals) return dkv_fail(err, DKV_EUSER, "%s takes no value ('%.80s')", o->name, word);
            return take(o, NULL, given, cli, err);
        }
        if (equals) return take(o, equals + 1, given, cli, err);
        if (left < 2) return dkv_fail(err, DKV_EUSER, "%s: %s is missing", o->name, o->arg);
        *used = 2;
        return take(o, argv[1], given, cli, err);
    }
    return unknownOption(command, word, len, err);
}

/* --convention is an option of every Python kernel that has none of its own: so it is in records and replay lines. */
static int addConvention(const char *name, dkv_kernel_spec *spec, dkv_err *err) {
    char text[2 * DKV_SPEC_MAX];
    if (spec->kind != DKV_SPEC_PYTHON || strstr(spec->options, "convention=")) return 0;
    snprintf(text, sizeof text, "%s+convention=%.80s", spec->text, name);
    return dkv_parseKernelSpec(text, spec, err);
}

static int takeConvention(dkv_cli *cli, dkv_err *err) {
    const char *name = cli->convention;
    int taken = cli->has_peer && cli->peer.kind == DKV_SPEC_PYTHON;
    int rc = name ? dkv_checkConvention(name, err) : 0;
    if (!name || rc) return rc;
    for (int k = 0; k < cli->n_kernels && !rc; k++) {
        taken |= cli->kernels[k].kind == DKV_SPEC_PYTHON;
        rc = addConvention(name, &cli->kernels[k], err);
    }
    if (!rc && cli->has_peer) rc = addConvention(name, &cli->peer, err);
    if (rc || taken) return rc;
    return dkv_fail(err, DKV_EUSER, "--convention %s: no kernel here is a function of a Python file (--kernel FILE.py:FUNCTION)",
                    name);
}

/* Records never go over a file that the run reads: its kernels, its lines, its waivers, its report. */
static int keepApart(const dkv_cli *cli, dkv_err *err) {
    const char *json = cli->json, *others[] = {cli->waivers, cli->markdown, cli->has_peer ? cli->peer.path : NULL};
    const char *taken = NULL;
    if (!json || !strcmp(json, "-")) return 0;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i] && dkv_isSameFile(json, others[i])) taken = others[i];
    for (int i = 0; i < cli->n_kernels; i++)
        if (cli->kernels[i].path[0] && dkv_isSameFile(json, cli->kernels[i].path)) taken = cli->kernels[i].path;
    for (int i = 0; i < cli->n_words && access(json, F_OK) == 0; i++) /* a word may be a suite's name */
        if (dkv_isSameFile(json, cli->words[i])) taken = cli->words[i];
    return taken ? dkv_fail(err, DKV_EUSER, "--json: '%.200s' is named for something else, too", taken) : 0;
}

int dkv_parseCli(unsigned command, int argc, char **argv, dkv_cli *out, dkv_err *err) {
    int rc = 0, used = 1;
    bool plain = false; /* after `--` */
    bool given[N_OPTIONS] = {false};
    memset(out, 0, sizeof *out);
    out->timeout = DKV_TIMEOUT;
    out->budget = DKV_BUDGET;
    out->repeats = DKV_REPEATS;
    out->floor = 50;
    out->perf_limit = 1.05;
    out->words = calloc((size_t)argc + 1, sizeof *out->words);
    if (!out->words) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (int i = 0; i < argc && !rc; i += used) {
        used = 1;
        if (!plain && strcmp(argv[i], "--") == 0) plain = true;
        else if (!plain && argv[i][0] == '-' && argv[i][1])
            rc = parseOption(command, argc - i, &argv[i], given, out, &used, err);
        else out->words[out->n_words++] = argv[i];
    }
    if (!rc && out->quiet && out->verbose) rc = dkv_fail(err, DKV_EUSER, "--quiet and --verbose together");
    for (int k = 0; k < out->n_kernels && !rc; k++)
        if (out->kernels[k].kind == DKV_SPEC_FILES) rc = dkv_setFilesDir(out->kernels[k].path, err);
    if (!rc && command != DKV_CMD_INIT) rc = takeConvention(out, err); /* init takes it for a file to write */
    if (!rc && out->files) rc = dkv_setFilesDir(out->files, err);
    if (!rc && command != GATE) rc = keepApart(out, err); /* gate has more files, and its own word for it */
    return rc;
}

void dkv_freeCli(dkv_cli *cli) { free(cli->words); }

void dkv_printOptions(unsigned command) {
    for (int i = 0; i < N_OPTIONS; i++) {
        const option *o = &options[i];
        char left[64];
        if (!(o->commands & command)) continue;
        snprintf(left, sizeof left, "%s%s%s%s%s", o->name, o->arg ? " " : "", o->arg ? o->arg : "",
                 o->shorter ? ", " : "", o->shorter ? o->shorter : "");
        printf("  %-24s %s\n", left, o->doc);
    }
}

int dkv_complain(const dkv_err *err) {
    fprintf(stderr, "dualkv: %s\n", err->text);
    return err->code == DKV_EHARNESS ? DKV_EXIT_NOTHING : DKV_EXIT_USER;
}

bool dkv_wantsColour(void) {
    const char *no = getenv("NO_COLOR");
    return !(no && no[0]) && isatty(STDOUT_FILENO);
}
