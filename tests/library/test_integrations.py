"""The callbacks inside the real frameworks: they fire at the right steps, do what fire does, and survive a resume."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from fire_core import UserError, fire
from fire_core.triggers import Cooldown, EveryNSteps, Plateau
from tests.architectures import small_language_model  # its import makes that of torchvision possible

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning.pytorch")

from fire_core.integrations.lightning import FireCallback as LightningCallback  # noqa: E402
from fire_core.integrations.transformers import FireCallback as TrainerCallback  # noqa: E402

pytestmark = pytest.mark.reference
INPUTS, LABELS = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3


class Module(lightning.LightningModule):
    """A small classifier whose validation metric is a script: best in epoch 0, flat afterwards."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.net[-1].is_head = True

    def training_step(self, batch: list, index: int) -> Tensor:
        self.log("train_loss", torch.tensor(1.0), on_epoch=True, on_step=False)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list, index: int) -> None:
        self.log("val_loss", torch.tensor(1.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def lightning_run(callback, folder, epochs, resume=None, others=(), learning_rate=1e-2, **settings):
    """The trained module and the trainer."""
    module = Module(learning_rate)
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    settings |= {"default_root_dir": folder, "accelerator": "cpu"} | dict.fromkeys(quiet, False)
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[callback, *others], **settings)
    loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=8)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module, trainer


def steps_of(*callbacks) -> list[int]:
    """The steps at which they fired."""
    return [step for callback in callbacks for step, _ in callback.reports]


def assert_equal_weights(one: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=tolerance)


def test_lightning_fires_on_steps_and_does_what_fire_does(tmp_path: Path) -> None:
    callback = LightningCallback(EveryNSteps(8), solver="exact", targets="-head")
    module, trainer = lightning_run(callback, tmp_path, epochs=4, learning_rate=0.0)
    assert steps_of(callback) == [8], "and not after the last step"
    expected, _ = lightning_run(LightningCallback(EveryNSteps(17)), tmp_path, epochs=4, learning_rate=0.0)
    fire(expected, solver="exact", targets="-head")
    assert_equal_weights(module, expected)
    assert callback.reports[0][1].changed == {"net.0.weight"}
    steps = {parameter: state["step"] for parameter, state in trainer.optimizers[0].state.items()}
    assert (steps[module.net[0].weight], steps[module.net[2].weight]) == (8, 16)


FIRED = [
    (Plateau("val_loss", patience=2), {"epochs": 5}, [12]),
    (Plateau("val_loss", patience=2), {"epochs": 1, "val_check_interval": 1}, [3]),
    (Plateau("train_loss", patience=2), {"epochs": 4, "val_check_interval": 2}, [12]),
    (Plateau("train_loss", patience=9), {"epochs": 3}, []),
    (EveryNSteps(1), {"epochs": 2, "accumulate_grad_batches": 2}, [1, 2, 3]),
]


@pytest.mark.parametrize("trigger, settings, steps", FIRED)
def test_lightning_fires_at_hand_worked_steps(tmp_path: Path, trigger, settings, steps) -> None:
    callback = LightningCallback(trigger)
    _, trainer = lightning_run(callback, tmp_path, **settings)
    assert steps_of(callback) == steps and trainer.current_epoch == settings["epochs"]


def test_lightning_resumes_its_trigger(tmp_path: Path) -> None:
    def make() -> LightningCallback:
        return LightningCallback(Cooldown(Plateau("val_loss", patience=2), 5), optimizer_state="keep")

    whole = make()
    expected, _ = lightning_run(whole, tmp_path / "whole", epochs=4)
    first, second = make(), make()
    lightning_run(first, tmp_path / "first", epochs=3)  # fires at its end, and acts in the next
    resume = str(tmp_path / "first/last.ckpt")
    actual, _ = lightning_run(second, tmp_path / "second", epochs=4, resume=resume)
    lightning_run(whole, tmp_path / "again", epochs=4)  # the same callback in another fit
    assert steps_of(whole) == [12, 12] and steps_of(first) == [] and steps_of(second) == [12]
    with pytest.raises(UserError, match="FireCallback 'new' has no state at step 12"):
        lightning_run(LightningCallback(EveryNSteps(2), name="new"), tmp_path, epochs=4, resume=resume)
    assert_equal_weights(actual, expected)


