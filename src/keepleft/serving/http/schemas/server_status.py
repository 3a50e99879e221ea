"""Schema of GET /explore/server: what the server is doing, for its operator."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from keepleft.serving.http.schemas.responses import HealthStatus


class AddressConnections(BaseModel):
    address: str = Field(description="an IPv4 address, or an IPv6 network of 64 bits")
    open: int


class ConnectionStatus(BaseModel):
    open: int
    limit: int
    limit_per_address: int
    refused: int = Field(description="since the start")
    addresses: int = Field(description="from which connections are open")
    top: list[AddressConnections] = Field(description="the addresses with the most of them")


class QueueStatus(BaseModel):
    running: int = Field(description="requests in the batch")
    running_rows: int = Field(description="their sequences")
    max_rows: int | None = Field(description="sequences at once (max_num_seqs); null for an encoder")
    paused: int = Field(description="requests that gave their rows to others, and keep their pages")
    waiting: int = Field(description="requests that wait for rows or pages")
    oldest_wait: float = Field(description="seconds")
    in_flight: int


class CacheStatus(BaseModel):
    """The KV cache, in pages."""

    page_size: int = Field(description="tokens of a page")
    page_bytes: int
    pages: int
    used: int = Field(description="by requests")
    prefix: int = Field(description="by the prefix cache alone; they are evicted when they are needed")
    prefix_queries: int = Field(description="full pages of prompts since the start")
    prefix_hits: int = Field(description="those of them found in the prefix cache")
    preemptions: int


class LatencyStatus(BaseModel):
    """Time to first token of the requests that ended within the last minutes, in seconds."""

    requests: int
    p50: float | None
    p95: float | None


class WorkStatus(BaseModel):
    """A kind of work beside the engine."""

    name: Literal[
        "questions", "audits", "grammars", "templates", "tokenizing", "preparation", "validation", "responses"
    ]
    running: int
    waiting: int


class TenantStatus(BaseModel):
    """An API key."""

    label: str = Field(description="the first characters of its hash, as in the log; empty without keys")
    operator: bool
    weight: float
    share: float = Field(description="of the rows, among the keys that have requests now; 0 without any")
    users: int = Field(description="with requests now")
    in_flight: int
    running_rows: int
    running: int
    paused: int
    waiting: int
    oldest_wait: float = Field(description="seconds")
    requests: int = Field(description="answered since the start")
    rate_limited: int = Field(description="those of them that were answered with 429")
    prompt_tokens: int = Field(description="computed since the start: not those of the prefix cache")
    generation_tokens: int


class ServerStatus(BaseModel):
    """Counters start with the server, so two answers give what happened between them."""

    status: HealthStatus
    model: str
    version: str
    device: str
    dtype: str
    threads: int
    uptime: float = Field(description="seconds")
    engine_age: float = Field(description="seconds since the engine was asked: long while its step is long")
    steps: int
    step_seconds: float
    failures: int = Field(description="of the engine")
    responses: dict[str, int] = Field(description="by class of their status: 2xx, 4xx, 429, 5xx")
    queue: QueueStatus
    cache: CacheStatus | None = Field(description="null for an encoder")
    time_to_first_token: LatencyStatus
    prompt_tokens: int
    generation_tokens: int
    tenants: list[TenantStatus] = Field(description="those with the most use, the largest first")
    more_tenants: int = Field(description="keys that are not in the list")
    connections: ConnectionStatus | None = Field(description="null where another server accepts them")
    beside_engine: list[WorkStatus]
