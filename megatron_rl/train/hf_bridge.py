"""Models of Hugging Face folders through Megatron-Bridge, for architectures that hf_architectures.py does not declare.

What `train` asks of a folder stands here once for both loaders: read_model, config_of, build_model, save_model.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_rl.errors import ConfigError, printable
from megatron_rl.files.json_values import Fields
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.megatron.cpu import import_megatron
from megatron_rl.megatron.model import config_values, find_gpt_model, transformer_config
from megatron_rl.train.hf_architectures import ARCHITECTURES, OFF
from megatron_rl.train.hf_checkpoint import (
    CONFIG,
    IGNORED,
    MISSHAPEN_REMEDY,
    MISSING_REMEDY,
    UNKNOWN_REMEDY,
    Files,
    build_hf_model,
    check_length,
    copied_files,
    read_hf_model,
    save_hf_checkpoint,
    shown,
)
from megatron_rl.train.hf_model import HFModel, not_computed
from megatron_rl.train.writers import names_what_cannot_be_written

OWN, BRIDGE = "own", "bridge"
# Proved equal to transformers by a test -> fields of config.json that Megatron-Bridge leaves out, with the values that it computes.
BRIDGED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "GemmaForCausalLM": {
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "attention_bias": OFF,
        "rope_scaling": (None,),
        "rope_parameters": (None,),
        "tie_word_embeddings": (True,),
        "use_bidirectional_attention": OFF,
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgedModel:
    """A checked folder, dense. Its layers and mapping are Megatron-Bridge's."""

    folder: Path
    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    max_position_embeddings: int
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def notes(self) -> list[str]:
        """For the start of a run."""
        return [f"--hf-checkpoint {self.folder}: {self.architecture} is built, loaded and saved by Megatron-Bridge"]


LoadedModel = HFModel | BridgedModel


def bridge_problem() -> str | None:
    """Why Megatron-Bridge cannot be used here; None where it can."""
    try:
        import_megatron()
        from megatron.bridge import AutoBridge  # noqa: F401
    except ModuleNotFoundError as error:
        missing = "megatron-bridge" if error.name == "megatron.bridge" else f"{error.name}, which megatron-bridge needs,"
        return f"{missing} is not installed"
    except Exception as error:  # of packages below it, which fit neither each other nor this machine
        return f"megatron-bridge cannot be imported ({type(error).__name__}: {error})"
    return None


def read_model(folder: str | Path, loader: str | None) -> LoadedModel:
    """loader None: own where the architecture is declared here, else Megatron-Bridge. Nothing is allocated.

    Raises ConfigError as read_hf_model, and where Megatron-Bridge cannot be used, or would build another model than the folder's.
    """
    place = Path(folder, CONFIG)
    if loader == OWN or not place.is_file():
        return read_hf_model(folder)
    fields = Fields.of_file(place, "no folder of a Hugging Face checkpoint")
    names = fields.items("architectures", str)
    is_bridged = bool(set(names) & set(BRIDGED)) and not set(names) & set(ARCHITECTURES)
    if loader is None and not is_bridged:
        return read_hf_model(folder)
    if not is_bridged:
        raise ConfigError(
            f"--hf-loader {loader}: {place} has architectures={names}; through Megatron-Bridge are proved {', '.join(BRIDGED)}, "
            f"and --hf-loader {OWN} loads {', '.join(ARCHITECTURES)}"
        )
    problem = bridge_problem()
    if problem is not None:
        raise ConfigError(
            f"--hf-checkpoint {folder}: {names[0]} is loaded by Megatron-Bridge, and {problem}: install megatron-bridge with "
            "transformer-engine where there is a GPU, or train the model in miles, slime or verl"
        )
    return _described(Path(folder), next(name for name in names if name in BRIDGED), fields)


def _described(folder: Path, architecture: str, fields: Fields) -> BridgedModel:
    problems = not_computed(fields, BRIDGED[architecture])
    if problems:
        raise ConfigError(problems)
    with Files(folder) as files:
        of_weights, most = f": the weights hold {len(files.file_of)} tensors", max(len(files.file_of), 1)
    heads = fields.whole("num_attention_heads")
    return BridgedModel(
        folder=folder,
        architecture=architecture,
        num_layers=fields.whole("num_hidden_layers", most=most, why=of_weights),
        hidden_size=fields.whole("hidden_size"),
        num_attention_heads=heads,
        num_query_groups=fields.whole("num_key_value_heads", heads),
        vocab_size=fields.whole("vocab_size"),
        max_position_embeddings=fields.whole("max_position_embeddings"),
    )


