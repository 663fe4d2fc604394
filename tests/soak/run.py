"""The soak: a broker and real clients, killed, paused and cut off from each other; then the check of the
history.

    PYTHONPATH=src:tests python -m soak.run --minutes 30 --seed 1 --report report.md

The broker and each client are processes; clients talk to the broker through a proxy. Every few seconds
one of them is killed, paused or ended, or connections are reset, or responses lost. A client
that ends or hangs is started again. At the end everything goes on undisturbed, the clients end, all is
read from the beginning, and the journals are held against each other (``anomalies``).

What is done to whom and when follows from the seed; what the machine makes of it does not.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from soak.anomalies import SHOWN_MAX, Finding, findings
from soak.clients import TOPICS
from soak.history import History, Operation, read_journals
from soak.proxy import Proxy

from millstream.testing.free_ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = {
    "send": 2,
    "transact": 2,
    "transform": 2,
    "member": 3,
    "committed": 1,
    "uncommitted": 1,
}
START_S = 60.0
HUNG_S = 60.0  # without a beat: longer than any call of a client may take
END_S = 75.0  # longer than any call of a client may take
SEGMENT_BYTES = 500_000  # so that segments are closed while it runs
BROKER = (sys.executable, "-m", "millstream", "broker")


@dataclass
class Run:
    """The result of a run."""

    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)  # clients that ended themselves, and why
    hung: Counter[str] = field(default_factory=Counter)  # clients without a beat, and where
    problems: list[str] = field(default_factory=list)
    complete: bool = False  # everything was read at the end
    operations: list[Operation] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)
    broker_cpu_s: float = 0.0
    broker_rss_mib: int = 0
    starts_s: list[float] = field(default_factory=list)


class Process:
    """A process that may be paused, killed and started again."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
        with log.open("ab") as out:
            self._process = subprocess.Popen(list(words), stdout=out, stderr=out, env=env)
        self.is_paused = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.is_paused = True

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self.is_paused = False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self, wait_s: float) -> int | None:
        """Send it SIGTERM; return its exit code, None if it had to be killed."""
        self.go_on()
        self._process.terminate()
        return self.wait(wait_s)

    def wait(self, wait_s: float) -> int | None:
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None


class Broker:
    """The broker, in one life after the other."""

    def __init__(self, folder: Path, run: Run, words: Sequence[str]) -> None:
        self._folder, self._run, self._words = folder, run, words
        self._ready = folder / "ready"
        (self.port,) = free_ports(1)
        self.advertised = ""
        self.process: Process

    def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        listen = f"127.0.0.1:{self.port}"
        words = [*self._words, str(self._folder / "log"), "--listen", listen]
        words += ["--advertise", self.advertised, "--ready-file", str(self._ready)]
        began = time.monotonic()
        self.process = Process(words, self._folder / "broker.txt")
        while not self._ready.exists():
            if self.process.code is not None or time.monotonic() - began > START_S:
                said = (self._folder / "broker.txt").read_text()[-2000:]
                raise RuntimeError(f"the broker did not start: {self.process.code}: {said}")
            time.sleep(0.01)
        self._run.starts_s.append(time.monotonic() - began)

    def note_use(self) -> None:
        """Add up the resources that this life used; before it is ended."""
        try:
            words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return
        self._run.broker_cpu_s += sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")
        for line in status.splitlines():
            if line.startswith("VmHWM"):
                mib = int(line.split()[1]) >> 10
                self._run.broker_rss_mib = max(self._run.broker_rss_mib, mib)


class Client:
    """A client, in one life after the other."""

    def __init__(self, role: str, name: str, address: str, folder: Path, run: Run) -> None:
        self.role, self.name = role, name
        self._address, self._folder, self._run = address, folder, run
        self._beat = folder / "beats" / name
        self.life = 0
        self.heard_s = 0.0
        self.process: Process
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "soak.clients", self.role, self.name, str(self.life)]
        words += [self._address, str(self._folder)]
        self.life += 1
        self.process = Process(words, self._folder / f"{self.name}.txt")
        self.heard_s = time.monotonic()

    def look_after(self) -> None:
        """Start it again if it has ended or hangs."""
        code = self.process.code
        if code is not None:
            self._run.ended[f"{self.role}: {self._reason(code)}"] += 1
            self.start()
        elif self.is_hung():
            self._run.hung[f"{self.name}: {self.step()}"] += 1
            self.process.kill()
            self.start()

    def is_hung(self) -> bool:
        if self.process.is_paused:
            self.heard_s = time.monotonic()
        try:
            ago_s = time.time() - self._beat.stat().st_mtime
        except FileNotFoundError:
            return False
        return min(ago_s, time.monotonic() - self.heard_s) > HUNG_S

    def step(self) -> str:
        return self._beat.read_text().strip()

    def _reason(self, code: int) -> str:
        if code != 3:
            said = (self._folder / f"{self.name}.txt").read_text()[-1500:]
            self._run.problems.append(f"{self.name} ended with {code}: {said}")
            return f"exit code {code}"
        said = (self._folder / f"{self.name}.txt").read_text().split("ended ")[-1]
        return said.partition(" ")[2].strip()


