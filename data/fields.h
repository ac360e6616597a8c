/* Fields of a record (a JSON object, data from outside): what is missing or of another kind reads as nothing.
 * Numbers that JSON cannot hold stand as the strings "inf", "-inf" and "nan" (verify/record.h). */
#ifndef DKV_FIELDS_H
#define DKV_FIELDS_H

#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>

/* The text of field `key`, "" where there is none. Lives as long as `o`. */
static inline const char *dkv_textOf(const cJSON *o, const char *key) {
    const char *s = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(o, key));
    return s ? s : "";
}

/* The number of field `key`, `otherwise` where the field is neither number nor string; any string but the three is NaN. */
static inline double dkv_numberOf(const cJSON *o, const char *key, double otherwise) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, key);
    if (cJSON_IsNumber(x)) return x->valuedouble;
    const char *s = cJSON_GetStringValue(x);
    if (!s) return otherwise;
    return strcmp(s, "inf") == 0 ? INFINITY : strcmp(s, "-inf") == 0 ? -INFINITY : NAN;
}

/* Adds it as dkv_numberOf reads it. */
static inline void dkv_addNumber(cJSON *o, const char *key, double x) {
    if (isfinite(x)) cJSON_AddNumberToObject(o, key, x);
    else cJSON_AddStringToObject(o, key, isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

#endif
