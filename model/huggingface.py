"""Our configurations and tensors under the names and shapes of `transformers`, so that checkpoints open there too."""

import re

import torch
from torch import Tensor

from errors import UserError
from model.config import LARGEST, GPTConfig

CUT_CONTEXT = 8192  # tokens that the model sees if its context is longer than the largest of ours

# Our module -> theirs. GPT-2 has q, k and v in one matrix, and stores every matrix of a block transposed ("Conv1D").
GPT2 = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
    "blocks.{}.attention.qkv_proj": "transformer.h.{}.attn.c_attn",  # three modules of ours
    "blocks.{}.attention.o_proj": "transformer.h.{}.attn.c_proj",
    "blocks.{}.mlp_norm": "transformer.h.{}.ln_2",
    "blocks.{}.mlp.up_proj": "transformer.h.{}.mlp.c_fc",
    "blocks.{}.mlp.down_proj": "transformer.h.{}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
LLAMA = {
    "token_embedding": "model.embed_tokens",
    "blocks.{}.attention_norm": "model.layers.{}.input_layernorm",
    "blocks.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.{}.mlp.gate_proj": "model.layers.{}.mlp.gate_proj",
    "blocks.{}.mlp.up_proj": "model.layers.{}.mlp.up_proj",
    "blocks.{}.mlp.down_proj": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
for part in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj"):
    LLAMA[f"blocks.{{}}.attention.{part}"] = f"model.layers.{{}}.self_attn.{part}"
NANOCHAT = LLAMA | {
    "blocks.{}.mlp.up_proj": "model.layers.{}.mlp.fc1",
    "blocks.{}.mlp.down_proj": "model.layers.{}.mlp.fc2",
}
NAMES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": LLAMA, "nanochat": NANOCHAT}
TRANSPOSED = ("c_attn", "c_proj", "c_fc")

ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ARCHITECTURES |= {"nanochat": "NanoChatForCausalLM"}
# Accepted values of the keys in config.json that change the computation. We write the first; a missing key means the
# first. A model with another value is refused.
EXPECTED = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    "qwen3": {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    "nanochat": {"hidden_act": ("relu2",), "attention_bias": (False,), "final_logit_softcapping": (15.0,)},
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def config_to_huggingface(config: GPTConfig, start_of_text: int, end_of_text: int) -> dict:
    """Return config.json for the model type with the family's name.

    GPT-2 has no keys for its biases and its key heads: these two are under "tril".
    """
    c = config
    content = {
        "architectures": [ARCHITECTURES[c.family]],
        "model_type": c.family,
        **{key: expected[0] for key, expected in EXPECTED[c.family].items()},
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tied,
        "bos_token_id": start_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,  # else `transformers` may take a real token as padding, and not train it
    }
    if c.family == "gpt2":
        return content | {
            "n_positions": c.context_length,
            "n_ctx": c.context_length,  # the name that llama.cpp reads
            "n_embd": c.n_embd,
            "n_layer": c.n_layer,
            "n_head": c.n_head,
            "n_inner": c.n_inner,
            "layer_norm_epsilon": c.norm_eps,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), c.dropout),
            "tril": {"bias": c.bias, "n_kv_head": c.n_kv_head},
        }
    rope = {"rope_type": "default"}
    if c.rope_scaling:
        rope = {"rope_type": "llama3", **dict(zip(SCALING, c.rope_scaling, strict=True))}
    return content | {
        "max_position_embeddings": c.context_length,
        "hidden_size": c.n_embd,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head,
        "head_dim": c.head_dim,
        "intermediate_size": c.n_inner,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": rope | {"rope_theta": c.rope_theta},
        "tril": {"dropout": c.dropout},  # transformers has no such dropout in these families
    }


