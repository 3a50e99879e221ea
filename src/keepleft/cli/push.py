"""keepleft push"""

from __future__ import annotations

import sys
from pathlib import Path


def push_model(
    model: str,
    repo: str,
    private: bool = False,
    license: str | None = None,
    language: str | None = None,
    card: str | None = None,
    revision: str | None = None,
    message: str | None = None,
    dry_run: bool = False,
    no_audit: bool = False,
) -> int:
    """Push a model to the Hugging Face hub, with a model card.

    Your token comes from HF_TOKEN or from `hf auth login`.

    Args:
        model: a model directory or a GGUF file
        repo: the repository, OWNER/NAME; it is created if it does not exist
        private: make the repository private; an existing public one is refused
        license: the licence, as the hub names it: apache-2.0, mit, cc-by-4.0, …
        language: the languages, as ISO codes separated by commas; if not given, those that the data files
            name (a.en, a.fr)
        card: a file to use as the card; if not given, the README.md in the model directory if it was edited,
            or else one that is made from the run: data, recipe, metrics, audit, licence, how to use it
        revision: the branch to push to (default: main)
        message: the commit message
        dry_run: write the card and list the files, without a network
        no_audit: push without auditing the weights, so even if the model leaks
    """
    from keepleft.cli.paths import model_path
    from keepleft.runs.audit_verdict import AuditVerdict, audit_quickly
    from keepleft.runs.model_card import CARD_FILE, is_generated, make_card, read_metadata
    from keepleft.runs.push import check_options, list_files, push
    from keepleft.weights.model_directory import load

    languages = (language or "").replace(",", " ").split()
    check_options(repo, license, languages)
    path = Path(model_path(model))
    if not path.exists():
        raise ValueError(f"there is no model directory {model}: name one, such as runs/translate/model")
    files, left_out = list_files(path)
    if not no_audit:
        report = audit_quickly(load(path)[0])
        if report.leaks:
            raise ValueError(f"the model was not pushed, as it leaks (--no-audit pushes it)\n{report.text()}")
    verdict = None if no_audit else AuditVerdict.of(report)
    own_card = Path(card) if card is not None else path / CARD_FILE
    if card is not None or (path.is_dir() and not is_generated(path)):
        if license is not None or languages:
            raise ValueError(f"{own_card} is a card of your own: put licence and languages into it yourself")
        text = own_card.read_text("utf-8")
        print(f"card: {own_card}, as it is", file=sys.stderr)
    else:
        text = make_card(path, repo=repo, license=license, languages=languages, verdict=verdict)
        _keep_card(path, text, is_own_folder=Path(model).is_dir())
    if left_out:
        print(f"left out: {', '.join(left_out)}", file=sys.stderr)
    if "license" not in read_metadata(text):
        print("note: no licence is stated, so nobody may use the model: --license names one", file=sys.stderr)
    if dry_run:
        for name, size in [("README.md", len(text.encode())), *((file.name, file.size) for file in files)]:
            print(f"{size:>15,}  {name}")
        total = sum(file.size for file in files)
        print(f"{total:>15,}  bytes in {len(files) + 1} files would go to {repo}")
        return 0
    print(f"pushing {len(files) + 1} files to {repo} …", file=sys.stderr)
    message = message or f"Push {repo.partition('/')[2]} with keepleft"
    print(push(files, text, repo, private=private, revision=revision, message=message))
    return 0


def _keep_card(path: Path, text: str, *, is_own_folder: bool) -> None:
    """Write a generated card to the model directory; print it where that is someone else's, or a file."""
    from keepleft.disk.regular_file import snapshot_commit
    from keepleft.runs.model_card import CARD_FILE, write_card

    if is_own_folder and snapshot_commit(path) is None:
        write_card(path, text)
        print(f"card: {path / CARD_FILE}", file=sys.stderr)
    else:
        print(f"card:\n{text}", file=sys.stderr)