class Faults:
    """The schedule of faults, from a seed."""

    def __init__(
        self,
        broker: Broker,
        clients: Sequence[Client],
        proxy: Proxy,
        run: Run,
        chance: random.Random,
    ) -> None:
        self._broker, self._clients, self._proxy = broker, clients, proxy
        self._run, self._chance = run, chance
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._kinds: list[tuple[int, Callable[[], None]]] = [
            (4, self.kill_broker),
            (1, self.stop_broker),
            (3, self.pause_broker),
            (6, self.kill_client),
            (5, self.pause_client),
            (2, self.reset_all),
            (3, self.reset_some),
            (3, self.lose_answers),
        ]

    def next(self) -> None:
        """Do the next one."""
        weights = [weight for weight, _ in self._kinds]
        (do,) = self._chance.choices([do for _, do in self._kinds], weights)
        self._run.faults[do.__name__.replace("_", " ")] += 1
        do()

    def due(self, now_s: float) -> None:
        """End what is over."""
        over = [do for at, do in self._later if at <= now_s]
        self._later = [one for one in self._later if one[0] > now_s]
        for do in over:
            do()

    def heal(self) -> None:
        """End everything."""
        self.due(float("inf"))

    def kill_broker(self) -> None:
        if self._broker.process.is_paused:
            self._broker.process.go_on()
        self._broker.note_use()
        self._broker.process.kill()
        time.sleep(self._chance.choice((0.0, 0.0, 0.3, 2.0)))
        self._broker.start()

    def stop_broker(self) -> None:
        self._broker.note_use()
        code = self._broker.process.end(END_S)
        if code != 0:
            self._run.problems.append(f"the broker ended with {code} at SIGTERM")
        self._broker.start()

    def pause_broker(self) -> None:
        process = self._broker.process
        process.pause()
        self._after(self._chance.choice((0.2, 1.0, 3.0, 8.0)), process.go_on)

    def kill_client(self) -> None:
        client = self._chance.choice(self._clients)
        client.process.kill()
        client.start()

    def pause_client(self) -> None:
        process = self._chance.choice(self._clients).process
        process.pause()
        self._after(self._chance.choice((0.5, 3.0, 9.0, 25.0)), process.go_on)

    def reset_all(self) -> None:
        self._proxy.reset(1.0)

    def reset_some(self) -> None:
        self._proxy.reset(0.3)

    def lose_answers(self) -> None:
        self._proxy.mute(self._chance.choice((0.2, 1.0)))
        self._after(self._chance.choice((0.1, 0.5, 2.0)), self._proxy.reset_mute)

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, do))


def soak(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    every_s: float = 4.0,
    settle_s: float = 5.0,
    forgetting: bool = True,
    broker_words: Sequence[str] = BROKER,
) -> Run:
    """Run it; return the result.

    Args:
        every_s: How far apart faults are, on average.
        settle_s: For how long the clients go on undisturbed at the end.
        forgetting: Whether every other client forgets its brokers, and may hang (``clients``).
        broker_words: The command that is the broker, for one with a fault of its own.
    """
    run, chance = Run(), random.Random(seed)
    for name in ("beats", "journals"):
        (folder / name).mkdir(parents=True)
    broker = Broker(folder, run, broker_words)
    clients: list[Client] = []
    with Proxy(broker.port, random.Random(seed + 1)) as proxy:
        broker.advertised = proxy.address
        broker.start()
        try:
            _make_topics(proxy.address)
            for role, count in CLIENTS.items():
                for number in range(count):
                    name = f"{role}-{number if forgetting else 2 * number + 1}"
                    clients.append(Client(role, name, proxy.address, folder, run))
            faults = Faults(broker, clients, proxy, run, chance)
            _disturb(clients, faults, chance, seconds=seconds, every_s=every_s)
            _finish(clients, proxy.address, folder, run, settle_s)
            broker.note_use()
            if broker.process.end(END_S) != 0:
                run.problems.append("the broker did not end in order")
        finally:
            for process in (*(one.process for one in clients), broker.process):
                if process.code is None:
                    process.kill()
    run.seconds = seconds
    run.operations = read_journals(sorted((folder / "journals").iterdir()))
    run.found = findings(History(run.operations, complete=run.complete))
    return run


