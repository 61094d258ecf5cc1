"""A mock of S3 with one bucket, shared by all processes of a test.

Unlike S3, moto (5.2) checks whether an object exists and then writes it without a lock.
"""

import contextlib
import logging


@contextlib.contextmanager
def mock_s3(monkeypatch):
    """Returns a client of the mock."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    endpoint = f"http://127.0.0.1:{port}"
    for name, value in {
        **dict.fromkeys(("AWS_ENDPOINT_URL", "MLFLOW_S3_ENDPOINT_URL"), endpoint),  # for pyarrow and boto3
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test"),
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # ends with the test
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    try:
        yield client
    finally:
        server.stop()
