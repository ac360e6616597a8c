/* files.h: the kernel `files:DIR`: outputs that were computed elsewhere, one file a case (data/casefile.h). It runs no code
 * and needs no process: the coordinator copies what the file holds into the arena, and the case is judged like any other,
 * but for checks that would have to run the kernel on something else.
 *
 * A line that no file of DIR has is refused (UNSUPPORTED). An output that the file lacks is not judged, and the result says
 * so; where that is O or a gradient, a case that shows no defect ends INCONCLUSIVE. */
#ifndef DKV_FILES_H
#define DKV_FILES_H

#include "../data/casefile.h"
#include "buffers.h"

#define DKV_FILES_PREFIX "files:"

typedef struct dkv_files {
    char *dir;
    long n;
    char **names, **lines; /* sorted by name; canonical lines */
    bool any_replicated;
    dkv_casefile open; /* of the described case; header, and data once it was launched */
    bool is_open;
} dkv_files;

/* The headers of all files, checked. DKV_EUSER: a folder or a file that will not do, two files of the same line. */
int dkv_openFiles(const char *dir, dkv_files *out, dkv_err *err);
void dkv_closeFiles(dkv_files *f);
/* Finds the case; false where no file has it. */
bool dkv_findFile(dkv_files *f, const char *line, dkv_err *err);
/* Outputs of the found case that its file lacks: bits 1 << dkv_tensor_id of those that the line has. */
int32_t dkv_absentOutputs(const dkv_files *f, bool grad, bool sink);
/* Copies the outputs of forward or backward into the arena. DKV_EUSER where the file's inputs are not the arena's. */
int dkv_launchFile(dkv_files *f, dkv_arena *a, int backward, dkv_err *err);
#endif
