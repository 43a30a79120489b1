"""Two hosts behind a slow link: how long until the same validation loss, by what is sent over it. Needs root, iproute2.

    python -m benchmarks.slow_link --rate 100 --delay 20 --target 0.2

The hosts are network namespaces; the link between them has so many Mbit/s each way, and so many ms there and back. The
kernel's netem shapes it where there is one, else two tunnel devices and a process between that holds packets back.
"""

import argparse
import ctypes
import fcntl
import json
import os
import select
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.netns import Host, hosts, missing, torchrun

_NETWORK = ["--data", "digits", "--model", "mlp", "--set", "model.args.width=768", "--set", "model.args.depth=2"]
_COMMON = [*_NETWORK, "--batch-size", "32", "--epochs", "60", "--schedule", "constant", "--checkpoint-every", "100000"]
_WAYS: dict[str, list[str]] = {
    "plain DDP": [],
    "--grad-compression fp16": ["--grad-compression", "fp16"],
    "--grad-compression powersgd": ["--grad-compression", "powersgd"],
    "--grad-accum-steps 4": ["--grad-accum-steps", "4"],
    "--grad-accum-steps 4 --grad-compression fp16": ["--grad-accum-steps", "4", "--grad-compression", "fp16"],
}
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_CLONE_NEWNET = 0x40000000
_MTU = 9000
_QUEUE = 0.2  # seconds of packets that the link keeps; more are dropped, as by a switch


class Link(threading.Thread):
    """A wire between two tunnel devices: each packet leaves it when it has been sent at the rate, and has travelled.

    Args:
        ends: descriptors of the devices.
        rate: bytes a second, each way.
        delay: seconds, one way.
    """

    def __init__(self, ends: tuple[int, int], rate: float, delay: float) -> None:
        super().__init__(name="link", daemon=True)
        self._ends, self._rate, self._delay, self._over = ends, rate, delay, threading.Event()

    def run(self) -> None:
        waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in self._ends}
        sent = dict.fromkeys(self._ends, 0.0)
        while not self._over.is_set():
            due = min((packets[0][0] for packets in waiting.values() if packets), default=time.monotonic() + 0.1)
            readable, _, _ = select.select(self._ends, [], [], max(0.0, due - time.monotonic()))
            now = time.monotonic()
            for end in readable:
                packet = os.read(end, 65536)
                begins = max(now, sent[end])
                if begins - now < _QUEUE:
                    sent[end] = begins + len(packet) / self._rate
                    waiting[end].append((sent[end] + self._delay, packet))
            for end, other in (self._ends, self._ends[::-1]):
                while waiting[end] and waiting[end][0][0] <= now:
                    os.write(other, waiting[end].popleft()[1])

    def close(self) -> None:
        self._over.set()
        self.join()
        for end in self._ends:
            os.close(end)


@contextmanager
def shaped(pair: Sequence[Host], megabits: float, milliseconds: float) -> Iterator[str]:
    """Make the link between two hosts slow; says by what."""
    netem = ["tc", "qdisc", "add", "dev", "eth0", "root", "netem", "rate", f"{megabits}mbit"]
    try:
        for host in pair:
            host.inside(*netem, "delay", f"{milliseconds / 2}ms", "limit", "10000")
        yield "tc netem"
        return
    except AssertionError as error:
        if "kind is unknown" not in str(error):
            raise
    ends = []
    for host in pair:
        host.inside("ip", "link", "del", "eth0")
        ends.append(_tunnel(host))
        host.inside("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.inside("ip", "link", "set", "eth0", "mtu", str(_MTU), "up")
    link = Link((ends[0], ends[1]), megabits * 1e6 / 8, milliseconds / 2e3)
    link.start()
    try:
        yield "two tunnels and a process that holds packets back (this kernel has no netem)"
    finally:
        link.close()


def _tunnel(host: Host) -> int:
    """Open a tunnel device named eth0 within a host's namespace: a thread goes there, and comes back with it."""
    found: list[int] = []

    def open_there() -> None:
        with open(f"/run/netns/{host.space}") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22s", b"eth0", _IFF_TUN | _IFF_NO_PI, b""))
        found.append(end)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    return found[0]


def trained(pair: Sequence[Host], words: Sequence[str], target: float, run: Path, seconds: float) -> dict[str, Any]:
    """Train on both hosts until the validation loss is reached, and end it there."""
    command = torchrun("2", pair[0], *_COMMON, *words, "--save-dir", str(run), "--quiet", "--log-interval", "10")
    agents = [host.start(command) for host in pair]
    until, steps = time.monotonic() + seconds, [0.0]
    reached: dict[str, Any] = {}
    while not reached and time.monotonic() < until and all(agent.poll() is None for agent in agents):
        time.sleep(0.2)
        events = [json.loads(line) for line in _lines(run / "journal.jsonl")]
        began = next((event["time"] for event in events if event["event"] == "start"), 0.0)
        steps = [event["step_ms"] for event in events if event["event"] == "train"] or steps
        good = [event for event in events if event["event"] == "eval" and event["loss"] <= target]
        if good:
            reached = {"seconds": good[0]["time"] - began, "steps": good[0]["step"], "loss": good[0]["loss"]}
    for host in pair:
        host.kill()
    late = sorted(steps[len(steps) // 2 :])  # PowerSGD sends the first hundred gradients whole
    return reached | {"step_ms": late[len(late) // 2]}


def _lines(journal: Path) -> list[str]:
    return [line for line in journal.read_text().split("\n")[:-1] if line] if journal.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s, each way")
    parser.add_argument("--delay", type=float, default=20, help="ms, there and back")
    parser.add_argument("--target", type=float, default=0.2, help="validation loss")
    parser.add_argument("--seconds", type=float, default=240, help="at most, for each way")
    asked = parser.parse_args()
    if why := missing():
        raise SystemExit(why)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slow-link-")))
        pair = stack.enter_context(hosts(["node1", "node2"], folder))
        means = stack.enter_context(shaped(pair, asked.rate, asked.delay))
        kernel = os.uname()
        print(f"{asked.rate:g} Mbit/s each way, {asked.delay:g} ms there and back, by {means}")
        print(f"{kernel.sysname} {kernel.release}, {os.cpu_count()} cores, to a validation loss of {asked.target:g}")
        for number, (name, words) in enumerate(_WAYS.items()):
            found = trained(pair, words, asked.target, folder / f"run{number}", asked.seconds)
            took = f"{found['seconds']:.0f} s, {found['steps']} steps" if "seconds" in found else "not reached"
            print(f"{name}: {took}, {found['step_ms']:.0f} ms a step", flush=True)


if __name__ == "__main__":
    main()
