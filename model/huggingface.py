"""Configurations and tensors under the names and shapes of `transformers`, so that checkpoints open there too.

A family needs an `Export` in EXPORTS. An option that `transformers` does not know is stored under the key "tril" of
config.json.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from errors import UserError
from model.config import MOST_CONTEXT, GPTConfig
from model.families import FAMILIES

Tensors = dict[str, Tensor]  # by name, as a state dict

OWN_KEY = "tril"
CUT_CONTEXT = 8192  # context_length of a model whose own is longer than the largest of ours

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
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

# Our field -> their key in config.json.
GPT2_FIELDS = {
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "n_embd": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_inner": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
    "tied": "tie_word_embeddings",
}
LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_inner": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
LLAMA_DEFAULTS = {"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Export:
    """A family as `transformers` has it."""

    architecture: str
    """The class of the model."""
    modules: dict[str, str]
    """Our module -> theirs; {} stands for the number of a layer."""
    fields: dict[str, str]
    """Our field -> their key in config.json."""
    defaults: dict[str, object]
    """Key of `fields` -> its value in a config.json without this key. Every other key of `fields` is required."""
    accepted: dict[str, tuple]
    """Key that `fields` has not, such as an activation -> the values that our family computes. A config.json of ours
    has the first value. A config.json without the key means the first value."""


EXPORTS = {
    "gpt2": Export(
        "GPT2LMHeadModel",
        GPT2,
        GPT2_FIELDS,
        {"n_inner": None, "layer_norm_epsilon": None, "resid_pdrop": 0.0, "tie_word_embeddings": True},
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
    "llama": Export(
        "LlamaForCausalLM",
        LLAMA,
        LLAMA_FIELDS,
        LLAMA_DEFAULTS,
        {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "qwen3": Export(
        "Qwen3ForCausalLM",
        LLAMA,
        LLAMA_FIELDS,
        LLAMA_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
        {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    ),
    "nanochat": Export(
        "NanoChatForCausalLM",
        NANOCHAT,
        LLAMA_FIELDS,
        LLAMA_DEFAULTS,
        {"hidden_act": ("relu2",), "attention_bias": (False,), "final_logit_softcapping": (15.0,)},
    ),
}


def config_to_huggingface(config: GPTConfig) -> dict:
    """Return config.json for the model type with the family's name, which does not know the ids of a tokenizer.

    Fields without a key in `transformers` are under OWN_KEY. Raises UserError for a family without an export.
    """
    if config.family not in EXPORTS:
        raise UserError(
            f"no checkpoint could hold a model of the family {config.family}: add an entry to EXPORTS in "
            "model/huggingface.py"
        )
    export = EXPORTS[config.family]
    values = asdict(config)
    content = {
        "architectures": [export.architecture],
        "model_type": config.family,
        **{key: accepted[0] for key, accepted in export.accepted.items()},
        **{key: values[name] for name, key in export.fields.items()},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,  # else `transformers` may take a real token as padding, and not train it
    }
    stored = {"family", *export.fields}
    if FAMILIES[config.family].rotary:
        content |= rope_to_huggingface(config)
        stored |= {"rope_theta", "rope_scaling"}
    else:
        content["n_ctx"] = config.context_length  # the name that llama.cpp reads
        content |= {"embd_pdrop": config.dropout, "attn_pdrop": config.dropout}
    return content | {OWN_KEY: {name: value for name, value in values.items() if name not in stored}}


def rope_to_huggingface(config: GPTConfig) -> dict:
    """Return the keys of config.json for rotary positions."""
    theta = {"rope_theta": config.rope_theta}
    rope = {"rope_type": "default"}
    if config.rope_scaling:
        rope = {"rope_type": "llama3"} | dict(zip(SCALING, config.rope_scaling, strict=True))
    return theta | {"rope_parameters": rope | theta}


def config_from_huggingface(content: dict) -> GPTConfig:
    """Return the configuration in a config.json, ours or foreign. Raises UserError if no family computes the same."""
    family = content.get("model_type", content.get("_class_name"))  # the latter in a config.json of diffusers
    if not isinstance(family, str) or family not in EXPORTS:
        raise UserError(
            f"config.json has model_type {family!r:.60}, this version reads {', '.join(EXPORTS)} "
            "(inspect_attention.py asks transformers to open others)"
        )
    if quantized := content.get("quantization_config"):
        raise UserError(f"config.json has quantized weights, {quantized!r:.60}: give the model that they were made of")
    export = EXPORTS[family]
    for key, accepted in export.accepted.items():
        value = content.get(key, accepted[0])
        if value not in accepted:
            raise UserError(f"config.json has {key} = {value!r:.60}, a {family} of ours computes {accepted[0]!r}")
    try:
        known = export.defaults | content
        values = {"family": family, **{name: known[key] for name, key in export.fields.items()}}
        if FAMILIES[family].rotary:
            values |= rope_from_huggingface(content)
            if values["context_length"] > MOST_CONTEXT:
                values["context_length"] = CUT_CONTEXT
        for name, value in content.get(OWN_KEY, {}).items():
            if name not in GPTConfig.__dataclass_fields__:
                raise UserError(
                    f"config.json has {name} = {value!r:.60}, an option that this code does not have: open it with the "
                    "code that trained it"
                )
            values.setdefault(name, tuple(value) if isinstance(value, list) else value)  # JSON has no tuples
        return GPTConfig(**values)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"config.json does not describe a GPT: {error!s:.60}") from error


def rope_from_huggingface(content: dict) -> dict[str, object]:
    """Return rope_theta and rope_scaling. Raises UserError for rotary positions of another type."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if "original_max_position_embeddings" in content:
        rope = rope | {"original_max_position_embeddings": content["original_max_position_embeddings"]}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
        raise UserError(f"config.json has rotary positions of the type {kind!r:.60}, this version reads llama3")
    return {
        "rope_theta": rope.get("rope_theta", content.get("rope_theta", 10_000.0)),
        "rope_scaling": tuple(rope[key] for key in SCALING) if kind == "llama3" else None,
    }


