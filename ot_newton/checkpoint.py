"""A stopped run on disk: written whole or not at all, checked when it is read, continued bit for bit on the CPU.

A file is a magic word, the SHA-256 digest (FIPS 180-4) of the rest, and the rest as `torch.save` writes it: tensors,
numbers, words, lists and dictionaries, nothing that could run code when it is loaded. Frozen dataclasses are stored
field by field under the name of their class, which must be loaded already when the file is read.
"""

import hashlib
import io
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

MAGIC = b"ot-newton checkpoint 1\n"
DIGEST_SIZE = hashlib.sha256().digest_size


@runtime_checkable
class Resumable(Protocol):
    """A problem whose answers depend, within their accuracy, on what it has kept from earlier points.

    With these two methods a run that is continued from a checkpoint meets the same answers as one that was never
    interrupted. A problem that keeps nothing needs neither. Counters such as `n_passes` do not belong to the state.

    Example: a problem that starts each solve from its last potentials.

        >>> class Warm:
        ...     potentials = torch.zeros(3)
        ...     def state(self): return {"potentials": self.potentials}
        ...     def restore(self, state): self.potentials = state["potentials"]
        >>> isinstance(Warm(), Resumable)
        True
    """

    def state(self) -> Mapping[str, Any]:
        """What was kept: tensors, numbers, words, None, and tuples, lists, dictionaries and frozen dataclasses of them.

        Tensors are copied before the next evaluation.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep this, the result of `state` in another process, instead."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """The file of one run.

    Args:
        path: where it is.
        owner: what the file must agree with to be continued: words and numbers by name.
        device: where its tensors belong.
    """

    path: Path
    owner: Mapping[str, Any]
    device: torch.device

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the file by `content`, whole or not at all.

        Raises:
            OSError: the folder is missing or read-only, the disk is full, …; what was there before is kept.
            TypeError: `content` holds something that cannot be stored.
        """
        buffer = io.BytesIO()
        torch.save(encode({"owner": dict(self.owner), "content": dict(content)}), buffer)
        data = buffer.getvalue()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            try:
                with open(temporary, "wb") as file:
                    file.write(MAGIC + hashlib.sha256(data).digest() + data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"cannot write the checkpoint ({reason})", str(self.path)) from error

    def read(self) -> dict[str, Any] | None:
        """The content of the file; None if there is no file.

        Raises:
            ValueError: the file is no checkpoint, is damaged, or belongs to another run.
            OSError: it cannot be read.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if not data.startswith(MAGIC):
            raise ValueError(f"expected a checkpoint, got a file of another kind: {self.path}")
        digest, payload = data[len(MAGIC) :][:DIGEST_SIZE], data[len(MAGIC) + DIGEST_SIZE :]
        if hashlib.sha256(payload).digest() != digest:
            raise ValueError(f"expected a whole checkpoint, got a damaged one: {self.path}; delete it to start afresh")
        try:
            stored = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(f"expected plain data in the checkpoint, got something else: {self.path}") from error
        found = decode(stored["items"]["owner"], self.device)
        if changed := [name for name in self.owner if found.get(name) != self.owner[name]]:
            changes = ", ".join(f"{name}: {found.get(name)} there, {self.owner[name]} here" for name in changed)
            raise ValueError(f"expected a checkpoint of this run, got that of another ({changes}): {self.path}")
        return decode(stored["items"]["content"], self.device)


def encode(value: Any) -> Any:
    """Plain data that `decode` turns back into an equal value; tensors are copied to the CPU.

    Raises:
        TypeError: neither a tensor, a number, a word, None, nor a list, tuple, dictionary with words for keys, enum or
            frozen dataclass of them.
    """
    if isinstance(value, Enum):
        return {"kind": "enum", "class": _name(type(value)), "value": encode(value.value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        here = value.device.type == "cpu"
        return {"kind": "tensor", "tensor": value.detach().to("cpu", copy=True), "on_cpu": here}
    if type(value) in (list, tuple):
        return type(value)(encode(item) for item in value)
    if type(value) is dict and all(type(key) is str for key in value):
        return {"kind": "dict", "items": {key: encode(item) for key, item in value.items()}}
    if _is_frozen_dataclass(type(value)):
        content = {name: encode(getattr(value, name)) for name in _field_names(type(value))}
        return {"kind": "dataclass", "class": _name(type(value)), "fields": content}
    raise TypeError(
        f"expected tensors, numbers, words or frozen dataclasses of them to store, got {_name(type(value))}"
    )


def decode(stored: Any, device: torch.device) -> Any:
    """The value that was encoded, its tensors on `device` unless they were on the CPU.

    Raises:
        ValueError: a class is not loaded, or has other fields now.
    """
    if type(stored) in (list, tuple):
        return type(stored)(decode(item, device) for item in stored)
    if not isinstance(stored, dict):
        return stored
    match stored["kind"]:
        case "tensor":
            return stored["tensor"] if stored["on_cpu"] else stored["tensor"].to(device)
        case "dict":
            return {key: decode(item, device) for key, item in stored["items"].items()}
        case "enum":
            return _find(stored["class"])(decode(stored["value"], device))
    cls, content = _find(stored["class"]), stored["fields"]
    if list(content) != _field_names(cls):
        raise ValueError(f"expected {stored['class']} with fields {', '.join(content)}, got another version of it")
    value = object.__new__(cls)  # as it was, whatever __init__ would make of it
    for name, item in content.items():
        object.__setattr__(value, name, decode(item, device))
    return value


def _is_frozen_dataclass(cls: type) -> bool:
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _field_names(cls: Any) -> list[str]:
    return [f.name for f in fields(cls)]


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(name: str) -> Any:
    """The enum or frozen dataclass of this name in a module that is loaded; nothing is imported for it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and (issubclass(found, Enum) or _is_frozen_dataclass(found))):
        raise ValueError(f"expected the class {name} of the checkpoint to be loaded, got none; import its module first")
    return found
