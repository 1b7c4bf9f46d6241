"""Write generator/onboard/spec/model_types.json: what transformers' auto classes say of each model_type.

`onboard` classifies a config by its properties. Where no property decides (a bare `bert` config says nothing of being
an encoder) it looks the model_type up in this table, and says so. The table is made from transformers' own mappings,
never by hand, except for the few REMOTE entries below.

    python scripts/make_model_type_table.py            write the table
    python scripts/make_model_type_table.py --check    exit 1 where the file differs
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

TABLE = Path(__file__).parents[1] / "generator" / "onboard" / "spec" / "model_types.json"

# In order: the first group that has the model_type names it. A type with a causal language model is never listed as an
# encoder, because its *ForCausalLM configs are decoders.
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("image-text", ("IMAGE_TEXT_TO_TEXT",)),
    ("audio", ("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION", "AUDIO_XVECTOR", "TEXT_TO_WAVEFORM", "RNNT", "TDT",
               "TEXT_TO_SPECTROGRAM")),
    ("encoder-decoder", ("SEQ_TO_SEQ_CAUSAL_LM",)),
    ("decoder", ("CAUSAL_LM",)),
    ("encoder", ("MASKED_LM", "TEXT_ENCODING", "QUESTION_ANSWERING", "SEQUENCE_CLASSIFICATION", "MULTIPLE_CHOICE")),
    ("vision", ("IMAGE", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION", "BACKBONE",
                "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "MASK_GENERATION", "DEPTH_ESTIMATION",
                "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "ZERO_SHOT_OBJECT_DETECTION",
                "ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_TO_IMAGE", "INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION")),
    ("time series", ("TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION")),
)  # fmt: skip

# Remote code on the Hub: neither every published config.json of theirs nor transformers tells what they are.
REMOTE: dict[str, str] = {
    "moondream1": "image-text",
    "molmo": "image-text",
    "Dream": "diffusion",
    "llada": "diffusion",
    "llada2_moe": "diffusion",
    "sdar": "diffusion",
    "sdar_moe": "diffusion",
}


def build() -> dict[str, object]:
    """The table, as the JSON object that the file holds."""
    import transformers
    import transformers.models.auto.modeling_auto as auto

    members = {
        group: {model_type for name in names for model_type in getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})}
        for group, names in GROUPS
    }
    types: dict[str, str] = {}
    for group, names in members.items():
        for model_type in names:
            types.setdefault(model_type, group)
    groups: dict[str, list[str]] = {group: [] for group, _ in GROUPS}
    for model_type, group in sorted(types.items()):
        groups[group].append(model_type)
    return {"made_from": f"transformers {transformers.__version__}", "model_types": groups, "seen_on_the_hub": REMOTE}


def main() -> int:
    """Write or check the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where the file differs from what would be written")
    check = parser.parse_args().check
    text = json.dumps(build(), indent=1) + "\n"
    if check:
        same = TABLE.exists() and TABLE.read_text() == text
        print("up to date" if same else f"{TABLE} differs: run this script without --check", file=sys.stderr)
        return 0 if same else 1
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
