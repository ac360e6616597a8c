#include "bisect_proc.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../ref/clock.h"
#include "guard.h"
#include "worker.h"

extern char **environ;

enum { CHUNK = 1 << 16, LOOK_MS = 50 };

/* The last bytes of a stream. */
typedef struct tail {
    char text[2 * DKV_LASTS_MAX];
    size_t n;
} tail;

static void addTail(tail *t, const char *text, size_t n) {
    if (n > DKV_LASTS_MAX) {
        text += n - DKV_LASTS_MAX;
        n = DKV_LASTS_MAX;
    }
    if (t->n + n > sizeof t->text) {
        size_t keep = DKV_LASTS_MAX - n;
        if (keep > t->n) keep = t->n;
        memmove(t->text, t->text + t->n - keep, keep);
        t->n = keep;
    }
    memcpy(t->text + t->n, text, n);
    t->n += n;
}

static void takeTail(const tail *t, char out[DKV_LASTS_MAX + 1]) {
    size_t n = t->n < DKV_LASTS_MAX ? t->n : DKV_LASTS_MAX;
    memcpy(out, t->text + t->n - n, n);
    for (size_t i = 0; i < n; i++)
        if (!out[i]) out[i] = '?';
    out[n] = 0;
}

/* One read of a stream; 0 where nothing more will come. */
static int drain(dkv_program *p, int fd, tail *t) {
    static char chunk[CHUNK]; /* programs run one at a time */
    ssize_t n = read(fd, chunk, sizeof chunk);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return 0;
    p->bytes += n;
    if (t) addTail(t, chunk, (size_t)n);
    if (t) return 1;
    size_t room = DKV_OUTPUT_MAX - p->n, take = (size_t)n < room ? (size_t)n : room;
    memcpy(p->out + p->n, chunk, take);
    p->n += take;
    return 1;
}

/* Starts it with stdout and stderr as given. */
static int start(const dkv_program *p, int out, int errs, int in, pid_t *pid, dkv_err *err) {
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none, usual;
    sigemptyset(&none);
    sigemptyset(&usual);
    sigaddset(&usual, SIGPIPE);
    sigaddset(&usual, SIGXFSZ);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    if (in >= 0) posix_spawn_file_actions_adddup2(&files, in, 0);
    else posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, out, 1);
    posix_spawn_file_actions_adddup2(&files, errs, 2);
    if (p->dir) posix_spawn_file_actions_addchdir_np(&files, p->dir);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &usual);
    posix_spawnattr_setpgroup(&attr, 0); /* Ctrl-C is for us */
    dkv_lockChildren();
    int rc = posix_spawnp(pid, p->argv[0], &files, &attr, (char *const *)p->argv, p->envp ? p->envp : environ);
    if (!rc) dkv_addChild(*pid);
    dkv_unlockChildren();
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&files);
    if (rc == ENOENT) return dkv_fail(err, DKV_EHARNESS, "'%s' is not on the PATH", p->argv[0]);
    return rc ? dkv_fail(err, DKV_EHARNESS, "cannot start '%s': %s", p->argv[0], strerror(rc)) : 0;
}

/* Reads until the program has ended; kills its group when its time is over. */
static void attend(dkv_program *p, pid_t pid, struct pollfd fds[2], tail tails[2]) {
    const double begun = dkv_now();
    int status = 0;
    bool killed = false;
    for (;;) {
        bool open = fds[0].fd >= 0 || fds[1].fd >= 0;
        int ready = poll(fds, 2, open ? LOOK_MS : 2); /* closed: it is about to end */
        for (int i = 0; i < 2 && ready > 0; i++) {
            if (fds[i].fd < 0 || !fds[i].revents) continue;
            if (!drain(p, fds[i].fd, i == 0 && !p->ends_only ? NULL : &tails[i])) fds[i].fd = -1;
        }
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid || (got < 0 && errno != EINTR)) break;
        p->timed_out |= !killed && p->timeout > 0 && dkv_now() - begun > p->timeout;
        p->stopped |= !killed && !p->heedless && dkv_stopRequested;
        if (!killed && (p->timed_out || p->stopped)) {
            kill(-pid, SIGKILL);
            kill(pid, SIGKILL);
            killed = true;
        }
    }
    kill(-pid, SIGKILL); /* what it left in its group */
    for (int i = 0; i < 2; i++)
        for (long reads = 0; fds[i].fd >= 0 && reads < 64; reads++) { /* what is in the pipe */
            struct pollfd one = {fds[i].fd, POLLIN, 0};
            if (poll(&one, 1, 0) <= 0 || !drain(p, fds[i].fd, i == 0 && !p->ends_only ? NULL : &tails[i])) break;
        }
    p->code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    p->seconds = dkv_now() - begun;
}

