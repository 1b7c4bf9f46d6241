"""Renders every file of a generated package: templates, then ruff."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onboard import __version__
from onboard.facts import Facts
from onboard.facts.remote_code import PACKAGE, RemoteCode
from onboard.packing.models import model_packing
from onboard.plan.targets import Layout
from onboard.render.context import model_context, origins, variants
from onboard.render.environment import environment
from onboard.render.mutants import Mutant, mutants
from onboard.render.style import format_sources
from onboard.spec.arch import ArchSpec
from onboard.spec.keys import data_keys
from onboard.spec.kind import Kind
from onboard.spec.recognise import Recognised
from onboard.spec.reused import ReusedSpec
from onboard.spec.show import show
from onboard.spec.unproven import Unproven

# Tokens of the test sequences and of the packed documents.
SEQUENCE = 24
TESTS = (
    "test_config",
    "test_forward",
    "test_state_dict_adapter",
    "test_layer_parity",
    "test_parity",
    "test_training",
    "test_registration",
    "test_packing",
    "test_mutants",
)


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """A file of the package: path relative to the plan's root, text, and why it is there."""

    path: str
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """All files, and what the report needs to know about them."""

    files: tuple[RenderedFile, ...]
    mutants: tuple[Mutant, ...]
    origins: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be rendered.

    Args:
        spec: the architecture.
        kind: its classification.
        facts: what was read.
        decoder: the decoder's part of config.json.
        measured: what the probe found.
        layout: where files go.
        prefix: prefix of every class name.
        header: licence header, or empty.
        builtin: whether the framework has a class of this architecture.
        versions: of onboard, transformers, nemo_automodel and torch.
        recognised: the class that stands in for one that transformers lacks.
        unproven: what had no reference.
        code: the model's own code, where that is the reference.
    """

    spec: ArchSpec | ReusedSpec
    kind: Kind
    facts: Facts
    decoder: Mapping[str, Any]
    measured: Mapping[str, Any]
    layout: Layout
    prefix: str
    header: str
    builtin: bool
    versions: Mapping[str, str | None]
    recognised: Recognised | None = None
    unproven: tuple[Unproven, ...] = ()
    code: RemoteCode | None = None


def render(work: Work) -> Rendered:
    """Render all files but the lock."""
    context = _context(work)
    env = environment()
    layout = work.layout
    files: list[RenderedFile] = []

    def add(path: str, template: str, reason: str) -> None:
        files.append(RenderedFile(path, env.get_template(template).render(context), reason))

    package, tests = layout.package_dir, layout.tests_dir
    add(f"{package}/__init__.py", "package/__init__.py.j2", "makes the folder a package")
    add(f"{package}/model.py", "package/model.py.j2", "the model")
    add(
        f"{package}/state_dict_adapter.py",
        "package/state_dict_adapter.py.j2",
        "checkpoint names and layouts, both ways",
    )
    if context["layer_reasons"]:
        reason = f"the framework lacks {' and '.join(context['layer_reasons'])}"
        add(f"{package}/layers.py", "package/layers.py.j2", reason)
    if context["own_rope"]:
        reason = f"the framework's rotary embedding does not cover it: {context['rope_reason']}"
        add(f"{package}/rope_utils.py", "package/rope_utils.py.j2", reason)
    add(f"{tests}/conftest.py", "tests/conftest.py.j2", "the tiny model that all tests share")
    for name in TESTS:
        add(f"{tests}/{name}.py", f"tests/{name}.py.j2", contract(env, f"tests/{name}.py.j2"))
    files.append(
        RenderedFile(
            f"{tests}/config.json", published_config(work.decoder), "the published config.json, read by test_config"
        )
    )
    if layout.target == "intree":
        add(f"{tests}/__init__.py", "package/__init__.py.j2", "makes the tests a package, as upstream's are")
    add(context["example_path"], "examples/finetune.yaml.j2", "a recipe to start from")
    add(layout.docs_page, "docs/page.mdx.j2", "coverage page; the registry's contract asks for one")
    add(layout.review, "review/REVIEW.md.j2", "where the reviewer starts")
    if layout.pyproject and layout.readme:
        add(layout.pyproject, "project/pyproject.toml.j2", "makes the package installable, with its entry point")
        add(layout.readme, "project/README.md.j2", "how to install and use it")
    first_party = ("nemo_automodel", layout.import_package.split(".")[0])
    formatted = format_sources({file.path: file.text for file in files}, first_party)
    rendered = [RenderedFile(file.path, formatted[file.path], file.reason) for file in files]
    if work.code is not None:
        copied = {"__init__.py": "", **work.code.files}
        reason = "the model's own code, which the tests hold the package against"
        rendered += [RenderedFile(f"{tests}/{PACKAGE}/{name}", text, reason) for name, text in copied.items()]
    return Rendered(
        tuple(rendered),
        tuple(context["mutants"]),
        tuple(context["origins"]),
    )


def render_review(work: Work, results: Any) -> str:
    """REVIEW.md again, with the results of the generated tests.

    Args:
        work: what was rendered.
        results: a :class:`onboard.verify.run.ProofResult`.
    """
    context = _context(work) | {"results": results}
    return environment().get_template("review/REVIEW.md.j2").render(context)


def _context(work: Work) -> dict[str, Any]:
    spec, measured, layout = work.spec, work.measured, work.layout
    if not isinstance(spec, ArchSpec):
        raise TypeError(f"{type(spec).__name__} is rendered by onboard.render.reused")
    header = work.header and work.header.rstrip("\n") + "\n\n"
    own = variants(spec, measured)
    length_dependent = spec.rope is not None and bool(spec.rope.length_dependent)
    lengths, why = _packed_lengths(length_dependent)
    known = set(work.decoder)
    return model_context(spec, prefix=work.prefix, package=layout.import_package, header=header) | {
        "tiny": measured["tiny"],
        "variants": {"base": {}, **own},
        "mutants": mutants(spec, measured["tiny"], own),
        "origins": origins(spec, measured),
        "sequence": SEQUENCE,
        "sequence_reason": "longer than the tiny window and the tiny original length of a RoPE scaling",
        "packed_lengths": lengths,
        "packed_reason": why,
        "uniform_length": 12,
        # Fresh embeddings that are scaled up make fresh logits larger where the head shares them.
        "fresh_loss_tolerance": _fresh_loss_tolerance(spec, measured),
        "prompt_length": 6 if length_dependent else 9,
        "new_tokens": 8 if length_dependent else 12,
        "dropout_keys": _dropout_keys(spec),
        "real_builds": not measured["real"].get("error"),
        "eager_attention": eager_attention(spec, measured),
        "oracle_attention": oracle_attention(spec, measured),
        "submodules": _submodules(measured),
        "rotating_kind": _rotating_kind(measured["tiny"].get("rope_parameters")),
        "late_bias": any(name.endswith(".o_proj.bias") for entry in measured["modules"] for name in entry["native"]),
        "disk_of": _disk_of(measured),
        "saved_variants": ["base", "untied" if spec.tying.tied else "tied"],
        "respelt_keys": sorted(
            known & {"architectures", "torch_dtype", "dtype", "transformers_version", "rope_scaling", "_name_or_path"}
        ),
        "normalised": measured["real"]["normalised"],
        "uniform_kind": len(set(spec.layer_kinds)) == 1,
        "other_values": {name: effect.get("other") for name, effect in measured["live"].items()},
        "reference_layers_attribute": measured["roles"]["layers"],
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
        "rows": spec_rows(spec),
        "measured_on": measured["origin"],
        **reference_context(work),
        "results": None,
        "onboard_version": __version__,
        "transformers_version": measured["transformers"],
        "automodel_version": work.versions.get("nemo_automodel"),
        "automodel_floor": work.versions.get("nemo_automodel") or "0.7.0",
    }


def reference_context(work: Work) -> dict[str, Any]:
    """What the reference is, where it is not simply transformers' class of the architecture."""
    code = work.code
    modules = [name.rpartition(".")[0] for name in (code.config, code.model)] if code else []
    config_module, class_module = (f"{PACKAGE}.{name}" for name in modules) if code else ("transformers",) * 2
    return {
        "recognised": work.recognised,
        "unproven": work.unproven,
        "code": code,
        "overrides": work.recognised.overrides if work.recognised else {},
        # A model_type that transformers' auto classes do not know: who loads the model has to give the config.
        "foreign_type": bool(code or work.recognised),
        # Where the tests import the reference from.
        "config_module": config_module,
        "class_module": class_module,
    }


