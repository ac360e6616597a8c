#include "kernel.h"

#include <dlfcn.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"
#include "status.h"

/* A row: built in, or found in a shared object that lies beside the program. */
typedef struct row {
    const char *name;
    const dualkv_kernel *kernel; /* NULL: from `plugin` */
    const char *plugin, *doc;
} row;

static const row rows[] = {
#define K(name, table) {name, &table, NULL, NULL},
    DKV_KERNELS(K)
#undef K
    {"cuda", NULL, DKV_CUDA_PLUGIN, "the CUDA kernel of this project, chosen for the device"},
    {"cuda-replicated", NULL, DKV_CUDA_PLUGIN, "the same arithmetic on the replicated layout"},
    {"cuda-fp64", NULL, DKV_CUDA_PLUGIN, "the truth in double precision on the device"},
    {"cuda-hopper", NULL, DKV_CUDA_PLUGIN, "the sm_90a kernel"},
};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

static int findUnder(const char *folder, const char *file, char *path, size_t n) {
    static const char *const folders[] = {"", "/../lib"}; /* a build folder; installed */
    for (int i = 0; i < 2; i++) {
        int wrote = snprintf(path, n, "%s%s/%s", folder, folders[i], file);
        if (wrote > 0 && (size_t)wrote < n && access(path, R_OK) == 0) return 1;
    }
    return 0;
}

int dkv_findBeside(const char *file, char *path, size_t n) {
    char exe[PATH_MAX];
    Dl_info info;
    ssize_t len = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (len > 0) {
        exe[len] = 0;
        if (findUnder(dirname(exe), file, path, n)) return 1;
    }
    if (!dladdr((const void *)rows, &info) || !info.dli_fname || !realpath(info.dli_fname, exe)) return 0;
    return findUnder(dirname(exe), file, path, n);
}

const char *dkv_listKernel(int i, const char **doc) {
    char path[DKV_SPEC_MAX];
    for (int r = 0; r < N_ROWS; r++) {
        if (!rows[r].kernel && !dkv_findBeside(rows[r].plugin, path, sizeof path)) continue;
        if (i-- > 0) continue;
        if (doc) *doc = rows[r].kernel ? rows[r].kernel->doc : rows[r].doc;
        return rows[r].name;
    }
    return NULL;
}

/* End of "….so" or "….py" in the spec, NULL if this is not a path: the first that ends, or meets ':' or '+'. */
static const char *endOfPath(const char *text, int32_t *kind) {
    for (const char *s = strchr(text, '.'); s; s = strchr(s + 1, '.')) {
        bool python = strncmp(s, ".py", 3) == 0;
        if ((!python && strncmp(s, ".so", 3) != 0) || (s[3] && s[3] != ':' && s[3] != '+')) continue;
        *kind = python ? DKV_SPEC_PYTHON : DKV_SPEC_SO;
        return s + 3;
    }
    return NULL;
}

/* "attached:FD[=WORDS]". */
static int parseAttached(const char *text, dkv_kernel_spec *out, dkv_err *err) {
    char *end;
    errno = 0;
    long fd = strtol(text, &end, 10);
    if (end == text || errno || fd < 0 || fd > INT32_MAX || (*end && *end != '='))
        return dkv_fail(err, DKV_EUSER, "kernel 'attached:%s': the number of an open socket is missing", text);
    out->kind = DKV_SPEC_ATTACHED;
    out->fd = (int32_t)fd;
    strcpy(out->name, "attached");
    if (*end == '=' && end[1]) memmove(out->text, out->text + (end + 1 - text) + strlen("attached:"), strlen(end));
    return 0;
}

static int parseOptions(const char *text, const char *at, dkv_kernel_spec *out, dkv_err *err) {
    size_t n = 0;
    while (*at) {
        at++; /* the '+' */
        size_t len = strcspn(at, "+");
        if (len == 0) return dkv_fail(err, DKV_EUSER, "kernel '%s': an option is empty at '+%s'", text, at);
        if (strcspn(at, ", \t\n") < len)
            return dkv_fail(err, DKV_EUSER, "kernel '%s': a comma or space in option '%.*s'", text, (int)len,
                            at);
        for (const char *other = at + len; *other; other += strcspn(other, "+")) { /* named again further on? */
            size_t key = strcspn(at, "=+");
            other++;
            if (strcspn(other, "=+") == key && strncmp(other, at, key) == 0)
                return dkv_fail(err, DKV_EUSER, "kernel '%s': option '%.*s' twice", text, (int)key, at);
        }
        if (n) out->options[n++] = ',';
        memcpy(out->options + n, at, len);
        n += len;
        at += len;
    }
    out->options[n] = 0;
    return 0;
}

