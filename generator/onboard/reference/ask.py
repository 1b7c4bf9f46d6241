"""Asks the reference: runs :mod:`.probe` in a subprocess, so that the command line itself never imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from onboard.errors import OnboardError, Unsupported

TIMEOUT_SECONDS = 300


def ask_reference(config: Mapping[str, Any], architecture: str, model_type: str | None) -> dict[str, Any]:
    """Measure transformers' own implementation of a model at tiny size.

    Args:
        config: the decoder's part of config.json.
        architecture: name of the architecture, already checked to be an identifier.
        model_type: config.json's ``model_type``.

    Returns:
        What the probe found, plus ``origin``: how a report names the measurement.

    Raises:
        Unsupported: transformers has no class for it, refuses the config, or a part of it is not explained.
        OnboardError: the subprocess broke.
    """
    request = json.dumps({"architecture": architecture, "model_type": model_type, "config": config})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "onboard.reference.probe"],
            input=request,
            capture_output=True,
            text=True,
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
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise OnboardError(
            "Measuring the reference failed.",
            last[:300],
            "Run `onboard doctor`. If torch and transformers are fine, report this with the config.json.",
            code="reference.crashed",
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    if answer.get("error") == "no_reference":
        raise Unsupported(
            "transformers has no reference for this model.",
            answer["what"],
            "Models with remote code are not supported yet. If a newer transformers has the class, upgrade it.",
            code="unsupported.no_reference",
        )
    if answer.get("error") == "unexplained":
        nearest = f" Tried: {'; '.join(answer['nearest'][:3])}." if answer["nearest"] else ""
        raise Unsupported(
            f"The {answer['part']} of this architecture is not explained yet.",
            f"{answer['what']}.{nearest}",
            "Report the architecture, or write this part by hand after an architecture that comes near (`onboard inspect`).",
            code=f"unsupported.{answer['part'].replace(' ', '_')}",
        )
    answer["origin"] = f"tiny {answer['reference_class']} of transformers {answer['transformers']}"
    return answer


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
