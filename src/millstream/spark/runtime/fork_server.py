"""Forks the processes in which Spark plans a streaming source, instead of starting each anew.

Spark starts one such process for each query, as a Python that imports PySpark and the source: half a second of
CPU and of waiting. The parent of the workers has imported all of that. So it forks this server, which listens at
a Unix-domain socket and forks a planner for each connection: the fork server of Python's ``multiprocessing``.

Spark's command is the same as ever: the session names a small script as its Python (``python_script``),
which asks the server where the command is that of a planner, and runs Python for any other. Its side of the
connection is ``fork_client.py``, which passes on its environment and its standard streams, and stays until the
planner ends. When Spark kills it, the connection ends, and so does the planner. Where no server answers, the
client becomes the Python that Spark asked for, so a server that is missing or dead costs time, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path

PLANNER_MODULE = "pyspark.sql.streaming.python_streaming_source_runner"
SOCKET_VARIABLE = "MILLSTREAM_FORK_SERVER"  # the path of the socket
PROCESS_NAME = (
    "planner"  # of the server and of what it forks, whose command line is that of the workers
)
_HEADER_BYTES = 4


def python_script(python: str) -> str:
    """Return the script that Spark starts as its Python; ``python`` is the real one."""
    client = Path(__file__).with_name("fork_client.py")
    real = shlex.quote(python)
    return f"""#!/bin/sh
if [ "$1 $2" = "-m {PLANNER_MODULE}" ] && [ -S "${SOCKET_VARIABLE}" ]; then
    exec {real} -I -S {shlex.quote(str(client))} "${SOCKET_VARIABLE}" "$@"
fi
exec {real} "$@"
"""


def start_fork_server() -> None:
    """Fork the server, if this process is told where it listens; import before what planners use.

    It ends with this process and those that this process forks.
    """
    path = os.environ.get(SOCKET_VARIABLE)
    if path is None:
        return
    lifeline, held = os.pipe()
    os.set_inheritable(held, False)
    if os.fork():
        os.close(lifeline)
        return
    os.close(held)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    code = 1
    try:
        code = _serve(path, lifeline)
    finally:
        os._exit(code)


def _serve(path: str, lifeline: int) -> int:
    """Fork a planner for each connection until the other end of ``lifeline`` is closed."""
    os.setpgid(0, 0)  # the parent's signals to its group are for workers
    with socket.socket(socket.AF_UNIX) as listener:
        _bind(listener, path)
        wakeup, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poller = select.poll()
        for descriptor in (listener.fileno(), lifeline, wakeup):
            poller.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if lifeline in ready:
                return 0
            if wakeup in ready:
                os.read(wakeup, 1024)
                _reap()
            if listener.fileno() in ready:
                connection, _ = listener.accept()
                if os.fork() == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for descriptor in (lifeline, wakeup, woken):
                        os.close(descriptor)
                    listener.close()
                    _plan(connection)
                connection.close()


def _bind(listener: socket.socket, path: str) -> None:
    """Listen at ``path``, also where the server of an earlier parent of workers does."""
    fresh = f"{path}.{os.getpid()}"
    listener.bind(fresh)
    listener.listen(16)
    Path(fresh).rename(path)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _plan(connection: socket.socket) -> None:
    """Be the process that a client asks for, to its end. Does not return."""
    code = 1
    try:
        if _take_over(connection):
            threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
            runpy.run_module(PLANNER_MODULE, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python itself does at the end of a program
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _take_over(connection: socket.socket) -> bool:
    """Take the client's streams and environment; refuse a client that would find other modules."""
    header, streams, _, _ = socket.recv_fds(connection, _HEADER_BYTES, 3)
    with connection.makefile("rb") as file:
        header += file.read(_HEADER_BYTES - len(header))
        asked = json.loads(file.read(int.from_bytes(header)))
    environment: dict[str, str] = asked["environment"]
    if environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        return False
    os.chdir(asked["folder"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    sys.argv = [PLANNER_MODULE]
    connection.sendall(b"+")
    return True


def _end_with(connection: socket.socket) -> None:
    connection.recv(1)
    os._exit(1)
