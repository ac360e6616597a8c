#include "eligible.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/fields.h"
#include "eligible_keys.h"

enum { LAYERS_MAX = 100000, WINDOW = 1, FULL = 2, CHUNK = 4 };

typedef struct model {
    const cJSON *o;
    const char *inside; /* "text_config." */
    const dkv_scope *scope;
    dkv_eligible *e;
    dkv_err *err;
    double heads, kv_heads, dim, v_dim, tokens, window, chunk, softcap, scale; /* 0: none */
    bool sinks, alibi, all_see, forward;
    const char *dtype;
    int kinds; /* of layers: bits */
} model;

/* ---- what is said ---- */

static int say(model *m, dkv_answer answer, const char *option, const char *value, const char *why) {
    dkv_eligible *e = m->e;
    dkv_said *said = realloc(e->said, (size_t)(e->n + 1) * sizeof *said);
    if (!said) return dkv_fail(m->err, DKV_EHARNESS, "out of memory for a model's options");
    e->said = said;
    dkv_said *s = &said[e->n++];
    *s = (dkv_said){.answer = answer};
    snprintf(s->option, sizeof s->option, "%s%.100s%s%.70s", m->inside, option, value[0] ? "=" : "", value);
    snprintf(s->why, sizeof s->why, "%s", why);
    e->outside += answer == DKV_OUTSIDE;
    e->not_judged += answer == DKV_NOT_JUDGED;
    return 0;
}

static void valueOf(const cJSON *x, char out[80]) {
    if (cJSON_IsNumber(x)) snprintf(out, 80, "%.10g", x->valuedouble);
    else if (cJSON_IsString(x)) snprintf(out, 80, "%.70s", x->valuestring);
    else snprintf(out, 80, "%s", cJSON_IsTrue(x) ? "true" : cJSON_IsFalse(x) ? "false" : cJSON_IsNull(x) ? "null" : cJSON_IsArray(x) ? "[…]" : "{…}");
}

static const cJSON *get(const model *m, const char *key) { return cJSON_GetObjectItemCaseSensitive(m->o, key); }

static bool isTrue(const model *m, const char *key) { return cJSON_IsTrue(get(m, key)); }

/* The first of the keys that is there and not null, as a number; *found: which. DKV_EUSER: something else, or negative. */
static int takeNumber(model *m, const char *const *keys, double *x, const char **found) {
    for (; *keys; keys++) {
        const cJSON *v = get(m, *keys);
        if (!v || cJSON_IsNull(v)) continue;
        if (!cJSON_IsNumber(v) || v->valuedouble < 0 || v->valuedouble > 1e12)
            return dkv_fail(m->err, DKV_EUSER, "%s%s is no number from 0 to 1e12", m->inside, *keys);
        *x = v->valuedouble;
        if (found) *found = *keys;
        return 0;
    }
    return 0;
}

static int takeWhole(model *m, const char *const *keys, double *x) {
    const char *found = NULL;
    int rc = takeNumber(m, keys, x, &found);
    return !rc && found && *x != floor(*x) ? dkv_fail(m->err, DKV_EUSER, "%s%s is no whole number", m->inside, found) : rc;
}

#define KEYS(...) (const char *const[]){__VA_ARGS__, NULL}

/* ---- options ---- */

