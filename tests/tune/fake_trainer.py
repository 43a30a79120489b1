"""A trainer without packages, in the front door's place: its runs write what real ones do, so that tests start many.

The accuracy is a function of lr, width, seed and epoch; `label_smoothing` asks for a fault: 0.1 out of memory, 0.2 NaN,
0.3 a full disk, 0.4 dies by SIGKILL in its second epoch, once, 0.5 overfits after its second epoch.
"""

import json
import os
import re
import signal
import sys
import time
from hashlib import sha256
from math import log10
from pathlib import Path

argv = sys.argv[1:]
given = [argv[at + 1] for at, word in enumerate(argv) if word == "--set"]
settings = {key: json.loads(value) for key, value in (each.split("=", 1) for each in given)}
stopped: list[int] = []
heard = signal.SIG_IGN if "FAKE_DEAF" in os.environ else lambda number, frame: stopped.append(number)
signal.signal(signal.SIGTERM, heard)
signal.signal(signal.SIGUSR1, heard)
if argv[0] == "evaluate":
    print(json.dumps({"split": "test", "samples": 10, "accuracy": 0.5, "run": argv[1]}))
    sys.exit(0)
workers = int(argv[argv.index("--nproc-per-node") + 1]) if "--nproc-per-node" in argv else 1
folder = Path(argv[argv.index("--save-dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
journal, summary = folder / "journal.jsonl", folder / "summary.json"
lr, width, fault = (
    float(settings.get("lr", 0.01)),
    settings.get("model.args.width", 16),
    settings.get("label_smoothing"),
)
epochs = int(re.findall(r"\bepochs: (\d+)", Path(argv[argv.index("--config") + 1]).read_text())[0])
pause, length = settings["tune.pause_at"], float(os.environ.get("FAKE_EPOCH", "0"))
lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
done = max((line["epoch"] for line in lines if line["event"] == "eval"), default=0)
summary.unlink(missing_ok=True)


def write(event: str, **fields) -> None:
    with open(journal, "a") as file:
        file.write(json.dumps({"event": event, "time": time.time()} | fields) + "\n")


def end(status: str, code: int, **fields) -> None:
    print(fields.get("error", ""), file=sys.stderr)
    evals = [json.loads(line) for line in journal.read_text().splitlines()]
    finite = [line for line in evals if line["event"] == "eval" and line["accuracy"] != "NaN"]
    best: dict = max(finite, key=lambda line: line["accuracy"], default={})
    best = {name: value for name, value in best.items() if name not in ("event", "split")}
    summary.write_text(json.dumps({"status": status, "best": best} | fields))
    sys.exit(code)


write(
    "start",
    plan={"steps_per_epoch": 10, "samples": 100},
    resumed_from="checkpoint" if done else None,
    world_size=workers,
    gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
)
if done:
    write("resume", step=10 * done, from_world_size=1, world_size=workers)
if fault == 0.1:
    end("failed", 1, error="OutOfMemory: out of memory")
if fault == 0.3:
    end("failed", 1, error="OSError: [Errno 28] No space left on device")
for epoch in range(done + 1, epochs + 1):
    until = time.monotonic() + length / workers
    while not stopped and time.monotonic() < until:
        time.sleep(0.005)
    if stopped:
        end("stopped", 75)
    if fault == 0.4 and epoch == 2 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    best = 1 - 0.1 * abs(log10(lr) + 2) - 0.001 * settings.get("seed", 0) - 0.002 * abs(width - 32)
    accuracy = float("nan") if fault == 0.2 and epoch > 1 else best * (1 - 0.5**epoch)
    if fault == 0.5 and epoch > 2:
        accuracy = best / epoch
    rate = 100 * workers / length if length else 1e6
    write("train", step=10 * epoch, samples=100 * epoch, epoch=epoch, samples_per_second=rate)
    shown = accuracy if accuracy == accuracy else "NaN"
    write("eval", epoch=epoch, step=10 * epoch, split="val", samples=10, accuracy=shown, loss=width / 64)
    if epoch >= pause and epoch < epochs:
        end("stopped", 75)
end(
    "completed",
    0,
    fingerprint=sha256(repr(sorted((k, v) for k, v in settings.items() if k != "tune.pause_at")).encode()).hexdigest(),
)
