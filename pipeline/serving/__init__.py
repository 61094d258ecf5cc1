"""Policies and reward models behind an endpoint: one frozen base, versions as adapters, requests batched across them.

    make serve    or    python -m pipeline serve jobs/demo/serve.yaml

A request passes `app.py` (HTTP, a Ray Serve application), `answer.py` (its choices, in one piece or streamed) and
`batching.py` (the rows of all requests) on its way to a decoder of pipeline.inference. `protocol.py` reads requests,
`models.py` starts the decoder and holds the versions of a replica, `scores.py` runs reward models, `feedback.py` keeps
what users think of the answers, and `metrics.py` counts. `proxy.py` limits the time for a request's headers.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine
REQUEST_S = 30  # time until a connection has the headers of its next request, and time for the body
