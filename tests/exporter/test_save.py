# SPDX-License-Identifier: Apache-2.0
"""A full disk, a kill or a wrong path leaves the files that were there before, whole, and nothing beside them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir
import onnxruntime
import pytest

from flash_export import pipeline, save
from flash_export.errors import MissingHere, UsageError
from flash_export.load_onnx import verify
from flash_export.options import Options
from flash_export.talk import Talk


def write_unfused(path: Path, *, elements: int = 3000, seed: int = 0, outside: bool = False) -> Path:
    """y = (x + w) * s with a big weight ``w`` and a small one ``s``."""
    value = onnx.helper.make_tensor_value_info
    weight = np.random.default_rng(seed).standard_normal(elements).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["t"]), onnx.helper.make_node("Mul", ["t", "s"], ["y"])],
        "g",
        [value("x", onnx.TensorProto.FLOAT, [elements])],
        [value("y", onnx.TensorProto.FLOAT, [elements])],
        [onnx.numpy_helper.from_array(weight, "w"), onnx.numpy_helper.from_array(np.float32([2.0]), "s")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    onnx.save_model(model, path, save_as_external_data=outside, location=f"{path.name}.data", size_threshold=100)
    return path


def fuse(path: Path) -> ir.Model:
    """Stands in for the rewrite: the same weights, another small tensor."""
    model = ir.load(path)
    model.graph.initializers["s"].const_value = ir.tensor(np.float32([3.0]), name="s")
    return model


def publish(folder: Path, *, seed: int = 0, elements: int = 3000) -> save.Saved:
    """A first or next export into ``folder``/out."""
    unfused = write_unfused(folder / f"unfused{seed}.onnx", seed=seed, elements=elements)
    return save.save(fuse(unfused), unfused, folder / "out" / "m.flash.onnx", {"schema": 1, "seed": seed})


def run(path: Path) -> np.ndarray:
    """The model's output on zeros: s * w."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (value,) = session.get_inputs()
    return session.run(None, {"x": np.zeros(value.shape, np.float32)})[0]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go outside from 10 kB on, so that tests stay small."""
    monkeypatch.setattr(save, "INLINE_LIMIT_BYTES", 10_000)


def test_a_small_model_is_one_file_and_its_twin(tmp_path: Path) -> None:
    saved = publish(tmp_path)
    assert saved.data is None
    assert sorted(snapshot(tmp_path / "out")) == ["m.flash.onnx", "m.flash.unfused.onnx", "report.json"]
    assert json.loads(saved.report.read_text()) == {"schema": 1, "seed": 0}
    np.testing.assert_array_equal(run(saved.output), 1.5 * run(saved.unfused))


@pytest.mark.usefixtures("outside")
def test_fused_and_unfused_share_one_file_of_weights(tmp_path: Path) -> None:
    saved = publish(tmp_path)
    assert saved.data is not None
    assert sorted(snapshot(tmp_path / "out")) == sorted(
        [saved.data.name, "m.flash.onnx", "m.flash.unfused.onnx", "report.json"]
    )
    assert saved.data.stat().st_size == 12_000
    for path in (saved.output, saved.unfused):
        verify(path)
        assert path.stat().st_size < 2000
    np.testing.assert_array_equal(run(saved.output), 1.5 * run(saved.unfused))


@pytest.mark.usefixtures("outside")
def test_weights_start_on_a_page_and_small_tensors_stay_inside(tmp_path: Path) -> None:
    model = ir.load(publish(tmp_path).output)
    weight, small = (model.graph.initializers[name].const_value for name in ("w", "s"))
    assert isinstance(weight, ir.ExternalTensor)
    assert (weight.offset or 0) % 4096 == 0
    assert not isinstance(small, ir.ExternalTensor)


def test_a_source_with_weights_outside_keeps_them_outside(tmp_path: Path) -> None:
    unfused = write_unfused(tmp_path / "source.onnx", outside=True)
    saved = save.save(fuse(unfused), unfused, tmp_path / "out" / "m.onnx", {}, keep_unfused=False)
    assert saved.unfused == unfused
    assert saved.data is not None
    np.testing.assert_array_equal(run(saved.output), 1.5 * run(unfused))


def test_a_constant_node_with_weights_outside_takes_them_in(tmp_path: Path) -> None:
    unfused = write_unfused(tmp_path / "source.onnx", outside=True)
    proto = onnx.load_model(unfused, load_external_data=False)
    node = onnx.helper.make_node("Constant", [], ["w"])
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(proto.graph.initializer[0])
    del proto.graph.initializer[0]
    proto.graph.node.insert(0, node)
    unfused.write_bytes(proto.SerializeToString())
    saved = save.save(ir.load(unfused), unfused, tmp_path / "out" / "m.onnx", {}, keep_unfused=False)
    verify(saved.output)


@pytest.mark.usefixtures("outside")
def test_the_model_in_memory_is_as_before(tmp_path: Path) -> None:
    unfused = write_unfused(tmp_path / "source.onnx")
    model = fuse(unfused)
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    save.save(model, unfused, tmp_path / "m.onnx", {})
    assert all(model.graph.initializers[name].const_value is tensor for name, tensor in before.items())


@pytest.mark.usefixtures("outside")
def test_new_weights_replace_old_ones_and_leave_nothing(tmp_path: Path) -> None:
    first, second = publish(tmp_path, seed=0), publish(tmp_path, seed=1)
    assert first.data is not None
    assert second.data is not None
    assert first.data != second.data
    assert not first.data.exists()
    assert len(snapshot(tmp_path / "out")) == 4


@pytest.mark.usefixtures("outside")
def test_equal_weights_keep_their_file(tmp_path: Path) -> None:
    assert publish(tmp_path).data == publish(tmp_path).data


def test_a_report_goes_where_it_is_wanted(tmp_path: Path) -> None:
    unfused = write_unfused(tmp_path / "u.onnx")
    saved = save.save(fuse(unfused), unfused, tmp_path / "m.onnx", {}, report_folder=tmp_path / "a" / "b")
    assert saved.report == tmp_path / "a" / "b" / "report.json"
    assert saved.report.exists()


def test_staged_files_can_be_run_before_they_are_published(tmp_path: Path) -> None:
    unfused = write_unfused(tmp_path / "u.onnx")
    with save.staged(fuse(unfused), unfused, tmp_path / "out" / "m.onnx") as files:
        np.testing.assert_array_equal(run(files.fused), 1.5 * run(files.unfused))
    assert snapshot(tmp_path / "out") == {}


@pytest.mark.usefixtures("outside")
def test_a_failure_between_staging_and_publishing_leaves_the_old_files(tmp_path: Path) -> None:
    publish(tmp_path)
    before = snapshot(tmp_path / "out")
    unfused = write_unfused(tmp_path / "u.onnx", seed=5)
    with (
        pytest.raises(RuntimeError, match="the check failed"),
        save.staged(fuse(unfused), unfused, tmp_path / "out" / "m.flash.onnx"),
    ):
        raise RuntimeError("the check failed")
    assert snapshot(tmp_path / "out") == before


def fail_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """From now on the ``call``-th fsync or rename fails for want of space."""
    calls = 0

    def failing(original: Callable) -> Callable:
        def wrapper(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*arguments)

        return wrapper

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(Path, "replace", failing(Path.replace))


CALLS = (1, 2, 3, 4, 5, 7, 9, 10, 11, 12)
"""fsync of data, fused, unfused, report and record; rename of the record; rename of each."""
SYNCS = (6, 8, 13)
"""fsync of a folder: before and after the record's rename, and at the end."""


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("call", CALLS)
def test_no_space_at_any_call_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    publish(tmp_path)
    before = snapshot(tmp_path / "out")
    fail_at(monkeypatch, call)
    with pytest.raises(MissingHere) as error:
        publish(tmp_path, seed=1)
    assert error.value.exit_code == 5
    assert "No space left" in error.value.got
    assert snapshot(tmp_path / "out") == before


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("call", CALLS)
def test_no_space_at_any_call_of_a_first_save_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    fail_at(monkeypatch, call)
    with pytest.raises(MissingHere):
        publish(tmp_path)
    assert snapshot(tmp_path / "out") == {}


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("call", SYNCS)
def test_a_folder_that_cannot_be_synced_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    publish(tmp_path)
    fail_at(monkeypatch, call)
    assert json.loads(publish(tmp_path, seed=1).report.read_text())["seed"] == 1


