"""Serves policies and reward models: one frozen base, versions as adapters, requests batched across them.

    make serve    or    python -m pipeline serve jobs/demo/serve.yaml

A request passes `app.py` (HTTP, a Ray Serve application), `answer.py` (its choices, in one piece or streamed) and `batching.py`
(the rows of all requests) on its way to a decoder of pipeline.writing. `protocol.py` reads requests, `models.py` starts the
decoder and holds the versions of a replica, `scores.py` runs reward models, `feedback.py` stores users' feedback on answers,
and `metrics.py` counts. `proxy.py` limits the time for a request's headers.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine
REQUEST_S = 30  # maximum seconds until a connection has its next request's headers, and for the body
