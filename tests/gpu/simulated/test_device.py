"""The simulated GPUs themselves: they must show what a real one shows, or the tests on them prove nothing."""

import copy
import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multigpu_cli import engine
from multigpu_cli.checkpoint.weights import copy_to_host
from multigpu_cli.distributed.world import World
from multigpu_cli.monitor import gpu as nvml
from tests.gpu.simulated import build
from tests.gpu.simulated.gpus import alone, each_rank, events_in, front_door, train_on_gpus
from tests.gpu.simulated.install import Simulated
from tests.gpu.simulated.machine import GIB, Gpu, Machine


def network() -> nn.Module:
    torch.manual_seed(3)
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(convolution, nn.Flatten(), nn.Dropout(0.3), nn.Linear(72, 32), Attention(), nn.Linear(32, 5))


class Attention(nn.Module):
    """Of four positions."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = inputs.view(len(inputs), 1, 4, 8)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).flatten(1)


def three_steps(device: str) -> list[float]:
    """What a network comes to in three steps of a fused optimizer."""
    model = network().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    for step in range(3):
        torch.manual_seed(step)
        nn.functional.cross_entropy(model(inputs), torch.arange(6, device=device) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(value.double().sum()) for value in model.state_dict().values()]


@pytest.mark.slow
def test_training_has_the_bits_of_the_cpu() -> None:
    def work(sim: Simulated) -> Any:
        return three_steps("cuda:1"), sim.device.kernels()

    found, kernels = alone(work)
    assert found == three_steps("cpu")
    names = ("aten::convolution_backward", "aten::_scaled_dot_product_flash_attention", "aten::_fused_adamw_")
    assert all(kernels.get(name) for name in names)


def test_tensors_of_two_devices_do_not_mix() -> None:
    def work(sim: Simulated) -> None:
        here, there, host = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1"), torch.ones(2)
        for one, other in ((here, there), (here, host), (host, there)):
            with pytest.raises(RuntimeError, match="on the same device"):
                one + other
        assert (here + there.to("cuda:0") + torch.tensor(1.0)).tolist() == [3, 3]
        assert here.view(2, 1).device == torch.device("cuda:0")
        with torch.cuda.device(1):
            assert torch.zeros(1, device="cuda").get_device() == torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0
        assert copy.deepcopy(there).get_device() == 1
        with pytest.raises(RuntimeError, match="invalid device"):
            torch.cuda.set_device(2)

    alone(work)


def test_views_share_memory() -> None:
    def work(sim: Simulated) -> None:
        whole = torch.zeros(2, 3, device="cuda")
        for part in (whole[0], whole.t()[0], whole.unfold(1, 2, 1)[0, 0], whole.detach().flatten()):
            part += 1
        whole.chunk(2)[1].zero_()
        assert whole.tolist() == [[4, 3, 2], [0, 0, 0]]

    alone(work)


def read_value(one: torch.Tensor) -> None:
    one.sum().item()


def compare(one: torch.Tensor) -> None:
    bool(one[0] > 0)


def pick(one: torch.Tensor) -> None:
    one[one > 0]


def bring(one: torch.Tensor) -> None:
    one.copy_(torch.ones(4))


def fetch(one: torch.Tensor) -> None:
    one.cpu()


def fetch_into_pageable(one: torch.Tensor) -> None:
    torch.empty(4).copy_(one, non_blocking=True)


def make(one: torch.Tensor) -> None:
    torch.tensor(1.0, device="cuda")


def wait_for_the_stream(one: torch.Tensor) -> None:
    torch.cuda.current_stream().synchronize()


def test_the_host_is_seen_to_wait() -> None:
    def work(sim: Simulated) -> None:
        one = torch.ones(4, device="cuda")
        for wait in (read_value, compare, pick, bring, fetch, fetch_into_pageable, make, wait_for_the_stream):
            torch.cuda.set_sync_debug_mode("default")
            with sim.record.watching() as events:
                wait(one)
            assert {event.kind for event in events} == {"sync"}, wait
            torch.cuda.set_sync_debug_mode("error")
            with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                wait(one)

    alone(work)


def test_what_does_not_wait_is_not_taken_for_it() -> None:
    def work(sim: Simulated) -> None:
        one, pinned = torch.ones(4, device="cuda"), torch.ones(4).pin_memory()
        with sim.record.watching() as events:
            (one * 2 + 1).sum().div_(3)
            torch.where(one > 0, one, 0.0)
            one.copy_(pinned, non_blocking=True)
            torch.empty(4, pin_memory=True).copy_(one, non_blocking=True)
            torch.full((3,), 2.0, device="cuda").normal_()
        assert [event.kind for event in events] == ["copy", "copy"]
        with sim.record.watching() as events:
            torch.ones(4).to("cuda", non_blocking=True)
        assert [event.kind for event in events] == ["pageable"]

    alone(work)


def test_a_line_of_ours_that_waits_is_named() -> None:
    def work(sim: Simulated) -> list[str]:
        loss = torch.ones((), device="cuda")
        with sim.record.watching() as events:
            copy_to_host({"loss": loss})
        return [event.place for event in events]

    (place,) = alone(work)
    assert place.startswith("multigpu_cli/checkpoint/weights.py:")
    assert place.endswith(" copy_to_host")


@pytest.mark.parametrize("number", [0, 1])
def test_a_copy_lands_when_its_stream_is_waited_for(number: int) -> None:
    def work(sim: Simulated) -> None:
        device = torch.device("cuda", number)
        stream, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
        source, target = torch.arange(4.0, device=device), torch.zeros(4).pin_memory()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        other.synchronize()
        assert target.isnan().all()
        stream.synchronize()
        assert target.tolist() == [0, 1, 2, 3]

    alone(work)


def test_a_batch_is_there_for_the_stream_that_waited() -> None:
    def work(sim: Simulated) -> None:
        ahead, host = torch.cuda.Stream(), torch.arange(4.0).pin_memory()
        with torch.cuda.stream(ahead):
            batch = host.to("cuda", non_blocking=True)
        assert (batch * 1).cpu().isnan().all()
        torch.cuda.current_stream().wait_stream(ahead)
        assert (batch * 1).cpu().tolist() == [0, 1, 2, 3]

    alone(work)


def test_a_copy_beside_the_step_may_be_as_late_as_its_stream() -> None:
    def work(sim: Simulated) -> None:
        beside, weights = torch.cuda.Stream(), torch.ones(3, device="cuda")
        first, second = torch.empty(3).pin_memory(), torch.empty(3).pin_memory()
        with torch.cuda.stream(beside):
            first.copy_(weights, non_blocking=True)
        second.copy_(weights, non_blocking=True)
        weights += 1
        torch.cuda.synchronize()
        assert first.tolist() == [2, 2, 2]
        assert second.tolist() == [1, 1, 1]

    alone(work)


def test_an_event_is_recorded_while_another_thread_finishes_copies_of_tensors_python_has_let_go() -> None:
    """Freeing such a tensor takes the GIL, which the thread that records has: neither may wait for the other."""

    def work(sim: Simulated) -> None:
        targets = [torch.empty(4096).pin_memory() for _ in range(16)]

        def copy_all() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(300):
                    for target in targets:
                        target.copy_(torch.zeros(4096, device="cuda"), non_blocking=True)
                    torch.cuda.current_stream().synchronize()

        copier = threading.Thread(target=copy_all)
        copier.start()
        while copier.is_alive():
            torch.cuda.Event(enable_timing=True).record()
        copier.join()

    alone(work)


def test_torch_save_brings_tensors_to_the_host() -> None:
    def work(sim: Simulated) -> None:
        file, tensor = io.BytesIO(), torch.randn(4, 3, device="cuda").t()
        torch.save({"weights": tensor, "row": tensor[1]}, file)
        file.seek(0)
        found = torch.load(file, weights_only=True, map_location="cpu")
        assert torch.equal(found["weights"], tensor.cpu())
        assert torch.equal(found["row"], tensor[1].cpu())

    alone(work)


def test_memory_is_counted_and_ends() -> None:
    def work(sim: Simulated) -> None:
        one = torch.zeros(1024, device="cuda")
        assert torch.cuda.memory_allocated() == 4096
        two = one + 1
        del one, two
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 8192)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        assert torch.cuda.mem_get_info() == (GIB - 8192, GIB)
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info() == (GIB, GIB)
        with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
            torch.zeros(2**40, device="cuda")
        sim.device.fail_allocation(0, 1, 2048)
        small = [torch.zeros(1, device="cuda") for _ in range(3)] + [torch.zeros(512, device="cuda")]
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(512, device="cuda")
        assert len([*small, torch.zeros(512, device="cuda")]) == 5
        half = torch.zeros(2**27, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            half.double()

    alone(work, Machine.of(1, memory=GIB))


def test_every_device_draws_from_its_own_generator() -> None:
    def work(sim: Simulated) -> None:
        torch.cuda.init()
        torch.manual_seed(5)
        generators: Any = torch.cuda.default_generators
        generators[1].manual_seed(6)
        host, first, second = (torch.rand(3, device=device) for device in ("cpu", "cuda:0", "cuda:1"))
        assert torch.equal(host, first.cpu())
        assert not torch.equal(host, second.cpu())
        state = torch.cuda.get_rng_state(1)
        dropped = [nn.functional.dropout(torch.ones(50, device="cuda:1"), 0.5).cpu() for _ in range(2)]
        torch.cuda.set_rng_state(state, 1)
        assert torch.equal(nn.functional.dropout(torch.ones(50, device="cuda:1"), 0.5).cpu(), dropped[0])
        assert not torch.equal(*dropped)

    alone(work)


def test_a_loss_scale_falls_where_something_overflows() -> None:
    def work(sim: Simulated) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        with torch.autocast("cuda", torch.float16):
            product = nn.functional.linear(torch.ones(1, 2, device="cuda"), weight[None])
        assert product.dtype == torch.float16
        for factor, scale in ((1.0, 4.0), (float("inf"), 2.0)):
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == scale
        assert weight.tolist() == [0, 0]

    alone(work)


def test_data_parallel_trains_on_two_devices() -> None:
    def work(sim: Simulated) -> None:
        model = nn.DataParallel(nn.Linear(3, 2).cuda(), [0, 1])
        model(torch.ones(6, 3, device="cuda")).sum().backward()
        assert model.module.weight.grad is not None
        assert model.module.weight.grad.tolist() == [[6, 6, 6], [6, 6, 6]]

    alone(work)


def reductions(sim: Simulated, world: World) -> list[Any]:
    """Of tensors on the device, by all ranks."""
    one = torch.full((3,), world.rank + 1.0, device=world.device)
    mean = one.clone()
    dist.all_reduce(one)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    parts = [torch.empty(1, device=world.device) for _ in range(world.size)]
    dist.all_gather(parts, torch.tensor([float(world.rank)], device=world.device))
    with pytest.raises(RuntimeError, match="cpu"):
        dist.all_reduce(torch.ones(1))
    for _ in range(2):  # the first goes while the second comes
        group = dist.new_group([0, 1])
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
        dist.destroy_process_group(group)
    dist.barrier()
    return [dist.get_backend(), one.tolist(), mean.tolist(), [part.item() for part in parts]]


def test_nccl_adds_over_ranks() -> None:
    assert each_rank(2, reductions) == [["nccl", [3, 3, 3], [1.5, 1.5, 1.5], [0, 1]]] * 2


def replicate_model(sim: Simulated, world: World) -> Any:
    """The gradient of DDP, after a step that no rank waited in; in the first two DDP lays out its buckets."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).to(world.device), device_ids=[world.rank])
    inputs = torch.full((1, 2), world.rank + 1.0, device=world.device)
    for _ in range(2):
        model(inputs).sum().backward()
    with sim.record.watching() as events:
        model.zero_grad()
        model(inputs).sum().backward()
        assert [event for event in events if event.kind == "sync"] == []
    assert model.module.weight.grad is not None
    return model.module.weight.grad.tolist()


