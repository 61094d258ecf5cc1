"""Policies and reward models behind an endpoint: one frozen base, versions as adapters, requests batched across them.

    make serve    or    python -m pipeline serve jobs/demo/serve.yaml

From a request down to the model: `app.py` (HTTP, a Ray Serve application) -> `traffic.py` (which version answers) ->
`answer.py` (its choices, whole or as a stream) -> `batching.py` (the rows of all requests), which `engine.py` starts as
`transformers_batcher.py` (one forward for all rows; `slots.py` is their KV cache) or as `vllm_batcher.py`. Beside it:
`protocol.py` (what a request may say), `models.py` (the versions that a replica holds), `scores.py`
(reward models), `feedback.py` (what users thought of the answers, as rows to learn from), `metrics.py`.
"""
