/* A diagnosis in words and as JSON. */
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "diagnose.h"
#include "record.h"

static void number(double x, char *out, size_t n) {
    if (isnan(x))
        snprintf(out, n, "-");
    else
        snprintf(out, n, "%.3g", x);
}

static void sayTensors(const dkv_diagnosis *d, FILE *f, bool verbose) {
    fprintf(f, "  %-6s %16s %10s %8s %10s  %s\n", "tensor", "rows off", "err/bound", "noise", "gain",
            "where");
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const dkv_tensor_where *w = &d->tensor[id];
        char off[40], worst[24], noise[24], gain[24];
        if (!w->present) continue;
        snprintf(off, sizeof off, "%lld of %lld", (long long)w->off, (long long)w->rows);
        number(w->worst, worst, sizeof worst);
        number(w->noise, noise, sizeof noise);
        number(w->gain, gain, sizeof gain);
        fprintf(f, "  %-6s %16s %10s %8s %10s", dkv_tensorName((dkv_tensor_id)id), off, worst, noise, gain);
        if (w->rows_words[0]) fprintf(f, "  %s of %s", w->rows_words, w->segments);
        if (w->heads[0]) fprintf(f, "%s %s", w->rows_words[0] ? "," : " ", w->heads);
        if (w->dims[0]) fprintf(f, ", %s", w->dims);
        if (w->nonfinite) fprintf(f, "; %lld not finite", (long long)w->nonfinite);
        fprintf(f, "\n");
        if (w->pattern[0]) fprintf(f, "  %6s %s\n", "", w->pattern);
        if (w->scaled_share > 0.5)
            fprintf(f, "  %6s %.4g times its value explains %.3f of the error\n", "", w->scaled,
                    w->scaled_share);
        if (w->growth_p < 1e-6 && (verbose || fabs(w->growth) > 0.3))
            fprintf(f,
                    "  %6s the error goes with the number of keys to the power %.2g (by chance: p = %.0e)\n",
                    "", w->growth, fmax(w->growth_p, 1e-99));
    }
    fprintf(
        f,
        "  rows: a token and a head; dQ, dK, dV, dSink against the backward of the kernel's own O and LSE\n");
}

static void sayRepeats(const dkv_diagnosis *d, FILE *f) {
    const dkv_repeats *r = &d->repeats;
    if (r->runs < 2) return;
    if (!r->differing) {
        fprintf(f, "  repeats: %d runs, the same bits\n", r->runs);
        return;
    }
    fprintf(f, "  repeats: %d of %d further runs have other bits:", r->differing, r->runs - 1);
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (r->elements[id])
            fprintf(f, " %s (%lld elements, by up to %.2g of the bound)", dkv_tensorName((dkv_tensor_id)id),
                    (long long)r->elements[id], r->beyond[id]);
    fprintf(f, "\n  %8s %s\n", "", r->where);
}

static void sayHypotheses(const dkv_diagnosis *d, FILE *f, bool verbose) {
    const int n = verbose || d->n_hypotheses < 4 ? d->n_hypotheses : 4;
    for (int i = 0; i < n; i++) {
        const dkv_hypothesis *h = &d->hypothesis[i];
        fprintf(f, "  %-7s %5.3f  %s: %s\n", i ? "" : "cause:", h->share, h->name, h->sentence);
        if (h->evidence[0] && (verbose || i == 0)) fprintf(f, "  %14s %s\n", "", h->evidence);
        if (h->n_members > 1 && (verbose || i == 0)) {
            fprintf(f, "  %14s not told apart here:", "");
            for (int k = 0; k < h->n_members && k < DKV_CLASS_MAX && (verbose || k < 8); k++)
                fprintf(f, "%s %s", k ? "," : "", h->members[k]);
            fprintf(f, "%s\n", !verbose && h->n_members > 8 ? ", ..." : "");
        }
    }
}

/* The kernel is then weighed against the loosest arithmetic known: much of a fault lies within that. */
static void sayArithmetic(const dkv_diagnosis *d, FILE *f) {
    if (d->held[0]) return;
    if (d->n_hypotheses && !strcmp(d->hypothesis[0].name, "unknown") && !d->result.declared)
        fprintf(f, "  its arithmetic is not declared: with --arithmetic NAME (`dualkv list arithmetics`), or auto, a cause may show\n");
}

