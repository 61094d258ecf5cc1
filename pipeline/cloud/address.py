"""Checks RAY_ADDRESS of a driver that joins a cluster: where there is none, Ray itself would wait for minutes."""

import os
import re
from urllib.parse import urlsplit

from pipeline.errors import InputError

SECONDS = 5.0
# Private (ray 2.60); any answer but a gRPC error means that Ray is there.
CHECK = "/ray.rpc.NodeInfoGcsService/CheckAlive"
EXPECTED = (
    "expected http://HEAD:8265 to submit jobs to a cluster, auto or HOST:6379 on one of its nodes, or nothing: "
    "unset RAY_ADDRESS"
)


def is_dashboard(address: str) -> bool:
    """Whether it is the address of a cluster's dashboard, which takes jobs, as http://HEAD:8265 is."""
    try:
        parts = urlsplit(address)
        return bool(re.fullmatch(r"https?://\S+", address) and parts.hostname and parts.port != 0)
    except ValueError:  # a port that is no number, half of an IPv6 address
        return False


def check(address: str) -> None:
    """Proves that the head of a Ray cluster answers at `auto` or HOST:PORT.

    Raises:
        InputError: if none does.
    """
    import grpc

    target = _of_this_machine() if address == "auto" else address
    port = re.fullmatch(r"[^/\s]+:(\d{1,5})", target)
    if not port or int(port[1]) > 65535:
        raise InputError(f"found {address!r}; {EXPECTED}", key="RAY_ADDRESS")
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # ray.init() knows the certificates
    try:
        with grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
            channel.unary_unary(CHECK)(b"", timeout=SECONDS)
    except grpc.RpcError as error:
        if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            raise InputError(
                f"no Ray answers at {target} ({error.code().name}: {error.details()}); {EXPECTED}",
                key="RAY_ADDRESS",
            ) from error


def _of_this_machine() -> str:
    """HOST:PORT of the cluster that this machine is a node of."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return str(canonicalize_bootstrap_address("auto"))
    except (ConnectionError, ValueError) as error:
        raise InputError(
            f"found 'auto', but no Ray cluster runs on this machine; {EXPECTED}", key="RAY_ADDRESS"
        ) from error
