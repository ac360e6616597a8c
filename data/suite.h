/* suite.h: named lists of problem lines, data/suites/NAME.txt: one line each, `#` starts a comment. */
#ifndef DKV_SUITE_H
#define DKV_SUITE_H

#include "../ref/problem.h"

typedef struct dkv_suite {
    char name[64];
    int n;
    char **lines; /* canonical lines, owned */
} dkv_suite;

/* Where suites/, corpus/ and recorded/ lie: $DUALKV_DATA, else beside the shared library that this is in, else beside the
 * program (../data, ../share/dualkv, data), else the installed folder. */
const char *dkv_dataDir(void);
/* `name`: a suite's name, "corpus" (every file of corpus/), or a path to a file of lines. Every line is parsed; an
 * error names file and line. */
int dkv_loadSuite(const char *name, dkv_suite *out, dkv_err *err);
void dkv_freeSuite(dkv_suite *s);
/* Name and first comment line of the i-th installed suite; false past the end. */
bool dkv_listSuite(int i, char name[64], char help[200]);
#endif
