#include "bisect_repo.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bisect_proc.h"

#define PREFIX "dualkv-bisect-"
#define LOCK   "dualkv.lock"

extern char **environ;

enum { WORDS = 32 };

/* ---- git ---- */

/* Where git is told to look by these, it would not look where we say; builds of ours call git, too. */
static void forgetPlaces(void) {
    static const char *const names[] = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY",
                                        "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE",
                                        "GIT_CONFIG", "GIT_GRAFT_FILE", "GIT_SHALLOW_FILE", "GIT_EXTERNAL_DIFF"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

static char **gitEnvironment(void) {
    static char *const more[] = {(char *)"LC_ALL=C", (char *)"GIT_OPTIONAL_LOCKS=0", (char *)"GIT_TERMINAL_PROMPT=0",
                                 (char *)"GIT_PAGER=cat", (char *)"GIT_EDITOR=true"};
    size_t n = 0, kept = 0;
    while (environ[n]) n++;
    char **out = calloc(n + sizeof more / sizeof *more + 1, sizeof *out);
    for (size_t i = 0; out && i < n; i++) {
        bool replaced = false;
        for (size_t k = 0; k < sizeof more / sizeof *more; k++)
            replaced |= strncmp(environ[i], more[k], strcspn(more[k], "=") + 1) == 0;
        if (!replaced) out[kept++] = environ[i];
    }
    for (size_t k = 0; out && k < sizeof more / sizeof *more; k++) out[kept++] = more[k];
    return out;
}

/* git in `dir`; words end with NULL, `tail` (or NULL) follows them. Its failure is DKV_EHARNESS with its own last line. In
 * the worktree it is told both folders: with its .git gone (a build's doing) git would look in the folders above, and there
 * may be the user's own checkout. */
static int git(const dkv_repo *r, const char *dir, dkv_program *p, const char *const *words, const char *const *tail,
               dkv_err *err) {
    const char *argv[WORDS + DKV_PATHS_MAX + 32] = {
        "git", "-C", dir, "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", "-c", "maintenance.auto=false",
        "-c", "core.fsmonitor=false", "-c", "color.ui=false", "-c", "advice.detachedHead=false", "-c", "log.showSignature=false",
        "-c", "worktree.useRelativePaths=false"};
    char why[300];
    int n = 0;
    while (argv[n]) n++;
    if (dir == r->tree && r->admin[0]) {
        const char *const places[] = {"--git-dir", r->admin, "--work-tree", r->tree};
        for (int i = 0; i < 4; i++) argv[n++] = places[i];
    }
    for (int i = 0; words[i] && i < WORDS; i++) argv[n++] = words[i];
    for (int i = 0; tail && tail[i] && i < DKV_PATHS_MAX; i++) argv[n++] = tail[i];
    p->argv = argv;
    p->envp = r->envp;
    p->heedless = true; /* its work is short, and half of it would have to be mended */
    int rc = dkv_runProgram(p, err);
    p->argv = NULL;
    if (rc) return rc;
    if (p->code == 0) return 0;
    dkv_lastLine(p->last[0] ? p->last : p->out, why, sizeof why);
    return dkv_fail(err, DKV_EHARNESS, "git %.40s: %s", words[0], why[0] ? why : "failed without a word");
}

#define WORDS_OF(...) ((const char *const[]){__VA_ARGS__, NULL})

static void copyLine(const char *from, char *to, size_t n) {
    size_t len = strcspn(from, "\n");
    if (len >= n) len = n - 1;
    memmove(to, from, len);
    to[len] = 0;
}

static void makePlain(char *text, bool lines) {
    for (unsigned char *c = (unsigned char *)text; *c; c++)
        if ((*c < 32 && !(lines && *c == '\n')) || *c == 127) *c = '?';
}

int dkv_openRepo(const char *path, dkv_repo *r, dkv_err *err) {
    dkv_program p = {0};
    dkv_err why = {0};
    struct stat s;
    memset(r, 0, sizeof *r);
    if (!path[0] || strlen(path) >= sizeof r->path) return dkv_fail(err, DKV_EUSER, "--repo: '%.80s' is no folder", path);
    if (stat(path, &s)) return dkv_fail(err, DKV_EUSER, "--repo: cannot read '%s': %s", path, strerror(errno));
    if (!S_ISDIR(s.st_mode)) return dkv_fail(err, DKV_EUSER, "--repo: '%s' is not a folder", path);
    if (!realpath(path, r->path)) return dkv_fail(err, DKV_EUSER, "--repo: '%s': %s", path, strerror(errno));
    forgetPlaces();
    r->envp = gitEnvironment();
    if (!r->envp) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    int rc = git(r, r->path, &p, WORDS_OF("rev-parse", "--path-format=absolute", "--git-common-dir"), NULL, &why);
    if (!rc && p.n > sizeof r->common) rc = dkv_fail(&why, DKV_EUSER, "the path of its git folder is too long");
    if (!rc && p.n > 1) {
        p.out[p.n - 1] = 0;
        strcpy(r->common, p.out);
    }
    if (rc && !p.out) dkv_fail(err, why.code, "%s", why.text); /* git itself is missing */
    else if (rc) dkv_fail(err, DKV_EUSER, "--repo: '%.200s' is no git repository (%.200s)", path, why.text);
    if (!rc && git(r, r->path, &p, WORDS_OF("rev-parse", "--is-shallow-repository"), NULL, NULL) == 0)
        r->shallow = strncmp(p.out, "true", 4) == 0;
    if (!rc && git(r, r->path, &p, WORDS_OF("status", "--porcelain", "--untracked-files=no"), NULL, NULL) == 0)
        r->dirty = p.n > 0; /* a bare repository has no status, and no checkout either */
    dkv_freeProgram(&p);
    return rc ? (int)err->code : 0;
}

void dkv_closeRepo(dkv_repo *r) {
    free(r->envp);
    r->envp = NULL;
}

int dkv_findCommit(const dkv_repo *r, const char *option, const char *word, char id[DKV_HASH_MAX], dkv_err *err) {
    dkv_program p = {0};
    char *spec = NULL;
    dkv_err why = {0};
    if (!word[0] || word[0] == '-' || strchr(word, '\n') || strlen(word) > 1000)
        return dkv_fail(err, DKV_EUSER, "%s: '%.80s' is no name of a commit", option, word);
    if (asprintf(&spec, "%s^{commit}", word) < 0) return dkv_fail(err, DKV_EHARNESS, "out of memory");
    int rc = git(r, r->path, &p, WORDS_OF("rev-parse", "--verify", "--quiet", "--end-of-options", spec), NULL, &why);
    if (!rc) copyLine(p.out, id, DKV_HASH_MAX);
    if (!rc && strspn(id, "0123456789abcdef") != strlen(id)) rc = DKV_EUSER;
    if (rc) rc = dkv_fail(err, DKV_EUSER, "%s: '%.80s' names no commit of %.200s%s", option, word, r->path,
                          r->shallow ? ", whose history is cut off (shallow): git fetch --unshallow" : "");
    dkv_freeProgram(&p);
    free(spec);
    return rc;
}

static int isAncestor(const dkv_repo *r, const char *a, const char *b) {
    dkv_program p = {0};
    int rc = git(r, r->path, &p, WORDS_OF("merge-base", "--is-ancestor", a, b), NULL, NULL);
    dkv_freeProgram(&p);
    return rc == 0;
}

int dkv_countBetween(const dkv_repo *r, const char *good, const char *bad, const char *const *paths, long *n, bool *linear,
                     dkv_err *err) {
    dkv_program p = {0};
    char range[2 * DKV_HASH_MAX + 4];
    if (strcmp(good, bad) == 0) return dkv_fail(err, DKV_EUSER, "--good and --bad name the same commit, %.12s", good);
    *linear = isAncestor(r, good, bad);
    if (!*linear && isAncestor(r, bad, good))
        return dkv_fail(err, DKV_EUSER, "--good %.12s is a descendant of --bad %.12s: the other way round?", good, bad);
    int rc = *linear ? 0 : git(r, r->path, &p, WORDS_OF("merge-base", good, bad), NULL, NULL);
    if (rc)
        rc = dkv_fail(err, DKV_EUSER, "--good %.12s and --bad %.12s have no commit in common%s", good, bad,
                      r->shallow ? ": the history is cut off (shallow): git fetch --unshallow" : "");
    snprintf(range, sizeof range, "%s..%s", good, bad);
    if (!rc) rc = git(r, r->path, &p, WORDS_OF("rev-list", "--count", range, "--"), paths, err);
    if (!rc) *n = strtol(p.out, NULL, 10);
    if (!rc && *n == 0) rc = dkv_fail(err, DKV_EUSER, "--path: no commit between --good and --bad touches these");
    dkv_freeProgram(&p);
    return rc;
}

int dkv_describeCommit(const dkv_repo *r, const char *id, const char *good, dkv_commit_info *out, dkv_err *err) {
    dkv_program p = {0};
    char range[2 * DKV_HASH_MAX + 4];
    memset(out, 0, sizeof *out);
    int rc = git(r, r->path, &p, WORDS_OF("show", "-s", "--no-notes", "--format=%H%n%h%n%an%n%as%n%s", id, "--"), NULL, err);
    if (!rc) {
        char *at = p.out, *to[] = {out->id, out->brief, out->author, out->date, out->subject};
        const size_t room[] = {sizeof out->id, sizeof out->brief, sizeof out->author, sizeof out->date, sizeof out->subject};
        for (int i = 0; i < 5; i++) {
            copyLine(at, to[i], room[i]);
            makePlain(to[i], false);
            at += strcspn(at, "\n");
            at += *at == '\n';
        }
    }
    snprintf(range, sizeof range, "%s..%s", good ? good : id, id);
    if (!rc) rc = git(r, r->path, &p, WORDS_OF("rev-list", "--count", range, "--"), NULL, err);
    if (!rc) out->position = strtol(p.out, NULL, 10);
    dkv_freeProgram(&p);
    return rc;
}

int dkv_treeOf(const dkv_repo *r, const char *id, char tree[DKV_HASH_MAX], dkv_err *err) {
    dkv_program p = {0};
    char spec[DKV_HASH_MAX + 8];
    snprintf(spec, sizeof spec, "%s^{tree}", id);
    int rc = git(r, r->path, &p, WORDS_OF("rev-parse", "--verify", spec), NULL, err);
    if (!rc) copyLine(p.out, tree, DKV_HASH_MAX);
    dkv_freeProgram(&p);
    return rc;
}

char *dkv_diffstat(const dkv_repo *r, const char *id) {
    dkv_program p = {0};
    if (git(r, r->path, &p, WORDS_OF("show", "--no-notes", "--format=", "--stat=100,70,12", "--no-ext-diff", "-m",
                                     "--first-parent", id, "--"), NULL, NULL)) {
        dkv_freeProgram(&p);
        return NULL;
    }
    makePlain(p.out, true);
    return p.out;
}

/* ---- the worktree ---- */

/* Is this the name that mkdtemp made of ours, in a folder given by its whole path? */
static bool isOurs(const char *tree) {
    const char *base = strrchr(tree, '/');
    if (tree[0] != '/' || !base || strncmp(base + 1, PREFIX, strlen(PREFIX)) != 0) return false;
    base += 1 + strlen(PREFIX);
    return strlen(base) == 6 && strspn(base, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") == 6;
}

/* Was it begun by a bisect in this worktree? Who only looks around there has not the word in its environment. */
static bool isMarked(pid_t pid, const char *tree) {
    char path[64], word[PATH_MAX + sizeof DKV_BISECT_TREE + 1], *text = NULL;
    size_t room = 0;
    bool found = false;
    snprintf(path, sizeof path, "/proc/%ld/environ", (long)pid);
    snprintf(word, sizeof word, DKV_BISECT_TREE "=%s", tree);
    FILE *f = fopen(path, "re");
    while (f && !found && getdelim(&text, &room, 0, f) > 0) found = strcmp(text, word) == 0;
    if (f) fclose(f);
    free(text);
    return found;
}

/* What a build, of a run that was killed, too, left behind: processes that it began and that stand in the worktree. */
static void endStanding(const char *tree) {
    const size_t n = strlen(tree);
    DIR *proc = isOurs(tree) ? opendir("/proc") : NULL;
    const struct dirent *entry;
    while (proc && (entry = readdir(proc))) {
        char path[64], at[PATH_MAX];
        pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
        if (pid <= 1 || pid == getpid()) continue;
        snprintf(path, sizeof path, "/proc/%ld/cwd", (long)pid);
        ssize_t len = readlink(path, at, sizeof at - 1);
        if (len < (ssize_t)n) continue;
        at[len] = 0;
        if (strncmp(at, tree, n) == 0 && (!at[n] || at[n] == '/' || strcmp(at + n, " (deleted)") == 0) && isMarked(pid, tree))
            kill(pid, SIGKILL);
    }
    if (proc) closedir(proc);
}

static void removeFolder(const char *path) {
    dkv_program p = {.heedless = true, .ends_only = true};
    for (int round = 0; round < 2 && access(path, F_OK) == 0; round++) {
        if (round) { /* folders that may not be written */
            p.argv = WORDS_OF("chmod", "-R", "u+rwX", "--", path);
            (void)dkv_runProgram(&p, NULL);
        }
        p.argv = WORDS_OF("rm", "-rf", "--", path);
        (void)dkv_runProgram(&p, NULL);
    }
    dkv_freeProgram(&p);
}

/* By git, and where it refuses, by hand: what git would prune. */
static void removeTree(const dkv_repo *r, const char *tree, const char *admin) {
    dkv_program p = {0};
    char parent[PATH_MAX + 16];
    if (!isOurs(tree)) return;
    endStanding(tree);
    (void)git(r, r->path, &p, WORDS_OF("worktree", "remove", "--force", "--force", tree), NULL, NULL);
    dkv_freeProgram(&p);
    removeFolder(tree);
    removeFolder(admin);
    snprintf(parent, sizeof parent, "%s/worktrees", r->common);
    rmdir(parent); /* as git does, when it was the last */
}

/* Nothing but git's own file: killed between the worktree's making and its lock. */
static bool isBare(const char *tree) {
    DIR *d = opendir(tree);
    const struct dirent *entry;
    bool bare = true;
    while (d && bare && (entry = readdir(d)))
        bare = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 || strcmp(entry->d_name, ".git") == 0;
    if (d) closedir(d);
    return bare;
}

/* One of the repository's worktrees: ours, and nobody holds its lock? Then it goes. */
static void removeStale(const dkv_repo *r, const char *name) {
    char admin[PATH_MAX], path[PATH_MAX + 32], tree[PATH_MAX] = "";
    if (snprintf(admin, sizeof admin, "%s/worktrees/%s", r->common, name) >= (int)sizeof admin) return;
    snprintf(path, sizeof path, "%s/" LOCK, admin);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB)) {
        close(fd);
        return;
    }
    snprintf(path, sizeof path, "%s/gitdir", admin);
    FILE *f = fopen(path, "re");
    if (f && !fgets(tree, sizeof tree, f)) tree[0] = 0;
    if (f) fclose(f);
    char *end = strstr(tree, "/.git\n");
    if (end) *end = 0;
    if (end && isOurs(tree) && (fd >= 0 || isBare(tree))) removeTree(r, tree, admin); /* else somebody else's */
    if (fd >= 0) close(fd);
}

