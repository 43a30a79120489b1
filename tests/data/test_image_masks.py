"""Folders of images and masks as segmentation data: which files form a pair, and the class number of each pixel."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

import main_multi_gpu
from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.images.masks import read_mask
from multigpu_cli.data.load import choose_form, load_data_source
from multigpu_cli.data.source import DataSource
from multigpu_cli.errors import RequestError
from tests.support.image_files import make_png, make_tiff
from tests.support.run_training import run_training

Image = pytest.importorskip("PIL.Image", reason="needs Pillow (extra images)")
SIDE = 8


class PixelNet(nn.Sequential):
    """Logits (n, num_classes, h, w) of images (n, channels, h, w)."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(nn.Conv2d(input_shape[0], num_classes, 1))


def open_masks(folder: Path, task: str | None = "segmentation", **args: Any) -> DataSource:
    form = args.pop("form", choose_form(None, task))
    config = DataConfig(name="image-folder", dir=str(folder), args={"size": SIDE, "resize": SIDE} | args)
    return load_data_source(config, 42, form)


def write_pair(images: Path, masks: Path, name: str, number: int, *, values: tuple[int, ...] = (0, 1, 2)) -> None:
    """An image whose pixels are `number`, and a mask all of one class."""
    for folder, shade in ((images, number), (masks, values[number % len(values)])):
        file = folder / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (SIDE + 2, SIDE), shade).save(file)


def write_tree(root: Path, count: int = 20, images: str = "images", masks: str = "masks", **more: Any) -> Path:
    for number in range(count):
        write_pair(root / images, root / masks, f"{number:03}", number, **more)
    return root


def read_all(source: DataSource) -> dict[str, list[tuple[int, int]]]:
    """By split, the shade of each image and the class of its mask."""
    splits = {name: getattr(source, name) for name in ("train", "val", "test")}
    return {
        name: [(int(image.max()), int(mask.max())) for image, mask in (split[at] for at in range(len(split)))]
        for name, split in splits.items()
        if split
    }


@given(
    layout=st.sampled_from(["undivided", "splits outside", "splits inside"]),
    images=st.sampled_from(["images", "IMG", "photos", "JPEGImages"]),
    masks=st.sampled_from(["masks", "Labels", "annotations", "SegmentationClass", "gt", "image_masks"]),
    folders=st.lists(st.sampled_from(["", "a/", "b/c/"]), min_size=20, max_size=24),
    names=st.tuples(st.sampled_from(["train", "training"]), st.sampled_from(["val", "validation"])),
)
def test_every_image_is_used_once_with_its_mask(
    layout: str, images: str, masks: str, folders: list[str], names: tuple[str, str]
) -> None:
    wanted: dict[str, set[tuple[int, int]]] = {}
    with TemporaryDirectory() as folder:
        for number, inner in enumerate(folders):
            split = (*names, "test")[number % 3] if layout != "undivided" else ""
            root, below = (Path(folder, split), "") if layout != "splits inside" else (Path(folder), split)
            write_pair(root / images / below, root / masks / below, f"{inner}{number}.of", number)
            write_pair(root / images / ".cache", root / masks / "__MACOSX", f"{number}.of", 200)
            wanted.setdefault({"training": "train", "validation": "val"}.get(split, split), set()).add(
                (number, number % 3)
            )
        found = read_all(open_masks(Path(folder)))
    if layout == "undivided":
        assert sorted(pair for pairs in found.values() for pair in pairs) == sorted(wanted[""])
        assert [len(found[split]) for split in ("val", "test")] == [2, 2]
    else:
        assert {split: sorted(pairs) for split, pairs in found.items()} == {
            split: sorted(pairs) for split, pairs in wanted.items()
        }


def draw_masks(dtype: str, high: int) -> st.SearchStrategy[np.ndarray]:
    sides = st.tuples(st.integers(1, 9), st.integers(1, 9))
    return sides.flatmap(lambda sides: arrays(dtype, sides, elements=st.integers(0, high)))


@given(draw_masks("uint8", 255), draw_masks("uint16", 65535), st.sampled_from([1, 2, 4]))
def test_masks_of_any_depth_keep_their_class_numbers(few: np.ndarray, many: np.ndarray, bits: int) -> None:
    low = few % 2**bits
    palette = Image.fromarray(few)
    palette.putpalette(bytes(range(255, -1, -1)) * 3)
    small = Image.fromarray(low).convert("L")
    files = [
        (make_png(many), many),
        (make_tiff(many), many),
        (make_tiff(many.astype(">u2")), many),
        (make_tiff(many.astype("int32")), many),
        (make_png(low, bits=bits), low),
        *((encode(palette, kind), few) for kind in ("PNG", "TIFF", "BMP")),
        (encode(small, "PNG"), low),
        (encode(Image.fromarray(few > 100), "PNG"), few > 100),
    ]
    for content, classes in files:
        assert np.array_equal(read(content), classes)
    listed = [*np.unique(many)[::-1].tolist()]
    assert np.array_equal(np.take(listed, read(make_png(many), listed)), many)


