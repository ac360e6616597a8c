/* Configurations of public models, cut to what speaks of attention, against a scope that was made for some of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eligible.h"

static dkv_scope *scope;

static const char *const judged[] = {
    "shape=1 heads=1:1", "shape=1 heads=1:1 mask=window:1", "shape=1 heads=1:1 mask=chunk:1", /* hulls begin at 1 */
    "shape=8192+2x16 heads=32:8 dim=128", "shape=8192+2x16 heads=32:8 dim=128 mask=window:4096",
    "shape=8192 heads=8:4 dim=256 softcap=50", "shape=8192 heads=8:4 dim=256 softcap=50 mask=window:4096",
    "shape=8192 heads=8:4 dim=256", "shape=8192 heads=8:4 dim=256 mask=window:1024",
    "shape=8192 heads=64:8 dim=64 sinklogit=1", "shape=8192 heads=64:8 dim=64 sinklogit=1 mask=window:128",
    "shape=8192 heads=128:128 dim=192:128 scale=0.14", "shape=8192 heads=8:8 dim=192:128 scale=0.13", "shape=8192 heads=16:8 dim=128",
    "shape=8192 heads=40:8 dim=128 mask=chunk:8192", "shape=8192 heads=40:8 dim=128"};

static int makeScope(void **state) {
    (void)state;
    scope = calloc(1, sizeof *scope);
    for (size_t i = 0; i < sizeof judged / sizeof *judged; i++) {
        dkv_problem p = {0};
        dkv_err err = {0};
        if (dkv_parseProblem(judged[i], NULL, &p, &err) || dkv_addToScope(scope, &p)) return -1;
        dkv_freeProblem(&p);
    }
    return 0;
}

static int freeScope(void **state) {
    (void)state;
    free(scope);
    return 0;
}

#define COMMON "\"architectures\":[\"X\"],\"vocab_size\":1000,\"rms_norm_eps\":1e-5,\"rope_theta\":1e4,\"torch_dtype\":\"bfloat16\","
#define LLAMA COMMON "\"model_type\":\"llama\",\"hidden_size\":4096,\"num_attention_heads\":32,\"num_key_value_heads\":8,"

