"""Text from a run's language model."""

import torch

from multigpu_cli.checkpoint.trained_weights import load_trained_weights
from multigpu_cli.commands.inference.load_run import load_run_without_data
from multigpu_cli.commands.requests import InferenceRequest
from multigpu_cli.data.vocabulary import Numbers
from multigpu_cli.errors import RequestError
from multigpu_cli.models.generate import generate
from multigpu_cli.runtime.model_call import ModelCall

_REMEDY = "a default of None for these parameters of forward, where text is written"


def generate_text(
    request: InferenceRequest, prompt: str, *, count: int, temperature: float, top_k: int | None, seed: int
) -> str:
    """The prompt and the model's continuation; the text that the model was trained on is not needed.

    Raises:
        RequestError: the run is not of a language model, or the prompt is empty or has characters the model lacks.
    """
    weights = load_trained_weights(request.run)
    task = weights.settings.get("built_for", {}).get("task", "language-model")
    if task != "language-model":
        raise RequestError(f"{request.run}: only a language model writes text, and this run's task is {task}")
    run = load_run_without_data(weights, own_code=request.own_code)
    if missing := ModelCall.of(run.model).required[1:]:
        raise RequestError(f"{request.run}: its network needs {', '.join(missing)} beside the tokens", remedy=_REMEDY)
    source = run.source
    vocabulary = source.vocabulary or Numbers(source.num_classes)
    start = vocabulary.encode(prompt)
    if not start:
        raise RequestError("--prompt is empty: the model needs a token to start from", remedy="--prompt TEXT")
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
    return vocabulary.decode(tokens[0].tolist())
