#include "kernel_hash.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/sha256.h"
#include "kernel.h"

enum { KEPT = 32 }; /* specs of a run, more than --kernel takes; further ones have none */

static void hashSpec(const char *text, char hex[65]) {
    const char *path = NULL;
    dkv_kernel_spec spec;
    dkv_err err = {0};
    hex[0] = 0;
    if (dkv_parseKernelSpec(text, &spec, &err)) return;
    if (spec.path[0] && spec.kind != DKV_SPEC_FILES) path = spec.path;
    else if (spec.kind == DKV_SPEC_NAME) path = "/proc/self/exe"; /* compiled in */
    char *real = path ? realpath(path, NULL) : NULL;
    if (real && dkv_hashFile(real, hex, &err)) hex[0] = 0;
    free(real);
}

const char *dkv_kernelHash(const char *spec) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct {
        char spec[DKV_SPEC_MAX], hex[65];
    } kept[KEPT];
    static int n;
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < n && strcmp(kept[i].spec, spec) != 0) i++;
    if (i == n && n < KEPT) {
        snprintf(kept[i].spec, sizeof kept[i].spec, "%s", spec);
        hashSpec(spec, kept[i].hex);
        n++;
    }
    pthread_mutex_unlock(&lock);
    return i < KEPT ? kept[i].hex : "";
}
