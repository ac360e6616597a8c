#include "report_classes.h"

#include <string.h>

#include "report_gather.h"

static const char *const dims[DKV_GATHER_DIMS] = {"1–32", "33–64", "65–128", "129–256", "Dqk ≠ Dv"};
static const char *const edges[DKV_GATHER_EDGES] = {
    "plain sequence",    "prompt + responses", "tree",            "limited or key-only context",
    "several groups",    "empty segment",      "one-token segment", "beside a 64-token edge"};
static const char *const features[DKV_GATHER_FEATURES] = {
    "gradients",    "a gradient through LSE", "softcap",       "ALiBi",        "a sink logit",  "a scale of its own",
    "GQA",          "fused layout",           "padded layout", "strided layout", "run twice", "another case between",
    "a side stream", "a CUDA graph",          "a busy device", "recorded activations", "1024 tokens or more in a row's sight"};

const char *dkv_gatherDim(int i) { return i < DKV_GATHER_DIMS ? dims[i] : NULL; }
const char *dkv_gatherEdge(int i) { return i < DKV_GATHER_EDGES ? edges[i] : NULL; }
const char *dkv_gatherFeature(int i) { return i < DKV_GATHER_FEATURES ? features[i] : NULL; }

int dkv_classOfDim(const dkv_problem *p) {
    if (p->dqk != p->dv) return 4;
    return p->dqk <= 32 ? 0 : p->dqk <= 64 ? 1 : p->dqk <= 128 ? 2 : 3;
}

static bool besideEdge(int64_t n) { return n >= 63 && (n % 64 == 0 || n % 64 == 1 || n % 64 == 63); }

unsigned dkv_edgesOf(const dkv_problem *p) {
    bool children = false, tree = false, limited = false, empty = false, one = false, beside = false;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        const dkv_node *n = &p->nodes[i];
        children |= n->depth > 0;
        tree |= n->depth > 1;
        if (n->parent >= 0) limited |= n->context < p->nodes[n->parent].context + p->nodes[n->parent].len;
        limited |= n->key_only;
        empty |= n->len == 0;
        one |= n->len == 1;
        beside |= besideEdge(n->len) || besideEdge(n->context) || besideEdge(n->context + n->len);
    }
    return (unsigned)!children | (unsigned)children << 1 | (unsigned)tree << 2 | (unsigned)limited << 3 |
           (unsigned)(p->n_groups > 1) << 4 | (unsigned)empty << 5 | (unsigned)one << 6 | (unsigned)beside << 7;
}

unsigned dkv_featuresOf(const dkv_problem *p) {
    bool longest = false;
    for (int32_t i = 0; i < p->n_nodes; i++) longest |= p->nodes[i].context + p->nodes[i].len >= 1024;
    bool has[DKV_GATHER_FEATURES] = {
        p->grad, p->dlse, p->softcap != 0, p->alibi, p->sink, p->scale_given, p->hq != p->hkv,
        p->layout == DKV_FUSED, p->layout == DKV_PADDED, p->layout == DKV_STRIDED, p->run == DKV_TWICE,
        p->run == DKV_ABA, p->run == DKV_SIDE, p->run == DKV_GRAPH, p->run == DKV_BUSY,
        strncmp(p->fill, "recorded", 8) == 0 || strncmp(p->fill, "file:", 5) == 0, longest};
    unsigned bits = 0;
    for (int i = 0; i < DKV_GATHER_FEATURES; i++) bits |= (unsigned)has[i] << i;
    return bits;
}

/* Dense rates of the datasheets: 16 bit by tensor cores, fp32 by the others. */
static const dkv_card cards[] = {
    {"H200", 989.4e12, 66.9e12, 4.8e12},
    {"H100 PCIe", 756e12, 51e12, 2.0e12},
    {"H100", 989.4e12, 66.9e12, 3.35e12},
    {"A100-SXM4-80GB", 312e12, 19.5e12, 2.039e12},
    {"A100", 312e12, 19.5e12, 1.555e12},
};

const dkv_card *dkv_findCard(const char *device) {
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++)
        if (strstr(device, cards[i].name)) return &cards[i];
    return NULL;
}

double dkv_leastBytes(const dkv_problem *p, bool backward) {
    double size = p->dtype == DUALKV_FP32 ? 4 : 2, q = (double)dkv_countQueries(p) * p->hq,
           k = (double)dkv_countKeys(p) * p->hkv, dqk = p->dqk, dv = p->dv;
    double forward = size * (q * (dqk + dv) + k * (dqk + dv)) + 4 * q; /* Q, O, K, V; LSE */
    /* also dO and dQ, dK and dV */
    return backward ? forward + size * (q * (dqk + dv) + k * (dqk + dv)) : forward;
}
