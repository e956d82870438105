"""Prompt files and the sampler."""

import json
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpgrpo_fast.prompts import BUILTIN, evaluation_prompts, load_prompts, prompts_of_iteration


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_builtin_lists_are_distinct_texts(name):
    prompts = load_prompts(name)
    assert len(prompts) >= 40
    assert len(set(prompts)) == len(prompts)
    assert all(prompt == prompt.strip() and prompt for prompt in prompts)


def test_heldout_prompts_are_not_trained_on():
    assert not set(load_prompts("shapes")) & set(load_prompts("shapes-heldout"))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_text_file(tmp_path, newline):
    path = tmp_path / "prompts.txt"
    path.write_bytes(newline.join(["\ufeffa cat", "", "  ein Bär  ", "a\u2028b", ""]).encode())
    assert load_prompts(path) == ["a cat", "ein Bär", "a\u2028b"]
    assert load_prompts(str(path)) == load_prompts(path)


def test_jsonl_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "tag": 1}) for text in ["a cat", "two\nlines"]) + "\n\n")
    assert load_prompts(path) == ["a cat", "two\nlines"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "holds no prompt"),
        ("a.txt", b"\n  \n\n", "holds no prompt"),
        ("a.jsonl", b"\n", "holds no prompt"),
        ("a.txt", b"a cat\nein B\xe4r\n", "byte 11 (line 2) is 0xe4"),
        ("a.txt", b"\xef\xbb\xbfa\xff", "byte 4 (line 1) is 0xff"),
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', "line 3: not valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n', 'line 1: no text under the key "prompt"'),
        ("a.jsonl", b'{"prompt": "a"}\n["a"]\n', 'line 2: no text under the key "prompt"'),
        ("a.jsonl", b'{"prompt": 3}\n', 'line 1: no text under the key "prompt"'),
        ("a.csv", b"a cat\n", "neither a builtin name nor a .txt or .jsonl file"),
    ],
)
def test_bad_files(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are checked below)
        load_prompts(path)
    message = str(caught.value)
    assert words in message
    assert str(path) in message
    assert "->" in message


def test_missing_file_and_unknown_name(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)does not exist.*data\.prompts"):
        load_prompts(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"did you mean shapes\?"):
        load_prompts("shape")
    folder = tmp_path / "folder.txt"
    folder.mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        load_prompts(folder)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), total=st.integers(1, 23), seed=st.integers(0, 2**63 - 1))
def test_every_prompt_is_visited_before_any_repeats(data, total, seed):
    count = data.draw(st.integers(1, total))
    iterations = [prompts_of_iteration(total, count, seed, i) for i in range(3 * total // count + 2)]
    assert all(len(set(chosen)) == count for chosen in iterations)
    walk = list(chain.from_iterable(iterations))
    for epoch in range(len(walk) // total):
        assert sorted(walk[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_sampler_is_a_pure_function_of_seed_and_iteration():
    prompts = [str(i) for i in range(50)]
    forward = [prompts_of_iteration(prompts, 8, 7, i) for i in range(30)]
    backward = [prompts_of_iteration(prompts, 8, 7, i) for i in reversed(range(30))]
    assert forward == backward[::-1]
    assert forward != [prompts_of_iteration(prompts, 8, 8, i) for i in range(30)]
    # The first and the second pass over the prompts differ.
    assert list(chain.from_iterable(forward))[:50] != list(chain.from_iterable(forward))[50:100]


@pytest.mark.parametrize("count", [4, 0])
def test_too_few_prompts(count):
    with pytest.raises(ValueError, match=r"(?s)data\.prompts_per_iteration = .*holds 3 prompts.*at most 3"):
        prompts_of_iteration(["a", "b", "c"], count, 0, 0)


def test_evaluation_prompts_are_evenly_spaced_or_repeated():
    assert evaluation_prompts(list("abcdef"), 3) == list("ace")
    assert evaluation_prompts(list("abc"), 3) == list("abc")
    assert evaluation_prompts(list("abc"), 7) == list("abcabca")
