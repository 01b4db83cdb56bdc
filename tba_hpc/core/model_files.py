"""Finds faults in a model's files by names, sizes, headers and settings, without reading the weights."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from safetensors import safe_open

POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a git LFS pointer, which stands in for a large file that was not downloaded."""

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that list the parts of a model's weights."""

TOKENIZER, WEIGHTS = "tokenizer", "weights (model*.safetensors or pytorch_model*.bin)"

PARTS = {
    "config.json": ("config.json",),
    WEIGHTS: ("model*.safetensors", "pytorch_model*.bin", *INDICES),
    TOKENIZER: ("tokenizer*", "vocab*", "*.model", "tekken.json", "*.tiktoken"),
}
"""Parts of a model's folder, with the patterns of files of which one must be there."""

CHECKED = (".safetensors", ".bin", ".json", ".model")
"""Suffixes of the files that ``fault`` checks."""


def lacking(folder: Path) -> list[str]:
    """List the weight files that an index names but the folder lacks, as phrases: FILE, which INDEX lists."""
    return [
        f"{part}, which {index} lists"
        for index in INDICES
        if (folder / index).is_file()
        for part in sorted(set(json.loads((folder / index).read_text("utf-8"))["weight_map"].values()))
        if not (folder / part).is_file()
    ]


def absent(folder: Path) -> str | None:
    """Return the name of a part of PARTS of which a model's folder has no file; None if it has all."""
    return next((part for part, names in PARTS.items() if not any(map(any, map(folder.glob, names)))), None)


def layer_names(folder: Path) -> set[str]:
    """Return the names of layers with weights in a model's safetensors files; empty without such files."""
    with ExitStack() as files:
        opened = [files.enter_context(safe_open(file, "np")) for file in folder.glob("model*.safetensors")]
        return {name.rpartition(".")[0] for file in opened for name in file.keys()}  # noqa: SIM118, no dict


def fault(folder: Path) -> str | None:
    """Return why a model's folder cannot be loaded, as the end of a sentence; None if no fault is found."""
    if parts := lacking(folder):
        return f"lacks {parts[0]}"
    files = sorted(file for file in folder.iterdir() if file.suffix in CHECKED and file.is_file())
    return next((f"holds {file.name}, {found}" for file in files if (found := _fault_of(file))), None)


def unfit(folder: Path) -> str | None:
    """Return why a model's weights cannot be trained, and the remedy, as the end of a sentence, or None.

    Quantized weights cannot be trained. Nor can weights in a folder with an adapter, because transformers
    would add the adapter to them, and engines would not.
    """
    if (folder / "adapter_config.json").is_file():
        return (
            "holds a LoRA adapter (adapter_config.json): merge it into its model (peft's merge_and_unload, "
            "then save_pretrained) and give that folder; if it is merged already, remove the adapter's files"
        )
    try:
        kind = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]["quant_method"]
    except (OSError, ValueError, LookupError, TypeError):  # not quantized, or refused later by transformers
        return None
    return (
        f"holds quantized weights ({kind}), which cannot be trained: give the same model in bfloat16 or "
        "float32 (generator.engine={quantization: fp8_per_channel} quantizes engines alone)"
    )


def _fault_of(file: Path) -> str | None:
    """Return what is wrong with a file, as the end of a sentence, or None."""
    with file.open("rb") as opened:
        begins = opened.read(len(POINTER))
        if begins == POINTER:
            return "a git LFS pointer instead of the file"
        if file.suffix != ".safetensors":
            return None
        size, length = file.stat().st_size, int.from_bytes(begins[:8], "little")
        opened.seek(8)
        whole = 8 + length if 8 + length <= size else None
        try:
            header = json.loads(opened.read(length)) if whole else {}
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            whole = None
    if whole is None:
        return f"whose {size:,} bytes are not in safetensors format"
    needed = whole + max(ends, default=0)
    return None if size == needed else f"with {size:,} of {needed:,} bytes"
