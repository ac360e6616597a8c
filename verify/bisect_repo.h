/* bisect_repo.h: a user's git repository, seen through a worktree of our own. Nothing else of it changes: its HEAD, index,
 * checkout and refs stay as they are (a bisect's refs and state belong to the worktree). The worktree is removed with
 * dkv_closeTree; one that a killed run left behind, when the next one opens its own. Hooks do not run. */
#ifndef DKV_BISECT_REPO_H
#define DKV_BISECT_REPO_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "../ref/dkv_err.h"

#define DKV_HASH_MAX  72  /* a commit's or tree's name, SHA-256 included */
#define DKV_PATHS_MAX 64
#define DKV_BISECT_TREE "DUALKV_BISECT_TREE" /* in the environment of builds: the worktree */

typedef struct dkv_repo {
    char path[PATH_MAX];   /* as git is told it */
    char common[PATH_MAX]; /* its git folder */
    char tree[PATH_MAX];   /* our worktree; "": none */
    char admin[PATH_MAX];  /* what git keeps of that */
    int lock;              /* held as long as the worktree is ours; 0: none */
    bool shallow, dirty;   /* dirty: its checkout has changes that no commit holds */
    char **envp;           /* of git */
} dkv_repo;

typedef struct dkv_commit_info {
    char id[DKV_HASH_MAX], brief[DKV_HASH_MAX], author[120], date[32], subject[200]; /* control characters replaced */
    long position; /* commits reachable from it and not from the good end */
} dkv_commit_info;

/* DKV_EUSER where `path` is no repository. */
int dkv_openRepo(const char *path, dkv_repo *r, dkv_err *err);
void dkv_closeRepo(dkv_repo *r);
/* The commit that a word names. DKV_EUSER (naming `option`) where there is none. */
int dkv_findCommit(const dkv_repo *r, const char *option, const char *word, char id[DKV_HASH_MAX], dkv_err *err);
/* Commits that `bad` has and `good` has not, those that touch one of `paths` where there are any (NULL behind the last).
 * *linear: good is an ancestor. DKV_EUSER where the two are the wrong way round, equal, or have no history in common. */
int dkv_countBetween(const dkv_repo *r, const char *good, const char *bad, const char *const *paths, long *n, bool *linear,
                     dkv_err *err);
int dkv_describeCommit(const dkv_repo *r, const char *id, const char *good, dkv_commit_info *out, dkv_err *err);
/* The name of its tree: two commits with the same files have the same. */
int dkv_treeOf(const dkv_repo *r, const char *id, char tree[DKV_HASH_MAX], dkv_err *err);
/* `git show --stat`, malloc'ed, control characters but newlines replaced. */
char *dkv_diffstat(const dkv_repo *r, const char *id);

/* Makes the worktree (in TMPDIR), at `id`. */
int dkv_openTree(dkv_repo *r, const char *id, dkv_err *err);
/* Also when the run is to stop. */
void dkv_closeTree(dkv_repo *r);
/* The worktree at `id`, as it was committed; `keep`: what is no part of commits (built files) stays. */
int dkv_checkOut(dkv_repo *r, const char *id, bool keep, dkv_err *err);
/* Does the build change files of the commit? The first, "" if none. */
int dkv_changedFile(const dkv_repo *r, char *out, size_t n, dkv_err *err);

/* ---- git bisect, in the worktree, which it does not touch ---- */

typedef struct dkv_bisect_end {
    bool found, stuck;           /* stuck: only skipped commits are left */
    char first[DKV_HASH_MAX];    /* found: the first bad commit */
    char (*possible)[DKV_HASH_MAX]; /* stuck: any of these; owned */
    long n;
} dkv_bisect_end;

int dkv_startBisect(dkv_repo *r, const char *good, const char *bad, const char *const *paths, dkv_err *err);
/* verdict: good, bad or skip. */
int dkv_markCommit(dkv_repo *r, const char *verdict, const char *id, dkv_err *err);
/* The commit to be tested next, or how it ended. */
int dkv_nextCommit(dkv_repo *r, const char *const *paths, char id[DKV_HASH_MAX], dkv_bisect_end *end, dkv_err *err);

#endif
