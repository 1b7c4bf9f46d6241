"""Facts about a model: the raw config.json, the commit it came from, and the checkpoint's tensors from headers alone.

Reading a local source imports neither the Hub's client nor any model library; the Hub's half is imported when needed.
"""

from __future__ import annotations

from onboard.errors import HubError, UsageError
from onboard.facts._facts import Facts, Source, TensorHeader
from onboard.facts.source import LocalPath, check_revision, understand

__all__ = ["Facts", "Source", "TensorHeader", "read_facts"]


def read_facts(given: str, *, revision: str | None = None, headers: bool = True) -> Facts:
    """Read what is known about a model before anything is derived from it.

    Args:
        given: a Hub id (``org/name``), a directory that holds config.json, or the path of a config.json. A path that
            exists wins over an id.
        revision: a branch, tag or commit of a Hub repo; its default branch when omitted.
        headers: whether to read the headers of the checkpoint's safetensors files. Weights are never read.

    Raises:
        UsageError: the source is not one, or a local file is missing, unreadable or malformed.
        HubError: the Hub did not give the files, or gave malformed ones.
    """
    source = understand(given)
    if revision is not None:
        check_revision(revision)
    if isinstance(source, LocalPath):
        if revision is not None:
            raise UsageError(
                "a revision was given for a local source",
                "only a repo on the Hub has branches, tags and commits",
                "Leave --revision out, or give a Hub id.",
                code="source.local_revision",
            )
        from onboard.facts.local import read_local

        return read_local(given, source.path, headers=headers)
    try:
        from onboard.facts.hub import read_hub
    except ValueError as error:
        # The Hub's client reads its variables at import, and not one of them with care.
        raise HubError(
            f"cannot read {source.id} from the Hub",
            f"huggingface_hub does not accept one of its environment variables: {error}",
            "Correct the variables whose names begin with HF_ (HF_ENDPOINT, HF_HUB_DOWNLOAD_TIMEOUT, ...).",
            code="hub.environment",
        ) from error

    return read_hub(given, source.id, revision=revision, headers=headers)