def read(content: bytes, values: Sequence[int] = ()) -> np.ndarray:
    with NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        return np.asarray(read_mask(Path(file.name), values, None))


def encode(image: Any, kind: str) -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


def test_masks_are_cut_and_mirrored_as_their_images_are(tmp_path: Path) -> None:
    places = np.arange(16 * 18, dtype="uint16").reshape(16, 18) % 251
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        for number in range(12):
            Image.fromarray(places.astype("uint8")).save(tmp_path / folder / f"{number}.png")
    train = open_masks(tmp_path, resize=16).train
    cuts = [train[at % len(train)] for at in range(40)]  # type: ignore[arg-type]
    assert all(torch.equal(image[0].long(), mask) for image, mask in cuts)
    assert len({tuple(mask.flatten().tolist()) for _, mask in cuts}) > 10


def test_a_folder_with_masks_needs_the_task(tmp_path: Path) -> None:
    named = write_tree(tmp_path / "named", masks="labels")
    alike = write_tree(tmp_path / "alike", images="scans", masks="trimaps")
    divided = write_tree(tmp_path / "divided" / "train").parent
    for folder in (named, alike, divided):
        with pytest.raises(RequestError, match=r"seems to hold masks of the images in .*, not a class") as refused:
            open_masks(folder, None)
        assert refused.value.remedy.startswith("add --task segmentation; or")
        assert open_masks(folder).num_classes == 3
    (named / "cat").mkdir()
    (named / "cat" / "1.png").write_bytes((named / "images" / "001.png").read_bytes())
    with pytest.raises(RequestError, match="seems to hold masks"):
        open_masks(named, None)


@pytest.mark.parametrize("names", [("cat", "dog"), ("mask", "no_mask"), ("labeled", "unlabeled")])
def test_classes_of_numbered_images_stay_classes(tmp_path: Path, names: tuple[str, str]) -> None:
    source = open_masks(write_tree(tmp_path, images=names[0], masks=names[1]), None)
    assert source.class_names == names
    with pytest.raises(RequestError, match="folders of images and masks: ") as refused:
        open_masks(tmp_path)
    assert refused.value.remedy.startswith("images/NAME.jpg and masks/NAME.png")


def test_a_class_of_that_name_stays_one_beside_other_files(tmp_path: Path) -> None:
    write_tree(tmp_path, images="helmet", masks="mask")
    (tmp_path / "mask" / "001.png").rename(tmp_path / "mask" / "more.png")
    assert open_masks(tmp_path, None).class_names == ("helmet", "mask")


def test_a_split_without_masks_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path / "train")
    write_tree(tmp_path / "test", masks="more")
    with pytest.raises(RequestError, match=r"test: folders of images and masks: none by their names\n"):
        open_masks(tmp_path)


def test_names_without_a_partner_are_listed(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "masks" / "003.png").rename(tmp_path / "masks" / "003_mask.png")
    Image.new("L", (3, 3)).save(tmp_path / "images" / "004.gif")
    with pytest.raises(RequestError, match=r"one image and one mask of each name: 003, 003_mask, 004\n  try: give an"):
        open_masks(tmp_path)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda: encode(Image.new("L", (SIDE + 2, SIDE)), "JPEG"), "JPEG of uint8 .* is no mask of class numbers"),
        (lambda: encode(Image.new("RGB", (SIDE + 2, SIDE)), "PNG"), r"PNG of uint8 \(8, 10, 3\) is no mask"),
        (lambda: make_tiff(np.zeros((SIDE, SIDE + 2), "float32")), "TIFF of float32 .* is no mask"),
        (lambda: make_tiff(np.full((SIDE, SIDE + 2), -3, "int32")), "a pixel has the value -3, which is no class"),
        (lambda: encode(Image.new("L", (SIDE, SIDE + 2)), "PNG"), r"images/000\.png: 10×8 pixels, and its mask 8×10"),
        (lambda: encode(Image.new("L", (SIDE + 2, SIDE)), "PNG")[:20], r"000\.png is not a readable image"),
    ],
)
def test_a_mask_of_other_things_is_named(tmp_path: Path, mask: Any, message: str) -> None:
    write_tree(tmp_path, count=10)
    (tmp_path / "masks" / "000.png").write_bytes(mask())
    with pytest.raises(RequestError, match=message):
        read_all(open_masks(tmp_path))