static int unknownKernel(const dkv_kernel_spec *spec, dkv_err *err) {
    const char *names[N_ROWS];
    for (int r = 0; r < N_ROWS; r++) {
        if (!rows[r].kernel && strcmp(rows[r].name, spec->name) == 0)
            return dkv_fail(err, DKV_EHARNESS, "kernel '%s': %s is not beside the program: `make cuda` builds it, where nvcc is",
                            spec->name, rows[r].plugin);
        names[r] = rows[r].name;
    }
    const char *near = dkv_nearestWord(spec->name, names, N_ROWS);
    if (near) return dkv_fail(err, DKV_EUSER, "unknown kernel '%s': did you mean '%s'?", spec->name, near);
    return dkv_fail(err, DKV_EUSER, "unknown kernel '%s': no name of `dualkv list kernels`, no PATH.so[:NAME], no PATH.py:FUNCTION, no files:DIR",
                    spec->name);
}

/* files:DIR takes no options: all that follows is the folder. */
static int parseFiles(dkv_kernel_spec *out, dkv_err *err) {
    struct stat s;
    out->kind = DKV_SPEC_FILES;
    strcpy(out->name, "files");
    strcpy(out->path, out->text + strlen(DKV_FILES_PREFIX));
    if (!out->path[0]) return dkv_fail(err, DKV_EUSER, "kernel '%s': a folder is missing", out->text);
    if (stat(out->path, &s) != 0)
        return dkv_fail(err, DKV_EUSER, "kernel '%s': cannot read '%s': %s", out->text, out->path, strerror(errno));
    if (!S_ISDIR(s.st_mode)) return dkv_fail(err, DKV_EUSER, "kernel '%s': '%s' is not a folder", out->text, out->path);
    return 0;
}

int dkv_parseKernelSpec(const char *text, dkv_kernel_spec *out, dkv_err *err) {
    memset(out, 0, sizeof *out);
    if (strlen(text) >= sizeof out->text)
        return dkv_fail(err, DKV_EUSER, "kernel '%.40s...': longer than %d bytes", text, DKV_SPEC_MAX - 1);
    strcpy(out->text, text);
    if (strncmp(text, "attached:", 9) == 0) return parseAttached(text + 9, out, err);
    if (strncmp(text, DKV_FILES_PREFIX, strlen(DKV_FILES_PREFIX)) == 0) return parseFiles(out, err);
    const char *end = endOfPath(text, &out->kind), *name = text;
    if (end) {
        memcpy(out->path, text, (size_t)(end - text));
        name = *end == ':' ? end + 1 : end;
    }
    size_t len = strcspn(name, "+");
    if (len >= sizeof out->name)
        return dkv_fail(err, DKV_EUSER, "kernel '%.40s...': a name longer than %zu bytes", name,
                        sizeof out->name - 1);
    if (len == 0 && out->kind == DKV_SPEC_PYTHON)
        return dkv_fail(err, DKV_EUSER, "kernel '%s': which function? %s:FUNCTION", text, out->path);
    if (len == 0 && (!end || *end == ':'))
        return dkv_fail(err, DKV_EUSER, "kernel '%s': a name is missing", text);
    memcpy(out->name, name, len);
    if (parseOptions(text, name + len, out, err)) return DKV_EUSER;
    if (end) {
        if (access(out->path, R_OK) != 0)
            return dkv_fail(err, DKV_EUSER, "kernel '%s': cannot read '%s': %s", text, out->path,
                            strerror(errno));
        struct stat s;
        if (out->kind == DKV_SPEC_PYTHON && (stat(out->path, &s) || !S_ISREG(s.st_mode)))
            return dkv_fail(err, DKV_EUSER, "kernel '%s': '%s' is not a file", text, out->path);
        return 0;
    }
    for (int r = 0; r < N_ROWS; r++) {
        if (strcmp(rows[r].name, out->name) != 0) continue;
        if (rows[r].kernel || dkv_findBeside(rows[r].plugin, out->path, sizeof out->path)) return 0;
        break;
    }
    return unknownKernel(out, err);
}

/* ---- the worker's side: code of the kernel runs from here on ---- */

