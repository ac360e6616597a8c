/* safetensors.h: reading and writing safetensors files. Hostile files are refused with one line: every offset, size,
 * shape product and dtype is checked against the file before anything is read. JSON by cJSON. */
#ifndef DKV_SAFETENSORS_H
#define DKV_SAFETENSORS_H

#include <stdint.h>

#include "../ref/dkv_err.h"

typedef struct dkv_st_tensor {
    char name[128];
    char dtype[8]; /* "BF16", "F16", "F32", ... as the file says */
    int ndim;
    int64_t shape[8];
    const void *data; /* into the file's buffer */
    int64_t bytes;
} dkv_st_tensor;

typedef struct dkv_st_file {
    void *buffer;
    int n_tensors;
    dkv_st_tensor *tensors;
    int n_meta;
    char **meta_keys, **meta_values;
} dkv_st_file;

int dkv_readSafetensors(const char *path, dkv_st_file *out, dkv_err *err);
void dkv_freeSafetensors(dkv_st_file *f);
const dkv_st_tensor *dkv_findTensor(const dkv_st_file *f, const char *name);
const char *dkv_findMeta(const dkv_st_file *f, const char *key);
/* Writes atomically (temporary file, rename). */
int dkv_writeSafetensors(const char *path, const dkv_st_tensor *tensors, int n_tensors, const char *const *meta_keys,
                         const char *const *meta_values, int n_meta, dkv_err *err);
#endif
