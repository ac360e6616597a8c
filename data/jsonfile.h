/* jsonfile.h: a JSON file from outside, as a whole. */
#ifndef DKV_JSONFILE_H
#define DKV_JSONFILE_H

#include <cjson/cJSON.h>

#include "../ref/dkv_err.h"

#define DKV_JSONFILE_MAX ((size_t)32 << 20) /* bytes */

/* One object in UTF-8, its numbers finite, no key of an object twice, nothing behind it. DKV_EUSER, one line that names the
 * file and what is wrong, for anything else: a folder, a pipe, too large, cut off, nested too deep. Freed by the caller. */
int dkv_readJsonFile(const char *path, cJSON **out, dkv_err *err);

#endif