static void removeAllStale(const dkv_repo *r) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/worktrees", r->common);
    DIR *d = opendir(path);
    const struct dirent *entry;
    while (d && (entry = readdir(d)))
        if (strncmp(entry->d_name, PREFIX, strlen(PREFIX)) == 0) removeStale(r, entry->d_name);
    if (d) closedir(d);
}

static int addTree(dkv_repo *r, const char *id, dkv_err *err) {
    dkv_program p = {0};
    char path[PATH_MAX + 32];
    int rc = git(r, r->path, &p, WORDS_OF("worktree", "add", "--force", "--detach", "--no-checkout", r->tree, id), NULL, err);
    if (!rc) rc = git(r, r->tree, &p, WORDS_OF("rev-parse", "--absolute-git-dir"), NULL, err);
    if (!rc) copyLine(p.out, r->admin, sizeof r->admin);
    dkv_freeProgram(&p);
    if (rc) return rc;
    snprintf(path, sizeof path, "%s/" LOCK, r->admin);
    r->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (r->lock < 0 || flock(r->lock, LOCK_EX | LOCK_NB))
        return dkv_fail(err, DKV_EHARNESS, "cannot lock the worktree '%.200s': %s", r->tree, strerror(errno));
    return 0;
}

int dkv_openTree(dkv_repo *r, const char *id, dkv_err *err) {
    const char *tmp = getenv("TMPDIR");
    char real[PATH_MAX];
    int rc = 0, folder = open(r->common, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!tmp || !tmp[0]) tmp = "/tmp";
    if (tmp[0] != '/' || strchr(tmp, '\n') || strlen(tmp) > PATH_MAX - 64)
        rc = dkv_fail(err, DKV_EUSER, "TMPDIR: '%.80s' is no place for a worktree", tmp);
    /* One start at a time: between a worktree's making and its lock it looks as if nobody owned it. */
    if (!rc && (folder < 0 || flock(folder, LOCK_EX)))
        rc = dkv_fail(err, DKV_EHARNESS, "cannot lock '%.200s': %s", r->common, strerror(errno));
    if (!rc) removeAllStale(r);
    if (!rc) {
        snprintf(r->tree, sizeof r->tree, "%s/" PREFIX "XXXXXX", tmp);
        if (!mkdtemp(r->tree)) {
            rc = dkv_fail(err, DKV_EHARNESS, "cannot make a folder in '%.200s': %s", tmp, strerror(errno));
            r->tree[0] = 0;
        } else if (!realpath(r->tree, real)) {
            rc = dkv_fail(err, DKV_EHARNESS, "'%.200s': %s", r->tree, strerror(errno));
        } else strcpy(r->tree, real); /* as git and /proc write it */
    }
    if (!rc && setenv(DKV_BISECT_TREE, r->tree, 1)) rc = dkv_fail(err, DKV_EHARNESS, "out of memory");
    if (!rc) rc = addTree(r, id, err);
    if (folder >= 0) close(folder);
    if (rc) dkv_closeTree(r);
    return rc;
}

