#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../ref/clock.h"
#include "pyhost.h"
#include "guard.h"
#include "wire.h"

extern char **environ;
volatile sig_atomic_t dkv_stopRequested;

enum { CHANNEL_FD = 3, ATTACHED = -1 };
static volatile sig_atomic_t attached_lost; /* an attached worker has died, or no longer understands */

void dkv_initWorker(dkv_worker *w, const dkv_kernel_spec *spec, double timeout) {
    memset(w, 0, sizeof *w);
    w->socket = w->output = -1;
    w->spec = *spec;
    w->timeout = timeout;
}

/* ---- output of the kernel ---- */

static const char fatal[] = "Fatal Python error: ";

/* Python's report on a signal ends in the names of all modules, which would push out the frames before them. */
static void dropModules(dkv_worker *w) {
    char *report = strstr(w->tail, fatal), *modules = report ? strstr(report, "\nExtension modules: ") : NULL;
    if (!modules) return;
    w->tail_n = (size_t)(modules + 1 - w->tail);
    w->tail[w->tail_n] = 0;
    w->tail_closed = true;
}

static void keepTail(dkv_worker *w, const char *text, size_t n) {
    if (w->tail_closed && w->tail_n) return;
    w->tail_closed = false;
    if (n >= DKV_WORKER_TAIL) {
        text += n - DKV_WORKER_TAIL;
        n = DKV_WORKER_TAIL;
        w->tail_n = 0;
    }
    if (w->tail_n + n > DKV_WORKER_TAIL) {
        size_t drop = w->tail_n + n - DKV_WORKER_TAIL;
        memmove(w->tail, w->tail + drop, w->tail_n - drop);
        w->tail_n -= drop;
    }
    memcpy(w->tail + w->tail_n, text, n);
    w->tail_n += n;
    w->tail[w->tail_n] = 0;
    dropModules(w);
}

/* Takes what is in the pipe now; a kernel that prints without end must not hold us. */
static void drainOutput(dkv_worker *w) {
    char text[4096];
    for (int i = 0; i < 64 && w->output >= 0; i++) {
        ssize_t n = read(w->output, text, sizeof text);
        if (n <= 0) return;
        keepTail(w, text, (size_t)n);
    }
}

/* Words of the kernel are one line of plain text: they go into messages, terminals and records. */
static void tidy(char *text, size_t n) {
    text[n - 1] = 0;
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 32 || (unsigned char)*c > 126) *c = '?';
}

void dkv_lastOutput(const dkv_worker *w, char *out, size_t n) {
    size_t end = w->tail_n, begin;
    while (end > 0 && (w->tail[end - 1] == '\n' || w->tail[end - 1] == ' ')) end--;
    for (begin = end; begin > 0 && w->tail[begin - 1] != '\n'; begin--) continue;
    size_t len = end - begin < n - 1 ? end - begin : n - 1;
    memcpy(out, w->tail + begin, len);
    out[len] = 0;
    tidy(out, n);
}

