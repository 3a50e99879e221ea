"""The explorer's processes: fair, bounded, killed when nobody waits, and gone when the server is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import CancelledError, wait
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch

import keepleft as kl
from keepleft.serving.engine.request import OverloadedError, ShuttingDownError
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.explorer_process import tasks, worker_queue
from keepleft.serving.http.explorer_process.client import MAX_WORKERS, QUESTION_MEMORY, ExplorerProcess
from keepleft.serving.http.explorer_process.worker import ModelSource
from keepleft.serving.http.explorer_process.worker_queue import WorkerError
from keepleft.serving.http.explorer_process.worker_source import ForkServer, SpawnedWorkers
from serving.test_http_serve import LONG, served
from serving.tiny_services import CHAT, client, decoder

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are forked on Linux")
PATIENCE = 60.0  # seconds, on a busy machine


def refuse():
    raise ValueError("the text is empty: give one")


def break_down():
    raise RuntimeError("a bug")


TASKS = {
    "echo": lambda value: value,
    "sleep": lambda seconds: time.sleep(seconds),
    "pid": os.getpid,
    "die": lambda: os._exit(3),
    "tensor": lambda size: int(torch.ones(size, dtype=torch.uint8)[-1]),
    "bytes": lambda size: len(bytes(size)),
    "refuse": refuse,
    "break": break_down,
    "question": lambda question, params, tenant="": (time.sleep(params["seconds"]), os.getpid())[1],
}


@pytest.fixture
def process():
    explorer_process = ExplorerProcess(ForkServer.fork(TASKS), max_waiting=4)
    yield explorer_process
    explorer_process.close()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explored") / "small"
    kl.save(*decoder(chat_template=CHAT)[:2], folder)
    return folder


def ask(process, task, key="", **params):
    return json.loads(process.queue.submit(key, task, params).result(PATIENCE))


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def start_sleeping(process, seconds=600.0, key=""):
    """A task that keeps the worker busy."""
    future = process.queue.submit(key, "sleep", {"seconds": seconds})
    wait_until(lambda: worker_of(process, future) is not None)
    return future


def worker_of(process, future):
    slots = [slot for slot in process.queue.slots if slot.task is not None and slot.task.future is future]
    return slots[0].worker if slots and slots[0].start_time is not None else None


def descendants(pid):
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children += map(int, path.read_text().split())
    return [*children, *(other for child in children for other in descendants(child))]


def test_answers_and_errors_cross_the_process(process):
    assert ask(process, "echo", value={"a": [1, "é", None]}) == {"a": [1, "é", None]}
    assert ask(process, "pid") not in (os.getpid(), process.source.process.pid)
    with pytest.raises(APIError, match="the text is empty") as error:
        ask(process, "refuse")
    assert error.value.status == 400
    with pytest.raises(WorkerError, match="RuntimeError: a bug") as error:
        ask(process, "break")
    assert error.value.where[0] == "RuntimeError"
    assert error.value.where[-1].endswith("break_down")
    links = [os.readlink(path) for path in Path(f"/proc/{ask(process, 'pid')}/fd").iterdir()]
    assert sum(link.startswith("socket:") for link in links) == 1  # its own, and none of this process


def test_a_large_answer_is_refused(monkeypatch):
    monkeypatch.setattr(tasks, "MAX_ANSWER_BYTES", 10)
    assert tasks.run_task(TASKS, "echo", {"value": "12345678"}) == b'"12345678"'
    with pytest.raises(ValueError, match="the answer has 11 bytes, and at most 10 are sent: ask for less"):
        tasks.run_task(TASKS, "echo", {"value": "123456789"})


def test_a_worker_that_dies_is_replaced(process):
    with pytest.raises(APIError, match="ended before it had the answer") as error:
        ask(process, "die")
    assert (error.value.status, error.value.code) == (500, "model_failed")
    pid = ask(process, "pid")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process.queue.slots[0].worker.is_alive())
    assert ask(process, "pid") != pid
    future = start_sleeping(process)
    os.kill(next(iter(descendants(process.source.process.pid))), signal.SIGKILL)
    with pytest.raises(APIError, match="ended before it had the answer"):
        future.result(PATIENCE)
    assert ask(process, "echo", value=1) == 1


def test_a_worker_whose_caller_left_is_free_again(process):
    pid = ask(process, "pid")
    future = start_sleeping(process)
    waiting = process.queue.submit("", "sleep", {"seconds": 600})
    started = time.monotonic()
    assert waiting.cancel()
    assert future.cancel()
    assert ask(process, "pid") != pid
    assert time.monotonic() - started < 5
    quick = process.queue.submit("", "sleep", {"seconds": 0.01})
    pid = process.queue.submit("", "pid", {})
    quick.cancel()
    time.sleep(0.5)
    assert ask(process, "pid") == json.loads(pid.result(PATIENCE))  # what it has cached is kept


def test_a_caller_of_a_route_that_leaves_is_noticed(process):
    async def leave():
        task = asyncio.ensure_future(
            process.run("question", {"question": "beam", "params": {"seconds": 600}}, "")
        )
        while not process.queue.counts()[0]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await process.run("question", {"question": "beam", "params": {"seconds": 0}}, "")

    assert asyncio.run(asyncio.wait_for(leave(), PATIENCE))


def test_another_key_is_next(process):
    process.queue.slots = process.queue.slots[:1]
    blocker = start_sleeping(process, 0.3, "first")
    order = []
    futures = []
    for key, name in (("first", "a"), ("first", "b"), ("first", "c"), ("second", "d"), ("second", "e")):
        futures.append(process.queue.submit(key, "echo", {"value": name}))
        futures[-1].add_done_callback(lambda future: order.append(json.loads(future.result())))
    wait([blocker, *futures], PATIENCE)
    assert order == ["d", "a", "e", "b", "c"]


def test_keys_do_not_wait_for_each_other_and_each_keeps_its_worker(process):
    pids = [ask(process, "pid", key) for key in "abcd"]
    assert len(set(pids)) == MAX_WORKERS
    blockers = [start_sleeping(process, key=key) for key in "abc"]
    own = process.queue.submit("a", "pid", {})
    assert ask(process, "pid", "d") == pids[3]
    assert process.queue.counts() == (3, 1)
    assert not own.done()  # one key has one worker, however much it asks
    for blocker in blockers:
        blocker.cancel()
    own.result(PATIENCE)
    assert ask(process, "pid", "e") in {ask(process, "pid", key) for key in "abcd"} | {pids[3]}


def test_a_task_is_ended_where_other_keys_wait_for_a_worker(process):
    process.queue.hold_seconds = 0.2
    first = start_sleeping(process, key="a")
    others = [start_sleeping(process, key=key) for key in "bcd"]
    again = process.queue.submit("a", "echo", {"value": 1})
    time.sleep(0.5)
    assert not any(future.done() for future in (first, *others, again))  # nobody else waits
    assert ask(process, "echo", "e", value=2) == 2
    with pytest.raises(APIError, match=r"more than 0.2 seconds while other API keys waited") as error:
        first.result(PATIENCE)
    assert (error.value.status, error.value.code) == (503, "ended_for_others")
    assert json.loads(again.result(PATIENCE)) == 1
    assert not any(future.done() for future in others)


def test_a_short_task_is_not_ended_for_others(process):
    process.queue.slots = process.queue.slots[:1]
    process.queue.hold_seconds = 0.5
    futures = [process.queue.submit(key, "sleep", {"seconds": 0.2}) for key in "abcdef"]
    for future in futures:  # for 1.2 seconds somebody waits, and nobody holds the worker for half a second
        assert json.loads(future.result(PATIENCE)) is None


def test_a_task_that_needs_too_much_memory_fails_and_the_server_goes_on(process):
    pid = ask(process, "pid")
    for allocate in ("tensor", "bytes"):
        with pytest.raises(APIError, match=r"needs more memory than the process .* may use") as error:
            ask(process, allocate, size=QUESTION_MEMORY + (64 << 20))
        assert (error.value.status, error.value.code) == (500, "model_failed")
    assert ask(process, "tensor", size=QUESTION_MEMORY // 2) == 1
    assert ask(process, "pid") != pid  # what it had kept is gone


def test_waiting_tasks_are_bounded(process, monkeypatch):
    process.queue.slots = process.queue.slots[:1]
    blocker = start_sleeping(process)
    waiting = [process.queue.submit("first", "echo", {"value": 1}) for _ in range(4)]
    with pytest.raises(OverloadedError, match="4 questions of yours wait already"):
        process.queue.submit("first", "echo", {"value": 1})
    waiting.append(process.queue.submit("second", "echo", {"value": 1}))
    monkeypatch.setattr(worker_queue, "MAX_WAITING", 5)
    with pytest.raises(OverloadedError):
        process.queue.submit("third", "echo", {"value": 1})
    blocker.cancel()
    wait(waiting, PATIENCE)
    assert ask(process, "echo", "first", value=2) == 2


def test_an_audit_has_its_own_worker(process):
    question = {"question": "beam", "params": {"seconds": 600}}
    audit = {"question": "audit", "params": {"seconds": 0}}

    async def both():
        first = asyncio.ensure_future(process.run("question", question, ""))
        pid = await process.run("question", audit, "")
        assert not first.done()
        first.cancel()
        slow_poll = asyncio.ensure_future(
            process.run("question", {"question": "audit", "params": {"seconds": 0.5}}, "")
        )
        await asyncio.sleep(0.1)
        slow_poll.cancel()
        await asyncio.wait([first, slow_poll])
        return pid, await process.run("question", audit, "")

    pid, pid_later = asyncio.run(asyncio.wait_for(both(), PATIENCE))
    assert pid == pid_later


def test_nothing_is_left_after_close():
    process = ExplorerProcess(ForkServer.fork(TASKS), max_waiting=4)
    asyncio.run(process.run("question", {"question": "audit", "params": {"seconds": 0}}, ""))
    running = start_sleeping(process)
    waiting = process.queue.submit("", "echo", {"value": 1})
    fork_server = process.source.process.pid
    pids = [fork_server, *descendants(fork_server)]
    assert len(pids) == 3
    assert not process.drain(0.05)
    process.close()
    process.close()
    for future in (running, waiting):
        with pytest.raises((ShuttingDownError, CancelledError)):
            future.result(0)
    # a zombie of ours would still be there; the system may need a moment for those of the fork server
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    with pytest.raises(ShuttingDownError):
        process.queue.submit("", "echo", {"value": 1})


def test_a_forked_explorer_answers_as_the_one_here(model_folder):
    loaded = decoder()
    explorer = Explorer(loaded.model, loaded.tokenizer, name="tiny")
    model_tasks = tasks.make_tasks(loaded.model, explorer)
    process = ExplorerProcess(ForkServer.fork(model_tasks), max_waiting=4)
    params = {"text": "the sea", "num_beams": 2, "max_new_tokens": 4}
    maps = {"tokens": [5, 6, 7], "source": None, "layers": ["decoder.0.self"], "heads": [1]}
    with client(loaded, explorer=explorer) as here:
        here.service.explorer_process = process  # drained with the service
        answer = here.post("/explore/beam", json=params)
        assert answer.headers["content-type"] == "application/json"
        there = answer.json()
        assert here.post("/v1/attention", json={"input": "the sea"}).json()["maps"]
        assert here.post("/explore/beam", json={}).json()["error"]["message"].startswith("beam needs")
        assert ask(process, "attention_maps", **maps) == model_tasks["attention_maps"](**maps)
    expected = explorer.ask("beam", params)
    assert there["best"]["tokens"] == expected["best"]["tokens"]
    assert there["best"]["score"] == pytest.approx(expected["best"]["score"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("start", [ForkServer, SpawnedWorkers])
def test_where_the_server_cannot_be_forked_the_model_is_loaded_again(start, model_folder):
    others = set(descendants(os.getpid()))  # of tests before this one
    process = ExplorerProcess(start(ModelSource(str(model_folder), "float32", "again")), max_waiting=4)
    try:
        info = ask(process, "question", question="model_info", params={})
        assert info["name"] == "again"
        with pytest.raises(APIError, match="beam needs"):
            ask(process, "question", question="beam", params={})
        pids = set(descendants(os.getpid())) - others
        if start is ForkServer:  # one that dies is started again
            process.source.process.kill()
            process.queue.slots[0].worker.kill()
            assert ask(process, "question", question="model_info", params={}) == info
    finally:
        process.close()
    wait_until(lambda: not pids & set(descendants(os.getpid())))


def test_a_question_does_not_hold_up_a_stream(model_folder):
    params = {"text": "the sea", "num_beams": 16, "max_new_tokens": 48}
    with served(model_folder) as (address, process, _):
        times = []
        ended = threading.Event()

        def stream():
            body = {**LONG, "max_tokens": 4000}
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE) as answer:
                for line in answer.iter_lines():
                    if line:
                        times.append(time.monotonic())
                    if ended.is_set():
                        break

        thread = threading.Thread(target=stream)
        thread.start()
        wait_until(lambda: len(times) > 2 or not thread.is_alive())
        started = time.monotonic()
        assert httpx.post(f"{address}/explore/beam", json=params, timeout=PATIENCE).status_code == 200
        finished = time.monotonic()
        ended.set()
        thread.join(PATIENCE)
        times = [started, *(moment for moment in times if started < moment < finished), finished]
        gaps = [after - before for before, after in pairwise(times)]
        assert len(gaps) >= 5
        assert max(gaps) < (finished - started) / 3
        pids = descendants(process.pid)
        assert len(pids) >= 2
        process.kill()
        process.wait(PATIENCE)
        wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