void dkv_closeTree(dkv_repo *r) {
    if (r->tree[0] && r->admin[0]) removeTree(r, r->tree, r->admin);
    else if (r->tree[0]) removeFolder(r->tree);
    if (r->lock > 0) close(r->lock);
    r->tree[0] = r->admin[0] = 0;
    r->lock = 0;
}

int dkv_checkOut(dkv_repo *r, const char *id, bool keep, dkv_err *err) {
    dkv_program p = {0};
    int rc = git(r, r->tree, &p, WORDS_OF("checkout", "--quiet", "--force", "--detach", id, "--"), NULL, err);
    if (!rc && !keep) {
        rc = git(r, r->tree, &p, WORDS_OF("clean", "-ffdxq"), NULL, NULL);
        if (rc) { /* folders that may not be written */
            dkv_program q = {.heedless = true, .ends_only = true, .argv = WORDS_OF("chmod", "-R", "u+rwX", "--", r->tree)};
            (void)dkv_runProgram(&q, NULL);
            dkv_freeProgram(&q);
            rc = git(r, r->tree, &p, WORDS_OF("clean", "-ffdxq"), NULL, err);
        }
    }
    dkv_freeProgram(&p);
    return rc;
}

int dkv_changedFile(const dkv_repo *r, char *out, size_t n, dkv_err *err) {
    dkv_program p = {0};
    int rc = git(r, r->tree, &p, WORDS_OF("status", "--porcelain", "--untracked-files=no"), NULL, err);
    out[0] = 0;
    if (!rc && p.n > 3) copyLine(p.out + 3, out, n);
    makePlain(out, false);
    dkv_freeProgram(&p);
    return rc;
}