static int takeShape(model *m) {
    double hidden = 0, nope = 0, rope = 0;
    int rc = takeWhole(m, KEYS("num_attention_heads", "n_head", "n_heads", "num_heads"), &m->heads);
    if (!rc) rc = takeWhole(m, KEYS("num_key_value_heads", "num_kv_heads", "n_head_kv"), &m->kv_heads);
    if (!rc) rc = takeWhole(m, KEYS("head_dim"), &m->dim);
    if (!rc) rc = takeWhole(m, KEYS("hidden_size", "n_embd", "d_model"), &hidden);
    if (!rc) rc = takeWhole(m, KEYS("qk_nope_head_dim"), &nope);
    if (!rc) rc = takeWhole(m, KEYS("qk_rope_head_dim"), &rope);
    if (!rc) rc = takeWhole(m, KEYS("v_head_dim"), &m->v_dim);
    if (rc) return rc;
    if (m->heads < 1) return 0; /* no attention at all, perhaps: said by the caller */
    if (isTrue(m, "multi_query")) m->kv_heads = 1;
    if (m->kv_heads < 1) m->kv_heads = m->heads;
    if (nope + rope > 0 && get(m, "kv_lora_rank")) { /* latent attention, as it is trained: K and V expanded for each head */
        m->dim = nope + rope;
        m->kv_heads = m->heads;
        rc = say(m, DKV_NOT_JUDGED, "kv_lora_rank", "", "latent attention: judged as it is trained, with keys and values expanded for each "
                                                        "head; the absorbed form that decoding uses is another problem");
    } else if (get(m, "kv_lora_rank") && !cJSON_IsNull(get(m, "kv_lora_rank")))
        rc = say(m, DKV_NOT_JUDGED, "kv_lora_rank", "", "latent attention without qk_nope_head_dim and qk_rope_head_dim: its heads are not known");
    if (m->dim < 1) m->dim = floor(hidden / m->heads);
    if (m->v_dim < 1 || !get(m, "kv_lora_rank")) m->v_dim = m->dim;
    if (!rc && (m->dim < 1 || fmod(m->heads, m->kv_heads) != 0))
        rc = dkv_fail(m->err, DKV_EUSER, "%s%s", m->inside, m->dim < 1 ? "head_dim: neither there nor to be had from hidden_size"
                                                                       : "num_key_value_heads does not divide num_attention_heads");
    return rc;
}

static int takeDropout(model *m) {
    static const char *const keys[] = {"attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout", "attention_dropout_prob"};
    int rc = 0;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !rc; i++) {
        char value[80];
        double x = 0;
        const char *found = NULL;
        rc = takeNumber(m, KEYS(keys[i]), &x, &found);
        if (rc || !found) continue;
        snprintf(value, sizeof value, "%.10g", x);
        rc = x > 0 ? say(m, DKV_OUTSIDE, found, value, "dropout: a random mask is no attention that was judged; set it to 0")
                   : say(m, DKV_INSIDE, found, value, "no dropout");
    }
    return rc;
}

static int takeScale(model *m) {
    double x = 0, factor = 0, all = 0;
    const char *found = NULL;
    int rc = takeNumber(m, KEYS("query_pre_attn_scalar"), &x, &found);
    if (!rc && found && x > 0) m->scale = 1 / sqrt(x);
    if (!rc && !found) rc = takeNumber(m, KEYS("attention_multiplier", "attn_scale"), &m->scale, &found);
    if (!rc && cJSON_IsFalse(get(m, "scale_attn_weights"))) m->scale = 1;
    model inner = *m; /* YaRN as DeepSeek has it: the score's scale grows with the factor */
    inner.o = get(m, "rope_scaling");
    inner.inside = "rope_scaling.";
    if (!rc && cJSON_IsObject(inner.o)) rc = takeNumber(&inner, KEYS("mscale_all_dim"), &all, NULL);
    if (!rc && all > 0) rc = takeNumber(&inner, KEYS("factor"), &factor, NULL);
    if (!rc && all > 0 && factor > 1) {
        double mscale = 0.1 * all * log(factor) + 1;
        m->scale = (m->scale > 0 ? m->scale : 1 / sqrt(m->dim)) * mscale * mscale;
    }
    if (m->scale > 0 && fabs(m->scale * sqrt(m->dim) - 1) < 1e-6) m->scale = 0; /* the usual one */
    return rc;
}

static bool isAny(const char *word, const char *const *list, size_t n) {
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(list[i]), have = strlen(word);
        if (list[i][0] == '*' ? have >= len - 1 && strcmp(word + have - (len - 1), list[i] + 1) == 0
            : list[i][len - 1] == '*' ? strncmp(word, list[i], len - 1) == 0 : strcmp(word, list[i]) == 0)
            return true;
    }
    return false;
}
#define IS_ANY(word, list) isAny(word, list, sizeof list / sizeof *list)

