"""A program: has a process forked by the fork server, and stays until it ends; see ``fork_server.py``.

    python -I -S fork_client.py SOCKET -m MODULE

It is run without the rest of the package, and imports little, as it is there to save a start. Where no server
takes over, it becomes ``python -m MODULE``.
"""

import contextlib
import json
import os
import socket
import sys


def main(path: str, *command: str) -> None:
    """Pass this process's environment and standard streams to the server."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        asked = {"environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109 - saves an import
        body = json.dumps(asked).encode()
        socket.send_fds(connection, [len(body).to_bytes(4)], [0, 1, 2])
        connection.sendall(body)
        if connection.recv(1):
            connection.recv(1)  # nothing: the connection ends when the process does
            os._exit(0)
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - the Python that was asked for


if __name__ == "__main__":
    main(*sys.argv[1:])
