"""Configurations and tensors under the names and shapes of `transformers`, so that checkpoints open there too.

A family needs a `Codec` in CODECS. An option that `transformers` does not know is
stored under the key "tril" of config.json, and a parameter that it does not know under its name here.
If such an option makes it another model, its type is one of ours, as tril_qwen3: other tools then refuse it. They would
leave the option out without a word.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from errors import UserError, errors_as_user_error
from model.config import MOST_CONTEXT, GPTConfig
from model.families import FAMILIES

Tensors = dict[str, Tensor]  # by name, as a state dict

HEAD = "lm_head.weight"
OWN_KEY = "tril"
CUT_CONTEXT = 8192  # context_length of a model whose own is longer than the largest of ours
UNUSED = re.compile(r"\b(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")  # masks and rotary tables in old files
# Modules around the body: those of `transformers`, which may be missing, and of torch.compile and DataParallel.
WRAPPERS = re.compile(r"^((transformer|model|_orig_mod|module)\.)+|\b_orig_mod\.")
# Keys of config.json that we do not write -> the values that our families compute. The first is that of a missing key.
READ_ONLY = {
    "rope_type": ("default", "llama3"),
    "type": ("default", "llama3"),  # the older name
    "partial_rotary_factor": (1,),
    "is_causal": (True,),  # a false one makes an encoder of a decoder
    "quantization_config": ("weights that are not quantized", None),
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Codec:
    """A family as `transformers` stores it."""

    architecture: str
    """The class of the model."""
    body: str
    """The beginning of all names of tensors but the head's."""
    names: dict[str, str]
    """A part of our name of a tensor -> theirs. Other parts are the same."""
    fields: dict[str, str]
    """Their key in config.json -> our field. Of several keys of one field the last is read."""
    accepted: dict[str, tuple]
    """Key that is no field, such as an activation -> the values that our family computes. A config.json of ours has the
    first value. A config.json without the key means the first value."""
    defaults: dict[str, object]
    """Key of `fields` -> its value in a config.json without this key. Every other key of `fields` is required."""
    conv1d: bool = False
    """Whether q, k and v are one matrix, and each matrix of a block is transposed and has biases, as in GPT-2."""


