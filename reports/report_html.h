/* report_html.h: one page that answers a sceptic: is it equivalent, on what evidence, what would have been seen, what was not
 * checked; then the tables. Self-contained: no script, nothing from a network. */
#ifndef DKV_REPORT_HTML_H
#define DKV_REPORT_HTML_H

#include "report_gather.h"

/* `command` made the page; it is shown. The same records make the same bytes. */
int dkv_writeHtml(const dkv_gather *g, const char *path, const char *command, dkv_err *err);

#endif
