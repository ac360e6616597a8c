#include "power_report.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "../verify/record.h"
#include "../verify/version.h"

static int compareNumbers(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static bool foundInAll(const dkv_power *p, const dkv_fault_power *f) {
    for (int s = 0; s < p->seeds; s++)
        if (!f->hunts[s].found[0]) return false;
    return true;
}

static bool foundInAny(const dkv_power *p, const dkv_fault_power *f) {
    for (int s = 0; s < p->seeds; s++)
        if (f->hunts[s].found[0]) return true;
    return false;
}

dkv_power_summary dkv_summarisePower(const dkv_power *p) {
    dkv_power_summary s = {0};
    double *cases = malloc(((size_t)p->n_faults * (size_t)p->seeds + 1) * sizeof *cases);
    size_t n = 0;
    for (int i = 0; i < p->n_faults; i++) {
        const dkv_fault_power *f = &p->fault[i];
        if (f->control) {
            s.controls++;
            s.controls_found += foundInAny(p, f) || f->in_suite;
            continue;
        }
        s.planted++;
        s.found += foundInAll(p, f);
        s.in_suite += f->in_suite;
        s.by_tool += f->hunts[0].found[0];
        for (int r = 0; r < DKV_N_RULES; r++) s.by_rule[r] += f->hunts[0].found[1 + r];
        for (int k = 0; k < p->seeds && cases; k++)
            if (f->hunts[k].found[0]) cases[n++] = (double)f->hunts[k].cases[0];
    }
    if (n) {
        qsort(cases, n, sizeof *cases, compareNumbers);
        s.median = (cases[(n - 1) / 2] + cases[n / 2]) / 2;
        s.worst = cases[n - 1];
    }
    free(cases);
    return s;
}

/* The seed that took longest; its case is the one that is told. */
static const dkv_hunt *worstHunt(const dkv_power *p, const dkv_fault_power *f) {
    const dkv_hunt *worst = &f->hunts[0];
    for (int s = 1; s < p->seeds; s++)
        if (!f->hunts[s].found[0] || (worst->found[0] && f->hunts[s].cases[0] > worst->cases[0]))
            worst = &f->hunts[s];
    return worst;
}

static const char *tensorOf(const dkv_hunt *h) {
    return h->found[0] && h->reason.tensor >= 0 ? dkv_tensorName((dkv_tensor_id)h->reason.tensor) : "";
}

static cJSON *faultObject(const dkv_power *p, const dkv_fault_power *f) {
    const dkv_hunt *worst = worstHunt(p, f), *first = &f->hunts[0];
    cJSON *o = cJSON_CreateObject(), *seeds = cJSON_CreateArray();
    cJSON_AddStringToObject(o, "fault", f->id);
    cJSON_AddStringToObject(o, "row", f->kind);
    cJSON_AddStringToObject(o, "doc", f->doc);
    cJSON_AddBoolToObject(o, "control", f->control);
    cJSON_AddBoolToObject(o, "found", foundInAll(p, f));
    cJSON_AddNumberToObject(o, "cases", (double)worst->cases[0]);
    cJSON_AddNumberToObject(o, "seconds", worst->seconds);
    for (int s = 0; s < p->seeds; s++)
        cJSON_AddItemToArray(seeds, f->hunts[s].found[0] ? cJSON_CreateNumber((double)f->hunts[s].cases[0])
                                                         : cJSON_CreateNull());
    cJSON_AddItemToObject(o, "cases_by_seed", seeds);
    cJSON_AddStringToObject(o, "status", first->found[0] ? dkv_statusRow(first->reason.status)->name : "");
    cJSON_AddStringToObject(o, "check", first->found[0] ? first->reason.check : "");
    cJSON_AddStringToObject(o, "tensor", tensorOf(first));
    cJSON_AddStringToObject(o, "why", first->why);
    cJSON_AddStringToObject(o, "first_line", first->line);
    cJSON_AddStringToObject(o, "line", f->shrunk[0] ? f->shrunk : first->line);
    if (p->shrink_done || f->shrunk[0]) {
        cJSON_AddNumberToObject(o, "trials", (double)f->trials);
        cJSON_AddNumberToObject(o, "shrink_seconds", f->shrink_seconds);
    }
    if (p->suite_done) {
        cJSON_AddBoolToObject(o, "in_suite", f->in_suite);
        cJSON_AddNumberToObject(o, "suite_cases", (double)f->suite_cases);
    }
    for (int r = 0; r < DKV_N_RULES && p->rules_done; r++) {
        cJSON *value =
            first->found[1 + r] ? cJSON_CreateNumber((double)first->cases[1 + r]) : cJSON_CreateNull();
        cJSON_AddItemToObject(o, dkv_ruleName(r), value);
    }
    return o;
}

static cJSON *cleanObject(const dkv_power *p) {
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "kernel", p->kernel.text);
    cJSON_AddStringToObject(o, "profile", dkv_profileName((int)p->profile));
    cJSON_AddNumberToObject(o, "seed", (double)p->seed);
    cJSON_AddNumberToObject(o, "seeds", p->seeds);
    cJSON_AddNumberToObject(o, "cases", (double)p->cases);
    cJSON_AddNumberToObject(o, "clean_cases", (double)p->clean_cases);
    cJSON_AddNumberToObject(o, "false_alarms", (double)p->false_alarms);
    cJSON_AddNumberToObject(o, "clean_seconds", p->clean_seconds);
    for (int r = 0; r < DKV_N_RULES && p->rules_done; r++) {
        char key[64];
        snprintf(key, sizeof key, "false_alarms_%s", dkv_ruleName(r));
        cJSON_AddNumberToObject(o, key, (double)p->rule_alarms[r]);
    }
    cJSON_AddStringToObject(o, "device", dkv_hostDevice());
    dkv_addBuild(o);
    return o;
}

