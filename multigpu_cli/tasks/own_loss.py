"""User-supplied losses: a callable of outputs and targets, a function of a global batch, or the network itself."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from multigpu_cli.config.schema import TaskConfig
from multigpu_cli.data.collate import Collate, get_sample, to_pair
from multigpu_cli.data.loader import Batch
from multigpu_cli.data.source import DataSource
from multigpu_cli.distributed.world import is_out_of_memory
from multigpu_cli.errors import RequestError
from multigpu_cli.runtime.model_call import IGNORED, TARGETS, Labelled
from multigpu_cli.runtime.module_state import eval_mode
from multigpu_cli.runtime.precision import Precision, at_least_float32
from multigpu_cli.tasks.base import BatchMetrics, Loss, Task
from multigpu_cli.tasks.global_loss import GlobalLoss, Model, Rows
from multigpu_cli.tasks.supervised import check_rows, compute_accuracy, count_right
from multigpu_cli.tasks.weighted_mean import WeightedMean, find_weighted_mean


class _OwnLoss(Task):
    """A loss that user code computes; a scalar counts as the mean over the samples of the micro-batch."""

    _makes_rows: bool | None = None  # whether collate_fn makes a row of each sample it keeps; None: not asked yet

    def _refuse_dropped(self, batch: Batch, *parts: Any) -> None:
        """Raise RequestError if rows are samples, and the parts have fewer: see `refuse_dropped_rows`."""
        self._makes_rows = refuse_dropped_rows(self.source, batch, *parts, makes_rows=self._makes_rows)


def refuse_dropped_rows(source: DataSource, batch: Batch, *parts: Any, makes_rows: bool | None = None) -> bool | None:
    """Raise RequestError if all parts have as many rows, fewer than there are samples, and rows are samples.

    Rows are samples if a part has one number in each row, or if the collate_fn makes a row of each copy of a sample.
    Otherwise rows may be packed, time steps or tokens. Returns whether rows are samples, `makes_rows` of a later call;
    None if it was not asked.
    """
    tensors = [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = {len(leaf) for leaf in tensors}
    if len(rows) == 1 and min(rows) < len(batch):
        if makes_rows is None:
            has_numbers = any(leaf.numel() == len(leaf) for leaf in tensors)
            makes_rows = has_numbers or _makes_row_of_each_sample(source, len(batch))
        if makes_rows:
            check_rows(batch, min(rows))
    return makes_rows


def _makes_row_of_each_sample(source: DataSource, copies: int) -> bool:
    """Return whether the training split's collate_fn makes one row of each sample that it does not drop.

    Such a function returns as many rows as it gets copies of one sample, or none. A function that packs returns fewer
    rows for short samples, one that puts time first a row for each time step, one that joins pairs half as many.
    """
    collate, numbers = Collate(source.train, source.form), set[int]()
    # 32, since a few of so many samples are short enough to be packed together
    for index in range(min(32, len(source.train))) if collate.own is not None else ():  # type: ignore[arg-type]
        numbered = [(index, get_sample(source.train, index))] * copies
        with suppress(Exception):  # the user's own code may raise anything, as for a batch of which it drops all
            inputs, targets = collate(numbered)
            leaves = tree_leaves(inputs if targets is None else targets)
            numbers |= {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
        if numbers - {0, copies}:
            return False
    return copies in numbers


class Criterion(_OwnLoss):
    """The loss `criterion(outputs, targets)`, as a mean over the samples of the global batch.

    A criterion that returns () counts as the mean over its micro-batch, each of whose samples weighs the same; one that
    returns (n, …) as the losses of the samples. torch's own cross-entropies count as in plain PyTorch on the whole
    global batch, with weights of classes and labels that are ignored, at any size of micro-batch: see `WeightedMean`.
    Outputs (n, classes) with targets (n,) int64 give an accuracy, too, over the labels that are not ignored; the better
    result has the higher one, or else the lower loss.

    Outputs come as the network returns them: a tensor, a tuple, a dict, an object. Of a network of transformers
    (`has_logits`) the criterion gets the logits, if it takes them, else the whole output object.
    """

    expected_shapes = "what the criterion takes"

    def __init__(self, source: DataSource, config: TaskConfig, criterion: Loss, *, has_logits: bool = False) -> None:
        super().__init__(source, config)
        if getattr(criterion, "reduction", "mean") == "sum":
            problem = "criterion: reduction='sum' grows with the batch, and a step here is a mean over its global batch"
            raise RequestError(problem, remedy="reduction='mean'")
        if isinstance(criterion, nn.Module) and any(p.requires_grad for p in criterion.parameters()):
            raise RequestError(
                "criterion: it has parameters of its own, which would not be trained", remedy="put them into the model"
            )
        self.criterion = criterion
        self._mean = self._find_mean()
        self._has_logits = has_logits
        self._of_logits: bool | None = isinstance(criterion, nn.modules.loss._Loss) or None  # None: to be tried

    def _find_mean(self) -> WeightedMean | None:
        """Return how to take the mean over a global batch, if samples are not its units; set `units_per_sample`."""
        if not isinstance(self.criterion, nn.CrossEntropyLoss | nn.NLLLoss) or not len(self.source.train):  # type: ignore[arg-type]
            return None
        train, form = self.source.train, self.source.form
        labels = to_pair(train.tensors, "train", form)[1] if isinstance(train, TensorDataset) else None
        targets = Collate(train, form)([(0, get_sample(train, 0))]).targets
        mean = find_weighted_mean(self.criterion, targets, labels)
        if mean is not None:
            self.unit, self.units_per_sample = "weight", max(1, round(targets.numel() * mean.expected))
        return mean

    def units(self, batch: Batch) -> Tensor | int:
        return len(batch) if self._mean is None else self._mean.units(batch.targets)

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return self._sum(model(batch.inputs), batch)

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        outputs = model(batch.inputs)
        ignored = None if self._mean is None else self._mean.ignored
        return BatchMetrics(self._sum(outputs, batch).double(), _right(self._logits(outputs), batch.targets, ignored))

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        return self._logits(model(batch.inputs))

    def pair_with_targets(self, outputs: Any, batch: Batch) -> tuple[Any, Any]:
        return super().pair_with_targets(self._logits(outputs), batch)

    def metrics(self, counts: Tensor, units: int) -> dict[str, float]:
        return {"accuracy": compute_accuracy(counts, int(counts[2]))} if counts.numel() else {}

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:
        return (metrics["accuracy"], -metrics["loss"]) if "accuracy" in metrics else (-metrics["loss"],)

    def _sum(self, outputs: Any, batch: Batch) -> Tensor:
        if isinstance(self.criterion, nn.Module) and isinstance(batch.targets, Tensor):
            self.criterion.to(batch.targets.device)
        chosen, criterion = self._choose(outputs, batch.targets), self._mean.loss_sum if self._mean else self.criterion
        loss: Any = criterion(chosen, batch.targets)
        self._refuse_dropped(batch, outputs, batch.targets)  # after the criterion, as samples may draw random numbers
        if not isinstance(loss, Tensor):
            raise TypeError(f"the criterion returned a {type(loss).__name__}, not a tensor")
        wide = at_least_float32(loss)
        if wide.ndim == 0:
            return wide if self._mean else wide * len(batch)
        return wide.sum() if wide.ndim == 1 else wide.flatten(1).mean(1).sum()

    def _logits(self, outputs: Any) -> Any:
        return outputs.logits if self._has_logits else outputs

    def _choose(self, outputs: Any, targets: Any) -> Any:
        """Logits or the whole output object, as the first batch has shown."""
        if self._has_logits and self._of_logits is None:
            try:
                self.criterion(outputs.logits, targets)
                self._of_logits = True
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                if is_out_of_memory(error):
                    raise
                self._of_logits = False
        return self._logits(outputs) if self._of_logits else outputs


def _right(outputs: Any, targets: Any, ignored: int | None) -> Tensor:
    """Return (3,): those of `count_right`, and the number of rows that count; (0,) if there are no classes."""
    both = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if not both or outputs.ndim != 2 or outputs.shape[1] < 2 or targets.ndim != 1 or targets.is_floating_point():
        return torch.zeros(0, dtype=torch.int64, device=getattr(outputs, "device", None))
    if ignored is not None:
        counted = targets != ignored
        outputs, targets = outputs[counted], targets[counted]
    counts = count_right(outputs.argmax(1) == targets, outputs)
    return torch.cat([counts, torch.full_like(counts[:1], len(targets))])


class GlobalBatchTask(Task):
    """Base class of losses over the global batch (contrastive losses, triplets), given as --task module:Class.

    The loss is a function of the rows of all samples: a few numbers for each, which the model returns. It depends
    neither on the number of workers nor on --batch-size, except through BatchNorm and dropout. Each micro-batch runs
    forward twice, see `GlobalLoss`.

    An evaluation computes the loss of groups with as many samples as a global batch, in the order of the split, and
    returns their mean, weighted by samples. A last group, like the last global batch of an epoch, may be smaller. The
    better result has the lower loss.
    """

    expected_shapes = "what its rows and its loss take"

    def __init__(self, source: DataSource, config: TaskConfig) -> None:
        super().__init__(source, config)
        self.global_loss = GlobalLoss(self.rows, self._loss)

    def rows(self, model: Model, batch: Batch) -> Rows:
        """(n, …), or a tuple or mapping of such: a row for each of n samples; by default what the model returns."""
        return model(batch.inputs)

    @abstractmethod
    def loss(self, rows: Rows, targets: Any) -> Tensor:
        """(): the mean over the samples, in order, of a global batch or of a group of an evaluation.

        Every rank calls it with the same rows, in 32 bits or more. If it needs a parameter of the model, such as a
        learned temperature, the model returns that among the rows: `scale.expand(n)`.
        """

    def loss_sum(self, model: Model, batch: Batch) -> Tensor:
        assert self.global_loss is not None
        return self.global_loss.loss_sum(model, batch)

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        return self._measure_global_loss(model, batch)

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        return self.rows(model, batch)

    def _loss(self, model: Model, rows: Rows, targets: Any) -> Tensor:
        return self.loss(rows, targets)


class FromModel(_OwnLoss):
    """The loss that the network returns, as a mean over the samples of the global batch, or over its labels.

    The network is called with inputs and targets, a dict goes to it as it is. Its loss is the mean over a micro-batch:
    over the labels that are not -100 where a sample has a row of whole numbers (tokens, a mask of classes), of which
    transformers' causal language models do not predict the first; else over samples. A micro-batch weighs as many, so
    the step's loss is the mean over the global batch on any number of workers. Where its cross-entropy ignores another
    label than -100, a label of -100 becomes that one, and neither counts.

    A network with a method `global_loss(rows, targets)` has a loss over the global batch, as a `GlobalBatchTask` has:
    it is called with the inputs alone, and returns their rows; the method gets those of all samples, and the targets,
    and may use parameters of the network, such as a learned temperature.

    An evaluation calls it the same way in evaluation mode. A network that has no loss there (torchvision's detectors)
    is in training mode then, but for BatchNorm and dropout. The better result has the lower loss.

    Args:
        loss: name of the loss in what is returned, or its place in a tuple. Without it: a () tensor, `loss`, the only
            () tensor of a tuple, or the sum of a dict of () tensors.
        ignore_index: the label that the network ignores; None is that of its only cross-entropy, or else -100.
    """

    expected_shapes = (
        "a loss () from the network: alone, as .loss, in a tuple, or a dict of losses (--set task.loss=NAME); "
        "it ignores labels of -100, or of --set task.ignore_index=N"
    )

    def __init__(
        self, source: DataSource, config: TaskConfig, loss: str | int | None = None, ignore_index: int | None = None
    ) -> None:
        super().__init__(source, config)
        self._ignored = ignore_index
        self._name, self._loss_in_training, self._skips_first = loss, False, False
        self._network: nn.Module | None = None  # the one that is trained, not wrapped, if it has a `global_loss`
        inputs, targets = Collate(source.train, source.form)([(0, get_sample(source.train, 0))])
        if (labels := _find_labels(inputs, targets)) is not None:
            self.unit, self.units_per_sample = "token", max(1, labels.numel())

    def check_model(self, model: nn.Module, precision: Precision) -> None:
        if callable(getattr(model, "global_loss", None)):
            self.global_loss, self._network = GlobalLoss(_make_rows, self._compute_global_loss), model
            self.unit, self.units_per_sample = "sample", 1

    def _compute_global_loss(self, model: Any, rows: Rows, targets: Any) -> Tensor:
        network: Any = model if hasattr(model, "global_loss") else self._network  # a wrapper (DDP) has no such method
        return network.global_loss(rows, targets)  # type: ignore[no-any-return]

    def loss_sum(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        if self.global_loss:
            return self.global_loss.loss_sum(model, batch)
        return self._sum(self._loss(model, batch, needed=True), batch)

    def units(self, batch: Batch) -> Tensor | int:
        labels = _find_labels(batch.inputs, batch.targets) if self.unit == "token" else None
        if labels is None:
            return len(batch)
        counted = labels != IGNORED
        if self._ignored not in (None, IGNORED):
            counted &= labels != self._ignored
        return torch.count_nonzero(counted[..., 1:] if self._skips_first else counted)

    def step_outputs(self, returned: Any) -> Any:
        """Return the outputs other than the loss: the rest of a mapping or tuple; of a pair, its other element."""
        loss = self._find_loss(returned)
        if isinstance(returned, Mapping):
            return {key: value for key, value in returned.items() if value is not loss}
        if isinstance(returned, Tensor | tuple):
            others = tuple(value for value in returned if value is not loss) if isinstance(returned, tuple) else ()
            return others[0] if len(others) == 1 else others
        return returned

    def measure(self, model: nn.Module, batch: Batch) -> BatchMetrics:
        if self.global_loss:
            return self._measure_global_loss(model, batch)
        loss = None if self._loss_in_training else self._loss(model, batch, needed=False)
        if loss is None:
            self._loss_in_training = True
            with _loss_mode(model):
                loss = self._loss(model, batch, needed=True)
        return BatchMetrics(self._sum(loss.double(), batch), torch.zeros(0, dtype=torch.int64, device=loss.device))

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        return model(batch.inputs if self.global_loss else self._join_labels(model, batch))

    def _loss(self, model: Callable[..., Any], batch: Batch, *, needed: bool) -> Any:
        """Return the mean loss () over a micro-batch; None if no output is a loss, or ValueError if it is `needed`."""
        outputs = model(self._join_labels(model, batch))
        self._skips_first = "CausalLM" in type(outputs).__name__
        loss = self._find_loss(outputs)
        if loss is None and needed:
            raise ValueError(f"no loss{'' if self._name is None else f' {self._name!r}'} in what it returns")
        return loss

    def _find_loss(self, outputs: Any) -> Tensor | None:
        return _find_loss(outputs) if self._name is None else _find_by_name(outputs, self._name)

    def _join_labels(self, model: Callable[..., Any], batch: Batch) -> Any:
        """What the network is called with; its first batch shows which label it ignores."""
        labels = _find_labels(batch.inputs, batch.targets) if self.unit == "token" else None
        if labels is not None and self._ignored is None:
            with torch.no_grad(), _CrossEntropies() as seen:
                model(_join(batch, labels, labels.clamp(min=0)))  # on a GPU a label out of range would end the process
            self._ignored = seen.ignored.pop() if len(seen.ignored) == 1 else IGNORED
        if labels is None or self._ignored in (None, IGNORED):
            return _join(batch)
        return _join(batch, labels, labels.masked_fill(labels == IGNORED, self._ignored))

    def _sum(self, loss: Tensor, batch: Batch) -> Tensor:
        """Over units; the mean over none of them is no number."""
        wide, count = at_least_float32(loss), self.units(batch)
        if self.unit == "sample":
            self._refuse_dropped(batch, batch.inputs, batch.targets)
        return wide * count if isinstance(count, int) else torch.where(count > 0, wide * count, 0.0)


def _make_rows(model: Callable[..., Any], batch: Batch) -> Rows:
    return model(batch.inputs)


class _CrossEntropies(TorchDispatchMode):
    """Sees which labels the cross-entropies in it ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default):
            self.ignored.add(int(args[4]))
        return func(*args, **(kwargs or {}))