def contract(env: Any, template: str) -> str:
    """The first words of a test's contract, which its docstring opens with."""
    source: str = env.loader.get_source(env, template)[0]
    first = source.split('"""Contract: ', 1)[1].split("\n", 1)[0]
    return "proves that " + first.rstrip('".').split(";")[0]


def published_config(decoder: Mapping[str, Any]) -> str:
    """The tests' copy of config.json; see :func:`onboard.spec.keys.data_keys` for what it leaves out."""
    return json.dumps(data_keys(decoder), indent=2, sort_keys=True) + "\n"


def _dropout_keys(spec: ArchSpec) -> list[str]:
    """Config keys of the dropouts, each once."""
    drops = spec.dropouts
    keys = (drops.embedding, spec.attention.dropout_key, drops.attention_output, drops.mlp_activation, drops.mlp_output)
    return sorted({key for key in keys if key is not None})


def eager_attention(spec: ArchSpec, measured: Mapping[str, Any]) -> str:
    """The module of transformers whose eager attention computes this one; caps and sinks have several forms."""
    plain = not (spec.attention.softcap or spec.attention.sinks)
    own: str | None = measured["own_eager"]
    return "llama.modeling_llama" if plain or own is None else own


def oracle_attention(spec: ArchSpec, measured: Mapping[str, Any]) -> str:
    """The reference's attention implementation that computes all of it: sdpa leaves out caps and sinks."""
    plain = not (spec.attention.softcap or spec.attention.sinks)
    return "sdpa" if plain and measured["sdpa"] else "eager"


