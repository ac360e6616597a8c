#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "session.h"

static volatile sig_atomic_t asked_at; /* seconds, when it was asked first */

static void onSignal(int signal_number) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    if (!dkv_stopRequested) {
        asked_at = (sig_atomic_t)t.tv_sec;
        dkv_stopRequested = signal_number;
    } else if ((sig_atomic_t)t.tv_sec - asked_at > 1)
        _exit(128 + signal_number); /* asked again; timeout(1) sends the first one twice */
}

void dkv_catchSignals(void) {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = onSignal;
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    if (signal(SIGHUP, SIG_IGN) != SIG_IGN) sigaction(SIGHUP, &a, NULL); /* the terminal is gone; nohup(1) says go on */
    signal(SIGPIPE, SIG_IGN);
}
