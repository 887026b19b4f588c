"""`benchmarks.finetune`: its conversations, its entries, and the figures of its table."""

import json
import sys

import pytest
from benchmarks.finetune import command, report, rows, study
from benchmarks.finetune import data as finetune_data
from benchmarks.finetune.chats import CONTINUE, QUESTION, Chat, of_functions, of_paragraphs
from benchmarks.finetune.data import Conversations
from benchmarks.finetune.rows import RATES, STUDY_SEED, TRIAL_SEED, Entry, Job

MODULE = '''\
def area(width, height):
    """Return the area of a rectangle with these sides.

    More words.
    """
    # Sides may be negative, and then the area may be, too: nobody has asked for more.
    return width * height


class Shape:
    @property
    def sides(self):
        """Return how many sides this shape has, as a number."""
        if self.kind == "triangle":
            return 3
        return 4 if self.kind == "square" else len(self.corners)

    def short(self):
        """Short."""
        return self.corners[0], self.corners[1], self.corners[2], self.corners[3]
'''


def test_a_function_is_asked_for_without_its_docstring(tmp_path):
    (tmp_path / "shapes.py").write_text(MODULE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "other.py").write_text(MODULE.replace("area", "surface"))
    (tmp_path / "wrong.py").write_text("def f(:\n")
    chats = of_functions(tmp_path)
    assert [chat.answer for chat in chats] == [
        "Return the area of a rectangle with these sides.",
        "Return how many sides this shape has, as a number.",
    ]
    assert chats[0].question.startswith(f"{QUESTION}\n\ndef area(width, height):\n")
    assert chats[0].question.endswith("return width * height")
    assert all(chat.answer not in chat.question and '"""' not in chat.question for chat in chats)


def test_a_paragraph_is_cut_in_its_middle(tmp_path):
    words = [f"word{number}" for number in range(60)]
    (tmp_path / "a.txt").write_text(f" = Title = \n\n {' '.join(words)} \n too short \n")
    (chat,) = of_paragraphs([tmp_path / "a.txt"])
    assert chat.question == f"{CONTINUE}\n\n{' '.join(words[:30])}"
    assert chat.answer == " ".join(words[30:])


def test_a_conversation_is_written_as_messages():
    said = json.loads(Chat("why?", "so.").line)
    assert said == {
        "messages": [
            {"role": "user", "content": "why?"},
            {"role": "assistant", "content": "so."},
        ]
    }


def test_about_a_sixteenth_is_held_out():
    held = sum(Chat(str(number), "").held_out for number in range(4000))
    assert 180 < held < 320


def test_entries_have_the_same_trials_and_their_best_rate_is_used():
    entry = rows.entries("lora")[1]
    made = rows.trials(entry, "lora", "bf16")
    assert [job.rate for job in made] == list(RATES["lora"])
    assert all(job.is_trial and job.sites == 2 for job in made)
    losses = dict(zip(RATES["lora"], (2.0, 1.5, None), strict=True))
    known = [{**job.key, "val_loss": losses[job.rate]} for job in made]
    assert rows.best_rate(entry, "lora", known, "bf16") == RATES["lora"][1]
    assert rows.best_rate(entry, "lora", known[:2], "bf16") is None
    assert [job.entry.label for job in rows.quoted("lora", 4, (0,), known, "bf16")] == [entry.label]


def test_labels_are_unique_and_links_are_of_the_trained_parameters():
    for mode in RATES:
        labels = [entry.label for entry in rows.entries(mode)]
        assert len(set(labels)) == len(labels)
    job = Job(Entry("dilocox 40x", "dilocox", {}, 40), "lora", 2, 0, 1e-3)
    # 4 bytes per parameter and step from each of two sites, on 90 % of a link, in 40 steps.
    assert float(job.link(1_000_000).removesuffix("kbit")) == pytest.approx(888.889)
    assert Job(Entry("allreduce", "allreduce"), "lora", 2, 0, 1e-3).link(1_000_000) is None


