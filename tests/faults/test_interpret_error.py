import pytest
import torch

from multigpu_cli.faults.explain import is_peer_failure, name_unused_parameters, remedy_for

GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:38274. This is typically caused by a remote worker"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer"),
        RuntimeError("Application timeout caused pair closure"),
        torch.distributed.DistBackendError("NCCL error in: …"),
        torch.distributed.DistNetworkError("connect() failed"),
        torch.distributed.DistStoreError("wait timeout after 30000ms"),
    ],
)
def test_who_only_lost_the_others_is_no_cause(error: Exception) -> None:
    assert is_peer_failure(error)


@pytest.mark.parametrize("error", [ValueError("peer review"), RuntimeError("out of memory"), OSError("disk full")])
def test_everything_else_is_one(error: Exception) -> None:
    assert not is_peer_failure(error)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "--batch-size"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "--batch-size"),
        (RuntimeError("The server socket has failed to bind: EADDRINUSE, Address already in use"), "--standalone"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."), "--shm-size"),
        (RuntimeError("unable to write to file </torch_7_2>: No space left on device (28), /dev/shm"), "--shm-size"),
        (OSError(28, "No space left on device"), "make room"),
        (RuntimeError("Expected to have finished reduction in the prior iteration"), "--find-unused-parameters"),
        (RuntimeError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)"), "NCCL_P2P_DISABLE"),
        (RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly"), "--num-workers 0"),
        (OSError(24, "Too many open files"), "ulimit"),
        (RuntimeError("CUDA error: device-side assert triggered"), "CUDA_LAUNCH_BLOCKING"),
        (ValueError("anything else"), ""),
    ],
)
def test_known_causes_have_a_way_out(error: Exception, remedy: str) -> None:
    assert remedy in remedy_for(error)
    assert bool(remedy) == bool(remedy_for(error))


def test_indices_of_ddp_become_names() -> None:
    error = RuntimeError("… Parameter indices which did not receive grad for rank 1: 0 2\n In addition, …")
    other = RuntimeError("something else")
    for each in (error, other):
        name_unused_parameters(each, ["a", "b", "c"])
    assert error.__notes__ == ["no gradient for: a, c"]
    assert not hasattr(other, "__notes__")
