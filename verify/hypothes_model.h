/* hypothes_model.h: attention in double precision on small problems, with one decision taken wrongly. Dense:
 * all queries against all keys. Backward is conditioned on the kernel's own O and LSE. */
#ifndef DKV_HYPOTHES_MODEL_H
#define DKV_HYPOTHES_MODEL_H

#include "hypothes.h"

typedef enum dkv_edit_rows { DKV_ROWS_ALL, DKV_ROWS_PROMPT, DKV_ROWS_RESPONSE } dkv_edit_rows;

/* Which keys a row sees. */
typedef enum dkv_edit_keys {
    DKV_KEYS_RIGHT,
    DKV_KEYS_SHIFT,           /* as a row `by` positions later would */
    DKV_KEYS_WINDOW,          /* window wider by `by` */
    DKV_KEYS_SINKS,           /* `by` more of the window's sinks; -1000: none */
    DKV_KEYS_MASK,            /* another mask: `by` */
    DKV_KEYS_FIRST,           /* the first key of all is lost */
    DKV_KEYS_PREFIX_END,      /* the last key of each ancestor is lost */
    DKV_KEYS_OWN_FIRST,       /* the first own key is lost */
    DKV_KEYS_NO_PREFIX,       /* no ancestors */
    DKV_KEYS_NO_OWN,          /* ancestors only */
    DKV_KEYS_PARENT,          /* no ancestors above the parent */
    DKV_KEYS_LOCAL,           /* own keys: the causal limit without the context */
    DKV_KEYS_PREFIX_DIAGONAL, /* ancestors' keys: causal by the row's number */
    DKV_KEYS_SIBLINGS,        /* all earlier segments of the group, too */
    DKV_KEYS_NEIGHBOUR,       /* the segment before, too */
    DKV_KEYS_LATER,           /* all later segments of the group, too */
    DKV_KEYS_UNLIMITED,       /* a context limit is ignored */
    DKV_KEYS_TAIL,            /* a last, partial tile of `by` keys of a range is lost */
    DKV_KEYS_LAST_TILE,       /* the last tile of `by` keys of a range is lost */
    DKV_KEYS_FIRST_TILE,
    DKV_KEYS_BEYOND,     /* rows behind the range up to a whole tile of `by` are seen */
    DKV_KEYS_ONE_BEYOND, /* the row behind an ancestor's last is seen */
    DKV_KEYS_TWICE,      /* ancestors count twice */
    DKV_KEYS_PAIR, /* rows of segment `by` / n_segments do not see the keys of segment `by` % n_segments */
    DKV_KEYS_GIVEN /* as often as m->given says */
} dkv_edit_keys;

typedef struct dkv_edit {
    const char *family, *name, *doc;
    dkv_edit_keys keys;
    int64_t by;
    dkv_edit_rows rows;
    double scale; /* 0: 1 */
    int softcap;  /* 1: none; 2: its derivative is missing */
    int alibi; /* 1: none; 2: slope of h / (Hq/Hkv); 3: signed; 4: distance without the context; 5: slope of
                  the next head */
    int sink;  /* 1: none; 2: twice; 3: scaled */
    int k_heads, v_heads; /* KV head read: 1: h mod Hkv; 2: reversed; 3: the first; 4: the next */
    int lse;   /* 1: base 2; 2: base 2, converted twice; 3: without the maximum; 4: the maximum alone; 5: of
                  scores before the scale */
    int delta; /* 1: none; 2: other sign; 3: head before; 4: head after; 5: row before; 6: row after; 7: twice
                */
    double d_lse; /* added to the coefficient of dLSE: -1 ignored, -2 other sign, 1 twice */
    int base;     /* backward takes LSE for: 1: base 2 where it is natural; 2: the reverse */
    int p_for_ds; /* dS: 1: without P; 2: with P twice */
} dkv_edit;

typedef struct dkv_model {
    const dkv_problem *p;
    const dkv_layout *l;
    int64_t tq, tk;
    double *q, *k, *v, *d_o, *d_lse, *sink; /* decoded; NULL where the problem has none */
    double *raw, *dp;                       /* [hq, tq, tk] q.k and dO.v of pairs within a group */
    int64_t *pos; /* [segments with queries, tk] position for that segment; -1: not of its ranges */
    int32_t *q_segment, *k_segment, *pos_at; /* [tq], [tk], [n_segments] row of pos */
    const double *o, *lse;                   /* the kernel's own, for backward */
    double *w, *s, *g, *slope;               /* [tk] scratch of a row */
    dkv_outputs right, out;                  /* without an edit; of the last edit */
    const float *given;                      /* [hq, tq, tk], or NULL */
} dkv_model;

/* seg, head: only these rows' part of dK, dV, dSink (-1: all). */
void dkv_runModelForward(dkv_model *m, const dkv_edit *e, const dkv_outputs *out);
void dkv_runModelBackward(dkv_model *m, const dkv_edit *e, int32_t seg, int head, const dkv_outputs *out);

/* How often a right row t counts key j: 0 or 1. */
double dkv_modelSees(const dkv_model *m, int64_t t, int64_t j);
/* Runs an edit in the stages where something is wrong and guesses it there. */
int dkv_tryEdit(dkv_inquiry *q, const dkv_edit *e, dkv_err *err);

/* A number in words, where it is near one that has a name ("log2 e", "1/N"); else its digits. */
void dkv_nameFactor(const dkv_problem *p, double c, double tolerance, char *out, size_t n);

#endif
