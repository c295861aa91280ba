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
    # What only some types have, or call by another name.
    **dict.fromkeys("index_n_heads indexer_n_heads linear_num_heads linear_num_key_heads".split(), 3),
    **dict.fromkeys("linear_num_value_heads mamba_n_heads mamba_num_heads n_mamba_heads".split(), 3),
    **dict.fromkeys("chunk_size mamba_chunk_size mamba_dt_rank time_step_rank".split(), 5),
    **dict.fromkeys("hidden_size_per_layer_input mamba_d_state ssm_state_size state_size".split(), 11),
    **dict.fromkeys("attention_head_size d_head linear_head_dim linear_value_head_dim mamba_head_dim".split(), 14),
    **dict.fromkeys("index_head_dim indexer_head_dim linear_key_head_dim".split(), 22),
    **dict.fromkeys("d_inner decoder_ffn_dim dff encoder_ffn_dim feed_forward_size".split(), 47),
    **dict.fromkeys("index_topk max_target_positions model_max_length".split(), 97),  # an index chooses all keys
    "n_groups": 1,
    "rotary_dim": 6,
    "use_mamba_kernels": False,
}
HEAD = {"head_dim": 14}
WHOLE = {"num_key_value_heads": 3}  # as many heads of keys as of queries
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
WIDER = {"per_layer_config": {1: {"head_dim": 28}}}  # heads of the second layer
CONV = {"layer_types": ["conv", "full_attention"]}
EXPERTS = {
    "hidden_size": 48,
    "head_dim": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 28,
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 5),
    **dict.fromkeys("num_experts_per_tok num_experts_per_token moe_k moe_topk".split(), 2),
    **dict.fromkeys("n_group topk_group num_expert_group".split(), 1),
    **dict.fromkeys("moe_shared_expert_intermediate_size shared_expert_intermediate_size".split(), 36),
    "shared_intermediate_size": 36,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
