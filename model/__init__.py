"""The model: attention.py is the layer, gpt.py stacks it, load.py opens a stored one."""

from errors import UserError
from model.config import GPTConfig, ModelConfig
from model.gpt import GPT
