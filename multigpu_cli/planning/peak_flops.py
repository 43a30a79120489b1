"""The peak rates of known GPUs: dense 16-bit matrix products with 32-bit accumulation, without sparsity.

Source: NVIDIA's published rates, where "with sparsity" is twice the dense rate. Those of A100, A10, A40, H100 (SXM and
PCIe), H200, L4, L40S and V100 agree with published tables; the others were entered without a data sheet at hand.
"""

_TERA = 1e12
_BF16 = {  # TFLOP/s by CUDA's name of the device, without "NVIDIA"
    "GB200": 2500,
    "B200": 2250,
    "GH200 480GB": 989,
    "GH200 144G HBM3e": 989,
    "H200": 989,
    "H200 NVL": 835,
    "H100 80GB HBM3": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "A100-SXM4-40GB": 312,
    "A100-SXM4-80GB": 312,
    "A100-PCIE-40GB": 312,
    "A100 80GB PCIe": 312,
    "A30": 165,
    "A40": 149.7,
    "A10": 125,
    "A10G": 70,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 6000 Ada Generation": 364.2,
    "RTX A6000": 154.8,
    "RTX A5000": 111.1,
    "RTX A4000": 76.7,
    "GeForce RTX 5090": 209.5,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 4080": 97.5,
    "GeForce RTX 3090": 71,
}
_FP16 = {
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla V100-PCIE-32GB": 112,
    "Tesla T4": 65,
}


def peak_flops(device: str, precision: str) -> float | None:
    """FLOP/s of a device by its name; None if it is unknown, or in full precision, where it depends on TF32.

    The whole name must match: the names of laptop GPUs, MIG slices and virtual GPUs contain that of a faster GPU.
    """
    if precision not in ("bf16", "fp16"):
        return None
    table = _BF16 | (_FP16 if precision == "fp16" else {})
    rate = table.get(device.removeprefix("NVIDIA "))
    return None if rate is None else rate * _TERA
