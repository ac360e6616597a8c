#include "guard.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static bool guarded;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t *living;
static int n_living, room;

/* root may read any process, unless it gives that up; what it executes would have it again from the bounding set. Of this
 * thread, and of those and the processes that it starts. */
static void dropTracing(void) {
#ifndef __SANITIZE_ADDRESS__ /* its leak check attaches to the process */
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct caps[2];
    if (syscall(SYS_capget, &head, caps)) return;
    prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE);
    caps[0].effective &= ~(1u << CAP_SYS_PTRACE);
    caps[0].permitted &= ~(1u << CAP_SYS_PTRACE);
    caps[0].inheritable &= ~(1u << CAP_SYS_PTRACE);
    syscall(SYS_capset, &head, caps);
#endif
}

void dkv_guardCoordinator(void) {
    dropTracing();
    guarded = prctl(PR_SET_CHILD_SUBREAPER, 1) == 0;
#ifndef __SANITIZE_ADDRESS__
    prctl(PR_SET_DUMPABLE, 0);
#endif
}

void dkv_guardWorker(void) {
    static const char most[] = "1000";
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a kernel that hangs must not outlive its coordinator */
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    dropTracing();
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, most, sizeof most - 1) < 0) errno = 0; /* as it was, then */
    close(fd);
}

static pid_t coordinator;

/* The thread that started us has ended: the process, too? */
static void threadEnded(int signal_number) {
    (void)signal_number;
    if (getppid() != coordinator) _exit(1);
}

void dkv_guardShared(void) {
    struct sigaction act = {.sa_handler = threadEnded, .sa_flags = SA_RESTART};
    coordinator = getppid();
    if (sigaction(SIGUSR2, &act, NULL) == 0) prctl(PR_SET_PDEATHSIG, SIGUSR2);
}

void dkv_limitWorker(double bytes) {
#ifndef __SANITIZE_ADDRESS__ /* its shadow counts */
    struct rlimit now;
    if (!isfinite(bytes) || bytes < 0 || getrlimit(RLIMIT_DATA, &now)) return;
    bytes += 256.0 * 1048576; /* what it has already: libraries, stacks */
    if (bytes >= (double)now.rlim_cur || bytes >= 0x1p62) return;
    setrlimit(RLIMIT_DATA, &(struct rlimit){(rlim_t)bytes, (rlim_t)bytes});
#else
    (void)bytes;
#endif
}

/* ---- children ---- */

void dkv_lockChildren(void) { pthread_mutex_lock(&lock); }
void dkv_unlockChildren(void) { pthread_mutex_unlock(&lock); }

void dkv_addChild(pid_t pid) {
    if (n_living == room) {
        pid_t *more = realloc(living, (size_t)(room * 2 + 16) * sizeof *more);
        if (!more) {
            guarded = false; /* better a stray than a worker killed for one */
            return;
        }
        living = more;
        room = room * 2 + 16;
    }
    living[n_living++] = pid;
}

static bool isLiving(pid_t pid) {
    for (int i = 0; i < n_living; i++)
        if (living[i] == pid) return true;
    return false;
}

/* The fourth word of /proc/PID/stat, behind a name in brackets that may hold anything. */
static pid_t parentOf(const char *pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC), parent = -1;
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) close(fd);
    if (n <= 0) return -1;
    text[n] = 0;
    const char *end = strrchr(text, ')');
    return end && sscanf(end + 1, " %*c %d", &parent) == 1 ? parent : -1;
}

static int killStrays(void) {
    DIR *proc = opendir("/proc");
    const struct dirent *entry;
    int found = 0;
    while (proc && (entry = readdir(proc))) {
        pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
        if (pid <= 0 || isLiving(pid) || parentOf(entry->d_name) != getpid()) continue;
        kill(pid, SIGKILL);
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) continue;
        found++;
    }
    if (proc) closedir(proc);
    return found;
}

void dkv_dropChild(pid_t pid) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_living; i++)
        if (living[i] == pid) living[i--] = living[--n_living];
    for (int round = 0; guarded && round < 1000 && killStrays(); round++) continue; /* children of the killed come to us */
    pthread_mutex_unlock(&lock);
}
