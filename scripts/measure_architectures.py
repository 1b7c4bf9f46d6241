"""Measure transformers' own dense decoders, for ``onboard inspect``, which must not import torch.

Runs the probe on the default config of every decoder-only architecture of the causal-LM mapping and writes
``generator/onboard/spec/measured/<model_type>.json``. ``onboard new`` never reads these files: it measures the very
model.

    python scripts/measure_architectures.py              all of them (some minutes)
    python scripts/measure_architectures.py llama phi3   these
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from onboard.pipeline.making import is_builtin
from onboard.reference.build import NoReference, consumed_keys, find_class
from onboard.reference.probe import probe
from onboard.reference.roles import Unexplained
from onboard.spec.kind import classify
from onboard.spec.static import SIZES, fill_in
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TARGET = Path(__file__).parents[1] / "generator" / "onboard" / "spec" / "measured"


def measure(model_type: str, architecture: str) -> dict[str, Any] | None:
    """What the probe finds on an architecture's default config; None where it is no dense decoder."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    config = config_class()
    raw = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}
    if classify(raw).kind != "dense":
        return None
    try:
        found = probe(architecture, model_type, raw)
    except Unexplained as error:
        found = {"unexplained": {"part": error.part, "what": error.what}}
    except NoReference as error:
        found = {"unexplained": {"part": "reference", "what": str(error)}}
    found["architecture"] = architecture
    found["transformers"] = transformers.__version__
    found["builtin"] = is_builtin(architecture)
    found["declared"] = declared(config_class)
    if "real" in found:
        # Spellings of old files, which a default config does not hold.
        old = {"sliding_window_pattern": 3, "rope_local_base_freq": 5000.0, "n_embed": 96}
        consumed = consumed_keys(find_class(architecture, model_type), {"model_type": model_type, **old})
        found["real"]["fields"] = sorted({*found["real"]["fields"], *consumed})
    if "real" in found and not reads_alike(found, model_type, architecture):
        # `inspect` would show sizes that this class computes otherwise; `onboard new` measures the very model.
        return {"unexplained": {"part": "inspect", "what": "its sizes cannot be read without its config class"}}
    return found


def reads_alike(found: dict[str, Any], model_type: str, architecture: str) -> bool:
    """Whether the defaults are read from an empty file as transformers' own config class reads them."""
    if found["attention"]["num_key_value_heads"].isdigit():
        return False  # of these defaults alone: another field decides it
    bare = {"model_type": model_type, "architectures": [architecture]}
    ours, theirs = fill_in(bare, found)["real"], found["real"]
    names = (*SIZES, "layer_types", "sliding_window", "rope_parameters", "tie_word_embeddings")
    return all(ours[name] == theirs[name] for name in names)


def declared(config_class: type[transformers.PretrainedConfig]) -> dict[str, Any]:
    """What the class writes down for a field that a file leaves out; None where it computes the value from others."""
    names = (*SIZES, "sliding_window")
    fields = config_class.__dataclass_fields__
    own = {name: config_class.attribute_map.get(name, name) for name in names}
    return {name: getattr(fields[key], "default", None) for name, key in own.items() if key in fields}


def main() -> None:
    """Measure the named model types, or all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    TARGET.mkdir(exist_ok=True)
    explained = 0
    for index, model_type in enumerate(names, 1):
        try:
            found = measure(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        except Exception as error:
            found = {"unexplained": {"part": "probe", "what": f"{type(error).__name__}: {error}".splitlines()[0][:200]}}
        if found is None:
            continue
        explained += "unexplained" not in found
        what = found.get("unexplained", {"part": "explained", "what": ""})
        print(f"{index}/{len(names)} {model_type}: {what['part']} {what['what'][:100]}", flush=True)
        (TARGET / f"{model_type}.json").unlink(missing_ok=True)
        if "unexplained" not in found:
            text = json.dumps(found, indent=1, sort_keys=True)
            (TARGET / f"{model_type}.json").write_text(text + "\n", encoding="utf-8")
    names_known = {"activations": sorted(ACT2FN), "rope_types": sorted({"default", *ROPE_INIT_FUNCTIONS})}
    (TARGET.parent / "known_names.json").write_text(json.dumps(names_known, indent=1) + "\n", encoding="utf-8")
    print(f"{explained} explained")


if __name__ == "__main__":
    main()
