"""Text from a run's language model."""

import torch

from multigpu_cli.checkpoint.export import load_trained_weights
from multigpu_cli.commands.inference.load_run import load_run_without_data
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.data.vocabulary import Numbers
from multigpu_cli.errors import RequestError
from multigpu_cli.models.generate import generate


def generate_text(
    request: InferenceRequest, prompt: str, *, count: int, temperature: float, top_k: int | None, seed: int
) -> str:
    """The prompt and what the model adds to it; the text that it was trained on is not needed.

    Raises:
        RequestError: the run is none of a language model, or the prompt holds what it does not know.
    """
    weights = load_trained_weights(request.run)
    task = weights.settings.get("built_for", {}).get("task", "language-model")
    if task != "language-model":
        raise RequestError(f"{request.run}: only a language model writes text, and this run's task is {task}")
    run = load_run_without_data(weights, own_code=request.own_code)
    source = run.source
    known = source.vocabulary or Numbers(source.num_classes)
    start = known.encode(prompt)
    if not start:
        raise RequestError("--prompt: the model needs something to go on from", remedy="--prompt with a token or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = generate(
        run.model.to(device),
        torch.tensor([start], device=device),
        count,
        source.input_shape[-1],
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return known.decode(tokens[0].tolist())


def print_text(text: str) -> None:
    """Print it."""
    print(text)
