#include "status.h"

#include <string.h>

static const dkv_status_row table[DKV_ST_N] = {
    {"PASSED", "everything was checked and nothing is wrong", DKV_EXIT_OK, false},
    {"FAILED", "an element is further from the truth than rounding allows", DKV_EXIT_DEFECT, true},
    {"IMPRECISE", "more rounding than the kernel declares", DKV_EXIT_DEFECT, true},
    {"BIASED", "errors share a sign or a factor that rounding does not explain", DKV_EXIT_DEFECT, true},
    {"NONDETERMINISTIC", "two runs differ where repeatability is promised", DKV_EXIT_DEFECT, true},
    {"OUT_OF_BOUNDS", "memory outside the outputs was written", DKV_EXIT_DEFECT, true},
    {"UNWRITTEN", "a part of an output was never written", DKV_EXIT_DEFECT, true},
    {"INPUT_MUTATED", "an input was changed", DKV_EXIT_DEFECT, true},
    {"LEAKED", "a NaN or Inf of one branch reached another", DKV_EXIT_DEFECT, true},
    {"NOT_RUN", "the kernel reported an error or did not launch", DKV_EXIT_DEFECT, true},
    {"CRASHED", "the kernel's process ended", DKV_EXIT_DEFECT, true},
    {"TIMEOUT", "the kernel did not return in time", DKV_EXIT_DEFECT, true},
    {"HARNESS_ERROR", "the harness itself failed; nothing was learned", DKV_EXIT_NOTHING, false},
    {"INCONCLUSIVE", "no defect seen, and not enough power to have seen one", DKV_EXIT_WEAK, false},
    {"UNSUPPORTED", "the kernel refused the problem, with a reason", DKV_EXIT_NOTHING, false},
};

const dkv_status_row *dkv_statusRow(dkv_status s) { return &table[s]; }

dkv_status dkv_findStatus(const char *name) {
    int s = 0;
    while (s < DKV_ST_N && strcmp(table[s].name, name) != 0) s++;
    return (dkv_status)s;
}

const char *dkv_findingName(dkv_finding_state s) {
    static const char *const names[] = {NULL, "passed", "defect", "note"};
    return names[s];
}

int dkv_runExit(const long counts[DKV_ST_N]) {
    long seen[5] = {0};
    for (int s = 0; s < DKV_ST_N; s++)
        if (s != DKV_ST_UNSUPPORTED) seen[table[s].exit] += counts[s];
    if (seen[DKV_EXIT_DEFECT]) return DKV_EXIT_DEFECT;
    if (seen[DKV_EXIT_NOTHING]) return DKV_EXIT_NOTHING;
    if (seen[DKV_EXIT_WEAK]) return DKV_EXIT_WEAK;
    return seen[DKV_EXIT_OK] ? DKV_EXIT_OK : DKV_EXIT_NOTHING; /* only refusals: nothing ran */
}

int dkv_bisectExit(int code, const long counts[DKV_ST_N]) {
    if (code == DKV_EXIT_USER) return 128;
    if (code == DKV_EXIT_NOTHING || code == DKV_EXIT_WEAK) return 125;
    if (code == DKV_EXIT_OK && counts && counts[DKV_ST_UNSUPPORTED]) return 125;
    return code;
}

/* Edit distance (insert, delete, change, swap neighbours) of short words; long ones are never near. */
static size_t distance(const char *a, const char *b) {
    enum { LONGEST = 48 };
    size_t n = strlen(a), m = strlen(b), rows[3][LONGEST + 1];
    if (n > LONGEST || m > LONGEST) return LONGEST;
    for (size_t i = 0; i <= n; i++) {
        size_t *row = rows[i % 3], *above = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];
        for (size_t j = 0; j <= m; j++) {
            if (!i || !j) {
                row[j] = i + j;
                continue;
            }
            size_t best = above[j] < row[j - 1] ? above[j] + 1 : row[j - 1] + 1;
            const size_t change = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (change < best) best = change;
            const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            row[j] = swapped && before[j - 2] + 1 < best ? before[j - 2] + 1 : best;
        }
    }
    return rows[n % 3][m];
}

const char *dkv_nearestWord(const char *word, const char *const *words, size_t n) {
    const char *best = NULL;
    size_t least = (strlen(word) + 1) / 3; /* further than a third of the word is another word */
    for (size_t i = 0; i < n; i++) {
        size_t d = distance(word, words[i]);
        if (d <= least && (!best || d < least)) {
            best = words[i];
            least = d;
        }
    }
    return best;
}

void dkv_countRefusal(dkv_refusals *t, const char *why) {
    int k = 0;
    while (k < DKV_REASONS_MAX - 1 && t->row[k].cases && strncmp(t->row[k].why, why, 199) != 0) k++;
    snprintf(t->row[k].why, sizeof t->row[k].why, "%.199s",
             k < DKV_REASONS_MAX - 1 ? why : "for further reasons (see the records)");
    t->row[k].cases++;
}

void dkv_sayRefusals(const dkv_refusals *t, FILE *f) {
    for (int k = 0; k < DKV_REASONS_MAX && t->row[k].cases; k++)
        fprintf(f, "  %ld UNSUPPORTED: %s\n", t->row[k].cases, t->row[k].why);
}
