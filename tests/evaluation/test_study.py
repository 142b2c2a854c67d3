"""The study's runs: the same but for the recipe, done once, and measured as they say."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dynamiq import Call, ConfigurationError, DynamiQCompressor, Ring, State, Uncompressed
from dynamiq.core.metrics import Simulated, vnmse
from evaluation import rows
from evaluation.language_model import Batches
from evaluation.reviews import Tokens
from evaluation.rows import append_row, read_rows
from evaluation.study import recipes, runs, trainer, workloads
from evaluation.study.__main__ import main
from evaluation.study.records import Evaluation, Row, Settings
from evaluation.study.runs import Grid, run_missing
from evaluation.study.trainer import Reduction, Training, error_sample, second_moments

INPUTS, OUTPUTS, BATCH = 40, 30, 8


@dataclass(frozen=True)
class Regression:
    """The smallest workload: a matrix is learnt from noisy products with it."""

    settings: Settings
    clip: float | None = None

    def build(self) -> nn.Module:
        torch.manual_seed(self.settings.seed)
        return nn.Linear(INPUTS, OUTPUTS)

    def optimizer(self, model: nn.Module) -> tuple[Optimizer, LambdaLR]:
        kind = torch.optim.AdamW if self.settings.optimizer == "adamw" else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=self.settings.learning_rate)
        return optimizer, LambdaLR(optimizer, lambda step: 1 - step / self.settings.steps)

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        return squared_error(model, *batch(self.settings.seed, step, rank))

    def evaluate(self, model: nn.Module) -> Evaluation:
        with torch.no_grad():
            return Evaluation(loss=squared_error(model, *batch(-1, 0, 0)).item(), accuracy=0.5)


def batch(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * seed + 10 * step + rank)
    x = torch.randn(BATCH, INPUTS, generator=generator)
    matrix = torch.randn(INPUTS, OUTPUTS, generator=torch.Generator().manual_seed(99))
    return x, x @ matrix


def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


@pytest.fixture(autouse=True)
def regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the smallest workload one that can be named."""
    monkeypatch.setitem(workloads.WORKLOADS, "regression", Regression)
    monkeypatch.setitem(workloads.LEARNING_RATES, ("regression", "adamw"), 0.1)
    monkeypatch.setitem(workloads.LEARNING_RATES, ("regression", "sgd"), 0.5)


def settings(
    recipe: str = "uncompressed", bits: float | None = None, **changes: object
) -> Settings:
    values: dict[str, object] = {
        "workload": "regression",
        "compressor": None,
        "topology": "ring",
        "optimizer": "adamw",
        "learning_rate": 0.1,
        "steps": 12,
        "seed": 0,
    }
    return Settings.model_validate({**values, "recipe": recipe, "bits": bits, **changes})


