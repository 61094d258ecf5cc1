"""A mock of S3 with one bucket, which all processes of a test share.

Unlike S3, moto 5.2 has no lock between the check of a condition and the write.
"""

import contextlib
import logging


@contextlib.contextmanager
def mock_s3(monkeypatch):
    """Starts the mock, and sets the variables with which clients find it. Yields a client."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    endpoint = f"http://127.0.0.1:{port}"
    for name, value in {
        # endpoint of S3 for pyarrow and boto3
        **dict.fromkeys(("AWS_ENDPOINT_URL", "MLFLOW_S3_ENDPOINT_URL"), endpoint),
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test"),
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # makes boto3 read the environment variables again
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    try:
        yield client
    finally:
        server.stop()
