#include "view.h"

#include <stdlib.h>
#include <string.h>

int dkv_problemOfView(const dualkv_problem *v, dkv_problem *out, dkv_err *err) {
    *out = (dkv_problem){.n_nodes = v->n_segments,
                         .n_groups = v->n_groups,
                         .hq = v->hq,
                         .hkv = v->hkv,
                         .dqk = v->dqk,
                         .dv = v->dv,
                         .dtype = (dualkv_dtype)v->dtype,
                         .mask = (dualkv_mask_kind)v->mask,
                         .window = v->window,
                         .window_sinks = v->window_sinks,
                         .chunk = v->chunk,
                         .block = v->block,
                         .block_density = v->block_density,
                         .block_seed = v->block_seed,
                         .scale = v->scale,
                         .softcap = v->softcap,
                         .scale_given = true,
                         .alibi = v->alibi != 0,
                         .sink = v->sink != 0,
                         .fill = "normal",
                         .seed = 1,
                         .grad = v->grad != 0,
                         .dlse = v->dlse != 0};
    out->nodes = calloc((size_t)v->n_segments + 1, sizeof *out->nodes);
    if (!out->nodes) return dkv_fail(err, DKV_EHARNESS, "out of memory for %d segments", v->n_segments);
    for (int32_t i = 0; i < v->n_segments; i++) {
        const dualkv_segment *s = &v->segments[i];
        out->nodes[i] = (dkv_node){.parent = s->parent,
                                   .group = s->group,
                                   .depth = s->depth,
                                   .key_only = s->q_len == 0 && s->k_len > 0,
                                   .len = s->k_len,
                                   .context = s->context};
    }
    return 0;
}