/* ---- git bisect ---- */

int dkv_startBisect(dkv_repo *r, const char *good, const char *bad, const char *const *paths, dkv_err *err) {
    dkv_program p = {0};
    int rc = git(r, r->tree, &p, WORDS_OF("bisect", "start", "--no-checkout", bad, good, "--"), paths, err);
    dkv_freeProgram(&p);
    return rc;
}

static bool isOver(const char *log) {
    return strstr(log, "\n# first bad commit: [") || strstr(log, "\n# only skipped commits left to test");
}

static int readLog(const dkv_repo *r, dkv_program *p, dkv_err *err) {
    return git(r, r->tree, p, WORDS_OF("bisect", "log"), NULL, err);
}

int dkv_markCommit(dkv_repo *r, const char *verdict, const char *id, dkv_err *err) {
    dkv_program p = {0};
    dkv_err why = {0};
    int rc = git(r, r->tree, &p, WORDS_OF("bisect", verdict, id), NULL, &why);
    /* Skipping the last one that could be tested is a failure to git, and an answer to us. */
    if (rc && readLog(r, &p, NULL) == 0 && isOver(p.out)) rc = 0;
    if (rc) dkv_fail(err, DKV_EHARNESS, "%s", why.text);
    dkv_freeProgram(&p);
    return rc;
}

