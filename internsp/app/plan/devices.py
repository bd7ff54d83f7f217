"""Devices that a plan knows: rates, memory, links, and three fitted constants (devices.toml)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from internsp.app.config import Config
from internsp.errors import ConfigError

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
NUMBERS: Mapping[str, tuple[str, float]] = {
    "memory_gib": ("memory", 2**30),
    "bandwidth_GBps": ("bandwidth", GIGA),
    "multiprocessors": ("multiprocessors", 1),
    "near_GBps": ("near", GIGA),
    "near_ranks": ("near_ranks", 1),
    "far_Gbps": ("far", GIGA / 8),
    "host_GBps": ("host", GIGA),
    "start_us": ("start", MICRO),
    "hop_us": ("hop", MICRO),
}
"""By key of devices.toml, the attribute of a device, which is above 0, and the key's unit."""
_OPTIONAL = ("host_GBps", "start_us", "hop_us")
BUILT_IN = Path(__file__).with_name("devices.toml")
PEAK_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
"""What devices.toml calls a dtype, by its name in a configuration."""
GENERAL = "flash2"  # the kernel that each device has
FITTED_FILE = "device.toml"  # what ``--calibrate`` writes, beside the folders of runs


@dataclass(frozen=True)
class Fitted:
    """The constants of a device that are fitted to measured steps.

    Attributes:
        products: share of the peak that a large product reaches.
        links: share of a link's rate that a large collective reaches.
        slowdown: how much longer products take while a message runs beside them; 0: not at all.
        rows: names of the measured steps that they were fitted on; empty: assumed.
    """

    products: float
    links: float
    slowdown: float
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Device:
    """A device, in bytes and seconds.

    Attributes:
        peak: dense operations a second by dtype of the operands (``"bf16"``).
        memory: bytes.
        bandwidth: bytes a second of its memory.
        multiprocessors: products are cut into tiles, as many at a time.
        near, far: bytes a second and direction of one device within its near domain, and of its
            share of adapters.
        host: the same between it and its host.
        near_ranks: devices of a near domain.
        start, hop: seconds of a collective, and of each step of a ring within a near domain,
            besides its bytes.
        attention: operations a second of a kernel: (head of 64 forward, backward, 128 forward,
            backward).
        source: where the figures are from.
        kind: what torch calls such a device, ``"cpu"`` or ``"cuda"``.
        torch_name: what ``torch.cuda.get_device_name`` returns.
    """

    name: str
    peak: Mapping[str, float]
    memory: float
    bandwidth: float
    multiprocessors: int
    near: float
    near_ranks: int
    far: float
    attention: Mapping[str, tuple[float, ...]]
    fitted: Fitted
    source: str = ""
    kind: Literal["cpu", "cuda"] = "cuda"
    torch_name: str = ""
    # Where a device does not say them; devices.toml has the source of the latter two.
    host: float = 32 * GIGA
    start: float = 8.4 * MICRO
    hop: float = 3.4 * MICRO

    def attention_rates(self, kernel: str, head: int) -> tuple[float, float]:
        """Operations a second, forward and backward, of a kernel whose heads have ``head``."""
        rates = self.attention.get(kernel) or self.attention[GENERAL]
        part = min(max((head - 64) / 64, 0.0), 1.0)
        few = min(head / 64, 1.0)  # smaller heads fill less of each product
        if self.kind == "cpu":  # of the same products, whose rate is an assumption until fitted
            few *= self.fitted.products
        forward, backward = (
            rates[i] + part * (rates[i + 2] - rates[i]) for i in range(2)
        )
        return forward * few, backward * few


def devices(own: Path | None = None) -> dict[str, Device]:
    """All known devices by name, those of the file ``own`` added.

    Raises:
        ConfigError: the file cannot be read, or lacks a value.
    """
    found = dict(_built_in())
    if own is not None:
        try:
            found |= _read(own, found)
        except OSError as error:
            raise ConfigError(f"--device-file {own}: {error.strerror}") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--device-file {own}: {error}; write each device as in {BUILT_IN.name}"
            ) from error
    return found


def device_named(name: str, own: Path | None = None) -> Device:
    """The device ``name``.

    Raises:
        ConfigError: there is none of this name.
    """
    known = devices(own)
    if name not in known:
        raise ConfigError(f"--device {name}: unknown; there are {', '.join(sorted(known))}")
    return known[name]


def on_device(config: Config, device: Device) -> Config:
    """``config`` as it is planned for ``device``, whatever this machine computes on.

    Raises:
        ConfigError: it has no peak of the products' dtype.
    """
    dtype = PEAK_NAMES[config.weight_parallel.compute_dtype or config.train.dtype]
    if dtype not in device.peak:
        raise ConfigError(
            f"--device {device.name}: it has no peak of {dtype}; set train.dtype or "
            "weight_parallel.compute_dtype, or add it in a file for --device-file"
        )
    return config.replaced({"parallel.device": device.kind})


@cache
def _built_in() -> dict[str, Device]:
    return _read(BUILT_IN, {})


def _read(path: Path, known: Mapping[str, Device]) -> dict[str, Device]:
    found: dict[str, Device] = {}
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, entry in tables.items():
        try:
            device = _device(name, entry, {**known, **found})
        except KeyError as error:
            raise ValueError(f"[{name}] has no {error}") from error
        found |= dict.fromkeys([name, *entry.get("also", [])], device)
    return found


def _device(name: str, entry: Mapping[str, Any], known: Mapping[str, Device]) -> Device:
    values, numbers = entry["fitted"], dict[str, Any]()
    for key, (attribute, unit) in NUMBERS.items():
        if key in entry or key not in _OPTIONAL:
            if not entry[key] > 0:
                raise ValueError(f"{name}: {key} = {entry[key]!r} is not above 0")
            numbers[attribute] = entry[key] * unit
    if "like" in values and values["like"] not in known:
        raise ValueError(f"{name}: fitted.like = {values['like']!r} is no device")
    fitted = (
        known[values["like"]].fitted
        if "like" in values
        else Fitted(
            values["products"], values["links"], values["slowdown"], tuple(values.get("rows", ()))
        )
    )
    return Device(
        name=name,
        peak={dtype: rate * TERA for dtype, rate in entry["peak"].items()},
        attention={k: tuple(r * TERA for r in rates) for k, rates in entry["attention"].items()},
        fitted=fitted,
        source=entry["source"],
        kind=entry.get("kind", "cpu" if name == "cpu" else "cuda"),
        torch_name=entry.get("torch", ""),
        **numbers,
    )