static void sayPassed(const dkv_diagnosis *d, FILE *f) {
    char sees[200];
    double most = -1;
    int at = -1;
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const dkv_judgement *j = &d->result.tensor[id];
        if (!j->present || !j->all.total || !(j->all.max_ratio > most)) continue;
        most = j->all.max_ratio;
        at = id;
    }
    if (at >= 0)
        fprintf(f, "  %s reaches %.2f of what rounding allows\n", dkv_tensorName((dkv_tensor_id)at), most);
    dkv_sayStrength(&d->result.strength, sees, sizeof sees);
    if (sees[0]) fprintf(f, "  it would have seen %s\n", sees);
}

void dkv_sayDiagnosis(const dkv_diagnosis *d, FILE *f, bool verbose) {
    const dkv_result *r = &d->result;
    char *replay = malloc(DKV_REPLAY_MAX);
    bool any = false;
    const bool none = d->interrupted && r->status == DKV_ST_HARNESS_ERROR; /* no verdict, and no fault of the harness */
    fprintf(f, "%s\n%s  %s  [%s]\n", d->sentence, none ? "INTERRUPTED" : dkv_statusRow(r->status)->name, r->line, r->kernel);
    if (d->note[0]) fprintf(f, "  %s\n", d->note);
    if (d->held[0] && r->judged && !r->declared) fprintf(f, "  its arithmetic is not declared: %s\n", d->held);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) any |= d->tensor[id].present;
    if (any) sayTensors(d, f, verbose);
    for (int i = 0; i < d->n_spots; i++) {
        const dkv_spot *s = &d->spot[i];
        fprintf(f, "  stage:  %s%s%s", dkv_stageRow(s->stage)->name, s->region[0] ? ", " : "", s->region);
        if (!isnan(s->share)) fprintf(f, " (its test explains %.2f)", s->share);
        fprintf(f, "\n");
    }
    sayRepeats(d, f);
    sayHypotheses(d, f, verbose);
    sayArithmetic(d, f);
    if (r->status == DKV_ST_PASSED) sayPassed(d, f);
    if (r->printed[0] &&
        (r->status == DKV_ST_CRASHED || r->status == DKV_ST_NOT_RUN || r->status == DKV_ST_TIMEOUT)) {
        fprintf(f, "  it printed:\n    ");
        for (const char *c = r->printed; *c; c++) {
            if (*c == '\n' && c[1])
                fprintf(f, "\n    ");
            else if (*c != '\n')
                fputc((unsigned char)*c < 32 || (unsigned char)*c > 126 ? '?' : *c, f);
        }
        fprintf(f, "\n");
    }
    if (replay && r->status != DKV_ST_PASSED) {
        dkv_replayCommand(r->line, r->kernel, replay, DKV_REPLAY_MAX);
        fprintf(f, "  replay: %s\n", replay);
    }
    free(replay);
}

/* ---- JSON ---- */

static void addTensor(cJSON *all, int id, const dkv_tensor_where *w) {
    cJSON *o = cJSON_AddObjectToObject(all, dkv_tensorName((dkv_tensor_id)id));
    dkv_addNumber(o, "rows", (double)w->rows);
    dkv_addNumber(o, "rows_off", (double)w->off);
    dkv_addNumber(o, "rows_outside", (double)w->outside);
    dkv_addNumber(o, "rows_nonfinite", (double)w->nonfinite);
    dkv_addNumber(o, "max_bound_ratio", w->worst);
    dkv_addNumber(o, "twin_rms", w->noise);
    dkv_addNumber(o, "twin_gain", w->gain);
    dkv_addNumber(o, "twin_mean", w->mean);
    dkv_addNumber(o, "factor", w->scaled);
    dkv_addNumber(o, "factor_share", w->scaled_share);
    dkv_addNumber(o, "growth", w->growth);
    dkv_addNumber(o, "growth_chance", w->growth_p);
    cJSON_AddBoolToObject(o, "given_own_o_lse", w->given_own);
    cJSON_AddStringToObject(o, "segments", w->segments);
    cJSON_AddStringToObject(o, "rows_words", w->rows_words);
    cJSON_AddStringToObject(o, "heads", w->heads);
    cJSON_AddStringToObject(o, "dims", w->dims);
    cJSON_AddStringToObject(o, "pattern", w->pattern);
}

