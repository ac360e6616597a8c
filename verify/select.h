/* select.h: which cases a command line asks for. */
#ifndef DKV_SELECT_H
#define DKV_SELECT_H

#include "session.h"

typedef struct dkv_selection {
    char **lines; /* canonical, owned */
    long n, from_suites; /* from_suites: lines that came with a suite or a file of lines */
    char **kernels; /* of each line where a record named one, else NULL */
} dkv_selection;

/* Words are problem lines (quoted, or as several key=value words), suites, files of lines, files:DIR. */
int dkv_selectWords(const char *const *words, int n, dkv_selection *out, dkv_err *err);
/* For replay: also files of records. */
int dkv_selectFile(const char *path, dkv_selection *out, dkv_err *err);
/* Adds to the seed of every line. */
int dkv_reseedSelection(dkv_selection *s, uint64_t add, dkv_err *err);
/* Takes the gradients out of every line; lines that become the same stay once. */
int dkv_forwardSelection(dkv_selection *s, dkv_err *err);
void dkv_freeSelection(dkv_selection *s);

#endif
