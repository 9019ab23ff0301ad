"""The paper's Table "Complexity for next-token inference", measured on the CPU as n grows.

    result = measure()                  # a dict of plain values, in about ten seconds
    print(report(result))               # every length, and the powers of n beside the table's
    how, verdict = summary(result)      # a line, and whether the powers are the table's

One more token is generated as token number n, by each of

    entp             the paper's ENTP: nothing is kept, the encoder reads all n tokens again
    entp, cached     EntpCache: the first layer is kept up to date, the layers above run again
    decoder          DecoderCache: keys and values of every layer are kept
    decoder, O(D)    the same with attention in O(D) memory (entp.theory.linear_memory)

and of each are taken: operations that ran (torch's count, and the engine's formula), seconds,
precomputed memory (bytes of the tensors kept between tokens) and additional memory (most bytes that
the one token allocates at once).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from entp.config import ModelConfig
from entp.engine.flops import STEP, reference_flops, token_flops
from entp.engine.generation.caches import Cache, DecoderCache, EntpCache, NoCache
from entp.engine.layout import Packing
from entp.errors import InputError, one_of
from entp.model import Transformer
from entp.stats import fit_exponent
from entp.terminal import format_table
from entp.theory.linear_memory import attend_streaming, peak_bytes

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
KINDS = ("entp", "entp, cached", "decoder", "decoder, O(D)")
MEASURES = ("operations", "seconds", "precomputed", "additional")
PAPER: dict[str, dict[str, Any]] = {
    "entp": {"operations": 2, "seconds": 2, "precomputed": None, "additional": 1},
    "decoder": {"operations": 1, "seconds": 1, "precomputed": 1, "additional": 0},
}
"""The table's powers of n; None: it says N/A, nothing is precomputed."""
PAPERS_NAMES = {"encoder-only": "entp", "decoder-only": "decoder"}
REPEATS = 3
"""Tokens that are timed."""
VOCAB = 4