def test_ddp_averages_over_ranks() -> None:
    assert each_rank(2, replicate_model) == [[[1.5, 1.5]]] * 2


def normalise_batch(sim: Simulated, world: World) -> Any:
    """Output, gradient and running mean of SyncBatchNorm, each rank with its part of one batch."""
    whole = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(2)).square()
    part = (whole[:2] if world.rank == 0 else whole[2:]).to(world.device).requires_grad_()
    layer = nn.SyncBatchNorm(3).to(world.device)
    out = layer(part)
    (out**3).sum().backward()
    assert part.grad is not None
    return torch.stack([out, part.grad]).tolist(), *(
        layer.get_buffer(f"running_{name}").tolist() for name in ("mean", "var")
    )


def test_batch_norm_is_over_all_ranks() -> None:
    whole = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(2)).square().requires_grad_()
    layer = nn.BatchNorm1d(3)
    out = layer(whole)
    (out**3).sum().backward()
    assert whole.grad is not None
    found = each_rank(2, normalise_batch)
    torch.testing.assert_close(
        torch.cat([torch.tensor(values) for values, _, _ in found], 1), torch.stack([out.detach(), whole.grad])
    )
    running = torch.stack([layer.get_buffer("running_mean"), layer.get_buffer("running_var")])
    for _, mean, variance in found:
        torch.testing.assert_close(torch.tensor([mean, variance]), running)