def _join(batch: Batch, labels: Tensor | None = None, new: Tensor | None = None) -> Any:
    """Inputs and targets as the network gets them, with `new` in the place of the labels."""
    if batch.targets is not None:
        return Labelled(batch.inputs, batch.targets if new is None else new)
    return batch.inputs if new is None else {k: new if v is labels else v for k, v in batch.inputs.items()}


def _find_labels(inputs: Any, targets: Any) -> Tensor | None:
    """Return the labels (n, t, …) int64, several for each sample; None if there are no such labels."""
    if targets is None and isinstance(inputs, Mapping):
        targets = next((inputs[name] for name in TARGETS if name in inputs), None)
    several = isinstance(targets, Tensor) and targets.dtype == torch.int64 and targets.ndim > 1
    return targets if several else None


def _find_loss(outputs: Any) -> Tensor | None:
    if _is_loss(outputs):
        return outputs  # type: ignore[no-any-return]
    if (named := _find_by_name(outputs, "loss")) is not None:
        return named
    if isinstance(outputs, Mapping):
        parts = list(outputs.values())
        return torch.stack(parts).sum() if parts and all(map(_is_loss, parts)) else None
    losses = [each for each in outputs if _is_loss(each)] if isinstance(outputs, tuple) else []
    return losses[0] if len(losses) == 1 else None


def _find_by_name(outputs: Any, name: str | int) -> Tensor | None:
    if isinstance(outputs, Mapping):
        found = outputs.get(name)
    elif isinstance(outputs, tuple) and isinstance(name, int):
        found = outputs[name] if -len(outputs) <= name < len(outputs) else None
    else:
        found = getattr(outputs, str(name), None)
    return found if _is_loss(found) else None


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


@contextmanager
def _loss_mode(model: nn.Module) -> Iterator[None]:
    """Training mode, in which some networks return their loss; BatchNorm, dropout and gradients as in evaluation."""
    with eval_mode(model):
        model.train()
        for module in model.modules():
            if isinstance(module, _NormBase | _DropoutNd):
                module.eval()
        yield