static const struct {
    const char *config;
    int outside, not_judged; /* -1: any, more than none */
    const char *says;
} models[] = {
    /* Llama 3: everything inside; a longer context; no type given */
    {"{" LLAMA "\"attention_dropout\":0.0,\"attention_bias\":false,\"max_position_embeddings\":8192}", 0, 0, "attention_dropout=0: no dropout"},
    {"{" LLAMA "\"max_position_embeddings\":131072}", 1, 0, "longest sequence (sight=131072): judged from 1 to 8208 only"},
    {"{" LLAMA "\"attention_dropout\":0.1,\"max_position_embeddings\":8192}", 1, 0, "attention_dropout=0.1: dropout"},
    {"{" LLAMA "\"head_dim\":64,\"max_position_embeddings\":8192}", 1, 0, "head_dim (gqa=4 with dim=64)"},
    {"{" LLAMA "\"head_dim\":80,\"max_position_embeddings\":8192}", 1, 0, "head_dim (dim=80): never judged"},
    {"{\"model_type\":\"llama\",\"hidden_size\":4096,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"max_position_embeddings\":99}", 0, 1,
     "dtype: not given: asked for bf16"},
    {"{\"model_type\":\"llama\",\"hidden_size\":4096,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"torch_dtype\":\"float16\","
     "\"max_position_embeddings\":99}", -1, 0, "torch_dtype (dtype=fp16): never judged"},
    {"{" LLAMA "\"max_position_embeddings\":8192,\"some_new_attention_trick\":true}", 0, 1, "some_new_attention_trick=true: may speak of attention"},
    {"{" LLAMA "\"max_position_embeddings\":8192,\"some_new_attention_trick\":false,\"other\":7}", 0, 0, ""},
    {"{" LLAMA "\"attention_multiplier\":0.0078125,\"max_position_embeddings\":8192}", -1, 0, "scale of scores"},
    /* Of a kind that is not known; flags that are none; half of what latent attention needs; an encoder and its decoder */
    {"{" COMMON "\"model_type\":\"bert\",\"hidden_size\":4096,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"max_position_embeddings\":8192}",
     0, 1, "model_type=bert: a kind of model that is not known here"},
    {"{" COMMON "\"hidden_size\":4096,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"max_position_embeddings\":8192}", 0, 1, "model_type: not given"},
    {"{" LLAMA "\"alibi\":1,\"max_position_embeddings\":8192}", 0, 1, "alibi=1: neither true nor false"},
    {"{" LLAMA "\"kv_lora_rank\":512,\"max_position_embeddings\":8192}", 0, 1, "its heads are not known"},
    {"{" LLAMA "\"is_encoder_decoder\":true,\"max_position_embeddings\":8192}", 1, 0, "is_encoder_decoder=true: attention to another sequence"},
    /* Qwen 2: a window that is switched off; Qwen 3 by its layers */
    {"{" COMMON "\"model_type\":\"qwen2\",\"hidden_size\":4096,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"sliding_window\":131072,"
     "\"use_sliding_window\":false,\"max_window_layers\":28,\"max_position_embeddings\":8192}", 0, 0, "use_sliding_window is false"},
    {"{" COMMON "\"model_type\":\"qwen3\",\"hidden_size\":1024,\"head_dim\":128,\"num_attention_heads\":16,\"num_key_value_heads\":8,"
     "\"layer_types\":[\"full_attention\",\"full_attention\"],\"sliding_window\":null,\"max_position_embeddings\":8192}", 0, 0, ""},
    /* Mistral, Mixtral, Phi */
    {"{" COMMON "\"model_type\":\"mistral\",\"hidden_size\":4096,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"sliding_window\":4096,"
     "\"max_position_embeddings\":8192}", 0, 0, "kind of attention (mask=window)"},
    {"{" COMMON "\"model_type\":\"mixtral\",\"hidden_size\":4096,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"sliding_window\":null,"
     "\"num_local_experts\":8,\"router_aux_loss_coef\":0.02,\"max_position_embeddings\":8192}", 0, 0, ""},
    {"{" COMMON "\"model_type\":\"phi3\",\"hidden_size\":3072,\"num_attention_heads\":32,\"num_key_value_heads\":32,\"sliding_window\":2047,"
     "\"max_position_embeddings\":4096}", -1, 0, "head_dim (dim=96): never judged"},
    /* Gemma 2: softcap and two kinds of layers; Gemma 3 inside another model */
    {"{" COMMON "\"model_type\":\"gemma2\",\"hidden_size\":2304,\"head_dim\":256,\"num_attention_heads\":8,\"num_key_value_heads\":4,"
     "\"attn_logit_softcapping\":50.0,\"final_logit_softcapping\":30.0,\"query_pre_attn_scalar\":256,\"sliding_window\":4096,"
     "\"max_position_embeddings\":8192}", 0, 0, "sliding layers: attn_logit_softcapping (softcap=on)"},
    {"{" COMMON "\"model_type\":\"gemma2\",\"hidden_size\":2304,\"head_dim\":256,\"num_attention_heads\":8,\"num_key_value_heads\":4,"
     "\"attn_logit_softcapping\":30.0,\"query_pre_attn_scalar\":144,\"sliding_window\":4096,\"max_position_embeddings\":8192}", -1, 0,
     "full layers: scale of scores"},
    {"{\"model_type\":\"gemma3\",\"torch_dtype\":\"bfloat16\",\"text_config\":{\"model_type\":\"gemma3_text\",\"hidden_size\":2560,"
     "\"num_attention_heads\":8,\"num_key_value_heads\":4,\"head_dim\":256,\"sliding_window\":1024,\"sliding_window_pattern\":6,"
     "\"query_pre_attn_scalar\":256,\"max_position_embeddings\":8192},\"vision_config\":{\"num_attention_heads\":16}}", 0, 1, "vision_config"},
    /* gpt-oss: sinks, in both kinds of layers */
    {"{" COMMON "\"model_type\":\"gpt_oss\",\"head_dim\":64,\"hidden_size\":2880,\"layer_types\":[\"sliding_attention\",\"full_attention\"],"
     "\"num_attention_heads\":64,\"num_key_value_heads\":8,\"sliding_window\":128,\"max_position_embeddings\":8192,\"swiglu_limit\":7.0}", 0, 0,
     "full layers: attention sinks (sinklogit=on)"},
    /* DeepSeek V3: latent attention, the scale by YaRN; V3.2: keys that an indexer chooses */
    {"{" COMMON "\"model_type\":\"deepseek_v3\",\"hidden_size\":7168,\"kv_lora_rank\":512,\"q_lora_rank\":1536,\"qk_nope_head_dim\":128,"
     "\"qk_rope_head_dim\":64,\"v_head_dim\":128,\"num_attention_heads\":128,\"num_key_value_heads\":128,\"max_position_embeddings\":8192,"
     "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"mscale\":1.0,\"mscale_all_dim\":1.0}}", 0, 1, "scale=1.87"},
    {"{" COMMON "\"model_type\":\"deepseek_v32\",\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"
     "\"num_attention_heads\":128,\"max_position_embeddings\":8192,\"index_topk\":2048}", -1, 1, "index_topk: each row sees only keys"},
    /* Llama 4: chunks */
    {"{\"model_type\":\"llama4\",\"torch_dtype\":\"bfloat16\",\"text_config\":{\"model_type\":\"llama4_text\",\"hidden_size\":5120,"
     "\"num_attention_heads\":40,\"num_key_value_heads\":8,\"attention_chunk_size\":8192,\"max_position_embeddings\":8192}}", 0, 0,
     "chunked layers: kind of attention (mask=chunk)"},
    /* recurrent layers: by their names, by the model, by keys that only such models have; no attention at all */
    {"{" COMMON "\"model_type\":\"qwen3_next\",\"hidden_size\":2048,\"head_dim\":256,\"num_attention_heads\":8,\"num_key_value_heads\":4,"
     "\"linear_num_key_heads\":16,\"layer_types\":[\"linear_attention\",\"full_attention\"],\"max_position_embeddings\":8192}", 1, 0,
     "layer_types=linear_attention: a recurrent layer"},
    {"{" COMMON "\"model_type\":\"jamba\",\"hidden_size\":4096,\"num_attention_heads\":32,\"num_key_value_heads\":8,\"attn_layer_period\":8,"
     "\"mamba_d_state\":16,\"max_position_embeddings\":8192}", 1, 0, "model_type=jamba"},
    {"{" LLAMA "\"mamba_d_state\":16,\"max_position_embeddings\":8192}", 1, 0, "mamba_d_state=16: speaks of recurrent"},
    {"{" COMMON "\"model_type\":\"mamba\",\"hidden_size\":4096,\"state_size\":16,\"conv_kernel\":4}", 1, 0, "model_type=mamba"},
    {"{" COMMON "\"model_type\":\"recurrent_gemma\",\"block_types\":[\"recurrent\",\"recurrent\",\"attention\"],\"hidden_size\":2560,"
     "\"num_attention_heads\":8,\"num_key_value_heads\":4,\"head_dim\":256,\"max_position_embeddings\":8192}", 1, 0, "block_types=recurrent"},
    {"{" LLAMA "\"layer_types\":[\"full_attention\",\"mystery_mixer\"],\"max_position_embeddings\":8192}", 0, 1, "layer_types=mystery_mixer"},
    /* others that are no such attention */
    {"{" COMMON "\"model_type\":\"bloom\",\"hidden_size\":4096,\"n_head\":32,\"seq_length\":2048}", -1, 0, "ALiBi (alibi=on): never judged"},
    {"{" LLAMA "\"is_causal\":false,\"max_position_embeddings\":8192}", -1, 0, "kind of attention (mask=full): never judged"},
    {"{" LLAMA "\"add_cross_attention\":true,\"max_position_embeddings\":8192}", 1, 0, "add_cross_attention=true"},
    {"{" LLAMA "\"position_embedding_type\":\"relative_key\",\"max_position_embeddings\":8192}", 1, 0, "relative_key"},
};

