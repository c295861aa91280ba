"""Our tensors under the names and shapes of `transformers`, so that a checkpoint opens there too."""

from dataclasses import asdict

import torch
from torch import Tensor

from model.config import GPTConfig, ModelError

# Ours -> theirs. GPT-2 keeps q, k and v in one matrix, c_attn, and stores every matrix transposed ("Conv1D").
OUTSIDE = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
}
IN_BLOCK = {
    "attention_norm": "ln_1",
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
TRANSPOSED = ("attention.o_proj", "mlp.up_proj", "mlp.down_proj")


def config_to_huggingface(config: GPTConfig, end_of_text: int) -> dict:
    """config.json of the `gpt2` model type; what it cannot say stands under "tril"."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": config.family,  # a family has the name of its model type there
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tril": asdict(config),
    }


def config_from_huggingface(content: dict) -> GPTConfig:
    """The configuration in a config.json, ours or a plain gpt2. Raises ModelError if there is none."""
    if content.get("model_type") != "gpt2":
        raise ModelError(f"config.json has model_type {content.get('model_type')!r}, this version reads 'gpt2'")
    try:
        if "tril" in content:
            return GPTConfig(**content["tril"])
        return GPTConfig(
            n_layer=content["n_layer"],
            n_head=content["n_head"],
            n_embd=content["n_embd"],
            context_length=content["n_positions"],
            dropout=content.get("resid_pdrop", 0.0),
            vocab_size=content["vocab_size"],
        )
    except (KeyError, TypeError) as error:
        raise ModelError(f"config.json does not describe a GPT: {error}") from error


def tensors_to_huggingface(config: GPTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of GPT as that of GPT2LMHeadModel. A model without biases gets biases of zero."""
    tensors = {}
    for parameter in ("weight", "bias"):
        for ours, theirs in names(config):
            if f"{ours}.{parameter}" in state:
                tensor = state[f"{ours}.{parameter}"]
                tensors[f"{theirs}.{parameter}"] = transpose(tensor) if ours.endswith(TRANSPOSED) else tensor
            elif not ours.endswith("embedding"):
                tensors[f"{theirs}.{parameter}"] = torch.zeros(tensors[f"{theirs}.weight"].shape[-1:])
        for layer in range(config.n_layer):
            qkv = [state.get(f"blocks.{layer}.attention.{x}_proj.{parameter}") for x in "qkv"]
            theirs = f"transformer.h.{layer}.attn.c_attn"
            if qkv[0] is None:
                tensors[f"{theirs}.{parameter}"] = torch.zeros(tensors[f"{theirs}.weight"].shape[-1:])
            else:
                tensors[f"{theirs}.{parameter}"] = transpose(torch.cat(qkv))
    return tensors


def tensors_from_huggingface(config: GPTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, of tensors that have the names and shapes of `tensors_to_huggingface`."""
    state = {}
    widths = [heads * config.head_dim for heads in (config.n_head, config.n_kv_head, config.n_kv_head)]
    for parameter in ("weight", "bias") if config.bias else ("weight",):
        for ours, theirs in names(config):
            if parameter == "weight" or not ours.endswith("embedding"):
                tensor = tensors[f"{theirs}.{parameter}"]
                state[f"{ours}.{parameter}"] = transpose(tensor) if ours.endswith(TRANSPOSED) else tensor
        for layer in range(config.n_layer):
            qkv = transpose(tensors[f"transformer.h.{layer}.attn.c_attn.{parameter}"])
            for x, part in zip("qkv", qkv.split(widths), strict=True):
                state[f"blocks.{layer}.attention.{x}_proj.{parameter}"] = part
    state["lm_head.weight"] = state["token_embedding.weight"]
    return state


def transpose(tensor: Tensor) -> Tensor:
    """A matrix transposed, a vector as it is."""
    return tensor.T.contiguous() if tensor.dim() == 2 else tensor


def names(config: GPTConfig) -> list[tuple[str, str]]:
    """(our module, their module) for every module that maps one to one."""
    blocks = [
        (f"blocks.{layer}.{ours}", f"transformer.h.{layer}.{theirs}")
        for layer in range(config.n_layer)
        for ours, theirs in IN_BLOCK.items()
    ]
    return [*OUTSIDE.items(), *blocks]