class StreamingDecoder(DecoderCache):
    """The decoder's cache with attention in O(D) memory, for one sequence: the same logits."""

    def prefill(
        self, tokens_BT: Tensor, lengths_B: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        if len(tokens_BT) != 1:
            raise InputError(
                f"the decoder in O(D) memory continues one sequence, got {len(tokens_BT)}."
            )
        return super().prefill(tokens_BT, lengths_B, position_ids)

    def append(self, new_B: Tensor, position_ids: Tensor | None = None) -> Tensor:
        at, n = self.lengths, self.longest + 1
        self.lengths, self.longest = at + 1, n
        ids = at if position_ids is None else position_ids
        own = ids[:, None]
        h = self.model.embed(new_B[:, None], own)
        for block, keys, values in zip(self.blocks, self.keys, self.values, strict=True):
            q, k, v = (x[0, 0] for x in block.project(h, own))  # (H, d) each
            keys[0, :, n - 1], values[0, :, n - 1] = k, v
            known = zip(q[:, None], keys[0, :, :n], values[0, :, :n], strict=True)
            attended = [attend_streaming(*one, scale=block.scale) for one in known]  # head by head
            h = block.finish(h, torch.cat(attended, 1)[None])
        return self.model.readout(h[:, 0])


def make(kind: str, model: Transformer, capacity: int) -> Cache:
    """What `kind` keeps between tokens, with room for `capacity` of them."""
    if kind == "entp":
        return NoCache(model, "entp")
    if kind == "entp, cached":
        return EntpCache(model, capacity)
    if kind == "decoder":
        return DecoderCache(model, capacity)
    if kind == "decoder, O(D)":
        return StreamingDecoder(model, capacity)
    raise one_of("kind", kind, KINDS)


@torch.no_grad()
def measure(
    lengths: Sequence[int] = LENGTHS, *, width: int = 8, layers: int = 3, heads: int = 2
) -> dict[str, Any]:
    """All measures of all kinds at every length, and the fitted powers of n, ready for JSON.

    The width is small so that attention, which grows as n², shows beside the linear layers at
    lengths that take no time.
    """
    lengths = sorted(set(lengths))
    if len(lengths) < 3 or lengths[0] < 2:
        raise InputError(
            f"the lengths are {list(lengths)}: at least three different ones from 2 on are needed "
            "to see growth."
        )
    if layers < 2:
        raise InputError(
            f"layers is {layers}: with one layer ENTP is the decoder; at least 2 are needed."
        )
    config = ModelConfig(VOCAB, lengths[-1] + REPEATS, layers, heads, width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(config)
    # Each thread of fused attention has buffers of its own: memory would be that of the machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind in KINDS:  # what is set up once must not count for the first length
            _measure_one(kind, model, lengths[0])
        points = {kind: [_measure_one(kind, model, n) for n in lengths] for kind in KINDS}
    finally:
        torch.set_num_threads(threads)
    powers = {kind: _fit_powers(lengths, points[kind]) for kind in KINDS}
    shape = {"width": width, "layers": layers, "heads": heads, "torch": str(torch.__version__)}
    return {"config": shape, "lengths": lengths, "points": points, "powers": powers, "paper": PAPER}


def _fit_powers(lengths: Sequence[int], points: list[dict[str, float]]) -> dict[str, float | None]:
    """The fitted power of n of every measure."""
    names = (*MEASURES, "formula")
    return {name: fit_power(lengths, [point[name] for point in points]) for name in names}


def _measure_one(kind: str, model: Transformer, n: int) -> dict[str, float]:
    """The measures of token number n, the one read before the next is predicted."""
    tokens = torch.randint(VOCAB, (1, n + REPEATS), generator=torch.Generator().manual_seed(n))
    before = torch.tensor([n - 1])
    cache = make(kind, model, n)
    cache.prefill(tokens[:, : n - 1], before)
    # As plain products, because torch does not count what fused attention does on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        cache.append(tokens[:, n - 1])
    kept = kept_bytes(cache)
    cache = make(kind, model, n + REPEATS)
    cache.prefill(tokens[:, : n - 1], before)
    additional = peak_bytes(lambda: cache.append(tokens[:, n - 1]))
    seconds = [_seconds(cache, tokens[:, t]) for t in range(n, n + REPEATS)]
    return {
        "operations": int(counter.get_total_flops()),
        "formula": formula(model.config, n, kind),
        "seconds": statistics.median(seconds),
        "precomputed": kept,
        "additional": additional,
    }


def _seconds(cache: Cache, new_B: Tensor) -> float:
    start = time.perf_counter()
    cache.append(new_B)
    return time.perf_counter() - start


def formula(config: ModelConfig, n: int, kind: str) -> int:
    """The operations of token number n by the engine's formulas."""
    if kind == "entp":  # one prefix of n tokens, forward only
        return reference_flops(config, torch.arange(n)[None] == n - 1).total // STEP
    mode = "entp" if kind == "entp, cached" else "decoder"
    return token_flops(config, n, mode).total


def kept_bytes(cache: Cache) -> int:
    """Bytes that a cache keeps between tokens, besides the weights and the text itself."""
    found: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list):
            for one in value:
                visit(one)
        elif isinstance(value, Packing):
            visit(list(vars(value).values()))

    for name, value in vars(cache).items():
        if name not in ("tokens", "lengths", "blocks"):
            visit(value)
    return sum(found.values())


def fit_power(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """The p of value = c n^p over the upper half of the lengths; None if a value there is 0."""
    if any(value <= 0 for value in values[len(lengths) // 2 :]):
        return None
    return fit_exponent(lengths, values)[0]


def summary(result: dict[str, Any]) -> tuple[str, str]:
    """The measured powers of n in a line, and "holds" if they are the paper's, else "FAILS".

    Seconds are too noisy to judge by. Operations must be within 0.2 of the paper's power, because
    linear layers count too; the decoder's additional memory is that with attention in O(D) memory,
    and the encoder's may be 0.4 off, by buffers that are not yet full.
    """
    powers = result["powers"]
    encoder, decoder = powers["entp"], powers["decoder"]
    space = powers["decoder, O(D)"]["additional"]
    near = [
        abs(encoder["operations"] - PAPER["entp"]["operations"]) < 0.2,
        abs(decoder["operations"] - PAPER["decoder"]["operations"]) < 0.2,
        encoder["precomputed"] is None
        and abs(decoder["precomputed"] - PAPER["decoder"]["precomputed"]) < 0.01,
        abs(encoder["additional"] - PAPER["entp"]["additional"]) < 0.4,
        abs(space - PAPER["decoder"]["additional"]) < 0.01,
    ]
    operations = f"operations {encoder['operations']:.2f} and {decoder['operations']:.2f}"
    memory = f"additional space {encoder['additional']:.2f} and {abs(space):.2f}"
    verdict = "holds" if all(near) else "FAILS"
    return f"powers of n measured: {operations}, {memory}", verdict


def report(result: dict[str, Any]) -> str:
    """The tables for a person, and what differs from the paper's and why."""
    config, lengths = result["config"], result["lengths"]
    size = f"{config['layers']} layers, width {config['width']}, {config['heads']} heads"
    title = f"one more token as token number n: {size}"
    head = ["n", "", "operations", "ms", "precomputed KiB", "additional KiB"]
    rows = [
        [
            str(n),
            kind,
            f"{point['operations']:,}",
            f"{1e3 * point['seconds']:.2f}",
            f"{point['precomputed'] / 1024:.2f}",
            f"{point['additional'] / 1024:.2f}",
        ]
        for number, n in enumerate(lengths)
        for kind in KINDS
        for point in [result["points"][kind][number]]
    ]
    return "\n".join(
        [
            f"{title}; one thread, torch {config['torch']}",
            format_table(head, rows),
            "",
            _powers_table(result),
            "",
            *_notes(result),
        ]
    )


def _powers_table(result: dict[str, Any]) -> str:
    """The fitted powers of n, and under them the paper's."""

    def cell(power: float | None) -> str:
        if power is None:
            return "N/A"
        if isinstance(power, int):
            return str(power)
        return f"{round(power, 2) + 0.0:.2f}"  # never -0.00

    rows = [[kind, *(cell(result["powers"][kind][what]) for what in MEASURES)] for kind in KINDS]
    rows += [
        [f"paper: {name}", *(cell(result["paper"][kind][what]) for what in MEASURES)]
        for name, kind in PAPERS_NAMES.items()
    ]
    first = result["lengths"][len(result["lengths"]) // 2]
    return format_table([f"growth as n^p from n = {first}", *MEASURES], rows)


def _notes(result: dict[str, Any]) -> list[str]:
    """Where the measured table is not the paper's, and why."""
    config, last = result["config"], result["lengths"][-1]
    width, layers = config["width"], config["layers"]
    end = {kind: result["points"][kind][-1] for kind in KINDS}
    fraction = end["entp, cached"]["formula"] / end["entp"]["formula"]
    apart = [
        kind
        for kind in KINDS
        if any(point["operations"] != point["formula"] for point in result["points"][kind])
    ]
    others = ", ".join(apart) or "none"
    return [
        "operations: with linear layers, which the table leaves out, a token costs ENTP 4 DL n² + "
        "24 D²L n and the decoder",
        f"  4 DL n + 24 D²L, so powers are below 2 and 1 and reach them for n far above 6 D = "
        f"{6 * width}. Torch's counts are",
        f"  the formulas' except for: {others}. (The cached ENTP's layer 1 adds keys by "
        "elementwise products, not counted.)",
        "seconds: at these sizes much is overhead: the start of operations, and for entp a loop "
        "over positions, which is O(n).",
        f"precomputed: the paper's ENTP keeps nothing. Ours keeps layer 1, O(nD) for any L, and "
        f"does {fraction:.0%} of the",
        f"  operations at n = {last}: n² is left in {layers - 2} of {layers} layers. With 2 layers "
        "a token is O(n), not O(n²).",
        "additional: ENTP's is O(nD) because fused attention never writes n² scores down; its "
        "buffers grow until they hold a",
        "  block. A decoder's mask and scores are n numbers, so it grows; with attention in O(D) "
        "memory it does not.",
    ]