AVERAGES = {
    "ema": lambda: lightning.callbacks.EMAWeightAveraging(decay=0.999),
    "mean": lightning.callbacks.WeightAveraging,
    "swa": lambda: lightning.callbacks.StochasticWeightAveraging(swa_lrs=1e-9, swa_epoch_start=1),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_lightning_starts_averages_anew(tmp_path: Path, kind: str) -> None:
    callback = LightningCallback(EveryNSteps(7), solver="exact", targets="net.0")
    module, _ = lightning_run(callback, tmp_path, 2, others=(AVERAGES[kind](),), learning_rate=1e-9)
    assert steps_of(callback) == [7]
    singular = torch.linalg.svdvals(module.net[0].weight.detach())
    assert (singular / (8 / 6) ** 0.5 - 1).abs().max() < 1e-3, "what training ends with is the average"


class Holder:
    """Another callback, which holds something in an attribute."""

    def __init__(self, held: object) -> None:
        self.held = held


def test_copies_that_cannot_start_anew_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    LightningCallback(EveryNSteps(1)).begin(0, model, [Holder(model), Holder(nn.Linear(6, 8)), Holder(None)])
    copied = {name: p.detach().clone() for name, p in model.named_parameters()}
    for held in (copy.deepcopy(model), copied, Holder(list(copied.values()))):  # the last as torch_ema does
        with pytest.raises(UserError, match=r"Holder\.held.* holds a copy of the weights"):
            LightningCallback(EveryNSteps(1)).begin(0, model, [Holder(held)])
        LightningCallback(EveryNSteps(1), keep_copies=True).begin(0, model, [Holder(held)])


class Average(transformers.TrainerCallback):
    def on_train_begin(self, *args: object, model: nn.Module, **kwargs: object) -> None:
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def on_step_end(self, *args: object, model: nn.Module, **kwargs: object) -> None:
        self.average.update_parameters(model)


ROWS = [dict.fromkeys(("input_ids", "labels"), torch.arange(8) * index % 32) for index in range(1, 17)]


def trainer_run(callbacks, folder, steps, resume=False, **settings):
    """The trained model and its trainer."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = small_language_model("gpt2", n_layer=1, **dropout)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, save_strategy="steps", save_steps=4,
        report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no", lr_scheduler_type="constant", **settings,
    )  # fmt: skip
    given = {"train_dataset": ROWS, "eval_dataset": ROWS, "callbacks": callbacks}
    trainer = transformers.Trainer(model, arguments, **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, trainer


def test_trainer_fires_on_steps_and_keeps_the_optimizer_policy(tmp_path: Path) -> None:
    average, callback = Average(), TrainerCallback(EveryNSteps(3), targets="qk")
    late = TrainerCallback(Plateau("eval_loss", patience=1, min_change=1e9), name="late")
    model, trainer = trainer_run([average, callback, late], tmp_path, 4, eval_strategy="steps", eval_steps=2)
    ((step, report),) = callback.reports
    assert step == 3
    assert report.changed == {"transformer.h.0.attn.c_attn.weight"} and len(report.treated()) == 2
    start = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    saved, now = (net.transformer.h[0].attn.c_attn.weight for net in (start, model))
    assert torch.equal(saved, now), "what was evaluated is what is saved"
    steps = {parameter: state["step"] for parameter, state in trainer.optimizer.state.items()}
    assert (steps[now], steps[model.transformer.wte.weight]) == (1, 4)
    assert any(entry.get("fire/targets") == 2 for entry in trainer.state.log_history)
    before = copy.deepcopy(model)
    assert_equal_weights(average.average.module, before)
    assert average.average.n_averaged == 1, "it started anew"
    for _ in range(4):
        trainer.evaluate()
    assert late.reports == [], "the finished model is left alone"
    assert_equal_weights(model, before)


def test_two_trainer_callbacks_keep_their_own_triggers_and_serve_a_second_training(tmp_path: Path) -> None:
    def make() -> list[TrainerCallback]:
        often = TrainerCallback(EveryNSteps(3), name="often", targets="qk")
        return [often, TrainerCallback(EveryNSteps(5), name="seldom", solver="exact", targets="no_embedding")]

    whole, first, second = make(), make(), make()
    for part in ("whole", "again"):
        expected, _ = trainer_run(whole, tmp_path / part, steps=7)
    trainer_run(first, tmp_path / "parts", steps=4)
    actual, _ = trainer_run(second, tmp_path / "parts", steps=7, resume=True)
    assert_equal_weights(actual, expected, 1e-6)
    for one, before, after, steps in zip(whole, first, second, ([3, 6], [5]), strict=True):
        assert steps_of(before, after) == steps and steps_of(one) == 2 * steps
    assert not any(held is expected for callback in whole for held in vars(callback).values())
