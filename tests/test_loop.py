"""A loop's side of a site: what works within the context, and what is one clear line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dilocox
from dilocox.errors import ConfigError, DataError, TrainingError
from dilocox.inner.loop_optimizers import LoopOptimizers
from dilocox.inner.step_result import ReportedStep
from dilocox.loop import Site, own_loop
from dilocox.training.batches import Batch
from dilocox.training.loop.model import LoopModel, trained_tensors, usual_evaluation
from dilocox.training.loop.turns import LoopLeftError, StepWork, Turns
from tests.training.loop.test_parts import run_with

CPU = torch.device("cpu")


class Played:
    """A site whose trainer, in a thread, asks for `steps` inner steps in rounds of two."""

    def __init__(
        self,
        steps: int,
        evaluation: Callable[..., Any] | None = None,
        look: Callable[[], object] = lambda: None,
        **run: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loop = own_loop(self.model, self.optimizer, evaluation, None)
        self.turns, self.device, self.name = Turns(CPU, look), CPU, "paris"
        self.config, self.outcome = run_with(**run), "running"
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.said: list[tuple[str, bool]] = []
        self._steps = steps
        trained = trained_tensors(self.model)
        self.rank_model = LoopModel(
            self.model, trained, LoopOptimizers(trained, [self.optimizer], {}), self.turns,
            evaluation, lambda: (0, False),
        )  # fmt: skip
        rank = SimpleNamespace(model=self.rank_model, states=[])
        self.trainer = SimpleNamespace(rank=rank, at=SimpleNamespace(round=0))
        self.batches = SimpleNamespace(
            own_loader=False,
            read_now=lambda: Batch(torch.zeros(2, 3).long(), torch.ones(2, 3).long()),
        )
        self._thread = threading.Thread(target=self._train, daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def _train(self) -> None:
        try:
            for step in range(self._steps):
                self.results.append(self.turns.step(StepWork(step, 0.5, step % 2 == 1)))
            self.outcome = "finished"
            self.turns.end(None)
        except BaseException as error:
            self.error, self.outcome = error, "failed"
            self.turns.end(error)

    def end(self, reason: str, *, failed: bool) -> None:
        """As the site's process would."""
        self.said.append((reason, failed))
        if self.outcome == "running":
            self.turns.leave(reason, failed=failed)
        self._thread.join(5.0)
        assert not self._thread.is_alive()

    def site(self) -> Site:
        """The context manager."""
        return Site(AsOwnSite(self))  # type: ignore[arg-type]

    def take(self) -> torch.Tensor:
        """One optimizer step."""
        loss: torch.Tensor = self.model(torch.ones(2, 3)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class AsOwnSite:
    """What `Site` asks of a site, answered by `Played`."""

    def __init__(self, played: Played) -> None:
        self._played = played
        self.take = played.turns.take
        self.check_model = played.rank_model.check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._played, name)

    def done(self, loss: Any, grad_norm: Any, tokens: int | None) -> None:
        """Report a step."""
        self._played.turns.done(ReportedStep(loss, grad_norm, tokens))

    def check_batches(self) -> None:
        """All batches are whole."""

    def explanation(self, _error: BaseException) -> None:
        """The error says why."""


def test_the_loop_ends_with_the_run() -> None:
    own = Played(4)
    numbers = []
    with own.site() as site:
        for inputs, labels in site.batches():
            assert inputs.shape == labels.shape == (2, 3)
            numbers.append((site.inner_step, site.learning_rate))
            site.step(loss=own.take(), tokens=6, grad_norm=2.0)
        assert not site.running
    assert numbers == [(step, 0.5) for step in range(4)]
    assert [each.tokens for each in own.results] == [6] * 4
    assert own.results[0].grad_norm == 2.0
    assert own.results[0].norm_known
    assert own.results[0].loss > own.results[3].loss > 0
    assert (site.outcome, own.said) == ("finished", [("its loop ended before the run", False)])