static void models_are_told_apart(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        cJSON *config = cJSON_Parse(models[i].config);
        dkv_eligible e;
        dkv_err err = {0};
        char said[16384] = "";
        bool found = !models[i].says[0];
        assert_non_null(config);
        if (dkv_readModel(config, scope, 0, false, &e, &err)) fail_msg("%s: %s", models[i].config, err.text);
        for (int k = 0; k < e.n; k++) {
            char row[600];
            snprintf(row, sizeof row, "%s: %s", e.said[k].option, e.said[k].why);
            found |= strstr(row, models[i].says) != NULL;
            size_t at = strlen(said);
            snprintf(said + at, sizeof said - at, "%d %s\n", e.said[k].answer, row);
        }
        if (!found || (models[i].outside < 0 ? e.outside == 0 : e.outside != models[i].outside) || e.not_judged != models[i].not_judged)
            fail_msg("%s: %ld outside, %ld not judged, found %d:\n%s", models[i].config, e.outside, e.not_judged, found, said);
        dkv_freeEligible(&e);
        cJSON_Delete(config);
    }
}

static void tokens_can_be_named(void **state) {
    (void)state;
    cJSON *config = cJSON_Parse("{" LLAMA "\"max_position_embeddings\":131072}");
    dkv_eligible e;
    dkv_err err = {0};
    assert_int_equal(dkv_readModel(config, scope, 8000, false, &e, &err), 0);
    assert_int_equal(e.outside, 0);
    assert_string_equal(e.lines[0], "shape=8000 heads=32:8 dim=128 dtype=bf16");
    dkv_freeEligible(&e);
    assert_int_equal(dkv_readModel(config, scope, 8000, true, &e, &err), 0); /* forward alone was never judged */
    assert_int_equal(e.outside, 1);
    dkv_freeEligible(&e);
    cJSON_Delete(config);
}

