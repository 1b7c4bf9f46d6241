"""Renders the files of a package whose decoder is transformers' own; see :mod:`onboard.spec.reused`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onboard import __version__
from onboard.packing.models import model_packing
from onboard.render.environment import environment
from onboard.render.mutants import Mutant
from onboard.render.package import (
    SEQUENCE,
    Rendered,
    RenderedFile,
    Work,
    contract,
    published_config,
    reference_context,
    source_label,
)
from onboard.render.style import format_sources
from onboard.spec.reused import ReusedSpec

TESTS = (
    "test_config",
    "test_forward",
    "test_state_dict_adapter",
    "test_layer_parity",
    "test_parity",
    "test_training",
    "test_registration",
    "test_packing",
    "test_origins",
    "test_mutants",
)
_FOLDER = "reused"
_SHARED = ("test_registration",)


def render_reused(work: Work, spec: ReusedSpec) -> Rendered:
    """Render all files but the lock."""
    context = _context(work, spec)
    env = environment()
    layout = work.layout
    files: list[RenderedFile] = []

    def add(path: str, template: str, reason: str) -> None:
        files.append(RenderedFile(path, env.get_template(template).render(context), reason))

    package, tests = layout.package_dir, layout.tests_dir
    model = "model_decoder" if spec.level == "decoder" else "model_whole"
    add(f"{package}/__init__.py", "package/__init__.py.j2", "makes the folder a package")
    add(f"{package}/model.py", f"{_FOLDER}/package/{model}.py.j2", f"the model, around transformers' {_reused(spec)}")
    add(
        f"{package}/state_dict_adapter.py", f"{_FOLDER}/package/state_dict_adapter.py.j2", "checkpoint names, both ways"
    )
    add(f"{tests}/conftest.py", f"{_FOLDER}/tests/conftest.py.j2", "the tiny model that all tests share")
    for name in TESTS:
        template = f"tests/{name}.py.j2" if name in _SHARED else f"{_FOLDER}/tests/{name}.py.j2"
        add(f"{tests}/{name}.py", template, contract(env, template))
    files.append(
        RenderedFile(
            f"{tests}/config.json", published_config(work.decoder), "the published config.json, read by test_config"
        )
    )
    if layout.target == "intree":
        add(f"{tests}/__init__.py", "package/__init__.py.j2", "makes the tests a package, as upstream's are")
    add(context["example_path"], "examples/finetune.yaml.j2", "a recipe to start from")
    add(layout.docs_page, f"{_FOLDER}/docs/page.mdx.j2", "coverage page; the registry's contract asks for one")
    add(layout.review, f"{_FOLDER}/review/REVIEW.md.j2", "where the reviewer starts")
    if layout.pyproject and layout.readme:
        add(layout.pyproject, "project/pyproject.toml.j2", "makes the package installable, with its entry point")
        add(layout.readme, "project/README.md.j2", "how to install and use it")
    first_party = ("nemo_automodel", layout.import_package.split(".")[0])
    formatted = format_sources({file.path: file.text for file in files}, first_party)
    return Rendered(
        tuple(RenderedFile(file.path, formatted[file.path], file.reason) for file in files),
        tuple(context["mutants"]),
        tuple(context["origins"]),
    )


def render_reused_review(work: Work, spec: ReusedSpec, results: Any) -> str:
    """REVIEW.md again, with the results of the generated tests.

    Args:
        work: what was rendered.
        spec: the model.
        results: a :class:`onboard.verify.run.ProofResult`.
    """
    context = _context(work, spec) | {"results": results}
    return environment().get_template(f"{_FOLDER}/review/REVIEW.md.j2").render(context)


def summary(spec: ReusedSpec) -> str:
    """A few words on what is reused and what is not, for docstrings and reports."""
    if spec.level == "decoder":
        post = spec.postprocess
        extra = f", logits {_POST[post.operation]} by config.{post.key}" if post else ""
        around = f"native head{extra}, loss and state dict adapter"
    else:
        around = "native state dict adapter"
    novel = [f"{module.path} ({module.why.split(':')[0]})" for module in spec.novel]
    named = f" Novel, and the reason why it is reused: {', '.join(novel)}." if novel else ""
    what = "decoder" if spec.level == "decoder" else "model"
    return f"The {what} is transformers' own {_reused(spec)}; {around}.{named}"


_POST = {"cap": "capped", "multiply": "multiplied", "divide": "divided"}


def _reused(spec: ReusedSpec) -> str:
    return str(spec.base_class if spec.level == "decoder" else spec.reference_class)


def _context(work: Work, spec: ReusedSpec) -> dict[str, Any]:
    measured, layout = work.measured, work.layout
    found = measured["reuse"]
    supports = found["supports"]
    header = work.header and work.header.rstrip("\n") + "\n\n"
    own = _variants(spec, found, measured["tiny"])
    planted = _mutants(spec, found, measured["tiny"], own)
    known = set(work.decoder)
    return reference_context(work) | {
        "spec": spec,
        "prefix": work.prefix,
        "package": layout.import_package,
        "header": header,
        "class_name": f"{work.prefix}ForCausalLM",
        "summary": summary(spec),
        "has_conditional_rows": any(row.only_if for row in spec.rows),
        "has_indices": any("{index}" in row.native for row in spec.rows),
        "joined_indices": any("{index}" in row.native[0] for row in spec.joins),
        "recut": any(join.rows_of for join in spec.joins),
        "no_state": ", use_cache=False" if "use_cache" in supports["arguments"] else "",
        "has_infinity": "Infinity" in published_config(work.decoder),
        "supports": supports,
        "tiny": measured["tiny"],
        "variants": {"base": {}, **own},
        "saved_variants": ["base", *(name for name in ("tied", "untied") if name in own)],
        "oracle_attention": "sdpa" if supports["sdpa"] else "eager",
        "mutants": planted,
        "mutant_changes": " ".join(mutant.change for mutant in planted),
        "origins": [{"path": one.path, "origin": one.origin, "why": one.why} for one in spec.modules],
        "novel": [module.path for module in spec.novel],
        "sequence": SEQUENCE,
        "sequence_reason": "longer than the tiny window and the tiny original length of a RoPE scaling",
        "packed_lengths": [9, 11, 4],
        "packed_reason": "",
        # Freshly initialised, the reference predicts this much worse than a uniform guess.
        "fresh_loss_tolerance": round(0.5 + 2 * abs(supports["fresh_loss"]), 1),
        "dropouts": dict.fromkeys(supports["dropouts"], 0.5),
        "respelt_keys": sorted(
            known & {"architectures", "torch_dtype", "dtype", "transformers_version", "rope_scaling", "_name_or_path"}
        ),
        "normalised": measured["real"]["normalised"],
        "target": layout.target,
        "project": layout.project,
        "tests_dir": layout.tests_dir,
        "example_path": f"{layout.example_dir}/{layout.name}.yaml",
        "hub_id": work.facts.source.id,
        "model_id": work.facts.source.id or layout.name,
        "builtin": work.builtin,
        "kind": work.kind,
        "source_label": source_label(work.facts),
        "config_sha256": work.facts.config_sha256,
        "no_tensors_because": work.facts.no_tensors_because,
        "published_count": len(work.facts.tensors or ()),
        "published_open": any("KEY_MAP" in item.what for item in spec.review),
        "quantised": "quantization_config" in work.facts.config,
        "packing": model_packing(work.facts.config, work.kind),
        "rows": _rows(spec),
        "measured_on": measured["origin"],
        "results": None,
        "onboard_version": __version__,
        "transformers_version": measured["transformers"],
        "automodel_version": work.versions.get("nemo_automodel"),
        "automodel_floor": work.versions.get("nemo_automodel") or "0.7.0",
    }


def _variants(spec: ReusedSpec, found: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Other settings of config fields, each of which the generated tests prove too."""
    out: dict[str, dict[str, Any]] = {}
    if spec.tie_support == "BOTH":
        tied = bool(tiny.get("tie_word_embeddings"))
        out["untied" if tied else "tied"] = {"tie_word_embeddings": not tied}
    out.update(found["variants"])
    return out


