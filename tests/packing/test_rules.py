"""Each rule fires where it should, and not on the nearest neighbour; errors come in Megatron-Bridge's order."""

from __future__ import annotations

import pytest
from onboard.packing.checking import RULES, check
from onboard.packing.rules import apply
from onboard.packing.settings import Settings

from .rule_cases import (
    AVERAGE,
    CASES,
    CP,
    IN_BATCH,
    MULT,
    OFFLINE,
    PER_TOKEN,
    PLAIN,
    PRETRAIN,
    SIZE,
    SP,
    SPECS,
    TP,
    Case,
    on,
)


def ids(mapping, known=None) -> list[str]:
    return [finding.rule.id for finding in check(mapping, known).findings]


def _name(case: Case) -> str:
    return f"{case.id}-{case.note or CASES.index(case)}".replace(" ", "_")


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_fires(case):
    assert case.id in ids(case.fires, case.known)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_does_not_fire_on_the_neighbour(case):
    assert case.id not in ids(case.passes, case.known_passes)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_has_cases_a_source_and_words(rule):
    assert any(case.id == rule.id for case in CASES)
    assert rule.source
    assert rule.when
    assert rule.then
    assert rule.severity == ("error" if rule.id.startswith("P") else "warning")


def test_ids_are_unique():
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("base", [OFFLINE, IN_BATCH, PLAIN, PRETRAIN])
def test_bases_have_nothing_to_find(base):
    verdict = check(base)
    assert (verdict.findings, verdict.first_error, verdict.as_json()["verdict"]) == ((), None, "ok")


@pytest.mark.parametrize("case", [case for case in CASES if case.id.startswith("P")], ids=_name)
def test_a_case_of_an_error_is_an_error(case):
    verdict = check(case.fires, case.known)
    assert verdict.as_json()["verdict"] == "error"
    assert verdict.first_error == verdict.errors[0].rule.id


@pytest.mark.parametrize("case", [case for case in CASES if case.id.startswith("T")], ids=_name)
def test_a_trap_is_no_error(case):
    verdict = check(case.fires, case.known)
    assert verdict.first_error is None
    assert (verdict.exit_status(strict=False), verdict.exit_status(strict=True)) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({f"{SPECS}.packed_val_data_path": "no.txt", MULT: 0}, "P03"),
        ({MULT: 0, f"{SPECS}.max_single_sequence_length": 0}, "P01"),
        ({f"{SPECS}.max_single_sequence_length": 0, "dataset.enable_in_batch_packing": True}, "P02"),
        ({"dataset.enable_in_batch_packing": True, SPECS: None}, "P04"),
        ({SPECS: None, "train.micro_batch_size": 2}, "P05"),
        ({"dataset.enable_offline_packing": False, f"{SPECS}.pad_cu_seqlens": True}, "P06"),
        ({f"{SPECS}.pad_cu_seqlens": True, "model.cuda_graph_impl": "full_iteration"}, "P07"),
        ({"model.cuda_graph_impl": "full_iteration"}, "P08"),
        ({"model.cuda_graph_impl": "transformer_engine", "dataset.pad_to_max_length": True, SIZE: 0}, "P09"),
        ({SIZE: 0, "model.cuda_graph_impl": "local"}, "P11"),
        ({"model.cuda_graph_impl": "local", TP: 3}, "P12"),
        ({TP: 3, CP: 3}, "P13"),
        ({CP: 8, "model.seq_length": 4100}, "P14"),
        ({CP: 2, AVERAGE: True}, "P15"),
        ({CP: 2, PER_TOKEN: True, AVERAGE: True, "model.cp_comm_type": "a2a+p2p"}, "P16"),
        ({"model.cp_comm_type": "a2a+p2p", "train.micro_batch_size": 2, "train.global_batch_size": 16}, "P22"),
        ({"train.micro_batch_size": 2, "train.global_batch_size": 16, "model.seq_length": 8192}, "P17"),
        ({"model.seq_length": 8192}, "P19"),
    ],
)
def test_order_of_two_errors(changes, first):
    assert check(on(OFFLINE, changes)).first_error == first


def test_collate_multiple_comes_before_the_layout_and_the_micro_batch():
    mapping = on(IN_BATCH, {TP: 3, SP: True, "train.micro_batch_size": 1})
    assert ids(mapping)[:3] == ["P10", "P13", "P18"]


@pytest.mark.parametrize(
    ("changes", "collate", "offline"),
    [
        ({}, 1, 1),
        ({CP: 4}, 8, 8),
        ({TP: 8, SP: True}, 8, 8),
        ({TP: 8}, 1, 1),
        ({TP: 1, SP: True}, 1, 1),
        ({CP: 2, TP: 3, SP: True}, 12, 12),
        ({CP: 2, "model.eval_context_parallel_size": 3}, 12, 4),
        ({CP: 2, TP: 4, SP: True, "dist.eval_context_parallel_size": 3}, 24, 8),
    ],
)
def test_multiples(changes, collate, offline):
    settings = Settings.read(on(IN_BATCH, changes))
    assert (settings.collate_multiple, settings.needed_pad_multiple) == (collate, offline)


@pytest.mark.parametrize("case", [case for case in CASES if case.id not in ("P03", "P13")], ids=_name)
def test_the_change_that_is_proposed_mends_it(case):
    finding = next(item for item in check(case.fires, case.known).findings if item.rule.id == case.id)
    assert finding.mend.changes
    after = ids(apply(case.fires, finding.mend.changes), case.known)
    assert case.id not in after


def test_findings_show_the_values_that_made_them():
    finding = next(item for item in check(on(OFFLINE, {CP: 2, PER_TOKEN: True, MULT: 2})).findings)
    assert finding.as_json() == {
        "id": "T01",
        "severity": "warning",
        "values": {CP: 2, MULT: 2, "lcm(2*CP, CP*TP)": 4},
        "what": "each rank gets wrong slices of the samples, or training crashes",
        "mend": f"set {MULT} to 4; pack the data again: its samples are padded before they are packed",
        "changes": {MULT: 4},
    }
