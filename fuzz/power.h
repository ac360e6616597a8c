/* power.h: the power to find faults, measured: each planted fault of a kernel on the cases of the fuzzer
 * until it is found, for several seeds; the clean kernel on as many; suites on their own. Beside it what
 * other rules would have said of the same outputs (the kill matrix). */
#ifndef DKV_POWER_H
#define DKV_POWER_H

#include "shrink.h"

/* Rules that usual tests judge by, on O, dQ, dK and dV (none looks at LSE). */
typedef enum dkv_rule {
    DKV_RULE_ALLCLOSE, /* |got - truth| <= 1e-2 + 1e-2 |truth| for every element */
    DKV_RULE_NMSE,     /* sum (got - truth)^2 <= 5e-4 sum truth^2 for each tensor */
    DKV_RULE_PEER, /* max |got - truth| <= 2 max |peer - truth| for each tensor; the peer: a correct kernel of
                    * the same precision on replicated sequences */
    DKV_N_RULES
} dkv_rule;

const char *dkv_ruleName(int rule); /* NULL past the end */
const char *dkv_ruleDoc(int rule);

/* Does the rule object to one tensor's n elements? NaN and Inf where the truth has none: yes. Elements whose
 * truth is not finite are left out. peer NULL: the rule of the peer never objects. */
bool dkv_ruleObjects(dkv_rule rule, const double *got, const double *truth, const double *peer, int64_t n);

typedef struct dkv_hunt {            /* one fault, one seed */
    bool found[1 + DKV_N_RULES];     /* by this tool, then by each rule */
    uint64_t cases[1 + DKV_N_RULES]; /* looked at until then, the one that found it included; all, where not
                                        found */
    double seconds;                  /* until this tool found it */
    dkv_reason reason;
    char line[DKV_LINE_MAX + 1], why[600]; /* of the case that found it */
} dkv_hunt;

typedef struct dkv_fault_power {
    const char *id, *kind, *doc;
    int control;     /* must not be found */
    dkv_hunt *hunts; /* [seeds] */
    char shrunk[DKV_LINE_MAX + 1];
    long trials;
    double shrink_seconds;
    int32_t segments, heads; /* of the shrunk line; segments: with tokens */
    bool in_suite;
    char suite_line[DKV_LINE_MAX + 1];
    long suite_cases;
} dkv_fault_power;

typedef struct dkv_power {
    dkv_kernel_spec kernel, peer; /* without a fault; the peer's */
    const char *data_dir;
    dkv_profile profile;
    uint64_t seed, cases; /* of each hunt, at most */
    int seeds, jobs, repeats;
    double timeout, budget, level;
    bool shrink, matrix; /* shrink the first find; look on for what the other rules find */
    char **suite_lines;  /* borrowed; NULL: no suite */
    long n_suite;
    const char *faults;                       /* "A1,X3"; NULL: all */
    void (*say)(const char *text, void *arg); /* progress; may be NULL */
    void *arg;
    /* out */
    dkv_fault_power *fault; /* [n_faults] */
    int n_faults;
    uint64_t clean_cases, false_alarms, rule_alarms[DKV_N_RULES];
    double clean_seconds;
    dkv_err trouble;
    bool stopped;
    bool clean_done, suite_done, rules_done, shrink_done; /* these parts came to their ends */
} dkv_power;

int dkv_runPower(dkv_power *p, dkv_err *err);
void dkv_freePower(dkv_power *p);

#endif
