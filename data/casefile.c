#include "casefile.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "../ref/dtype.h"
#include "fill.h"

#define FOLDER_VARIABLE "DUALKV_FILES"

static const char *const names[DKV_CT_N] = {"q", "k",   "v",  "do", "dlse", "sink",
                                            "o", "lse", "dq", "dk", "dv",   "dsink"};
static const char *const informative[] = {"cu_seqlens_q", "cu_seqlens_k"};

const char *dkv_caseTensorName(dkv_case_tensor t) { return names[t]; }

/* ---- folder and names ---- */

const char *dkv_filesDir(void) {
    const char *dir = getenv(FOLDER_VARIABLE);
    return dir && *dir ? dir : NULL;
}

int dkv_setFilesDir(const char *dir, dkv_err *err) {
    static char set[PATH_MAX];
    if (set[0] && strcmp(set, dir))
        return dkv_fail(err, DKV_EUSER, "two folders of files in one run: '%.150s' and '%.150s'", set, dir);
    if (!*dir || strlen(dir) >= sizeof set) return dkv_fail(err, DKV_EUSER, "files: '%.80s' is not a folder", dir);
    strcpy(set, dir);
    return setenv(FOLDER_VARIABLE, dir, 1) ? dkv_fail(err, DKV_EHARNESS, "out of memory") : 0;
}

bool dkv_isCaseName(const char *name, size_t n) {
    return n && n <= DKV_CASE_NAME_MAX && name[0] != '.' && strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_.-") >= n;
}

/* Length of the stem of a case's file name, 0 where it is none. */
static size_t stem_of(const char *file) {
    size_t n = strlen(file), ending = strlen(DKV_CASE_ENDING);
    return n > ending && !strcmp(file + n - ending, DKV_CASE_ENDING) ? n - ending : 0;
}

static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

int dkv_listCaseFiles(const char *dir, char ***out, long *n, dkv_err *err) {
    DIR *folder = opendir(dir);
    const struct dirent *entry;
    long room = 0;
    int code = 0;
    *out = NULL;
    *n = 0;
    if (!folder) return dkv_fail(err, DKV_EUSER, "files: '%.200s': %s", dir, strerror(errno));
    while (!code && (entry = readdir(folder))) {
        size_t stem = stem_of(entry->d_name);
        if (!stem || entry->d_name[0] == '.') continue;
        if (!dkv_isCaseName(entry->d_name, stem)) {
            code = dkv_fail(err, DKV_EUSER, "%.200s/%.120s: a line cannot say this name ([a-z0-9_.-], at most %d characters)",
                            dir, entry->d_name, DKV_CASE_NAME_MAX);
            break;
        }
        if (*n == room) {
            char **more = realloc(*out, (size_t)(room = room * 2 + 64) * sizeof *more);
            if (more) *out = more;
            else code = dkv_fail(err, DKV_EHARNESS, "out of memory");
        }
        if (!code && !((*out)[*n] = strndup(entry->d_name, stem))) code = dkv_fail(err, DKV_EHARNESS, "out of memory");
        *n += !code;
    }
    closedir(folder);
    if (!code && *n == 0) code = dkv_fail(err, DKV_EUSER, "files: no " DKV_CASE_ENDING " in '%.200s'", dir);
    if (!code) {
        qsort(*out, (size_t)*n, sizeof **out, by_text);
        return 0;
    }
    for (long i = 0; i < *n; i++) free((*out)[i]);
    free(*out);
    *out = NULL;
    *n = 0;
    return code;
}

/* ---- shapes ---- */

