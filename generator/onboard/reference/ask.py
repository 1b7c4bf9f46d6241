"""Asks the reference: runs :mod:`.probe` in a subprocess, so that the command line itself never imports torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

from onboard._child import command
from onboard.errors import OnboardError, Unsupported, UsageError
from onboard.facts._text import shown
from onboard.facts.remote_code import RemoteCode

TIMEOUT_SECONDS = 300


class NoClass(Unsupported):
    """transformers has no class for the architecture; it may be one of its classes under another name."""


def ask_reference(
    config: Mapping[str, Any],
    architecture: str,
    model_type: str | None,
    style: str = "native",
    problem: Mapping[str, Any] | None = None,
    code: RemoteCode | None = None,
) -> dict[str, Any]:
    """Measure transformers' own implementation of a model, or the model's own code, at tiny size.

    Args:
        config: the decoder's part of config.json.
        architecture: name of the architecture, already checked to be an identifier.
        model_type: config.json's ``model_type``.
        style: ``native``: every part has to be explained; ``reuse``: what a package needs that reuses transformers'
            modules; ``auto``: the latter where the former fails.
        problem: why parts are reused, where that is known already.
        code: the model's own code, which the user trusts; it runs in the subprocess.

    Returns:
        What the probe found, plus ``origin``: how a report names the measurement. It has a key ``reuse`` where the
        package is to reuse transformers' modules.

    Raises:
        NoClass: transformers has no class for it.
        Unsupported: transformers refuses the config, or a part of it is not explained.
        UsageError: a key or value that no decoder can have.
        OnboardError: the subprocess broke.
    """
    request = json.dumps(
        {
            "architecture": architecture,
            "model_type": model_type,
            "config": config,
            "code": code.as_request() if code else None,
            "style": style,
            "problem": problem,
        }
    )
    try:
        done = subprocess.run(
            command("onboard.reference.probe", answers=True),
            input=request,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=False,
            env=_environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise Unsupported(
            "The reference did not answer.",
            f"Building transformers' {architecture} at tiny size took more than {TIMEOUT_SECONDS} s.",
            "Run `onboard doctor`; if the environment is fine, report the architecture.",
            code="reference.timeout",
        ) from error
    measured = understand(_answer(done, architecture), architecture)
    if code is not None:
        measured["origin"] = f"tiny {measured['reference_class']} of the model's own code"
    return measured


def understand(answer: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The measurement in an answer of :func:`onboard.reference.probe.answer`.

    Raises:
        OnboardError: the answer is an error; see :func:`ask_reference`.
    """
    if answer.get("error") == "refused":
        refusal = UsageError if answer["exit_status"] == UsageError.exit_status else Unsupported
        raise refusal(answer["what"], answer["why"], answer["do"], code=answer["code"])
    if answer.get("error") == "failed":
        raise Unsupported(
            f"transformers' {architecture} could not be measured with this config.json.",
            shown(answer["what"], 300),
            "If transformers loads this config, report it with the config.json.",
            code="reference.failed",
        )
    if answer.get("error") == "broken_code":
        raise Unsupported(
            "The model's own code does not run with the installed transformers.",
            answer["what"],
            "Old code often needs an old transformers: correct it in a copy of the directory, and give that. Without "
            "--trust-remote-code, onboard looks whether the model is one of transformers' classes under another name.",
            code="remote_code.broken",
        )
    if answer.get("error") in ("no_class", "no_reference"):
        kind = NoClass if answer["error"] == "no_class" else Unsupported
        raise kind(
            "transformers has no reference for this model.",
            answer["what"],
            "If a newer transformers has the class, upgrade it.",
            code="unsupported.no_reference",
        )
    if answer.get("error") == "unexplained":
        nearest = f" Tried: {'; '.join(answer['nearest'][:3])}." if answer["nearest"] else ""
        raise Unsupported(
            f"The {answer['part']} of this architecture is not explained yet.",
            f"{answer['what']}.{nearest}",
            "Report the architecture, or write this part by hand after one that comes near (`onboard inspect`).",
            code=f"unsupported.{answer['part'].replace(' ', '_')}",
        )
    answer["origin"] = f"tiny {answer['reference_class']} of transformers {answer['transformers']}"
    return answer


def _answer(done: subprocess.CompletedProcess[str], architecture: str) -> dict[str, Any]:
    """The probe's answer.

    Raises:
        Unsupported: it was ended by a signal: a crash inside of torch, or too little memory.
        OnboardError: it did not start, or did not answer.
    """
    if done.returncode < 0:
        raise Unsupported(
            f"transformers' {architecture} crashed while it was measured.",
            f"Its process was ended by {_signal_name(-done.returncode)}.",
            "Run `onboard doctor`. If torch and transformers are fine, check the numbers of the config.json.",
            code="reference.crashed",
        )
    try:
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise OnboardError(
        "Measuring the reference failed.",
        shown(last, 300),
        "Run `onboard doctor`. If torch and transformers are fine, report this with the config.json.",
        code="reference.crashed",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment() -> dict[str, str]:
    """Offline and quiet: the reference is built from its config alone."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {**os.environ, **quiet}
