#include "version.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#ifndef DUALKV_COMMIT
#define DUALKV_COMMIT "unknown"
#endif

const char *dkv_version(void) { return DUALKV_VERSION; }
const char *dkv_commit(void) { return DUALKV_COMMIT; }
const char *dkv_compiler(void) { return "gcc " __VERSION__; }

static char device[160] = "cpu";

static void readDevice(void) {
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

const char *dkv_hostDevice(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, readDevice);
    return device;
}

int dkv_hostCores(void) {
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? n : 1;
}
