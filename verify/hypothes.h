/* hypothes.h: what the files behind explain.h share. An inquiry holds the observed error and all guesses made
 * so far; a guess is one hypothesis with what it leaves unexplained. Families: hypothes_emu.c (faults and
 * roundings of the emulated kernel), hypothes_model.c (edits of a double-precision model), hypothes_fit.c
 * (numbers and places fitted to the outputs). */
#ifndef DKV_HYPOTHES_H
#define DKV_HYPOTHES_H

#include "explain.h"

#define DKV_FIT_CHANCE 1e-6 /* that a fitted number lies further from the right one than its error says */
#define DKV_MEMORY DKV_N_OUTPUTS /* beside the tensors: bytes changed that must not be */
#define DKV_PARTS (DKV_N_OUTPUTS + 1)
#define DKV_FORWARD_PARTS (1 << DKV_O | 1 << DKV_LSE)
#define DKV_GRADIENT_PARTS (1 << DKV_DQ | 1 << DKV_DK | 1 << DKV_DV | 1 << DKV_DSINK)
#define DKV_ALL_PARTS (DKV_FORWARD_PARTS | DKV_GRADIENT_PARTS)

typedef struct dkv_prediction {
    dkv_outputs out;   /* packed */
    dkv_damage damage; /* to memory */
} dkv_prediction;

typedef struct dkv_guess {
    char family[16], name[96], doc[300];
    int32_t mask;       /* tensors that it speaks of: bits 1 << dkv_tensor_id; the others are clean */
    int32_t parameters; /* numbers fitted */
    double value[4];
    double left[DKV_PARTS];      /* of a wrong tensor: the part unexplained; of a right one: 0, up to 1 if put
                                    wrong */
    double fine[DKV_N_OUTPUTS];  /* the same in logarithms, which tell apart what is alike at the bound */
    double key, share;           /* key: what the ranking goes by, the smaller the better */
    bool exact;                  /* all bits as predicted */
    bool moves;                  /* it predicts anything but the clean result */
    int order;                   /* in which it was made */
    double *kept[DKV_N_OUTPUTS]; /* the prediction; NULL where it is the clean one, or was not kept */
    bool whole;                  /* it was kept */
    dkv_damage damage;
    uint64_t hash; /* of all bits predicted */
} dkv_guess;

struct dkv_emulator;
struct dkv_model;

typedef struct dkv_inquiry {
    const dkv_explain_in *in;
    int64_t n[DKV_N_OUTPUTS];     /* elements; 0: not given */
    double *clean[DKV_N_OUTPUTS]; /* what the emulated kernel prints; gradients: from the kernel's own O and
                                     LSE */
    double *noise[DKV_N_OUTPUTS]; /* what the bound allows, by element; INFINITY: nothing is claimed */
    double *sigma[DKV_N_OUTPUTS];
    bool catalogue; /* the emulated kernel is fast enough on this problem to try all faults */
    bool gross;
    bool any_finite; /* some wrong element is a number */
    bool exactlike;  /* most bits are those of the emulated kernel */
    bool wrong[DKV_PARTS];
    int n_wrong;
    double whole[DKV_N_OUTPUTS],
        whole_fine[DKV_N_OUTPUTS]; /* what there is to explain: counts as explain.h says; logs */
    int64_t bad[DKV_N_OUTPUTS];    /* wrong elements */
    double bits[DKV_N_OUTPUTS];    /* information in them */
    dkv_guess *guess;
    int n_guesses, room, n_made;
    int64_t kept_bytes;
    struct dkv_emulator *emu;
    struct dkv_model *model; /* NULL: too large */
    dkv_prediction work;     /* scratch */
    char coverage[2][520];   /* what probes say of the keys that forward and backward count; "" */
    double start, seconds;
} dkv_inquiry;

/* explain_score.c */
int dkv_openInquiry(dkv_inquiry *q, const dkv_explain_in *in, dkv_err *err);
void dkv_closeInquiry(dkv_inquiry *q);
/* Finds what is wrong, once `clean` is there. */
int dkv_weighErrors(dkv_inquiry *q, dkv_err *err);
/* Scores a prediction and adds it to the guesses. `doc`: what the kernel does, as a clause. */
dkv_guess *dkv_addGuess(dkv_inquiry *q, const char *family, const char *name, const char *doc, int32_t mask,
                        const dkv_prediction *p);
void dkv_dropGuess(dkv_inquiry *q); /* the last one */
bool dkv_isExcluded(const dkv_inquiry *q, const char *name);
double dkv_inquirySeconds(const dkv_inquiry *q); /* since it was opened */
bool dkv_outOfTime(const dkv_inquiry *q);
/* Can the two not be told apart on this line? */
bool dkv_sameGuess(const dkv_inquiry *q, const dkv_guess *a, const dkv_guess *b);
static inline double dkv_guessAt(const dkv_inquiry *q, const dkv_guess *g, int id, int64_t i) {
    return g->kept[id] ? g->kept[id][i] : q->clean[id][i];
}

/* hypothes_emu.c */
int dkv_openEmulator(dkv_inquiry *q, dkv_err *err);
void dkv_closeEmulator(dkv_inquiry *q);
/* Further options ("fault=D1"; "" for none) after those of the kernel. own: backward starts from the kernel's
 * O and LSE. DKV_REFUSED: that combination is refused. */
#define DKV_REFUSED (-77)
int dkv_emulate(dkv_inquiry *q, const char *options, const dkv_inputs *in, bool own, dkv_prediction *out,
                dkv_err *err);
/* rows: of the query tile; 0: the emulated kernel's own. */
int dkv_guessFaults(dkv_inquiry *q, int rows, dkv_err *err);
int dkv_guessRoundings(dkv_inquiry *q, dkv_err *err);

/* hypothes_model.c, hypothes_edits.c */
int dkv_openModel(dkv_inquiry *q, dkv_err *err); /* leaves q->model NULL where the problem is too large */
void dkv_closeModel(dkv_inquiry *q);
int dkv_guessEdits(dkv_inquiry *q, dkv_err *err);

/* explain_probe.c */
int dkv_guessKeys(dkv_inquiry *q, dkv_err *err);
/* Where there is no model: what a few rows see, for the evidence. */
int dkv_sampleKeys(dkv_inquiry *q, dkv_err *err);

/* hypothes_fit.c */
int dkv_guessFactors(dkv_inquiry *q, dkv_err *err);
int dkv_guessPlaces(dkv_inquiry *q, dkv_err *err);
int dkv_guessSums(dkv_inquiry *q, dkv_err *err);

#endif
