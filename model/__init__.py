"""The model: attention.py is the layer, gpt.py stacks it, load.py opens a stored one."""

from model.config import GPTConfig, ModelConfig
from model.gpt import GPT
from model.load import load_model

GPT.from_pretrained = staticmethod(load_model)  # from here, since load.py imports gpt.py