static const char *baseName(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* A frame of Python's report, `  File "PATH", line N in NAME`, as " (FILE, line N, in NAME)"; false where it is not of `file`
 * (NULL: of any but the package's that call it). */
static bool sayFrame(const char *frame, const char *file, char *out, size_t n) {
    static const char start[] = "  File \"", ours[] = "/dualkv/"; /* the package's folder */
    char words[240];
    if (strncmp(frame, start, strlen(start))) return false;
    snprintf(words, sizeof words, "%.*s", (int)strcspn(frame + strlen(start), "\n"), frame + strlen(start));
    char *quote = strchr(words, '"'), *name = quote ? strstr(quote, " in ") : NULL;
    if (!name || words[0] == '<') return false;
    *quote = 0;
    const char *base = baseName(words);
    if (file && strcmp(base, file)) return false;
    const size_t up = sizeof ours - 1;
    if (!file && (size_t)(base - words) >= up && !strncmp(base - up, ours, up)) return false;
    snprintf(out, n, " (%.80s%.*s, %.80s)", base, (int)(name - quote - 1), quote + 1, name + 1);
    return true;
}

/* What a dead process said last, in words for a message; of Python's own report on a signal the innermost place in the
 * kernel's file (else outside of the package), and the line printed before it. */
static void sayLast(dkv_worker *w, char *out, size_t n) {
    static const char thread[] = " (most recent call first):\n";
    const char *const files[] = {baseName(w->spec.path), NULL};
    char last[200], place[200] = "";
    const char *report = strstr(w->tail, fatal), *frames = report ? strstr(report, thread) : NULL;
    for (int i = 0; i < 2 && frames && !place[0]; i++)
        for (const char *at = frames + strlen(thread); *at == ' ' && !sayFrame(at, files[i], place, sizeof place);) {
            at = strchr(at, '\n');
            if (!at++) break;
        }
    const size_t all = w->tail_n;
    if (report) w->tail_n = (size_t)(report - w->tail);
    dkv_lastOutput(w, last, sizeof last);
    w->tail_n = all;
    tidy(place, sizeof place);
    snprintf(out, n, "%s%s%s", place, last[0] ? "; it last printed: " : "", last);
}

/* ---- life ---- */

static void closeChannel(dkv_worker *w) {
    if (w->socket >= 0 && w->pid != ATTACHED) close(w->socket);
    if (w->output >= 0) close(w->output);
    w->socket = w->output = -1;
    w->pid = 0;
}

bool dkv_isFiles(const dkv_worker *w) {
    return w && w->spec.kind == DKV_SPEC_FILES;
}

/* An answer of it may still come, to a question that nobody remembers: it cannot be used again. */
static void loseAttached(dkv_worker *w) {
    attached_lost = 1;
    shutdown(w->socket, SHUT_RDWR);
}

void dkv_stopWorker(dkv_worker *w) {
    dkv_dropSpares(&w->spares);
    if (w->pid == ATTACHED) closeChannel(w);
    if (dkv_isFiles(w)) dkv_closeFiles(&w->files);
    if (w->pid <= 0) return;
    kill(-w->pid, SIGKILL); /* its process group: whatever the kernel started, too */
    kill(w->pid, SIGKILL);
    while (waitpid(w->pid, NULL, 0) < 0 && errno == EINTR) continue;
    dkv_dropChild(w->pid);
    closeChannel(w);
}

/* Reaps a worker that has closed its end, and says in words how it ended. Kills it if it lives on. */
static void bury(dkv_worker *w, const char *during) {
    int status = 0;
    pid_t got = 0;
    double give_up = dkv_now() + 1.0;
    if (w->pid == ATTACHED) {
        snprintf(w->why, sizeof w->why, "the process of the kernel ended, or garbled the harness's channel, %s", during);
        loseAttached(w);
        closeChannel(w);
        return;
    }
    while ((got = waitpid(w->pid, &status, WNOHANG)) == 0 && dkv_now() < give_up)
        nanosleep(&(struct timespec){0, 2000000}, NULL);
    drainOutput(w);
    char said[440];
    sayLast(w, said, sizeof said);
    if (got == w->pid && WIFSIGNALED(status))
        snprintf(w->why, sizeof w->why, "signal %d (%s) %s%s", WTERMSIG(status), strsignal(WTERMSIG(status)),
                 during, said);
    else if (got == w->pid && WEXITSTATUS(status) != DKV_LOST_CHANNEL)
        snprintf(w->why, sizeof w->why, "its process called exit(%d) %s%s", WEXITSTATUS(status), during,
                 said);
    else snprintf(w->why, sizeof w->why, "it closed or garbled the harness's channel %s%s", during, said);
    kill(-w->pid, SIGKILL);
    if (got != w->pid) {
        kill(w->pid, SIGKILL);
        while (waitpid(w->pid, NULL, 0) < 0 && errno == EINTR) continue;
    }
    dkv_dropChild(w->pid);
    closeChannel(w);
}

/* Was this process started as a worker? A program that then starts workers itself would never stop doing so. */
static int isWorker(void) {
    static const char own[] = "dualkv\0" DKV_WORKER_ARG;
    char words[sizeof own];
    FILE *f = fopen("/proc/self/cmdline", "r");
    size_t n = f ? fread(words, 1, sizeof words, f) : 0;
    if (f) fclose(f);
    return n == sizeof words && memcmp(words, own, n) == 0;
}

/* This program again, or the interpreter of a Python file; `channel` becomes its CHANNEL_FD. */
static int spawnLocked(dkv_worker *w, int channel, int output) {
    char word[16], exe[] = "/proc/self/exe";
    snprintf(word, sizeof word, "%d", CHANNEL_FD);
    char *own[] = {"dualkv", DKV_WORKER_ARG, word, NULL}, **argv = own, **envp = environ, *program = exe;
    dkv_command_line python = {0};
    dkv_err err = {0};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none;
    if (isWorker()) {
        snprintf(w->why, sizeof w->why, "a worker starts no workers: main() has to hand '%s FD' to dkv_serveWorker",
                 DKV_WORKER_ARG);
        return -1;
    }
    if (w->spec.kind == DKV_SPEC_PYTHON) {
        if (dkv_makePythonCommand(&w->spec, word, &python, &err)) {
            snprintf(w->why, sizeof w->why, "kernel '%.150s': %.300s", w->spec.text, err.text);
            return -1;
        }
        argv = python.argv;
        envp = python.envp;
        program = argv[0];
    }
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, output, 1);
    posix_spawn_file_actions_adddup2(&files, output, 2);
    posix_spawn_file_actions_adddup2(&files, channel, CHANNEL_FD);
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setpgroup(&attr, 0); /* Ctrl-C is for the coordinator */
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    int rc = posix_spawnp(&w->pid, program, &files, &attr, argv, envp);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    dkv_freeCommandLine(&python);
    if (rc) w->pid = 0;
    else dkv_addChild(w->pid);
    return rc;
}

static int spawn(dkv_worker *w, int channel, int output) {
    const char *program;
    dkv_err err = {0};
    if (w->spec.kind == DKV_SPEC_PYTHON) dkv_findPython(&program, &err); /* starts processes: before the lock; its trouble is said below */
    dkv_lockChildren();
    int rc = spawnLocked(w, channel, output);
    dkv_unlockChildren();
    return rc;
}

static int openChannel(dkv_worker *w) {
    int pair[2] = {-1, -1}, out[2] = {-1, -1}, rc = -1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0 || pipe2(out, O_CLOEXEC) < 0)
        goto done;
    /* dup2 onto itself would keep close-on-exec */
    if (pair[1] == CHANNEL_FD) {
        int moved = fcntl(pair[1], F_DUPFD_CLOEXEC, CHANNEL_FD + 1);
        if (moved < 0) goto done;
        close(pair[1]);
        pair[1] = moved;
    }
    if (fcntl(out[0], F_SETFL, O_NONBLOCK) < 0) goto done;
    rc = spawn(w, pair[1], out[1]);
    if (rc) goto done;
    w->socket = pair[0];
    w->output = out[0];
    pair[0] = out[0] = -1;
done:
    for (int i = 0; i < 2; i++) {
        if (pair[i] >= 0) close(pair[i]);
        if (out[i] >= 0) close(out[i]);
    }
    return rc;
}

