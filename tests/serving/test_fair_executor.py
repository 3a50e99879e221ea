"""Threads that API keys share: in turns, and nobody waits for another's queue."""

from __future__ import annotations

import asyncio
import threading

import pytest

from keepleft.serving.engine.request import OverloadedError, ShuttingDownError, Tenant
from keepleft.serving.http.fair_executor import FairExecutor
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware import admission
from serving.test_http_misbehaving_clients import LONG, connect, request, wait_until
from serving.tiny_services import Slow, decoder, running

LOUD, QUIET = Tenant("loud"), Tenant("quiet")


@pytest.fixture
def executor():
    executor = FairExecutor(1, "test", max_waiting=20)
    yield executor
    executor.shutdown()


def test_results_and_errors_come_back(executor):
    assert asyncio.run(executor.run(LOUD, lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(executor.run(LOUD, lambda: 1 // 0))


def test_a_panic_which_is_no_exception_comes_back_as_one(executor):
    class PanicException(BaseException):
        pass

    def fail():
        raise PanicException("index out of bounds")

    with pytest.raises(RuntimeError, match="PanicException: index out of bounds"):
        asyncio.run(executor.run(LOUD, fail))
    assert asyncio.run(executor.run(LOUD, lambda: 7)) == 7


def test_a_quiet_key_is_next_whatever_waits(executor):
    release = threading.Event()
    order = []
    executor.submit(LOUD, release.wait)
    wait_until(lambda: not len(executor.waiting))
    futures = [executor.submit(LOUD, lambda n=n: order.append(n)) for n in range(20)]
    futures.append(executor.submit(QUIET, lambda: order.append("quiet")))
    release.set()
    for future in futures:
        future.result(30)
    assert order.index("quiet") <= 1
    with executor.condition:
        assert not executor.num_waiting


def test_too_many_of_one_key_are_refused(executor):
    release = threading.Event()
    executor.submit(LOUD, release.wait)
    wait_until(lambda: not len(executor.waiting))
    futures = [executor.submit(LOUD, lambda: None) for _ in range(20)]
    with pytest.raises(OverloadedError, match="20 requests of yours wait"):
        executor.submit(LOUD, lambda: None)
    futures.append(executor.submit(QUIET, lambda: None))
    futures[3].cancel()
    release.set()
    assert [future.cancelled() or future.result(30) for future in futures].count(True) == 1


def test_what_waits_at_the_end_fails_and_nothing_more_is_accepted(executor):
    release = threading.Event()
    running_call = executor.submit(LOUD, release.wait)
    wait_until(lambda: not len(executor.waiting))
    waiting, cancelled = (executor.submit(LOUD, lambda: None) for _ in range(2))
    cancelled.cancel()
    executor.shutdown()
    with pytest.raises(ShuttingDownError):
        waiting.result(30)
    with pytest.raises(ShuttingDownError):
        executor.submit(QUIET, lambda: None)
    release.set()
    assert running_call.result(30)


def test_requests_of_one_key_too_many_are_refused_before_their_body_is_read(monkeypatch):
    monkeypatch.setattr(admission, "REFUSAL_SECONDS", 0.1)
    with running(decoder(), Slow, limits=Limits(requests=2)) as (port, service, _):
        with connect(port) as first, connect(port) as second, connect(port) as third:
            for connection in (first, second):
                connection.sendall(request(LONG))
            wait_until(lambda: len(service.engine_thread.in_flight) == 2)
            third.sendall(request({**LONG})[:-10])  # its body never comes
            answer = third.recv(65536)
            assert answer.startswith(b"HTTP/1.1 429")
            assert b"2 requests of yours are being answered already" in answer + third.recv(65536)
        wait_until(lambda: not service.engine_thread.in_flight)