def training(made: Settings, clip: float | None = None) -> Training:
    compressor = recipes.compressor(made.recipe, made.bits)
    return Training(made, Regression(made, clip), Reduction(compressor, Ring(), made.seed))


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class TestTraining:
    @pytest.mark.parametrize("clip", [None, 0.5])
    def test_without_compression_it_is_plain_training_on_all_batches(
        self, clip: float | None
    ) -> None:
        made = settings()
        ours = training(made, clip)
        ours.run({}, "")
        workload = Regression(made)
        model = workload.build()
        optimizer, schedule = workload.optimizer(model)
        for step in range(made.steps):
            optimizer.zero_grad()
            torch.stack([workload.loss(model, step, rank) for rank in range(4)]).mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
        assert torch.allclose(weights(ours.model), weights(model), atol=1e-5)
        assert not torch.allclose(weights(model), weights(workload.build()), atol=1e-2)

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
    def test_a_row_says_what_happened(self, optimizer: str) -> None:
        made = settings("paper", 6.0, optimizer=optimizer, steps=22)
        run = training(made)
        row = run.run({"torch": "1"}, "abc")
        assert [c.step for c in row.checkpoints] == [6, 11, 17, 22]
        assert row.final == Regression(made).evaluate(run.model)
        assert row.final.loss < row.checkpoints[0].held_out.loss
        assert row.training_loss == pytest.approx(sum(run.losses[20:]) / 2)
        assert [sample.step for sample in row.errors] == [0, 10, 20]
        assert 1e-5 < row.vnmse < 0.1
        assert 1e-5 < row.weighted < 1
        assert (row.adam is None) == (optimizer == "sgd")
        assert 5 < row.bits_per_entry <= 6
        assert row.training_s > 0
        assert (row.versions, row.commit) == ({"torch": "1"}, "abc")

    def test_clipping_leaves_the_measured_error_alone(self) -> None:
        errors = [training(settings("paper", 5.0, steps=1), c) for c in (None, 1e-3)]
        rows = [run.run({}, "") for run in errors]
        assert rows[0].vnmse == rows[1].vnmse > 0

    def test_recipes_share_batches_and_weights_and_seeds_do_not(self) -> None:
        runs_ = [
            training(made)
            for made in (settings(), settings("bf16"), settings("paper", 5.0), settings(seed=1))
        ]
        for run in runs_:
            run.run({}, "")
        first = [run.losses[0] for run in runs_]
        last = [run.losses[-1] for run in runs_]
        assert first[0] == first[1] == first[2] != first[3]
        assert len(set(last)) == 4

    def test_it_is_deterministic(self) -> None:
        one, two = (training(settings("paper", 4.0, steps=4)).run({}, "") for _ in range(2))
        assert one.model_copy(update={"training_s": two.training_s}) == two


def test_states_go_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, object]] = []

    def simulate(rows: Tensor, _: object, __: object, call: Call, states: object) -> Simulated:
        seen.append((call.number, states))
        return Simulated(rows.mean(0), [State() for _ in rows], (0,) * 4, 5.0 + call.number)

    monkeypatch.setattr(trainer, "simulate", simulate)
    reduction = Reduction(Uncompressed("bf16"), Ring(), seed=0)
    for number in range(3):
        reduction.mean(torch.ones(4, 8), number)
    assert [number for number, _ in seen] == [0, 1, 2]
    assert seen[0][1] is None
    assert seen[1][1] is not None
    assert seen[2][1] is not seen[1][1]
    assert reduction.bits_per_entry == [5, 6, 7]


class TestErrors:
    @pytest.fixture
    def rows(self) -> Tensor:
        rows = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
        rows[:, 7] = 0  # no v: left out of the weighted errors
        rows[:, 50:] *= 1e-3
        return rows

    def test_they_are_what_the_formulas_say(
        self, rows: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trainer, "_PIECE", 32)
        exact = rows.double().mean(0)
        estimate = (exact + torch.linspace(1e-3, 2e-2, 100)).float()
        moments = torch.linspace(0, 1, 100)
        sample = error_sample(3, rows, estimate, moments)
        assert sample.step == 3
        assert sample.vnmse == pytest.approx(vnmse(estimate, exact), rel=1e-9)
        error = (estimate.double() - exact).square()

        def weighted(v: Tensor) -> float:
            kept = v > 0
            norm = (exact.square()[kept] / v[kept]).sum()
            return float((error[kept] / v[kept]).sum() / norm)

        squares = rows.double().square().mean(0)
        assert sample.weighted == pytest.approx(weighted(squares), rel=1e-9)
        assert sample.adam == pytest.approx(weighted(moments.double()), rel=1e-9)
        assert sample.weighted > 10 * sample.vnmse  # small entries count as much as large ones

    def test_an_exact_mean_has_none(self, rows: Tensor) -> None:
        sample = error_sample(0, rows, rows.mean(0), None)
        assert sample.vnmse < 1e-14
        assert sample.weighted < 1e-13
        assert sample.adam is None

    def test_adam_is_asked_for_its_moments_in_the_order_of_the_gradients(self) -> None:
        model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
        for k, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, k + 1)
        adam = torch.optim.Adam(model.parameters(), betas=(0.0, 0.0))
        adam.step()
        moments = second_moments(adam, list(model.parameters()))
        assert moments is not None
        assert moments.tolist() == [1, 1, 4, 9, 16]
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sgd.step()
        assert second_moments(sgd, list(model.parameters())) is None


