from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny
import tune_tiny
from tiny_world import words
from tiny_world.models import MODEL_KINDS, build_model
from tiny_world.problems import TASKS, Problem, draw_problem, draw_solution, split_problems
from tiny_world.sampling import generate, is_correct
from tiny_world.tokenizer import BOXED, VOCAB_SIZE, build_tokenizer, encode_prompt, encode_response
from tiny_world.warm_start import WarmStart, stack
from tiny_world.world import TASK_SETTINGS, TaskSettings, splits

from reward import compute_score

REPOSITORY = Path(__file__).parents[2]
TOKENIZER = build_tokenizer()
FEW_STEPS = WarmStart(skill_steps=2, slip_steps=1, correct_share=0.5, batch_size=4)
SMALL = {
    "sum": TaskSettings(
        num_warm=40, num_train=20, num_test=8, max_tokens=8, warm={"qwen3": FEW_STEPS, "qwen3_moe": FEW_STEPS}
    )
}
SPLIT_SIZES = {"test": 50, "train": 200, "warm": 200}


def build_small(root: Path, *, seed: int = 0, jobs: int = 1) -> None:
    make_tiny.build(root, make_tiny.parts_of(["sum"], ["qwen3", "qwen3_moe"], seed, SMALL), jobs)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("worlds") / "world"
    root.mkdir()
    build_small(root)
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Every file of the world's parts; the manifest has dates."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.glob("*/*")) if p.is_file()}


# Tokenizer


def test_vocabulary_is_exactly_the_tokenizer():
    assert len(TOKENIZER) == VOCAB_SIZE >= 512
    assert {TOKENIZER.pad_token_id, TOKENIZER.eos_token_id} == {0, 2}


def test_short_answers_are_few_tokens():
    ids = encode_response(TOKENIZER, "\\boxed{83}")
    assert TOKENIZER.convert_ids_to_tokens(ids) == [BOXED, "8", "3", "}", "<|im_end|>"]


@pytest.mark.parametrize("word", words.WORDS)
def test_every_word_is_one_token_with_and_without_a_space(word):
    assert len(TOKENIZER.encode(word)) == len(TOKENIZER.encode(" " + word)) == 1


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_chat_template_and_generation_prompt():
    chat = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    text = "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False) == text
    assert TOKENIZER.apply_chat_template(chat, tokenize=False) == text + "3<|im_end|>\n"
    assert encode_prompt(TOKENIZER, "1+2") == TOKENIZER.encode(text)


# Problems


def test_a_slip_is_carried_along():
    problem = Problem("chain", 28, (-5, 3, -5, 3))
    assert problem.answer == 24
    assert problem.question == "28+(-5+3)*2"
    assert problem.solution() == "a=28\nb-5=23\nc+3=26\nd-5=21\ne+3=24\n\\boxed{24}"
    assert problem.solution(slip=1, error=-10) == "a=28\nb-5=23\nc+3=16\nd-5=11\ne+3=14\n\\boxed{14}"


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), num_steps=st.integers(1, 14))
def test_the_beginning_of_a_problem_is_a_problem_with_its_key(seed, num_steps):
    chain, worded = (draw_problem(task, random.Random(seed)) for task in ("chain", "worded"))
    short = chain.prefix(num_steps)
    assert len(short.deltas) % 2 == 0 and short.key == chain.key
    assert worded.prefix(1).question.count(".") == 2 and worded.prefix(len(worded.deltas)) == worded


def test_worded_problems_have_verbs_nouns_and_prepositions():
    problem = Problem("worded", 20, (3, -4), ("Tom", "apples", "buys {} at the shop", "gives {} to Anna"))
    assert problem.question == (
        "Tom has 20 apples. Tom buys 3 at the shop. Tom gives 4 to Anna. How many apples are left?"
    )
    assert problem.solution().endswith("so 20+3=23. Tom gives 4 to Anna, so 23-4=19. The answer is \\boxed{19}.")


@settings(deadline=None)
@given(task=st.sampled_from(TASKS), seed=st.integers(0, 2**31))
def test_right_solutions_score_one_and_slips_zero(task, seed):
    rng = random.Random(seed)
    problem = draw_problem(task, rng)
    for share, score in ((1.0, 1.0), (0.0, 0.0)):
        text = draw_solution(problem, share, rng)
        assert is_correct(text, problem.answer) == bool(score)
        assert compute_score(f"tiny/{task}", text, str(problem.answer))["score"] == score


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.0, 1.0]))
def test_chains_take_40_to_256_tokens_and_fit_their_limits(seed, share):
    rng = random.Random(seed)
    for task in TASKS:
        length = len(encode_response(TOKENIZER, draw_solution(draw_problem(task, rng), share, rng)))
        assert length <= TASK_SETTINGS[task].max_tokens
        if task == "chain":
            assert 40 <= length <= 256


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_also_in_mirror_image_and_repeatable(task):
    splits = split_problems(task, SPLIT_SIZES, seed=3)
    assert {name: len(problems) for name, problems in splits.items()} == SPLIT_SIZES
    problems = [problem for split in splits.values() for problem in split]
    assert (
        len({problem.key for problem in problems}) == len({p.question for p in problems}) == sum(SPLIT_SIZES.values())
    )
    if task == "sum":
        unordered = {frozenset((p.start, p.deltas[0])) for p in problems}
        assert len(unordered) == len(problems)
    assert split_problems(task, SPLIT_SIZES, seed=3) == splits != split_problems(task, SPLIT_SIZES, seed=4)


