"""The reward function as verl calls it: signature, data sources, shaping, pickling, threads, coroutines."""

from __future__ import annotations

import asyncio
import logging
import pickle

import pytest

import reward
from reward import check_gold, compute_score, compute_score_async, overlong_penalty
from reward.verl import task_of


def test_result_has_what_verl_logs():
    result = compute_score("tiny_sum", r"so \boxed{5}", "5", {"num_turns": None}, reward_router_address=None)
    assert result == {
        "score": 1.0, "acc": 1.0, "pred": "5", "status": "correct", "rule": "text (unknown data_source, read as math)",
    }  # fmt: skip
    assert compute_score("HuggingFaceH4/MATH-500", "no idea", "5")["pred"] == ""


@pytest.mark.parametrize(
    ("source", "task"),
    [
        ("HuggingFaceH4/aime_2024", "aime"), ("aime2025", "aime"), ("math_dapo", "math"), ("openai/gsm8k", "gsm8k"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"), ("HuggingFaceH4/MATH-500", "math"), ("AMC2023", "math"),
        ("minerva_math", "math"), ("CollegeMath", "math"), ("BytedTsinghua-SIA/DAPO-Math-17k", "math"),
    ],
)  # fmt: skip
def test_known_sources(source, task):
    assert task_of(source) == (task, True)


def test_an_unknown_source_is_said_once(caplog):
    task_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert task_of("chess_puzzles") == ("math", False)
    assert len(caplog.records) == 1 and "chess_puzzles" in caplog.text


def test_the_task_decides_how_answers_are_read():
    assert compute_score("aime", r"\boxed{016}", "16")["score"] == 1.0
    assert compute_score("aime", r"\boxed{2^4}", "16")["score"] == 0.0
    assert compute_score("math", r"\boxed{2^4}", "16")["score"] == 1.0
    assert compute_score("gsm8k", "\\boxed{3}\n#### 1,000", "1000")["score"] == 1.0
    assert compute_score("quiz", "Answer: (b)", "B", task="choice")["score"] == 1.0
    with pytest.raises(ValueError, match="task='quizz'"):
        compute_score("quiz", "", "B", task="quizz")  # type: ignore[arg-type]


def test_dapo_rewards_are_by_configuration():
    assert [compute_score("math", rf"\boxed{{{x}}}", "5", negative=True)["score"] for x in (5, 6)] == [1.0, -1.0]
    shaped = compute_score(
        "math", r"\boxed{5}", "5", {"response_length": 5120}, overlong={"max_length": 8192, "buffer": 4096}
    )
    assert shaped["score"] == 0.75 and shaped["acc"] == 1.0
    with pytest.raises(ValueError, match="response_length"):
        compute_score("math", r"\boxed{5}", "5", overlong={"max_length": 8192, "buffer": 4096})
    with pytest.raises(ValueError, match="needs max_length and buffer"):
        compute_score("math", "", "5", {"response_length": 1}, overlong={"max_len": 8192})


@pytest.mark.parametrize(("length", "penalty"), [(4000, 0.0), (4096, 0.0), (5120, -0.25), (8192, -1.0), (9000, -1.0)])
def test_overlong_penalty_by_hand(length, penalty):
    assert overlong_penalty(length, max_length=8192, buffer=4096) == penalty


def test_overlong_penalty_refuses_a_bad_buffer():
    with pytest.raises(ValueError, match="buffer=0"):
        overlong_penalty(1, max_length=10, buffer=0)


def test_functions_can_be_pickled():
    for function in (compute_score, compute_score_async):
        assert pickle.loads(pickle.dumps(function)) is function


def test_coroutine_agrees_with_the_function():
    async def both() -> list[dict]:
        loop = asyncio.get_running_loop()
        calls = [compute_score_async("math", rf"\boxed{{{i}}}", "5") for i in range(50)]
        threads = [loop.run_in_executor(None, compute_score, "math", rf"\boxed{{{i}}}", "5") for i in range(50)]
        return [*await asyncio.gather(*calls), *await asyncio.gather(*threads)]

    results = asyncio.run(both())
    assert results[:50] == results[50:] and sum(r["score"] for r in results) == 2.0


def test_verl_loads_it_from_the_package():
    verl_import = pytest.importorskip("verl.utils.import_utils")
    assert verl_import.load_extern_object("pkg://reward", "compute_score") is compute_score
    assert verl_import.load_extern_object("pkg://reward.verl", "compute_score") is compute_score


@pytest.mark.slow
def test_inside_a_ray_actor():
    ray = pytest.importorskip("ray")

    @ray.remote
    class Worker:
        async def crowd(self) -> list[float]:
            loop = asyncio.get_running_loop()
            bombs = [(r"\boxed{10^{10^{10}}}", "7"), ("Answer: 9**9**9**9", "7")] * 25
            items = [(rf"\boxed{{\frac{{{2 * i}}}{{14}}}}", rf"\frac{{{i}}}{{7}}") for i in range(1, 451)] + bombs
            calls = [loop.run_in_executor(None, compute_score, "math", output, gold) for output, gold in items]
            return [result["score"] for result in await asyncio.gather(*calls)]

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": "."}})
    try:
        scores = ray.get(Worker.remote().crowd.remote(), timeout=120)
    finally:
        ray.shutdown()
    assert scores == [1.0] * 450 + [0.0] * 50


@pytest.mark.parametrize(
    ("gold", "task"),
    [("", "math"), (r"\boxed{}", "math"), ("...", "math"), (r"\frac{1}{", "math"), ("1000", "aime"), ("3/2", "aime"),
     ("eleven", "gsm8k"), ("42", "choice")],
)  # fmt: skip
def test_check_gold_refuses_what_nothing_can_match(gold, task):
    with pytest.raises(ValueError, match="check_gold: gold="):
        check_gold(gold, task)


@pytest.mark.parametrize(
    ("gold", "task"),
    [("42", "math"), (r"\frac{1}{2}", "math"), (r"\text{Evelyn}", "math"), ("033", "aime"), ("1,000", "gsm8k"),
     (r"\text{(C)}", "choice"), (r"2\sqrt{3}\text{ cm}", "math"), ("x = 5, y = 7", "math")],
)  # fmt: skip
def test_check_gold_accepts(gold, task):
    check_gold(gold, task)


def test_public_names():
    assert {"verify", "score", "extract", "Verdict", "verify_many", "compute_score", "check_gold"} <= set(
        reward.__all__
    )
    assert all(hasattr(reward, name) for name in reward.__all__)