def _make_topics(address: str) -> None:
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    config = {"segment.bytes": str(SEGMENT_BYTES)}
    topics = [NewTopic(name, count, 1, config=config) for name, count in TOPICS.items()]
    for made in admin.create_topics(topics).values():
        try:
            made.result(START_S)
        except KafkaException as error:
            raise RuntimeError(f"the topics could not be made: {error}") from None


def _disturb(
    clients: Sequence[Client],
    faults: Faults,
    chance: random.Random,
    *,
    seconds: float,
    every_s: float,
) -> None:
    began = time.monotonic()
    next_s = began + 3.0
    while (now_s := time.monotonic()) < began + seconds:
        faults.due(now_s)
        for client in clients:
            client.look_after()
        if now_s > next_s:
            faults.next()
            next_s = time.monotonic() + chance.expovariate(1 / every_s)
        time.sleep(0.05)
    faults.heal()


def _finish(
    clients: Sequence[Client], address: str, folder: Path, run: Run, settle_s: float
) -> None:
    """Let all clients continue undisturbed, end, and read everything."""
    end_s = time.monotonic() + settle_s
    while time.monotonic() < end_s:
        for client in clients:
            client.look_after()
        time.sleep(0.05)
    (folder / "stop").touch()
    for client in clients:
        code = client.process.wait(END_S)
        if code is None:
            run.hung[f"{client.name}, at the end: {client.step()}"] += 1
        elif code:
            run.ended[f"{client.role}: {client._reason(code)}"] += 1
    last = Process(
        [sys.executable, "-m", "soak.clients", "finish", "finish", "0", address, str(folder)],
        folder / "finish.txt",
    )
    run.complete = last.wait(3 * END_S) == 0
    if not run.complete:
        said = (folder / "finish.txt").read_text()[-2000:]
        run.problems.append(f"not everything could be read at the end: {said}")


# -- the report -------------------------------------------------------------------------------


def report(run: Run, *, seed: int, commit: str) -> str:
    """Return the report of a run."""
    kinds = Counter(f"{one.kind}, {one.outcome}" for one in run.operations)
    sent = sum(len(one.sent) for one in run.operations)
    read = sum(len(one.read) for one in run.operations)
    lives = len({one.process for one in run.operations})
    what = (
        f"{run.seconds / 60:.3g} minutes on {time.strftime('%Y-%m-%d')}, seed {seed}, commit {commit}; "
        f"{_machine()}.\n\n{sum(run.faults.values())} faults; {sent:,} records sent, {read:,} read, "
        f"{len(run.operations):,} operations of {lives} lives of {sum(CLIENTS.values())} clients. "
        f"The broker: {len(run.starts_s)} starts, ready after {max(run.starts_s):.1f} s at most; "
        f"{run.broker_cpu_s:.0f} CPU seconds; {run.broker_rss_mib} MiB at most."
    )
    lines = [
        what,
        "",
        *_table("fault", run.faults),
        *_table("operation", kinds),
        *_table("a client ended itself", run.ended),
        *_table("a client hung, and was killed", run.hung),
    ]
    lines += ["| finding | how often |", "|---|---|"]
    counts = Counter(one.kind for one in run.found)
    lines += [f"| {kind} | {count} |" for kind, count in sorted(counts.items())] or ["| none | 0 |"]
    shown: Counter[str] = Counter()
    for one in run.found:
        shown[one.kind] += 1
        if shown[one.kind] <= SHOWN_MAX:
            lines.append(f"- {one.kind}: {one.text}")
    lines += ["", *(f"- problem: {problem}" for problem in run.problems)]
    return "\n".join(lines).rstrip() + "\n"


def _table(title: str, counts: Counter[str]) -> list[str]:
    if not counts:
        return []
    rows = [f"| {name} | {count:,} |" for name, count in sorted(counts.items())]
    return [f"| {title} | how often |", "|---|---|", *rows, ""]


def _machine() -> str:
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return (
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, "
        f"load {load} at the end"
    )


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between faults")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for all that it leaves")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="millstream-soak-"))
    commit = _commit()
    run = soak(folder, seconds=60 * options.minutes, seed=options.seed, every_s=options.every)
    text = report(run, seed=options.seed, commit=commit)
    print(text)
    if options.report is not None:
        options.report.write_text(text)
    if options.keep is None and not run.found and not run.problems:
        shutil.rmtree(folder)
    return 1 if run.found or run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
