/* gate_run.h: one run of `gate`: what runs and concludes (cmd_gate.c), what is timed (gate_perf.c), what is written of it
 * (gate_words.c). */
#ifndef DKV_GATE_RUN_H
#define DKV_GATE_RUN_H

#include "../fuzz/log.h"
#include "../reports/report_junit.h"
#include "../reports/report_md.h"
#include "cli.h"
#include "gate.h"
#include "perf.h"
#include "record.h"
#include "select.h"
#include "waiver.h"

#define DKV_GATE_SUMMARY_MOST 60000 /* bytes: a comment on GitHub holds 65536, a step's summary 1 MiB */
enum { DKV_GATE_ARITHMETICS = 12, DKV_GATE_TIMED = 3 };

typedef struct dkv_gate_timed { /* a line that was timed against the accepted kernel */
    char *line;                 /* owned */
    dkv_perf perf;
    char why[520]; /* why it was not; "" where it was */
} dkv_gate_timed;

typedef struct dkv_gate_run {
    const dkv_cli *cli;
    char *records, *perf_path, *junit_path, *summary, *html, *accepted_path; /* owned */
    dkv_record_file file, perf_file;
    dkv_log log;
    dkv_report report;
    dkv_junit junit;
    dkv_accepted was, now;
    bool has_was, suites, fuzzed;
    dkv_gate gate;
    dkv_waivers waivers;
    uint8_t *met; /* of each waiver: 1 + the status that its case had; 0: that did not run */
    dkv_refusals refused;
    dkv_reasons told[2]; /* defects of the suite, of fuzzing */
    long counts[DKV_ST_N], fuzz_counts[DKV_ST_N], waived, expired, blind;
    struct {
        char words[240];
        bool declared;
        long cases;
    } arithmetic[DKV_GATE_ARITHMETICS]; /* the last: all further ones */
    dkv_kernel_spec baseline;           /* of --perf */
    dkv_selection perf_lines;           /* of --perf-lines */
    dkv_gate_timed *timed;
    int n_timed;
    double start, seconds, level; /* seconds: all of it */
    int shares;                   /* of the false alarms: verdicts, fuzzing, comparisons, times */
    dkv_profile profile;
    uint64_t seed;
    char stopped[32]; /* the word that allows workflow commands again, "" where they are not stopped */
    char asked[240]; /* what was asked for instead of the usual lines */
    long again;      /* cases whose line had been there */
    int interrupted;  /* the signal, 0: none */
    dkv_err trouble;
} dkv_gate_run;

/* ---- gate_perf.c ---- */

/* Which kernel --perf compares with: --baseline-kernel, the copy beside the accepted file (its hash must be the accepted
 * one's), or the accepted name where that is compiled in. DKV_EUSER where there is none. */
int dkv_findBaseline(dkv_gate_run *r, dkv_err *err);
/* Copies the kernel's file there, whole or not at all, and names its hash in r->now. */
int dkv_keepKernel(dkv_gate_run *r, dkv_err *err);
/* Appends a file to an open descriptor, and waits until it is on the disk. */
int dkv_copyBytes(const char *from, int to, dkv_err *err);
/* Times the longest lines that passed (or those of --perf-lines), tells what is slower than --perf-limit, and adds records
 * (those of bench, and `versus`). */
int dkv_timeGate(dkv_gate_run *r, const dkv_selection *lines, dkv_err *err);

/* ---- gate_words.c ---- */

bool dkv_isBad(dkv_status s); /* a defect, or of the harness */
/* The verdict and each thing that changed, a sentence each; `md`: as a list of Markdown. */
void dkv_sayGate(const dkv_gate_run *r, FILE *f, int code, bool md);
/* At most DKV_GATE_SUMMARY_MOST bytes; what there is no room for is counted. */
int dkv_writeGateSummary(const dkv_gate_run *r, int code, dkv_err *err);
/* From here on nothing that is printed is a command, until dkv_allowCommands: kernels choose some of the words. */
void dkv_stopCommands(dkv_gate_run *r);
void dkv_allowCommands(dkv_gate_run *r);
/* GitHub's workflow commands, at most ten of a kind: what that shows of a step. */
void dkv_annotateGate(const dkv_gate_run *r);
/* One of them, of a run that ended before anything ran; `text` may begin with FILE:LINE: . */
void dkv_annotateError(const char *text);

#endif
