import pytest
import torch

from multigpu_cli.faults.explain import is_peer_failure, name_small_embedding, name_unused_parameters, remedy_for

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
BROKEN = f"{NCCL}unhandled system error, NCCL version 2.27.3\nncclSystemError: System call (e.g. socket, malloc) or "
BROKEN += "external library call failed or device error.\nLast error:\n"
SHM = f"{BROKEN}Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"
FULL = f"{NCCL}unhandled cuda error, NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
FULL += "Last error:\nCuda failure 2 'out of memory'"
TWICE = f"{NCCL}invalid usage, NCCL version 2.27.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
TWICE += "library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
GONE = f"{NCCL}remote process exited or there was a network error, NCCL version 2.27.3\nncclRemoteError: A call "
GONE += "failed possibly due to a network error or a remote process exiting prematurely."
GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:38274. This is typically caused by a remote worker"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer"),
        RuntimeError("Application timeout caused pair closure"),
        torch.distributed.DistBackendError(GONE),
        torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1."),
        torch.distributed.DistBackendError(f"{BROKEN}Connect to 10.0.0.2 failed: Connection refused"),
        torch.distributed.DistBackendError("… key '0', but store->get('0') got error: wait timeout after 600000ms"),
        torch.distributed.DistNetworkError("connect() failed"),
        torch.distributed.DistStoreError("wait timeout after 30000ms"),
    ],
)
def test_who_only_lost_the_others_is_no_cause(error: Exception) -> None:
    assert is_peer_failure(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("peer review"),
        RuntimeError("out of memory"),
        OSError("disk full"),
        ConnectionRefusedError("Connection refused"),
        *map(torch.distributed.DistBackendError, (SHM, FULL, TWICE)),
    ],
)
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
        (OSError(28, "No space left on device"), "free space"),
        (RuntimeError("Expected to have finished reduction in the prior iteration"), "--find-unused-parameters"),
        (RuntimeError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)"), "NCCL_P2P_DISABLE"),
        (RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly"), "--num-workers 0"),
        (OSError(24, "Too many open files"), "ulimit"),
        (RuntimeError("CUDA error: device-side assert triggered"), "CUDA_LAUNCH_BLOCKING"),
        (torch.distributed.DistBackendError(SHM), "--shm-size"),
        (torch.distributed.DistBackendError(FULL), "--batch-size"),
        (torch.distributed.DistBackendError(TWICE), "one GPU for each process; the MIG slices"),
        (RuntimeError("Deterministic behavior was enabled … CUBLAS_WORKSPACE_CONFIG=:4096:8 or"), ":4096:8 python"),
        (ValueError("anything else"), ""),
    ],
)
def test_known_causes_have_a_way_out(error: Exception, remedy: str) -> None:
    assert remedy in remedy_for(error)
    assert bool(remedy) == bool(remedy_for(error))


def test_an_embedding_that_is_too_small_is_told_with_its_size() -> None:
    with pytest.raises(IndexError) as raised:
        torch.nn.Embedding(12, 2)(torch.tensor([3, 17]))
    name_small_embedding(raised.value)
    assert raised.value.__notes__ == ["its inputs are 3 to 17, and the embedding has 12 rows"]
    assert "a row for every number" in remedy_for(raised.value)
    name_small_embedding(other := IndexError("list index out of range"))
    assert not hasattr(other, "__notes__")


def test_indices_of_ddp_become_names() -> None:
    error = RuntimeError("… Parameter indices which did not receive grad for rank 1: 0 2\n In addition, …")
    other = RuntimeError("something else")
    for each in (error, other):
        name_unused_parameters(each, ["a", "b", "c"])
    assert error.__notes__ == ["no gradient for: a, c"]
    assert not hasattr(other, "__notes__")