def config_from_huggingface(content: dict) -> GPTConfig:
    """Return the configuration in a config.json, ours or foreign. Raises UserError if no family computes the same."""
    family = content.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise UserError(f"config.json has model_type {family!r}, this version reads {', '.join(ARCHITECTURES)}")
    for key, expected in EXPECTED[family].items():
        if content.get(key, expected[0]) not in expected:
            raise UserError(f"config.json has {key} = {content[key]!r}, a {family} of ours computes {expected[0]!r}")
    try:
        if family == "gpt2":
            ours = content.get("tril", {})
            return GPTConfig(
                n_layer=content["n_layer"],
                n_head=content["n_head"],
                n_kv_head=ours.get("n_kv_head"),
                n_embd=content["n_embd"],
                n_inner=content.get("n_inner"),
                context_length=content["n_positions"],
                dropout=content.get("resid_pdrop", 0.0),
                bias=ours.get("bias"),
                vocab_size=content["vocab_size"],
                tied=content.get("tie_word_embeddings", True),
                norm_eps=content.get("layer_norm_epsilon"),
            )
        rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
        if "original_max_position_embeddings" in content:
            rope = rope | {"original_max_position_embeddings": content["original_max_position_embeddings"]}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
            raise UserError(f"config.json has rotary positions of the type {kind!r}, this version reads llama3")
        context_length = content["max_position_embeddings"]
        return GPTConfig(
            family=family,
            n_layer=content["num_hidden_layers"],
            n_head=content["num_attention_heads"],
            n_kv_head=content.get("num_key_value_heads", 32 if family == "qwen3" else None),
            n_embd=content["hidden_size"],
            head_dim=content.get("head_dim", 128 if family == "qwen3" else None),
            n_inner=content["intermediate_size"],
            context_length=context_length if context_length <= LARGEST["context_length"] else CUT_CONTEXT,
            dropout=content.get("tril", {}).get("dropout", 0.0),
            tied=content.get("tie_word_embeddings", False),
            rope_theta=rope.get("rope_theta", content.get("rope_theta", 10_000.0)),
            vocab_size=content["vocab_size"],
            norm_eps=content.get("rms_norm_eps", 1e-6),
            rope_scaling=tuple(rope[key] for key in SCALING) if kind == "llama3" else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"config.json does not describe a GPT: {error}") from error


def tensors_to_huggingface(config: GPTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a GPT under the names of `transformers`. A GPT-2 without biases gets biases of zero.

    Raises UserError for a tensor that has no name there, or is not of floating-point numbers.
    """
    tensors, left = {}, set(state) - {"lm_head.weight"}  # a tied head has no name there
    for parameter in (".weight", ".bias", ""):  # "": a parameter without a module
        for ours, theirs in names(config):
            parts = [f"{module}{parameter}" for module in ours if f"{module}{parameter}" in state]
            if parts:
                joined = torch.cat([state[part] for part in parts]) if len(parts) > 1 else state[parts[0]]
                tensors[f"{theirs}{parameter}"] = transpose_conv1d(theirs, joined)
                left.difference_update(parts)
    if left:
        where = f"the names of {config.family} in model/huggingface.py"
        raise UserError(f"no checkpoint could hold {min(left)}: add it to {where}")
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            meant = "if it is a buffer, make it one with persistent=False"
            raise UserError(f"no checkpoint could hold {name} of {tensor.dtype}: {meant}")
    if config.family == "gpt2" and not config.bias:
        for name in [name for name in tensors if re.search(r"\.(ln_.|c_attn|c_proj|c_fc)\.weight$", name)]:
            bias = name.removesuffix("weight") + "bias"
            tensors[bias] = torch.zeros(tensors[name].shape[-1:], dtype=tensors[name].dtype)
    return tensors


def tensors_from_huggingface(config: GPTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a GPT, without a tied head: the inverse of `tensors_to_huggingface`.

    A GPT-2 without biases has biases of zero there, which are returned too.
    """
    state = {}
    widths = [heads * config.head_dim for heads in (config.n_head, config.n_kv_head, config.n_kv_head)]
    for parameter in (".weight", ".bias", ""):
        for ours, theirs in names(config):
            if f"{theirs}{parameter}" in tensors:
                joined = transpose_conv1d(theirs, tensors[f"{theirs}{parameter}"])
                parts = joined.split(widths) if len(ours) > 1 else [joined]
                state |= {f"{module}{parameter}": part for module, part in zip(ours, parts, strict=True)}
    return state


def names(config: GPTConfig) -> list[tuple[list[str], str]]:
    """Return (our modules, their module) for every module of theirs: GPT-2 joins q_proj, k_proj and v_proj."""
    pairs = []
    for ours, theirs in NAMES[config.family].items():
        modules = [ours.replace("qkv", x) for x in "qkv"] if "qkv" in ours else [ours]
        layers = range(config.n_layer) if "{}" in ours else [0]
        if ours != "lm_head" or not config.tied:
            pairs += [([module.format(layer) for module in modules], theirs.format(layer)) for layer in layers]
    return pairs


def transpose_conv1d(theirs: str, tensor: Tensor) -> Tensor:
    """Return a tensor of our module as `transformers` stores it, or the other way round.

    Matrices of a GPT-2 are transposed: copied, because products of transposed views round differently.
    """
    return tensor.T.contiguous() if theirs.endswith(TRANSPOSED) and tensor.dim() == 2 else tensor
