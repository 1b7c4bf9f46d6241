"""The command line of ``scripts/sweep.py``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType

from onboard.pipeline.reading import versions

from breadth import scope, table
from breadth.progress import Shown
from breadth.runner import GIB, REPOSITORY, Command, Limits, onboard_new, run_all
from breadth.scope import Scope, Subject
from breadth.store import Record, Store, base_key, record_key

KEPT = REPOSITORY / ".sweep"
SOURCES = (REPOSITORY / "generator" / "onboard", REPOSITORY / "templates")
INTERRUPTED = 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="sweep.py",
        description="Onboard transformers' dense decoder architectures from their default configs, or a folder of "
        "config.json files, and make a table of how each one ends. Finished ones are kept and not run again until the "
        "generator, its templates or the versions change.",
    )
    parser.add_argument("archs", nargs="*", metavar="MODEL_TYPE", help="these only; default: the whole scope")
    parser.add_argument("--configs", type=Path, metavar="DIR", help="sweep DIR's NAME/config.json or NAME.json instead")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes side by side (2)")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="seconds for each one (900)")
    parser.add_argument("--memory", type=float, default=12, metavar="GIB", help="private memory of a process (12)")
    parser.add_argument("--kept", type=Path, default=KEPT, metavar="DIR", help="where results are kept (.sweep)")
    parser.add_argument("--again", action="store_true", help="run also what is kept")
    parser.add_argument("--list", action="store_true", help="show the scope, and what is left out and why; run nothing")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="put the table between FILE's markers instead of printing it; a file that is not there is made",
    )
    options = parser.parse_args(arguments)
    if options.configs and options.list:
        parser.error("--list shows transformers' architectures; it does not go with --configs")
    if options.jobs < 1 or options.timeout <= 0 or options.memory <= 0:
        parser.error("--jobs, --timeout and --memory must be positive")
    return options


def main(arguments: Sequence[str], command: Command = onboard_new) -> int:
    """Run a sweep.

    Args:
        arguments: the command line's words.
        command: what is run for each config.

    Returns:
        0 where every config was run to an end of its own or stopped (how it ended is in the table), 2 for a mistake in
        the command line, 130 where the sweep was interrupted.
    """
    options = parse(arguments)
    try:
        found = None if options.configs else scope.find_scope()
        if found and options.list:
            print(listing(found))
            return 0
        subjects = scope.read_folder(options.configs) if found is None else chosen(found, options.archs)
        if found is None and options.archs:
            subjects = among(subjects, options.archs)
        what = "sweep" if found else "configs"
        if options.page:
            page(options.page, what, "")  # before the work, not after it
    except (ValueError, OSError) as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    base = base_key(versions(), SOURCES)
    keys = {subject.name: record_key(base, subject.config) for subject in subjects}
    store = Store(options.kept / what)
    records = {} if options.again else kept(store, keys)
    interrupted = False
    try:
        sweep(subjects, keys, records, store, options, command)
    except KeyboardInterrupt:
        interrupted = True
    text = table.table(subjects, records, made_with(options.jobs), len(found.subjects) if found else None)
    if options.page and not interrupted:
        options.page.write_text(page(options.page, what, text), encoding="utf-8")
    elif not options.page:
        print(text, end="")
    summary(subjects, records, interrupted, options)
    return INTERRUPTED if interrupted else 0


def sweep(
    subjects: Sequence[Subject],
    keys: dict[str, str],
    records: dict[str, Record],
    store: Store,
    options: argparse.Namespace,
    command: Command,
) -> None:
    """Run what has no record, keep each record as it comes, and add it to ``records``.

    Raises:
        KeyboardInterrupt: by Ctrl-C or a signal to end; what ran is not kept.
    """
    todo = [subject for subject in subjects if subject.name not in records]
    if records:
        print(f"{len(records)} kept from before, {len(todo)} to run", file=sys.stderr)
    limits = Limits(options.timeout, int(options.memory * GIB))
    handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with Shown(len(subjects), len(records)) as shown:
            running = run_all(todo, keys, workers=options.jobs, limits=limits, command=command, started=shown.started)
            with closing(running):  # at an interrupt, at once
                for record in running:
                    store.save(record)
                    records[record.name] = record
                    shown.ended(record.name, one_line(record), table.passed(record))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def kept(store: Store, keys: dict[str, str]) -> dict[str, Record]:
    """The records that are as good as a run now."""
    found = {name: store.load(name, key) for name, key in keys.items()}
    return {name: record for name, record in found.items() if record is not None and record.ended}


def chosen(found: Scope, names: Sequence[str]) -> tuple[Subject, ...]:
    """The named model types of the scope, or all of it.

    Raises:
        ValueError: a name is not in scope, with the reason.
    """
    for name in names:
        if name in found.left_out:
            raise ValueError(f"{name} is left out: {found.left_out[name]}")
    return among(found.subjects, names) if names else found.subjects


def among(subjects: Sequence[Subject], names: Sequence[str]) -> tuple[Subject, ...]:
    """The named subjects, in their own order.

    Raises:
        ValueError: there is none of a name.
    """
    unknown = sorted(set(names) - {subject.name for subject in subjects})
    if unknown:
        raise ValueError(f"there is no {', '.join(unknown)}; --list shows what there is")
    return tuple(subject for subject in subjects if subject.name in names)


def page(path: Path, what: str, text: str) -> str:
    """What a file holds with the table in it.

    Raises:
        ValueError: it is there and has no markers.
    """
    begin, end = table.markers(what)
    before = path.read_text(encoding="utf-8") if path.exists() else begin + end
    try:
        return table.put(before, what, text)
    except table.NoMarkers as error:
        raise ValueError(f"no place for the table in {path}: {error}") from error


def made_with(jobs: int) -> str:
    """The line that says how the table was made."""
    named = [f"{name.replace('_', '-')} {version}" for name, version in versions().items() if version]
    side = "one process at a time" if jobs == 1 else f"{jobs} processes side by side"
    return f"Run with {', '.join(named)}, on the CPU, {side}; the seconds are those of the whole command."


def one_line(record: Record) -> str:
    """How one ended, for the progress."""
    text = table.result(record)
    return f"{text if len(text) <= 160 else text[:157] + '...'}, {record.seconds:.0f} s"


def summary(
    subjects: Sequence[Subject], records: dict[str, Record], interrupted: bool, options: argparse.Namespace
) -> None:
    """Say on stderr how it went, and what to do about what did not go well."""
    ended = list(records.values())
    lines = [table.counts(ended)]
    ways = {"exit 3, not supported": 3, "exit 1, a test or a mutant": 1, "exit 5, a bug": 5}
    found = {
        way: [record.name for record in ended if record.ended and record.exit == status] for way, status in ways.items()
    }
    found["stopped or killed, to be run again"] = [record.name for record in ended if not record.ended]
    lines += [f"  {way}: {len(names)} ({', '.join(names)})" for way, names in found.items() if names]
    if interrupted:
        lines.append(f"interrupted: {len(subjects) - len(ended)} are left; the same command goes on with these")
    elif options.page:
        lines.append(f"wrote {options.page}")
    print("\n".join(lines), file=sys.stderr)


def listing(found: Scope) -> str:
    """The scope, for people."""
    width = max(len(name) for name in (*found.left_out, *(subject.name for subject in found.subjects)))
    lines = [f"in scope: {len(found.subjects)} model types, {len(found.aliases)} of them with the config of another"]
    for subject in found.subjects:
        alias = f" (config of {found.aliases[subject.name]})" if subject.name in found.aliases else ""
        lines.append(f"  {subject.name:<{width}}  {subject.architecture}{alias}")
    lines.append(f"left out: {len(found.left_out)}")
    lines += [f"  {name:<{width}}  {reason}" for name, reason in found.left_out.items()]
    return "\n".join(lines)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
