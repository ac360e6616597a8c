#include "files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int compareLines(const dkv_files *f, dkv_err *err) {
    for (long i = 0; i < f->n; i++)
        for (long k = i + 1; k < f->n; k++)
            if (strcmp(f->lines[i], f->lines[k]) == 0)
                return dkv_fail(err, DKV_EUSER, "%.150s: '%s' and '%s' are of the same line: %.200s", f->dir,
                                f->names[i], f->names[k], f->lines[i]);
    return 0;
}

int dkv_openFiles(const char *dir, dkv_files *out, dkv_err *err) {
    *out = (dkv_files){0};
    int rc = dkv_listCaseFiles(dir, &out->names, &out->n, err);
    if (rc) return rc;
    out->dir = strdup(dir);
    out->lines = calloc((size_t)out->n, sizeof *out->lines);
    if (!out->dir || !out->lines) rc = dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (long i = 0; i < out->n && !rc; i++) {
        rc = dkv_openCaseFile(dir, out->names[i], false, &out->open, err);
        if (rc) break;
        out->any_replicated |= out->open.replicated;
        out->lines[i] = strdup(out->open.line);
        if (!out->lines[i]) rc = dkv_fail(err, DKV_EHARNESS, "out of memory");
        dkv_closeCaseFile(&out->open);
    }
    if (!rc) rc = compareLines(out, err);
    if (rc) dkv_closeFiles(out);
    return rc;
}

void dkv_closeFiles(dkv_files *f) {
    if (f->is_open) dkv_closeCaseFile(&f->open);
    for (long i = 0; i < f->n; i++) {
        free(f->names[i]);
        if (f->lines) free(f->lines[i]);
    }
    free(f->names);
    free(f->lines);
    free(f->dir);
    *f = (dkv_files){0};
}

bool dkv_findFile(dkv_files *f, const char *line, dkv_err *err) {
    if (f->is_open) dkv_closeCaseFile(&f->open);
    f->is_open = false;
    for (long i = 0; i < f->n; i++) {
        if (strcmp(f->lines[i], line) != 0) continue;
        if (dkv_openCaseFile(f->dir, f->names[i], true, &f->open, err)) return false;
        f->is_open = true;
        if (strcmp(f->open.line, line) == 0) return true; /* it may have been replaced meanwhile */
        dkv_closeCaseFile(&f->open);
        f->is_open = false;
    }
    dkv_fail(err, DKV_EREFUSED, "no file of '%.300s' holds this case", f->dir);
    return false;
}

int32_t dkv_absentOutputs(const dkv_files *f, bool grad, bool sink) {
    const bool has[DKV_N_OUTPUTS] = {true, true, grad, grad, grad, grad && sink};
    int32_t absent = 0;
    for (int id = 0; id < DKV_N_OUTPUTS; id++)
        if (has[id] && !f->open.tensor[DKV_CT_O + id]) absent |= 1 << id;
    return absent;
}

int dkv_launchFile(dkv_files *f, dkv_arena *a, int backward, dkv_err *err) {
    static const dkv_slot inputs[DKV_CT_O] = {DKV_SLOT_Q,  DKV_SLOT_K,    DKV_SLOT_V,
                                              DKV_SLOT_DO, DKV_SLOT_DLSE, DKV_SLOT_SINK};
    for (int t = 0; t < DKV_CT_O && !backward; t++) {
        const dkv_st_tensor *x = f->open.tensor[t];
        if (x && !dkv_holdsTensor(a, inputs[t], x->data))
            return dkv_fail(err, DKV_EUSER, "%s" DKV_CASE_ENDING ": its %s is not what generator %s makes of its line",
                            f->open.name, dkv_caseTensorName((dkv_case_tensor)t), dkv_findMeta(&f->open.file, "generator"));
    }
    for (int id = 0; id < DKV_N_OUTPUTS; id++) {
        const dkv_st_tensor *x = f->open.tensor[DKV_CT_O + id];
        if (x && (id >= DKV_DQ) == (backward != 0)) dkv_putTensor(a, dkv_outputSlot((dkv_tensor_id)id), x->data);
    }
    return 0;
}
