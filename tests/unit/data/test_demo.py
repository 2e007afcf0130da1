"""The demo data: real, repeatable, held-out questions about other functions."""

import argparse
import json

import pytest

from fullspan.cli import data
from fullspan.data.config import DataConfig
from fullspan.data.demo import Question, module_questions, split_questions, write_demo
from fullspan.data.load import load_packs
from fullspan.errors import DataError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"), samples=40, held_out=8)


def rows(path):
    chats = [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]
    return [(question["content"], answer["content"]) for question, answer in chats]


def test_answers_stand_in_the_context(made):
    for question, answer in rows(made.train) + rows(made.held_out):
        assert all(line in question for line in answer.splitlines())
        assert "def " in question
        assert question.splitlines()[-1].startswith("What does ")


def test_sizes(made):
    train, held_out = rows(made.train), rows(made.held_out)
    assert (len(train), len(held_out)) == (made.train_samples, made.held_out_samples) == (40, 8)
    assert made.longest_bytes == max(len(q.encode()) for q, _ in train + held_out) < 6200
    assert made.modules > 15


def test_held_out_questions_and_answers_are_not_trained(made):
    train, held_out = rows(made.train), rows(made.held_out)
    assert not {question for question, _ in train} & {question for question, _ in held_out}
    answers = [answer for _, answer in train + held_out]
    assert len(set(answers)) == len(answers)


def test_questions_of_a_module():
    source = '''
def first(x):
    """Give back what was\n    put in, unchanged.

    More about it.
    """
class Box:
    def get(self):
        "Take out whatever lies in the box."
    async def put(self):
        "Put the thing into the box again."
    def put(self):
        "Put the thing into the box once more."
def escaped():
    """A line with a tab\\t in its docstring."""
def short():
    "Too short."
def none(): ...
'''
    found = [(question.function, question.answer) for question in module_questions("m", source)]
    assert found == [
        ("first", "Give back what was\nput in, unchanged."),
        ("Box.get", "Take out whatever lies in the box."),
        ("Box.put", "Put the thing into the box again."),
    ]
    assert list(module_questions("m", "def broken(:")) == []


def test_an_answer_occurs_once_over_both_files():
    questions = [
        Question(module="m", function=f"f{n}", source="s", answer=f"answer {n % 20}")
        for n in range(200)
    ]
    chosen = split_questions(questions, 100, 100)
    answers = [question.answer for part in chosen.values() for question in part]
    assert sorted(answers) == sorted({question.answer for question in questions})
    assert min(len(part) for part in chosen.values()) > 0


def test_the_same_python_gives_the_same_files(made, tmp_path):
    again = write_demo(tmp_path, samples=40, held_out=8)
    assert again.train.read_bytes() == made.train.read_bytes()
    assert again.held_out.read_bytes() == made.held_out.read_bytes()


def test_fewer_samples_are_the_first_of_more(made, tmp_path):
    fewer = write_demo(tmp_path, samples=10, held_out=2)
    assert rows(fewer.held_out) == rows(made.held_out)[:2]
    assert set(rows(fewer.train)) <= set(rows(made.train))


def test_packs(made, tokenizer):
    path = str(made.train)
    packs, report = load_packs(path, DataConfig(path=path, pack_length=6400), tokenizer)
    assert report.packed_documents == report.rows == 40
    assert report.trained_tokens == sum(len(a.encode()) + 1 for _, a in rows(made.train))
    assert sum(pack.trained_tokens for pack in packs) == report.trained_tokens


def test_nothing_fits(tmp_path):
    with pytest.raises(DataError, match="no train questions in modules of at most 10 bytes; raise"):
        write_demo(tmp_path, max_context_bytes=10)
    with pytest.raises(DataError, match="--samples: got 0"):
        write_demo(tmp_path, samples=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write demo data"):
        write_demo(tmp_path / "file", samples=1, held_out=1)


def test_command(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers())
    words = ["data", "demo", str(tmp_path), "--samples", "3", "--held-out", "2"]
    args = parser.parse_args([*words, "--max-context-bytes", "4000"])
    assert args.run(args) == 0
    assert "train.jsonl: 3 questions\n" in capsys.readouterr().out
    assert len(rows(tmp_path / "heldout.jsonl")) == 2