/* One layer's kind by its name; *said: kinds of which something was said already. */
static int takeLayer(model *m, const char *key, const char *name, int *said) {
    static const struct {
        const char *word;
        int kind;
    } kinds[] = {{"full", FULL}, {"sliding", WINDOW}, {"chunked", CHUNK}};
    bool recurrent = strstr(name, "linear") || strstr(name, "recurrent") || strstr(name, "mamba") || strstr(name, "conv") ||
                     strstr(name, "ssm") || strstr(name, "rwkv") || strstr(name, "delta") || strstr(name, "lightning");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strstr(name, kinds[i].word) && !recurrent) {
            m->kinds |= kinds[i].kind;
            return 0;
        }
    if (strcmp(name, "attention") == 0 || strcmp(name, "global") == 0) {
        m->kinds |= FULL;
        return 0;
    }
    if (*said & (recurrent ? 1 : 2)) return 0;
    *said |= recurrent ? 1 : 2;
    return recurrent ? say(m, DKV_OUTSIDE, key, name, "a recurrent layer: its state runs through all tokens before, across prompt and responses; "
                                                      "sharing a prompt is not exact for it, and nothing here judges it")
                     : say(m, DKV_NOT_JUDGED, key, name, "a kind of layer that is not known here");
}

static int takeLayers(model *m) {
    static const char *const keys[] = {"layer_types", "layers_block_type", "block_types", "_block_types"};
    int rc = 0, said = 0;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !rc; i++) {
        const cJSON *x, *list = get(m, keys[i]);
        long n = 0;
        if (!list || cJSON_IsNull(list)) continue;
        if (!cJSON_IsArray(list)) return dkv_fail(m->err, DKV_EUSER, "%s%s is no list", m->inside, keys[i]);
        cJSON_ArrayForEach(x, list) {
            if (!cJSON_IsString(x) || n++ == LAYERS_MAX)
                return dkv_fail(m->err, DKV_EUSER, "%s%s is no list of at most %d names", m->inside, keys[i], LAYERS_MAX);
            if (!rc) rc = takeLayer(m, keys[i], x->valuestring, &said);
        }
    }
    return rc;
}

static int takeMasks(model *m) {
    char value[80];
    const char *type = dkv_textOf(m->o, "model_type");
    int rc = takeLayers(m);
    if (!rc) rc = takeWhole(m, KEYS("sliding_window"), &m->window);
    if (!rc) rc = takeWhole(m, KEYS("attention_chunk_size"), &m->chunk);
    if (rc) return rc;
    valueOf(get(m, "sliding_window"), value);
    if (m->window > 0 && cJSON_IsFalse(get(m, "use_sliding_window"))) {
        m->window = 0;
        rc = say(m, DKV_INSIDE, "sliding_window", value, "not used: use_sliding_window is false");
    }
    bool listed = m->kinds != 0;
    if (!listed && m->window > 0) { /* every layer, unless something says that some are not */
        bool some = get(m, "sliding_window_pattern") || get(m, "_sliding_window_pattern") || get(m, "max_window_layers") ||
                    strcmp(type, "gemma2") == 0 || strncmp(type, "gemma3", 6) == 0 || strcmp(type, "cohere2") == 0 || strcmp(type, "gpt_oss") == 0;
        m->kinds = WINDOW | (some ? FULL : 0);
    }
    if (!listed && m->chunk > 0) m->kinds |= CHUNK | FULL;
    if (m->kinds & WINDOW && m->window <= 0) {
        if (!rc && !cJSON_IsFalse(get(m, "use_sliding_window")))
            rc = say(m, DKV_NOT_JUDGED, "layer_types", "sliding_attention", "sliding layers without a sliding_window");
        m->kinds &= ~WINDOW;
    }
    if (m->kinds & CHUNK && m->chunk <= 0) {
        if (!rc) rc = say(m, DKV_NOT_JUDGED, "layer_types", "chunked_attention", "chunked layers without an attention_chunk_size");
        m->kinds &= ~CHUNK;
    }
    if (!m->kinds) m->kinds = FULL;
    m->all_see = cJSON_IsFalse(get(m, "is_causal")) || isTrue(m, "use_bidirectional_attention");
    for (int i = 0; i < 2 && !rc; i++) {
        const char *key = i ? "is_encoder_decoder" : "add_cross_attention";
        if (isTrue(m, key)) rc = say(m, DKV_OUTSIDE, key, "true", "attention to another sequence was not judged");
    }
    return rc;
}

