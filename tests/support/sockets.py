"""What a process and its descendants listen on."""

import psutil


def sockets(process):
    """{(address, port): process name} of what a process and its descendants listen on."""
    found = {}
    for one in [process, *process.children(recursive=True)]:
        try:
            for connection in one.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    address = connection.laddr.ip.removeprefix("::ffff:")
                    # The program or the title that Ray gives it
                    found[address, connection.laddr.port] = " ".join(one.cmdline()[:1])
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


def on_loopback(address):
    return address.startswith("127.") or address == "::1"
