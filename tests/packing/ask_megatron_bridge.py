"""Asks Megatron-Bridge 0.3.1 itself, in a process of its own: it packs a data set, reads it, and checks specs.

Its packages import transformer_engine and CUDA libraries; only the modules on packing are imported here, below packages
that do nothing. What of megatron-core they need is one switch, for object stores, which is off.

Usage: ask_megatron_bridge.py FOLDER < specs.json > answers.json
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

EOS, SIZE, MULT = 2, 64, 4


def bare(name: str, path: str | None = None, **members: Any) -> None:
    """Put a module in place that holds only what is given."""
    module = types.ModuleType(name)
    if path is not None:
        module.__path__ = [path]
    module.__dict__.update(members)
    sys.modules[name] = module


def prepare() -> None:
    spec = importlib.util.find_spec("megatron.bridge")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    for package in ("", "data", "data.datasets", "training", "training.tokenizers", "utils"):
        name = f"megatron.bridge.{package}".rstrip(".")
        bare(name, str(root.joinpath(*package.split(".")) if package else root))
    tokenizer = type("MegatronTokenizer", (), {})
    off = type("MultiStorageClientFeature", (), {"is_enabled": staticmethod(lambda: False)})
    bare("megatron.core", "")
    bare("megatron.core.msc_utils", MultiStorageClientFeature=off)
    bare("megatron.core.tokenizers", MegatronTokenizer=tokenizer)
    bare("megatron.bridge.training.tokenizers.tokenizer", MegatronTokenizer=tokenizer)
    bare("megatron.bridge.utils.common_utils", get_rank_safe=lambda: 0)


def samples() -> list[dict[str, list[Any]]]:
    """Tokenised samples, padded as packing pads them for a multiple."""
    import numpy as np

    rng = np.random.default_rng(5)
    found = []
    for length in rng.integers(3, 40, 60):
        tokens = [*rng.integers(3, 900, length - 1).tolist(), EOS]
        mask = [index >= length // 2 for index in range(length)]
        pad = -(length - 1) % MULT
        found.append({"input_ids": tokens + [EOS] * pad, "loss_mask": mask + [False] * pad})
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    prepare()
    import numpy as np
    from megatron.bridge.data.datasets.packed_sequence import PackedSequenceSpecs
    from megatron.bridge.data.datasets.packing_utils import (
        create_hist,
        create_packing_strategy,
        fill_packing_strategy,
        get_seqlen_list,
    )
    from megatron.bridge.data.datasets.sft import GPTSFTPackedDataset

    np.random.seed(1)
    sequences, histogram = create_hist(np.array(samples()), SIZE)
    assignments, metadata = create_packing_strategy(histogram, SIZE, "first_fit_shuffle")
    rows = fill_packing_strategy(assignments, sequences, SIZE, EOS)
    data, meta = folder / "training_64.npy", folder / "64_metadata.jsonl"
    np.save(data, rows)
    meta.write_text(json.dumps([metadata]))
    dataset = GPTSFTPackedDataset(
        str(data),
        types.SimpleNamespace(eos_id=EOS, bos_id=1, space_sensitive=False),
        max_seq_length=SIZE,
        pad_to_max_length=True,
        pad_cu_seqlens=True,
        pad_seq_to_mult=MULT,
        pack_metadata_file_path=str(meta),
        prompt_template="{input} {output}",
        label_key="output",
        truncation_field="input",
    )
    batches = [dataset.collate_fn([dataset[index]]) for index in range(len(dataset))]
    refused = []
    for given in json.load(sys.stdin):
        try:
            PackedSequenceSpecs(**given)
        except (ValueError, AssertionError, FileNotFoundError):
            refused.append(True)
        else:
            refused.append(False)
    answers = {
        "rows": rows,
        "metadata": metadata,
        "lengths": [get_seqlen_list(row)[0] for row in rows],
        "cu_seqlens": [batch["cu_seqlens"][0].tolist() for batch in batches],
        "position_ids": [batch["position_ids"][0].tolist() for batch in batches],
        "synthetic_loss": int(dataset.collate_fn([dataset[-1]])["loss_mask"].sum()),
        "refused": refused,
    }
    json.dump(answers, sys.stdout)


main()
