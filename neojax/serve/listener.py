"""The listening socket: taken before anything is loaded, so a taken port fails at once."""

from __future__ import annotations

import socket
import ssl


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on host and port. Raises OSError saying what would work."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise OSError(f"--host {host} is no address of this machine: {error}") from error
    try:
        # A restart must not wait for the connections of the server before it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Two servers may both bind; only one can listen.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}. "
            f"Choose another with --port, or --port 0 for a free one"
        ) from error
    sock.setblocking(False)
    return sock


def check_certificate(certfile: str, keyfile: str | None) -> None:
    """Raise OSError saying what is wrong when HTTPS could not be served with these files."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except OSError as error:  # SSLError is one too
        raise OSError(f"--ssl-certfile {certfile} with key {keyfile}: {error}") from error


def url(sock: socket.socket, *, is_https: bool = False) -> str:
    """http://host:port of a listening socket."""
    scheme = "https" if is_https else "http"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