def test_gaps_are_against_the_synchronous_row_of_the_same_seed():
    def row(label, seed, loss, reduction):
        job = Job(Entry(label, "m"), "lora", 2, seed, 1e-3)
        return {**job.key, "val_loss": loss, "reduction_total": reduction, "accuracy": 0.5}

    known = [
        row(rows.BASELINE, 0, 2.0, 1.0),
        row(rows.BASELINE, 1, 4.0, 1.0),
        row("dilocox 40x", 0, 2.02, 40.0),
        row("dilocox 40x", 1, 4.0, 42.0),
        row("dilocox 40x", TRIAL_SEED, 9.0, 40.0),
    ]
    lines = {line["label"]: line for line in report.summarised(known, {"full": 135, "lora": 5})}
    found = lines["dilocox 40x"]
    assert found["gap"] == pytest.approx(0.005)
    assert found["gap_spread"] == pytest.approx(0.005)
    assert (found["seeds"], found["reduction"], found["of_full"]) == (2, 41.0, 41.0 * 27)
    assert lines[rows.BASELINE]["gap"] == 0.0
    assert "dilocox 40x" in report.table(known, {"full": 135, "lora": 5})


def test_the_study_waits_for_the_trials_and_is_not_quoted():
    assert study.jobs("lora", [], "bf16") == study.jobs("full", [], "bf16") == []
    trials = rows.trials(rows.entries("lora")[0], "lora", "bf16")
    known = [{**job.key, "val_loss": job.rate} for job in trials]
    jobs = study.jobs("lora", known, "bf16")
    assert [job.entry.label for job in jobs[:2]] == ["allreduce", "allreduce, A frozen"]
    assert {(job.sites, job.rate, job.is_trial) for job in jobs} == {(2, RATES["lora"][0], True)}
    assert len({job.entry.label for job in jobs}) == len(jobs)
    made = [{**job.key, "val_loss": 2.0, "plans": "", "reduction_total": 1.0} for job in jobs]
    made[2]["val_loss"] = 2.1
    assert report.summarised(known + made, {"full": 1, "lora": 1}) == []
    assert rows.best_rate(rows.entries("lora")[0], "lora", known + made, "bf16") == RATES["lora"][0]
    text = study.table("lora", known + made, "bf16")
    assert jobs[2].seed == STUDY_SEED
    assert "+5.00%" in text
    assert "A frozen" in text


def test_the_study_of_all_parameters_has_a_trial_as_baseline():
    trials = rows.trials(rows.entries("full")[0], "full", "bf16")
    known = [
        {**job.key, "val_loss": 3 - job.rate, "plans": "", "reduction_total": 1.0} for job in trials
    ]
    baseline, *jobs = study.jobs("full", known, "bf16")
    assert baseline.made(known[-1])
    best = RATES["full"][-1]
    assert {(job.rate, job.seed, job.steps) for job in jobs} == {
        (best, TRIAL_SEED, rows.TRIAL_STEPS)
    }
    made = [
        {**job.key, "val_loss": 1.05 * (3 - best), "plans": "", "reduction_total": 128.0}
        for job in jobs
    ]
    assert rows.best_rate(rows.entries("full")[0], "full", known + made, "bf16") == best
    text = study.table("full", known + made, "bf16")
    assert text.count("+5.00%") == len(jobs)
    assert text.count("allreduce") == 1


def found(label, seed, loss, **more):
    job = Job(Entry(label, "m"), "lora", 2, seed, 1e-3)
    return {**job.key, "val_loss": loss, "reduction_total": 1.0, "accuracy": 0.5, **more}


def lines_of(known):
    lines = report.summarised(known, {"full": 1, "lora": 1})
    return {(line["label"], line["steps"], line["learning_rate"]): line for line in lines}


