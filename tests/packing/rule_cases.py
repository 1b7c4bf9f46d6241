"""For each rule configurations that fire it, and the nearest ones that do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onboard.packing.families import Known, from_config
from onboard.packing.rules import Change, apply

OFFLINE = {
    "world_size": 8,
    "train": {"micro_batch_size": 1, "global_batch_size": 8},
    "model": {"seq_length": 4096},
    "dataset": {
        "kind": "gpt_sft",
        "seq_length": 4096,
        "enable_offline_packing": True,
        "offline_packing_specs": {"packed_sequence_size": 4096},
    },
}
"""Text, packed offline, on 8 data parallel processes: nothing to find."""
IN_BATCH = {
    "world_size": 8,
    "train": {"micro_batch_size": 2, "global_batch_size": 16},
    "model": {"seq_length": 4096},
    "dataset": {"kind": "hf_sft", "seq_length": 4096, "enable_in_batch_packing": True},
}
"""Images and text, packed in the batch."""
PLAIN = {
    "world_size": 8,
    "train": {"micro_batch_size": 1, "global_batch_size": 8},
    "model": {"seq_length": 4096},
    "dataset": {"kind": "gpt_sft", "seq_length": 4096},
}
"""Text, not packed."""
PRETRAIN = {**PLAIN, "dataset": {"kind": "gpt_pretrain", "seq_length": 4096}}
CP = "model.context_parallel_size"
TP = "model.tensor_model_parallel_size"
SP = "model.sequence_parallel"
SPECS = "dataset.offline_packing_specs"
MULT = f"{SPECS}.pad_seq_to_mult"
SIZE = f"{SPECS}.packed_sequence_size"
PER_TOKEN = "model.calculate_per_token_loss"
AVERAGE = "ddp.average_in_collective"
IMPL = "model.cuda_graph_impl"
MODULES = "model.cuda_graph_modules"
TO_MAX = "dataset.dataset_kwargs.pad_to_max_length"
CP_SAFE = {CP: 2, PER_TOKEN: True, MULT: 4}
"""CP 2 for offline packing, with all that it needs."""


def on(base: Mapping[str, Any], changes: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """A base configuration with values set, by dotted path."""
    return {**apply(base, [Change(path, value) for path, value in (changes or {}).items()]), **top}


@dataclass(frozen=True)
class Case:
    """A configuration that fires a rule, and a neighbour that does not."""

    id: str
    fires: Mapping[str, Any]
    passes: Mapping[str, Any]
    known: Known | None = None
    known_passes: Known | None = field(default=None)
    note: str = ""


def model(architecture: str, kind: str = "dense", **config: Any) -> Known:
    return from_config(architecture, {"architectures": [architecture], **config}, kind)


QWEN_NEXT = model("Qwen3NextForCausalLM", "moe")
GLM = model("Glm4MoeForCausalLM", "moe")
GEMMA_VL = model("Gemma3ForConditionalGeneration", "vlm")
LLAVA = model("LlavaForConditionalGeneration", "vlm")
PLAIN_MODEL = model("Qwen3ForCausalLM")
WITH_MTP = model("DeepseekV3ForCausalLM", "moe", num_nextn_predict_layers=1)
NO_MTP = model("DeepseekV3ForCausalLM", "moe", num_nextn_predict_layers=0)

SHORT = {"model.seq_length": 4100, "dataset.seq_length": 4100}
ODD = {"model.seq_length": 4099, "dataset.seq_length": 4099}

CASES = (
    Case("P01", on(OFFLINE, {MULT: 0}), on(OFFLINE, {MULT: 1})),
    Case("P01", on(OFFLINE, {MULT: -4}), on(OFFLINE, {MULT: None}), note="null is not checked"),
    Case(
        "P02",
        on(OFFLINE, {f"{SPECS}.max_single_sequence_length": 0}),
        on(OFFLINE, {f"{SPECS}.max_single_sequence_length": 1}),
    ),
    Case(
        "P02",
        on(OFFLINE, {f"{SPECS}.max_single_sequence_length": 4097}),
        on(OFFLINE, {f"{SPECS}.max_single_sequence_length": 4096}),
    ),
    Case(
        "P02",
        on(OFFLINE, {f"{SPECS}.max_single_sequence_length": -1, SIZE: -1}),
        on(OFFLINE, {f"{SPECS}.max_single_sequence_length": 9999, SIZE: -1}),
        note="no size to exceed",
    ),
    Case(
        "P03",
        on(OFFLINE, {f"{SPECS}.packed_train_data_path": "nowhere/train.parquet"}),
        on(OFFLINE, {f"{SPECS}.packed_train_data_path": None}),
    ),
    Case(
        "P04",
        on(OFFLINE, {"dataset.enable_in_batch_packing": True}),
        on(OFFLINE, {"dataset.enable_in_batch_packing": False}),
    ),
    Case("P05", on(PLAIN, {"dataset.enable_offline_packing": True}), on(OFFLINE)),
    Case("P05", on(OFFLINE, {SPECS: None}), on(OFFLINE, {SPECS: {}}), note="empty specs are specs"),
    Case("P06", on(OFFLINE, {"dataset.enable_offline_packing": False}), on(PLAIN)),
    Case(
        "P07",
        on(OFFLINE, {f"{SPECS}.pad_cu_seqlens": True}),
        on(OFFLINE, {f"{SPECS}.pad_cu_seqlens": True, TO_MAX: True}),
    ),
    Case(
        "P07",
        on(OFFLINE, {f"{SPECS}.pad_cu_seqlens": True, TO_MAX: 1}),
        on(OFFLINE, {f"{SPECS}.pad_cu_seqlens": True, "dataset.pad_to_max_length": True}),
        note="1 is not true",
    ),
    Case(
        "P08",
        on(OFFLINE, {IMPL: "transformer_engine", MODULES: ["mlp"]}),
        on(OFFLINE, {IMPL: "none", MODULES: ["mlp"]}),
    ),
    Case("P08", on(OFFLINE, {IMPL: "full_iteration"}), on(PLAIN, {IMPL: "full_iteration"})),
    Case(
        "P09",
        on(OFFLINE, {IMPL: "transformer_engine", TO_MAX: True}),
        on(OFFLINE, {IMPL: "transformer_engine", TO_MAX: True, MODULES: ["mlp"]}),
    ),
    Case(
        "P09",
        on(OFFLINE, {IMPL: "transformer_engine", TO_MAX: True, MODULES: ["mlp", "attn"]}),
        on(
            OFFLINE,
            {IMPL: "transformer_engine", TO_MAX: True, MODULES: ["mlp", "attn"], f"{SPECS}.pad_cu_seqlens": True},
        ),
    ),
    Case(
        "P09",
        on(OFFLINE, {IMPL: "local", MODULES: ["full_iteration"], TO_MAX: True}),
        on(OFFLINE, {IMPL: "local", MODULES: ["attn"], TO_MAX: True}),
    ),
    Case(
        "P10",
        on(IN_BATCH, {CP: 2, PER_TOKEN: True, "model.seq_length": 4098, "dataset.seq_length": 4098}),
        on(IN_BATCH, {CP: 2, PER_TOKEN: True, **SHORT}),
    ),
    Case("P10", on(IN_BATCH, {TP: 8, SP: True, **SHORT}), on(IN_BATCH, {TP: 8, SP: False, **SHORT})),
    Case(
        "P10",
        on(IN_BATCH, {CP: 2, TP: 4, SP: True, PER_TOKEN: True, **SHORT}),
        on(OFFLINE, {CP: 2, TP: 4, SP: True, PER_TOKEN: True, **SHORT}),
        note="text is not padded at collate time",
    ),
    Case(
        "P10",
        on(IN_BATCH, {"model.eval_context_parallel_size": 4, **SHORT}),
        on(IN_BATCH, {"model.eval_context_parallel_size": 2, **SHORT}),
        note="CP of evaluation counts",
    ),
    Case("P11", on(OFFLINE, {SIZE: 0}), on(OFFLINE, {SIZE: 1})),
    Case("P11", on(OFFLINE, {SPECS: {}}), on(OFFLINE), note="the default is -1"),
    Case("P12", on(PLAIN, {IMPL: "local"}), on(PLAIN, {IMPL: "local", MODULES: ["full_iteration"]})),
    Case(
        "P12",
        on(PRETRAIN, {IMPL: "local", MODULES: "attn,mlp"}),
        on(PRETRAIN, {IMPL: "transformer_engine", MODULES: "attn,mlp"}),
    ),
    Case("P13", on(PLAIN, {TP: 3}), on(PLAIN, {TP: 4})),
    Case("P13", on(PLAIN, {"train.global_batch_size": 12}), on(PLAIN, {"train.global_batch_size": 16})),
    Case(
        "P13",
        on(PLAIN, {"train.eval_micro_batch_size": 2}),
        on(PLAIN, {"train.eval_micro_batch_size": 2, "train.eval_global_batch_size": 16}),
    ),
    Case("P13", on(PLAIN, {"model.eval_context_parallel_size": 3}), on(PLAIN, {"model.eval_context_parallel_size": 4})),
    Case(
        "P14",
        on(PRETRAIN, {CP: 2, "model.seq_length": 4098, "dataset.seq_length": 4098}),
        on(PRETRAIN, {CP: 1, "model.seq_length": 4098, "dataset.seq_length": 4098}),
    ),
    Case("P14", on(PLAIN, {CP: 8, PER_TOKEN: True, **SHORT}), on(PLAIN, {CP: 2, PER_TOKEN: True, **SHORT})),
    Case("P15", on(PLAIN, {CP: 2}), on(PRETRAIN, {CP: 2}), note="pre-training is exempt"),
    Case("P15", on(IN_BATCH, {CP: 2}), on(IN_BATCH, {CP: 2, PER_TOKEN: True})),
    Case("P16", on(PLAIN, {CP: 2, PER_TOKEN: True, AVERAGE: True}), on(PRETRAIN, {CP: 2, AVERAGE: True})),
    Case(
        "P16",
        on(PLAIN, {CP: 2, PER_TOKEN: True, AVERAGE: True, "ddp.use_megatron_fsdp": False}),
        on(PLAIN, {CP: 2, PER_TOKEN: True, AVERAGE: True, "ddp.use_megatron_fsdp": True}),
        note="Megatron-FSDP resets it",
    ),
    Case(
        "P17",
        on(OFFLINE, {"train.micro_batch_size": 2, "train.global_batch_size": 16}),
        on(PLAIN, {"train.micro_batch_size": 2, "train.global_batch_size": 16}),
    ),
    Case("P18", on(IN_BATCH, {"train.micro_batch_size": 1}), on(IN_BATCH, {"train.micro_batch_size": 2})),
    Case(
        "P19", on(PLAIN, {"model.seq_length": 8192}), on(PLAIN, {"model.seq_length": 8192, "dataset.seq_length": 8192})
    ),
    Case(
        "P19",
        on(PRETRAIN, {"model": {}}),
        on(PRETRAIN, {"model": {}, "dataset.seq_length": 1024}),
        note="the model's default is 1024",
    ),
    Case(
        "P20",
        on(IN_BATCH, {"dataset.kind": "energon", "train.eval_micro_batch_size": 1}),
        on(IN_BATCH, {"dataset.kind": "mock_vlm", "train.eval_micro_batch_size": 1}),
    ),
    Case(
        "P20",
        on(IN_BATCH, {"dataset.kind": "energon", "train.eval_micro_batch_size": 1}),
        on(IN_BATCH, {"dataset.kind": "energon", "train.eval_micro_batch_size": 1, "dataset.do_validation": False}),
    ),
    Case("P21", on(PLAIN, {"train": {"micro_batch_size": 1}}), on(PLAIN)),
    Case("P21", on(PLAIN, {"train": {"global_batch_size": 8}}), on(PLAIN)),
    Case(
        "P22",
        on(PLAIN, {CP: 4, PER_TOKEN: True, "model.cp_comm_type": "a2a+p2p"}),
        on(
            PLAIN,
            {
                CP: 4,
                PER_TOKEN: True,
                "model.cp_comm_type": "a2a+p2p",
                "model.hierarchical_context_parallel_sizes": [2, 2],
            },
        ),
    ),
    Case(
        "P22",
        on(PLAIN, {CP: 4, PER_TOKEN: True, "model.hierarchical_context_parallel_sizes": [2, 4]}),
        on(PLAIN, {CP: 4, PER_TOKEN: True, "model.cp_comm_type": "p2p"}),
    ),
    Case("T01", on(OFFLINE, {**CP_SAFE, MULT: 2}), on(OFFLINE, CP_SAFE)),
    Case("T02", on(OFFLINE, {TP: 4, SP: True, MULT: 2}), on(OFFLINE, {TP: 4, SP: False, MULT: 2})),
    Case(
        "T02",
        on(OFFLINE, {**CP_SAFE, TP: 4, SP: True, MULT: 4}),
        on(OFFLINE, {**CP_SAFE, TP: 4, SP: True, MULT: 8}),
        note="lcm(2*CP, CP*TP)",
    ),
    Case("T03", on(OFFLINE, {SIZE: 2048}), on(OFFLINE, {SIZE: 4096})),
    Case("T03", on(OFFLINE, {MULT: 3}), on(OFFLINE, {MULT: 4})),
    Case("T04", on(OFFLINE, {"model.mtp_num_layers": 1}), on(PLAIN, {"model.mtp_num_layers": 1})),
    Case("T04", on(OFFLINE), on(OFFLINE), WITH_MTP, NO_MTP, note="from config.json"),
    Case("T04", on(IN_BATCH), on(IN_BATCH, {"model.mtp_num_layers": None}), WITH_MTP, WITH_MTP, note="turned off"),
    Case("T05", on(PLAIN, {TP: 2, SP: True, **ODD}), on(PLAIN, {TP: 2, SP: True, **SHORT})),
    Case("T05", on(PLAIN, {TP: 8, SP: True, **SHORT}), on(IN_BATCH, {TP: 8, SP: True, **SHORT}), note="P10 there"),
    Case("T06", on(PLAIN, {PER_TOKEN: True, AVERAGE: True}), on(PLAIN, {PER_TOKEN: False, AVERAGE: True})),
    Case(
        "T06",
        on(PRETRAIN, {CP: 2, PER_TOKEN: True, AVERAGE: True}),
        on(PLAIN, {CP: 2, PER_TOKEN: True, AVERAGE: True}),
        note="P16 there",
    ),
    Case(
        "T07",
        on(PLAIN, {"train.global_batch_size": 4, "train.eval_global_batch_size": 8}),
        on(PLAIN, {"train.eval_global_batch_size": 16}),
    ),
    Case(
        "T07",
        on(PLAIN, {"train.global_batch_size": 12, "train.eval_global_batch_size": 8}),
        on(PLAIN, {"train.global_batch_size": 12}),
        note="P13 there",
    ),
    Case(
        "T08",
        on(OFFLINE, {"train.eval_micro_batch_size": 2, "train.eval_global_batch_size": 16}),
        on(OFFLINE, {"train.eval_micro_batch_size": 1}),
    ),
    Case("T08", on(IN_BATCH, {"train.eval_micro_batch_size": 1}), on(IN_BATCH, {"train.eval_micro_batch_size": 2})),
    Case("T09", on(OFFLINE, {MULT: None}), on(OFFLINE, {MULT: 1})),
    Case("T10", on(OFFLINE), on(OFFLINE, peft="lora"), QWEN_NEXT, QWEN_NEXT, note="full fine-tuning only"),
    Case("T10", on(OFFLINE, peft="lora"), on(PLAIN), GLM, GLM, note="with an adapter too"),
    Case("T10", on(OFFLINE), on(OFFLINE), GLM, PLAIN_MODEL),
    Case("T10", on(IN_BATCH), on(OFFLINE), GEMMA_VL, GEMMA_VL, note="the other packing"),
    Case(
        "T10",
        on(IN_BATCH, {"model.pipeline_model_parallel_size": 2}),
        on(IN_BATCH),
        LLAVA,
        LLAVA,
        note="PP 1 and CP 1 only",
    ),
)