/* Did the hunts of this fault (of the clean kernel, where i is past the last) end, or were they interrupted? */
static bool isComplete(const dkv_power *p, int i) {
    if (!p->stopped) return true;
    for (int s = 0; i < p->n_faults && s < p->seeds; s++) {
        const dkv_hunt *h = &p->fault[i].hunts[s];
        if (!h->found[0] && h->cases[0] < p->cases) return false;
    }
    return i < p->n_faults || p->clean_done;
}

int dkv_writePowerJson(const dkv_power *p, FILE *f) {
    for (int i = 0; i <= p->n_faults; i++) {
        if (!isComplete(p, i)) continue;
        cJSON *o = i < p->n_faults ? faultObject(p, &p->fault[i]) : cleanObject(p);
        char *text = cJSON_PrintUnformatted(o);
        int bad = !text || fprintf(f, "%s\n", text) < 0;
        free(text);
        cJSON_Delete(o);
        if (bad) return -1;
    }
    return fflush(f) ? -1 : 0;
}

/* ---- Markdown ---- */

static void writeNumber(FILE *f, bool found, uint64_t n) {
    if (found)
        fprintf(f, " %" PRIu64 " |", n);
    else
        fprintf(f, " – |");
}

static void writeSummary(const dkv_power *p, const dkv_power_summary *s, FILE *f) {
    fprintf(f, "# Power of the checks, measured on planted faults\n\n");
    fprintf(f,
            "Kernel `%s`, profile %s, seeds %" PRIu64 " to %" PRIu64 ", at most %" PRIu64
            " cases each; %s, commit %s.\n\n",
            p->kernel.text, dkv_profileName((int)p->profile), p->seed, p->seed + (uint64_t)p->seeds - 1,
            p->cases, dkv_hostDevice(), dkv_commit());
    fprintf(f, "- %d of %d planted faults found in every seed; median %g cases, at most %g.\n", s->found,
            s->planted, s->median, s->worst);
    if (p->n_suite)
        fprintf(f, "- %d of %d found by the suite alone (%ld lines).\n", s->in_suite, s->planted, p->n_suite);
    fprintf(f, "- Clean kernel: %" PRIu64 " false alarms in %" PRIu64 " cases", p->false_alarms,
            p->clean_cases);
    if (s->controls) fprintf(f, "; %d of %d controls raised one", s->controls_found, s->controls);
    if (p->clean_seconds > 0) fprintf(f, "; %.1f cases a second", (double)p->clean_cases / p->clean_seconds);
    fprintf(f, ".\n");
}

