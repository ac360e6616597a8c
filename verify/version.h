/* version.h: what was built, by what. */
#ifndef DKV_VERSION_H
#define DKV_VERSION_H

const char *dkv_version(void);  /* "0.1.0" */
const char *dkv_commit(void);   /* commit of the sources, "-dirty" where they were changed */
const char *dkv_compiler(void); /* "gcc 12.2.0" */
const char *dkv_flags(void);    /* of the compiler, warnings left out */
const char *dkv_libraries(void); /* OpenBLAS with its configuration, cJSON, libc: as loaded now */
/* When this process first asked: "2026-01-31T12:00:00Z". */
const char *dkv_startTime(void);
/* The processor, one line, from /proc/cpuinfo ("cpu" where it does not say). */
const char *dkv_hostDevice(void);
int dkv_hostCores(void); /* that this process may use */

#endif
