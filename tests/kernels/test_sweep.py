"""The sweep that fills the tables: its candidates can be launched, and what it says of times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch

from kernels import bench, bench_layers, linear_norm, linear_persistent, linear_specialised
from kernels import linear as module
from kernels.bench_layers import L2_BYTES, PRODUCTS, SHAPES, Product, finished
from kernels.configs import layers, sampling, sweep, sweep_layers
from kernels.configs.sweep_layers import decided, general, product_trials, shown
from kernels.configs.trial import Trial, in_use
from tests.kernels.sm90_audit import recorded

GENERAL, SPECIALISED, PERSISTENT = (
    "_linear_kernel", "_specialised_linear_kernel", "_persistent_linear_kernel",
)  # fmt: skip


def kernel_of(product: Product) -> str:
    """The kernel that the launch in use would run a product with on sm_90."""
    x, weight, residual = product.meta()
    with (
        recorded(module, GENERAL, "_finish_kernel") as own,
        recorded(linear_specialised, SPECIALISED) as specialised,
        recorded(linear_persistent, PERSISTENT) as persistent,
        recorded(linear_norm, "_finish_norm_kernel"),
    ):
        module._launch_linear(x, weight, None, None, residual, product.activation, True)
    products = [launch.kernel.fn.__name__ for launch in (*own, *specialised, *persistent)]
    (name,) = (name for name in products if name != "_finish_kernel")
    return name


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_every_candidate_of_a_product_is_what_would_be_launched(product: Product) -> None:
    """`fits` agrees to all that are left, the general kernel's launch is the general kernel's, and
    no two candidates of a case are the same, nor one the table's."""
    found = product_trials(product)
    x, weight, _ = product.meta()
    present = layers.linear_tiles(x, weight, product.activation == "swiglu")
    assert found[0].label == "present"
    assert len({trial.label for trial in found}) == len(found) >= 5
    with in_use(general(product)):
        assert kernel_of(product) == GENERAL
    for trial in found[1:]:
        kernel = {"S": SPECIALISED, "P": PERSISTENT, "L": GENERAL}[trial.label[0]]
        with in_use(trial):
            assert kernel_of(product) == kernel, trial.label
            assert layers.linear_tiles(x, weight, product.activation == "swiglu") != present


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # on the way to torch.compile
def test_every_product_of_a_layer_has_candidates_at_every_row_count() -> None:
    """Five row counts of each; special kernels where they may pay; all named cases exist."""
    kernels_of: dict[str, set[str]] = {}
    for trial in sweep.trials():
        kernels_of.setdefault(trial.case, set()).add(trial.label.split("(")[0])
        assert sweep._case(trial.case).name == trial.case
    for kind in SHAPES:
        for rows in (5, 40, 64, 160, 320):
            assert kind == "sums" or {"present", "LinearTiles"} <= kernels_of[f"{kind}{rows}"]
    for name in ("qkv40", "out64", "qkv160", "out320", "down160", "sums160"):
        assert "Specialised" in kernels_of[name]
    of_the_table = {product.name for product in PRODUCTS if kernel_of(product) == PERSISTENT}
    assert of_the_table == {"up160", "up320", "head160"}
    assert "Persistent" in kernels_of["head320"]
    assert not any("Persistent" in kernels_of[name] for name in of_the_table)
    assert len(sweep.trials()) < 600


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_inputs_do_not_fit_the_cache(product: Product) -> None:
    """A call never finds its own weights: the sets are three times the L2 together."""
    _, weight, _ = product.meta()
    assert product.case().num_sets * weight.numel() * 2 > 2.5 * L2_BYTES


def cases_of(only: str) -> set[str]:
    chosen = sweep.chosen_trials([glob for glob in only.split(",") if glob])
    return {sweep.trials()[number].case for number in chosen}