def test_two_values_are_classes_once_they_are_listed(tmp_path: Path) -> None:
    write_tree(tmp_path, values=(0, 255))
    with pytest.raises(RequestError, match=r"values in the masks are \[0, 255\], and 255 does not count") as refused:
        open_masks(tmp_path)
    assert refused.value.remedy == "list that of each class: --set 'data.values=[0, 255]'"
    source = open_masks(tmp_path, values=[0, 255])
    assert source.num_classes == 2
    assert {target for pairs in read_all(source).values() for _, target in pairs} == {0, 1}
    partly = open_masks(tmp_path, values=[7, 0])
    assert {target for pairs in read_all(partly).values() for _, target in pairs} == {1, 255}, "255 does not count"
    with pytest.raises(RequestError, match=r"the value 0, which is no class\n  try: add it to data\.values"):
        read_all(open_masks(tmp_path, values=[7, 8]))


@pytest.mark.parametrize("values", ["0,255", 2, [0, "255"], [0.5, 1]])
def test_values_must_be_whole_numbers(tmp_path: Path, values: Any) -> None:
    with pytest.raises(RequestError, match=r"data\.args\.values: .*\n  try: list the value of each class"):
        open_masks(write_tree(tmp_path), values=values)


def test_sparse_values_are_not_taken_for_class_numbers(tmp_path: Path) -> None:
    write_tree(tmp_path, values=(0, 60, 120))
    with pytest.raises(RequestError, match=r"\[0, 60, 120\]"):
        open_masks(tmp_path)
    assert open_masks(tmp_path, values=[0, 60, 120]).num_classes == 3


def test_a_run_on_masks_evaluates_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_tree(tmp_path / "data")
    flags: dict[str, Any] = {"data": str(data), "task": "segmentation", "lr": 0.01, "exact": True, "epochs": 2}
    flags |= {"model": "tests.data.test_image_masks:PixelNet", "global_batch_size": 8, "batch_size": 4}
    sets = ["data.args.size=8", "data.args.resize=8"]
    runs = [run_training(n, **flags, sets=sets, save_dir=f"run{n}").summary for n in (1, 2)]
    assert runs[0]["fingerprint"] == runs[1]["fingerprint"]
    capsys.readouterr()
    assert main_multi_gpu.run(["evaluate", "run1", "--own-code", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == runs[0]["final"]["test_loss"]
    write_pair(tmp_path / "new", tmp_path / "unused", "1", 7)
    words = ["predict", "run1", "--own-code", "--set", f"data.new={tmp_path / 'new'}", "--out", "classes.npy"]
    assert main_multi_gpu.run(words) == 0
    assert np.load("classes.npy").shape == (1, SIDE, SIDE)


@pytest.mark.parametrize("key", ["data.rand_augment", "data.random_resized_crop"])
def test_augmentation_that_leaves_masks_behind_is_refused(tmp_path: Path, key: str) -> None:
    flags: dict[str, Any] = {"data": str(write_tree(tmp_path / "data")), "task": "segmentation"}
    flags |= {"model": "tests.data.test_image_masks:PixelNet", "save_dir": str(tmp_path / "run")}
    refused = run_training(1, **flags, sets=["data.args.size=8", f"{key}=1"])
    assert refused.kind == "RequestError"
    assert f"{key}: it would change the place of pixels in images, and not in their masks" in refused.error
    assert not (tmp_path / "run" / "journal.jsonl").exists()


@pytest.mark.parametrize(
    ("images", "masks", "names"),
    [
        ("CXR_png", "masks", ("{}", "{}_mask")),
        ("scans", "labels", ("{}", "{}-segmentation_v2")),
        ("input", "ground_truth", ("in{}", "out{}")),
        ("leftImg8bit", "gtFine", ("{}_leftImg8bit", "{}_gtFine_labelIds")),
        ("images", "manual", ("{}_training", "{}_manual1")),
    ],
)
def test_public_layouts_of_masks_are_no_classes(
    tmp_path: Path, images: str, masks: str, names: tuple[str, str]
) -> None:
    for number in range(20):
        for folder, name in ((images, names[0]), (masks, names[1])):
            write_pair(tmp_path / folder, tmp_path / folder, name.format(number), number)
    with pytest.raises(RequestError, match=f"{masks} seems to hold masks of the images in {images}/, not a class"):
        open_masks(tmp_path, None)
