/* report_page.h: the report as Markdown, for a pull request and a step's summary: below 60 KiB whatever the records hold. */
#ifndef DKV_REPORT_PAGE_H
#define DKV_REPORT_PAGE_H

#include "report_gather.h"

/* `command` made the page; it is shown. */
int dkv_writePage(const dkv_gather *g, const char *path, const char *command, dkv_err *err);

#endif