static void writeFaults(const dkv_power *p, FILE *f) {
    fprintf(f, "\n## Faults\n\n| fault | what it does | cases |%s found by | first | shrunk line |\n",
            p->n_suite ? " suite |" : "");
    fprintf(f, "|---|---|---|%s---|---|---|\n", p->n_suite ? "---|" : "");
    for (int i = 0; i < p->n_faults; i++) {
        const dkv_fault_power *x = &p->fault[i];
        const dkv_hunt *h = &x->hunts[0];
        fprintf(f, "| %s | %s%s |", x->id, x->control ? "control: " : "", x->doc);
        for (int s = 0; s < p->seeds; s++) {
            if (x->hunts[s].found[0])
                fprintf(f, "%s%" PRIu64, s ? ", " : " ", x->hunts[s].cases[0]);
            else
                fprintf(f, "%s–", s ? ", " : " ");
        }
        fprintf(f, " |");
        if (p->n_suite) fprintf(f, " %s |", x->in_suite ? "yes" : "–");
        fprintf(f, " %s%s%s | %s |", h->found[0] ? dkv_statusRow(h->reason.status)->name : "–",
                h->found[0] && h->reason.check[0] ? ", " : "", h->found[0] ? h->reason.check : "",
                tensorOf(h));
        if (h->found[0] || x->shrunk[0])
            fprintf(f, " `%s` |\n", x->shrunk[0] ? x->shrunk : h->line);
        else
            fprintf(f, " |\n");
    }
}

static void writeMatrix(const dkv_power *p, const dkv_power_summary *s, FILE *f) {
    fprintf(f,
            "\n## Kill matrix\n\nThe number of the case (seed %" PRIu64 ", of %" PRIu64
            ") at which each rule first objects, and would not to the clean kernel.\n\n",
            p->seed, p->cases);
    for (int r = 0; r < DKV_N_RULES; r++) fprintf(f, "- `%s`: %s\n", dkv_ruleName(r), dkv_ruleDoc(r));
    fprintf(f, "\n| |");
    for (int r = 0; r < DKV_N_RULES; r++) fprintf(f, " %s |", dkv_ruleName(r));
    fprintf(f, " this tool |\n|---|");
    for (int r = 0; r <= DKV_N_RULES; r++) fprintf(f, "---|");
    fprintf(f, "\n| **faults found, of %d** |", s->planted);
    for (int r = 0; r < DKV_N_RULES; r++) fprintf(f, " **%d** |", s->by_rule[r]);
    fprintf(f, " **%d** |\n| **false alarms, of %" PRIu64 " clean cases** |", s->by_tool, p->cases);
    for (int r = 0; r < DKV_N_RULES; r++) fprintf(f, " **%" PRIu64 "** |", p->rule_alarms[r]);
    fprintf(f, " **%" PRIu64 "** of %" PRIu64 " |\n", p->false_alarms, p->clean_cases);
    for (int i = 0; i < p->n_faults; i++) {
        const dkv_hunt *h = &p->fault[i].hunts[0];
        fprintf(f, "| %s%s |", p->fault[i].id, p->fault[i].control ? " (control)" : "");
        for (int r = 0; r < DKV_N_RULES; r++) writeNumber(f, h->found[1 + r], h->cases[1 + r]);
        writeNumber(f, h->found[0], h->cases[0]);
        fprintf(f, "\n");
    }
}

int dkv_writePowerMarkdown(const dkv_power *p, FILE *f) {
    dkv_power_summary s = dkv_summarisePower(p);
    writeSummary(p, &s, f);
    writeFaults(p, f);
    if (p->matrix) writeMatrix(p, &s, f);
    return fflush(f) || ferror(f) ? -1 : 0;
}
