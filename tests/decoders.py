"""Tiny decoders of many model types, built by `transformers` with random weights: strangers to our own code.

`DECODERS` has what a type needs besides the sizes that most of them share. All sizes differ, and are prime where a type
allows it: a width is a multiple of the heads, and the rotated part of a head is even.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
EXPERTS = {
    "hidden_size": 48,
    "head_dim": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 28,
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
GROUPS = {"n_routed_experts": 5, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
DEEPSEEK = {**EXPERTS, **WHOLE, **GROUPS, **LATENT, "head_dim": 6, "first_k_dense_replace": 1}

PLAIN = "biogpt gpt2 gpt_bigcode gpt_neox granite modernbert-decoder olmo olmo2 phi3 qwen2 smollm3 starcoder2"
WITH_HEAD = """apertus arcee cohere2 cwm ernie4_5 exaone4 gemma gemma3_text glm glm4 helium hunyuan_v1_dense jais2 llama
ministral mistral nanochat nemotron olmo3 qwen3 seed_oss"""
# Dense layers that attend through PyTorch's kernel.
DENSE: dict[str, dict] = {
    **dict.fromkeys(PLAIN.split(), {}),
    **dict.fromkeys(WITH_HEAD.split(), HEAD),
    "cohere": WHOLE,
    "falcon": {"num_kv_heads": 1},
    "opt": {"ffn_dim": 47, "word_embed_proj_dim": 42},
    "persimmon": {"hidden_size": 36},
    "phi": {"hidden_size": 36, **WHOLE},
    "stablelm": {"hidden_size": 48},
}
# Dense layers that write attention out: attn_implementation="eager" is all they know.
WRITTEN_OUT: dict[str, dict] = {
    "bloom": {"n_head": 3},
    "codegen": {"n_head": 3, "rotary_dim": 6, "hidden_size": 44, "num_attention_heads": 4},
    "gemma2": HEAD,
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gptj": {"n_head": 3, "rotary_dim": 6},
    "mpt": {"d_model": 42, "n_heads": 3, "n_layers": 2, "max_seq_len": 97},
    "openai-gpt": {},
    "vaultgemma": HEAD,
    "xglm": {"d_model": 42, "attention_heads": 3, "num_layers": 2, "ffn_dim": 47},
}
# Mixtures of experts: how many rows an expert multiplies differs from text to text. Their kernel wants multiples of 4.
MIXTURES: dict[str, dict] = {
    **dict.fromkeys("flex_olmo granitemoe mixtral olmoe phimoe qwen3_moe".split(), EXPERTS),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "dots1": {**EXPERTS, **GROUPS, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 5, "moe_k": 2},
    "glm4_moe": {**EXPERTS, **GROUPS},
    "gpt_oss": {**EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 36},
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "jetmoe": {**EXPERTS, "num_attention_heads": 6, "num_key_value_heads": 3, "kv_channels": 16},
    "minimax": {**EXPERTS, "block_size": 5},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 36},
}
# Layers that carry a state along in place of attention, or beside it.
RECURRENT: dict[str, dict] = {
    "falcon_h1": {
        **HEAD,
        "mamba_d_ssm": 42,
        "mamba_n_heads": 3,
        "mamba_d_head": 14,
        "mamba_d_state": 11,
        "mamba_chunk_size": 5,
    },
    "falcon_mamba": {"state_size": 11, "time_step_rank": 5},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 11, "time_step_rank": 5},
    "mamba2": {"state_size": 11, "num_heads": 3, "head_dim": 28, "n_groups": 1, "chunk_size": 5},
    "recurrent_gemma": {
        **HEAD,
        "lru_width": 42,
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 97,
    },
    "rwkv": {"attention_hidden_size": 42, "context_length": 97},
}
DECODERS = DENSE | WRITTEN_OUT | MIXTURES | RECURRENT


def make_decoder(
    name: str, attn_implementation: str | None = None, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """Build a decoder in evaluation mode. Its random weights are large enough for attention that is not uniform."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **{**COMMON, **DECODERS[name], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1.5 * parameter.size(-1) ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
