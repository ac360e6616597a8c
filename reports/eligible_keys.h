/* eligible_keys.h: what is known of the keys of a config.json; tables for eligible.c alone. A '*' at the end stands for any
 * rest. */
#ifndef DKV_ELIGIBLE_KEYS_H
#define DKV_ELIGIBLE_KEYS_H

/* Read by name in eligible.c, or without a say of its own. */
static const char *const dkv_read_keys[] = {
    "num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query",
    "head_dim", "hidden_size", "n_embd", "d_model", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim",
    "kv_lora_rank", "q_lora_rank", "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout",
    "attention_dropout_prob", "attn_logit_softcapping", "attn_logit_softcap", "sliding_window", "use_sliding_window",
    "sliding_window_pattern", "_sliding_window_pattern", "max_window_layers", "layer_types", "layers_block_type", "block_types",
    "_block_types", "attention_chunk_size", "query_pre_attn_scalar", "attention_multiplier", "attn_scale", "scale_attn_weights",
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length", "torch_dtype", "dtype",
    "alibi", "use_alibi", "position_embedding_type", "is_causal", "use_bidirectional_attention", "add_cross_attention",
    "is_encoder_decoder", "model_type",
    "rope_scaling", "rope_parameters", "index_topk", "index_n_heads", "index_head_dim", "sinks", "use_sinks", "attention_sinks", "use_attention_sinks"};

/* Before or after attention, or not of it: what reaches Q, K and V, what becomes of O. */
static const char *const dkv_unrelated_keys[] = {
    "architectures", "vocab_size", "intermediate_size", "num_hidden_layers", "n_layer", "n_layers", "n_inner", "hidden_act",
    "hidden_activation", "activation_function", "rms_norm_eps", "layer_norm_eps*", "layer_norm_epsilon", "norm_eps", "norm_epsilon",
    "initializer_range", "initializer_factor", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "*_token_id",
    "*_token_index", "transformers_version", "rope_theta", "rope_local_base_freq", "rope_interleave", "partial_rotary_factor",
    "rotary*", "attention_bias", "attention_out_bias", "attention_in_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "use_bias", "bias",
    "use_qk_norm", "qk_norm", "qk_layernorm", "clip_qkv", "use_cache", "pretraining_tp", "num_local_experts", "num_experts*",
    "router_*", "moe_*", "n_routed_experts", "n_shared_experts", "n_group", "topk_*", "norm_topk_prob", "routed_scaling_factor",
    "scoring_func", "aux_loss_alpha", "seq_aux", "first_k_dense_replace", "ep_size", "resid_pdrop", "embd_pdrop", "hidden_dropout*",
    "hidden_dropout_prob", "ffn_dropout*", "classifier_dropout*", "final_logit_softcapping", "no_rope_layers*", "no_rope_layer_interval",
    "original_max_position_embeddings", "_attn_implementation*", "attn_implementation", "_name_or_path", "quantization_config", "auto_map",
    "output_router_logits", "output_hidden_states", "return_dict", "decoder_sparse_step", "mlp_only_layers", "shared_expert*",
    "num_nextn_predict_layers", "use_mamba_kernels", "swiglu_limit", "experts_per_token", "initial_context_length", "gradient_checkpointing",
    "summary_*", "task_specific_params", "num_mtp_modules", "embedding_multiplier", "residual_multiplier", "logits_scaling",
    "head_dtype", "attn_output_gate", "lm_head*", "scale_embeddings", "scale_emb", "scale_depth", "mup_*", "type_vocab_size", "mask_token_id", "unk_token_id",
    "sep_token_id", "cls_token_id", "id2label", "label2id", "problem_type", "pruned_heads", "chunk_size_feed_forward", "is_decoder", "tokenizer_class", "prefix"};

/* Read as true or false. */
static const char *const dkv_flag_keys[] = {
    "multi_query", "alibi", "use_alibi", "is_causal", "use_bidirectional_attention", "add_cross_attention", "is_encoder_decoder",
    "use_sliding_window", "scale_attn_weights", "sinks", "use_sinks", "attention_sinks", "use_attention_sinks"};

/* Models of which it is known that rows see themselves and what is before them, and that the keys here say the rest. */
static const char *const dkv_causal_models[] = {
    "llama", "llama4*", "mistral*", "ministral*", "mixtral", "qwen2", "qwen2_moe", "qwen2_vl*", "qwen2_5_vl*", "qwen3", "qwen3_moe", "qwen3_vl*",
    "gemma", "gemma2", "gemma3*", "phi", "phi3", "phimoe", "gpt2", "gpt_neox*", "gpt_oss", "gptj", "gpt_bigcode", "falcon", "bloom", "mpt", "opt",
    "stablelm", "starcoder2", "cohere", "cohere2", "olmo", "olmo2", "olmo3", "olmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2",
    "granite", "granitemoe", "granitemoeshared", "glm", "glm4", "glm4_moe", "internlm2", "internlm3", "nemotron", "exaone", "exaone4", "smollm3",
    "ernie4_5", "ernie4_5_moe", "seed_oss", "hunyuan_v1_dense", "hunyuan_v1_moe", "persimmon", "dbrx", "arcee", "apertus", "dots1", "helium",
    "codegen", "xglm", "biogpt"};

/* Layers that are no attention, or state beside it. */
static const char *const dkv_recurrent_keys[] = {
    "mamba_*", "ssm_*", "ssm_cfg", "state_size", "time_step_*", "conv_kernel*", "linear_*", "lru_width", "attn_layer_period",
    "attn_layer_offset", "attn_layer_indices", "hybrid_override_pattern", "hybrid_layer_ids", "full_attention_interval",
    "full_attn_idxs", "conv_L_cache", "conv_bias", "short_conv_*", "linear_attn_config", "rwkv_*", "attention_window_size"};

static const char *const dkv_recurrent_models[] = {
    "mamba*", "falcon_mamba", "rwkv*", "jamba", "bamba", "zamba*", "recurrent_gemma", "qwen3_next", "falcon_h1", "nemotron_h",
    "granitemoehybrid", "lfm2*", "minimax", "kimi_linear", "xlstm", "retnet", "hyena*", "olmo_hybrid", "plamo2", "rwkv"};

/* A key with one of these in its name speaks of attention. */
static const char *const dkv_attention_words[] = {
    "attn", "attention", "window", "head", "softcap", "sink", "mask", "dropout", "pdrop", "kv", "qk", "causal", "layer_type", "block_type",
    "sliding", "chunk", "sparse", "linear", "ssm", "mamba", "recurrent", "state", "conv", "alibi", "relative", "index_", "indexer",
    "scale", "scaling", "cross", "bidirectional", "position", "local", "global", "compress", "lora", "latent", "share", "rope", "hybrid",
    "topk", "context", "seq_len", "multiplier", "temperature", "logit"};

#endif
