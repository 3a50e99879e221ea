"""The limits of a request and of the server, in one table."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A request above one of these is rejected before any work is done for it.

    Args:
        body: bytes of a request body
        headers: bytes of the headers
        body_memory: bytes of the bodies of all requests together, of which one API key may hold no more than
            it leaves free; more get 503
        chunks: chunks of a body with Transfer-Encoding: chunked
        elements: values and names of fields in the JSON body, counted before it is parsed
        containers: lists and objects in it, counted before it is parsed
        keys: fields of one object
        depth: nesting of lists and objects
        prompts: prompts in one request
        choices: choices in one response, over all prompts
        n: choices for one prompt (n, best_of, num_return_sequences)
        beams: beams of a beam search (num_beams)
        new_tokens: tokens to generate (max_tokens)
        context: tokens of prompt and output together, for a model without a maximum of its own
        characters: characters of one text
        logprobs: top logprobs of each token
        reported_logprobs: logprobs in one response: for each token of each choice (of an echoed prompt too)
            its own and the top logprobs; for each token of a scored text one
        stop_strings: stop strings of one request
        stop_characters: characters of one stop string
        tokens: entries of logit_bias and of token lists (suppress_tokens, bad_words_ids, …), and their rows
        messages: messages of one chat
        grammar: characters of a regular expression, a JSON schema or a grammar
        grammar_seconds: seconds to compile a grammar
        template_seconds: seconds to render a chat template
        tokenize_seconds: seconds to encode texts with a tokenizer that may take long
        inputs: texts in one request to embeddings, classify, score or translate
        cells: numbers in the attention maps of one response
        user: characters of the field user
        seconds: seconds for a request from start to end
        requests: prompts of one API key in flight; more get 429
        texts: texts of one API key in flight that need no generation (embeddings, labels, scores)
        questions: explorer questions and attention maps of one API key that wait; more get 429
        connections: open connections; more get 503
        connections_per_address: open connections from one address (IPv6: one /64 network); more get 503
        header_seconds: seconds for a client to send its headers
        body_seconds: seconds for a client to send its body
        write_seconds: seconds for a client to receive what was sent
        idle_seconds: seconds that a connection may stay open between two requests
        step_seconds: seconds that one step of the engine may take; GET /health/live fails beyond them
    """

    body: int = 4 << 20
    headers: int = 16 << 10
    body_memory: int = 256 << 20
    chunks: int = 16_384
    elements: int = 262_144
    containers: int = 8192
    keys: int = 4096
    depth: int = 32
    prompts: int = 64
    choices: int = 128
    n: int = 16
    beams: int = 16
    new_tokens: int = 4096
    context: int = 8192
    characters: int = 400_000
    logprobs: int = 20
    reported_logprobs: int = 262_144
    stop_strings: int = 8
    stop_characters: int = 256
    tokens: int = 1024
    messages: int = 1024
    grammar: int = 65_536
    grammar_seconds: float = 3.0
    template_seconds: float = 2.0
    tokenize_seconds: float = 2.0
    inputs: int = 256
    cells: int = 262_144
    user: int = 256
    seconds: float = 600.0
    requests: int = 256
    texts: int = 4096
    questions: int = 32
    connections: int = 1024
    connections_per_address: int = 512
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    idle_seconds: float = 10.0
    step_seconds: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"the limit {field.name} is {value!r}: it must be above 0")
