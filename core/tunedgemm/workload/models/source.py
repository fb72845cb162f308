"""Build a model on the meta device with transformers, from the content of its ``config.json``.

Only ``config.json`` and the JSON files of a quantisation next to it are read, no code of the folder
runs, and nothing is downloaded: `sandbox` sees to it, whatever the files say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.errors import UserError
from tunedgemm.process.files import JSON_MIB, read_regular
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.workload.models.confine import too_deep
from tunedgemm.workload.models.scheme import stated_parts

if TYPE_CHECKING:
    import torch

#: Fields that decide shapes, by transformers' usual names. A class fills in missing ones with
#: defaults, which may be another model's.
_DECIDING = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "moe_intermediate_size", "n_routed_experts", "num_experts", "num_local_experts", "num_experts_per_tok",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip

#: Required fields.
_POSITIVE = _DECIDING[:5]

#: Files next to ``config.json`` that state a quantisation: ModelOpt's, GPTQ's and AWQ's.
_BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")

#: Remedy for a model that transformers does not know.
_INSTEAD = "capture its shapes while it runs, with AITER_TUNE_GEMM=1, or write the file of shapes by hand"

#: Fields that choose an implementation or code, on which no shape depends. They are dropped, as is
#: any field that begins with an underscore.
_NO_SHAPE = frozenset(
    ("attn_implementation", "experts_implementation", "use_kernels", "auto_map", "trust_remote_code", "name_or_path",
     "quantization_config", "compression_config")
)  # fmt: skip


@attrs.frozen
class ModelSource:
    """A model as its folder describes it.

    Attributes:
        folder: the folder of ``config.json``.
        raw: the file's content.
        module: the model on the meta device, in its dtype.
        settings: transformers' object for the text part, with every field filled in.
        notes: remarks for the reader of the shapes, a sentence each.
    """

    folder: Path
    raw: dict[str, Any]
    module: torch.nn.Module
    settings: Any
    notes: tuple[str, ...] = ()


def json_of(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a model's folder.

    Raises:
        UserError: it cannot be read, or holds no object.
    """
    try:
        content = json.loads(read_regular(path, JSON_MIB).decode())
    except (FileNotFoundError, NotADirectoryError):
        what = f"no {path.name} in it" if path.parent.is_dir() else "no such folder"
        raise UserError(f"{path.parent}: {what}; name a model folder in Hugging Face's layout (nothing is downloaded)") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise UserError(too_deep(str(path.parent))) from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object (got {type(content).__name__})")
    return content


