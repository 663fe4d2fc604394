"""A broker for tests: in a thread of this process, or as the process that a user would start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Self

from millstream.broker.server import RunningBroker, serve
from millstream.broker.settings import BrokerSettings

WAIT_S = 60
MILLSTREAM = [sys.executable, "-m", "millstream"]


class InProcess:
    """A broker in a thread; ``address`` is where it listens.

    Args:
        door: Arguments of ``serve`` for certificate and users.
    """

    def __init__(
        self,
        folder: Path,
        *,
        listen: str = "127.0.0.1:0",
        door: Mapping[str, object] = MappingProxyType({}),
        **settings: object,
    ) -> None:
        self.admin: object = None
        self._folder, self._listen, self._settings = folder, listen, BrokerSettings(**settings)
        self._door = door
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def run_maintenance(self) -> None:
        """Do now what the owner of a folder does every half minute."""
        self._writer.run_maintenance()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        async with AsyncExitStack() as stack:
            serving: RunningBroker = await stack.enter_async_context(
                serve(self._folder, listen=self._listen, settings=self._settings, **self._door)
            )
            self.address, self.port = serving.address, serving.port
            self.serving, self._writer = serving, serving.writer
            self._up.set()
            await self._ended.wait()


class AsProcess:
    """A broker as a process, started by the command."""

    def __init__(self, folder: Path, *options: str, listen: str = "127.0.0.1:0") -> None:
        self.ready_file = folder.parent / "ready"
        self.process = subprocess.Popen(
            [
                *MILLSTREAM,
                "broker",
                str(folder),
                "--listen",
                listen,
                "--ready-file",
                str(self.ready_file),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            self.address = self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self) -> str:
        deadline_s = time.monotonic() + WAIT_S
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.process.communicate()[1].decode()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        return self.ready_file.read_text().strip()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        self.ready_file.unlink(missing_ok=True)  # the next one is not ready because this one was

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """End it as a service manager would; return exit code, output and errors."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out.decode(), err.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        if not self.process.stdout.closed:
            self.process.communicate()
        self.ready_file.unlink(missing_ok=True)
