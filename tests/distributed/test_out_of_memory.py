import pytest
import torch

from multigpu_cli.distributed.world import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA driver error: out of memory"),
        torch.distributed.DistBackendError("ncclUnhandledCudaError: …\nLast error:\nCuda failure 2 'out of memory'"),
        torch.distributed.DistBackendError(
            "ncclUnhandledCudaError: …\nLast error:\nFailed to CUDA calloc async 4 bytes"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    ],
)
def test_memory_did_not_suffice(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        ValueError("CUDA error: out of memory, said a user's own code"),
    ],
)
def test_something_else_has_failed(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "FIND was unable to find an engine to execute this computation",
        "GET was unable to find an engine to execute this computation",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    ],
)
def test_a_library_that_finds_no_kernel_lacks_memory_where_the_gpu_is_full(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, reserved, allocated, wanted in ((5, 90, 90, True), (5, 90, 60, False), (60, 30, 30, False)):
        found = {"mem_get_info": (free, 100), "memory_reserved": reserved, "memory_allocated": allocated}
        for name, value in found.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        assert is_out_of_memory(RuntimeError(text)) is wanted, (free, reserved, allocated)