def test_a_loop_without_batches_asks_step_whether_to_go_on() -> None:
    own = Played(3)
    with own.site() as site:
        while site.step(loss=own.take()):
            pass
        with pytest.raises(TrainingError, match=r"has ended \(finished\); end the loop when site"):
            site.step(loss=1.0)
    assert not own.results[0].norm_known
    with pytest.raises(TrainingError, match="was entered before"), site:
        pass
    own.take()  # the model is the user's again
    own.take()


def test_a_step_before_the_context_is_refused() -> None:
    with pytest.raises(TrainingError, match="has not begun: enter the context"):
        Played(1).site().step(loss=1.0)


@pytest.mark.parametrize("loader", [True, False])
def test_a_forgotten_step_is_named(loader: bool) -> None:
    own = Played(3)
    data = [torch.zeros(1)] * 9 if loader else None
    said = "the optimizer steps again" if loader else "was not called since the last batch"

    def loop() -> None:
        with own.site() as site:
            for _ in site.batches(data):
                own.take()

    with pytest.raises(TrainingError, match=f"site paris: .*{said}"):
        loop()
    assert isinstance(own.error, LoopLeftError)
    assert own.said[0][1]


def test_gradients_may_be_accumulated_over_batches_of_a_loader() -> None:
    own = Played(3)
    seen = 0
    with own.site() as site:
        for _ in site.batches([torch.zeros(1)] * 4):
            own.model(torch.ones(1, 3)).sum().backward()
            seen += 1
            if seen % 2 == 0:
                own.optimizer.step()
                own.optimizer.zero_grad()
                site.step(loss=0.5)
    assert seen == 6
    assert own.batches.own_loader


class Epochs:
    """A loader with a sampler, as a DataLoader has it."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.sampler = SimpleNamespace(set_epoch=self.epochs.append)

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def test_a_loader_begins_again_and_an_exhausted_one_is_named() -> None:
    own, loader = Played(5), Epochs()
    with own.site() as site:
        for _ in site.batches(loader):
            site.step(loss=own.take())
    assert loader.epochs == [0, 1, 2]
    own = Played(5)

    def loop() -> None:
        with own.site() as site:
            for _ in site.batches(iter([1, 2])):
                site.step(loss=own.take())

    with pytest.raises(DataError, match="the loader has no more batches"):
        loop()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(3, 3))), "another object"),
        (lambda model: setattr(model, "more", nn.Linear(1, 1)), "was added or unfrozen"),
        (lambda model: model.weight.requires_grad_(False), "weight was removed or frozen"),
        (lambda model: model.double(), "another shape, dtype, device or memory"),
    ],
)
def test_a_changed_model_is_named_at_the_end_of_its_round(
    change: Callable[[nn.Linear], object], said: str
) -> None:
    own = Played(4)

    def loop() -> None:
        with own.site() as site:
            site.step(loss=own.take())
            change(own.model)
            site.step(loss=1.0)

    with pytest.raises(TrainingError, match=f"model: .*{said}"):
        loop()
    assert len(own.results) == 1


def test_an_error_of_the_loop_reaches_the_coordinator_and_the_user() -> None:
    own = Played(4)

    def loop() -> None:
        with own.site() as site:
            site.step(loss=own.take())
            raise ZeroDivisionError("a mistake\nof two lines")

    with pytest.raises(ZeroDivisionError):
        loop()
    assert own.said == [("its loop ended by ZeroDivisionError: a mistake", True)]
    assert str(own.error) == own.said[0][0]


def test_an_interrupt_is_no_failure() -> None:
    own = Played(4)
    with pytest.raises(KeyboardInterrupt), own.site():
        raise KeyboardInterrupt
    assert own.said == [("its loop ended before the run", False)]


def test_an_error_of_the_run_reaches_the_loop() -> None:
    def lost() -> None:
        if own.results:
            raise TrainingError("the coordinator is gone")

    own = Played(4, look=lost)

    def loop() -> None:
        with own.site() as site:
            site.step(loss=own.take())
            own._thread.join(5.0)
            site.step(loss=own.take())

    with pytest.raises(TrainingError, match="the coordinator is gone"):
        loop()


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_a_figure_that_is_no_scalar_is_named(what: str) -> None:
    own = Played(1)
    figures: dict[str, Any] = {"loss": 1.0} | {what: torch.ones(2)}
    with pytest.raises(TrainingError, match=rf"{what} has the shape \(2,\)"), own.site() as site:
        site.step(**figures)


def test_a_norm_that_fsdp_divides_is_made_whole(tmp_path: Path) -> None:
    """`clip_grad_norm_` returns one, which no copy to the host shows."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(torch.ones(2, 4)).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        own = Played(1)
        with own.site() as site:
            site.step(loss=own.take(), grad_norm=norm)
        # Gradients of 2 for each of the 16 weights and of the 4 biases.
        assert own.results[0].grad_norm == pytest.approx(80**0.5)
    finally:
        dist.destroy_process_group()