/* A file without a name that holds the input; -1 where there is none. */
static int makeInput(const char *text) {
    if (!text) return -1;
    int fd = open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    size_t n = strlen(text);
    if (fd < 0) return -1;
    if (write(fd, text, n) == (ssize_t)n && lseek(fd, 0, SEEK_SET) == 0) return fd;
    close(fd);
    return -1;
}

int dkv_runProgram(dkv_program *p, dkv_err *err) {
    static tail tails[2];
    int pipes[2][2] = {{-1, -1}, {-1, -1}}, rc = 0, in = makeInput(p->input);
    pid_t pid = 0;
    dkv_freeProgram(p);
    memset(tails, 0, sizeof tails);
    p->n = 0;
    p->bytes = 0;
    p->timed_out = p->stopped = false;
    p->last[0] = 0;
    p->out = malloc(p->ends_only ? DKV_LASTS_MAX + 1 : DKV_OUTPUT_MAX + 1);
    if (!p->out) rc = dkv_fail(err, DKV_EHARNESS, "out of memory for what '%s' prints", p->argv[0]);
    if (!rc && p->input && in < 0) rc = dkv_fail(err, DKV_EHARNESS, "no place for the input of '%s'", p->argv[0]);
    for (int i = 0; i < 2 && !rc; i++)
        if (pipe2(pipes[i], O_CLOEXEC)) rc = dkv_fail(err, DKV_EHARNESS, "no pipe: %s", strerror(errno));
    if (!rc) rc = start(p, pipes[0][1], p->ends_only ? pipes[0][1] : pipes[1][1], in, &pid, err);
    for (int i = 0; i < 2; i++)
        if (pipes[i][1] >= 0) close(pipes[i][1]);
    if (!rc) {
        for (int i = 0; i < 2; i++) fcntl(pipes[i][0], F_SETFL, O_NONBLOCK);
        attend(p, pid, (struct pollfd[2]){{pipes[0][0], POLLIN, 0}, {pipes[1][0], POLLIN, 0}}, tails);
        dkv_dropChild(pid); /* and what left its group */
        takeTail(&tails[!p->ends_only], p->last);
        if (p->ends_only) p->n = (size_t)(stpcpy(p->out, p->last) - p->out);
        p->out[p->n] = 0;
    }
    for (int i = 0; i < 2; i++)
        if (pipes[i][0] >= 0) close(pipes[i][0]);
    if (in >= 0) close(in);
    return rc;
}

void dkv_freeProgram(dkv_program *p) {
    free(p->out);
    p->out = NULL;
}

void dkv_errorLine(const char *text, char *out, size_t n) {
    const char *found = NULL;
    for (const char *at = text; *at; at += strcspn(at, "\n"), at += *at == '\n') {
        const char *error = strcasestr(at, "error");
        if (!found && error && error < at + strcspn(at, "\n")) found = at;
    }
    if (!found) {
        dkv_lastLine(text, out, n);
        return;
    }
    char *line = strndup(found, strcspn(found, "\n"));
    dkv_lastLine(line ? line : text, out, n);
    free(line);
}

void dkv_lastLine(const char *text, char *out, size_t n) {
    size_t end = strlen(text), begin, at = 0;
    while (end > 0 && (unsigned char)text[end - 1] <= ' ') end--;
    for (begin = end; begin > 0 && text[begin - 1] != '\n'; begin--) continue;
    for (; begin < end && at + 1 < n; begin++) {
        unsigned char c = (unsigned char)text[begin];
        out[at++] = c < 32 || c == 127 ? '?' : (char)c;
    }
    if (n) out[at] = 0;
}