static int addPossible(dkv_bisect_end *e, const char *id, size_t len, dkv_err *err) {
    void *more = realloc(e->possible, (size_t)(e->n + 1) * sizeof *e->possible);
    if (!more) return dkv_fail(err, DKV_EHARNESS, "out of memory for commits");
    e->possible = more;
    snprintf(e->possible[e->n++], DKV_HASH_MAX, "%.*s", (int)len, id);
    return 0;
}

/* After a skipped commit git draws the next one at random, often far from the middle. Candidates, those that halve best
 * first, stand in `rev-list --bisect-all`: the further commits have been skipped, the more of them are passed over, for what
 * does not build often comes in rows. */
static int chooseBesideSkipped(dkv_repo *r, const char *const *paths, const char *log, char id[DKV_HASH_MAX], dkv_err *err) {
    dkv_program p = {0};
    char mark[DKV_HASH_MAX + 16], one[DKV_HASH_MAX], last[DKV_HASH_MAX] = "";
    long rank = 0, skipped = 0; /* of those that are candidates still */
    int rc = git(r, r->tree, &p, WORDS_OF("rev-list", "--bisect", "--bisect-all", "--"), paths, err);
    for (int round = 0; round < 2 && !rc; round++) {
        const char *at = p.out;
        const long wide = 6 * skipped * skipped, most = rank * skipped / (skipped + 3), pass = wide < most ? wide : most;
        for (rank = 0; *at; rank++, at += strcspn(at, "\n"), at += *at == '\n') {
            copyLine(at, one, sizeof one);
            one[strcspn(one, " ")] = 0;
            snprintf(mark, sizeof mark, "\n# skip: [%s]", one);
            bool is = strstr(log, mark) != NULL;
            if (round == 0) {
                skipped += is;
                continue;
            }
            const char *zero = strstr(at, "dist=0)"); /* the bad end itself */
            if (is || (zero && zero < at + strcspn(at, "\n"))) continue;
            if (strspn(one, "0123456789abcdef") >= 40) strcpy(last, one);
            if (rank >= pass) break;
        }
    }
    if (!rc && skipped && last[0]) strcpy(id, last);
    dkv_freeProgram(&p);
    return rc;
}

