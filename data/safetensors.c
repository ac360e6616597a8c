#include "safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "replace.h"

/* File: 8 bytes, little endian, the length of a JSON header; the header; the data. The header maps each
 * tensor's name to {dtype, shape, data_offsets} (offsets from the start of the data), and "__metadata__" to
 * strings. */

#define HEADER_MAX (100u << 20)
#define TENSORS_MAX 65536
#define METADATA_MAX 4096
#define METADATA "__metadata__"

static const struct {
    const char *name;
    int bytes;
} dtypes[] = {{"F64", 8}, {"I64", 8},  {"U64", 8},     {"F32", 4},     {"I32", 4},
              {"U32", 4}, {"BF16", 2}, {"F16", 2},     {"I16", 2},     {"U16", 2},
              {"I8", 1},  {"U8", 1},   {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"BOOL", 1}};

static int dtype_bytes(const char *name) {
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (!strcmp(name, dtypes[i].name)) return dtypes[i].bytes;
    return 0;
}

/* Bytes of a tensor; false if the product overflows or the type is unknown. */
static bool tensor_bytes(const dkv_st_tensor *t, int64_t *bytes) {
    bool empty = false;
    *bytes = dtype_bytes(t->dtype);
    for (int i = 0; i < t->ndim; i++) empty |= t->shape[i] == 0;
    for (int i = 0; i < t->ndim && !empty; i++)
        if (__builtin_mul_overflow(*bytes, t->shape[i], bytes)) return false;
    if (empty) *bytes = 0;
    return dtype_bytes(t->dtype) > 0;
}

/* ---- reading ---- */

/* A whole number in [0, 2^53], where doubles are exact. */
static bool whole(const cJSON *j, int64_t *out) {
    if (!cJSON_IsNumber(j) || !(j->valuedouble >= 0 && j->valuedouble <= 9007199254740992.0)) return false;
    *out = (int64_t)j->valuedouble;
    return (double)*out == j->valuedouble;
}

/* data: NULL where only the header is read. */
static int read_entry(const char *path, const cJSON *j, int64_t data_bytes, const char *data,
                      dkv_st_tensor *t, dkv_err *err) {
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(j, "dtype"), *d;
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(j, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(j, "data_offsets");
    const char *name = j->string;
    int64_t from, to, bytes;
    if (!*name || strlen(name) >= sizeof t->name)
        return dkv_fail(err, DKV_EUSER, "%s: tensor name '%.40s' is empty or too long", path, name);
    strcpy(t->name, name);
    if (!cJSON_IsString(dtype) || !dtype_bytes(dtype->valuestring))
        return dkv_fail(err, DKV_EUSER, "%s: tensor '%s': unknown dtype", path, name);
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype->valuestring);
    if (!cJSON_IsArray(shape) || cJSON_GetArraySize(shape) > 8)
        return dkv_fail(err, DKV_EUSER, "%s: tensor '%s': shape is not a list of at most 8 sizes", path,
                        name);
    cJSON_ArrayForEach(d, shape) if (!whole(d, &t->shape[t->ndim++])) return dkv_fail(
        err, DKV_EUSER, "%s: tensor '%s': a size in shape is not a whole number", path, name);
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !whole(offsets->child, &from) ||
        !whole(offsets->child->next, &to))
        return dkv_fail(err, DKV_EUSER, "%s: tensor '%s': data_offsets are not two whole numbers", path,
                        name);
    if (from > to || to > data_bytes)
        return dkv_fail(err, DKV_EUSER,
                        "%s: tensor '%s': data_offsets %" PRId64 "..%" PRId64
                        " are outside the file's %" PRId64 " bytes of data",
                        path, name, from, to, data_bytes);
    if (!tensor_bytes(t, &bytes))
        return dkv_fail(err, DKV_EUSER, "%s: tensor '%s': the product of its shape overflows", path, name);
    if (bytes != to - from)
        return dkv_fail(err, DKV_EUSER,
                        "%s: tensor '%s': shape and dtype need %" PRId64 " bytes, data_offsets give %" PRId64,
                        path, name, bytes, to - from);
    if (from % dtype_bytes(t->dtype))
        return dkv_fail(err, DKV_EUSER, "%s: tensor '%s': its data are not aligned", path, name);
    t->data = data ? data + from : NULL;
    t->offset = from;
    t->bytes = bytes;
    return 0;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const dkv_st_tensor *)a)->name, ((const dkv_st_tensor *)b)->name);
}

