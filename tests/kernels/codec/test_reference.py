"""Properties of block codes in PyTorch. Other tests compare the kernels with them bitwise."""

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.codec.checks import INF, LARGEST, NAN, blocks_of, ordinary, rows_of, same
from torchtitan_scape.kernels.codec.formats import FORMATS, MessageSize
from torchtitan_scape.kernels.codec.reference import MIN_SCALE, SPLIT, BlockCode

SCALES = [torch.bfloat16, torch.float32]
LEVELS = [name for name, form in FORMATS.items() if form.largest is not None]
each_code = pytest.mark.parametrize("name", FORMATS)


def decoded(code: BlockCode, x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode and decode rows. Returns the decoded values and the error of the encoder."""
    out, error = torch.empty_like(x), torch.empty_like(x)
    code.decode(code.encode(x, error), out)
    return out, error


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", LEVELS)
def test_errors_are_within_the_bound(name: str, scale: torch.dtype) -> None:
    """For every kind of block. Scales are rounded up, by at most 2^-7 in BF16."""
    largest, rounding = FORMATS[name].largest, 2.0**-7 if scale == torch.bfloat16 else 2.0**-22
    assert largest is not None
    for kind, x in blocks_of(64).items():
        out, _ = decoded(BlockCode(name, 64, scale), x.view(1, -1))
        if kind not in ("nan", "inf", "-inf", "largest"):
            magnitude = x.abs().max()
            step = magnitude / largest * (1 + rounding)
            # Floating-point formats: half of the distance of two levels, near zero or proportional to the entry.
            third = torch.maximum(step / 8, x.abs() * (1 + 2.0**-20) / 3)
            floats = {"e2m1": torch.maximum(step / 2, x.abs()) / 2, "e3m0": third}
            half = floats.get(name, step / 2)
            bound = half if magnitude >= MIN_SCALE else torch.full_like(x, MIN_SCALE)
            assert bool(((out[0] - x).abs() <= bound).all()), kind


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("block", [32, 1024])
@each_code
def test_errors_are_exact(name: str, block: int, scale: torch.dtype) -> None:
    """The error is the difference, bitwise; for codes of levels, decoded values plus errors are exactly the input."""
    x = rows_of(2, 13, block, "cpu")
    before = x.clone()
    out, error = decoded(BlockCode(name, block, scale), x)
    assert same(x, before) and same(error, x - out)
    exact = out.isfinite()
    if name in LEVELS:
        assert bool(exact.any()) and torch.equal((out + error)[exact], x[exact])


@pytest.mark.parametrize(
    ("name", "most", "ties", "codes"),
    [
        ("int8", 127.0, [0.5, 1.5, 2.5, 125.5, 126.5], [0, 2, 2, 126, 126]),
        ("int4", 7.0, [0.5, 1.5, 2.5, 5.5, 6.5], [0, 2, 2, 6, 6]),
        ("e2m1", 6.0, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], [0, 1, 1, 2, 2, 4, 4]),
        ("e3m0", 16.0, [0.125, 0.375, 0.75, 1.5, 3.0, 6.0, 12.0], [0, 0.5, 0.5, 2, 2, 8, 8]),
    ],
)
def test_ties_go_to_the_even_code(name: str, most: float, ties: list[float], codes: list[float]) -> None:
    x, expected = torch.zeros(32), torch.zeros(32)
    for i, (tie, code) in enumerate(zip([most, *ties], [most, *codes], strict=True)):
        x[2 * i], x[2 * i + 1] = tie, -tie
        expected[2 * i], expected[2 * i + 1] = code, -code
    assert torch.equal(decoded(BlockCode(name, 32), x.view(1, -1))[0][0], expected)


@pytest.mark.parametrize("scale", SCALES)
@each_code
def test_numbers_that_are_not_finite_make_their_block_nan(name: str, scale: torch.dtype) -> None:
    code, x = BlockCode(name, 32, scale), ordinary(32 * 37, torch.Generator().manual_seed(1)).view(1, -1)
    clean, _ = decoded(code, x)
    for position, value in ((40, NAN), (130, INF), (200, -INF)):
        x[0, position] = value
    messages, out, total = code.encode(x), torch.empty_like(x), torch.empty(x.shape[1])
    code.decode(messages, out)
    code.decode_and_sum(messages, total)
    hit = torch.zeros(37, dtype=torch.bool)
    hit[[1, 4, 6]] = True
    for values in (out[0], total):
        assert torch.equal(values.view(37, 32).isnan(), hit[:, None].expand(37, 32))
    assert torch.equal(out.view(37, 32)[~hit], clean.view(37, 32)[~hit])


@pytest.mark.parametrize("scale", SCALES)
@each_code
def test_the_bits_depend_only_on_the_block(name: str, scale: torch.dtype) -> None:
    """They do not depend on its position. A conversion of NaN to BF16 had position-dependent bits, also on a GPU."""
    form = FORMATS[name]
    x = torch.cat([rows_of(1, 13, 32, "cpu"), torch.full((1, 24 * 32), NAN)], 1)
    code, codes = BlockCode(name, 32, scale), 4 * form.bits
    message = code.encode(x)[0]
    size = form.scales * scale.itemsize
    for i in range(37):
        alone = code.encode(x[:, 32 * i : 32 * i + 32])[0]
        scales = message[37 * codes + i * size :][:size]
        assert torch.equal(message[codes * i :][:codes], alone[:codes]) and torch.equal(scales, alone[codes:][:size])


@each_code
def test_zeros_and_tiny_blocks_are_decoded_as_zeros(name: str) -> None:
    kinds = blocks_of(32)
    x = torch.stack([kinds[kind] for kind in ("zeros", "denormal", "tiny", "least")])
    out, _ = decoded(BlockCode(name, 32), x)
    assert not bool(out[:3].any()) and bool(out[3].any())


@pytest.mark.parametrize("scale", SCALES)
@each_code
def test_the_largest_numbers_are_decoded_or_become_infinite(name: str, scale: torch.dtype) -> None:
    out, _ = decoded(BlockCode(name, 32, scale), torch.tensor([LARGEST, -LARGEST]).repeat(16).view(1, -1))
    seen = torch.where(out.isinf(), LARGEST, out.abs())
    assert bool((seen >= LARGEST * (1 - 2.0**-7)).all()) and torch.equal(out > 0, torch.tensor([[True, False] * 16]))


def test_two_bits_without_large_magnitudes() -> None:
    """The mean of no large magnitudes was 0, which was nearer to some entries than the mean of the small ones."""
    x = torch.tensor([1.0, -1.25]).repeat(64).view(1, -1)
    assert torch.equal(decoded(BlockCode("2bit"), x)[0], torch.full_like(x, 1.125).copysign(x))


@pytest.mark.parametrize("scale", SCALES)
def test_one_and_two_bits_encode_means(scale: torch.dtype) -> None:
    """1 bit: the mean of all magnitudes. 2 bits: the means of those above SPLIT times that, and of the others."""
    x = ordinary(128, torch.Generator().manual_seed(2))
    sizes, bound = x.double().abs(), 2.0**-8 if scale == torch.bfloat16 else 2.0**-20
    out, _ = decoded(BlockCode("1bit", 128, scale), x.view(1, -1))
    assert torch.allclose(out[0].double(), sizes.mean().copysign(x.double()), rtol=bound)
    out, _ = decoded(BlockCode("1bit_unbiased", 128, scale), x.view(1, -1))
    assert torch.allclose(out[0].double(), math.pi / 2 * sizes.mean().copysign(x.double()), rtol=bound)
    large = sizes > SPLIT * sizes.mean()
    means = torch.stack([sizes[~large].mean(), sizes[large].mean()])
    out, _ = decoded(BlockCode("2bit", 128, scale), x.view(1, -1))
    nearer = means[(sizes > means.mean()).long()]
    assert torch.allclose(out[0].double(), nearer.copysign(x.double()), rtol=bound)


def test_decoded_values_of_the_unbiased_code_are_as_large_as_normally_distributed_entries() -> None:
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(4))
    found = {name: float((x * decoded(BlockCode(name), x)[0]).mean() / x.square().mean()) for name in FORMATS}
    assert abs(found["1bit_unbiased"] - 1.0) < 0.01 and abs(found["1bit"] - 2.0 / math.pi) < 0.01
    assert {name for name, bias in found.items() if abs(bias - 1.0) > 0.1} == {"1bit"}


@pytest.mark.parametrize(("distribution", "size"), [("Laplace", 0.79), ("Student", 0.65), ("equal", 1.57)])
def test_decoded_values_of_the_unbiased_code_have_another_size_for_other_distributions(
    distribution: str, size: float
) -> None:
    """pi / 2 times E[|x|]^2 / E[x^2], as in docs/reference/methods/index.md."""
    torch.manual_seed(0)
    n = 128 * 2000
    x = {
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((n,)),
        "Student": torch.distributions.StudentT(3.0).sample((n,)),
        "equal": torch.randn(n).sign(),
    }[distribution]
    out, _ = decoded(BlockCode("1bit_unbiased"), x.view(1, -1))
    assert float((x * out[0]).mean() / x.square().mean()) == pytest.approx(size, abs=0.05)


@pytest.mark.parametrize(
    ("code", "least", "most"), [("1bit", 55, 70), ("2bit", 9, 11), ("e2m1", 0, 0.3), ("int4", 0, 0.3)]
)
def test_entries_that_change_fast_lag_behind(code: str, least: float, most: float) -> None:
    """With error feedback, in exchanges, of the faster half: the figures of docs/reference/methods/sparta.md."""
    torch.manual_seed(0)
    change = torch.exp(torch.randn(1, 4096)) * torch.randn(1, 4096).sign()
    block_code, error, lag = BlockCode(code), torch.zeros_like(change), torch.zeros_like(change)
    for n in range(600):
        _, error = decoded(block_code, error + change)
        lag += error / change / 300 if n >= 300 else 0.0
    assert least < float(lag[change.abs() >= change.abs().median()].max()) < most
    assert code != "2bit" or float(lag.mean()) == pytest.approx(0.36, abs=0.02)


def test_rows_are_added_in_order() -> None:
    """A value below half a unit in the last place of the first row is lost before that row is subtracted."""
    code, rows = BlockCode("int8", 32), torch.tensor([[127.0 * 2**26], [127.0], [-127.0 * 2**26]]).repeat(1, 32)
    for order, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 127.0)):
        out = torch.empty(32)
        code.decode_and_sum(code.encode(rows[order]), out)
        assert bool((out == expected).all())


@each_code
def test_sums_of_messages_of_any_size(name: str) -> None:
    """Messages are decoded in parts, of which the last one may be a single block."""
    code = BlockCode(name)
    for rows, blocks in ((1, 1), (2, 1), (2, 3), (8, 1025), (2, 2049), (2, 4097)):
        generator = torch.Generator().manual_seed(blocks)
        values = torch.randn(rows, blocks * code.block_size, generator=generator)
        messages, found, expected = code.encode(values), torch.empty(values.shape[1]), torch.zeros(values.shape[1])
        code.decode_and_sum(messages, found)
        for row in messages.split(1):
            decoded = torch.empty(1, values.shape[1])
            code.decode(row, decoded)
            expected += decoded[0]
        assert same(found, expected), (rows, blocks)


@pytest.mark.parametrize("scale", SCALES)
@each_code
def test_messages_have_the_stated_size(name: str, scale: torch.dtype) -> None:
    """bits / 8 bytes per entry and the scales of each block, padded with zeros to 16 bytes."""
    form = FORMATS[name]
    for rows, blocks in ((2, 3), (1, 1), (0, 2), (2, 0)):
        code = BlockCode(name, 64, scale)
        used = blocks * (8 * form.bits + form.scales * scale.itemsize)
        size = -(-used // 16) * 16
        message = code.encode(torch.ones(rows, 64 * blocks))
        assert message.shape == (rows, size) and size == code.message_bytes(64 * blocks)
        assert size == MessageSize(name, 64, scale.itemsize)(64 * blocks)
        assert not bool(message[:, used:].any())
        out = torch.full((64 * blocks,), NAN)
        code.decode_and_sum(message, out)
        assert torch.allclose(out, torch.full_like(out, rows * form.gain), rtol=2.0**-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(name="int3"), "there is no block code 'int3'; known are int8, int4, e2m1, e3m0, 2bit, 1bit"),
        (dict(block=48), "blocks of 48 entries; they must have a power of two of them, from 32 to 1024"),
        (dict(scale=torch.float16), r"scales in torch\.float16; they must be torch\.float32 or torch\.bfloat16"),
    ],
)
def test_unknown_codes_are_refused(arguments: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"name": "int4", **arguments}
    with pytest.raises(ValueError, match=message):
        BlockCode(**options)  # type: ignore[arg-type]


def test_wrong_sizes_are_refused() -> None:
    code = BlockCode("int4", 32)
    with pytest.raises(ValueError, match="48 entries in blocks of 32; pad them with zeros to whole blocks"):
        code.encode(torch.ones(2, 48))
    for give in (lambda: code.decode(torch.zeros(1, 32).byte(), torch.ones(1, 64)), lambda: code.message_bytes(1)):
        with pytest.raises(ValueError, match=r"messages of 32 bytes; those of 64 entries have 48|1 entries in blocks"):
            give()
    with pytest.raises(ValueError, match="messages of 16 bytes; those of 64 entries have 48"):
        code.decode_and_sum(torch.zeros(1, 16).byte(), torch.ones(64))
