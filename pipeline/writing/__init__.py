"""Decodes completions of several roles in one batch, on one shared base.

`rows.py` defines the inputs and outputs of a decoder. `SlotDecoder` (decoder.py) decodes on the shared base, `VllmDecoder`
(vllm.py) in vLLM. `slots.py` implements the KV cache, `graphs.py` replays decoding steps as CUDA graphs, and `memory.py` computes
how many rows fit into memory.
"""