/* Elements and, up to three, sizes of a tensor in a layout's view. */
static int64_t dkv_caseShape(const dualkv_problem *v, dkv_case_tensor t, int64_t shape[3], int *ndim) {
    const bool by_key = t == DKV_CT_K || t == DKV_CT_V || t == DKV_CT_O + DKV_DK || t == DKV_CT_O + DKV_DV;
    const bool value = t == DKV_CT_V || t == DKV_CT_DO || t == DKV_CT_O + DKV_O || t == DKV_CT_O + DKV_DV;
    shape[0] = by_key ? v->tk : v->tq;
    shape[1] = by_key ? v->hkv : v->hq;
    shape[2] = value ? v->dv : v->dqk;
    *ndim = 3;
    if (t == DKV_CT_DLSE || t == DKV_CT_O + DKV_LSE) {
        shape[0] = v->hq;
        shape[1] = v->tq;
        *ndim = 2;
    } else if (t == DKV_CT_SINK || t == DKV_CT_O + DKV_DSINK) {
        shape[0] = v->hq;
        *ndim = 1;
    }
    int64_t n = 1; /* at most 2^40 rows, 2^12 heads, 2^8 columns */
    for (int i = 0; i < *ndim; i++) n *= shape[i];
    return n;
}

static bool dkv_caseTensorWanted(const dualkv_problem *v, dkv_case_tensor t) {
    switch ((int)t) {
    case DKV_CT_DO:
    case DKV_CT_O + DKV_DQ:
    case DKV_CT_O + DKV_DK:
    case DKV_CT_O + DKV_DV: return v->grad;
    case DKV_CT_DLSE: return v->grad && v->dlse;
    case DKV_CT_SINK: return v->sink;
    case DKV_CT_O + DKV_DSINK: return v->grad && v->sink;
    default: return true;
    }
}

static bool is_fp32(dkv_case_tensor t) {
    return t == DKV_CT_DLSE || t == DKV_CT_SINK || t == DKV_CT_O + DKV_LSE || t == DKV_CT_O + DKV_DSINK;
}

static dualkv_dtype type_of(const dualkv_problem *v, dkv_case_tensor t) {
    return is_fp32(t) ? DUALKV_FP32 : (dualkv_dtype)v->dtype;
}

static const char *type_name(dualkv_dtype t) {
    return t == DUALKV_BF16 ? "BF16" : t == DUALKV_FP16 ? "F16" : "F32";
}

static void print_shape(const int64_t *shape, int ndim, char *out, size_t n) {
    size_t at = 0;
    out[0] = 0;
    for (int i = 0; i < ndim && at < n; i++)
        at += (size_t)snprintf(out + at, n - at, "%s%" PRId64, i ? ", " : "", shape[i]);
}

/* ---- reading ---- */

static int check_tensor(const char *path, const dualkv_problem *v, dkv_case_tensor t, const dkv_st_tensor *have,
                        dkv_err *err) {
    int64_t want[3];
    int ndim;
    char has[100], wants[100];
    if (!dkv_caseTensorWanted(v, t))
        return dkv_fail(err, DKV_EUSER, "%s: '%s' is there, and the line has none", path, names[t]);
    if (strcmp(have->dtype, type_name(type_of(v, t))))
        return dkv_fail(err, DKV_EUSER, "%s: '%s' is %s, the line wants %s", path, names[t], have->dtype,
                        type_name(type_of(v, t)));
    dkv_caseShape(v, t, want, &ndim);
    if (have->ndim == ndim && !memcmp(have->shape, want, (size_t)ndim * sizeof *want)) return 0;
    print_shape(have->shape, have->ndim, has, sizeof has);
    print_shape(want, ndim, wants, sizeof wants);
    return dkv_fail(err, DKV_EUSER, "%s: '%s' is [%s], the line wants [%s]", path, names[t], has, wants);
}

static int find_tensors(const char *path, dkv_casefile *f, dkv_err *err) {
    for (int i = 0; i < f->file.n_tensors; i++) {
        const dkv_st_tensor *t = &f->file.tensors[i];
        int id = 0;
        bool known = false;
        while (id < DKV_CT_N && strcmp(t->name, names[id])) id++;
        if (id < DKV_CT_N) f->tensor[id] = t;
        for (size_t k = 0; k < sizeof informative / sizeof *informative; k++) known |= !strcmp(t->name, informative[k]);
        if (id == DKV_CT_N && !known)
            return dkv_fail(err, DKV_EUSER, "%s: tensor '%.60s' is none of q k v do dlse sink o lse dq dk dv dsink", path,
                            t->name);
    }
    return 0;
}

