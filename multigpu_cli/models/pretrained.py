"""A causal language model of transformers with its pretrained weights, from a folder."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from multigpu_cli.errors import RequestError, pluralize
from multigpu_cli.runtime.model_folder import (
    check_weight_files,
    find_model_folder,
    import_transformers,
    load_config,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}
_QUANTIZED = ("none", "4bit")
_LISTED = 4


def build(
    model_dir: str | None = None, dtype: str = "float32", attention: str = "sdpa", quantize: str = "none"
) -> nn.Module:
    """The model of a folder, whole: nothing in it is as initialised.

    Args:
        model_dir: --model-dir.
        dtype: of the weights. In half precision AdamW does not move most of them: --amp bf16 computes in it instead.
        attention: sdpa, eager, or flash (of the flash-attn package).
        quantize: none, or 4bit (of the bitsandbytes package): an adapter learns beside linear layers in 4 bits.

    Raises:
        RequestError: weights are missing, pickled, or not those of the configuration.
    """
    choices = (("dtype", dtype, _DTYPES), ("attention", attention, _ATTENTION), ("quantize", quantize, _QUANTIZED))
    for name, value, known in choices:
        if value not in known:
            raise RequestError(f"model.args.{name}: {value!r}", remedy=" or ".join(known))
    folder = find_model_folder(model_dir)
    config = load_config(folder)
    if torch.get_default_device().type == "meta":  # a rank that is sent the weights
        return _build_without_weights(config, dtype, attention)
    check_weight_files(folder)
    more = {} if quantize == "none" else {"quantization_config": _configure_4_bits()}
    try:
        network, told = import_transformers().AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=_DTYPES[dtype],
            attn_implementation=_ATTENTION[attention],
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are told below
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **more,
        )
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "a causal language model of transformers"
        if attention == "flash" and isinstance(error, ImportError):
            remedy = "pip install flash-attn, where there is a GPU for it; or --set model.args.attention=sdpa"
        raise RequestError(f"--model-dir {folder}: {said}", remedy=remedy) from error
    wrong = [*told["missing_keys"], *(each[0] for each in told["mismatched_keys"])]
    if wrong:
        raise RequestError(
            f"--model-dir {folder}: its weights are not those of its config.json; {pluralize(len(wrong), 'tensor')} "
            f"would be as initialised: {', '.join(sorted(wrong)[:_LISTED])}",
            remedy="the config.json and the weights of one model, with its language-model head",
        )
    model: nn.Module = network
    return model


def _configure_4_bits() -> Any:
    """NF4 with doubly quantized scales, computing in bfloat16 (Dettmers et al. 2023, QLoRA); not run by any test.

    Raises:
        RequestError: bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise RequestError("model.args.quantize 4bit: bitsandbytes is not installed", remedy="pip install bitsandbytes")
    return import_transformers().BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _build_without_weights(config: Any, dtype: str, attention: str) -> nn.Module:
    model: nn.Module = import_transformers().AutoModelForCausalLM.from_config(
        config, dtype=_DTYPES[dtype], attn_implementation=_ATTENTION[attention]
    )
    return model
