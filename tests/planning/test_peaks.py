import pytest

from multigpu_cli.planning.peaks import peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 121),
        ("Tesla T4", "fp16", 65),
    ],
)
def test_known_devices(device: str, precision: str, tera: float) -> None:
    assert peak_flops(device, precision) == tera * 1e12


@pytest.mark.parametrize(
    ("device", "precision"), [("cpu", "bf16"), ("NVIDIA H200", "off"), ("Tesla T4", "bf16"), ("AMD Instinct", "bf16")]
)
def test_no_number_is_better_than_a_guess(device: str, precision: str) -> None:
    assert peak_flops(device, precision) is None