static int takeModifiers(model *m) {
    const char *type = dkv_textOf(m->o, "model_type"), *place = dkv_textOf(m->o, "position_embedding_type");
    static const char *const sinks[] = {"sinks", "use_sinks", "attention_sinks", "use_attention_sinks"};
    int rc = takeNumber(m, KEYS("attn_logit_softcapping", "attn_logit_softcap"), &m->softcap, NULL);
    m->alibi = isTrue(m, "alibi") || isTrue(m, "use_alibi") || strcmp(type, "bloom") == 0 || strcmp(place, "alibi") == 0;
    m->sinks = strcmp(type, "gpt_oss") == 0;
    for (size_t i = 0; i < sizeof sinks / sizeof *sinks; i++) m->sinks |= isTrue(m, sinks[i]);
    if (!rc && strncmp(place, "relative", 8) == 0)
        rc = say(m, DKV_OUTSIDE, "position_embedding_type", place, "a learned bias of distances on the scores was not judged");
    double chosen = 0;
    if (!rc) rc = takeNumber(m, KEYS("index_topk"), &chosen, NULL);
    if (!rc && chosen > 0) rc = say(m, DKV_OUTSIDE, "index_topk", "", "each row sees only keys that an indexer chooses: no mask that was judged");
    return rc;
}

static int takeType(model *m) {
    static const struct {
        const char *word, *dtype;
    } types[] = {{"bfloat16", "bf16"}, {"float16", "fp16"}, {"half", "fp16"}, {"float32", "fp32"}, {"float", "fp32"}};
    const char *key = dkv_textOf(m->o, "torch_dtype")[0] ? "torch_dtype" : "dtype", *word = dkv_textOf(m->o, key);
    if (m->dtype && !word[0]) return 0; /* that of the whole model */
    const char *plain = strncmp(word, "torch.", 6) == 0 ? word + 6 : word;
    if (!word[0] || strcmp(word, "auto") == 0) {
        m->dtype = "bf16";
        return say(m, DKV_NOT_JUDGED, key, word, "not given: asked for bf16");
    }
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(plain, types[i].word) == 0) m->dtype = types[i].dtype;
    if (m->dtype) return 0;
    m->dtype = "bf16";
    return say(m, DKV_OUTSIDE, key, word, "no type that was judged (asked on for bf16)");
}

/* Model types and keys that mean layers without attention; of several keys the first is told. */
static int takeRecurrence(model *m) {
    const char *type = dkv_textOf(m->o, "model_type");
    const cJSON *x;
    int rc = 0;
    for (int i = 0; i < m->e->n; i++)
        if (strstr(m->e->said[i].why, "recurrent layer")) return 0;
    if (IS_ANY(type, dkv_recurrent_models))
        return say(m, DKV_OUTSIDE, "model_type", type, "has recurrent layers: their state runs through all tokens before, and nothing here judges it");
    cJSON_ArrayForEach(x, m->o) {
        char value[80];
        bool off = cJSON_IsNull(x) || cJSON_IsFalse(x) || (cJSON_IsNumber(x) && x->valuedouble == 0);
        if (!x->string || off || !IS_ANY(x->string, dkv_recurrent_keys)) continue;
        valueOf(x, value);
        return say(m, DKV_OUTSIDE, x->string, value, "speaks of recurrent or convolutional layers, which nothing here judges");
    }
    return rc;
}

/* What nobody has looked at. */
static int takeRest(model *m) {
    const cJSON *x;
    int rc = 0;
    size_t at = strlen(m->e->other);
    cJSON_ArrayForEach(x, m->o) {
        char value[80];
        bool attention = false;
        if (!x->string || IS_ANY(x->string, dkv_read_keys) || IS_ANY(x->string, dkv_unrelated_keys) || IS_ANY(x->string, dkv_recurrent_keys)) continue;
        if (cJSON_IsNull(x) || cJSON_IsFalse(x)) continue; /* off, whatever it is */
        for (size_t i = 0; i < sizeof dkv_attention_words / sizeof *dkv_attention_words; i++)
            attention |= strcasestr(x->string, dkv_attention_words[i]) != NULL;
        bool towers = cJSON_IsObject(x) && strstr(x->string, "config");
        valueOf(x, value);
        if (towers && !rc) rc = say(m, DKV_NOT_JUDGED, x->string, "", "another part of the model: its attention is not looked at");
        else if (attention && !rc) rc = say(m, DKV_NOT_JUDGED, x->string, value, "may speak of attention, and is not known here");
        else if (!rc && at < sizeof m->e->other - 80) at += (size_t)snprintf(m->e->other + at, sizeof m->e->other - at, "%s%.60s", at ? ", " : "", x->string);
    }
    return rc;
}

