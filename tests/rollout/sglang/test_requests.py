import asyncio
import pickle

import pytest
import zmq
import zmq.asyncio

from megarl.rollout.sglang.requests import BatchingSocket

MANY, TIMES = 64, 30


@pytest.fixture
def ends(tmp_path):
    """The two ends of a socket like SGLang's: the sender of requests, and the scheduler's end."""
    context, here = zmq.asyncio.Context(), zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), here.socket(zmq.PULL)
    receiver.bind(f"ipc://{tmp_path}/socket")
    sender.connect(f"ipc://{tmp_path}/socket")
    yield sender, receiver
    context.destroy(linger=0)
    here.destroy(linger=0)


def all_there(receiver):
    """All messages that can be received without waiting, once there is one."""
    assert receiver.poll(10_000)
    found = []
    while True:
        try:
            found.append(receiver.recv(zmq.NOBLOCK))
        except zmq.Again:
            return found


def test_what_ready_tasks_send_comes_at_once(ends):
    sender, receiver = ends
    messages = [bytes([number]) * 4096 for number in range(MANY)]

    async def send_all():
        together = BatchingSocket(sender, asyncio.get_running_loop())

        async def send(message):
            await together.send(message)

        loop = asyncio.get_running_loop()
        looked = loop.run_in_executor(None, all_there, receiver)  # the receiver waits already
        await asyncio.sleep(0.01)
        await asyncio.gather(*(send(message) for message in messages))
        return await looked

    for _ in range(TIMES):
        assert asyncio.run(send_all()) == messages


def test_an_object_is_sent_as_it_was(ends):
    sender, receiver = ends

    async def send_then_change():
        together, thing = BatchingSocket(sender, asyncio.get_running_loop()), {"rid": "a"}
        sent = together.send_pyobj(thing)
        thing["rid"] = None
        await sent
        await asyncio.sleep(0)

    asyncio.run(send_then_change())
    assert [pickle.loads(message) for message in all_there(receiver)] == [{"rid": "a"}]


def test_nothing_waits_while_no_task_runs(ends):
    """Nor does a message wait that was sent a moment before the loop stopped."""
    sender, receiver = ends

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        asyncio.set_event_loop(loop)
        failed = []
        loop.set_exception_handler(lambda loop, context: failed.append(context))
        together = BatchingSocket(sender, loop)
        loop.call_soon(loop.stop)
        loop.call_soon(together.send, b"request")
        loop.run_forever()
        together.send(b"abort")
        assert all_there(receiver) == [b"request", b"abort"]
        runner.run(asyncio.sleep(0))  # the callback that the first message scheduled finds nothing to send
        assert not failed
