"""The plugin inside the real Avalanche: it acts before each experience but the first, and does what fire does."""

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fire_core import UserError, fire
from fire_core.measure.plasticity import plasticity
from fire_core.triggers import Above
from vision.torchvision_import import import_torchvision

if find_spec("torchvision") is not None:
    import_torchvision()
pytest.importorskip("avalanche")

from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import as_classification_dataset

from fire_core.integrations import avalanche as integration
from fire_core.integrations.avalanche import FirePlugin

pytestmark = pytest.mark.reference
PAGE = Path(__file__).parents[1] / "docs/how-to/avalanche.md"


class Labelled(TensorDataset):
    """16 samples; Avalanche reads `targets`."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(3, (16,), generator=generator).tolist()
        super().__init__(torch.randn(16, 6, generator=generator), torch.tensor(self.targets))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def run_page(monkeypatch: pytest.MonkeyPatch, *arguments: object, **settings: object) -> SimpleNamespace:
    """The names after the page's code has run on three experiences; the plugin gets these arguments if there are any.

    The learning rate is 0, so only the plugin changes weights. `models` are the weights after each experience.
    """
    if arguments or settings:
        plugin = FirePlugin(*arguments, **settings)
        monkeypatch.setattr(integration, "FirePlugin", lambda **given: plugin)
    datasets = [Labelled(seed) for seed in range(3)]
    benchmark = benchmark_from_datasets(train=[as_classification_dataset(data) for data in datasets])
    model, models = net(), []

    def stream() -> object:
        for experience in benchmark.train_stream:
            yield experience
            models.append({name: value.clone() for name, value in model.state_dict().items()})

    names = {"torch": torch, "model": model, "benchmark": SimpleNamespace(train_stream=stream())}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.0)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(code, names)
    return SimpleNamespace(models=models, datasets=datasets, **names)


def test_it_treats_the_model_before_each_experience_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_page(monkeypatch)
    assert [experience for experience, _ in names.plugin.reports] == [1, 2]
    expected = net()
    for done, weights in enumerate(names.models):
        if done > 0:
            fire(expected, solver="exact", targets="no_head")
        assert all(torch.equal(weights[name], value) for name, value in expected.state_dict().items())
    assert len(names.models) == 3


def test_it_publishes_plasticity_before_the_treatment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_page(monkeypatch, targets="0", strength=0.5)
    metrics = names.strategy.evaluator.get_last_metrics()
    assert metrics["fire/targets"] == 1
    old = net()
    old.load_state_dict(names.models[1])
    measured = plasticity(old, names.datasets[2].tensors[0])
    assert measured.keys() >= {"dormant_share", "dfi"}
    for name, value in measured.items():
        assert metrics[f"plasticity/{name}"] == pytest.approx(value, rel=1e-5), name


def test_a_trigger_decides_by_the_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_page(monkeypatch, Above("weight_norm", 1e9)).plugin.reports == []
    fired = run_page(monkeypatch, Above("weight_norm", 0.0)).plugin.reports
    assert [experience for experience, _ in fired] == [0]
    with pytest.raises(UserError, match="'nosuch' matches nothing"):
        run_page(monkeypatch, targets="nosuch")
