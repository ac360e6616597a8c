/* report_template.h: a page of Markdown whose numbers come from records: text that is copied, and lines that begin with `@`:
 *
 *     @records FILE.jsonl[.gz]        takes records in, as the set FILE; relative to the folder of the template
 *     @TABLE [SET...]                 a table of report_survey.h over these sets (all of them where none is named)
 *     @case SET KERNEL [WORDS] LINE   one case; WORDS (before `shape=`) must stand in its replay command
 *     @files                          the files of records, with the SHA-256 of each and how many it holds
 *
 * A line that cannot be filled is an error, so that no sentence outlives its records. */
#ifndef DKV_REPORT_TEMPLATE_H
#define DKV_REPORT_TEMPLATE_H

#include <stdio.h>

#include "../ref/dkv_err.h"

/* Writes the page to `f`. DKV_EUSER with the template's line, or the file's. */
int dkv_fillTemplate(const char *path, FILE *f, dkv_err *err);

#endif
