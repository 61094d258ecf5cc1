"""Bases with random weights: small, but of shapes that GPU kernels are made for."""

import torch
import transformers

from pipeline.models.adapters import SharedBase

LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
EIGHT_B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)


def base(layers=4, dtype=torch.bfloat16, device="cuda", **changes):
    """A Llama with the layers of Llama 3 8B, but few of them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**EIGHT_B, "num_hidden_layers": layers, **changes})
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def shared(layers=4, autocast=torch.bfloat16, spread=0.02, **changes):
    """A SharedBase whose policy differs from its base."""
    made = SharedBase(base(layers, **changes), autocast=autocast)
    made.add("policy", lora=LORA, trainable=True)
    for parameter in made.parameters_of("policy"):
        parameter.data += spread * torch.randn_like(parameter)
    return made
