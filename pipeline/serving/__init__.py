"""Serves policies and reward models as adapters on one frozen base. Requests to different adapters share a batch.

    make serve    or    python -m pipeline serve jobs/demo/serve.yaml

`app.py` defines the Ray Serve application, and parses requests with `protocol.py`. `batching.py` decodes the completions of all
requests with a decoder of pipeline.writing, and `answer.py` turns completions into responses. `models.py` loads the adapters of a
replica, `scores.py` runs reward models, `feedback.py` stores users' feedback on answers, and `metrics.py` defines the metrics.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of the loopback interface
