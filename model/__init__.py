"""The model: attention.py is the layer, gpt.py stacks it, load.py opens a stored one."""

from model.config import GPTConfig, ModelConfig
from model.gpt import GPT
