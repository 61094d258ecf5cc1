"""Finds the sockets on which a process and its descendants listen."""

import psutil


def sockets(process):
    """Returns {(address, port): process name} of the sockets on which a process and its descendants listen."""
    found = {}
    for one in [process, *process.children(recursive=True)]:
        try:
            for connection in one.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    address = connection.laddr.ip.removeprefix("::ffff:")
                    # the program, or the title that Ray gives it
                    found[address, connection.laddr.port] = " ".join(one.cmdline()[:1])
        except psutil.Error:
            continue  # the process ended meanwhile
    return found


def on_loopback(address):
    return address.startswith("127.") or address == "::1"