def test_two_ranks_cannot_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    same = Machine((Gpu(), Gpu()))
    monkeypatch.setattr(Machine, "uuid", lambda machine, number: "the same")
    with pytest.raises(AssertionError, match="Duplicate GPU detected"):
        each_rank(2, reductions, same)


def test_unlike_gpus_and_what_nvml_says_of_them() -> None:
    old = Gpu("Tesla T4", 15 * GIB, (7, 5), {"busy": 40, "power": None})
    lost = Gpu(nvml={"lost": "GPU is lost"})

    def work(sim: Simulated) -> None:
        assert [torch.cuda.get_device_name(n) for n in range(3)] == ["Tesla T4", Gpu().name, Gpu().name]
        assert torch.cuda.get_device_capability(0) == (7, 5)
        assert [torch.cuda.is_bf16_supported(including_emulation=False), torch.cuda.is_available()] == [False, True]
        library = nvml.open_nvml()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        handle = library.nvmlDeviceGetHandleByUUID(uuid)
        assert library.nvmlDeviceGetUtilizationRates(handle).gpu == 40
        with pytest.raises(library.NVMLError, match="lost"):
            library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(2).uuid}")

    alone(work, Machine((old, Gpu(), lost)))


def test_some_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine.of(3)

    def work(sim: Simulated) -> list[str]:
        return [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]

    for words, seen in (("2,0", [2, 0]), (f"GPU-{machine.uuid(1)}", [1]), ("0,7,1", [0]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", words)
        assert alone(work, machine) == [machine.uuid(number) for number in seen]


def test_a_machine_travels_in_the_environment() -> None:
    machine = Machine((Gpu(nvml={"busy": 3}), Gpu("Tesla T4", capability=(7, 5))), no_nvml="no", record="/tmp/file")
    assert Machine.from_environment(machine.environment({})) == machine
    assert Machine.from_environment({}) is None


def test_the_command_line_trains_on_two_gpus(tmp_path: Path) -> None:
    machine = Machine(record=str(tmp_path / "record"))
    done = front_door("--model", "mlp", "--max-steps", "4", "--json", "--save-dir", f"{tmp_path}/run", machine=machine)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["strategy"], summary["precision"], summary["world_size"]) == ("ddp", "bf16", 2)
    assert {rank for rank, _ in events_in(tmp_path / "record")} == {0, 1}


@pytest.mark.parametrize("how", ["none", "dp"])
def test_one_process_trains_on_its_gpus(how: str, tmp_path: Path) -> None:
    """A thread of dp lives for one pass, and would have cuDNN try its kernels in each."""

    def note_benchmark(sim: Simulated) -> None:
        real = engine.train_step

        def step(run: Any, layout: Any, work: Any) -> Any:
            (tmp_path / "tries").write_text(str(torch.backends.cudnn.benchmark))
            return real(run, layout, work)

        engine.train_step = step

    flags: dict[str, Any] = {"data": "digits", "model": "mlp", "multi_gpu": how, "max_steps": 4}
    ended = train_on_gpus(prepare=note_benchmark, save_dir=str(tmp_path / "run"), **flags)
    assert not ended.error
    assert (tmp_path / "tries").read_text() == str(how != "dp")
    assert (ended.summary["status"], ended.summary["precision"]) == ("completed", "bf16")
    assert ended.summary["strategy"] == ("dp" if how == "dp" else "single")
    assert all(bytes > 0 for bytes in ended.summary["peak_memory_bytes"])


def test_without_a_compiler_a_test_is_skipped_and_in_ci_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-compiler"):
        alone(lambda sim: None)
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-compiler"):
        alone(lambda sim: None)


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    lines = ("#!/bin/sh", 'echo once >> "$0.calls"', 'while [ "$1" != -o ]; do shift; done', 'echo library > "$2"', "")
    compiler.write_text("\n".join(lines))
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    words = [sys.executable, "-c", "from tests.gpu.simulated import build; print(build.build_library())"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    places = {process.communicate()[0] for process in both}
    assert len(places) == 1
    assert Path(places.pop().strip()).read_text() == "library\n"
    assert Path(f"{compiler}.calls").read_text() == "once\n"
    assert build.build_library().read_text() == "library\n"


def test_a_wait_in_a_thread_of_torchs_own_is_recorded() -> None:
    """No line of Python asks for it there."""

    def work(sim: Simulated) -> list[str]:
        weights = torch.ones(4, device="cuda", requires_grad=True)
        loss = weights[torch.tensor([True, False, True, True], device="cuda")].sum()
        with sim.record.watching() as events:
            loss.backward()
        return [event.place for event in events if event.kind == "sync"]

    assert set(alone(work)) == {"a thread of torch's own"}
