"""``onboard new``: facts, spec, plan, render, apply, verify."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onboard.errors import Unsupported, UsageError
from onboard.pipeline.reading import Read, class_names, published_tensors, read, require_dense, versions
from onboard.pipeline.referring import Reference, find_reference, unproven, with_ignored
from onboard.plan.apply import apply
from onboard.plan.changes import FileChange, Plan, sha256
from onboard.plan.lock import drift, file_hashes, read_lock, render_lock
from onboard.plan.targets import Layout, find_checkout, header_from, layout, license_header
from onboard.reference.ask import ask_reference
from onboard.render.package import Rendered, Work, render, render_review
from onboard.render.reused import render_reused, render_reused_review
from onboard.spec.arch import ArchSpec
from onboard.spec.derive import derive
from onboard.spec.reused import ReusedSpec, describe
from onboard.spec.validate import check_config
from onboard.verify.progress import Progress
from onboard.verify.run import ProofResult, run_tests


@dataclass(frozen=True)
class NewRequest:
    """The options of ``onboard new``; see its ``--help``."""

    source: str
    revision: str | None = None
    target: str | None = None
    out: Path | None = None
    into: Path | None = None
    name: str | None = None
    style: str = "auto"
    verify: bool = True
    dry_run: bool = False
    diff: bool = False
    force: bool = False
    trust_remote_code: bool = False
    license_header: Path | None = None


@dataclass(frozen=True)
class NewResult:
    """What was made, and whether it holds."""

    payload: Mapping[str, Any]
    exit_status: int
    diff: str | None = None
    summary_rows: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> Mapping[str, Any]:
        """DESIGN's JSON of ``onboard new``."""
        return self.payload


def make(request: NewRequest, progress: Progress) -> NewResult:
    """Write a model's onboarding change and prove it.

    Raises:
        OnboardError: nothing was written, with the reason.
    """
    progress.start(f"reading {request.source}")
    source = read(request.source, revision=request.revision)
    require_dense(source)
    check_config(source.decoder)
    name, prefix = class_names(source, request.name)
    root, places = _place(request, source, name)
    if not request.dry_run and not request.force:
        _refuse_existing(root, places)
    progress.done(f"{source.kind.kind}, {source.kind.architecture}")

    progress.start(f"measuring transformers' {source.architecture} at tiny size")
    reference = _refer(source, request, places)
    source = reference.source
    spec, measured = _understand(reference, request.style)
    open_points = unproven(spec, reference)
    progress.done(_understood(spec) + (f", as {spec.reference_class}" if reference.recognised else ""))

    progress.start("rendering")
    work = Work(
        spec=spec,
        kind=source.kind,
        facts=source.facts,
        decoder=source.decoder,
        measured=measured,
        layout=places,
        prefix=prefix,
        header=_header(request, root, places),
        builtin=is_builtin(source.architecture),
        versions=versions(),
        recognised=reference.recognised,
        unproven=open_points,
        code=reference.code,
    )
    rendered = render_reused(work, spec) if isinstance(spec, ReusedSpec) else render(work)
    plan = _plan(request, source, work, rendered, root)
    progress.done(f"{len(plan.changes)} files")
    rows = plan.summary()
    diff = plan.diff() if request.diff else None
    backup: Path | None = None
    if not request.dry_run:
        written = apply(plan, force=request.force)
        backup = written.backup

    payload = _payload(source, spec, work, rendered, plan, backup, reference.warnings)
    if request.dry_run and not request.force:
        payload["warnings"] += _would_be_refused(root, places)
    status = 0
    if request.verify and not request.dry_run:
        result = run_tests(root, places, progress)
        _record(plan, work, result)
        payload |= result.as_json()
        status = result.exit_status
    return NewResult(payload, status, diff, rows)


def _refer(source: Read, request: NewRequest, places: Layout) -> Reference:
    """What the model is held against, which is measured.

    Raises:
        UsageError: an option that does not go with it.
    """
    reference = find_reference(source, request.style, ask_reference, trust_remote_code=request.trust_remote_code)
    if reference.code and places.target == "intree":
        raise UsageError(
            "a model's own code cannot be the reference inside a checkout",
            "its files would become part of NeMo AutoModel's tests",
            "write a project of its own: --target plugin --out DIR",
            code="target.remote_code",
        )
    if request.style == "reuse" and (reference.code or reference.recognised):
        raise UsageError(
            "--style reuse needs a class of this architecture in transformers",
            f"transformers has none for {source.architecture}",
            "leave --style out",
            code="style.no_class",
        )
    return reference


