"""What a table teaches is to the bit what scikit-learn's transformers learn and compute."""

import random
from pathlib import Path

import numpy as np
import pytest
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from multigpu_cli.data.notation import to_number
from multigpu_cli.data.tables.csv import CsvTable
from multigpu_cli.data.tables.features import GAP, Part, learn_features

NUMBERS = ["plain", "with gaps", "constant", "nearly constant", "huge", "empty"]
WORDS = ["few", "many", "fifty", "words with gaps"]


def make_table(rows: int, seed: int) -> CsvTable:
    draw = random.Random(seed)

    def row() -> list[str]:
        value = draw.gauss(3, 2)
        numbers = [f"{value}", f"{value:.3f}" if draw.random() < 0.7 else "", "7.3", f"{1e8 + draw.random() * 1e-9}"]
        numbers += [f"{draw.gauss(0, 1) * 1e12}", ""]
        words = [draw.choice("abc"), f"w{int(draw.expovariate(0.02))}", f"w{draw.randrange(50)}"]
        return [*numbers, *words, draw.choice(["x", "y", "NA"])]

    return CsvTable(Path("table.csv"), [*NUMBERS, *WORDS], [row() for _ in range(rows)], list(range(rows)), ())


@pytest.mark.parametrize(("rows", "seed"), [(5, 1), (50, 2), (1001, 3), (20_000, 4)])
def test_features_are_those_of_scikit_learn(rows: int, seed: int) -> None:
    table, unseen = make_table(rows, seed), make_table(100, seed + 100)
    chosen = np.random.default_rng(seed).permutation(rows)[: max(2, rows * 4 // 5)]
    features = learn_features(Part(table, chosen), table.columns)
    assert features.numbers == NUMBERS

    gaps = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    scaler = make_pipeline(gaps, StandardScaler())
    encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=50, sparse_output=False)
    scaler.fit(np.asfortranarray(numbers_of(table)[chosen]))
    encoder.fit(words_of(table)[chosen])
    for each in (table, unseen):
        theirs = np.hstack([scaler.transform(numbers_of(each)), encoder.transform(words_of(each))]).astype(np.float32)
        assert np.array_equal(features.transform(each).numpy(), theirs)


def numbers_of(table: CsvTable) -> np.ndarray:
    """(n, columns) float64; each column in one piece, which decides the last bit of its mean."""
    cells = [[to_number(cell) for cell in table.select(name)] for name in NUMBERS]
    return np.array(cells, dtype=np.float64).T


def words_of(table: CsvTable) -> np.ndarray:
    words = [[GAP if cell == "NA" else cell for cell in table.select(name)] for name in WORDS]
    return np.array(words, dtype=object).T