def test_the_real_splits_have_thousands_of_distinct_problems():
    for task, sizes in TASK_SETTINGS.items():
        assert sizes.num_train >= 2000, task
        problems = [problem for split in splits(task, sizes, seed=0).values() for problem in split]
        assert len({problem.key for problem in problems}) == len(problems)
    with pytest.raises(ValueError, match="task sum has too few distinct problems"):
        split_problems("sum", {"test": 1, "train": 4095}, seed=0)


# Models, sampling and training


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_model_sizes_suit_the_engines(kind):
    model = build_model(kind, 0, pad_token_id=0, eos_token_id=2)
    config = model.config
    sizes = [config.hidden_size, config.intermediate_size, getattr(config, "moe_intermediate_size", 32)]
    assert all(size % 32 == 0 for size in sizes)
    assert config.vocab_size == model.get_output_embeddings().weight.shape[0] == len(TOKENIZER)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_generation_with_cache_and_padding_equals_one_prompt_at_a_time():
    model = build_model("qwen3", 1, pad_token_id=0, eos_token_id=2).eval()
    prompts = [encode_prompt(TOKENIZER, question) for question in ("1+2", "43+38", "a28b-5c+9")]
    together = generate(model, TOKENIZER, prompts, max_tokens=6, temperature=0.0)
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert together.response_ids_BT[row].tolist() == ids[len(prompt) :]


def test_responses_end_with_the_end_of_turn():
    model = build_model("qwen3", 1, pad_token_id=0, eos_token_id=2).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # every token is equally likely
    prompts = [encode_prompt(TOKENIZER, "1+2")] * 64
    found = generate(model, TOKENIZER, prompts, max_tokens=400, generator=torch.Generator().manual_seed(0))
    lengths_B = found.response_mask_BT.sum(1)
    ended_B = (found.response_ids_BT == TOKENIZER.eos_token_id).any(1)
    last_B = found.response_ids_BT.gather(1, (lengths_B - 1)[:, None])[:, 0]
    assert 0 < ended_B.sum() < 64
    assert (last_B[ended_B] == TOKENIZER.eos_token_id).all()
    assert (found.response_ids_BT[~found.response_mask_BT] == TOKENIZER.pad_token_id).all()


def test_labels_cover_the_response_only():
    ids, labels = stack([([5, 6], [7, 2]), ([5], [8])], pad_token_id=0)
    assert ids.tolist() == [[5, 6, 7, 2], [5, 8, 0, 0]]
    assert labels.tolist() == [[-100, -100, 7, 2], [-100, 8, -100, -100]]


# The world on disk


def test_same_seed_same_world_also_in_processes(world, tmp_path):
    build_small(tmp_path, jobs=2)
    assert contents(tmp_path) == contents(world)


def test_another_seed_is_another_world(world, tmp_path):
    build_small(tmp_path, seed=1)
    ours, theirs = contents(tmp_path), contents(world)
    assert {name for name in ours if ours[name] != theirs[name]} >= {
        "sum/train.parquet",
        "sum/test.parquet",
        "qwen3_sum/model.safetensors",
        "qwen3_moe_sum/model.safetensors",
    }


def test_what_is_complete_is_kept_and_what_is_not_is_made_again(world, tmp_path, capsys):
    root = tmp_path / "world"
    shutil.copytree(world, root)
    build_small(root)
    assert capsys.readouterr().out.count("kept") == 3
    (root / "qwen3_sum" / "model.safetensors").write_bytes(b"cut short")
    (root / "sum" / "test.parquet").unlink()
    build_small(root)
    out = capsys.readouterr().out
    assert out.count("kept") == 1 and "qwen3_sum        done" in out and "sum              done" in out
    assert contents(root) == contents(world)


