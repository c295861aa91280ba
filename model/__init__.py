"""The model: attention.py is the layer, gpt.py stacks it, checkpoint.py keeps it."""

from model.config import GPTConfig, ModelConfig, ModelError
from model.gpt import GPT

__all__ = ["GPT", "GPTConfig", "ModelConfig", "ModelError"]