static void options_of_another_kind_are_errors(void **state) {
    (void)state;
    static const struct {
        const char *config, *says;
    } rows[] = {{"{}", "num_attention_heads is not there"},
                {"{\"num_attention_heads\":\"many\"}", "num_attention_heads is no number"},
                {"{\"num_attention_heads\":-4,\"hidden_size\":8}", "num_attention_heads is no number"},
                {"{\"num_attention_heads\":4,\"hidden_size\":1e300}", "hidden_size is no number"},
                {"{\"num_attention_heads\":4}", "head_dim: neither there"},
                {"{\"num_attention_heads\":4,\"head_dim\":63.5}", "head_dim is no whole number"},
                {"{" LLAMA "\"sliding_window\":4096.5}", "sliding_window is no whole number"},
                {"{\"num_attention_heads\":4,\"num_key_value_heads\":3,\"head_dim\":64}", "does not divide"},
                {"{" LLAMA "\"sliding_window\":\"yes\"}", "sliding_window is no number"},
                {"{" LLAMA "\"attention_dropout\":[0.1]}", "attention_dropout is no number"},
                {"{" LLAMA "\"layer_types\":7}", "layer_types is no list"},
                {"{" LLAMA "\"layer_types\":[7]}", "layer_types is no list of"},
                {"{\"text_config\":{\"num_attention_heads\":true}}", "text_config.num_attention_heads is no number"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        cJSON *config = cJSON_Parse(rows[i].config);
        dkv_eligible e;
        dkv_err err = {0};
        int rc = dkv_readModel(config, scope, 0, false, &e, &err);
        if (rc != DKV_EUSER || !strstr(err.text, rows[i].says)) fail_msg("%s: %d '%s'", rows[i].config, rc, err.text);
        dkv_freeEligible(&e);
        cJSON_Delete(config);
    }
    cJSON *huge = cJSON_Parse("{" LLAMA "\"head_dim\":100000,\"max_position_embeddings\":8192}"); /* no problem has that */
    dkv_eligible e;
    dkv_err err = {0};
    assert_int_equal(dkv_readModel(huge, scope, 0, false, &e, &err), 0);
    assert_true(e.outside > 0);
    dkv_freeEligible(&e);
    cJSON_Delete(huge);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(models_are_told_apart), cmocka_unit_test(tokens_can_be_named),
                                       cmocka_unit_test(options_of_another_kind_are_errors)};
    return cmocka_run_group_tests(tests, makeScope, freeScope);
}