def test_rows_of_other_lengths_and_rates_are_lines_of_their_own():
    """A quick run of 16 steps is no seed of a row of 64 steps."""
    known = [
        found(rows.BASELINE, 0, 2.0),
        found("dilocox 40x", 0, 2.1),
        found("dilocox 40x", 1, 2.0),
        found("dilocox 40x", 0, 4.0, steps=16),
        found("dilocox 40x", 0, 3.0, learning_rate=3e-3),
    ]
    lines = lines_of(known)
    line = lines["dilocox 40x", rows.STEPS, 1e-3]
    assert (line["seeds"], line["val_loss"]) == (2, 2.05)
    assert lines["dilocox 40x", 16, 1e-3]["gap"] is None
    assert lines["dilocox 40x", rows.STEPS, 3e-3]["gap"] == pytest.approx(0.5)


def test_a_mean_without_a_seed_that_diverged_is_not_shown():
    known = [found(rows.BASELINE, seed, 2.0) for seed in (0, 1)]
    known += [found("x", 0, 1.9), found("x", 1, None, accuracy=None)]
    # A seed without a synchronous row has no gap, and nothing is said of the others.
    known += [found("y", 0, 1.9), found("y", 2, 1.9), found("z", 0, 1.9, text="another")]
    lines = lines_of(known)
    assert lines["x", rows.STEPS, 1e-3]["diverged"] == 1
    for label in "xyz":
        assert lines[label, rows.STEPS, 1e-3]["gap"] is None
        assert lines[label, rows.STEPS, 1e-3]["gap_spread"] is None
    assert lines["x", rows.STEPS, 1e-3]["val_loss"] is None
    assert lines["x", rows.STEPS, 1e-3]["accuracy"] is None


def test_a_rate_is_chosen_by_trials_alone():
    entry = rows.entries("lora")[1]
    made = [{**job.key, "val_loss": job.rate} for job in rows.trials(entry, "lora", "bf16")]
    longer = {**made[-1], "steps": rows.STEPS, "val_loss": 0.0}
    assert rows.best_rate(entry, "lora", [*made, longer], "bf16") == RATES["lora"][0]


def test_trials_of_the_other_precision_serve_where_those_of_the_same_are_missing():
    entry = rows.entries("lora")[1]
    low, _middle, high = RATES["lora"]
    made = rows.trials(entry, "lora", "bf16")
    known = [{**job.key, "val_loss": job.rate} for job in made]
    own = [{**job.key, "val_loss": -job.rate} for job in rows.trials(entry, "lora", "fp32")]
    assert rows.best_rate(entry, "lora", known + own[:2], "fp32") == low
    assert rows.best_rate(entry, "lora", known + own, "fp32") == high
    assert rows.best_rate(entry, "lora", own + known, "bf16") == low
    (job,) = rows.quoted("lora", 2, (0,), known, "fp32")
    assert (job.rate, job.precision) == (low, "fp32")