def config_of(model: LoadedModel, **options: Any) -> Any:  # TransformerConfig
    """Megatron's config. options: further fields, which replace the folder's. Raises what transformer_config raises."""
    if isinstance(model, HFModel):
        return transformer_config(**model.transformer_options() | options)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnBackend

    provider = _bridge_of(model.folder).to_megatron_provider(load_weights=False)
    values = config_values(num_query_groups=model.num_query_groups, fp16=False, **options)
    # What Megatron-Bridge sets for its own trainer.
    values |= {
        "autocast_dtype": values["params_dtype"],
        "attention_backend": AttnBackend.auto,
        "deallocate_pipeline_outputs": False,
    }
    for name, value in values.items():
        setattr(provider, name, value)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider


def build_model(model: LoadedModel, config: Any, *, max_sequence_length: int) -> Any:  # GPTModel
    """The GPTModel with the folder's weights. config: of config_of. Communication: none.

    Raises ConfigError as build_hf_model, and for a parameter or a tensor that Megatron-Bridge's mapping left out.
    """
    if isinstance(model, HFModel):
        return build_hf_model(model, config, max_sequence_length=max_sequence_length)
    check_length(model, max_sequence_length)
    config.seq_length = max_sequence_length
    gpt, bridge = config.provide(pre_process=True, post_process=True), _bridge_of(model.folder)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.fill_(torch.nan)
    with contextlib.redirect_stdout(sys.stderr):  # its progress
        try:
            bridge.load_hf_weights([gpt])
        except ValueError as error:  # a tensor of another shape
            raise ConfigError(
                f"{model.folder}: Megatron-Bridge cannot load it ({printable(str(error))}); {MISSHAPEN_REMEDY}"
            ) from error
    _check_loaded(model, gpt, bridge)
    return gpt


def _check_loaded(model: BridgedModel, gpt: nn.Module, bridge: Any) -> None:
    """Megatron-Bridge only logs a parameter that has no tensor, and says nothing of a tensor that has no parameter."""
    empty = [name for name, parameter in gpt.named_parameters() if parameter.isnan().any()]
    used: set[str] = set()
    for task in bridge.get_conversion_tasks([gpt]):
        names = task.mapping.hf_param
        used |= {names} if isinstance(names, str) else set(names.values())
    with Files(model.folder) as files:
        unknown = sorted(name for name in set(files.file_of) - used - {"lm_head.weight"} if not IGNORED.fullmatch(name))
    problems = [
        f"{model.folder}: Megatron-Bridge {what}: {shown(names)}; {remedy}"
        for what, names, remedy in (
            ("left without a number", empty, MISSING_REMEDY),
            ("has no place for", unknown, UNKNOWN_REMEDY),
        )
        if names
    ]
    if problems:
        raise ConfigError(problems)


def save_model(model: LoadedModel, chunk: Any, folder: str | Path) -> None:
    """Writes the weights to `folder`, with the settings and the tokenizer of the folder that they came from. Every rank calls it.

    Communication and errors: as save_hf_checkpoint.
    """
    if isinstance(model, HFModel):
        save_hf_checkpoint(model, [chunk], folder)
        return
    folder = Path(folder)
    with names_what_cannot_be_written(folder), contextlib.redirect_stdout(sys.stderr):
        _bridge_of(model.folder).save_hf_weights([find_gpt_model(chunk)], folder, show_progress=False)

    def copy() -> None:
        if torch.distributed.get_rank() == 0:
            with names_what_cannot_be_written(folder):
                for path in copied_files(model.folder):
                    shutil.copyfile(path, folder / path.name)

    on_all_ranks(copy)


@functools.cache
def _bridge_of(folder: Path) -> Any:  # AutoBridge
    """It reads settings and headers; weights where they are asked for."""
    from megatron.bridge import AutoBridge

    return AutoBridge.from_hf_pretrained(folder)
