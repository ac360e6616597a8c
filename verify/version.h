/* version.h: what was built, by what. */
#ifndef DKV_VERSION_H
#define DKV_VERSION_H

const char *dkv_version(void);  /* "0.1.0" */
const char *dkv_commit(void);   /* commit of the sources, "-dirty" where they were changed */
const char *dkv_compiler(void); /* "gcc 12.2.0" */
/* The processor, one line, from /proc/cpuinfo ("cpu" where it does not say). */
const char *dkv_hostDevice(void);
int dkv_hostCores(void); /* that this process may use */

#endif