static int attach(dkv_worker *w) {
    if (attached_lost) {
        snprintf(w->why, sizeof w->why, "the process of the kernel was lost in an earlier case, and cannot be started again");
        return -1;
    }
    if (fcntl(w->spec.fd, F_SETFD, FD_CLOEXEC) < 0) {
        snprintf(w->why, sizeof w->why, "attached:%d is no open socket", w->spec.fd);
        return -1;
    }
    w->pid = ATTACHED;
    w->socket = w->spec.fd;
    return 0;
}

/* ---- asking ---- */

static int sendRequest(const dkv_worker *w, const dkv_request *q, int arena_fd) {
    struct iovec part = {(void *)q, sizeof *q};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (arena_fd >= 0) {
        memset(&control, 0, sizeof control);
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &arena_fd, sizeof(int));
    }
    ssize_t n;
    while ((n = sendmsg(w->socket, &m, MSG_NOSIGNAL)) < 0 && errno == EINTR) continue;
    return n == (ssize_t)sizeof *q ? 0 : -1;
}

/* It ended, and what it left behind may hold the socket open. */
static bool hasEnded(const dkv_worker *w) {
    siginfo_t info = {0};
    return w->pid > 0 && waitid(P_PID, (id_t)w->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == w->pid;
}

/* Waits for the answer, drains the kernel's output, watches the clock. */
static dkv_outcome awaitReply(dkv_worker *w, const dkv_request *q, const char *during, dkv_reply *r) {
    double end = dkv_now() + w->timeout;
    for (;;) {
        struct pollfd p[2] = {{.fd = w->socket, .events = POLLIN}, {.fd = w->output, .events = POLLIN}};
        double left = end - dkv_now();
        if (dkv_stopRequested || left <= 0) {
            bool stopped = dkv_stopRequested != 0;
            if (w->pid == ATTACHED) loseAttached(w);
            dkv_stopWorker(w);
            if (stopped) snprintf(w->why, sizeof w->why, "interrupted %s", during);
            else snprintf(w->why, sizeof w->why, "no answer within %.3g s %s", w->timeout, during);
            return stopped ? DKV_W_STOPPED : DKV_W_TIMEOUT;
        }
        bool ended = hasEnded(w); /* before the poll: its last words are still heard */
        poll(p, 2, ended ? 0 : left > 0.1 ? 100 : (int)(left * 1000) + 1);
        if (p[1].revents & POLLIN) drainOutput(w);
        if (p[1].revents & (POLLHUP | POLLERR) &&
            !(p[1].revents & POLLIN)) { /* it closed stdout: its right */
            close(w->output);
            w->output = -1;
        }
        if (!(p[0].revents & (POLLIN | POLLHUP | POLLERR)) && !ended) continue;
        ssize_t n = recv(w->socket, r, sizeof *r, MSG_DONTWAIT | MSG_TRUNC);
        if (n < 0 && (errno == EAGAIN || errno == EINTR) && !ended) continue;
        if (n == (ssize_t)sizeof *r && r->magic == DKV_WIRE_MAGIC && r->sequence == q->sequence &&
            r->outcome >= DKV_W_OK && r->outcome <= DKV_W_HARNESS) {
            drainOutput(w);
            tidy(r->text, sizeof r->text);
            return (dkv_outcome)r->outcome;
        }
        bury(w, during);
        return DKV_W_CRASHED;
    }
}

static dkv_outcome ask(dkv_worker *w, dkv_request *q, int arena_fd, const char *during, dkv_reply *r) {
    q->magic = DKV_WIRE_MAGIC;
    q->sequence = ++w->sequence;
    memset(r, 0, sizeof *r);
    w->why[0] = 0;
    if (sendRequest(w, q, arena_fd)) {
        bury(w, during);
        return DKV_W_CRASHED;
    }
    dkv_outcome o = awaitReply(w, q, during, r);
    if (w->why[0] == 0 && o != DKV_W_OK) {
        r->text[sizeof r->text - 1] = 0;
        snprintf(w->why, sizeof w->why, "%s", r->text);
        if (o == DKV_W_CRASHED && w->pid == ATTACHED) loseAttached(w);
        if (o == DKV_W_CRASHED) dkv_stopWorker(w); /* it says itself that it is of no more use */
    }
    return o;
}

/* ---- files ---- */

static dkv_outcome failFiles(dkv_worker *w, const dkv_err *err) {
    snprintf(w->why, sizeof w->why, "%s", err->text);
    return err->code == DKV_EHARNESS ? DKV_W_HARNESS : DKV_W_ERROR;
}

static dkv_outcome startFiles(dkv_worker *w) {
    dkv_err err = {0};
    w->why[0] = 0;
    if (w->files.n) return DKV_W_OK;
    if (dkv_openFiles(w->spec.path, &w->files, &err)) return failFiles(w, &err);
    w->memory = DUALKV_HOST;
    w->replicated = w->files.any_replicated;
    return DKV_W_OK;
}

static dkv_outcome describeFile(dkv_worker *w, const char *line, dkv_description *out) {
    dkv_err err = {0};
    dkv_problem p;
    memset(out, 0, sizeof *out);
    dkv_outcome o = startFiles(w);
    if (o != DKV_W_OK) return o;
    snprintf(out->name, sizeof out->name, "files");
    if (!dkv_findFile(&w->files, line, &err)) {
        if (err.code != DKV_EREFUSED) return failFiles(w, &err);
        out->refused = 1;
        snprintf(out->reason, sizeof out->reason, "%.390s", err.text);
        return DKV_W_OK;
    }
    if (dkv_parseProblem(line, NULL, &p, &err)) return failFiles(w, &err);
    out->alignment = 1;
    out->replicated = w->files.open.replicated;
    out->has_backward = 1;
    out->absent = dkv_absentOutputs(&w->files, p.grad, p.sink);
    dkv_freeProblem(&p);
    return DKV_W_OK;
}

static dkv_outcome launchFiles(dkv_worker *w, const dkv_arena *a, int backward) {
    dkv_err err = {0};
    dkv_arena arena = *a;
    w->why[0] = 0;
    return dkv_launchFile(&w->files, &arena, backward, &err) ? failFiles(w, &err) : DKV_W_OK;
}

dkv_outcome dkv_startWorker(dkv_worker *w) {
    if (dkv_isFiles(w)) return startFiles(w);
    if (w->pid) return DKV_W_OK;
    w->tail_n = 0;
    w->tail[0] = w->why[0] = 0;
    int rc = w->spec.kind == DKV_SPEC_ATTACHED ? attach(w) : openChannel(w);
    if (rc && w->why[0]) return attached_lost && w->spec.kind == DKV_SPEC_ATTACHED ? DKV_W_HARNESS : DKV_W_ERROR;
    if (rc) {
        snprintf(w->why, sizeof w->why, "cannot start a worker process: %s", strerror(rc > 0 ? rc : errno));
        return DKV_W_HARNESS;
    }
    w->starts++;
    dkv_request *q = calloc(1, sizeof *q);
    dkv_reply *r = malloc(sizeof *r);
    dkv_outcome o = DKV_W_HARNESS;
    if (q && r) {
        q->op = w->oracle ? DKV_OP_ORACLE_OPEN : DKV_OP_OPEN;
        q->spec = w->spec;
        o = ask(w, q, -1, "while it was loaded", r);
        w->memory = r->description.memory;
        w->replicated = r->description.replicated;
        if (o == DKV_W_OK) w->gpu = r->gpu;
        w->gpu.name[sizeof w->gpu.name - 1] = w->gpu.capability[sizeof w->gpu.capability - 1] = 0;
        w->gpu.driver[sizeof w->gpu.driver - 1] = 0;
    }
    free(q);
    free(r);
    if (o != DKV_W_OK) dkv_stopWorker(w);
    return o;
}

static void tidyStrings(dkv_description *d) {
    tidy(d->name, sizeof d->name);
    tidy(d->doc, sizeof d->doc);
    tidy(d->reason, sizeof d->reason);
}

dkv_outcome dkv_describeCase(dkv_worker *w, const char *line, dkv_description *out) {
    if (dkv_isFiles(w)) return describeFile(w, line, out);
    dkv_request *q = calloc(1, sizeof *q);
    dkv_reply *r = malloc(sizeof *r);
    dkv_outcome o = q && r ? dkv_startWorker(w) : DKV_W_HARNESS;
    if (o == DKV_W_OK) {
        q->op = DKV_OP_DESCRIBE;
        q->overstate = w->overstate;
        snprintf(q->line, sizeof q->line, "%s", line);
        o = ask(w, q, -1, "while it was asked about the problem", r);
        *out = r->description;
        tidyStrings(out);
    }
    free(q);
    free(r);
    return o;
}

dkv_outcome dkv_launchCase(dkv_worker *w, const dkv_arena *a, int backward, double *seconds,
                           int64_t *launches, int64_t *peak) {
    if (dkv_isFiles(w)) {
        if (seconds) *seconds = 0;
        if (launches) *launches = -1;
        if (peak) *peak = 0;
        return launchFiles(w, a, backward);
    }
    dkv_request *q = calloc(1, sizeof *q);
    dkv_reply *r = malloc(sizeof *r);
    dkv_outcome o = q && r && w->pid ? DKV_W_OK : DKV_W_HARNESS;
    if (o == DKV_W_OK) {
        q->op = DKV_OP_LAUNCH;
        q->backward = backward;
        q->plan = a->plan;
        q->move = w->move && !backward;
        q->resend = w->resend && backward;
        o = ask(w, q, a->fd, backward ? "in backward" : "in forward", r);
        if (seconds) *seconds = r->seconds[0];
        if (launches) *launches = r->launches;
        if (peak) *peak = r->peak;
    }
    free(q);
    free(r);
    return o;
}

dkv_outcome dkv_timeCase(dkv_worker *w, double seconds[2], int64_t *bytes) {
    dkv_request *q = calloc(1, sizeof *q);
    dkv_reply *r = malloc(sizeof *r);
    dkv_outcome o = q && r && w->pid ? DKV_W_OK : DKV_W_HARNESS;
    if (o == DKV_W_OK) {
        q->op = DKV_OP_TIME;
        o = ask(w, q, -1, "while it was timed", r);
        for (int b = 0; b < 2; b++) seconds[b] = r->seconds[b];
        *bytes = r->peak;
    }
    free(q);
    free(r);
    return o;
}

dkv_outcome dkv_probeDevice(dkv_worker *w, char *json, size_t n) {
    dkv_request *q = calloc(1, sizeof *q);
    dkv_reply *r = malloc(sizeof *r);
    dkv_outcome o = q && r ? dkv_startWorker(w) : DKV_W_HARNESS;
    if (o == DKV_W_OK) {
        q->op = DKV_OP_PROBE;
        o = ask(w, q, -1, "while the device was probed", r);
        r->json[sizeof r->json - 1] = 0;
        snprintf(json, n, "%s", r->json);
    }
    free(q);
    free(r);
    return o;
}

dkv_outcome dkv_askOracle(dkv_worker *w, int arena_fd, int64_t bytes, double *seconds, double *flops) {
    dkv_request *q = calloc(1, sizeof *q);
    dkv_reply *r = malloc(sizeof *r);
    dkv_outcome o = q && r ? dkv_startWorker(w) : DKV_W_HARNESS;
    if (o == DKV_W_OK) {
        q->op = DKV_OP_ORACLE;
        q->bytes = bytes;
        o = ask(w, q, arena_fd, "while it was asked", r);
        *seconds = r->seconds[0];
        *flops = r->flops;
    }
    free(q);
    free(r);
    return o;
}
