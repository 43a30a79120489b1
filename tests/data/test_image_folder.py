import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from multigpu_cli.config.schema import DataConfig
from multigpu_cli.data.load import load_data_source
from multigpu_cli.data.loader import Loader
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.transforms import decode_image
from multigpu_cli.errors import RequestError
from tests.support.run_training import run_training

Image = pytest.importorskip("PIL.Image", reason="needs Pillow (extra images)")
COLOURS = {"blue": (20, 30, 220), "green": (30, 200, 40), "red": (230, 20, 30)}


def write_images(folder: Path, count: int = 10) -> Path:
    """Real JPEGs and PNGs of several sizes, a folder for each colour."""
    for name, colour in COLOURS.items():
        (folder / name / "deeper").mkdir(parents=True)
        for at in range(count):
            place = folder / name / ("deeper" if at % 3 == 0 else "")
            image = Image.new("RGB", (20 + 3 * at, 40 - 2 * at), colour)
            image.putpixel((0, 0), (at, at, at))
            image.save(place / (f"{at}.JPG" if at % 2 else f"{at}.png"), quality=95)
    (folder / "notes.txt").write_text("no image")
    return folder


def open_images(folder: Path | None, **args: Any) -> DataSource:
    place = None if folder is None else str(folder)
    return load_data_source(DataConfig(name="image-folder", dir=place, args={"size": 16} | args), 42)


def test_folders_are_classes_and_all_images_are_divided(tmp_path: Path) -> None:
    source = open_images(write_images(tmp_path))
    assert source.class_names == ("blue", "green", "red")
    assert (source.num_classes, source.input_shape) == (3, (3, 16, 16))
    parts = (source.train, source.val, source.test)
    assert [len(part) for part in parts] == [24, 3, 3]  # type: ignore[arg-type]
    paths = [path for part in parts for path, _ in part.entries]  # type: ignore[union-attr]
    assert len(set(paths)) == 30
    for part in parts:
        for (path, label), (pixels, target) in zip(part.entries, part, strict=True):  # type: ignore[union-attr, call-overload]
            assert (pixels.dtype, pixels.shape, target) == (torch.uint8, (3, 16, 16), label)
            middle = pixels[:, 8, 8].tolist()
            assert middle == pytest.approx(COLOURS[source.class_names[label]], abs=12), path


@pytest.mark.parametrize("split", ["", "train"])
@pytest.mark.parametrize(
    "hidden",
    [
        *(".ipynb_checkpoints", "deeper/.cache/more", "__MACOSX", "deeper/@eaDir/0.png"),
        *("$RECYCLE.BIN", "System Volume Information", "lost+found/#12"),
    ],
)
def test_images_in_hidden_folders_do_not_count(tmp_path: Path, hidden: str, split: str) -> None:
    root, later = write_images(tmp_path / "data" / split), tmp_path / "later"
    for folder in (root / "red" / hidden, root / hidden, later / hidden, later):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "red" / "1.JPG", folder / "1-checkpoint.JPG")
    (root / "red" / "._1.JPG").write_bytes(b"\0\5\26\7Mac OS X")
    if hidden.startswith("deeper"):
        shutil.rmtree(root / "deeper")  # a class of its own otherwise
    source = open_images(tmp_path / "data", new=str(later))
    assert sum(map(len, filter(None, (source.train, source.val, source.test)))) == 30  # type: ignore[arg-type]
    assert source.class_names == ("blue", "green", "red")
    assert len(source.new) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "stem", "is_pair"),
    [
        *((["low", "high"], "{}", True), (["trainA", "trainB"], "{:04}", True), (["x", "y"], "photo_{}", True)),
        *((["cat", "dog"], "{}", False), (["a", "b", "c"], "photo_{}", False)),
    ],
)
def test_two_classes_of_the_same_names_are_warned_of(
    tmp_path: Path, names: list[str], stem: str, is_pair: bool
) -> None:
    for at, folder in enumerate(names):
        (tmp_path / folder).mkdir()
        for number in range(12):
            Image.new("RGB", (16, 16)).save(tmp_path / folder / f"{stem.format(number)}.{'png' if at else 'jpg'}")
    warnings = " ".join(open_images(tmp_path).warnings)
    assert warnings.startswith(
        f"{tmp_path}: the classes {' and '.join(sorted(names))} have files of the same names" * is_pair
    )
    assert bool(warnings) == is_pair
    Image.new("RGB", (16, 16)).save(tmp_path / names[0] / "another.png")
    assert open_images(tmp_path).warnings == ()


