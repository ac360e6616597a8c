/* pyhost.h: kernels that are functions of a Python file: the interpreter, the package `dualkv` that serves them, and
 * the command of such a worker. */
#ifndef DKV_PYHOST_H
#define DKV_PYHOST_H

#include "kernel.h"

/* Folder that holds the package `dualkv`: in a build folder, installed, or around a wheel's program. 0: none. */
int dkv_findPackage(char *path, size_t n);
/* $DUALKV_PYTHON, else the first of python3 on the PATH and /usr/bin/python3 that can import numpy. Starts processes
 * once, and waits for each 20 s at most; the answer is kept. Takes the lock of the children (guard.h). DKV_EUSER where
 * none can. */
int dkv_findPython(const char **program, dkv_err *err);

/* A calling convention: a line of dualkv/conventions.txt. */
typedef struct dkv_convention {
    char name[32], layout[16], doc[200];
} dkv_convention;
/* The i-th; 0 past the end, or where there is no package. */
int dkv_listConvention(int i, dkv_convention *out);
/* Is there one of this name? DKV_EUSER, with the nearest, where not. */
int dkv_checkConvention(const char *name, dkv_err *err);

typedef struct dkv_command_line {
    char *argv[9], **envp; /* NULL-terminated */
    char *owned[4];
} dkv_command_line;
/* `PYTHON -m dualkv.worker FD FILE FUNCTION OPTIONS`, once dkv_findPython has chosen PYTHON; the environment names the package's folder and libdualkv.so. */
int dkv_makePythonCommand(const dkv_kernel_spec *spec, const char *fd_word, dkv_command_line *out, dkv_err *err);
void dkv_freeCommandLine(dkv_command_line *c);

#endif