@pytest.mark.parametrize("call", CALLS)
def test_a_page_is_published_with_the_numbers_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Here fsync of fused, unfused, page, report and record, and the rest as with weights outside."""
    unfused = write_unfused(tmp_path / "u.onnx")

    def publish_with_page(page: str) -> None:
        with save.staged(fuse(unfused), unfused, tmp_path / "out" / "m.onnx") as files:
            files.publish({"page": page}, page=page)

    publish_with_page("<p>old</p>")
    before = snapshot(tmp_path / "out")
    assert before["report.html"] == b"<p>old</p>"
    fail_at(monkeypatch, call)
    with pytest.raises(MissingHere):
        publish_with_page("<p>new</p>")
    assert snapshot(tmp_path / "out") == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB, where mounting is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_old_files(tmp_path: Path, small_disk: Path) -> None:
    output = small_disk / "m.onnx"
    small = write_unfused(tmp_path / "small.onnx", elements=10_000)
    save.save(fuse(small), small, output, {})
    before = snapshot(small_disk)
    big = write_unfused(tmp_path / "big.onnx", elements=50_000)
    with pytest.raises(MissingHere) as error:
        save.save(fuse(big), big, output, {})
    assert "No space left on device" in error.value.got
    assert snapshot(small_disk) == before


def test_a_file_size_limit_leaves_the_old_files(tmp_path: Path) -> None:
    """Without a mount: a child under RLIMIT_FSIZE."""
    publish(tmp_path)
    before = snapshot(tmp_path / "out")
    unfused = write_unfused(tmp_path / "u.onnx", seed=1, elements=50_000)
    program = f"""