/* Types and shapes against the line; a captured case must have all that goes in. */
static int check_tensors(const char *path, const dkv_problem *p, dkv_casefile *f, dkv_err *err) {
    dkv_layout packed = {0}, rep = {0};
    int code = dkv_makeLayout(p, &packed, err);
    if (!code && f->replicated) code = dkv_makeReplicated(p, &packed, &rep, NULL, NULL, NULL, err);
    const dualkv_problem *v = f->replicated ? &rep.view : &packed.view;
    for (int t = 0; t < DKV_CT_N && !code; t++) {
        if (f->tensor[t]) code = check_tensor(path, v, (dkv_case_tensor)t, f->tensor[t], err);
        else if (t < DKV_CT_O && f->own_inputs && dkv_caseTensorWanted(v, (dkv_case_tensor)t))
            code = dkv_fail(err, DKV_EUSER, "%s: '%s' is missing%s", path, names[t],
                            t == DKV_CT_DO ? " (a line without gradients says grad=off)" : "");
    }
    dkv_freeLayout(&rep);
    dkv_freeLayout(&packed);
    return code;
}

static int check_finite(const char *path, const dkv_st_tensor *x, dualkv_dtype type, dkv_err *err) {
    const size_t size = dkv_dtypeSize(type);
    double part[256];
    int64_t bad = 0, first = 0, n = x->bytes / (int64_t)size;
    for (int64_t i = 0; i < n; i += 256) {
        int64_t len = n - i < 256 ? n - i : 256;
        dkv_decodeArray((const char *)x->data + i * (int64_t)size, type, (size_t)len, part);
        for (int64_t k = 0; k < len; k++)
            if (!isfinite(part[k]) && bad++ == 0) first = i + k;
    }
    if (!bad) return 0;
    return dkv_fail(err, DKV_EUSER, "%s: %" PRId64 " elements of %s are NaN or Inf, the first is number %"
                    PRId64, path, bad, x->name, first);
}

static int take_line(const char *path, const char *line, dkv_casefile *f, dkv_problem *p, dkv_err *err) {
    dkv_err why = {0};
    const char *layout = dkv_findMeta(&f->file, "layout"), *generator = dkv_findMeta(&f->file, "generator");
    if (!line) line = dkv_findMeta(&f->file, "line");
    if (!line) return dkv_fail(err, DKV_EUSER, "%s: metadata 'line', the problem line, is missing", path);
    if (layout && strcmp(layout, "packed") && strcmp(layout, "replicated"))
        return dkv_fail(err, DKV_EUSER, "%s: layout '%.40s' is neither packed nor replicated", path, layout);
    f->replicated = layout && !strcmp(layout, "replicated");
    f->own_inputs = !generator && (f->tensor[DKV_CT_Q] || f->tensor[DKV_CT_K] || f->tensor[DKV_CT_V]);
    if (generator && strcmp(generator, DKV_GENERATOR))
        return dkv_fail(err, DKV_EUSER, "%s: its inputs are of generator %.20s, this program has %s: export them again", path,
                        generator, DKV_GENERATOR);
    if (f->own_inputs && f->replicated)
        return dkv_fail(err, DKV_EUSER, "%s: inputs of a captured case are packed, not replicated", path);
    if (dkv_parseProblem(line, f->own_inputs ? NULL : dkv_knownFill, p, &why))
        return dkv_fail(err, DKV_EUSER, "%.200s: %.280s", path, why.text);
    if (!f->own_inputs && !strncmp(p->fill, "file:", 5))
        return dkv_fail(err, DKV_EUSER, "%s: a captured case, and its q, k, v are missing", path);
    if (f->own_inputs) {
        snprintf(p->fill, sizeof p->fill, "file:%s", f->name);
        p->seed = 1;
    }
    if (dkv_printProblem(p, f->line, sizeof f->line, &why)) return dkv_fail(err, DKV_EUSER, "%.200s: %.280s", path, why.text);
    return 0;
}

