"""Pixels of images in every mode and depth, compared with what NumPy computes from the raw values."""

import os
import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from multigpu_cli.data.transforms import decode_image
from multigpu_cli.errors import RequestError
from tests.support.image_files import make_png, make_tiff

Image = pytest.importorskip("PIL.Image", reason="needs Pillow (extra images)")


def draw_values(dtype: str, *channels: int, high: int | None = None) -> st.SearchStrategy[np.ndarray]:
    """(h, w, *channels) of any values up to `high`, by default all of the dtype."""
    sides = st.tuples(st.integers(1, 9), st.integers(1, 9))
    numbers = st.integers(0, high or int(np.iinfo(dtype).max))
    return sides.flatmap(lambda sides: arrays(dtype, (*sides, *channels), elements=numbers))


def decode(content: bytes) -> np.ndarray:
    """Decode at the image's own size, at which nothing is resized."""
    with Image.open(BytesIO(content)) as opened:
        shorter = min(opened.size)
    return decode_image(content, shorter, "it")


def encode(image: Any, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def show_gray(values: np.ndarray) -> np.ndarray:
    return np.repeat(values.astype(np.uint8)[..., None], 3, axis=2)


@given(draw_values("uint16"))
def test_16_bits_of_gray_become_their_high_byte(values: np.ndarray) -> None:
    wanted = show_gray(values >> 8)
    stored = values.astype(">u2")
    pgm = b"P5 %d %d 65535\n" % values.shape[::-1] + stored.tobytes()
    files = [make_png(values), make_tiff(values), make_tiff(stored), encode(Image.fromarray(stored), "TIFF"), pgm]
    for content in files:
        assert np.array_equal(decode(content), wanted)
    assert np.array_equal(decode(make_tiff(values, photometric=0)), 255 - wanted), "white is zero"


@given(draw_values("uint16", 4))
def test_16_bits_of_several_channels_become_their_high_bytes(values: np.ndarray) -> None:
    """Transparency is left out, as in torchvision's datasets."""
    high = (values >> 8).astype(np.uint8)
    assert np.array_equal(decode(make_png(values[..., :2])), show_gray(values[..., 0] >> 8))
    assert np.array_equal(decode(make_png(values[..., :3])), high[..., :3])
    assert np.array_equal(decode(make_png(values)), high[..., :3])


@given(draw_values("uint16", high=4095))
def test_12_bits_of_a_tiff_are_scaled_by_their_own_range(values: np.ndarray) -> None:
    values = values[:, : max(1, values.shape[1] // 2 * 2)]
    if values.shape[1] == 1:
        values = np.repeat(values, 2, axis=1)  # two values are three bytes
    assert np.array_equal(decode(make_tiff(values, bits=12)), show_gray(values >> 4))


@given(draw_values("uint32", high=65535).filter(lambda values: values.max() > 255), st.sampled_from("iu"))
def test_32_bits_that_hold_16_are_scaled_so(values: np.ndarray, kind: str) -> None:
    assert np.array_equal(decode(make_tiff(values.astype(f"{kind}4"))), show_gray(values >> 8))


@given(draw_values("uint16"))
def test_floats_from_0_to_1_are_scaled(values: np.ndarray) -> None:
    floats = values.astype("float32") / np.float32(65535)
    assert np.array_equal(decode(make_tiff(floats)), show_gray(np.round(floats * 255)))


@pytest.mark.parametrize("odd", [-1, 65536, 200, 2**31 - 1])
def test_an_integer_of_unknown_range_is_refused(odd: int) -> None:
    values = np.zeros((3, 4), "int32")
    assert not decode(make_tiff(values)).any(), "black in any range"
    values[1, 2] = odd
    with pytest.raises(
        RequestError, match=f"^it has values from .*{odd}.* which are black and white is unknown\n  try: save it"
    ):
        decode(make_tiff(values))


@pytest.mark.parametrize("odd", [-0.1, 1.01, 255.0, np.nan, np.inf])
def test_a_float_beyond_0_to_1_is_refused(odd: float) -> None:
    values = np.full((3, 4), 0.5, "float32")
    values[1, 2] = odd
    with pytest.raises(RequestError, match=r"mode F of Pillow\): which are black and white is unknown"):
        decode(make_tiff(values))


@given(draw_values("uint8", 4), st.sampled_from(["PNG", "TIFF"]))
def test_8_bits_are_read_as_they_are(values: np.ndarray, kind: str) -> None:
    gray, half = values[..., 0], values[..., 0] > 127
    assert np.array_equal(decode(encode(Image.fromarray(gray), kind)), show_gray(gray))
    assert np.array_equal(decode(encode(Image.fromarray(half), kind)), show_gray(half * 255)), "one bit"
    assert np.array_equal(decode(encode(Image.fromarray(values[..., :3]), kind)), values[..., :3])
    assert np.array_equal(decode(encode(Image.fromarray(values), kind)), values[..., :3]), "alpha is left out"
    assert np.array_equal(decode(encode(Image.fromarray(values[..., :2].copy(), "LA"), kind)), show_gray(gray))


@given(draw_values("uint8", high=2), st.sampled_from(["PNG", "GIF"]))
def test_palettes_are_looked_up_and_no_color_is_transparent(numbers: np.ndarray, kind: str) -> None:
    colors = np.array([(200, 10, 30), (10, 220, 40), (5, 7, 250)], "uint8")
    image = Image.fromarray(numbers)
    image.putpalette(colors.tobytes())
    assert image.mode == "P"
    assert np.array_equal(decode(encode(image, kind, transparency=1)), colors[numbers])


def test_cmyk_is_the_light_that_inks_leave() -> None:
    inks = Image.new("CMYK", (2, 1), (255, 0, 0, 0))
    assert decode(encode(inks, "TIFF")).tolist() == [[[0, 255, 255]] * 2]


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [Image.new("RGB", (3, 2), color) for color in ((250, 0, 0), (0, 250, 0))]
    for kind in ("GIF", "TIFF"):
        content = encode(frames[0], kind, save_all=True, append_images=frames[1:])
        assert decode(content)[0, 0].tolist() == [250, 0, 0]


@pytest.mark.parametrize("mode", ["L", "I;16", "I", "F"])
def test_deep_images_are_turned_as_their_camera_was(mode: str) -> None:
    dtype = {"L": "uint8", "I;16": "uint16", "I": "int32", "F": "float32"}[mode]
    values = np.arange(6).reshape(2, 3)
    stored = {"L": values, "I;16": values << 8, "I": values << 8, "F": values / 255}[mode].astype(dtype)
    turned = show_gray(np.rot90(values, -1))  # 6: the camera was turned by a quarter
    assert np.array_equal(decode(make_tiff(stored, orientation=6)), turned)
    if mode in ("L", "I;16"):
        exif = Image.Exif()
        exif[0x0112] = 6
        assert np.array_equal(decode(encode(Image.fromarray(stored), "PNG", exif=exif)), turned)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    file = tmp_path / "odd.tif"
    file.write_bytes(make_tiff(np.zeros((9, 9), "uint8"))[:-20])
    with pytest.raises(RequestError, match=r"odd\.tif is not a readable image"):
        decode_image(file, 2, str(file))
    with pytest.raises(RequestError, match=r"it is not a readable image \(.*identify"):
        decode_image(struct.pack("<4I", 1, 2, 3, 4), 2, "it")


@pytest.mark.parametrize("as_bytes", [False, True])
def test_decode_image_starts_no_program_for_postscript(
    as_bytes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow looks at the content, and starts Ghostscript for EPS, whatever the file is called."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    image = tmp_path / "1.png"
    image.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(RequestError, match=r"1\.png is not a readable image") as refused:
        decode_image(image.read_bytes() if as_bytes else image, 8, str(image))
    assert "PNG, JPEG" in str(refused.value.remedy)
    assert not (tmp_path / "started").exists()