def test_only_chooses_cases_by_globs(capsys: pytest.CaptureFixture[str]) -> None:
    """A name is itself and no longer one; a glob that matches nothing is refused, also beside
    others; nothing asked for is everything."""
    assert cases_of("S64") == {"S64"}
    assert cases_of("down5") == {"down5"}
    assert cases_of("up*,sums64") == {"up5", "up40", "up64", "up160", "up320", "sums64"}
    assert cases_of("[oq]*[06]4") == {"out64", "qkv64"}
    assert cases_of("") == {trial.case for trial in sweep.trials()}
    with pytest.raises(ValueError, match="qkv65"):
        cases_of("qkv64,qkv65")
    with pytest.raises(SystemExit):
        sweep.main(["--only", "qkv65"])
    assert "'qkv65' is no case" in capsys.readouterr().err
    assert sweep.main(["--list", "--only", "N32k"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "N32k        16 values a thread", "N32k        32 values a thread", "3 candidates",
    ]  # fmt: skip


def test_the_tables_are_as_they_were_behind_a_trial() -> None:
    """Every table a candidate may write; also where it raised."""
    before = [dict(layers._LINEAR), dict(layers._ROPE), dict(sampling._DRAFT)]
    x, weight, _ = Product("head", 320).meta()
    for trial in sweep.trials():
        with in_use(trial):
            pass
        assert before == [layers._LINEAR, layers._ROPE, sampling._DRAFT]
    persistent = next(t for t in product_trials(Product("head", 320)) if t.label[0] == "P")
    with pytest.raises(ZeroDivisionError), in_use(persistent):
        assert 1 / (layers.linear_tiles(x, weight, False).persistent is None)
    assert before[0] == layers._LINEAR


def test_a_launch_is_shown_as_it_is_written() -> None:
    """What a person copies into the table makes the same launch."""
    for product in PRODUCTS:
        for tiles in sweep_layers._general_tiles(product):
            assert eval(shown(tiles)) == tiles
    assert shown(layers.Specialised(1, 7)) == "Specialised(1, 7)"


LinearTiles = layers.LinearTiles  # for `eval`


def test_sums_of_chunks_are_added_ascending_in_float32() -> None:
    """As the launch that adds does, with one rounding; finished tensors pass."""
    chunks = torch.tensor([1.0, 2.0**-24, 2.0**-24]).view(3, 1, 1)
    other = torch.ones(1, 1, dtype=torch.bfloat16)
    made = finished([chunks, other])
    assert made[0].dtype is torch.bfloat16
    assert made[0].item() == 1.0
    assert made[1] is other
    assert finished([chunks.flip(0) * 2**8])[0].item() == 256.0
    assert finished([torch.tensor([256.0, 1.0, 1.0]).view(3, 1, 1)])[0].item() == 258.0


def test_other_bits_are_an_error() -> None:
    """Signs of zero and NaN count, and a tensor that is missing."""
    zero = torch.zeros(2, 3, dtype=torch.bfloat16)
    sweep.require_same([zero, zero], [zero.clone(), zero])
    for other in (-zero, zero + float("nan"), zero + 1):
        with pytest.raises(AssertionError, match="6 of 6 have other bits"):
            sweep.require_same([zero, other], [zero, zero])
    with pytest.raises(ValueError, match="longer"):
        sweep.require_same([zero], [zero, zero])


def test_what_failed_among_others_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of another candidate of the process is no verdict; what did not end is wrong and is
    not tried again."""
    asked: list[tuple[list[int], int | None]] = []

    def tried(numbers: Sequence[int], a_process: int | None) -> dict[int, str]:
        asked.append((list(numbers), a_process))
        return {0: "", 1: "a fault", 2: "a fault"} if a_process is None else {1: "its own", 2: ""}

    monkeypatch.setattr(sweep, "_tried", tried)
    found = sweep.wrongs([0, 1, 2, 3])
    assert asked == [([0, 1, 2, 3], None), ([1, 2], 1)]
    assert {number: wrong for number, wrong in found.items() if number < 3} == {
        0: "", 1: "its own", 2: "",
    }  # fmt: skip
    assert "not ended" in found[3]


def test_what_is_wrong_is_reported_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status says so, and the others are timed by case."""
    timed: list[tuple[str, list[str]]] = []

    def time_case(name: str, own: Sequence[Trial]) -> Iterator[dict[str, object]]:
        timed.append((name, [trial.label for trial in own]))
        yield from ({"case": name, "candidate": t.label, "median_ms": 0.5} for t in own)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep, "_time_case", time_case)
    monkeypatch.setattr(sweep, "wrongs", lambda numbers: dict.fromkeys(numbers, ""))
    assert sweep.main(["--only", "N32k,down5"]) == 0
    assert [name for name, _ in timed] == ["down5", "N32k"]
    first = sweep.chosen_trials(["N32k"])[0]
    monkeypatch.setattr(sweep, "wrongs", lambda own: {n: "bad" * (n == first) for n in own})
    timed.clear()
    assert sweep.main(["--only", "N32k"]) == 1
    assert timed == [("N32k", ["16 values a thread", "32 values a thread"])]
    assert "N32k              bad  8 values a thread" in capsys.readouterr().out