static int by_data(const void *a, const void *b) {
    const dkv_st_tensor *x = *(const dkv_st_tensor *const *)a, *y = *(const dkv_st_tensor *const *)b;
    int64_t p = x->offset, q = y->offset;
    return p != q ? (p > q) - (p < q) : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* No name twice, and the data are tiled by the tensors without overlap or hole. Sorts the tensors by name. */
static int check_tiling(const char *path, const dkv_st_file *f, int64_t data_bytes, dkv_err *err) {
    const dkv_st_tensor **order = malloc(((size_t)f->n_tensors + 1) * sizeof *order);
    int64_t at = 0;
    int code = 0;
    if (!order) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    qsort(f->tensors, (size_t)f->n_tensors, sizeof *f->tensors, by_name);
    for (int i = 0; i < f->n_tensors; i++) order[i] = &f->tensors[i];
    for (int i = 1; i < f->n_tensors && !code; i++)
        if (!strcmp(f->tensors[i].name, f->tensors[i - 1].name))
            code = dkv_fail(err, DKV_EUSER, "%s: tensor '%s' is there twice", path, f->tensors[i].name);
    qsort(order, (size_t)f->n_tensors, sizeof *order, by_data);
    for (int i = 0; i < f->n_tensors && !code; i++) {
        int64_t data = order[i]->offset;
        if (data < at)
            code = dkv_fail(err, DKV_EUSER, "%s: tensor '%s' overlaps another", path, order[i]->name);
        else if (data > at)
            code = dkv_fail(err, DKV_EUSER, "%s: %" PRId64 " bytes before tensor '%s' belong to no tensor", path,
                            data - at, order[i]->name);
        at = data + order[i]->bytes;
    }
    if (!code && at != data_bytes)
        code = dkv_fail(err, DKV_EUSER, "%s: %" PRId64 " bytes at its end belong to no tensor", path,
                        data_bytes - at);
    free(order);
    return code;
}

static int read_metadata(const char *path, const cJSON *meta, dkv_st_file *f, dkv_err *err) {
    const cJSON *j;
    int n = cJSON_GetArraySize(meta);
    if (!cJSON_IsObject(meta) || f->meta_keys || n > METADATA_MAX)
        return dkv_fail(err, DKV_EUSER, "%s: " METADATA " is not one map of strings", path);
    f->meta_keys = calloc((size_t)n + 1, sizeof *f->meta_keys);
    f->meta_values = calloc((size_t)n + 1, sizeof *f->meta_values);
    if (!f->meta_keys || !f->meta_values) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    cJSON_ArrayForEach(j, meta) {
        if (!cJSON_IsString(j))
            return dkv_fail(err, DKV_EUSER, "%s: metadata '%.40s' is not a string", path, j->string);
        if (dkv_findMeta(f, j->string))
            return dkv_fail(err, DKV_EUSER, "%s: metadata '%.40s' is there twice", path, j->string);
        f->meta_keys[f->n_meta] = strdup(j->string);
        f->meta_values[f->n_meta] = strdup(j->valuestring);
        if (!f->meta_keys[f->n_meta] || !f->meta_values[f->n_meta++])
            return dkv_fail(err, DKV_EHARNESS, "out of memory");
    }
    return 0;
}

static int read_header(const char *path, const char *text, size_t n, int64_t data_bytes, dkv_st_file *f,
                       dkv_err *err) {
    const char *end = NULL;
    const cJSON *j;
    cJSON *root = NULL;
    int code = 0;
    /* The JSON reader would end a name at a NUL, and so see another name than is written. */
    if (memchr(text, 0, n) || memmem(text, n, "\\u0000", 6))
        return dkv_fail(err, DKV_EUSER, "%s: a NUL in the header", path);
    root = cJSON_ParseWithLengthOpts(text, n, &end, false);
    while (root && end < text + n && *end == ' ') end++;
    if (!cJSON_IsObject(root) || end != text + n) {
        code = dkv_fail(err, DKV_EUSER, "%s: the header is not a JSON object (at byte %td)", path,
                        8 + (root && end ? end - text : 0));
        goto done;
    }
    int count = cJSON_GetArraySize(root);
    if (count > TENSORS_MAX) {
        code = dkv_fail(err, DKV_EUSER, "%s: more than %d tensors", path, TENSORS_MAX);
        goto done;
    }
    f->tensors = calloc((size_t)count + 1, sizeof *f->tensors);
    if (!f->tensors) code = dkv_fail(err, DKV_EHARNESS, "out of memory");
    for (j = root->child; j && !code; j = j->next) {
        if (!strcmp(j->string, METADATA))
            code = read_metadata(path, j, f, err);
        else
            code = read_entry(path, j, data_bytes, f->buffer, &f->tensors[f->n_tensors++], err);
    }
    if (!code) code = check_tiling(path, f, data_bytes, err);
done:
    cJSON_Delete(root);
    return code;
}

static bool read_all(int fd, void *to, size_t n) {
    char *p = to;
    while (n) {
        ssize_t got = read(fd, p, n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        p += got;
        n -= (size_t)got;
    }
    return true;
}

static int read_file(const char *path, int flags, bool data, dkv_st_file *out, dkv_err *err) {
    unsigned char length[8];
    uint64_t n = 0;
    char *text = NULL;
    struct stat st;
    int code = 0, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
    *out = (dkv_st_file){0};
    if (fd < 0) return dkv_fail(err, DKV_EUSER, "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        code = dkv_fail(err, DKV_EUSER, "%s: not a regular file", path);
        goto done;
    }
    if (st.st_size < 10 || !read_all(fd, length, 8)) {
        code = dkv_fail(err, DKV_EUSER, "%s: too short for a safetensors file", path);
        goto done;
    }
    for (int i = 7; i >= 0; i--) n = n << 8 | length[i];
    if (n > (uint64_t)st.st_size - 8 || n > HEADER_MAX) {
        code = dkv_fail(err, DKV_EUSER, "%s: the header's length, %" PRIu64 " bytes, is beyond %s", path, n,
                        n > HEADER_MAX ? "100 MiB" : "the file");
        goto done;
    }
    int64_t data_bytes = st.st_size - 8 - (int64_t)n;
    text = malloc((size_t)n + 1);
    if (data) out->buffer = malloc((size_t)data_bytes + 1);
    if (!text || (data && !out->buffer))
        code = dkv_fail(err, DKV_EHARNESS, "out of memory for the %" PRId64 " bytes of %s",
                        (int64_t)st.st_size, path);
    else if (!read_all(fd, text, (size_t)n) || (data && !read_all(fd, out->buffer, (size_t)data_bytes)))
        code = dkv_fail(err, DKV_EUSER, "%s: could not be read to its end", path);
    else
        code = read_header(path, text, (size_t)n, data_bytes, out, err);
done:
    close(fd);
    free(text);
    if (code) dkv_freeSafetensors(out);
    return code;
}

int dkv_readSafetensors(const char *path, dkv_st_file *out, dkv_err *err) {
    return read_file(path, 0, true, out, err);
}

int dkv_readTensorsOf(const char *path, bool data, dkv_st_file *out, dkv_err *err) {
    return read_file(path, O_NOFOLLOW, data, out, err);
}

void dkv_freeSafetensors(dkv_st_file *f) {
    if (!f) return;
    for (int i = 0; i < f->n_meta; i++) {
        free(f->meta_keys[i]);
        free(f->meta_values[i]);
    }
    free(f->meta_keys);
    free(f->meta_values);
    free(f->tensors);
    free(f->buffer);
    *f = (dkv_st_file){0};
}

const dkv_st_tensor *dkv_findTensor(const dkv_st_file *f, const char *name) {
    for (int i = 0; i < f->n_tensors; i++)
        if (!strcmp(f->tensors[i].name, name)) return &f->tensors[i];
    return NULL;
}

const char *dkv_findMeta(const dkv_st_file *f, const char *key) {
    for (int i = 0; i < f->n_meta; i++)
        if (!strcmp(f->meta_keys[i], key)) return f->meta_values[i];
    return NULL;
}

/* ---- writing ---- */

/* The k-th tensor of the file: larger elements first, so that all are aligned. */
static const dkv_st_tensor *in_order(const dkv_st_tensor *t, int n, int k) {
    for (int size = 8; size; size /= 2)
        for (int i = 0; i < n; i++)
            if (dtype_bytes(t[i].dtype) == size && k-- == 0) return &t[i];
    return NULL;
}

static char *make_header(const dkv_st_tensor *t, int n, const char *const *keys, const char *const *values,
                         int n_meta) {
    cJSON *root = cJSON_CreateObject(), *meta = n_meta ? cJSON_AddObjectToObject(root, METADATA) : NULL;
    bool good = root && (!n_meta || meta);
    double at = 0;
    for (int i = 0; good && i < n_meta; i++) good = cJSON_AddStringToObject(meta, keys[i], values[i]);
    for (int k = 0; good && k < n; k++) {
        const dkv_st_tensor *x = in_order(t, n, k);
        double ends[2] = {at, at + (double)x->bytes}, shape[8];
        for (int i = 0; i < x->ndim; i++) shape[i] = (double)x->shape[i];
        cJSON *entry = cJSON_AddObjectToObject(root, x->name);
        good = entry && cJSON_AddStringToObject(entry, "dtype", x->dtype) &&
               cJSON_AddItemToObject(entry, "shape", cJSON_CreateDoubleArray(shape, x->ndim)) &&
               cJSON_AddItemToObject(entry, "data_offsets", cJSON_CreateDoubleArray(ends, 2));
        at = ends[1];
    }
    char *text = good ? cJSON_PrintUnformatted(root) : NULL;
    cJSON_Delete(root);
    return text;
}

int dkv_writeSafetensors(const char *path, const dkv_st_tensor *tensors, int n_tensors,
                         const char *const *meta_keys, const char *const *meta_values, int n_meta,
                         dkv_err *err) {
    char *temporary = NULL, *text = NULL;
    FILE *f = NULL;
    int fd = -1, code = 0;
    for (int i = 0; i < n_tensors; i++) {
        int64_t bytes;
        if (tensors[i].ndim < 0 || tensors[i].ndim > 8 || !tensor_bytes(&tensors[i], &bytes) ||
            bytes != tensors[i].bytes)
            return dkv_fail(err, DKV_EHARNESS, "%s: tensor '%s': shape, dtype and bytes disagree", path,
                            tensors[i].name);
    }
    text = make_header(tensors, n_tensors, meta_keys, meta_values, n_meta);
    if (!text || asprintf(&temporary, "%s.XXXXXX", path) < 0) {
        temporary = NULL;
        code = dkv_fail(err, DKV_EHARNESS, "out of memory");
        goto done;
    }
    size_t n = strlen(text), padded = (n + 7) / 8 * 8;
    unsigned char length[8];
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)(padded >> 8 * i);
    if ((fd = mkstemp(temporary)) < 0 || fchmod(fd, 0644) || !(f = fdopen(fd, "wb"))) {
        code = dkv_fail(err, DKV_EUSER, "%s: cannot be written: %s", path, strerror(errno));
        goto done;
    }
    fd = -1; /* f's now */
    fwrite(length, 1, 8, f);
    fprintf(f, "%s%*s", text, (int)(padded - n), "");
    for (int k = 0; k < n_tensors; k++) {
        const dkv_st_tensor *x = in_order(tensors, n_tensors, k);
        if (x->bytes) fwrite(x->data, 1, (size_t)x->bytes, f);
    }
    bool bad = ferror(f);
    bad |= fclose(f) != 0;
    f = NULL;
    if (bad || dkv_replaceFile(temporary, path)) {
        code = dkv_fail(err, DKV_EUSER, "%s: cannot be written: %s", path, strerror(errno));
        goto done;
    }
    free(temporary);
    temporary = NULL;
done:
    if (fd >= 0) close(fd);
    if (temporary) unlink(temporary);
    free(temporary);
    cJSON_free(text);
    return code;
}
