"""The peak rates of known GPUs: dense 16-bit matrix products with 32-bit accumulation, from NVIDIA's data sheets."""

_TERA = 1e12
_BF16 = {  # FLOP/s; the first name that occurs in the device's counts
    "B200": 2250 * _TERA,
    "H200": 989 * _TERA,
    "H100 PCIe": 756 * _TERA,
    "H100": 989 * _TERA,
    "A100": 312 * _TERA,
    "A40": 149.7 * _TERA,
    "A10G": 70 * _TERA,
    "A10": 125 * _TERA,
    "L40S": 362 * _TERA,
    "L4": 121 * _TERA,
    "RTX 4090": 165.2 * _TERA,
    "RTX 3090": 71 * _TERA,
}
_FP16 = {"V100": 125 * _TERA, "T4": 65 * _TERA}


def peak_flops(device: str, precision: str) -> float | None:
    """FLOP/s of a device by its name; None where it is not known, and in full precision, where it depends on TF32."""
    if precision not in ("bf16", "fp16"):
        return None
    table = _BF16 | (_FP16 if precision == "fp16" else {})
    return next((rate for name, rate in table.items() if name in device), None)