def config_of(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's ``config.json``.

    Raises:
        UserError: no folder, no ``config.json`` in it, or no JSON object with an architecture.
    """
    path = folder / "config.json" if folder.is_dir() or not folder.exists() else folder
    if path.name != "config.json":
        raise UserError(f"{path}: not a model folder; name the folder that holds its config.json")
    raw = json_of(path)
    if not raw.get("model_type") or not isinstance(raw["model_type"], str):
        raise UserError(f"{path}: lacks the field 'model_type', which names the architecture; {_INSTEAD}")
    return raw


def with_quantisation(folder: Path, raw: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the content of ``config.json`` with a quantisation next to it, and a note on that.

    ModelOpt, GPTQ and AWQ wrote one of `_BESIDE` before they wrote into ``config.json``.

    Raises:
        UserError: the file cannot be read.
    """
    stated = dict(stated_parts(raw))
    own = stated.get("")
    lacks_layers = isinstance(own, dict) and "MIXED" in str(own.get("quant_algo")).upper() and not own.get("quantized_layers")
    names = _BESIDE if not stated else _BESIDE[:1] if lacks_layers else ()
    folder = folder if folder.is_dir() else folder.parent
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        return raw, ()
    content = json_of(path)
    method = "modelopt" if path.name == _BESIDE[0] else "awq" if {"w_bit", "zero_point"} & {*content} else "gptq"
    how = "" if method == "modelopt" else f", as vLLM does with --quantization {method}"
    return {**raw, "quantization_config": {"quant_method": method, **content}}, (f"the quantisation is read from {path.name}{how}",)


def build(folder: Path, raw: dict[str, Any]) -> ModelSource:
    """Build the model of a `config_of` on the meta device.

    Raises:
        UserError: an architecture that the installed transformers does not know, missing fields, or
            contradictory sizes.
    """
    import transformers

    settings = _settings(transformers, folder, raw)
    notes = _check_fields(folder, raw, settings)
    module = _module(transformers, folder, raw, settings)
    return ModelSource(folder, raw, module, _of_text(settings), tuple(notes))


def number_of(owner: Any, *names: str) -> int:
    """Return the first positive number among some attributes of a model's part or settings, else 0."""
    for name in names:
        try:
            value = getattr(owner, name, None)
        except Exception:  # settings that differ between layers have no common answer
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _settings(transformers: Any, folder: Path, raw: dict[str, Any]) -> Any:
    fields = _shape_fields(folder, raw)
    classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if raw["model_type"] not in classes:
        raise UserError(
            f"{folder}: transformers {transformers.__version__} does not know the architecture {raw['model_type']!r}; "
            f"install a newer one, or {_INSTEAD}"
        )
    try:
        return classes[raw["model_type"]].from_dict(fields)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # a class of transformers may raise anything
        raise UserError(f"{folder}/config.json: transformers rejects it: {_on_one_line(error)}") from None


def _shape_fields(folder: Path, part: Any) -> Any:
    """Return a part of the file without fields that choose an implementation, at any depth.

    Raises:
        UserError: a part names another model, whose sizes are not in the file, or an unknown dtype.
    """
    if isinstance(part, list):
        return [_shape_fields(folder, value) for value in part]
    if not isinstance(part, dict):
        return part
    if isinstance(named := part.get("backbone"), str):
        raise UserError(f"{folder}/config.json: backbone names another model (got {named!r}); write its fields into backbone_config")
    kept = {name: _shape_fields(folder, value) for name, value in part.items() if name not in _NO_SHAPE and not name.startswith("_")}
    return kept | {name: _dtype_name(folder, name, part[name]) for name in ("dtype", "torch_dtype") if part.get(name) is not None}


def _dtype_name(folder: Path, field: str, value: Any) -> str:
    """Return the name of a dtype as torch has it.

    Raises:
        UserError: there is none of that name.
    """
    import torch

    name = str(value).removeprefix("torch.")
    if not isinstance(vars(torch).get(name), torch.dtype):
        raise UserError(f"{folder}/config.json: {field} must be a dtype of torch (got {value!r})")
    return name


def _check_fields(folder: Path, raw: dict[str, Any], settings: Any) -> list[str]:
    """Return sentences on fields that a part of the file left to transformers' defaults.

    Raises:
        UserError: the file itself leaves out fields that decide shapes.
    """
    notes = []
    parts = {"": (raw, settings)}
    for name in getattr(settings, "sub_configs", {}):
        part, filled = raw.get(name), getattr(settings, name, None)
        if filled is not None:
            parts[name] = (part if isinstance(part, dict) else raw, filled)  # older files keep the text's fields at the top
    for name, (in_file, filled) in parts.items():
        _check_sizes(folder, filled)
        missing = _missing(in_file, filled) if not (name == "" and len(parts) > 1) else []
        if missing and name == "":
            raise UserError(f"{folder}/config.json: lacks {', '.join(missing)}, which decide shapes; {_INSTEAD}")
        if missing:
            taken = ", ".join(f"{field}={getattr(filled, field)}" for field in missing)
            notes.append(f"config.json leaves fields of {name} to transformers' defaults: {taken}")
    return notes


def _check_sizes(folder: Path, filled: Any) -> None:
    """Refuse sizes that no model has, which transformers would only detect when it runs.

    Raises:
        UserError: a size is below 1, or keys and values have heads that queries cannot share.
    """
    stored = vars(filled)
    renamed = getattr(filled, "attribute_map", {})
    for field in _POSITIVE:
        value = stored.get(renamed.get(field, field))
        if isinstance(value, int) and value < 1:
            raise UserError(f"{folder}/config.json: {renamed.get(field, field)} must be at least 1 (got {value})")
    heads, shared = (stored.get(renamed.get(field, field)) for field in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise UserError(f"{folder}/config.json: num_key_value_heads ({shared}) must divide num_attention_heads ({heads})")


def _missing(in_file: dict[str, Any], filled: Any) -> list[str]:
    renamed = getattr(filled, "attribute_map", {})  # common name of a field -> the class's name for it
    stated = {renamed.get(name, name) for name in in_file}
    keys = dict.fromkeys(renamed.get(field, field) for field in _DECIDING)
    return [key for key in keys if key not in stated and _own(filled, key)]


def _own(filled: Any, field: str) -> bool:
    """Tell whether the class stores a number for a field instead of computing it from others."""
    return isinstance(vars(filled).get(field), int)


def _module(transformers: Any, folder: Path, raw: dict[str, Any], settings: Any) -> torch.nn.Module:
    import torch

    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    classes = (getattr(transformers, name, None) for name in names if isinstance(name, str))
    chosen = next((candidate for candidate in classes if hasattr(candidate, "_from_config")), None)
    dtype = _dtype(settings)
    construct = _by_type(transformers, settings).from_config if chosen is None else chosen._from_config
    try:
        with torch.device("meta"):
            module: torch.nn.Module = construct(settings, dtype=dtype)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # the constructor of any model
        if is_out_of_memory(error) or isinstance(error, SystemError):  # what CPython raises without memory for the MemoryError
            raise MemoryError from None
        raise UserError(
            f"{folder}/config.json: transformers cannot build this model: {type(error).__name__}: {_on_one_line(error)}"
        ) from None
    return module.eval()


def _of_text(settings: Any) -> Any:
    """Return the settings of the text part; those of the whole where several parts might be it."""
    try:
        return settings.get_text_config()
    except ValueError:
        return settings


def _dtype(settings: Any) -> torch.dtype:
    import torch

    for part in (settings, _of_text(settings)):
        if isinstance(dtype := getattr(part, "dtype", None), torch.dtype):
            return dtype
    return torch.bfloat16


def _by_type(transformers: Any, settings: Any) -> Any:
    """Return the class that generates text for this type of model, from images too where needed."""
    names = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")
    for name in names:
        auto = getattr(transformers, name, None)
        if auto is not None and type(settings) in auto._model_mapping:
            return auto
    raise UserError(f"transformers {transformers.__version__} has no model for the architecture {settings.model_type!r}; {_INSTEAD}")


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or "no reason given"
