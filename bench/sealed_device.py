"""Sealed scores on one GPU: how many questions a second over how many codes of 64 bytes.

The codes are random numbers of 8 bits: a pass takes the same time whatever they are. Questions are encrypted and
answers decrypted by the library's own functions, and both are timed apart; what comes out is checked against whole
numbers and against the bound on a score's error::

    python bench/sealed_device.py --gib 64 --out out/bench
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from nearveil.privacy.noise import secure_source
from nearveil.sealed.accuracy import SPAN, find_score_deviation
from nearveil.sealed.kernels import multiply_digits
from nearveil.sealed.lwe import (
    ANSWER_BITS,
    WORD_BITS,
    add_messages,
    centre,
    encrypt_zeros,
    make_hint,
    round_down_to,
)
from nearveil.sealed.parameters import SCORES

DIMENSION, COLOURS = 64, 16
COLUMNS = 1 << 16  # of a colour: 1024 cells
SEED = bytes(range(32))


def encrypt_question(query: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return ciphertexts and secrets of a question that looks into the first cell of every colour."""
    messages = np.zeros((COLOURS, COLUMNS), np.int64)
    messages[:, :DIMENSION] = np.rint(query * scale)
    zeros, secrets = encrypt_zeros(SCORES, SEED, messages.shape, secure_source())
    return add_messages(SCORES, zeros, messages), secrets


def check_scores(
    torch: Any, database: Any, sent: Any, answers: Any, made: list[Any], query: np.ndarray
) -> dict[str, float]:
    """Compare a few rows of an answer with whole numbers, and their scores with those in the clear."""
    rows, reach = np.array([0, 1, 12345 % database.shape[1], database.shape[1] - 1]), 35.0 * np.sqrt(DIMENSION) * 4
    errors, worst = [], 0.0
    for colour in (0, COLOURS - 1):
        matrix = database[colour][torch.from_numpy(rows).to(database.device)].cpu().numpy()
        asked = sent[:, colour].cpu().numpy().astype(np.int64)
        expected = (asked @ matrix.astype(np.int64).T) % (1 << WORD_BITS)
        found = answers[:, colour].cpu().numpy()[:, rows]
        if not np.array_equal(found, expected):
            raise SystemExit("a product is wrong")
        hint = round_down_to(make_hint(SCORES, SEED, matrix), SCORES.modulus_bits, ANSWER_BITS).astype(np.int64)
        masks = hint @ made[0][1][colour]
        raw = centre(round_down_to(found[0], WORD_BITS, ANSWER_BITS).astype(np.int64) - masks, ANSWER_BITS)
        scores = raw * SPAN / 2.0**ANSWER_BITS
        errors += list(scores - matrix[:, :DIMENSION] @ query / reach)
        worst = max(worst, float(np.linalg.norm(matrix.astype(np.float64), axis=1).max()))
    return {"score_error": float(np.std(errors)), "score_error_predicted": find_score_deviation(worst, reach)}


def time_passes(torch: Any, database: Any, questions: Any, repeats: int = 5) -> dict[str, float]:
    """Return seconds of a pass alone, and of a pass with questions from the host's memory and answers back to it."""
    multiply_digits(torch, database, questions.to(database.device))
    pinned, times = questions.pin_memory(), []
    landing = torch.empty((len(questions), *database.shape[:2]), dtype=torch.int16, pin_memory=True)
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        sent = pinned.to(database.device, non_blocking=True)
        torch.cuda.synchronize()
        moved = time.perf_counter()
        answers = multiply_digits(torch, database, sent)
        torch.cuda.synchronize()
        done = time.perf_counter()
        landing.copy_(((answers + (1 << 7)) >> 8).to(torch.int16))
        times.append((moved - start, done - moved, time.perf_counter() - done))
    upload, work, download = np.median(times, axis=0)
    return {"upload_s": float(upload), "pass_s": float(work), "download_s": float(download)}


def main() -> None:
    """Measure."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=64, help="codes, in GiB; a multiple of 1/16")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    given = parser.parse_args()
    rows = given.gib * (1 << 30) // (COLOURS * COLUMNS)
    generator = torch.Generator("cuda").manual_seed(0)
    database = torch.empty((COLOURS, rows, COLUMNS), dtype=torch.int8, device="cuda")
    for matrix in database:
        # About as wide as real codes: the sum of three uniform numbers.
        matrix.zero_()
        for _ in range(3):
            matrix.add_(torch.randint(-42, 43, matrix.shape, dtype=torch.int8, device="cuda", generator=generator))
    n_codes = COLOURS * rows * COLUMNS // DIMENSION
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "codes": n_codes, "bytes": database.numel()}
    start = time.perf_counter()
    torch.sum(database.view(torch.int64), dtype=torch.int64).item()
    start = time.perf_counter()
    torch.sum(database.view(torch.int64), dtype=torch.int64).item()
    report["read_bytes_per_s"] = database.numel() / (time.perf_counter() - start)
    rng = np.random.default_rng(0)
    reach = 35.0 * np.sqrt(DIMENSION) * 4
    scale = 2.0**SCORES.modulus_bits / (SPAN * reach)
    query = rng.normal(size=DIMENSION)
    query /= np.linalg.norm(query)
    start = time.perf_counter()
    made = [encrypt_question(query, scale) for _ in range(4)]
    report["encrypt_s"] = (time.perf_counter() - start) / len(made)
    hint = rng.integers(0, 1 << 16, (rows, SCORES.dimension), dtype=np.uint16)
    start = time.perf_counter()
    for colour in range(COLOURS):  # one colour's random rows stand for those of all
        for first in range(0, rows, 4096):
            hint[first : first + 4096].astype(np.float64) @ made[0][1][colour].astype(np.float64)
    report["decrypt_s"] = time.perf_counter() - start
    del hint
    report["batches"] = []
    for count in (1, 4, 16, 32, 42):
        ciphertexts = np.stack([made[at % len(made)][0] for at in range(count)]).astype(np.int32)
        questions = torch.from_numpy(ciphertexts)
        figures = time_passes(torch, database, questions)
        total = figures["upload_s"] + figures["pass_s"] + figures["download_s"]
        figures |= {
            "questions": count,
            "questions_per_s": count / total,
            "pass_bytes_per_s": database.numel() / figures["pass_s"],
        }
        report["batches"].append(figures)
        print(json.dumps(figures), flush=True)
        if count == 4:
            sent = questions.cuda()
            answers = multiply_digits(torch, database, sent)
            report |= check_scores(torch, database, sent, answers, made, query)
            del sent, answers
    report["memory"] = int(torch.cuda.max_memory_allocated())
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "sealed-cuda.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
