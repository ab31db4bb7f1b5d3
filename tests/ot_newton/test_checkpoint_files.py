"""What a checkpoint holds, and which files are refused."""

import errno
import hashlib
import io
import os
import pickle
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ot_newton.adam import Adam
from ot_newton.checkpoint import DIGEST_SIZE, MAGIC, decode, encode
from ot_newton.minimize import minimize
from ot_newton.newton_cg import NewtonCG
from ot_newton.problems import toys

CPU = torch.device("cpu")


def write(path, **changes):
    arguments = {"method": NewtonCG(), "options": {"maxiter": 3}} | changes
    return minimize(toys.Rosenbrock([-1.2, 1.0]), checkpoint=path, **arguments)


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    path = tmp_path / "run.ckpt"
    write(path)
    before = path.read_bytes()
    for changes, words in (
        ({"method": NewtonCG(eta_max=0.4)}, "method: NewtonCG.*eta_max=0.5.*there.*eta_max=0.4.*here"),
        ({"method": Adam()}, "method: NewtonCG.*there, Adam"),
        ({"options": {"seed": 3}}, "seed: 0 there, 3 here"),
        ({"options": {"gtol": 1e-3}}, "gtol: None there, 0.001 here"),
        ({"x0": [-1.2, 1.1]}, "another x0"),
        ({"x0": [[-1.2, 1.0]]}, r"shape: \(2,\) there, \(1, 2\) here"),
    ):
        with pytest.raises(ValueError, match=f"expected (a|the) checkpoint of .*{words}.*run.ckpt"):
            write(path, **changes)
    for problem, words in (
        (toys.Rosenbrock([-1.2, 1.0, 1.0]), r"shape: \(2,\) there, \(3,\) here"),
        (toys.Rosenbrock([-1.2, 1.0], dtype=torch.float32), r"dtype: torch.float64 there, torch.float32 here"),
        (toys.StrictSaddle([-1.2, 1.0]), "problem: Rosenbrock there, StrictSaddle here"),
        (toys.Rosenbrock([-1.2, 1.0], scale=1.01), "this function, f = .* at its point, got"),
    ):
        with pytest.raises(ValueError, match=f"{words}.*run.ckpt"):
            minimize(problem, method=NewtonCG(), checkpoint=path)
    assert path.read_bytes() == before


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "run.ckpt"
    write(path)
    good = path.read_bytes()
    spots = [*range(len(MAGIC), len(MAGIC) + DIGEST_SIZE, 7), *range(len(MAGIC) + DIGEST_SIZE, len(good), 211)]
    damaged = [bytes([*good[:i], good[i] ^ 1, *good[i + 1 :]]) for i in spots]
    for data in (*damaged, good[:-1], good[: len(good) // 2], good[: len(MAGIC)], good + b"\0"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"expected a whole checkpoint, got a damaged one: .*run\.ckpt"):
            write(path)
        assert path.read_bytes() == data
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer)
    for data in (b"", b"text", buffer.getvalue()):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"expected a checkpoint, got a file of another kind: .*run\.ckpt"):
            write(path)
    for data in (pickle.dumps(os.system, protocol=2), b"neither"):
        path.write_bytes(MAGIC + hashlib.sha256(data).digest() + data)
        with pytest.raises(ValueError, match="expected plain data in the checkpoint"):
            write(path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_what_is_there(call, tmp_path, monkeypatch):
    path = tmp_path / "run.ckpt"
    write(path)
    before = path.read_bytes()

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(
        OSError, match=r"cannot write the checkpoint \(No space left on device\): .*run\.ckpt"
    ) as caught:
        write(path, options={"maxiter": 20})
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.ckpt"]


def test_bad_paths(tmp_path):
    with pytest.raises(TypeError, match="expected checkpoint as a path, got int"):
        write(3)
    with pytest.raises(ValueError, match=r"expected checkpoint in a folder that exists, got .*nowhere"):
        write(tmp_path / "nowhere" / "run.ckpt")
    with pytest.raises(OSError, match="Is a directory"):
        write(tmp_path)
    for every in (0, -1, 2.5):
        with pytest.raises(ValueError, match="expected checkpoint_every as an integer ≥ 1"):
            write(tmp_path / "run.ckpt", options={"checkpoint_every": every})
    assert not list(tmp_path.iterdir())


def test_a_state_that_cannot_be_stored_is_named(tmp_path):
    class Odd(toys.Rosenbrock):
        def state(self):
            return {"solver": object()}

        def restore(self, state):
            raise AssertionError

    with pytest.raises(
        TypeError, match=r"expected tensors, numbers, words or frozen dataclasses .* got builtins:object"
    ):
        minimize(Odd(), checkpoint=tmp_path / "run.ckpt")


class Word(StrEnum):
    ONE = "one"


@dataclass(frozen=True)
class Inner:
    tensor: Any
    word: Word = Word.ONE


@dataclass(frozen=True)
class Outer:
    inner: Inner
    numbers: tuple[float, ...]

    def __post_init__(self):
        if self.numbers == (13.0,):
            raise ValueError("restored as it is, not built anew")


@dataclass
class Thawed:
    x: int = 0


def test_dataclasses_enums_and_tensors_come_back():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.arange(6).reshape(2, 3).to(dtype).T
        back = decode(encode(Outer(Inner(tensor), (1.0, float("nan")))), CPU)
        assert type(back) is Outer
        assert back.inner.word is Word.ONE
        assert back.inner.tensor.dtype == dtype
        assert torch.equal(back.inner.tensor, tensor)
        assert back.inner.tensor.stride() == tensor.stride()
        assert back.inner.tensor.data_ptr() != tensor.data_ptr()
    odd = object.__new__(Outer)
    object.__setattr__(odd, "inner", Inner(None))
    object.__setattr__(odd, "numbers", (13.0,))
    assert decode(encode(odd), CPU) == odd


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(Word.ONE),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_plain_data_comes_back(value):
    buffer = io.BytesIO()
    torch.save(encode(value), buffer)
    buffer.seek(0)
    back = decode(torch.load(buffer, weights_only=True), CPU)
    assert back == value
    assert type(back) is type(value)


def test_only_plain_data_is_stored_and_only_loaded_classes_are_found():
    for value in ({1: 2}, {1, 2}, b"bytes", lambda: 0, Thawed(), Outer(Inner(torch.Generator()), ())):
        with pytest.raises(TypeError, match="to store, got"):
            encode(value)
    stored = encode(Inner(None))
    for name in ("nowhere:Class", "os:system", "builtins:dict", f"{__name__}:Thawed", f"{__name__}:Missing"):
        with pytest.raises(ValueError, match=f"expected the class {name} of the checkpoint to be loaded"):
            decode(stored | {"class": name}, CPU)
    with pytest.raises(ValueError, match="another version"):
        decode(stored | {"fields": {"tensor": None}}, CPU)
