/* report_map.h: maps of where the errors of a case lie (verify/errmap.h says what they show), read from its record and drawn
 * with the edges of segments. */
#ifndef DKV_REPORT_MAP_H
#define DKV_REPORT_MAP_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum { DKV_PICTURE_SIDE = 40, DKV_PICTURES = 8 };

typedef struct dkv_picture_axis {
    double tile;                     /* tokens or heads of a cell */
    int first, n, total;             /* segments (0: heads); cells of all */
    uint8_t cells[DKV_PICTURE_SIDE]; /* of each segment */
} dkv_picture_axis;

typedef struct dkv_picture {
    char name[32]; /* tensor, or "weights_forward", "weights_backward" */
    dkv_picture_axis rows, columns;
    int8_t level[DKV_PICTURE_SIDE * DKV_PICTURE_SIDE]; /* -1 nothing, 0..51 at most 10^((level - 15) / 8), 52 not finite */
} dkv_picture;

struct cJSON;
/* All maps of a record, at most DKV_PICTURES, malloc'ed; *n of them. What is no map is passed over. -1: out of memory. */
int dkv_readPictures(const struct cJSON *record, dkv_picture **out, int *n);
/* What the drawings show, and their colours. */
void dkv_writeMapKey(FILE *f);
/* `line`: the case's. Drawings, each with a sentence that says the same. */
void dkv_drawPictures(const dkv_picture *list, int n, const char *line, FILE *f);

#endif