def _mutants(
    spec: ReusedSpec,
    found: Mapping[str, Any],
    tiny: Mapping[str, Any],
    variants: Mapping[str, Mapping[str, Any]],
) -> list[Mutant]:
    """The mistakes that showed on the tiny reference, and those of the native head."""
    out = [Mutant(mistake["name"], mistake["change"]) for mistake in found["mistakes"]]
    untied = "base" if not tiny.get("tie_word_embeddings") else "untied"
    if spec.tie_support != "TIED_ONLY" and spec.head and untied in ("base", *variants) and found["can_tie"]:
        out.append(Mutant("head tied where it is its own", "tie_head", untied))
    post = spec.postprocess
    if post and (post.key in variants or tiny.get(post.key) not in (None, 1.0)):
        out.append(Mutant(f"{post.key} forgotten", "plain_logits", post.key if post.key in variants else "base"))
    return [replace(mutant, name=re.sub(r"\s+", " ", mutant.name)) for mutant in out]


def _rows(spec: ReusedSpec) -> list[tuple[str, str, str]]:
    """What was read and measured, as ``(name, value, provenance)``."""
    post = spec.postprocess
    measured = "measured: tiny reference"
    values: list[tuple[str, Any, str]] = [
        (
            "reference",
            f"{spec.reference_module}.{spec.reference_class}",
            "class look-up by architecture, then model_type",
        ),
        ("config", spec.config_class, "its config_class"),
        ("level", spec.level, measured),
        *((name, getattr(spec.dimensions, name), str(spec.provenance[name])) for name in spec.dimensions.__slots__),
        ("tie_word_embeddings", spec.tying.tied, str(spec.provenance["tie_word_embeddings"])),
        ("tying that the class honours", spec.tie_support, measured),
        ("head", spec.head, measured),
        ("logits", f"{post.operation} by config.{post.key}" if post else "the head's output", measured),
        ("decoder layers", spec.layers, measured),
        ("a mask of documents keeps them apart", spec.block_mask, measured),
    ]
    return [(name, "none" if value is None else str(value), where) for name, value, where in values]
