/* safetensors.h: reading and writing safetensors files. Hostile files are refused with one line: every offset, size,
 * shape product and dtype is checked against the file before anything is read. JSON by cJSON. */
#ifndef DKV_SAFETENSORS_H
#define DKV_SAFETENSORS_H

#include <stdbool.h>
#include <stdint.h>

#include "../ref/dkv_err.h"

typedef struct dkv_st_tensor {
    char name[128];
    char dtype[8]; /* "BF16", "F16", "F32", ... as the file says */
    int ndim;
    int64_t shape[8];
    const void *data; /* into the file's buffer; NULL where only the header was read */
    int64_t bytes, offset; /* offset: of the data; not for writing */
} dkv_st_tensor;

typedef struct dkv_st_file {
    void *buffer;
    int n_tensors;
    dkv_st_tensor *tensors;
    int n_meta;
    char **meta_keys, **meta_values;
} dkv_st_file;

int dkv_readSafetensors(const char *path, dkv_st_file *out, dkv_err *err);
/* The same without following a symbolic link, and, unless `data`, the header alone (all of it checked). */
int dkv_readTensorsOf(const char *path, bool data, dkv_st_file *out, dkv_err *err);
void dkv_freeSafetensors(dkv_st_file *f);
const dkv_st_tensor *dkv_findTensor(const dkv_st_file *f, const char *name);
const char *dkv_findMeta(const dkv_st_file *f, const char *key);
/* Writes atomically (temporary file, rename). */
int dkv_writeSafetensors(const char *path, const dkv_st_tensor *tensors, int n_tensors, const char *const *meta_keys,
                         const char *const *meta_values, int n_meta, dkv_err *err);
#endif
