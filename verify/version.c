#include "version.h"

#include <cblas.h>
#include <cjson/cJSON.h>
#include <gnu/libc-version.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#ifndef DUALKV_COMMIT
#define DUALKV_COMMIT "unknown"
#endif
#ifndef DUALKV_FLAGS
#define DUALKV_FLAGS ""
#endif

const char *dkv_version(void) { return DUALKV_VERSION; }
const char *dkv_commit(void) { return DUALKV_COMMIT; }
const char *dkv_compiler(void) { return "gcc " __VERSION__; }

const char *dkv_flags(void) { return DUALKV_FLAGS; }

static char device[160] = "cpu", libraries[300], started[32];

static void readMachine(void) {
    time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc)) strftime(started, sizeof started, "%Y-%m-%dT%H:%M:%SZ", &utc);
    snprintf(libraries, sizeof libraries, "%s; cJSON %s; glibc %s", openblas_get_config(), cJSON_Version(),
             gnu_get_libc_version());
    char row[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(row, sizeof row, f)) {
        char *colon = strchr(row, ':');
        if (strncmp(row, "model name", 10) != 0 || !colon) continue;
        colon[strcspn(colon, "\n")] = 0;
        snprintf(device, sizeof device, "cpu:%s", colon + 1);
        break;
    }
    if (f) fclose(f);
}

static const char *readOnce(const char *what) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, readMachine);
    return what;
}

const char *dkv_hostDevice(void) { return readOnce(device); }
const char *dkv_libraries(void) { return readOnce(libraries); }
const char *dkv_startTime(void) { return readOnce(started); }

int dkv_hostCores(void) {
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? n : 1;
}