def _understand(reference: Reference, style: str) -> tuple[ArchSpec | ReusedSpec, Mapping[str, Any]]:
    """What is written: native parts where all are explained, else, unless ``--style native``, a reused decoder.

    Raises:
        Unsupported: neither can be written, with the reason.
    """
    source, measured = reference.source, reference.measured
    if "reuse" not in measured:
        try:
            spec = with_ignored(derive(source.decoder, source.architecture, source.model_type, measured), reference)
            return replace(spec, review=(*published_tensors(source, spec), *spec.review)), measured
        except Unsupported as error:
            if style == "native" or reference.code or reference.recognised:
                raise
            problem = {"part": "architecture", "what": f"{error.what} {error.why}", "nearest": []}
            measured = ask_reference(source.decoder, source.architecture, source.kind.model_type, "reuse", problem)
    tensors = source.facts.tensors
    published = None if tensors is None else [tensor.name for tensor in tensors]
    return describe(source.decoder, source.architecture, source.model_type, measured, published), measured


def _understood(spec: ArchSpec | ReusedSpec) -> str:
    if not isinstance(spec, ReusedSpec):
        return "every part explained"
    what = "decoder" if spec.level == "decoder" else "model"
    novel = ", ".join(module.path for module in spec.novel)
    return f"the {what} is reused; novel: {novel}" if novel else f"the {what} is reused"


def _refuse_existing(root: Path, places: Layout) -> None:
    """Refuse a project's folder that has something in it, before anything is measured.

    Raises:
        UsageError: with what onboard itself wrote there, and what was edited since.
    """
    reasons = _would_be_refused(root, places) if places.target == "plugin" else []
    if reasons:
        raise UsageError(
            f"cannot make {root}",
            reasons[0],
            "--force replaces it and keeps a copy of what was edited; or give another folder with --out",
            code="target.exists",
        )


def _would_be_refused(root: Path, places: Layout) -> list[str]:
    """Why a run without ``--force`` would write nothing; empty where it would write."""
    lock_file = root / places.lock
    edited = []
    if lock_file.is_file():
        edited = [item.path for item in drift(root, read_lock(lock_file)) if item.state == "edited"]
    since = f"; edited since: {', '.join(edited[:5])}{' ...' if len(edited) > 5 else ''}" if edited else ""
    if places.target == "plugin" and (root.is_file() or (root.is_dir() and any(root.iterdir()))):
        made = "onboard wrote it already" if lock_file.is_file() else "it is there already, with something in it"
        return [f"{made}{since} (needs --force)"]
    return [f"files that onboard wrote were edited (needs --force){since}"] if edited else []


def _place(request: NewRequest, source: Read, name: str) -> tuple[Path, Layout]:
    """The plan's root and the layout below it."""
    checkout = request.into or (None if request.out else find_checkout(Path.cwd()))
    target = request.target or ("intree" if checkout and request.out is None else "plugin")
    if target == "intree":
        if checkout is None or find_checkout(checkout) is None:
            raise UsageError(
                "no checkout of NeMo AutoModel found",
                f"{checkout or Path.cwd()} has no nemo_automodel/_transformers/registry.py, nor has a folder above it",
                "give it with --into CHECKOUT, or write a project of its own with --target plugin",
                code="target.no_checkout",
            )
        org = source.facts.source.id.split("/")[0] if source.facts.source.id and "/" in source.facts.source.id else None
        return checkout.resolve(), layout("intree", name, "dense", org)
    places = layout("plugin", name, "dense")
    return (request.out or Path.cwd() / places.project).absolute(), places


def _header(request: NewRequest, root: Path, places: Layout) -> str:
    if request.license_header is None:
        return license_header(root) if places.target == "intree" else ""
    return header_from(request.license_header)


