"""Serves policies and reward models: one frozen base, versions as adapters, requests batched across them.

    make serve    or    python -m pipeline serve jobs/demo/serve.yaml

`app.py` is the Ray Serve application, which parses a request with `protocol.py`. `answer.py` collects a request's choices from
`batching.py`, which decodes the rows of all requests with a decoder of pipeline.writing. `models.py` loads the versions of a
replica, `scores.py` runs reward models, `feedback.py` stores users' feedback on answers, and `metrics.py` has the metrics.
`proxy.py` limits the time for the headers of a request.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine
REQUEST_S = 30  # seconds that a client has for the headers of a request, and for its body
