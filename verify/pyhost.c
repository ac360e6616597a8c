#include "pyhost.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guard.h"
#include "status.h"
#include "worker.h"

#define LIBRARY "libdualkv.so"

extern char **environ;

int dkv_findPackage(char *path, size_t n) {
    static const char *const places[] = {"python", "../share/dualkv/python", "../.."};
    char marker[PATH_MAX];
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(marker, sizeof marker, "%s/dualkv/worker.py", places[i]);
        if (!dkv_findBeside(marker, path, n)) continue;
        path[strlen(path) - strlen("/dualkv/worker.py")] = 0;
        return 1;
    }
    return 0;
}

/* Field `n` of a row "a | b | c", without the spaces around it. */
static void takeField(const char *row, int n, char *out, size_t size) {
    for (; n > 0 && row; n--) row = strchr(row, '|') ? strchr(row, '|') + 1 : NULL;
    row = row ? row + strspn(row, " ") : "";
    size_t len = strcspn(row, "|\n");
    while (len > 0 && row[len - 1] == ' ') len--;
    snprintf(out, size, "%.*s", (int)len, row);
}

int dkv_listConvention(int i, dkv_convention *out) {
    char path[PATH_MAX], row[512];
    if (!dkv_findPackage(path, sizeof path - 32)) return 0;
    strcat(path, "/dualkv/conventions.txt");
    FILE *f = fopen(path, "re");
    int found = 0;
    while (f && !found && fgets(row, sizeof row, f)) {
        if (row[0] == '#' || row[0] == '\n' || i-- > 0) continue;
        takeField(row, 0, out->name, sizeof out->name);
        takeField(row, 1, out->layout, sizeof out->layout);
        takeField(row, 3, out->doc, sizeof out->doc);
        found = 1;
    }
    if (f) fclose(f);
    return found;
}

enum { CONVENTIONS_MAX = 32 };

int dkv_checkConvention(const char *name, dkv_err *err) {
    dkv_convention known[CONVENTIONS_MAX];
    const char *names[CONVENTIONS_MAX];
    int n = 0;
    while (n < CONVENTIONS_MAX && dkv_listConvention(n, &known[n])) {
        names[n] = known[n].name;
        if (strcmp(known[n++].name, name) == 0) return 0;
    }
    if (!n) return dkv_fail(err, DKV_EUSER, "no convention is known: the Python package is not beside the program");
    const char *near = dkv_nearestWord(name, names, (size_t)n);
    return dkv_fail(err, DKV_EUSER, "unknown convention '%.80s'%s%s%s", name,
                    near ? ": did you mean '" : ": see `dualkv list conventions`", near ? near : "", near ? "'?" : "");
}

/* ---- the interpreter ---- */

static char interpreter[PATH_MAX], trouble[300];
static pthread_once_t once = PTHREAD_ONCE_INIT;

enum { PATIENCE_MS = 20000 }; /* an import of numpy takes a tenth of a second, from a slow disk a few */

/* Its exit status; -1 where it did not end in time, or we were interrupted: then it is killed. */
static int awaitExit(pid_t pid) {
    int status = -1;
    for (int ms = 0; ms < PATIENCE_MS && !dkv_stopRequested; ms += 2) {
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid) return status;
        if (got < 0 && errno != EINTR) return -1;
        nanosleep(&(struct timespec){0, 2000000}, NULL);
    }
    kill(pid, SIGKILL);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) continue;
    return -1;
}

/* Can it import numpy? */
static int canServe(const char *program) {
    char *argv[] = {(char *)program, "-c", "import numpy", NULL};
    posix_spawn_file_actions_t files;
    pid_t pid;
    posix_spawn_file_actions_init(&files);
    for (int fd = 0; fd <= 2; fd++)
        posix_spawn_file_actions_addopen(&files, fd, "/dev/null", fd ? O_WRONLY : O_RDONLY, 0);
    dkv_lockChildren();
    int rc = posix_spawnp(&pid, program, &files, NULL, argv, environ);
    if (!rc) dkv_addChild(pid);
    dkv_unlockChildren();
    posix_spawn_file_actions_destroy(&files);
    if (rc) return 0;
    const int status = awaitExit(pid);
    dkv_dropChild(pid); /* and what it left behind */
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void choosePython(void) {
    static const char *const usual[] = {"python3", "/usr/bin/python3"};
    const char *named = getenv("DUALKV_PYTHON");
    if (named && named[0]) {
        snprintf(interpreter, sizeof interpreter, "%s", named);
        if (canServe(named)) return;
        interpreter[0] = 0;
        snprintf(trouble, sizeof trouble, "DUALKV_PYTHON=%.150s cannot be run, or does not import numpy", named);
        return;
    }
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++)
        if (canServe(usual[i])) {
            snprintf(interpreter, sizeof interpreter, "%s", usual[i]);
            return;
        }
    snprintf(trouble, sizeof trouble, "no python3 that can import numpy (DUALKV_PYTHON names another)");
}

int dkv_findPython(const char **program, dkv_err *err) {
    pthread_once(&once, choosePython);
    if (!interpreter[0]) return dkv_fail(err, DKV_EUSER, "%s", trouble);
    *program = interpreter;
    return 0;
}

/* ---- the command ---- */

/* The environment with `n` entries replaced or added. */
static char **changeEnvironment(char *const *entries, int n) {
    size_t have = 0, kept = 0;
    while (environ[have]) have++;
    char **out = calloc(have + (size_t)n + 1, sizeof *out);
    for (size_t i = 0; out && i < have; i++) {
        int replaced = 0;
        for (int k = 0; k < n; k++)
            replaced |= entries[k] && strncmp(environ[i], entries[k], strcspn(entries[k], "=") + 1) == 0;
        if (!replaced) out[kept++] = environ[i];
    }
    for (int k = 0; out && k < n; k++)
        if (entries[k]) out[kept++] = entries[k];
    return out;
}

int dkv_makePythonCommand(const dkv_kernel_spec *spec, const char *fd_word, dkv_command_line *out, dkv_err *err) {
    char package[PATH_MAX] = "", library[PATH_MAX] = "";
    const char *program, *before = getenv("PYTHONPATH");
    memset(out, 0, sizeof *out);
    if (dkv_findPython(&program, err)) return DKV_EUSER;
    if (dkv_findPackage(package, sizeof package) &&
        asprintf(&out->owned[0], "PYTHONPATH=%s%s%s", package, before && before[0] ? ":" : "", before ? before : "") < 0)
        out->owned[0] = NULL;
    if (dkv_findBeside(LIBRARY, library, sizeof library) && asprintf(&out->owned[1], "DUALKV_LIBRARY=%s", library) < 0)
        out->owned[1] = NULL;
    /* As many workers run as there are cores, unless told otherwise. */
    if (!getenv("OMP_NUM_THREADS")) out->owned[2] = strdup("OMP_NUM_THREADS=1");
    out->owned[3] = strdup("PYTHONSAFEPATH=1"); /* the folder that the user stands in is not a place of modules */
    out->envp = changeEnvironment(out->owned, 4);
    if (!out->envp) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    const char *const argv[] = {program, "-m", "dualkv.worker", fd_word, spec->path, spec->name, spec->options};
    for (size_t i = 0; i < sizeof argv / sizeof *argv; i++) out->argv[i] = (char *)argv[i];
    return 0;
}

void dkv_freeCommandLine(dkv_command_line *c) {
    for (size_t i = 0; i < sizeof c->owned / sizeof *c->owned; i++) free(c->owned[i]);
    free(c->envp);
    memset(c, 0, sizeof *c);
}
