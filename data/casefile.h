/* casefile.h: one case in one safetensors file, DIR/NAME.safetensors: outputs that were computed elsewhere, and, where the
 * case was captured, the inputs too.
 *
 * Metadata (strings): `line`, the problem line; `layout`, packed (the default) or replicated; `generator`, the version of
 * the input generator where it made the inputs of the line. Others are not looked at.
 *
 * Tensors, all C-contiguous; 16-bit or F32 as the line's dtype says, unless a type is given:
 *
 *     inputs   q [Tq,Hq,Dqk]  k [Tk,Hkv,Dqk]  v [Tk,Hkv,Dv]  do [Tq,Hq,Dv]  dlse [Hq,Tq] F32  sink [Hq] F32
 *     outputs  o [Tq,Hq,Dv]  lse [Hq,Tq] F32  dq, dk, dv as q, k, v  dsink [Hq] F32
 *     cu_seqlens_q, cu_seqlens_k (written by export in the replicated layout; not looked at)
 *
 * A file that has q, k or v and no `generator` is a captured case: all the inputs that its line wants are its own (and
 * finite, and packed), and its line is `fill=file:NAME`, whatever its metadata say of fill and seed. In any other file the
 * inputs are the generator's; where the file holds them as well they must be the same, bit for bit.
 * Outputs may be missing: they are not judged. Names, types and shapes that do not fit the line are refused, and so is a
 * symbolic link.
 *
 * NAME is [a-z0-9_-][a-z0-9_.-]*, at most 58 characters: no path, so nothing outside of DIR can be named by a line. DIR is
 * not part of a line: it is that of the kernel or suite `files:DIR`, of `--files DIR`, or $DUALKV_FILES. */
#ifndef DKV_CASEFILE_H
#define DKV_CASEFILE_H

#include "../ref/tensors.h"
#include "safetensors.h"

#define DKV_CASE_NAME_MAX 58
#define DKV_CASE_ENDING ".safetensors"

typedef enum dkv_case_tensor { /* inputs, then outputs in the order of dkv_tensor_id */
    DKV_CT_Q,
    DKV_CT_K,
    DKV_CT_V,
    DKV_CT_DO,
    DKV_CT_DLSE,
    DKV_CT_SINK,
    DKV_CT_O,
    DKV_CT_N = DKV_CT_O + DKV_N_OUTPUTS
} dkv_case_tensor;

typedef struct dkv_casefile {
    char name[DKV_CASE_NAME_MAX + 1];
    char line[DKV_LINE_MAX + 1]; /* canonical */
    bool own_inputs, replicated;
    dkv_st_file file;
    const dkv_st_tensor *tensor[DKV_CT_N]; /* into file; NULL: not there */
} dkv_casefile;

/* Reads and checks DIR/NAME.safetensors; without `data` its header alone. DKV_EUSER, one line, for whatever is wrong. */
int dkv_openCaseFile(const char *dir, const char *name, bool data, dkv_casefile *out, dkv_err *err);
/* The same for any path; `line`: instead of the metadata's, or NULL. */
int dkv_openCasePath(const char *path, const char *name, const char *line, bool data, dkv_casefile *out, dkv_err *err);
void dkv_closeCaseFile(dkv_casefile *f);
/* Names of the cases of a folder, sorted; *names and each of them malloc'ed. DKV_EUSER for a folder that cannot be read, a
 * name that no line can say, or no case at all. */
int dkv_listCaseFiles(const char *dir, char ***names, long *n, dkv_err *err);

/* The inputs of a problem whose fill is file:NAME, from dkv_filesDir(). Shapes must be the problem's. */
int dkv_readCaseInputs(const dkv_problem *p, const dkv_layout *l, dkv_inputs *in, dkv_err *err);
/* Writes one case, atomically; tensors of `in` and `out` that are NULL are left out, values of `out` are rounded to the
 * problem's dtype. l: packed or replicated. generator: NULL in a captured case. */
int dkv_writeCaseFile(const char *path, const char *line, const dkv_layout *l, bool replicated, const char *generator,
                      const char *made_by, const dkv_inputs *in, const dkv_outputs *out, dkv_err *err);

/* The same tensors in a file of their own, with the case's line and layout as metadata. The file must hold its data. */
int dkv_copyCaseFile(const dkv_casefile *f, const char *path, dkv_err *err);

const char *dkv_caseTensorName(dkv_case_tensor t);
bool dkv_isCaseName(const char *name, size_t n);

/* The folder of fill=file:NAME; NULL where none is named. Setting another one than before is DKV_EUSER: a line says NAME
 * alone. Set before threads and workers start (workers inherit it). */
const char *dkv_filesDir(void);
int dkv_setFilesDir(const char *dir, dkv_err *err);
#endif
