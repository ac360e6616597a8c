/* report_survey.h: tables over sets of records that are held whole: per kernel and set what was judged, refused and said, errors,
 * gains, repeats. Text from records is escaped. Numbers: err/bound (1: all that rounding explains); rms z of the residual to the twin
 * (1: as the declared roundings predict), the gain beyond the twin and how large it may be, and the gain against the truth. */
#ifndef DKV_REPORT_SURVEY_H
#define DKV_REPORT_SURVEY_H

#include <cjson/cJSON.h>
#include <stdio.h>

#include "../ref/dkv_err.h"
#include "../ref/tensors.h"
#include "../verify/status.h"

typedef struct dkv_survey_case {
    cJSON *record; /* owned */
    int set;
    dkv_status status;
    int64_t tokens;
    char kernel[120]; /* its file's name without folders */
    char held[80];    /* what --arithmetic held it to, "" where nothing */
    char fill[64];
    int repeated; /* 0: run once, 1: again with the same bits, 2: with others */
} dkv_survey_case;

typedef struct dkv_survey {
    char **sets; /* names, owned */
    dkv_survey_case *cases;
    long n, room;
    int n_sets;
} dkv_survey;

/* Takes a record of check into the set `name`. DKV_EUSER: not one. */
int dkv_surveyRecord(dkv_survey *s, const char *name, const char *json, dkv_err *err);
void dkv_freeSurvey(dkv_survey *s);

/* `sets`: bit i for set i. */
typedef void (*dkv_survey_table)(const dkv_survey *s, uint64_t sets, FILE *f);
dkv_survey_table dkv_findSurveyTable(const char *name); /* NULL: none is called so */

/* One case as an item of a list, with its replay command. `words`: must stand in that (NULL: anything). The last that fits is told.
 * DKV_EUSER: there is none. */
int dkv_surveyCase(const dkv_survey *s, int set, const char *kernel, const char *words, const char *line, FILE *f,
                   dkv_err *err);

#endif
