"""The house style: mixtures of the regime colours, settings that stay inside their block, reproducible files."""

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from figures.style import REGIMES, mix, save, style


def test_corners_are_the_regime_colours():
    np.testing.assert_allclose(mix(np.eye(3)), [to_rgb(colour) for colour in REGIMES.values()], rtol=1e-15)


def test_mixtures_are_weighted_means_of_any_shape():
    weights = np.random.default_rng(0).dirichlet(np.ones(3), (4, 5))
    colours = mix(weights)
    expected = sum(weights[..., [k]] * np.array(to_rgb(colour)) for k, colour in enumerate(REGIMES.values()))
    np.testing.assert_allclose(colours, expected, rtol=1e-14)
    # Outside the triangle a colour is cut off, not wrapped.
    assert mix(np.array([3.0, -1.0, -1.0])).max() == 1
    assert mix(np.array([3.0, -1.0, -1.0])).min() == 0


def test_style_ends_with_its_block():
    before = dict(mpl.rcParams)

    def fail():
        with style():
            assert mpl.rcParams["font.size"] == 8
            assert mpl.rcParams["pdf.fonttype"] == 42
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert dict(mpl.rcParams) == before


def test_saved_files_depend_on_the_figure_alone(tmp_path):
    contents = []
    for name in ("a", "b"):
        with style():
            figure = Figure(figsize=(2, 1))
            figure.subplots().plot([0, 1], [1, 0])
            paths = save(figure, tmp_path, name)
        assert [path.name for path in paths] == [f"{name}.png", f"{name}.pdf"]
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]
    # 2 x 1 inches at 200 dots an inch.
    assert matplotlib.image.imread(tmp_path / "a.png").shape[:2] == (200, 400)
