"""Sealed search on one GPU: how many questions a second, with their tokens, over how many codes of 64 bytes.

Codes and tables of tokens are random numbers: passes take the same time whatever they are. Before, masks are checked
with the tables of a real block, and products against whole numbers::

    python bench/sealed_device.py --gib 64 --out out/bench
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nearveil.privacy.noise import secure_source
from nearveil.sealed import ring
from nearveil.sealed.kernels import multiply_digits
from nearveil.sealed.parameters import RING, WORD_BITS
from nearveil.sealed.ring import PRIMES, L, N, T, TokenKey

DIMENSION, COLOURS = 64, 16
COLUMNS = 1 << 16  # of a colour: 1024 cells
SEED = bytes(range(32))
SECRETS = 4  # of LWE in a question; colours share matrices
STEPS, GIANTS, HALF = RING.baby_steps, RING.giant_steps, N // 2
TERMS = STEPS + L
MODULI = np.array(PRIMES, np.uint64)[:, None]


def split_digits(slots: np.ndarray) -> np.ndarray:
    """Return residues modulo each prime as small numbers modulo all primes, shape (L, L, N)."""
    values = ring.to_coefficients(slots).astype(np.int64)
    return ring.to_slots(values - (values > MODULI.astype(np.int64) // 2) * MODULI.astype(np.int64))


def make_tables(hint: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return digits, tables of one block, and its public part: the library's, without Numba."""
    baby, giant = ring.derive_keys("scores", SEED)
    public, digits = ring.derive_public("scores", SEED, "secret", 0), np.empty((L, STEPS - 1, L, N), np.uint32)
    steps = [public]
    for i in range(STEPS - 1):
        parts = split_digits(ring.rotate(steps[i], 1))
        digits[:, i] = ((parts << 32) % MODULI).swapaxes(0, 1)
        steps.append((parts * baby % MODULI).sum(axis=0) % MODULI)
    factors = np.concatenate([steps, giant]).swapaxes(0, 1)
    tables, sums = np.zeros((L, GIANTS, TERMS, N), np.uint64), np.zeros((L, N), np.uint64)
    slots = np.arange(HALF)
    for g in range(GIANTS - 1, -1, -1):
        rows = (slots - STEPS * g) % HALF
        columns = (slots + np.arange(STEPS)[:, None]) % RING.dimension
        diagonals = np.concatenate([hint[rows, columns], hint[HALF + rows, columns]], axis=1)
        plain = ring.get_transform(T).to_coefficients(diagonals).astype(np.int64)
        tables[:, g, :STEPS] = ring.to_slots(plain - (plain > T // 2) * T).swapaxes(0, 1)
        if g < GIANTS - 1:
            tables[:, g, STEPS:] = split_digits(ring.rotate(sums, STEPS)).swapaxes(0, 1)
        sums = (tables[:, g] * factors % MODULI[:, None]).sum(axis=1) % MODULI
    tiles = ((tables << 32) % MODULI[:, None, None]).astype(np.uint32).reshape(L, GIANTS, TERMS, N // 64, 64)
    return digits[None], tiles.swapaxes(2, 3), ring.round_fractions(ring.to_coefficients(sums), 32).astype(np.uint32)


def make_request(count: int) -> tuple[TokenKey, np.ndarray]:
    """Return a key, and the secrets that its request encrypts."""
    secrets = np.rint(np.random.default_rng().normal(0, 6.4, (count, RING.dimension))).astype(np.int64)
    return TokenKey.make("scores", SEED, secrets, secure_source()), secrets


def check_tokens(tables_class: Any) -> int:
    """Return the wrong masks of nine tokens for a real block."""
    hint = np.random.default_rng(1).integers(0, T, (N, RING.dimension), dtype=np.uint32)
    digits, tables, public = make_tables(hint)
    device = tables_class("cuda", digits, [tables], np.zeros(1, int))
    pairs = [make_request(1) for _ in range(9)]
    answers = device.answer([ring.read_request(key.request, 1) for key, _ in pairs])
    return sum(
        int((key.read(token, public.tobytes(), [N])[0] != hint.astype(np.int64) @ secrets[0] % T).sum())
        for (key, secrets), token in zip(pairs, answers, strict=True)
    )


def check_products(torch: Any, database: Any, questions: Any, answers: Any) -> None:
    """Compare a few rows of answers with whole numbers."""
    rows = np.array([0, 1, 12345 % database.shape[1], database.shape[1] - 1])
    for colour in (0, COLOURS - 1):
        matrix = database[colour][torch.from_numpy(rows).to(database.device)].cpu().numpy()
        sent = questions[:, colour].cpu().numpy().astype(np.int64)
        if not np.array_equal(answers[:, colour].cpu().numpy()[:, rows], sent @ matrix.astype(np.int64).T % (1 << 24)):
            raise SystemExit("a product is wrong")


def fill_tables(torch: Any, tables_class: Any, count: int) -> Any:
    """Return tables of so many blocks on the device, of random numbers."""
    digits = np.random.default_rng(2).integers(0, PRIMES[-1], (SECRETS, L, STEPS - 1, L, N), dtype=np.uint32)
    device = tables_class("cuda", digits, [], np.arange(count) * SECRETS // count)
    shape = L, STEPS, GIANTS, TERMS, N // STEPS
    blocks = [torch.randint(PRIMES[-1], shape, dtype=torch.int32, device="cuda") for _ in range(count)]
    device._blocks = [(None, block) for block in blocks]
    return device


def measure(torch: Any, work: Any, repeats: int = 5) -> float:
    """Return the median of seconds that work takes, after one run."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measure_stages(torch: Any, tables: Any, bodies: list[bytes]) -> dict[str, float]:
    """Return seconds of the stages of 16 tokens: factors of all secrets, products and switching of one.

    Parsing is on the processor, for one request.
    """
    start = time.process_time()
    requests = [ring.read_request(body, SECRETS) for body in bodies]
    parse = (time.process_time() - start) / len(bodies)
    numbers, keys = (tables._load(np.stack(part).astype(np.int64)) for part in zip(*requests[:16], strict=True))
    secrets = tables.to_slots(numbers)
    blocks = [block for (_, block), owner in zip(tables._blocks, tables._owners, strict=True) if owner == 0]
    factors = tables.make_factors(secrets, keys)[0]
    sums = tables.multiply(blocks, factors)
    return {
        "parse_s": parse,
        "factors_s": measure(torch, lambda: tables.make_factors(tables.to_slots(numbers), keys)),
        "multiply_s": measure(torch, lambda: tables.multiply(blocks, factors)),
        "switch_s": measure(torch, lambda: tables.switch(sums)),
    }


def measure_batches(torch: Any, database: Any, tables: Any, bodies: list[bytes]) -> list[dict[str, float]]:
    """Return seconds of batches: of a pass with questions and answers in the host's memory, of tokens, and of both."""
    shape = len(bodies), *database.shape[::2]
    questions = torch.randint(1 << WORD_BITS, shape, dtype=torch.int32).pin_memory()
    check_products(torch, database, questions[:4], multiply_digits(torch, database, questions[:4].cuda()))
    landing = torch.empty((len(bodies), *database.shape[:2]), dtype=torch.int16, pin_memory=True)

    def run_pass(count: int) -> None:
        answers = multiply_digits(torch, database, questions[:count].cuda(non_blocking=True))
        landing[:count].copy_(((answers + (1 << 7)) >> 8).to(torch.int16))

    def run_tokens(count: int) -> None:
        tables.answer([ring.read_request(body, SECRETS) for body in bodies[:count]])

    def run_both(count: int) -> None:
        run_tokens(count)
        run_pass(count)

    def run_sustained(count: int) -> None:
        """Answer as a server with many clients does: threads read and write while the device works."""
        jobs = [partial(run_tokens, 32), partial(run_pass, 32)] * (count // 32)
        with ThreadPoolExecutor(4) as threads:
            for job in [threads.submit(job) for job in jobs]:
                job.result()

    batches = []
    for count in (1, 4, 8, 16, 32):
        figures: dict[str, float] = {"questions": count}
        for name, work in (("pass_s", run_pass), ("tokens_s", run_tokens), ("both_s", run_both)):
            figures[name] = measure(torch, partial(work, count))
        figures["questions_per_s"] = count / figures["both_s"]
        batches.append(figures)
        print(json.dumps(figures), flush=True)
    seconds = measure(torch, partial(run_sustained, 512))
    return [*batches, {"questions": 512, "sustained_s": seconds, "questions_per_s": 512 / seconds}]


def main() -> None:
    """Measure."""
    import torch

    from nearveil.sealed._device_ring import DeviceTables

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=64, help="codes, in GiB; a multiple of 1/16")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    rows = options.gib * (1 << 30) // (COLOURS * COLUMNS)
    generator = torch.Generator("cuda").manual_seed(0)
    database = torch.empty((COLOURS, rows, COLUMNS), dtype=torch.int8, device="cuda")
    for matrix in database:
        matrix.random_(-127, 128, generator=generator)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "codes": COLOURS * rows * COLUMNS // DIMENSION,
        "bytes": database.numel(),
        "rows": COLOURS * rows,
        "wrong_masks": check_tokens(DeviceTables),
        "checked_masks": 9 * N,
    }
    words = database.view(torch.int64)
    report["read_bytes_per_s"] = database.numel() / measure(torch, lambda: torch.sum(words, dtype=torch.int64))
    tables = fill_tables(torch, DeviceTables, COLOURS * rows // N)
    report["table_bytes"] = sum(block.numel() * 4 for _, block in tables._blocks)
    bodies = [make_request(SECRETS)[0].request for _ in range(32)]
    report |= {"request_bytes": len(bodies[0]), "token_bytes": ring.token_bytes([COLOURS * rows])}
    # Centroids of 1024 cells a colour in 32 bits, and the public parts of tokens.
    report["kept_bytes"] = 4 * COLUMNS * COLOURS + ring.public_bytes([COLOURS * rows])
    report["stages"] = measure_stages(torch, tables, bodies)
    report["batches"] = measure_batches(torch, database, tables, bodies)
    report["memory"] = int(torch.cuda.max_memory_allocated())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sealed-cuda.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