int dkv_nextCommit(dkv_repo *r, const char *const *paths, char id[DKV_HASH_MAX], dkv_bisect_end *end, dkv_err *err) {
    static const char first[] = "# first bad commit: [", possible[] = "# possible first bad commit: [";
    dkv_program p = {0};
    memset(end, 0, sizeof *end);
    int rc = readLog(r, &p, err);
    for (const char *at = rc ? NULL : p.out; at && *at && !rc; at += strcspn(at, "\n"), at += *at == '\n') {
        const char *word = strncmp(at, first, strlen(first)) == 0         ? at + strlen(first)
                           : strncmp(at, possible, strlen(possible)) == 0 ? at + strlen(possible)
                                                                          : NULL;
        if (!word) continue;
        size_t len = strcspn(word, "]\n");
        if (len >= DKV_HASH_MAX) continue;
        if (at[2] == 'f') {
            end->found = true;
            snprintf(end->first, sizeof end->first, "%.*s", (int)len, word);
        } else {
            end->stuck = true;
            rc = addPossible(end, word, len, err);
        }
    }
    if (!rc && end->found) end->stuck = false;
    if (!rc && !end->found && !end->stuck) {
        char *log = p.out;
        p.out = NULL;
        rc = git(r, r->tree, &p, WORDS_OF("rev-parse", "--verify", "BISECT_HEAD"), NULL, err);
        if (!rc) copyLine(p.out, id, DKV_HASH_MAX);
        if (!rc && strstr(log, "\n# skip: [")) rc = chooseBesideSkipped(r, paths, log, id, err);
        free(log);
    }
    dkv_freeProgram(&p);
    return rc;
}