def tensors_to_huggingface(config: GPTConfig, state: Tensors) -> Tensors:
    """Return the state dict of a GPT under the names of `transformers`. A GPT-2 without biases gets biases of zero.

    Raises UserError for a tensor without a name there, or of other than floating-point numbers.
    """
    tensors = {}
    left = set(state) - {"lm_head.weight"}  # a tied head has no name there
    for ours, theirs in tensor_names(config):
        parts = [state[name] for name in ours if name in state]
        if parts:
            joined = torch.cat(parts) if len(parts) > 1 else parts[0]
            tensors[theirs] = transpose_conv1d(theirs, joined)
            left.difference_update(ours)
    if left:
        raise UserError(
            f"no checkpoint could hold {min(left)}: add it to the modules of {config.family} in model/huggingface.py"
        )
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise UserError(
                f"no checkpoint could hold {name} of {tensor.dtype}: if a buffer, make it one with persistent=False"
            )
    if config.family == "gpt2" and not config.bias:
        for name, weight in list(tensors.items()):
            if re.search(r"\.(ln_.|c_attn|c_proj|c_fc)\.weight$", name):
                tensors[name.removesuffix("weight") + "bias"] = weight.new_zeros(weight.shape[-1:])
    return tensors


def tensors_from_huggingface(config: GPTConfig, tensors: Tensors) -> Tensors:
    """Return the state dict of a GPT from tensors under the names of `transformers`, without a tied head.

    A GPT-2 without biases is stored with biases of zero, which are returned too.
    """
    state = {}
    widths = [heads * config.head_dim for heads in (config.n_head, config.n_kv_head, config.n_kv_head)]
    for ours, theirs in tensor_names(config):
        if theirs in tensors:
            joined = transpose_conv1d(theirs, tensors[theirs])
            parts = joined.split(widths) if len(ours) > 1 else [joined]
            state.update(zip(ours, parts, strict=True))
    return state


def tensor_names(config: GPTConfig) -> Iterator[tuple[list[str], str]]:
    """Yield (our names, their name) of every tensor that a model may have: GPT-2 joins q_proj, k_proj and v_proj."""
    for parameter in (".weight", ".bias", ""):  # "": a parameter without a module
        for ours, theirs in EXPORTS[config.family].modules.items():
            if ours == "lm_head" and config.tied:
                continue
            modules = [ours.replace("qkv", x) for x in "qkv"] if "qkv" in ours else [ours]
            for layer in range(config.n_layer if "{}" in ours else 1):
                yield [module.format(layer) + parameter for module in modules], theirs.format(layer) + parameter


def transpose_conv1d(name: str, tensor: Tensor) -> Tensor:
    """Transpose the tensor of that name if it is a matrix of a GPT-2's block; return any other tensor as it is.

    The matrix is copied, because products of transposed views round differently.
    """
    return tensor.T.contiguous() if name.endswith(TRANSPOSED) else tensor
