"""Finds the sockets on which processes listen."""

import contextlib

import psutil


def sockets(process):
    """Returns {(address, port): process name} of the sockets on which a process and its descendants listen."""
    family, names = {p.pid: p for p in [process, *process.children(recursive=True)]}, {}
    # Lists the sockets of all processes at once, because a query for each process would be slower.
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid in family:
            address = connection.laddr.ip.removeprefix("::ffff:")
            with contextlib.suppress(psutil.Error):  # the process has ended in the meantime
                # the name of the program, or the title that Ray gave the process
                names[address, connection.laddr.port] = " ".join(family[connection.pid].cmdline()[:1])
    return names


def on_loopback(address):
    return address.startswith("127.") or address == "::1"
