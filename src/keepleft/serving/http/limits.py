"""The most of everything that a caller may ask for, in one table."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is above one of these is refused before any work is done for it.

    Args:
        body: bytes of one request
        headers: bytes of its headers
        depth: lists and objects within one another in its JSON
        prompts: prompts in one request
        choices: choices in one answer, over all prompts
        n: choices for one prompt (n, best_of, num_return_sequences)
        beams: num_beams
        new_tokens: max_tokens
        context: tokens of prompt and text together, where the model itself has no end
        characters: of one text
        logprobs: likely tokens that are told beside each token
        stop_strings: stop strings
        stop_characters: of one stop string
        tokens: entries of logit_bias and of lists of tokens (suppress_tokens, bad_words_ids and their like)
        messages: messages of one chat
        grammar: characters of a regular expression, a JSON schema or a grammar
        grammar_seconds: that its compilation may take
        template_seconds: that a chat template may take
        inputs: texts in one request to embeddings, classify, score or translate
        batch_tokens: tokens, padding included, that are read together for embeddings and labels
        cells: numbers in the attention maps of one answer
        user: characters of the field user
        seconds: that a request may take from beginning to end
        requests: requests on their way at once; more are told to come again (429)
        tasks: questions besides writing that wait at once
        connections: open connections; more are told to come again (503)
        header_seconds: for a client to send its headers
        body_seconds: for a client to send its body
        write_seconds: for a client to take what was sent to it
        idle_seconds: that a connection may stay open between two requests
    """

    body: int = 4 << 20
    headers: int = 16 << 10
    depth: int = 32
    prompts: int = 64
    choices: int = 128
    n: int = 16
    beams: int = 16
    new_tokens: int = 4096
    context: int = 8192
    characters: int = 400_000
    logprobs: int = 20
    stop_strings: int = 8
    stop_characters: int = 256
    tokens: int = 1024
    messages: int = 1024
    grammar: int = 65_536
    grammar_seconds: float = 3.0
    template_seconds: float = 2.0
    inputs: int = 256
    batch_tokens: int = 16_384
    cells: int = 262_144
    user: int = 256
    seconds: float = 600.0
    requests: int = 256
    tasks: int = 64
    connections: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    idle_seconds: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"the limit {field.name} is {value!r}: it must be above 0")