def test_a_case_times_the_table_first_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the library; a candidate whose bits on the timed inputs are others is an error, the
    rest go on."""
    product = Product("out", 5)
    own = product_trials(product)[:3]
    zeros = torch.zeros(1, dtype=torch.bfloat16)
    workload = bench.Workload(lambda: (zeros,), {"product alone": lambda: zeros})
    case = bench.Case(product.name, lambda _seed: workload, 1.0)

    def outcome(_workload: bench.Workload, _product: Product) -> list[torch.Tensor]:
        tiles = layers.linear_tiles(*product.meta()[:2], False)
        return [zeros + 1 if shown(tiles) == own[1].label else zeros]

    monkeypatch.setattr(sweep, "_case", lambda _name: case)
    monkeypatch.setattr(sweep, "outcome", outcome)
    monkeypatch.setattr(bench, "check", lambda _workload: None)
    monkeypatch.setattr(bench, "time_calls", lambda _calls, **_: bench.Timing(0.25, 0.2, 0.3))
    found = list(sweep._time_case(product.name, own))
    assert [result["candidate"] for result in found] == [
        "library", "present", own[1].label, own[2].label, "present",
    ]  # fmt: skip
    assert [result.get("median_ms") for result in found] == [0.25, 0.25, None, 0.25, 0.25]
    assert "1 of 1 have other bits" in str(found[2]["error"])


SMALL_SHAPES = {
    "qkv": (96, 256), "sums": (96, 256), "out": (64, 128), "up": (128, 128), "down": (64, 320),
    "head": (80, 128),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_a_products_check_knows_right_from_wrong(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small shapes pass; a row that another launch would make otherwise, and a value off, do not.
    Finished, sums of chunks are qkv's product."""

    def random(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        # The interpreter multiplies no bfloat16.
        return (values * scale).to(device, torch.bfloat16 if device == "cuda" else torch.float16)

    monkeypatch.setattr(bench_layers, "SHAPES", SMALL_SHAPES)
    monkeypatch.setattr(bench_layers, "_random", random)
    workload = Product(kind, 5).workload(0)
    assert workload.check is not None
    workload.check()
    made = workload.run()
    assert isinstance(made, tuple)
    assert {tuple(t.shape) for t in finished(made)} == {
        (5, SMALL_SHAPES[kind][0] // (2 if kind == "up" else 1))
    }
    assert set(workload.anchors) == {"product alone", "eager"}
    ours, exact = finished(made)[-1].float(), workload.anchors["eager"]()
    assert isinstance(exact, torch.Tensor)
    assert torch.allclose(ours, exact.float(), atol=0.1, rtol=0.05)
    name = {"sums": "linear_chunks", "out": "linear_norm", "down": "linear_norm"}.get(
        kind, "linear"
    )
    real = getattr(bench_layers, name)

    def off(added: float, x: torch.Tensor, *others: object, **options: object) -> object:
        made = real(x, *others, **options)
        (made[0] if isinstance(made, tuple) else made).view(-1)[0] += added * (len(x) > 1)
        return made

    for added, words in ((2**-6, "number of rows"), (64.0, "relative error")):
        monkeypatch.setattr(bench_layers, name, partial(off, added))
        with pytest.raises(AssertionError, match=words):
            workload.check()


def timing(case: str, candidate: str, median_ms: float) -> dict[str, object]:
    return {"case": case, "candidate": candidate, "median_ms": median_ms}


def test_the_table_names_the_fastest_and_sums_a_layer() -> None:
    """The faster of two times of the present launch counts; candidates in error, products without a
    present time and cases of other kernels are left out; sums are of whole layers."""
    results = [
        timing("qkv64", "library", 0.0164), timing("qkv64", "present", 0.0202),
        timing("qkv64", "A(1)", 0.0151), timing("qkv64", "B(2)", 0.0150),
        timing("qkv64", "present", 0.0200), timing("out64", "present", 0.01),
        timing("out64", "A(1)", 0.02), timing("up64", "present", 0.06), timing("up64", "C", 0.05),
        timing("down64", "present", 0.03), timing("sums64", "present", 0.018),
        timing("qkv40", "present", 0.02), timing("up40", "A(1)", 0.02),
        {"case": "out64", "candidate": "D", "error": "other bits"}, timing("N32k", "n", 0.1),
    ]  # fmt: skip
    assert decided(results) == [
        "kind   rows   present      best  ratio   library  launch",
        "qkv      64     20.00     15.00  0.750     16.40  B(2)",
        "out      64     10.00     10.00  1.000         -  present",
        "up       64     60.00     50.00  0.833         -  C",
        "down     64     30.00     30.00  1.000         -  present",
        "sums     64     18.00     18.00  1.000         -  present",
        "qkv      40     20.00     20.00  1.000         -  present",
        "layer    64    120.00    105.00  0.875",
    ]
    assert decided([timing("N32k", "n", 0.1)]) == []
