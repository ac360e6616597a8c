#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "session.h"

static void onSignal(int signal_number) {
    if (dkv_stopRequested) _exit(128 + signal_number); /* asked twice */
    dkv_stopRequested = signal_number;
}

void dkv_catchSignals(void) {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = onSignal;
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file at its size limit: the write fails, and that is said */
}