int dkv_openCasePath(const char *path, const char *name, const char *line, bool data, dkv_casefile *out, dkv_err *err) {
    struct stat st;
    dkv_problem p = {0};
    *out = (dkv_casefile){0};
    if (!dkv_isCaseName(name, strlen(name)))
        return dkv_fail(err, DKV_EUSER, "%.200s: '%.80s' cannot be a case's name ([a-z0-9_.-], at most %d characters)", path,
                        name, DKV_CASE_NAME_MAX);
    if (!lstat(path, &st) && S_ISLNK(st.st_mode))
        return dkv_fail(err, DKV_EUSER, "%s: a symbolic link, which is not followed", path);
    strcpy(out->name, name);
    int code = dkv_readTensorsOf(path, data, &out->file, err);
    if (!code) code = find_tensors(path, out, err);
    if (!code) code = take_line(path, line, out, &p, err);
    if (!code) code = check_tensors(path, &p, out, err);
    for (int t = 0; t < DKV_CT_O && !code && data && out->own_inputs; t++)
        if (out->tensor[t])
            code = check_finite(path, out->tensor[t], is_fp32((dkv_case_tensor)t) ? DUALKV_FP32 : p.dtype, err);
    dkv_freeProblem(&p);
    if (code) dkv_closeCaseFile(out);
    return code;
}

int dkv_openCaseFile(const char *dir, const char *name, bool data, dkv_casefile *out, dkv_err *err) {
    char path[PATH_MAX];
    *out = (dkv_casefile){0};
    if (snprintf(path, sizeof path, "%s/%s" DKV_CASE_ENDING, dir, name) >= (int)sizeof path)
        return dkv_fail(err, DKV_EUSER, "%.80s...: the path is too long", dir);
    return dkv_openCasePath(path, name, NULL, data, out, err);
}

void dkv_closeCaseFile(dkv_casefile *f) {
    dkv_freeSafetensors(&f->file);
    *f = (dkv_casefile){0};
}

/* ---- a captured case's inputs ---- */

int dkv_readCaseInputs(const dkv_problem *p, const dkv_layout *l, dkv_inputs *in, dkv_err *err) {
    const char *dir = dkv_filesDir(), *name = strchr(p->fill, ':') + 1;
    void *to[DKV_CT_O] = {in->q, in->k, in->v, in->d_o, in->d_lse, in->sink};
    dkv_casefile f;
    if (!dir)
        return dkv_fail(err, DKV_EUSER, "fill=%s: in which folder? --files DIR says it, or the kernel files:DIR", p->fill);
    int code = dkv_openCaseFile(dir, name, true, &f, err);
    if (code) return code;
    if (!f.own_inputs) code = dkv_fail(err, DKV_EUSER, "fill=%s: the file's inputs are a generator's, not its own", p->fill);
    for (int t = 0; t < DKV_CT_O && !code; t++) {
        if (!to[t]) continue;
        if (!f.tensor[t]) code = dkv_fail(err, DKV_EUSER, "fill=%s: '%s' is missing", p->fill, names[t]);
        if (!code) code = check_tensor(f.name, &l->view, (dkv_case_tensor)t, f.tensor[t], err);
        if (!code && f.tensor[t]->bytes) memcpy(to[t], f.tensor[t]->data, (size_t)f.tensor[t]->bytes);
    }
    dkv_closeCaseFile(&f);
    return code;
}

/* ---- writing ---- */

/* [groups + 1] tokens before each sequence of a replicated layout. */
static int64_t *cumulate(const dualkv_problem *v, bool keys) {
    int64_t *cu = calloc((size_t)v->n_groups + 1, sizeof *cu);
    for (int32_t i = 0; cu && i < v->n_segments; i++)
        cu[v->segments[i].group + 1] += keys ? v->segments[i].k_len : v->segments[i].q_len;
    for (int32_t g = 0; cu && g < v->n_groups; g++) cu[g + 1] += cu[g];
    return cu;
}

