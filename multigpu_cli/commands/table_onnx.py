"""A table's preprocessing as part of an ONNX file: raw columns in, what `predict` writes out."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from multigpu_cli.data.notation import list_missing_words
from multigpu_cli.data.source import DataSource
from multigpu_cli.data.tables.features import GAP, TableFeatures
from multigpu_cli.errors import RequestError

_LABELS = ("ai.onnx.ml", 3)  # the operators for categories, and their version
_OUTPUTS = ("output", "prediction", "probability")


class _Nodes:
    """A growing list of nodes and constants; names that nobody gives begin with the place."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, dtype: Any) -> str:
        name = f"{self.place}/constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype=dtype), name))
        return name

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{self.place}/{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output


def add_preprocessing(network: bytes, source: DataSource, task: str) -> bytes:
    """An ONNX network of features as one of raw columns.

    Args:
        network: input "input" (n, features), output "output".
        task: what the outputs mean; of another than classification and regression they are passed on as they are.

    Returns:
        A file with an input (n,) for each column, by its name: float64 numbers, NaN where there is none, and texts,
        empty where there is none; outputs "output" as before, and "prediction" (n,): the names of classes, with the
        "probability" (n, classes) of each, or numbers in their own unit.
    """
    table = source.codec
    assert isinstance(table, TableFeatures)
    if taken := [name for name in table.columns if name in _OUTPUTS]:
        problem = f"column {taken[0]!r} has the same name as an output of the file"
        raise RequestError(problem, remedy="rename it, or --to ….pt2")
    model = onnx.compose.add_prefix(onnx.load_from_string(network), "network/")
    before = _Nodes("table")
    _add_features(before, table)
    kinds = [TensorProto.DOUBLE if name in table.numbers else TensorProto.STRING for name in table.columns]
    pairs = zip(table.columns, kinds, strict=True)
    places = [helper.make_tensor_value_info(name, kind, ["batch"]) for name, kind in pairs]
    features = helper.make_tensor_value_info("table/features", TensorProto.FLOAT, ["batch", source.input_shape[0]])
    graph = helper.make_graph(before.nodes, "table", places, [features], before.constants)
    versions = [*model.opset_import, helper.make_opsetid(*_LABELS)]
    front = helper.make_model(graph, opset_imports=versions, ir_version=model.ir_version)
    whole = onnx.compose.merge_models(front, model, io_map=[("table/features", "network/input")])
    _add_predictions(whole.graph, source, task)
    onnx.checker.check_model(whole)
    return bytes(whole.SerializeToString())


def list_raw_inputs(table: TableFeatures) -> dict[str, np.ndarray]:
    """The first training rows as such a file takes them."""
    found: dict[str, np.ndarray] = {}
    for name in table.columns:
        is_number = name in table.numbers
        found[name] = table.examples.parse(name)[0] if is_number else np.array(table.examples.select(name), object)
    return found


def _add_features(nodes: _Nodes, table: TableFeatures) -> None:
    """In the order of `TableFeatures.learned`, and in float64 as there."""
    learned = table.learned
    blocks = []
    if learned["numbers"]:
        blocks.append(_add_numbers(nodes, learned["numbers"], learned["gaps"]))
    blocks += [_add_words(nodes, column) for column in learned["categories"]]
    nodes.add("Concat", *blocks, output="table/features", axis=1)


def _add_numbers(nodes: _Nodes, numbers: Sequence[Mapping[str, Any]], gaps: Sequence[Mapping[str, Any]]) -> str:
    """(n, numbers + gaps) float32."""
    last = nodes.constant([1], np.int64)
    columns = nodes.add("Concat", *[nodes.add("Unsqueeze", each["column"], last) for each in numbers], axis=1)
    missing = nodes.add("IsNaN", columns)
    medians = nodes.constant([each["median"] for each in numbers], np.float64)
    filled = nodes.add("Where", missing, medians, columns)
    if gaps:
        names = [each["column"] for each in numbers]
        places = nodes.constant([names.index(each["column"]) for each in gaps], np.int64)
        marks = nodes.add("Cast", nodes.add("Gather", missing, places, axis=1), to=TensorProto.DOUBLE)
        filled = nodes.add("Concat", filled, marks, axis=1)
    spread = [*numbers, *gaps]
    means, scales = ([each[name] for each in spread] for name in ("mean", "scale"))
    centred = nodes.add("Sub", filled, nodes.constant(means, np.float64))
    return nodes.add("Cast", nodes.add("Div", centred, nodes.constant(scales, np.float64)), to=TensorProto.FLOAT)


def _add_words(nodes: _Nodes, column: Mapping[str, Any]) -> str:
    """(n, words) float32: a row of the identity for each known word, and zeros for another."""
    count = len(column["words"])
    other = count if column["other"] is None else column["other"]
    places = {word: place for place, words in enumerate(column["words"]) for word in words}
    if GAP in places:
        # the words that stand for nothing, in small and capital letters
        spelled = (product(*zip(word, word.upper(), strict=True)) for word in list_missing_words())
        places |= dict.fromkeys(sorted({"".join(letters) for each in spelled for letters in each}), places[GAP])
    number = nodes.add(
        "LabelEncoder",
        column["column"],
        domain=_LABELS[0],
        keys_strings=list(places),
        values_int64s=list(places.values()),
        default_int64=other,
    )
    return nodes.add("Gather", nodes.constant(np.eye(count + 1, count), np.float32), number, axis=0)


def _add_predictions(graph: Any, source: DataSource, task: str) -> None:
    """What `predict` writes, after the network's own output."""
    after, declared = _Nodes("predictions"), onnx.ValueInfoProto()
    after.add("Identity", graph.output[0].name, output="output")
    declared.CopyFrom(graph.output[0])
    declared.name = "output"
    outputs = [declared]
    if task == "classification":
        names = after.constant(source.class_names, object)
        after.add("Softmax", "output", output="probability", axis=1)
        best = after.add("ArgMax", "output", axis=1, keepdims=0)
        after.add("Gather", names, best, output="prediction", axis=0)
        outputs += [
            helper.make_tensor_value_info("prediction", TensorProto.STRING, ["batch"]),
            helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["batch", source.num_classes]),
        ]
    elif task == "regression" and source.target_scale:
        mean, deviation = (after.constant(value, np.float64) for value in source.target_scale)
        wide = after.add("Cast", "output", to=TensorProto.DOUBLE)
        scaled = after.add("Add", after.add("Mul", wide, deviation), mean)
        after.add("Reshape", scaled, after.constant([-1], np.int64), output="prediction")
        outputs.append(helper.make_tensor_value_info("prediction", TensorProto.DOUBLE, ["batch"]))
    del graph.output[:]
    graph.output.extend(outputs)
    graph.node.extend(after.nodes)
    graph.initializer.extend(after.constants)
