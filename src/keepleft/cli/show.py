"""keepleft show"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from keepleft.cli import text_io
from keepleft.cli.paths import check_folders, model_name, model_path
from keepleft.cli.progress import Bar

Dtype = Literal["float32", "bfloat16", "float16", "int8"]


def show(
    inputs: list[str],
    html: str | None = None,
    source: str | None = None,
    to: str | None = None,
    views: str | None = None,
    runs: str | None = None,
    compare: str | None = None,
    revision: str | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
) -> int:
    """Write a web page that shows what a model does with a text, all in one file.

    Attention maps, next tokens, the beam tree, masks, the audit, training curves.

    `keepleft serve` shows the same page for any text, as long as it runs.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub), then the text to show:
            what a decoder or an encoder reads, or the source of an encoder-decoder. Without one, an example
        html: the file to write (required)
        source: the source of an encoder-decoder, where TEXT is to be the target. Without TEXT, the model
            generates it
        to: the language to write, such as fr, for a multilingual model: its tag goes before the source
        views: some of attention, decoding, masks, leaks, training, separated by commas (default: all)
        runs: a folder of run directories, for the training view
        compare: the folder that `keepleft compare` wrote
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        dtype: data type of the weights: float32, bfloat16, float16, or int8 on CPUs
        device: cpu or cuda; a GPU is used if there is one
    """
    if html is None:
        raise ValueError("say where the page goes: keepleft show MODEL TEXT --html page.html")
    if Path(html).is_dir():
        raise ValueError(f"{html} is a folder: name a file in it")
    model, input_texts = text_io.split_model_and_texts(inputs, require_model=True)
    if len(input_texts) > 1:
        raise ValueError(f"{len(input_texts)} texts were given: one at a time, in quotes")
    check_folders(runs=runs, compare=compare)
    from keepleft.pipelines.loading import load_for_inference
    from keepleft.serving.explorer.explorer import Explorer
    from keepleft.serving.explorer.html_file import page_file, write_html
    from keepleft.serving.explorer.snapshot import build_snapshot
    from keepleft.serving.explorer.translate import tag_source

    for file in ("explorer.js", "explorer.css"):
        page_file(file)  # fail before the work if the page has not been built
    loaded = load_for_inference(model_path(str(model), revision), dtype=dtype, device=device)
    name = model_name(str(model))
    explorer = Explorer(*loaded, name=name, runs=runs, compare=compare)
    if source is None and loaded.model.design.is_encoder_decoder and input_texts:
        source = input_texts.pop()  # the model writes the target
    if source is not None or not input_texts:
        source = tag_source(explorer, source, to)
    with Bar("exploring", None) as bar:
        answers = build_snapshot(
            explorer,
            input_texts[0] if input_texts else None,
            source,
            views and views.replace(",", " ").split(),
            on_progress=lambda count: bar.update(count, "answers"),
        )
    path = write_html(html, answers, title=f"{name} – keepleft explorer")
    megabytes = path.stat().st_size / 1e6
    print(f"{path}: a page of {megabytes:.1f} MB; open it in a browser, it needs no server and no network")
    return 0
