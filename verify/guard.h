/* guard.h: what a kernel's process must not do to the run: read the coordinator's memory (the truth is in it), or leave
 * processes behind that outlive it. */
#ifndef DKV_GUARD_H
#define DKV_GUARD_H

#include <sys/types.h>

/* For the program's own process, before threads and workers: its memory is closed to other processes of the user (no
 * debugger attaches then, and it leaves no core), and it becomes the parent of every process that a worker leaves behind.
 * Without it (in a library) such processes go to the system's init. */
void dkv_guardCoordinator(void);
/* In a worker that this program started: no right to look into other processes, none to outlive the coordinator, no core
 * files, and the first that goes where memory is short. */
void dkv_guardWorker(void);
/* In a worker that several threads of the coordinator use, after dkv_guardWorker: it lives on when the thread ends that
 * happened to start it (which is what the kernel calls a parent's death). */
void dkv_guardShared(void);
/* In a worker whose kernel works in host memory: no more memory than is free now, so that an allocation is refused before
 * the machine is short of it. */
void dkv_limitWorker(double bytes);

/* Children that are to live. Hold the lock while one is started and added. */
void dkv_lockChildren(void);
void dkv_addChild(pid_t pid);
void dkv_unlockChildren(void);
/* It has been waited for; every other child of a guarded coordinator was left behind by it or another: they are killed. */
void dkv_dropChild(pid_t pid);
#endif