def test_a_build_that_was_killed_leaves_nothing_that_looks_complete(world, tmp_path):
    root = tmp_path / "world"
    root.mkdir()
    # What is on disk when the process dies between the end of a part and its entry in the manifest.
    shutil.copytree(world / "qwen3_sum", root / "qwen3_sum")
    (root / ".qwen3_moe_sum.partial").mkdir()
    parts = make_tiny.parts_of(["sum"], ["qwen3", "qwen3_moe"], 0, SMALL)
    assert not any(make_tiny.is_complete(root, part.name, part.identity) for part in parts)
    build_small(root)
    assert contents(root) == contents(world)
    assert not list(root.glob(".*.partial"))


def test_a_killed_build_leaves_no_process_and_is_taken_up_again(tmp_path):
    # The settings of the real world: workers are busy for longer than this test lives.
    script = REPOSITORY / "tools" / "make_tiny.py"
    process = subprocess.Popen(
        [sys.executable, str(script), "--out", str(tmp_path), "--jobs", "2"], stdout=subprocess.PIPE, text=True
    )
    children = [psutil.Process(process.pid)]
    try:
        assert process.stdout is not None and "step" in process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
    finally:
        process.kill()
        for child in children:
            if child.is_running():
                child.kill()
    assert not (tmp_path / "manifest.json").exists() or "qwen3" not in (tmp_path / "manifest.json").read_text()
    build_small(tmp_path)
    assert not list(tmp_path.glob(".*.partial"))


def test_models_load_with_their_tokenizer(world):
    for kind in MODEL_KINDS:
        folder = world / f"{kind}_sum"
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        assert len(tokenizer) == model.config.vocab_size == VOCAB_SIZE
        assert tokenizer.chat_template == TOKENIZER.chat_template
        assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert model.config.pad_token_id == tokenizer.pad_token_id


def test_verl_reads_the_problems(world):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create({"max_prompt_length": 16, "filter_overlong_prompts": True, "truncation": "error"})
    path = world / "sum" / "train.parquet"
    dataset = RLHFDataset([str(path)], TOKENIZER, config)
    assert len(dataset) == pq.read_metadata(path).num_rows == SMALL["sum"].num_train
    row = dataset[3]
    first, second = row["raw_prompt"][0]["content"].split("+")
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(int(first) + int(second))}
    assert (row["data_source"], row["ability"], row["index"]) == ("tiny/sum", "math", 3)
    assert row["extra_info"]["split"] == "train"


def test_a_foreign_manifest_is_refused(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text("[]")
    assert make_tiny.main(["--out", str(tmp_path)]) == 1
    assert "is not a manifest of the tiny world" in capsys.readouterr().err


def test_a_sampled_accuracy_out_of_range_is_said(world):
    parts = make_tiny.parts_of(["sum"], ["qwen3"], 0, SMALL)
    assert "outside 0.30 to 0.50" in make_tiny.report(world, parts)


# The plain loop


def test_the_list_always_has_the_sampled_token():
    logp_BTV = torch.log_softmax(torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0)), -1)
    sampled_BT = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, 0, 1, 2]])
    anchor = tune_tiny.listed(logp_BTV, sampled_BT, 3)
    assert (anchor.ids_BTK.gather(-1, anchor.sampled_index_BT[..., None])[..., 0] == sampled_BT).all()
    torch.testing.assert_close(anchor.logp_BTK, logp_BTV.gather(-1, anchor.ids_BTK))


def test_group_advantages_by_hand():
    reward_B = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    by_std = tune_tiny.group_advantages(reward_B, 8, True)
    plain = tune_tiny.group_advantages(reward_B, 8, False)
    torch.testing.assert_close(by_std[:2], torch.tensor([1.620182, -0.540061]), atol=1e-5, rtol=0)
    torch.testing.assert_close(plain[:2], torch.tensor([0.75, -0.25]))


def test_a_plain_loop_runs_on_the_world(world, tmp_path, capsys):
    assert tune_tiny.main(["--world", str(world), "--quick", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert len(result["rows"]) == 2 and set(result["accuracy"]) == {"0", "2"}
    assert tune_tiny.main(["--world", str(tmp_path), "--quick"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_reinforcement_raises_held_out_accuracy(tmp_path, capsys):
    assert make_tiny.main(["--out", str(tmp_path)]) == 0
    for kind in MODEL_KINDS:
        measured = json.loads((tmp_path / "manifest.json").read_text())["parts"][f"{kind}_sum"]["measured"]
        assert 0.30 <= measured["sampled_accuracy"] <= 0.50
        assert measured["greedy_accuracy"] >= measured["sampled_accuracy"] + 0.3
        assert tune_tiny.main(["--world", str(tmp_path), "--model", kind, "--json", "--seeds", "0"]) == 0
        (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
        first, *_, last = result["accuracy"].values()
        assert last >= first + 0.20
        assert any(row["masked_share"] > 0 for row in result["rows"])