def _submodules(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where a layer's attention and MLP end, ``{layer}`` open: path in the reference, path in the package's model."""
    ends = ("model.layers.{layer}.self_attn.o_proj", "model.layers.{layer}.mlp.down_proj")
    found = [(entry["reference"], name) for entry in measured["modules"] for name in entry["native"] if name in ends]
    if measured.get("mixer"):
        roles = measured["roles"]
        native = f"model.layers.{{layer}}.{measured['mixer']['name']}"
        found.append((f"{roles['layers']}.{{layer}}.{roles['mixer']}", native))
    return found


def _rotating_kind(parameters: Any) -> str:
    """A kind of layer that rotates, where each kind has rotary parameters of its own."""
    kinds = [kind for kind, own in (parameters or {}).items() if isinstance(own, Mapping)]
    return "full_attention" if "full_attention" in kinds or not kinds else str(kinds[0])


def _disk_of(measured: Mapping[str, Any]) -> dict[str, str]:
    """Pattern of a parameter of the reference to its pattern on disk, where they differ."""

    def pattern(name: str) -> str:
        return re.sub(r"\.\d+\.", ".{layer}.", name, count=1)

    return {pattern(name): pattern(disk) for name, disk in measured["disk_of"].items()}


def _fresh_loss_tolerance(spec: ArchSpec, measured: Mapping[str, Any]) -> float:
    """How far the loss of fresh weights may be from that of a uniform guess: further where the reference's is."""
    if spec.embedding.scale:
        return 1.0
    fresh = abs(measured.get("fresh_loss", 0.0))
    return round(0.2 + 2 * fresh, 1) if fresh > _CLOSE else 0.2


_CLOSE = 0.1


def _packed_lengths(length_dependent: bool) -> tuple[list[int], str]:
    """Lengths of the packed documents.

    Where the frequencies depend on the longest position of the batch, the documents must agree with it.
    """
    if length_dependent:
        return [9, 13, 11], ", below the original length: the frequencies follow the longest position of a batch"
    return [9, 24, 2, 13], ", one of them longer than a window"


def spec_rows(spec: ArchSpec) -> list[tuple[str, str, str]]:
    """The spec as ``(dotted path, value, provenance)``, without the key map, which has a table of its own."""
    rows = []
    for path, value in spec.leaves():
        if path.startswith("checkpoint."):
            continue
        rows.append((path, show(value), str(spec.provenance[path])))
    return rows


def source_label(facts: Facts) -> str:
    """How reports name the source: the Hub id with its commit, or the base name of a local path."""
    if facts.source.id:
        return f"{facts.source.id} at {facts.source.revision}"
    return (facts.source.given or "").rstrip("/").rsplit("/", 1)[-1]
