"""What a `train` line says of a GPU: torch's own word and NVML's."""

from pathlib import Path

from multigpu_cli.monitor import journal
from tests.gpu.simulated.gpus import train_on_gpus
from tests.gpu.simulated.machine import GIB, Gpu, Machine


def test_torch_and_nvml_say_how_the_gpu_does(tmp_path: Path) -> None:
    machine = Machine((Gpu(nvml={"busy": 90, "used": GIB}),))
    ended = train_on_gpus(1, machine=machine, save_dir=str(tmp_path), max_steps=4, log_interval=2)
    assert ended.error == ""
    *_, line = (event for event in journal.read_events(tmp_path / "journal.jsonl") if event["event"] == "train")
    assert (line["gpu_utilisation"], line["gpu_memory_used"]) == ([90], [GIB])
    assert line["memory_reserved"][0] > 0