GPT2 = Codec(
    "GPT2LMHeadModel",
    "transformer.",
    {
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "blocks": "h",
        "attention_norm": "ln_1",
        "attention.q_proj": "attn.c_attn",  # with keys and values
        "attention.o_proj": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
        "final_norm": "ln_f",
    },
    {
        "vocab_size": "vocab_size",
        "n_ctx": "context_length",  # which llama.cpp reads
        "n_positions": "context_length",
        "n_embd": "n_embd",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_inner": "n_inner",
        "layer_norm_epsilon": "norm_eps",
        "embd_pdrop": "dropout",
        "attn_pdrop": "dropout",
        "resid_pdrop": "dropout",
        "tie_word_embeddings": "tied",
    },
    {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    dict.fromkeys(("n_ctx", "n_inner", "layer_norm_epsilon", "tie_word_embeddings"))
    | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    conv1d=True,
)
LLAMA = Codec(
    "LlamaForCausalLM",
    "model.",
    {
        "token_embedding": "embed_tokens",
        "blocks": "layers",
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "mlp_norm": "post_attention_layernorm",
        "final_norm": "norm",
    },
    {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context_length",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "head_dim": "head_dim",
        "intermediate_size": "n_inner",
        "rms_norm_eps": "norm_eps",
        "rope_theta": "rope_theta",
        "tie_word_embeddings": "tied",
    },
    {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,)},
    {
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
)
CODECS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen3": replace(
        LLAMA,
        architecture="Qwen3ForCausalLM",
        defaults=LLAMA.defaults | {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "nanochat": replace(
        LLAMA,
        architecture="NanoChatForCausalLM",
        names=LLAMA.names | {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
        accepted=LLAMA.accepted | {"hidden_act": ("relu2",), "final_logit_softcapping": (15.0,)},
    ),
}


def config_to_huggingface(config: GPTConfig) -> dict:
    """Return config.json without the ids of a tokenizer.

    The model type has the family's name, and "tril_" before it if `transformers` would compute another model.
    """
    codec = CODECS[config.family]
    values = asdict(config)
    content = {
        "architectures": [f"Tril{codec.architecture}"],  # llama.cpp and vLLM choose by this
        "model_type": f"{OWN_KEY}_{config.family}",
        **{key: accepted[0] for key, accepted in codec.accepted.items()},
        **{key: values[name] for key, name in codec.fields.items()},
        "pad_token_id": None,  # else `transformers` may take a real token as padding, and not train it
        OWN_KEY: {name: value for name, value in values.items() if name not in {"family", *codec.fields.values()}},
    }
    if FAMILIES[config.family].rotary:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        if config.rope_scaling:
            rope |= {"rope_type": "llama3", **dict(zip(SCALING, config.rope_scaling, strict=True))}
        content["rope_parameters"] = rope
    # These make no other model: training alone reads the first, tensors hold the second, a gpt2 does not use the third.
    harmless = {name: values[name] for name in ("dropout", "bias", "rope_theta")}
    with suppress(UserError):  # what is left without our options may break a rule of GPTConfig
        if config_from_huggingface(content | {OWN_KEY: harmless}) == config:
            content |= {"architectures": [codec.architecture], "model_type": config.family}
    return content


def config_from_huggingface(content: dict) -> GPTConfig:
    """Return the configuration in a config.json, ours or foreign. Raises UserError if no family computes the same."""
    family = str(content.get("model_type")).removeprefix(f"{OWN_KEY}_")
    if family not in CODECS:
        raise UserError(
            f"config.json has model_type {family!r:.60}, this version reads {', '.join(CODECS)} "
            "(inspect_attention.py asks transformers to open others)"
        )
    codec = CODECS[family]
    with errors_as_user_error("config.json describes no GPT of this code"):
        known = codec.defaults | content | (content.get("rope_scaling") or content.get("rope_parameters") or {})
        for key, accepted in (codec.accepted | READ_ONLY).items():
            if known.get(key, accepted[0]) not in accepted:
                raise UserError(
                    f"config.json has {key} = {known[key]!r:.60}, a {family} here has {accepted[0]!r} "
                    "(inspect_attention.py asks transformers to open others)"
                )
        own = {  # JSON has no tuples
            name: tuple(value) if isinstance(value, list) else value for name, value in content.get(OWN_KEY, {}).items()
        }
        values = own | {"family": family, **{name: known[key] for key, name in codec.fields.items()}}
        if "llama3" in (known.get("rope_type"), known.get("type")):
            values["rope_scaling"] = tuple(known[key] for key in SCALING)
        if values["context_length"] > MOST_CONTEXT:
            values["context_length"] = CUT_CONTEXT
        return GPTConfig(**values)


def tensors_to_huggingface(config: GPTConfig, state: Tensors) -> Tensors:
    """Return the state dict of a GPT under the names of `transformers`. A GPT-2 without biases gets biases of zero."""
    tensors = {}
    for theirs, (ours, is_turned) in layout(config, state).items():
        if theirs == HEAD and config.tied:
            continue  # the embedding
        tensor = torch.cat([state[name] for name in ours]) if len(ours) > 1 else state[ours[0]]
        tensors[theirs] = tensor.T.contiguous() if is_turned else tensor
        if CODECS[config.family].conv1d and not config.bias and ours[0].endswith(("proj.weight", "norm.weight")):
            tensors[theirs.removesuffix("weight") + "bias"] = tensor.new_zeros(len(tensor))
    return tensors


def tensors_from_huggingface(
    config: GPTConfig, state: Tensors, stored: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a GPT from those of `transformers`, one at a time.

    state: those that the GPT has, for their names and shapes. A tensor that belongs to none of them keeps its own name,
    except one that changes nothing: it is left out.
    """
    known = {WRAPPERS.sub("", theirs): found for theirs, found in layout(config, state).items()}
    for theirs, tensor in stored:
        ours, is_turned = known.get(WRAPPERS.sub("", theirs), ([theirs], False))
        if ours == [theirs] and (UNUSED.search(theirs) or (theirs.endswith("bias") and not tensor.any())):
            continue
        tensor = tensor.T if is_turned else tensor
        parts = tensor.split([len(state[name]) for name in ours]) if len(ours) > 1 else [tensor]
        yield from zip(ours, parts, strict=True)


def layout(config: GPTConfig, names: Iterable[str]) -> dict[str, tuple[list[str], bool]]:
    """Return which of our tensors, one below the other, each tensor of `transformers` holds, and whether transposed."""
    codec = CODECS[config.family]
    parts = re.compile(rf"\b({'|'.join(codec.names)})\b")  # whole parts of a name, which are between dots
    found = {}
    for name in names:
        first = re.sub(r"\b[kv]_proj", "q_proj", name) if codec.conv1d else name
        theirs = HEAD if name == HEAD else codec.body + parts.sub(lambda part: codec.names[part[0]], first)
        found.setdefault(theirs, ([], codec.conv1d and name.endswith("proj.weight")))[0].append(name)
    return found