def _plan(request: NewRequest, source: Read, work: Work, rendered: Rendered, root: Path) -> Plan:
    places = work.layout
    changes = [FileChange(file.path, file.text, file.reason) for file in rendered.files]
    if places.registry is not None:
        from onboard.plan.registry import registry_change

        module = f"{places.import_package}.model"
        changes.append(
            registry_change(root, source.architecture, module, f"{work.prefix}ForCausalLM", force=request.force)
        )
    lock = render_lock(
        source=source.facts.source.as_json(),
        config_sha256=source.facts.config_sha256,
        versions=work.versions,
        answers={
            "target": places.target,
            "name": places.name,
            "style": request.style,
            "revision": request.revision,
            "license_header": work.header,
        },
        kind="dense",
        architecture=source.architecture,
        model_type=source.model_type,
        name=places.name,
        files=file_hashes(changes),
    )
    changes.append(FileChange(places.lock, lock, "remembers what was written, for `onboard check`"))
    # A project that onboard wrote is replaced file by file, as in a checkout: what else lies in it (its git history,
    # notes) is not ours to move.
    in_place = places.target == "intree" or (root / places.lock).is_file()
    return Plan(root, "intree" if in_place else "plugin", tuple(changes))


def _record(plan: Plan, work: Work, result: ProofResult) -> None:
    """Write the results into REVIEW.md, and its new hash into the lock; both or neither."""
    places = work.layout
    texts = {change.path: change.content for change in plan.changes}
    spec = work.spec
    review = render_reused_review(work, spec, result) if isinstance(spec, ReusedSpec) else render_review(work, result)
    lock = json.loads(texts[places.lock])
    lock["files"][places.review] = sha256(review.encode())
    edits = (
        FileChange(places.review, review, "the results of the tests", True, sha256(texts[places.review].encode())),
        FileChange(
            places.lock,
            json.dumps(lock, indent=2, sort_keys=True) + "\n",
            "remembers the new REVIEW.md",
            True,
            sha256(texts[places.lock].encode()),
        ),
    )
    # The folder is there already: its files are edited in place, as those of a checkout are.
    apply(Plan(plan.root, "intree", edits), force=True)


def is_builtin(architecture: str) -> bool:
    """Whether the installed framework has a class of this architecture, read from its registry without importing it."""
    package = find_spec("nemo_automodel")
    for folder in (package.submodule_search_locations if package else None) or []:
        registry = Path(folder) / "_transformers" / "registry.py"
        if registry.is_file():
            text = registry.read_text(encoding="utf-8")
            mapping = text.split("MODEL_ARCH_MAPPING", 1)[-1].split("\n)\n", 1)[0]
            return re.search(rf'^\s*"{architecture}",$', mapping, re.MULTILINE) is not None
    return False


def _payload(
    source: Read,
    spec: ArchSpec | ReusedSpec,
    work: Work,
    rendered: Rendered,
    plan: Plan,
    backup: Path | None,
    more: Sequence[str],
) -> dict[str, Any]:
    places = work.layout
    counts = {
        name: sum(module["origin"] == name for module in rendered.origins) for name in ("native", "reused", "novel")
    }
    warnings = list(source.facts.warnings)
    if work.builtin and places.target == "plugin":
        warnings.append(
            f"NeMo AutoModel has {source.architecture} built in, and a built-in class wins over an entry point: "
            "register this one with exist_ok=True (see the project's README)."
        )
    warnings += more
    if isinstance(spec, ReusedSpec):
        warnings += [
            f"{one.path} is novel and reused from transformers ({one.why}): review it first" for one in spec.novel
        ]
    if backup is not None:
        warnings.append(f"what was replaced and not written by onboard is kept in {backup}")
    return {
        "schema_version": 1,
        "source": source.facts.source.as_json(),
        "kind": source.kind.kind,
        "architecture": source.architecture,
        "model_type": source.model_type,
        "name": places.name,
        "target": places.target,
        "out": str(plan.root),
        "verify_path": str(plan.root if places.target == "plugin" else plan.root / places.package_dir),
        "import": {
            "sys_path": str((plan.root / places.sys_path).resolve()),
            "package": places.import_package,
            "model_module": f"{places.import_package}.model",
            "model_class": f"{work.prefix}ForCausalLM",
            "adapter_class": f"{work.prefix}StateDictAdapter",
        },
        "files": [change.path for change in plan.changes],
        "origins": {**counts, "modules": list(rendered.origins)},
        "tests": None,
        "parity": None,
        "mutants": {"planted": len(rendered.mutants), "caught": None},
        "capabilities": dict.fromkeys(("tp", "cp", "pp", "ep"), False),
        "warnings": warnings,
        "unproven": [item.as_json() for item in work.unproven],
        "review": [f"{item.what} {item.do}" for item in spec.review],
    }