class Asks(Played):
    """A site whose trainer asks for an evaluation after its first step."""

    def _train(self) -> None:
        self.turns.step(StepWork(0, 0.5, False))
        try:
            self.rank_model.evaluate(torch.ones(1, 2).long(), torch.ones(1, 2).long())
        except LoopLeftError as error:
            self.error, self.outcome = error, "failed"
            self.turns.end(error)


def test_an_error_of_an_evaluation_ends_the_sites_part_at_once() -> None:
    def evaluation(*_: object) -> float:
        raise ZeroDivisionError("a mistake of the evaluation")

    own = Asks(1, evaluation)
    with own.site() as site:
        with pytest.raises(ZeroDivisionError):
            site.step(loss=1.0)
        said = "its loop ended by ZeroDivisionError: a mistake of the evaluation"
        assert own.said == [(said, True)]
        assert not site.running
        with pytest.raises(TrainingError, match=r"no inner step is due, .* \(failed\)"):
            site.step(loss=1.0)


def test_a_step_within_a_step_is_named() -> None:
    """From an evaluation, as from another thread."""
    sites: list[Site] = []
    own = Asks(1, lambda *_: float(sites[0].step(loss=1.0)))

    def loop() -> None:
        with own.site() as site:
            sites.append(site)
            site.step(loss=1.0)

    with pytest.raises(TrainingError, match="while another call of it runs"):
        loop()


def test_batches_of_packed_documents_need_a_loader() -> None:
    own = Played(1, packing="documents")
    with pytest.raises(ConfigError, match='packing "documents"'), own.site() as site:
        next(site.batches())


def test_an_evaluation_runs_in_the_loops_thread_without_gradients() -> None:
    threads = []

    def evaluation(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        threads.append((threading.current_thread(), model.training, torch.is_grad_enabled()))
        return float(inputs.sum() + labels.sum())

    own = Played(1, evaluation)
    batch = (torch.ones(1, 2).long(), torch.ones(1, 2).long())
    found: list[float] = []
    train = own._train

    def evaluates_first() -> None:
        found.append(own.rank_model.evaluate(*batch))
        train()

    own._thread = threading.Thread(target=evaluates_first, daemon=True)
    with own.site() as site:
        site.step(loss=own.take())
    assert found == [4.0]
    assert threads == [(threading.main_thread(), False, False)]
    assert own.model.training


def test_a_model_without_logits_needs_an_evaluation() -> None:
    labels = torch.zeros(2, 3).long()
    with pytest.raises(ConfigError, match="does not return logits"):
        usual_evaluation(nn.Identity(), torch.zeros(2, 4, 5), labels)
    logits = torch.randn(2, 3, 7)
    found = usual_evaluation(nn.Identity(), logits, labels)
    assert torch.equal(found, nn.functional.cross_entropy(logits.view(6, 7), labels.view(6)))


def test_the_function_is_part_of_the_package() -> None:
    assert "site" in dilocox.__all__
