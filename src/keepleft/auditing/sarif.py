"""Reports and hints as SARIF 2.1.0, from which forges annotate the lines of a change."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from keepleft.auditing.report import KINDS, UNCHECKED, AuditReport, Finding
from keepleft.auditing.static.hints import Hint
from keepleft.auditing.static.rule_table import RULES

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
KIND_TEXTS = {
    "future": "A hidden position moves an output",
    "padding": "The content or the amount of padding moves a real output",
    "packing": "A neighbour in the same packed row moves a sequence",
    "cache": "Decoding with the KV cache differs from one full forward pass",
    "batch": "Other rows of the batch move a row",
    "nan": "A query that sees nothing turns into NaN",
    "labels": "The loss compares labels with the wrong logits",
}
_LINE = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+)")  # as a finding names it: "model.py:31, in softmax()"


@dataclass(frozen=True)
class SourceLocation:
    """A line of a file."""

    path: Path
    line: int = 1


def sarif(
    reports: Sequence[tuple[AuditReport, SourceLocation | None]] = (),
    hints: Sequence[Hint] = (),
    *,
    failures: Sequence[str] = (),
    root: Path | None = None,
    version: str | None = None,
) -> str:
    """One run with a result for each finding (an error) and each hint (a warning or a note).

    A finding stands at its own line where that is known, and otherwise at the location given with its report.
    failures: what could not be audited or read, as notifications of the tool. root: the folder that paths are
    relative to, by default the current one. version: of keepleft.
    """
    root = (root or Path.cwd()).resolve()
    results: list[dict[str, Any]] = []
    messages = list(failures)
    for report, place in reports:
        results += [_finding_result(finding, place, root) for finding in report.findings]
        if report.verdict == UNCHECKED:
            messages += report.blocked or ["nothing was checked"]
    results += [_hint_result(hint, root) for hint in hints]
    run = {
        "tool": {
            "driver": {
                "name": "keepleft audit",
                **({"semanticVersion": version} if version is not None else {}),
                "rules": _rules({result["ruleId"] for result in results}),
            }
        },
        "invocations": [
            {
                "executionSuccessful": not messages,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": message}} for message in messages
                ],
            }
        ],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1, ensure_ascii=False) + "\n"


def is_own_code(path: Path) -> bool:
    """Is it a file of the user's, and none of an installed package?"""
    return path.is_file() and not {"site-packages", "dist-packages"} & set(path.parts)


# -- results -----------------------------------------------------------------------------------


def _finding_result(finding: Finding, fallback: SourceLocation | None, root: Path) -> dict[str, Any]:
    place = _finding_location(finding, root) or fallback
    message = f"{finding}\npath: {finding.path}" + (f"\nline: {finding.line}" if finding.line else "")
    return {
        "ruleId": f"leak-{finding.kind}",
        "level": "error" if finding.is_leak else "warning",
        "message": {"text": message},
        **({"locations": [_physical_location(place.path, place.line, 1, root)]} if place is not None else {}),
        "partialFingerprints": {"keepleft/v1": f"{finding.kind}:{finding.module}"},
    }


def _hint_result(hint: Hint, root: Path) -> dict[str, Any]:
    return {
        "ruleId": hint.rule,
        "level": hint.level,
        "message": {"text": hint.message},
        "locations": [_physical_location(Path(hint.path), hint.line, hint.column, root)],
    }


def _finding_location(finding: Finding, root: Path) -> SourceLocation | None:
    """The line of a finding, which names its file without the folder: of the modules that are imported, the
    one with this name, if only one of the user's has it.
    """
    match = _LINE.match(finding.line)
    if match is None:
        return None
    candidates = {
        Path(file).resolve()
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None)) and PurePath(file).name == match["file"]
    }
    own = [path for path in candidates if is_own_code(path) and path.is_relative_to(root)]
    return SourceLocation(own[0], int(match["line"])) if len(own) == 1 else None


def _physical_location(path: Path, line: int, column: int, root: Path) -> dict[str, Any]:
    path = path.resolve()
    if path.is_relative_to(root):
        artifact = {"uri": quote(path.relative_to(root).as_posix()), "uriBaseId": "%SRCROOT%"}
    else:
        artifact = {"uri": path.as_uri()}
    region = {"startLine": line, **({"startColumn": column} if column > 1 else {})}
    return {"physicalLocation": {"artifactLocation": artifact, "region": region}}


def _rules(used: set[str]) -> list[dict[str, Any]]:
    """Those rules that have results: the kinds of leak, and the rules of hints."""
    rules = [
        {
            "id": f"leak-{kind}",
            "shortDescription": {"text": KIND_TEXTS[kind]},
            "defaultConfiguration": {"level": "error"},
        }
        for kind in KINDS
    ]
    rules += [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.id.replace("-", " ")},
            "defaultConfiguration": {"level": rule.level},
        }
        for rule in RULES
    ]
    return [rule for rule in rules if rule["id"] in used]
