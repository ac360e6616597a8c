/* kernel.h: kernels by name, and kernel specs.
 *
 *   spec := NAME option*  |  PATH.so[:NAME] option*  |  PATH.py:FUNCTION option*       option := '+' key ['=' value]
 *         | attached:FD[=WORDS]     a worker that runs already, on an inherited socket; WORDS name it in records
 *         | files:DIR               outputs that lie in files (files.h)
 *
 * Built-in kernels are rows of one table, below. A spec is parsed by the coordinator, which never runs or
 * loads foreign code; the worker process opens it (dkv_openKernel). */
#ifndef DKV_KERNEL_H
#define DKV_KERNEL_H

#include "../ref/dkv_err.h"
#include "../ref/dualkv_kernel.h"

#define DKV_SPEC_MAX 1024 /* longest spec, bytes */

typedef enum dkv_spec_kind { DKV_SPEC_NAME, DKV_SPEC_SO, DKV_SPEC_PYTHON, DKV_SPEC_ATTACHED, DKV_SPEC_FILES } dkv_spec_kind;

typedef struct dkv_kernel_spec {
    char text[DKV_SPEC_MAX];    /* as given */
    char name[64];              /* kernel or function; "" where a shared object has just one */
    char path[DKV_SPEC_MAX];    /* shared object or Python file or folder, "" for others */
    int32_t kind, fd;           /* dkv_spec_kind; the socket of an attached worker */
    char options[DKV_SPEC_MAX]; /* "bm=64,bn=64,det", as the ABI's open() wants them */
} dkv_kernel_spec;

typedef struct dkv_kernel {
    dualkv_kernel table; /* a copy: fields that an older kernel does not have are NULL */
    void *self;
    void *so;
} dkv_kernel;

/* DKV_EUSER: malformed, no such kernel (with the nearest name), no such file. */
int dkv_parseKernelSpec(const char *text, dkv_kernel_spec *out, dkv_err *err);
/* Name and one line of the i-th kernel that can be named; NULL past the end. */
const char *dkv_listKernel(int i, const char **doc);

#define DKV_CUDA_PLUGIN "libdualkv_cuda.so"
/* Path of a file beside the running program (or the library that this code is in), or in ../lib; 0 if it is not there. */
int dkv_findBeside(const char *file, char *path, size_t n);

/* Loads, validates (ABI, struct size, functions) and opens an instance. Runs the kernel's code: only in a
 * worker. */
int dkv_openKernel(const dkv_kernel_spec *spec, dkv_kernel *out, dkv_err *err);
/* The same for a table that is there already, which `label` names in messages. */
int dkv_openTable(const char *label, const dualkv_kernel *table, const char *options, dkv_kernel *out, dkv_err *err);
void dkv_closeKernel(dkv_kernel *k);

/* Built-in kernels, one row each: word of a spec, table. A file kernel_<name>.c, or ref/emu.c. */
#define DKV_KERNELS(K)                           \
    K("ref", dkv_refKernel)                      \
    K("ref-replicated", dkv_refReplicatedKernel) \
    K("emu", dkv_emuKernel)                      \
    K("emu-replicated", dkv_emuReplicatedKernel) \
    K("broken", dkv_brokenKernel)

#define K(name, table) extern const dualkv_kernel table;
DKV_KERNELS(K)
#undef K

#endif
