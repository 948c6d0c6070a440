"""RewardPool: hangs, crashes and nonsense cost one answer; every answer gets one grade; no process stays."""

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unit.rollout.tasks.fakes import BrokenGrader, DyingGrader, ScriptedGrader, SlowStartGrader, prompt

from miles_k3.errors import LaunchError
from miles_k3.rollout.tasks.rewards import RewardPool
from miles_k3.types import Grade

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, or needs RLIMIT_AS")


class FakeTask:
    def __init__(self, grader=None):
        self.grader = grader or ScriptedGrader()


def grade_all(pool, texts, answer=""):
    async def main():
        return await asyncio.gather(*(pool.grade(prompt(answer, str(i)), text) for i, text in enumerate(texts)))

    return asyncio.run(main())


@pytest.fixture(scope="module")
def pool():
    with RewardPool(FakeTask(), workers=2, timeout_s=0.5) as pool:
        yield pool


def alive(pid: float) -> bool:
    stat = Path(f"/proc/{int(pid)}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or between that and the read
        return False


def wait_until_gone(pids, limit_s=10.0):
    end = time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


def test_rewards_and_nonsense(pool):
    keys = ["zero", "half", "int", "none", "nan", "inf", "string", "dict", "huge", "bool"]
    grades = grade_all(pool, [f"value:{key}" for key in keys])
    assert [g.reward for g in grades] == [0.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [g.failure is None for g in grades] == [True, True, True, *[False] * 6, True]


def test_each_answer_is_graded_with_its_own_prompt(pool):
    async def main():
        return await asyncio.gather(*(pool.grade(prompt(str(i)), f"answer:{i % 7}") for i in range(200)))

    assert [g.reward for g in asyncio.run(main())] == [float(str(i) == str(i % 7)) for i in range(200)]


@pytest.mark.parametrize("how", ["hang", "burn"])
def test_a_hang_costs_one_answer(pool, how):
    start = time.monotonic()
    grades = grade_all(pool, ["value:int", how, *["value:half"] * 20])
    assert time.monotonic() - start < 5
    assert grades[1].reward == 0.0
    assert grades[1].failure == "timeout: no reward within 0.5 s"
    assert grades[0] == Grade(reward=1.0)
    assert grades[2:] == [Grade(reward=0.5)] * 20


def test_more_hangs_than_workers(pool):
    grades = grade_all(pool, [*["hang"] * 5, "value:int"])
    assert [g.failure is None for g in grades] == [False] * 5 + [True]


@pytest.mark.parametrize("text", ["exit:0", "exit:7", "sysexit"])
def test_a_dying_worker_costs_one_answer(pool, text):
    grades = grade_all(pool, ["value:int", text, text, "value:int"])
    assert [g.reward for g in grades] == [1.0, 0.0, 0.0, 1.0]
    assert grades[1].failure.startswith("died: the scorer ended its process (exit code")


@linux
def test_exceptions_and_memory_bombs_are_failures(pool):
    grades = grade_all(pool, ["raise", "memory", "value:int"])
    assert grades[0].failure == "exception: RuntimeError: no such unit"
    assert "MemoryError" in grades[1].failure
    assert grades[2].reward == 1.0


@linux
def test_workers_hold_no_torch_and_little_memory(pool):
    import torch  # noqa: F401 so that a forked copy of this process would hold it

    torch_loaded, pid, server, tokens = grade_all(pool, ["torch", "pid", "server", "tokens"])
    assert torch_loaded.reward == 0.0
    assert torch_loaded.failure is None
    assert tokens.reward == 0.0
    for process in (pid, server):
        status = Path(f"/proc/{int(process.reward)}/status").read_text()
        rss_kb = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        assert rss_kb < 80_000


def test_graders_of_both_schemes_import_no_torch():
    code = (
        "import sys, warnings; warnings.simplefilter('error', SyntaxWarning)\n"
        "from miles_k3.rollout.tasks.reasoning_gym import ReasoningGymGrader\n"
        "from miles_k3.rollout.tasks.grading import MathGrader, ExactGrader\n"
        "[g.prepare() for g in (ReasoningGymGrader('chain_sum', {}), MathGrader(), ExactGrader())]\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
    assert result.stderr == ""


def test_scorers_cannot_print_into_the_runs_output():
    code = (
        "import asyncio\n"
        "from unit.rollout.tasks.test_rewards import FakeTask, grade_all\n"
        "from miles_k3.rollout.tasks.rewards import RewardPool\n"
        "with RewardPool(FakeTask(), workers=1, timeout_s=5) as pool: print(grade_all(pool, ['print'])[0].reward)\n"
    )
    result = run_script(code)
    assert result.stdout == "1.0\n"
    assert "printed by a scorer" in result.stderr


def run_script(code, **options):
    env = {**os.environ, "PYTHONPATH": "tests"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, **options)


def test_256_trivial_gradings_are_fast():
    with RewardPool(FakeTask(), workers=1, timeout_s=5) as pool:
        grade_all(pool, ["value:int"])
        seconds = []
        for _ in range(3):
            start = time.monotonic()
            grades = grade_all(pool, ["value:int"] * 256)
            seconds.append(time.monotonic() - start)
            assert grades == [Grade(reward=1.0)] * 256
        assert min(seconds) < 0.3, seconds


def test_large_texts_neither_block_nor_deadlock():
    with RewardPool(FakeTask(SlowStartGrader()), workers=1, timeout_s=5) as pool:

        async def main():
            answer = "x" * 20_000
            start = time.monotonic()
            tasks = [asyncio.create_task(pool.grade(prompt(answer), f"answer:{answer}")) for _ in range(300)]
            await asyncio.sleep(0)
            blocked = time.monotonic() - start
            return blocked, await asyncio.gather(*tasks)

        blocked, grades = asyncio.run(main())
    assert blocked < 0.4  # the workers need 0.5 s to start
    assert grades == [Grade(reward=1.0)] * 300


def test_construction_does_not_wait_for_the_workers():
    start = time.monotonic()
    pool = RewardPool(FakeTask(SlowStartGrader()), workers=1, timeout_s=5)
    assert time.monotonic() - start < 0.3
    assert grade_all(pool, ["value:int"]) == [Grade(reward=1.0)]
    pool.close()


@linux
def test_close_leaves_no_process_even_amid_a_hang():
    pool = RewardPool(FakeTask(), workers=2, timeout_s=60)
    pids = [g.reward for g in grade_all(pool, ["pid"] * 50 + ["server"])]

    async def main():
        hang = asyncio.create_task(pool.grade(prompt(), "hang"))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(pool.close)
        with pytest.raises(LaunchError, match="closed while answers were being graded"):
            await hang
        with pytest.raises(LaunchError, match="the reward pool is closed"):
            await pool.grade(prompt(), "value:int")

    asyncio.run(main())
    pool.close()
    assert wait_until_gone(pids) == []


@linux
def test_a_killed_server_is_replaced_and_nothing_is_lost():
    with RewardPool(FakeTask(), workers=1, timeout_s=60) as pool:
        server, worker = (g.reward for g in grade_all(pool, ["server", "pid"]))
        grades = grade_all(pool, [*["value:int"] * 40, "kill server", *["value:half"] * 100])
        assert wait_until_gone([server, worker]) == []
        assert grades[40].reward == 0.0
        assert grades[40].failure == "died: the grading process ended twice over this answer"
        assert grades[:40] == [Grade(reward=1.0)] * 40
        assert grades[41:] == [Grade(reward=0.5)] * 100


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (BrokenGrader(), "can't be set up in the grading process: ValueError: no word list"),
        (DyingGrader(), "exit code 9"),
    ],
)
def test_a_scorer_that_cannot_start_is_an_error_not_a_hang(grader, message):
    with RewardPool(FakeTask(grader), workers=1, timeout_s=5) as pool:
        with pytest.raises(LaunchError, match=message):
            grade_all(pool, ["value:int"] * 3)
        with pytest.raises(LaunchError, match=message):
            grade_all(pool, ["value:int"])


def test_cancelled_gradings_leave_the_pool_usable():
    with RewardPool(FakeTask(), workers=1, timeout_s=0.5) as pool:

        async def main():
            tasks = [asyncio.create_task(pool.grade(prompt(), text)) for text in ["hang", *["value:int"] * 100]]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True)
            )
            return await pool.grade(prompt(), "value:half")

        assert asyncio.run(main()) == Grade(reward=0.5)
        assert not pool._requests


@linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_an_interrupted_parent(how):
    code = (
        "import asyncio, signal\n"
        "from unit.rollout.tasks.test_rewards import FakeTask, prompt\n"
        "from miles_k3.rollout.tasks.rewards import RewardPool\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job inherits it ignored
        "async def main():\n"
        "    pool = RewardPool(FakeTask(), workers=2, timeout_s=3600)\n"
        "    grades = [await pool.grade(prompt(), t) for t in ('pid', 'server')]\n"
        "    tasks = [asyncio.create_task(pool.grade(prompt(), t)) for t in ('hang', 'burn')]\n"
        "    await asyncio.sleep(0.2)\n"
        "    print(*(int(g.reward) for g in grades), flush=True)\n"
        "    await asyncio.gather(*tasks)\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": "tests"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        server = pids[1]
        pids += map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
        assert len(set(pids)) == 3
        assert all(map(alive, pids))
        parent.send_signal(how)
        try:
            parent.wait(timeout=30)
        except subprocess.TimeoutExpired:
            parent.kill()
            raise
    left = wait_until_gone(pids)
    assert min(pids) > 1
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


def test_graders_are_small_to_send():
    from miles_k3.rollout.tasks.reasoning_gym import ReasoningGymGrader

    grader = ReasoningGymGrader("chain_sum", {"max_terms": 3})
    grader.prepare()
    assert len(pickle.dumps(grader)) < 1000
