"""Which classes of a file claim to be causal: by name, docstring, is_causal=True, or by who uses them."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from keepleft.auditing.static.syntax import Class, Function, SourceFile, called_name, is_constant

CAUSAL_NAME = re.compile(r"causal|gpt|autoregress|llama|wavenet|language_?model|decoder_?only", re.I)
DECODER_NAME = re.compile(r"decoder", re.I)
# what is bidirectional, what attends to another sequence, what decodes something else than a text
OTHER_NAME = re.compile(
    r"non_?causal|bidirection|encoder|bert|cross|masked_?(lm|language)|diffus|denois|vae|detr|slot|"
    r"image|pixel|vision|audio|speech|mel\b|patch|vocoder|segment|classif|discriminat",
    re.I,
)
CAUSAL_WORD = re.compile(r"(?<!non-)(?<!non)(?<!not )(?<!no )(?<!a)\b(causal|autoregressive)\b", re.I)
OTHER_WORD = re.compile(r"bidirectional|non-?\s?causal|not causal|no causal|cross[- ]attention|encoder", re.I)
EVIDENCE_OF_TEXT = re.compile(r"vocab|n_?tokens?$|num_?tokens?$", re.I)
CONVOLUTIONS = frozenset({"Conv2d", "ConvTranspose1d", "ConvTranspose2d", "Conv3d"})


def claims_causality(function: Function) -> bool:
    """Whether the class of a method, or the name of a function, claims that no position sees a later one."""
    if function.owner is not None:
        return function.owner.name in causal_classes(function.file)
    return bool(CAUSAL_NAME.search(function.name)) and not OTHER_NAME.search(function.name)


def is_language_model(function: Function) -> bool:
    """As claims_causality, and any decoder of tokens too: "decoder" alone may as well decode images."""
    if claims_causality(function):
        return True
    return function.owner is not None and function.owner.name in text_decoders(function.file)


@lru_cache(maxsize=4)
def causal_classes(file: SourceFile) -> frozenset[str]:
    """The names of the classes that claim causality, and of those that only they are made of."""
    return _with_parts(file, {name for name, item in file.classes.items() if _claims_by_itself(item)})


@lru_cache(maxsize=4)
def text_decoders(file: SourceFile) -> frozenset[str]:
    """Classes called decoder, in a file that speaks of a vocabulary and has no convolution of images."""
    speaks_of_text = "Embedding" in file.called_names or any(map(EVIDENCE_OF_TEXT.search, file.names))
    if not speaks_of_text or file.called_names & CONVOLUTIONS:
        return frozenset()
    names = {name for name in file.classes if DECODER_NAME.search(name) and not OTHER_NAME.search(name)}
    return _with_parts(file, names)


def _claims_by_itself(item: Class) -> bool:
    if OTHER_NAME.search(item.name):
        return False
    docstring = ast.get_docstring(item.node) or ""
    says_so = bool(CAUSAL_WORD.search(docstring)) and not OTHER_WORD.search(docstring)
    return bool(CAUSAL_NAME.search(item.name)) or says_so or _sets_is_causal(item)


def _sets_is_causal(item: Class) -> bool:
    return any(
        keyword.arg == "is_causal" and is_constant(keyword.value, True)
        for call in item.calls()
        for keyword in call.keywords
    )


def _with_parts(file: SourceFile, claiming: set[str]) -> frozenset[str]:
    """With the classes of the file that these make or that inherit from them, unless others make them too."""
    makes = {name: _made_classes(item) for name, item in file.classes.items()}
    out = set(claiming)
    for _ in file.classes:  # as deep as classes can be nested in each other
        others = {name for name in file.classes if name not in out}
        new = set()
        for name in others:
            makers = {maker for maker, made in makes.items() if name in made and maker != name}
            bases = {base.id for base in file.classes[name].node.bases if isinstance(base, ast.Name)}
            if OTHER_NAME.search(name) is None and ((makers and makers <= out) or bases & out):
                new.add(name)
        if not new:
            break
        out |= new
    return frozenset(out)


def _made_classes(item: Class) -> frozenset[str]:
    return frozenset(called_name(call) for call in item.calls())