def test_a_row_is_compared_with_the_same_precision():
    known = [
        found(rows.BASELINE, 0, 2.0),
        found(rows.BASELINE, 0, 1.0, precision="fp32"),
        found("dilocox 40x", 0, 2.02),
        found("dilocox 20x", 0, 1.05, precision="fp32"),
        found("x", 0, 1.05, precision="fp32", text="another"),
    ]
    lines = lines_of(known)
    assert lines["dilocox 40x", rows.STEPS, 1e-3]["gap"] == pytest.approx(0.01)
    assert lines["dilocox 20x", rows.STEPS, 1e-3]["gap"] == pytest.approx(0.05)
    assert lines["x", rows.STEPS, 1e-3]["gap"] is None
    (entry,) = [each for each in rows.entries("lora") if each.label == "dilocox 20x"]
    assert Job(entry, "lora", 2, 0, 1e-3, precision="fp32").made(known[3])
    assert not Job(entry, "lora", 2, 0, 1e-3).made(known[3])


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp32")])
def test_the_precision_is_what_the_processor_multiplies(bench, monkeypatch, native, precision):
    monkeypatch.setattr(command, "cpu_multiplies_bf16", lambda: native)
    words, trained = ("--modes", "lora", "--only", "allreduce", "--tune"), []
    assert bench(trained, *words) == bench(trained, *words, "--precision", "bf16") == 0
    assert [job.precision for job in trained] == [precision] * 3 + ["bf16"] * 3


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Call the benchmark with stand-ins for text and training; `trained` has the jobs."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    data = Conversations(tmp_path, tmp_path / "model")
    monkeypatch.setattr(command.common, "machine", dict)
    monkeypatch.setattr(command.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(command.Conversations, "write", lambda *_: data)
    monkeypatch.setattr(command.Conversations, "tokenise", lambda *_: None)
    monkeypatch.setattr(command.Conversations, "held_out", lambda *_: [])
    monkeypatch.setattr(command.Conversations, "described", lambda *_: {"digest": "d"})
    monkeypatch.setattr(command, "_parameters", lambda *_: {"lora": 1, "full": 1})
    monkeypatch.setattr(command, "configuration", lambda *_: None)

    def call(trained, *words):
        def train(job, _config, _log, _questions):
            trained.append(job)
            more = {"accuracy": None, "failed": None, "seconds": 1.0, "plans": ""}
            return {**job.key, "val_loss": 2.0, "reduction_total": 1.0, **more}

        monkeypatch.setattr(command, "train", train)
        monkeypatch.setattr(sys, "argv", ["finetune", "--model", str(tmp_path / "model"), *words])
        return command.main()

    return call


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (("--quick", "--tune"), "--quick, --tune and --study: give one of them"),
        (("--only", "dilocox"), "--only 'dilocox': there are allreduce, dilocox 20x"),
        (("--study", "--only", "dilocox 40x"), "--only 'dilocox 40x': there are allreduce"),
        (("--seeds", "0", "1000"), "--seeds 1000: a seed of trials"),
        (("--wikitext", "x"), "--wikitext x: no wikitext2-"),
    ],
)
def test_options_that_name_nothing_are_refused(bench, capsys, words, mend):
    with pytest.raises(SystemExit) as end:
        bench([], *words)
    assert mend in f"{end.value.code}{capsys.readouterr().err}"


@pytest.mark.parametrize("words", [(), ("--study",)])
def test_without_trials_nothing_is_trained_and_that_is_said(bench, capsys, words):
    trained = []
    assert bench(trained, *words) == 2
    assert trained == []
    assert "make the trials first, with --tune" in capsys.readouterr().err


def test_conversations_of_another_python_are_not_gone_on_with(bench, tmp_path, monkeypatch):
    file, trained = tmp_path / "rows.json", []
    words = ("--json", str(file), "--modes", "lora", "--only", "allreduce")
    assert bench(trained, *words, "--tune") == 0
    assert bench(trained, *words, "--seeds", "0", "--sites", "2") == 0
    assert len(trained) == 4
    monkeypatch.setattr(command.Conversations, "described", lambda *_: {"digest": "e"})
    with pytest.raises(SystemExit, match="rows of seed 0 are of another text"):
        bench(trained, *words, "--seeds", "0", "--sites", "4")
    assert bench(trained, *words, "--seeds", "0", "--sites", "2") == 0


def test_a_folder_of_other_conversations_is_refused(tmp_path, monkeypatch):
    chats = [Chat(str(number), "answer") for number in range(64)]
    monkeypatch.setattr(finetune_data, "of_functions", lambda: chats)
    made = Conversations.write(tmp_path / "chats", tmp_path, None)
    kept = [line for site in range(4) for line in made.part(site, 4).read_text().splitlines()]
    assert len(kept) + len(made.held_out()) == 64
    Conversations.write(tmp_path / "chats", tmp_path, None)
    monkeypatch.setattr(finetune_data, "of_functions", lambda: chats[1:])
    with pytest.raises(SystemExit, match="holds another text than these options ask for"):
        Conversations.write(tmp_path / "chats", tmp_path, None)
