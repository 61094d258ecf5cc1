"""Decoding: the completions of rows of any role, written together on one base.

`rows.py` defines a decoder's inputs and outputs. `SlotDecoder` (decoder.py) decodes on the shared base itself, `VllmDecoder`
(vllm.py) in vLLM. `slots.py` is the KV cache, `graphs.py` replays steps as CUDA graphs, `memory.py` counts bytes.
"""