/* ---- asking ---- */

/* The option of a configuration that a feature or size comes from. */
static const char *optionOf(const char *key) {
    static const char *const names[][2] = {{"mask", "kind of attention"}, {"dtype", "torch_dtype"}, {"dim", "head_dim"},
                                           {"gqa", "query heads for each key head"}, {"scale", "scale of scores"},
                                           {"softcap", "attn_logit_softcapping"}, {"alibi", "ALiBi"}, {"sinklogit", "attention sinks"},
                                           {"sight", "longest sequence"}, {"heads", "num_attention_heads"}, {"window", "sliding_window"},
                                           {"chunk", "attention_chunk_size"}, {"gradients", "training"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i][0], key) == 0) return names[i][1];
    return key;
}

typedef struct asking {
    model *m;
    const char *kind; /* of layers */
    int rc;
} asking;

static void takeCovered(const dkv_covered *c, void *arg) {
    asking *a = arg;
    char option[160];
    const char *inside = a->m->inside;
    /* A value of a learned sink is not in a configuration; that there is one is a feature. */
    if (strcmp(c->key, "window-first") == 0 || (strcmp(c->key, "sinklogit") == 0 && !strstr(c->what, "=o"))) return;
    snprintf(option, sizeof option, "%s%s%s (%.80s)", optionOf(c->key), c->with ? ", " : "", c->with ? optionOf(c->with) : "", c->what);
    a->m->inside = a->kind;
    if (!a->rc) a->rc = say(a->m, c->inside ? DKV_INSIDE : DKV_OUTSIDE, option, "", c->why);
    a->m->inside = inside;
}

/* Attention of one kind of layers, as a problem of one sequence. */
static int askKind(model *m, int kind) {
    static const char *const names[] = {"", "sliding layers: ", "full layers: ", "", "chunked layers: "};
    char line[256], dim[40], mask[48] = "", more[120] = "";
    dkv_problem p = {0};
    dkv_err why = {0};
    asking a = {.m = m, .kind = m->kinds == kind ? "" : names[kind]};
    size_t at = 0;
    if (kind == WINDOW) snprintf(mask, sizeof mask, " mask=window:%.0f", m->window);
    else if (kind == CHUNK) snprintf(mask, sizeof mask, " mask=chunk:%.0f", m->chunk);
    else if (m->all_see) strcpy(mask, " mask=full");
    snprintf(dim, sizeof dim, m->dim == m->v_dim ? "%.0f" : "%.0f:%.0f", m->dim, m->v_dim);
    if (m->scale > 0) at += (size_t)snprintf(more + at, sizeof more - at, " scale=%.9g", m->scale);
    if (m->softcap > 0) at += (size_t)snprintf(more + at, sizeof more - at, " softcap=%.9g", m->softcap);
    snprintf(more + at, sizeof more - at, "%s%s%s", m->alibi ? " alibi=on" : "", m->sinks ? " sinklogit=0" : "", m->forward ? " grad=off" : "");
    snprintf(line, sizeof line, "shape=%.0f heads=%.0f:%.0f dim=%s dtype=%s%s%s", m->tokens, m->heads, m->kv_heads, dim, m->dtype, mask, more);
    if (m->e->n_lines < 4) strcpy(m->e->lines[m->e->n_lines++], line);
    if (dkv_parseProblem(line, NULL, &p, &why)) return say(m, DKV_OUTSIDE, line, "", why.text);
    if (m->all_see && kind == WINDOW)
        a.rc = say(m, DKV_OUTSIDE, "use_bidirectional_attention", "", "a window to both sides was not judged (asked on for a causal one)");
    dkv_askScope(m->scope, &p, true, takeCovered, &a);
    dkv_freeProblem(&p);
    return a.rc;
}