class TestGrid:
    def grid(self, *names: str, **changes: object) -> Grid:
        values: dict[str, object] = {"bits": [4, 5], "seeds": [0, 1], "steps": 4}
        return Grid("regression", names, optimizer="adamw", **{**values, **changes})

    def test_seed_by_seed_and_without_a_budget_once(self) -> None:
        made = list(self.grid("uncompressed", "paper").settings())
        assert [(s.seed, s.recipe, s.bits) for s in made] == [
            (0, "uncompressed", None),
            (0, "paper", 4),
            (0, "paper", 5),
            (1, "uncompressed", None),
            (1, "paper", 4),
            (1, "paper", 5),
        ]
        assert made[1].compressor == DynamiQCompressor.paper(4).to_dict()
        assert made[0].learning_rate == 0.1
        assert len({s.model_dump_json() for s in made}) == 6

    def test_a_finished_run_is_not_done_again(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        assert len(list(run_missing(self.grid("uncompressed", "paper"), path))) == 6
        content = path.read_bytes()
        assert list(run_missing(self.grid("paper"), path)) == []
        assert path.read_bytes() == content
        more = list(run_missing(self.grid("paper", seeds=[1, 2], bits=[5]), path))
        assert [row.settings.seed for row in more] == [2]
        assert len(read_rows(path, Row)) == 7

    @pytest.mark.parametrize(
        "change", [{"steps": 3}, {"learning_rate": 0.2}, {"topology": "butterfly"}]
    )
    def test_another_setting_is_another_run(self, change: dict[str, object]) -> None:
        one = {s.model_dump_json() for s in self.grid("paper").settings()}
        assert not one & {s.model_dump_json() for s in self.grid("paper", **change).settings()}

    def test_an_interrupted_run_leaves_no_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "rows.jsonl"
        whole = Regression.loss

        def interrupted(self: Regression, model: nn.Module, step: int, rank: int) -> Tensor:
            if self.settings.recipe == "paper" and step == 3:
                raise KeyboardInterrupt
            return whole(self, model, step, rank)

        grid = self.grid("uncompressed", "paper", bits=[5], seeds=[0])
        with monkeypatch.context() as patch:
            patch.setattr(Regression, "loss", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(run_missing(grid, path))
        assert [row.settings.recipe for row in read_rows(path, Row)] == ["uncompressed"]
        assert [row.settings.recipe for row in run_missing(grid, path)] == ["paper"]

    def test_what_is_wrong_with_the_last_run_shows_before_the_first(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        with pytest.raises(ConfigurationError, match="budget"):
            list(run_missing(self.grid("uncompressed", "paper", bits=[5, 1]), path))
        assert not path.exists()


def test_a_row_names_versions_and_commit(tmp_path: Path) -> None:
    grid = Grid("regression", ["uncompressed"], [], [0], "sgd", steps=1)
    (row,) = run_missing(grid, tmp_path / "rows.jsonl")
    assert row.versions["torch"] == torch.__version__
    in_a_checkout = (Path(runs.__file__).resolve().parents[2] / ".git").exists()
    assert re.fullmatch(r"[0-9a-f]{12,}(-dirty)?" if in_a_checkout else "", row.commit)


class TestRows:
    @pytest.fixture
    def row(self) -> Row:
        return training(settings("paper", 5.0, steps=1)).run({"torch": "1"}, "abc")

    def test_they_are_read_as_they_were(self, row: Row, tmp_path: Path) -> None:
        errors = [sample.model_copy(update={"vnmse": float("inf")}) for sample in row.errors]
        diverged = row.model_copy(update={"training_loss": float("inf"), "errors": tuple(errors)})
        path = tmp_path / "rows.jsonl"
        assert read_rows(path, Row) == []
        append_row(path, row)
        append_row(path, diverged)
        assert read_rows(path, Row) == [row, diverged]

    def test_what_a_crash_left_is_no_row_and_swallows_none(self, row: Row, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        append_row(path, row)
        with path.open("a") as file:
            file.write('{"settings": {"workload": "x" ' + "-" * 5000)
        assert read_rows(path, Row) == [row]
        append_row(path, row)
        assert read_rows(path, Row) == [row, row]

    def test_several_may_add_at_once(self, row: Row, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"

        def add(name: int) -> None:
            for k in range(10):
                append_row(path, row.model_copy(update={"commit": f"{name} {k}"}))

        threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = {f"{n} {k}" for n in range(4) for k in range(10)}
        assert {row.commit for row in read_rows(path, Row)} == expected


class TestRecipes:
    @pytest.mark.parametrize("name", [n for n in recipes.NAMES if n != "uncompressed"])
    def test_each_name_is_a_compressor_of_the_bits(self, name: str) -> None:
        made = recipes.compressor(name, 4.0 if recipes.has_budget(name) else None)
        if recipes.has_budget(name):
            assert isinstance(made, DynamiQCompressor)
            assert made.bit_budget == 4
            assert name.endswith("-tempered") == (made.to_dict().get("energy_power", 1) == 0.5)
        else:
            assert made == Uncompressed("bf16")

    def test_names_that_share_a_method_are_different_compressors(self) -> None:
        made = [recipes.compressor(n, 4.0) for n in recipes.NAMES if recipes.has_budget(n)]
        assert len({c.digest() for c in made if c is not None}) == 5

    @pytest.mark.parametrize(("name", "match"), [("papr", "uncompressed"), ("paper", "bits")])
    def test_what_cannot_be_made_is_said(self, name: str, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            recipes.compressor(name, None)


class TestLanguageModel:
    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], workloads.LanguageModel]:
        monkeypatch.setattr("evaluation.language_model._embedding", lambda m: m[0].weight)
        tokens = Tokens(torch.zeros(128 * 64).short().numpy(), torch.zeros(128 * 300).numpy())
        batches = Batches(tokens, seed=0, world_size=4, sequences=8)

        def make(optimizer: str) -> workloads.LanguageModel:
            chosen = settings(optimizer=optimizer, learning_rate=3e-3, steps=50)
            return workloads.LanguageModel(chosen, batches)

        return make

    def test_sgd_follows_the_schedule_of_adamw(
        self, made: Callable[[str], workloads.LanguageModel]
    ) -> None:
        rates: list[list[float]] = []
        for name, kind in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
            model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3))
            optimizer, schedule = made(name).optimizer(model)
            assert isinstance(optimizer, kind)
            rates.append([])
            for _ in range(50):
                rates[-1] += [group["lr"] for group in optimizer.param_groups]
                optimizer.step()
                schedule.step()
        assert rates[0] == rates[1]
        assert max(rates[0]) == pytest.approx(0.3)

    def test_every_held_out_sequence_counts_once(
        self,
        made: Callable[[str], workloads.LanguageModel],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        sizes: list[int] = []

        def loss(_: nn.Module, sequences: Tensor) -> Tensor:
            sizes.append(len(sequences))
            return torch.tensor(2.0)

        monkeypatch.setattr("evaluation.language_model.mean_loss", loss)
        assert made("adamw").evaluate(nn.Linear(1, 1)) == Evaluation(loss=2.0)
        assert sizes == [32] * 8


def test_the_command_adds_rows_and_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "commit", lambda: "abc")
    path = tmp_path / "rows.jsonl"
    words = ["run", "--workload", "regression", "--recipes", "uncompressed", "paper", "--bits"]
    words += ["3", "3.5", "--seeds", "4", "5", "--optimizer", "sgd", "--steps", "2"]
    main([*words, "--output", str(path)])
    found = read_rows(path, Row)
    assert [(r.settings.seed, r.settings.bits) for r in found] == [
        (seed, bits) for seed in (4, 5) for bits in (None, 3, 3.5)
    ]
    assert {(r.settings.optimizer, r.settings.learning_rate, r.commit) for r in found} == {
        ("sgd", 0.5, "abc")
    }
    assert len(capsys.readouterr().out.splitlines()) == 6
    with pytest.raises(SystemExit, match="nowhere"):
        main([*words, "--topology", "nowhere", "--output", str(tmp_path / "other.jsonl")])
