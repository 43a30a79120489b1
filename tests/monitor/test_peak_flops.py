import pytest

from multigpu_cli.monitor.gpu import peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "tera"),
    [
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A30", "bf16", 165),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX A4000", "bf16", 76.7),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("Tesla T4", "fp16", 65),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
    ],
)
def test_known_devices(device: str, precision: str, tera: float) -> None:
    assert peak_flops(device, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("device", "precision"), [("cpu", "bf16"), ("NVIDIA H200", "off"), ("Tesla T4", "bf16"), ("AMD Instinct", "bf16")]
)
def test_no_number_is_better_than_a_guess(device: str, precision: str) -> None:
    assert peak_flops(device, precision) is None


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A40-48Q",
        "GRID A100X-10C",
        "NVIDIA RTX A1000",
        "NVIDIA RTX A400",
        "NVIDIA T400",
        "NVIDIA T400 4GB",
        "Quadro RTX 6000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
    ],
)
def test_the_name_of_another_gpu_inside_a_name_says_nothing(device: str) -> None:
    assert peak_flops(device, "fp16") is None
