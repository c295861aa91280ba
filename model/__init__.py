"""The model: attention.py is the layer, gpt.py stacks it, checkpoint.py keeps it."""

from errors import UserError
from model.config import GPTConfig, ModelConfig
from model.gpt import GPT

__all__ = ["GPT", "GPTConfig", "ModelConfig", "UserError"]
