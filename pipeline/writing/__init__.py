"""Decodes completions of several roles together, on one base.

`rows.py` defines the inputs and outputs of a decoder. `SlotDecoder` (decoder.py) decodes on the shared base, `VllmDecoder`
(vllm.py) in vLLM. `slots.py` is the KV cache, `graphs.py` replays steps as CUDA graphs, and `memory.py` counts bytes.
"""
