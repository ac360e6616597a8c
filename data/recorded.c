#include "recorded.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ref/dtype.h"

static int check_tensors(const char *path, const dkv_problem *p, dkv_recorded *r, dkv_err *err) {
    static const char *const names[] = {"q", "k", "v"};
    for (int i = 0; i < 3; i++) {
        const dkv_st_tensor *t = dkv_findTensor(&r->file, names[i]);
        int32_t dim = i < 2 ? p->dqk : p->dv;
        if (!t || strcmp(t->dtype, "BF16") || t->ndim != 3 || t->shape[1] < 1 || t->shape[2] < 1)
            return dkv_fail(err, DKV_EUSER, "%s: tensor %s [tokens, heads, dim] in BF16 is missing", path,
                            names[i]);
        if (t->shape[0] != dkv_findTensor(&r->file, "q")->shape[0])
            return dkv_fail(err, DKV_EUSER, "%s: %s has another number of tokens than q", path, names[i]);
        if (t->shape[2] != dim)
            return dkv_fail(err, DKV_EUSER,
                            "fill=%s: %s was recorded with head dimension %" PRId64 ", dim= says %d", p->fill,
                            names[i], t->shape[2], (int)dim);
        r->tensor[i] = t;
    }
    return 0;
}

/* r->first: from the recorded shape and the problem's. */
static int match_segments(const char *path, const dkv_problem *p, const dkv_problem *have, dkv_recorded *r,
                          dkv_err *err) {
    int32_t responses = have->n_nodes - 1, ordinal = 0;
    int64_t *start = calloc((size_t)have->n_nodes, sizeof *start);
    r->first = calloc((size_t)p->n_nodes, sizeof *r->first);
    int code = start && r->first ? 0 : dkv_fail(err, DKV_EHARNESS, "out of memory");
    if (!code && (have->n_groups != 1 || dkv_countKeys(have) != r->tensor[0]->shape[0]))
        code = dkv_fail(err, DKV_EUSER, "%s: its shape is not one group of its %" PRId64 " tokens", path,
                        r->tensor[0]->shape[0]);
    for (int32_t i = 1; i < have->n_nodes && !code; i++) {
        start[i] = start[i - 1] + have->nodes[i - 1].len;
        if (have->nodes[i].depth != 1)
            code = dkv_fail(err, DKV_EUSER, "%s: its shape is not a prompt and responses", path);
    }
    for (int32_t i = 0; i < p->n_nodes && !code; i++) {
        const dkv_node *n = &p->nodes[i];
        int32_t from = 0;
        if (n->depth == 0) ordinal = 0;
        if (n->depth > 1)
            code = dkv_fail(err, DKV_EUSER,
                            "fill=%s: a prompt and responses are recorded, no branches of them", p->fill);
        else if (n->depth == 1 && responses == 0)
            code = dkv_fail(err, DKV_EUSER, "fill=%s: no responses are recorded", p->fill);
        else if (n->depth == 1)
            from = 1 + ordinal++ % responses;
        if (!code && n->len > have->nodes[from].len)
            code = dkv_fail(err, DKV_EUSER,
                            "fill=%s: %s %d of %" PRId64 " tokens is asked for, %" PRId64 " are recorded",
                            p->fill, from ? "response" : "prompt", (int)(from ? ordinal - 1 : n->group),
                            n->len, have->nodes[from].len);
        r->first[i] = start[from];
    }
    free(start);
    return code;
}

int dkv_openRecorded(const dkv_problem *p, const char *data_dir, dkv_recorded *out, dkv_err *err) {
    char *path = NULL, *line = NULL;
    dkv_problem have = {0};
    *out = (dkv_recorded){0};
    if (asprintf(&path, "%s/recorded/%s.safetensors", data_dir, strchr(p->fill, ':') + 1) < 0)
        return dkv_fail(err, DKV_EHARNESS, "out of memory");
    int code = dkv_readSafetensors(path, &out->file, err);
    if (!code) code = check_tensors(path, p, out, err);
    if (!code) {
        const char *shape = dkv_findMeta(&out->file, "shape");
        if (!shape)
            code = dkv_fail(err, DKV_EUSER, "%s: metadata 'shape' is missing", path);
        else if (asprintf(&line, "shape=%s", shape) < 0)
            code = dkv_fail(err, DKV_EHARNESS, "out of memory"), line = NULL;
        else if (dkv_parseProblem(line, NULL, &have, NULL))
            code = dkv_fail(err, DKV_EUSER, "%s: metadata shape '%.60s' is not a shape", path, shape);
    }
    if (!code) code = match_segments(path, p, &have, out, err);
    dkv_freeProblem(&have);
    free(line);
    free(path);
    if (code) dkv_closeRecorded(out);
    return code;
}

void dkv_closeRecorded(dkv_recorded *r) {
    dkv_freeSafetensors(&r->file);
    free(r->first);
    *r = (dkv_recorded){0};
}

void dkv_readRecorded(const dkv_recorded *r, int32_t seg, int64_t t, int tensor, int32_t head, double *x) {
    const dkv_st_tensor *s = r->tensor[tensor];
    int64_t heads = s->shape[1], dim = s->shape[2];
    const uint16_t *data = s->data;
    dkv_decodeArray(data + ((r->first[seg] + t) * heads + head % heads) * dim, DUALKV_BF16, (size_t)dim, x);
}