import resource, signal
from pathlib import Path
import onnx_ir as ir
from flash_export import save
from flash_export.errors import MissingHere
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
unfused = Path({str(unfused)!r})
try:
    save.save(ir.load(unfused), unfused, Path({str(tmp_path / "out" / "m.flash.onnx")!r}), {{}})
except MissingHere as error:
    print(error.exit_code)
"""
    assert child(program).stdout.strip() == "5"
    assert snapshot(tmp_path / "out") == before


def child(program: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_an_output_whose_parent_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UsageError, match="cannot be created"):
        save.check_output(tmp_path / "file" / "m.onnx")
    assert (tmp_path / "file").read_text() == "a file"


def test_an_output_that_is_a_folder_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").mkdir()
    with pytest.raises(UsageError) as error:
        save.check_output(tmp_path / "m.onnx")
    assert "Is a directory" in error.value.got


@pytest.mark.parametrize("name", ["m.pt", "m.engine", "model", "m.onnx.gz"])
def test_an_output_named_as_another_format_is_a_usage_error_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    source = write_unfused(tmp_path / "u.onnx")
    with pytest.raises(UsageError, match="name of an ONNX file") as error:
        pipeline.run(Options(source=source, output=tmp_path / "out" / name), Talk(silent=True))
    assert ".onnx" in error.value.do
    assert [path.name for path in tmp_path.rglob("*")] == ["u.onnx"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError):
        save.check_output(tmp_path / "m.onnx")


def test_missing_folders_are_made(tmp_path: Path) -> None:
    save.check_output(tmp_path / "a" / "b" / "m.onnx")
    assert (tmp_path / "a" / "b").is_dir()


def test_an_output_that_is_no_plain_file_is_a_usage_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    (tmp_path / "link.onnx").symlink_to("m.onnx")
    for name in ("m.onnx", "link.onnx"):
        with pytest.raises(UsageError, match="no plain file"):
            save.check_output(tmp_path / name)
    assert (tmp_path / "m.onnx").is_fifo()


def test_weights_of_the_source_that_an_old_output_shares_stay(tmp_path: Path, outside: None) -> None:
    saved = publish(tmp_path)
    source = saved.unfused.rename(tmp_path / "out" / "source.onnx")
    save.save(fuse(source), source, saved.output, {}, keep_unfused=False)
    save.save(fuse(write_unfused(tmp_path / "u.onnx", seed=1)), source, saved.output, {}, keep_unfused=False)
    verify(source)