def test_splits_that_lie_there_are_taken(tmp_path: Path) -> None:
    for split, count in (("train", 10), ("test", 2)):
        write_images(tmp_path / split, count)
    source = open_images(tmp_path)
    assert [len(part) for part in (source.train, source.val, source.test)] == [27, 3, 6]  # type: ignore[arg-type]
    write_images(tmp_path / "valid", 4)
    source = open_images(tmp_path)
    assert [len(part) for part in (source.train, source.val, source.test)] == [30, 12, 6]  # type: ignore[arg-type]


def test_augmentation_is_keyed_by_the_sample_in_any_process(tmp_path: Path) -> None:
    gradient = Image.radial_gradient("L").resize((48, 40)).rotate(20).convert("RGB")
    for name in COLOURS:
        (tmp_path / name).mkdir()
        for at in range(4):
            gradient.save(tmp_path / name / f"{at}.png")
    source = open_images(tmp_path)

    def seen(split: Any, epoch: int, processes: int = 0) -> torch.Tensor:
        loader = Loader(split, source, DataConfig(num_workers=processes), device=torch.device("cpu"), seed=5)
        batch: torch.Tensor = next(loader.iter_training_batches([torch.arange(8)], epoch)).inputs
        loader.close()
        return batch

    first = seen(source.train, 0)
    assert torch.equal(first, seen(source.train, 0, processes=1))
    assert not torch.equal(first, seen(source.train, 1))
    assert len({row.sum().item() for row in first}) > 3, "the same picture, cut in several ways"
    assert torch.equal(source.val[0][0], source.val[0][0])  # type: ignore[index]
    assert first.dtype == torch.float32
    assert abs(float(first.mean())) < 2, "standardised"
    plain = open_images(tmp_path, augment=False)
    assert torch.equal(plain.train[0][0], plain.train[1][0])


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder leaves out what the smaller side does not need: an eighth of each side here, never less than that."""
    sizes, resize = [], Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda image, *to: sizes.append(image.size) or resize(image, *to), raising=True
    )
    for at, side in enumerate((160, 128)):
        Image.new("RGB", (side, side), COLOURS["red"]).save(tmp_path / f"{at}.jpg")
        assert decode_image(tmp_path / f"{at}.jpg", 18, "it").shape == (18, 18, 3)
    assert sizes == [(20, 20), (32, 32)]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    write_images(tmp_path)
    whole = (tmp_path / "red" / "1.JPG").read_bytes()
    (tmp_path / "red" / "1.JPG").write_bytes(whole[: len(whole) // 2])
    flags: dict[str, Any] = {"data": "image-folder", "data_dir": str(tmp_path), "save_dir": str(tmp_path / "run")}
    ended = run_training(1, model="convnet", epochs=1, sets=["data.args.size=16"], num_workers=1, **flags)
    assert ended.kind == "RequestError"
    assert "red/1.JPG is not a readable image" in ended.error
    assert "Traceback" not in ended.error


def test_it_trains_on_two_workers_with_the_same_bits_as_on_one(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    flags: dict[str, Any] = {"data": "image-folder", "data_dir": str(tmp_path / "images"), "model": "convnet"}
    flags |= {"global_batch_size": 12, "batch_size": 4, "epochs": 2, "lr": 0.01, "exact": True, "num_workers": 1}
    sets = ["data.args.size=16", "model.args.width=4"]
    ends = [run_training(n, **flags, sets=sets, save_dir=str(tmp_path / f"run{n}")).summary for n in (1, 2)]
    assert ends[0]["fingerprint"] == ends[1]["fingerprint"]
    assert ends[0]["steps"] == 4


def test_what_is_no_image_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needs --data-dir"):
        open_images(None)
    with pytest.raises(RequestError, match="holds images of no class"):
        open_images(tmp_path)
    write_images(tmp_path / "train")
    write_images(tmp_path / "val")
    (tmp_path / "val" / "pink").mkdir()
    (tmp_path / "val" / "red" / "1.JPG").rename(tmp_path / "val" / "pink" / "1.JPG")
    with pytest.raises(RequestError, match="val/pink is a class that train/ does not have"):
        open_images(tmp_path)
    with pytest.raises(RequestError, match=r"data\.args\.resize: 8 pixels"):
        open_images(tmp_path, resize=8)