static int validate(const char *label, const dualkv_kernel *k, dualkv_kernel *copy, dkv_err *err) {
    const size_t least = offsetof(dualkv_kernel, launches); /* everything of ABI 1 before the optional last */
    if (k->size < least || k->size > 65536)
        return dkv_fail(err, DKV_EUSER, "kernel '%s': its table says size %u; ABI %u needs at least %zu",
                        label, k->size, DUALKV_ABI, least);
    if (k->abi != DUALKV_ABI)
        return dkv_fail(err, DKV_EUSER, "kernel '%s': speaks ABI %u, this program ABI %u", label, k->abi,
                        DUALKV_ABI);
    memset(copy, 0, sizeof *copy);
    memcpy(copy, k, k->size < sizeof *copy ? k->size : sizeof *copy);
    const char *missing = !copy->name      ? "name"
                          : !copy->open    ? "open"
                          : !copy->close   ? "close"
                          : !copy->refuses ? "refuses"
                          : !copy->forward ? "forward"
                                           : NULL;
    if (missing) return dkv_fail(err, DKV_EUSER, "kernel '%s': %s is NULL in its table", label, missing);
    if (copy->memory != DUALKV_HOST && copy->memory != DUALKV_CUDA)
        return dkv_fail(err, DKV_EUSER, "kernel '%s': unknown memory space %d", label, copy->memory);
    if (copy->absent & ~0x3F)
        return dkv_fail(err, DKV_EUSER, "kernel '%s': absent outputs 0x%x: there are six, bits 0 to 5", label,
                        (unsigned)copy->absent);
    int32_t a = copy->alignment;
    if (a < 1 || a > 4096 || (a & (a - 1)))
        return dkv_fail(err, DKV_EUSER, "kernel '%s': alignment %d is not a power of two up to 4096",
                        label, a);
    return 0;
}

/* The table of the shared object that the spec names. */
static int loadTable(const dkv_kernel_spec *spec, dkv_kernel *out, const dualkv_kernel **found,
                     dkv_err *err) {
    char path[DKV_SPEC_MAX + 2];
    snprintf(path, sizeof path, "%s%s", strchr(spec->path, '/') ? "" : "./", spec->path);
    out->so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!out->so) return dkv_fail(err, DKV_EUSER, "kernel '%s': cannot load: %s", spec->text, dlerror());
    dualkv_kernels_fn entry;
    *(void **)&entry = dlsym(out->so, DUALKV_KERNELS_SYMBOL);
    if (!entry)
        return dkv_fail(err, DKV_EUSER, "kernel '%s': the shared object has no symbol '%s'", spec->text,
                        DUALKV_KERNELS_SYMBOL);
    int count = 0;
    const dualkv_kernel *const *list = entry(DUALKV_ABI, &count);
    if (!list)
        return dkv_fail(err, DKV_EUSER, "kernel '%s': does not support ABI %u", spec->text, DUALKV_ABI);
    if (count < 1 || count > 1024)
        return dkv_fail(err, DKV_EUSER, "kernel '%s': exports %d kernels", spec->text, count);
    for (int i = 0; i < count; i++) {
        if (!list[i])
            return dkv_fail(err, DKV_EUSER, "kernel '%s': table %d of %d is NULL", spec->text, i, count);
        bool named = spec->name[0] && list[i]->name && strcmp(list[i]->name, spec->name) == 0;
        if (named || (!spec->name[0] && count == 1)) *found = list[i];
    }
    if (*found) return 0;
    const char *first = list[0]->name ? list[0]->name : "?";
    if (!spec->name[0])
        return dkv_fail(err, DKV_EUSER, "kernel '%s': exports %d kernels; name one, as in '%s:%s'",
                        spec->text, count, spec->path, first);
    return dkv_fail(err, DKV_EUSER, "kernel '%s': no kernel '%s' in it (it has '%s'%s)", spec->text,
                    spec->name, first, count > 1 ? ", ..." : "");
}

int dkv_openTable(const char *label, const dualkv_kernel *table, const char *options, dkv_kernel *out, dkv_err *err) {
    char reason[300] = "";
    int rc = validate(label, table, &out->table, err);
    if (!rc) {
        out->self = out->table.open(options, reason, sizeof reason);
        reason[sizeof reason - 1] = 0;
        if (!out->self)
            rc = dkv_fail(err, DKV_EUSER, "kernel '%s': %s", label, reason[0] ? reason : "cannot be opened");
    }
    if (rc) dkv_closeKernel(out);
    return rc;
}

int dkv_openKernel(const dkv_kernel_spec *spec, dkv_kernel *out, dkv_err *err) {
    const dualkv_kernel *found = NULL;
    memset(out, 0, sizeof *out);
    for (int r = 0; r < N_ROWS && !spec->path[0]; r++)
        if (strcmp(rows[r].name, spec->name) == 0) found = rows[r].kernel;
    int rc = spec->path[0] ? loadTable(spec, out, &found, err) : 0;
    if (!rc && !found) rc = unknownKernel(spec, err);
    if (!rc) return dkv_openTable(spec->text, found, spec->options, out, err);
    dkv_closeKernel(out);
    return rc;
}

void dkv_closeKernel(dkv_kernel *k) {
    if (k->self) k->table.close(k->self);
    if (k->so) dlclose(k->so);
    memset(k, 0, sizeof *k);
}
