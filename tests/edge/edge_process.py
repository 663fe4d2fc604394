"""The edge and the webhook as the processes that a user would start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

WAIT_S = 120
MILLSTREAM = [sys.executable, "-m", "millstream"]


class Process:
    """A command that says when it is ready; ``ready`` has what it says then."""

    def __init__(self, ready_file, *arguments, under=()):
        self.ready_file = ready_file
        self.process = subprocess.Popen(
            [*under, *MILLSTREAM, *map(str, arguments), "--ready-file", str(ready_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            self.ready = self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self):
        deadline_s = time.monotonic() + WAIT_S
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.process.communicate()[1].decode()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        return self.ready_file.read_text().split()

    def kill(self):
        """End it as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        self.ready_file.unlink(missing_ok=True)

    def stop(self):
        """End it as a service manager would; return exit code, output and errors."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out.decode(), err.decode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        if not self.process.stdout.closed:
            self.process.communicate()
        self.ready_file.unlink(missing_ok=True)
