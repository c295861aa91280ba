"""Tiny decoders of many model types, built by `transformers` with random weights: strangers to our own code.

`DECODERS` has what a type needs besides the sizes that most of them share. All sizes differ, and are prime where a type
allows it: a width is a multiple of the heads, and the rotated part of a head is even.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

V, T = 61, 13  # the vocabulary of each, and a length of text that each can read
COMMON = {
    "vocab_size": V,
    "hidden_size": 42,
    "intermediate_size": 47,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 97,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
HEAD = {"head_dim": 14}
WHOLE = {"num_key_value_heads": 3}  # as many heads of keys as of queries
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
EXPERTS = {  # by all the names that types have for them
    "hidden_size": 48,
    "head_dim": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 5),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group"], 1),
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
DEEPSEEK = {**EXPERTS, **WHOLE, **LATENT, "head_dim": 6, "first_k_dense_replace": 1}
INDEX = {"index_topk": 97, "index_head_dim": 22, "index_n_heads": 3}  # chooses the keys that are seen: here all of them

ENCODER = {**WHOLE, "is_decoder": True}  # made for texts that are read in both directions
SECOND_HALF = {  # of a model that translates, without the half that reads
    "is_decoder": True,
    **dict.fromkeys(["decoder_layers", "encoder_layers"], 2),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 3),
    **dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim"], 47),
    "max_target_positions": 97,
}
TOWER = {"hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2}  # is never asked
SMALL_TOWERS = {
    "vision_config": {**TOWER, "image_size": 28, "crop_size": 28},
    "audio_config": {**TOWER, "num_blocks": 1},
}

INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "sliding_window_size": 5,
    "swa_num_attention_heads": 3,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 16,
    "d_rel": 7,
    "rel_extent": 11,
}

PLAIN = """apertus1p5_text biogpt bitnet exaone gpt-sw3 gpt2 gpt_bigcode gpt_neox granite internlm3 iquestcoder
modernbert-decoder olmo olmo2 phi3 qwen2 smollm3 starcoder2"""
WITH_HEAD = """apertus arcee cohere2 cwm doge ernie4_5 exaone4 gemma gemma3_text glm glm4 helium hunyuan_v1_dense
hyperclovax jais2 llama ministral ministral3 mistral nanochat nemotron olmo3 qwen3 seed_oss"""
# Dense layers that attend through PyTorch's kernel.
DENSE: dict[str, dict] = {
    **dict.fromkeys(PLAIN.split(), {}),
    **dict.fromkeys(WITH_HEAD.split(), HEAD),
    **dict.fromkeys("bert bert-generation camembert data2vec-text electra ernie roberta".split(), ENCODER),
    **dict.fromkeys("roberta-prelayernorm xlm-roberta xlm-roberta-xl".split(), ENCODER),
    **dict.fromkeys("bart blenderbot blenderbot-small marian mbart pegasus plbart whisper".split(), SECOND_HALF),
    **dict.fromkeys("minicpm3 youtu".split(), LATENT | WHOLE),
    "blt": {
        **dict.fromkeys(["encoder_config", "decoder_config"], COMMON | {"hidden_size_global": 84}),
        "patcher_config": COMMON,
        "global_config": {**COMMON, "hidden_size": 84},
        "encoder_hash_byte_group_vocab": 67,
        "encoder_hash_byte_group_size": [3, 5],
    },
    "cohere": WHOLE,
    "cohere_compass_text": {
        **KINDS,
        "rope_parameters": dict.fromkeys(KINDS["layer_types"], {"rope_type": "default", "rope_theta": 1e4}),
    },
    "ctrl": {"dff": 47},
    "diffllama": {**HEAD, "hidden_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2},
    "dory": {**HEAD, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3},
    "emu3": {"text_config": COMMON},
    "falcon": {"num_kv_heads": 1},
    "gemma3n_text": {
        **HEAD,
        **KINDS,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": V,
        "hidden_size_per_layer_input": 11,
        "laurel_rank": 13,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gemma4_text": {**HEAD, **KINDS, "vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 11},
    "gemma4_unified_text": {**HEAD, **KINDS},
    "hrm_text": {**HEAD, "H_cycles": 1, "L_cycles": 1},
    "mllama": {"text_config": {**COMMON, "cross_attention_layers": []}},
    "moshi": {**HEAD, **WHOLE, "ffn_dim": 46},
    "opt": {"ffn_dim": 47, "word_embed_proj_dim": 42},
    "persimmon": {"hidden_size": 36},
    "phi": {"hidden_size": 36, **WHOLE},
    "phi4_multimodal": SMALL_TOWERS,
    "roc_bert": {**ENCODER, "pronunciation_vocab_size": V, "shape_vocab_size": V},
    "stablelm": {"hidden_size": 48},
    "xmod": {**ENCODER, "default_language": "en_XX"},
}
# Layers that write attention out: attn_implementation="eager" is all they know.
WRITTEN_OUT: dict[str, dict] = {
    **dict.fromkeys("megatron-bert rembert roformer".split(), ENCODER),
    **dict.fromkeys("bigbird_pegasus mvp trocr".split(), SECOND_HALF),
    **dict.fromkeys("flint granite_swa granitemoe_swa".split(), EXPERTS | KINDS),
    **dict.fromkeys("gemma2 vaultgemma".split(), HEAD),
    **dict.fromkeys(
        "inkling2_loop_text inkling2_text".split(),
        {
            **EXPERTS,
            **INKLING,
            "unpadded_vocab_size": V,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
        },
    ),
    "big_bird": {**ENCODER, "attention_type": "original_full"},
    "bloom": {"n_head": 3},
    "codegen": {"n_head": 3, "rotary_dim": 6, "hidden_size": 44, "num_attention_heads": 4},
    "deepseek_v4": {
        **DEEPSEEK,
        **INDEX,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "o_groups": 3,
        "o_lora_rank": 11,
        "sliding_window": 5,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "git": {**WHOLE, **SMALL_TOWERS},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gpt_neox_japanese": {"hidden_size": 36},
    "gpt_oss": {**EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gptj": {"n_head": 3, "rotary_dim": 6},
    "hy_v4": DEEPSEEK | INDEX,
    "mimo_v2_flash": {**EXPERTS, **KINDS, "num_attention_heads": 4, "v_head_dim": 12},
    "mpt": {"d_model": 42, "n_heads": 3, "n_layers": 2, "max_seq_len": 97},
    "openai-gpt": {},
    "prophetnet": {
        "is_decoder": True,
        "add_cross_attention": False,
        "num_hidden_layers": None,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 3,
        "decoder_ffn_dim": 47,
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 97,  # not in pieces
        "lsh_attn_chunk_length": 97,
        "hidden_dropout_prob": 0.0,  # which layers seed by themselves
        "local_attention_probs_dropout_prob": 0.0,
        "attention_head_size": 14,
        "feed_forward_size": 47,
        "axial_pos_embds": False,
    },
    "xglm": {"d_model": 42, "attention_heads": 3, "num_layers": 2, "ffn_dim": 47},
    "xlm": {"causal": True},
    "xlnet": {"max_position_embeddings": None, "d_inner": 47, "d_head": 14, "attn_type": "uni"},
}
# Mixtures of experts: how many rows an expert multiplies differs from text to text. Their kernel wants multiples of 4.
OF_EXPERTS = """aria_text ernie4_5_moe flex_olmo glm4_moe granitemoe hunyuan_v1_moe hy_v3 mellum minimax_m2 mixtral
olmoe phimoe qwen2_moe qwen3_moe sarvam_moe solar_open"""
MIXTURES: dict[str, dict] = {
    **dict.fromkeys(OF_EXPERTS.split(), EXPERTS),
    **dict.fromkeys("afmoe beam cohere2_moe exaone_moe kolibri1 laguna".split(), EXPERTS | KINDS),
    **dict.fromkeys("axk1 deepseek_v2 deepseek_v3 glm4_moe_lite sarvam_mla".split(), DEEPSEEK),
    **dict.fromkeys("axk2 deepseek_v32 glm_moe_dsa".split(), DEEPSEEK | INDEX),
    "dbrx": {
        "d_model": 42,
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 7.0},
        "ffn_config": {"ffn_hidden_size": 28, "moe_num_experts": 5, "moe_top_k": 2},
    },
    "dots1": {**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {
        **DEEPSEEK,
        **INDEX,
        "head_dim": 16,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "sliding_window": 5,
        "per_layer_config": {},
    },
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 36},
    "inkling_text": EXPERTS | INKLING,
    "jetmoe": {**EXPERTS, "num_attention_heads": 6, "num_key_value_heads": 3, "kv_channels": 16},
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 44,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 5,
    },
    "longcat_flash": {
        **DEEPSEEK,
        "num_layers": 1,
        "zero_expert_num": 2,
        "ffn_hidden_size": 44,
        "expert_ffn_hidden_size": 28,
    },
    "minimax": {**EXPERTS, "block_size": 5},
    "minimax_m3_vl_text": {
        **EXPERTS,
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "index_n_heads": 1,
        "index_head_dim": 22,
        "index_block_size": 2,
        "index_topk_blocks": 3,
        "rotary_dim": 6,
        "shared_intermediate_size": 36,
    },
    "zaya": {**EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 11},
}
# Layers that carry a state along in place of attention, or beside it.
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 3, "mamba_d_head": 28, "mamba_d_state": 11, "mamba_chunk_size": 5, "mamba_expand": 2}
ZAMBA = {
    **WHOLE,
    "attention_head_dim": 28,
    "layers_block_type": ["hybrid", "hybrid"],
    "n_mamba_heads": 3,
    "mamba_headdim": 28,
    "mamba_d_state": 11,
    "mamba_dt_rank": 5,
    "chunk_size": 5,
    "use_mamba_kernels": False,
}
DELTA = {
    **LINEAR,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}
KIMI = {**DEEPSEEK, **LINEAR, "linear_head_dim": 14, "linear_num_heads": 3, "model_max_length": 97}
RECURRENT: dict[str, dict] = {
    **dict.fromkeys("bailing_hybrid kimi_linear".split(), KIMI),
    **dict.fromkeys("olmo_hybrid qwen3_5_text".split(), HEAD | DELTA),
    **dict.fromkeys("qwen3_5_moe_text qwen3_next".split(), EXPERTS | DELTA),
    **dict.fromkeys("zamba zamba2".split(), ZAMBA),
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**HEAD, **MAMBA, "mamba_d_ssm": 42, "mamba_d_head": 14},
    "falcon_mamba": {"state_size": 11, "time_step_rank": 5},
    "granitemoehybrid": {**EXPERTS, **MAMBA, **LINEAR, "mamba_d_head": 32, "shared_intermediate_size": 36},
    "jamba": {
        **EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 5,
        "mamba_d_state": 11,
        "use_mamba_kernels": False,
    },
    "lara_mini": {
        **EXPERTS,
        **DELTA,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", *KINDS["layer_types"]],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {**HEAD, **KINDS, "num_hidden_layers": 3, "layer_types": ["conv", *KINDS["layer_types"]]},
    "mamba": {"state_size": 11, "time_step_rank": 5},
    "mamba2": {"state_size": 11, "num_heads": 3, "head_dim": 28, "n_groups": 1, "chunk_size": 5},
    "nemotron_h": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 3,
        "mamba_head_dim": 32,
        "ssm_state_size": 11,
        "n_groups": 1,
        "chunk_size": 5,
        "moe_shared_expert_intermediate_size": 36,
    },
    "qwen4_exp_text": {
        **EXPERTS,
        **DELTA,
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 11,
        "indexer_n_heads": 3,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 22,
        "indexer_budget": 96,
        "indexer_compress_ratio": 3,
    },
    "recurrent_gemma": {
        **HEAD,
        "lru_width": 42,
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 97,
    },
    "rwkv": {"attention_hidden_size": 42, "context_length": 97},
    "xlstm": {"hidden_size": 64, "num_blocks": 2, "num_heads": 4, "qk_dim_factor": 1.0, "chunk_size": 16},
}
# Types that are not in the table: those of other inputs too, whose layers for texts are those of a type above, ...
MANY_INPUTS = """dots3_note fuyu gemma3 gemma3n gemma4 gemma4_unified got_ocr2 llama4 moss_transcribe_diarize qwen3_5
qwen3_5_moe qwen4_exp"""
LEFT_OUT = {
    **dict.fromkeys(MANY_INPUTS.split(), "its layers for texts are those of a type in the table"),
    **dict.fromkeys("gemma4_assistant gemma4_unified_assistant".split(), "reads the keys of another model"),
    **dict.fromkeys("musicgen musicgen_melody".split(), "reads codes of sound, not tokens"),
    "cpmant": "reads a text in both directions",
}
DENSE, WRITTEN_OUT, MIXTURES, RECURRENT = (  # as far as this version of `transformers` has them
    {name: options for name, options in group.items() if name in TYPES}
    for group in (DENSE, WRITTEN_OUT, MIXTURES, RECURRENT)
)
DECODERS = DENSE | WRITTEN_OUT | MIXTURES | RECURRENT


def make_decoder(
    name: str, attn_implementation: str | None = None, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """Build a decoder in evaluation mode. Its random weights are large enough for attention that is not uniform."""
    torch.manual_seed(seed)
    options = {**COMMON, **DECODERS[name], **changes}
    config = AutoConfig.for_model(name, **{key: value for key, value in options.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1.5 * parameter.size(-1) ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