/* The part of the configuration that speaks of text. */
static const cJSON *findText(const cJSON *o, const char **inside) {
    static const char *const names[][2] = {{"text_config", "text_config."}, {"llm_config", "llm_config."}, {"language_config", "language_config."}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, names[i][0]);
        if (!cJSON_IsObject(x)) continue;
        *inside = names[i][1];
        return x;
    }
    return NULL;
}

/* What can only be read one way, and was meant another, perhaps. */
static int takeKind(model *m) {
    const char *own = dkv_textOf(m->o, "model_type"), *type = own[0] || !m->inside[0] ? own : m->e->model; /* else the whole's */
    int rc = 0;
    for (size_t i = 0; i < sizeof dkv_flag_keys / sizeof *dkv_flag_keys && !rc; i++) {
        const cJSON *x = get(m, dkv_flag_keys[i]);
        char value[80];
        if (!x || cJSON_IsNull(x) || cJSON_IsBool(x)) continue;
        valueOf(x, value);
        rc = say(m, DKV_NOT_JUDGED, dkv_flag_keys[i], value, "neither true nor false");
    }
    if (rc || IS_ANY(type, dkv_causal_models) || IS_ANY(type, dkv_recurrent_models)) return rc;
    return say(m, DKV_NOT_JUDGED, "model_type", type, type[0] ? "a kind of model that is not known here (asked as one whose rows see what is before them)"
                                                              : "not given (asked as one whose rows see what is before them)");
}

static int readOptions(model *m) {
    int rc = takeShape(m);
    if (!rc) rc = takeKind(m);
    if (!rc) rc = takeType(m);
    if (!rc) rc = takeDropout(m);
    if (!rc) rc = takeScale(m);
    if (!rc) rc = takeMasks(m);
    if (!rc) rc = takeModifiers(m);
    if (!rc) rc = takeRecurrence(m);
    return rc ? rc : takeRest(m);
}

int dkv_readModel(const cJSON *config, const dkv_scope *scope, int64_t tokens, bool forward, dkv_eligible *e, dkv_err *err) {
    memset(e, 0, sizeof *e);
    model m = {.o = config, .inside = "", .scope = scope, .e = e, .err = err, .forward = forward};
    const char *inside = "";
    const cJSON *text = findText(config, &inside);
    int rc = 0;
    snprintf(e->model, sizeof e->model, "%.60s", dkv_textOf(config, "model_type")[0] ? dkv_textOf(config, "model_type") : "a model of no name");
    if (text) {
        const cJSON *x, *type = cJSON_GetObjectItemCaseSensitive(text, "torch_dtype") ? NULL : cJSON_GetObjectItemCaseSensitive(config, "torch_dtype");
        cJSON_ArrayForEach(x, config) {
            bool tower = cJSON_IsObject(x) && x != text && x->string && strstr(x->string, "config") && strcmp(x->string, "quantization_config") != 0;
            if (tower && !rc) rc = say(&m, DKV_NOT_JUDGED, x->string, "", "another part of the model: its attention is not looked at");
        }
        m.o = text;
        m.inside = inside;
        if (cJSON_IsString(type) && !dkv_textOf(text, "dtype")[0]) m.dtype = strstr(type->valuestring, "bfloat16") ? "bf16" : strstr(type->valuestring, "float16") ? "fp16" : NULL;
    }
    if (!rc) rc = readOptions(&m);
    if (!rc) rc = takeWhole(&m, KEYS("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"), &m.tokens);
    if (rc) return rc;
    if (m.heads < 1)
        return e->outside ? 0 : dkv_fail(err, DKV_EUSER, "%snum_attention_heads is not there: not a configuration with attention", m.inside);
    if (tokens > 0) m.tokens = (double)tokens;
    if (m.tokens < 1) {
        m.tokens = 1;
        rc = say(&m, DKV_NOT_JUDGED, "max_position_embeddings", "", "not there: how long sequences are is not known (--tokens says it)");
    }
    for (int kind = WINDOW; kind <= CHUNK && !rc; kind *= 2)
        if (m.kinds & kind) rc = askKind(&m, kind);
    return rc;
}

void dkv_freeEligible(dkv_eligible *e) {
    free(e->said);
    memset(e, 0, sizeof *e);
}