DEEPSEEK = {**EXPERTS, **WHOLE, **LATENT, "head_dim": 6, "first_k_dense_replace": 1}
INKLING = dict(EXPERTS, layer_types=["hybrid_sliding", "hybrid"], sliding_window_size=5, d_rel=7, rel_extent=11)
INKLING |= {"swa_num_attention_heads": 3, "swa_num_key_value_heads": 1, "swa_head_dim": 16}
ENCODER = {**WHOLE, "is_decoder": True}  # made to read a text in both directions
SECOND_HALF = {  # of a model that translates
    "is_decoder": True,
    **dict.fromkeys("decoder_layers encoder_layers".split(), 2),
    **dict.fromkeys("decoder_attention_heads encoder_attention_heads".split(), 3),
}
TOWER = {"hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2, "num_blocks": 1}
TOWERS = {"vision_config": {**TOWER, "image_size": 28, "crop_size": 28}, "audio_config": TOWER}  # are never asked

PLAIN = """apertus1p5_text biogpt bitnet ctrl exaone gpt-sw3 gpt2 gpt_bigcode gpt_neox granite internlm3 iquestcoder
modernbert-decoder olmo olmo2 phi3 qwen2 smollm3 starcoder2"""
WITH_HEAD = """apertus arcee cohere2 cwm doge ernie4_5 exaone4 gemma gemma3_text glm glm4 helium hunyuan_v1_dense
hyperclovax jais2 llama ministral ministral3 mistral nanochat nemotron olmo3 qwen3 seed_oss"""
ENCODERS = """bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm xlm-roberta
xlm-roberta-xl"""
HALVES = "bart blenderbot blenderbot-small marian mbart pegasus plbart whisper"
# Dense layers that attend through PyTorch's kernel.
DENSE: dict[str, dict] = {
    **dict.fromkeys(PLAIN.split(), {}),
    **dict.fromkeys(WITH_HEAD.split(), HEAD),
    **dict.fromkeys(ENCODERS.split(), ENCODER),
    **dict.fromkeys(HALVES.split(), SECOND_HALF),
    **dict.fromkeys("minicpm3 youtu".split(), LATENT | WHOLE),
    "blt": {
        **dict.fromkeys(["encoder_config", "decoder_config"], COMMON | {"hidden_size_global": 84}),
        "patcher_config": COMMON,
        "global_config": {**COMMON, "hidden_size": 84},
        "encoder_hash_byte_group_vocab": 67,
        "encoder_hash_byte_group_size": [3, 5],
    },
    "cohere": WHOLE,
    "cohere_compass_text": KINDS | {"rope_parameters": dict.fromkeys(KINDS["layer_types"], {"rope_theta": 1e4})},
    "diffllama": {**HEAD, "hidden_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2},
    "dory": {**HEAD, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3},
    "emu3": {"text_config": COMMON},
    "falcon": {"num_kv_heads": 1},
    "gemma3n_text": dict(HEAD | KINDS, num_kv_shared_layers=0, vocab_size_per_layer_input=V, laurel_rank=13),
    "gemma4_text": {**HEAD, **KINDS, **WIDER, "vocab_size_per_layer_input": V},
    "gemma4_unified_text": HEAD | KINDS | WIDER,
    "hrm_text": {**HEAD, "H_cycles": 1, "L_cycles": 1},
    "mllama": {"text_config": {**COMMON, "cross_attention_layers": []}},
    "moshi": {**HEAD, **WHOLE, "ffn_dim": 46},
    "opt": {"ffn_dim": 47, "word_embed_proj_dim": 42},
    "persimmon": {"hidden_size": 36},
    "phi": {"hidden_size": 36, **WHOLE},
    "phi4_multimodal": TOWERS,
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
    "big_bird": {**ENCODER, "attention_type": "original_full"},
    "bloom": {"n_head": 3},
    "codegen": {"n_head": 3, "hidden_size": 44, "num_attention_heads": 4},
    "deepseek_v4": {
        **DEEPSEEK,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "o_groups": 3,
        "o_lora_rank": 11,
        "sliding_window": 5,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    },
    "git": WHOLE | TOWERS,
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gpt_neox_japanese": {"hidden_size": 36},
    "gpt_oss": {**EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gptj": {"n_head": 3},
    "hy_v4": DEEPSEEK,
    "inkling2_loop_text": dict(
        INKLING, n_layers_per_attn_res_block=1, loop_layer_index_start=1, loop_layer_index_end=2, unpadded_vocab_size=V
    ),
    "inkling2_text": {**INKLING, "n_layers_per_attn_res_block": 1, "unpadded_vocab_size": V},
    "mimo_v2_flash": {**EXPERTS, **KINDS, "num_attention_heads": 4, "v_head_dim": 12},
    "mpt": {"d_model": 42, "n_heads": 3, "n_layers": 2, "max_seq_len": 97},
    "openai-gpt": {},
    "prophetnet": dict(ENCODER, num_hidden_layers=None, num_decoder_layers=2, num_decoder_attention_heads=3),
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        **dict.fromkeys(["local_attn_chunk_length", "lsh_attn_chunk_length"], 97),  # not in pieces
        **dict.fromkeys(["hidden_dropout_prob", "local_attention_probs_dropout_prob"], 0.0),  # of seeds of its own
        "axial_pos_embds": False,
    },
    "xglm": {"d_model": 42, "attention_heads": 3, "num_layers": 2, "ffn_dim": 47},
    "xlm": {"causal": True},
    "xlnet": {"max_position_embeddings": None, "attn_type": "uni"},
}
# Mixtures of experts: how many rows an expert multiplies differs from text to text. Their kernel wants multiples of 4.
OF_EXPERTS = """aria_text ernie4_5_moe flex_olmo glm4_moe granitemoe granitemoeshared hunyuan_v1_moe hy_v3 mellum
minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe sarvam_moe solar_open"""
MIXTURES: dict[str, dict] = {
    **dict.fromkeys(OF_EXPERTS.split(), EXPERTS),
    **dict.fromkeys("afmoe beam cohere2_moe exaone_moe kolibri1 laguna".split(), EXPERTS | KINDS),
    **dict.fromkeys(
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa sarvam_mla".split(), DEEPSEEK
    ),
    "dbrx": {
        "d_model": 42,
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 7.0},
        "ffn_config": {"ffn_hidden_size": 28, "moe_num_experts": 5, "moe_top_k": 2},
    },
    "dots1": {**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": dict(
        DEEPSEEK | KINDS, head_dim=16, layer_types=["sliding_attention", "indexed_attention"], per_layer_config={}
    ),
    "inkling_text": INKLING,
    "jetmoe": {**EXPERTS, "num_attention_heads": 6, "num_key_value_heads": 3, "kv_channels": 16},
    "llama4_text": dict(
        EXPERTS, layer_types=["chunked_attention", "full_attention"], attention_chunk_size=5, intermediate_size_mlp=44
    ),
    "longcat_flash": dict(DEEPSEEK, num_layers=1, zero_expert_num=2, ffn_hidden_size=44, expert_ffn_hidden_size=28),
    "minimax": {**EXPERTS, "block_size": 5},
    "minimax_m3_vl_text": dict(
        EXPERTS,
        layer_types=["minimax_m3_sparse", "full_attention"],
        index_n_heads=1,
        index_block_size=2,
        index_topk_blocks=3,
    ),
    "zaya": {**EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 11},
}
# Layers that carry a state along in place of attention, or beside it.
STATE_ALONE = ["falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"]
RECURRENT: dict[str, dict] = {
    **dict.fromkeys(["falcon_mamba", "mamba"], {}),
    **dict.fromkeys(["bailing_hybrid", "kimi_linear"], DEEPSEEK | LINEAR),
    **dict.fromkeys(["olmo_hybrid", "qwen3_5_text"], HEAD | LINEAR),
    **dict.fromkeys(["qwen3_5_moe_text", "qwen3_next"], EXPERTS | LINEAR),
    **dict.fromkeys(["zamba", "zamba2"], WHOLE | {"layers_block_type": ["hybrid", "hybrid"]}),
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {**HEAD, "mamba_d_ssm": 42, "mamba_d_head": 14},
    "granitemoehybrid": EXPERTS | LINEAR,
    "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lara_mini": dict(EXPERTS | KINDS, layer_types=["linear_attention", *KINDS["layer_types"]], num_hidden_layers=3),
    "lfm2": CONV,
    "lfm2_moe": {**EXPERTS, **CONV, "num_dense_layers": 1},
    "lfm3": dict(HEAD | KINDS, layer_types=["conv", *KINDS["layer_types"]], num_hidden_layers=3),
    "mamba2": {"num_heads": 3, "head_dim": 28},
    "nemotron_h": dict(EXPERTS, layers_block_type=[*LINEAR["layer_types"], "moe", "mlp"], num_hidden_layers=4),
    "qwen4_exp_text": dict(
        EXPERTS | LINEAR, hc_count=2, hc_lowrank=11, indexer_kv_heads=1, indexer_budget=96, indexer_compress_ratio=3
    ),
    "recurrent_gemma": dict(HEAD, lru_width=42, block_types=["recurrent", "attention"], attention_window_size=97),
    "rwkv": {"attention_hidden_size": 42, "context_length": 97},
    "xlstm": {"hidden_size": 64, "num_heads": 4, "qk_dim_factor": 1.0},
}
OF_MORE_THAN_TEXT = """dots3_note fuyu gemma3 gemma3n gemma4 gemma4_unified got_ocr2 llama4 moss_transcribe_diarize
qwen3_5 qwen3_5_moe qwen4_exp"""
# Types that are not in the table, and why.
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(OF_MORE_THAN_TEXT.split(), "reads a text with the layers of another type"),
    **dict.fromkeys(["gemma4_assistant", "gemma4_unified_assistant"], "reads the keys of another model"),
    **dict.fromkeys(["musicgen", "musicgen_melody"], "reads codes of sound"),
    "cpmant": "reads a text in both directions",
}
DENSE, WRITTEN_OUT, MIXTURES, RECURRENT = (  # of the types that this version of `transformers` has
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