static void add_tensor(dkv_st_tensor *all, int *n, const dualkv_problem *v, dkv_case_tensor t, const void *data) {
    dkv_st_tensor *x = &all[(*n)++];
    memset(x, 0, sizeof *x);
    strcpy(x->name, names[t]);
    strcpy(x->dtype, type_name(type_of(v, t)));
    x->bytes = dkv_caseShape(v, t, x->shape, &x->ndim) * (int64_t)dkv_dtypeSize(type_of(v, t));
    x->data = data;
}

int dkv_writeCaseFile(const char *path, const char *line, const dkv_layout *l, bool replicated, const char *generator,
                      const char *made_by, const dkv_inputs *in, const dkv_outputs *out, dkv_err *err) {
    const dualkv_problem *v = &l->view;
    const char *keys[4] = {"line", "layout"}, *values[4] = {line, replicated ? "replicated" : "packed"};
    dkv_st_tensor all[DKV_CT_N + 2];
    void *rounded[DKV_N_OUTPUTS] = {0};
    int64_t shape[3], *cu[2] = {0};
    int n = 0, n_meta = 2, ndim, code = 0;
    if (generator) keys[n_meta] = "generator", values[n_meta++] = generator;
    if (made_by) keys[n_meta] = "kernel", values[n_meta++] = made_by;
    const void *inputs[DKV_CT_O] = {in->q, in->k, in->v, in->d_o, in->d_lse, in->sink};
    for (int t = 0; t < DKV_CT_O; t++)
        if (inputs[t] && dkv_caseTensorWanted(v, (dkv_case_tensor)t)) add_tensor(all, &n, v, (dkv_case_tensor)t, inputs[t]);
    for (int id = 0; id < DKV_N_OUTPUTS && out && !code; id++) {
        const dkv_case_tensor t = (dkv_case_tensor)(DKV_CT_O + id);
        const double *x = dkv_outputAt(out, (dkv_tensor_id)id);
        if (!x || !dkv_caseTensorWanted(v, t)) continue;
        int64_t elements = dkv_caseShape(v, t, shape, &ndim);
        rounded[id] = malloc((size_t)elements * dkv_dtypeSize(type_of(v, t)) + 1);
        if (!rounded[id]) code = dkv_fail(err, DKV_EHARNESS, "out of memory");
        else {
            dkv_encodeArray(x, type_of(v, t), (size_t)elements, rounded[id]);
            add_tensor(all, &n, v, t, rounded[id]);
        }
    }
    for (int k = 0; k < 2 && replicated && !code; k++) {
        cu[k] = cumulate(v, k);
        if (!cu[k]) code = dkv_fail(err, DKV_EHARNESS, "out of memory");
        dkv_st_tensor x = {.dtype = "I64", .ndim = 1, .shape = {v->n_groups + 1}, .data = cu[k]};
        strcpy(x.name, informative[k]);
        x.bytes = 8 * x.shape[0];
        all[n++] = x;
    }
    if (!code) code = dkv_writeSafetensors(path, all, n, keys, values, n_meta, err);
    for (int id = 0; id < DKV_N_OUTPUTS; id++) free(rounded[id]);
    free(cu[0]);
    free(cu[1]);
    return code;
}

int dkv_copyCaseFile(const dkv_casefile *f, const char *path, dkv_err *err) {
    static const char *const kept[] = {"generator", "kernel"};
    const char *keys[4] = {"line", "layout"}, *values[4] = {f->line, f->replicated ? "replicated" : "packed"};
    int n = 2;
    for (int i = 0; i < 2; i++)
        if ((values[n] = dkv_findMeta(&f->file, kept[i]))) keys[n++] = kept[i];
    return dkv_writeSafetensors(path, f->file.tensors, f->file.n_tensors, keys, values, n, err);
}