static void addSpots(cJSON *o, const dkv_diagnosis *d) {
    cJSON *all = cJSON_AddArrayToObject(o, "spots");
    for (int i = 0; i < d->n_spots; i++) {
        const dkv_spot *s = &d->spot[i];
        cJSON *one = cJSON_CreateObject(), *tensors;
        cJSON_AddItemToArray(all, one);
        cJSON_AddStringToObject(one, "stage", dkv_stageRow(s->stage)->name);
        cJSON_AddStringToObject(one, "tensor", dkv_tensorName(s->tensor));
        tensors = cJSON_AddArrayToObject(one, "tensors");
        for (int id = 0; id < DKV_N_OUTPUTS; id++)
            if (s->tensors >> id & 1)
                cJSON_AddItemToArray(tensors, cJSON_CreateString(dkv_tensorName((dkv_tensor_id)id)));
        cJSON_AddStringToObject(one, "region", s->region);
        cJSON_AddStringToObject(one, "detail", s->detail);
        cJSON_AddBoolToObject(one, "precision", s->precision);
        dkv_addNumber(one, "share", s->share);
        cJSON_AddStringToObject(one, "sentence", s->sentence);
    }
}

static void addHypotheses(cJSON *o, const dkv_diagnosis *d) {
    cJSON *all = cJSON_AddArrayToObject(o, "hypotheses");
    for (int i = 0; i < d->n_hypotheses; i++) {
        const dkv_hypothesis *h = &d->hypothesis[i];
        cJSON *one = cJSON_CreateObject(), *members;
        cJSON_AddItemToArray(all, one);
        cJSON_AddStringToObject(one, "family", h->family);
        cJSON_AddStringToObject(one, "name", h->name);
        cJSON_AddStringToObject(one, "sentence", h->sentence);
        cJSON_AddStringToObject(one, "evidence", h->evidence);
        dkv_addNumber(one, "share", h->share);
        dkv_addNumber(one, "parameters", h->parameters);
        cJSON_AddBoolToObject(one, "claimed", h->claimed);
        cJSON_AddBoolToObject(one, "exact", h->exact);
        members = cJSON_AddArrayToObject(one, "members");
        for (int k = 0; k < h->n_members && k < DKV_CLASS_MAX; k++)
            cJSON_AddItemToArray(members, cJSON_CreateString(h->members[k]));
    }
}

static void addRepeats(cJSON *o, const dkv_diagnosis *d) {
    cJSON *r = cJSON_AddObjectToObject(o, "repeats");
    dkv_addNumber(r, "runs", d->repeats.runs);
    dkv_addNumber(r, "differing", d->repeats.differing);
    cJSON_AddStringToObject(r, "where", d->repeats.where);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        if (!d->repeats.elements[id]) continue;
        cJSON *t = cJSON_AddObjectToObject(r, dkv_tensorName((dkv_tensor_id)id));
        dkv_addNumber(t, "elements", (double)d->repeats.elements[id]);
        dkv_addNumber(t, "beyond_bound", d->repeats.beyond[id]);
    }
}

char *dkv_printDiagnosis(const dkv_diagnosis *d) {
    cJSON *o = cJSON_CreateObject();
    char *record = dkv_printRecord(&d->result);
    cJSON_AddStringToObject(o, "diagnosis", d->sentence);
    addSpots(o, d);
    cJSON *tensors = cJSON_AddObjectToObject(o, "where");
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (d->tensor[id].present) addTensor(tensors, id, &d->tensor[id]);
    addRepeats(o, d);
    dkv_addNumber(o, "probes", d->probes);
    addHypotheses(o, d);
    if (d->held[0]) cJSON_AddStringToObject(o, "held_to", d->held);
    if (d->interrupted) cJSON_AddTrueToObject(o, "interrupted");
    cJSON_AddStringToObject(o, "note", d->note);
    cJSON *case_ = record ? cJSON_Parse(record) : NULL;
    if (case_) cJSON_AddItemToObject(o, "case", case_);
    char *text = case_ ? cJSON_PrintUnformatted(o) : NULL;
    cJSON_Delete(o);
    free(record);
    return text;
}
