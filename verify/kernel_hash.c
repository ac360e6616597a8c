#include "kernel_hash.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

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

/* What tells a file that was left alone, without reading it. */
typedef struct stamp {
    dev_t device;
    ino_t inode;
    off_t size;
    struct timespec modified, changed;
} stamp;

typedef struct pin {
    char spec[DKV_SPEC_MAX], hex[65];
    stamp at;
} pin;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pin kept[KEPT];
static int n_kept;

/* Of the file that a spec names; zeros: there is none. */
static stamp readStamp(const char *text) {
    dkv_kernel_spec spec;
    dkv_err err = {0};
    struct stat s;
    stamp out;
    memset(&out, 0, sizeof out);
    if (dkv_parseKernelSpec(text, &spec, &err) || !spec.path[0] || spec.kind == DKV_SPEC_FILES || stat(spec.path, &s) != 0) return out;
    out.device = s.st_dev;
    out.inode = s.st_ino;
    out.size = s.st_size;
    out.modified = s.st_mtim;
    out.changed = s.st_ctim;
    return out;
}

static bool isSame(const stamp *a, const stamp *b) {
    return a->device == b->device && a->inode == b->inode && a->size == b->size && a->modified.tv_sec == b->modified.tv_sec &&
           a->modified.tv_nsec == b->modified.tv_nsec && a->changed.tv_sec == b->changed.tv_sec &&
           a->changed.tv_nsec == b->changed.tv_nsec;
}

/* The spec's row, made where there is none; NULL: no room. Called with the lock held, as is: */
static pin *findPin(const char *spec, bool *fresh) {
    int i = 0;
    while (i < n_kept && strcmp(kept[i].spec, spec) != 0) i++;
    *fresh = i == n_kept;
    if (i == KEPT) return NULL;
    if (*fresh) snprintf(kept[n_kept++].spec, sizeof kept[0].spec, "%s", spec);
    return &kept[i];
}

static void takeFile(pin *p) {
    p->at = readStamp(p->spec); /* before it is read: what is written meanwhile is seen as a change */
    hashSpec(p->spec, p->hex);
}

const char *dkv_kernelHash(const char *spec) {
    bool fresh;
    pthread_mutex_lock(&lock);
    pin *p = findPin(spec, &fresh);
    if (p && fresh) takeFile(p);
    pthread_mutex_unlock(&lock);
    return p ? p->hex : "";
}

void dkv_pinKernel(const char *spec) {
    bool fresh;
    pthread_mutex_lock(&lock);
    pin *p = findPin(spec, &fresh);
    if (p) takeFile(p);
    pthread_mutex_unlock(&lock);
}

bool dkv_isKernelChanged(const char *spec, char *words, size_t n) {
    bool fresh, changed = false;
    words[0] = 0;
    pthread_mutex_lock(&lock);
    pin *p = findPin(spec, &fresh);
    const stamp now = readStamp(spec);
    if (p && fresh) takeFile(p);
    else if (p && p->hex[0] && !isSame(&p->at, &now)) {
        char hex[65];
        const stamp none = {0};
        hashSpec(spec, hex);
        changed = strcmp(hex, p->hex) != 0 && !isSame(&p->at, &none); /* none: compiled into this program */
        if (!changed) p->at = now; /* touched */
        else if (hex[0])
            snprintf(words, n, "the kernel's file was changed during the run (SHA-256 %.12s... when it began, %.12s... now): "
                     "what it did since then is not judged", p->hex, hex);
        else snprintf(words, n, "the kernel's file cannot be read any more: what it did since then is not judged");
    }
    pthread_mutex_unlock(&lock);
    return changed;
}
